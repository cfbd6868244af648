"""The pipelines of a strategy: what they hold and cost, which sequences go where."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import ceil
from typing import Any, Literal

import numpy as np

from megatron_balance.analysis.backward import state_bytes
from megatron_balance.analysis.change import Change, PipelineWork
from megatron_balance.analysis.step_memory import StepMemory, max_len, stages_of
from megatron_balance.cost.base import MachineCost
from megatron_balance.cost.fits import fit_quadratic
from megatron_balance.cost.parallel import joined_nodes, one_of_each, stage_transfer_s, wide_ranks
from megatron_balance.cost.perturbed import changed, on_cluster
from megatron_balance.errors import ConfigError, InfeasibleError
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.model import Model
from megatron_balance.ir.step import EMPTY, StepPlan
from megatron_balance.ir.strategy import Scheme, Strategy
from megatron_balance.planners.base import StepContext, planner_within, renumbered
from megatron_balance.solvers import dispatch
from megatron_balance.solvers.dispatch import Assigned, PipelineCost

# Tokens of a microbatch where nobody says what a rank holds.
UNLIMITED = 1 << 40
Microbatches = tuple[tuple[tuple[int, ...], ...], ...]
# Sequences to pipelines: ours; the paper's Alg. 1; Eq. 3 as an integer program.
Dispatching = Literal["search", "trials", "ilp"]
# A pipeline's sequences into microbatches: ours; Eq. 1 as an integer program.
Packing = Literal["longest_first", "ilp"]


@dataclass(frozen=True, slots=True)
class Solvers:
    dispatching: Dispatching = "search"
    packing: Packing = "longest_first"
    node_limit: int = 200

    def dispatch(self, lengths: Sequence[int], costs: Sequence[PipelineCost]) -> Assigned:
        match self.dispatching:
            case "search":
                return dispatch.dispatch(lengths, costs, filled=True)
            case "trials":
                return dispatch.greedy(lengths, costs)
            case "ilp":
                return dispatch.exact(lengths, costs, self.node_limit)

    @property
    def pack_nodes(self) -> int:
        return self.node_limit if self.packing == "ilp" else 0


OURS = Solvers()


@dataclass(frozen=True, slots=True)
class CandidateMovement:
    """A candidate's way to its weights. `change`: from the base layout; None: it is the base
    layout, whose own all-gather and reduce-scatter take `sync_s`. `overlap`: layers move beside the
    work of others.
    """

    change: Change | None
    sync_s: float
    layers: int
    overlap: bool

    def added_s(self, lengths: Sequence[int], made: Microbatches, costs: Sequence[PipelineCost]) -> float:
        if self.change is None:
            return self.sync_s
        works: list[PipelineWork] = []
        for own, cost in zip(made, costs, strict=True):
            sizes = [[lengths[seq] for seq in each] for each in own]
            first, last = (dispatch.microbatch_s(sizes[at], cost) if sizes else cost.c for at in (0, -1))
            layers = self.layers / cost.stages
            works.append(
                PipelineWork(
                    cost.stages,
                    pipeline_s(sizes, cost),
                    dispatch.FORWARD_SHARE * first / layers,
                    (1 - dispatch.FORWARD_SHARE) * last / layers,
                )
            )
        return sum(self.change.uncovered_s(works, overlap=self.overlap))

    @property
    def least_s(self) -> float:
        return self.sync_s if self.change is None else self.change.least_s(overlap=self.overlap)


@dataclass(frozen=True, slots=True)
class Pipelines:
    """A strategy with each pipeline's cost and the context of the planner inside it."""

    strategy: Strategy
    costs: tuple[PipelineCost, ...]
    inside: tuple[StepContext, ...]

    @property
    def max_tokens(self) -> int:
        """Tokens of the longest microbatch of any pipeline; 0 where one holds not even its weights."""
        return max(cost.max_tokens for cost in self.costs) if min(cost.max_tokens for cost in self.costs) else 0

    def of_one_size(self) -> Pipelines:
        most = min(cost.max_tokens for cost in self.costs)
        return replace(self, costs=tuple(replace(cost, max_tokens=most) for cost in self.costs))

    def with_overhead(self, microbatch_s: float) -> Pipelines:
        return replace(self, costs=tuple(replace(cost, c=cost.c + microbatch_s) for cost in self.costs))

    def longer_with(self, length: int) -> str:
        limits = [
            inside.options.tokens_per_rank * inside.cluster.num_ranks if inside.options.tokens_per_rank else UNLIMITED
            for inside in self.inside
        ]
        if self.max_tokens < max(limits):
            return "a GPU's memory allows no more (MaxLen): use more tensor, pipeline or context parallelism"
        ranks = max(limit // inside.options.tokens_per_rank for limit, inside in zip(limits, self.inside, strict=True))
        return f"raise tokens_per_rank to at least {-(-length // ranks)}, use more context-parallel ranks"


def deal(
    lengths: Sequence[int], costs: Sequence[PipelineCost], solvers: Solvers = OURS
) -> tuple[Microbatches, tuple[float, ...]]:
    """Dispatch sequences to pipelines, and pack those of each: by pipeline and microbatch,
    positions in `lengths`; and seconds of each pipeline. InfeasibleError: a sequence that no
    pipeline holds.
    """
    return packed(lengths, costs, solvers.dispatch(lengths, costs), solvers)


def packed(
    lengths: Sequence[int], costs: Sequence[PipelineCost], assigned: Assigned, solvers: Solvers = OURS
) -> tuple[Microbatches, tuple[float, ...]]:
    """Pack the sequences that each pipeline is given; as `deal`."""
    made: list[tuple[tuple[int, ...], ...]] = []
    seconds: list[float] = []
    for own, cost in zip(assigned, costs, strict=True):
        of_pipeline = dispatch.pack([lengths[seq] for seq in own], cost, solvers.pack_nodes)
        made.append(tuple(tuple(own[at] for at in microbatch) for microbatch in of_pipeline))
        seconds.append(pipeline_s([[lengths[seq] for seq in each] for each in made[-1]], cost))
    return tuple(made), tuple(seconds)


def fastest(
    lengths: Sequence[int],
    candidates: Sequence[Sequence[PipelineCost]],
    solvers: Solvers = OURS,
    moving: Sequence[CandidateMovement] = (),
) -> tuple[int, Microbatches, tuple[float, ...]]:
    """The candidate whose slowest pipeline ends first, with what moves weights (`moving`): its
    number, and as `deal`.
    """
    assigned = [solvers.dispatch(lengths, costs) for costs in candidates]
    least = [
        dispatch.slowest_s(lengths, costs, each, PipelineCost.least_s) + (moving[at].least_s if moving else 0.0)
        for at, (costs, each) in enumerate(zip(candidates, assigned, strict=True))
    ]
    best: tuple[float, int, Microbatches, tuple[float, ...]] | None = None
    for at in sorted(range(len(candidates)), key=least.__getitem__):
        if best is not None and least[at] > best[0]:
            break
        made, seconds = packed(lengths, candidates[at], assigned[at], solvers)
        step_s = max(seconds) + (moving[at].added_s(lengths, made, candidates[at]) if moving else 0.0)
        if best is None or (step_s, at) < best[:2]:
            best = step_s, at, made, seconds
    assert best is not None, "no candidates"
    return best[1:]


def pipeline_s(microbatches: Sequence[Sequence[int]], cost: PipelineCost) -> float:
    """Seconds of a pipeline: its stage times, and the fullest through the other stages (Eq. 2)."""
    times = [dispatch.microbatch_s(lengths, cost) for lengths in microbatches]
    return sum(times) + (cost.stages - 1) * max(times, default=0.0)


def candidates_of(given: Sequence[Strategy], context: StepContext, key: str) -> tuple[Strategy, ...]:
    """The strategies to choose from; empty: one pipeline of all ranks. `key`: the option that names
    `given`.

    Raises:
        ConfigError: strategies beside a training job's own layout, or for a microbatch alone.
    """
    if context.strategy is not None:
        if given and tuple(given) != (context.strategy,):
            raise ConfigError(
                f"{key}: training runs the command line's layout, {context.strategy}, as the only one; leave it out, "
                "or start with the flags of one of them"
            )
        return (context.strategy,)
    if given and not context.own_microbatches:
        raise ConfigError(
            f"{key}: pipelines have microbatches of their own, and here these are as dealt (a microbatch alone, or a "
            "training loop that shares every microbatch over all ranks); leave it out, or use 'simulate' and 'compare'"
        )
    return tuple(given)


def holders(known: Sequence[Pipelines], sizes: Sequence[int]) -> list[Pipelines]:
    """Those that hold the longest of sequences of `sizes` tokens; InfeasibleError: there is none."""
    longest = max(sizes, default=0)
    held = [each for each in known if each.max_tokens >= max(longest, 1)]
    if not held:
        best = max(known, key=lambda each: each.max_tokens)
        raise InfeasibleError(
            f"a sequence of {longest} tokens is longer than any microbatch: {best.strategy}, with the longest, holds "
            f"{best.max_tokens}; {best.longer_with(longest)}, or cut documents at a shorter --seq-length (documents: "
            "split)"
        )
    return held


def side_by_side(
    every: Sequence[tuple[int, int]], pipelines: Pipelines, microbatches: Microbatches, within: tuple[str, Any]
) -> StepPlan:
    """The step of these microbatches, each placed by a planner on its pipeline's own ranks. `every`:
    number and tokens of each sequence; `within`: name and options of the planner of one microbatch.
    """
    steps = [
        _pipeline_step([length for _, length in every], own, inside, within)
        for own, inside in zip(microbatches, pipelines.inside, strict=True)
    ]
    return renumbered(StepPlan.side_by_side(pipelines.strategy, steps), [number for number, _ in every])


def _pipeline_step(
    sizes: Sequence[int], microbatches: Sequence[Sequence[int]], inside: StepContext, within: tuple[str, Any]
) -> StepPlan:
    chosen = tuple(tuple(each) for each in microbatches) or ((),)
    lengths = tuple(tuple(sizes[at] for at in each) for each in chosen)
    step, carried = planner_within(inside, *within)(lengths, inside, EMPTY)
    assert carried.is_empty, "nothing may be carried inside a microbatch"
    return renumbered(step, list(chain.from_iterable(chosen)))


def pipelines_of(strategy: Strategy, context: StepContext) -> Pipelines:
    """The pipelines of a strategy with their costs.

    Raises:
        ConfigError: a strategy that the ranks or the model cannot be split by.
    """
    # Whose model is cut by Megatron's own rules.
    if context.of_ranks:
        strategy.check(context.cluster.num_ranks, context.cluster.node_size)
    elif context.strategy is None:
        strategy.check(context.cluster.num_ranks, context.cluster.node_size)
        for scheme in dict.fromkeys(strategy.pipelines):
            check_scheme(scheme, context.model, f"strategy {strategy}: ")
    known: dict[Scheme, tuple[PipelineCost, StepContext]] = {}
    for scheme in strategy.pipelines:
        if scheme not in known:
            known[scheme] = _pipeline(scheme, context)
    costs, inside = zip(*(known[scheme] for scheme in strategy.pipelines), strict=True)
    return Pipelines(strategy, costs, inside)


def _pipeline(scheme: Scheme, context: StepContext) -> tuple[PipelineCost, StepContext]:
    # The ranks of a training job are tensor-parallel groups already.
    tensor = None if context.strategy is not None else scheme.tensor
    options = context.options
    if options.tokens_per_rank is not None and tensor is not None:
        options = replace(options, tokens_per_rank=options.tokens_per_rank * tensor)
    most = UNLIMITED if options.tokens_per_rank is None else options.tokens_per_rank * scheme.context
    # a training job's memory is its own: recomputation, offloading.
    if tensor is not None:
        most = min(most, max_len(scheme, context.model, context.cluster.memory_bytes, context.cluster.num_ranks))
    gpus = context.cluster
    # Each pipeline lies on the one node whole.
    if context.of_ranks and gpus.num_ranks <= gpus.node_size:
        own = scheme.tensor * scheme.context
        gpus = replace(gpus, num_ranks=own, ranks_per_node=own)
    ranks = gpus if tensor is None else wide_ranks(joined_nodes(gpus, tensor), tensor)
    cluster = stage_cluster(ranks, scheme.context)
    cost = on_cluster(context.cost, cluster, tensor)
    alone = Scheme(1, scheme.pipeline, scheme.context)
    known = cost_of_scheme(alone, context.model, cluster, lambda _cluster, _tensor: cost, most)
    model = context.model
    if context.of_ranks:
        model = model.share(scheme.tensor)
        cluster = stage_cluster(one_of_each(joined_nodes(gpus, scheme.tensor), scheme.tensor), scheme.context)
        # One rank of each tensor-parallel group, without what its ranks exchange.
        cost = changed(context.cost, "other ranks", cluster=cluster, tensor_parallel=1, model=model)
    inside = replace(
        context,
        cluster=cluster,
        model=model,
        cost=cost,
        options=options,
        strategy=None,
        own_microbatches=False,
        may_carry=False,
        memory=_memory(scheme, context, model, gpus.num_ranks if tensor is None else ranks.num_ranks),
    )
    return known, inside


def _memory(scheme: Scheme, context: StepContext, model: Model, num_groups: int) -> StepMemory | None:
    """The memory of a pipeline's step around its plans; `num_groups`: tensor-parallel groups of the
    job, which share out the optimizer's state; `model`: of a rank.
    """
    told = context.memory
    # Which is the layout that it is of.
    if told is None or context.strategy is not None:
        return told
    tensor = scheme.tensor if context.of_ranks else 1
    stages = stages_of(context.model, max(scheme.context, num_groups // scheme.pipeline), pipeline=scheme.pipeline)
    spread = (replace(each, sharding=replace(each.sharding, tensor=tensor)) for each in stages)
    recompute = told.stages[0].recompute
    known = (replace(each, recompute=recompute, state_bytes=state_bytes(context.model, each)) for each in spread)
    return StepMemory(model, tuple(known), told.asked)


def stage_cluster(cluster: Cluster, num_ranks: int) -> Cluster:
    """The first `num_ranks` of a cluster, like any of its stages; ConfigError: they lie unevenly."""
    size = cluster.node_size
    if size % num_ranks and num_ranks % size:
        raise ConfigError(
            f"{num_ranks} context-parallel ranks of a pipeline would lie unevenly on nodes of {size}; use a number "
            "that divides a node, or whole nodes"
        )
    return replace(cluster, num_ranks=num_ranks, ranks_per_node=min(size, num_ranks))


# Seconds of one sequence under a parallel scheme, and the quadratic through them (Hydraulis, arXiv
# 2412.07894, Appendix C.2).
#
# Hydraulis profiles each scheme <TP, PP, CP> on its cluster. Here the times to fit come from a cost
# model of one rank, with the scheme's communication on top.

# A ring's backward moves keys and values again, and their gradients.
_RING_BACKWARD = 2
# Lengths in tokens through whose predicted times the quadratic of a scheme goes.
_FITTED = tuple(1 << power for power in range(8, 18))
# Those longer than this many times the longest microbatch are left out, as long as three stay.
_BEYOND = 4
# Megatron pads a vocabulary to it (--make-vocab-size-divisible-by), times its own TP.
_VOCAB_MULTIPLE = 128
# (cluster of wide ranks, tensor parallelism) -> its cost.
_CostOf = Callable[[Cluster, int], MachineCost]


def check_scheme(scheme: Scheme, model: Model, where: str = "") -> None:
    """Reject a scheme whose degrees do not divide a model's heads, padded vocabulary and layers.

    Raises:
        ConfigError: names what does not divide; `where`: what the sentence begins with.
    """
    for what, number, degree in (
        ("heads", model.num_heads, scheme.tensor),
        ("key-value heads (query groups)", model.num_kv_heads, scheme.tensor),
        ("layers", model.num_layers, scheme.pipeline),
    ):
        if number % degree:
            raise ConfigError(
                f"{where}{scheme} splits the {number} {what} of {model.name} {degree} ways; choose a divisor of "
                f"{number}"
            )
    padded = -(-model.vocab_size // _VOCAB_MULTIPLE) * _VOCAB_MULTIPLE
    if padded % scheme.tensor:
        raise ConfigError(
            f"{where}{scheme} splits the padded vocabulary of {model.name}, {padded} tokens, {scheme.tensor} ways; "
            f"choose a divisor of {padded}, or --make-vocab-size-divisible-by {scheme.tensor * _VOCAB_MULTIPLE}"
        )


def cost_of_scheme(scheme: Scheme, model: Model, cluster: Cluster, cost_of: _CostOf, max_tokens: int) -> PipelineCost:
    """The cost of a pipeline whose microbatches have at most `max_tokens`: the quadratic through the
    predicted times of sequences.

    Raises:
        ConfigError: a tensor parallelism that does not fit the cluster's nodes.
    """
    wide = wide_ranks(cluster, scheme.tensor)
    cost = cost_of(wide, scheme.tensor)
    lengths = [length for at, length in enumerate(_FITTED) if at < 3 or length <= _BEYOND * max_tokens]
    fitted = fit_quadratic(lengths, [sequence_s(scheme, model, wide, cost, length) for length in lengths])
    return PipelineCost(fitted.a, fitted.b, fitted.c, scheme.pipeline, max_tokens)


def sequence_s(scheme: Scheme, model: Model, wide: Cluster, cost: MachineCost, length: int) -> float:
    """Seconds of the longest pipeline stage for one sequence as a microbatch, forward and backward.

    The stage is the last one, which has the logits. Context parallelism is a zigzag ring over the
    ranks of `wide`, each round's transfer hidden behind its attention or the other way round.
    """
    tokens = length / scheme.context
    rounds = scheme.context - 1
    link = cost.link(inter_node=scheme.context > wide.node_size)
    round_s = cost.call_s + link.time_s(cost.kv_bytes(tokens))
    layer_s = 0.0
    for backward in (False, True):
        ring_s = rounds * round_s * (_RING_BACKWARD if backward else 1)
        attention_s = _attention_s(scheme, model, cost, length, backward=backward)
        layer_s += model.attending * max(attention_s, ring_s) + cost.layer_s(tokens, backward=backward)
    handed_on_s = 2 * stage_transfer_s(model, tokens, link) if scheme.pipeline > 1 else 0.0
    head_s = cost.head_s(tokens) + cost.head_s(tokens, backward=True)
    return model.num_layers / scheme.pipeline * layer_s + head_s + handed_on_s


def _attention_s(scheme: Scheme, model: Model, cost: MachineCost, length: int, *, backward: bool) -> float:
    """One layer's attention on one rank: the first and the last of 2 CP chunks, a launch a round."""
    heads = [0, model.num_heads], [0, model.num_kv_heads]
    chunk = ceil(length / (2 * scheme.context))
    queries = [(0, length)] if scheme.context == 1 else [(0, chunk), (length - chunk, length)]
    pairs = np.array(
        [[0, *query, *heads[0], 0, query[1], *heads[1]] for query in queries if query[0] >= 0], dtype=np.int64
    )
    launches_s = (scheme.context - 1) * cost.launch_s(1)
    return float(cost.attend_s(pairs, np.zeros(len(pairs), dtype=np.int64), 1, backward=backward)[0]) + launches_s
