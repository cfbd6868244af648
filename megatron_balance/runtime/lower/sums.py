"""Where gradients are summed: the first of a buffer is kept as it comes, later ones are added.

A ring's launch gives the gradients of all keys of the buffer that it read, in order. Nothing has to
be zeroed for them, and nothing added to zero.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache

from megatron_balance.analysis.wire import ALIGN
from megatron_balance.ir.program import Kind
from megatron_balance.runtime.lower.last_use import GRADS, Value
from megatron_balance.runtime.lower.regions import RowRun
from megatron_balance.runtime.lower.steps import FinishStep, GradLaunch, Packed, Step, Sums

Sizes = Mapping[Kind, Mapping[int, tuple[int, int]]]
"""(rows, heads) of buffers by kind of input and number."""


def mark_sums(steps: Sequence[Step], sizes: Sizes) -> list[Step]:
    """Say of every gradient that a step brings which of its runs are kept and which are added."""
    begun: set[Value] = set()
    marked: list[Step] = []
    for step in steps:
        match step:
            case GradLaunch():
                dq, dk = (
                    _sums(packed, kind, begun, sizes)
                    for packed, kind in ((step.dq, Kind.Q_GRAD), (step.dk, Kind.KV_GRAD))
                )
                marked.append(step._replace(dq_sums=dq, dk_sums=dk))
            case FinishStep(exchange) if any(m.kind in GRADS for m in exchange.receives):
                receives = tuple(
                    m._replace(sums=_sums(m.packed, m.kind, begun, sizes)) if m.kind in GRADS else m
                    for m in exchange.receives
                )
                marked.append(FinishStep(exchange._replace(receives=receives)))
            case _:
                marked.append(step)
    return marked


def is_whole(run: RowRun, packed: Packed, size: tuple[int, int]) -> bool:
    """Whether a run of packed rows is a whole buffer of `size` (rows, heads), in order."""
    rows, heads = size
    whole_rows = run.index is None and (run.start, run.count) == (0, rows)
    return whole_rows and (run.head, run.buffer_head, run.num_heads, packed.num_heads) == (0, 0, heads, heads)


def become_buffers(packed: Packed, sizes: Mapping[int, tuple[int, int]], head_bytes: Sequence[int]) -> bool:
    """Whether packed rows that came in a message are all of one or of several buffers, none of them
    the caller's, and may be used where they lie: each buffer begins aligned.

    `head_bytes`: of a head of a row, of each tensor.
    """
    return len({run.buffer for run in packed.runs}) == len(packed.runs) and all(
        run.buffer > 0
        and is_whole(run, packed, sizes[run.buffer])
        and not any(run.row * packed.num_heads * num_bytes % ALIGN for num_bytes in head_bytes)
        for run in packed.runs
    )


@lru_cache(maxsize=4096)
def _whole(buffer: int, rows: int, heads: int, kind: Kind) -> Packed:
    del kind  # movers know packed rows by identity: each kind has its own
    return Packed((RowRun(0, rows, buffer, 0, rows, None, 0, heads, 0),), rows, heads, (None,), direct=True)


def whole_of(value: Value, sizes: Mapping[int, tuple[int, int]]) -> Packed:
    """All rows and heads of a buffer of these (rows, heads): the same object for the same value."""
    return _whole(value[1], *sizes[value[1]], value[0])


def _sums(packed: Packed, kind: Kind, begun: set[Value], sizes: Sizes) -> Sums:
    of = sizes[Kind.Q if kind == Kind.Q_GRAD else Kind.KV]
    named = Counter(run.buffer for run in packed.runs)
    keeps = [
        named[run.buffer] == 1 and (kind, run.buffer) not in begun and is_whole(run, packed, of[run.buffer])
        for run in packed.runs
    ]
    begun |= {(kind, run.buffer) for run in packed.runs}
    if True not in keeps:
        return Sums((), packed)
    rest = [i for i, keep in enumerate(keeps) if not keep]
    added = packed._replace(
        runs=tuple(packed.runs[i] for i in rest), indices=tuple(packed.indices[i] for i in rest), direct=False
    )
    return Sums(tuple(run for run, keep in zip(packed.runs, keeps, strict=True) if keep), added)
