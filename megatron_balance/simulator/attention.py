"""One attention call of a plan, forward and backward, on the clocks of either engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeAlias

import numpy as np

from megatron_balance.analysis.memory import Policy
from megatron_balance.analysis.statistics import tokens_per_rank
from megatron_balance.compile.pipeline import compile_ranks
from megatron_balance.cost.base import Floats, Ints
from megatron_balance.errors import ConfigError
from megatron_balance.ir.arrays import as_array
from megatron_balance.ir.plan import MicrobatchPlan
from megatron_balance.patterns import pattern_of
from megatron_balance.patterns.base import Context
from megatron_balance.simulator import engine, rounds
from megatron_balance.simulator.engine import Transport
from megatron_balance.simulator.events import Outcome
from megatron_balance.simulator.machine import Machine
from megatron_balance.simulator.phase import phase_of, ring_names

EngineName: TypeAlias = Literal["auto", "events", "rounds"]
ENGINES: tuple[EngineName, ...] = ("auto", "events", "rounds")

SMALL = 16
"""Ranks up to which "auto" takes the event engine (docs/adr/0017)."""


class BothPhases(NamedTuple):
    """Both phases of one attention call, one layer."""

    forward: Outcome
    backward: Outcome


def attention_call(
    plan: MicrobatchPlan,
    machine: Machine,
    policy: Policy = "keep",
    enter_s: tuple[Floats, Floats] | None = None,
    name: EngineName = "auto",
    transport: Transport = "streams",
) -> BothPhases:
    """Run one attention call of a plan.

    `enter_s`: when each rank [num_ranks] enters the forward and the backward; not given: all at
    once.

    Raises:
        ConfigError: the round engine is asked for sockets, or for transfers that wait for SMs,
            which it does not know.
    """
    check_engine(name, machine)
    if name == "rounds" and transport == "sockets":
        raise ConfigError(
            "the engine 'rounds' knows the transport 'streams' only; use the engine 'events' for 'sockets'"
        )
    forward_s, backward_s = (np.zeros(machine.num_ranks),) * 2 if enter_s is None else enter_s
    small = machine.num_ranks <= SMALL or transport == "sockets" or machine.cost.contention.waits
    if name == "rounds" or (name == "auto" and not small):
        return BothPhases(*rounds.play(plan, machine, policy, (forward_s, backward_s)))
    return events(plan, machine, policy, (forward_s, backward_s), transport)


def mean_call(calls: Sequence[tuple[BothPhases, float]]) -> BothPhases:
    """The mean of layers' calls, each with its share of the layers."""
    if len(calls) == 1:
        return calls[0][0]

    def mean(name: str, backward: bool) -> Floats:
        return np.sum([share * getattr(call[backward], name) for call, share in calls], axis=0)

    return BothPhases(
        *(Outcome(mean("end_s", each), mean("compute_s", each), mean("bytes_moved", each)) for each in (False, True))
    )


def check_engine(name: EngineName, machine: Machine) -> None:
    """Reject an engine that does not know what the machine does.

    Raises:
        ConfigError: transfers wait for SMs, and the engine is `rounds`.
    """
    if name == "rounds" and machine.cost.contention.waits:
        raise ConfigError(
            f"the engine 'rounds' has no transfers that wait for SMs, and those of {machine.cluster.name} do; use "
            "'events'"
        )


def events(
    plan: MicrobatchPlan,
    machine: Machine,
    policy: Policy,
    enter_s: tuple[Floats, Floats],
    transport: Transport = "streams",
    *,
    trace: bool = False,
) -> BothPhases:
    """Run one attention call on the event engine. `trace`: note what every stream did."""
    ranks = compile_ranks(plan, policy)
    return BothPhases(
        *(
            engine.play(
                phase_of(ranks, machine, backward=backward, sums=transport == "streams", rings=ring_names(plan)),
                *(machine, enter_s[backward], transport),
                trace=trace,
            )
            for backward in (False, True)
        )
    )


def linear_tokens(plan: MicrobatchPlan) -> Ints:
    """Tokens of each rank outside attention [num_ranks]."""
    tokens = tokens_per_rank(plan)
    holder, owner, moved = as_array(plan.moves).T
    for ranks, sign in ((owner, 1), (holder, -1)):
        np.add.at(tokens, ranks, sign * moved)
    return tokens


def coupled(plan: MicrobatchPlan) -> Ints:
    """Groups of ranks that enter a layer together [num_ranks]: each rank's group by its first rank.

    Ranks are in one group if they exchange anything, directly or through others.
    """
    first = list(range(plan.num_ranks))

    def find(rank: int) -> int:
        while first[rank] != rank:
            first[rank] = first[first[rank]]
            rank = first[rank]
        return rank

    def join(a: int, b: int) -> None:
        low, high = sorted((find(a), find(b)))
        first[high] = low

    context = Context.of(plan)
    for zone in plan.zones:
        for a, b in pattern_of(zone).coupled(zone, context):
            join(a, b)
    for holder, owner, _ in plan.moves:
        join(holder, owner)
    return np.array([find(rank) for rank in range(plan.num_ranks)], dtype=np.int64)
