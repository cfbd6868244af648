"""Exchanges that every rank that takes part in them can start at once, when it enters a phase.

What they send lies at the owner: they need no launch and no other exchange, and no exchange of
their traffic class comes before them on any rank. `compile.ping_pong` issues them before another
program's exchanges, on all ranks alike.
"""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

from megatron_balance.compile.transpose import Policy
from megatron_balance.ir.plan import MicrobatchPlan
from megatron_balance.patterns import pattern_of


class Prefetchable(NamedTuple):
    """Ids of exchanges, by phase."""

    forward: frozenset[int]
    backward: frozenset[int]


NOT_PREFETCHABLE = Prefetchable(frozenset(), frozenset())


def prefetchable(plan: MicrobatchPlan, policy: Policy) -> Prefetchable:
    """Exchanges of a plan that can start at once. Ids as in `compile.transpose`.

    With a remap these are its own. Else those that the patterns of the first zone (forward) and of
    the last zone (backward) name (`patterns.base.Startable`), or of all zones where these start
    beside one another.
    """
    if plan.moves:
        return Prefetchable(frozenset({0}), frozenset({0, 2} if policy == "replay" else {2}))
    patterns = [(pattern_of(zone), zone) for zone in plan.zones]
    counts = [pattern.num_exchanges(zone) for pattern, zone in patterns]
    total = sum(counts)
    bases = accumulate(counts, initial=0)
    zones = [(base, *each) for base, count, each in zip(bases, counts, patterns, strict=False) if count]
    beside = all(pattern.starts_beside for _, pattern, _ in zones)
    first, last = (zones, zones) if beside else (zones[:1], zones[-1:])
    forward = [base + at for base, pattern, zone in first for at in pattern.startable(zone).forward]
    backward: list[int] = []
    for base, pattern, zone in last:
        startable = pattern.startable(zone)
        backward += [2 * (total - 1 - base - at) + 1 for at in startable.gradients]
        backward += [2 * (total - 1 - base - at) for at in startable.replays] if policy == "replay" else []
    return Prefetchable(frozenset(forward), frozenset(backward))
