"""Regions cut at every boundary that occurs: atoms are equal or disjoint, so sets of tokens become sets of integers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_balance.ir.arrays import Ints

_SHIFT = 40  # a token's position needs fewer bits than this
_DENSE = 8  # a table with an entry a token is made where there are at most this many tokens a region


def token_key(seq: Ints, position: Ints) -> Ints:
    """Integers that order tokens by sequence, then position: seq << 40 | position."""
    return (seq << _SHIFT) | position


def seq_of(key: Ints) -> Ints:
    """The sequence of each `token_key`."""
    return key >> _SHIFT


def position_of(key: Ints) -> Ints:
    """The position of each `token_key` in its sequence."""
    return key & ((1 << _SHIFT) - 1)


def ranges(start: Ints, stop: Ints) -> tuple[Ints, Ints]:
    """(row, value) of every value of every half-open range [start[row], stop[row]), row by row."""
    counts = np.maximum(stop - start, 0)
    row = np.repeat(np.arange(len(counts)), counts)
    offset = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    return row, start[row] + offset


def _ascending(values: Ints) -> Ints:
    """The distinct values, ascending (sorting is several times faster here than NumPy's hashing `unique`)."""
    values = np.sort(values)
    fresh = np.ones(len(values), dtype=bool)
    fresh[1:] = values[1:] != values[:-1]
    return values[fresh]


@dataclass(frozen=True, slots=True)
class Atoms:
    """Elementary token runs and head runs of a set of regions.

    `cuts`: sorted keys of every boundary, `seq << 40 | position`; token atom i runs from cuts[i] to cuts[i + 1].
    `heads`: sorted head boundaries; head atom i runs from heads[i] to heads[i + 1].
    """

    cuts: Ints
    heads: Ints
    table: tuple[Ints, Ints] | None = None
    """To look boundaries up instead of searching: where each sequence begins, and the atom that begins there or next."""

    @classmethod
    def of(cls, seq: Ints, start: Ints, stop: Ints, heads: Ints) -> Atoms:
        """Atoms of regions with these (concatenated) columns; `heads` holds every head boundary."""
        longest = np.zeros(int(seq.max()) + 1 if len(seq) else 0, dtype=np.int64)
        np.maximum.at(longest, seq, stop)
        ends = np.cumsum(longest + 1)
        if not len(seq) or ends[-1] > _DENSE * len(seq):
            return cls(_ascending(np.concatenate([(seq << _SHIFT) | start, (seq << _SHIFT) | stop])), _ascending(heads))
        first = ends - longest - 1
        marks = np.zeros(int(ends[-1]), dtype=bool)
        marks[first[seq] + start] = marks[first[seq] + stop] = True
        place = np.flatnonzero(marks)
        owner = np.searchsorted(first, place, side="right") - 1
        return cls((owner << _SHIFT) | (place - first[owner]), _ascending(heads), (first, np.cumsum(marks) - marks))

    @property
    def num_token_atoms(self) -> int:
        return len(self.cuts)

    @property
    def num_head_atoms(self) -> int:
        return max(len(self.heads) - 1, 1)

    def tokens(self, seq: Ints, start: Ints, stop: Ints) -> tuple[Ints, Ints]:
        """First and one past the last token atom of each region."""
        if self.table is not None:
            first, atom = self.table
            return atom[first[seq] + start], atom[first[seq] + stop]
        return np.searchsorted(self.cuts, (seq << _SHIFT) | start), np.searchsorted(self.cuts, (seq << _SHIFT) | stop)

    def head_range(self, start: Ints, stop: Ints) -> tuple[Ints, Ints]:
        """First and one past the last head atom of each region."""
        return np.searchsorted(self.heads, start), np.searchsorted(self.heads, stop)

    def seq(self, token_atom: Ints) -> Ints:
        return self.cuts[token_atom] >> _SHIFT

    def start(self, token_atom: Ints) -> Ints:
        return self.cuts[token_atom] & ((1 << _SHIFT) - 1)

    def stop(self, token_atom: Ints) -> Ints:
        return self.cuts[token_atom + 1] & ((1 << _SHIFT) - 1)

    def expand(self, seq: Ints, start: Ints, stop: Ints, head_start: Ints, head_stop: Ints) -> tuple[Ints, Ints]:
        """(row, atom) of every atom of every region; an atom is token atom * num_head_atoms + head atom."""
        row, token = ranges(*self.tokens(seq, start, stop))
        if self.num_head_atoms == 1:
            return row, token
        first, last = self.head_range(head_start, head_stop)
        again, head = ranges(first[row], last[row])
        return row[again], token[again] * self.num_head_atoms + head

    def regions(self, group: Ints, atom: Ints) -> tuple[Ints, Ints]:
        """Coalesce atoms, unique within each group, into regions: (group [n], rows (seq, start, stop, head_start, head_stop))."""
        token, head = np.divmod(atom, self.num_head_atoms)
        # Along tokens first, per head atom; then along heads where the token runs are the same.
        order = np.argsort((group * self.num_head_atoms + head) * (self.num_token_atoms + 1) + token, kind="stable")
        group, token, head = group[order], token[order], head[order]
        seq = self.seq(token)
        fresh = np.ones(len(token), dtype=bool)
        fresh[1:] = (group[1:] != group[:-1]) | (head[1:] != head[:-1]) | (token[1:] != token[:-1] + 1) | (seq[1:] != seq[:-1])
        begin = np.flatnonzero(fresh)
        end = np.append(begin[1:], len(token)) - 1
        table = np.stack([group[begin], token[begin], token[end], head[begin]], 1) if len(token) else np.empty((0, 4), dtype=np.int64)
        first = last = table
        if self.num_head_atoms > 1:
            order = np.lexsort((table[:, 3], table[:, 2], table[:, 1], table[:, 0]))
            table = table[order]
            fresh = np.ones(len(table), dtype=bool)
            fresh[1:] = (table[1:, :3] != table[:-1, :3]).any(axis=1) | (table[1:, 3] != table[:-1, 3] + 1)
            begin = np.flatnonzero(fresh)
            end = np.append(begin[1:], len(table)) - 1 if len(table) else begin
            first, last = table[begin], table[end]
        rows = np.stack(
            [self.seq(first[:, 1]), self.start(first[:, 1]), self.stop(first[:, 2]), self.heads[first[:, 3]], self.heads[last[:, 3] + 1]], 1
        )
        return first[:, 0], rows
