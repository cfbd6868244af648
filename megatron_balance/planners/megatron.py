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

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any, Literal, TypeAlias

from megatron_balance.cost.base import CostModel
from megatron_balance.errors import ConfigError, InfeasibleError
from megatron_balance.ir.batch import Batch
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.model import Model
from megatron_balance.ir.plan import MicrobatchPlan
from megatron_balance.ir.step import EMPTY, Carry, Lengths, StepPlan
from megatron_balance.ir.strategy import Strategy
from megatron_balance.planners import pipelines
from megatron_balance.planners.base import Count, Scheduler, Slack, StepContext, planner_within, renumbered
from megatron_balance.solvers.groups import (
    Frame,
    by_sequence,
    capacity_of,
    check_each,
    check_pool,
    context_sizes,
    least_context,
    microbatches_of,
    needed,
    rank_tokens,
    samples_of,
    sizes,
)
from megatron_balance.solvers.packing import first_fit_decreasing, longest_first

WITHIN: tuple[str, dict[str, Any]] = ("te_ring", {})


@dataclass(frozen=True, slots=True)
class MegatronOptions:
    tokens_per_rank: Count | None = None
    """Capacity of a rank in tokens; a full microbatch has this times the context-parallel ranks of a
    pipeline."""
    strategy: str | None = None
    """Replicas and their degrees, such as `4*tp1-pp2-cp2`. None: the layout of the training job;
    elsewhere replicas of `context_parallel` ranks."""
    context_parallel: Count | None = None
    """Context-parallel ranks of a replica (--context-parallel-size). None: the fewest that hold the
    longest sequence; in `simulate`, `compare` and `report`, of the sizes that hold the longest of all
    batches and fit in memory, the one with the fastest step."""


def plan_step(lengths: Lengths, context: StepContext, carry: Carry, /) -> tuple[StepPlan, Carry]:
    """Pack the sequences of a step, those that wait first, and deal the microbatches in turn."""
    options: MegatronOptions = context.options
    given = () if options.strategy is None else (Strategy.parse(options.strategy),)
    candidates = pipelines.candidates_of(given, context, "strategy")
    if candidates and options.context_parallel is not None:
        raise ConfigError(
            f"context_parallel {options.context_parallel}: the strategy {candidates[0]} says the replicas already; "
            "leave out one of the two"
        )
    if not candidates:
        return _replicas(lengths, context, carry)
    every = [*carry.waiting, *enumerate(chain.from_iterable(lengths))]
    sizes = [length for _, length in every]
    own = pipelines.pipelines_of(candidates[0], context).of_one_size()
    most = own.max_tokens
    if most >= pipelines.UNLIMITED:
        raise ConfigError("tokens_per_rank: full microbatches need a limit; give the tokens that a rank holds")
    pipelines.holders([own], sizes)
    packed = [tuple(sorted(each)) for each in first_fit_decreasing(sizes, most)]
    count = len(own.costs)
    return pipelines.side_by_side(every, own, tuple(tuple(packed[at::count]) for at in range(count)), WITHIN), EMPTY


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


# megatron_dynamic: a context-parallel group of its own size for each sequence, as Megatron has it.
#
# Source: Megatron-LM, "dynamic context parallelism" (dev branch, `default_dynamic_cp`) and "hybrid
# context parallelism" (megatron-core 0.16 to 0.19 and main, `BalancedCPScheduler`). What we
# implement: both schedulers' rules, written from what they do. Sizes are powers of two or all ranks,
# groups are neighbouring ranks from the first one on, work is length^2 / size, and what does not come
# out even waits for a further microbatch. `plan_with` takes any scheduler of the same signature:
# training with `rules: hybrid` hands it Megatron's own, and tests hold ours against it, group by
# group.
#
# What we leave out: padding, the splitting of microbatches for virtual stages, a least group size.
#
# Where we differ and why: `plan` makes one microbatch, in which those of a schedule run one after the
# other: Megatron's limit is the capacity over 1, 2, 3, ... until they fit a rank, else all sequences
# go over all ranks. Megatron fails where groups do not come out; there all ranks take the microbatch.
# Sequences that share a group share one ring; `hybrid` runs each by itself.

# Megatron's limit is lowered to the capacity over this at most.
MOST_PARTS = 4


@dataclass(frozen=True, slots=True)
class MegatronDynamicOptions:
    tokens_per_rank: Count | None = None
    """Capacity of a rank in tokens, `--max-seqlen-per-dp-cp-rank`; `slack` decides if not given."""
    rules: Literal["dynamic", "hybrid"] = "dynamic"
    """Megatron's scheduler: `default_dynamic_cp`, or the releases' `BalancedCPScheduler`."""
    slack: Slack = 1.5
    """Without `tokens_per_rank`: capacity over the batch's mean tokens per rank, at least 1."""


def plan(
    batch: Batch, cluster: Cluster, model: Model, cost: CostModel, options: MegatronDynamicOptions
) -> MicrobatchPlan:
    # Megatron's workload is length^2 / size.
    del cost
    return plan_with(RULES[options.rules], batch, cluster, model, options)


def plan_by(options: MegatronDynamicOptions) -> Callable[..., MicrobatchPlan] | None:
    """`plan_with`, if another scheduler may stand in: Megatron has one for `hybrid`."""
    return plan_with if options.rules == "hybrid" else None


def plan_with(
    scheduler: Scheduler, batch: Batch, cluster: Cluster, model: Model, options: MegatronDynamicOptions
) -> MicrobatchPlan:
    """`plan` with any scheduler."""
    capacity = capacity_of(options, batch.num_tokens, cluster.num_ranks)
    check_pool(batch.lengths, cluster.num_ranks, options.tokens_per_rank)
    placement = [tuple(range(cluster.num_ranks))] * len(batch.lengths)
    for parts in range(1, MOST_PARTS + 1):
        microbatches = scheduler(batch.lengths, max(1, capacity // parts), cluster.num_ranks)
        if _most_tokens(microbatches, batch.lengths, cluster.num_ranks) <= capacity:
            placement = by_sequence(_on_ranks(microbatches), len(batch.lengths))[0]
            break
    return Frame("megatron_dynamic", cluster, model).microbatch(batch.lengths, placement)


def plan_batch(
    batch: Batch, cluster: Cluster, model: Model, cost: CostModel, options: MegatronDynamicOptions
) -> StepPlan:
    """The microbatches that Megatron would run; the batch may be larger than the pool."""
    del cost
    capacity = capacity_of(options, batch.num_tokens, cluster.num_ranks)
    check_each(batch.lengths, cluster.num_ranks, options.tokens_per_rank)
    microbatches = RULES[options.rules](batch.lengths, capacity, cluster.num_ranks)
    placement, microbatch_of = by_sequence(_on_ranks(microbatches), len(batch.lengths))
    return Frame("megatron_dynamic", cluster, model).batch(batch.lengths, placement, microbatch_of)


def _most_tokens(microbatches: "Sequence[Microbatch]", lengths: Sequence[int], num_ranks: int) -> int:
    held = [0] * num_ranks
    for _, ranks, seqs in _on_ranks(microbatches):
        tokens = sum(rank_tokens(lengths[seq], len(ranks)) for seq in seqs)
        for rank in ranks:
            held[rank] += tokens
    return max(held)


def _on_ranks(microbatches: "Sequence[Microbatch]") -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """Microbatch, ranks and sequences of each group: neighbouring ranks, from the first one on."""
    for microbatch, groups in enumerate(microbatches):
        stops = accumulate(size for size, _ in groups)
        for stop, (size, seqs) in zip(stops, groups, strict=True):
            yield microbatch, tuple(range(stop - size, stop)), seqs


# Groups in the order of their ranks: how many ranks, and the ids of their sequences.
Microbatch: TypeAlias = tuple[tuple[int, tuple[int, ...]], ...]


@dataclass(slots=True)
class _Group:
    """A group in the making. `tokens`: of each rank; `load`: sum of length^2 / size."""

    size: int
    seqs: list[int]
    tokens: float
    load: float

    def add(self, seq: int, length: int) -> None:
        self.seqs.append(seq)
        self.tokens += length / self.size
        self.load += length * length / self.size

    def drop_last(self, length: int) -> int:
        self.tokens -= length / self.size
        self.load -= length * length / self.size
        return self.seqs.pop()

    def grow(self, size: int) -> None:
        self.tokens *= self.size / size
        self.load *= self.size / size
        self.size = size


def _fill(groups: list[_Group], allowed: Sequence[int], num_ranks: int) -> bool:
    """Give ranks left to the first of the smallest groups, until none is; False: some are."""
    free = num_ranks - sum(group.size for group in groups)
    while free:
        # The first of them.
        group = min(groups, key=lambda g: g.size)
        larger = next((size for size in allowed if size > group.size), None)
        if larger is None or larger - group.size > free:
            return False
        free -= larger - group.size
        group.grow(larger)
    return True


def _frozen(groups: Sequence[_Group]) -> Microbatch:
    return tuple((group.size, tuple(group.seqs)) for group in groups)


# Share by which a rank may exceed the bound on its work.
_WORK_SLACK = 0.05


def _dynamic(lengths: Sequence[int], tokens: int, num_ranks: int) -> list[Microbatch]:
    """Rules `dynamic` (`--dynamic-context-parallel`). The longest sequence left takes the fewest
    ranks that hold it. Every other one goes where the largest work of a rank stays lowest, within a
    bound on work. What fits nowhere waits. Ranks left over make the smallest groups larger; else
    all ranks take the microbatch.
    """
    left = longest_first(lengths)
    microbatches: list[Microbatch] = []
    while left:
        made, left = _next(lengths, left, tokens, num_ranks)
        microbatches.append(made)
    return microbatches


def _next(lengths: Sequence[int], order: list[int], tokens: int, num_ranks: int) -> tuple[Microbatch, list[int]]:
    allowed = sizes(num_ranks)
    first, *others = order
    most_work = lengths[first] * tokens * (1 + _WORK_SLACK)
    making = _DynamicMicrobatch(lengths, tokens, allowed, most_work)
    making.put(first, _Group(needed(lengths[first], tokens, allowed), [], 0.0, 0.0))
    left: list[int] = []
    for seq in others:
        group = making.choose(lengths[seq])
        if group is None:
            left.append(seq)
        else:
            making.put(seq, group)
    if _fill(making.groups, allowed, num_ranks):
        return _frozen(making.groups), left
    return _everywhere(lengths, order, tokens, num_ranks)


class _DynamicMicrobatch:
    """`free`: ranks without a group; `highest`: the largest work of a rank."""

    def __init__(self, lengths: Sequence[int], tokens: int, allowed: Sequence[int], most_work: float) -> None:
        self.lengths, self.tokens, self.most_work = lengths, tokens, most_work
        self.of_size: dict[int, list[_Group]] = {size: [] for size in allowed}
        self.groups: list[_Group] = []
        self.free, self.highest = allowed[-1], 0.0

    def put(self, seq: int, group: _Group) -> None:
        if not group.seqs:
            self.groups.append(group)
            self.of_size[group.size].append(group)
            self.free -= group.size
        group.add(seq, self.lengths[seq])
        self.highest = max(self.highest, group.load)

    def choose(self, length: int) -> _Group | None:
        """The group, or a new one, with which the largest work is lowest; ties: smaller, older."""
        best, best_work = None, self.most_work
        for size, groups in self.of_size.items():
            if length > size * self.tokens:
                continue
            work, most_held = length * length / size, self.tokens - length / size
            candidates = [group for group in groups if group.tokens <= most_held]
            if size <= self.free:
                candidates.append(_Group(size, [], 0.0, 0.0))
            for group in candidates:
                projected = max(self.highest, group.load + work)
                if projected < best_work or (best is None and projected == best_work):
                    best, best_work = group, projected
        return best


def _everywhere(
    lengths: Sequence[int], order: Sequence[int], tokens: int, num_ranks: int
) -> tuple[Microbatch, list[int]]:
    group = _Group(num_ranks, [], 0.0, 0.0)
    left: list[int] = []
    for seq in order:
        if not group.seqs or group.tokens + lengths[seq] / num_ranks <= tokens:
            group.add(seq, lengths[seq])
        else:
            left.append(seq)
    return _frozen([group]), left


# Share by which the least loaded rank may have less than the most loaded one.
EVEN = 0.05
# Share by which a bucket's work may exceed the mean.
BUCKET_SLACK = 1.1


def _hybrid(lengths: Sequence[int], tokens: int, num_ranks: int) -> list[Microbatch]:
    """Rules `hybrid`, `BalancedCPScheduler` (`--hybrid-context-parallel`). A sequence takes the
    fewest ranks that hold it. Sequences are cut into buckets of about equal work; the first bucket
    whose longest finds ranks gives it away, until work is even. Then the last ones of the most
    loaded group are put back while that helps, and ranks left over make the smallest groups larger.
    """
    left = longest_first(lengths)
    microbatches: list[Microbatch] = []
    while left:
        made = _HybridMicrobatch(lengths, tokens, num_ranks)
        left = made.take(_buckets(made, left))
        left += made.put_back()
        if not _fill(made.groups, sizes(num_ranks), num_ranks):
            together = [seq for group in made.groups for seq in group.seqs]
            made.groups = [_Group(num_ranks, together, 0.0, 0.0)]
        microbatches.append(_frozen(made.groups))
    return microbatches


class _HybridMicrobatch:
    def __init__(self, lengths: Sequence[int], tokens: int, num_ranks: int) -> None:
        self.lengths, self.num_ranks = lengths, num_ranks
        allowed = sizes(num_ranks)
        self.size = {length: needed(length, tokens, allowed) for length in set(lengths)}
        self.groups: list[_Group] = []

    def work(self, seq: int) -> float:
        return self.lengths[seq] ** 2 / self.size[self.lengths[seq]]

    @property
    def free(self) -> int:
        return self.num_ranks - sum(group.size for group in self.groups)

    def take(self, buckets: list[deque[int]]) -> list[int]:
        first_size: int | None = None
        sizes_came_down = False
        while True:
            bucket = next((b for b in buckets if b and self._place_for(b[0])), None)
            if bucket is None:
                break
            seq = bucket.popleft()
            size = self.size[self.lengths[seq]]
            first_size = size if first_size is None else first_size
            self._assign(seq, size)
            sizes_came_down = sizes_came_down or size < first_size
            if sizes_came_down and any(buckets) and self._is_even():
                break
        return [seq for bucket in buckets for seq in bucket]

    def put_back(self) -> list[int]:
        """Take last sequences from the most loaded group while work gets more even."""
        back: list[int] = []
        while not self.free and not self._is_even():
            loads = [group.load for group in self.groups]
            spread = max(loads) - min(loads)
            most = loads.index(max(loads))
            group = self.groups[most]
            if len(group.seqs) == 1:
                break
            loads[most] -= self.work(group.seqs[-1])
            if max(loads) - min(loads) >= spread:
                break
            back.append(group.drop_last(self.lengths[group.seqs[-1]]))
        return back

    def _place_for(self, seq: int) -> bool:
        size = self.size[self.lengths[seq]]
        return size <= self.free or any(group.size == size for group in self.groups)

    def _assign(self, seq: int, size: int) -> None:
        if size <= self.free:
            self.groups.append(_Group(size, [], 0.0, 0.0))
            group = self.groups[-1]
        else:
            group = min((g for g in self.groups if g.size == size), key=lambda g: g.load)
        group.add(seq, self.lengths[seq])

    def _is_even(self) -> bool:
        loads = [group.load for group in self.groups]
        most = max(loads)
        return most - (0.0 if self.free else min(loads)) <= EVEN * most


def _buckets(making: _HybridMicrobatch, seqs: Sequence[int]) -> list[deque[int]]:
    num_buckets = len({making.size[making.lengths[seq]] for seq in seqs})
    target = sum(making.work(seq) for seq in seqs) / num_buckets
    buckets: list[deque[int]] = [deque()]
    work = 0.0
    for i, seq in enumerate(seqs):
        closed = len(buckets) - 1
        # Both terms count closed buckets, as in Megatron: the last ones are given one sequence each
        # only if enough are to come.
        scarce = len(seqs) - i <= num_buckets - closed - closed
        if buckets[-1] and (work + making.work(seq) > target * BUCKET_SLACK or scarce):
            buckets.append(deque())
            work = 0.0
        buckets[-1].append(seq)
        work += making.work(seq)
    return buckets


RULES: dict[str, Scheduler] = {"dynamic": _dynamic, "hybrid": _hybrid}
