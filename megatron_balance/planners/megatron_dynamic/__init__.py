"""megatron_dynamic: Megatron's own answer to unequal lengths, a context-parallel group of its own
size for each sequence.

Source: Megatron-LM, "dynamic context parallelism" (dev branch, `default_dynamic_cp`) and "hybrid
context parallelism" (megatron-core 0.16 to 0.19 and main, `BalancedCPScheduler`).

What we implement: both schedulers' rules, `rules: dynamic` (the default) and `rules: hybrid`,
written from what they do. They are deterministic functions of lengths, the tokens that a rank may
hold and the number of ranks. Sizes are powers of two or all ranks, groups are neighbouring ranks
from the first one on, work is length^2 / size, and what does not come out even waits for a further
microbatch. `plan_batch` gives those microbatches. `plan_with` takes any scheduler of the same
signature: training with `rules: hybrid` hands it Megatron's own (`megatron.own_scheduler`, where
the installed megatron-core has one that works), so that Megatron's code itself decides. Outside
training a plan does not depend on what is installed; tests hold `hybrid` against the installed one,
group by group.

What we leave out: padding of each sequence to a multiple of twice its group (lengths need none
here), the splitting of microbatches for virtual pipeline stages, and a least group size.

Where we differ and why: `plan` makes one microbatch, so the microbatches of a schedule run one
after the other in it, on tokens that are there all at once: Megatron's limit is set to the capacity
over 1, 2, 3, ... until all of them together fit a rank; if they never do, all sequences go over all
ranks. Megatron fails where a number of ranks is no power of two and groups do not come out; there
all ranks together take the microbatch. Sequences that share a group share one ring, as in
`dynamic`; `hybrid` runs each by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Literal

from megatron_balance.cost.base import CostModel
from megatron_balance.errors import ConfigError
from megatron_balance.ir.batch import Batch
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.model import Model
from megatron_balance.ir.plan import MicrobatchPlan
from megatron_balance.ir.step import StepPlan
from megatron_balance.planners.megatron_dynamic import dynamic, hybrid
from megatron_balance.planners.megatron_dynamic.group import Microbatch, Scheduler
from megatron_balance.solvers.capacity import check_each, check_pool
from megatron_balance.solvers.groups import rank_tokens
from megatron_balance.solvers.placed import Frame

RULES: dict[str, Scheduler] = {"dynamic": dynamic.schedule, "hybrid": hybrid.schedule}

MOST_PARTS = 4
"""Megatron's limit is lowered to the capacity over this at most; groups that small spread nearly
everything over all ranks.
"""


@dataclass(frozen=True, slots=True)
class MegatronDynamicOptions:
    """Options of megatron_dynamic."""

    tokens_per_rank: int | None = None
    """Capacity of a rank in tokens, Megatron's `--max-seqlen-per-dp-cp-rank`; `slack` decides if
    not given.
    """
    rules: Literal["dynamic", "hybrid"] = "dynamic"
    """Megatron's scheduler: `default_dynamic_cp` of its dev branch, or the releases'
    `BalancedCPScheduler`.
    """
    slack: float = 1.5
    """Without `tokens_per_rank`: capacity of a rank over the batch's mean tokens per rank, at least
    1.
    """


def plan(
    batch: Batch, cluster: Cluster, model: Model, cost: CostModel, options: MegatronDynamicOptions
) -> MicrobatchPlan:
    """One microbatch by our rules.

    Raises:
        InfeasibleError: a sequence or the batch is larger than what the ranks hold.
        ConfigError: a slack below 1.
    """
    del cost  # Megatron's workload is length^2 / size
    return plan_with(RULES[options.rules], batch, cluster, model, options)


def plan_by(options: MegatronDynamicOptions) -> Callable[..., MicrobatchPlan] | None:
    """`plan_with`, if a scheduler other than ours may stand in for these rules: Megatron's releases
    have one for `hybrid`.
    """
    return plan_with if options.rules == "hybrid" else None


def plan_with(
    scheduler: Scheduler, batch: Batch, cluster: Cluster, model: Model, options: MegatronDynamicOptions
) -> MicrobatchPlan:
    """`plan` with any scheduler."""
    capacity = _capacity(batch, cluster, options)
    check_pool(batch.lengths, cluster.num_ranks, options.tokens_per_rank)
    placement = [tuple(range(cluster.num_ranks))] * len(batch.lengths)
    for parts in range(1, MOST_PARTS + 1):
        microbatches = scheduler(batch.lengths, max(1, capacity // parts), cluster.num_ranks)
        if _most_tokens(microbatches, batch.lengths, cluster.num_ranks) <= capacity:
            placement = _placement(microbatches, len(batch.lengths))[0]
            break
    return Frame("megatron_dynamic", cluster, model).microbatch(batch.lengths, placement)


def plan_batch(
    batch: Batch, cluster: Cluster, model: Model, cost: CostModel, options: MegatronDynamicOptions
) -> StepPlan:
    """The microbatches that Megatron would run; the batch may be larger than the pool.

    Raises:
        InfeasibleError: a sequence is larger than what the ranks hold.
        ConfigError: as `plan`.
    """
    del cost
    capacity = _capacity(batch, cluster, options)
    check_each(batch.lengths, cluster.num_ranks, options.tokens_per_rank)
    microbatches = RULES[options.rules](batch.lengths, capacity, cluster.num_ranks)
    placement, microbatch_of = _placement(microbatches, len(batch.lengths))
    return Frame("megatron_dynamic", cluster, model).batch(batch.lengths, placement, microbatch_of)


def _capacity(batch: Batch, cluster: Cluster, options: MegatronDynamicOptions) -> int:
    if options.slack < 1:
        raise ConfigError(
            f"megatron_dynamic: slack {options.slack}: a capacity below the average holds no batch; use at least 1"
        )
    return options.tokens_per_rank or max(1, ceil(options.slack * batch.num_tokens / cluster.num_ranks))


def _most_tokens(microbatches: Sequence[Microbatch], lengths: Sequence[int], num_ranks: int) -> int:
    """The most tokens that a rank holds of all microbatches together."""
    held = [0] * num_ranks
    for groups in microbatches:
        first = 0
        for size, seqs in groups:
            tokens = sum(rank_tokens(lengths[seq], size) for seq in seqs)
            for rank in range(first, first + size):
                held[rank] += tokens
            first += size
    return max(held)


def _placement(microbatches: Sequence[Microbatch], num_seqs: int) -> tuple[list[tuple[int, ...]], list[int]]:
    """The ranks and the microbatch of each sequence."""
    placement: list[tuple[int, ...]] = [()] * num_seqs
    microbatch_of = [0] * num_seqs
    for index, groups in enumerate(microbatches):
        first = 0
        for size, seqs in groups:
            ranks = tuple(range(first, first + size))
            first += size
            for seq in seqs:
                placement[seq], microbatch_of[seq] = ranks, index
    return placement, microbatch_of
