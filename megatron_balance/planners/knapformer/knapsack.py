"""The first pass of KnapFormer's balancer (section 3.3): in descending order of work each sequence
goes to the least occupied group among those with room, occupancy being work over capacity, and
capacity the group's ranks times the mean work of a rank. Where no group has room the least occupied
takes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapreplace
from itertools import chain

import numpy as np

from megatron_balance.cost.base import Floats, Ints
from megatron_balance.errors import InfeasibleError

_ROUNDING = 1 + 1e-9

# Groups, for each size there is, from which on sequences are assigned in runs.
_MANY = 32
# A run is worth so many sequences that are assigned one by one; runs that need not be.
_PAYS, _FREE_RUNS = 32, 8


def assign(work: Floats, lengths: Sequence[int], sizes: Sequence[int], tokens_per_rank: int | None) -> Ints:
    """The group of each sequence, [S].

    Args:
        work: of each sequence, [S], above 0.
        lengths: in tokens, [S].
        sizes: ranks of each group, [M]; a group may stay empty.
        tokens_per_rank: tokens that a rank can hold; None: any number.

    Raises:
        InfeasibleError: no group has memory left for a sequence.
    """
    if not len(work):
        return np.zeros(0, dtype=np.int64)
    chosen = _by_work(work, sizes)
    if tokens_per_rank is None:
        return chosen
    held = np.bincount(chosen, weights=lengths, minlength=len(sizes))
    if (held <= np.array(sizes) * tokens_per_rank).all():
        return chosen
    return _within_memory(work, lengths, sizes, tokens_per_rank)


def _by_work(work: Floats, sizes: Sequence[int]) -> Ints:
    # A key is work in its high bits and a number in its low ones, so equal work goes by number;
    # the batch's work takes at most 61 - bits bits, and sums stay inside int64.
    bits = max(len(work), len(sizes)).bit_length()
    total = float(work.sum())
    whole = (work * 2.0 ** (61 - bits - np.ceil(np.log2(total)))).astype(np.int64)
    order = np.sort(((int(whole.max()) - whole) << bits) | np.arange(len(work)))
    order &= (1 << bits) - 1
    filling = _FilledGroups(sizes, int(whole.sum()), bits)
    ordered = whole[order]
    done = filling.in_runs(ordered) if len(sizes) >= _MANY * len(filling.kinds) else 0
    if done < len(ordered):
        filling.one_by_one(ordered[done:])
    chosen = np.empty(len(work), dtype=np.int64)
    chosen[order] = np.concatenate(filling.groups)
    return chosen


class _FilledGroups:
    """Groups while they are filled with sequences in descending order of work."""

    def __init__(self, sizes: Sequence[int], total: int, bits: int) -> None:
        kinds = {size: kind for kind, size in enumerate(dict.fromkeys(sizes))}
        self.kinds, self.bits = np.array([*kinds])[:, None], bits
        self.kind_of: Ints = np.array([kinds[size] for size in sizes])
        self.number = (1 << bits) - 1
        # Then the least occupied one takes a sequence, room or not.
        alike = len(kinds) == 1
        self.limit = (1 << 63) - 1 if alike else int(total / sum(sizes) * _ROUNDING) << bits | self.number
        self.keys: Ints = np.arange(len(sizes))
        self.groups: list[Ints] = []

    def in_runs(self, work: Ints) -> int:
        """Assign sequences many at a time, and return how many were; ends where that does not pay."""
        added = (work // self.kinds) << self.bits
        done = runs = 0
        while done < len(work) and done >= _PAYS * (runs - _FREE_RUNS):
            runs += 1
            # Ascending occupancy: a run fills a prefix, one sequence a group.
            self.keys.sort()
            keys, ahead, closed = self.keys, added[:, done : done + len(self.keys)], None
            if len(self.kinds) == 1:
                count = ahead.shape[1]
                filled = keys[:count] + ahead[0]
            else:
                kinds = self.kind_of[keys & self.number]
                roomy = keys + ahead[:, 0][kinds] <= self.limit
                if not roomy.all():
                    # Work from which on no closed group has room: shorter ones wait for the next run.
                    again = (((self.limit - keys[~roomy]) >> self.bits) + 1) * self.kinds[kinds[~roomy], 0]
                    ahead = ahead[:, : int((work[done : done + ahead.shape[1]] >= again.max()).sum())]
                    if roomy.any():
                        keys, closed, kinds = keys[roomy], keys[~roomy], kinds[roomy]
                count = min(len(keys), ahead.shape[1])
                filled = keys[:count] + ahead[kinds[:count], np.arange(count)]
            # A run ends before a group that is fuller than one that it has filled already.
            (ends,) = (np.minimum.accumulate(filled)[:-1] < keys[1:count]).nonzero()
            stop = int(ends[0]) + 1 if len(ends) else count
            self.groups.append(keys[:stop] & self.number)
            keys[:stop] = filled[:stop]
            self.keys = keys if closed is None else np.concatenate((keys, closed))
            done += stop
        return done

    def one_by_one(self, work: Ints) -> None:
        """Assign sequences: by one heap while the least occupied group has room, else one a size."""
        by_kind: list[list[int]] = ((work // self.kinds) << self.bits).tolist()
        kind_of: list[int] = self.kind_of.tolist()
        added = [by_kind[kind] for kind in kind_of]
        heap: list[int] = np.sort(self.keys).tolist()
        taken: list[int] = []
        while len(taken) < len(work):
            self._in_turn(heap, added, taken)
            self._with_room(heap, added, taken)
        self.groups.append(np.array(taken, dtype=np.int64) & self.number)

    def _in_turn(self, heap: list[int], added: list[list[int]], taken: list[int]) -> None:
        """Append the least occupied group's key to `taken` for each sequence, while it has room."""
        number, limit = self.number, self.limit
        for seq in range(len(taken), len(added[0])):
            key = heap[0]
            filled = key + added[key & number][seq]
            if filled > limit:
                return
            taken.append(key)
            heapreplace(heap, filled)

    def _with_room(self, heap: list[int], added: list[list[int]], taken: list[int]) -> None:
        """As `_in_turn`, of groups with room, until the least occupied has had room a while."""
        number, limit = self.number, self.limit
        kind_of: list[int] = self.kind_of.tolist()
        heaps: list[list[int]] = [[] for _ in self.kinds]
        for key in sorted(heap):
            heaps[kind_of[key & number]].append(key)
        since, least = len(taken), [each[0] for each in heaps]
        for seq in range(len(taken), len(added[0])):
            key = min(least)
            if key + added[key & number][seq] > limit:
                since = seq
                key = min([each for each in least if each + added[each & number][seq] <= limit], default=key)
            elif seq - since > len(heap):
                break
            taken.append(key)
            group = key & number
            kind = kind_of[group]
            heapreplace(heaps[kind], key + added[group][seq])
            least[kind] = heaps[kind][0]
        heap[:] = sorted(chain.from_iterable(heaps))


def _within_memory(work: Floats, lengths: Sequence[int], sizes: Sequence[int], tokens_per_rank: int) -> Ints:
    mean = float(work.sum()) / sum(sizes)
    loads, left = [0.0] * len(sizes), [size * tokens_per_rank for size in sizes]
    chosen = np.zeros(len(work), dtype=np.int64)
    order: list[int] = (-work).argsort(kind="stable").tolist()
    for seq in order:
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
