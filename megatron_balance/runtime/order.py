"""The order of a rank's steps: an exchange starts as early as what it sends allows, and ends where its values are first needed.

Exchanges keep their order among each other, so all ranks issue the same ones in the same order. In a ring the next round's keys are
under way while the current ones are attended, and a later zone's first transfer starts while an earlier zone computes.
"""

from __future__ import annotations

from megatron_balance.core.program import Kind
from megatron_balance.runtime.lowered import Finish, GradLaunch, Launch, Start, Step, Swap

INPUTS = (Kind.Q, Kind.KV)
Value = tuple[Kind, int]
"""What a step reads or brings: (kind, buffer) of inputs, (kind, -1) of everything else."""


class Steps:
    """Steps in execution order, built op by op in program order."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self._under_way: list[tuple[Swap, frozenset[Value]]] = []  # started, not finished: with what they bring

    def launch(self, launch: Launch | GradLaunch) -> None:
        """Add a launch, behind the arrival of what it reads."""
        self._finish(launch.reads)
        self.steps.append(launch)

    def swap(self, swap: Swap) -> None:
        """Add an exchange: before the launches at the end of the list if it only moves inputs that are here already."""
        takes = _takes(swap)
        at = len(self.steps)
        if not self._finish(takes) and all(m.kind in INPUTS for m in (*swap.sends, *swap.receives)):
            while at and isinstance(self.steps[at - 1], Launch | GradLaunch):
                at -= 1
        else:
            at = len(self.steps)
        self.steps.insert(at, Start(swap))
        self._under_way.append((swap, _gives(swap)))

    def end(self) -> list[Step]:
        """All steps; every exchange has ended."""
        self.steps += [Finish(swap) for swap, _ in self._under_way]
        self._under_way = []
        return self.steps

    def _finish(self, wanted: frozenset[Value]) -> bool:
        done = [(swap, gives) for swap, gives in self._under_way if gives & wanted]
        if done:
            self.steps += [Finish(swap) for swap, _ in done]
            self._under_way = [entry for entry in self._under_way if entry not in done]
        return bool(done)


def _gives(swap: Swap) -> frozenset[Value]:
    return frozenset((m.kind, m.buffer) for m in swap.receives)


def _takes(swap: Swap) -> frozenset[Value]:
    return frozenset(
        value for m in swap.sends for value in ([(m.kind, run.buffer) for run in m.packed.runs] if m.kind in INPUTS else [(m.kind, -1)])
    )


def frees(steps: list[Step]) -> tuple[tuple[Value, ...], ...]:
    """After which step each received input buffer is read for the last time."""
    last: dict[Value, int] = {}
    for index, step in enumerate(steps):
        match step:
            case Start(swap):
                touched = _takes(swap)
            case Finish(swap):
                touched = _gives(swap)
            case Launch() | GradLaunch():
                touched = step.reads
        for value in touched:
            if value[0] in INPUTS and value[1] > 0:
                last[value] = index
    found: list[list[Value]] = [[] for _ in steps]
    for value, index in sorted(last.items()):
        found[index].append(value)
    return tuple(tuple(f) for f in found)
