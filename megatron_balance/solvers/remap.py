"""The remapping solver: from the tokens each rank holds to equal counts, at the least cost.

Zeppelin, section 3.4, Eq. (2): the rank that pays most for what it sends pays as little as
possible; in whole tokens. What we add: receivers count too; targets that are multiples of the
tensor-parallel size. Where we differ: the cost matrix has two values, so the optimum has a closed
form (`_solve_exactly`), the default, which makes the sum over ranks least as well; Gurobi (as in the
paper) and HiGHS solve the same problem as a program: the same cost and tokens between nodes,
perhaps by other moves.
"""

import logging
import math
from dataclasses import dataclass
from functools import cache

import numpy as np

from megatron_balance.errors import ConfigError
from megatron_balance.ir.arrays import Ints
from megatron_balance.ir.columns import Move
from megatron_balance.ir.step import MilpSolver, Solver
from megatron_balance.solvers import milp
from megatron_balance.solvers.milp import NoAnswerError, NoSolverError

log = logging.getLogger(__name__)


def solve(
    held: Ints, node_size: int, *, intra_s: float, inter_s: float, align: int = 1, solver: Solver = "exact"
) -> Ints:
    """The moves, sorted rows (src, dst, tokens) [n, 3], that even out `held` [d] tokens per rank at
    the least cost.

    `node_size`: ranks of a node; the last one may be smaller. `intra_s`, `inter_s`: any cost of a
    token inside a node and between nodes (`intra_s` where it is less). `align`: as in `balanced`.
    `solver`: where it gives no proven optimum, one warning says so and the exact one answers.

    Raises:
        ConfigError: a count, a size or a cost out of its range.
    """
    held = np.asarray(held, dtype=np.int64)
    _check(held, node_size, intra_s, inter_s, align)
    over = held - _balanced(held, align)
    intra = min(intra_s / inter_s, 1.0) if inter_s > 0 else 1.0
    problem = _RemapProblem(np.maximum(over, 0), np.maximum(-over, 0), node_size, intra)
    moves = _moves(problem, solver) if over.any() else np.zeros((0, Move.WIDTH), dtype=np.int64)
    return moves[np.lexsort((moves[:, Move.DST], moves[:, Move.SRC]))]


def _moves(problem: "_RemapProblem", solver: Solver) -> Ints:
    if solver != "exact":
        try:
            return _solve_program(problem, solver)
        except (NoAnswerError, NoSolverError) as error:
            _warn_once(solver, str(error))
    return _solve_exactly(problem)


@cache
def _warn_once(solver: Solver, reason: str) -> None:
    log.warning(
        "remapping: solver %r gives no answer: %s; the exact solver takes over (same cost, same tokens between nodes)",
        solver,
        reason,
    )


def _check(held: Ints, node_size: int, intra_s: float, inter_s: float, align: int) -> None:
    if held.ndim != 1 or not len(held) or held.min() < 0:
        raise ConfigError(
            f"remapping: tokens held by each rank must be one count of 0 or more per rank, got {held.tolist()}"
        )
    if node_size < 1 or align < 1:
        raise ConfigError(
            f"remapping: a node has at least 1 rank and align is at least 1, got node_size={node_size}, align={align}"
        )
    for name, cost in (("intra_s", intra_s), ("inter_s", inter_s)):
        if not (math.isfinite(cost) and cost >= 0):
            raise ConfigError(f"remapping: {name} must be a finite cost per token of 0 or more, got {cost}")


@dataclass(frozen=True, slots=True)
class _RemapProblem:
    """Eq. (2) for a given target. `surplus`, `deficit` [d]: tokens to send and to receive. A token
    costs 1 between nodes and `intra`, 0 to 1, within one.
    """

    surplus: Ints
    deficit: Ints
    node_size: int
    intra: float


def _by_node(counts: Ints, node_size: int) -> Ints:
    """`counts` [d] as [nodes, node_size]; ranks that the last node lacks have 0."""
    num_nodes = -(-len(counts) // node_size)
    table = np.zeros(num_nodes * node_size, dtype=np.int64)
    table[: len(counts)] = counts
    return table.reshape(num_nodes, node_size)


def _balanced(held: Ints, align: int) -> Ints:
    """The tokens [d] that each rank ends with: as equal as possible, moving as few as possible;
    multiples of `align` but for one rank. Extra units go to the ranks that hold most, then what
    makes no unit.
    """
    units, rest = divmod(int(held.sum()), align)
    each, extra = divmod(units, len(held))
    most_first = np.argsort(-held, kind="stable")
    target = np.full(len(held), each * align, dtype=np.int64)
    target[most_first[:extra]] += align
    target[most_first[extra]] += rest
    return target


def _solve_exactly(problem: _RemapProblem) -> Ints:
    """Rows (src, dst, tokens) [n, 3] of an optimum, at most one row for each pair.

    A node with a surplus S and a deficit D keeps min(S, D) inside: two crossing transfers for one
    inside never cost any rank more. Who of the larger side uses the inside is decided by
    water-filling, which minimises the largest cost of every node, hence of all; the sum depends on
    min(S, D) alone.
    """
    surplus, deficit = _by_node(problem.surplus, problem.node_size), _by_node(problem.deficit, problem.node_size)
    inside = np.minimum(surplus.sum(axis=1), deficit.sum(axis=1))
    sent = _fill_fairly(surplus, inside, problem.intra)
    received = _fill_fairly(deficit, inside, problem.intra)
    return np.concatenate(
        [_match(sent.ravel(), received.ravel()), _match((surplus - sent).ravel(), (deficit - received).ravel())]
    )


def _fill_fairly(need: Ints, inside: Ints, intra: float) -> Ints:
    """`inside` [nodes] tokens, each to the rank whose cost is largest [nodes, node_size]."""
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
    """The lowest whole levels [nodes] at which sum(clip(heights - level, 0, need)) <= inside."""
    # A rank starts to take at `heights` and stops at `heights - need`: the sum is piecewise linear,
    # with a bend at each, and known from the number of ranks that take.
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
    """Rows (src, dst, tokens) that pair what is sent with what is received, both in rank order."""
    # Laid end to end both sides cover one line; each stretch between two ends is one transfer. Where
    # every node sends as many tokens inside as it receives, none leaves its node.
    senders, receivers = np.flatnonzero(sent), np.flatnonzero(received)
    sent_until, received_until = np.cumsum(sent[senders]), np.cumsum(received[receivers])
    ends: Ints = np.union1d(sent_until, received_until)
    src = senders[np.searchsorted(sent_until, ends)]
    dst = receivers[np.searchsorted(received_until, ends)]
    return np.stack([src, dst, np.diff(ends, prepend=0)], axis=1)


# Nodes of the search tree; these problems are proven at the root or close to it.
MAX_NODES = 10_000


def _solve_program(problem: _RemapProblem, solver: MilpSolver) -> Ints:
    """`Move` rows [n, 3] of a proven optimum by Gurobi or HiGHS.

    Raises:
        NoSolverError: the solver is not installed.
        NoAnswerError: it has no licence or too small a licence, or ended without an optimum.
    """
    pairs, program = _formulate(problem)
    values = milp.solve(program, MAX_NODES, solver=solver, proven=True)
    tokens = np.rint(values[: len(pairs)]).astype(np.int64)
    moves = np.column_stack([pairs, tokens])[tokens > 0]
    for column, wanted in ((Move.SRC, problem.surplus), (Move.DST, problem.deficit)):
        if (np.bincount(moves[:, column], moves[:, Move.TOKENS], len(wanted)) != wanted).any():
            raise milp.NoAnswerError("its answer is not in whole tokens")
    return moves


def _formulate(problem: _RemapProblem) -> tuple[Ints, milp.Milp]:
    """Pairs (src, dst) [n, 2] and the program: their tokens, each rank's inside, the largest cost."""
    senders, receivers = np.flatnonzero(problem.surplus), np.flatnonzero(problem.deficit)
    src, dst = (grid.ravel() for grid in np.meshgrid(np.arange(len(senders)), np.arange(len(receivers)), indexing="ij"))
    pairs = np.stack([senders[src], receivers[dst]], axis=1)
    src_node, dst_node = (pairs // problem.node_size).T
    inside = src_node == dst_node
    ends = ((src, senders, problem.surplus[senders]), (dst, receivers, problem.deficit[receivers]))
    pair = np.arange(len(pairs))
    rows = milp.Constraints()
    for rank, _, need in ends:
        rows.add(len(need), need, need, (rank, pair, 1.0))
    num_variables = len(pairs) + sum(len(ranks) for _, ranks, _ in ends) + 1
    # What a node can keep it keeps: no rank pays more, and no second objective is needed.
    kept = np.minimum(*(_by_node(need, problem.node_size).sum(axis=1) for need in (problem.surplus, problem.deficit)))
    first = len(pairs)
    for rank, ranks, need in ends:
        each = np.arange(len(need))
        largest = np.full_like(each, num_variables - 1)
        rows.add(len(need), 0.0, 0.0, (rank[inside], pair[inside], 1.0), (each, first + each, -1.0))
        rows.add(len(need), need, np.inf, (each, first + each, 1.0 - problem.intra), (each, largest, 1.0))
        nodes, node = np.unique(ranks // problem.node_size, return_inverse=True)
        rows.add(len(nodes), kept[nodes], kept[nodes], (node, first + each, 1.0))
        first += len(need)
    is_largest = np.arange(num_variables) == num_variables - 1
    return pairs, rows.program(is_largest.astype(np.float64), ~is_largest)
