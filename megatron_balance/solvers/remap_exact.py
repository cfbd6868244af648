"""The remapping in closed form: cost has two values, so each node keeps what it can and spreads
fairly what it cannot.

A node with a surplus S and a deficit D in all keeps min(S, D) tokens inside: exchanging two
crossing transfers for one inside never makes any rank's cost larger. What is left to decide is who
of the larger side uses the node's inside. Every token that does lowers its rank's cost by the same
1 - intra, so it goes to the rank whose cost is largest then (water-filling), which minimises the
largest cost of every node, hence of all; the sum of costs depends on min(S, D) alone and is minimal
too. Which of the possible partners a rank gets costs nothing and follows rank order.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from megatron_balance.ir.arrays import Ints
from megatron_balance.solvers.remap_problem import RemapProblem, by_node


def solve(problem: RemapProblem) -> Ints:
    """Rows (src, dst, tokens) [n, 3] of an optimum, at most one row for each pair."""
    surplus, deficit = by_node(problem.surplus, problem.node_size), by_node(problem.deficit, problem.node_size)
    inside = np.minimum(surplus.sum(axis=1), deficit.sum(axis=1))
    sent = _fill_fairly(surplus, inside, problem.intra)
    received = _fill_fairly(deficit, inside, problem.intra)
    return np.concatenate(
        [_match(sent.ravel(), received.ravel()), _match((surplus - sent).ravel(), (deficit - received).ravel())]
    )


def _fill_fairly(need: Ints, inside: Ints, intra: float) -> Ints:
    """`inside` [nodes] tokens, each in turn to the rank of the node whose cost is largest, ties to
    the lower rank; [nodes, node_size].

    A rank with `need` tokens of which x stay inside costs need - (1 - intra) x. Divided by 1 -
    intra that is height - x, where height = need / (1 - intra): a step is one token, and the rule
    is water-filling downwards from `height`. With the heights cut to whole numbers the water's
    level is found in integers, exactly; the cut-off parts order the last, incomplete layer.
    """
    most = int(need.max())
    # A steeper slope than most + 2 decides nothing more: a rank that needs one token more than
    # another is then served to its end first. Past 2**53 heights would not be whole numbers apart
    # (only beyond 90 million tokens on a rank).
    slope = 1.0 / max(1.0 - intra, 1.0 / (most + 2), most / 2**53)
    heights = slope * need
    whole = np.floor(heights).astype(np.int64)
    level = _water_level(whole, need, inside)[:, None]
    filled = np.clip(whole - level, 0, need)
    takes_more = np.clip(whole - level + 1, 0, need) > filled
    most_costly_first = np.argsort(np.where(takes_more, whole - heights, 1.0), axis=1, kind="stable")
    place = np.argsort(most_costly_first, axis=1)
    return filled + (place < (inside - filled.sum(axis=1))[:, None])


def _water_level(heights: Ints, need: Ints, inside: Ints) -> Ints:
    """The lowest whole levels [nodes] at which sum(clip(heights - level, 0, need)) <= inside.

    Going down, a rank starts to take a token a step at `heights` and stops at `heights - need`: the
    sum is piecewise linear with bends at these levels, where it is known from the number of ranks
    that take.
    """
    bends = np.concatenate([heights, heights - need], axis=1)
    order = np.argsort(-bends, axis=1, kind="stable")
    bends = np.take_along_axis(bends, order, 1)
    taking = np.cumsum(np.where(order < heights.shape[1], 1, -1), axis=1)
    taken = np.zeros_like(bends)
    np.cumsum(taking[:, :-1] * (bends[:, :-1] - bends[:, 1:]), axis=1, out=taken[:, 1:])
    last = (taken <= inside[:, None]).sum(axis=1, keepdims=True) - 1
    bend, used, ranks = (np.take_along_axis(table, last, 1)[:, 0] for table in (bends, taken, taking))
    return bend - (inside - used) // np.maximum(ranks, 1)


def _match(sent: Ints, received: Ints) -> Ints:
    """Rows (src, dst, tokens) that pair what is sent with what is received, both in rank order.

    Laid end to end, both sides cover the same line; each stretch between two ends is one transfer.
    Where every node sends as many tokens inside as it receives, the nodes' ends coincide, and no
    transfer leaves its node.
    """
    senders, receivers = np.flatnonzero(sent), np.flatnonzero(received)
    sent_until, received_until = np.cumsum(sent[senders]), np.cumsum(received[receivers])
    ends: NDArray[np.int64] = np.union1d(sent_until, received_until)
    src = senders[np.searchsorted(sent_until, ends)]
    dst = receivers[np.searchsorted(received_until, ends)]
    return np.stack([src, dst, np.diff(ends, prepend=0)], axis=1)
