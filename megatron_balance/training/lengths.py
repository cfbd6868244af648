"""Lengths of all sequences that the pool read, and which plan each rank had made before."""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist

from megatron_balance.errors import BalanceError, ConfigError, DataError
from megatron_balance.ir.arrays import Ints
from megatron_balance.training.pool import Pool, TensorParallel
from megatron_balance.training.sequences import Sequences

_FAILED = -1
"""In place of a rank's first number: it could not read."""
_HEADER = 6
"""Numbers before a rank's counts, each as the least and the most over its tensor-parallel ranks:
microbatches of a step, and two halves of the plan's fingerprint.
"""
_NOT_PLANNED = -1
"""In place of both halves of a fingerprint."""


@dataclass(frozen=True, slots=True)
class PoolLengths:
    """The sequences that the pool read in one step.

    `lengths[m]`: of all sequences of microbatch m, replica by replica. `owners[m]` [sequences]: the
    pool rank that holds each. `announced`: by global rank, the fingerprint of the plan that it made
    before; empty: it made none.
    """

    lengths: tuple[tuple[int, ...], ...]
    owners: tuple[Ints, ...]
    announced: Mapping[int, str] = field(default_factory=dict[int, str])


def share_lengths(  # noqa: PLR0913  what was read, what was made of it, and whom to tell
    mine: Sequence[Sequences],
    failure: Exception | None,
    num_microbatches: int,
    pool: Pool,
    tensor_parallel: TensorParallel,
    device: torch.device,
    *,
    fingerprint: str = "",
) -> PoolLengths:
    """Share the lengths of all sequences.

    Collective over the joint pool and the tensor-parallel group.

    Args:
        mine: by microbatch, what this rank read; empty on ranks whose microbatches do not count.
        failure: the reason why this rank could not read, told to the others before it is raised.
        num_microbatches: of a step, on this rank.
        pool: of this rank.
        tensor_parallel: its rank 0 shares, and hands on.
        device: that the process groups work on.
        fingerprint: of the plan that this rank made for the step (16 hex digits); empty: none yet.

    Raises:
        DataError: a rank could not read its microbatches, or stages read different ones.
        ConfigError: ranks that run different numbers of microbatches; each is a collective of all.

    Every rank raises, so none waits for another.
    """
    table = torch.empty(0)
    header = _least_and_most((num_microbatches, *_halves(fingerprint)), tensor_parallel, device)
    if tensor_parallel.is_source:
        counts = [len(m.lengths) for m in mine]
        row = [*header, *counts, *(length for m in mine for length in m.lengths)]
        if failure is not None:
            row = [_FAILED] * _HEADER
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
    _check_read(rows, failure, pool)
    announced = {pool.joint.ranks[rank]: _announced(row) for rank, row in enumerate(rows[:, 2:_HEADER].tolist())}
    return _split_by_microbatch(rows[: pool.size, _HEADER:], num_microbatches, pool, announced)


def _halves(fingerprint: str) -> tuple[int, int]:
    return (int(fingerprint[:8], 16), int(fingerprint[8:], 16)) if fingerprint else (_NOT_PLANNED, _NOT_PLANNED)


def _announced(halves: Sequence[int]) -> str:
    """The fingerprint of one rank and its tensor-parallel peers; `halves`: of the header."""
    least, most = halves[::2], halves[1::2]
    if least != most:
        return "others than its tensor-parallel peers"
    return "" if _NOT_PLANNED in least else "".join(f"{half:08x}" for half in least)


def _least_and_most(numbers: Sequence[int], tensor_parallel: TensorParallel, device: torch.device) -> list[int]:
    """Of each number its least and its most over the tensor-parallel group, in turns."""
    both = [end for number in numbers for end in (number, -number)]
    if tensor_parallel.size > 1:
        ends = torch.tensor(both, dtype=torch.int64, device=device)
        dist.all_reduce(ends, op=dist.ReduceOp.MIN, group=tensor_parallel.group)
        both = ends.tolist()
    return [-end if at % 2 else end for at, end in enumerate(both)]


def _check_read(rows: Ints, failure: Exception | None, pool: Pool) -> None:
    """Reject a step that a rank could not read, or that ranks cut or stages read differently."""
    failed = [pool.joint.ranks[rank] for rank in np.flatnonzero(rows[:, 0] == _FAILED)]
    if failed:
        if isinstance(failure, BalanceError):
            raise failure
        if failure is not None:
            own = pool.joint.ranks[pool.joint.rank]
            raise DataError(f"rank {own} could not read its microbatches: {chain_of(failure)}") from failure
        raise DataError(f"ranks {failed} could not read their microbatches; the error of each of them says why")
    _check_numbers(rows[:, :2], pool)
    first, last = rows[: pool.size, _HEADER:], rows[-pool.size :, _HEADER:]
    if not np.array_equal(first, last):
        differing = [pool.joint.ranks[rank] for rank in np.flatnonzero((first != last).any(axis=1))]
        raise DataError(
            f"ranks {differing} and their peers on the last pipeline stage read different samples; give all ranks the "
            "same data set"
        )


def chain_of(error: BaseException) -> str:
    """An error and its causes, the first cause last, each with the line that raised it."""
    told: list[str] = []
    seen: BaseException | None = error
    while seen is not None:
        frames = traceback.extract_tb(seen.__traceback__)
        where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
        told.append(f"{type(seen).__name__}: {' '.join(str(seen).split())}{where}")
        seen = seen.__cause__ or (None if seen.__suppress_context__ else seen.__context__)
    return ", caused by ".join(told)


def _check_numbers(numbers: Ints, pool: Pool) -> None:
    """Reject different numbers of microbatches; `numbers` [joint ranks, 2]: fewest and most."""
    if (numbers == numbers[0, 0]).all():
        return
    by_number: dict[str, list[int]] = {}
    for rank, (fewest, most) in enumerate(numbers.tolist()):
        of = str(fewest) if fewest == most else f"{fewest} to {most} (with their tensor-parallel ranks)"
        by_number.setdefault(of, []).append(pool.joint.ranks[rank])
    told = ", ".join(f"ranks {ranks} run {number}" for number, ranks in by_number.items())
    raise ConfigError(
        f"every rank must run the same number of microbatches in a step, but {told}; give all ranks as many (Megatron: "
        "start all ranks with the same --global-batch-size, --micro-batch-size and --rampup-batch-size)"
    )


def _split_by_microbatch(rows: Ints, num_microbatches: int, pool: Pool, announced: Mapping[int, str]) -> PoolLengths:
    lengths: list[list[int]] = [[] for _ in range(num_microbatches)]
    owners: list[list[int]] = [[] for _ in range(num_microbatches)]
    for reader in pool.readers:
        at = num_microbatches
        for m, count in enumerate(rows[reader, :num_microbatches].tolist()):
            lengths[m] += rows[reader, at : at + count].tolist()
            owners[m] += [reader] * count
            at += count
    shared = tuple(np.array(each, dtype=np.int64) for each in owners)
    return PoolLengths(tuple(map(tuple, lengths)), shared, announced)
