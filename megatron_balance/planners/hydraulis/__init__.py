"""hydraulis: pipelines side by side, each with microbatches of its own in number and length.

Paper: Hydraulis: Balancing Large Transformer Model Training via Co-designing Parallel Strategies and
Data Assignment (Li et al., arXiv 2412.07894), sections 4 to 6: Eq. 1 (packing), Eq. 3 (dispatch), and
the choice among candidate strategies at every step.

What we implement: sequences of a step are dispatched to the pipelines of a strategy by seconds, then
packed into each pipeline's microbatches (`solvers.dispatch`, `solvers.microbatches`). Of several
candidates the step takes the one whose slowest pipeline ends first, among those whose longest
microbatch, by MaxLen (Appendix C.1) and `tokens_per_rank`, holds the longest
sequence. In training the command line's layout is the only strategy, and its memory the user's.
Inside a microbatch the planner named by `within` places sequences on the pipeline's
context-parallel ranks.

What we leave out: changing from one strategy to another during training.

Where we differ and why: context parallelism is a degree of a scheme like the others (the authors'
code has none). A pipeline without sequences runs one microbatch without any, since it still meets
the others where gradients are summed. Without a strategy there is one pipeline of all ranks, and
its microbatches are as dealt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from megatron_balance.errors import ConfigError, InfeasibleError
from megatron_balance.ir.layers import Layers
from megatron_balance.ir.step import EMPTY, Carry, Lengths, StepPlan
from megatron_balance.ir.strategy import Strategy
from megatron_balance.planners.base import PlanStep, StepContext
from megatron_balance.planners.hydraulis.pipelines import Pipelines, pipelines_of, read_strategies

NAME = "hydraulis"


@dataclass(frozen=True, slots=True)
class HydraulisOptions:
    """Options of hydraulis."""

    tokens_per_rank: int | None = None
    """Capacity of a rank in tokens; a microbatch has at most this times the context-parallel ranks of
    its pipeline. Unlimited if not given."""
    strategies: Sequence[str] | str = ()
    """Candidates, such as `4*tp1-pp1-cp2`, or the file that verb `strategies` wrote. None: the layout
    of the training job; elsewhere one pipeline of all ranks."""
    within: str = "te_ring"
    """The planner that places a microbatch on the context-parallel ranks of a pipeline."""
    within_options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Options of that planner."""

    def __post_init__(self) -> None:
        """Keep a list from a YAML as a tuple, equal to one given in Python."""
        if not isinstance(self.strategies, str):
            object.__setattr__(self, "strategies", tuple(self.strategies))


@dataclass(frozen=True, slots=True)
class _Dealt:
    """A candidate's microbatches, by pipeline, as positions in the lengths; `seconds` of its slowest
    pipeline.
    """

    pipelines: Pipelines
    microbatches: tuple[tuple[tuple[int, ...], ...], ...]
    seconds: float


def plan_step(lengths: Lengths, context: StepContext, carry: Carry, /) -> tuple[StepPlan, Carry]:
    """Dispatch and pack the sequences of a step, those that wait first, under the best candidate.

    Raises:
        InfeasibleError: a sequence that no candidate holds.
        ConfigError: options out of range; strategies that do not fit the ranks.
    """
    options: HydraulisOptions = context.options
    if options.within == NAME:
        raise ConfigError(f"within: expected the planner of one microbatch, such as te_ring, got {NAME}")
    if "tokens_per_rank" in options.within_options:
        raise ConfigError("within_options: tokens_per_rank is an option of hydraulis itself; give it beside them")
    candidates = _candidates(context, options)
    if not candidates:
        return _within(context)(lengths, context, carry)
    every = [*carry.waiting, *enumerate(chain.from_iterable(lengths))]
    sizes = [length for _, length in every]
    best = min(_feasible(sizes, candidates, context), key=lambda each: each.seconds)
    steps = [
        _pipeline_step(sizes, microbatches, best.pipelines.inside[pipeline])
        for pipeline, microbatches in enumerate(best.microbatches)
    ]
    numbers = [number for number, _ in every]
    planned = StepPlan.side_by_side(best.pipelines.strategy, steps)
    members = tuple(tuple(tuple(numbers[seq] for seq in part) for part in microbatch) for microbatch in planned.members)
    return replace(planned, members=members), EMPTY


def _candidates(context: StepContext, options: HydraulisOptions) -> tuple[Strategy, ...]:
    """The strategies to choose from; empty: one pipeline of all ranks, with microbatches as dealt.

    Raises:
        ConfigError: strategies beside a training job's own layout, or for a microbatch alone.
    """
    given = read_strategies(options.strategies)
    if context.strategy is not None:
        if given and given != (context.strategy,):
            raise ConfigError(
                f"strategies: training runs the command line's layout, {context.strategy}, as the only one; leave them "
                "out, or start with the flags of one of them"
            )
        return (context.strategy,)
    if given and not context.own_microbatches:
        raise ConfigError(
            "strategies have microbatches of their own, and here these are as dealt (a microbatch alone, or a training "
            "loop that shares every microbatch over all ranks); leave them out, or use 'simulate' and 'compare'"
        )
    return given


def _feasible(sizes: Sequence[int], candidates: Sequence[Strategy], context: StepContext) -> list[_Dealt]:
    """Microbatches by each candidate that holds the longest sequence.

    Raises:
        InfeasibleError: there is none.
    """
    longest = max(sizes, default=0)
    known = [pipelines_of(strategy, context) for strategy in candidates]
    held = [each for each in known if each.max_tokens >= max(longest, 1)]
    if not held:
        best = max(known, key=lambda each: each.max_tokens)
        raise InfeasibleError(
            f"a sequence of {longest} tokens is longer than any microbatch: {best.strategy}, with the longest, holds "
            f"{best.max_tokens}; {best.longer_with(longest)}, or cut documents at a shorter --seq-length (documents: "
            "split)"
        )
    return [_Dealt(each, *each.deal(sizes)) for each in held]


def _pipeline_step(sizes: Sequence[int], microbatches: Sequence[Sequence[int]], inside: StepContext) -> StepPlan:
    """The microbatches of one pipeline, placed by `within`; their members are positions in `sizes`."""
    chosen = tuple(tuple(each) for each in microbatches) or ((),)
    lengths = tuple(tuple(sizes[at] for at in each) for each in chosen)
    step, carried = _within(inside)(lengths, inside, EMPTY)
    assert carried.is_empty, "nothing may be carried inside a microbatch"
    flat = list(chain.from_iterable(chosen))
    members = tuple(tuple(tuple(flat[seq] for seq in part) for part in of) for of in step.members)
    return StepPlan(members, step.plans)


def _within(context: StepContext) -> PlanStep:
    options: HydraulisOptions = context.options
    given = dict(options.within_options)
    if options.tokens_per_rank is not None:
        given["tokens_per_rank"] = options.tokens_per_rank
    # Layers that somebody asked for go inside; otherwise that planner comes with its own.
    asked = Layers(align=context.layers.align)
    return context.planner(options.within, given, None if context.layers == asked else context.layers)
