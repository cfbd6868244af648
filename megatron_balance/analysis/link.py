"""The link between the base layout and a strategy: which rectangle of which parameter goes from which
rank to which, in a pull (weights to roles) and in a push (gradients to owners).

Source: Hydraulis, arXiv 2412.07894, section 5.2 and Appendix B.1.

- The paper cuts every parameter into equal slices, as many as the LCM of the number of GPUs and the
  largest TP. Such a number need not divide a dimension: transfers here are intersections of
  rectangles, so any degrees go together. Gradients go to their owner at once.
- What several ranks of a node have alike crosses its NICs once (`Twins`): one hands on what came in a
  pull, and sums what the others have in a push.
- Slot 0 of an exchange beside compute has the embedding, the last one what the last stage has alone;
  between them are as many as the longest stage has layers (`layer_slot`).

Every rank computes its own rows, and those of two ranks agree without a message (docs/adr/0024).
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from megatron_balance.analysis.shards import Base, ParameterTable, Shard, held
from megatron_balance.errors import ConfigError
from megatron_balance.ir.arrays import Bools, Ints, ranges
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.strategy import Strategy


class WeightPiece:
    """Columns of a table of transfers: one rectangle of one parameter from one rank to another."""

    WIDTH = 7
    SRC, DST, PARAMETER, ROW_START, ROW_STOP, COLUMN_START, COLUMN_STOP = range(7)
    RECTANGLE = slice(3, 7)
    STARTS = slice(3, 6, 2)
    STOPS = slice(4, 7, 2)


@dataclass(frozen=True, slots=True)
class StrategyLink:
    """The transfers of one rank, or of all, under one strategy [n, WeightPiece.WIDTH].

    Rows are sorted by all columns, so both ends of a message have its rectangles in one order, and
    an owner adds gradients by rank, its own in their place. Rows from a rank to itself are in it.
    """

    pull: Ints
    push: Ints


def link(
    base: Base, owned: Ints, strategy: Strategy, parameters: ParameterTable, rank: int | None = None
) -> StrategyLink:
    """The transfers of `rank` under `strategy`; None: those of all ranks.

    `base`: the layout that owns; `owned`: its shards, `base.owned(parameters)`; the same for all
    strategies; `strategy`: the pipelines, from rank 0 on; ranks behind the last one only own. Raises
    ConfigError: a strategy with more ranks than the base, or a rank outside of it.
    """
    if strategy.num_ranks > base.num_ranks or not (rank is None or 0 <= rank < base.num_ranks):
        raise ConfigError(
            f"link of rank {rank}, strategy {strategy} with {strategy.num_ranks} ranks: the base layout has "
            f"{base.num_ranks}; use a strategy and a rank within them"
        )
    mine = held(strategy, parameters, rank=rank)
    pull, push = _pulled(base, owned, mine), _pushed(owned, mine, parameters)
    if rank is None:
        return StrategyLink(_sorted_pieces(pull), _sorted_pieces(push))
    own = owned[owned[:, Shard.RANK] == rank]
    others = held(strategy, parameters, chosen=np.unique(own[:, Shard.PARAMETER]))
    pulled, pushed = _pulled(base, own, others), _pushed(own, others, parameters)
    return StrategyLink(
        _sorted_pieces(np.concatenate([pull, pulled[pulled[:, WeightPiece.DST] != rank]], axis=0)),
        _sorted_pieces(np.concatenate([push, pushed[pushed[:, WeightPiece.SRC] != rank]], axis=0)),
    )


def link_of(base: Base, owned: Ints, strategy: Strategy, parameters: ParameterTable, number: int) -> StrategyLink:
    """The transfers of all ranks for one parameter, in no order.

    `owned`: the shards of this parameter alone; `number`: of the parameter; else as for `link`.
    """
    mine = held(strategy, parameters, chosen=np.array([number]))
    return StrategyLink(_pulled(base, owned, mine), _pushed(owned, mine, parameters))


def elements(pieces: Ints) -> Ints:
    """Elements of each transfer [n]."""
    return (pieces[:, WeightPiece.STOPS] - pieces[:, WeightPiece.STARTS]).prod(axis=1)


def _pulled(base: Base, owned: Ints, wanted: Ints) -> Ints:
    # Weights to every holder, from the owned copy of its TP rank and end, if there is one.
    one, other, rectangles = _meetings(owned, wanted)
    ends = np.minimum(wanted[other, Shard.END], int(base.scheme.pipeline > 1))
    fits = owned[one, Shard.TENSOR] == wanted[other, Shard.TENSOR] % owned[one, Shard.DEGREE]
    fits &= owned[one, Shard.END] == ends
    one, other = one[fits], other[fits]
    return _pieces(owned[one, Shard.RANK], wanted[other, Shard.RANK], owned[one, Shard.PARAMETER], rectangles[fits])


def _pushed(owned: Ints, given: Ints, parameters: ParameterTable) -> Ints:
    # Gradients from holders to every owned copy: of a replicated parameter from one TP rank, or
    # from all where each has a part.
    one, other, rectangles = _meetings(owned, given)
    fits = given[other, Shard.TENSOR] == owned[one, Shard.TENSOR] % given[other, Shard.DEGREE]
    fits |= parameters.parts[given[other, Shard.PARAMETER]]
    one, other = one[fits], other[fits]
    return _pieces(given[other, Shard.RANK], owned[one, Shard.RANK], owned[one, Shard.PARAMETER], rectangles[fits])


def _meetings(owned: Ints, other: Ints) -> tuple[Ints, Ints, Ints]:
    # Indices of owned and other shards that share elements, and the rectangles shared [m, 4].
    order = np.argsort(owned[:, Shard.PARAMETER], kind="stable")
    numbers = owned[order, Shard.PARAMETER]
    of = other[:, Shard.PARAMETER]
    two, place = ranges(np.searchsorted(numbers, of, side="left"), np.searchsorted(numbers, of, side="right"))
    one = order[place]
    starts = np.maximum(owned[one, Shard.STARTS], other[two, Shard.STARTS])
    stops = np.minimum(owned[one, Shard.STOPS], other[two, Shard.STOPS])
    meet = (starts < stops).all(axis=1)
    return one[meet], two[meet], np.stack([starts[meet], stops[meet]], axis=2).reshape(-1, 4)


def _pieces(src: Ints, dst: Ints, number: Ints, rectangles: Ints) -> Ints:
    return np.concatenate([np.stack([src, dst, number], axis=1), rectangles], axis=1)


def _sorted_pieces(pieces: Ints) -> Ints:
    # Transfers in the order of all columns, the rank that sends first.
    return pieces[np.lexsort(pieces.T[::-1])]


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
    def of(cls, strategy: Strategy, num_ranks: int, ranks_per_node: int) -> "Twins":
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

        `pieces`: rows of a link, of one rank or of all; `role`: the column of the rank that holds for
        a role: `WeightPiece.DST` in a pull; `single`: by parameter, whether each of its elements has
        one owner; sums of others would reach one owner for another; `rank`: whose rows they are; None:
        of all.
        """
        member, owner = pieces[:, role], pieces[:, WeightPiece.SRC + WeightPiece.DST - role]
        turn = owner + self.node[owner] + pieces[:, WeightPiece.PARAMETER]
        chosen = self.members[member, turn % self.counts[member]]
        far = (self.node[owner] != self.node[member]) & single[pieces[:, WeightPiece.PARAMETER]]
        across = pieces[~far | (chosen == member)]
        theirs = far & (chosen != member) & ((member == rank) if rank is not None else True)
        inside = _between_twins(pieces[theirs], chosen[theirs], member[theirs], role)
        if rank is None:
            return across, inside
        mine = np.flatnonzero(far & (chosen == member) & (member == rank))
        counts = self.counts[member[mine]]
        which, turn = ranges(np.zeros_like(counts), counts)
        mine, other = mine[which], self.members[member[mine[which]], turn]
        there = other != rank
        handed = _between_twins(pieces[mine[there]], chosen[mine[there]], other[there], role)
        return across, _sorted_pieces(np.concatenate([inside, handed], axis=0))


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


def _between_twins(pieces: Ints, chosen: Ints, other: Ints, role: int) -> Ints:
    # The rectangles of `pieces` from the chosen rank to the other in a pull, back in a push.
    made = pieces.copy()
    made[:, role], made[:, WeightPiece.SRC + WeightPiece.DST - role] = other, chosen
    return made


def num_slots(strategy: Strategy, num_layers: int) -> int:
    """Slots of layers, each way."""
    return max(num_layers // scheme.pipeline for scheme in strategy.pipelines)


def layer_slot(layer: Ints, count: int | Ints, slots: int) -> Ints:
    """The slot of a stage's layers by their number in it, of `count`; slot 0 is the embedding's."""
    return 1 + layer * slots // count


def slots_of(numbers: Ints, ranks: Ints, strategy: Strategy, parameters: ParameterTable) -> Ints:
    """The slot in which each parameter of a role's rank moves [n].

    `ranks`: that hold them in the strategy; `strategy`: whose PP divides the layers.
    """
    total = parameters.num_layers
    stages, stage = np.array([(seat.scheme.pipeline, seat.stage) for seat in strategy.seats()]).T[:, ranks]
    slots = num_slots(strategy, total)
    layer, count = parameters.layer[numbers], total // stages
    found = layer_slot(layer - stage * count, count, slots)
    found = np.where(layer < 0, 0, np.where(layer == total, slots + 1, found))
    tied_end = parameters.tied[numbers] & (stages > 1) & (stage == stages - 1)
    return np.where(tied_end, slots + 1, found)


def places(pieces: Ints, shards: Ints) -> Ints:
    """Where each piece lies on the rank that has these shards [n, 5]: rows (parameter, start, rows,
    columns, stride), a strided matrix in the flat tensor that the rank has of the parameter.

    A rank's shards of a parameter lie in one flat tensor, one behind the other, row by row: for an
    owner its range of the parameter (`Base.owned`), for a role the weight itself (`held`). `pieces`:
    rows of a link that this rank sends, or receives; `shards`: rows of one rank, in the order of
    `Base.owned` or `held`. Raises ConfigError: a piece that lies in none of the shards.
    """
    order = np.argsort(shards[:, Shard.PARAMETER], kind="stable")
    shards = shards[order]
    sizes = (shards[:, Shard.STOPS] - shards[:, Shard.STARTS]).prod(axis=1)
    before = np.cumsum(sizes) - sizes
    numbers = shards[:, Shard.PARAMETER]
    starts = before - before[np.searchsorted(numbers, numbers, side="left")]
    of = pieces[:, WeightPiece.PARAMETER]
    which, shard = ranges(np.searchsorted(numbers, of, side="left"), np.searchsorted(numbers, of, side="right"))
    inside = (pieces[which][:, WeightPiece.STARTS] >= shards[shard][:, Shard.STARTS]).all(axis=1)
    inside &= (pieces[which][:, WeightPiece.STOPS] <= shards[shard][:, Shard.STOPS]).all(axis=1)
    which, shard = which[inside], shard[inside]
    if not np.array_equal(which, np.arange(len(pieces))):
        wrong = int(np.setdiff1d(np.arange(len(pieces)), which)[0]) if len(which) < len(pieces) else int(which[0])
        raise ConfigError(
            f"places: piece {pieces[wrong].tolist()} of a link lies in {int((which == wrong).sum())} of this rank's "
            "shards, expected one; give the shards that the link was computed from"
        )
    mine = shards[shard]
    stride = mine[:, Shard.COLUMN_STOP] - mine[:, Shard.COLUMN_START]
    down, right = (pieces[:, WeightPiece.STARTS] - mine[:, Shard.STARTS]).T
    rows, columns = (pieces[:, WeightPiece.STOPS] - pieces[:, WeightPiece.STARTS]).T
    return np.stack(
        [pieces[:, WeightPiece.PARAMETER], starts[shard] + down * stride + right, rows, columns, stride], axis=1
    )


@dataclass(frozen=True, slots=True)
class WeightTraffic:
    """Bytes of a pull and a push [2, num_ranks, 2, 2]: inside nodes and between, sent and received."""

    SHAPE: ClassVar[tuple[int, ...]] = (2, 2, 2)
    table: Ints
    handed_on: bool = False
    """Whether transfers among ranks of a node follow those between nodes (`Twins`)."""

    def described(self, cluster: Cluster) -> dict[str, float]:
        """Bytes of all ranks, and the seconds that links alone take by a data sheet."""
        found: dict[str, float] = {}
        for name, way in zip(("pull", "push"), self.table, strict=True):
            found[f"{name}_bytes"] = int(way[:, :, 0].sum())
            found[f"{name}_bytes_inter_node"] = int(way[:, 1, 0].sum())
            found[f"predicted_{name}_s"] = links_s(way, cluster, handed_on=self.handed_on)
        return found


def links_s(way: Ints, cluster: Cluster, *, handed_on: bool = False) -> float:
    """Seconds of the busiest link or NIC, each direction for itself.

    `way`: bytes [num_ranks, 2, 2], one direction of a `WeightTraffic`, or a part of it; `handed_on`:
    both count, one after the other.
    """
    inside, between = way[:, 0], way[:, 1]
    by_nic = np.zeros((-(-len(way) // cluster.ranks_per_nic), 2), dtype=np.int64)
    np.add.at(by_nic, np.arange(len(way)) // cluster.ranks_per_nic, between)
    link_s, nic_s = float(inside.max()) / cluster.intra_bytes_per_s, float(by_nic.max()) / cluster.nic_bytes_per_s
    return link_s + nic_s if handed_on else max(link_s, nic_s)


def volume(pieces: Ints, width: int, num_ranks: int, ranks_per_node: int) -> Ints:
    """Bytes [num_ranks, 2, 2] of transfers of `width` bytes an element, as in `WeightTraffic`."""
    found = np.zeros((num_ranks, 2, 2), dtype=np.int64)
    src, dst = pieces[:, WeightPiece.SRC], pieces[:, WeightPiece.DST]
    moves = np.flatnonzero(src != dst)
    away = (src[moves] // ranks_per_node != dst[moves] // ranks_per_node).astype(np.int64)
    amounts = width * elements(pieces[moves])
    for way, ends in enumerate((src[moves], dst[moves])):
        np.add.at(found[..., way], (ends, away), amounts)
    return found
