"""From one rank's program to its steps: everything looked up once per microbatch, so that running needs no lookup."""
