"""Strategies worth keeping for a data set, and what their pipelines cost (Hydraulis, arXiv
2412.07894, section 7, Appendix C).

Eq. 4 gives intervals of lengths to kinds of pipelines by dynamic programming. With steps that go to
zero each length goes to the scheme of least GPU-seconds that holds it. We start there, with the (PP
- 1) T that fill each pipeline; round the numbers of pipelines to all neighbours; and rank those by
dispatch and packing of sampled batches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, product
from math import inf
from statistics import fmean
from typing import TypeAlias

import numpy as np

from megatron_balance.analysis.machine import Machine
from megatron_balance.analysis.step_memory import StepMemory, max_len
from megatron_balance.config import SchemeTable
from megatron_balance.cost.base import MachineCost
from megatron_balance.cost.parallel import joined_nodes, wide_ranks
from megatron_balance.cost.perturbed import on_cluster
from megatron_balance.errors import ConfigError, InfeasibleError
from megatron_balance.ir.arrays import Bools, Floats, Ints
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.model import Model
from megatron_balance.ir.strategy import Scheme, Strategy
from megatron_balance.planners.base import StepContext
from megatron_balance.planners.hydraulis import AUTO, fastest, strategies_of
from megatron_balance.planners.pipelines import check_scheme, cost_of_scheme, deal, packed, stage_cluster, stages_around
from megatron_balance.planning.choice import PlannerChoice
from megatron_balance.solvers.dispatch import EFFICIENCY, PipelineCost, dispatch

Lengths = Sequence[int]
Counts = tuple[int, ...]
# Intervals of lengths, besides the ends at every scheme's MaxLen.
NUM_BINS = 32
HALVINGS = 13
# Rounds of the duality bound; few of them leave this many times the strategies wanted.
KEPT, PRICE_ROUNDS, COARSE_ROUNDS, COARSE_KEPT = 12, 24, 4, 6
# A microbatch fills a pipeline from where T(l) / l is within this of b (Appendix D).
FULL = 1 / EFFICIENCY
# Best roundings around which pipelines of one scheme are exchanged for another's.
EXCHANGED = 8
# Schemes of one continuous solution that are rounded; the least used are dropped.
MOST_CLASSES = 4
# Batches of the first rounds of the ranking, each of which leaves a third.
FIRST_ROUNDS, FEWER = (2, 5), 3
# Longest lengths that strategies are proposed for, as shares of the longest of all.
LONGEST_PARTS = (1.0, 0.75, 0.5, 0.375, 0.25, 0.125)


@dataclass(frozen=True, slots=True)
class SampledStrategy:
    """A strategy on sampled batches. `held_batches`: those without longer sequences than
    `max_tokens`; `seconds`: mean of those; `best_share`: of all batches, those it was fastest on.
    """

    strategy: Strategy
    max_tokens: int
    held_batches: int
    seconds: float
    best_share: float


@dataclass(frozen=True, slots=True)
class _Classes:
    """`work_s`, `fill_s` [schemes, intervals]: seconds of a stage for all sequences of an interval,
    and of filling a pipeline whose longest is there, infinite where MaxLen is less; `gpus`
    [schemes].
    """

    schemes: tuple[Scheme, ...]
    work_s: Floats
    fill_s: Floats
    gpus: Floats


def _classes_of(lengths: Lengths | Ints, num_tokens: int, costs: SchemeCosts, num_ranks: int) -> _Classes:
    """The costs of a step of `num_tokens` tokens under every scheme but those that another one
    beats in all.

    Raises:
        InfeasibleError: a sequence that no scheme holds.
    """
    schemes = costs.schemes(num_ranks)
    known = [costs.pipeline(scheme, num_ranks) for scheme in schemes]
    drawn = np.sort(np.asarray(lengths, dtype=np.float64))
    most, at = max(((each.max_tokens, -at) for at, each in enumerate(known)), default=(0, 0))
    if drawn[-1] > most:
        longest = f"{schemes[-at]} holds {most}" if known else "none"
        raise InfeasibleError(
            f"a sequence of {drawn[-1]:.0f} tokens fits no pipeline of {num_ranks} GPUs: {longest}; use more GPUs, "
            "allow wider schemes, or cut documents"
        )
    first, last = min(64.0, float(drawn[-1])), float(drawn[-1])
    even = first * (last / first) ** np.linspace(0.0, 1.0, NUM_BINS)
    even[-1] = last
    own = np.array([float(each.max_tokens) for each in known if each.max_tokens < drawn[-1]])
    ends = np.unique(np.concatenate([even, own]))
    at = np.searchsorted(ends, drawn)
    used = np.unique(at)
    number, tokens, squares = (np.bincount(at, drawn**power, len(ends))[used] for power in (0, 1, 2))
    scale = num_tokens / drawn.sum()
    top = np.array([drawn[at == each].max() for each in used])
    a, b, c, d, most_tokens, stages = (
        np.array([getattr(each, name) for each in known])[:, None]
        for name in ("a", "b", "c", "d", "max_tokens", "stages")
    )
    work_s = scale * (a * squares + (b + c / most_tokens) * tokens + d * number)
    one_s = np.maximum((a * top + b) * top + d + c, _full_s(b, c, most_tokens))
    fill_s = np.where(top <= most_tokens, (stages - 1) * one_s, np.inf)
    gpus = np.array([float(scheme.num_ranks) for scheme in schemes])
    kept = _undominated(
        np.concatenate([gpus[:, None], gpus[:, None] * np.where(top <= most_tokens, work_s, np.inf), fill_s], axis=1)
    )
    return _Classes(tuple(schemes[k] for k in kept), work_s[kept], fill_s[kept], gpus[kept])


def _undominated(prices: Floats) -> list[int]:
    """Rows of `prices` [schemes, what] that no other row is nowhere above and somewhere below."""
    # [schemes, schemes]: does row dominate column in every price, and in one strictly.
    no_dearer: Bools = np.asarray(prices[:, None] <= prices[None]).all(axis=2)
    cheaper: Bools = np.asarray(prices[:, None] < prices[None]).any(axis=2)
    beaten: Bools = np.logical_and(no_dearer, cheaper).any(axis=0)
    return [k for k in range(len(prices)) if not beaten[k]]


def _full_s(b: Floats, c: Floats, most_tokens: Floats) -> Floats:
    tokens = np.minimum(c / np.maximum(b * (FULL - 1), 1e-30), most_tokens)
    return b * tokens + c


def continuous(classes: _Classes, num_ranks: int, fixed: int | None = None) -> tuple[float, Floats]:
    """Seconds of a step, and numbers of pipelines [schemes] that need not be whole. `fixed`: a
    scheme with one whole pipeline at least; it takes the longest sequences first.

    Raises:
        InfeasibleError: that pipeline does not hold the longest, or leaves no GPU for the rest.
    """
    if fixed is not None and (classes.gpus[fixed] > num_ranks or np.isinf(classes.fill_s[fixed, -1])):
        raise InfeasibleError(f"one pipeline {classes.schemes[fixed]} cannot take the longest sequences")
    gpu_seconds = np.where(np.isfinite(classes.fill_s), classes.gpus[:, None] * classes.work_s, np.inf)
    # Without filling.
    low = float(gpu_seconds.min(axis=0).sum()) / num_ranks
    high = 1.25 * low
    while _needed(classes, high, fixed)[0] > num_ranks:
        low, high = high, 2 * high
        if not high < 1e9:
            raise InfeasibleError("no number of pipelines takes these sequences")
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if _needed(classes, middle, fixed)[0] > num_ranks else (low, middle)
    return high, _needed(classes, high, fixed)[1]


def _needed(classes: _Classes, seconds: float, fixed: int | None) -> tuple[float, Floats]:
    """GPUs and pipelines [schemes] for a step of so many seconds, lengths where they take fewest."""
    left = seconds - classes.fill_s
    pipelines = np.where(left > 0, classes.work_s / np.where(left > 0, left, 1.0), np.inf)
    count: Floats = np.zeros(len(classes.schemes))
    share = np.ones(classes.work_s.shape[1])
    if fixed is not None:
        room = left[fixed, -1]
        if room <= 0:
            return np.inf, count
        # Seconds of an interval and all longer ones: the fixed pipeline takes the longest first.
        done = np.cumsum(classes.work_s[fixed][::-1])[::-1]
        before = done - classes.work_s[fixed]
        taken = np.clip((room - before) / classes.work_s[fixed], 0.0, 1.0)
        share = np.where(np.isfinite(classes.fill_s[fixed]), 1 - taken, 1.0)
        count[fixed] = 1.0
    best = np.argmin(classes.gpus[:, None] * pipelines, axis=0)
    count += np.bincount(best, share * pipelines[best, np.arange(len(best))], len(count))
    return float(classes.gpus @ count), count


def roundings(count: Floats, gpus: Floats, num_ranks: int) -> set[Counts]:
    """Whole numbers of pipelines [schemes] near `count`: each down, up and one further down; GPUs
    that are left over go to more pipelines of one scheme, then of the others that fit.
    """
    used = [int(k) for k in np.argsort(-gpus * count, kind="stable") if count[k] > 1e-6][:MOST_CLASSES]
    sizes = [int(gpus[k]) for k in used]
    found: set[Counts] = set()
    for steps in product((-1, 0, 1), repeat=len(used)):
        near = [max(0, int(count[k]) + step) for k, step in zip(used, steps, strict=True)]
        left = num_ranks - sum(size * number for size, number in zip(sizes, near, strict=True))
        if left < 0:
            continue
        for first in range(len(used)):
            more, free = list(near), left
            for at in (first, *(each for each in range(len(used)) if each != first)):
                added, free = divmod(free, sizes[at])
                more[at] += added
            found.add(tuple(more))
    whole = np.zeros((len(found), len(count)), dtype=np.int64)
    whole[:, used] = np.array(list(found), dtype=np.int64).reshape(len(found), len(used))
    return set(map(tuple, whole[whole.any(axis=1)].tolist()))


def estimates(classes: _Classes, counts: Sequence[Counts], rounds: int = PRICE_ROUNDS) -> Floats:
    """Seconds of a step [strategies], sequences cut at will; infinite: the longest fits nowhere."""
    # [S, K].
    number = np.array(counts, dtype=np.float64)
    used = number.any(axis=0)
    number, work_s = number[:, used], classes.work_s[used]
    there = number > 0
    fits = np.isfinite(classes.fill_s[used])
    fill_s = classes.fill_s[used].min(axis=1)
    weight = there / number.sum(axis=1, keepdims=True)
    best = np.zeros(len(number))
    columns: Ints = np.arange(int(work_s.shape[1]))
    rows = np.arange(len(number))[:, None]
    # A strategy has few of all schemes: its own first, as many columns as any has [S, U].
    own = np.argsort(~there, axis=1, kind="stable")[:, : int(there.sum(axis=1).max())]
    is_own = there[rows, own]
    # [S, U, M].
    own_s = np.where(is_own[:, :, None] & fits[own], work_s[own], np.inf)
    for at in range(rounds):
        # [strategies, own schemes, intervals].
        price = np.where(is_own, weight[rows, own], 1.0)[:, :, None] * own_s
        # [S, M].
        first = price.argmin(axis=1)
        cheapest = own[rows, first]
        bound = price[rows, first, columns].sum(axis=1) + (weight * number * fill_s).sum(axis=1)
        best = np.maximum(best, bound)
        # Flat index into [strategies, schemes], so that one bincount sums all loads.
        cell = rows * number.shape[1] + cheapest
        load = np.bincount(cell.ravel(), work_s[cheapest, columns].ravel(), number.size).reshape(number.shape)
        each = np.where(there, load / np.maximum(number, 1) + fill_s, 0.0)
        mean = each.sum(axis=1, keepdims=True) / there.sum(axis=1, keepdims=True)
        weight = weight * np.exp((each / np.maximum(mean, 1e-30) - 1) / (at + 2))
        # Exponentials differ in their last bit from processor to processor; plans must not.
        weight = weight.astype(np.float32).astype(np.float64)
        weight /= (weight * number).sum(axis=1, keepdims=True)
    return best


def propose(lengths: Lengths, num_tokens: int, costs: SchemeCosts, num_ranks: int) -> dict[int, tuple[Strategy, ...]]:
    """Promising strategies by the longest length that they are for, the most promising first,
    `KEPT` of each.

    Raises:
        InfeasibleError: a sequence that no scheme holds.
    """
    drawn = np.sort(np.asarray(lengths, dtype=np.int64))
    found: dict[int, tuple[Strategy, ...]] = {}
    for part in LONGEST_PARTS:
        short = drawn[: np.searchsorted(drawn, part * drawn[-1], side="right")]
        longest = int(short[-1]) if len(short) else 0
        if not longest or longest in found:
            continue
        classes = _classes_of(short, num_tokens, costs, num_ranks)
        near: set[Counts] = set()
        for fixed in (None, *_anchors(classes, num_ranks)):
            try:
                _, count = continuous(classes, num_ranks, fixed)
            except InfeasibleError:
                continue
            near |= roundings(count, classes.gpus, num_ranks)
        best = _best(classes, near, EXCHANGED)
        near = set(best).union(*(_exchanges(counts, classes.gpus, num_ranks) for counts in best))
        if near:
            found[longest] = tuple(_strategy(classes.schemes, each) for each in _best(classes, near, KEPT))
    return found


def _best(classes: _Classes, counts: set[Counts], keep: int) -> list[Counts]:
    whole = sorted(counts)
    if whole:
        holds = (np.array(whole)[:, np.isfinite(classes.fill_s[:, -1])] > 0).any(axis=1)
        whole = [whole[at] for at in np.flatnonzero(holds)]
    for rounds, most in ((COARSE_ROUNDS, COARSE_KEPT * keep), (PRICE_ROUNDS, keep)):
        if whole and (len(whole) > most or rounds == PRICE_ROUNDS):
            order: list[int] = np.argsort(estimates(classes, whole, rounds), kind="stable").tolist()
            whole = [whole[at] for at in order[:most]]
    return whole


def _exchanges(counts: Counts, gpus: Floats, num_ranks: int) -> set[Counts]:
    """Numbers of pipelines with one more of a scheme for as few as possible of another."""
    found: set[Counts] = set()
    left = num_ranks - sum(int(size) * number for size, number in zip(gpus, counts, strict=True))
    sizes = [int(size) for size in gpus]
    for fewer in (at for at, number in enumerate(counts) if number):
        for more in range(len(counts)):
            gone = max(1, -(-(sizes[more] - left) // sizes[fewer]))
            added = (left + gone * sizes[fewer]) // sizes[more]
            if more != fewer and gone <= counts[fewer] and added:
                other = list(counts)
                other[fewer] -= gone
                other[more] += added
                found.add(tuple(other))
    return found


def _anchors(classes: _Classes, num_ranks: int) -> list[int]:
    """Schemes that hold the longest sequence: for each number of GPUs the one first done with it."""
    holds = np.isfinite(classes.fill_s[:, -1])
    able = [k for k in range(len(classes.schemes)) if holds[k] and classes.gpus[k] <= num_ranks]
    price = classes.work_s[:, -1] + classes.fill_s[:, -1]
    return [
        min((k for k in able if classes.gpus[k] == size), key=price.__getitem__)
        for size in sorted({classes.gpus[k] for k in able})
    ]


def _strategy(schemes: Sequence[Scheme], counts: Counts) -> Strategy:
    """The widest stages first: groups of powers of two then lie inside nodes."""
    parts = [(scheme, number) for scheme, number in zip(schemes, counts, strict=True) if number]
    parts.sort(key=lambda part: (-part[0].tensor * part[0].context, -part[0].tensor, -part[0].pipeline))
    return Strategy(tuple(scheme for scheme, number in parts for _ in range(number)))


def with_proposed(choice: PlannerChoice, steps: Sequence[Sequence[Lengths]], context: StepContext) -> PlannerChoice:
    """The planner with candidates proposed for these steps, where it asks for `strategies: auto`.

    `steps`: lengths by microbatch. InfeasibleError: a sequence that no scheme holds.
    """
    if not choice.planner.pipelines or choice.given.get("strategies") != AUTO:
        return choice
    batches = [list(chain.from_iterable(step)) for step in steps]
    costs = PredictedCosts(context.cost, context.cluster, context.model, tokens_per_rank=choice.options.tokens_per_rank)
    num_ranks = context.cluster.num_ranks
    tokens = max(1, sum(map(sum, batches)) // len(batches))
    proposed = propose(list(chain.from_iterable(batches)), tokens, costs, num_ranks)
    found = tuple(str(each.strategy) for each in rank(proposed, batches, costs, num_ranks))
    # Beside others a strategy of one scheme has their roles in its memory, and syncs by itself.
    alone = tuple(each for each in found if len(set(Strategy.parse(each).pipelines)) == 1)
    asked = [replace(choice.options, strategies=each) for each in (found, *((each,) for each in alone))]
    return replace(choice, options=min(asked, key=lambda each: _mean_s(batches, replace(context, options=each))))


def _mean_s(batches: Sequence[Lengths], context: StepContext) -> float:
    """Mean seconds of steps by the candidates of `context`'s options; infinite: one fits nowhere."""
    candidates = strategies_of(context.options)
    try:
        return fmean(fastest(batch, candidates, context)[2] for batch in batches)
    except InfeasibleError:
        return inf


def costs_of(strategy: Strategy, costs: SchemeCosts, num_ranks: int) -> tuple[PipelineCost, ...]:
    """The cost of each pipeline; ConfigError: more ranks than there are, or a scheme without costs."""
    if strategy.num_ranks > num_ranks:
        raise ConfigError(f"strategy {strategy} takes {strategy.num_ranks} ranks, and there are {num_ranks}")
    return tuple(costs.pipeline(scheme, num_ranks) for scheme in strategy.pipelines)


def rank(
    proposed: dict[int, tuple[Strategy, ...]], batches: Sequence[Lengths], costs: SchemeCosts, num_ranks: int
) -> tuple[SampledStrategy, ...]:
    """The strategies that are best for some longest length, on the batches without longer sequences,
    and the best of one scheme for all lengths, whose weights need not move; the one that holds the
    longest sequence first.
    """
    kept: dict[Strategy, tuple[PipelineCost, ...]] = {}
    most = max(proposed, default=0)
    for longest, strategies in [*proposed.items(), (most, _of_one_scheme(most, costs, num_ranks))]:
        if not strategies:
            continue
        short = [[length for length in batch if length <= longest] for batch in batches]
        known = {strategy: costs_of(strategy, costs, num_ranks) for strategy in strategies}
        best = _fastest(strategies, known, [batch for batch in short if batch])
        kept[best] = known[best]
    holds = {strategy: max(each.max_tokens for each in known) for strategy, known in kept.items()}
    seconds = {
        strategy: [max(deal(batch, known)[1]) if max(batch) <= holds[strategy] else inf for batch in batches]
        for strategy, known in kept.items()
    }
    wins = [min(kept, key=lambda each: seconds[each][at]) for at in range(len(batches))]
    candidates: list[SampledStrategy] = []
    for strategy in kept:
        held = [each for each in seconds[strategy] if each != inf]
        share, mean_s = wins.count(strategy) / len(batches), fmean(held) if held else 0.0
        candidates.append(SampledStrategy(strategy, holds[strategy], len(held), mean_s, share))
    return tuple(sorted(candidates, key=lambda each: -each.max_tokens))


def _of_one_scheme(longest: int, costs: SchemeCosts, num_ranks: int) -> tuple[Strategy, ...]:
    """The strategies of one scheme on all ranks that hold a sequence of `longest` tokens."""
    return tuple(
        Strategy((scheme,) * (num_ranks // scheme.num_ranks))
        for scheme in costs.schemes(num_ranks)
        if num_ranks % scheme.num_ranks == 0 and costs.pipeline(scheme, num_ranks).max_tokens >= longest
    )


def _fastest(
    strategies: Sequence[Strategy], known: Mapping[Strategy, Sequence[PipelineCost]], batches: Sequence[Lengths]
) -> Strategy:
    def step_s(strategy: Strategy, batch: Lengths) -> float:
        costs = known[strategy]
        return max(packed(batch, costs, dispatch(batch, costs, searches=1, filled=True))[1])

    left = list(strategies)
    for count in (*FIRST_ROUNDS, len(batches)):
        if len(left) > 1:
            mean_s = {each: fmean(step_s(each, batch) for batch in batches[:count]) for each in left}
            left = sorted(left, key=mean_s.__getitem__)[: max(1, len(left) // FEWER)]
    return left[0]


# Nodes that a tensor-parallel group may span.
MOST_NODES_OF_TENSOR = 2


@dataclass(frozen=True, slots=True)
class TableCosts:
    """Costs from a table of fitted coefficients."""

    table: SchemeTable
    _milliseconds: dict[Scheme, list[float]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        found: dict[Scheme, list[float]] = {}
        for name, numbers in self.table.milliseconds.items():
            schemes = Strategy.parse(name).pipelines
            if len(schemes) != 1:
                raise ConfigError(f"{self.table.name}: milliseconds: {name}: expected one scheme, such as tp4-pp2-cp1")
            found[schemes[0]] = numbers
        object.__setattr__(self, "_milliseconds", found)

    def schemes(self, num_ranks: int) -> tuple[Scheme, ...]:
        fit = (scheme for scheme in self._milliseconds if scheme.num_ranks <= num_ranks)
        return tuple(scheme for scheme in fit if self._max_tokens(scheme, num_ranks) > 0)

    def pipeline(self, scheme: Scheme, num_ranks: int) -> PipelineCost:
        if scheme not in self._milliseconds:
            known = ", ".join(map(str, self._milliseconds))
            raise ConfigError(f"{self.table.name} has no coefficients for {scheme}; it has {known}")
        a, b, c = (number / 1e3 for number in self._milliseconds[scheme])
        return PipelineCost(a, b, c, scheme.pipeline, self._max_tokens(scheme, num_ranks))

    def _max_tokens(self, scheme: Scheme, num_ranks: int) -> int:
        """MaxLen by C.1, two vocabulary tables where one stage holds both."""
        table, tensor = self.table, scheme.tensor
        if tensor not in table.activation_bytes:
            raise ConfigError(
                f"{table.name} has no activation_bytes for tensor parallelism {tensor}; add it beside "
                f"{', '.join(map(str, table.activation_bytes))}"
            )
        hidden, sharded = table.hidden_size, table.sharded_share
        layers = table.num_layers * hidden**2 * table.state_bytes
        vocabulary = hidden * table.vocab_size * table.vocabulary_bytes
        ends = 2 if scheme.pipeline == 1 else 1
        states = (layers + 2 * vocabulary) * sharded / num_ranks
        states += (layers / scheme.pipeline + ends * vocabulary) * (1 - sharded) / tensor
        free = table.gpu_memory_bytes - table.reserved_bytes - states
        per_token = table.num_layers * hidden / (tensor * scheme.context) * table.activation_bytes[tensor]
        return max(0, int(free / per_token))


@dataclass(frozen=True, slots=True)
class PredictedCosts:
    """Costs by data sheets or a measured table. `cost`: of one GPU. Tensor parallelism beyond a
    node takes nodes together. `tokens_per_rank`: most tokens of a GPU, beside what its memory
    holds.
    """

    cost: MachineCost
    cluster: Cluster
    model: Model
    tokens_per_rank: int | None = None
    _known: dict[tuple[Scheme, int], PipelineCost] = field(
        default_factory=dict[tuple[Scheme, int], PipelineCost], init=False, repr=False, compare=False
    )
    _most: dict[tuple[Scheme, int], int] = field(
        default_factory=dict[tuple[Scheme, int], int], init=False, repr=False, compare=False
    )

    def schemes(self, num_ranks: int) -> tuple[Scheme, ...]:
        """As in `SchemeCosts`: degrees of tensor and context parallelism are powers of two."""
        model, most = self.model, min(num_ranks, MOST_NODES_OF_TENSOR * self.cluster.node_size)
        tensors = [at for at in _powers_of_two(most) if model.num_heads % at == model.num_kv_heads % at == 0]
        found = [
            Scheme(tensor, stages, context)
            for tensor in tensors
            for stages in _divisors(model.num_layers, num_ranks // tensor)
            for context in _powers_of_two(num_ranks // tensor // stages)
            if self._lies_well(tensor, context)
        ]
        return tuple(scheme for scheme in found if self._max_tokens(scheme, num_ranks) > 0)

    def pipeline(self, scheme: Scheme, num_ranks: int) -> PipelineCost:
        if (scheme, num_ranks) not in self._known:
            check_scheme(scheme, self.model)
            wide = wide_ranks(joined_nodes(self.cluster, scheme.tensor), scheme.tensor)
            cluster = stage_cluster(wide, scheme.context)
            memory = StepMemory(self.model, tuple(stages_around(scheme, self.model, num_ranks // scheme.tensor)))
            machine = Machine(cluster, self.model, on_cluster(self.cost, cluster, scheme.tensor), memory=memory)
            self._known[scheme, num_ranks] = cost_of_scheme(scheme, machine, self._max_tokens(scheme, num_ranks))
        return self._known[scheme, num_ranks]

    def _max_tokens(self, scheme: Scheme, num_ranks: int) -> int:
        if (scheme, num_ranks) not in self._most:
            most = max_len(scheme, self.model, self.cluster.memory_bytes, num_ranks)
            if self.tokens_per_rank is not None:
                most = min(most, self.tokens_per_rank * scheme.tensor * scheme.context)
            self._most[scheme, num_ranks] = most
        return self._most[scheme, num_ranks]

    def _lies_well(self, tensor: int, context: int) -> bool:
        """Whether context-parallel ranks fill nodes, or parts of one."""
        wide = max(1, self.cluster.node_size // tensor)
        return context % wide == 0 or wide % context == 0


# `schemes`: those with costs that so many GPUs can run; `pipeline`: of one in a job of so many, which
# split the optimizer's state (ConfigError: none is known).
SchemeCosts: TypeAlias = TableCosts | PredictedCosts


def _powers_of_two(most: int) -> list[int]:
    return [1 << power for power in range(most.bit_length()) if 1 << power <= most]


def _divisors(number: int, most: int) -> list[int]:
    return [divisor for divisor in range(1, min(number, most) + 1) if number % divisor == 0]
