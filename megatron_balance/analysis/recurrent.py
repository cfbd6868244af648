"""Bytes that the exchanges of recurrent layers move, as the program says it."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from megatron_balance.compile.recurrent import carries_map
from megatron_balance.ir.arrays import Ints, numbered, sums
from megatron_balance.ir.columns import Transfer
from megatron_balance.ir.program import Exchange
from megatron_balance.ir.recurrent import STATE_KINDS, RecurrentOp


class SummarySizes(NamedTuple):
    """Numbers of M and of a state of one head (Mamba-2: 1 and P * N; gated delta rule: K * K and K *
    V), channels of the convolution; bytes of a number of states, and of rows.
    """

    map: int
    state: int
    channels: int
    state_bytes: int = 4
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
