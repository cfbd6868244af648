"""The systems that DistCA is compared with (section 6.1), as replicas of context-parallel groups
that gather keys and values.

Megatron: samples of MaxDocLen tokens, each cut over its group as one sequence ("per-sequence
sharding": rank i has the i-th and the i-th but last of 2 c parts); samples are dealt to replicas so
that their FLOPs are as even as that allows. WLB-ideal: documents dealt to replicas by their time,
as many tokens as memory allows; each document cut over the group in the same way; no document
waits. FlexSP's groups, greedy: of different sizes by our planner `flexsp` without its integer program,
the documents of each cut like WLB-ideal's. Of Megatron and WLB-ideal the best configuration counts, as
in the paper: pipeline stages where there are any, degree of context parallelism, and recomputation of
activations where they do not fit the memory without.

A layer of a group takes its slowest rank's modules and kernels, and the gathering of keys and
values (backward: the scattering of their gradients, bf16 as the keys are), which nothing hides.
Replicas meet at the end of a step. Gradient synchronisation and the optimizer are the same for all
systems and left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from megatron_balance.analysis.memory import Recompute
from megatron_balance.cost.base import Floats, Ints
from megatron_balance.cost.parallel import CollectiveGroup, all_gather_s, group_of, reduce_scatter_s, stage_transfer_s
from megatron_balance.ir.batch import Batch
from megatron_balance.ir.columns import Pair
from megatron_balance.ir.mask import CAUSAL
from megatron_balance.ir.plan import Zone
from megatron_balance.lab.papers.distca.cases import DistcaCase, HeldTokens, chunks
from megatron_balance.planners.flexsp import FlexSpOptions, plan
from megatron_balance.simulator import pipeline
from megatron_balance.simulator.pipeline import ChunkPass

SEQ, START, STOP, RANK = range(4)
"""Columns of `GroupQueries.rows`: runs of queries, and the rank of the group that attends them."""


@dataclass(frozen=True, slots=True)
class GroupQueries:
    """Queries of one microbatch by rank of a context-parallel group: `rows` [n, 4] (seq, start,
    stop, rank).
    """

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
    cuts = np.unique(np.concatenate([bounds, ends, [0]]))
    begin, end = cuts[:-1], cuts[1:]
    seq = np.searchsorted(ends, begin, side="right")
    part = np.searchsorted(bounds, begin, side="right") - 1
    before = ends[seq] - np.array(documents, dtype=np.int64)[seq]
    rank = np.minimum(part, 2 * num_ranks - 1 - part)
    return GroupQueries(np.column_stack([seq, begin - before, end - before, rank]).astype(np.int64), num_ranks)


def per_document(documents: Sequence[int], num_ranks: int) -> GroupQueries:
    """Each document cut on its own."""
    lengths = np.array(documents, dtype=np.int64)
    part = np.arange(2 * num_ranks)
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
    """Seconds of one layer of a group, forward and backward: its slowest rank's computation, and
    the collective.
    """
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


def replica_configs(case: DistcaCase) -> list[ReplicaConfig]:
    """All configurations that are tried."""
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
    """Seconds of a step by configuration; those that leave a replica without a chunk, or do not fit
    the memory, are left out.
    """
    packed = chunks(documents, case.max_doc)
    work = [sum(CAUSAL.num_pairs(n) for n in chunk) for chunk in packed]
    seconds: dict[ReplicaConfig, float] = {}
    for config in replica_configs(case):
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
    """Seconds of a step by configuration; those that do not fit the memory are left out.

    With a pipeline, as many microbatches as Megatron's.
    """
    seconds: dict[ReplicaConfig, float] = {}
    work = [document_s(case, n) for n in documents]
    for config in replica_configs(case):
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
    """Items to bins, the one with most work first, each to the bin with least that has room; None
    where an item finds none.
    """
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
    """Seconds of a step with groups of different sizes; infinite if they do not fit the memory.

    The groups are the greedy answer to the integer program.
    """
    made = plan(Batch(tuple(documents)), case.cluster, case.model, case.cost, FlexSpOptions(solver="greedy"))
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
