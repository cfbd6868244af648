"""Megatron's own scheduler of context-parallel groups, as `planners.megatron_dynamic.plan_with`
takes one.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from importlib.metadata import version
from itertools import groupby
from typing import Any

from megatron_balance.cost.base import CostModel
from megatron_balance.ir.batch import Batch
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.model import Model
from megatron_balance.ir.plan import MicrobatchPlan
from megatron_balance.planners import megatron_dynamic
from megatron_balance.planners.megatron_dynamic import Microbatch, Scheduler
from megatron_balance.planning.choice import PlannerChoice

log = logging.getLogger(__name__)

PROBE = ((8192, 4096, 2048, 1024, 512, 256, 128, 64, 32, 16), 1024, 8)
"""Lengths, tokens of a rank and ranks that a scheduler which works makes groups for."""


def by_own_scheduler(choice: PlannerChoice) -> PlannerChoice | None:
    """The planner with Megatron's own scheduler deciding its groups; None: its options follow no
    scheduler of Megatron's, or none works.

    A batch that Megatron's scheduler fails on is planned by our rules for the same, and the log
    says so, once.
    """
    plan_with = choice.planner.plan_with(choice.options) if choice.planner.plan_with is not None else None
    scheduler = own_scheduler() if plan_with is not None else None
    if plan_with is None or scheduler is None:
        return None
    groups = _Guarded(scheduler)

    def plan(batch: Batch, cluster: Cluster, model: Model, cost: CostModel, options: Any) -> MicrobatchPlan:
        del cost  # groups follow from lengths
        return plan_with(groups, batch, cluster, model, options)

    return dataclasses.replace(choice, planner=dataclasses.replace(choice.planner, plan=plan))


class _Guarded:
    """Megatron's scheduler; our rules where it fails."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._said = False

    def __call__(self, lengths: Sequence[int], tokens: int, num_ranks: int) -> list[Microbatch]:
        try:
            return self._scheduler(lengths, tokens, num_ranks)
        except Exception as error:  # Megatron's assertions and index errors alike
            if not self._said:
                log.warning(
                    "Megatron's scheduler fails for %d sequences on %d ranks of %d tokens (%s: %s); use our rules for "
                    "such batches",
                    *(len(lengths), num_ranks, tokens, type(error).__name__, error),
                )
                self._said = True
            return megatron_dynamic.RULES["hybrid"](lengths, tokens, num_ranks)


def own_scheduler() -> Scheduler | None:
    """The scheduler of the installed megatron-core, or None if it has none or one that fails; a log
    line says which.

    Through megatron-core 0.19 this is `BalancedCPScheduler`, whose rules are `rules: hybrid`. Its
    code decides; what surrounds it there (data loader, forward pass) is not used, and does not run
    in 0.17 to 0.19.
    """
    name = f"megatron-core {version('megatron-core')}"
    try:
        _schedule(*PROBE)
    except Exception as error:  # whatever the installed version raises, we do without it
        log.warning(
            "%s has no scheduler of context-parallel groups that works (%s: %s); use our rules",
            name,
            type(error).__name__,
            error,
        )
        return None
    log.info("context-parallel groups by BalancedCPScheduler of %s", name)
    return _schedule


class _Size:
    """All that the scheduler asks of its process group."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks

    def size(self) -> int:
        return self._num_ranks


def _schedule(lengths: Sequence[int], tokens: int, num_ranks: int) -> list[Microbatch]:
    """Microbatches of groups. Raises what Megatron raises, where its rules do not come out (ranks
    that are no power of two).
    """
    from megatron.core.pipeline_parallel.hybrid_cp_schedule import BalancedCPScheduler

    scheduler = BalancedCPScheduler(tokens, _Size(num_ranks))  # pyright: ignore[reportArgumentType]
    _, by_rank = scheduler.get_groups_and_subsamples(list(enumerate(lengths)), None)
    return [tuple((len(list(ranks)), tuple(seqs)) for seqs, ranks in groupby(microbatch)) for microbatch in by_rank]
