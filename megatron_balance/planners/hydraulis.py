"""hydraulis: pipelines side by side, each with microbatches of its own in number and length.

Paper: Hydraulis: Balancing Large Transformer Model Training via Co-designing Parallel Strategies
and Data Assignment (Li et al., arXiv 2412.07894), sections 4 to 6. What we implement: sequences of
a step are dispatched to the pipelines of a strategy (Eq. 3), then packed into microbatches (Eq. 1).
Of several candidates that hold the longest sequence, by MaxLen (C.1) and `tokens_per_rank`, the
step takes the one whose slowest pipeline ends first, with what pipelines do not cover of pulling
weights and pushing gradients (5.2, 5.3). In training without candidates the command line's layout
is the only strategy.

Where we differ and why: context parallelism is a degree like the others, and `within` names the
planner inside a microbatch. A pipeline without sequences runs an empty microbatch, since it meets
the others where gradients are summed. Without a strategy there is one pipeline, with microbatches
as dealt.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from megatron_balance.analysis.change import Layouts, base_for, base_sync_s, change
from megatron_balance.errors import ConfigError
from megatron_balance.files import UnreadableError, read_text
from megatron_balance.ir.step import EMPTY, Carry, Lengths, StepPlan
from megatron_balance.ir.strategy import Strategy
from megatron_balance.planners import pipelines
from megatron_balance.planners.base import Count, NotNegative, StepContext, check_within, planner_within

NAME = "hydraulis"
# Strategies to be proposed for the lengths at hand, by whoever knows them all.
AUTO = "auto"


@dataclass(frozen=True, slots=True)
class HydraulisOptions:
    tokens_per_rank: Count | None = None
    """Capacity of a rank in tokens; a microbatch has at most this times the context-parallel ranks of
    its pipeline. Unlimited if not given."""
    strategies: Sequence[str] | str = ()
    """Candidates, such as `4*tp1-pp1-cp2`, or the file that verb `strategies` wrote; `auto`: in
    `simulate` and `compare` those that suit the batches, in training the layout. None: the layout of
    the training job; elsewhere one pipeline of all ranks."""
    base: str | None = None
    """The layout that owns weights and optimizer, such as `4*tp2-pp1-cp1`: pipelines of one scheme on
    all ranks. In training it is the command line's. None: the first such candidate, else the largest
    TP of any, and replicas."""
    overlap: bool = True
    """Whether layers' weights are pulled, and gradients pushed, beside the work of other layers."""
    within: str = "te_ring"
    """The planner that places a microbatch on the context-parallel ranks of a pipeline."""
    within_options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Options of that planner."""
    microbatch_s: NotNegative = 0.0
    """Seconds that a microbatch takes on a stage beside what its tokens do, above what the costs
    know of: overheads of host and framework. With 0 many short microbatches look as good as few."""
    dispatching: pipelines.Dispatching = "search"
    """Sequences to pipelines: the longest first with moves and swaps; `trials`: the paper's Alg. 1;
    `ilp`: Eq. 3 by HiGHS, which needs SciPy."""
    packing: pipelines.Packing = "longest_first"
    """A pipeline's sequences into microbatches: the longest first; `ilp`: Eq. 1 by HiGHS."""
    node_limit: Count = 200
    """Of a search by HiGHS; a limit in seconds would differ between ranks."""

    def __post_init__(self) -> None:
        if not isinstance(self.strategies, str):
            object.__setattr__(self, "strategies", tuple(self.strategies))


def plan_step(lengths: Lengths, context: StepContext, carry: Carry, /) -> tuple[StepPlan, Carry]:
    """Dispatch and pack the sequences of a step, those that wait first, under the best candidate."""
    options: HydraulisOptions = context.options
    check_within(NAME, options)
    within = options.within, options.within_options
    trains = context.strategy is not None
    given = () if trains and options.strategies == AUTO else _read_strategies(options.strategies)
    candidates = pipelines.candidates_of(given, context, "strategies")
    if not candidates:
        return planner_within(context, *within)(lengths, context, carry)
    every = [*carry.waiting, *enumerate(chain.from_iterable(lengths))]
    best, microbatches, _ = fastest([length for _, length in every], candidates, context)
    return pipelines.side_by_side(every, best, microbatches, within), EMPTY


def fastest(
    sizes: Sequence[int], candidates: Sequence[Strategy], context: StepContext
) -> tuple[pipelines.Pipelines, pipelines.Microbatches, float]:
    """The candidate that a step takes, its microbatches, and the seconds of the step, with what moves
    weights and gradients. InfeasibleError: none holds the longest sequence.
    """
    options: HydraulisOptions = context.options
    layouts = None
    if context.strategy is None:
        layouts = layouts_of(options, context.cluster.num_ranks, context.base)
    held = pipelines.holders([pipelines.pipelines_of(each, context, layouts) for each in candidates], sizes)
    solvers = pipelines.Solvers(options.dispatching, options.packing, options.node_limit)
    costs = [each.with_overhead(options.microbatch_s).costs for each in held]
    moving = [] if layouts is None else _moving_of([each.strategy for each in held], layouts, context)
    best, microbatches, step_s = pipelines.fastest(sizes, costs, solvers, moving)
    return held[best], microbatches, step_s


def _moving_of(
    strategies: Sequence[Strategy], layouts: Layouts, context: StepContext
) -> list[pipelines.CandidateMovement]:
    """The moves of weights and gradients of each strategy."""
    cluster, model = context.cluster, context.model
    sync_s = sum(base_sync_s(layouts.base, model, cluster))
    known = sync_s, model.num_layers, layouts.overlap
    changes = (None if each == layouts.base else change(layouts.base, each, model, cluster) for each in strategies)
    return [pipelines.CandidateMovement(each, *known) for each in changes]


def layouts_of(options: HydraulisOptions, num_ranks: int, base: Strategy | None = None) -> Layouts | None:
    """The base layout and the candidates on so many ranks; None: there is no other than the base.
    `base`: of a training job. ConfigError: options name another base, or one not for all ranks.
    """
    candidates = strategies_of(options)
    named = None if options.base is None else Strategy.parse(options.base)
    if named is not None and base not in (None, named):
        raise ConfigError(f"base: {named}: training's is the command line's layout, {base}; leave it out")
    if named is not None and (named.num_ranks != num_ranks or len(set(named.pipelines)) > 1):
        raise ConfigError(
            f"base: {named}: expected pipelines of one scheme on all {num_ranks} ranks, such as {num_ranks}*tp1-pp1-cp1"
        )
    if not candidates:
        return None
    layouts = Layouts(base or named or base_for(candidates, num_ranks), candidates, options.overlap)
    return None if candidates == (layouts.base,) else layouts


def strategies_of(options: HydraulisOptions) -> tuple[Strategy, ...]:
    """The candidates of a training run; none: it runs the command line's layout. ConfigError: text
    that is no strategy.
    """
    return () if options.strategies == AUTO else _read_strategies(options.strategies)


def _read_strategies(given: Sequence[str] | str) -> tuple[Strategy, ...]:
    """The candidates of an option: texts, or the file that names one a line."""
    if given == AUTO:
        raise ConfigError(
            "strategies: auto: 'simulate' and 'compare' propose them for all their batches; elsewhere name the FILE of "
            "'megatron-balance strategies --out FILE', or list them"
        )
    if isinstance(given, str):
        try:
            lines = read_text(Path(given)).splitlines()
        except (OSError, UnreadableError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise ConfigError(
                f"strategies: {given}: cannot be read ({why}); name a file of strategies, or list them: "
                "[2*tp1-pp1-cp2, tp1-pp1-cp4]"
            ) from None
        given = [line for line in (each.partition("#")[0].strip() for each in lines) if line]
        if not given:
            raise ConfigError("strategies: the file names none")
    return tuple(Strategy.parse(each) for each in given)
