"""Tokens from the replica that read them to the rank that computes them: once per step, before the schedule runs.

Every replica's context-parallel rank 0 reads samples; the pool shares their lengths, plans, and moves tokens, labels and loss masks in
one exchange, so that a rank receives only its own. Tensor-parallel ranks take what their rank 0 got. M microbatches a step; microbatch m
of the pool is the union of the replicas' m-th ones, numbered replica by replica.

With pipeline stages the first and the last one read, each its own copy of the same samples, and exchange tokens within their pools; those
between need lengths alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from megatron_balance.compile.layouts import RANK, SEQ, START, STOP, layouts
from megatron_balance.compile.pipeline import layout
from megatron_balance.errors import BalanceError, DataError
from megatron_balance.ir.arrays import Ints
from megatron_balance.ir.columns import Fragment
from megatron_balance.ir.intervals import ranges
from megatron_balance.ir.plan import MicrobatchPlan
from megatron_balance.megatron.data import Sequences, unpack
from megatron_balance.megatron.groups import Pool

COLUMNS = 3
"""token, label, and the loss mask's bits."""
FAILED = -1


@dataclass(frozen=True, slots=True)
class PoolLengths:
    """What the pool read in one step.

    `lengths[m]`: of all sequences of microbatch m, replica by replica. `owners[m]` [sequences]: the pool rank that holds each.
    """

    lengths: tuple[tuple[int, ...], ...]
    owners: tuple[Ints, ...]


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """The tensor-parallel group of this rank, whose rank 0 reads and exchanges."""

    group: dist.ProcessGroup
    source: int
    """Global rank of its rank 0."""

    @property
    def is_source(self) -> bool:
        return self.group.rank() == 0

    @property
    def size(self) -> int:
        return self.group.size()


def job_device() -> torch.device:
    """Where this rank's tensors live. Asked of a tensor, since with `--balance-device cpu` those made on "cuda" are on the CPU."""
    return torch.empty(0, device="cuda").device


def read(data_iterator: Iterator[Mapping[str, torch.Tensor]], num_microbatches: int) -> tuple[list[Sequences], Exception | None]:
    """The sequences of this rank's microbatches, on the host; or what went wrong, to be told to the others before it is raised."""
    microbatches: list[Sequences] = []
    try:
        for _ in range(num_microbatches):
            raw = next(data_iterator)
            microbatches.append(unpack({name: raw[name] for name in ("tokens", "labels", "loss_mask", "position_ids")}))
    except Exception as error:  # raised again by share_lengths, on all ranks
        return [], error
    return microbatches, None


def share_lengths(
    mine: Sequence[Sequences], failure: Exception | None, num_microbatches: int, pool: Pool, tensor_parallel: TensorParallel
) -> PoolLengths:
    """Lengths of all sequences that the pool read; collective over the joint pool and the tensor-parallel group.

    Raises:
        DataError: a rank could not read its microbatches, or stages read different ones; every rank raises, none waits for it.
    """
    device = job_device()
    table = torch.empty(0)
    if tensor_parallel.is_source:
        counts = [len(m.lengths) for m in mine]
        row = [FAILED] if failure is not None else [*counts, *(length for m in mine for length in m.lengths)]
        width = torch.tensor([len(row)], dtype=torch.int64, device=device)
        joint = pool.joint
        if joint.size > 1:  # a pool of one has no process group
            dist.all_reduce(width, op=dist.ReduceOp.MAX, group=joint.pool)
        padded = torch.zeros(int(width), dtype=torch.int64)
        padded[: len(row)] = torch.tensor(row, dtype=torch.int64)
        table = padded[None].to(device)
        if joint.size > 1:
            table = torch.empty(joint.size, int(width), dtype=torch.int64, device=device)
            dist.all_gather(list(table.unbind()), padded.to(device), group=joint.pool)
    if tensor_parallel.size > 1:
        size = torch.tensor([table.numel()], dtype=torch.int64, device=device)
        dist.broadcast(size, tensor_parallel.source, group=tensor_parallel.group)
        table = table if tensor_parallel.is_source else torch.empty(int(size), dtype=torch.int64, device=device)
        dist.broadcast(table, tensor_parallel.source, group=tensor_parallel.group)
    rows = table.cpu().numpy().reshape(pool.joint.size, -1)
    failed = [pool.joint.ranks[rank] for rank in np.flatnonzero(rows[:, 0] == FAILED)]
    if failed:
        if isinstance(failure, BalanceError):
            raise failure
        raise DataError(f"ranks {failed} could not read their microbatches; the reason is in the log of each") from failure
    first, last = rows[: pool.size], rows[-pool.size :]
    if not np.array_equal(first, last):
        differing = [pool.joint.ranks[rank] for rank in np.flatnonzero((first != last).any(axis=1))]
        raise DataError(
            f"ranks {differing} and their peers on the last pipeline stage read different samples; is the data set the same on all?"
        )
    return _split_by_microbatch(first, num_microbatches, pool)


def _split_by_microbatch(rows: Ints, num_microbatches: int, pool: Pool) -> PoolLengths:
    lengths: list[list[int]] = [[] for _ in range(num_microbatches)]
    owners: list[list[int]] = [[] for _ in range(num_microbatches)]
    for reader in pool.readers:
        at = num_microbatches
        for m, count in enumerate(rows[reader, :num_microbatches].tolist()):
            lengths[m] += rows[reader, at : at + count].tolist()
            owners[m] += [reader] * count
            at += count
    return PoolLengths(tuple(map(tuple, lengths)), tuple(np.array(o, dtype=np.int64) for o in owners))


def exchange(
    mine: Sequence[Sequences], shared: PoolLengths, plans: Sequence[MicrobatchPlan], pool: Pool, tensor_parallel: TensorParallel
) -> list[torch.Tensor]:
    """By microbatch, this rank's tokens [T, 3] int64 in the plan's row order; collective over the pool and the tensor-parallel group.

    Zeros on a pipeline stage that has no use for tokens.

    Args:
        mine: microbatches read here; empty on ranks that read none.
        shared: lengths and owners of all sequences.
        plans: of the pool's microbatches.
        pool: of this rank.
        tensor_parallel: its rank 0 exchanges and hands on.
    """
    device = job_device()
    owned = [layout(plan, pool.rank) for plan in plans]
    counts = [int((rows[:, Fragment.STOP] - rows[:, Fragment.START]).sum()) for rows in owned]
    rows = torch.zeros(sum(counts), COLUMNS, dtype=torch.int64, device=device)
    if not pool.has_tokens:
        return list(rows.split(counts))
    if tensor_parallel.is_source:
        send_counts, send_index = _sends(mine, shared, plans, pool)
        recv_counts, recv_index = _receives(owned, shared, pool.size)
        table = _table(mine).to(device)
        sent = table[torch.from_numpy(send_index).to(device)].contiguous()
        received = torch.empty_like(rows)
        if pool.size > 1:
            dist.all_to_all_single(received, sent, recv_counts, send_counts, group=pool.groups.pool)
        else:
            received = sent
        rows = received[torch.from_numpy(recv_index).to(device)].contiguous()
    if tensor_parallel.size > 1 and len(rows):
        dist.broadcast(rows, tensor_parallel.source, group=tensor_parallel.group)
    return list(rows.split(counts))


def mask_of(rows: torch.Tensor) -> torch.Tensor:
    """Loss mask [T] float32 of exchanged tokens."""
    return rows[:, 2].to(torch.int32).view(torch.float32)


def _table(mine: Sequence[Sequences]) -> torch.Tensor:
    """All tokens read here, one row each; the mask travels as its bits, so any weight arrives exactly."""
    parts = [torch.stack([m.tokens, m.labels, m.loss_mask.float().view(torch.int32).long()], dim=1) for m in mine]
    return torch.cat([torch.empty(0, COLUMNS, dtype=torch.int64), *parts])


def _sends(mine: Sequence[Sequences], shared: PoolLengths, plans: Sequence[MicrobatchPlan], pool: Pool) -> tuple[list[int], Ints]:
    """Tokens to send to each pool rank, and which rows of the table they are, destination by destination."""
    if not mine:
        return [0] * pool.size, np.empty(0, dtype=np.int64)
    starts = _starts(shared, pool.rank)
    counts = np.zeros(pool.size, dtype=np.int64)
    parts, destinations = [np.empty(0, dtype=np.int64)], [np.empty(0, dtype=np.int64)]
    for plan, owners, start in zip(plans, shared.owners, starts, strict=True):
        rows = layouts(plan)
        rows = rows[owners[rows[:, SEQ]] == pool.rank]
        row, tokens = ranges(start[rows[:, SEQ]] + rows[:, START], start[rows[:, SEQ]] + rows[:, STOP])
        parts.append(tokens)
        destinations.append(rows[row, RANK])
        counts += np.bincount(destinations[-1], minlength=pool.size)
    order = np.argsort(np.concatenate(destinations), kind="stable")
    return counts.tolist(), np.concatenate(parts)[order]


def _starts(shared: PoolLengths, rank: int) -> list[Ints]:
    """By microbatch and sequence: the table row of its first token; meaningless for sequences of other ranks."""
    result: list[Ints] = []
    base = 0
    for lengths, owners in zip(shared.lengths, shared.owners, strict=True):
        own = np.where(owners == rank, np.array(lengths, dtype=np.int64), 0)
        ends = np.cumsum(own) + base
        result.append(ends - own)
        base += int(own.sum())
    return result


def _receives(owned: Sequence[Ints], shared: PoolLengths, num_ranks: int) -> tuple[list[int], Ints]:
    """Tokens to receive from each pool rank, and for every row of this rank's layout its place in what arrives.

    Tokens arrive source by source; from one source in the order of microbatch and layout.
    """
    sources = np.concatenate([np.empty(0, dtype=np.int64), *(o[h[:, Fragment.SEQ]] for o, h in zip(shared.owners, owned, strict=True))])
    sizes = np.concatenate([np.empty(0, dtype=np.int64), *(h[:, Fragment.STOP] - h[:, Fragment.START] for h in owned)])
    order = np.argsort(sources, kind="stable")
    arrives = np.empty(len(order), dtype=np.int64)
    arrives[order] = np.cumsum(sizes[order]) - sizes[order]
    counts = np.bincount(sources, weights=sizes, minlength=num_ranks).astype(np.int64)
    return counts.tolist(), ranges(arrives, arrives + sizes)[1]
