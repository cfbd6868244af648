"""Rule `cost`: the fewest ranks and the narrowest zone in which a sequence still meets a target
time, and the best such target.

For a target time (`price`), sequences are placed in descending order, each where it takes the
fewest ranks without passing the target or the capacity: one rank, else ranks of one node, else of
two nodes or more. Where there is most room, if that works out; else where it leaves the least room,
which keeps whole nodes for those that need them; else on whole nodes, since a long sequence fills
ranks with time before it fills them with tokens; and where that strands room too, the longest
sequences go over all ranks. The target is found by bisection, as MULTIFIT packs bins, from below:
what is too low is soon found out. Short sequences go last, each to the least loaded rank.

Time is bought with uneven tokens, which cost something too: the slowest linear part, or what a
remap moves. So the same is done again under limits on a rank's tokens closer to the mean, and then
with a little more time, since what moves also costs where it hides. Of all these and the trivial
placement, all sequences over all ranks, the one of the lowest price is taken.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf, sqrt
from typing import TypeAlias

from megatron_balance.planners.zeppelin.filling import Fill, Filling, Sizes, Target
from megatron_balance.planners.zeppelin.price import Prediction, Prices, Pricing
from megatron_balance.solvers.placed import Placement

_STEPS = 4
_FEWER_STEPS = 2
_EFFORT = 300
"""Steps of the first bisection and of later ones, and fewer if that would place more than about
this many sequences.
"""

_WIDEST = 48
"""Every number of ranks up to this is tried for the longest sequence, and multiples of a node
beyond.
"""

_FIRST_FACTOR = 1.1
"""The first target tried is this much above what is known to be too low."""

_TOLERANCE = 0.01
"""Targets this close, relatively, are not told apart."""

_TOKEN_LIMITS = (1.15, 1.05)
"""Limits on a rank's tokens, over the mean, that are tried beside the capacity."""

_EASED = 3
_LESS = 0.97
"""How often the target is eased, and by what factor the tokens on a rank shrink each time but the
first.
"""


@dataclass(frozen=True, slots=True)
class Trivial:
    """All sequences over all ranks."""

    placement: Placement
    prediction: Prediction


Placed: TypeAlias = Filling | Trivial
"""A `placement` and its `prediction`."""


def place(search: CostedSearch, capacity: int, pricing: Pricing) -> Placed:
    """The ranks of each sequence, judged by `pricing`. `capacity`: tokens a rank holds.

    Never of a higher price than the trivial plan, all sequences over all ranks, which is also what
    is left where nothing else fits.
    """
    best = _Best(search, pricing)
    filling = search.tightest(capacity, best.time_s)
    if filling is None:
        return best.placed
    best.offer(filling)
    for limit in search.token_limits(capacity):
        if limit < max(filling.tokens) and best.time_s > search.sizes.mean_s * (1 + _TOLERANCE):
            evener = search.evener(filling.target, limit, best.time_s)
            if evener is not None:
                best.offer(evener)
                filling = evener
    for filling in (
        search.eased(best.placed.target, pricing.weight_communication) if isinstance(best.placed, Filling) else ()
    ):
        best.offer(filling)
    return best.placed


class _Best:
    """The placement of the lowest price so far, at first the trivial one."""

    def __init__(self, search: CostedSearch, pricing: Pricing) -> None:
        self.search, self.pricing = search, pricing
        self.placed: Placed = search.trivial
        self.price_s = search.prices.judge_s(search.trivial.prediction, pricing)

    @property
    def time_s(self) -> float:
        """The longest time of a rank with which a placement may still have a lower price."""
        prices = self.search.prices
        return (
            self.price_s
            - self.pricing.weight_tokens * prices.token_s * self.search.sizes.all_tokens / prices.cluster.num_ranks
        )

    def offer(self, filling: Filling) -> None:
        """Take it if it is better."""
        price_s = self.search.prices.judge_s(filling.prediction, self.pricing)
        if price_s < self.price_s:
            self.placed, self.price_s = filling, price_s


class CostedSearch:
    """Placements of a batch under targets.

    Keeps what it has tried, so that judging a batch twice takes little longer than once.
    """

    def __init__(self, prices: Prices) -> None:
        self.prices, self.sizes, self.cluster = prices, Sizes(prices), prices.cluster
        self.least_s = max(self.sizes.mean_s, self._longest_s() if self.sizes.large else 0.0)
        self.effort = _EFFORT // max(1, len(self.sizes.large))
        everyone, seqs = tuple(range(self.cluster.num_ranks)), range(len(prices.lengths))
        apart = len(everyone) > 1
        prediction = prices.predict_rings([-1 if apart else 0] * len(seqs), {everyone: seqs} if apart else {})
        self.trivial = Trivial([everyone] * len(seqs), prediction)
        self._tried: dict[tuple[float, int, int], Filling | None] = {}

    def _longest_s(self) -> float:
        """The least time that the longest sequence takes a rank, whatever shares it."""
        num_ranks, size, longest = self.cluster.num_ranks, self.cluster.node_size, self.sizes.large[0]
        seconds = [self.sizes.share(longest, count)[0] for count in range(1, size + 1)]
        if num_ranks > size:
            counts = {*range(2, min(num_ranks, _WIDEST) + 1), *range(size, num_ranks + 1, size)}
            seconds += [self.sizes.share(longest, count, inter_node=True)[0] for count in counts]
        return min(seconds)

    def token_limits(self, capacity: int) -> list[int]:
        """Limits on a rank's tokens to try beside the capacity."""
        return [limit for factor in _TOKEN_LIMITS if (limit := int(self.sizes.mean_tokens * factor) + 1) < capacity]

    def tightest(self, limit: int, bound_s: float) -> Filling | None:
        """The tightest placement found under a limit on a rank's tokens, if its longest time stays
        below `bound_s`.
        """
        wide = 0
        while wide <= len(self.sizes.large):
            filling = self._bisect(
                self.least_s, bound_s, Target(inf, limit, wide=wide), max(2, min(_STEPS, self.effort))
            )
            if filling is not None and filling.complete:
                return filling
            wide = max(1, 4 * wide)
        return None

    def evener(self, target: Target, limit: int, bound_s: float) -> Filling | None:
        """The tightest placement found with fewer tokens on a rank than under `target`, which takes
        at least as long.
        """
        filling = self._bisect(target.time_s, bound_s, target.within(limit), min(_FEWER_STEPS, self.effort))
        return filling if filling is not None and filling.complete else None

    def eased(self, target: Target, weight_communication: float) -> Iterator[Filling]:
        """Placements under a target a little less tight than one that was reached: they may move
        less, and even out more tokens.
        """
        target = target.at(target.time_s * (1 + weight_communication))
        for _ in range(min(_EASED, self.effort)):
            filling = self._attempt(target)
            if filling is None or not filling.complete:
                return
            yield filling
            target = target.within(int(_LESS * max(filling.tokens)))

    def _bisect(self, low: float, bound_s: float, loose: Target, steps: int) -> Filling | None:
        """The larger sequences under the lowest target time found from `low` on; None if `bound_s`
        is too low already.
        """
        high, factor = low, _FIRST_FACTOR
        while high < bound_s:
            low, high, factor = high, min(factor * high, bound_s), factor**2
            filling = self._attempt(loose.at(high))
            if filling is not None:
                return self._tighten(filling, low, steps)
        return None

    def _tighten(self, filling: Filling, low: float, steps: int) -> Filling:
        """Lower the target of a filling in `steps` steps of bisection; `low` is known to be too
        low.
        """
        for _ in range(steps):
            high = filling.target.time_s
            if high <= low * (1 + _TOLERANCE):
                break
            middle = sqrt(low * high)
            tighter = self._attempt(filling.target.at(middle))
            if tighter is None:
                low = middle
            else:
                filling = tighter
        return filling

    def _attempt(self, target: Target) -> Filling | None:
        """The larger sequences under a target, whatever its `fill`."""
        time_s, tokens, wide = key = target.time_s, target.tokens, target.wide
        if key not in self._tried:
            # Nodes of one rank are whole whatever is filled first.
            several = self.cluster.node_size > 1
            fills: tuple[Fill, ...] = (
                ("whole",) if wide else ("most", "least", "whole") if several else ("most", "least")
            )
            tries = (Filling(self.sizes, Target(time_s, tokens, fill, wide)) for fill in fills)
            self._tried[key] = next((filling for filling in tries if filling.place_large()), None)
        return self._tried[key]
