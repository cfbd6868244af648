"""The rows that one rank computes of a microbatch, with their positions and padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_balance.ir.arrays import Ints
from megatron_balance.ir.columns import Fragment
from megatron_balance.ir.intervals import ranges


@dataclass(frozen=True, slots=True, eq=False)
class LocalMicrobatch:
    """Rows of this rank in the plan's order, padding rows last.

    `rows` [T, C] int64 as they were exchanged, zeros where padded. `positions` [T] int64: of each
    token in its own sequence. `padding` [T]: True where a row belongs to no sequence.
    `nano_batches`: those that the microbatch runs as, whose rows `interleave` brought into these;
    empty: it runs whole.
    """

    rows: Tensor
    positions: Tensor
    padding: Tensor
    nano_batches: tuple[LocalMicrobatch, ...] = ()


def assemble(rows: Tensor, layout: Ints, multiple: int) -> LocalMicrobatch:
    """Pad the rows [T, C] of this rank to a positive multiple of `multiple`.

    A rank without tokens still takes part in every collective of a layer, so it computes masked
    padding.

    Args:
        rows: as `TokenExchange.to_ranks` gives them.
        layout: rows (seq, start, stop) of the tokens.
        multiple: that linear layers need (sequence parallelism, FP8).
    """
    padding = padded(len(rows), multiple) - len(rows)
    positions = torch.from_numpy(ranges(layout[:, Fragment.START], layout[:, Fragment.STOP])[1]).to(rows.device)
    assert len(positions) == len(rows), f"the exchange brought {len(rows)} tokens, the layout has {len(positions)}"
    rows = torch.nn.functional.pad(rows, (0, 0, 0, padding))
    positions = torch.nn.functional.pad(positions, (0, padding))
    return LocalMicrobatch(rows, positions, torch.arange(len(rows), device=rows.device) >= len(rows) - padding)


def padded(num_tokens: int, multiple: int) -> int:
    """Rows of a rank that holds so many tokens: the next positive multiple of `multiple`."""
    return max(1, -(-num_tokens // multiple)) * multiple


def interleave(nano_batches: Sequence[LocalMicrobatch], shares: int) -> LocalMicrobatch:
    """One microbatch of its nano-batches' rows.

    Under sequence parallelism the rows of a microbatch are split evenly over the tensor-parallel
    ranks, and each of these must hold its share of every nano-batch: the rows lie share by share,
    and in each share nano-batch by nano-batch. `shares`: those tensor-parallel ranks; 1: rows are
    not split.
    """
    if len(nano_batches) == 1:
        return nano_batches[0]

    def joined(name: str) -> Tensor:
        columns = [getattr(each, name) for each in nano_batches]
        return torch.cat([column.view(shares, -1, *column.shape[1:]) for column in columns], dim=1).flatten(0, 1)

    return LocalMicrobatch(joined("rows"), joined("positions"), joined("padding"), tuple(nano_batches))
