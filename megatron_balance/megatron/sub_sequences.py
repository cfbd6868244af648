"""Batches of a script's own data set, as columns whose positions open sequences.

Shapes: B = micro batch, S = --seq-length, N = entries of cu_seqlens. Packed samples (`--sft`,
`--dataloader-inter-document-masking`) come with cu_seqlens [B, N] int32: a row begins with 0, rises,
and ends with S, which is repeated to fill it, or with -1 behind it, as NeMo and Megatron-Bridge do,
where cu_seqlens_argmin [B, 1] counts the entries in front. With cu_seqlens_padded beside it, Megatron
attends by that one, and so do we. Those of Megatron-Bridge are named cu_seqlens_q and
cu_seqlens_q_padded, and may be [N] for a batch of one row. Samples of unequal lengths
(`--use-varlen-dataset`) come as a list of dicts, each one sequence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_balance.errors import DataError
from megatron_balance.megatron.data import PADDING

BOUNDARIES = ("cu_seqlens_padded", "cu_seqlens_q_padded", "cu_seqlens", "cu_seqlens_q")
"""Where a batch may say them, the first that is there taking precedence."""
COLUMNS = ("tokens", "labels", "loss_mask", "position_ids")
"""Columns that are read of a batch, each [B, S]."""


@dataclass(frozen=True, slots=True)
class Reader:
    """How batches are read. Those of samples with positions of their own stay as they are.

    `leave_out_tails`: tokens of a sub-sequence behind the last one whose loss counts are not read.
    No other token attends to them and no loss comes of them, so no number of a dense model depends
    on them: padding up to --seq-length costs nothing. `learned`: positions are embedded by
    position_ids, which have to agree.
    """

    leave_out_tails: bool = True
    learned: bool = False

    def columns(self, batch: Mapping[str, Tensor] | Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """The columns of a batch, whose position_ids say where sequences open.

        Raises:
            DataError: cu_seqlens that are none of the batch's, or with learned positions that are
                others.
        """
        if not isinstance(batch, Mapping):
            return self._without_tails(side_by_side(batch))
        found = {name: batch[name] for name in COLUMNS}
        name = next((name for name in BOUNDARIES if batch.get(name) is not None), None)
        if name is None:
            return found
        positions = positions_of(batch[name], found["tokens"].shape, batch.get(f"{name}_argmin"))
        if self.learned and not positions.equal(found["position_ids"]):
            raise DataError(
                "cu_seqlens and position_ids open sub-sequences at different tokens: learned positions would be "
                "others than Megatron's; let position_ids begin with 0 at each entry of cu_seqlens"
            )
        return self._without_tails({**found, "position_ids": positions})

    def _without_tails(self, columns: dict[str, Tensor]) -> dict[str, Tensor]:
        if not self.leave_out_tails:
            return columns
        positions = columns["position_ids"]
        kept = counts_or_precedes(positions == 0, columns["loss_mask"] != 0)
        return {**columns, "position_ids": positions.masked_fill(~kept, PADDING)}


def side_by_side(samples: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Columns [B, longest] of samples [n] that are one sequence each, without their own padding.

    Raises:
        DataError: a sample says that it has no tokens.
    """
    lengths = [int(sample.get("original_seq_len", sample["padded_seq_len"])) for sample in samples]
    if not lengths or min(lengths) < 1:
        raise DataError(
            f"samples of {lengths} tokens (original_seq_len): expected at least one sample, and no empty one"
        )
    made = {
        name: torch.nn.utils.rnn.pad_sequence(
            [sample[name].reshape(-1)[:length] for sample, length in zip(samples, lengths, strict=True)],
            batch_first=True,
        )
        for name in COLUMNS
    }
    at = torch.arange(max(lengths)).expand_as(made["tokens"])
    made["position_ids"] = at.masked_fill(at >= torch.tensor(lengths)[:, None], PADDING)
    return made


def positions_of(cu_seqlens: Tensor, shape: torch.Size, argmin: Tensor | None = None) -> Tensor:
    """Positions [B, S] of tokens in the sub-sequences of cu_seqlens [B, N], or [N] of one row.

    `argmin`: how many entries of each row count [B]; None: those in front of the first -1.

    Raises:
        DataError: these do not rise from 0 to S.
    """
    batch, size = shape
    ends = cu_seqlens.long()
    if ends.dim() == 1 and batch == 1:
        ends = ends[None]
    right = ends.dim() == 2 and ends.shape[0] == batch and ends.shape[1] > 1
    if right:
        fill = (ends == -1).cummax(dim=1).values if argmin is None else _behind(argmin, ends)
        ends = ends.masked_fill(fill, size)
        right = not (fill[:, :2].any() or (ends.diff(dim=1) < 0).any())
        right = right and not ((ends[:, 0] != 0).any() or (ends.masked_fill(fill, 0).amax(dim=1) != size).any())
    if not right:
        counted = "" if argmin is None else f"; entries that count (cu_seqlens_argmin): {argmin.reshape(-1).tolist()}"
        raise DataError(
            f"cu_seqlens of shape {list(cu_seqlens.shape)}: expected a row for each of {batch} samples, rising from 0 "
            f"to {size}, and filled with {size} or -1; first row: {cu_seqlens.reshape(-1)[:8].tolist()} ...{counted}"
        )
    opens = torch.zeros(batch, size + 1, dtype=torch.bool).scatter_(1, ends, True)[:, :size]
    at = torch.arange(size).expand(batch, size)
    return at - at.masked_fill(~opens, 0).cummax(dim=1).values


def _behind(argmin: Tensor, ends: Tensor) -> Tensor:
    """Entries [B, N] that do not count; all where `argmin` is not a count of entries for each row."""
    counts = argmin.reshape(-1, 1).long()
    if counts.shape[0] != ends.shape[0] or (counts > ends.shape[1]).any():
        return torch.ones_like(ends, dtype=torch.bool)
    return torch.arange(ends.shape[1]) >= counts


def counts_or_precedes(opens: Tensor, counts: Tensor) -> Tensor:
    """Tokens [B, S] that count, precede one that does in their sub-sequence, or open it."""
    size = opens.shape[1]
    at = torch.arange(size).expand_as(opens)
    next_count = _nearest_from(at.masked_fill(~counts, size))
    next_open = torch.nn.functional.pad(_nearest_from(at.masked_fill(~opens, size))[:, 1:], (0, 1), value=size)
    return opens | (next_count < next_open)


def _nearest_from(marks: Tensor) -> Tensor:
    """The least of each row's marks [B, S] from a column on."""
    return marks.flip(1).cummin(dim=1).values.flip(1)
