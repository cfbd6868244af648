"""A step's microbatches as this rank reads them, before they are planned, and batches of a script's
own data set as columns whose positions open sequences.

Every replica's context-parallel rank 0 reads samples; with pipeline stages on the first and the
last one, each its own copy of the same samples.

Shapes: B = micro batch, S = --seq-length, N = entries of cu_seqlens. Packed samples (`--sft`,
`--dataloader-inter-document-masking`) come with cu_seqlens [B, N] int32: a row begins with 0,
rises, and ends with S, which is repeated to fill it, or with -1 behind it, as NeMo and
Megatron-Bridge do, where cu_seqlens_argmin [B, 1] counts the entries in front. Megatron-Bridge's
are named cu_seqlens_q, and may be [N] for a batch of one row. Samples of unequal lengths
(`--use-varlen-dataset`) come as a list of dicts, each one sequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_balance.errors import BalanceError, DataError
from megatron_balance.megatron.data import PADDING, Documents, unpack
from megatron_balance.training.ledger import HeldDocument
from megatron_balance.training.plans import Draw
from megatron_balance.training.pool import Pool, TensorParallel
from megatron_balance.training.sequences import NOTHING, Recalled, Sequences


def read(
    data_iterator: Iterator[Mapping[str, torch.Tensor]],
    num_microbatches: int,
    reader: Reader,
    depths: int,
    first_sample: int | None,
) -> tuple[list[Sequences], Exception | None]:
    """The sequences of this rank's microbatches, on the host, or the error that prevented it;
    `depths`, `first_sample`: of `unpack`.
    """
    microbatches: list[Sequences] = []
    try:
        for _ in range(num_microbatches):
            microbatches.append(unpack(reader.columns(next(data_iterator)), depths, first_sample))
    except Exception as error:  # raised again by share_lengths, on all ranks
        return [], error
    return microbatches, None


def numbered(data: Documents, draw: Draw, micro_batch_size: int, pool: Pool) -> Iterator[Mapping[str, torch.Tensor]]:
    """The microbatches of this rank's replica by the numbers of their samples, in place of
    Megatron's iterator, which counts on where a step drew less.
    """
    assert draw.first is not None
    for microbatch in range(draw.num_microbatches):
        # As Megatron's sampler deals them: `micro_batch_size` samples to each replica in turn.
        start = draw.first + (microbatch * pool.num_replicas + pool.replica) * micro_batch_size
        samples = [data[index] for index in range(start, start + micro_batch_size)]
        yield {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}


def recall(
    wanted: Sequence[HeldDocument],
    data: Documents | None,
    pool: Pool,
    parallel: TensorParallel,
    device: torch.device,
    depths: int,
) -> Recalled:
    """Read documents of earlier steps again, each on one of the ranks that read. Collective over
    the joint pool where there are some. DataError on every rank: one could not read.
    """
    if not wanted:
        return NOTHING
    assert data is not None, "documents wait only where they can be read again"
    # Each on another rank that reads, in turn.
    owners = tuple(pool.readers[at % len(pool.readers)] for at in range(len(wanted)))
    rows: list[tuple[int, torch.Tensor]] = []
    failure: Exception | None = None
    if pool.reads and pool.has_tokens and parallel.is_source:
        try:
            for held, owner in zip(wanted, owners, strict=True):
                if owner == pool.rank:
                    rows.append((held.number, _read_again(data, held, depths)))
        except Exception as error:  # raised below, on all ranks
            failure = error
    # All ranks raise, so none waits for another.
    failed = torch.tensor([failure is not None], dtype=torch.int64, device=device)
    if pool.joint.size > 1:
        dist.all_reduce(failed, op=dist.ReduceOp.MAX, group=pool.joint.pool)
    if parallel.size > 1:
        dist.all_reduce(failed, op=dist.ReduceOp.MAX, group=parallel.group)
    if int(failed):
        if isinstance(failure, BalanceError):
            raise failure
        raise DataError("a rank could not read a document that waited; the reason is in its log") from failure
    return Recalled(tuple((held.number, held.length) for held in wanted), owners, tuple(rows))


def _read_again(data: Documents, held: HeldDocument, depths: int) -> torch.Tensor:
    sample = unpack({name: tensor[None] for name, tensor in data[held.sample].items()}, depths)
    lengths = sample.lengths
    if held.place >= len(lengths) or lengths[held.place] != held.length:
        raise DataError(
            f"document {held.place} of sample {held.sample}: expected {held.length} tokens that waited, got a sample "
            f"of {list(lengths)}; the corpus has changed since it was drawn"
        )
    first = sum(lengths[: held.place])
    return sample.rows[first : first + held.length]


BOUNDARIES = ("cu_seqlens_padded", "cu_seqlens_q_padded", "cu_seqlens", "cu_seqlens_q")
"""Where a batch may say them, the first that is there taking precedence."""


COLUMNS = ("tokens", "labels", "loss_mask", "position_ids")


@dataclass(frozen=True, slots=True)
class Reader:
    """How batches are read. Those of samples with positions of their own stay as they are.

    `leave_out_tails`: tokens of a sub-sequence behind the last one whose loss counts are not read.
    `learned`: positions are embedded by position_ids, which have to agree.
    """

    leave_out_tails: bool = True
    learned: bool = False

    def columns(self, batch: Mapping[str, Tensor] | Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """The columns of a batch, whose position_ids say where sequences open. DataError:
        cu_seqlens that are none of the batch's, or with learned positions that are others.
        """
        if not isinstance(batch, Mapping):
            return self._without_tails(side_by_side(batch))
        found = {name: batch[name] for name in COLUMNS}
        # With cu_seqlens_padded beside it, Megatron attends by that one, and so do we.
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
        # No other token attends to them and no loss comes of them, so no number of a dense model
        # depends on them: padding up to --seq-length costs nothing.
        kept = _counts_or_precedes(positions == 0, columns["loss_mask"] != 0)
        return {**columns, "position_ids": positions.masked_fill(~kept, PADDING)}


def side_by_side(samples: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Columns [B, longest] of samples [n] that are one sequence each, without their own padding.

    Raises:
        DataError: a sample without tokens.
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
    """Positions [B, S] of tokens in the sub-sequences of cu_seqlens [B, N], or [N] of one row;
    DataError: these do not rise from 0 to S. `argmin`: how many entries of each row count [B];
    None: those in front of the first -1.
    """
    batch, size = shape
    ends = cu_seqlens.long()
    if ends.dim() == 1 and batch == 1:
        ends = ends[None]
    right = ends.dim() == 2 and ends.shape[0] == batch and ends.shape[1] > 1
    if right:
        # [B, N]: the first -1 and all behind it, or what argmin does not count.
        fill = (ends == -1).cummax(dim=1).values if argmin is None else _behind(argmin, ends)
        # Entries that do not count become S, behind which no sequence opens.
        ends = ends.masked_fill(fill, size)
        right = not (fill[:, :2].any() or (ends.diff(dim=1) < 0).any())
        right = right and not ((ends[:, 0] != 0).any() or (ends.masked_fill(fill, 0).amax(dim=1) != size).any())
    if not right:
        counted = "" if argmin is None else f"; entries that count (cu_seqlens_argmin): {argmin.reshape(-1).tolist()}"
        raise DataError(
            f"cu_seqlens of shape {list(cu_seqlens.shape)}: expected a row for each of {batch} samples, rising from 0 "
            f"to {size}, and filled with {size} or -1; first row: {cu_seqlens.reshape(-1)[:8].tolist()} ...{counted}"
        )
    # [B, S + 1] marks, whose last column takes the ends; a token's position is its column less that
    # of the last mark up to it.
    opens = torch.zeros(batch, size + 1, dtype=torch.bool).scatter_(1, ends, True)[:, :size]
    at = torch.arange(size).expand(batch, size)
    return at - at.masked_fill(~opens, 0).cummax(dim=1).values


def _behind(argmin: Tensor, ends: Tensor) -> Tensor:
    """Entries [B, N] that do not count; all where `argmin` is not a count of entries for each row."""
    counts = argmin.reshape(-1, 1).long()
    if counts.shape[0] != ends.shape[0] or (counts > ends.shape[1]).any():
        return torch.ones_like(ends, dtype=torch.bool)
    return torch.arange(ends.shape[1]) >= counts


def _counts_or_precedes(opens: Tensor, counts: Tensor) -> Tensor:
    """Tokens [B, S] that count, precede one that does in their sub-sequence, or open it."""
    size = opens.shape[1]
    at = torch.arange(size).expand_as(opens)
    # [B, S]: the next column that counts, and the next sub-sequence's opening, from each on.
    next_count = _nearest_from(at.masked_fill(~counts, size))
    next_open = torch.nn.functional.pad(_nearest_from(at.masked_fill(~opens, size))[:, 1:], (0, 1), value=size)
    return opens | (next_count < next_open)


def _nearest_from(marks: Tensor) -> Tensor:
    return marks.flip(1).cummin(dim=1).values.flip(1)
