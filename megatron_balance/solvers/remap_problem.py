"""The problem that a remap solves: target tokens of every rank, and with them its surplus or
deficit.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_balance.ir.arrays import Ints


@dataclass(frozen=True, slots=True)
class RemapProblem:
    """Zeppelin's Eq. (2) for a given target.

    `surplus` and `deficit` [d] are tokens a rank has to send and to receive (never both above 0;
    their sums are equal). A token costs 1 between two nodes and `intra`, 0 to 1, within one. Node n
    has the ranks [n x node_size, (n + 1) x node_size).
    """

    surplus: Ints
    deficit: Ints
    node_size: int
    intra: float


def by_node(counts: Ints, node_size: int) -> Ints:
    """`counts` [d] as [nodes, node_size]; ranks that the last node lacks have 0."""
    num_nodes = -(-len(counts) // node_size)
    table = np.zeros(num_nodes * node_size, dtype=np.int64)
    table[: len(counts)] = counts
    return table.reshape(num_nodes, node_size)


def balanced(held: Ints, align: int) -> Ints:
    """The tokens [d] that each rank ends with: as equal as possible, and such that as few tokens as
    possible move.

    The rule for the remainder: with T tokens in all, every rank gets floor(T / d), and the T mod d
    extra tokens go one each to the ranks that hold most, ties to the lower rank. With `align` a > 1
    the same holds in units of a tokens, and the T mod a tokens that make no unit go to the next
    rank in that order. So counts differ by at most a, and all but one are multiples of a.
    """
    units, rest = divmod(int(held.sum()), align)
    each, extra = divmod(units, len(held))
    most_first = np.argsort(-held, kind="stable")
    target = np.full(len(held), each * align, dtype=np.int64)
    target[most_first[:extra]] += align
    target[most_first[extra]] += rest
    return target
