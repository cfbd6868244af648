"""Megatron's schedule over planned microbatches: the narrowest seam into its training and evaluation loops."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import mpu
from megatron.training.training import update_seqlen_stats_from_cu_seqlens

from megatron_balance.core.plan import MicrobatchPlan
from megatron_balance.errors import ConfigError
from megatron_balance.megatron import session
from megatron_balance.megatron.forward_step import PlannedMicrobatch, forward_step
from megatron_balance.megatron.packed import BalancedSeqParams
from megatron_balance.megatron.tokens import PoolLengths, TensorParallel, exchange, mask_of, read, share_lengths
from megatron_balance.passes.atoms import ranges
from megatron_balance.runtime.bind import Bound, bind


def balanced_schedule(inner: Callable[..., Any]) -> Callable[..., Any]:
    """A forward-backward function that plans the step's microbatches over the pool and runs `inner` on them.

    Called inside Megatron's rerun loop: on a rerun the same raw microbatches come again, and the same plan with them.
    """

    def schedule(
        *,
        forward_step_func: Callable[..., Any],  # noqa: ARG001  ours takes its place; the log said so when the session began
        data_iterator: Any,
        model: Any,
        num_microbatches: int,
        forward_only: bool = False,
        **kwargs: Any,
    ) -> Any:
        job = session.current()
        if kwargs.get("collect_non_loss_data"):
            raise ConfigError(
                "non-loss data is collected on the last rank alone, but a plan needs all ranks; pass no process_non_loss_data_func"
            )
        job.prepare(model)
        job.steps.begin(forward_only)
        pool = job.pool
        tensor_parallel = TensorParallel(
            cast("dist.ProcessGroup", mpu.get_tensor_model_parallel_group()), mpu.get_tensor_model_parallel_src_rank()
        )
        iterator = data_iterator[0] if isinstance(data_iterator, list) else data_iterator
        mine, failure = read(iterator, num_microbatches) if tensor_parallel.is_source else ([], None)
        if pool.rank not in pool.readers:
            mine = []  # another rank of this replica read the same samples
        shared = share_lengths(mine, failure, num_microbatches, pool, tensor_parallel)
        planned = job.planner(forward_only).plan(shared.lengths)
        rows = exchange(mine, shared, planned.plans, pool, tensor_parallel)
        if not forward_only:
            _count_flops(shared, pool.readers[pool.replicas[pool.rank]])
        microbatches = _Microbatches(job, planned.plans, rows)
        result = inner(
            forward_step_func=forward_step,
            data_iterator=microbatches,
            model=model,
            num_microbatches=num_microbatches,
            forward_only=forward_only,
            **kwargs,
        )
        if not forward_only:
            job.steps.ran(planned, shared, microbatches.bounds)
        return result

    return schedule


class _Microbatches(Iterator[PlannedMicrobatch]):
    """The step's microbatches, each bound when the schedule asks for it."""

    def __init__(self, job: session.Session, plans: Sequence[MicrobatchPlan], rows: Sequence[torch.Tensor]) -> None:
        self._job = job
        self._left = iter(list(zip(plans, rows, strict=True)))
        self.bounds: list[Bound] = []

    def __next__(self) -> PlannedMicrobatch:
        plan, rows = next(self._left)
        job = self._job
        bound = bind(
            plan,
            job.pool.rank,
            job.shape,
            dtype=job.dtype,
            device=rows.device,
            groups=job.pool.groups,
            policy=job.config.backward,
            kernel=job.config.kernel,
        )
        self.bounds.append(bound)
        return assemble(rows, bound, job.row_multiple)


def assemble(rows: torch.Tensor, bound: Bound, multiple: int) -> PlannedMicrobatch:
    """A microbatch of the rows [T, 3] of this rank, padded to a positive multiple.

    A rank without tokens still takes part in every collective, so it computes masked padding; sequence parallelism needs a multiple of the
    tensor-parallel size.
    """
    padding = multiple if not len(rows) else -len(rows) % multiple
    home = np.asarray(bound.home)
    positions = torch.from_numpy(ranges(home[:, 1], home[:, 2])[1]).to(rows.device)
    assert len(positions) == len(rows), f"the exchange brought {len(rows)} tokens, the layout has {len(positions)}"
    rows = torch.nn.functional.pad(rows, (0, 0, 0, padding))
    positions = torch.nn.functional.pad(positions, (0, padding))
    padding_mask = torch.arange(len(rows), device=rows.device) >= len(rows) - padding
    return PlannedMicrobatch(
        tokens=rows[None, :, 0].contiguous(),
        labels=rows[None, :, 1].contiguous(),
        loss_mask=mask_of(rows)[None],
        position_ids=positions[None],
        padding_mask=padding_mask[None],
        params=BalancedSeqParams(qkv_format="sbhd", bound=bound, position_ids=positions),
    )


def _count_flops(shared: PoolLengths, reader: int) -> None:
    """Tell Megatron's throughput line the sequences of this rank's replica; it expects them on each of the replica's ranks."""
    for lengths, owners in zip(shared.lengths, shared.owners, strict=True):
        own = np.array(lengths, dtype=np.int64)[owners == reader]
        # At least one entry: a rank that reports nothing would miss the all-reduce that Megatron sums these with.
        update_seqlen_stats_from_cu_seqlens(torch.from_numpy(np.concatenate([[0], np.cumsum(own) if len(own) else [0]])))
