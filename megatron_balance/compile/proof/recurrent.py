"""Prove that recurrent layers have each state, and the gradient of each state, exactly once."""

from itertools import islice
from typing import TypeAlias, assert_never

import numpy as np

from megatron_balance.compile.proof.structure import misplaced
from megatron_balance.compile.recurrent import pieces
from megatron_balance.errors import InvalidProgramError
from megatron_balance.ir.arrays import Bools, Ints, as_array, key, numbered, ranges
from megatron_balance.ir.columns import Fragment, Neighbours, Placed, Transfer
from megatron_balance.ir.program import Exchange
from megatron_balance.ir.recurrent import (
    FORWARD_KINDS,
    STATE_KINDS,
    Compose,
    RecurrentKind,
    RecurrentOp,
    RecurrentProgram,
)
from megatron_balance.ir.text import recurrent_lines

# Values that are given or taken: rows (rank, kind, seq, start, stop, head atom, time, op, row of the
# op). Rows of the convolution are single tokens; in place of the stop of their gradient stands the
# rank that made it.
_Told: TypeAlias = Ints
_WIDTH = 9
_VALUE = slice(0, 6)
_TIME, _OP, _ROW = range(6, 9)
_OF_NONE = -1
# An op's times: `op * _LONG` is before it, one less than the next op's is behind it.
_LONG = 1 << 32


def verify_recurrent(program: RecurrentProgram) -> None:
    """Prove the forward and the backward.

    Raises InvalidProgramError: names the op and the value that is not there, twice there or unused.
    """
    _Handed(program).prove()


# A rank has the SUMMARY [start, stop) of its own pieces; an exchange copies one, a Compose makes one
# of two neighbours. So a value is what its name says. Each piece takes SUMMARY [0, start): the state
# before it, of a branch the one at its parent's end. In the backward likewise from the end, where a
# Compose also takes the forward's SUMMARY of its first part, for M, or adds what siblings give. Each
# value is given once and before it is taken, and what an op gives is taken, so that no op can be
# dropped and none come too late. Summaries are made once the rows of all halos are there; gradients of
# rows are made once those of all states are.
class _Handed:
    def __init__(self, program: RecurrentProgram) -> None:
        self.program = program
        self.ops: list[RecurrentOp] = [*program.forward, *program.backward]
        self.backward = len(program.forward)  # the first op of the backward
        self.lengths = np.array(program.lengths, dtype=np.int64)
        self.pieces, self.paths = pieces(program.owned, program.trees), program.paths
        self.heads = np.empty(0, dtype=np.int64)

    def prove(self) -> None:
        self.check_layout()
        heads, last = [np.array([0, 1, self.program.num_heads])], -1
        for at, op in enumerate(self.ops):
            heads.append(self.check_op(at, op))
            if isinstance(op, Exchange):
                self.require(np.array([op.id > last]), at, f"it comes after exchange {last}; ids must rise")
                last = op.id
        self.heads = np.unique(np.concatenate(heads))
        both = [self.of_op(at, op) for at, op in enumerate(self.ops)]
        given, taken = (np.concatenate(each) for each in zip(*both, self.of_layout(), strict=True))
        value = np.zeros(len(given) + len(taken), dtype=np.int64)
        for column in np.concatenate([given[:, _VALUE], taken[:, _VALUE]]).T:
            _, value = np.unique(value * (column.max(initial=0) + 1) + column, return_inverse=True)
        count = np.bincount(value[: len(given)], minlength=int(value.max(initial=-1)) + 1)
        self.refuse(given, count[value[: len(given)]] > 1, "it gives what its rank has already")
        when = np.full(len(count), np.iinfo(np.int64).max)
        when[value[: len(given)]] = given[:, _TIME]
        self.refuse(
            taken,
            when[value[len(given) :]] >= taken[:, _TIME],
            "not there when it is taken, or a row that no piece reads",
        )
        used = np.bincount(value[len(given) :], minlength=len(count)) > 0
        self.refuse(given, ~used[value[: len(given)]] & (given[:, _OP] != _OF_NONE), "nobody uses what it gives")

    def check_layout(self) -> None:
        owned, ranks = numbered(list(enumerate(self.program.owned)), Fragment.WIDTH)
        placed = np.column_stack([ranks, owned])
        inside = np.isin(owned[:, Fragment.SEQ], np.arange(len(self.lengths))).all()
        held = int((owned[:, Fragment.STOP] - owned[:, Fragment.START]).sum())
        if not inside or len(misplaced(placed, self.program.lengths)) or held != self.lengths.sum():
            raise InvalidProgramError("layout: each token of each sequence has exactly one owner")

    def check_op(self, at: int, op: RecurrentOp) -> Ints:
        # The head boundaries of an op that names what is there, and is of its phase.
        match op:
            case Exchange():
                rows, tokens = as_array(op.transfers), [Transfer.START, Transfer.STOP]
                ranks, heads = rows[:, Transfer.ENDS], rows[:, Transfer.HEADS]
                self.require(ranks[:, 0] != ranks[:, 1], at, "a transfer is from a rank to itself")
            case Compose():
                rows, tokens = as_array(op.rows), [Neighbours.START, Neighbours.MIDDLE, Neighbours.STOP]
                ranks, heads = np.full((len(rows), 1), op.rank), rows[:, Neighbours.HEADS]
                self.require(np.isin(rows[:, Neighbours.KIND], STATE_KINDS), at, "only summaries compose")
            case _:
                assert_never(op)
        kinds, seqs, spans = rows[:, Transfer.KIND], rows[:, Transfer.SEQ], rows[:, tokens]
        self.require(np.array([len(rows) > 0]), at, "it has no rows")
        self.require(np.isin(kinds, list(RecurrentKind)), at, "it names a kind that is not there")
        self.require(np.isin(kinds, FORWARD_KINDS) == (at < self.backward), at, "a kind of the other phase")
        self.require(((ranks >= 0) & (ranks < self.program.num_ranks)).all(axis=1), at, "a rank that is not there")
        self.require((seqs >= 0) & (seqs < len(self.lengths)), at, "a sequence that is not there")
        inside = (spans[:, 0] >= 0) & (spans[:, -1] <= self.lengths[seqs]) & (np.diff(spans) > 0).all(axis=1)
        self.require(inside, at, "tokens that are not there, or none")
        whole = np.where(np.isin(kinds, STATE_KINDS), self.program.num_heads, 1)
        inside = (heads[:, 0] >= 0) & (heads[:, 1] <= whole) & (heads[:, 0] < heads[:, 1])
        self.require(inside, at, "heads that are not there, or none")
        if isinstance(op, Compose) and self.program.trees:
            self.check_compose(at, rows)
        return heads.ravel()

    def check_compose(self, at: int, rows: Ints) -> None:
        # Forward behind a path, or in a segment. Backward what goes on behind tokens of a segment and
        # lies below it, or siblings.
        seq, start, middle, stop = rows[:, 1 : Neighbours.STOP + 1].T
        first, last, before = self.paths.at(seq, start), self.paths.at(seq, middle - 1), self.paths.before(seq, middle)
        inside = (first == last) & (before == middle) & (stop <= self.paths.end[first])
        forward = rows[:, Neighbours.KIND] == RecurrentKind.SUMMARY
        inside &= ~forward | (self.paths.at(seq, stop - 1) == first)
        inside |= (forward & (start == 0)) | (~forward & (before == self.paths.before(seq, start)))
        self.require(inside, at, "not neighbours on a path, and no siblings")

    def of_op(self, at: int, op: RecurrentOp) -> tuple[_Told, _Told]:
        # What an op gives, and what it takes.
        begin, end = at * _LONG, (at + 1) * _LONG - 1
        match op:
            case Exchange():
                rows = as_array(op.transfers)
                row, table = np.arange(len(rows)), rows.copy()
                single = ~np.isin(rows[:, Transfer.KIND], STATE_KINDS)
                again, token = ranges(rows[single, Transfer.START], rows[single, Transfer.STOP])
                tokens = rows[single][again]
                tokens[:, Transfer.START], tokens[:, Transfer.STOP] = token, token + 1
                grads = tokens[:, Transfer.KIND] == RecurrentKind.ROWS_GRAD
                tokens[grads, Transfer.STOP] = tokens[grads, Transfer.SRC]
                row, table = np.append(row[~single], row[single][again]), np.concatenate([rows[~single], tokens])
                value, heads = table[:, : Transfer.HEAD_START], table[:, Transfer.HEADS]
                return (
                    self.told(table[:, Transfer.DST], value, heads, end, at, row),
                    self.told(table[:, Transfer.SRC], value, heads, begin, at, row),
                )
            case Compose():
                rows = as_array(op.rows)
                row, heads, time = np.arange(len(rows)), rows[:, Neighbours.HEADS], begin + 2 * np.arange(len(rows))
                parts = [rows[:, [0, 1, *columns]] for columns in ((2, 4), (2, 3), (3, 4))]
                seq, before = rows[:, 1], self.paths.before(rows[:, 1], rows[:, Neighbours.MIDDLE])
                forward = rows[:, Neighbours.KIND] == RecurrentKind.SUMMARY
                parts[1][:, 3] = np.where(forward, before, parts[1][:, 3])
                made, *of = (self.told(op.rank, part, heads, time + 1, at, row) for part in parts)
                for each in of:
                    each[:, _TIME] -= 1
                grads = ~forward & (before != self.paths.before(seq, rows[:, Neighbours.START]))
                map_of = parts[1][grads]
                map_of[:, 0] = RecurrentKind.SUMMARY
                of.append(self.told(op.rank, map_of, heads[grads], time[grads], at, row[grads]))
                return made, np.concatenate(of)
            case _:
                assert_never(op)

    def of_layout(self) -> tuple[_Told, _Told]:
        # What pieces give, and what they take.
        between, done = self.backward * _LONG, len(self.ops) * _LONG
        of_states = [at for at, op in enumerate(self.ops) if isinstance(op, Compose) or _moves_states(op)]
        given: list[_Told] = []
        taken: list[_Told] = []
        rank, seq, start, stop = (self.pieces[:, column] for column in range(Placed.WIDTH))
        before, end = self.paths.before(seq, start), self.paths.end[self.paths.at(seq, start)]
        all_heads = np.tile([0, self.program.num_heads], (len(rank), 1))

        def tell(to: list[_Told], kind: RecurrentKind, which: Bools, span: tuple[Ints, Ints], time: int) -> None:
            value = np.column_stack([np.full(len(rank), kind), seq, *span])[which]
            to.append(self.told(rank[which], value, all_heads[which], time, _OF_NONE, np.full(len(value), _OF_NONE)))

        tell(given, RecurrentKind.SUMMARY, stop < end, (start, stop), -1)
        tell(taken, RecurrentKind.SUMMARY, start > 0, (0 * start, before), between)
        # The halo: tokens of other owners, and the ranks that read them.
        token, row = start, np.arange(len(start))
        found: list[tuple[Ints, Ints]] = []
        for _ in range(self.program.halo):
            token = self.paths.before(seq[row], token) - 1
            row, token = row[token >= 0], token[token >= 0]
            found.append((row, token))
        row, token = (
            (np.concatenate([start[:0], *each]) for each in zip(*found, strict=True)) if found else (row[:0],) * 2
        )
        reads, of = rank[row], seq[row]
        at = np.searchsorted(key(seq, start), key(of, token), side="right") - 1
        table = np.unique(np.column_stack([of, token, rank[at], reads])[rank[at] != reads], axis=0)
        of, token, owner, reads = table.T

        def rows(to: list[_Told], kind: RecurrentKind, on: Ints, last: Ints, time: int) -> None:
            value, none = np.column_stack([np.full(len(of), kind), of, token, last]), np.full(len(of), _OF_NONE)
            to.append(self.told(on, value, np.tile([0, 1], (len(of), 1)), time, _OF_NONE, none))

        first_states = min((at for at in of_states if at < self.backward), default=self.backward)
        rows(given, RecurrentKind.ROWS, owner, token + 1, -1)
        rows(taken, RecurrentKind.ROWS, reads, token + 1, first_states * _LONG)
        tell(given, RecurrentKind.SUMMARY_GRAD, start > 0, (start, stop), between - 1)
        tell(taken, RecurrentKind.SUMMARY_GRAD, stop < end, (stop, end), done)
        rows(given, RecurrentKind.ROWS_GRAD, reads, reads, max(of_states, default=self.backward - 1) * _LONG)
        rows(taken, RecurrentKind.ROWS_GRAD, owner, reads, done)
        # Several ranks read one row.
        return np.unique(np.concatenate(given), axis=0), np.concatenate(taken)

    def told(self, rank: Ints | int, value: Ints, heads: Ints, time: Ints | int, op: int, row: Ints) -> _Told:
        # Rows of `value` (kind, seq, start, stop), one for each atom of its heads.
        each, atom = ranges(*np.searchsorted(self.heads, heads).T)
        table = np.empty((len(value), _WIDTH), dtype=np.int64)
        table[:, 0], table[:, 1:5], table[:, _TIME], table[:, _OP], table[:, _ROW] = rank, value, time, op, row
        table = table[each]
        table[:, 5] = atom
        return table

    # Complaints

    def refuse(self, told: _Told, wrong: Bools, complaint: str) -> None:
        # Of values that are wrong, name one of the first op; one of the layout if no op's is.
        bad = told[wrong]
        if len(bad):
            rank, kind, seq, start, stop, _, _, op, row = bad[np.argmin(bad[:, _OP] % (len(self.ops) + 1))].tolist()
            if op != _OF_NONE:
                raise self.error(op, row, complaint)
            stop = start + 1 if kind == RecurrentKind.ROWS_GRAD else stop
            raise InvalidProgramError(
                f"rank {rank}: {RecurrentKind(kind).name} s{seq}[{start}:{stop}), of a piece: {complaint}"
            )

    def require(self, good: Bools, at: int, complaint: str) -> None:
        if not good.all():
            raise self.error(at, int(np.argmin(good)), complaint)

    def error(self, at: int, row: int, complaint: str) -> InvalidProgramError:
        op, lines = self.ops[at], recurrent_lines(self.ops[at], self.program.num_heads)
        header, line = next(lines), next(islice(lines, row, None), "")
        return InvalidProgramError(f"op {at} ({type(op).__name__}): {complaint}\n{header}\n{line}".rstrip())


def _moves_states(op: RecurrentOp) -> bool:
    kinds = as_array(op.transfers)[:, Transfer.KIND] if isinstance(op, Exchange) else ()
    return bool(np.isin(kinds, STATE_KINDS).any())
