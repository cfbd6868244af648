"""Balanced training over torch.distributed, without Megatron: the steps that every adapter takes.

In the order of a training step:

1. `pool`: the ranks over which a plan may move tokens. Made once.
2. `sequences`, `lengths`: what a rank read, and the lengths of all that its pool read.
3. `nano_batches`: which sequences of a microbatch run together.
4. `plans`: plans for the step, made ahead or on the spot, and agreed (`agree`).
5. `tokens`: tokens to the ranks that compute them, and results back to the ranks that read them.
6. `microbatch`, `binding`: the rows of this rank with positions and padding, and its bound plans.
7. `figures`, `log`: the record of the step.

Beside them `link` and `weights`: weights to the ranks of another strategy, and gradients back.

Nothing here knows an arguments object or keeps a session: values are passed. `megatron` is an
adapter on this room.
"""
