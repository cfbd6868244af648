"""Limits of a step: its seconds, split by what would have to be better for them to go away.

One thing after another is idealised, and each is charged what the step gains: no rank slower than
the others; transfers between nodes that take no time; then those inside nodes, with the calls and
the processors that transfers take. What is left computes. What all ranks would take if they
computed equally long is computing; the rest of it is imbalance or, in a pipeline, waiting for other
stages. The order matters where two things hide behind each other: what would still be hidden costs
nothing.

The remap is charged what the layer gains if tokens are where attention needs them, and its
transfers are charged that much less.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron_balance.analysis.machine import Machine
from megatron_balance.analysis.statistics import linear_tokens
from megatron_balance.cost.base import Contention, Floats
from megatron_balance.cost.perturbed import Factors, PerturbedCost
from megatron_balance.ir.plan import NO_MOVES, MicrobatchPlan
from megatron_balance.ir.step import StepPlan
from megatron_balance.lab.bench import Figures, PlayedCase
from megatron_balance.lab.report import page
from megatron_balance.simulator.attention import BothPhases, attention_call, by_mask, mean_call
from megatron_balance.simulator.setup import StageSetup, settled
from megatron_balance.simulator.step import Perturbation, Setup, simulate_plans, summary

_NO_TIME = 1e-9
"""Factor on the time of transfers that are to cost nothing."""

PARTS = {
    "linear": "computing outside attention",
    "attention": "computing attention",
    "head": "embedding, logits and loss",
    "optimizer": "the optimizer",
    "imbalance": "imbalance between ranks",
    "straggler": "slow ranks",
    "nic": "transfers between nodes",
    "links": "transfers inside nodes",
    "remap": "the remap",
    "experts": "exchanging tokens between experts",
    "bubble": "waiting for other pipeline stages",
    "gradient_sync": "synchronising gradients",
}
COMPUTING = ("linear", "attention", "head", "optimizer")


class _FreeTransfers(PerturbedCost):
    """Transfers that take no time, no call and no processors."""

    @property
    def call_s(self) -> float:
        return 0.0

    @property
    def contention(self) -> Contention:
        return Contention(0, 0, 0)


def simulate(steps: Sequence[StepPlan], machine: Machine, setup: Setup) -> Figures:
    """The summary of some steps on a machine that is as it was planned for."""
    return summary(simulate_plans(steps, machine, setup, Perturbation()))


def mean_step_s(figures: Figures) -> float:
    """Seconds of a step, mean over the steps of a summary: phases are means, and add up to it."""
    return float(sum(figures["phases_s"].values()))


def of(played: PlayedCase) -> Figures:
    """Seconds of a step by part, mean over steps, with a sentence on the largest."""
    machine, steps = played.bench.machine, played.steps
    setup = settled(steps[0].plans, StageSetup(machine, played.bench.setup))
    seconds = _parts(steps, machine, setup)
    step_s = sum(seconds.values())
    other = max((part for part in PARTS if part not in COMPUTING), key=lambda part: seconds[part])
    computing = sum(seconds[part] for part in COMPUTING)
    layer = _LayerLoads.of(played.first_plan, machine, setup)
    limit = "compute" if computing >= seconds[other] else other
    return {
        "kind": "simulated",
        "planner": played.name,
        "num_steps": len(steps),
        "step_s": step_s,
        "parts_s": seconds,
        "computing_s": computing,
        "limit": limit,
        "largest_loss": other,
        "busiest_nic": _busiest_nic(layer, machine),
        "computing_ranks": layer.spread(),
        "sentence": _sentence(played, seconds, (limit, other), layer).strip(),
    }


def _parts(steps: Sequence[StepPlan], machine: Machine, setup: Setup) -> dict[str, float]:
    """Seconds of each of `PARTS`; they add up to a step, mean over steps."""
    even = replace(machine, slowdown=())
    # In the order of the module's docstring; gradients are synchronised over the same links and
    # have a part of their own.
    machines = [machine, even, _without_transfers(even, inside=False), _without_transfers(even, inside=True)]
    idealised = [simulate(steps, each, setup) for each in machines]
    sync = [each["phases_s"]["gradient_sync"] for each in idealised]
    slow, alone, no_nics, free = (mean_step_s(each) - s for each, s in zip(idealised, sync, strict=True))
    phases = idealised[-1]["phases_s"]
    nic, links = max(0.0, alone - no_nics), max(0.0, no_nics - free)
    remap = min(nic + links, _remap_s(steps, even, setup))
    shrink = 1 - remap / (nic + links) if nic + links else 1.0
    linear, attention = _even_compute_s(steps, machines[-1], setup)
    experts = _experts_s(steps, machines[-1], setup, phases)
    inside = sum(phases[p] for p in ("forward_linear", "forward_attention", "backward_linear", "backward_attention"))
    waiting = phases["waiting"]
    bubble = waiting if setup.pipeline > 1 else 0.0
    lost = max(0.0, inside - linear - attention - experts)
    seconds = {
        "linear": linear,
        "attention": attention,
        "head": phases["head"],
        "optimizer": phases["optimizer"],
        "imbalance": lost + waiting - bubble,
        "straggler": max(0.0, slow - alone),
        "nic": nic * shrink,
        "links": links * shrink,
        "remap": remap,
        "experts": experts,
        "bubble": bubble,
        "gradient_sync": sync[0],
    }
    return _adding_up(seconds, mean_step_s(idealised[0]))


def _adding_up(seconds: dict[str, float], step_s: float) -> dict[str, float]:
    # Seconds by which idealising one thing made another worse count as imbalance, or reduce the
    # largest part.
    left = seconds["imbalance"] + step_s - sum(seconds.values())
    seconds = {**seconds, "imbalance": max(0.0, left)}
    largest = max(seconds, key=lambda part: seconds[part])
    return {**seconds, largest: seconds[largest] + min(0.0, left)}


def _without_transfers(machine: Machine, *, inside: bool) -> Machine:
    """The machine with transfers between nodes that take no time, and `inside` nodes too."""
    factors = Factors(inter_node=_NO_TIME, intra_node=_NO_TIME if inside else 1.0)
    cost = _FreeTransfers(machine.cost, factors) if inside else PerturbedCost(machine.cost, factors)
    return replace(machine, cost=cost)


def _linear_s(plan: MicrobatchPlan, machine: Machine) -> tuple[Floats, Floats]:
    tokens, slow = linear_tokens(plan).tolist(), machine.slow()
    forward, backward = (np.array([machine.cost.layer_s(n, backward=b) for n in tokens]) * slow for b in (False, True))
    return forward, backward


def _call(plan: MicrobatchPlan, enter_s: tuple[Floats, Floats], machine: Machine, setup: Setup) -> BothPhases:
    return mean_call(
        [
            (attention_call(own, on, setup.drawn, enter_s, setup.engine, setup.transport), share)
            for own, on, share in by_mask(plan, machine)
        ]
    )


def _each_microbatch(steps: Sequence[StepPlan], setup: Setup, machine: Machine) -> list[tuple[MicrobatchPlan, float]]:
    """Every plan, and how often a stage runs it in a mean step: its layers."""
    layers = machine.model.num_layers / setup.pipeline
    return [(plan, layers / len(steps)) for step in steps for plan in step.plans]


def _even_compute_s(steps: Sequence[StepPlan], machine: Machine, setup: Setup) -> tuple[float, float]:
    """Seconds outside attention and in it, if all ranks computed equally long."""
    linear = attention = 0.0
    again = 2 if setup.recompute == "full" else 1
    for plan, times in _each_microbatch(steps, setup, machine):
        outside = _linear_s(plan, machine)
        call = _call(plan, outside, machine, setup)
        linear += times * float((again * outside[0] + outside[1]).mean())
        attention += times * float((again * call.forward.compute_s + call.backward.compute_s).mean())
    return linear, attention


def _experts_s(steps: Sequence[StepPlan], machine: Machine, setup: Setup, phases: dict[str, float]) -> float:
    """Seconds of exchanging tokens with experts on other ranks, which hide behind nothing."""
    if setup.experts == 1:
        return 0.0
    without_exchange = simulate(steps, machine, replace(setup, experts=1))["phases_s"]
    return sum(phases[phase] - without_exchange[phase] for phase in ("forward_linear", "backward_linear"))


def _remap_s(steps: Sequence[StepPlan], machine: Machine, setup: Setup) -> float:
    """Seconds that a step gains if each token were at the rank where it attends."""
    gained = 0.0
    for plan, times in _each_microbatch(steps, setup, machine):
        if plan.moves:
            enter_s = _linear_s(plan, machine)
            with_moves, without = (
                sum(float(outcome.end_s.max()) for outcome in _call(each, enter_s, machine, setup))
                for each in (plan, replace(plan, moves=NO_MOVES))
            )
            gained += times * max(0.0, with_moves - without)
    return gained


@dataclass(frozen=True, slots=True)
class _LayerLoads:
    """A layer of a microbatch, both ways: seconds of ranks, bytes over each resource, seconds."""

    compute_s: Floats
    bytes_moved: Floats
    seconds: float

    @staticmethod
    def of(plan: MicrobatchPlan, machine: Machine, setup: Setup) -> _LayerLoads:
        outside = _linear_s(plan, machine)
        forward, backward = call = _call(plan, outside, machine, setup)
        return _LayerLoads(
            outside[0] + outside[1] + forward.compute_s + backward.compute_s,
            forward.bytes_moved + backward.bytes_moved,
            sum(float(outcome.end_s.max()) for outcome in call),
        )

    def spread(self) -> Figures:
        mean = float(self.compute_s.mean())
        return {
            "mean_s": mean,
            "most_s": float(self.compute_s.max()),
            "most_rank": int(self.compute_s.argmax()),
            "least_s": float(self.compute_s.min()),
            "least_rank": int(self.compute_s.argmin()),
            "imbalance": float(self.compute_s.max()) / mean if mean else 1.0,
        }


def _busiest_nic(layer: _LayerLoads, machine: Machine) -> Figures | None:
    """The NIC that most bytes of a layer go over, in one direction; None: none go between nodes."""
    first = 2 * machine.num_ranks
    loads = layer.bytes_moved[first:]
    if not loads.any():
        return None
    at = int(loads.argmax())
    outgoing, nic = at < machine.num_nics, at % machine.num_nics
    return {
        "node": nic // machine.nics.per_node,
        "nic": nic % machine.nics.per_node,
        "direction": "out" if outgoing else "in",
        "bytes": float(loads[at]),
        "mean_bytes": float(loads.mean()),
        "full_share": float(loads[at] / machine.capacity()[first + at] / layer.seconds),
    }


# In words


def _sentence(played: PlayedCase, seconds: dict[str, float], limits: tuple[str, str], layer: _LayerLoads) -> str:
    limit, other = limits
    step_s = sum(seconds.values())
    mean = f", in the mean of the first {len(played.steps)}" if len(played.steps) > 1 else ""
    what = f"A step of {played.name} takes {page.seconds(step_s)}{mean} (simulated)"
    lost = f"{page.seconds(seconds[other])}, {page.percent(seconds[other] / step_s)} of it"
    why = _why(other, played, layer)
    if limit != "compute":
        return f"{what}. What limits it most is {PARTS[other]}: {lost}, would go away without. {why}"
    computing = sum(seconds[part] for part in COMPUTING)
    share = (
        f"{page.seconds(computing)}, {page.percent(computing / step_s)} of it, is arithmetic that even perfect "
        "balance and links would leave"
    )
    if seconds[other] < 0.01 * step_s:
        return f"{what}. Computing limits it: {share}. Nothing else costs as much as one percent."
    return f"{what}. Computing limits it: {share}. The largest loss beside it is {PARTS[other]}: {lost}. {why}"


def _why(part: str, played: PlayedCase, layer: _LayerLoads) -> str:
    machine, spread = played.bench.machine, layer.spread()
    match part:
        case "nic" | "remap":
            nic = _busiest_nic(layer, machine)
            if nic is None:
                return ""
            return (
                f"In the first microbatch the busiest NIC is number {nic['nic']} of node {nic['node']}: "
                f"{page.size(nic['bytes'])} go {nic['direction']} over it in one layer, "
                f"{page.times(nic['bytes'] / nic['mean_bytes'])} the mean NIC's, and keep it full for "
                f"{page.percent(nic['full_share'])} of the layer."
            )
        case "straggler":
            slow = machine.slow()
            return (
                f"Rank {int(slow.argmax())} computes {page.times(float(slow.max()))} as long as it should, "
                "and all others wait for it."
            )
        case "imbalance":
            balance = played.row["imbalance"]
            return (
                f"In the first microbatch rank {spread['most_rank']} computes {page.times(spread['imbalance'])} as "
                f"long as the mean rank; over all batches the most loaded rank has {balance['attention']:.2f} times "
                f"the mean attention work and {balance['tokens']:.2f} times the mean tokens."
            )
        case "bubble":
            setup = played.bench.setup
            few = page.count(max(len(step.plans) for step in played.steps), "microbatch", "microbatches")
            return (
                f"A step has {few} for {setup.pipeline} pipeline stages, which idle while the first comes in "
                "and the last goes out."
            )
        case "gradient_sync":
            return (
                "Every step has one, however many batches it has: more of them in a step (`--microbatches`) share it."
            )
        case _:
            return ""
