"""Bytes of recurrent layers: those that their exchanges move, as the program says it, and those that
ranks keep for the backward.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from megatron_balance.compile.recurrent import carries_map, composers, pieces_of, trees_of
from megatron_balance.compile.remap import layouts
from megatron_balance.ir.arrays import Bools, Ints, numbered, sums
from megatron_balance.ir.columns import Placed, Transfer
from megatron_balance.ir.model import RecurrentLayers
from megatron_balance.ir.plan import MicrobatchPlan
from megatron_balance.ir.program import Exchange
from megatron_balance.ir.recurrent import STATE_KINDS, RecurrentOp
from megatron_balance.ir.segments import PathEnds

STATE_BYTES = 4


class SummarySizes(NamedTuple):
    """Numbers of M and of a state of one head (Mamba-2: 1 and P * N; gated delta rule: K * K and K *
    V), channels of the convolution; bytes of a number of states, and of rows.
    """

    map: int
    state: int
    channels: int
    state_bytes: int = STATE_BYTES
    row_bytes: int = 2


def bytes_moved(ops: Sequence[RecurrentOp], sizes: SummarySizes) -> Ints:
    """Bytes by exchange and pair of ranks: rows (exchange id, src, dst, bytes), ascending.

    `ops`: of one phase of a program; an exchange is one round.
    """
    exchanges = [(op.id, op.transfers) for op in ops if isinstance(op, Exchange)]
    rows, ids = numbered(exchanges, Transfer.WIDTH)
    heads = rows[:, Transfer.HEAD_STOP] - rows[:, Transfer.HEAD_START]
    tokens = rows[:, Transfer.STOP] - rows[:, Transfer.START]
    states = heads * (sizes.state + sizes.map * carries_map(rows)) * sizes.state_bytes
    of_states = np.isin(rows[:, Transfer.KIND], STATE_KINDS)
    amount = np.where(of_states, states, tokens * sizes.channels * sizes.row_bytes)
    pairs, which = np.unique(np.column_stack([ids, rows[:, Transfer.ENDS]]), axis=0, return_inverse=True)
    return np.column_stack([pairs, sums(which.ravel(), amount, len(pairs))])


class Pieces(NamedTuple):
    """The pieces of a plan's sequences: `Placed` rows by sequence, then by start; whether a sequence
    begins with each, and a path ends with it. `paths`: None: all are documents.
    """

    held: Ints
    begins: Bools
    ends: Bools
    paths: PathEnds | None

    @staticmethod
    def of(plan: MicrobatchPlan) -> "Pieces":
        """ConfigError: a tree has full segments."""
        trees = trees_of(plan)
        held, paths = pieces_of(layouts(plan), trees), PathEnds.of(plan.lengths, trees) if trees else None
        _, seq, start, stop = held.T
        end = np.array(plan.lengths, dtype=np.int64)[seq] if paths is None else paths.end[paths.at(seq, start)]
        return Pieces(held, start == 0, stop == end, paths)


def kept_bytes(plan: MicrobatchPlan, own: RecurrentLayers) -> Ints:
    """Bytes that each rank keeps of a recurrent layer for the backward: states before its pieces,
    and the maps that it composed.
    """
    held, begins, ends, *_ = Pieces.of(plan)
    of_states = STATE_BYTES * own.state_heads * own.key_dim * own.value_dim
    kept = sums(held[~begins, Placed.RANK], np.full(int((~begins).sum()), of_states), plan.num_ranks)
    table = composers(held, own.state_heads)
    middle = np.bincount(held[~begins & ~ends, Placed.SEQ], minlength=len(plan.lengths))
    maps = (table[:, 3] - table[:, 2]) * middle[table[:, 1]] * STATE_BYTES * own.map_size
    return kept + sums(table[:, 0], maps, plan.num_ranks)
