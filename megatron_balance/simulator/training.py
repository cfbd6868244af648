"""A planned step as training would run it, on clocks: microbatches whole or as two nano-batches
(docs/adr/0013), pipeline stages each for itself or attending together (docs/adr/0014), pipelines
side by side (docs/adr/0023).
"""

from __future__ import annotations

from megatron_balance.ir.step import StepPlan
from megatron_balance.simulator.joint import simulate_joint
from megatron_balance.simulator.machine import Machine
from megatron_balance.simulator.setup import Microbatch, Setup
from megatron_balance.simulator.side_by_side import simulate_strategy
from megatron_balance.simulator.step import Step, simulate_step


def simulate_planned(plan: StepPlan, stage: Machine, pool: Machine, setup: Setup) -> Step:
    """The step on the machine of one stage's ranks and of all stages' (equal where there is one).

    Raises:
        ConfigError: layers or microbatches that the pipeline cannot be given evenly.
    """
    if plan.strategy is not None:
        return simulate_strategy(plan, plan.strategy, stage, setup)
    microbatches: list[Microbatch] = [each[0] if len(each) == 1 else each for each in plan.microbatches]
    if plan.ticks:
        return simulate_joint(plan.ticks, microbatches, stage, pool, setup)
    return simulate_step(microbatches, stage, setup)
