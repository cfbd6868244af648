"""Plans on tensors: torch and torch.distributed, no Megatron and no planner.

One attention call, in reading order: `bind` looks a plan up for one rank, `attention` is the
differentiable call, `executor` and `phase_run` take the steps. On the shelves:

- `lower`: from a rank's program to its steps;
- `kernels`: attention on a rank's own tensors;
- `movers`: rows in and out of messages, and partials merged;
- `transport`: exchanges between ranks.

`groups` holds what the calls of a rank share: process groups, threads, the queue of what is still to
be issued, buffers (`pool`) and CUDA streams (`cuda`).
"""
