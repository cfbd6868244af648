"""The simulator: the same programs on clocks instead of tensors (docs/simulator.md)."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from megatron_balance.cost.base import MachineCost
from megatron_balance.errors import ConfigError, suggest
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.model import Model
from megatron_balance.ir.plan import MicrobatchPlan
from megatron_balance.ir.step import StepPlan


def simulate(
    plan: MicrobatchPlan | StepPlan | Sequence[MicrobatchPlan | StepPlan],
    cluster: Cluster,
    model: Model,
    cost: MachineCost | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Simulate a step for each plan: step_s, tokens_per_s, phases_s, attention_s,
    peak_bytes_per_rank, utilisation.

    `plan`: of a microbatch or a step; several: a step each; `cost`: prices of kernels and links; not
    given: `cost.analytic.AnalyticCost`; `options`: those of `simulator.setup.Setup`. Raises
    ConfigError: no such option; a plan for other ranks than the cluster's.
    """
    from megatron_balance.analysis.machine import Machine
    from megatron_balance.cost.analytic import AnalyticCost
    from megatron_balance.simulator.setup import Setup
    from megatron_balance.simulator.step import Perturbation, simulate_plans, summary

    plans = [plan] if isinstance(plan, MicrobatchPlan | StepPlan) else list(plan)
    machine = Machine(cluster, model, cost if cost is not None else AnalyticCost(cluster, model))
    known = [field.name for field in fields(Setup)]
    for name in options:
        if name not in known:
            hint = suggest(name, known)
            told = f", {hint}" if hint else f". Options: {', '.join(known)}"
            raise ConfigError(f"simulate: unknown option {name!r}{told}")
    return summary(simulate_plans(plans, machine, Setup(**options), Perturbation()))
