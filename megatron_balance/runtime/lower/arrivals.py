"""Messages of an exchange that are taken together when they arrive.

A head exchange brings heads from every peer, and a launch for each would cost the host more than the
rows cost the device. Messages that touch no row and head in common may be placed, or added, in one
call of the mover, gradients of queries with those of keys; those that do are taken one after the
other, in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import TypeAlias

from megatron_balance.ir.program import Kind
from megatron_balance.runtime.lower.last_use import GRADS
from megatron_balance.runtime.lower.regions import RowRun
from megatron_balance.runtime.lower.steps import ExchangeStep, PeerMessage

_Box: TypeAlias = tuple[tuple[Kind, int], int, int, int, int]
"""Kind and buffer, heads [start, stop), and rows [start, stop) that hold all that a run names."""


def arrivals(receives: Sequence[PeerMessage]) -> tuple[tuple[int, ...], ...]:
    """Numbers of messages in the order in which they are taken, those of one call together."""
    calls: dict[Kind, list[list[int]]] = {}
    boxes: dict[Kind, list[list[_Box]]] = {}
    for number, message in enumerate(receives):
        kind = Kind.Q_GRAD if message.kind in GRADS else message.kind
        numbers, taken = calls.setdefault(kind, []), boxes.setdefault(kind, [])
        own = [_box(message.kind, run) for run in message.packed.runs]
        at = next((i + 1 for i in range(len(taken) - 1, -1, -1) if _meet(own, taken[i])), 0)
        if at == len(taken):
            numbers.append([])
            taken.append([])
        numbers[at].append(number)
        taken[at] += own
    return tuple(tuple(call) for numbers in calls.values() for call in numbers)


def taken_together(exchange: ExchangeStep, num_brought: int, *, wide: bool = False) -> list[tuple[int, ...]]:
    """`arrivals` of the first messages of an exchange: one that sums on the way brings no others.

    `wide`: gradients travel in the type that they are summed in. Then all are added in one call, which
    takes those of a row in order. In a narrower type the first of a buffer may have to be added to
    before it is converted.
    """
    of_call = [tuple(number for number in numbers if number < num_brought) for numbers in exchange.arrivals]
    calls = [numbers for numbers in of_call if numbers]
    if not wide:
        return calls
    grads = [numbers for numbers in calls if exchange.receives[numbers[0]].kind in GRADS]
    others = [numbers for numbers in calls if numbers not in grads]
    return [*others, *([tuple(chain.from_iterable(grads))] if grads else [])]


def _box(kind: Kind, run: RowRun) -> _Box:
    rows = (run.start, run.stop) if run.index is None else (int(run.index.min()), int(run.index.max()) + 1)
    return (kind, run.buffer), run.buffer_head, run.buffer_head + run.num_heads, *rows


def _meet(own: Sequence[_Box], taken: Sequence[_Box]) -> bool:
    return any(a[0] == b[0] and a[1] < b[2] and b[1] < a[2] and a[3] < b[4] and b[3] < a[4] for a in own for b in taken)
