"""Balanced training over torch.distributed, without Megatron: the steps that every adapter takes.

In their order: `pool` (the ranks over which a plan may move tokens), `plans` (made ahead or on the
spot, and agreed), `tokens` (what ranks read, to the ranks that compute it, and back), `binding`,
`log`. Beside them `weights`: to the ranks of another strategy, and gradients back.

Nothing here knows an arguments object or keeps a session: values are passed.
"""
