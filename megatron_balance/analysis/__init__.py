"""Statistics, traffic and wire format of a plan or a program, without running it."""
