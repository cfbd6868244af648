"""packing: sequences concatenated into packs of one size, one a rank.

Source: input-balanced packing, sections 2.2 and 2.3 of Zeppelin (arXiv 2509.21841); fixed-length
packing, section 3.2 of WLB-LLM (arXiv 2503.17924); best-fit packing (Ding et al., "Fewer
truncations improve language modeling", 2024). What we implement: packs of the batch's mean tokens
per rank. Sequences go whole, longest first, into the pack with the least room that holds them; what
fits no pack fills what is left and is cut where a pack ends. What we leave out: balancing
attention, and padding.

Where we differ and why: systems without document masks compute a pack as one causal sequence. Here
a program attends within sequences only, and the later part of a cut one is sent the earlier keys;
what would be computed in vain is a figure for the laboratory (`redundant_pairs`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_balance.cost.base import CostModel
from megatron_balance.ir.batch import Batch
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.columns import Rows
from megatron_balance.ir.mask import Mask
from megatron_balance.ir.model import Model
from megatron_balance.ir.plan import MicrobatchPlan, TaskTable, Zone
from megatron_balance.solvers.groups import check_pool, plan_of
from megatron_balance.solvers.packing import best_fit, longest_first

CUT, LOCAL = "cut", "local"


@dataclass(frozen=True, slots=True)
class PackingOptions:
    tokens_per_rank: int | None = None
    """Capacity of a rank in tokens; unlimited if not given. Packs are as small as the batch lets
    them be."""


def plan(batch: Batch, cluster: Cluster, model: Model, cost: CostModel, options: PackingOptions) -> MicrobatchPlan:
    """A local zone for each rank with whole sequences, and before them a table of all cut ones."""
    # Only tokens count.
    del cost
    lengths, num_ranks = batch.lengths, cluster.num_ranks
    check_pool(lengths, num_ranks, options.tokens_per_rank)
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
    cut_seqs = [seq for seq, pack in zip(order, pack_of, strict=True) if pack is None]
    zones: list[Zone | TaskTable] = (
        [_cut_zone([(seq, lengths[seq]) for seq in sorted(cut_seqs)], left, model.mask)] if cut_seqs else []
    )
    zones += [Zone(LOCAL, "ring", (rank,), tuple(sorted(seqs))) for rank, seqs in sorted(whole.items()) if seqs]
    return plan_of("packing", lengths, (cluster, model), tuple(zones))


def _cut_zone(seqs: Sequence[tuple[int, int]], capacities: Sequence[int], mask: Mask) -> TaskTable:
    """Table of sequences (id, length), in order into what ranks have left (`capacities`)."""
    fragments, length_of = list(_fill(seqs, capacities)), dict(seqs)
    tasks = [(*each, 0, min(length_of[each[1]], mask.keys(each[1], each[3] - 1)[1])) for each in fragments]
    return TaskTable(CUT, Rows.of(4, fragments), Rows.of(6, tasks))


def _fill(seqs: Sequence[tuple[int, int]], capacities: Sequence[int]) -> Iterator[tuple[int, int, int, int]]:
    """Fragments (rank, seq, start, stop)."""
    rank, left = 0, capacities[0]
    for seq, length in seqs:
        start = 0
        while start < length:
            while not left:
                rank += 1
                left = capacities[rank]
            stop = min(length, start + left)
            yield rank, seq, start, stop
            left -= stop - start
            start = stop


def redundant_pairs(pack: Sequence[int]) -> tuple[int, ...]:
    """For each sequence of a pack, the pairs of its queries with the tokens of the sequences before
    it: what a kernel without document masks computes in vain.
    """
    before, pairs = 0, list[int]()
    for length in pack:
        pairs.append(length * before)
        before += length
    return tuple(pairs)
