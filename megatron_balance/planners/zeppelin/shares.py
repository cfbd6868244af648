"""Uneven shares: which groups attend to each sequence, and to how much of it.

A sequence cut over groups is placed zigzag with chunks as wide as each share, so work and tokens
are linear in the shares, and both can be even at once. Longest first, a sequence goes to the group
with the least work, or is cut over as many as it needs; `_level_work` hands parts from the fullest
to the emptiest group; `_level_tokens` trades work for as much of another density. Every step costs
keys that travel, so whoever asks prices each on the way. Further ways to begin: only the longest
sequence cut over all groups (`_spread`); each shared evenly by few neighbours (`aligned`), or not
cut at all (`whole`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from heapq import heappop, heappush, heapreplace
from itertools import chain
from math import ceil, nan
from typing import NamedTuple

import numpy as np

from megatron_balance.ir.arrays import Floats, Ints, as_rows, laid, sums, union
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.columns import Placed
from megatron_balance.ir.plan import SharedZone
from megatron_balance.patterns.waves import ALIGN, lead_cuts, side_of
from megatron_balance.solvers.groups import INTER_NODE, INTRA_NODE, LOCAL
from megatron_balance.solvers.makespan import MachinesProblem, greedy, improve
from megatron_balance.solvers.packing import longest_first

# Shares up to this are none.
_NOTHING = 1e-3
# Work, and tokens, of a group above the mean that are taken as even.
_TOLERANCE = 0.01
# Seconds of a group of whole sequences above the mean at which swaps end.
_EVEN = 1e-3
# Steps of each levelling, for each group, at most.
_STEPS = 4
# Sequences of each of two groups among which a trade is looked for.
_TRADED = 12
# A placement is offered whenever what is uneven has become this much less.
_LESS = 0.7
# Work above the mean, over it, of a group's whole sequences with which levelling still helps.
_MOST_ABOVE = 0.3


@dataclass(slots=True)
class Shares:
    """A placement. `of[seq]`: the share of each group, summing to 1; `load`, `held`, `on`: work,
    tokens and sequences of each group; `cut`: sequences on several. Sequences and copies may share
    what a sequence is on, which is replaced, never changed.
    """

    work: Sequence[float]
    lengths: Sequence[int]
    of: list[dict[int, float]]
    load: list[float]
    held: list[float]
    on: list[set[int]]
    cut: set[int]
    mean_work: float
    mean_tokens: float

    @classmethod
    def begin(
        cls, work: Sequence[float], lengths: Sequence[int], num_groups: int, of: Sequence[dict[int, float]] = ()
    ) -> Shares:
        """Begin with what `of` says of the first sequences; the others have no group yet."""
        on, counts = [set[int]() for _ in range(num_groups)], list(map(len, of))
        group = np.fromiter(chain.from_iterable(of), np.int64, sum(counts))
        share = np.fromiter(chain.from_iterable(own.values() for own in of), np.float64, len(group))
        seqs = np.repeat(np.arange(len(of)), counts)
        load, held = (
            np.bincount(group, share * np.array(each, dtype=np.float64)[seqs], num_groups).astype(np.float64).tolist()
            for each in (work, lengths)
        )
        for at, seq in zip(group.tolist(), seqs.tolist(), strict=True):
            on[at].add(seq)
        cut = {seq for seq, count in enumerate(counts) if count > 1}
        of = [*of, *([{}] * (len(work) - len(of)))]
        return cls(work, lengths, of, load, held, on, cut, sum(work) / num_groups, sum(lengths) / num_groups)

    @property
    def num_groups(self) -> int:
        return len(self.load)

    def copy(self, *, kept: bool = False) -> Shares:
        """Another placement; `kept`: one that stays as it is, which needs no `on`."""
        on, means = [] if kept else [set(own) for own in self.on], (self.mean_work, self.mean_tokens)
        of, load, held = list(self.of), list(self.load), list(self.held)
        return Shares(self.work, self.lengths, of, load, held, on, set(self.cut), *means)

    def put(self, seq: int, group: int) -> None:
        self.load[group] += self.work[seq]
        self.held[group] += self.lengths[seq]
        self.on[group].add(seq)
        self.of[seq] = {group: 1.0}

    def give(self, seq: int, group: int, share: float) -> None:
        own = self.of[seq].copy()
        self.load[group] += share * self.work[seq]
        self.held[group] += share * self.lengths[seq]
        own[group] = own.get(group, 0.0) + share
        self.on[group].add(seq)
        self.of[seq] = own
        if len(own) > 1:
            self.cut.add(seq)

    def hand(self, seq: int, src: int, dst: int, work: float) -> None:
        own, whole, load, held = self.of[seq].copy(), self.work[seq], self.load, self.held
        share, before = work / whole, len(own)
        had, has = own[src], own.get(dst, 0.0)
        share = min(share, had)
        moved = share * self.lengths[seq]
        load[src] -= share * whole
        load[dst] += share * whole
        held[src] -= moved
        held[dst] += moved
        if had - share > _NOTHING:
            own[src] = had - share
        else:
            del own[src]
            self.on[src].discard(seq)
        if has + share > _NOTHING:
            own[dst] = has + share
            self.on[dst].add(seq)
        self.of[seq] = own
        if len(own) > 1:
            self.cut.add(seq)
        elif before > 1:
            self.cut.discard(seq)


@dataclass(frozen=True, slots=True)
class Trimmed:
    """Placements without their smallest shares: rows of all shares of cut sequences, by placement,
    sequence and group. `place`, `count`: the group's number among those of its sequence, and how
    many these are; `before`: sum of the shares before it; `load`, `held` [placements, groups].
    """

    placements: Sequence[Shares]
    work: Floats
    lengths: Floats
    placement: Ints
    seq: Ints
    group: Ints
    share: Floats
    place: Ints
    count: Ints
    before: Floats
    load: Floats
    held: Floats

    @classmethod
    def without(cls, placements: Sequence[Shares], least: float = 0.0) -> Trimmed:
        """Leave out shares below `least` or half the largest of their sequence."""
        # Of the same sequences and groups.
        one = placements[0]
        work, lengths = np.array(one.work, dtype=np.float64), np.array(one.lengths, dtype=np.float64)
        size, cuts = one.num_groups, [sorted(placed.cut) for placed in placements]
        # A piece is one cut sequence of one placement; rows are its shares.
        pieces = [placed.of[seq] for placed, cut in zip(placements, cuts, strict=True) for seq in cut]
        counts = np.fromiter(map(len, pieces), np.int64, len(pieces))
        piece = np.repeat(np.arange(len(pieces)), counts)
        group = np.fromiter(chain.from_iterable(pieces), np.int64, len(piece))
        share = np.fromiter(chain.from_iterable(own.values() for own in pieces), np.float64, len(piece))
        # Rows by piece, then by group: zigzag order is the groups' order.
        order = np.argsort(piece * size + group)
        group, share = group[order], share[order]
        of_piece = np.repeat(np.arange(len(placements)), [len(cut) for cut in cuts])
        seq = np.fromiter(chain.from_iterable(cuts), np.int64, len(pieces))
        load, held = (np.array([getattr(placed, name) for placed in placements]) for name in ("load", "held"))
        index, of_row = of_piece[piece] * size + group, seq[piece]
        load -= _by(index, share * work[of_row], load.shape)
        held -= _by(index, share * lengths[of_row], held.shape)
        if pieces:
            # Segments of `share` are the pieces; their starts are the exclusive sums of counts.
            largest = np.maximum.reduceat(share, np.cumsum(counts) - counts)
            enough = share >= np.minimum(least, largest / 2)[piece]
            piece, group, share = piece[enough], group[enough], share[enough]
            counts = np.bincount(piece, minlength=len(pieces))
            # What is left of a piece sums to 1 again.
            share = share / np.bincount(piece, weights=share, minlength=len(pieces))[piece]
        placement, seq = of_piece[piece], seq[piece]
        load += _by(placement * size + group, share * work[seq], load.shape)
        held += _by(placement * size + group, share * lengths[seq], held.shape)
        first = (np.cumsum(counts) - counts)[piece]
        # Exclusive running sum, restarted at every piece.
        so_far = np.cumsum(share) - share
        place, count = np.arange(len(piece)) - first, counts[piece]
        before = so_far - so_far[first]
        return cls(placements, work, lengths, placement, seq, group, share, place, count, before, load, held)

    def of(self, number: int) -> list[dict[int, float]]:
        """By sequence, the share of each group that a placement leaves it."""
        of = [dict.fromkeys(own, 1.0) for own in self.placements[number].of]
        for seq in self.placements[number].cut:
            of[seq] = {}
        rows = self.placement == number
        for seq, group, share in zip(
            *(each[rows].tolist() for each in (self.seq, self.group, self.share)), strict=True
        ):
            of[seq][group] = share
        return of


def _by(index: Ints, values: Floats, shape: tuple[int, ...]) -> Floats:
    return np.bincount(index, weights=values, minlength=shape[0] * shape[1]).astype(np.float64).reshape(shape)


def placements(
    work: Sequence[float], lengths: Sequence[int], num_groups: int, above: float | None = 0.0
) -> Iterator[Shares]:
    """Placements of all sequences, from few cuts to the most even. `work`: seconds of attention of
    each whole sequence on one group. `above`: work above the mean, over it, that groups may have at
    first: the more, the fewer cuts; None: the longest sequence is spread over all groups at first.
    """
    order = longest_first(work)
    placed = Shares.begin(work, lengths, num_groups)
    if above is None:
        if not _spread(placed, order):
            return
    else:
        _fill(placed, order, num_parts(work, num_groups, above))
    yield placed.copy(kept=True)
    if above:
        yield from _offered(placed.copy(), _level_tokens)
    yield from more_even(placed)


def aligned(
    seconds: Sequence[float], lengths: Sequence[int], num_groups: int, target_s: float, capacity: float
) -> list[tuple[int, ...]]:
    """The groups that share each sequence evenly: longest first, on the fewest neighbours, of as
    many those that have least to do, that then have at most `target_s` and `capacity` tokens; else
    on all groups.
    """
    load, held, heap = [0.0] * num_groups, [0.0] * num_groups, [(0.0, group) for group in range(num_groups)]
    placement: list[tuple[int, ...]] = [()] * len(seconds)
    runs, alone = _runs(num_groups), [(group,) for group in range(num_groups)]
    for seq in longest_first(seconds):
        least_s, idlest = heap[0]
        # Put there before the group was given more.
        while least_s != load[idlest]:
            heappop(heap)
            least_s, idlest = heap[0]
        now_s, tokens = least_s + seconds[seq], held[idlest] + lengths[seq]
        if now_s <= target_s and tokens <= capacity:
            load[idlest], held[idlest] = now_s, tokens
            heapreplace(heap, (now_s, idlest))
            placement[seq] = alone[idlest]
            continue
        best = range(num_groups)
        for each in runs:
            part_s, part = seconds[seq] / len(each[0]), lengths[seq] / len(each[0])
            # No run has less to do than its idlest group.
            if least_s + part_s > target_s:
                continue
            run = min(each, key=lambda run: max(load[run.start : run.stop]))
            if (
                max(load[run.start : run.stop]) + part_s <= target_s
                and max(held[run.start : run.stop]) + part <= capacity
            ):
                best = run
                break
        for group in best:
            load[group] += seconds[seq] / len(best)
            held[group] += lengths[seq] / len(best)
            heappush(heap, (load[group], group))
        placement[seq] = tuple(best)
    return placement


def whole(seconds: Sequence[float], num_groups: int) -> list[tuple[int, ...]]:
    """The group of each sequence, none cut: longest first, then by moves and swaps."""
    none = np.zeros(num_groups)
    problem = MachinesProblem(np.array([seconds]), none.astype(np.int64), none, none, none.astype(np.int64))
    group_of = greedy(problem, longest_first(seconds))
    improve(problem, group_of, (1 + _EVEN) * sum(seconds) / num_groups)
    return [(group,) for group in group_of.tolist()]


@cache
def _runs(num_groups: int) -> list[list[range]]:
    """Groups in a row, by how many; aligned to the largest power of two that divides their number."""
    widths = {*range(2, 9), *(times << power for power in range(3, num_groups.bit_length()) for times in (1, 3))}
    widths = {width for width in widths if 4 * width <= 3 * num_groups}
    return [
        [range(first, first + width) for first in range(0, num_groups - width + 1, width & -width)]
        for width in sorted(widths)
    ]


def more_even(placed: Shares) -> Iterator[Shares]:
    """Level work, then tokens; yields the placement whenever it became clearly more even."""
    yield from _offered(placed, _level_work)
    yield from _offered(placed, _level_tokens)


def _offered(placed: Shares, levelling: Callable[[Shares], Iterator[float]]) -> Iterator[Shares]:
    """The placement whenever it became clearly more even, and at the end."""
    steps = levelling(placed)
    last, behind = next(steps), False
    for now in steps:
        behind = now > last * _LESS
        if not behind:
            last = now
            yield placed.copy(kept=True)
    if behind:
        yield placed.copy(kept=True)


def _spread(placed: Shares, order: Sequence[int]) -> bool:
    """The longest sequence over all groups, the others whole; False: that is not even."""
    work, lengths = placed.work, placed.lengths
    longest, whole = order[0], order[1:]
    most = (1 + _MOST_ABOVE) * placed.mean_work
    if work[longest] < placed.mean_work or (whole and work[whole[0]] > most):
        return False
    density = work[longest] / lengths[longest]
    lack = {seq: density * lengths[seq] - work[seq] for seq in whole}
    heap = [(0.0, group) for group in range(placed.num_groups)]
    for seq in sorted(whole, key=lambda seq: (-lack[seq], seq)):
        so_far, group = heap[0]
        placed.put(seq, group)
        heapreplace(heap, (so_far + lack[seq], group))
    if max(placed.load) > most:
        return False
    _cut(placed, longest, range(placed.num_groups))
    return True


def _cut(placed: Shares, seq: int, groups: Sequence[int]) -> None:
    work = placed.work[seq]
    for group, amount in zip(groups, _levelled([placed.load[group] for group in groups], work), strict=True):
        if amount > _NOTHING * work:
            placed.give(seq, group, amount / work)


def num_parts(work: Sequence[float], num_groups: int, above: float) -> list[int]:
    """Groups that each sequence begins on: whole where it fits in the mean work and `above` of it."""
    fits = sum(work) / num_groups * (1 + above)
    return [1 if own <= fits else min(num_groups, max(1, ceil(own / fits - 0.1))) for own in work]


def _fill(placed: Shares, order: Sequence[int], parts: Sequence[int]) -> None:
    fair, mean, load, held = placed.mean_work, placed.mean_tokens, placed.load, placed.held
    work, lengths, of, on = placed.work, placed.lengths, placed.of, placed.on
    alone = [{group: 1.0} for group in range(placed.num_groups)]

    def fullness(group: int) -> tuple[float, int]:
        return load[group] / fair + 1e-3 * held[group] / mean, group

    heap = [fullness(group) for group in range(placed.num_groups)]
    for seq in order:
        if parts[seq] == 1:
            # As `put` and `fullness`: of most sequences.
            group = heap[0][1]
            load[group] = own = load[group] + work[seq]
            held[group] = tokens = held[group] + lengths[seq]
            on[group].add(seq)
            of[seq] = alone[group]
            heapreplace(heap, (own / fair + 1e-3 * tokens / mean, group))
            continue
        groups = [heappop(heap)[1] for _ in range(parts[seq])]
        _cut(placed, seq, groups)
        for group in groups:
            heappush(heap, fullness(group))


def _levelled(levels: Sequence[float], amount: float) -> list[float]:
    ordered = sorted(levels)
    total = top = 0.0
    for count, level in enumerate(ordered, 1):
        total += level
        top = (amount + total) / count
        if count == len(ordered) or top <= ordered[count]:
            break
    return [max(0.0, top - level) for level in levels]


def _level_work(placed: Shares) -> Iterator[float]:
    """Hand work from the fullest groups to the emptiest; yields what is uneven, first before any."""
    mean, load, work, lengths, of = placed.mean_work, placed.load, placed.work, placed.lengths, placed.of
    most = load.index(max(load))
    yield load[most] - mean
    for _ in range(_STEPS * placed.num_groups):
        least = load.index(min(load))
        if load[most] <= mean * (1 + _TOLERANCE):
            return
        need = min(load[most] - mean, mean - load[least])
        parts = {seq: of[seq][most] * work[seq] for seq in sorted(placed.on[most])}
        # One that both have already, else the shortest that is enough: fewest keys travel.
        enough = [seq for seq, part in parts.items() if part >= need]
        enough = [seq for seq in enough if least in of[seq]] or enough
        if enough:
            seq = min(enough, key=lambda seq: (lengths[seq], seq))
        else:
            seq = max(parts, key=parts.__getitem__)
        placed.hand(seq, most, least, min(need, parts[seq]))
        most = load.index(max(load))
        yield load[most] - mean


def _level_tokens(placed: Shares) -> Iterator[float]:
    """As `_level_work`: trade equal work of other density between the groups with most and fewest
    tokens.
    """
    mean, held, offers = placed.mean_tokens, placed.held, _Offers(placed)
    most = held.index(max(held))
    yield held[most] - mean
    for _ in range(_STEPS * placed.num_groups):
        least = held.index(min(held))
        if held[most] <= mean * (1 + _TOLERANCE):
            return
        trade = _best_trade(placed, offers, (most, least), min(held[most] - mean, mean - held[least]))
        if trade is None:
            return
        sparse, dense, amount = trade
        placed.hand(sparse, most, least, amount)
        placed.hand(dense, least, most, amount)
        for seq in (sparse, dense):
            offers.update(seq, most)
            offers.update(seq, least)
        most = held.index(max(held))
        yield held[most] - mean


def _best_trade(placed: Shares, offers: _Offers, groups: tuple[int, int], need: float) -> tuple[int, int, float] | None:
    """(sequence of the first group, of the second, work) with most tokens moved for those cut."""
    most, least = groups
    lengths, of, mean = placed.lengths, placed.of, placed.mean_tokens
    if not placed.on[least]:
        return None
    # What is offered is what the other group's mean is traded for most tokens.
    mean_there, mean_here = (placed.held[at] / placed.load[at] for at in (least, most))
    there = [
        (own, seq, part, 0 if most in of[seq] else lengths[seq])
        for own, seq, part in offers.of(least, mean_here, more=False)
    ]
    there.sort()
    best, chosen = 0.0, (0, 0, 0.0)
    for own, sparse, part in offers.of(most, mean_there, more=True):
        base = mean if least in of[sparse] else mean + lengths[sparse]
        bound = best * base * (1 - 1e-12)
        for other, dense, all_of_it, also_cut in there:
            # By a second of work; none if both are the same sequence. Later ones gain less; the bound
            # leaves rounding aside, so that ties are still told by number.
            gained = own - other
            if gained <= 0 or need < bound or part * gained < bound:
                break
            amount = min(need / gained, part, all_of_it)
            score = amount * gained / (base + also_cut)
            if score > best or (score == best and (-sparse, -dense) > (-chosen[0], -chosen[1])):
                best, chosen = score, (sparse, dense, amount)
                bound = best * base * (1 - 1e-12)
    return chosen if best > 0 else None


class _TradeRows(NamedTuple):
    """Sequences of a group, with some rows to spare. `density` of what is not there is no number;
    `of`: the row of each sequence.
    """

    seq: Ints
    density: Floats
    work: Floats
    of: dict[int, int]
    free: list[int]


class _Offers:
    """Sequences that groups may trade: of many a few, since all pairs are quadratic."""

    def __init__(self, placed: Shares) -> None:
        self.placed, self.work = placed, np.array(placed.work, dtype=np.float64)
        # Tokens of a second's work.
        self.density = np.array(placed.lengths, dtype=np.float64) / self.work
        self.rows: dict[int, _TradeRows] = {}  # of groups that were asked for

    def of(self, group: int, mean: float, *, more: bool) -> Iterable[tuple[float, int, float]]:
        """(density, sequence, work). `mean`: the other group's density; `more`: of tokens is given."""
        own = self.placed.on[group]
        if len(own) <= _TRADED:
            of, work, lengths = self.placed.of, self.placed.work, self.placed.lengths
            return [(lengths[seq] / work[seq], seq, of[seq][group] * work[seq]) for seq in own]
        rows = self.rows.get(group) or self._begin(group)
        gains = (mean - rows.density if more else rows.density - mean) * rows.work
        order = gains.argsort()
        if gains[order[_TRADED]] == gains[order[_TRADED - 1]]:
            order = np.lexsort((rows.seq, gains))  # of equal ones the lower
        first = order[:_TRADED]
        return zip(rows.density[first].tolist(), rows.seq[first].tolist(), rows.work[first].tolist(), strict=True)

    def _begin(self, group: int) -> _TradeRows:
        of, own = self.placed.of, list(self.placed.on[group])
        spare = [0] * _TRADED
        seq = np.array(own + spare, dtype=np.int64)
        rows = _TradeRows(seq, self.density[seq], self.work[seq], dict(zip(own, range(len(own)), strict=True)), [])
        rows.free.extend(range(len(own), len(seq)))
        rows.density[len(own) :] = nan
        for cut in self.placed.cut & rows.of.keys():
            rows.work[rows.of[cut]] *= of[cut][group]
        self.rows[group] = rows
        return rows

    def update(self, seq: int, group: int) -> None:
        """After a group has more or less of a sequence."""
        if (rows := self.rows.get(group)) is None:
            return
        share, row = self.placed.of[seq].get(group), rows.of.get(seq)
        if share is None:
            if row is not None:
                rows.density[row] = nan
                rows.free.append(rows.of.pop(seq))
        elif row is None and not rows.free:
            del self.rows[group]
        else:
            if row is None:
                row = rows.of[seq] = rows.free.pop()
                rows.seq[row], rows.density[row] = seq, self.density[seq]
            rows.work[row] = self.placed.work[seq] * (share if seq in self.placed.cut else 1.0)


def _zigzag_edges(length: int, shares: Sequence[float], align: int) -> list[int]:
    """Edges of the 2 k - 1 chunks of a sequence: share i has chunks i and 2 k - 2 - i, half as wide
    as it each, the last one the middle chunk. Multiples of `align` from either end where chunks are
    much wider.
    """
    total, so_far = sum(shares), 0.0
    step = align if length > 8 * align * len(shares) else 1
    # Half of each share lies ahead of the middle; the edges behind it mirror those.
    edges = [0]
    for share in shares[:-1]:
        so_far += share
        at = round(so_far / total * length / 2 / step) * step
        edges.append(max(edges[-1], min(at, length // 2)))
    return [*edges, *(length - edge for edge in reversed(edges))]


def shared_zone(
    of: Sequence[dict[int, float]], lengths: Sequence[int], cluster: Cluster, size: int, waves: tuple[int, int]
) -> SharedZone:
    """The zone of a placement: every group's fragments in near-equal runs on its ranks, those of
    its lead and those of the others. `of[seq]`: the share of it that each group holds. `waves`: how
    many, and the lead.
    """
    node_size, (num_waves, lead) = cluster.node_size, waves
    runs: list[tuple[int, int, int, int]] = []
    for seq, (length, own) in enumerate(zip(lengths, of, strict=True)):
        if len(own) == 1:
            runs.append((next(iter(own)), seq, 0, length))
            continue
        groups = sorted(own)
        edges = _zigzag_edges(length, [own[group] for group in groups], ALIGN)
        last = len(edges) - 2
        for at, group in enumerate(groups):
            # Chunk `at` from the front and its mirror from behind; of the last group they are one.
            for chunk in sorted({at, last - at}):
                if edges[chunk] < edges[chunk + 1]:
                    runs.append((group, seq, edges[chunk], edges[chunk + 1]))
    crosses = size > node_size or any(
        min(own) * size // node_size != max(own) * size // node_size for own in of if len(own) > 1
    )
    together = size > 1 or any(len(own) > 1 for own in of)
    name = INTER_NODE if crosses else INTRA_NODE if together else LOCAL
    # [runs, (group, seq, start, stop)].
    rows = np.fromiter(chain.from_iterable(runs), np.int64, Placed.WIDTH * len(runs)).reshape(-1, Placed.WIDTH)
    if not lead:
        return SharedZone(name, as_rows(on_ranks(rows, cluster.num_ranks, size)), size, num_waves)
    # Where each row's group cuts its sequence: a part ahead, which is the lead's, and one behind.
    cuts = lead_cuts(union(rows), cluster.num_ranks // size, lead)[rows[:, Placed.RANK], rows[:, Placed.SEQ]]
    parts = [on_ranks(side_of(rows, cuts, ahead=ahead), cluster.num_ranks, size) for ahead in (True, False)]
    return SharedZone(name, as_rows(np.concatenate(parts)), size, num_waves, lead)


def one_run_each(lengths: Sequence[int], cluster: Cluster) -> SharedZone:
    """The zone in which every rank has one run of tokens, the longest sequence first."""
    order = longest_first(lengths)
    rows = np.array([(0, seq, 0, lengths[seq]) for seq in order], dtype=np.int64)
    return SharedZone(INTER_NODE, as_rows(on_ranks(rows, cluster.num_ranks, cluster.num_ranks)), cluster.num_ranks, 1)


def on_ranks(rows: Ints, num_ranks: int, size: int) -> Ints:
    """`Placed` rows of the ranks: each group's rows (group, seq, start, stop) in near-equal runs."""
    rows = rows[np.argsort(rows[:, Placed.RANK], kind="stable")]
    length = rows[:, Placed.STOP] - rows[:, Placed.START]
    tokens = sums(rows[:, Placed.RANK], length, num_ranks // size)
    # Where a rank's tokens begin, all groups' laid end to end [groups, ranks of a group].
    edges = ((np.cumsum(tokens) - tokens)[:, None] + tokens[:, None] * np.arange(size) // size).ravel()
    rank, row, start, stop = laid(length, np.append(edges, length.sum())).T
    seq, begin = rows[row, Placed.SEQ], rows[row, Placed.START]
    return np.column_stack([rank, seq, begin + start, begin + stop])
