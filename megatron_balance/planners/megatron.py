"""megatron: microbatches as full as they get, as many for every replica: Megatron-LM's way with packed
samples, and the baseline of systems that balance replicas.

Source: Megatron-LM with packed sequences (`THD`), context parallelism inside a replica and data
parallelism over replicas. Hydraulis (arXiv 2412.07894), section 8.3, compares with it as "max-length
packing and even dispatching of packed sequences".

What we implement: all sequences of a step are packed by first fit, the longest first, into
microbatches of the most tokens that every pipeline holds; these are dealt to the pipelines in turn.
Inside a microbatch every sequence goes over all context-parallel ranks (`te_ring`).

What we leave out: cutting documents where a sample ends, so that samples are full to the last token;
microbatches without sequences that would make their numbers equal.

Where we differ and why: Megatron packs when the data set is built, so that a document meets the ones
beside it in the file. Without a strategy there is one pipeline of all ranks, and its microbatches
are as dealt.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import Any

from megatron_balance.errors import ConfigError
from megatron_balance.ir.step import EMPTY, Carry, Lengths, StepPlan
from megatron_balance.ir.strategy import Strategy
from megatron_balance.planners.base import StepContext
from megatron_balance.planners.pipelines import (
    UNLIMITED,
    candidates_of,
    holders,
    pipelines_of,
    planner_within,
    side_by_side,
)
from megatron_balance.solvers.packing import first_fit_decreasing

WITHIN: tuple[str, dict[str, Any]] = ("te_ring", {})


@dataclass(frozen=True, slots=True)
class MegatronOptions:
    """Options of megatron."""

    tokens_per_rank: int | None = None
    """Capacity of a rank in tokens; a full microbatch has this times the context-parallel ranks of a
    pipeline."""
    strategy: str | None = None
    """Replicas and their degrees, such as `4*tp1-pp2-cp2`. None: the layout of the training job;
    elsewhere one pipeline of all ranks."""


def plan_step(lengths: Lengths, context: StepContext, carry: Carry, /) -> tuple[StepPlan, Carry]:
    """Pack the sequences of a step, those that wait first, and deal the microbatches in turn.

    Raises:
        InfeasibleError: a sequence that no microbatch holds.
        ConfigError: a strategy that does not fit the ranks, or microbatches without a limit.
    """
    options: MegatronOptions = context.options
    given = () if options.strategy is None else (Strategy.parse(options.strategy),)
    candidates = candidates_of(given, context, "strategy")
    if not candidates:
        return planner_within(context, *WITHIN)(lengths, context, carry)
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
