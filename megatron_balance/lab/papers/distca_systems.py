"""The cases that DistCA is evaluated on (section 6.1): nodes of H200 with tensor parallelism 8, two
models, two data sets.

Not printed and assumed: `pretrain` has documents of up to 128K; for a longer MaxDocLen its lengths
are scaled. Longer ones of `prolong` are cut. A batch is as many samples of MaxDocLen tokens as the
batch size says (Table 4's first row of 8B is then the 1M tokens, and that of 34B the 512K tokens,
that section 6.3 names), filled with documents as they come; one that passes the end of a sample is
cut there, and its parts do not see one another, under all systems alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf

import numpy as np

from megatron_balance.analysis.memory import Holding, Policy, Recompute, Sharding, rank_memory
from megatron_balance.analysis.statistics import plan_statistics
from megatron_balance.config import load_cluster, load_model
from megatron_balance.cost.analytic import AnalyticCost
from megatron_balance.cost.base import Floats, Ints
from megatron_balance.cost.parallel import (
    CollectiveGroup,
    all_gather_s,
    group_of,
    reduce_scatter_s,
    stage_transfer_s,
    wide_ranks,
)
from megatron_balance.ir.batch import Batch
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.columns import Pair, Rows
from megatron_balance.ir.mask import CAUSAL
from megatron_balance.ir.plan import MicrobatchPlan, Zone
from megatron_balance.ir.step import Tick, TickPlan
from megatron_balance.lab.papers.base import SimulatedCase
from megatron_balance.planners import flexsp
from megatron_balance.planners.distca import DistcaOptions, plan, plan_owned
from megatron_balance.planners.flexsp import FlexSpOptions
from megatron_balance.planning.ticks import plan_ticks, ticks
from megatron_balance.simulator import pipeline
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
TOLERANCE = DistcaOptions().tolerance
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
        return AnalyticCost(wide_ranks(gpus, TENSOR), load_model(MODELS[self.model_name]), TENSOR)

    def batches(self, dataset: str, count: int) -> list[Lengths]:
        """Batches of documents, sample after sample."""
        scale = max(1, self.max_doc // PRETRAIN_LONGEST) if dataset == "pretrain" else 1
        drawn = [[scale * n for n in lengths] for lengths in draw(dataset, self.num_tokens // scale, count, SEED)]
        return [tuple(piece for chunk in chunks(lengths, self.max_doc) for piece in chunk) for lengths in drawn]

    @property
    def tokens_per_rank(self) -> float:
        return self.num_tokens / self.num_nodes

    def ping_pong(self, lengths: Sequence[int], tolerance: float = TOLERANCE) -> tuple[MicrobatchPlan, ...]:
        """DistCA's plans of both nano-batches of a batch."""
        plans: list[MicrobatchPlan] = []
        for nano_batch in nano_batches(lengths):
            batch = Batch(tuple(lengths[i] for i in nano_batch))
            if batch.lengths:
                plans.append(plan(batch, self.cluster, self.model, self.cost, DistcaOptions(tolerance=tolerance)))
        return tuple(plans)

    def passes_s(
        self, lengths: Sequence[int], tolerance: float = TOLERANCE, way: PingPongMode = ROUNDS
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
SEQ, START, STOP, RANK = range(4)
"""Columns of `GroupQueries.rows`: runs of queries, and the rank of the group that attends them."""


@dataclass(frozen=True, slots=True)
class GroupQueries:
    """Queries of a microbatch in a context-parallel group: `rows` [n, 4] (seq, start, stop, rank)."""

    rows: Ints
    num_ranks: int

    def tokens(self) -> Ints:
        """Tokens [num_ranks] of each rank."""
        rows = self.rows
        return np.bincount(rows[:, RANK], rows[:, STOP] - rows[:, START], self.num_ranks).astype(np.int64)


def per_sequence(documents: Sequence[int], num_ranks: int) -> GroupQueries:
    """Documents packed to one sequence, of which rank i has parts i and 2 c - 1 - i."""
    ends = np.cumsum(documents)
    total = int(ends[-1]) if len(ends) else 0
    bounds = total * np.arange(2 * num_ranks + 1) // (2 * num_ranks)
    # A piece ends where a document or one of the 2 c parts ends: [pieces + 1].
    cuts = np.unique(np.concatenate([bounds, ends, [0]]))
    begin, end = cuts[:-1], cuts[1:]
    seq = np.searchsorted(ends, begin, side="right")
    part = np.searchsorted(bounds, begin, side="right") - 1
    # Rows count in positions of their own document.
    before = ends[seq] - np.array(documents, dtype=np.int64)[seq]
    rank = np.minimum(part, 2 * num_ranks - 1 - part)
    return GroupQueries(np.column_stack([seq, begin - before, end - before, rank]).astype(np.int64), num_ranks)


def per_document(documents: Sequence[int], num_ranks: int) -> GroupQueries:
    """Each document cut on its own."""
    lengths = np.array(documents, dtype=np.int64)
    part = np.arange(2 * num_ranks)
    # [documents, 2 c parts], of which rank i has parts i and 2 c - 1 - i.
    begin = lengths[:, None] * part // (2 * num_ranks)
    end = lengths[:, None] * (part + 1) // (2 * num_ranks)
    seq = np.broadcast_to(np.arange(len(lengths))[:, None], begin.shape)
    rank = np.broadcast_to(np.minimum(part, 2 * num_ranks - 1 - part), begin.shape)
    rows = np.column_stack([seq.ravel(), begin.ravel(), end.ravel(), rank.ravel()])
    return GroupQueries(rows[rows[:, STOP] > rows[:, START]], num_ranks)


def group_on(case: DistcaCase, num_ranks: int) -> CollectiveGroup:
    """A context-parallel group: ranks are whole nodes, and each has its NICs to itself."""
    return group_of(case.cluster, num_ranks, 1)


def layer_s(case: DistcaCase, queries: GroupQueries) -> tuple[float, float]:
    """Seconds of a layer of a group, forward and backward: its slowest rank, and the collective."""
    rows, model, group = queries.rows, case.model, group_on(case, queries.num_ranks)
    pairs = np.zeros((len(rows), Pair.WIDTH), dtype=np.int64)
    pairs[:, Pair.QUERY_SPAN], pairs[:, Pair.K_STOP] = rows[:, [SEQ, START, STOP]], rows[:, STOP]
    pairs[:, Pair.Q_HEAD_STOP], pairs[:, Pair.KV_HEAD_STOP] = model.num_heads, model.num_kv_heads
    num_bytes = case.cost.kv_bytes(float(queries.tokens().max(initial=0)))
    passes_s: list[float] = []
    for backward, collective_s in ((False, all_gather_s(num_bytes, group)), (True, reduce_scatter_s(num_bytes, group))):
        attention = case.cost.attend_s(pairs, rows[:, RANK], queries.num_ranks, backward=backward)
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
        held = HeldTokens(
            tokens / self.degree, tokens * (1 - 1 / self.degree), self.stages, self.recompute, num_microbatches
        )
        return case.fits(held)

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
        for degree in degrees(case.num_nodes // stages)
        for recompute in ("none", "full")
    ]


def degrees(num_ranks: int) -> list[int]:
    """Powers of two that divide the ranks."""
    return [1 << i for i in range(num_ranks.bit_length()) if num_ranks % (1 << i) == 0]


def replica_s(case: DistcaCase, microbatches: Sequence[GroupQueries], config: ReplicaConfig) -> float:
    """Seconds of a replica's microbatches, one after another or through its pipeline (1F1B)."""
    num_layers = case.model.num_layers // config.stages
    seconds: list[tuple[float, float]] = []
    heads: list[tuple[float, float]] = []
    tokens: list[float] = []
    for queries in microbatches:
        forward_s, backward_s = layer_s(case, queries)
        seconds.append(
            (num_layers * forward_s, num_layers * (backward_s + (forward_s if config.recompute == "full" else 0.0)))
        )
        tokens.append(float(queries.tokens().max(initial=0)))
        heads.append((case.cost.head_s(tokens[-1]), case.cost.head_s(tokens[-1], backward=True)))
    if config.stages == 1:
        return sum(map(sum, seconds)) + sum(map(sum, heads))

    def each(stage: int, step: ChunkPass, start: Floats) -> Floats:
        return (
            start
            + seconds[step.microbatch][step.backward]
            + (stage == config.stages - 1) * heads[step.microbatch][step.backward]
        )

    def transfer(microbatch: int) -> Floats:
        return np.array([stage_transfer_s(case.model, tokens[microbatch], case.machine.inter)])

    return pipeline.run(config.stages, len(microbatches), 1, 1, each, transfer).total_s


def megatron_s(case: DistcaCase, documents: Sequence[int]) -> float:
    """Seconds of a step in the best configuration; infinite if none fits the memory."""
    return min(megatron_by_config(case, documents).values(), default=inf)


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


def wlb_s(case: DistcaCase, documents: Sequence[int]) -> float:
    """Seconds of a step in the best configuration; infinite if none fits the memory."""
    return min(wlb_by_config(case, documents).values(), default=inf)


def wlb_by_config(case: DistcaCase, documents: Sequence[int]) -> dict[ReplicaConfig, float]:
    """Seconds of a step by configuration that fits; pipelines have Megatron's microbatches."""
    seconds: dict[ReplicaConfig, float] = {}
    work = [document_s(case, n) for n in documents]
    for config in _replica_configs(case):
        num_replicas = config.replicas(case)
        each = max(1, case.num_tokens // case.max_doc // num_replicas) if case.stages != (1,) else 1
        bins = deal(work, [float(n) for n in documents], num_replicas * each, config.most_tokens(case, each))
        replicas = (
            None
            if bins is None
            else deal([sum(work[i] for i in one) for one in bins], [1.0] * len(bins), num_replicas, each)
        )
        if bins is not None and replicas is not None:
            microbatches = [per_document([documents[i] for i in one], config.degree) for one in bins]
            seconds[config] = max(replica_s(case, [microbatches[i] for i in replica], config) for replica in replicas)
    return seconds


def document_s(case: DistcaCase, length: int) -> float:
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


def flexsp_s(case: DistcaCase, documents: Sequence[int]) -> float:
    """Seconds of a step with groups of different sizes; infinite if they do not fit the memory."""
    made = flexsp.plan(Batch(tuple(documents)), case.cluster, case.model, case.cost, FlexSpOptions(solver="greedy"))
    group_s: list[float] = []
    for zone in made.zones:
        assert isinstance(zone, Zone)
        lengths = [documents[seq] for seq in zone.seqs]
        possible = [
            config
            for config in (ReplicaConfig(1, len(zone.ranks), "none"), ReplicaConfig(1, len(zone.ranks), "full"))
            if config.fits(case, sum(lengths), 1)
        ]
        group_s.append(
            min((replica_s(case, [per_document(lengths, config.degree)], config) for config in possible), default=inf)
        )
    return max(group_s)


OPTIONS = DistcaOptions()


# A step under DistCA: nano-batches interleaved, and with a pipeline all stages attending together,
# tick by tick.
def distca_s(case: DistcaCase, documents: Sequence[int]) -> float:
    """Seconds of a step in the best configuration; infinite if none fits the memory."""
    return min(_stages_s(case, documents, stages, size) for stages in case.stages for size in _sizes(case, stages))


def _stages_s(case: DistcaCase, documents: Sequence[int], stages: int, size: int) -> float:
    microbatches = chunks(documents, size * case.max_doc)
    return _in_a_row_s(case, microbatches) if stages == 1 else _CasePipeline(case, stages, microbatches).step_s()


def _sizes(case: DistcaCase, stages: int) -> list[int]:
    """Samples of a microbatch that are tried."""
    # The most that fit without recomputation, one for a rank at most; without a pipeline half as
    # many, too.
    ranks, samples = case.num_nodes // stages, case.num_tokens // case.max_doc
    sizes = [1 << i for i in reversed(range(min(ranks, samples).bit_length()))]
    fitting = [
        size
        for size in sizes
        if case.fits(
            _held(stages, size * case.max_doc / ranks, float(size * case.max_doc), -(-samples // size), "none")
        )
    ]
    return fitting[: 2 if stages == 1 else 1] or sizes[:1]


def _held(stages: int, tokens: float, received: float, num_microbatches: int, recompute: Recompute) -> HeldTokens:
    """Tokens that the first stage holds."""
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


@dataclass(frozen=True, slots=True)
class _CasePipeline:
    case: DistcaCase
    stages: int
    microbatches: Sequence[Sequence[int]]

    def step_s(self) -> float:
        """Seconds with the least recomputation that fits the memory."""
        order = ticks(self.stages, len(self.microbatches))
        first, second = (self._ticks(order, nano_batch) for nano_batch in (0, 1))
        for recompute in ("none", "full"):
            if self._fits([first, second], recompute):
                setup = Setup("replay", recompute, pipeline=self.stages, engine="rounds")
                return simulate_ticks(first, self.case.machine, setup, second).step_s
        return inf

    def _ticks(self, order: Sequence[Tick], nano_batch: int) -> tuple[TickPlan, ...]:
        case = self.case
        stage = Cluster(case.num_nodes // self.stages, case.cluster.ranks_per_node)
        cost = AnalyticCost(case.cluster, case.model, TENSOR)
        plans = [
            plan(
                Batch(tuple(documents[i] for i in nano_batches(documents)[nano_batch])),
                stage,
                case.model,
                cost,
                OPTIONS,
            )
            for documents in self.microbatches
        ]

        def of_all(lengths: tuple[int, ...], owned: Rows) -> MicrobatchPlan:
            return plan_owned(lengths, owned, case.cluster, case.model, cost, OPTIONS)

        return plan_ticks(order, plans, of_all)

    def _fits(self, ping_pong: Sequence[Sequence[TickPlan]], recompute: Recompute) -> bool:
        received = max(max(_received([one.plan for one in nano_batch], self.case)) for nano_batch in ping_pong)
        tokens = max(map(sum, self.microbatches)) / (self.case.num_nodes // self.stages)
        return self.case.fits(_held(self.stages, tokens, float(received), len(self.microbatches), recompute))
