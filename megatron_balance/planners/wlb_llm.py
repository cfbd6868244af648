"""wlb_llm: microbatches of equal work instead of equal length, outlier documents delayed.

Paper: WLB-LLM: Workload-Balanced 4D Parallelism for Large Language Model Training (Wang et al.,
OSDI 2025, arXiv 2503.17924), section 4 (Eq. 2, Algorithm 1) and, as baselines, section 3.2 (Eq. 1).
What we implement: packing by W_a + W_l into microbatches of at most S_max tokens (`packing:
workload`); documents that fit none go first in the next step; queues with thresholds L_i that delay
outliers until each microbatch gets one; the tuning of L_i. Baselines of Table 2: `original` (as
dealt), `fixed` (greedy by squares) and `ilp` (Eq. 1), over one or several global batches
(`window`). Ours: an `order` for pipelines.

What we leave out: sharding inside a context-parallel group (section 5), another planner's
(`within`).

Where we differ and why: a microbatch lies on all ranks, so N is the number of microbatches whatever
the replicas. A document fits if it fills S_max exactly. A queue that holds several times N
documents gives up all of these. Where nothing may be carried, documents that wait go first and none
is delayed.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from math import inf
from statistics import fmean
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from megatron_balance.cost.base import CostModel
from megatron_balance.cost.parallel import GRADIENT_BYTES
from megatron_balance.errors import ConfigError, InfeasibleError
from megatron_balance.ir.arrays import Floats
from megatron_balance.ir.batch import Batch
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.columns import Message
from megatron_balance.ir.mask import CAUSAL, Mask
from megatron_balance.ir.model import Model
from megatron_balance.ir.plan import MicrobatchPlan, Zone
from megatron_balance.ir.step import EMPTY, Carry, Lengths, StepPlan
from megatron_balance.patterns import pattern_of
from megatron_balance.patterns.base import Context
from megatron_balance.planners import base
from megatron_balance.solvers import packing
from megatron_balance.solvers.groups import check_pool, plan_of

NAME = "wlb_llm"
REMAINED = "remained"


@dataclass(frozen=True, slots=True)
class WlbLlmOptions:
    tokens_per_rank: base.Count | None = None
    """Capacity of a rank in tokens; S_max is this times the number of ranks. Unlimited if not given.
    """
    slack: base.Slack = 1.5
    """In training without `tokens_per_rank`: S_max over the tokens of full samples, at least 1."""
    packing: Literal["workload", "original", "fixed", "ilp"] = "workload"
    """How documents come to microbatches; all but `workload` are the paper's baselines."""
    thresholds: Sequence[int] = ()
    """L_i in tokens, rising: a document of L_i or more waits in queue i. None: nothing is delayed."""
    within: str = "llama_all_gather"
    """The planner that places a microbatch on the ranks."""
    within_options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Options of that planner, such as `sharding: mixed` of `wlb_sharding`."""
    window: base.Count = 1
    """Global batches over which `fixed` and `ilp` pack: the microbatches that are handed over at
    once are those of so many."""
    context_tokens: base.Count | None = None
    """S of `fixed` and `ilp`, the length of a microbatch; the fullest one as dealt if not given."""
    node_limit: base.Count = 20
    """Nodes of the search of `ilp`."""
    order: Literal["packed", "rise_and_fall"] = "packed"
    """In which order the microbatches of a step run: as they were packed, or the least work first and
    last and the most in the middle (`rise_and_fall`)."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "thresholds", tuple(self.thresholds))


def plan_step(lengths: Lengths, context: base.StepContext, carry: Carry, /) -> tuple[StepPlan, Carry]:
    """Pack the documents of a step and those that wait, and place each microbatch by `within`."""
    options: WlbLlmOptions = context.options
    _check(options, len(lengths))
    packed, after, _ = packed_step(lengths, context, carry)
    return _within(packed, context, options), after


def packed_step(
    lengths: Lengths, context: base.StepContext, carry: Carry
) -> tuple[Sequence[Sequence[Document]], Carry, int]:
    """A step whose microbatches are packed and not placed: those, what the next one is planned with,
    and the tokens that were dealt in it and wait.
    """
    microbatches, queued = _pack(lengths, context, carry)
    new = dict(enumerate(chain.from_iterable(lengths)))
    left = dict(carry.waiting) | new
    for document in chain.from_iterable(microbatches):
        del left[document.number]
    waiting = sorted((number - len(new), length) for number, length in left.items())
    fresh = sum(length for number, length in left.items() if number >= 0)
    in_queues = {each.number - len(new) for each in queued}
    remained = [number for number, _ in waiting if number not in in_queues]
    after = Carry.of(NAME, {REMAINED: remained}, tuple(waiting)) if waiting else EMPTY
    return microbatches, after, fresh


def _pack(
    lengths: Lengths, context: base.StepContext, carry: Carry
) -> tuple[tuple[tuple[Document, ...], ...], Sequence[Document]]:
    """The documents of each microbatch, as they were dealt, and those in queues."""
    options: WlbLlmOptions = context.options
    most = inf if options.tokens_per_rank is None else options.tokens_per_rank * context.cluster.num_ranks
    remained, queued = _waiting(carry)
    new = [Document(*each) for each in enumerate(chain.from_iterable(lengths))]
    _check_longest([*remained, *queued, *new], most, context.cluster.num_ranks)
    thresholds = tuple(options.thresholds) if context.may_carry else ()
    held: list[Document] = []
    if context.may_delay:
        now, held = release(queued, new, thresholds, len(lengths))
        now = [*remained, *_longest_first(now)]
    else:
        now = [*_longest_first([*remained, *queued]), *_longest_first(new)]
    work = _workload(context.cost, context.cluster, context.model.mask)
    if options.packing == "workload":
        packed = _by_workload(now, len(lengths), most, work)
    elif options.packing == "original":
        packed = _as_dealt(lengths, now, most)
    else:
        packed = _of_one_length(now, lengths, most, options, work)
    if packed.left and not context.may_carry:
        packed = _all_of(now, lengths, most, context.cluster.num_ranks)
    microbatches = packed.microbatches
    if options.order == "rise_and_fall":
        microbatches = _rise_and_fall(microbatches, work)
    return tuple(tuple(sorted(each)) for each in microbatches), held


def _check(options: WlbLlmOptions, num_microbatches: int) -> None:
    thresholds = _check_thresholds(options.thresholds)
    if thresholds and options.packing != "workload":
        raise ConfigError(
            f"thresholds {list(thresholds)} go with packing: workload, got packing: {options.packing}; leave one out"
        )
    base.check_within(NAME, options)
    if options.window > 1 and options.order != "packed":
        raise ConfigError(
            f"order: {options.order} orders the microbatches of one step; window: {options.window} has those of "
            "several in one order by work, leave one out"
        )
    if num_microbatches % options.window:
        raise ConfigError(
            f"window: expected a divisor of the {num_microbatches} microbatches that are planned at once, got "
            f"{options.window}"
        )


def _check_longest(documents: Sequence[Document], most: float, num_ranks: int) -> None:
    longest = max((each.length for each in documents), default=0)
    if longest > most:
        raise InfeasibleError(
            f"a document of {longest} tokens is longer than S_max, {most:.0f} tokens ({num_ranks} ranks x "
            f"{most / num_ranks:.0f}); raise tokens_per_rank to at least {-(-longest // num_ranks)}, or cut documents "
            "at a shorter --seq-length (documents: split)"
        )


def _waiting(carry: Carry) -> tuple[list[Document], list[Document]]:
    """Waiting documents in no queue (those that fit nowhere, and another planner's), and in queues."""
    waiting = [Document(*each) for each in carry.waiting]
    if not carry.planner:
        return waiting, []
    numbers = set(carry.value()[REMAINED])
    remained = [each for each in waiting if each.number in numbers]
    return remained, [each for each in waiting if each.number not in numbers]


def _as_dealt(lengths: Lengths, documents: Sequence[Document], most: float) -> _PackedDocuments:
    """Microbatches as dealt; those that waited into the one with the fewest tokens that holds them."""
    joined, left = packing.join_late(lengths, (each for each in documents if each.number < 0), most)
    microbatches = tuple(tuple(Document(*each) for each in microbatch) for microbatch in joined)
    return _PackedDocuments(microbatches, tuple(Document(*each) for each in left))


def _of_one_length(
    documents: Sequence[Document], lengths: Lengths, most: float, options: WlbLlmOptions, work: Work
) -> _PackedDocuments:
    """Eq. 1, greedy or by program, over all microbatches; those of a window by work."""
    ordered = _longest_first(documents)
    context = options.context_tokens or max((sum(each) for each in lengths), default=0)
    longest = max((each.length for each in ordered), default=0)
    capacity = int(min(most, max(context, longest)))
    problem = packing.PackingProblem([each.length for each in ordered], len(lengths), capacity)
    bins = packing.pack_greedily(problem)
    if options.packing == "ilp":
        bins = packing.pack_better(problem, bins, options.node_limit)
    found = _PackedDocuments.of_bins(ordered, bins, len(lengths))
    if options.window == 1:
        return found
    by_work = sorted(found.microbatches, key=lambda each: -sum(work(document.length) for document in each))
    return replace(found, microbatches=tuple(by_work))


def _all_of(documents: Sequence[Document], lengths: Lengths, most: float, num_ranks: int) -> _PackedDocuments:
    ordered = _longest_first(documents)
    bins = packing.best_fit([each.length for each in ordered], [most] * len(lengths))
    if None not in bins:
        return _PackedDocuments.of_bins(ordered, bins, len(lengths))
    packed = _as_dealt(lengths, ordered, most)
    fullest = max((sum(each.length for each in m) for m in packed.microbatches), default=0)
    if packed.left or fullest > most:
        tokens = sum(each.length for each in documents)
        raise InfeasibleError(
            f"{tokens} tokens in {len(documents)} documents do not fit {len(lengths)} microbatches of S_max = "
            f"{most:.0f} tokens ({num_ranks} ranks x {most / num_ranks:.0f}), and no step follows that takes the rest; "
            "raise tokens_per_rank, or have more microbatches"
        )
    return packed


def _within(microbatches: Sequence[Sequence[Document]], context: base.StepContext, options: WlbLlmOptions) -> StepPlan:
    planner = base.planner_within(context, options.within, options.within_options)
    lengths = tuple(tuple(each.length for each in microbatch) for microbatch in microbatches)
    return base.renumbered(
        base.placed_by(planner, lengths, context), [each.number for each in chain.from_iterable(microbatches)]
    )


# From a document's length to its workload.
Work: TypeAlias = Callable[[int], float]


class Document(NamedTuple):
    """A sequence of a step: its number (below 0: held back earlier) and its length in tokens."""

    number: int
    length: int


@dataclass(frozen=True, slots=True)
class _PackedDocuments:
    """Documents by microbatch, in the order in which they were packed, and those that fit none."""

    microbatches: tuple[tuple[Document, ...], ...]
    left: tuple[Document, ...]

    @classmethod
    def of_bins(cls, documents: Sequence[Document], bins: Sequence[int | None], count: int) -> _PackedDocuments:
        held = (tuple(documents[number] for number in own) for own in packing.members(bins, count))
        return cls(tuple(held), tuple(each for each, at in zip(documents, bins, strict=True) if at is None))


def _workload(cost: CostModel, cluster: Cluster, mask: Mask = CAUSAL) -> Work:
    """W_a + W_l of Eq. 2: seconds of one layer's forward pass of a document spread over all ranks,
    with the gathering of its keys and values.
    """
    ranks = cluster.num_ranks
    received = cost.kv_bytes(1.0) * (ranks - 1) / ranks
    gather_s = cost.inter_node_s(received, 0) if cluster.num_nodes > 1 else cost.intra_node_s(received, 0)
    token_s = cost.linear_s(1.0) / ranks + gather_s
    attention_s = cost.attention_s

    def work(length: int) -> float:
        return attention_s(mask.num_pairs(length)) / ranks + length * token_s

    return work


def _by_workload(
    documents: Sequence[Document], num_microbatches: int, most_tokens: float, work: Work
) -> _PackedDocuments:
    """Each document in turn into the microbatch with the least work, or else with the fewest tokens
    (Algorithm 1, lines 17 to 31); `most_tokens`: S_max. Ties go to the lower microbatch.
    """
    loads, tokens = [0.0] * num_microbatches, [0] * num_microbatches
    packed: list[list[Document]] = [[] for _ in range(num_microbatches)]
    left: list[Document] = []
    # Entries of other loads than `loads` are out of date.
    heap = [(0.0, m) for m in range(num_microbatches)]
    for document in documents:
        length = document.length
        while heap[0][0] != loads[heap[0][1]]:
            heapq.heappop(heap)
        m = heap[0][1]
        if tokens[m] + length > most_tokens:
            m = min(range(num_microbatches), key=tokens.__getitem__)
            if tokens[m] + length > most_tokens:
                left.append(document)
                continue
        loads[m] += work(length)
        tokens[m] += length
        packed[m].append(document)
        heapq.heappush(heap, (loads[m], m))
    return _PackedDocuments(tuple(map(tuple, packed)), tuple(left))


def _rise_and_fall(microbatches: Sequence[tuple[Document, ...]], work: Work) -> tuple[tuple[Document, ...], ...]:
    """The microbatches with the least work first and last: a pipeline of stages that alternate
    forward and backward waits longest where a long one is first or last.
    """
    rising = sorted(microbatches, key=lambda each: sum(work(document.length) for document in each))
    return (*rising[::2], *reversed(rising[1::2]))


def _longest_first(documents: Sequence[Document]) -> list[Document]:
    return sorted(documents, key=lambda each: (-each.length, each.number))


def _check_thresholds(thresholds: Sequence[int]) -> tuple[int, ...]:
    given = tuple(thresholds)
    if any(each < 1 for each in given) or any(a >= b for a, b in zip(given, given[1:], strict=False)):
        raise ConfigError(
            f"thresholds: expected lengths in tokens that rise from queue to queue, such as [32768, 65536], got "
            f"{list(given)}; 'megatron-balance tune' finds some"
        )
    return given


def release(
    waiting: Sequence[Document], new: Sequence[Document], thresholds: Sequence[int], num_microbatches: int
) -> tuple[list[Document], list[Document]]:
    """The documents that are trained now, and those that wait on (Algorithm 1, lines 4 to 15);
    `waiting`: oldest first; `thresholds`: L_1 to L_n, rising. A queue gives up its oldest N
    documents as often as it has so many: where outliers come faster than one a step, the paper's
    would grow for ever.
    """
    now: list[Document] = []
    queues: list[list[Document]] = [[] for _ in thresholds]
    for document in [*waiting, *new]:
        level = bisect_right(thresholds, document.length)
        if level:
            queues[level - 1].append(document)
        else:
            now.append(document)
    held: list[Document] = []
    for queue in queues:
        released = len(queue) - len(queue) % num_microbatches
        now += queue[:released]
        held += queue[released:]
    return now, held


OCTAVES, CANDIDATES_PER_OCTAVE = 4, 3
# Sets of thresholds that are extended.
BEAM = 6
# Imbalance that one more queue must win to be worth it.
ENOUGH = 0.005


def tune(
    steps: Sequence[Lengths], context: base.StepContext, most_delay: float, most_queues: int
) -> tuple[base.Trial, ...]:
    """The trials that no other trial beats in both imbalance and delay, by delay; one is chosen
    (section 4.2).

    The paper does not say how values are searched. Here: lengths a third of a doubling apart; the
    best few sets of n thresholds are extended by each to n + 1. The chosen one has the fewest
    queues of those within `ENOUGH` of the least imbalance under the delay allowed.

    Raises:
        ConfigError: a sample of one microbatch a step, or a number of queues that cannot be.
    """
    if most_queues < 1:
        raise ConfigError(f"--queues {most_queues}: expected at least 1")
    if not steps or min(map(len, steps)) < 2:
        raise ConfigError(
            "tune: expected a sample of steps of at least 2 microbatches, since one microbatch is always balanced; "
            "give --microbatches N"
        )
    longest = max(chain.from_iterable(chain.from_iterable(steps)))
    count = OCTAVES * CANDIDATES_PER_OCTAVE
    candidates = sorted({max(1, round(longest * 2 ** (-k / CANDIDATES_PER_OCTAVE))) for k in range(count)})
    tried = [_evaluate(steps, context, ())]
    best: list[base.Trial] = tried[:]
    for _ in range(most_queues):
        extended = {tuple(sorted({*trial.thresholds, each})) for trial in best for each in candidates}
        new = [_evaluate(steps, context, thresholds) for thresholds in sorted(extended - {t.thresholds for t in tried})]
        tried += new
        best = sorted(new, key=lambda trial: (trial.delay > most_delay, trial.imbalance))[:BEAM]
    allowed = [trial for trial in tried if trial.delay <= most_delay]
    goal = min(trial.imbalance for trial in allowed) + ENOUGH
    chosen = min(
        (trial for trial in allowed if trial.imbalance <= goal),
        key=lambda trial: (len(trial.thresholds), trial.imbalance, trial.delay),
    )
    return tuple(replace(trial, chosen=trial is chosen) for trial in _unbeaten(tried, chosen))


def _evaluate(steps: Iterable[Lengths], context: base.StepContext, thresholds: tuple[int, ...]) -> base.Trial:
    """Imbalance, mean over steps, and delay, mean over all tokens drawn, under these thresholds."""
    context = replace(context, options=replace(context.options, thresholds=thresholds, packing="workload"))
    work = _workload(context.cost, context.cluster, context.model.mask)
    carry = EMPTY
    imbalances: list[float] = []
    drawn = waited = delayed = 0
    for lengths in steps:
        microbatches, carry, left = packed_step(lengths, context, carry)
        loads = [sum(work(each.length) for each in microbatch) for microbatch in microbatches]
        if any(loads):
            imbalances.append(max(loads) * len(loads) / sum(loads))
        drawn += sum(map(sum, lengths))
        waited += carry.waiting_tokens
        delayed += left
    return base.Trial(thresholds, fmean(imbalances), waited / drawn, delayed / drawn)


def _unbeaten(tried: Sequence[base.Trial], chosen: base.Trial) -> list[base.Trial]:
    kept: list[base.Trial] = []
    for trial in sorted(tried, key=lambda each: (each.delay, each.imbalance, len(each.thresholds))):
        if trial is chosen or not kept or trial.imbalance < min(each.imbalance for each in kept):
            kept.append(trial)
    return kept


# wlb_sharding: every sequence over all ranks, cut on its own or packed with the others, whichever
# attention does sooner.
#
# Paper: WLB-LLM: Workload-Balanced 4D Parallelism for Large Language Model Training (Wang et al.,
# OSDI 2025, arXiv 2503.17924), sections 5 and 8. What we implement: `document`, each sequence in 2G
# chunks, chunk i and 2G - 1 - i on rank i, tokens left over dealt round robin (5.1); `sequence`, all
# packed to one and cut like that (3.1); `adaptive`, the one predicted sooner (5.3); `mixed`, those of
# some length or longer on their own, the rest packed (8). Keys and values are gathered by all ranks
# before one launch a zone.
#
# What we leave out: packing and delay, which is `wlb_llm`.
#
# Where we differ and why: tokens left over lengthen a rank's chunks (`patterns.zigzag`). Kernel
# time counts forward and backward. A sequence on one rank does not travel, where the paper gathers
# all; so the choice weighs what is gathered, too.


@dataclass(frozen=True, slots=True)
class WlbShardingOptions:
    tokens_per_rank: base.Count | None = None
    """Capacity of a rank in tokens; unlimited if not given."""
    sharding: Literal["document", "sequence", "adaptive", "mixed"] = "adaptive"
    """The unit that is cut: each sequence, all packed to one, the better by predicted time, or a
    mixture."""


def shard(batch: Batch, cluster: Cluster, model: Model, cost: CostModel, options: WlbShardingOptions) -> MicrobatchPlan:
    """One zone over all ranks, or two where some sequences are cut alone and others packed."""
    check_pool(batch.lengths, cluster.num_ranks, options.tokens_per_rank)
    tried = candidates(batch.lengths, cluster.num_ranks, options.sharding)
    zones = tried[0]
    if len(tried) > 1:
        on = model.num_heads, model.num_kv_heads, cluster.num_ranks, cluster.node_size
        context = Context(np.array(batch.lengths), *on, mask=model.mask)
        zones = min(tried, key=lambda zones: predicted_s(zones, context, cluster, model, cost))
    return plan_of("wlb_sharding", batch.lengths, (cluster, model), zones)


def candidates(lengths: Sequence[int], num_ranks: int, sharding: str) -> list[tuple[Zone, ...]]:
    """The zones that a sharding chooses among; of equally good ones the first counts. With `mixed`
    the longest documents are cut on their own: none, one, two, three, four, six and so on while
    these have a token for each of two chunks a rank, or all.
    """
    num_seqs = len(lengths)
    if not num_seqs:
        return [()]
    order = packing.longest_first(lengths)
    match sharding:
        case "document":
            counts = [num_seqs]
        case "sequence":
            counts = [0]
        case "adaptive":
            counts = [0, num_seqs]
        case _:
            long_enough = sum(length >= 2 * num_ranks for length in lengths)
            counts = [*_counts(long_enough), num_seqs]
    return [_zones(lengths, num_ranks, order[:count]) for count in dict.fromkeys(counts)]


def _counts(most: int) -> list[int]:
    """0, 1, 2, 3, 4, 6, 8, 12, ...: two numbers a doubling, up to `most`."""
    powers = [1 << exponent for exponent in range(most.bit_length())]
    return sorted({0, *(count for power in powers for count in (power, power + power // 2) if count <= most)})


def _zones(lengths: Sequence[int], num_ranks: int, alone: Sequence[int]) -> tuple[Zone, ...]:
    """The zone of the sequences `alone`, each cut on its own, and that of the others, packed."""
    own = set(alone)
    packed = tuple(seq for seq in range(len(lengths)) if seq not in own)
    # Even chunks give the tokens that are left over to the first ranks; the second zone's begin behind
    # them.
    first = sum(lengths[seq] for seq in own) % num_ranks
    ranks = tuple(range(num_ranks))
    zones: list[Zone] = []
    if own:
        zones.append(Zone("document", "gather_documents", ranks, tuple(sorted(own))))
    if packed:
        zones.append(Zone("sequence", "gather_sequence", ranks[first:] + ranks[:first], packed))
    return tuple(zones)


def predicted_s(zones: Sequence[Zone], context: Context, cluster: Cluster, model: Model, cost: CostModel) -> float:
    """Seconds of attention, forward and backward: kernels of the slowest rank, and each zone's gather
    and reduce-scatter, which nothing hides, with one latency and blocks as wide as the widest.
    """
    # Bytes of both, over those of the gather: gradients in fp32, the default of `gradient_wire`.
    both = 1 + GRADIENT_BYTES / model.bytes_per_element
    each = ((both * cost.kv_bytes(_widest(zone, context)), len(zone.ranks)) for zone in zones)
    moved_s = sum(_ring_s(*moved, cluster, cost) for moved in each)
    return float(kernel_s(zones, context, cost).max()) + moved_s


def _widest(zone: Zone, context: Context) -> int:
    messages = pattern_of(zone).messages(zone, context)
    return max((int(each.rows[:, Message.TOKENS].max()) for each in messages), default=0)


def _ring_s(num_bytes: float, num_ranks: int, cluster: Cluster, cost: CostModel) -> float:
    if not num_bytes:
        return 0.0
    steps = num_ranks - 1
    within_s = cost.intra_node_s(steps * num_bytes, steps)
    if cluster.num_nodes == 1:
        return within_s
    nics = cluster.node_size / cluster.ranks_per_nic
    return max(within_s, cost.inter_node_s(steps * num_bytes, steps, nics))


def kernel_s(zones: Sequence[Zone], context: Context, cost: CostModel) -> Floats:
    """Seconds of each rank's attention kernels, forward and backward: float64 [num_ranks]."""
    seconds = np.zeros(context.num_ranks)
    for zone in zones:
        launches = pattern_of(zone).rounds(zone, context).launches
        for backward in (False, True):
            each = cost.attend_s(launches.pairs, launches.launch, len(launches.merging), backward=backward)
            seconds[np.array(zone.ranks)] += each[launches.of_round].sum(axis=1)
    return seconds
