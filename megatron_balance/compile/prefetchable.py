"""Which exchanges every rank that takes part in them can start at once, when it enters a phase.

What they send lies at the owner: they need no launch and no other exchange, and no exchange of their lane comes before them on any rank.
`compile.ping_pong` issues them before another program's exchanges, on all ranks alike.
"""

from __future__ import annotations

from typing import NamedTuple

from megatron_balance.compile.transpose import Policy
from megatron_balance.ir.plan import MicrobatchPlan, TaskTable
from megatron_balance.patterns.registry import pattern_of


class Prefetchable(NamedTuple):
    """Ids of exchanges, by phase."""

    forward: frozenset[int]
    backward: frozenset[int]


NOT_PREFETCHABLE = Prefetchable(frozenset(), frozenset())


def prefetchable(plan: MicrobatchPlan, policy: Policy) -> Prefetchable:
    """The exchanges of a plan that can start at once. Ids as in `compile.transpose`.

    With a remap these are its own. Else, of the first zone its first exchange; in the backward, of the last zone the replay of its last
    exchange and, where that brought outputs back to the owner, the way of their gradients and the replay of what it attended to.
    """
    if plan.moves:
        return Prefetchable(frozenset({0}), frozenset({0, 2} if policy == "replay" else {2}))
    zones = [zone for zone in plan.zones if pattern_of(zone).num_exchanges(zone)]
    if not zones:
        return NOT_PREFETCHABLE
    if all(isinstance(zone, TaskTable) for zone in zones):
        num_exchanges = sum(pattern_of(zone).num_exchanges(zone) for zone in zones)
        inputs = frozenset(range(0, num_exchanges, 2))
        gradients = frozenset(2 * (num_exchanges - 1 - at) + 1 for at in range(1, num_exchanges, 2))
        again = frozenset(2 * (num_exchanges - 1 - at) for at in inputs) if policy == "replay" else frozenset[int]()
        return Prefetchable(inputs, gradients | again)
    brings_outputs = zones[-1].pattern in ("head_exchange", "dispatch")
    if brings_outputs:
        return Prefetchable(frozenset({0}), frozenset({1, 2} if policy == "replay" else {1}))
    return Prefetchable(frozenset({0}), frozenset({0} if policy == "replay" else ()))
