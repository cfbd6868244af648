"""Items to machines of unlike speed so that the last machine is done early: the longest first, then
moves and swaps from the slowest machine until none helps.

Beside its items a machine may be charged for its largest one again (`behind` times): the first
microbatch of a pipeline goes through all its stages alone.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

NOT_HELD = 1e15
"""Seconds in `Problem.work` where an item is not held: finite, so that sums stay numbers."""
CLOSE, CLOSE_MANY = 5e-4, 3e-3
"""Share above the bound at which a search ends; with more than `MANY` items, where the bound itself
is known to a few thousandths."""
PARTNERS = 8
"""Least busy machines whose items are looked at for swaps."""
MOST_STEPS = 400
"""Moves and swaps of one search."""
STARTS = 48
"""Searches of a small problem; a large one has as many as `WORK` items make."""
FEW = 24
"""Items up to which a depth-first search follows, of at most `NODES` nodes."""
NODES = 4_000
PATIENCE, PATIENCE_MANY, MANY = 12, 4, 150
"""Searches in a row that find nothing better before the last; with more than `MANY` items
`PATIENCE_MANY` of them."""
WORK, STARTS_MANY = 3_000, 4
"""Items over all searches; searches with more than `MANY` items."""
SHARES = (0.06, 0.12, 0.25, 0.5)
"""Of the bound: what a machine's largest item may take beside its items in the first searches."""
ROUNDS = 60
"""Of the bound: times that the machines' weights are corrected."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Items and machines.

    `work` [kinds, items]: seconds of each item on a machine of each kind; `NOT_HELD`: not there.
    `kind`, `behind`, `start_s`, `room` [machines]: its kind, how often its largest item counts again,
    seconds of a machine that has any item, and the sizes that it holds. `sizes` [items].
    """

    work: Floats
    kind: Ints
    behind: Floats
    start_s: Floats
    sizes: Ints
    room: Floats

    @property
    def num_items(self) -> int:
        return self.work.shape[1]

    @property
    def num_machines(self) -> int:
        return len(self.kind)

    def seconds(self, machine_of: Ints) -> Floats:
        """Seconds of each machine [machines]; `machine_of` [items]."""
        work = self.work[self.kind[machine_of], np.arange(self.num_items)]
        total = np.bincount(machine_of, weights=work, minlength=self.num_machines)
        largest = np.zeros(self.num_machines)
        np.maximum.at(largest, machine_of, work)
        return total + self.behind * largest + self.start_s * (largest > 0)


def assign(problem: Problem, seed: int = 0, starts: int = STARTS) -> Ints | None:
    """The machine of each item [items]; None: no machine has room for an item that is left. `starts`:
    searches at most.

    Equal on every host for equal input: ties go to the machine and the item with the lower number.
    """
    if not problem.num_items:
        return np.zeros(0, dtype=np.int64)
    bound = lower_bound(problem)
    few = problem.num_items <= MANY
    enough, patience = (1 + (CLOSE if few else CLOSE_MANY)) * bound, PATIENCE if few else PATIENCE_MANY
    longest_first = np.argsort(-problem.work.min(axis=0), kind="stable").tolist()
    best, best_s, since = None, np.inf, 0
    rng = random.Random(seed)
    for start in range(max(1, min(starts if few else STARTS_MANY, starts, WORK // problem.num_items))):
        if not start:
            found = greedy(problem, longest_first)
        elif start % 3 or start <= len(SHARES):
            caps = _fill_caps(problem, SHARES[start - 1] * bound) if start <= len(SHARES) else _caps(problem, rng)
            found = greedy(problem, longest_first if start <= len(SHARES) else _shaken(longest_first, rng), caps)
        else:
            found = in_turn(problem, rng.sample(longest_first, problem.num_items))
        if found is None:
            continue
        improve(problem, found, enough)
        seconds = float(problem.seconds(found).max())
        since += start > len(SHARES) or not problem.behind.any()
        if seconds < best_s * (1 - 1e-9):
            best, best_s, since = found, seconds, 0
        if best_s <= enough or since >= patience:
            break
    if problem.num_items <= FEW and best_s > enough and starts > 1:
        return _searched(problem, longest_first, best, best_s)
    return best


def _searched(problem: Problem, order: Sequence[int], best: Ints | None, best_s: float) -> Ints | None:
    """The best of a depth-first search of at most `NODES` nodes, `best` being known; of machines that
    are alike so far one is tried.
    """
    work, sizes = problem.work[problem.kind].T.tolist(), problem.sizes.tolist()
    behind, start_s, kinds = problem.behind.tolist(), problem.start_s.tolist(), problem.kind.tolist()
    total, largest, room = [0.0] * problem.num_machines, [0.0] * problem.num_machines, problem.room.tolist()
    chosen = [0] * problem.num_items
    nodes = 0

    def seconds(machine: int, more: float) -> float:
        return total[machine] + more + behind[machine] * max(largest[machine], more) + start_s[machine]

    def place(depth: int, slowest: float) -> None:
        nonlocal best, best_s, nodes
        if depth == len(order):
            best, best_s = np.array(chosen, dtype=np.int64), slowest
            return
        item = order[depth]
        alike: set[tuple[float, ...]] = set()
        tried: list[tuple[float, int]] = []
        for machine, more in enumerate(work[item]):
            state = (kinds[machine], behind[machine], start_s[machine], total[machine], largest[machine], room[machine])
            if more < NOT_HELD and room[machine] >= sizes[item] and state not in alike:
                alike.add(state)
                tried.append((seconds(machine, more), machine))
        for then, machine in sorted(tried):
            nodes += 1
            if max(then, slowest) >= best_s * (1 - 1e-12) or nodes > NODES:
                return
            before = total[machine], largest[machine]
            total[machine] += work[item][machine]
            largest[machine] = max(largest[machine], work[item][machine])
            room[machine] -= sizes[item]
            chosen[item] = machine
            place(depth + 1, max(then, slowest))
            total[machine], largest[machine] = before
            room[machine] += sizes[item]

    place(0, 0.0)
    return best


def _fill_caps(problem: Problem, most_s: float) -> list[float] | None:
    """Sizes above which counting an item again would take a machine longer than `most_s`; None: no
    machine counts any again. The first machine of each kind takes any.
    """
    if not problem.behind.any():
        return None
    again = problem.behind[:, None] * problem.work[problem.kind]
    sizes = np.where(again <= most_s, problem.sizes, 0).max(axis=1)
    first = np.unique(problem.kind, return_index=True)[1]
    caps = np.where(problem.behind > 0, sizes, np.inf)
    caps[first] = np.inf
    return caps.tolist()


def _caps(problem: Problem, rng: random.Random) -> list[float] | None:
    """Sizes above which machines that count their largest item again take none, at random; None: no
    machine does so.
    """
    if not problem.behind.any():
        return None
    sizes = np.sort(problem.sizes)
    shared = float(sizes[rng.randrange(len(sizes))])
    caps = [np.inf] * problem.num_machines
    for machine in np.flatnonzero(problem.behind).tolist():
        draw = rng.random()
        if draw < 0.7:
            caps[machine] = shared if draw < 0.4 else float(sizes[rng.randrange(len(sizes))])
    return caps


def _shaken(order: Sequence[int], rng: random.Random) -> list[int]:
    """The order with every item moved a little, the more the further behind it stands."""
    keys = [place * rng.uniform(0.5, 1.5) + rng.uniform(0, 3) for place in range(len(order))]
    return [order[place] for place in sorted(range(len(order)), key=keys.__getitem__)]


def in_turn(problem: Problem, order: Sequence[int]) -> Ints | None:
    """Each item in turn to the first machine with which the slowest is least slow, as Hydraulis'
    Alg. 1 has it; None: one finds no room.
    """
    work_of = problem.work[problem.kind].T
    total, largest, seconds = np.zeros((3, problem.num_machines))
    room = problem.room.copy()
    machine_of = np.zeros(problem.num_items, dtype=np.int64)
    for item in order:
        work = work_of[item]
        now = total + work
        then = now + problem.behind * np.maximum(largest, work) + problem.start_s
        then[(room < problem.sizes[item]) | (work >= NOT_HELD)] = np.inf
        slowest = int(seconds.argmax())
        others = np.full(problem.num_machines, seconds[slowest])
        others[slowest] = 0.0  # at most what it becomes itself
        at = int(np.maximum(then, others).argmin())
        if then[at] == np.inf:
            return None
        machine_of[item], total[at], seconds[at] = at, now[at], then[at]
        largest[at] = max(largest[at], work[at])
        room[at] -= problem.sizes[item]
    return machine_of


def greedy(problem: Problem, order: Sequence[int], caps: Sequence[float] | None = None) -> Ints | None:
    """Each item in turn to the machine that would then be done first; None: one finds no place.

    `caps` [machines]: sizes above which a machine takes an item only if no other does.
    """
    num_kinds = len(problem.work)
    queues = [
        [(0.0, machine) for machine in np.flatnonzero(problem.kind == kind).tolist()] for kind in range(num_kinds)
    ]
    largest, room = [0.0] * problem.num_machines, problem.room.tolist()
    behind, start_s = problem.behind.tolist(), problem.start_s.tolist()
    work, sizes = problem.work.T.tolist(), problem.sizes.tolist()
    limited = bool(np.isfinite(problem.room).any())
    machine_of = np.zeros(problem.num_items, dtype=np.int64)
    for item in order:
        best, best_s, at = -1, np.inf, 0.0
        for kind, queue in enumerate(queues):
            seconds = work[item][kind]
            if seconds >= NOT_HELD or not queue:
                continue
            for load, machine in _candidates(queue, sizes[item], room if limited else None, largest, caps):
                more = seconds + behind[machine] * max(0.0, seconds - largest[machine])
                then = load + more + (0.0 if largest[machine] else start_s[machine])
                if then < best_s:
                    best, best_s, at = machine, then, load
        if best < 0:
            return None if caps is None else greedy(problem, order)
        machine_of[item] = best
        kind = int(problem.kind[best])
        largest[best] = max(largest[best], work[item][kind])
        room[best] -= sizes[item]
        queue = queues[kind]
        if queue[0] == (at, best):
            heapq.heapreplace(queue, (best_s, best))
        else:
            queue[queue.index((at, best))] = (best_s, best)
            heapq.heapify(queue)
    return machine_of


def _candidates(
    queue: list[tuple[float, int]],
    size: int,
    room: Sequence[float] | None,
    largest: Sequence[float],
    caps: Sequence[float] | None,
) -> list[tuple[float, int]]:
    """Machines of a kind that may take an item: the least busy, and beside an empty one the least
    busy that is not; where caps make them unlike, all that may.
    """
    if caps is not None:
        return [each for each in queue if size <= caps[each[1]] and (room is None or room[each[1]] >= size)]
    if room is None and largest[queue[0][1]]:
        return queue[:1]
    able = queue if room is None else [each for each in queue if room[each[1]] >= size]
    found = [min(able)] if able else []
    if found and not largest[found[0][1]]:
        used = [each for each in able if largest[each[1]]]
        found += [min(used)] if used else []
    return found


def improve(problem: Problem, machine_of: Ints, enough: float) -> None:
    """Move an item of the slowest machine to another, or swap it for one of another's, as long as the
    later of the two is done earlier than the slowest was, and down to `enough` seconds. Changes
    `machine_of`.
    """
    items = np.arange(problem.num_items)
    work_of = problem.work[problem.kind]  # [machines, items]
    for _ in range(MOST_STEPS):
        own = work_of[machine_of, items]
        total = np.bincount(machine_of, weights=own, minlength=problem.num_machines)
        largest, second = _two_largest(own, machine_of, problem.num_machines)
        seconds = total + problem.behind * largest + problem.start_s * (largest > 0)
        slowest = int(seconds.argmax())
        if seconds[slowest] <= enough:
            return
        held = np.bincount(machine_of, weights=problem.sizes, minlength=problem.num_machines)
        free = problem.room - held
        near = np.argsort(seconds, kind="stable")[:PARTNERS]
        mine = np.flatnonzero(machine_of == slowest)
        others = np.flatnonzero(np.isin(machine_of, near[near != slowest]))
        rest = np.where(own == largest[machine_of], second[machine_of], largest[machine_of])  # without the item
        left = rest[mine]
        # Moves [mine, machines].
        without = total[slowest] - own[mine] + problem.behind[slowest] * left + problem.start_s[slowest] * (left > 0)
        brought = work_of[:, mine].T
        with_it = total + brought + problem.behind * np.maximum(largest, brought) + problem.start_s
        moved = np.maximum(without[:, None], with_it)
        moved[:, slowest] = np.inf
        moved[problem.sizes[mine, None] > free] = np.inf
        best = int(moved.argmin())
        found_s, change = float(moved.flat[best]), (best // problem.num_machines, best % problem.num_machines, -1)
        if len(others):
            both = others, machine_of[others]
            swapped = _swapped(problem, (own, rest, total, free), slowest, mine, both)
            at = int(swapped.argmin())
            if swapped.flat[at] < found_s:
                found_s = float(swapped.flat[at])
                other = int(others[at % len(others)])
                change = (at // len(others), int(machine_of[other]), other)
        if found_s >= seconds[slowest] * (1 - 1e-9):
            return
        item, target, other = change
        machine_of[mine[item]] = target
        if other >= 0:
            machine_of[other] = slowest


def _swapped(
    problem: Problem, now: tuple[Floats, Floats, Floats, Floats], slowest: int, mine: Ints, others: tuple[Ints, Ints]
) -> Floats:
    """Seconds of the later of two machines [mine, others] that have swapped an item each; `others`:
    the items and their machines.
    """
    own, rest, total, free = now
    items, theirs = others
    comes = problem.work[problem.kind[slowest], items]  # to the slowest
    goes = problem.work[problem.kind[theirs][None, :], mine[:, None]]  # from it
    here = (
        (total[slowest] - own[mine])[:, None]
        + comes
        + problem.behind[slowest] * np.maximum(rest[mine][:, None], comes)
        + problem.start_s[slowest]
    )
    there = (
        total[theirs] - own[items] + goes + problem.behind[theirs] * np.maximum(rest[items], goes)
    ) + problem.start_s[theirs]
    later = np.maximum(here, there)
    grows = problem.sizes[mine][:, None] - problem.sizes[items]
    later[(grows > free[theirs]) | (-grows > free[slowest])] = np.inf
    return later


def _two_largest(values: Floats, group: Ints, num_groups: int) -> tuple[Floats, Floats]:
    """The largest and the second largest value of each group; 0 where there is none."""
    order = np.lexsort((-values, group))
    ordered, of = values[order], group[order]
    first = np.searchsorted(of, np.arange(num_groups))
    count = np.bincount(group, minlength=num_groups)
    padded = np.append(ordered, [0.0, 0.0])
    return np.where(count > 0, padded[first], 0.0), np.where(
        count > 1, padded[np.minimum(first + 1, len(ordered))], 0.0
    )


def lower_bound(problem: Problem) -> float:
    """Seconds that no assignment comes below.

    The larger of two: an item alone on the machine that does it first; and, for weights of the
    machines that sum to 1, the sum over items of the least weighted work (the dual of the fractional
    problem, its weights found by multiplicative updates).
    """
    if not problem.num_items:
        return 0.0
    kinds, counts = np.unique(problem.kind, return_counts=True)
    first = np.array([np.flatnonzero(problem.kind == kind)[0] for kind in kinds])
    work = problem.work[kinds]  # [kinds, items]
    alone = work * (1 + problem.behind[first][:, None]) + problem.start_s[first][:, None]
    best = float(alone.min(axis=0).max())
    typical = np.where(work < NOT_HELD, work, 0.0).sum(axis=1) / np.maximum(1, (work < NOT_HELD).sum(axis=1))
    weights = 1.0 / np.maximum(typical, 1e-30)
    weights /= (weights * counts).sum()
    for turn in range(ROUNDS):
        weighted = weights[:, None] * work
        kind = weighted.argmin(axis=0)
        taken = weighted[kind, np.arange(problem.num_items)]
        best = max(best, float(taken.sum()))
        loads = np.bincount(kind, weights=taken / weights[kind], minlength=len(kinds)) / counts
        mean = float(np.average(loads, weights=counts))
        if len(kinds) == 1 or not mean:
            break
        weights = weights * np.exp(np.clip(loads / mean - 1, -1, 1) * 0.3 / (1 + turn / 3))
        weights /= (weights * counts).sum()
    return best
