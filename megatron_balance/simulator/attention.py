"""One attention call of a plan, forward and backward, on the clocks of either engine."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Literal, NamedTuple, TypeAlias

import numpy as np

from megatron_balance.analysis import rounds
from megatron_balance.analysis.clocks import Outcome, hosts_behind
from megatron_balance.analysis.machine import Machine
from megatron_balance.analysis.memory import Policy
from megatron_balance.analysis.states import states_of
from megatron_balance.analysis.statistics import linear_tokens
from megatron_balance.compile.halo import under
from megatron_balance.compile.pipeline import compile_ranks
from megatron_balance.errors import ConfigError
from megatron_balance.ir.arrays import Floats
from megatron_balance.ir.plan import MicrobatchPlan
from megatron_balance.simulator.emulated import Sockets
from megatron_balance.simulator.events import StreamsPhase
from megatron_balance.simulator.phase import SimulatedPhase, issued_s, phase_of, ring_names

EngineName: TypeAlias = Literal["auto", "events", "rounds"]
ENGINES: tuple[EngineName, ...] = ("auto", "events", "rounds")
Transport: TypeAlias = Literal["streams", "sockets"]

# A step is simulated on machines of all kinds, to see what limits it.
_compiled = lru_cache(maxsize=16)(compile_ranks)

# Ranks up to which "auto" takes the event engine (docs/adr/0017).
SMALL = 16


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

    `enter_s`: when each rank [num_ranks] enters the forward and the backward; not given: all at once.
    Raises ConfigError: the round engine is asked for sockets, or for transfers that wait for SMs,
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
    if len(calls) == 1 and calls[0][1] == 1:
        return calls[0][0]

    def mean(name: str, backward: bool) -> Floats:
        return np.sum([share * getattr(call[backward], name) for call, share in calls], axis=0)

    return BothPhases(
        *(Outcome(mean("end_s", each), mean("compute_s", each), mean("bytes_moved", each)) for each in (False, True))
    )


def beside(
    call: BothPhases,
    plans: Sequence[MicrobatchPlan],
    machine: Machine,
    linear: tuple[Floats, Floats],
    num_layers: int | None = None,
) -> BothPhases:
    """The call of a mean layer, of the calls of those that attend by their share of all, with what the
    others do; `linear`: seconds outside attention, after which calls begin.

    `num_layers`: of `plans`, nano-batches, that the call goes through, modules outside attention
    computing in it; their states hide behind nothing.
    """
    if (states := states_of(plans, machine)) is None:
        return call
    attention, recurrent, _ = machine.model.layer_shares
    times, found = num_layers or 1, list[Outcome]()
    of_states = zip(states.seconds, states.compute_s, states.moved, strict=True)
    for each, own, (seconds, compute_s, moved) in zip(call, linear, of_states, strict=True):
        others = times * (1 - attention) * own
        computes = times * recurrent * compute_s + (0.0 if num_layers is None else others)
        end_s = each.end_s + others + times * recurrent * seconds
        found.append(Outcome(end_s, each.compute_s + computes, each.bytes_moved + times * recurrent * moved))
    return BothPhases(*found)


def check_engine(name: EngineName, machine: Machine) -> None:
    """Reject an engine that does not know what the machine does. Raises ConfigError: transfers wait
    for SMs, and the engine is `rounds`.
    """
    if name == "rounds" and machine.cost.contention.waits:
        raise ConfigError(
            f"the engine 'rounds' has no transfers that wait for SMs, and those of {machine.cluster.name} do; use "
            "'events'"
        )


def play_events(
    phase: SimulatedPhase, machine: Machine, enter_s: Floats, transport: Transport = "streams", *, trace: bool = False
) -> Outcome:
    """Run a phase on the event engine: every stream and every transfer, by the executor's rules (CUDA
    streams, or gloo's sockets). `enter_s` [num_ranks]: when each rank enters it; `trace`: note what
    every stream does.
    """
    kind = StreamsPhase if transport == "streams" else Sockets
    outcome = kind(phase, machine, enter_s, trace=trace).run()
    if not machine.host.is_modelled:
        return outcome
    issued = issued_s(phase, machine.host)
    late = hosts_behind(np.array([max(each, default=0.0) for each in issued]), outcome.end_s)
    if not late.any():
        return outcome
    again = kind(phase, machine, enter_s, trace=trace)
    again.issued_s = [each if behind else None for each, behind in zip(issued, late.tolist(), strict=True)]
    return again.run()


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
    ranks = _compiled(plan, policy)
    return BothPhases(
        *(
            play_events(
                phase_of(ranks, machine, backward=backward, sums=transport == "streams", rings=ring_names(plan)),
                *(machine, enter_s[backward], transport),
                trace=trace,
            )
            for backward in (False, True)
        )
    )


def by_mask(plan: MicrobatchPlan, machine: Machine) -> list[tuple[MicrobatchPlan, Machine, float]]:
    """The layers under each of the model's masks (`Model.mask_shares`): what runs there, on which
    machine, and their share of the layers.
    """
    return [
        ((made := under(plan, mask)), machine.under(mask).for_trees(made.mask), share)
        for mask, share in machine.model.mask_shares
    ]


def linear_s(plan: MicrobatchPlan, machine: Machine) -> tuple[Floats, Floats]:
    """Seconds of one layer's modules outside attention on each rank [R], forward and backward."""
    counts, place = np.unique(linear_tokens(plan), return_inverse=True)
    forward, backward = (
        np.array([machine.cost.layer_s(n, backward=b) for n in counts.tolist()])[place] for b in (False, True)
    )
    return forward * machine.slow(), backward * machine.slow()
