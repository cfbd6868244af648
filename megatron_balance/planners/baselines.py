"""The planners that choose nothing: every sequence over all ranks. They differ in the comm pattern
alone.

te_ring: zigzag, keys and values around one ring. Source: Transformer Engine's context parallelism,
`AttnFuncWithCPAndKVP2P` ("THD", load balancing); Ring Attention (Liu et al., arXiv 2310.01889). A
fragment goes round only as far as a rank still needs it.

llama_all_gather: placed in the same way; one all-gather, then one launch. Source: The Llama 3 Herd
of Models (arXiv 2407.21783), section 3.3.2.

ulysses: near-equal runs of tokens; all-to-all of q, k, v to head spans, and of the outputs back.
Paper: DeepSpeed Ulysses (Jacobs et al., arXiv 2309.14509), section 3. Heads need not divide by the
ranks.

usp: zigzag over groups of ranks, heads exchanged inside each, keys and values around a ring of the
groups. Paper: USP (Fang and Zhao, arXiv 2405.07719). LoongTrain's 2D attention (arXiv 2406.18485) is
the same; its double ring makes the same hops in another order, which is left out.

Where we differ in all: lengths need no padding. With `context_parallel` the ranks are several
groups, as data-parallel replicas are: sequences are packed by first fit into one sample a group.
"""

from bisect import bisect_left, bisect_right, insort
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from heapq import heappop, heappush
from math import inf

import numpy as np

from megatron_balance.cost.base import CostModel
from megatron_balance.errors import ConfigError
from megatron_balance.ir.arrays import Ints, Rectangles, as_rows, laid, num_pairs
from megatron_balance.ir.batch import Batch
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.columns import Placed, Task
from megatron_balance.ir.forest import over
from megatron_balance.ir.mask import Mask
from megatron_balance.ir.model import Model
from megatron_balance.ir.plan import MicrobatchPlan, TaskTable, Zone
from megatron_balance.ir.step import StepPlan
from megatron_balance.planners.base import Count, NotNegative, Slack
from megatron_balance.solvers import groups
from megatron_balance.solvers.packing import best_fit, longest_first

# The comm pattern of each planner.
PATTERNS = {"te_ring": "ring", "llama_all_gather": "all_gather", "ulysses": "head_exchange", "usp": "head_ring"}


@dataclass(frozen=True, slots=True)
class WholePoolOptions:
    tokens_per_rank: Count | None = None
    """Capacity of a rank in tokens; unlimited if not given."""
    context_parallel: Count | None = None
    """Ranks of a group. None: all."""


@dataclass(frozen=True, slots=True)
class UspOptions(WholePoolOptions):
    group_size: Count | None = None
    """Neighbouring ranks that exchange heads (USP's Ulysses degree), a divisor of `context_parallel`.
    None: those of a node."""


def _plan(
    name: str, batch: Batch, cluster: Cluster, model: Model, cost: CostModel, options: WholePoolOptions
) -> MicrobatchPlan:
    # Nothing is chosen.
    del cost
    size = options.context_parallel or cluster.num_ranks
    group_size = 0
    if isinstance(options, UspOptions):
        group_size = min(cluster.node_size, size) if options.group_size is None else options.group_size
        if size % group_size:
            raise ConfigError(f"usp: group_size {group_size}: expected a divisor of the {size} ranks that attend")
    samples = _samples(batch, cluster, options)
    names = ["pool"] if len(samples) == 1 else [f"replica {at}" for at in range(len(samples))]
    zones = tuple(
        Zone(names[at], PATTERNS[name], tuple(range(at * size, (at + 1) * size)), seqs, group_size)
        for at, seqs in enumerate(samples)
        if seqs
    )
    return groups.plan_of(name, batch.lengths, (cluster, model), zones)


def _samples(batch: Batch, cluster: Cluster, options: WholePoolOptions) -> list[tuple[int, ...]]:
    """Sequences of each group of ranks."""
    groups.check_pool(batch.lengths, cluster.num_ranks, options.tokens_per_rank)
    size = options.context_parallel or cluster.num_ranks
    return groups.samples_of(batch.lengths, size, cluster, options.tokens_per_rank)


te_ring, llama_all_gather, ulysses, usp = (partial(_plan, name) for name in PATTERNS)


# magi: equal chunks of the packed sequences, dealt by their pairs; each rank is sent the keys that
# its chunks see.
#
# Source: MagiAttention 1.1.1 (SandAI; magi_attention/meta/_make_dispatch_meta.py and
# solver/dispatch_solver.py, `MinHeapDispatchAlg`). What we implement: chunks, those with the most
# pairs first, go to the rank that has the fewest pairs, of all with less than their number of chunks.
# What we leave out: its other solvers, keys in stages that attention hides, its kernel.
#
# Where we differ and why: the last chunk is short in place of padded; with `tokens_per_rank` chunks
# are so small that the rank with the most of them keeps to it.

# `MAGI_ATTENTION_MIN_CHUNKS_PER_RANK`, its default.
_CHUNKS_PER_RANK = 8


@dataclass(frozen=True, slots=True)
class MagiOptions(WholePoolOptions):
    chunk_tokens: Count | None = None
    """Tokens of a chunk, at most. None: eight chunks a rank, the fewest of MagiAttention 1.1.1; 1.1.0
    had no default, and its charts have 2,048 (exps/dist_attn/benchmark_conf.py)."""


def magi(batch: Batch, cluster: Cluster, model: Model, cost: CostModel, options: MagiOptions) -> MicrobatchPlan:
    """A table of tasks: every rank attends to what it holds."""
    # Pairs are what is balanced, whatever they take.
    del cost
    samples, fragments = _samples(batch, cluster, options), np.empty((0, Placed.WIDTH), dtype=np.int64)
    size, lengths = cluster.num_ranks // len(samples), np.array(batch.lengths, dtype=np.int64)
    mask = over(model.mask, batch.trees)
    for at, seqs in enumerate(map(list, samples)):
        if seqs:
            shown = over(model.mask, [batch.trees[seq] for seq in seqs]) if batch.trees else mask
            own = _dealt(lengths[seqs], size, shown, options)
            own[:, Placed.RANK] += at * size
            own[:, Placed.SEQ] = np.array(seqs)[own[:, Placed.SEQ]]
            fragments = np.concatenate([fragments, own])
    zones = (_where_held("pool", fragments, lengths, mask),) if len(fragments) else ()
    return replace(groups.plan_of("magi", batch.lengths, (cluster, model), zones), mask=mask)


def _where_held(name: str, fragments: Ints, lengths: Ints, mask: Mask) -> TaskTable:
    """The table in which every rank attends to the `Placed` rows that it holds; `lengths`: of all."""
    tasks = np.zeros((len(fragments), Task.WIDTH), dtype=np.int64)
    tasks[:, Task.RANK], tasks[:, Task.QUERY] = fragments[:, Placed.RANK], fragments[:, Placed.FRAGMENT]
    last = mask.keys(fragments[:, Placed.SEQ], fragments[:, Placed.STOP] - 1)[1]
    tasks[:, Task.K_STOP] = np.minimum(last, lengths[fragments[:, Placed.SEQ]])
    return TaskTable(name, as_rows(fragments), as_rows(tasks))


def _dealt(lengths: Ints, num_ranks: int, mask: Mask, options: MagiOptions) -> Ints:
    """`Placed` rows of sequences that ranks share, by rank, then in order."""
    stops, total = np.cumsum(lengths), int(lengths.sum())
    chunk, most = options.chunk_tokens or -(-total // (_CHUNKS_PER_RANK * num_ranks)), inf
    if options.tokens_per_rank is not None:
        most = groups.with_rounding(options.tokens_per_rank, len(lengths))
    while chunk * -(-total // (chunk * num_ranks)) > most:
        chunk -= 1
    edges = np.append(np.arange(0, total, chunk), total)
    # Pairs of all queries before each edge.
    seq = np.searchsorted(stops, edges)
    begun = Rectangles(0 * seq, edges - (stops - lengths)[seq], 0 * seq, lengths[seq])
    whole = num_pairs(np.arange(len(lengths)), Rectangles(0 * lengths, lengths, 0 * lengths, lengths), mask)
    before = np.append(0, np.cumsum(whole))[seq] + num_pairs(seq, begun, mask)
    rank = np.array(_by_pairs(np.diff(before).tolist(), num_ranks))
    # Neighbouring chunks of a rank are one.
    turns = np.diff(rank, prepend=-1) != 0
    rows = laid(lengths, np.append(edges[:-1][turns], total))
    rows[:, Placed.RANK] = rank[turns][rows[:, Placed.RANK]]
    return rows[np.argsort(rows[:, Placed.RANK], kind="stable")]


def _by_pairs(pairs: Sequence[int], num_ranks: int) -> list[int]:
    """The rank of each chunk of so many pairs; no rank has more than the mean number, rounded up."""
    most, held, rank_of = -(-len(pairs) // num_ranks), [0] * num_ranks, [0] * len(pairs)
    emptiest = [(0, rank) for rank in range(num_ranks)]
    # Of equal chunks the last one first, as there.
    for chunk in sorted(range(len(pairs)), key=pairs.__getitem__)[::-1]:
        load, rank = heappop(emptiest)
        rank_of[chunk] = rank
        held[rank] += 1
        if held[rank] < most:
            heappush(emptiest, (load + pairs[chunk], rank))
    return rank_of


# packing: sequences concatenated into packs of one size, one a rank.
#
# Source: input-balanced packing, sections 2.2 and 2.3 of Zeppelin (arXiv 2509.21841); fixed-length
# packing, section 3.2 of WLB-LLM (arXiv 2503.17924); best-fit packing (Ding et al., "Fewer
# truncations improve language modeling", 2024). What we implement: packs of the batch's mean tokens
# per rank. Sequences go whole, longest first, into the pack with the least room that holds them; what
# fits no pack fills what is left and is cut where a pack ends. What we leave out: balancing
# attention, and padding.
#
# Where we differ and why: systems without document masks compute a pack as one causal sequence. Here
# a program attends within sequences only, and the later part of a cut one is sent the earlier keys;
# what would be computed in vain is a figure for the laboratory (`redundant_pairs`).

CUT, LOCAL = "cut", "local"


@dataclass(frozen=True, slots=True)
class PackingOptions:
    tokens_per_rank: Count | None = None
    """Capacity of a rank in tokens; unlimited if not given. Packs are as small as the batch lets
    them be."""


def packing(batch: Batch, cluster: Cluster, model: Model, cost: CostModel, options: PackingOptions) -> MicrobatchPlan:
    """A local zone for each rank with whole sequences, and before them a table of all cut ones."""
    # Only tokens count.
    del cost
    lengths, num_ranks = batch.lengths, cluster.num_ranks
    groups.check_pool(lengths, num_ranks, options.tokens_per_rank)
    packs = [
        batch.num_tokens * (rank + 1) // num_ranks - batch.num_tokens * rank // num_ranks for rank in range(num_ranks)
    ]
    order = longest_first(lengths)
    pack_of = best_fit([lengths[seq] for seq in order], packs)
    whole: dict[int, list[int]] = defaultdict(list)
    for seq, pack in zip(order, pack_of, strict=True):
        if pack is not None:
            whole[pack].append(seq)
    left = [packs[rank] - sum(lengths[seq] for seq in whole[rank]) for rank in range(num_ranks)]
    cut = np.array(sorted(seq for seq, pack in zip(order, pack_of, strict=True) if pack is None), dtype=np.int64)
    zones: list[Zone | TaskTable] = []
    if len(cut):
        tokens = np.array(lengths, dtype=np.int64)
        fragments = laid(tokens[cut], np.cumsum([0, *left]))
        fragments[:, Placed.SEQ] = cut[fragments[:, Placed.SEQ]]
        zones.append(_where_held(CUT, fragments, tokens, model.mask))
    zones += [Zone(LOCAL, "ring", (rank,), tuple(sorted(seqs))) for rank, seqs in sorted(whole.items()) if seqs]
    return groups.plan_of("packing", lengths, (cluster, model), tuple(zones))


def redundant_pairs(pack: Sequence[int]) -> tuple[int, ...]:
    """For each sequence of a pack, the pairs of its queries with the tokens of the sequences before
    it: what a kernel without document masks computes in vain.
    """
    before, pairs = 0, list[int]()
    for length in pack:
        pairs.append(length * before)
        before += length
    return tuple(pairs)


# hybrid_dp: short sequences on one rank each, long ones in a ring, FLOPs even (ByteScale-like).
#
# Paper: ByteScale (Ge et al., arXiv 2502.21231), hybrid data parallelism, as Zeppelin (arXiv
# 2509.21841, sections 2.2 and 5) describes it as its baseline. What we implement: a limit on a rank's
# FLOPs, the mean and `tolerance` more. Sequences, longest first, take the fewest ranks (a power of
# two, or all) that pass neither it nor the capacity: of the runs of neighbouring ranks, inside a node
# where it fits, the fullest. If that cannot be, the limit is raised. `plan_batch`: as many
# microbatches as memory asks for, and only the sum of FLOPs over them is limited.
#
# What we leave out: offloading of activations; its variant for pipelines.
#
# Where we differ and why: `plan` makes one microbatch, so memory bounds the balance, and FLOPs widen
# a group, too (ByteScale sizes groups by memory alone).

# Factors on the limit of a rank's FLOPs, tried in turn.
_RAISES = (1.0, 1.2, inf)


@dataclass(frozen=True, slots=True)
class HybridDpOptions:
    tokens_per_rank: Count | None = None
    """Capacity of a rank in tokens, per microbatch; `slack` decides if not given."""
    slack: Slack = 1.5
    """Without `tokens_per_rank`: capacity over the batch's mean tokens per rank, at least 1."""
    tolerance: NotNegative = 0.05
    """FLOPs of the busiest rank above the mean, relatively, at most; more only if there is no other
    way."""


def hybrid_dp(
    batch: Batch, cluster: Cluster, model: Model, cost: CostModel, options: HybridDpOptions
) -> MicrobatchPlan:
    """One microbatch; where nothing fits, all sequences over all ranks."""
    # FLOPs are what this system balances, whatever they take.
    del cost
    problem = _problem(batch, cluster, model, options)
    groups.check_pool(batch.lengths, cluster.num_ranks, options.tokens_per_rank)
    placed = _search(problem, options.tolerance, most_microbatches=1)
    everywhere = [tuple(range(cluster.num_ranks))] * len(batch.lengths)
    return groups.Frame("hybrid_dp", cluster, model).microbatch(
        batch.lengths, placed.ranks if placed is not None else everywhere
    )


def hybrid_dp_batch(
    batch: Batch, cluster: Cluster, model: Model, cost: CostModel, options: HybridDpOptions
) -> StepPlan:
    """As many microbatches as memory asks for; the batch may be larger than the pool."""
    del cost
    problem = _problem(batch, cluster, model, options)
    groups.check_each(batch.lengths, cluster.num_ranks, options.tokens_per_rank)
    placed = _search(problem, options.tolerance, most_microbatches=max(1, len(batch.lengths)))
    # Each sequence may have a microbatch of its own.
    assert placed is not None
    return groups.Frame("hybrid_dp", cluster, model).batch(batch.lengths, placed.ranks, placed.microbatch)


@dataclass(frozen=True, slots=True)
class _DealProblem:
    """`work`: forward FLOPs of each sequence in one layer."""

    lengths: tuple[int, ...]
    work: tuple[float, ...]
    cluster: Cluster
    capacity: int

    @property
    def mean(self) -> float:
        return sum(self.work) / self.cluster.num_ranks


def _problem(batch: Batch, cluster: Cluster, model: Model, options: HybridDpOptions) -> _DealProblem:
    capacity = groups.capacity_of(options, batch.num_tokens, cluster.num_ranks)
    pair, token = model.attention_flops_per_pair, model.linear_flops_per_token
    work = tuple(model.mask.num_pairs(n) * pair + n * token for n in batch.lengths)
    return _DealProblem(batch.lengths, work, cluster, capacity)


def _search(problem: _DealProblem, tolerance: float, most_microbatches: int) -> "_Placing | None":
    """The placement with the lowest limit on FLOPs that is found; None: none fits the capacity."""
    for factor in _RAISES:
        placing = _Placing(problem, (1 + tolerance) * factor * problem.mean, most_microbatches)
        if placing.place_all():
            return placing
    return None


class _Placing:
    """A placement in the making. `work`: FLOPs of each rank; `tokens`: by microbatch."""

    def __init__(self, problem: _DealProblem, most_work: float, most_microbatches: int) -> None:
        self.problem, self.most_work, self.most_microbatches = problem, most_work, most_microbatches
        self.work = [0.0] * problem.cluster.num_ranks
        self.by_work = [(0.0, rank) for rank in range(problem.cluster.num_ranks)]
        self.tokens: list[list[int]] = []
        self.ranks: list[tuple[int, ...]] = [()] * len(problem.lengths)
        self.microbatch = [0] * len(problem.lengths)

    def place_all(self) -> bool:
        """Place every sequence on the fewest ranks that can take it; False if one finds none."""
        lengths, cluster = self.problem.lengths, self.problem.cluster
        order = longest_first(lengths)
        allowed = groups.sizes(cluster.num_ranks)
        on = cluster.num_ranks, cluster.node_size
        runs = {size: list(map(tuple, groups.blocks(size, *on))) for size in allowed[1:]}
        return all(
            self._place_alone(seq) or any(self._place(seq, size, runs[size]) for size in allowed[1:]) for seq in order
        )

    def _place_alone(self, seq: int) -> bool:
        """Place a sequence on the fullest rank that can take it (without a limit, the emptiest)."""
        most = self.most_work - self.problem.work[seq]
        if most == inf:
            return any(self._put(seq, (rank,)) for _, rank in self.by_work.copy())
        # The fullest that stays below the limit: entries before `at`, from the last down.
        at = bisect_right(self.by_work, (most, len(self.work)))
        return any(self._put(seq, (self.by_work[i][1],)) for i in range(at - 1, -1, -1))

    def _place(self, seq: int, size: int, runs: Sequence[tuple[int, ...]]) -> bool:
        most = self.most_work - self.problem.work[seq] / size
        if most < 0:
            return False
        sign = -1 if most < inf else 1
        loads = ((max(self.work[run[0] : run[-1] + 1]), run) for run in runs)
        ordered = sorted(((load, run) for load, run in loads if load <= most), key=lambda entry: sign * entry[0])
        return any(self._put(seq, run) for _, run in ordered)

    def _put(self, seq: int, run: tuple[int, ...]) -> bool:
        share = groups.rank_tokens(self.problem.lengths[seq], len(run))
        microbatch = self._with_room(run, share)
        if microbatch is None:
            return False
        for rank in run:
            # `by_work` stays sorted: the old entry goes before the load changes.
            del self.by_work[bisect_left(self.by_work, (self.work[rank], rank))]
            self.work[rank] += self.problem.work[seq] / len(run)
            self.tokens[microbatch][rank] += share
            insort(self.by_work, (self.work[rank], rank))
        self.ranks[seq], self.microbatch[seq] = run, microbatch
        return True

    def _with_room(self, run: tuple[int, ...], share: int) -> int | None:
        most_held = self.problem.capacity - share
        for microbatch, held in enumerate(self.tokens):
            if max(held[run[0] : run[-1] + 1]) <= most_held:
                return microbatch
        # Near-equal chunks over all ranks may pass the capacity by rounding: a microbatch among
        # others takes that.
        too_large = most_held < 0 and (len(run) < len(self.work) or self.most_microbatches == 1)
        if too_large or len(self.tokens) == self.most_microbatches:
            return None
        self.tokens.append([0] * len(self.work))
        return len(self.tokens) - 1
