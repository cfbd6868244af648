"""Check the lowered steps of all ranks: each op once, nothing read before it is there, no wait in a
circle.

`compile.order` moves starts of exchanges to the front and their ends to the back. These checks read
its result alone. A send takes what is there at its start, and what an exchange brings is there from
its end on.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from megatron_balance.compile.order import Finish, Run, Start, Step, hops
from megatron_balance.errors import InvalidProgramError
from megatron_balance.ir.arrays import Ints, as_array
from megatron_balance.ir.columns import Pair, Region, Transfer
from megatron_balance.ir.intervals import overlaps
from megatron_balance.ir.mask import Mask
from megatron_balance.ir.program import MOVED, Attend, AttendGrad, Exchange, Kind, Op
from megatron_balance.ir.visible import trim_pairs

Lowered: TypeAlias = tuple[Sequence[Op], Sequence[Step]]
"""Ops of one phase of a rank, and the order of its steps."""


class _Regions(NamedTuple):
    """Regions of one kind that ops read, give or take: `op` [n], `rows` [n, 5] of `Region`."""

    op: Ints
    rows: Ints

    @classmethod
    def of(cls, parts: Sequence[tuple[int, Ints]]) -> _Regions:
        rows = np.concatenate([np.empty((0, Region.WIDTH), dtype=np.int64), *(rows for _, rows in parts)])
        return cls(np.repeat(np.array([op for op, _ in parts], dtype=np.int64), [len(rows) for _, rows in parts]), rows)


def verify_steps(ops: Sequence[Op], steps: Sequence[Step], rank: int, mask: Mask) -> None:
    """Check the steps of one phase of `rank`: every exchange starts and ends once, every launch runs
    once, all after what they need and before what they must not see.

    Raises:
        InvalidProgramError: they do not; names the ops.
    """
    begin, end = _times(ops, steps, rank)
    for kind in Kind:
        there, given = _brought(ops, rank, kind), _given(ops, rank, kind)
        if kind in MOVED:
            there = _joined(there, _launched(ops, kind, mask))
            reads = given
        else:
            reads = _joined(given, _read(ops, kind, mask))
        source, reader = _pairs(there, reads)
        early = end[source] < begin[reader]
        # What is copied stays, so that only what came before is needed; of what moves all else must
        # not be taken along.
        wrong = (early != (source < reader)) if kind in MOVED else ((source < reader) & ~early)
        if wrong.any():
            at = int(np.flatnonzero(wrong)[0])
            word = "without" if source[at] < reader[at] else "with"
            raise InvalidProgramError(
                f"rank {rank}: op {int(reader[at])} takes {kind.name} {word} "
                f"what op {int(source[at])} leaves; its step is {'before' if not early[at] else 'behind'} that one's"
            )


def verify_meeting(ranks: Sequence[Lowered]) -> None:
    """Let all ranks take their steps, each end of an exchange when those that it receives from have
    started theirs: none may wait for ever.

    Raises:
        InvalidProgramError: names ranks that do, and for what.
    """
    started: set[tuple[int, int]] = set()
    sleeping: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    at = [0] * len(ranks)
    ready = list(range(len(ranks)))
    waits: dict[int, tuple[int, int]] = {}
    while ready:
        rank = ready.pop()
        ops, steps = ranks[rank]
        waits.pop(rank, None)
        while at[rank] < len(steps):
            step = steps[at[rank]]
            op = ops[step.op]
            if isinstance(op, Exchange):
                if isinstance(step, Start):
                    started.add((rank, op.id))
                    ready += sleeping.pop((rank, op.id), [])
                elif missing := [m for m in _senders(op, rank) if (m, op.id) not in started][:1]:
                    waits[rank] = (missing[0], op.id)
                    sleeping[waits[rank]].append(rank)
                    break
            at[rank] += 1
    if waits:
        told = "; ".join(f"rank {rank} for exchange {at} of rank {of}" for rank, (of, at) in sorted(waits.items())[:4])
        raise InvalidProgramError(f"{len(waits)} ranks wait for ever: {told}")


def _senders(op: Exchange, rank: int) -> Iterator[int]:
    """Ranks that must start an exchange before `rank` has all of it."""
    if op.collective != "p2p":
        yield from (other for other in op.group if other != rank)
        return
    rows = as_array(op.transfers)
    routed = {row[:2] for row in op.routes}
    for src in np.unique(rows[rows[:, Transfer.DST] == rank, Transfer.SRC]).tolist():
        if (src, rank) not in routed:
            yield src
    for src, dst, _, *proxies in op.routes:
        yield from (a for _, a, b in hops((src, *proxies, dst)) if b == rank)


def _times(ops: Sequence[Op], steps: Sequence[Step], rank: int) -> tuple[Ints, Ints]:
    """By op, the step that takes what it needs, and the one from which on its results are there."""
    times = np.full((2, len(ops)), -1)
    for at, step in enumerate(steps):
        op = ops[step.op]
        if isinstance(step, Run) == isinstance(op, Exchange):
            raise InvalidProgramError(f"rank {rank}: step {at} does not fit op {step.op}, {type(op).__name__}")
        for side, does in enumerate((not isinstance(step, Finish), not isinstance(step, Start))):
            if does and times[side, step.op] >= 0:
                raise InvalidProgramError(f"rank {rank}: op {step.op} has two steps {type(step).__name__}")
            if does:
                times[side, step.op] = at
    for index, op in enumerate(ops):
        needed = isinstance(op, Exchange | Attend | AttendGrad)
        if needed and not 0 <= times[0, index] <= times[1, index]:
            raise InvalidProgramError(f"rank {rank}: op {index} has no step, or ends before it starts")
    return times[0], times[1]


def _brought(ops: Sequence[Op], rank: int, kind: Kind) -> _Regions:
    return _moving(ops, rank, kind, Transfer.DST)


def _given(ops: Sequence[Op], rank: int, kind: Kind) -> _Regions:
    return _moving(ops, rank, kind, Transfer.SRC)


def _moving(ops: Sequence[Op], rank: int, kind: Kind, side: int) -> _Regions:
    tables = [(at, as_array(op.transfers)) for at, op in enumerate(ops) if isinstance(op, Exchange)]
    return _Regions.of(
        [(at, rows[(rows[:, side] == rank) & (rows[:, Transfer.KIND] == kind), Transfer.REGION]) for at, rows in tables]
    )


def _read(ops: Sequence[Op], kind: Kind, mask: Mask) -> _Regions:
    """Of Q, KV or OUT_GRAD, what launches read."""
    launches = _launches(ops, mask)
    if kind == Kind.OUT_GRAD:
        launches = [(at, pairs) for at, pairs in launches if isinstance(ops[at], AttendGrad)]
    return _Regions.of([(at, pairs[:, Pair.KEY if kind == Kind.KV else Pair.QUERY]) for at, pairs in launches])


def _launched(ops: Sequence[Op], kind: Kind, mask: Mask) -> _Regions:
    """Of OUT, Q_GRAD or KV_GRAD, what launches leave."""
    of = Attend if kind == Kind.OUT else AttendGrad
    launches = [(at, pairs) for at, pairs in _launches(ops, mask) if isinstance(ops[at], of)]
    return _Regions.of([(at, pairs[:, Pair.KEY if kind == Kind.KV_GRAD else Pair.QUERY]) for at, pairs in launches])


def _launches(ops: Sequence[Op], mask: Mask) -> list[tuple[int, Ints]]:
    """Launches and their pairs, without what the mask hides."""
    found = [(at, op) for at, op in enumerate(ops) if isinstance(op, Attend | AttendGrad)]
    return [(at, trim_pairs(as_array(op.pairs), mask)) for at, op in found]


def _joined(one: _Regions, other: _Regions) -> _Regions:
    return _Regions(np.concatenate([one.op, other.op]), np.concatenate([one.rows, other.rows]))


def _pairs(there: _Regions, reads: _Regions) -> tuple[Ints, Ints]:
    """(op that leaves, op that reads) of every two different ones that share a token and a head."""
    kept = there.rows[:, Region.START] < there.rows[:, Region.STOP]
    there = _Regions(there.op[kept], there.rows[kept])
    read, left = overlaps(reads.rows, there.rows)
    meet = there.rows[left, Region.HEAD_START] < reads.rows[read, Region.HEAD_STOP]
    meet &= there.rows[left, Region.HEAD_STOP] > reads.rows[read, Region.HEAD_START]
    source, reader = there.op[left[meet]], reads.op[read[meet]]
    other = source != reader
    return source[other], reader[other]
