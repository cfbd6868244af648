"""The first pass of KnapFormer's balancer: sequences to groups, no data moved (section 3.3).

In descending order of work each sequence goes to the least occupied group among those with room for
it, occupancy being work over capacity, and capacity the group's ranks times the mean work of a rank.
The paper leaves open what happens where no group has room; here the least occupied takes it.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Sequence

import numpy as np

from megatron_balance.cost.base import Floats, Ints
from megatron_balance.errors import InfeasibleError

_ROUNDING = 1 + 1e-9

_MANY = 64
"""Groups from which on sequences are assigned in runs."""
_PAYS, _FREE_RUNS = 16, 64
"""A run is worth so many sequences that are assigned one by one; runs that need not be."""


def assign(work: Floats, lengths: Sequence[int], sizes: Sequence[int], tokens_per_rank: int | None) -> list[int]:
    """The group of each sequence.

    Args:
        work: of each sequence, [S], above 0.
        lengths: in tokens, [S].
        sizes: ranks of each group, [M]; a group may stay empty.
        tokens_per_rank: tokens that a rank can hold; None: any number.

    Raises:
        InfeasibleError: no group has memory left for a sequence.
    """
    if not len(work):
        return []
    chosen = _by_work(work, sizes)
    if tokens_per_rank is None:
        return chosen
    held = [0] * len(sizes)
    for group, length in zip(chosen, lengths, strict=True):
        held[group] += length
    if all(tokens <= size * tokens_per_rank for tokens, size in zip(held, sizes, strict=True)):
        return chosen
    return _within_memory(work, lengths, sizes, tokens_per_rank)


def _descending(work: Floats) -> list[int]:
    return (-work).argsort(kind="stable").tolist()


def _by_work(work: Floats, sizes: Sequence[int]) -> list[int]:
    order = (-work).argsort(kind="stable")
    ordered = work[order]
    filling = _Filling(sizes, float(work.sum()) / sum(sizes))
    done = filling.in_runs(ordered) if len(sizes) >= _MANY else 0
    if done < len(ordered):
        filling.one_by_one(ordered[done:])
    chosen = np.empty(len(work), dtype=np.int64)
    chosen[order] = np.concatenate(filling.groups)
    return chosen.tolist()


class _Filling:
    """Groups while they are filled with sequences in descending order of work.

    Attributes:
        loads: work of each group so far, [M].
        groups: those of the sequences so far, in parts.
    """

    def __init__(self, sizes: Sequence[int], mean: float) -> None:
        self.sizes = np.array(sizes)
        alike = len(set(sizes)) == 1  # then the least occupied one takes a sequence, room or not
        self.room = np.ones(len(sizes)) if alike else self.sizes * mean
        self.limit = self.room * _ROUNDING
        self.loads = np.zeros(len(sizes))
        self.groups: list[Ints] = []

    def in_runs(self, work: Floats) -> int:
        """Assign sequences many at a time, and return how many were; ends where that does not pay.

        A run gives one sequence to each of the least occupied groups, in their order. It ends before
        a group that is no less occupied than one that the run has filled, or has no room, and before
        a sequence for which groups of another size have room again.
        """
        members = [np.flatnonzero(self.sizes == size) for size in dict.fromkeys(self.sizes.tolist())]
        everyone, bounded = np.arange(len(self.sizes)), False
        done = runs = 0
        while done < len(work) and done >= _PAYS * (runs - _FREE_RUNS):
            runs += 1
            ahead = work[done : done + len(self.sizes)]
            chosen = everyone
            if len(members) > 1:
                # A size whose least occupied group has no room has none at all.
                spare = [float((self.limit[each] - self.loads[each]).max()) for each in members]
                opened = [each for each, own in zip(members, spare, strict=True) if ahead[0] <= own]
                chosen = np.sort(np.concatenate(opened)) if opened else everyone
                again = max((own for own in spare if ahead[0] > own), default=0.0) * _ROUNDING
                ahead = ahead[: max(1, int((ahead > again).sum()))]
                bounded = bool(opened)
            loads, room = self.loads[chosen], self.room[chosen]
            order = _least_first(loads, room)[: len(ahead)]
            ahead, occupied = ahead[: len(order)], loads[order] / room[order]
            filled = loads[order] + ahead
            ends = np.minimum.accumulate(filled / room[order])[:-1] <= occupied[1:]
            if bounded:
                ends |= (filled > self.limit[chosen][order])[1:]
            stop = int(ends.argmax()) + 1 if ends.any() else len(order)
            groups = chosen[order[:stop]]
            self.loads[groups] = filled[:stop]
            self.groups.append(groups)
            done += stop
        return done

    def one_by_one(self, work: Floats) -> None:
        """Assign sequences. Of a size, kept in a heap, none has room if the least occupied has not."""
        loads = self.loads.tolist()
        heaps: list[list[tuple[float, int]]] = []
        rooms: list[float] = []
        for size in dict.fromkeys(self.sizes.tolist()):
            members = np.flatnonzero(self.sizes == size)
            heaps.append([(loads[group], group) for group in members.tolist()])
            heapq.heapify(heaps[-1])
            rooms.append(float(self.room[members[0]]))
        limits = [room * _ROUNDING for room in rooms]
        chosen: list[int] = []
        if len(heaps) == 1:
            (heap,) = heaps
            for own in work.tolist():
                load, group = heap[0]
                chosen.append(group)
                heapq.heapreplace(heap, (load + own, group))
        else:
            # The least occupied group of each size, by occupancy.
            least = sorted((heap[0][0] / rooms[at], heap[0][1], at) for at, heap in enumerate(heaps))
            for own in work.tolist():
                _, group, at = entry = least[0]
                load = heaps[at][0][0] + own
                if load > limits[at]:
                    roomy = (each for each in least if heaps[each[2]][0][0] + own <= limits[each[2]])
                    _, group, at = entry = next(roomy, entry)
                    load = heaps[at][0][0] + own
                chosen.append(group)
                heapq.heapreplace(heaps[at], (load, group))
                load, first = heaps[at][0]
                least.remove(entry)
                bisect.insort(least, (load / rooms[at], first, at))
        self.groups.append(np.array(chosen, dtype=np.int64))


def _least_first(loads: Floats, room: Floats) -> Ints:
    """Groups from the least occupied one on; of equal ones, by size the less loaded, then the first.

    Occupancies may be equal where loads of one size are not, by rounding. Heads of the sizes are
    compared as heaps would: a group waits for all of its size that come before it.
    """
    occupied = loads / room
    order = occupied.argsort(kind="stable")
    same = occupied[order[1:]] == occupied[order[:-1]]
    if not (same & (loads[order[1:]] != loads[order[:-1]])).any():
        return order
    order = np.lexsort((loads, room, occupied))
    heads = np.diff(occupied[order], prepend=-1.0).astype(bool) | np.diff(room[order], prepend=-1.0).astype(bool)
    start = heads.cumsum() * len(order)
    waits = np.maximum.accumulate(order + start) - start
    return order[np.lexsort((waits, occupied[order]))]


def _within_memory(work: Floats, lengths: Sequence[int], sizes: Sequence[int], tokens_per_rank: int) -> list[int]:
    """As `_by_work`, among the groups that have memory left."""
    mean = float(work.sum()) / sum(sizes)
    loads, left = [0.0] * len(sizes), [size * tokens_per_rank for size in sizes]
    chosen = [0] * len(work)
    for seq in _descending(work):
        own, length = float(work[seq]), lengths[seq]
        held = [group for group, room in enumerate(left) if length <= room]
        if not held:
            most = max(range(len(sizes)), key=lambda group: left[group])
            raise InfeasibleError(
                f"sequence {seq} has {length} tokens; the group with the most memory left, of {sizes[most]} ranks x "
                f"{tokens_per_rank} tokens, has room for {left[most]}. Use larger groups (topology), raise "
                "--tokens-per-rank (tokens_per_rank), or plan a smaller batch"
            )
        roomy = [group for group in held if loads[group] + own <= sizes[group] * mean * _ROUNDING]
        group = min(roomy or held, key=lambda each: (loads[each] / sizes[each], each))
        chosen[seq] = group
        loads[group] += own
        left[group] -= length
    return chosen
