"""Which step reads a received input for the last time."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_balance.core.program import Kind
from megatron_balance.runtime.lowered import Finish, GradLaunch, Launch, Start, Step, Swap

INPUTS = (Kind.Q, Kind.KV)
Value = tuple[Kind, int]
"""(kind, buffer) of inputs."""


def frees(steps: Sequence[Step]) -> tuple[tuple[Value, ...], ...]:
    """For each step, the received input buffers that no later step reads."""
    last: dict[Value, int] = {}
    for index, step in enumerate(steps):
        match step:
            case Start(swap):
                touched = _taken(swap)
            case Finish(swap):
                touched = {(m.kind, m.buffer) for m in swap.receives if m.buffer > 0}
            case Launch() | GradLaunch():
                touched = step.reads
        for value in touched:
            if value[1] > 0:
                last[value] = index
    found: list[list[Value]] = [[] for _ in steps]
    for value, index in sorted(last.items()):
        found[index].append(value)
    return tuple(tuple(f) for f in found)


def _taken(swap: Swap) -> set[Value]:
    return {(m.kind, run.buffer) for m in swap.sends if m.kind in INPUTS for run in m.packed.runs}
