"""The table of transfers: intersections of owned shards and held ones, in both directions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_balance.analysis.link.parameters import ParameterTable
from megatron_balance.analysis.link.shards import Base, Shard, held, runs
from megatron_balance.errors import ConfigError
from megatron_balance.ir.arrays import Ints, sums
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
    """The transfers of one rank, or of all, under one strategy [n, Piece.WIDTH].

    Rows are sorted by all columns, so both ends of a message have its rectangles in one order, and
    an owner adds gradients by rank, its own in their place. Rows from a rank to itself are in it.
    """

    pull: Ints
    push: Ints


def link(
    base: Base, owned: Ints, strategy: Strategy, parameters: ParameterTable, rank: int | None = None
) -> StrategyLink:
    """The transfers of `rank` under `strategy`; None: those of all ranks.

    Args:
        base: the layout that owns.
        owned: its shards, `base.owned(parameters)`; the same for all strategies.
        strategy: the pipelines, from rank 0 on; ranks behind the last one only own.
        parameters: all of the model's.
        rank: whose rows are asked for.

    Raises:
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
        return StrategyLink(sorted_pieces(pull), sorted_pieces(push))
    own = owned[owned[:, Shard.RANK] == rank]
    others = held(strategy, parameters, chosen=np.unique(own[:, Shard.PARAMETER]))
    pulled, pushed = _pulled(base, own, others), _pushed(own, others, parameters)
    return StrategyLink(
        sorted_pieces(np.concatenate([pull, pulled[pulled[:, WeightPiece.DST] != rank]], axis=0)),
        sorted_pieces(np.concatenate([push, pushed[pushed[:, WeightPiece.SRC] != rank]], axis=0)),
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


def traffic(pieces: Ints, num_ranks: int) -> Ints:
    """Elements that each rank sends and receives [num_ranks, 2], without those it keeps."""
    moved = pieces[pieces[:, WeightPiece.SRC] != pieces[:, WeightPiece.DST]]
    amounts = elements(moved)
    return np.stack([sums(moved[:, end], amounts, num_ranks) for end in (WeightPiece.SRC, WeightPiece.DST)], axis=1)


def _pulled(base: Base, owned: Ints, wanted: Ints) -> Ints:
    """Weights to every holder, from one of the owned copies: that of its TP rank and end, if there
    is one.
    """
    one, other, rectangles = _meetings(owned, wanted)
    ends = np.minimum(wanted[other, Shard.END], int(base.scheme.pipeline > 1))
    fits = (owned[one, Shard.TENSOR] == wanted[other, Shard.TENSOR] % owned[one, Shard.DEGREE]) & (
        owned[one, Shard.END] == ends
    )
    one, other = one[fits], other[fits]
    return _pieces(owned[one, Shard.RANK], wanted[other, Shard.RANK], owned[one, Shard.PARAMETER], rectangles[fits])


def _pushed(owned: Ints, given: Ints, parameters: ParameterTable) -> Ints:
    """Gradients from holders to every owned copy: of a replicated parameter from one TP rank, or
    from all where each has a part.
    """
    one, other, rectangles = _meetings(owned, given)
    fits = given[other, Shard.TENSOR] == owned[one, Shard.TENSOR] % given[other, Shard.DEGREE]
    fits |= parameters.parts[given[other, Shard.PARAMETER]]
    one, other = one[fits], other[fits]
    return _pieces(given[other, Shard.RANK], owned[one, Shard.RANK], owned[one, Shard.PARAMETER], rectangles[fits])


def _meetings(owned: Ints, other: Ints) -> tuple[Ints, Ints, Ints]:
    """Pairs of shards of one parameter that share elements: index of the owned one, index of the
    other, and the rectangle that they share [m, 4].
    """
    order = np.argsort(owned[:, Shard.PARAMETER], kind="stable")
    numbers = owned[order, Shard.PARAMETER]
    first = np.searchsorted(numbers, other[:, Shard.PARAMETER], side="left")
    count = np.searchsorted(numbers, other[:, Shard.PARAMETER], side="right") - first
    two, place = runs(count)
    one = order[first[two] + place]
    starts = np.maximum(owned[one, Shard.STARTS], other[two, Shard.STARTS])
    stops = np.minimum(owned[one, Shard.STOPS], other[two, Shard.STOPS])
    meet = (starts < stops).all(axis=1)
    return one[meet], two[meet], np.stack([starts[meet], stops[meet]], axis=2).reshape(-1, 4)


def _pieces(src: Ints, dst: Ints, number: Ints, rectangles: Ints) -> Ints:
    return np.concatenate([np.stack([src, dst, number], axis=1), rectangles], axis=1)


def sorted_pieces(pieces: Ints) -> Ints:
    """Transfers in the order of all columns, the rank that sends first."""
    return pieces[np.lexsort(pieces.T[::-1])]
