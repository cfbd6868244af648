"""Predicted seconds of a job's steps, to choose between ways of running it before the first one."""

from __future__ import annotations

from math import inf
from typing import NamedTuple

from megatron_balance.analysis.estimate import estimate
from megatron_balance.analysis.estimate.times import PricedMachine
from megatron_balance.ir.step import Lengths
from megatron_balance.planners.pipelines import stage_cluster
from megatron_balance.planning.choice import planning_cost
from megatron_balance.planning.step_planner import PlanSpec, StepPlanner


class Predicted(NamedTuple):
    """Of a layer, modules outside attention included; less is better."""

    too_large: bool
    """Whether a rank's memory does not hold the step."""
    layer_s: float
    """Infinite where nobody can tell."""


def predict(spec: PlanSpec, lengths: Lengths) -> Predicted:
    """The step of these lengths (tokens, by microbatch), planned as `spec` says and priced by closed
    forms (`analysis.estimate`): seconds of a layer, summed over the step's plans.

    Raises:
        InfeasibleError: a microbatch that the ranks cannot hold.
        ConfigError: as `StepPlanner.plan`, of the planner's options.
    """
    step, _ = StepPlanner(spec).plan(lengths)
    too_large, total = False, 0.0
    for plan in step.plans:
        ranks = spec.cluster
        if plan.num_ranks != ranks.num_ranks:  # of a pipeline's own
            ranks = stage_cluster(ranks, plan.num_ranks)
        cost = planning_cost(ranks, spec.model, spec.plan_costs)
        found = estimate(plan, PricedMachine.of(ranks, spec.model, cost, spec.memory))
        total += inf if found is None else found.layer_s
        too_large |= found is not None and not found.backward.fits
    return Predicted(too_large, total)
