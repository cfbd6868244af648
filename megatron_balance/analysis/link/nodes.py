"""Transfers between nodes that several ranks of a node have alike: they cross its NICs once. In a pull
one of these ranks hands on what came; in a push it sums what the others have, and sends the sum.

Source: Hydraulis, arXiv 2412.07894, section 5.2, sums among replicas before it sends to owners. Here
only those of one node are, since sums across nodes are what the owners make.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_balance.analysis.link.parameters import ParameterTable
from megatron_balance.analysis.link.shards import runs
from megatron_balance.analysis.link.table import StrategyLink, WeightPiece, sorted_pieces
from megatron_balance.ir.arrays import Bools, Ints
from megatron_balance.ir.strategy import Strategy


@dataclass(frozen=True, slots=True)
class Twins:
    """Ranks of a node that hold the same shards under a strategy: those of equal PP, stage, TP and TP
    rank.

    `members` [num_ranks, most]: of each rank's set in order, itself included, -1 where there are
    fewer; `counts` [num_ranks]; `node` [num_ranks].
    """

    members: Ints
    counts: Ints
    node: Ints

    @classmethod
    def of(cls, strategy: Strategy, num_ranks: int, ranks_per_node: int) -> Twins:
        """The twins of all ranks; one that is left over is alone."""
        sets: dict[tuple[int, ...], list[int]] = {}
        for rank, seat in enumerate(strategy.seats()):
            key = (rank // ranks_per_node, seat.scheme.pipeline, seat.stage, seat.scheme.tensor, seat.tensor)
            sets.setdefault(key, []).append(rank)
        sets |= {(-1, rank): [rank] for rank in range(strategy.num_ranks, num_ranks)}
        members = np.full((num_ranks, max(map(len, sets.values()))), -1, dtype=np.int64)
        counts = np.zeros(num_ranks, dtype=np.int64)
        for each in sets.values():
            members[each, : len(each)] = each
            counts[each] = len(each)
        return cls(members, counts, np.arange(num_ranks, dtype=np.int64) // ranks_per_node)

    def split(self, pieces: Ints, role: int, single: Bools, rank: int | None) -> tuple[Ints, Ints]:
        """Transfers that cross between nodes or stay as they are, and those among twins.

        Args:
            pieces: rows of a link, of one rank or of all.
            role: the column of the rank that holds for a role: `WeightPiece.DST` in a pull.
            single: by parameter, whether each of its elements has one owner; sums of others would
                reach one owner for another.
            rank: whose rows they are; None: of all.
        """
        member, owner = pieces[:, role], pieces[:, WeightPiece.SRC + WeightPiece.DST - role]
        turn = owner + self.node[owner] + pieces[:, WeightPiece.PARAMETER]
        chosen = self.members[member, turn % self.counts[member]]
        far = (self.node[owner] != self.node[member]) & single[pieces[:, WeightPiece.PARAMETER]]
        across = pieces[~far | (chosen == member)]
        theirs = far & (chosen != member) & ((member == rank) if rank is not None else True)
        inside = _between(pieces[theirs], chosen[theirs], member[theirs], role)
        if rank is None:
            return across, inside
        mine = np.flatnonzero(far & (chosen == member) & (member == rank))
        which, turn = runs(self.counts[member[mine]])
        mine, other = mine[which], self.members[member[mine[which]], turn]
        there = other != rank
        handed = _between(pieces[mine[there]], chosen[mine[there]], other[there], role)
        return across, sorted_pieces(np.concatenate([inside, handed], axis=0))


def through_nodes(
    link: StrategyLink, parameters: ParameterTable, twins: Twins, rank: int | None
) -> tuple[StrategyLink, StrategyLink]:
    """The link as transfers of one rank of each set of twins, and those among twins: behind the first
    in a pull, before them in a push. `rank`: whose rows they are; None: of all.
    """
    single = (parameters.cut >= 0) & ~parameters.tied
    (pull, handed), (push, given) = (
        twins.split(pieces, role, single, rank)
        for pieces, role in ((link.pull, WeightPiece.DST), (link.push, WeightPiece.SRC))
    )
    return StrategyLink(pull, push), StrategyLink(handed, given)


def _between(pieces: Ints, chosen: Ints, other: Ints, role: int) -> Ints:
    """The rectangles of `pieces` from the chosen rank to the other in a pull, back in a push."""
    made = pieces.copy()
    made[:, role], made[:, WeightPiece.SRC + WeightPiece.DST - role] = other, chosen
    return made
