"""packing: sequences concatenated into packs of one size, one a rank; every rank has the same
number of tokens.

Source: input-balanced packing, figures 2.a and 3.a and sections 2.2 and 2.3 of Zeppelin (arXiv
2509.21841); fixed-length packing, section 3.2 of WLB-LLM (arXiv 2503.17924); best-fit packing (Ding
et al., "Fewer truncations improve language modeling", 2024).

What we implement: packs of the batch's mean tokens per rank. Sequences go whole into packs, longest
first, each into the pack with the least room that holds it; what fits no pack whole (a sequence
longer than a pack, or the last ones) fills what room is left and is cut where a pack ends. Tokens
of ranks differ by one at most; attention falls where it falls.

What we leave out: padding (packs are filled by cutting), and balancing attention between packs
(WLB-LLM's Eq. 1): this is the baseline that balances input only.

Where we differ and why: systems without document masks compute a pack as one causal sequence, and
what is cut loses its beginning. Trained numbers must not depend on a planner, so the program
attends within sequences only, and the later part of a cut sequence is sent the keys of the earlier
ones. The attention across sequences that such systems compute in vain is a figure for the
laboratory and never executed: `redundant_pairs_per_rank(plan)` beside the plan's own pairs, and
`redundant_pairs(lengths)` for one pack in which all of a batch lies (Zeppelin's figure 3.a: the
packed context on all ranks).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_balance.cost.base import CostModel
from megatron_balance.errors import InvalidProgramError
from megatron_balance.ir.batch import Batch
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.columns import Rows
from megatron_balance.ir.mask import Mask
from megatron_balance.ir.model import Model
from megatron_balance.ir.plan import MicrobatchPlan, TaskTable, Zone
from megatron_balance.solvers.capacity import check_pool
from megatron_balance.solvers.packing import best_fit

CUT, LOCAL = "cut", "local"


@dataclass(frozen=True, slots=True)
class PackingOptions:
    """Options of packing."""

    tokens_per_rank: int | None = None
    """Capacity of a rank in tokens; unlimited if not given.

    Packs are as small as the batch lets them be, whatever the capacity.
    """


def plan(batch: Batch, cluster: Cluster, model: Model, cost: CostModel, options: PackingOptions) -> MicrobatchPlan:
    """A local zone for each rank that has whole sequences, and before them one task table of all
    that is cut.

    Raises:
        InfeasibleError: the batch has more tokens than the ranks hold.
    """
    del cost  # only tokens count
    lengths, num_ranks = batch.lengths, cluster.num_ranks
    check_pool(lengths, num_ranks, options.tokens_per_rank)
    packs = [
        batch.num_tokens * (rank + 1) // num_ranks - batch.num_tokens * rank // num_ranks for rank in range(num_ranks)
    ]
    order = sorted(range(len(lengths)), key=lambda seq: (-lengths[seq], seq))
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
    return MicrobatchPlan(
        "packing",
        lengths,
        num_ranks,
        cluster.node_size,
        model.num_heads,
        model.num_kv_heads,
        tuple(zones),
        mask=model.mask,
    )


def _cut_zone(seqs: Sequence[tuple[int, int]], capacities: Sequence[int], mask: Mask) -> TaskTable:
    """Task table of sequences (id, length), one after the other into what ranks have left
    (`capacities`, tokens).

    The rank of the queries attends to all keys that they see.
    """
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
    """For each sequence of a pack, in order of the pack, the pairs of its queries with the tokens
    of the sequences before it.

    These are what a kernel without document masks computes beside the causal pairs of the sequences
    themselves.
    """
    before, pairs = 0, list[int]()
    for length in pack:
        pairs.append(length * before)
        before += length
    return tuple(pairs)


def redundant_pairs_per_rank(plan: MicrobatchPlan) -> tuple[int, ...]:
    """The redundant pairs of each rank's pack, all heads: its fragments in the order of its layout,
    as one causal sequence.

    What a rank would compute without document masks is this and the causal pairs inside its
    fragments; the keys that the later part of a cut sequence is sent lie outside the pack and are
    not counted.

    Raises:
        InvalidProgramError: not a plan of `packing`.
    """
    packs: list[list[int]] = [[] for _ in range(plan.num_ranks)]
    for zone in plan.zones:
        if isinstance(zone, TaskTable):
            for rank, _, start, stop in zone.fragments:
                packs[rank].append(stop - start)
        elif isinstance(zone, Zone) and len(zone.ranks) == 1:
            packs[zone.ranks[0]] += [plan.lengths[seq] for seq in zone.seqs]
        else:
            raise InvalidProgramError(
                f"zone {zone.name} of planner {plan.planner} has several ranks; redundant pairs are defined "
                "for plans of packing"
            )
    return tuple(sum(redundant_pairs(pack)) for pack in packs)
