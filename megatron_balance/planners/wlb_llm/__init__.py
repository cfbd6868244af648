"""wlb_llm: microbatches of equal work instead of equal length, outlier documents delayed.

Paper: WLB-LLM: Workload-Balanced 4D Parallelism for Large Language Model Training (Wang et al.,
OSDI 2025, arXiv 2503.17924), section 4 (Eq. 2, Algorithm 1) and, as baselines, section 3.2 (Eq. 1).

What we implement: packing by W_a + W_l of the cost model into microbatches of at most S_max tokens
(`packing: workload`); documents that fit none go first in the next step; a multi-level queue with
thresholds L_i that delays outliers until each microbatch gets one (`thresholds`). The baselines of
the paper's Table 2: `original` (as dealt), `fixed` (greedy by squares of lengths into microbatches
of one length) and `ilp` (Eq. 1), over the microbatches of one global batch or of several
(`window`). The tuning of the thresholds is `planners.wlb_llm.tuning`.

Ours: an order of a step's microbatches for pipelines (`order`).

What we leave out: sharding inside a context-parallel group (section 5), which is another planner's,
chosen by `within`. Every planner of the registry may follow inside a microbatch.

Where we differ and why: a microbatch lies on all ranks of the pool, so N is the number of
microbatches of a step whatever the number of replicas. A document fits if it fills S_max exactly.
A queue that holds several times N documents gives up all of these. Nothing waits for ever: in the
last steps of training, and where nothing may be carried, documents that wait go first and none is
delayed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from math import inf
from typing import Any, Literal

from megatron_balance.errors import ConfigError, InfeasibleError
from megatron_balance.ir.layers import Layers
from megatron_balance.ir.step import EMPTY, Carry, Lengths, StepPlan, held_back
from megatron_balance.planners.base import StepContext
from megatron_balance.planners.wlb_llm.delay import check_thresholds, release
from megatron_balance.planners.wlb_llm.packing import (
    Document,
    PackedDocuments,
    Work,
    by_workload,
    longest_first,
    rise_and_fall,
    workload,
)
from megatron_balance.solvers import fixed_packing
from megatron_balance.solvers.packing import best_fit

NAME = "wlb_llm"
REMAINED = "remained"


@dataclass(frozen=True, slots=True)
class WlbLlmOptions:
    """Options of wlb_llm."""

    tokens_per_rank: int | None = None
    """Capacity of a rank in tokens; S_max is this times the number of ranks. Unlimited if not given.
    """
    slack: float = 1.5
    """In training without `tokens_per_rank`: S_max over the tokens of full samples, at least 1."""
    packing: Literal["workload", "original", "fixed", "ilp"] = "workload"
    """How documents come to microbatches; all but `workload` are the paper's baselines."""
    thresholds: Sequence[int] = ()
    """L_i in tokens, rising: a document of L_i or more waits in queue i. None: nothing is delayed."""
    within: str = "llama_all_gather"
    """The planner that places a microbatch on the ranks."""
    within_options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Options of that planner, such as `sharding: mixed` of `wlb_sharding`."""
    window: int = 1
    """Global batches over which `fixed` and `ilp` pack: the microbatches that are handed over at
    once are those of so many."""
    context_tokens: int | None = None
    """S of `fixed` and `ilp`, the length of a microbatch; the fullest one as dealt if not given."""
    node_limit: int = 20
    """Nodes of the search of `ilp`."""
    order: Literal["packed", "rise_and_fall"] = "packed"
    """In which order the microbatches of a step run: as they were packed, or the least work first and
    last and the most in the middle (`planners.wlb_llm.packing.rise_and_fall`)."""

    def __post_init__(self) -> None:
        """Keep a list from a YAML as a tuple, equal to one given in Python."""
        object.__setattr__(self, "thresholds", tuple(self.thresholds))


def plan_step(lengths: Lengths, context: StepContext, carry: Carry, /) -> tuple[StepPlan, Carry]:
    """Pack the documents of a step and those that wait, and place each microbatch by `within`.

    Raises:
        InfeasibleError: a document longer than S_max; documents that cannot all be held where
            nothing may be carried.
        ConfigError: options out of range.
    """
    options: WlbLlmOptions = context.options
    _check(options, len(lengths))
    packed, queued = pack(lengths, context, carry)
    step = _within(packed, context, options)
    waiting = held_back(step, lengths, carry.waiting)
    if not waiting:
        return step, EMPTY
    num_dealt = sum(map(len, lengths))
    in_queues = {each.number - num_dealt for each in queued}
    remained = [number for number, _ in waiting if number not in in_queues]
    return step, Carry.of(NAME, {REMAINED: remained}, waiting)


def pack(
    lengths: Lengths, context: StepContext, carry: Carry
) -> tuple[tuple[tuple[Document, ...], ...], Sequence[Document]]:
    """The documents of each microbatch, in the order in which they were dealt, and those in queues.

    As `plan_step`, without placing them.
    """
    options: WlbLlmOptions = context.options
    most = inf if options.tokens_per_rank is None else options.tokens_per_rank * context.cluster.num_ranks
    remained = _remained(carry)
    queued, new = _queued_and_new(lengths, carry)
    _check_longest([*remained, *queued, *new], most, context.cluster.num_ranks)
    thresholds = tuple(options.thresholds) if context.may_carry else ()
    held: list[Document] = []
    if context.may_delay:
        now, held = release(queued, new, thresholds, len(lengths))
        now = [*remained, *longest_first(now)]
    else:
        now = [*longest_first([*remained, *queued]), *longest_first(new)]
    work = workload(context.cost, context.cluster, context.model.mask)
    if options.packing == "workload":
        packed = by_workload(now, len(lengths), most, work)
    elif options.packing == "original":
        packed = _as_dealt(lengths, now, most)
    else:
        packed = _of_one_length(now, lengths, most, options, work)
    if packed.left and not context.may_carry:
        packed = _all_of(now, lengths, most, context.cluster.num_ranks)
    microbatches = packed.microbatches
    if options.order == "rise_and_fall":
        microbatches = rise_and_fall(microbatches, work)
    return tuple(tuple(sorted(each)) for each in microbatches), held


def _check(options: WlbLlmOptions, num_microbatches: int) -> None:
    """Reject options out of range.

    Raises:
        ConfigError: they are.
    """
    thresholds = check_thresholds(options.thresholds)
    if thresholds and options.packing != "workload":
        raise ConfigError(
            f"thresholds {list(thresholds)} go with packing: workload, got packing: {options.packing}; leave one out"
        )
    if options.within == NAME:
        raise ConfigError(f"within: expected the planner of one microbatch, such as llama_all_gather, got {NAME}")
    if "tokens_per_rank" in options.within_options:
        raise ConfigError(
            "within_options: tokens_per_rank is an option of wlb_llm itself, where S_max follows from it too; give it "
            "beside within_options"
        )
    if options.slack < 1:
        raise ConfigError(f"slack: expected at least 1, the tokens of full samples, got {options.slack}")
    if options.window > 1 and options.order != "packed":
        raise ConfigError(
            f"order: {options.order} orders the microbatches of one step; window: {options.window} has those of "
            "several in one order by work, leave one out"
        )
    if options.window < 1 or (num_microbatches and num_microbatches % options.window):
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


def _remained(carry: Carry) -> list[Document]:
    """Waiting documents that are in no queue: those that fit no microbatch, and another planner's."""
    if not carry.planner:
        return [Document(*each) for each in carry.waiting]
    numbers = set(carry.value()[REMAINED])
    return [Document(*each) for each in carry.waiting if each[0] in numbers]


def _queued_and_new(lengths: Lengths, carry: Carry) -> tuple[list[Document], list[Document]]:
    """Documents in queues, oldest first, and those just dealt."""
    remained = set(_remained(carry))
    queued = [each for each in (Document(*each) for each in carry.waiting) if each not in remained]
    return queued, [Document(*each) for each in enumerate(chain.from_iterable(lengths))]


def _as_dealt(lengths: Lengths, documents: Sequence[Document], most: float) -> PackedDocuments:
    """Microbatches as dealt; those that waited into the one with the fewest tokens that holds them."""
    microbatches: list[list[Document]] = []
    first = 0
    for microbatch in lengths:
        microbatches.append([Document(first + i, length) for i, length in enumerate(microbatch)])
        first += len(microbatch)
    tokens = [sum(microbatch) for microbatch in lengths]
    left: list[Document] = []
    for document in documents:
        if document.number >= 0:
            continue
        m = min(range(len(tokens)), key=tokens.__getitem__)
        if tokens[m] + document.length > most:
            left.append(document)
            continue
        tokens[m] += document.length
        microbatches[m].append(document)
    return PackedDocuments(tuple(map(tuple, microbatches)), tuple(left))


def _of_one_length(
    documents: Sequence[Document], lengths: Lengths, most: float, options: WlbLlmOptions, work: Work
) -> PackedDocuments:
    """Eq. 1, greedy or by integer program, over all microbatches; then those of like work together.

    A global batch takes as long as its largest microbatch, so the microbatches of a window come by
    work, descending.
    """
    ordered = longest_first(documents)
    context = options.context_tokens or max((sum(each) for each in lengths), default=0)
    longest = max((each.length for each in ordered), default=0)
    problem = fixed_packing.PackingProblem(
        [each.length for each in ordered], len(lengths), int(min(most, max(context, longest)))
    )
    bins = fixed_packing.greedy(problem)
    if options.packing == "ilp":
        bins = fixed_packing.improve(problem, bins, options.node_limit)
    microbatches: list[list[Document]] = [[] for _ in lengths]
    left: list[Document] = []
    for document, at in zip(ordered, bins, strict=True):
        (left if at is None else microbatches[at]).append(document)
    if options.window > 1:
        microbatches.sort(key=lambda each: -sum(work(document.length) for document in each))
    return PackedDocuments(tuple(map(tuple, microbatches)), tuple(left))


def _all_of(documents: Sequence[Document], lengths: Lengths, most: float, num_ranks: int) -> PackedDocuments:
    """All documents, where nothing may be carried: best fit by length, or else as dealt.

    Raises:
        InfeasibleError: neither holds all.
    """
    ordered = longest_first(documents)
    bins = best_fit([each.length for each in ordered], [int(most)] * len(lengths))
    if None not in bins:
        microbatches: list[list[Document]] = [[] for _ in lengths]
        for document, at in zip(ordered, bins, strict=True):
            assert at is not None
            microbatches[at].append(document)
        return PackedDocuments(tuple(map(tuple, microbatches)), ())
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


def _within(microbatches: Sequence[Sequence[Document]], context: StepContext, options: WlbLlmOptions) -> StepPlan:
    """The step in which planner `within` places the microbatches."""
    given = dict(options.within_options)
    if options.tokens_per_rank is not None:
        given["tokens_per_rank"] = options.tokens_per_rank
    asked = Layers(align=context.layers.align)
    planner = context.planner(options.within, given, None if context.layers == asked else context.layers)
    lengths = tuple(tuple(each.length for each in microbatch) for microbatch in microbatches)
    inner, carried = planner(lengths, _inside(context), EMPTY)
    assert carried.is_empty, "nothing may be carried inside a microbatch"
    numbers = [each.number for each in chain.from_iterable(microbatches)]
    members = tuple(
        tuple(tuple(numbers[seq] for seq in nano_batch) for nano_batch in microbatch) for microbatch in inner.members
    )
    return StepPlan(members, inner.plans, inner.ticks)


def _inside(context: StepContext) -> StepContext:
    return replace(context, own_microbatches=False, may_carry=False)
