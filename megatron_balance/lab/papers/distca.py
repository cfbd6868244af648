"""DistCA (core attention disaggregation): its figures and tables beside ours.

The cases are those of section 6.1: nodes of H200 with tensor parallelism 8, two models, two data
sets. Not printed and assumed: `pretrain` has documents of up to 128K; for a longer MaxDocLen its
lengths are scaled. Longer ones of `prolong` are cut. A batch is as many samples of MaxDocLen tokens
as the batch size says (Table 4's first row of 8B is then the 1M tokens, and that of 34B the 512K
tokens, that section 6.3 names), filled with documents as they come; one that passes the end of a
sample is cut there, and its parts do not see one another, under all systems alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import inf
from statistics import fmean

import numpy as np

from megatron_balance.analysis.memory import Holding, Policy, Recompute, Sharding, rank_memory
from megatron_balance.analysis.statistics import plan_statistics
from megatron_balance.config import load_cluster, load_model
from megatron_balance.cost import parallel
from megatron_balance.cost.analytic import AnalyticCost
from megatron_balance.cost.base import Floats, Ints
from megatron_balance.ir.arrays import sums
from megatron_balance.ir.batch import Batch
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.columns import Pair, Placed, Rows
from megatron_balance.ir.mask import CAUSAL
from megatron_balance.ir.model import Model
from megatron_balance.ir.plan import MicrobatchPlan, Zone
from megatron_balance.ir.step import TickPlan
from megatron_balance.lab.papers.base import Effort, Ours, SimulatedCase, cases, number, paper
from megatron_balance.planners import flexsp
from megatron_balance.planners.distca import DistcaOptions, linear_owned, plan, plan_owned
from megatron_balance.planners.flexsp import FlexSpOptions
from megatron_balance.planning.ticks import plan_ticks, ticks
from megatron_balance.simulator import pipeline
from megatron_balance.simulator.attention import linear_s
from megatron_balance.simulator.ping_pong import PingPongMode, layers
from megatron_balance.simulator.pipeline import ChunkPass
from megatron_balance.simulator.step import Setup
from megatron_balance.simulator.ticks import simulate_ticks
from megatron_balance.solvers.packing import nano_batches
from megatron_balance.workloads.distributions import K
from megatron_balance.workloads.lengths import Lengths, draw

TENSOR = 8
MODELS = {"8B": "llama3-8b", "34B": "llama-34b"}
DATASETS = {"pretrain": "Pretrain", "prolong": "ProLong"}
SEED = 0
PRETRAIN_LONGEST = 128 * K
OPTIONS = DistcaOptions()
TOLERANCE = OPTIONS.tolerance
ROUNDS = PingPongMode(engine="rounds")


@dataclass(frozen=True)
class DistcaCase(SimulatedCase):
    """A model on nodes of eight tensor-parallel GPUs, each a rank; `stages`: of pipelines tried."""

    model_name: str
    num_nodes: int
    num_tokens: int
    max_doc: int
    stages: tuple[int, ...] = (1,)

    @cached_property
    def cost(self) -> AnalyticCost:
        gpus = load_cluster("h200").build(num_ranks=TENSOR * self.num_nodes).with_kernel("flash_attn")  # as the paper
        return AnalyticCost(parallel.wide_ranks(gpus, TENSOR), load_model(MODELS[self.model_name]), TENSOR)

    def batches(self, dataset: str, count: int) -> list[Lengths]:
        """Batches of documents, sample after sample."""
        scale = max(1, self.max_doc // PRETRAIN_LONGEST) if dataset == "pretrain" else 1
        drawn = [[scale * n for n in lengths] for lengths in draw(dataset, self.num_tokens // scale, count, SEED)]
        return [tuple(piece for chunk in chunks(lengths, self.max_doc) for piece in chunk) for lengths in drawn]

    @property
    def tokens_per_rank(self) -> float:
        return self.num_tokens / self.num_nodes

    def ping_pong(self, lengths: Sequence[int], tolerance: float | None = TOLERANCE) -> tuple[MicrobatchPlan, ...]:
        """DistCA's plans of both nano-batches of a batch."""
        options = DistcaOptions(tolerance=tolerance)
        batches = (Batch(tuple(lengths[i] for i in half)) for half in nano_batches(lengths) if half)
        return tuple(plan(batch, self.cluster, self.model, self.cost, options) for batch in batches)

    def passes_s(
        self, lengths: Sequence[int], tolerance: float | None = TOLERANCE, way: PingPongMode = ROUNDS
    ) -> tuple[float, float]:
        """Seconds of all layers under DistCA, forward and backward, of the slowest rank."""
        forward, backward = layers(self.ping_pong(lengths, tolerance), self.machine, self.model.num_layers, way)
        return float(forward.end_s.max()), float(backward.end_s.max())

    def held_bytes(self, held: HeldTokens) -> float:
        """Peak bytes of a GPU of the first pipeline stage."""
        ranks = self.num_nodes // held.stages
        sharding = Sharding(TENSOR, held.stages, optimizer=ranks)
        holding = Holding(held.policy, held.recompute, held.num_microbatches)
        return rank_memory(self.model, held.tokens, held.received, sharding, holding).total

    def fits(self, held: HeldTokens) -> bool:
        return self.held_bytes(held) <= self.cluster.memory_bytes / TENSOR


@dataclass(frozen=True, slots=True)
class HeldTokens:
    """Tokens of a rank of the first stage in each microbatch, and those whose keys it receives."""

    tokens: float
    received: float
    stages: int = 1
    recompute: Recompute = "none"
    num_microbatches: int = 1
    policy: Policy = "keep"


def chunks(documents: Sequence[int], size: int) -> list[list[int]]:
    """Chunks of `size` tokens; a document is cut where a chunk ends, and attends within its pieces."""
    packed: list[list[int]] = [[]]
    left_in_chunk = size
    for document in documents:
        left = document
        while left:
            if not left_in_chunk:
                packed.append([])
                left_in_chunk = size
            piece = min(left, left_in_chunk)
            packed[-1].append(piece)
            left, left_in_chunk = left - piece, left_in_chunk - piece
    return packed


# The systems that DistCA is compared with (section 6.1), as replicas of context-parallel groups
# that gather keys and values.
#
# Megatron: samples of MaxDocLen tokens, each cut over its group as one sequence ("per-sequence
# sharding": rank i has the i-th and the i-th but last of 2 c parts); samples are dealt to replicas
# so that their FLOPs are as even as that allows. WLB-ideal: documents dealt to replicas by their
# time, as many tokens as memory allows; each document cut over the group in the same way; no
# document waits. FlexSP's groups, greedy: of different sizes by our planner `flexsp` without its
# integer program, the documents of each cut like WLB-ideal's. Of Megatron and WLB-ideal the best
# configuration counts, as in the paper: pipeline stages where there are any, degree of context
# parallelism, and recomputation of activations where they do not fit the memory without.
#
# A layer of a group takes its slowest rank's modules and kernels, and the gathering of keys and
# values (backward: the scattering of their gradients, bf16 as the keys are), which nothing hides.
# Replicas meet at the end of a step. Gradient synchronisation and the optimizer are the same for
# all systems and left out.
@dataclass(frozen=True, slots=True)
class _GroupQueries:
    """Queries of a microbatch in a context-parallel group, in `Placed` rows."""

    rows: Ints
    num_ranks: int

    def tokens(self) -> Ints:
        """Tokens [num_ranks] of each rank."""
        rows = self.rows
        return sums(rows[:, Placed.RANK], rows[:, Placed.STOP] - rows[:, Placed.START], self.num_ranks)


def _mirrored(num_ranks: int) -> list[int]:
    """The rank of each of 2 c parts in a row, on c ranks: rank i has parts i and 2 c - 1 - i."""
    return [*range(num_ranks), *reversed(range(num_ranks))]


def per_sequence(documents: Sequence[int], num_ranks: int) -> _GroupQueries:
    """Documents packed to one sequence, which is cut."""
    return _GroupQueries(linear_owned(documents, _mirrored(num_ranks)), num_ranks)


def per_document(documents: Sequence[int], num_ranks: int) -> _GroupQueries:
    """Each document cut on its own."""
    lengths = np.array(documents, dtype=np.int64)
    # [documents, 2 c + 1] where parts begin and end.
    edges = lengths[:, None] * np.arange(2 * num_ranks + 1) // (2 * num_ranks)
    rank, seq = np.tile(_mirrored(num_ranks), len(lengths)), np.repeat(np.arange(len(lengths)), 2 * num_ranks)
    rows = np.column_stack([rank, seq, edges[:, :-1].ravel(), edges[:, 1:].ravel()])
    return _GroupQueries(rows[rows[:, Placed.STOP] > rows[:, Placed.START]], num_ranks)


def layer_s(case: DistcaCase, queries: _GroupQueries) -> tuple[float, float]:
    """Seconds of a layer of a group, forward and backward: its slowest rank, and the collective."""
    # Ranks of a context-parallel group are whole nodes, and each has its NICs to itself.
    rows, model, group = queries.rows, case.model, parallel.group_of(case.cluster, queries.num_ranks, 1)
    pairs = np.zeros((len(rows), Pair.WIDTH), dtype=np.int64)
    pairs[:, Pair.QUERY_SPAN], pairs[:, Pair.K_STOP] = rows[:, Placed.FRAGMENT], rows[:, Placed.STOP]
    pairs[:, Pair.Q_HEAD_STOP], pairs[:, Pair.KV_HEAD_STOP] = model.num_heads, model.num_kv_heads
    num_bytes = case.cost.kv_bytes(float(queries.tokens().max(initial=0)))
    passes_s: list[float] = []
    collective_s = parallel.all_gather_s(num_bytes, group)  # and the reduce-scatter of gradients
    for backward in (False, True):
        attention = case.cost.attend_s(pairs, rows[:, Placed.RANK], queries.num_ranks, backward=backward)
        linear = np.array([case.cost.layer_s(n, backward=backward) for n in queries.tokens().tolist()])
        passes_s.append(float((attention + linear).max()) + collective_s)
    return passes_s[0], passes_s[1]


@dataclass(frozen=True, slots=True)
class ReplicaConfig:
    """Configuration of the replicas: pipeline stages, degree of context parallelism, recomputation."""

    stages: int
    degree: int
    recompute: Recompute

    def replicas(self, case: DistcaCase) -> int:
        return case.num_nodes // self.stages // self.degree

    def fits(self, case: DistcaCase, tokens: float, num_microbatches: int) -> bool:
        """Whether a rank holds its tokens and the keys and values of its group's."""
        own, received = tokens / self.degree, tokens * (1 - 1 / self.degree)
        return case.fits(HeldTokens(own, received, self.stages, self.recompute, num_microbatches))

    def most_tokens(self, case: DistcaCase, num_microbatches: int) -> int:
        """Tokens of a microbatch that a group holds."""
        low, high = 0, 2 * case.num_tokens
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.fits(case, middle, num_microbatches) else (low, middle - 1)
        return low


def _replica_configs(case: DistcaCase) -> list[ReplicaConfig]:
    return [
        ReplicaConfig(stages, degree, recompute)
        for stages in case.stages
        for degree in _degrees(case.num_nodes // stages)
        for recompute in ("none", "full")
    ]


def _degrees(num_ranks: int) -> list[int]:
    return [1 << i for i in range(num_ranks.bit_length()) if num_ranks % (1 << i) == 0]


def replica_s(case: DistcaCase, microbatches: Sequence[_GroupQueries], config: ReplicaConfig) -> float:
    """Seconds of a replica's microbatches, one after another or through its pipeline (1F1B)."""
    num_layers = case.model.num_layers // config.stages
    seconds: list[tuple[float, float]] = []
    for queries in microbatches:
        forward_s, backward_s = layer_s(case, queries)
        again_s = forward_s if config.recompute == "full" else 0.0
        seconds.append((num_layers * forward_s, num_layers * (backward_s + again_s)))
    tokens = [float(queries.tokens().max(initial=0)) for queries in microbatches]
    heads = [(case.cost.head_s(n), case.cost.head_s(n, backward=True)) for n in tokens]
    if config.stages == 1:
        return sum(map(sum, seconds)) + sum(map(sum, heads))

    def each(stage: int, step: ChunkPass, start: Floats) -> Floats:
        head_s = (stage == config.stages - 1) * heads[step.microbatch][step.backward]
        return start + seconds[step.microbatch][step.backward] + head_s

    def transfer(microbatch: int) -> Floats:
        return np.array([parallel.stage_transfer_s(case.model, tokens[microbatch], case.machine.inter)])

    return pipeline.run(config.stages, len(microbatches), 1, 1, each, transfer).total_s


def _best_s(by_config: Callable[[DistcaCase, Sequence[int]], dict[ReplicaConfig, float]]) -> Seconds:
    """Seconds of a step in the best configuration; infinite if none fits the memory."""
    return lambda case, documents: min(by_config(case, documents).values(), default=inf)


def megatron_by_config(case: DistcaCase, documents: Sequence[int]) -> dict[ReplicaConfig, float]:
    """Seconds of a step by configuration, without those that leave a replica empty or do not fit."""
    packed = chunks(documents, case.max_doc)
    work = [sum(CAUSAL.num_pairs(n) for n in chunk) for chunk in packed]
    seconds: dict[ReplicaConfig, float] = {}
    for config in _replica_configs(case):
        num_replicas = config.replicas(case)
        most = -(-len(packed) // num_replicas)
        if num_replicas > len(packed) or not config.fits(case, case.max_doc, most):
            continue
        dealt = deal(work, [1.0] * len(packed), num_replicas, most)
        if dealt is not None:
            seconds[config] = max(
                replica_s(case, [per_sequence(packed[i], config.degree) for i in replica], config) for replica in dealt
            )
    return seconds


def wlb_by_config(case: DistcaCase, documents: Sequence[int]) -> dict[ReplicaConfig, float]:
    """Seconds of a step by configuration that fits; pipelines have Megatron's microbatches."""
    seconds: dict[ReplicaConfig, float] = {}
    work = [_document_s(case, n) for n in documents]
    for config in _replica_configs(case):
        num_replicas = config.replicas(case)
        each = max(1, case.num_tokens // case.max_doc // num_replicas) if case.stages != (1,) else 1
        bins = deal(work, [float(n) for n in documents], num_replicas * each, config.most_tokens(case, each))
        if bins is None:
            continue
        replicas = deal([sum(work[i] for i in one) for one in bins], [1.0] * len(bins), num_replicas, each)
        if replicas is not None:
            microbatches = [per_document([documents[i] for i in one], config.degree) for one in bins]
            seconds[config] = max(replica_s(case, [microbatches[i] for i in replica], config) for replica in replicas)
    return seconds


def _document_s(case: DistcaCase, length: int) -> float:
    """Seconds of a document in one layer, forward, by which documents are dealt."""
    return case.cost.attention_s(CAUSAL.num_pairs(length), length) + case.cost.linear_s(length)


def deal(work: Sequence[float], size: Sequence[float], num_bins: int, most: float) -> list[list[int]] | None:
    """Items, most work first, each to the bin with least that has room; None: one finds none."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    done, held = [0.0] * num_bins, [0.0] * num_bins
    for item in sorted(range(len(work)), key=lambda i: (-work[i], i)):
        open_bins = [i for i in range(num_bins) if held[i] + size[item] <= most]
        if not open_bins:
            return None
        chosen = min(open_bins, key=lambda i: (done[i], i))
        bins[chosen].append(item)
        done[chosen] += work[item]
        held[chosen] += size[item]
    return bins


def _flexsp_s(case: DistcaCase, documents: Sequence[int]) -> float:
    """Seconds of a step with groups of different sizes; infinite if they do not fit the memory."""
    made = flexsp.plan(Batch(tuple(documents)), case.cluster, case.model, case.cost, FlexSpOptions(solver="greedy"))
    group_s: list[float] = []
    for zone in made.zones:
        assert isinstance(zone, Zone)
        lengths = [documents[seq] for seq in zone.seqs]
        queries = per_document(lengths, len(zone.ranks))
        tried = (ReplicaConfig(1, len(zone.ranks), recompute) for recompute in ("none", "full"))
        possible = (config for config in tried if config.fits(case, sum(lengths), 1))
        group_s.append(min((replica_s(case, [queries], config) for config in possible), default=inf))
    return max(group_s)


# A step under DistCA: nano-batches interleaved, and with a pipeline all stages attending together,
# tick by tick.
def distca_s(case: DistcaCase, documents: Sequence[int]) -> float:
    """Seconds of a step in the best configuration; infinite if none fits the memory."""
    tried = (
        (stages, chunks(documents, size * case.max_doc)) for stages in case.stages for size in _sizes(case, stages)
    )
    return min(
        _in_a_row_s(case, microbatches) if stages == 1 else _in_ticks_s(case, stages, microbatches)
        for stages, microbatches in tried
    )


def _sizes(case: DistcaCase, stages: int) -> list[int]:
    # The most that fit without recomputation, one for a rank at most; without a pipeline half as
    # many, too.
    ranks, samples = case.num_nodes // stages, case.num_tokens // case.max_doc
    sizes = [1 << i for i in reversed(range(min(ranks, samples).bit_length()))]

    def fits(size: int) -> bool:
        tokens = float(size * case.max_doc)
        return case.fits(_held(stages, tokens / ranks, tokens, -(-samples // size), "none"))

    return list(filter(fits, sizes))[: 2 if stages == 1 else 1] or sizes[:1]


def _held(stages: int, tokens: float, received: float, num_microbatches: int, recompute: Recompute) -> HeldTokens:
    # In ticks up to 2 S - 1 microbatches are in flight instead of S (`planning.ticks`).
    usual, in_ticks = min(stages, num_microbatches), min(2 * stages - 1, num_microbatches)
    return HeldTokens(tokens * in_ticks / usual, received, stages, recompute, usual, "replay")


def _received(ping_pong: Sequence[MicrobatchPlan], case: DistcaCase) -> list[int]:
    """Tokens whose keys and values a rank receives at most, by nano-batch."""
    return [max(plan_statistics(nano_batch, case.model)["kv_tokens_received_per_rank"]) for nano_batch in ping_pong]


def _in_a_row_s(case: DistcaCase, microbatches: Sequence[Sequence[int]]) -> float:
    seconds = 0.0
    for documents in microbatches:
        tokens = sum(documents) / case.num_nodes
        received = _received(case.ping_pong(documents), case)
        seconds += case.cost.head_s(tokens) + case.cost.head_s(tokens, backward=True)
        if case.fits(HeldTokens(tokens, sum(received))):
            seconds += sum(case.passes_s(documents))
        elif case.fits(HeldTokens(tokens, max(received), policy="replay")):
            seconds += sum(case.passes_s(documents, way=replace(ROUNDS, policy="replay")))
        elif case.fits(HeldTokens(tokens, sum(received), recompute="full")):
            forward_s, backward_s = case.passes_s(documents)
            seconds += 2 * forward_s + backward_s
        else:
            return inf
    return seconds


def _in_ticks_s(case: DistcaCase, stages: int, microbatches: Sequence[Sequence[int]]) -> float:
    """Seconds with the least recomputation that fits the memory."""
    on = case.model, case.cost, OPTIONS
    stage = Cluster(case.num_nodes // stages, case.cluster.ranks_per_node)

    def of_all(lengths: tuple[int, ...], owned: Rows) -> MicrobatchPlan:
        return plan_owned(lengths, owned, case.cluster, *on)

    def ticks_of(half: int) -> tuple[TickPlan, ...]:
        batches = (Batch(tuple(documents[i] for i in nano_batches(documents)[half])) for documents in microbatches)
        return plan_ticks(ticks(stages, len(microbatches)), [plan(batch, stage, *on) for batch in batches], of_all)

    first, second = map(ticks_of, (0, 1))
    received = float(max(_received([one.plan for one in (*first, *second)], case)))
    tokens = max(map(sum, microbatches)) / stage.num_ranks
    for recompute in ("none", "full"):
        if case.fits(_held(stages, tokens, received, len(microbatches), recompute)):
            setup = Setup("replay", recompute, pipeline=stages, engine="rounds")
            return simulate_ticks(first, case.machine, setup, second).step_s
    return inf


TOKENS_PER_NODE = 128 * K


def _fig3(_: Effort) -> Ours:
    """Share of gathering keys and values in a layer's time and memory (8B, documents of 32K)."""
    for degree in (2, 4, 8, 16, 32):
        case = DistcaCase("8B", degree, degree * TOKENS_PER_NODE, 32 * K)
        share = per_document([32 * K] * (case.num_tokens // (32 * K)), degree)
        gather_s = parallel.all_gather_s(
            case.cost.kv_bytes(float(TOKENS_PER_NODE)), parallel.group_of(case.cluster, degree, 1)
        )
        yield f"{degree} nodes: all-gather", gather_s / layer_s(case, share)[0]
        sharding, others = Sharding(TENSOR, optimizer=degree), case.num_tokens - TOKENS_PER_NODE
        held = rank_memory(case.model, TOKENS_PER_NODE, others, sharding, Holding())
        yield f"{degree} nodes: gathered keys", held.received / held.total


def _fig4(effort: Effort) -> Ours:
    """Documents dealt to replicas by work, without limit and within memory (8B, chunks of 512K)."""
    # Without context parallelism. The memory's limit is the most tokens of a rank over the mean
    # that balance asks for, as printed.
    for replicas in effort.progress([2, 4, 8], "fig4"):
        case = DistcaCase("8B", replicas, replicas * 512 * K, 512 * K)
        tokens: list[float] = []
        idle: list[tuple[float, float]] = []
        for batch in case.batches("pretrain", effort.batches):
            work = [_document_s(case, n) for n in batch]
            loads: list[list[float]] = []
            for limit in (inf, number("distca", "fig4", "diverges") * case.tokens_per_rank):
                bins = deal(work, [float(n) for n in batch], replicas, limit)
                if bins is not None:
                    loads.append([sum(work[i] for i in each) for each in bins])
                    if limit == inf:
                        tokens.append(max(sum(batch[i] for i in each) for each in bins) / case.tokens_per_rank)
            idle.append((max(loads[-1]) - fmean(loads[-1]), max(loads[-1])))
        name = f"data parallelism {replicas}"
        yield f"{name}: most tokens over the mean", fmean(tokens)
        yield f"{name}: idle", sum(idle_s for idle_s, _ in idle) / sum(all_s for _, all_s in idle)


def _fig5(effort: Effort) -> Ours:
    """Rate of the kernel on 32K tokens in shards of one length, contexts drawn, over that at 4K."""
    case, generator = DistcaCase("8B", 8, 1024 * K, 128 * K), np.random.default_rng(0)
    rates: dict[int, float] = {}
    for length in (32, 64, 128, 256, 512, 1024, 4096):
        count = 32 * K // length
        each: list[float] = []
        for _ in range(effort.batches):
            pairs = np.zeros((count, Pair.WIDTH), dtype=np.int64)
            stop = length + generator.integers(0, 32 * K, count)
            pairs[:, Pair.Q_START], pairs[:, Pair.Q_STOP], pairs[:, Pair.K_STOP] = stop - length, stop, stop
            pairs[:, Pair.Q_HEAD_STOP], pairs[:, Pair.KV_HEAD_STOP] = case.model.num_heads, case.model.num_kv_heads
            seconds = case.cost.attend_s(pairs, np.zeros(count, dtype=np.int64), 1)[0]
            each.append(float((length * (stop - length + (length + 1) / 2)).sum() / seconds))
        rates[length] = fmean(each)
    return ((f"shards of {n}", rate / rates[4096]) for n, rate in rates.items())


def _fig6(effort: Effort) -> Ours:
    """Documents dealt to replicas and cut in their groups (8B, 64 GPUs, chunks of 512K)."""
    case = DistcaCase("8B", 8, 1024 * K, 512 * K)
    samples: dict[int, list[float]] = {degree: [] for degree in _degrees(8)}
    for batch in case.batches("pretrain", effort.batches):
        by_degree: dict[int, float] = {}
        for config, seconds in wlb_by_config(case, batch).items():
            by_degree[config.degree] = min(seconds, by_degree.get(config.degree, inf))
        for degree, seconds in by_degree.items():
            samples[degree].append(case.num_tokens / seconds / 8 / TENSOR)
    for degree, each in samples.items():
        yield f"DP {8 // degree}, CP {degree}", fmean(each) if each else 0.0, f"{len(each)} batches fit"


# Appendix A: into how many shards a document may be cut before its keys no longer hide behind the
# layers outside attention.
BYTES_PER_S = 50e9
MFU = 0.5
FLOPS_PER_S = 990e12


def _bound(token_s: float, model: Model, kv_tensors: int) -> float:
    """The largest s for which l h_q + l h_kv (s + 1) / 2 travels within the time of l tokens."""
    # h_kv counts `kv_tensors` tensors.
    size_q = model.num_heads * model.head_dim * model.bytes_per_element
    size_kv = kv_tensors * model.num_kv_heads * model.head_dim * model.bytes_per_element
    return 2 * (token_s * BYTES_PER_S - size_q) / size_kv - 1


def _appendix_a(_: Effort) -> Ours:
    model = DistcaCase("34B", 8, 512 * K, 128 * K).model
    hidden, kv_hidden, inner = model.hidden_size, model.num_kv_heads * model.head_dim, model.ffn_size
    flops = 2.0 * hidden * (2 * hidden + kv_hidden + 3 * inner)
    both = 2.0 * hidden * (2 * hidden + 2 * kv_hidden + 3 * inner)
    token_s, both_s = (each / (MFU * FLOPS_PER_S) for each in (flops, both))
    yield "FLOPs of a token outside attention", flops
    yield "seconds of a token", token_s
    yield "shards, by the printed formula", _bound(token_s, model, 1)
    yield "shards, keys and values both counted", _bound(both_s, model, 2)


# Figures 9 and 10 and section 6.2: speedup over Megatron, FlexSP and WLB-LLM without pipelines, on
# the grid of Table 4; over Megatron and WLB-LLM with pipelines, on that of Table 5.
# Of each row of a table: model, MaxDocLen in K, batch size by number of nodes.
Sizes = Sequence[tuple[str, int, Mapping[int, int]]]
TABLE_4: Sizes = cases("distca", "fig9")
TABLE_5: Sizes = cases("distca", "fig10")
# Of Figure 10's pipelines.
STAGES = (1, 2, 4)
# On 8 nodes, of documents of up to 128K.
TOKENS = {model: sizes[8] * longest * K for model, longest, sizes in TABLE_4 if longest == 128}
GREEDY = "FlexSP's groups, greedy"
Seconds = Callable[[DistcaCase, Sequence[int]], float]
# By configuration and data set, DistCA's speedup over each of the others; infinite: one that does
# not fit the memory.
Speedups = dict[tuple[DistcaCase, str], dict[str, float]]


def grid(sizes: Sizes, stages: tuple[int, ...] = (1,)) -> list[DistcaCase]:
    return [
        DistcaCase(model, num_nodes, size * longest * K, longest * K, stages)
        for model, longest, by_nodes in sizes
        for num_nodes, size in by_nodes.items()
    ]


def _speedups(effort: Effort, name: str, cases: Sequence[DistcaCase], others: Mapping[str, Seconds]) -> Speedups:
    """Mean time over mean time, with both data sets."""
    found: Speedups = {}
    for case, dataset in effort.progress(list(product(cases, DATASETS)), name):
        batches = case.batches(dataset, effort.batches)
        ours_s = fmean(distca_s(case, batch) for batch in batches)
        found[case, dataset] = {
            of: fmean(each(case, batch) for batch in batches) / ours_s for of, each in others.items()
        }
    return found


def _cells(found: Speedups) -> Ours:
    for (case, dataset), each in found.items():
        cell = f"{case.model_name}, {case.max_doc // K}K, {8 * case.num_nodes} GPUs, {DATASETS[dataset]}"
        yield from ((f"{cell}: over {system}", ratio) for system, ratio in each.items() if ratio < inf)


def _fig9(effort: Effort) -> Ours:
    others: dict[str, Seconds] = {
        "Megatron": _best_s(megatron_by_config),
        GREEDY: _flexsp_s,
        "WLB-ideal": _best_s(wlb_by_config),
    }
    found = _speedups(effort, "fig9", grid(TABLE_4), others)
    for system in others:
        finite = [each[system] for each in found.values() if each[system] < inf]
        left = len(found) - len(finite)
        note = f"without {left} configurations that do not fit the memory" if left else ""
        yield f"over {system}, largest", max(finite), note
        yield f"over {system}, mean", fmean(finite)
    yield from _cells(found)


def _fig10(effort: Effort) -> Ours:
    """Speedups with pipelines, model by model."""
    others: dict[str, Seconds] = {"Megatron": _best_s(megatron_by_config), "WLB-ideal": _best_s(wlb_by_config)}
    found = _speedups(effort, "fig10", grid(TABLE_5, STAGES), others)
    for model, system in product(MODELS, others):
        finite = [each[system] for (case, _), each in found.items() if case.model_name == model and each[system] < inf]
        yield f"{model}: over {system}, largest", max(finite)
        yield f"{model}: over {system}, mean", fmean(finite)
    yield from _cells(found)


# Appendix E, Tables 6 and 7: splitting and merging of tensors, and the bandwidth that hides all
# exchanges.


def _moved(plan: MicrobatchPlan, case: DistcaCase) -> tuple[Ints, Ints]:
    """Bytes that reach each rank in a layer's forward pass: queries, keys and values; outputs."""
    report = plan_statistics(plan, case.model)
    of_token = int(case.cost.query_bytes(1))
    queries, keys = (np.array(report[f"{what}_tokens_received_per_rank"], dtype=np.int64) for what in ("query", "kv"))
    outputs = np.array(report["partial_tokens_received_per_rank"], dtype=np.int64)
    return queries * of_token + keys * int(case.cost.kv_bytes(1)), outputs * of_token


def _table6(effort: Effort) -> Ours:
    """Share of the time of all layers that splitting and merging take, tokens as in Table 4."""
    names = ("QKV", "O", "QKV, what travels", "O, what travels")
    for model, nodes in effort.progress(cases("distca", "table6"), "table6"):
        per_node = TOKENS[model] // 8
        case = DistcaCase(model, nodes, nodes * per_node, 128 * K)
        # A pass over all of a rank's tensors forward, and one over their gradients backward.
        of_all = (per_node * (case.cost.query_bytes(1) + case.cost.kv_bytes(1)), per_node * case.cost.query_bytes(1))
        shares: list[list[float]] = []
        for batch in case.batches("pretrain", effort.batches):
            seconds = sum(case.passes_s(batch))
            parts = [_moved(nano_batch, case) for nano_batch in case.ping_pong(batch)]
            # Out of the sender's tensors and into the receiver's.
            travels = [2 * sum(part[i].sum() for part in parts) / nodes for i in (0, 1)]
            layers = 2 * case.model.num_layers
            shares.append([100 * layers * case.cost.pack_s(each) / seconds for each in (*of_all, *travels)])
        for what, each in zip(names, zip(*shares, strict=True), strict=True):
            yield f"{model}, {nodes} nodes: {what}", fmean(each)


def _table7(effort: Effort) -> Ours:
    """Bytes per second and GPU that hide all exchanges, documents of up to 512K."""
    for model, size, nodes, tolerance in effort.progress(cases("distca", "table7"), "table7"):
        case = DistcaCase(model, nodes, size * 512 * K, 512 * K)
        rates: list[tuple[float, float]] = []
        for batch in case.batches("pretrain", effort.batches):
            nano_batches = case.ping_pong(batch, tolerance)
            if len(nano_batches) == 2:
                both = [_rates(case, nano_batches[i], nano_batches[1 - i]) for i in (0, 1)]
                rates.append((max(each for each, _ in both), max(each for _, each in both)))
        name = f"{model}, {nodes} nodes, tolerance {tolerance:g}"
        outside, covered = (fmean(each) / 1e9 for each in zip(*rates, strict=True))
        yield name, outside
        yield f"{name}, beside attention too", covered


def _rates(case: DistcaCase, moving: MicrobatchPlan, computing: MicrobatchPlan) -> tuple[float, float]:
    """Bytes per second and GPU, beside the modules outside attention, and beside attention too."""
    inputs, outputs = _moved(moving, case)
    pairs = np.array(plan_statistics(computing, case.model)["attention_pairs_per_rank"], dtype=np.float64)
    outside = linear_s(computing, case.machine)[0]
    meanwhile = outside + np.array([case.cost.attention_s(n) for n in pairs.tolist()])
    most = float((inputs + outputs).max()) / TENSOR
    return most / float(outside.min()), most / float(meanwhile.min())


# Figure 11: latency with hidden exchanges, with exchanges of one byte ("Signal"), and on a single
# stream; Figure 12: what the tolerance costs in time and saves in bytes. 8B and 34B on 8 and 16
# nodes, Pretrain, documents of up to 128K.
TOLERANCES = (0.0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3)
SIGNAL = PingPongMode(engine="rounds", signal=True)
SINGLE = PingPongMode(engine="rounds", interleaved=False)


def _panels() -> list[DistcaCase]:
    """The four panels; the tokens are those of 8 nodes, twice as many on 16."""
    return [DistcaCase(model, nodes, TOKENS[model] * nodes // 8, 128 * K) for model in TOKENS for nodes in (8, 16)]


def _fig11(effort: Effort) -> Ours:
    """Both ablations over DistCA as it is, for each panel."""
    for case in effort.progress(_panels(), "fig11"):
        batches = case.batches("pretrain", effort.batches)
        whole, signal, single = (
            fmean(sum(case.passes_s(batch, TOLERANCE, way)) for batch in batches) for way in (ROUNDS, SIGNAL, SINGLE)
        )
        name = f"{case.model_name}, {case.num_nodes} nodes"
        yield f"{name}: DistCA over Signal", whole / signal
        yield f"{name}: lost on a single stream, at least", single / whole - 1
        yield f"{name}: lost on a single stream, at most", single / whole - 1


def _measure(case: DistcaCase, batches: list[Lengths], tolerance: float) -> tuple[float, float]:
    """Seconds of the layers, and the mean bytes that a rank receives in a layer's forward pass."""
    seconds: list[float] = []
    received: list[float] = []
    for batch in batches:
        statistics = (plan_statistics(nano_batch, case.model) for nano_batch in case.ping_pong(batch, tolerance))
        seconds.append(sum(case.passes_s(batch, tolerance)))
        received.append(sum(fmean(each["bytes_received_per_rank"]["total"]) for each in statistics))
    return fmean(seconds), fmean(received)


def _fig12(effort: Effort) -> Ours:
    """Bytes and time relative to tolerance 0, for every panel."""
    for case in effort.progress(_panels(), "fig12"):
        batches = case.batches("pretrain", effort.batches)
        base_s, base_bytes = _measure(case, batches, 0.0)
        for tolerance in TOLERANCES[1:]:
            seconds, received = _measure(case, batches, tolerance)
            label = f"{case.model_name}, {case.num_nodes} nodes, tolerance {tolerance:g}"
            yield f"{label}: bytes saved", 1 - received / base_bytes
            yield f"{label}: time", seconds / base_s


PAPER = paper(
    "distca",
    "DistCA: Efficient Long-context Language Model Training by Core Attention Disaggregation",
    {
        "fig3": _fig3,
        "fig4": _fig4,
        "fig5": _fig5,
        "fig6": _fig6,
        "fig9": _fig9,
        "fig10": _fig10,
        "fig11": _fig11,
        "fig12": _fig12,
        "appendixa": _appendix_a,
        "table6": _table6,
        "table7": _table7,
    },
)
