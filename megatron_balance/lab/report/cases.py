"""The question of a report: planners on a machine, their plans and steps, and variants of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_balance.analysis.machine import Machine
from megatron_balance.ir.batch import Batch
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.plan import MicrobatchPlan
from megatron_balance.ir.step import StepPlan
from megatron_balance.planning.choice import PlannerChoice
from megatron_balance.simulator.report import Perturbation, simulate_plans, summary
from megatron_balance.simulator.step import Setup

Figures = dict[str, Any]
"""A JSON object."""

MOST_STEPS = 4
"""Number of first steps on which limits and variants are simulated."""


@dataclass(frozen=True, slots=True)
class Case:
    """One planner on one machine. `cluster` is what it plans for; `group`: batches of a step."""

    choice: PlannerChoice
    batches: tuple[Batch, ...]
    group: int
    cluster: Cluster
    machine: Machine
    setup: Setup

    def first_steps(self) -> Case:
        """A copy of the case with the first few steps only."""
        return replace(self, batches=self.batches[: MOST_STEPS * self.group])


@dataclass(frozen=True, slots=True)
class PlayedCase:
    """A case's steps; `row`: figures as `compare` prints them, with phases and utilisation."""

    case: Case
    steps: tuple[StepPlan, ...]
    row: Figures

    @property
    def name(self) -> str:
        return self.case.choice.name

    def first_steps(self) -> PlayedCase:
        """A copy with the first few steps only; the row stays that of all steps."""
        return replace(self, case=self.case.first_steps(), steps=self.steps[:MOST_STEPS])

    @property
    def first_plan(self) -> MicrobatchPlan:
        """The first microbatch of the first step."""
        return self.steps[0].plans[0]


@dataclass(frozen=True, slots=True)
class Asked:
    """The question.

    `plan`: how a case is planned; `play`: the same, timed and simulated, on machines that differ if
    it was asked so.

    `assumed`: the defaults taken, in words; `lengths`: source of the lengths; `costs`: the file
    of measured times, empty: data sheets. `explicit`: the user named the planners, so one that
    cannot place the batch is a mistake.
    """

    cases: tuple[Case, ...]
    baseline: str
    plan: Callable[[Case], tuple[StepPlan, ...]]
    play: Callable[[Case], PlayedCase]
    assumed: str
    lengths: str
    costs: str
    explicit: bool
    gpus_per_rank: int
    price: float | None = None
    """Of a GPU-hour."""


def simulate(steps: Sequence[StepPlan], machine: Machine, setup: Setup) -> Figures:
    """The summary of some steps on a machine that is as it was planned for."""
    return summary(simulate_plans(steps, machine, setup, Perturbation()))


def mean_step_s(figures: Figures) -> float:
    """Seconds of a step, mean over the steps of a summary: phases are means, and add up to it."""
    return float(sum(figures["phases_s"].values()))
