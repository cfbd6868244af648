"""The systems that DistCA is compared with (section 6.1), as replicas of context-parallel groups that gather keys and values.

Megatron: samples of MaxDocLen tokens, each cut over its group as one sequence ("per-sequence sharding": rank i has the i-th and the i-th
but last of 2 c parts); samples are dealt to replicas so that their FLOPs are as even as that allows.
WLB-ideal: documents dealt to replicas by their time, as many tokens as memory allows; each document cut over the group in the same way;
no document waits. FlexSP+: groups of different sizes by our planner `flexsp`, the documents of each cut like WLB-ideal's.
Of Megatron and WLB-ideal the best way counts, as in the paper: pipeline stages where there are any, degree of context parallelism, and
recomputation of activations where they do not fit the memory without.

A layer of a group takes its slowest rank's modules and kernels, and the gathering of keys and values (backward: the scattering of their
gradients, bf16 as the keys are), which nothing hides. Replicas meet at the end of a step. Gradient synchronisation and the optimizer are
the same for all systems and left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from megatron_balance.cost.base import Floats, Ints
from megatron_balance.cost.collectives import Group, all_gather_s, group_of, reduce_scatter_s
from megatron_balance.cost.memory import Recompute
from megatron_balance.cost.parallel import stage_transfer_s
from megatron_balance.ir.batch import Batch
from megatron_balance.ir.columns import Pair
from megatron_balance.ir.mask import CAUSAL
from megatron_balance.ir.plan import Zone
from megatron_balance.papers.distca.cases import Case, Held, chunks
from megatron_balance.planners.flexsp import FlexSpOptions, plan
from megatron_balance.simulator import pipeline
from megatron_balance.simulator.pipeline import Pass

SEQ, START, STOP, RANK = range(4)
"""Columns of queries: rows of what each rank of a group attends."""


@dataclass(frozen=True, slots=True)
class Share:
    """Queries [n, 4] of one microbatch on a group of so many ranks."""

    queries: Ints
    num_ranks: int

    def tokens(self) -> Ints:
        """Of each rank."""
        rows = self.queries
        return np.bincount(rows[:, RANK], rows[:, STOP] - rows[:, START], self.num_ranks).astype(np.int64)


def per_sequence(documents: Sequence[int], num_ranks: int) -> Share:
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
    return Share(np.column_stack([seq, begin - before, end - before, rank]).astype(np.int64), num_ranks)


def per_document(documents: Sequence[int], num_ranks: int) -> Share:
    """Each document cut on its own."""
    lengths = np.array(documents, dtype=np.int64)
    part = np.arange(2 * num_ranks)
    begin = lengths[:, None] * part // (2 * num_ranks)
    end = lengths[:, None] * (part + 1) // (2 * num_ranks)
    seq = np.broadcast_to(np.arange(len(lengths))[:, None], begin.shape)
    rank = np.broadcast_to(np.minimum(part, 2 * num_ranks - 1 - part), begin.shape)
    rows = np.column_stack([seq.ravel(), begin.ravel(), end.ravel(), rank.ravel()])
    return Share(rows[rows[:, STOP] > rows[:, START]], num_ranks)


def group_on(case: Case, num_ranks: int) -> Group:
    """A context-parallel group: ranks are whole nodes, and each has its NICs to itself."""
    return group_of(case.cluster, num_ranks, 1)


def layer_s(case: Case, share: Share) -> tuple[float, float]:
    """Seconds of one layer of a group, forward and backward: its slowest rank's computation, and the collective."""
    rows, model, group = share.queries, case.model, group_on(case, share.num_ranks)
    pairs = np.zeros((len(rows), Pair.WIDTH), dtype=np.int64)
    pairs[:, Pair.QUERY_SPAN], pairs[:, Pair.K_STOP] = rows[:, [SEQ, START, STOP]], rows[:, STOP]
    pairs[:, Pair.Q_HEAD_STOP], pairs[:, Pair.KV_HEAD_STOP] = model.num_heads, model.num_kv_heads
    num_bytes = case.cost.kv_bytes(float(share.tokens().max(initial=0)))
    found: list[float] = []
    for backward, collective_s in ((False, all_gather_s(num_bytes, group)), (True, reduce_scatter_s(num_bytes, group))):
        attention = case.cost.attend_s(pairs, rows[:, RANK], share.num_ranks, backward=backward)
        linear = np.array([case.cost.layer_s(n, backward=backward) for n in share.tokens().tolist()])
        found.append(float((attention + linear).max()) + collective_s)
    return found[0], found[1]


@dataclass(frozen=True, slots=True)
class Way:
    """How replicas run: pipeline stages, degree of context parallelism, recomputation."""

    stages: int
    degree: int
    recompute: Recompute

    def replicas(self, case: Case) -> int:
        return case.num_nodes // self.stages // self.degree

    def fits(self, case: Case, tokens: float, num_microbatches: int) -> bool:
        """Whether a rank holds its tokens and the keys and values of its group's."""
        held = Held(tokens / self.degree, tokens * (1 - 1 / self.degree), self.stages, self.recompute, num_microbatches)
        return case.fits(held)

    def most_tokens(self, case: Case, num_microbatches: int) -> int:
        """Tokens of a microbatch that a group holds."""
        low, high = 0, 2 * case.num_tokens
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.fits(case, middle, num_microbatches) else (low, middle - 1)
        return low


def ways(case: Case) -> list[Way]:
    """All that are tried."""
    return [
        Way(stages, degree, recompute)
        for stages in case.stages
        for degree in degrees(case.num_nodes // stages)
        for recompute in ("none", "full")
    ]


def degrees(num_ranks: int) -> list[int]:
    """Powers of two that divide the ranks."""
    return [1 << i for i in range(num_ranks.bit_length()) if num_ranks % (1 << i) == 0]


def replica_s(case: Case, shares: Sequence[Share], way: Way) -> float:
    """Seconds of a replica's microbatches, one after another or through its pipeline (1F1B)."""
    num_layers = case.model.num_layers // way.stages
    seconds: list[tuple[float, float]] = []
    heads: list[tuple[float, float]] = []
    tokens: list[float] = []
    for share in shares:
        forward_s, backward_s = layer_s(case, share)
        seconds.append((num_layers * forward_s, num_layers * (backward_s + (forward_s if way.recompute == "full" else 0.0))))
        tokens.append(float(share.tokens().max(initial=0)))
        heads.append((case.cost.head_s(tokens[-1]), case.cost.head_s(tokens[-1], backward=True)))
    if way.stages == 1:
        return sum(map(sum, seconds)) + sum(map(sum, heads))

    def each(stage: int, step: Pass, start: Floats) -> Floats:
        return start + seconds[step.microbatch][step.backward] + (stage == way.stages - 1) * heads[step.microbatch][step.backward]

    def transfer(microbatch: int) -> Floats:
        return np.array([stage_transfer_s(case.model, tokens[microbatch], case.machine.inter)])

    return pipeline.total_s(pipeline.run(way.stages, len(shares), 1, 1, each, transfer))


def megatron_s(case: Case, documents: Sequence[int]) -> float:
    """Seconds of a step in the best way; infinite if none fits the memory."""
    return min(megatron_by_way(case, documents).values(), default=inf)


def megatron_by_way(case: Case, documents: Sequence[int]) -> dict[Way, float]:
    """Seconds by way; those that leave a replica without a chunk, or do not fit the memory, are left out."""
    packed = chunks(documents, case.max_doc)
    work = [sum(CAUSAL.num_pairs(n) for n in chunk) for chunk in packed]
    found: dict[Way, float] = {}
    for way in ways(case):
        num_replicas = way.replicas(case)
        most = -(-len(packed) // num_replicas)
        if num_replicas > len(packed) or not way.fits(case, case.max_doc, most):
            continue
        dealt = deal(work, [1.0] * len(packed), num_replicas, most)
        if dealt is not None:
            found[way] = max(replica_s(case, [per_sequence(packed[i], way.degree) for i in replica], way) for replica in dealt)
    return found


def wlb_s(case: Case, documents: Sequence[int]) -> float:
    """Seconds of a step in the best way; infinite if none fits the memory."""
    return min(wlb_by_way(case, documents).values(), default=inf)


def wlb_by_way(case: Case, documents: Sequence[int]) -> dict[Way, float]:
    """Seconds by way; those that do not fit the memory are left out. With a pipeline, as many microbatches as Megatron's."""
    found: dict[Way, float] = {}
    work = [document_s(case, n) for n in documents]
    for way in ways(case):
        num_replicas = way.replicas(case)
        each = max(1, case.num_tokens // case.max_doc // num_replicas) if case.stages != (1,) else 1
        bins = deal(work, [float(n) for n in documents], num_replicas * each, way.most_tokens(case, each))
        replicas = None if bins is None else deal([sum(work[i] for i in one) for one in bins], [1.0] * len(bins), num_replicas, each)
        if bins is not None and replicas is not None:
            shares = [per_document([documents[i] for i in one], way.degree) for one in bins]
            found[way] = max(replica_s(case, [shares[i] for i in replica], way) for replica in replicas)
    return found


def document_s(case: Case, length: int) -> float:
    """What a document takes of one layer, forward, which documents are dealt by."""
    return case.cost.attention_s(CAUSAL.num_pairs(length), length) + case.cost.linear_s(length)


def deal(work: Sequence[float], size: Sequence[float], num_bins: int, most: float) -> list[list[int]] | None:
    """Items to bins, the one with most work first, each to the bin with least that has room; None where an item finds none."""
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


def flexsp_s(case: Case, documents: Sequence[int]) -> float:
    """Seconds of a step with groups of different sizes; infinite if they do not fit the memory.

    The groups are the greedy answer to the integer program.
    """
    made = plan(Batch(tuple(documents)), case.cluster, case.model, case.cost, FlexSpOptions(solver="greedy"))
    found: list[float] = []
    for zone in made.zones:
        assert isinstance(zone, Zone)
        lengths = [documents[seq] for seq in zone.seqs]
        possible = [way for way in (Way(1, len(zone.ranks), "none"), Way(1, len(zone.ranks), "full")) if way.fits(case, sum(lengths), 1)]
        found.append(min((replica_s(case, [per_document(lengths, way.degree)], way) for way in possible), default=inf))
    return max(found)
