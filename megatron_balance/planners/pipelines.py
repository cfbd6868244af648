"""The pipelines of a strategy: what they hold and cost, which sequences go where."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Literal, TypeVar

from megatron_balance.analysis.backward import Stage, microbatch_bytes, state_bytes
from megatron_balance.analysis.change import Change, Layouts, PipelineWork, beside_bytes
from megatron_balance.analysis.estimate import estimate
from megatron_balance.analysis.machine import Machine
from megatron_balance.analysis.step_memory import StepMemory, max_len, stages_of
from megatron_balance.cost.fits import least_squares
from megatron_balance.cost.parallel import joined_nodes, one_of_each, stage_transfer_s, wide_ranks
from megatron_balance.cost.perturbed import changed, on_cluster
from megatron_balance.errors import ConfigError, InfeasibleError
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.model import Model
from megatron_balance.ir.plan import MicrobatchPlan, Zone
from megatron_balance.ir.step import StepPlan
from megatron_balance.ir.strategy import Scheme, Strategy
from megatron_balance.planners.base import StepContext, placed_by, planner_within, renumbered
from megatron_balance.solvers import dispatch
from megatron_balance.solvers.dispatch import Assigned, PipelineCost
from megatron_balance.solvers.groups import plan_of

T = TypeVar("T")
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

    def of_one_size(self) -> "Pipelines":
        most = min(cost.max_tokens for cost in self.costs)
        return replace(self, costs=tuple(replace(cost, max_tokens=most) for cost in self.costs))

    def with_overhead(self, microbatch_s: float) -> "Pipelines":
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
) -> tuple[int, Microbatches, float]:
    """The candidate whose slowest pipeline ends first, with what moves weights (`moving`): its
    number, its microbatches, and seconds of the step.
    """
    assigned = [solvers.dispatch(lengths, costs) for costs in candidates]
    least = [
        dispatch.slowest_s(lengths, costs, each, PipelineCost.least_s) + (moving[at].least_s if moving else 0.0)
        for at, (costs, each) in enumerate(zip(candidates, assigned, strict=True))
    ]
    best: tuple[float, int, Microbatches] | None = None
    for at in sorted(range(len(candidates)), key=least.__getitem__):
        if best is not None and least[at] > best[0]:
            break
        made, seconds = packed(lengths, candidates[at], assigned[at], solvers)
        step_s = max(seconds) + (moving[at].added_s(lengths, made, candidates[at]) if moving else 0.0)
        if best is None or (step_s, at) < best[:2]:
            best = step_s, at, made
    assert best is not None, "no candidates"
    return best[1], best[2], best[0]


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
    return renumbered(placed_by(planner_within(inside, *within), lengths, inside), list(chain.from_iterable(chosen)))


def pipelines_of(strategy: Strategy, context: StepContext, layouts: Layouts | None = None) -> Pipelines:
    """The pipelines of a strategy with their costs. `layouts`: where weights move, whose roles take
    memory.

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
    beside = dict.fromkeys(strategy.pipelines, 0.0)
    if layouts is not None:
        of_ranks = beside_bytes(layouts, strategy, context.model, context.cluster.num_ranks)
        for number, scheme in enumerate(strategy.pipelines):
            beside[scheme] = max(beside[scheme], float(of_ranks[strategy.ranks_of(number)].max()))
    known = {scheme: _pipeline(scheme, _with_less(context, held)) for scheme, held in beside.items()}
    costs, inside = zip(*(known[scheme] for scheme in strategy.pipelines), strict=True)
    return Pipelines(strategy, costs, inside)


def _with_less(context: StepContext, held: float) -> StepContext:
    if not held:
        return context
    left = max(1.0, context.cluster.memory_bytes - held)
    return replace(context, cluster=replace(context.cluster, memory_bytes=left))


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
    groups = gpus.num_ranks if tensor is None else ranks.num_ranks
    memory = _memory(scheme, replace(context, of_ranks=False), context.model, groups)
    memory = memory or StepMemory(context.model, tuple(stages_around(scheme, context.model, groups)))
    known = cost_of_scheme(scheme, Machine(cluster, context.model, cost, memory=memory), most)
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
        memory=_memory(scheme, context, model, groups),
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
    stages = stages_around(scheme, context.model, num_groups)
    spread = (replace(each, sharding=replace(each.sharding, tensor=tensor)) for each in stages)
    recompute = told.stages[0].recompute
    known = (replace(each, recompute=recompute, state_bytes=state_bytes(context.model, each)) for each in spread)
    return StepMemory(model, tuple(known), told.asked)


def stages_around(scheme: Scheme, model: Model, num_groups: int) -> list[Stage]:
    """The stages of a pipeline of wide ranks, in a job of `num_groups` of them."""
    return stages_of(model, max(scheme.context, num_groups // scheme.pipeline), pipeline=scheme.pipeline)


def stage_cluster(cluster: Cluster, num_ranks: int) -> Cluster:
    """The first `num_ranks` of a cluster, like any of its stages; ConfigError: they lie unevenly."""
    size = cluster.node_size
    if size % num_ranks and num_ranks % size:
        raise ConfigError(
            f"{num_ranks} context-parallel ranks of a pipeline would lie unevenly on nodes of {size}; use a number "
            "that divides a node, or whole nodes"
        )
    return replace(cluster, num_ranks=num_ranks, ranks_per_node=min(size, num_ranks))


# Seconds of a microbatch under a parallel scheme, and the cost through them (Hydraulis, arXiv
# 2412.07894, Appendix C.2).
#
# Hydraulis profiles each scheme <TP, PP, CP> on its cluster. Here the times to fit are the estimate's
# (`analysis.estimate`), which the simulator's are held to.

# Tokens of a rank in the microbatches whose times are fitted: the most that it holds, as a power of
# two between these, and that over `_PART`; in sequences of one length, at most so many, or in one.
_LEAST_FULL, _MOST_FULL, _PART = 1 << 10, 1 << 15, 32
_LENGTHS, _MOST_SEQUENCES, _SHORT = tuple(512 * 8**at for at in range(6)), 256, 64
# Megatron pads a vocabulary to it (--make-vocab-size-divisible-by), times its own TP.
_VOCAB_MULTIPLE = 128


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


def cost_of_scheme(scheme: Scheme, machine: Machine, max_tokens: int) -> PipelineCost:
    """The cost of a pipeline whose microbatches have at most `max_tokens`, by estimated times of
    microbatches. `machine`: the wide ranks of one stage, with its step's memory.
    """
    asked = scheme, max_tokens, machine.memory, machine.cost, machine.cluster, machine.model
    return _known(asked, lambda: _fitted(scheme, machine, max_tokens))


def _fitted(scheme: Scheme, machine: Machine, max_tokens: int) -> PipelineCost:
    model, ranks = machine.model, scheme.context
    full = (1 << max(_LEAST_FULL, min(_MOST_FULL, max_tokens // ranks)).bit_length() - 1) * ranks
    lengths = _LENGTHS if full > _LENGTHS[1] else (_SHORT, *_LENGTHS)  # four unknowns
    sizes = [(tokens, one) for tokens in (full // _PART, full) for one in (*lengths, tokens)]
    cases = sorted({(tokens // one, one) for tokens, one in sizes if one <= tokens <= _MOST_SEQUENCES * one})
    assert machine.memory is not None, "whether layers keep what they received is decided by the step's memory"
    memory = machine.memory.of_microbatches(scheme.pipeline)
    fullest = _known(
        (full, machine.cluster, model), lambda: microbatch_bytes([_ring(machine.cluster, model, 1, full)], model)
    )
    keeps = memory.decide(fullest, machine.cluster.memory_bytes).kept_share >= 0.5
    alike = replace(machine, memory=replace(memory, asked="keep" if keeps else "replay"))
    layers_s = _known(
        (cases, keeps, machine.cost, machine.cluster, model),
        lambda: [estimate(_ring(machine.cluster, model, *each), alike).layer_s for each in cases],
    )
    layers = model.num_layers / scheme.pipeline
    seconds = [
        layers * layer_s + _beside_layers_s(scheme, machine, number * length / ranks)
        for (number, length), layer_s in zip(cases, layers_s, strict=True)
    ]
    columns = [[number * length**2, number * length, 1.0, number] for number, length in cases]
    a, b, c, d = least_squares(columns, seconds, what=f"costs of {scheme}")
    return PipelineCost(a, b, c, scheme.pipeline, max_tokens, d)


# Costs, and bytes and seconds of rings, by what they were asked for: schemes of other stages ask for
# the same rings, and a job asks for all in every step.
_RECENT: list[tuple[tuple[Any, ...], Any]] = []
_MOST_RECENT = 256


def _known(asked: tuple[Any, ...], find: Callable[[], T]) -> T:
    for known, found in tuple(_RECENT):  # a copy: threads plan ahead
        if known == asked:
            return found
    found = find()
    _RECENT[:] = [(asked, found), *_RECENT[: _MOST_RECENT - 1]]
    return found


def _ring(cluster: Cluster, model: Model, number: int, length: int) -> MicrobatchPlan:
    """`number` sequences of `length` tokens around a zigzag ring of all ranks."""
    every = Zone("pool", "ring", tuple(range(cluster.num_ranks)), tuple(range(number)))
    return plan_of("te_ring", (length,) * number, (cluster, model), (every,))


def _beside_layers_s(scheme: Scheme, machine: Machine, tokens: float) -> float:
    """Seconds of the last stage beside its layers: logits, and what it is handed and hands back."""
    handed_on_s = 2 * stage_transfer_s(machine.model, tokens, machine.inter) if scheme.pipeline > 1 else 0.0
    return machine.cost.head_s(tokens) + machine.cost.head_s(tokens, backward=True) + handed_on_s
