"""The one order in which all ranks issue the exchanges of a phase."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple, TypeAlias

from megatron_balance.compile.transpose import Policy
from megatron_balance.ir.plan import MicrobatchPlan
from megatron_balance.patterns import pattern_of

Key: TypeAlias = tuple[int, int]


# A rank issues its exchanges in this order, on whatever stream or communicator each of their legs
# is. So any two ranks that share two exchanges issue them in one order, and no set of ranks can
# wait for one another in a circle: of all exchanges that have not met, the first in this order has
# every rank that it needs (`compile.proof.issued` proves it of compiled programs). NCCL needs that
# twice. It connects two ranks of a communicator at their first send or receive, and their hosts
# stand in the call until both have made it (NVIDIA/nccl#783); and kernels of several communicators
# share a GPU's hardware queues.
#
# It is the order of ids, which follows the dependencies, but for two things. Exchanges that every
# rank can start when it enters the phase come first. And a copied exchange passes the moved one
# just before it: the keys of a replayed ring's next round go out ahead of the gradients of the
# current one, which wait for its attention. Every rank lets it pass, since id and traffic class of
# an exchange are the same everywhere; what a rank sends or receives in it, and when it could, has
# no part in this.
@dataclass(frozen=True, slots=True)
class IssueOrder:
    """Keys that sort the exchanges of one phase.

    `passing`: whether a copied exchange passes the moved one just before it. `first`: exchanges
    that come before all others: every rank that takes part in them can start them when it enters
    the phase, on all ranks alike.
    """

    passing: bool = True
    first: frozenset[int] = frozenset()

    def key(self, exchange_id: int, *, moved: bool) -> Key:
        """The key that an exchange is sorted by; `moved`: its traffic class."""
        if exchange_id in self.first:
            return 0, exchange_id
        # A moved one comes between the next exchange, if that is copied, and the one after it.
        return 1, 2 * exchange_id + 3 * (moved and self.passing)


# Of programs compiled without a plan: which exchanges can start at once is not known.
PASSING = IssueOrder()
# One after the other in the order of ids (`communication: safe`).
BY_ID = IssueOrder(passing=False)


class IssueOrders(NamedTuple):
    """Of both phases."""

    forward: IssueOrder
    backward: IssueOrder


def issue_orders(plan: MicrobatchPlan, policy: Policy, *, passing: bool = True) -> IssueOrders:
    """The issue orders of a plan's phases. Ids as in `compile.transpose`."""
    if not passing:
        return IssueOrders(BY_ID, BY_ID)
    return IssueOrders(*(IssueOrder(first=frozenset(ids)) for ids in _startable(plan, policy)))


def _startable(plan: MicrobatchPlan, policy: Policy) -> tuple[Iterable[int], Iterable[int]]:
    # Exchanges of the forward and of the backward that can start at once.
    # What they send lies at the owner: they need no launch, and no exchange but others of this set.
    # Of a forward of n exchanges the backward replays i as 2 (n - 1 - i) and reverses it as the id
    # behind that; the remap in, 0, is replayed as 0 and reversed as 2 (1 would replay the remap out).
    replays = policy == "replay"
    if plan.moves:  # those of the remap
        return (0,), ((0, 2) if replays else (2,))
    patterns = [pattern_of(zone) for zone in plan.zones]
    counts = [pattern.num_exchanges(zone) for pattern, zone in zip(patterns, plan.zones, strict=True)]
    bases = list(accumulate(counts, initial=0))
    at = [index for index, count in enumerate(counts) if count]
    # Those of the first zone (forward) and of the last zone (backward), or of all zones where these
    # start beside one another.
    beside = all(patterns[index].starts_beside for index in at)
    found = {index: patterns[index].startable(plan.zones[index]) for index in (at if beside else {*at[:1], *at[-1:]})}
    last_id = sum(counts) - 1
    backward: list[int] = []
    for index in at if beside else at[-1:]:
        backward += [2 * (last_id - bases[index] - own) + 1 for own in found[index].gradients]
        backward += [2 * (last_id - bases[index] - own) for own in found[index].replays] if replays else []
    return [bases[index] + own for index in (at if beside else at[:1]) for own in found[index].forward], backward
