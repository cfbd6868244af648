"""What a plan or a program costs in tokens and bytes, without running it."""
