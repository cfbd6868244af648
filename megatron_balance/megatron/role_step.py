"""The forward and backward of a training step under another strategy than the command line's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.utils import get_model_config
from megatron.training import get_timers

from megatron_balance.megatron.data import NUM_COLUMNS
from megatron_balance.megatron.forward_step import LOSS, forward_step
from megatron_balance.megatron.microbatches import Microbatches
from megatron_balance.megatron.stage_transfers import Crossings, PlannedTransfers, StageShapes
from megatron_balance.megatron.tokens import job_device
from megatron_balance.training.lengths import PoolLengths
from megatron_balance.training.microbatch import LocalMicrobatch, assemble, interleave
from megatron_balance.training.plans import PlannedStep
from megatron_balance.training.sequences import Sequences
from megatron_balance.training.tokens import TokenExchange

if TYPE_CHECKING:
    from megatron_balance.megatron.changes import Changes
    from megatron_balance.megatron.roles import Role
    from megatron_balance.megatron.session import Session


@dataclass(frozen=True, slots=True)
class Read:
    """The sequences of a step as this rank has read them, and those of all ranks of the base layout's
    pool, a microbatch for each nano-batch of the plan.
    """

    mine: Sequence[Sequences]
    apart: PoolLengths


def run_role(
    job: Session, changes: Changes, planned: PlannedStep, shared: PoolLengths, read: Read
) -> list[Mapping[str, torch.Tensor]]:
    """Pull weights, run this rank's role, push gradients. Collective over the world.

    Returns:
        For each microbatch what Megatron reports of it: on the base layout's last stage one, of the
        whole step on its first rank.
    """
    strategy = planned.step.strategy
    assert strategy is not None, "a step without strategy runs on the base layout"
    timers: Any = get_timers()
    timers("forward-backward", log_level=1).start(barrier=job.args.barrier_with_L1_time)
    job.keeping().decide(planned)  # with all ranks, those that are left over included
    role = changes.begin(strategy)
    changes.expect(0 if role.seat is None else len(planned.own_plans_of(role.seat.pipeline)))
    exchange, rows = _tokens(changes, role, planned, read)
    if role.seat is None:
        stored: list[Any] = []
        job.steps.ran(planned, shared, [])
    else:
        own = planned.own_plans_of(role.seat.pipeline)
        place = changes.place(strategy)
        assert place is not None

        def local(index: int) -> LocalMicrobatch:
            """This rank's rows of a microbatch, put together when the schedule asks for it."""
            parts = [assemble(rows[at], exchange.layouts[at], place.row_multiple) for at in own[index]]
            return interleave(parts, place.row_multiple)

        config: Any = get_model_config(role.model)
        counts = [[exchange.counts[at] for at in of] for of in own]
        shapes = StageShapes.of_step(counts, place.row_multiple, config)
        microbatches = Microbatches(job, planned, local, own, forward_only=False)
        stored = role.schedule(_transfers(role, config, shapes))(
            forward_step_func=forward_step,
            data_iterator=microbatches.of_chunk(),
            num_microbatches=len(own),
            seq_length=job.args.seq_length,
            micro_batch_size=job.args.micro_batch_size,
        )
        microbatches.trained(job, shared, job.planner(False))
    changes.roles.issue_pushes()
    reported = _summed(changes, role, stored)
    changes.end(reported[1])
    timers("forward-backward").stop()
    job.steps.changed(lambda: changes.figures(strategy))
    if job.pool.stage != job.pool.num_stages - 1:
        return []
    mine = reported if job.pool.rank == 0 else torch.zeros_like(reported)
    return [{LOSS: mine.float()}]


def _tokens(changes: Changes, role: Role, planned: PlannedStep, read: Read) -> tuple[TokenExchange, list[torch.Tensor]]:
    """The rows of this rank, straight from the ranks of the base layout that read them."""
    global_rank = np.array(changes.owner_ranks, dtype=np.int64)
    everywhere = PoolLengths(read.apart.lengths, tuple(global_rank[owners] for owners in read.apart.owners))
    ranks = changes.ranks(role.strategy)
    exchange = TokenExchange(everywhere, planned.plans, ranks, planned.step.pipeline_of)
    mine = read.mine if ranks.reads else ()
    return exchange, exchange.to_ranks(mine, NUM_COLUMNS, changes.tensor_parallel(role), job_device())


def _transfers(role: Role, config: Any, shapes: StageShapes) -> PlannedTransfers | None:
    """Transfers between the role's stages; None where there is one."""
    assert role.seat is not None
    stages = role.seat.scheme.pipeline
    if stages == 1:
        return None
    crossings = Crossings.of_schedule(len(shapes.rows), role.seat.stage, stages, 1, stages)
    return PlannedTransfers(role.groups.pp, config, shapes, crossings)


def _summed(changes: Changes, role: Role, stored: Sequence[Mapping[str, torch.Tensor]]) -> torch.Tensor:
    """The step's loss, summed over tokens, and its tokens [2] float64. Collective over the world.

    A pipeline's last stage knows them, on each context-parallel rank its part; of ranks that have
    the same one counts.
    """
    found = torch.zeros(2, dtype=torch.float64, device=job_device())
    if role.seat is not None and role.seat.tensor == 0:
        for each in chain.from_iterable(one.values() for one in stored):
            found += each.double()
    dist.all_reduce(found, group=changes.roles.everyone.pool)
    return found
