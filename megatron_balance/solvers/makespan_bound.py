"""Items to machines of unlike speed: the problem, and seconds that no assignment comes below.

Weights: for weights of the machines that sum to 1, an assignment takes at least the sum over items
of the least weighted work (the dual of the fractional problem). Stairs: a machine that counts its
largest item again (the first microbatch of a pipeline goes through all stages alone) takes at most
T - start_s - behind x (its largest) of work in T seconds. The longest items go to few machines, and
the next opens where those are full; if all are open and items are left, no assignment takes T
seconds.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import inf, prod

import numpy as np
import numpy.typing as npt

# Groups of items that are alike where the machines' weights are corrected.
GROUPS = 48
# Powers of weighted work by which kinds share items, in the first and the last round; and the
# least load or weight of a kind over the mean or the largest.
SHARPNESS, LEAST_SHARE = (2.0, 500.0), 1e-6
# Numbers of open machines by kind, above which stairs are not climbed.
MOST_STATES = 20_000
# Share of the bound by weights that is added first, and twice as much ever after, until the items
# fit; and the share to which the seconds are then known.
FIRST_STEP, CLOSE = 0.01, 1e-5

# In the order of opening: the place of the first item among the longest first, and the machine.
Opened = list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Stairs:
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
    def of(cls, problem: MachinesProblem, weights: Floats) -> Stairs | None:
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
        return cls(
            tuple(np.flatnonzero(problem.kind == kinds[kind]).tolist() for kind in again),
            tuple(
                (
                    float(weight[kind]),
                    float(problem.behind[first[kind]]),
                    float(problem.start_s[first[kind]]),
                    least[kind].tolist(),
                )
                for kind in again
            ),
            np.cumsum((weight[:, None] * work).min(axis=0)),
            ((weight * counts)[~counts_again, None] * up_to).sum(axis=0),
            _steps([int(counts[kind]) for kind in again]),
        )

    def least_s(self, bound: float, close: float = CLOSE) -> float:
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
    return tuple(
        (
            state,
            tuple((kind, state + strides[kind]) for kind, number in enumerate(numbers) if number < counts[kind]),
        )
        for state, numbers in states
    )


def by_weights(problem: MachinesProblem, rounds: int) -> tuple[float, Floats]:
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
        price = np.log(weights)[:, None] + logs
        least_price = price.min(axis=0)
        total = float(np.exp(least_price).sum())
        if total > best_s:
            best, best_s = weights, total
        # Softmin over kinds: sharper each round, so that items settle on one kind.
        share = np.exp(-sharpness * (price - least_price))
        loads = (share / share.sum(axis=0) * grouped).sum(axis=1) / each
        mean = loads.mean()
        weights = weights * np.maximum(loads / mean, LEAST_SHARE) ** (1 / (1 + sharpness / 2))
        weights = np.maximum(weights, LEAST_SHARE * weights.max())
        weights /= weights @ each
    return best


Floats = npt.NDArray[np.float64]


Ints = npt.NDArray[np.int64]


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
