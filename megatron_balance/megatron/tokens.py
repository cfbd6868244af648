"""A step's microbatches as this rank reads them, before they are planned.

Every replica's context-parallel rank 0 reads samples. With pipeline stages the first and the last
one read, each its own copy of the same samples; those between need lengths alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist

from megatron_balance.errors import BalanceError, DataError
from megatron_balance.megatron.data import Documents, unpack
from megatron_balance.megatron.sub_sequences import Reader
from megatron_balance.training.ledger import HeldDocument
from megatron_balance.training.nano_batches import NOTHING, Recalled
from megatron_balance.training.plans import Draw
from megatron_balance.training.pool import Pool, TensorParallel
from megatron_balance.training.sequences import Sequences


def job_device() -> torch.device:
    """The device of this rank's tensors.

    Asked of a tensor, since with `--balance-device cpu` those made on "cuda" are on the CPU.
    """
    return torch.empty(0, device="cuda").device


def read(
    data_iterator: Iterator[Mapping[str, torch.Tensor]],
    num_microbatches: int,
    reader: Reader,
    depths: int,
    first_sample: int | None,
) -> tuple[list[Sequences], Exception | None]:
    """The sequences of this rank's microbatches, on the host, or the error that prevented it.

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
    """The microbatches of this rank's replica by the numbers of their samples, in place of Megatron's
    iterator, which counts on where a step drew less.

    As Megatron's sampler deals them: `micro_batch_size` samples to each replica in turn.
    """
    assert draw.first is not None
    for microbatch in range(draw.num_microbatches):
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
    """Read documents of earlier steps again, each on one of the ranks that read.

    Collective over the joint pool where there are some.

    Raises:
        DataError: a rank could not read one. Every rank raises, so none waits for another.
    """
    if not wanted:
        return NOTHING
    assert data is not None, "documents wait only where they can be read again"
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
    """Rows [n, C] of a document that waited."""
    sample = unpack({name: tensor[None] for name, tensor in data[held.sample].items()}, depths)
    lengths = sample.lengths
    if held.place >= len(lengths) or lengths[held.place] != held.length:
        raise DataError(
            f"document {held.place} of sample {held.sample}: expected {held.length} tokens that waited, got a sample "
            f"of {list(lengths)}; the corpus has changed since it was drawn"
        )
    first = sum(lengths[: held.place])
    return sample.rows[first : first + held.length]
