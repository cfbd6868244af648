"""The one order in which all ranks issue the exchanges of a phase, worked out from the plan alone.

A rank issues its exchanges in this order, on whatever stream or communicator each of their legs is.
So any two ranks that share two exchanges issue them in one order, and no set of ranks can wait for
one another in a circle: of all exchanges that have not met, the first in this order has every rank
that it needs (`compile.verify.verify_issue_order` proves it of compiled programs). NCCL needs that
twice. It connects two ranks of a communicator at their first send or receive, and their hosts stand
in the call until both have made it (NVIDIA/nccl#783); and kernels of two communicators share a
GPU's hardware queues.

The order follows the dependencies: steps of a zone in their order, zones of one rank one after the
other, the remap around them. Zones that share no rank are at the same *level*, so that their steps
come side by side; a rank that passes on pieces of another zone's ring does so round by round beside
its own. Within it a copied exchange passes the moved ones of the step before: the keys of a
replayed ring's next round go out ahead of the gradients of the current one, which wait for its
attention. Every rank lets them pass alike, since step and traffic class are the same everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeAlias

from megatron_balance.compile.prefetchable import prefetchable
from megatron_balance.compile.transpose import Policy
from megatron_balance.ir.plan import MicrobatchPlan
from megatron_balance.patterns import pattern_of

Key: TypeAlias = tuple[int, int, int]


@dataclass(frozen=True)
class IssueOrder:
    """Keys that sort the exchanges of one phase.

    `steps`: the step of each exchange, by its id; ids beyond are steps of their own. `passing`:
    whether copied exchanges pass the moved ones of the step before. `first`: exchanges that every
    rank can start when it enters the phase; they come before all others.
    """

    steps: Sequence[int] = ()
    passing: bool = True
    first: frozenset[int] = frozenset()

    def key(self, exchange_id: int, *, moved: bool) -> Key:
        """What an exchange is sorted by; `moved`: its traffic class."""
        if exchange_id in self.first:
            return 0, 0, exchange_id
        step = self.steps[exchange_id] if exchange_id < len(self.steps) else exchange_id
        # One behind the copied exchanges of the next step, and before those of the step after it.
        return 1, 2 * (step + 1) + 1 if moved and self.passing else 2 * step, exchange_id


BY_ID = IssueOrder(passing=False)
"""Exchanges one after the other in the order of their ids (`communication: safe`)."""


class IssueOrders(NamedTuple):
    """Of both phases."""

    forward: IssueOrder
    backward: IssueOrder


@dataclass(frozen=True)
class _Steps:
    """Steps of a plan's forward exchanges, by id without the remap in.

    `early`: zones of a level begin together; `late`: they end together.
    """

    plan: MicrobatchPlan

    @cached_property
    def zones(self) -> list[tuple[int, int]]:
        """(level, number of exchanges) of each zone that has any."""
        levels = [0] * self.plan.num_ranks
        found: list[tuple[int, int]] = []
        for zone in self.plan.zones:
            pattern = pattern_of(zone)
            count = pattern.num_exchanges(zone)
            if not count:
                continue
            ranks = pattern.ranks(zone, self.plan.num_ranks)
            level = max((levels[rank] for rank in ranks), default=0)
            for rank in ranks:
                levels[rank] = level + 1
            found.append((level, count))
        return found

    @cached_property
    def begins(self) -> list[int]:
        """The first step of each level, and one past the last step of all."""
        longest = [0] * (1 + max((level for level, _ in self.zones), default=-1))
        for level, count in self.zones:
            longest[level] = max(longest[level], count)
        begins = [0]
        for length in longest:
            begins.append(begins[-1] + length)
        return begins

    def early(self) -> list[int]:
        return [self.begins[level] + at for level, count in self.zones for at in range(count)]

    def late(self) -> list[int]:
        return [self.begins[level + 1] - count + at for level, count in self.zones for at in range(count)]


def issue_orders(plan: MicrobatchPlan, policy: Policy, *, passing: bool = True) -> IssueOrders:
    """The issue orders of a plan's phases. Ids as in `compile.transpose`.

    Zones of a level end together in the forward, and, reversed, in the backward too, so that the
    next level's first step is next to the last of each.
    """
    if not passing:
        return IssueOrders(BY_ID, BY_ID)
    steps, remapped = _Steps(plan), 1 if plan.moves else 0
    last = steps.begins[-1] + remapped  # of the remap out, or one past the last
    forward = [0] * remapped + [remapped + step for step in steps.late()] + [last] * remapped
    # Steps of the reversed exchanges; the replay of the remap in, which is first, has id 0.
    back = [last - step for step in [0] * remapped + [remapped + s for s in steps.early()] + [last] * remapped]
    backward = [0] * remapped + [step + remapped for step in reversed(back) for _ in range(2)]
    ahead = prefetchable(plan, policy)
    return IssueOrders(IssueOrder(forward, first=ahead.forward), IssueOrder(backward, first=ahead.backward))
