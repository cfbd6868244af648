"""Items to machines of unlike speed so that the last machine is done early: the longest first, then
moves and swaps from the slowest machine until none helps.

Beside its items a machine may be charged for its largest one again (`behind` times): the first
microbatch of a pipeline goes through all its stages alone.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

CAPPED = 1e9
"""Seconds by which a machine comes behind others for an item above its limit."""
NOT_HELD = 1e15
"""Seconds in `Problem.work` where an item is not held: finite, so that sums stay numbers."""
CLOSE, CLOSE_MANY = 5e-4, 3e-3
"""Share above the bound at which a search ends; with more than `MANY` items, where the bound itself
is known to a few thousandths."""
PARTNERS = 8
"""Least busy machines whose items are looked at for swaps."""
MOST_STEPS = 400
"""Moves and swaps of one search."""
LEAST_GAIN, LEAST_GAIN_MANY = 1e-9, 3e-4
"""Share of the seconds that a move or swap must gain."""
MANY = 150
"""Items from which fewer searches do."""
TRIALS, SHAKEN = 100, 40
"""Starts of a problem that is not large: Hydraulis' Alg. 1 in random orders, and almost the longest
first with random limits."""
IMPROVED = 10
"""Starts that are searched from, the earliest done first."""
HEAD = 16
"""Of many items, these and two a machine decide between limits."""
FEW = 24
"""Items up to which a depth-first search follows, of at most `NODES` nodes."""
NODES = 20_000
SHARES = (0.02, 0.04, 0.06, 0.09, 0.12, 0.18, 0.25, 0.35, 0.5)
"""Of the bound: what a machine's largest item may take beside its items in the first starts."""
ROUNDS, ROUNDS_FEW, ROUNDS_AHEAD, GROUPS = 80, 24, 8, 48
"""Of the bound: times that the machines' weights are corrected, fewer ahead of a search; and groups
of items that are alike for that."""
SHARPNESS, LEAST_SHARE = (2.0, 500.0), 1e-6
"""Of the bound: powers of weighted work by which kinds share items, in the first and the last round;
and the least load or weight of a kind over the mean or the largest."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Items and machines.

    `work` [kinds, items]: seconds of each item on a machine of each kind; `NOT_HELD`: not there.
    `kind`, `behind`, `start_s` [machines]: its kind, how often its largest item counts again, and
    seconds of a machine that has any item. `sizes` [items]: what limits are in.
    """

    work: Floats
    kind: Ints
    behind: Floats
    start_s: Floats
    sizes: Ints

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


def assign(problem: Problem, seed: int = 0, searches: int = IMPROVED) -> Ints:
    """The machine of each item [items]. `searches`: starts that are searched from, at most.

    Equal on every host for equal input: ties go to the machine and the item with the lower number.
    """
    if not problem.num_items:
        return np.zeros(0, dtype=np.int64)
    few = problem.num_items <= MANY
    bound, weights = _bound(problem, ROUNDS_FEW if few else ROUNDS_AHEAD)
    enough = (1 + (CLOSE if few else CLOSE_MANY)) * bound
    longest_first = np.argsort(-problem.work.min(axis=0), kind="stable")
    if not few:
        head = _limited_head(problem, longest_first, bound, weights) if problem.behind.any() else None
        found = greedy(problem, longest_first.tolist(), head)
        improve(problem, found, enough, LEAST_GAIN_MANY)
        return found
    best = greedy(problem, longest_first.tolist())
    improve(problem, best, enough)
    best_s = float(problem.seconds(best).max())
    if searches > 1 and best_s > enough:
        starts = _starts(problem, longest_first, bound, seed)[:searches]
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


def _limited_head(problem: Problem, longest_first: Ints, bound: float, weights: Floats) -> Ints:
    """Machines of the longest items under the best of some limits, or without; `weights`: of a
    machine of each kind.

    The best leaves the least seconds by the dual bound, for the items that are left.
    """
    head = longest_first[: HEAD + 2 * problem.num_machines]
    rest = longest_first[len(head) :]
    some = Problem(problem.work[:, head], problem.kind, problem.behind, problem.start_s, problem.sizes[head])
    unlimited = np.full(problem.num_machines, np.inf)
    caps = np.concatenate([unlimited[None], _fill_caps(problem, bound)])
    found, seconds = in_turn(some, np.arange(len(head))[None], caps)
    left = (weights[:, None] * problem.work[:, rest]).min(axis=0).sum()
    return found[int(np.maximum(seconds.max(axis=1), seconds @ weights[problem.kind] + left).argmin())]


def _by_price(problem: Problem, longest_first: Ints, weights: Floats) -> Ints:
    """The longest first, each among the machines of the kind with the least weighted work; `weights`:
    of a machine of each kind.

    Where all machines end together, what is left to gain is that items lie where they are cheap.
    """
    kind = (weights[:, None] * problem.work).argmin(axis=0)
    only = np.where(np.arange(len(weights))[:, None] == kind, problem.work, NOT_HELD)
    return greedy(replace(problem, work=only), longest_first.tolist())


def _starts(problem: Problem, longest_first: Ints, bound: float, seed: int) -> list[Ints]:
    """Assignments to search from, the earliest done first: the longest first under limits of the
    largest items, orders and limits at random, and Alg. 1's trials.
    """
    rng = random.Random(seed)
    shaken = [_shaken(longest_first.tolist(), rng) for _ in range(SHAKEN)]
    orders, caps = np.array(shaken), None
    if problem.behind.any():
        limits = _fill_caps(problem, bound)
        orders = np.array([longest_first] * len(limits) + shaken)
        caps = np.concatenate([limits, [_caps(problem, rng) for _ in range(SHAKEN)]])
    ours, tried = in_turn(problem, orders, caps), trials(problem, TRIALS, rng)
    found, seconds = np.concatenate([ours[0], tried[0]]), np.concatenate([ours[1], tried[1]])
    found, first = np.unique(found, axis=0, return_index=True)
    last = seconds[first].max(axis=1)
    return [found[at] for at in np.argsort(last, kind="stable").tolist()]


def _searched(problem: Problem, order: Sequence[int], best: Ints, best_s: float) -> Ints:
    """The best of a depth-first search of at most `NODES` nodes, `best` being known; of machines that
    are alike so far one is tried.
    """
    work = problem.work[problem.kind].T.tolist()
    behind, start_s, kinds = problem.behind.tolist(), problem.start_s.tolist(), problem.kind.tolist()
    total, largest = [0.0] * problem.num_machines, [0.0] * problem.num_machines
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
            state = (kinds[machine], behind[machine], start_s[machine], total[machine], largest[machine])
            if more < NOT_HELD and state not in alike:
                alike.add(state)
                tried.append((seconds(machine, more), machine))
        for then, machine in sorted(tried):
            nodes += 1
            if max(then, slowest) >= best_s * (1 - 1e-12) or nodes > NODES:
                return
            before = total[machine], largest[machine]
            total[machine] += work[item][machine]
            largest[machine] = max(largest[machine], work[item][machine])
            chosen[item] = machine
            place(depth + 1, max(then, slowest))
            total[machine], largest[machine] = before

    place(0, 0.0)
    return best


def _fill_caps(problem: Problem, bound: float) -> Floats:
    """Sizes above which counting an item again would take a machine longer than each of `SHARES` of
    the bound [limits, machines].

    The first machine of each kind takes any; in the second half only of kinds that count least.
    """
    again = problem.behind[:, None] * problem.work[problem.kind]
    caps = np.array([np.where(again <= share * bound, problem.sizes, 0.0).max(axis=1) for share in SHARES])
    first = np.unique(problem.kind, return_index=True)[1]
    least = first[problem.behind[first] == problem.behind.min()]
    caps = np.concatenate([caps, caps])
    caps[: len(SHARES), first] = np.inf
    caps[len(SHARES) :, least] = np.inf
    caps[:, problem.behind == 0] = np.inf
    return caps


def _caps(problem: Problem, rng: random.Random) -> Floats:
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
    """The order with every item moved a little, the more the further behind it stands."""
    keys = [place * rng.uniform(0.5, 1.5) + rng.uniform(0, 3) for place in range(len(order))]
    return [order[place] for place in sorted(range(len(order)), key=keys.__getitem__)]


def trials(problem: Problem, count: int, rng: random.Random) -> tuple[Ints, Floats]:
    """As `in_turn`, by Hydraulis' Alg. 1: items in random order, each to the first machine with which
    the slowest is least slow.
    """
    keys = np.array([rng.random() for _ in range(count * problem.num_items)]).reshape(count, problem.num_items)
    return in_turn(problem, np.argsort(keys, axis=1, kind="stable"), None, slowest=True)


def in_turn(problem: Problem, orders: Ints, caps: Floats | None, *, slowest: bool = False) -> tuple[Ints, Floats]:
    """Each item in turn to the machine that would then be done first; several orders side by side.

    Args:
        problem: items and machines.
        orders: items in turn [orders, items]; one: the same for all limits.
        caps: sizes above which a machine takes an item only if no other does [orders, machines].
        slowest: to the first machine with which the slowest of all is least slow.

    Returns:
        Machines [orders, items], and seconds of each machine [orders, machines].
    """
    work_of = np.ascontiguousarray(problem.work[problem.kind].T)
    again_of = problem.behind * work_of
    count = max(len(orders), 0 if caps is None else len(caps))
    load = np.repeat(problem.start_s[None], count, axis=0)  # of a machine that has any item
    again = np.zeros((count, problem.num_machines))
    found = np.empty((count, problem.num_items), dtype=np.int64)
    top = np.zeros((count, 1))
    row, counted = np.arange(count), bool(problem.behind.any())
    over = None if caps is None else CAPPED * (problem.sizes[orders.T][:, :, None] > caps)
    for turn, items in enumerate(orders.T):
        work = work_of[items]
        then = load + work  # [orders, machines]
        more = np.maximum(again, again_of[items]) if counted else again
        if counted:
            then += more
        if slowest:
            np.maximum(then, top, out=then)
        if over is not None:
            then += over[turn]
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


def greedy(problem: Problem, order: Sequence[int], head: Ints | None = None) -> Ints:
    """Each item in turn to the machine that would then be done first: the least busy of a kind, or one
    that has none yet.

    `head`: machines of the first items in `order`, as they are.
    """
    behind, start_s = problem.behind.tolist(), problem.start_s.tolist()
    kinds: list[int] = problem.kind.tolist()
    work: list[list[float]] = problem.work.T.tolist()
    machine_of, known = np.zeros(problem.num_items, dtype=np.int64), 0
    largest, busy, idle = [0.0] * problem.num_machines, *_queues(problem, [0.0] * problem.num_machines)
    if head is not None:
        known = len(head)
        first = list(order[:known])
        machine_of[first] = head
        some = Problem(problem.work[:, first], problem.kind, problem.behind, problem.start_s, problem.sizes[first])
        busy, idle = _queues(problem, some.seconds(head).tolist())
        largest = _two_largest(some.work[problem.kind[head], np.arange(known)], head, problem.num_machines)[0].tolist()
    sides = list(zip(busy, idle, strict=True))
    for item in order[known:]:
        best, best_s, is_idle = -1, NOT_HELD, False
        for own, (used, unused) in zip(work[item], sides, strict=True):
            if own >= best_s:
                continue
            if used:
                then, machine = used[0]
                then += own
                if own > largest[machine]:
                    then += behind[machine] * (own - largest[machine])
                if then < best_s:
                    best, best_s, is_idle = machine, then, False
            if unused:
                machine = unused[-1]
                then = own * (1 + behind[machine]) + start_s[machine]
                if then < best_s:
                    best, best_s, is_idle = machine, then, True
        assert best >= 0, "an item that no machine holds"
        kind = kinds[best]
        machine_of[item] = best
        largest[best] = max(largest[best], work[item][kind])
        if is_idle:
            idle[kind].pop()
            heapq.heappush(busy[kind], (best_s, best))
        else:
            heapq.heapreplace(busy[kind], (best_s, best))
    return machine_of


def _queues(problem: Problem, seconds: Sequence[float]) -> tuple[list[list[tuple[float, int]]], list[list[int]]]:
    """By kind, a heap of the machines that have items, by their `seconds`, and the others, the last
    first.
    """
    busy: list[list[tuple[float, int]]] = [[] for _ in problem.work]
    idle: list[list[int]] = [[] for _ in problem.work]
    kinds: list[int] = problem.kind.tolist()
    for machine, kind in reversed(list(enumerate(kinds))):
        if seconds[machine]:
            heapq.heappush(busy[kind], (seconds[machine], machine))
        else:
            idle[kind].append(machine)
    return busy, idle


def improve(problem: Problem, machine_of: Ints, enough: float, gain: float = LEAST_GAIN) -> None:
    """Move an item of the slowest machine to another, or swap it for one of another's, as long as the
    later of the two is done earlier than the slowest was by a share of `gain`, and down to `enough`
    seconds. Changes `machine_of`.
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
        best = int(moved.argmin())
        found_s, change = float(moved.flat[best]), (best // problem.num_machines, best % problem.num_machines, -1)
        if len(others):
            both = others, machine_of[others]
            swapped = _swapped(problem, (own, rest, total), slowest, mine, both)
            at = int(swapped.argmin())
            if swapped.flat[at] < found_s:
                found_s = float(swapped.flat[at])
                other = int(others[at % len(others)])
                change = (at // len(others), int(machine_of[other]), other)
        if found_s >= seconds[slowest] * (1 - gain):
            return
        item, target, other = change
        machine_of[mine[item]] = target
        if other >= 0:
            machine_of[other] = slowest


def _swapped(
    problem: Problem, now: tuple[Floats, Floats, Floats], slowest: int, mine: Ints, others: tuple[Ints, Ints]
) -> Floats:
    """Seconds of the later of two machines [mine, others] that have swapped an item each; `others`:
    the items and their machines.
    """
    own, rest, total = now
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
    return np.maximum(here, there)


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
    machines that sum to 1, the sum over items of the least weighted work, that of the largest with
    what counts again (the dual of the fractional problem).
    """
    return _bound(problem, ROUNDS)[0] if problem.num_items else 0.0


def _bound(problem: Problem, rounds: int) -> tuple[float, Floats]:
    """The lower bound, and the weights of a machine of each kind [kinds] that it was found with."""
    kinds, first, counts = np.unique(problem.kind, return_index=True, return_counts=True)
    work = problem.work[kinds]  # [kinds, items]
    alone = work * (1 + problem.behind[first][:, None]) + problem.start_s[first][:, None]
    least = alone.min(axis=0)
    longest = int(least.argmax())
    found = _dual_weights(work, counts, rounds)
    weighted = found[:, None] * work
    shared = weighted.min(axis=0)
    again = (found[:, None] * alone)[:, longest].min() - shared[longest]
    weights = np.zeros(len(problem.work))
    weights[kinds] = found
    return max(float(least[longest]), float(shared.sum() + again)), weights


def _dual_weights(work: Floats, counts: Ints, rounds: int) -> Floats:
    """Weights of a machine of each kind [kinds], `counts` of them sum to 1, for which the sum over
    items of the least weighted work is large.

    Items, in groups, are shared among kinds by weighted work, ever more sharply; kinds that get more
    than the mean become dearer.
    """
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
    grouped: Floats = np.add.reduceat(work[:, order], np.minimum(edges, len(order) - 1), axis=1)
    each, best, best_s = counts.astype(np.float64), weights, 0.0
    logs = np.log(grouped)
    for turn in range(rounds):
        sharpness = SHARPNESS[0] * (SHARPNESS[1] / SHARPNESS[0]) ** (turn / rounds)
        price = np.log(weights)[:, None] + logs
        least_price = price.min(axis=0)
        total = float(np.exp(least_price).sum())
        if total > best_s:
            best, best_s = weights, total
        share = np.exp(-sharpness * (price - least_price))
        loads = (share / share.sum(axis=0) * grouped).sum(axis=1) / each
        mean = loads.mean()
        weights = weights * np.maximum(loads / mean, LEAST_SHARE) ** (1 / (1 + sharpness / 2))
        weights = np.maximum(weights, LEAST_SHARE * weights.max())
        weights /= weights @ each
    return best
