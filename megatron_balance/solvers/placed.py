"""Plans of microbatches, made from a placement: the ranks of each sequence."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.model import Model
from megatron_balance.ir.plan import MicrobatchPlan, Zone
from megatron_balance.ir.step import StepPlan

Placement: TypeAlias = Sequence[tuple[int, ...]]
"""The ranks that share each sequence: ascending, so that a ring crosses each node's border once."""

INTER_NODE, INTRA_NODE, LOCAL = "inter_node", "intra_node", "local"


@dataclass(frozen=True, slots=True)
class Frame:
    """The common part of one planner's plans. `pattern`: the comm pattern of every zone."""

    planner: str
    cluster: Cluster
    model: Model
    pattern: str = "ring"

    def microbatch(self, lengths: Sequence[int], placement: Placement) -> MicrobatchPlan:
        """The plan in which sequences with the same ranks share a zone."""
        cluster, model = self.cluster, self.model
        return MicrobatchPlan(
            self.planner,
            tuple(lengths),
            cluster.num_ranks,
            cluster.node_size,
            model.num_heads,
            model.num_kv_heads,
            zones(placement, cluster, self.pattern),
            mask=model.mask,
        )

    def batch(self, lengths: Sequence[int], placement: Placement, microbatch_of: Sequence[int]) -> StepPlan:
        """The step of microbatches 0, 1, ..., each whole; `microbatch_of`: by sequence."""
        ids: list[list[int]] = [[] for _ in range(max(microbatch_of, default=-1) + 1)]
        for seq, microbatch in enumerate(microbatch_of):
            ids[microbatch].append(seq)
        plans = (self.microbatch([lengths[seq] for seq in seqs], [placement[seq] for seq in seqs]) for seqs in ids)
        return StepPlan.whole(tuple(plans), ids)


def members(placement: Placement, fewest: int = 1) -> dict[tuple[int, ...], list[int]]:
    """The sequences, ascending, that share a set of `fewest` ranks or more."""
    return grouped([(seq, ranks) for seq, ranks in enumerate(placement) if len(ranks) >= fewest])


def grouped(placed: Iterable[tuple[int, tuple[int, ...]]]) -> dict[tuple[int, ...], list[int]]:
    """The sequences, ascending, that share a set of ranks; `placed`: sequences in ascending order,
    and the ranks of each.
    """
    # By identity first: hashing a thousand ranks for each of a thousand sequences would take longer
    # than all the rest.
    alike: dict[int, tuple[tuple[int, ...], list[int]]] = {}
    for seq, ranks in placed:
        alike.setdefault(id(ranks), (ranks, []))[1].append(seq)
    groups: dict[tuple[int, ...], list[int]] = {}
    for ranks, seqs in alike.values():
        groups.setdefault(ranks, []).extend(seqs)
    return {ranks: sorted(seqs) for ranks, seqs in groups.items()}


def zones(placement: Placement, cluster: Cluster, pattern: str = "ring") -> tuple[Zone, ...]:
    """Zones in issue order: inter-node, intra-node, local; the widest first, then by ranks.

    Sequences with the same ranks share one.
    """
    groups = members(placement)

    def spread(ranks: tuple[int, ...]) -> int:
        return 2 if len(ranks) == 1 else int(cluster.node(ranks[0]) == cluster.node(ranks[-1]))

    ordered = sorted(groups, key=lambda ranks: (spread(ranks), -len(ranks), ranks))
    names = (INTER_NODE, INTRA_NODE, LOCAL)
    return tuple(Zone(names[spread(ranks)], pattern, ranks, tuple(groups[ranks])) for ranks in ordered)
