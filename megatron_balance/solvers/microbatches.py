"""Items into microbatches and places, under a cap of tokens: as few microbatches as hold them, the
slowest place of each as fast as was found.

Where the ranks of a microbatch wait for one another (weights gathered layer by layer), a step takes
the sum, over its microbatches, of the seconds of its slowest place: slow items belong into the same
microbatches. Where they wait at its end alone, it takes the slowest place over all microbatches.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapreplace
from typing import Literal

import numpy as np

from megatron_balance.ir.arrays import Floats, Ints
from megatron_balance.solvers import packing


@dataclass(frozen=True, slots=True)
class MicrobatchesProblem:
    """`tokens`, `seconds` [n]: of each item, on each of the neighbouring `widths` [n] places that
    share it; a width divides `num_places`. A place holds at most `most` tokens of a microbatch.
    """

    tokens: Ints
    seconds: Floats
    widths: Ints
    num_places: int
    most: int


# Of each item, its microbatch and the first of its places.
Dealt = list[tuple[int, int]]
Meet = Literal["layer", "step"]


def deal(
    problem: MicrobatchesProblem, fewest: int = 1, multiple: int = 1, *, meet: Meet = "layer"
) -> tuple[int, Dealt]:
    """The fewest microbatches that were found to hold all items, of at least `fewest` and a
    `multiple`; where each item is. No item may have more than `most` tokens on a place. `meet`: the
    places wait for one another in every microbatch (`layer`), or behind all (`step`).
    """
    assert problem.tokens.max(initial=0) <= problem.most, "an item that no place holds"
    room = problem.most * problem.num_places
    count = max(fewest, -(-int((problem.tokens * problem.widths).sum()) // room), 1)
    count = -(-count // multiple) * multiple
    # One item a microbatch always fits.
    while (found := _deal(problem, count, meet)) is None:
        count += multiple
    return count, found


def _deal(problem: MicrobatchesProblem, count: int, meet: Meet) -> Dealt | None:
    held = np.zeros((count, problem.num_places), dtype=np.int64)
    loads = np.zeros((count, problem.num_places))
    dealt: Dealt = [(-1, -1)] * len(problem.tokens)
    order = np.argsort(-problem.seconds, kind="stable")
    wide: list[int] = order[problem.widths[order] > 1].tolist()
    for item in sorted(wide, key=lambda item: -problem.widths[item]):
        if (at := _wide(problem, item, held, loads)) is None:
            return None
        dealt[item] = at
    narrow: list[int] = order[problem.widths[order] == 1].tolist()
    if meet == "step" and (evened := _by_places(problem, narrow, held, loads)) is not None:
        for item, at in zip(narrow, evened, strict=True):
            dealt[item] = at
        return dealt
    spared = loads - _spare(problem.seconds[narrow], loads)[:, None]
    bins = _by_seconds(problem, narrow, held, spared) or _by_seconds(problem, narrow, held, loads)
    bins = bins or _by_tokens(problem, narrow, held)
    if bins is None:
        return None
    np.add.at(loads.reshape(-1), bins, problem.seconds[narrow])
    moved = _arranged(
        problem,
        loads,
        [dealt[item] for item in wide],
        [int(problem.widths[item]) for item in wide],
    )
    places = zip(*(each.tolist() for each in np.divmod(moved[bins], problem.num_places)), strict=True)
    for item, at in zip(narrow, places, strict=True):
        dealt[item] = at
    return dealt


def _arranged(
    problem: MicrobatchesProblem,
    loads: Floats,
    wide: Sequence[tuple[int, int]],
    widths: Sequence[int],
) -> Ints:
    """Where each bin without a wide item goes; the slowest stand together in the microbatches with
    the slowest wide items, each on the place that has least in all microbatches before.
    """
    taken = np.zeros(loads.shape, dtype=bool)
    for (microbatch, first), width in zip(wide, widths, strict=True):
        taken[microbatch, first : first + width] = True
    of_wide = np.where(taken, loads, 0.0)
    totals, moved = of_wide.sum(axis=0), np.arange(loads.size)
    left = np.flatnonzero(~taken)
    left = left[np.argsort(-loads.reshape(-1)[left], kind="stable")]
    for microbatch in np.argsort(-of_wide.max(axis=1), kind="stable"):
        places = np.flatnonzero(~taken[microbatch])
        places = places[np.argsort(totals[places], kind="stable")]
        own, left = left[: len(places)], left[len(places) :]
        moved[own] = microbatch * problem.num_places + places
        totals[places] += loads.reshape(-1)[own]
    return moved


def _spare(seconds: Floats, loads: Floats) -> Floats:
    """Seconds by which each microbatch may be slower than the fastest one [microbatches], since an
    item alone makes it so; `seconds`: of narrow items, descending; `loads`: of wide ones.
    """
    count, num_places = loads.shape
    # The slowest narrow items go, one a place, where wide ones are slowest.
    order = np.argsort(-loads.max(axis=1), kind="stable")
    levels = loads.max(axis=1)[order]
    tops = seconds[::num_places][:count]
    levels[: len(tops)] = np.maximum(levels[: len(tops)], tops)
    levels[::-1].sort()
    even, left = 0.0, (seconds.sum() + loads.sum()) / num_places
    for at, level in enumerate(levels):
        even = left / (count - at)  # the level of all others, those above it taken out
        if even >= level:
            break
        left -= level
    spare = np.empty(count)
    spare[order] = np.maximum(levels - even, 0.0)
    return spare


def _wide(problem: MicrobatchesProblem, item: int, held: Ints, loads: Floats) -> tuple[int, int] | None:
    """Put an item where it adds least to the step, then on the least loaded places that have room."""
    width, tokens, seconds = int(problem.widths[item]), problem.tokens[item], problem.seconds[item]
    before = loads.reshape(len(loads), -1, width).max(axis=2)
    fits = held.reshape(len(held), -1, width).max(axis=2) + tokens <= problem.most
    if not fits.any():
        return None
    added = np.maximum(before + seconds - loads.max(axis=1, keepdims=True), 0.0)
    added[~fits] = np.inf
    best = np.where(added == added.min(), before, np.inf)
    microbatch, block = divmod(int(best.argmin()), best.shape[1])
    own = slice(block * width, (block + 1) * width)
    held[microbatch, own] += tokens
    loads[microbatch, own] += seconds
    return microbatch, block * width


def _by_seconds(problem: MicrobatchesProblem, items: Sequence[int], held: Ints, loads: Floats) -> list[int] | None:
    """The bin of each item, the slowest first in the least loaded one with room; None: none has."""
    sizes, seconds = problem.tokens[items].tolist(), problem.seconds[items].tolist()
    room, bins = (problem.most - held).reshape(-1).tolist(), list[int]()
    for at in packing.least_loaded(sizes, seconds, room, loads.reshape(-1).tolist()):
        if at is None:
            return None
        bins.append(at)
    return bins


def _by_places(problem: MicrobatchesProblem, items: Sequence[int], held: Ints, loads: Floats) -> Dealt | None:
    """Microbatch and place of each item, the slowest first on the place least loaded in all
    microbatches, in its least loaded one with room; None: no place has room.
    """
    rooms, load = (problem.most - held).T.tolist(), loads.T.tolist()
    room = list(map(max, rooms))
    ready: list[tuple[float, int]] = sorted((sum(own), place) for place, own in enumerate(load))
    full: list[packing.Full] = []
    found: Dealt = []
    tokens, seconds = problem.tokens.tolist(), problem.seconds.tolist()
    for item in items:
        if not packing.begins_with_room(tokens[item], room, ready, full):
            return None
        total, place = ready[0]
        own, of = rooms[place], load[place]
        at = min((at for at, left in enumerate(own) if left >= tokens[item]), key=of.__getitem__)
        own[at] -= tokens[item]
        of[at] += seconds[item]
        room[place] = max(own)
        found.append((at, place))
        heapreplace(ready, (total + seconds[item], place))
    return found


def _by_tokens(problem: MicrobatchesProblem, items: Sequence[int], held: Ints) -> list[int] | None:
    """The bin of each item, the largest first in the fullest one with room; None: none has."""
    order = sorted(range(len(items)), key=lambda at: -problem.tokens[items[at]])
    found = packing.best_fit(
        [int(problem.tokens[items[at]]) for at in order],
        (problem.most - held).reshape(-1).tolist(),
    )
    bins = [-1] * len(items)
    for at, chosen in zip(order, found, strict=True):
        if chosen is None:
            return None
        bins[at] = chosen
    return bins
