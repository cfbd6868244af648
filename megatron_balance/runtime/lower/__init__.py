"""From one rank's program to its steps: everything looked up once per microbatch.

In reading order: `steps` are the result, `lowering` makes them with `messages`, `launches` and
`routes`. `regions` finds rows of buffers, `entries` joins pairs into kernel entries, `parcels` says
what a message looks like on the way. `last_use` and `peak_bytes` are analyses of steps.
"""
