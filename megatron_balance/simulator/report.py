"""Several simulated steps as the figures that `megatron-balance simulate` prints; none was
measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from megatron_balance.analysis.machine import Machine
from megatron_balance.cost.perturbed import Factors, PerturbedCost
from megatron_balance.errors import ConfigError, suggest
from megatron_balance.ir.plan import MicrobatchPlan
from megatron_balance.ir.step import StepPlan
from megatron_balance.simulator.setup import Setup
from megatron_balance.simulator.step import Step, simulate_step


@dataclass(frozen=True, slots=True)
class Perturbation:
    """Machines that differ from the one that was planned for: `draws` of them, times off by factors
    exp(N(0, `spread`)).
    """

    spread: float = 0.0
    draws: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        if self.spread < 0:
            raise ConfigError(f"spread {self.spread}: must not be negative; 0.1 is about 10 %")
        if self.draws < 1:
            raise ConfigError(f"draws {self.draws}: must be at least 1")

    def machines(self, machine: Machine) -> Iterator[Machine]:
        """Yield the machine itself, or `draws` others."""
        if not self.spread:
            yield machine
            return
        for draw in range(self.draws):
            cost = PerturbedCost(machine.cost, Factors.draw(self.spread, self.seed + draw))
            yield replace(machine, cost=cost)


def setup_of(options: Mapping[str, Any]) -> Setup:
    """The setup with these options.

    Raises:
        ConfigError: no such option.
    """
    known = [field.name for field in fields(Setup)]
    for name in options:
        if name not in known:
            hint = suggest(name, known)
            told = f", {hint}" if hint else f". Options: {', '.join(known)}"
            raise ConfigError(f"simulate: unknown option {name!r}{told}")
    return Setup(**options)


def simulate_plans(
    plans: Sequence[StepPlan | MicrobatchPlan], machine: Machine, setup: Setup, perturbation: Perturbation
) -> list[Step]:
    """Simulate every plan, each a step, on every machine."""
    machines = list(perturbation.machines(machine))
    return [simulate_step(_microbatches(plan), each, setup) for plan in plans for each in machines]


def _microbatches(plan: StepPlan | MicrobatchPlan) -> tuple[MicrobatchPlan, ...]:
    """Every plan as a microbatch of its own; `simulator.training` runs nano-batches interleaved."""
    return plan.plans if isinstance(plan, StepPlan) else (plan,)


def _changes(steps: Sequence[Step]) -> dict[str, Any]:
    """Means of what steps pulled and pushed, of those that did; none where weights stay."""
    moved = [step.change for step in steps if step.change]
    if not moved:
        return {}
    means = {name: float(np.mean([each[name] for each in moved])) for name in moved[0]}
    return {"changes": {"steps": len(moved), **means}}


def summary(steps: Sequence[Step]) -> dict[str, Any]:
    """The keys of `simulate` for several steps.

    Median, p5 and p95 of their seconds; means of phases and utilisation; each rank's largest peak.
    """
    seconds = np.array([step.step_s for step in steps])
    median, low, high = (float(np.percentile(seconds, at)) for at in (50, 5, 95))
    return {
        "step_s": {"median": median, "p5": low, "p95": high},
        "mean_step_s": float(seconds.mean()),
        "tokens_per_s": sum(step.num_tokens for step in steps) / float(seconds.sum()),
        "phases_s": {name: float(np.mean([step.phases_s[name] for step in steps])) for name in steps[0].phases_s},
        "peak_bytes_per_rank": np.max([step.peak_bytes for step in steps], axis=0).tolist(),
        "utilisation": {
            name: float(np.mean([step.utilisation[name] for step in steps])) for name in steps[0].utilisation
        },
        **_changes(steps),
        "backward": max((step.backward for step in steps), key=lambda each: each.peak_bytes).described(),
        "kind": "simulated",
    }
