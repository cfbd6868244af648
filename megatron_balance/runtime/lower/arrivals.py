"""Messages of an exchange that are taken together when they arrive.

A head exchange brings heads from every peer, and a launch for each would cost the host more than the
rows cost the device. Messages that touch no row and head in common may be placed, or added, in one
call of the mover; those that do are taken one after the other, in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from megatron_balance.ir.program import Kind
from megatron_balance.runtime.lower.regions import Run
from megatron_balance.runtime.lower.steps import Message

_Box: TypeAlias = tuple[int, int, int, int, int]
"""Buffer, heads [start, stop), and rows [start, stop) that hold all that a run names."""


def arrivals(receives: Sequence[Message]) -> tuple[tuple[int, ...], ...]:
    """Numbers of messages in the order in which they are taken, those of one call together."""
    calls: dict[Kind, list[list[int]]] = {}
    boxes: dict[Kind, list[list[_Box]]] = {}
    for number, message in enumerate(receives):
        numbers, taken = calls.setdefault(message.kind, []), boxes.setdefault(message.kind, [])
        own = [_box(run) for run in message.packed.runs]
        at = next((i + 1 for i in range(len(taken) - 1, -1, -1) if _meet(own, taken[i])), 0)
        if at == len(taken):
            numbers.append([])
            taken.append([])
        numbers[at].append(number)
        taken[at] += own
    return tuple(tuple(call) for numbers in calls.values() for call in numbers)


def _box(run: Run) -> _Box:
    rows = (run.start, run.stop) if run.index is None else (int(run.index.min()), int(run.index.max()) + 1)
    return run.buffer, run.buffer_head, run.buffer_head + run.num_heads, *rows


def _meet(own: Sequence[_Box], taken: Sequence[_Box]) -> bool:
    return any(a[0] == b[0] and a[1] < b[2] and b[1] < a[2] and a[3] < b[4] and b[3] < a[4] for a in own for b in taken)
