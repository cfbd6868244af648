"""megatron: microbatches as full as they get, as many for every replica: packed samples on CP x DP,
the baseline of systems that balance replicas.

Source: Megatron-LM with packed sequences (`THD`); "max-length packing and even dispatching of
packed sequences" of Hydraulis (arXiv 2412.07894), section 8.3. What we implement: all sequences of
a step are packed by first fit, the longest first, into samples that are dealt to the replicas in
turn (those of `context_parallel`, or the pipelines of a `strategy`); inside one every sequence goes
over all ranks (`te_ring`). What we leave out: cutting documents where a sample ends; padding.

Where we differ and why: Megatron packs when the data set is built. Samples are as long as the
step's tokens fill so many of them. Microbatches that are dealt already keep their sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from megatron_balance.errors import ConfigError, InfeasibleError
from megatron_balance.ir.step import EMPTY, Carry, Lengths, StepPlan
from megatron_balance.ir.strategy import Strategy
from megatron_balance.planners.base import StepContext, planner_within, renumbered
from megatron_balance.planners.pipelines import (
    UNLIMITED,
    candidates_of,
    holders,
    pipelines_of,
    side_by_side,
)
from megatron_balance.solvers.groups import context_sizes, least_context, microbatches_of, samples_of
from megatron_balance.solvers.packing import first_fit_decreasing

WITHIN: tuple[str, dict[str, Any]] = ("te_ring", {})


@dataclass(frozen=True, slots=True)
class MegatronOptions:
    tokens_per_rank: int | None = None
    """Capacity of a rank in tokens; a full microbatch has this times the context-parallel ranks of a
    pipeline."""
    strategy: str | None = None
    """Replicas and their degrees, such as `4*tp1-pp2-cp2`. None: the layout of the training job;
    elsewhere replicas of `context_parallel` ranks."""
    context_parallel: int | None = None
    """Context-parallel ranks of a replica (--context-parallel-size). None: the fewest that hold the
    longest sequence; in `simulate`, `compare` and `report`, of the sizes that hold the longest of all
    batches and fit in memory, the one with the fastest step."""


def plan_step(lengths: Lengths, context: StepContext, carry: Carry, /) -> tuple[StepPlan, Carry]:
    """Pack the sequences of a step, those that wait first, and deal the microbatches in turn."""
    options: MegatronOptions = context.options
    given = () if options.strategy is None else (Strategy.parse(options.strategy),)
    candidates = candidates_of(given, context, "strategy")
    if candidates and options.context_parallel is not None:
        raise ConfigError(
            f"context_parallel {options.context_parallel}: the strategy {candidates[0]} says the replicas already; "
            "leave out one of the two"
        )
    if not candidates:
        return _replicas(lengths, context, carry)
    every = [*carry.waiting, *enumerate(chain.from_iterable(lengths))]
    sizes = [length for _, length in every]
    pipelines = pipelines_of(candidates[0], context).of_one_size()
    most = pipelines.max_tokens
    if most >= UNLIMITED:
        raise ConfigError("tokens_per_rank: full microbatches need a limit; give the tokens that a rank holds")
    holders([pipelines], sizes)
    packed = [tuple(sorted(each)) for each in first_fit_decreasing(sizes, most)]
    count = len(pipelines.costs)
    return side_by_side(every, pipelines, tuple(tuple(packed[at::count]) for at in range(count)), WITHIN), EMPTY


def _replicas(lengths: Lengths, context: StepContext, carry: Carry) -> tuple[StepPlan, Carry]:
    options: MegatronOptions = context.options
    own = context.own_microbatches and not carry.waiting
    if options.context_parallel is not None:
        size = options.context_parallel
    else:
        size = context.cluster.num_ranks if carry.waiting else _least_context(lengths, context, own=own)
    within = planner_within(context, WITHIN[0], {**WITHIN[1], "context_parallel": size})
    if not own:
        return within(lengths, context, carry)
    pooled = tuple(chain.from_iterable(lengths))
    chosen = microbatches_of(pooled, size, context.cluster, options.tokens_per_rank)
    step, after = within(tuple(tuple(pooled[seq] for seq in each) for each in chosen), context, carry)
    return renumbered(step, tuple(chain.from_iterable(chosen))), after


def _least_context(lengths: Lengths, context: StepContext, *, own: bool) -> int:
    """The fewest ranks of a replica that hold the longest sequence and each dealt microbatch."""
    cluster, each = context.cluster, context.options.tokens_per_rank
    least = least_context(lengths, cluster, each)
    if own:
        return least
    wider = [size for size in context_sizes(cluster) if least <= size < cluster.num_ranks]
    fits = (size for size in wider if all(_packs(given, size, context) for given in lengths))
    return next(fits, cluster.num_ranks)


def _packs(lengths: Sequence[int], size: int, context: StepContext) -> bool:
    try:
        samples_of(lengths, size, context.cluster, context.options.tokens_per_rank)
    except InfeasibleError:
        return False
    return True
