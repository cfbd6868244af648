"""MagiAttention's distributed benchmark on 8 to 64 H100: attention of one layer, by eight systems.

Published are charts (assets/magi_attn/exp/distributed/h100 of SandAI-org/MagiAttention, February
2026), the code that made them (exps/dist_attn) and its settings: 64 query and 8 key heads of 128, 8k
tokens a GPU, 20 packs of a fixed seed, FlashAttention-3 of an image of October 2025.

Its systems but Magi itself are implementations of the benchmark's own, so ours is the system *as
implemented there*: the kernels, copies and transfers of each step in order (`RankStep`), counted in
its code, priced by `cost`. HybridCP and Magi are run by our own plans, which make none of these
copies. Rows "as we run it" are our plan of the same scheme on the simulator; the charts do not show
them.

The benchmark's number is the mean over packs of FLOPs over time, a backward 2.5 times the
forward's FLOPs. Its inputs are projections (of 1,024 channels), so a backward also computes the
gradients of their weights.

Estimated, not measured (`reproduce magi constants`: the errors with each halved and doubled):

- An operator of torch takes a host 30 us, views too, a group call 35 us: configs/cluster/h100.yaml.
- A block of the backward's grid that finds no work: `cost.kernel.KeyBlocks.empty_s`.
- `SCATTER_PER_S`, `GAP_S` below.
- `CALL_S` below, which is read off a kernel chart: a call of 1,024 tokens takes as long under a
  causal mask as without one.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache, lru_cache, partial
from itertools import product
from statistics import fmean, median
from typing import Any, Literal, TypeAlias, get_args

import numpy as np

from megatron_balance.analysis.machine import Machine
from megatron_balance.config import load_cluster, load_model
from megatron_balance.cost import kernel
from megatron_balance.cost.analytic import AnalyticCost
from megatron_balance.cost.base import Floats, Ints
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.model import Model
from megatron_balance.ir.plan import MicrobatchPlan
from megatron_balance.lab.papers.base import PRINTED, Effort, Ours, paper
from megatron_balance.patterns.base import pairs_of
from megatron_balance.planners import PLANNERS
from megatron_balance.planners.base import StepContext
from megatron_balance.planning.choice import PlannerChoice, choose_layers, choose_planner
from megatron_balance.simulator.attention import attention_call
from megatron_balance.simulator.setup import Setup
from megatron_balance.simulator.step import simulate_step
from megatron_balance.workloads.distributions import K
from megatron_balance.workloads.lengths import Lengths

Chart: TypeAlias = Literal["packed", "document", "packed_full", "document_full"]
GPUS, NODE, TOKENS = (8, 16, 32, 64), 8, 8 * K
HEADS, KV_HEADS, HEAD_DIM, CHANNELS = 64, 8, 128, 1024
CHARTS: tuple[Chart, ...] = get_args(Chart)
# FLOPs over those of a forward, as the benchmark counts them.
FORWARD, BACKWARD = 1.0, 2.5
BF16 = 2
# Bytes of a token and head.
ROW = HEAD_DIM * BF16
MODEL = Model(HEADS, KV_HEADS, HEAD_DIM, num_layers=1, hidden_size=CHANNELS, ffn_size=CHANNELS)

# Elements that torch's `scatter_` writes a second, estimated: its kernel for expanded indices took
# 0.224 ms for 33.5 million bf16 (PyTorch issue 121389, of `gather`, which had the same one; the card
# is not named, an A100 taken), times SMs and clock of an H100 over those of an A100.
SCATTER_PER_S = 33.5e6 / 0.224e-3 * (132 * 1.755) / (108 * 1.41)
# Between two kernels of a stream, estimated: CUDA's own launch takes 2 to 5 us in microbenchmarks.
GAP_S = 3e-6
# A call of FlashAttention-3 on the host: the floor of its kernel chart (61 us at 1,024 tokens).
CALL_S = 61e-6
# Of which rank is the slowest, these are asked where there are many.
ASKED = (0.0, 0.25, 0.5, 0.75)


# Packs
#
# Documents of the benchmark's data set by length, bins (edge before, edge], each at its middle.
EDGES = (0, 10, 50, 100, 200, 500, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072, 196608)
DOCUMENTS = (
    *(30254, 391188, 699596, 1377757, 3794735, 3316785, 2106566),
    *(988525, 410002, 173574, 115007, 18428, 22513, 18284),
)
SEED, NUM_PACKS = 42, 20
# A document is cut into parts of at most this share of a pack.
LONGEST = 4


@lru_cache(maxsize=8)
def packs(num_gpus: int) -> tuple[Lengths, ...]:
    """The benchmark's first packs, which all its systems run.

    Documents longer than a quarter of a pack are cut into such parts; parts are shuffled and laid end
    to end; packs are cut from them, documents at their borders too, and shuffled.
    """
    edges, counts = np.array(EDGES), np.array(DOCUMENTS)
    lengths = (edges[:-1] + edges[1:]) // 2
    size = num_gpus * TOKENS
    longest = size // LONGEST
    whole, rest = np.divmod(lengths, longest)
    full = np.full(int(whole @ counts), longest, dtype=np.int32)
    parts = np.concatenate([full, np.repeat(rest[rest > 0].astype(np.int32), counts[rest > 0])])
    generator = np.random.default_rng(SEED)
    generator.shuffle(parts)
    ends = np.cumsum(parts, dtype=np.int64)
    order = list(range(int(ends[-1]) // size))
    generator.shuffle(order)
    found: list[Lengths] = []
    for first in (size * number for number in order[:NUM_PACKS]):
        inside = ends[np.searchsorted(ends, first, "right") : np.searchsorted(ends, first + size)]
        found.append(tuple(np.diff([first, *inside.tolist(), first + size]).tolist()))
    return tuple(found)


def drawn(chart: Chart, num_gpus: int, count: int) -> tuple[Lengths, ...]:
    """Lengths of `count` packs of a chart; one document of all tokens is one pack."""
    return packs(num_gpus)[:count] if chart in ("packed", "packed_full") else ((num_gpus * TOKENS,),)


def is_causal(chart: Chart) -> bool:
    return chart in ("packed", "document")


def flops(lengths: Lengths, chart: Chart) -> float:
    """FLOPs of a forward, as the benchmark counts them."""
    each = np.array(lengths, dtype=np.float64)
    pairs = each * (each + 1) / 2 if is_causal(chart) else each**2
    return 4 * HEADS * HEAD_DIM * float(pairs.sum())


# Steps of a system


@dataclass(frozen=True, slots=True)
class AttentionLaunch:
    """An attention kernel: `queries` over `keys` tokens of each document [documents], under a causal
    mask aligned at their ends.
    """

    queries: Ints
    keys: Ints
    heads: int
    kv_heads: int
    causal: bool


@dataclass(frozen=True, slots=True)
class RankStep:
    """Work of a rank, one part after another, and of its host that issues it.

    `copies`: bytes that each reads and writes; `scattered`: elements of each `scatter_`, behind a
    fill. `beside_s`: of transfers beside kernels and copies; `wait_s`: of transfers that all wait
    for. `operators`: of torch, `calls`: of a group.
    """

    launch: AttentionLaunch | None = None
    copies: tuple[float, ...] = ()
    scattered: tuple[float, ...] = ()
    beside_s: float = 0.0
    wait_s: float = 0.0
    operators: int = 0
    calls: int = 0

    def after(self, *copies: float, operators: int = 0, **more: Any) -> "RankStep":
        """This step with further copies and operators."""
        return replace(self, copies=(*self.copies, *copies), operators=self.operators + operators, **more)


# Of some ranks, the steps of each.
Ranks: TypeAlias = Sequence[Sequence[RankStep]]


@dataclass(frozen=True)
class Pack:
    """A pack on so many GPUs, and the links between them."""

    lengths: Ints
    cluster: Cluster
    causal: bool
    backward: bool
    cost: AnalyticCost = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "cost", AnalyticCost(self.cluster, MODEL))

    @property
    def ranks(self) -> int:
        return self.cluster.num_ranks

    def padded(self, parts: int) -> Ints:
        """Tokens of each document, filled up to a multiple."""
        return -(-self.lengths // parts) * parts

    def piece(self, parts: int, part: int) -> Ints:
        """Tokens of each document in one of its equal parts; the last ones may have none."""
        size = self.padded(parts) // parts
        return np.clip(self.lengths - part * size, 0, size)

    def hop_s(self, num_bytes: float, *, far: bool) -> float:
        """Seconds of a message to the next rank of a ring."""
        return self.cost.call_s + self.cost.link(inter_node=far).time_s(num_bytes) if num_bytes else 0.0

    def exchange_s(self, num_bytes: float, ranks: int) -> float:
        """Seconds of an all-to-all of a rank's bytes: what leaves the node moves beside what stays."""
        here, each = min(ranks, NODE), num_bytes / ranks
        inside = self.cost.link(inter_node=False).time_s((here - 1) * each)
        return self.cost.call_s + max(inside, self._away_s((ranks - here) * each / self.cluster.all_to_all_efficiency))

    def _away_s(self, num_bytes: float) -> float:
        return self.cost.link(inter_node=True).time_s(num_bytes) if num_bytes else 0.0

    def gather_s(self, num_bytes: float) -> float:
        """Seconds of an all-gather of every rank's bytes, or a reduce-scatter to them: a ring over all
        NICs, each step with the latency of its link (NCCL, graph/tuning.cc).
        """
        inside, away = (self.cost.link(inter_node=far) for far in (False, True))
        nodes = self.cluster.num_nodes
        rate = inside.bytes_per_s if nodes == 1 else min(inside.bytes_per_s, NODE * away.bytes_per_s)
        latency_s = (nodes - 1) * away.alpha_s + (self.ranks - nodes) * inside.alpha_s
        return self.cost.call_s + latency_s + (self.ranks - 1) * num_bytes / rate


# Operators around a kernel's call: three tensors are gathered forward, by an index that is sliced,
# widened by two axes and expanded; two are filled and scattered, with as many views. Backward six
# and three.
AROUND = {False: 3 * 5 + 2 * 6, True: 6 * 5 + 3 * 6}


def attended(launch: AttentionLaunch, rows: tuple[int, int], *, backward: bool) -> RankStep:
    """A kernel; its inputs are un-padded before, its results padded to `rows` of queries and keys."""
    seen = (launch.queries > 0) & (launch.keys > 0)
    launch = replace(launch, queries=launch.queries * seen, keys=launch.keys * seen)
    read_q = 2.0 * ROW * launch.heads * int(launch.queries.sum())
    read_k = 2.0 * ROW * launch.kv_heads * int(launch.keys.sum())
    of_q, of_k = HEAD_DIM * launch.heads * rows[0], HEAD_DIM * launch.kv_heads * rows[1]
    statistics = launch.heads * rows[0]
    if backward:
        gathered = (read_q, read_q, read_q, read_k, read_k, 8.0 * statistics)
        return RankStep(launch, gathered, (of_q, of_k, of_k), operators=AROUND[True])
    return RankStep(launch, (read_q, read_k, read_k), (of_q, statistics), operators=AROUND[False])


# Operators around an all-to-all: axes swapped and made whole on both sides, the call, its wait.
SWAPPED = 7


def exchanged(pack: Pack, ranks: int, tokens: int, kv_heads: int) -> RankStep:
    """The all-to-alls of q, k, v and the output inside groups of `ranks`, or of their gradients.

    A tensor's axes are swapped before and after; an output's only after, its gradient's twice.
    """
    queries, keys = float(tokens * HEADS * ROW), float(tokens * kv_heads * ROW)
    swaps = (2 * queries,) * (4 if pack.backward else 3) + (2 * keys,) * 4
    wait_s = 2 * pack.exchange_s(queries, ranks) + 2 * pack.exchange_s(keys, ranks)
    return RankStep(copies=swaps, wait_s=wait_s, operators=4 * SWAPPED, calls=4)


def ulysses(pack: Pack) -> Ranks:
    """Heads exchanged over all GPUs; with more of them than key heads, keys are repeated first."""
    ranks = pack.ranks
    total = -(-int(pack.lengths.sum()) // ranks) * ranks
    kv_heads = max(KV_HEADS, ranks)
    launch = AttentionLaunch(pack.lengths, pack.lengths, HEADS // ranks, kv_heads // ranks, pack.causal)
    kernel_step = attended(launch, (total, total), backward=pack.backward)
    return [[exchanged(pack, ranks, total // ranks, kv_heads), kernel_step]]


def asked(ranks: int) -> list[int]:
    """Ranks of which one is the slowest: all, or some along the ring with its ends."""
    some = {int(share * ranks) for share in ASKED} | {1, ranks - 2, ranks - 1}
    return list(range(ranks)) if ranks <= NODE else sorted(some)


def all_gather(pack: Pack) -> Ranks:
    """Keys of all ranks gathered and put in order; each half of a rank's queries on its own."""
    ranks, backward = pack.ranks, pack.backward
    total = int(pack.padded(2 * ranks).sum())
    tokens = total // ranks
    shard, whole, half = tokens * KV_HEADS * ROW, float(total * KV_HEADS * ROW), float(tokens * HEADS * ROW)
    # Gathered, sliced, widened, expanded, put in order: k and v. Backward also their gradients:
    # filled, put in order and reduced.
    if backward:
        around = RankStep(
            copies=(2 * whole,) * 4 + (whole,) * 2, wait_s=4 * pack.gather_s(shard), operators=10 + 3 + 6, calls=4
        )
    else:
        around = RankStep(copies=(2 * whole,) * 2, wait_s=2 * pack.gather_s(shard), operators=10 + 2, calls=2)
    found: list[list[RankStep]] = []
    for rank in asked(ranks):
        steps = [around]
        for part in (rank, 2 * ranks - 1 - rank):
            queries = pack.piece(2 * ranks, part)
            keys = np.minimum(pack.lengths, pack.padded(2 * ranks) // (2 * ranks) * (part + 1))
            launch = AttentionLaunch(queries, keys if pack.causal else pack.lengths, HEADS, KV_HEADS, pack.causal)
            step = attended(launch, (tokens // 2, total), backward=backward)
            if backward:  # halves of q and of the output's gradient; dq collected; dk, dv added
                steps.append(step.after(half, half, half, 3 * whole, 3 * whole, operators=5))
            else:  # a half of q; the output collected, its statistics of 16 columns cast and collected
                statistics = float(tokens * HEADS * 16 * BF16)
                steps.append(step.after(half, half, statistics, statistics, operators=8))
        found.append(steps)
    return found


# Operators of a ring's step beside the kernel's: two waits, a half, two selects, and corrections of
# output and statistics; backward two selects, two halves, and sums. A send and a receive are two
# calls.
RING_STEP = {False: 5 + 8, True: 4 + 8}
RING_CALLS = 2


def ring(pack: Pack, ranks: int, share: int, *, far: bool) -> Ranks:
    """A zigzag ring of `ranks` with 1 / `share` of the heads; `far`: it goes from node to node."""
    heads, kv_heads, backward = HEADS // share, KV_HEADS // share, pack.backward
    tokens = int(pack.padded(2 * ranks).sum()) // ranks
    queries, keys = float(tokens * heads * ROW), float(2 * tokens * kv_heads * ROW)
    parts = [pack.piece(2 * ranks, part) for part in range(2 * ranks)]
    found: list[list[RankStep]] = []
    for rank in asked(ranks):
        steps: list[RankStep] = []
        corrected: list[float] = []
        second = parts[2 * ranks - 1 - rank]
        for at in range(ranks):
            sender = (rank - at) % ranks
            q, k = parts[rank] + second, parts[sender] + parts[2 * ranks - 1 - sender]
            rows, moved = (tokens, tokens), (0.0, 0.0)
            if pack.causal and 0 < at <= rank:  # all queries, the first half of the keys
                k, rows, moved = parts[sender], (tokens, tokens // 2), (0.0, keys)
            elif pack.causal and at > rank:  # the second half of the queries, all keys
                q, rows, moved = second, (tokens // 2, tokens), ((3 if backward else 1) * queries, 0.0)
            launch = AttentionLaunch(q, k, heads, kv_heads, pack.causal and at == 0)
            of_q, of_k = queries * rows[0] / tokens, keys * rows[1] / tokens
            # Keys travel; backward their gradients a step behind, and dq, dk and dv are added.
            travels, summed = keys * (at < ranks - 1), ()
            if backward:
                travels, summed = travels + keys * (at > 0), (3 * of_q, 2 * of_k, 3 * of_k)
            corrected.append(3 * of_q)
            step = attended(launch, rows, backward=backward)
            copies = (*(each for each in moved if each), *summed)
            calls, beside_s = RING_CALLS * (ranks > 1), pack.hop_s(travels, far=far)
            steps.append(step.after(*copies, operators=RING_STEP[backward], beside_s=beside_s, calls=calls))
        # Behind the loop every step's output is corrected; the sum is cast.
        found.append([*steps, *(() if backward else (RankStep(copies=(*corrected, queries)),))])
    return found


# Hops of a ring of nodes that nothing hides, forward and backward.
#
# USP: in a ring of two the sends and receives of both directions are unbatched calls on one
# communicator: the second direction waits for the first, and then for the persistent kernel.
# LoongTrain has windows, of two nodes, two of two, two of four: such pairs in windows of two, a hop
# between windows, and backward the gradients' hops inside each window and between them.
HOPS = {"USP": {2: (1, 0)}, "LoongTrain": {2: (1, 2), 4: (3, 8), 8: (1, 6)}}


def _heads_and_ring(pack: Pack, system: str) -> Ranks:
    """Heads exchanged inside nodes, a ring of the nodes (USP; LoongTrain)."""
    nodes = pack.ranks // NODE
    tokens = int(pack.padded(2 * nodes).sum()) // nodes
    heads = exchanged(pack, NODE, tokens // NODE, KV_HEADS)
    hops = HOPS[system].get(nodes, (0, 0))[pack.backward]
    alone = RankStep(wait_s=hops * pack.hop_s(2 * tokens * KV_HEADS // NODE * ROW, far=True))
    return [[heads, *steps, alone] for steps in ring(pack, nodes, NODE, far=True)]


SYSTEMS: Mapping[str, Callable[[Pack], Ranks]] = {
    "ring": lambda pack: ring(pack, pack.ranks, 1, far=pack.ranks > NODE),
    "all-gather": all_gather,
    "Ulysses": ulysses,
    "USP": lambda pack: _heads_and_ring(pack, "USP"),
    "LoongTrain": lambda pack: _heads_and_ring(pack, "LoongTrain"),
}


# Prices of steps


@dataclass(frozen=True, slots=True)
class EstimateFactors:
    """Factors on what is estimated (module docstring)."""

    empty_block: float = 1.0
    operator: float = 1.0
    group_call: float = 1.0
    attention_call: float = 1.0
    scatter: float = 1.0
    gap: float = 1.0


AS_ESTIMATED = EstimateFactors()
KERNEL = "flash_attn_3"
# Magi's own kernel: 634 TFLOP/s forward, no mask, 32k, of its kernel chart.
MAGI_RATE = 0.641


@lru_cache(maxsize=8)
def cluster(num_gpus: int) -> Cluster:
    """A cluster of H100s in nodes of eight, priced with FlashAttention-3."""
    return load_cluster("h100").build(num_ranks=num_gpus, ranks_per_node=NODE).with_kernel(KERNEL)


@dataclass(frozen=True, slots=True)
class _Bill:
    """Work of a pack's steps [steps], and the rank of each.

    `empty`: blocks of the kernel's grid without work; `copied`: bytes read and written; `gaps`:
    kernels beside attention; `scattered`: elements.
    """

    rank: Ints
    kernel_s: Floats
    empty: Floats
    copied: Floats
    gaps: Floats
    scattered: Floats
    beside_s: Floats
    wait_s: Floats
    operators: Floats
    attention_calls: Floats
    calls: Floats

    def seconds(self, on: Cluster, factors: EstimateFactors = AS_ESTIMATED) -> float:
        """Seconds of the slowest rank: of its device, or of its host, which runs ahead of it."""
        blocks = kernel.LAWS[KERNEL].key_blocks
        assert blocks is not None
        work = self.kernel_s + (factors.empty_block - 1) * self.empty * blocks.empty_s / on.num_sms
        work = work + self.copied / on.memory_bytes_per_s + factors.gap * self.gaps * GAP_S
        work = work + self.scattered / (SCATTER_PER_S * factors.scatter)
        device = np.maximum(work, self.beside_s) + self.wait_s
        host = factors.operator * on.host_launch_s * self.operators + factors.group_call * on.host_call_s * self.calls
        host = host + factors.attention_call * CALL_S * self.attention_calls
        return float(max(np.bincount(self.rank, each).max() for each in (device, host)))


def bill(pack: Pack, ranks: Ranks) -> _Bill:
    """The bill of a system's steps on a pack, for any `EstimateFactors`."""
    steps = [(rank, step) for rank, each in enumerate(ranks) for step in each]
    launches = [(at, step.launch) for at, (_, step) in enumerate(steps) if step.launch is not None]
    kernel_s, empty = _kernels(pack, launches, len(steps))
    rows = [
        (
            rank,
            sum(step.copies) + BF16 * sum(step.scattered),
            len(step.copies) + 2 * len(step.scattered),
            sum(step.scattered),
            step.beside_s,
            step.wait_s,
            step.operators,
            (2 if pack.backward else 1) * (step.launch is not None),
            step.calls,
        )
        for rank, step in steps
    ]
    rank, *columns = np.array(rows, dtype=np.float64).T
    return _Bill(rank.astype(np.int64), kernel_s, empty, *columns)


def _kernels(pack: Pack, launches: Sequence[tuple[int, AttentionLaunch]], count: int) -> tuple[Floats, Floats]:
    """Seconds, and blocks without work, of the launches [count]; all have the same heads."""
    heads, kv_heads = launches[0][1].heads, launches[0][1].kv_heads
    cost = AnalyticCost(pack.cluster, replace(MODEL, num_heads=heads, num_kv_heads=kv_heads), buckets=False)
    number = np.repeat([at for at, _ in launches], [len(one.queries) for _, one in launches])
    queries, keys = (np.concatenate([getattr(one, name) for _, one in launches]) for name in ("queries", "keys"))
    causal = np.isin(number, [at for at, one in launches if one.causal])
    # Queries end with the keys that they see a part of, or stand behind keys that they see all of.
    first = np.where(causal, keys - queries, keys)
    documents = np.concatenate([np.arange(len(one.keys)) for _, one in launches])
    spans = np.column_stack([documents, first, first + queries])
    pairs = pairs_of(spans, np.column_stack([0 * keys, keys]), [(0, heads, 0, kv_heads)])
    seconds = cost.attend_s(pairs, number, count, backward=pack.backward)
    blocks = kernel.LAWS[KERNEL].key_blocks
    if not pack.backward or blocks is None:
        return seconds, np.zeros(count)
    return seconds, kernel.backward_work(pairs, number, count, MODEL.mask, blocks, buckets=False)[2]


@cache
def _bills(system: str, chart: Chart, num_gpus: int, backward: bool, count: int) -> tuple[_Bill, ...]:
    on = cluster(num_gpus)
    each = (Pack(np.array(lengths), on, is_causal(chart), backward) for lengths in drawn(chart, num_gpus, count))
    return tuple(bill(pack, SYSTEMS[system](pack)) for pack in each)


def weights_s(on: Cluster) -> float:
    """Seconds of the gradients of the projections' weights, a part of the benchmark's backward."""
    read = TOKENS * (HEADS + 2 * KV_HEADS) * ROW
    product_s = TOKENS * MODEL.projected_flops / (on.flops_per_s * on.linear_efficiency)
    return product_s + read / on.memory_bytes_per_s


def rate(seconds: Sequence[float], chart: Chart, num_gpus: int, passes: float, count: int) -> float:
    """TFLOP/s a GPU in the benchmark's statistic, of the seconds of each pack. `passes`: FLOPs over
    those of a forward.
    """
    more_s = weights_s(cluster(num_gpus)) if passes > FORWARD else 0.0
    works = (passes * flops(lengths, chart) / num_gpus for lengths in drawn(chart, num_gpus, count))
    return fmean(work / (each + more_s) / 1e12 for work, each in zip(works, seconds, strict=True))


def implemented(
    system: str, chart: Chart, num_gpus: int, backward: bool, count: int, factors: EstimateFactors = AS_ESTIMATED
) -> float:
    """TFLOP/s a GPU of a system as the benchmark implements it."""
    on = cluster(num_gpus)
    seconds = [each.seconds(on, factors) for each in _bills(system, chart, num_gpus, backward, count)]
    return rate(seconds, chart, num_gpus, BACKWARD if backward else FORWARD, count)


# Our own plans


@dataclass(frozen=True, slots=True)
class _OwnPlan:
    """A planner with its options. `rate`: of its own kernel, None: FlashAttention-3;
    `once_per_node`: None, the planner's.
    """

    planner: str
    options: Mapping[str, Any] = field(default_factory=dict[str, Any], hash=False)
    rate: float | None = None
    once_per_node: bool | None = None


MAGI: dict[str, Any] = {"chunk_tokens": 2048}
# What the charts show of these is compared with our plan.
PLANNED = {
    "HybridCP": _OwnPlan("megatron_dynamic", {"rules": "hybrid", "tokens_per_rank": TOKENS}),
    "Magi, native": _OwnPlan("magi", MAGI, MAGI_RATE, once_per_node=True),
    "Magi, a2av": _OwnPlan("magi", MAGI, MAGI_RATE, once_per_node=False),
}
AS_WE_RUN = {
    "ring": _OwnPlan("te_ring"),
    "all-gather": _OwnPlan("llama_all_gather"),
    "Ulysses": _OwnPlan("ulysses"),
    "USP": _OwnPlan("usp"),
}


@cache
def _passes_s(own: _OwnPlan, chart: Chart, num_gpus: int, count: int, buckets: bool) -> tuple[tuple[float, float], ...]:
    """Seconds of each pack, forward and backward, of our plan on the simulator, by its slowest rank.
    With `buckets` its backwards are launched by key length, which the benchmark does for none.
    """
    model = MODEL if is_causal(chart) else replace(MODEL, attention="full")
    choice, machine = _run_by(own, num_gpus, model, buckets=buckets)
    found: list[tuple[float, float]] = []
    for lengths in drawn(chart, num_gpus, count):
        calls = [attention_call(plan, machine) for plan in _plans(choice, lengths, machine)]
        forward_s, backward_s = (sum(float(call[way].end_s.max()) for call in calls) for way in (0, 1))
        found.append((forward_s, backward_s))
    return tuple(found)


def planned(own: _OwnPlan, chart: Chart, num_gpus: int, count: int, *, buckets: bool = False) -> tuple[float, float]:
    """TFLOP/s a GPU, forward and backward, of our plan on the simulator."""
    forward, backward = zip(*_passes_s(own, chart, num_gpus, count, buckets), strict=True)
    return rate(forward, chart, num_gpus, FORWARD, count), rate(backward, chart, num_gpus, BACKWARD, count)


def layer_s(own: _OwnPlan, model: Model, num_gpus: int, count: int) -> float:
    """Seconds of a layer of `model` over the packs, forward and backward, by our plan."""
    choice, machine = _run_by(own, num_gpus, model, buckets=True)
    plans = (_plans(choice, pack, machine) for pack in packs(num_gpus)[:count])
    return sum(sum(simulate_step(each, machine, Setup(policy="keep")).layer_s) for each in plans)


def _run_by(own: _OwnPlan, num_gpus: int, model: Model, *, buckets: bool) -> tuple[PlannerChoice, Machine]:
    on = cluster(num_gpus)
    if own.rate is not None:  # its grid is not known
        on = replace(on, attention_kernel=None, attention_efficiency=own.rate)
    layers = choose_layers(own.planner, once_per_node=own.once_per_node)
    machine = Machine(on, model, AnalyticCost(on, model, buckets=buckets))
    return choose_planner(own.planner, own.options, layers=layers), machine


def _plans(choice: PlannerChoice, lengths: Lengths, machine: Machine) -> Sequence[MicrobatchPlan]:
    return choice.plan_step((lengths,), StepContext(machine.cluster, machine.model, machine.cost))[0].plans


# Tables

WAYS = {"forward": False, "backward": True}


def _chart(chart: Chart, effort: Effort) -> Ours:
    """The systems as implemented, those that we plan, and ours of the same scheme."""
    count = effort.batches
    for system in effort.progress(list(SYSTEMS), f"{chart}, as implemented"):
        for num_gpus, (way, backward) in product(GPUS, WAYS.items()):
            yield f"{system}, {num_gpus} GPUs: {way}", implemented(system, chart, num_gpus, backward, count)
    named = [(name, plan, "") for name, plan in PLANNED.items()]
    if is_causal(chart):
        named += [(name, plan, ", as we run it") for name, plan in AS_WE_RUN.items()]
    cases = [(*each, num_gpus) for each in named for num_gpus in GPUS]
    for system, plan, said, num_gpus in effort.progress(cases, f"{chart}, our plans"):
        for way, found in zip(WAYS, planned(plan, chart, num_gpus, count, buckets=bool(said)), strict=True):
            yield f"{system}, {num_gpus} GPUs: {way}{said}", found


# Errors
#
# Ring's forward is bound by the host, at prices that nobody measured: explained, not predicted.
RING_FORWARD = (("ring", "forward"),)
PREDICTED = tuple(each for each in product(SYSTEMS, WAYS) if each not in RING_FORWARD)
PEERS = (*(name for name in AS_WE_RUN if name != "ring"), "HybridCP", "Magi, native")


@dataclass(frozen=True, slots=True)
class _RowGroup:
    """Published rows whose errors are summed up. `planned`: ours is our own plan."""

    charts: tuple[Chart, ...]
    rows: tuple[tuple[str, str], ...]
    planned: bool = False

    def errors(self, count: int, factors: EstimateFactors = AS_ESTIMATED) -> list[float]:
        """In per cent, alike for too fast and too slow."""
        found: list[float] = []
        for chart, (system, way), num_gpus in product(self.charts, self.rows, GPUS):
            published = PRINTED["magi"][chart]["rows"][f"{system}, {num_gpus} GPUs: {way}"]["published"]
            if not self.planned:
                ours = implemented(system, chart, num_gpus, WAYS[way], count, factors)
            else:
                ours = planned({**PLANNED, **AS_WE_RUN}[system], chart, num_gpus, count)[WAYS[way]]
            ratio = ours / published
            found.append(100 * (max(ratio, 1 / ratio) - 1))
        return found


def _planned(systems: Sequence[str], *ways: str, charts: tuple[Chart, ...] = ("packed",)) -> _RowGroup:
    return _RowGroup(charts, tuple(product(systems, ways)), planned=True)


IMPLEMENTED = {
    "as implemented, packed and document": _RowGroup(("packed", "document"), PREDICTED),
    "as implemented, packed_full": _RowGroup(("packed_full",), PREDICTED),
    "as implemented, document_full": _RowGroup(("document_full",), PREDICTED),
    "ring's forward, packed and document": _RowGroup(("packed", "document"), RING_FORWARD),
    "ring's forward, full masks": _RowGroup(("packed_full", "document_full"), RING_FORWARD),
}
GROUPS = {
    **IMPLEMENTED,
    "our plans, packed: backward": _planned(PEERS, "backward"),
    "our plans, packed: forward": _planned(PEERS, "forward"),
    # As `compare` tells them (configs/published_errors.json).
    **{
        f"{own.planner}, packed: {way}": _planned([system], way)
        for system, own in {
            **AS_WE_RUN,
            "HybridCP": PLANNED["HybridCP"],
            "Magi, native": PLANNED["Magi, native"],
        }.items()
        for way in WAYS
    },
    "HybridCP and Magi native, other charts: backward": _planned(PEERS[-2:], "backward", charts=CHARTS[1:]),
    "HybridCP and Magi native, other charts: forward": _planned(PEERS[-2:], "forward", charts=CHARTS[1:]),
    "Magi a2av, all charts": _planned(["Magi, a2av"], *WAYS, charts=CHARTS),
}


def _of_errors(name: str, errors: Sequence[float]) -> Ours:
    yield f"{name}, {len(errors)} rows: median", median(errors)
    yield f"{name}, {len(errors)} rows: worst", max(errors)


def _errors(effort: Effort) -> Ours:
    """How far ours is from what is published, by group of rows."""
    for name, group in effort.progress(list(GROUPS.items()), "errors"):
        yield from _of_errors(name, group.errors(effort.batches))


def _zeppelin(effort: Effort) -> Ours:
    """zeppelin's plans of the benchmark's packs beside Magi's, in its statistic: Magi's with its own
    kernel, and with zeppelin's; of these also a layer as wide as Llama 70B's.
    """
    zeppelin, magi = _OwnPlan("zeppelin"), PLANNED["Magi, native"]
    alike, wide = replace(magi, rate=None), replace(load_model("llama-70b"), num_layers=1)
    for num_gpus in effort.progress(list(GPUS), "zeppelin"):
        case = num_gpus, effort.batches
        ours = planned(zeppelin, "packed", *case, buckets=True)
        theirs, with_ours = planned(magi, "packed", *case), planned(alike, "packed", *case, buckets=True)
        for at, way in enumerate(WAYS):
            row = f"{num_gpus} GPUs: {way}"
            charted = PRINTED["magi"]["packed"]["rows"][f"Magi, native, {row}"]["published"]
            yield f"zeppelin, {row}", ours[at]
            yield f"zeppelin over Magi, native, both simulated, {row}", ours[at] / theirs[at]
            yield f"zeppelin, simulated, over Magi, native, measured, {row}", ours[at] / charted
            yield f"zeppelin over Magi's plan, one kernel, {row}", ours[at] / with_ours[at]
        layer = f"zeppelin over Magi's plan, one kernel, a layer of Llama 70B, {num_gpus} GPUs"
        yield layer, layer_s(alike, wide, *case) / layer_s(zeppelin, wide, *case)


def _planners(effort: Effort) -> Ours:
    """Every planner's plans of the packs, launched as we run them: by pass, and of both together."""
    # Of one microbatch on one replica the others are an all-gather or a ring.
    names = [name for name in PLANNERS if name not in ("wlb_llm", "hydraulis", "megatron")]
    for name, num_gpus in effort.progress(list(product(names, GPUS)), "planners"):
        case = "packed", num_gpus, effort.batches
        own = _OwnPlan(name)
        for way, found in zip(WAYS, planned(own, *case, buckets=True), strict=True):
            yield f"{name}, {num_gpus} GPUs: {way}", found
        both_s = [sum(each) for each in _passes_s(own, *case, True)]
        yield f"{name}, {num_gpus} GPUs: both", rate(both_s, "packed", num_gpus, FORWARD + BACKWARD, effort.batches)


def _constants(effort: Effort) -> Ours:
    """The errors with each estimated constant halved and doubled."""
    changes = [("as estimated", AS_ESTIMATED)]
    for each, (how, factor) in product(fields(EstimateFactors), {"halved": 0.5, "doubled": 2.0}.items()):
        changes.append((f"{each.name} {how}", replace(AS_ESTIMATED, **{each.name: factor})))
    for change, factors in effort.progress(changes, "constants"):
        for name, group in IMPLEMENTED.items():
            yield from _of_errors(f"{change}: {name}", group.errors(effort.batches, factors))


PAPER = paper(
    "magi",
    "MagiAttention's distributed benchmark on H100 (charts of February 2026)",
    {
        **{chart: partial(_chart, chart) for chart in CHARTS},
        "zeppelin": _zeppelin,
        "planners": _planners,
        "errors": _errors,
        "constants": _constants,
    },
)
