"""Megatron's schedule over planned microbatches: the narrowest seam into its training and evaluation loops."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import mpu
from megatron.training.training import update_seqlen_stats_from_cu_seqlens

from megatron_balance.compile.pipeline import layout
from megatron_balance.errors import ConfigError
from megatron_balance.ir.arrays import Ints
from megatron_balance.ir.intervals import ranges
from megatron_balance.megatron import nano_batches, session
from megatron_balance.megatron.forward_step import PlannedMicrobatch, forward_step
from megatron_balance.megatron.packed import BalancedSeqParams
from megatron_balance.megatron.pipeline_ticks import TickRun
from megatron_balance.megatron.tokens import PoolLengths, TensorParallel, exchange, mask_of, read, share_lengths
from megatron_balance.runtime.bind import Bound, Counters, bind
from megatron_balance.runtime.lowered import BOTH_PHASES
from megatron_balance.training.plans import PlannedStep


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
        # One iterator a model chunk; a script's own provider may leave out those of chunks that neither embed nor compute the loss.
        iterators = data_iterator if isinstance(data_iterator, list) else [data_iterator]
        iterator = next((each for each in iterators if each is not None), iter(()))
        mine, failure = read(iterator, num_microbatches) if tensor_parallel.is_source and pool.has_tokens else ([], None)
        if pool.rank not in pool.readers:
            mine = []  # another rank of this replica read the same samples
        shared = share_lengths(mine, failure, num_microbatches, pool, tensor_parallel)
        planned = job.planner(forward_only).plan(shared.lengths)
        rows = exchange(*nano_batches.cut(mine, shared, planned.parts, pool.rank), planned.plans, pool, tensor_parallel)
        if not forward_only:
            _count_flops(shared, pool.readers[pool.replicas[pool.rank]])
        if planned.ticks:
            return _run_ticks(job, planned, shared, rows, model, forward_only=forward_only, **kwargs)
        microbatches = Microbatches(job, planned, rows, forward_only=forward_only)
        chunks = [microbatches.of_chunk() for _ in model] if isinstance(model, list) else [microbatches.of_chunk()]
        result = inner(
            forward_step_func=forward_step,
            data_iterator=chunks if len(chunks) > 1 else chunks[0],
            model=model,
            num_microbatches=num_microbatches,
            forward_only=forward_only,
            **kwargs,
        )
        if not forward_only:
            job.steps.ran(planned, shared, microbatches.counters)
        return result

    return schedule


def _run_ticks(
    job: session.Session,
    planned: PlannedStep,
    shared: PoolLengths,
    rows: Sequence[torch.Tensor],
    model: Any,
    *,
    forward_only: bool,
    **kwargs: Any,
) -> Any:
    """The step with our schedule in place of Megatron's: all pipeline stages attend together."""
    given = [name for name in ("pg_collection", "p2p_communicator", "adjust_tensor_shapes_fn") if kwargs.get(name) is not None]
    if given:
        raise ConfigError(
            f"pretrain was handed {', '.join(given)}: stages cannot attend together over other groups; set 'pipeline: stages'"
        )
    owned = [layout(plan, job.pool.rank) for plan in planned.plans]

    def microbatch(index: int) -> PlannedMicrobatch:
        return nano_batches.together([assemble(rows[at], owned[at], job.row_multiple) for at in planned.plans_of[index]], job.row_multiple)

    run = TickRun(job, planned.ticks, microbatch, model, forward_only=forward_only)
    result = run.run(**kwargs)
    if not forward_only:
        job.steps.ran(planned, shared, run.counters)
    return result


class Microbatches:
    """The step's microbatches, each bound when the schedule first asks for it, and shared by the model chunks of this rank."""

    def __init__(self, job: session.Session, planned: PlannedStep, rows: Sequence[torch.Tensor], *, forward_only: bool) -> None:
        """Nothing is bound yet. `rows`: of every plan."""
        self._job = job
        self._forward_only = forward_only
        self._plans = planned.plans
        self._rows = rows
        self._plans_of = planned.plans_of
        self._bound: dict[int, PlannedMicrobatch] = {}
        self._chunks = 0
        self._asked = [0] * len(self._plans_of)
        self.counters: list[Counters] = []

    def of_chunk(self) -> Iterator[PlannedMicrobatch]:
        """All microbatches in order, for one model chunk. Every chunk's is made before any is used."""
        self._chunks += 1
        return map(self._take, range(len(self._plans_of)))

    def _take(self, index: int) -> PlannedMicrobatch:
        if index not in self._bound:
            self._bound[index] = self._bind(index)
        self._asked[index] += 1
        return self._bound.pop(index) if self._asked[index] == self._chunks else self._bound[index]

    def _bind(self, index: int) -> PlannedMicrobatch:
        parts = [self._bind_part(at, nano_batch) for nano_batch, at in enumerate(self._plans_of[index])]
        return nano_batches.together(parts, self._job.row_multiple)

    def _bind_part(self, index: int, nano_batch: int) -> PlannedMicrobatch:
        plan, rows, job = self._plans[index], self._rows[index], self._job
        bound = bind(
            plan,
            job.pool.rank,
            job.shape,
            dtype=job.dtype,
            device=rows.device,
            groups=job.pool.groups,
            policy="replay" if self._forward_only else job.config.backward,  # nothing is kept for a backward that does not come
            kernel=job.config.kernel,
            nano_batch=nano_batch,
            phases=("forward",) if self._forward_only else BOTH_PHASES,
        )
        self.counters.append(bound.counters)
        return assemble(rows, bound.owned, job.row_multiple, bound)


def assemble(rows: torch.Tensor, owned: Ints, multiple: int, bound: Bound | None = None) -> PlannedMicrobatch:
    """A microbatch of the rows [T, 3] of this rank, padded to a positive multiple. `owned`: rows (seq, start, stop) of what they are.

    A rank without tokens still takes part in every collective, so it computes masked padding; sequence parallelism needs a multiple of the
    tensor-parallel size.
    """
    padding = multiple if not len(rows) else -len(rows) % multiple
    positions = torch.from_numpy(ranges(owned[:, 1], owned[:, 2])[1]).to(rows.device)
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
