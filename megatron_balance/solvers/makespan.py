"""Items to machines of unlike speed so that the last machine is done early: the longest first, then
moves and swaps from the slowest machine until none helps.
"""

from __future__ import annotations

import heapq
import random
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import inf, prod

import numpy as np

from megatron_balance.ir.arrays import Floats, Ints

# Seconds by which a machine comes behind others for an item above its limit.
CAPPED = 1e9

# Items to machines of unlike speed: the problem, and seconds that no assignment comes below.
#
# Weights: for weights of the machines that sum to 1, an assignment takes at least the sum over items
# of the least weighted work (the dual of the fractional problem). Stairs: a machine that counts its
# largest item again (the first microbatch of a pipeline goes through all stages alone) takes at most
# T - start_s - behind x (its largest) of work in T seconds. The longest items go to few machines, and
# the next opens where those are full; if all are open and items are left, no assignment takes T
# seconds.
# Share above the bound at which a search ends; with more than `MANY` items, where the bound
# itself is known to a few thousandths.
CLOSE, CLOSE_MANY = 5e-4, 3e-3
# Least busy machines whose items are looked at for swaps.
PARTNERS = 8
# Moves and swaps of one search.
MOST_STEPS = 400
# Share of the seconds that a move or swap must gain.
LEAST_GAIN, LEAST_GAIN_MANY = 1e-9, 3e-4
# Items from which fewer searches do.
MANY = 150
# Starts of a problem that is not large: Hydraulis' Alg. 1 in random orders, and almost the
# longest first with random limits.
TRIALS, SHAKEN = 100, 40
# Starts that are searched from, the earliest done first.
IMPROVED = 10
# Share of the bound from which the longest item alone makes it.
ALONE = 0.97
# By how much stairs are higher than the bound, with many items.
HEIGHT = 0.003
# Heights with fewer items, which are less like fractional ones; all are tried.
HEIGHTS = (0.001, 0.003, 0.01, 0.02, 0.04, 0.08, 0.16)
# Items up to which a depth-first search follows, of at most `NODES` nodes.
FEW = 24
NODES = 20_000
# Corrections of the machines' weights ahead of a search, fewer with many items.
ROUNDS_FEW, ROUNDS_AHEAD = 24, 8


def assign(problem: MachinesProblem, seed: int = 0, searches: int = IMPROVED) -> Ints:
    """The machine of each item [items], equal on every host. `searches`: starts to search from."""
    if not problem.num_items:
        return np.zeros(0, dtype=np.int64)
    few = problem.num_items <= MANY
    bound, weights = _by_weights(problem, ROUNDS_FEW if few else ROUNDS_AHEAD)
    stairs = _Stairs.of(problem, weights)
    least_s = bound if stairs is None else stairs.least_s(bound, CLOSE)
    longest_first = np.argsort(-problem.work.min(axis=0), kind="stable")
    if not few:
        return _of_many(problem, longest_first, stairs, least_s)
    enough = (1 + CLOSE) * least_s
    best = greedy(problem, longest_first.tolist())
    improve(problem, best, enough)
    best_s = float(problem.seconds(best).max())
    if searches > 1 and best_s > enough:
        limits = None if stairs is None else _limits(problem, longest_first, stairs, least_s)
        starts = _starts(problem, longest_first, limits, seed)[:searches]
        for found in [_by_price(problem, longest_first, weights), *starts]:
            improve(problem, found, enough)
            seconds = float(problem.seconds(found).max())
            if seconds < best_s * (1 - 1e-9):
                best, best_s = found, seconds
            if best_s <= enough:
                break
    if problem.num_items <= FEW and best_s > enough and searches > 1:
        return _searched(problem, longest_first.tolist(), best, best_s)
    return best


def _of_many(problem: MachinesProblem, longest_first: Ints, stairs: _Stairs | None, least_s: float) -> Ints:
    """One search, from machines that are opened by stairs where any counts its largest item again."""
    order: list[int] = longest_first.tolist()
    enough_s = (1 + CLOSE_MANY) * least_s
    found = greedy(problem, order) if stairs is None or _alone_s(problem) > ALONE * least_s else None
    # Where one item alone takes the time, machines need not be filled as far as stairs do.
    if stairs is not None and (found is None or float(problem.seconds(found).max()) > enough_s):
        full_s = (1 + HEIGHT) * least_s
        found = greedy(problem, order, stairs.climb(full_s) or [], full_s)
    assert found is not None
    improve(problem, found, enough_s, LEAST_GAIN_MANY)
    return found


def _alone_s(problem: MachinesProblem) -> float:
    kind, first = np.unique(problem.kind, return_index=True)
    again = problem.behind[first][:, None] * problem.again[kind]
    return float((problem.work[kind] + again + problem.start_s[first][:, None]).min(axis=0).max())


def _by_price(problem: MachinesProblem, longest_first: Ints, weights: Floats) -> Ints:
    """The longest first, each among the machines of the kind with the least weighted work."""
    kind = (weights[:, None] * problem.work).argmin(axis=0)
    only = np.where(np.arange(len(weights))[:, None] == kind, problem.work, NOT_HELD)
    return greedy(replace(problem, work=only), longest_first.tolist())


def _limits(problem: MachinesProblem, longest_first: Ints, stairs: _Stairs, least_s: float) -> Floats:
    """Largest items of each machine where stairs of different heights open it [limits, machines]."""
    found = [np.full(problem.num_machines, np.inf)]
    for height in HEIGHTS:
        opened = stairs.climb((1 + height) * least_s)
        if opened is not None:
            caps = np.where(problem.behind > 0, 0.0, np.inf)
            for place, machine in opened:
                caps[machine] = problem.sizes[longest_first[place]]
            found.append(caps)
    return np.array(found)


def _starts(problem: MachinesProblem, longest_first: Ints, limits: Floats | None, seed: int) -> list[Ints]:
    rng = random.Random(seed)
    shaken = [_shaken(longest_first.tolist(), rng) for _ in range(SHAKEN)]
    orders, caps = np.array(shaken), None
    if limits is not None:
        orders = np.array([longest_first] * len(limits) + shaken)
        caps = np.concatenate([limits, [_caps(problem, rng) for _ in range(SHAKEN)]])
    ours, tried = in_turn(problem, orders, caps), trials(problem, TRIALS, rng)
    found, seconds = np.concatenate([ours[0], tried[0]]), np.concatenate([ours[1], tried[1]])
    found, first = np.unique(found, axis=0, return_index=True)
    last = seconds[first].max(axis=1)
    return [found[at] for at in np.argsort(last, kind="stable").tolist()]


def _searched(problem: MachinesProblem, order: Sequence[int], best: Ints, best_s: float) -> Ints:
    """The best of a depth-first search of at most `NODES` nodes."""
    work, again = problem.work[problem.kind].T.tolist(), problem.again[problem.kind].T.tolist()
    behind, start_s, kinds = problem.behind.tolist(), problem.start_s.tolist(), problem.kind.tolist()
    total, largest = [0.0] * problem.num_machines, [0.0] * problem.num_machines
    chosen = [0] * problem.num_items
    nodes = 0

    def seconds(machine: int, more: float, counted: float) -> float:
        return total[machine] + more + behind[machine] * max(largest[machine], counted) + start_s[machine]

    def place(depth: int, slowest: float) -> None:
        nonlocal best, best_s, nodes
        if depth == len(order):
            best, best_s = np.array(chosen, dtype=np.int64), slowest
            return
        item = order[depth]
        alike: set[tuple[float, ...]] = set()
        tried: list[tuple[float, int]] = []
        for machine, more in enumerate(work[item]):
            state = (kinds[machine], behind[machine], start_s[machine], total[machine], largest[machine])
            if more < NOT_HELD and state not in alike:
                alike.add(state)
                tried.append((seconds(machine, more, again[item][machine]), machine))
        for then, machine in sorted(tried):
            nodes += 1
            if max(then, slowest) >= best_s * (1 - 1e-12) or nodes > NODES:
                return
            before = total[machine], largest[machine]
            total[machine] += work[item][machine]
            largest[machine] = max(largest[machine], again[item][machine])
            chosen[item] = machine
            place(depth + 1, max(then, slowest))
            total[machine], largest[machine] = before

    place(0, 0.0)
    return best


def _caps(problem: MachinesProblem, rng: random.Random) -> Floats:
    """Sizes [machines] above which those that count their largest item again take none, at random."""
    sizes = np.sort(problem.sizes)
    shared = float(sizes[rng.randrange(len(sizes))])
    caps = np.full(problem.num_machines, np.inf)
    for machine in np.flatnonzero(problem.behind).tolist():
        draw = rng.random()
        if draw < 0.7:
            caps[machine] = shared if draw < 0.4 else float(sizes[rng.randrange(len(sizes))])
    return caps


def _shaken(order: Sequence[int], rng: random.Random) -> list[int]:
    keys = [place * rng.uniform(0.5, 1.5) + rng.uniform(0, 3) for place in range(len(order))]
    return [order[place] for place in sorted(range(len(order)), key=keys.__getitem__)]


def trials(problem: MachinesProblem, count: int, rng: random.Random) -> tuple[Ints, Floats]:
    """As `in_turn`, by Hydraulis' Alg. 1: random order, each to where the slowest is least slow."""
    keys = np.array([rng.random() for _ in range(count * problem.num_items)]).reshape(count, problem.num_items)
    return in_turn(problem, np.argsort(keys, axis=1, kind="stable"), None, slowest=True)


def in_turn(
    problem: MachinesProblem, orders: Ints, caps: Floats | None, *, slowest: bool = False
) -> tuple[Ints, Floats]:
    """Each item in turn to the machine that would then be done first; several orders side by side.

    `orders`: items in turn [orders, items]; one: the same for all limits. `caps` [orders,
    machines]: sizes above which a machine takes an item only if no other does. `slowest`: as in
    `trials`. Returns machines [orders, items], and seconds of each machine [orders, machines].
    """
    # [items, machines]: a row is what one item takes on every machine.
    work_of = np.ascontiguousarray(problem.work[problem.kind].T)
    again_of = problem.behind * problem.again[problem.kind].T
    count = max(len(orders), 0 if caps is None else len(caps))
    # Of a machine that has any item.
    load = np.repeat(problem.start_s[None], count, axis=0)
    again = np.zeros((count, problem.num_machines))
    found = np.empty((count, problem.num_items), dtype=np.int64)
    top = np.zeros((count, 1))
    row, counted = np.arange(count), bool(problem.behind.any())
    over = None if caps is None else CAPPED * (problem.sizes[orders.T][:, :, None] > caps)
    for turn, items in enumerate(orders.T):
        work = work_of[items]
        # [orders, machines].
        then = load + work
        more = np.maximum(again, again_of[items]) if counted else again
        if counted:
            then += more
        if slowest:
            np.maximum(then, top, out=then)
        if over is not None:
            then += over[turn]
        # One machine for each order; ties go to the lower number.
        at = then.argmin(axis=1)
        cell = (row, at)
        found[row, items] = at
        load[cell] += work_of[items, at]
        if counted:
            again[cell] = more[cell]
        if slowest:
            top = then[cell][:, None]
    used = load > problem.start_s
    return found, np.where(used, load + again, 0.0)


def greedy(problem: MachinesProblem, order: Sequence[int], opened: Opened | None = None, full_s: float = inf) -> Ints:
    """Each item in turn to the machine that would then be done first.

    `opened`: machines that take no item before a place in `order`, unless no other would be done
    with it in `full_s`; others that count their largest item again come with the last of them.
    """
    behind, start_s = problem.behind.tolist(), problem.start_s.tolist()
    kinds: list[int] = problem.kind.tolist()
    work: list[list[float]] = problem.work.T.tolist()
    again = work if problem.floor is None else problem.again.T.tolist()
    machine_of: list[int] = [0] * problem.num_items
    largest = [0.0] * problem.num_machines
    busy: list[list[tuple[float, int]]] = [[] for _ in problem.work]
    idle: list[list[int]] = [[] for _ in problem.work]
    closed = [(0, machine) for machine in range(problem.num_machines)]
    if opened is not None:
        place_of, last = {machine: place for place, machine in opened}, max((place for place, _ in opened), default=0)
        closed = [(place_of.get(machine, last if behind[machine] else 0), machine) for _, machine in closed]
    closed.sort(reverse=True)
    sides = list(zip(busy, idle, strict=True))
    for turn, item in enumerate(order):
        while closed and closed[-1][0] <= turn:
            machine = closed.pop()[1]
            idle[kinds[machine]].insert(0, machine)
        best, best_s, is_idle = _first_done(work[item], again[item], sides, largest, behind, start_s)
        while closed and best_s > full_s:
            machine = closed.pop()[1]
            idle[kinds[machine]].insert(0, machine)
            best, best_s, is_idle = _first_done(work[item], again[item], sides, largest, behind, start_s)
        assert best >= 0, "an item that no machine holds"
        kind = kinds[best]
        machine_of[item] = best
        largest[best] = max(largest[best], again[item][kind])
        if is_idle:
            idle[kind].pop()
            heapq.heappush(busy[kind], (best_s, best))
        else:
            heapq.heapreplace(busy[kind], (best_s, best))
    return np.array(machine_of, dtype=np.int64)


def _first_done(
    work: Sequence[float],
    again: Sequence[float],
    sides: Sequence[tuple[list[tuple[float, int]], list[int]]],
    largest: Sequence[float],
    behind: Sequence[float],
    start_s: Sequence[float],
) -> tuple[int, float, bool]:
    """The machine that would be done first with an item, when, and whether it has none yet; -1:
    there is none. `sides`: by kind, machines that have items, as a heap, and those that have none.
    """
    best, best_s, is_idle = -1, NOT_HELD, False
    for own, counted, (used, unused) in zip(work, again, sides, strict=True):
        if own >= best_s:
            continue
        if used:
            then, machine = used[0]
            then += own
            if counted > largest[machine]:
                then += behind[machine] * (counted - largest[machine])
            if then < best_s:
                best, best_s, is_idle = machine, then, False
        if unused:
            machine = unused[-1]
            then = own + behind[machine] * counted + start_s[machine]
            if then < best_s:
                best, best_s, is_idle = machine, then, True
    return best, best_s, is_idle


def improve(problem: MachinesProblem, machine_of: Ints, enough: float, gain: float = LEAST_GAIN) -> None:
    """Move an item of the slowest machine to another, or swap it, as long as the later of the two
    gains a share of `gain`, and down to `enough` seconds. Changes `machine_of`.
    """
    state = _MachineLoads.of(problem, machine_of)
    for _ in range(MOST_STEPS):
        slowest = int(state.seconds.argmax())
        slowest_s = float(state.seconds[slowest])
        if slowest_s <= enough:
            return
        mine = state.items[slowest]
        found_s, item, target = state.moved(slowest, mine)
        other = -1
        near: list[int] = np.argsort(state.seconds, kind="stable")[:PARTNERS].tolist()
        beside: list[Ints] = [state.items[machine] for machine in near if machine != slowest]
        others: Ints = np.concatenate(beside or [mine[:0]])
        if len(others):
            swapped = state.swapped(slowest, mine, others)
            at = int(swapped.argmin())
            if swapped.flat[at] < found_s:
                row, column = divmod(at, len(others))
                found_s, item, other = float(swapped.flat[at]), int(mine[row]), int(others[column])
                target = int(machine_of[other])
        if found_s >= slowest_s * (1 - gain):
            return
        machine_of[item] = target
        if other >= 0:
            machine_of[other] = slowest
        state.update(slowest)
        state.update(target)


@dataclass(slots=True)
class _MachineLoads:
    """Machines as a search changes them. `own`, `rest` [items]: work of each where it is, and what
    the largest other there counts again.
    """

    problem: MachinesProblem
    machine_of: Ints
    work_of: Floats
    again_of: Floats
    items: list[Ints]
    seconds: Floats
    total: Floats
    largest: Floats
    own: Floats
    rest: Floats

    @classmethod
    def of(cls, problem: MachinesProblem, machine_of: Ints) -> _MachineLoads:
        machines = np.zeros((3, problem.num_machines))
        items = np.zeros((2, problem.num_items))
        work_of = problem.work[problem.kind]
        again_of = work_of if problem.floor is None else problem.again[problem.kind]
        of = [machine_of] * problem.num_machines
        state = cls(problem, machine_of, work_of, again_of, of, *machines, *items)
        for machine in range(problem.num_machines):
            state.update(machine)
        return state

    def update(self, machine: int) -> None:
        items = self.items[machine] = (self.machine_of == machine).nonzero()[0]
        own, again = self.work_of[machine, items], self.again_of[machine, items]
        self.own[items] = own
        if not len(items):
            self.total[machine] = self.largest[machine] = self.seconds[machine] = 0.0
            return
        first = int(again.argmax())
        largest = float(again[first])
        self.rest[items] = largest
        # The largest of the others: what counts again once the largest is gone.
        again[first] = 0.0
        self.rest[items[first]] = again.max()
        total = float(own.sum())
        self.total[machine], self.largest[machine] = total, largest
        self.seconds[machine] = total + self.problem.behind[machine] * largest + self.problem.start_s[machine]

    def moved(self, slowest: int, mine: Ints) -> tuple[float, int, int]:
        """Seconds of the later of two machines once the best item moved, that item, and whereto."""
        problem, left = self.problem, self.rest[mine]
        without = self.total[slowest] - self.own[mine] + problem.behind[slowest] * left
        without += problem.start_s[slowest] * (left > 0)
        brought = self.work_of[:, mine]
        with_it = np.maximum(self.largest[:, None], self.again_of[:, mine]) * problem.behind[:, None] + brought
        with_it += (self.total + problem.start_s)[:, None]
        # [machines, mine].
        later = np.maximum(with_it, without)
        later[slowest] = np.inf
        at = int(later.argmin())
        return float(later.flat[at]), int(mine[at % len(mine)]), at // len(mine)

    def swapped(self, slowest: int, mine: Ints, others: Ints) -> Floats:
        """Seconds of the later of two machines [mine, others] that have swapped an item each."""
        problem, theirs = self.problem, self.machine_of[others]
        comes = self.work_of[slowest, others]
        without = self.total[slowest] - self.own[mine] + problem.start_s[slowest]
        here = without[:, None] + comes
        if problem.behind[slowest]:
            here += problem.behind[slowest] * np.maximum(self.rest[mine][:, None], self.again_of[slowest, others])
        # [mine, others]: what each of mine takes on the machine of each other.
        goes = self.work_of[theirs[None, :], mine[:, None]]
        behind = problem.behind[theirs]
        there = goes + (self.total[theirs] - self.own[others] + problem.start_s[theirs])
        if behind.any():
            there += behind * np.maximum(self.rest[others], self.again_of[theirs[None, :], mine[:, None]])
        return np.maximum(here, there, out=here)


# Groups of items that are alike where the machines' weights are corrected.
GROUPS = 48
# Powers of weighted work by which kinds share items, in the first and the last round; and the
# least load or weight of a kind over the mean or the largest.
SHARPNESS, LEAST_SHARE = (2.0, 500.0), 1e-6
# Numbers of open machines by kind, above which stairs are not climbed.
MOST_STATES = 20_000
# Share of the bound by weights that is added first, and twice as much ever after, until the items
# fit; and the share to which the seconds are then known.
FIRST_STEP, CLOSEST = 0.01, 1e-5
# In the order of opening: the place of the first item among the longest first, and the machine.
Opened = list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class _Stairs:
    """Machines that count their largest item again, opened as late as the longer items allow;
    "place": in the order of the items, the longest first. `costs`: of each such kind the weight,
    how often the largest counts, seconds to start, and least seconds [places] that count again.
    `before` [places]: weighted work; `free` [places]: weight of the other machines. `steps`:
    states, and where one more machine leads.
    """

    machines: tuple[list[int], ...]
    costs: tuple[tuple[float, float, float, list[float]], ...]
    before: Floats
    free: Floats
    steps: tuple[tuple[int, tuple[tuple[int, int], ...]], ...]

    @classmethod
    def of(cls, problem: MachinesProblem, weights: Floats) -> _Stairs | None:
        """None: nothing counts again, or there are more than `MOST_STATES`."""
        kinds, first, counts = np.unique(problem.kind, return_index=True, return_counts=True)
        order = np.argsort(-problem.work.min(axis=0), kind="stable")
        work, weight = problem.work[kinds][:, order], weights[kinds]
        held = work < NOT_HELD
        counts_again = (problem.behind[first] > 0) & held.any(axis=1)
        again: list[int] = np.flatnonzero(counts_again).tolist()
        if not again or prod(int(counts[kind]) + 1 for kind in again) > MOST_STATES:
            return None
        least = np.minimum.accumulate(np.where(held, problem.again[kinds][:, order], np.inf), axis=1)
        up_to = np.logical_or.accumulate(held, axis=1)[~counts_again]
        costs = weight, problem.behind[first], problem.start_s[first], least
        return cls(
            tuple(np.flatnonzero(problem.kind == kinds[kind]).tolist() for kind in again),
            tuple(zip(*(each[again].tolist() for each in costs), strict=True)),
            np.cumsum((weight[:, None] * work).min(axis=0)),
            ((weight * counts)[~counts_again, None] * up_to).sum(axis=0),
            _steps([int(counts[kind]) for kind in again]),
        )

    def least_s(self, bound: float, close: float = CLOSEST) -> float:
        """Seconds that no assignment comes below, at least `bound`, known to the share `close`."""
        if self.climb(bound) is not None:
            return bound
        low, step = bound, FIRST_STEP * bound
        while self.climb(low + step) is None:
            low, step = low + step, 2 * step
        high = low + step
        while high - low > close * bound:
            middle = (low + high) / 2
            low, high = (middle, high) if self.climb(middle) is None else (low, middle)
        return low

    def climb(self, seconds: float) -> Opened | None:
        """The machines that are open when all items fit into so many seconds; None: they do not."""
        needed: list[float] = np.maximum.accumulate(self.before - self.free * seconds).tolist()
        room = [-inf] * len(self.steps)
        came: list[tuple[int, int, int]] = [(-1, -1, -1)] * len(self.steps)
        room[0] = 0.0
        for state, more in self.steps:
            # The first item that the open machines have no room for opens the next one.
            place = bisect_right(needed, room[state])
            if place == len(needed):
                return self._way(state, came)
            for kind, target in more:
                weight, behind, start_s, least = self.costs[kind]
                left = seconds - start_s - behind * least[place]
                then = room[state] + weight * left
                if left > 0 and then > room[target]:
                    room[target], came[target] = then, (state, kind, place)
        return None

    def _way(self, state: int, came: Sequence[tuple[int, int, int]]) -> Opened:
        way: list[tuple[int, int]] = []
        while state:
            state, kind, place = came[state]
            way.append((place, kind))
        left = [iter(own) for own in self.machines]
        return [(place, next(left[kind])) for place, kind in reversed(way)]


def _steps(counts: Sequence[int]) -> tuple[tuple[int, tuple[tuple[int, int], ...]], ...]:
    """The states of so many machines by kind, in mixed radix, and where one more machine leads."""
    # Mixed radix: one more machine of a kind adds its stride to the state.
    strides = [prod(number + 1 for number in counts[at + 1 :]) for at in range(len(counts))]
    states = list(enumerate(product(*(range(number + 1) for number in counts))))
    states.sort(key=lambda each: sum(each[1]))

    def more(state: int, numbers: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
        return tuple((kind, state + strides[kind]) for kind, number in enumerate(numbers) if number < counts[kind])

    return tuple((state, more(state, numbers)) for state, numbers in states)


def _by_weights(problem: MachinesProblem, rounds: int) -> tuple[float, Floats]:
    """The bound by weights, the longest item counting again, and the weights [kinds]."""
    kinds, first, counts = np.unique(problem.kind, return_index=True, return_counts=True)
    # [kinds, items].
    work = problem.work[kinds]
    alone = work + problem.behind[first][:, None] * problem.again[kinds] + problem.start_s[first][:, None]
    least = alone.min(axis=0)
    longest = int(least.argmax())
    found = _dual_weights(work, counts, rounds)
    # [kinds, items] by [kinds, 1]: an item goes where it weighs least.
    weighted = found[:, None] * work
    shared = weighted.min(axis=0)
    again = (found[:, None] * alone)[:, longest].min() - shared[longest]
    weights = np.zeros(len(problem.work))
    weights[kinds] = found
    return max(float(least[longest]), float(shared.sum() + again)), weights


def _dual_weights(work: Floats, counts: Ints, rounds: int) -> Floats:
    """Weights [kinds] (`counts` of them sum to 1) with much least weighted work."""
    typical = np.where(work < NOT_HELD, work, 0.0).sum(axis=1) / np.maximum(1, (work < NOT_HELD).sum(axis=1))
    weights = 1.0 / np.maximum(typical, 1e-30)
    weights /= (weights * counts).sum()
    if len(counts) == 1:
        return weights
    least = work.min(axis=0)
    order = np.argsort(least, kind="stable")
    part: Floats = np.cumsum(least[order])
    shares: Floats = part[-1] * np.linspace(0.0, 1.0, GROUPS, endpoint=False)
    edges: Ints = np.unique(np.searchsorted(part, shares, side="right").astype(np.int64))
    # Items of like work are one column: the dual needs their sums alone.
    grouped: Floats = np.add.reduceat(work[:, order], np.minimum(edges, len(order) - 1), axis=1)
    each, best, best_s = counts.astype(np.float64), weights, 0.0
    logs = np.log(grouped)
    for turn in range(rounds):
        sharpness = SHARPNESS[0] * (SHARPNESS[1] / SHARPNESS[0]) ** (turn / rounds)
        total = float((weights[:, None] * grouped).min(axis=0).sum())
        if total > best_s:
            best, best_s = weights, total
        # Softmin over kinds: sharper each round, so that items settle on one kind.
        price = np.log(weights)[:, None] + logs
        share = np.exp(-sharpness * (price - price.min(axis=0)))
        loads = (share / share.sum(axis=0) * grouped).sum(axis=1) / each
        mean = loads.mean()
        weights = weights * np.maximum(loads / mean, LEAST_SHARE) ** (1 / (1 + sharpness / 2))
        weights = np.maximum(weights, LEAST_SHARE * weights.max())
        # Logarithms differ in their last bit from processor to processor; plans must not.
        weights = weights.astype(np.float32).astype(np.float64)
        weights /= (weights * each).sum()
    return best


# Seconds in `MachinesProblem.work` where an item is not held: finite, so that sums stay numbers.
NOT_HELD = 1e15


@dataclass(frozen=True, slots=True)
class MachinesProblem:
    """`work` [kinds, items]: seconds of each item; `NOT_HELD`: not there. `kind`, `behind`,
    `start_s` [machines]: its kind, how often its largest item counts again, and seconds of a
    machine that has any item. `sizes` [items]: what limits are in.
    """

    work: Floats
    kind: Ints
    behind: Floats
    start_s: Floats
    sizes: Ints
    floor: Floats | None = None
    """[kinds]: seconds that the largest item counts at least where it counts again; None: its work."""

    @property
    def again(self) -> Floats:
        return self.work if self.floor is None else np.maximum(self.work, self.floor[:, None])

    @property
    def num_items(self) -> int:
        return self.work.shape[1]

    @property
    def num_machines(self) -> int:
        return len(self.kind)

    def seconds(self, machine_of: Ints) -> Floats:
        """Seconds of each machine [machines]; `machine_of` [items]."""
        at = self.kind[machine_of], np.arange(self.num_items)
        total = np.bincount(machine_of, weights=self.work[at], minlength=self.num_machines)
        largest = np.zeros(self.num_machines)
        np.maximum.at(largest, machine_of, self.again[at])
        return total + self.behind * largest + self.start_s * (largest > 0)
