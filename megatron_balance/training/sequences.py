"""The sequences that a rank read, as rows of integers that travel through the pool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatron_balance.ir.arrays import Bools
from megatron_balance.ir.intervals import ranges


@dataclass(frozen=True, slots=True, eq=False)
class Sequences:
    """The sequences of one microbatch, one after another without padding, on the host.

    `rows` [T, C] int64: a row a token; its columns are the adapter's (token, label, ...).
    `lengths`: in tokens, summing to T.
    """

    rows: Tensor
    lengths: tuple[int, ...]

    @classmethod
    def of(cls, documents: Sequence[Tensor], num_columns: int = 1) -> Sequences:
        """Documents [n], or [n, C] for C columns, of integers; none is fine."""
        rows = [document.reshape(-1, num_columns).long() for document in documents]
        return cls(torch.cat([torch.empty(0, num_columns, dtype=torch.int64), *rows]), tuple(map(len, rows)))

    def select(self, wanted: Bools) -> Sequences:
        """The sequences that are `wanted` [sequences]."""
        lengths = np.array(self.lengths, dtype=np.int64)
        ends = np.cumsum(lengths)
        rows = torch.from_numpy(ranges((ends - lengths)[wanted], ends[wanted])[1])
        return Sequences(self.rows[rows], tuple(lengths[wanted].tolist()))


def to_bits(values: Tensor) -> Tensor:
    """The bits of `values` as float32, in int64: a column that arrives exactly. Any shape."""
    return values.float().view(torch.int32).long()


def from_bits(bits: Tensor) -> Tensor:
    """The float32 numbers whose bits `to_bits` gave."""
    return bits.to(torch.int32).view(torch.float32)
