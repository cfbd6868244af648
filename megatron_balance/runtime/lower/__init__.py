"""From one rank's program to its steps: everything looked up once per microbatch.

In reading order: `steps` are the words and the result; `regions` finds rows of buffers; `messages` and
`launches` look up exchanges and attention; `lowering` puts them in order; `memory` says where tensors
lie, and how much that is; `moves` lists the rows that are moved.
"""
