"""Prove, without tensors, that a program computes attention and its gradient exactly once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, assert_never

import numpy as np

from megatron_balance.compile.transpose import POLICIES
from megatron_balance.errors import InvalidProgramError
from megatron_balance.ir.arrays import Atoms, Bools, Ints, as_array, concat, key_seq, numbered, ranges, sees, trim_pairs
from megatron_balance.ir.columns import Fragment, Pair, Region, Rows, Transfer, Value
from megatron_balance.ir.forest import Forest
from megatron_balance.ir.program import (
    KEY_SIDE,
    MOVED,
    Attend,
    AttendGrad,
    Exchange,
    Kind,
    Merge,
    Op,
    Program,
    RankProgram,
    is_remap_move,
)
from megatron_balance.ir.text import op_lines

_NEVER = -1
_SHOWS = "a kernel would show what the mask hides, or hide what it shows"
COPIED = (Kind.Q, Kind.KV, Kind.OUT_GRAD)  # a transfer leaves these with the source


def verify(program: Program) -> None:
    """Prove the forward and, if the program has one, the backward.

    Raises InvalidProgramError: naming the op, its text and what is wrong.
    """
    _check_shape(program)
    _State(program).prove()


def _check_shape(program: Program) -> None:
    if program.num_heads < 1 or program.num_kv_heads < 1 or program.num_heads % program.num_kv_heads:
        raise InvalidProgramError(
            f"expected key-value heads that divide the query heads, got {program.num_kv_heads} and {program.num_heads}"
        )
    for seq, length in enumerate(program.lengths):
        if length < 1:
            raise InvalidProgramError(f"sequence {seq} has length {length}; expected at least 1 token")
    if program.policy not in (None, *POLICIES):
        raise InvalidProgramError(
            f"unknown policy {program.policy!r}; known: {', '.join(POLICIES)}, or none for a forward alone"
        )
    if program.policy is None and program.backward:
        raise InvalidProgramError(
            "the program has a backward but no policy, so it cannot be proved; say how received inputs reach it"
        )


# All regions are cut at every boundary that occurs (`ir.arrays`). Then these hold:
#
# * A rank reads only what it holds.
# * A partial output travels or is returned only when it is a single one.
# * Every (query, key, head) that the mask shows is computed at most once.
# * Transfers and merges conserve contributions.
#
# So an output is complete exactly when the count at its owner equals the number of keys that it may
# see, and likewise for the gradients. Of trees keys are counted along paths: each key atom has the
# number of atoms before it on its path, its place, and a query sees one run of places, under a
# window, too, which hides what is far back on the path. Which atom a place is differs by branch, so
# a row may name only keys on the path of all of its queries; then (query, place) is a pair. The
# queries that see a key are those below it whose run reaches it: each query counts 1 at its last key
# and -1 right above its first one, and what a key has is the sum over all below it (depth first: one
# run of atoms).
#
# Kernels do not know trees. They compute of a row what its `ir.mask.Band` says, so the proof of a
# row under a forest is that its band holds for all of its queries and keys alike: one kind of
# segment, under a window one distance between positions and path, and nothing that the mask hides.
# Then what rows compute is what the mask shows of them.
#
# Every op is needed: an exchange that brings nothing new or nothing used, and a merge with nothing to
# merge, are errors, so that dropping any op of a program that verifies makes one that does not.
class _State:
    """The values that every rank holds, while ops run one after the other.

    Arrays are flat over `_Places`; heads are counted in query heads.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.ratio = program.num_heads // program.num_kv_heads
        self.lengths = np.array(program.lengths, dtype=np.int64)
        tables = _ProgramTables.of(program)
        self.atoms = self._cut(program, tables)
        self.num_heads = self.atoms.num_head_atoms
        every = np.arange(len(self.lengths))
        # Atoms of each sequence.
        self.first, self.last = self.atoms.tokens(every, np.zeros_like(self.lengths), self.lengths)
        _, self._there = ranges(self.first, self.last)  # between the end of a sequence and the next are none
        self.places = _Places.of(tables, program.num_ranks, self.first, self.last, self.num_heads)
        size = self.places.size
        self.held = {kind: np.zeros(size, dtype=bool) for kind in COPIED}
        self.brought = {kind: np.full(size, _NEVER, dtype=np.int32) for kind in self.held}
        self.parts = {kind: np.zeros(size, dtype=np.int16) for kind in MOVED}
        self.count = {kind: np.zeros(size, dtype=np.int64) for kind in MOVED}
        self.tree = self._tree()
        self.visible_keys = self._visible_keys()
        # First and one past the last place of the keys that each query atom sees.
        self.key_first, self.key_last = (self.tree.place[atom] + side for side, atom in enumerate(self.visible_keys))
        num_keys = np.where(self.computed(tables), self.key_last - self.key_first, 0)
        self.pair_base = np.cumsum(num_keys) - num_keys
        self.done = np.zeros(int(num_keys.sum()) * self.num_heads, dtype=bool)
        self.scratch = np.zeros(max(size, len(self.done)), dtype=np.int32)
        # By op: something that this exchange brought was read; the last entry is nobody's.
        self.used = np.zeros(1, dtype=bool)
        self.where: tuple[str, Sequence[int], Sequence[Op]] = ("", (), ())
        self.owner_ranks = tables.owners
        all_heads = np.tile([0, program.num_heads], (len(tables.owned), 1))
        self.owned_regions = np.concatenate([tables.owned, all_heads], axis=1)

    def prove(self) -> None:
        program = self.program
        self.place_owned()
        self.run("forward", program.forward)
        self.finish("forward", (Kind.OUT,))
        if program.policy is not None:
            self.start_backward()
            self.run("backward", program.backward)
            self.finish("backward", (Kind.Q_GRAD, Kind.KV_GRAD))

    def _tree(self) -> _Tree:
        # A sequence that is no tree is one path.
        every, there, mask = np.arange(self.atoms.num_token_atoms), self._there, self.program.mask
        seq, start = self.atoms.seq(there), self.atoms.start(there)
        tree = _Tree(every, every - 1, every.copy(), every, np.zeros(len(every), dtype=bool))
        tree.below[there] = self.last[seq]
        if not isinstance(mask, Forest):
            return tree
        of = mask.segments
        at, (first, end) = of.at(seq, start), mask.queries(seq, start)
        tree.below[there] = self.atoms.at(seq, end - 1) + 1
        # Of the atoms up to each those that it lies below, itself included.
        ends = np.bincount(tree.below[there], minlength=len(every) + 1)[:-1]
        place = np.cumsum(np.isin(every, there) - ends) - 1
        above, seen_from, full = tree.above.copy(), every.copy(), tree.full.copy()
        begins = (start == of.start[at]) & (of.above[at] >= 0)
        above[there[begins]] = self.atoms.at(seq[begins], of.above[at[begins]])
        seen_from[there], full[there] = self.atoms.at(seq, first), of.full[at]
        return _Tree(place, above, tree.below, seen_from, full)

    def _visible_keys(self) -> tuple[Ints, Ints]:
        # First and last key atom of which each query atom sees any key: [num_token_atoms] each.
        first, last = np.zeros((2, self.atoms.num_token_atoms), dtype=np.int64)
        query = self._there
        seq = self.atoms.seq(query)
        begin = self.program.mask.keys(seq, self.atoms.start(query))[0]
        end = self.program.mask.keys(seq, self.atoms.stop(query) - 1)[1]
        first[query] = self.atoms.at(seq, begin)
        last[query] = self.atoms.at(seq, np.minimum(end, self.lengths[seq]) - 1)
        return first, last

    def num_queries(self) -> Ints:
        # Query atoms that see each key atom.
        query, (first, last) = self._there, self.visible_keys
        higher = np.where(self.tree.place[first[query]] > 0, self.tree.above[first[query]], len(first))
        size = len(first) + 1
        begun = np.bincount(last[query], minlength=size) - np.bincount(higher, minlength=size)
        before = np.append(0, np.cumsum(begun))
        return before[self.tree.below] - before[:-2]

    def computed(self, tables: _ProgramTables) -> Bools:  # noqa: ARG002  one rank's state looks
        # Whether launches that are looked at attend for each query atom, [num_token_atoms].
        return np.ones(self.atoms.num_token_atoms, dtype=bool)

    def _cut(self, program: Program, tables: _ProgramTables) -> Atoms:
        # Atoms of all regions of the program; regions that the mask trims are cut there, too.
        seqs, starts, stops, heads = (
            [np.arange(len(self.lengths))],
            [np.zeros_like(self.lengths)],
            [self.lengths],
            [np.array([0, program.num_heads])],
        )

        def add_spans(fragments: Ints) -> None:
            seq, start, stop = fragments.T
            if ((seq < 0) | (seq >= len(self.lengths))).any():
                raise InvalidProgramError(
                    f"a region names sequence {int(seq.max())}, but there are {len(self.lengths)}"
                )
            outside = (start < 0) | (start >= stop) | (stop > self.lengths[seq])
            if outside.any():
                at, begin, end = fragments[int(np.flatnonzero(outside)[0])]
                raise InvalidProgramError(
                    f"region s{at}[{begin}:{end}) is empty or outside its sequence, which has {self.lengths[at]} tokens"
                )
            seqs.append(seq)
            starts.append(start)
            stops.append(stop)

        def add(regions: Ints, scale: Ints | int) -> None:
            add_spans(regions[:, Region.SPAN])
            low, high = (regions[:, column] * scale for column in (Region.HEAD_START, Region.HEAD_STOP))
            if ((low < 0) | (low >= high) | (high > program.num_heads)).any():
                raise InvalidProgramError("a region has an empty head span or heads that the model has not")
            heads.extend(np.flatnonzero(np.bincount(side)) for side in (low, high))

        add_spans(tables.owned)
        for table in (tables.moved[:, Transfer.VALUE], tables.merged):
            kinds = table[:, Value.KIND]
            if ((kinds < 0) | (kinds >= len(Kind))).any():
                raise InvalidProgramError(f"a transfer or merge of an unknown kind; kinds are 0 to {len(Kind) - 1}")
            add(table[:, Value.REGION], np.where(np.isin(kinds, KEY_SIDE), self.ratio, 1))
        pairs = tables.pairs
        add(pairs[:, Pair.QUERY], 1)
        add(pairs[:, Pair.KEY], self.ratio)
        # Tokens that a rectangle trims away take no part in it, so that its atoms are all visible
        # or all hidden.
        trimmed = trim_pairs(pairs, program.mask)
        for side, columns in ((Pair.Q_START, Pair.Q_SPAN), (Pair.K_START, Pair.K_SPAN)):
            shown = (trimmed[:, side] < trimmed[:, side + 1]) & (trimmed[:, columns] != pairs[:, columns]).any(axis=1)
            start, stop = trimmed[shown, columns].T
            seqs.append(pairs[shown, Pair.SEQ])
            starts.append(start)
            stops.append(stop)
        if isinstance(program.mask, Forest):
            if program.mask.lengths != program.lengths:
                raise InvalidProgramError(
                    f"mask {program.mask.name}: its trees have {[*program.mask.lengths[:8]]} tokens, the sequences "
                    f"{[*program.lengths[:8]]} (the first 8 each)"
                )
            segments = program.mask.segments
            seqs.append(key_seq(segments.begin))
            starts.append(segments.start)
            stops.append(segments.stop)
        return Atoms.of(*(np.concatenate(c) for c in (seqs, starts, stops, heads)))

    # Reading regions

    def index(self, ranks: Ints, kind: Kind, regions: Ints) -> tuple[Ints, Ints]:
        # (row, flat state index) of every atom of `Region` rows [n, 5] on `ranks` [n].
        scale = self.ratio if kind in KEY_SIDE else 1
        seq, start, stop, head_start, head_stop = regions.T
        row, atom = self.atoms.expand(seq, start, stop, head_start * scale, head_stop * scale)
        return row, self.places.offset(ranks, seq)[row] + atom

    def place_owned(self) -> None:
        row, flat = self.index(self.owner_ranks, Kind.Q, self.owned_regions)
        seq = self.owned_regions[row, Region.SEQ]
        self.owned_atom = flat - self.places.offset(self.owner_ranks[row], seq)
        self.check_owners()
        self.owned_index = flat
        for kind in (Kind.Q, Kind.KV):
            self.held[kind][flat] = True

    def check_owners(self) -> None:
        # Check that every token has one owner.
        owners = np.bincount(self.owned_atom, minlength=self.atoms.num_token_atoms * self.num_heads)
        _, tokens = ranges(self.first, self.last)
        wrong = tokens[owners[tokens * self.num_heads] != 1]
        if len(wrong):
            atom = int(wrong[0])
            seq, start, stop = (int(of(wrong[:1])[0]) for of in (self.atoms.seq, self.atoms.start, self.atoms.stop))
            where = f"sequence {seq}, tokens [{start}:{stop})"
            raise InvalidProgramError(
                f"layout: {where} lie on {owners[atom * self.num_heads]} ranks; each token has exactly one owner"
            )

    def start_backward(self) -> None:
        self.done[:] = False
        for kind in (Kind.Q, Kind.KV):
            if self.program.policy == "replay":
                self.held[kind][:] = False
                self.held[kind][self.owned_index] = True
            self.brought[kind][:] = _NEVER
        self.held[Kind.OUT_GRAD][self.owned_index] = True

    # Running

    def run(self, phase: str, ops: Sequence[Op]) -> None:
        self.used = np.zeros(len(ops) + 1, dtype=bool)
        self.check_ids(phase, ops)
        for batch in _batches(ops):
            chosen = [ops[i] for i in batch]
            self.where = (phase, batch, chosen)
            first = chosen[0]
            self.check_ops(chosen)
            match first:
                case Exchange():
                    self.exchange(phase, batch[0], first)
                case Attend() | AttendGrad():
                    if isinstance(first, Attend) != (phase == "forward"):
                        raise self.error(0, f"{type(first).__name__} does not belong into the {phase}")
                    self.attend(chosen, phase)  # pyright: ignore[reportArgumentType]
                case Merge():
                    self.merge(chosen)  # pyright: ignore[reportArgumentType]
                case _:
                    assert_never(first)
        for index, op in enumerate(ops):
            if not self.used[index] and isinstance(op, Exchange) and self.brings_copies(as_array(op.transfers)):
                self.where = (phase, [index], [op])
                raise self.error(0, "nothing that it brings is ever used; drop it")

    def brings_copies(self, rows: Ints) -> bool:
        # Whether `Transfer` rows bring anything that is to be used, to a rank that is looked at.
        return bool(np.isin(rows[:, Transfer.KIND], COPIED).any())

    def check_ids(self, phase: str, ops: Sequence[Op]) -> None:
        # Check that exchange ids rise, so that all ranks issue theirs in one order.
        last = -1
        for index, op in enumerate(ops):
            if isinstance(op, Exchange):
                if op.id <= last:
                    self.where = (phase, [index], [op])
                    raise self.error(0, f"it comes after exchange {last}; ids must rise")
                last = op.id

    def check_ops(self, ops: Sequence[Op]) -> None:
        for which, op in enumerate(ops):
            match op:
                case Exchange(_, rows, _, ranks, _):
                    empty = "it moves nothing"
                case Attend(rank, rows) | AttendGrad(rank, rows):
                    empty, ranks = "it attends nothing", (rank,)
                case Merge(rank, rows):
                    empty, ranks = "it merges nothing", (rank,)
                case _:
                    assert_never(op)
            if not rows:
                raise self.error(which, empty)
            if any(not 0 <= rank < self.program.num_ranks for rank in ranks):
                raise self.error(which, f"it names a rank that is not there; there are {self.program.num_ranks}")

    def check_rows(self, phase: str, op: Exchange) -> Ints:
        # The `Transfer` rows of an exchange, whose ranks, kinds and ways have been checked.
        rows = as_array(op.transfers)
        kinds, (src, dst) = rows[:, Transfer.KIND], rows[:, Transfer.ENDS].T
        if ((src == dst) | (np.minimum(src, dst) < 0) | (np.maximum(src, dst) >= self.program.num_ranks)).any():
            raise self.error(0, "a transfer is from a rank to itself or names a rank that is not there")
        others = (Kind.OUT,) if phase == "forward" else (Kind.OUT_GRAD, Kind.Q_GRAD, Kind.KV_GRAD)
        if not np.isin(kinds, (Kind.Q, Kind.KV, *others)).all():
            raise self.error(0, f"moves a kind of value that does not belong into the {phase}")
        self.check_collective(op, rows)
        self.check_routes(op, rows)
        return rows

    def exchange(self, phase: str, op_index: int, op: Exchange) -> None:
        rows = self.check_rows(phase, op)
        kinds = rows[:, Transfer.KIND]
        arrivals: list[tuple[Kind, Ints, Ints]] = []
        for kind in _kinds_in(kinds):
            sent, there, brought, here = self.ends(kind, rows[kinds == kind])
            if kind in self.held:
                self.require(self.held[kind][there], sent, "the source does not hold it")
                self.mark_used(kind, there)
                self.require(~self.held[kind][here], brought, "the target holds it already")
                if not self.distinct(here):
                    raise self.error(0, "a rank receives the same value twice")
            else:
                several = "holds several partials of it that are not merged"
                self.require(self.parts[kind][there] <= 1, sent, f"the source {several}")
                self.check_given(kind, there, sent)
                if not self.distinct(there):
                    raise self.error(0, "a partial is given away twice")
                self.require(self.parts[kind][here] <= 1, brought, f"the target {several}")
            arrivals.append((kind, there, here))
        moves = is_remap_move(op.id, self.program.remap_in, forward=phase == "forward")
        for kind, there, here in arrivals:
            if kind in self.held:
                if moves:
                    self.held[kind][there] = False
                self.held[kind][here] = True
                self.brought[kind][here] = op_index
            else:
                count = self.arriving(kind, there, here)
                self.parts[kind][there] = 0
                self.count[kind][there] = 0
                np.add.at(self.parts[kind], here, 1)
                np.add.at(self.count[kind], here, count)

    def ends(self, kind: Kind, rows: Ints) -> tuple[Ints, Ints, Ints, Ints]:
        # `Transfer` rows of one kind, atom by atom, and the places at the source; so for the target.
        row, there = self.index(rows[:, Transfer.SRC], kind, rows[:, Transfer.REGION])
        src_offset, dst_offset = (
            self.places.offset(rows[:, side], rows[:, Transfer.SEQ]) for side in (Transfer.SRC, Transfer.DST)
        )
        each = rows[row]
        return each, there, each, there + (dst_offset - src_offset)[row]

    def check_given(self, kind: Kind, there: Ints, rows: Ints) -> None:
        # Check partials that a rank gives away, beside that it holds no two of one region.
        if kind == Kind.OUT:
            self.require(self.parts[kind][there] == 1, rows, "the source holds no partial output of it")

    def arriving(self, kind: Kind, there: Ints, here: Ints) -> Ints:  # noqa: ARG002  one rank's state looks
        # Contributions to what is moved.
        return self.count[kind][there].copy()

    def check_collective(self, op: Exchange, rows: Ints) -> None:
        if op.collective == "p2p":
            return
        src, dst = rows[:, Transfer.ENDS].T
        if not np.isin(rows[:, Transfer.ENDS], np.array(op.group)).all():
            raise self.error(0, f"{op.collective} reaches beyond its group")
        match op.collective:
            case "all_gather":
                differs = self.differing(op, src, dst, rows)
                if differs is not None:
                    raise self.error(0, f"all_gather, but rank {differs} does not send the same to all")
            case "reduce_scatter":
                if np.isin(rows[:, Transfer.KIND], (Kind.Q_GRAD, Kind.KV_GRAD), invert=True).any():
                    raise self.error(0, "reduce_scatter of values that are not sums of gradients")
                differs = self.differing(op, dst, src, rows)
                if differs is not None:
                    raise self.error(0, f"reduce_scatter, but rank {differs} is not sent the same by all")
            case "all_to_all":
                pass

    def differing(self, op: Exchange, one: Ints, others: Ints, rows: Ints) -> int | None:
        # The first rank of `one` whose rows differ between the other ranks of the group; None if
        # there is none.
        order = np.lexsort((others, one))
        group = np.sort(op.group)
        size = len(group)
        pair = np.searchsorted(group, one[order]) * size + np.searchsorted(group, others[order])
        ends = np.searchsorted(pair, np.arange(size**2 + 1))
        ordered = rows[order, Transfer.VALUE]
        for at, rank in enumerate(group.tolist()):
            each = {
                ordered[ends[cell] : ends[cell + 1]].tobytes()
                for cell in range(at * size, (at + 1) * size)
                if cell != at * (size + 1)
            }
            if len(each) > 1:
                return rank
        return None

    def check_routes(self, op: Exchange, rows: Ints) -> None:
        # Check that pieces are counted from 0, of pairs that move something, over ranks that are
        # there.
        if not op.routes:
            return
        if op.collective != "p2p":
            raise self.error(0, f"{op.collective} is routed; only point-to-point transfers are")
        pieces: dict[tuple[int, int], list[int]] = defaultdict(list)
        for src, dst, piece, *proxies in op.routes:
            pieces[src, dst].append(piece)
            if any(not 0 <= rank < self.program.num_ranks for rank in proxies):
                raise self.error(
                    0,
                    f"a route from rank {src} to rank {dst} names a rank that is not there; there are "
                    f"{self.program.num_ranks}",
                )
        moved = {(src, dst) for src, dst in rows[:, Transfer.ENDS].tolist()}
        for (src, dst), numbers in pieces.items():
            if (src, dst) not in moved:
                raise self.error(0, f"a route from rank {src} to rank {dst}, which moves nothing")
            if numbers != list(range(len(numbers))):
                raise self.error(0, f"pieces from rank {src} to rank {dst} are numbered {numbers}")

    def attend(self, ops: Sequence[Attend | AttendGrad], phase: str) -> None:
        pairs, ranks = numbered([(op.rank, op.pairs) for op in ops], Pair.WIDTH)
        self.check_pairs(pairs)
        # Queries that see none of the keys, and keys that none of the queries sees, take no part.
        trimmed = trim_pairs(pairs, self.program.mask)
        queries, keys = trimmed[:, Pair.QUERY], trimmed[:, Pair.KEY]
        needed = [(Kind.Q, queries), (Kind.KV, keys), (Kind.OUT_GRAD, queries)]
        for kind, regions in needed if phase == "backward" else needed[:2]:
            row, flat = self.index(ranks, kind, regions)
            self.require_pair(self.held[kind][flat], pairs[row], f"rank does not hold {kind.name}", ranks[row])
            self.mark_used(kind, flat)
        # Every (query atom, key atom, head atom) once.
        offset = self.places.offset(ranks, pairs[:, Pair.SEQ])
        row, query = ranges(*self.atoms.tokens(*queries[:, Region.SPAN].T))
        key_first, key_last = (of[row] for of in self.atoms.tokens(*keys[:, Region.SPAN].T))
        # By as much all keys of a cell are further along the sequence than along the path.
        beside = key_first - self.tree.place[key_first]
        last = self.key_last[query] + beside
        if isinstance(self.program.mask, Forest):  # as a kernel has it
            last = np.where(self.tree.full[query], key_last, query + 1)
        again, key = ranges(np.maximum(key_first, self.key_first[query] + beside), np.minimum(key_last, last))
        row, query = row[again], query[again]
        if isinstance(self.program.mask, Forest):
            shown = (self.tree.seen_from[key] <= query) & (query < self.tree.below[key])
            self.require_pair(shown, pairs[row], _SHOWS, ranks[row])
        base = self.pair_base[query] + self.tree.place[key] - self.key_first[query]
        if self.num_heads > 1:
            head_first, head_last = self.atoms.head_range(*pairs[:, Pair.Q_HEADS].T)
            again, head = ranges(head_first[row], head_last[row])
            row, query, key, base = row[again], query[again], key[again], base[again]
        else:
            head = np.zeros_like(row)
        pair = base * self.num_heads + head
        self.require_pair(~self.done[pair], pairs[row], "some of it is computed twice", ranks[row])
        self.done[pair] = True
        if not self.distinct(pair):
            raise self.error(0, "it computes some pair twice")
        place = offset[row] + head
        self.contribute(Kind.OUT if phase == "forward" else Kind.Q_GRAD, place + query * self.num_heads, queries, ranks)
        if phase == "backward":
            self.contribute(Kind.KV_GRAD, place + key * self.num_heads, keys, ranks)

    def contribute(self, kind: Kind, places: Ints, regions: Ints, ranks: Ints) -> None:
        # Count contributions at `places`; the launch leaves one partial of each region.
        np.add.at(self.count[kind], places, 1)
        row, flat = self.index(ranks, kind, regions)
        if (self.parts[kind][flat] > 1).any():
            owner = int(ranks[row[int(np.flatnonzero(self.parts[kind][flat] > 1)[0])]])
            raise self.error(
                self.op_of(owner), f"rank {owner} holds several partials of {kind.name} that are not merged"
            )
        self.parts[kind][flat] += 1  # once for each region, however often it is listed: NumPy reads before it writes

    def check_pairs(self, pairs: Ints) -> None:
        (q_first, q_last), (kv_first, kv_last) = pairs[:, Pair.Q_HEADS].T, pairs[:, Pair.KV_HEADS].T
        q_heads, kv_heads = q_last - q_first, kv_last - kv_first
        whole = (q_first == kv_first * self.ratio) & (q_heads == kv_heads * self.ratio)
        within = (kv_heads == 1) & (q_first // self.ratio == kv_first) & ((q_last - 1) // self.ratio == kv_first)
        self.require_pair(whole | within, pairs, "its query heads do not map evenly onto its key-value heads")
        self.require_pair(sees(pairs, self.program.mask), pairs, "no query of it may see any key of it")
        if isinstance(self.program.mask, Forest):
            self.check_cells(self.program.mask, pairs)

    def check_cells(self, mask: Forest, pairs: Ints) -> None:
        # Check that what a kernel computes of a row by its first query and key holds for all others.
        seq = pairs[:, Pair.SEQ]
        row, query = ranges(*self.atoms.tokens(*pairs[:, Pair.QUERY_SPAN].T))
        causal = mask.band(seq, pairs[:, Pair.Q_START], pairs[:, Pair.K_START]).causal
        self.require_pair(causal[row] != self.tree.full[query], pairs[row], _SHOWS)
        if mask.window:
            of = mask.segments
            ends = pairs[:, Pair.SPANS] - [0, 1, 0, 1]
            shift = of.shift[of.at(seq[:, None], ends)]
            same = (shift[:, 0] == shift[:, 1]) & (shift[:, 2] == shift[:, 3])
            self.require_pair(same, pairs, _SHOWS)

    def merge(self, ops: Sequence[Merge]) -> None:
        values, ranks = numbered([(op.rank, op.values) for op in ops], Value.WIDTH)
        kinds = values[:, Value.KIND]
        if not np.isin(kinds, MOVED).all():
            names = ", ".join(kind.name for kind in _kinds_in(kinds) if kind not in MOVED)
            raise self.error(0, f"merges {names or 'an unknown kind'}, which has no partials")
        for kind in _kinds_in(kinds):
            chosen = kinds == kind
            row, flat = self.index(ranks[chosen], kind, values[chosen, Value.REGION])
            self.require(self.parts[kind][flat] >= 2, values[chosen][row], "there are not two partials to merge")
            self.parts[kind][flat] = 1

    def finish(self, phase: str, kinds: tuple[Kind, ...]) -> None:
        # Check that everything is complete at its owner, and that nothing is left elsewhere.
        num_keys, num_queries = self.key_last - self.key_first, self.num_queries()
        for kind in kinds:
            owned = self.owned_index
            atom = self.owned_atom // self.num_heads
            want = (num_queries if kind == Kind.KV_GRAD else num_keys)[atom]
            bad = self.incomplete(kind, want)
            if bad.any():
                index = int(np.flatnonzero(bad)[0])
                rank, region = self.named(int(owned[index]))
                raise InvalidProgramError(
                    f"{phase}: rank {rank} never completes {kind.name} of {region}: it has "
                    f"{self.count[kind][owned[index]]} of {want[index]} parts of the sequence in "
                    f"{self.parts[kind][owned[index]]} partials"
                )
            self.parts[kind][owned] = 0
            if self.parts[kind].any():
                rank, region = self.named(int(np.flatnonzero(self.parts[kind])[0]))
                raise InvalidProgramError(
                    f"{phase}: rank {rank} ends with an unconsumed partial {kind.name} of {region}; "
                    "a Merge or a transfer to its owner is missing"
                )

    def incomplete(self, kind: Kind, want: Ints) -> Bools:
        # Whether what the owner has in each of its places is not all of it, in one partial.
        return (self.count[kind][self.owned_index] != want) | (self.parts[kind][self.owned_index] != 1)

    def named(self, place: int) -> tuple[int, str]:
        rank, atom = self.places.at(place)
        one = np.array([atom // self.num_heads])
        return rank, f"s{self.atoms.seq(one)[0]}[{self.atoms.start(one)[0]}:{self.atoms.stop(one)[0]})"

    # Complaints

    def mark_used(self, kind: Kind, flat: Ints) -> None:
        self.used[self.brought[kind][flat]] = True

    def distinct(self, flat: Ints) -> bool:
        # Whether no index occurs twice. Of two that write their number to one place, one does not
        # find it again.
        number = np.arange(len(flat), dtype=np.int32)
        self.scratch[flat] = number
        return bool((self.scratch[flat] == number).all())

    def require(self, good: Bools, rows: Ints, complaint: str) -> None:
        if not good.all():
            kind, seq, start, stop, head_start, head_stop, *ends = rows[int(np.flatnonzero(~good)[0])].tolist()
            route = f" from rank {ends[0]} to rank {ends[1]}" if ends else ""
            raise self.error(
                0, f"{Kind(kind).name} s{seq}[{start}:{stop}) heads [{head_start}:{head_stop}){route}: {complaint}"
            )

    def require_pair(self, good: Bools, pairs: Ints, complaint: str, ranks: Ints | None = None) -> None:
        if not good.all():
            at = int(np.flatnonzero(~good)[0])
            seq, q_start, q_stop, _, _, k_start, k_stop, _, _ = pairs[at].tolist()
            op = 0 if ranks is None else self.op_of(int(ranks[at]))
            raise self.error(op, f"q s{seq}[{q_start}:{q_stop}) over [{k_start}:{k_stop}): {complaint}")

    def op_of(self, rank: int) -> int:
        return [op.rank for op in self.where[2] if not isinstance(op, Exchange)].index(rank)

    def error(self, which: int, complaint: str) -> InvalidProgramError:
        phase, indices, ops = self.where
        lines = list(op_lines(ops[which], self.program.num_heads, self.program.num_kv_heads))
        shown = "\n".join(lines[:6] + (["  ..."] if len(lines) > 6 else []))
        return InvalidProgramError(f"{phase} op {indices[which]}: {complaint}\n{shown}")


def _kinds_in(column: Ints) -> list[Kind]:
    return [kind for kind in Kind if (column == kind).any()]


def _batches(ops: Sequence[Op]) -> Iterator[list[int]]:
    # Indices of ops that can be checked together: an exchange alone; between two, the j-th op of
    # every rank if of one kind.
    start = 0
    while start < len(ops):
        if isinstance(ops[start], Exchange):
            yield [start]
            start += 1
            continue
        stop = start
        queues: dict[int, list[int]] = defaultdict(list)
        while stop < len(ops):
            op = ops[stop]
            if isinstance(op, Exchange):
                break
            queues[op.rank].append(stop)
            stop += 1
        for depth in range(max(len(q) for q in queues.values())):
            by_kind: dict[type[Op], list[int]] = defaultdict(list)
            for queue in queues.values():
                if depth < len(queue):
                    by_kind[type(ops[queue[depth]])].append(queue[depth])
            yield from by_kind.values()
        start = stop


class _ProgramTables(NamedTuple):
    """All rows of a program below one another, and the ranks of those that do not name theirs.

    `owned` with `owners`; `moved`: `Transfer` rows; `merged`: `Value` rows, with `merging`; `pairs`
    with `attending`.
    """

    owned: Ints
    owners: Ints
    moved: Ints
    merged: Ints
    merging: Ints
    pairs: Ints
    attending: Ints

    @classmethod
    def of(cls, program: Program) -> _ProgramTables:
        ops = (*program.forward, *program.backward)
        merges = [op for op in ops if isinstance(op, Merge)]
        # A backward launch has the very table of its forward launch; looking at it once will do.
        launches = {(op.rank, id(op.pairs)): op for op in ops if isinstance(op, Attend | AttendGrad)}.values()
        return cls(
            *numbered(list(enumerate(program.owned)), Fragment.WIDTH),
            concat([op.transfers for op in ops if isinstance(op, Exchange)], Transfer.WIDTH),
            *numbered([(op.rank, op.values) for op in merges], Value.WIDTH),
            *numbered([(op.rank, op.pairs) for op in launches], Pair.WIDTH),
        )


@dataclass(frozen=True, slots=True)
class _Places:
    """Indices of what the ranks may hold: a run of atoms for each (sequence, rank) that occur
    together.

    So a plan of many small zones takes the sum of them, not all ranks times all sequences.

    `cells` [n], ascending: sequence * num_ranks + rank; `base` [n + 1]: where the run of each begins;
    `first` [S]: the first atom of each sequence.
    """

    num_ranks: int
    cells: Ints
    base: Ints
    first: Ints

    @classmethod
    def of(cls, tables: _ProgramTables, num_ranks: int, first: Ints, last: Ints, num_heads: int) -> _Places:
        # `first`, `last` [S]: token atoms of each sequence; ranks that are not there are left out.
        met = [np.empty((0, 2), dtype=np.int64)]
        met += [tables.moved[:, [Transfer.SEQ, side]] for side in (Transfer.SRC, Transfer.DST)]
        met += [np.column_stack([tables.merged[:, Value.SEQ], tables.merging])]
        met += [np.column_stack([tables.pairs[:, Pair.SEQ], tables.attending])]
        met += [np.column_stack([tables.owned[:, Fragment.SEQ], tables.owners])]
        seqs, ranks = np.concatenate(met).T
        cells = np.unique((seqs * num_ranks + ranks)[(ranks >= 0) & (ranks < num_ranks)])
        sizes = (last - first)[cells // num_ranks] * num_heads
        return cls(num_ranks, cells, np.append(0, np.cumsum(sizes)), first * num_heads)

    @property
    def size(self) -> int:
        return int(self.base[-1])

    def offset(self, ranks: Ints, seqs: Ints) -> Ints:
        # Offsets [n] that turn atoms of `seqs` [n] into indices on `ranks` [n].
        return self.base[np.searchsorted(self.cells, seqs * self.num_ranks + ranks)] - self.first[seqs]

    def at(self, place: int) -> tuple[int, int]:
        cell = int(np.searchsorted(self.base, place, side="right")) - 1
        seq, rank = divmod(int(self.cells[cell]), self.num_ranks)
        return rank, place - int(self.base[cell] - self.first[seq])


class _Tree(NamedTuple):
    """Atoms as keys, [num_token_atoms] each.

    `place`: how many others are before it on its path; `above`: the last of these; `below`: one past
    the last atom below it; `seen_from`: the first query atom that sees it; `full`: of a full
    segment. Without trees only `place`, `above` and `below` are asked for.
    """

    place: Ints
    above: Ints
    below: Ints
    seen_from: Ints
    full: Bools


class NotAloneError(InvalidProgramError):
    """A rank whose part may hold, but cannot be proved without all the others."""


def verify_rank(
    program: RankProgram, shape: tuple[tuple[int, ...], int, int], num_ranks: int, policy: str | None
) -> None:
    """Prove the ops of one rank, with what the others bring taken as promised.

    `shape`: lengths of the sequences, query heads, key-value heads. Raises InvalidProgramError: names
    the op, its text and what is wrong.
    """
    lengths, num_heads, num_kv_heads = shape
    nothing = Rows(Fragment.WIDTH)
    owned = tuple(program.owned if rank == program.rank else nothing for rank in range(num_ranks))
    alone = Program(
        lengths,
        num_heads,
        num_kv_heads,
        owned,
        program.forward,
        program.backward,
        policy,
        program.remap_in,
        program.mask,
    )
    _OwnState(alone, program.rank).prove()


class _OwnState(_State):
    """The values that one rank holds, while its ops run one after the other."""

    def __init__(self, program: Program, rank: int) -> None:
        self.rank = rank
        super().__init__(program)

    def computed(self, tables: _ProgramTables) -> Bools:
        # As in `_State`: the query atoms that this rank attends for.
        marks = np.zeros(self.atoms.num_token_atoms, dtype=bool)
        queries = trim_pairs(tables.pairs, self.program.mask)[:, Pair.Q_SPAN]
        _, atom = ranges(*self.atoms.tokens(tables.pairs[:, Pair.SEQ], *queries.T))
        marks[atom] = True
        return marks

    def check_owners(self) -> None:
        # `verify_owned` has looked at what all ranks own.
        pass

    def brings_copies(self, rows: Ints) -> bool:
        # As in `_State`, to this rank.
        return super().brings_copies(rows[rows[:, Transfer.DST] == self.rank])

    def incomplete(self, kind: Kind, want: Ints) -> Bools:
        if kind == Kind.KV_GRAD:
            return self.parts[kind][self.owned_index] != 1
        return super().incomplete(kind, want)

    def check_ops(self, ops: Sequence[Op]) -> None:
        # As in `_State`, and that they are this rank's.
        super().check_ops(ops)
        for which, op in enumerate(ops):
            if not isinstance(op, Exchange) and op.rank != self.rank:
                raise self.error(which, f"it is an op of rank {op.rank} in the program of rank {self.rank}")

    def check_rows(self, phase: str, op: Exchange) -> Ints:
        if op.collective not in ("p2p", "all_to_all"):
            raise NotAloneError(f"{op.collective} in exchange {op.id} is proved of all its ranks at once, not of one")
        return super().check_rows(phase, op)

    def ends(self, kind: Kind, rows: Ints) -> tuple[Ints, Ints, Ints, Ints]:
        # As in `_State`: what this rank sends, and what it is brought.
        sent, brought = (rows[rows[:, side] == self.rank] for side in (Transfer.SRC, Transfer.DST))
        (row, there), (other, here) = (
            self.index(np.full(len(own), self.rank), kind, own[:, Transfer.REGION]) for own in (sent, brought)
        )
        return sent[row], there, brought[other], here

    def check_given(self, kind: Kind, there: Ints, rows: Ints) -> None:
        if kind != Kind.KV_GRAD:
            whole = (self.parts[kind][there] == 1) & (self.count[kind][there] == self._whole(there))
            self.require(whole, rows, "it is sent before it is complete, so that no rank can be proved alone")

    def arriving(self, kind: Kind, there: Ints, here: Ints) -> Ints:
        # What comes is complete, but for gradients of keys, whose contributions are not counted.
        del there
        return np.zeros(len(here), dtype=np.int64) if kind == Kind.KV_GRAD else self._whole(here)

    def _whole(self, places: Ints) -> Ints:
        cell = np.searchsorted(self.places.base, places, side="right") - 1
        seq = self.places.cells[cell] // self.places.num_ranks
        atom = (places - self.places.base[cell] + self.places.first[seq]) // self.num_heads
        return (self.key_last - self.key_first)[atom]
