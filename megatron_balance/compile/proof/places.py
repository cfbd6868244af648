"""Places of what ranks hold, for a proof: one flat index over the (sequence, rank) pairs that occur
together, and the rows of a program that say which do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megatron_balance.ir.arrays import Ints, concat
from megatron_balance.ir.columns import Fragment, Pair, Transfer, Value
from megatron_balance.ir.program import Attend, AttendGrad, Exchange, Merge, Program


class ProgramTables(NamedTuple):
    """All rows of a program below one another, and the ranks of those that do not name theirs.

    `owned` with `owners`; `moved`: `Transfer` rows; `merged`: `Value` rows, with `merging`; `pairs`
    with `attending`.
    """

    owned: Ints
    owners: Ints
    moved: Ints
    merged: Ints
    merging: Ints
    pairs: Ints
    attending: Ints

    @classmethod
    def of(cls, program: Program) -> ProgramTables:
        ops = (*program.forward, *program.backward)
        merges = [op for op in ops if isinstance(op, Merge)]
        # A backward launch has the very table of its forward launch; looking at it once will do.
        launches = {(op.rank, id(op.pairs)): op for op in ops if isinstance(op, Attend | AttendGrad)}.values()
        return cls(
            concat(list(program.owned), Fragment.WIDTH),
            np.repeat(np.arange(program.num_ranks), [len(rows) for rows in program.owned]),
            concat([op.transfers for op in ops if isinstance(op, Exchange)], Transfer.WIDTH),
            concat([op.values for op in merges], Value.WIDTH),
            _repeated([op.rank for op in merges], [len(op.values) for op in merges]),
            concat([op.pairs for op in launches], Pair.WIDTH),
            _repeated([op.rank for op in launches], [len(op.pairs) for op in launches]),
        )


def _repeated(ranks: list[int], counts: list[int]) -> Ints:
    return np.repeat(np.array(ranks, dtype=np.int64), np.array(counts, dtype=np.int64))


@dataclass(frozen=True, slots=True)
class Places:
    """Indices of what the ranks may hold: a run of atoms for each (sequence, rank) that occur
    together.

    So a plan of many small zones takes the sum of them, not all ranks times all sequences.

    `cells` [n], ascending: sequence * num_ranks + rank; `base` [n + 1]: where the run of each begins;
    `first` [S]: the first atom of each sequence.
    """

    num_ranks: int
    cells: Ints
    base: Ints
    first: Ints

    @classmethod
    def of(cls, tables: ProgramTables, num_ranks: int, first: Ints, last: Ints, num_heads: int) -> Places:
        """`first`, `last` [S]: token atoms of each sequence; ranks that are not there are left out."""
        met = [np.empty((0, 2), dtype=np.int64)]
        met += [tables.moved[:, [Transfer.SEQ, side]] for side in (Transfer.SRC, Transfer.DST)]
        met += [np.column_stack([tables.merged[:, Value.SEQ], tables.merging])]
        met += [np.column_stack([tables.pairs[:, Pair.SEQ], tables.attending])]
        met += [np.column_stack([tables.owned[:, Fragment.SEQ], tables.owners])]
        seqs, ranks = np.concatenate(met).T
        cells = np.unique((seqs * num_ranks + ranks)[(ranks >= 0) & (ranks < num_ranks)])
        sizes = (last - first)[cells // num_ranks] * num_heads
        return cls(num_ranks, cells, np.append(0, np.cumsum(sizes)), first * num_heads)

    @property
    def size(self) -> int:
        return int(self.base[-1])

    def offset(self, ranks: Ints, seqs: Ints) -> Ints:
        """Offsets [n] that turn atoms of `seqs` [n] into indices on `ranks` [n]."""
        return self.base[np.searchsorted(self.cells, seqs * self.num_ranks + ranks)] - self.first[seqs]

    def at(self, place: int) -> tuple[int, int]:
        """The rank and the atom of an index."""
        cell = int(np.searchsorted(self.base, place, side="right")) - 1
        seq, rank = divmod(int(self.cells[cell]), self.num_ranks)
        return rank, place - int(self.base[cell] - self.first[seq])
