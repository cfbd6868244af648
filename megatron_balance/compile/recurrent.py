"""The program of a plan's recurrent layers, from its linear layout alone.

The ranks of a sequence share its heads: each composes the summaries of all pieces for its heads and
hands the states back. So there are two rounds however many ranks there are, and what a rank sends
grows with the pieces that it holds (an all-gather of summaries grows with all pieces). The rows of
the convolution's halo come in a round before, since summaries are made of its outputs.

Of trees the two rounds are the same: a branch begins with the state at its parent's end, which
composers hand to each rank once, and of the gradients of branches they make the sum.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from megatron_balance.compile.remap import layouts
from megatron_balance.errors import ConfigError
from megatron_balance.ir.arrays import Bools, Ints, as_rows, key_seq, numbered, overlaps, ranges, run_bounds, union
from megatron_balance.ir.columns import Fragment, Neighbours, Placed, Rows, Transfer
from megatron_balance.ir.forest import Forest, Tree
from megatron_balance.ir.plan import MicrobatchPlan
from megatron_balance.ir.program import Exchange
from megatron_balance.ir.recurrent import Compose, RecurrentKind, RecurrentOp, RecurrentProgram
from megatron_balance.ir.segments import PathEnds


def compile_recurrent(plan: MicrobatchPlan, num_heads: int, halo: int) -> RecurrentProgram:
    """The program, forward and backward, of recurrent layers with `num_heads` heads of states on
    every rank (0: a convolution alone) and convolutions that read `halo` rows before a token.
    """
    placed = layouts(plan)
    owned = [as_rows(placed[placed[:, Placed.RANK] == rank][:, Placed.FRAGMENT]) for rank in range(plan.num_ranks)]
    return program_of(plan.lengths, owned, num_heads, halo, trees_of(plan))


def trees_of(plan: MicrobatchPlan) -> tuple[Tree, ...]:
    """The trees of a plan's sequences; none: all are documents.

    ConfigError: a tree has full segments, which no recurrence can show.
    """
    return _causal(plan.mask.trees if isinstance(plan.mask, Forest) else ())


def _causal(trees: tuple[Tree, ...]) -> tuple[Tree, ...]:
    if any(segment.full for tree in trees for segment in tree):
        raise ConfigError(
            "expected causal segments for recurrent layers, got full ones, whose tokens see later ones, which no "
            "recurrence shows; give causal segments, or a model whose layers all attend"
        )
    return trees


def program_of(
    lengths: Sequence[int], owned: Sequence[Rows], num_heads: int, halo: int, trees: tuple[Tree, ...] = ()
) -> RecurrentProgram:
    """As `compile_recurrent`, for a linear layout: `Fragment` rows by rank."""
    laid = _Laid(pieces(owned, _causal(trees)), PathEnds.of(lengths, trees), num_heads, halo)
    forward, backward = tuple(laid.forward()), tuple(laid.backward())
    return RecurrentProgram(tuple(lengths), num_heads, halo, tuple(owned), forward, backward, trees)


def pieces(owned: Sequence[Rows], trees: tuple[Tree, ...] = ()) -> Ints:
    """All ranks' pieces, `Placed` rows by sequence, then by start; in trees each is of one segment."""
    rows, ranks = numbered(list(enumerate(owned)), Fragment.WIDTH)
    return pieces_of(np.column_stack([ranks, rows]), trees)


def pieces_of(placed: Ints, trees: tuple[Tree, ...]) -> Ints:
    """As `pieces`, of the `Placed` rows of all ranks."""
    runs = union(placed)
    if trees:
        of = Forest(trees).segments
        segments = np.column_stack([key_seq(of.begin), of.start, of.stop])
        run, at = overlaps(runs[:, Placed.FRAGMENT], segments)
        runs, segments = runs[run], segments[at]
        runs[:, Placed.START] = np.maximum(runs[:, Placed.START], segments[:, Fragment.START])
        runs[:, Placed.STOP] = np.minimum(runs[:, Placed.STOP], segments[:, Fragment.STOP])
    return runs[np.lexsort((runs[:, Placed.START], runs[:, Placed.SEQ]))]


def halos(held: Ints, halo: int, paths: PathEnds | None = None) -> Ints:
    """Rows before a rank's `pieces` that their convolution reads and another rank owns: `Transfer`
    rows, each token once to a rank, from as many owners as they have. `paths`: None: of documents.
    """
    inside = held[held[:, Placed.START] > 0]
    rank_seq, stop = inside[:, : Placed.START], inside[:, Placed.START]
    left, before = np.full(len(inside), halo), [inside[:0]]
    while len(stop):
        first = 0 * stop
        if paths is not None:
            stop = paths.before(rank_seq[:, 1], stop)
            first = paths.start[paths.at(rank_seq[:, 1], stop - 1)]
        start = np.maximum(stop - left, first)
        before.append(np.column_stack([rank_seq, start, stop]))
        left = left - (stop - start)
        more = (left > 0) & (start > 0)
        rank_seq, stop, left = rank_seq[more], start[more], left[more]
    wanted = union(np.concatenate(before))  # pieces of few tokens lie in one another's halos
    want, have = overlaps(wanted[:, Placed.FRAGMENT], held[:, Placed.FRAGMENT])
    seq, (src, dst) = held[have, Placed.SEQ], (held[have, Placed.RANK], wanted[want, Placed.RANK])
    start = np.maximum(held[have, Placed.START], wanted[want, Placed.START])
    stop = np.minimum(held[have, Placed.STOP], wanted[want, Placed.STOP])
    rows = np.column_stack([np.full(len(seq), RecurrentKind.ROWS), seq, start, stop, 0 * seq, 0 * seq + 1, src, dst])
    return rows[src != dst]


def carries_map(rows: Ints) -> Bools:
    """Whether each of the `Transfer` rows brings M beside U: not a state, which the first summary of a
    sequence is, and none in the backward.
    """
    return (rows[:, Transfer.KIND] == RecurrentKind.SUMMARY) & (rows[:, Transfer.START] > 0)


def composers(held: Ints, num_heads: int) -> Ints:
    """Heads of each cut sequence, shared among its ranks: rows (rank, seq, head_start, head_stop)."""
    ends = run_bounds(held[1:, Placed.SEQ] != held[:-1, Placed.SEQ], len(held))
    cut = np.repeat(np.diff(ends) > 1, np.diff(ends))
    seq, rank = np.unique(held[cut][:, [Placed.SEQ, Placed.RANK]], axis=0).T
    ends = run_bounds(seq[1:] != seq[:-1], len(seq))
    count = np.repeat(np.diff(ends), np.diff(ends))
    # Turned by sequence: the few heads of many short sequences do not meet on the same ranks.
    place = (np.arange(len(seq)) - np.repeat(ends[:-1], np.diff(ends)) - seq) % count
    table = np.column_stack([rank, seq, num_heads * place // count, num_heads * (place + 1) // count])
    return table[table[:, 2] < table[:, 3]]


# Of the state at a token boundary: what was sent to make it was the SUMMARY that ends there, what is
# sent back is the SUMMARY_GRAD that begins there. A composer answers for all tokens behind it; a rank
# that was handed the state for its own piece answers for that piece.
class _Laid:
    """Rows of a layout: every piece of a cut sequence, once for each of its composers."""

    def __init__(self, held: Ints, paths: PathEnds, num_heads: int, halo: int) -> None:
        self.halo, table = halos(held, halo, paths), composers(held, num_heads)
        first = np.searchsorted(held[:, Placed.SEQ], table[:, 1], side="left")
        end = np.searchsorted(held[:, Placed.SEQ], table[:, 1], side="right")
        composer, at = ranges(first, end)
        self.by, self.heads = table[composer, 0], table[composer, 2:]
        self.held, (self.rank, self.seq, self.start, self.stop) = held, held[at].T
        segment = paths.at(self.seq, self.start)
        self.zero, self.before, self.end = 0 * self.start, paths.before(self.seq, self.start), paths.end[segment]
        self.begins, self.ends = self.start == 0, self.stop == self.end
        # Where what lies below the segment's parent ends: there are more siblings up to there.
        self.whole = paths.end[paths.at(self.seq, np.maximum(paths.above[segment] - 1, 0))]
        self.sibling = (self.start == paths.start[segment]) & (self.end != self.whole)

    def forward(self) -> Iterator[RecurrentOp]:
        if len(self.halo):
            yield Exchange(0, as_rows(self.halo))
        kind, middle = RecurrentKind.SUMMARY, ~self.begins & ~self.ends
        yield from self.sent(1, kind, (self.start, self.stop), ~self.ends)
        yield from self.composed(kind, [((self.zero, self.start, self.stop), middle)])
        yield from self.handed(2, kind, (self.zero, self.before), ~self.begins)

    def backward(self) -> Iterator[RecurrentOp]:
        kind, middle = RecurrentKind.SUMMARY_GRAD, ~self.begins & ~self.ends
        yield from self.sent(3, kind, (self.start, self.stop), ~self.begins)
        sums = (self.start, self.end, self.whole), self.sibling
        joins = (self.start, self.stop, self.end), middle
        yield from reversed([*self.composed(kind, [sums, joins], turn=-1)])
        yield from self.handed(4, kind, (self.stop, self.end), ~self.ends)
        if len(self.halo):
            rows = self.halo.copy()
            rows[:, Transfer.ENDS] = rows[:, [Transfer.DST, Transfer.SRC]]
            rows[:, Transfer.KIND] = RecurrentKind.ROWS_GRAD
            yield Exchange(5, as_rows(rows))

    def sent(self, number: int, kind: RecurrentKind, span: tuple[Ints, Ints], which: Bools) -> Iterator[RecurrentOp]:
        """To who composes."""
        which = which & (self.rank != self.by)
        if which.any():
            kinds = np.full(len(which), kind)
            yield Exchange(
                number, as_rows(np.column_stack([kinds, self.seq, *span, self.heads, self.rank, self.by])[which])
            )

    def handed(self, number: int, kind: RecurrentKind, span: tuple[Ints, Ints], which: Bools) -> Iterator[RecurrentOp]:
        """From who composed: once to a rank, where it is not the value of a piece there."""
        kinds = np.full(len(which), kind)
        rows = np.column_stack([kinds, self.seq, *span, self.heads, self.by, self.rank])[which & (self.rank != self.by)]
        value = rows[:, [Transfer.DST, Transfer.SEQ, Transfer.START, Transfer.STOP]]
        number_of = np.unique(np.concatenate([self.held, value]), axis=0, return_inverse=True)[1].ravel()
        rows = rows[~np.isin(number_of[len(self.held) :], number_of[: len(self.held)])]
        rows = rows[np.sort(np.unique(rows, axis=0, return_index=True)[1])]
        if len(rows):
            yield Exchange(number, as_rows(rows))

    def composed(
        self, kind: RecurrentKind, joins: Sequence[tuple[tuple[Ints, ...], Bools]], turn: int = 1
    ) -> Iterator[RecurrentOp]:
        """One op for each composer; of each piece the rows `joins`, those of all in turn."""
        rows = [np.column_stack([np.full(len(self.by), kind), self.seq, *span, self.heads]) for span, _ in joins]
        which = np.column_stack([each for _, each in joins]).ravel()
        table, by = np.stack(rows, axis=1).reshape(-1, Neighbours.WIDTH)[which], np.repeat(self.by, len(joins))[which]
        for each in np.unique(by).tolist():
            yield Compose(each, as_rows(table[by == each][::turn]))
