"""Check the lowered steps of a rank: each op once, nothing read before it is there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from megatron_balance.compile.order import Finish, RunLaunches, Start, Step
from megatron_balance.errors import InvalidProgramError
from megatron_balance.ir.arrays import Bools, Ints, numbered, overlaps, trim_pairs
from megatron_balance.ir.columns import Pair, Region, Transfer
from megatron_balance.ir.mask import Mask
from megatron_balance.ir.program import MOVED, Attend, AttendGrad, Exchange, Kind, Op


# `compile.order` moves starts of exchanges to the front and their ends to the back. These checks
# read its result alone. A send takes what is there at its start, and what an exchange brings is
# there from its end on.
class _OpRegions(NamedTuple):
    """Regions of one kind that ops read, give or take: `op` [n], `rows` [n, 5] of `Region`."""

    op: Ints
    rows: Ints


class _PhaseTables(NamedTuple):
    """All rows of a rank's ops in one phase, below one another, and the op of each row.

    `moved` [n, Transfer.WIDTH] of exchanges; `pairs` [m, Pair.WIDTH] of launches, without what the
    mask hides, and whether they are of the backward.
    """

    moved: Ints
    moving_op: Ints
    pairs: Ints
    launching_op: Ints
    of_backward: Bools

    @classmethod
    def of(cls, ops: Sequence[Op], mask: Mask) -> _PhaseTables:
        exchanges = [(at, op.transfers) for at, op in enumerate(ops) if isinstance(op, Exchange)]
        launches = [(at, op.pairs) for at, op in enumerate(ops) if isinstance(op, Attend | AttendGrad)]
        pairs, launching_op = numbered(launches, Pair.WIDTH)
        backward = np.array([isinstance(op, AttendGrad) for op in ops], dtype=bool)
        moved = numbered(exchanges, Transfer.WIDTH)
        return cls(*moved, trim_pairs(pairs, mask), launching_op, backward[launching_op])

    def moving(self, rank: int, kind: Kind, side: int) -> _OpRegions:
        # Rows that `rank` gives (`side` `Transfer.SRC`) or is brought (`Transfer.DST`).
        chosen = (self.moved[:, side] == rank) & (self.moved[:, Transfer.KIND] == kind)
        return _OpRegions(self.moving_op[chosen], self.moved[chosen, Transfer.REGION])

    def read(self, kind: Kind) -> _OpRegions:
        chosen = self.of_backward if kind == Kind.OUT_GRAD else np.ones_like(self.of_backward)
        return self._of_launches(chosen, Pair.KEY if kind == Kind.KV else Pair.QUERY)

    def launched(self, kind: Kind) -> _OpRegions:
        chosen = ~self.of_backward if kind == Kind.OUT else self.of_backward
        return self._of_launches(chosen, Pair.KEY if kind == Kind.KV_GRAD else Pair.QUERY)

    def _of_launches(self, chosen: Bools, columns: slice | tuple[int, ...]) -> _OpRegions:
        return _OpRegions(self.launching_op[chosen], self.pairs[chosen][:, columns])


def verify_steps(ops: Sequence[Op], steps: Sequence[Step], rank: int, mask: Mask) -> None:
    """Check the steps of one phase of `rank`: every exchange starts and ends once, every launch runs
    once, all after what they need and before what they must not see.

    Raises:
        InvalidProgramError: they do not; names the ops.
    """
    begin, end = _times(ops, steps, rank)
    tables = _PhaseTables.of(ops, mask)
    for kind in Kind:
        there, given = tables.moving(rank, kind, Transfer.DST), tables.moving(rank, kind, Transfer.SRC)
        if kind in MOVED:
            there = _joined(there, tables.launched(kind))
            reads = given
        else:
            reads = _joined(given, tables.read(kind))
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


def _times(ops: Sequence[Op], steps: Sequence[Step], rank: int) -> tuple[Ints, Ints]:
    # By op, the step that takes what it needs, and the one from which on its results are there.
    times = np.full((2, len(ops)), -1)
    for at, step in enumerate(steps):
        op = ops[step.op]
        if isinstance(step, RunLaunches) == isinstance(op, Exchange):
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


def _joined(one: _OpRegions, other: _OpRegions) -> _OpRegions:
    return _OpRegions(np.concatenate([one.op, other.op]), np.concatenate([one.rows, other.rows]))


def _pairs(there: _OpRegions, reads: _OpRegions) -> tuple[Ints, Ints]:
    # (op that leaves, op that reads) of every two different ones that share a token and a head.
    kept = there.rows[:, Region.START] < there.rows[:, Region.STOP]
    there = _OpRegions(there.op[kept], there.rows[kept])
    read, left = overlaps(reads.rows, there.rows)
    meet = there.rows[left, Region.HEAD_START] < reads.rows[read, Region.HEAD_STOP]
    meet &= there.rows[left, Region.HEAD_STOP] > reads.rows[read, Region.HEAD_START]
    source, reader = there.op[left[meet]], reads.op[read[meet]]
    other = source != reader
    return source[other], reader[other]
