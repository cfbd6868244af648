"""Memory of a simulated step by `analysis.backward`: how many layers keep, the peak of each rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from megatron_balance.analysis import room
from megatron_balance.analysis.backward import Decision, Stage, StepBytes, decide, microbatch_bytes, step_bytes
from megatron_balance.analysis.step_memory import StepMemory
from megatron_balance.cost.base import Floats
from megatron_balance.ir.program import Policy
from megatron_balance.simulator.around import Around
from megatron_balance.simulator.setup import Microbatch, Setup, parts_of


def stages_of(around: Around) -> list[Stage]:
    """The pipeline stages of a step, each over the ranks of the machine."""
    setup, machine = around.setup, around.machine
    return room.stages_of(
        machine.model,
        machine.num_ranks,
        recompute=setup.recompute,
        pipeline=setup.pipeline,
        chunks=setup.interleave,
        experts=setup.experts,
    )


def step_memory(around: Around) -> StepMemory:
    """The memory of a step around its plans, for planners."""
    return StepMemory(around.machine.model, tuple(stages_of(around)), around.setup.policy)


def predicted(plans: Sequence[Microbatch], around: Around) -> list[StepBytes]:
    """Predicted bytes of each stage's ranks."""
    model = around.machine.model
    known = {id(plan): plan for plan in plans}
    found = {key: microbatch_bytes(parts_of(plan), model) for key, plan in known.items()}
    return [step_bytes([found[id(plan)] for plan in plans], model, stage) for stage in stages_of(around)]


def decided(plans: Sequence[Microbatch], around: Around) -> Decision:
    """Number of layers that keep, by the memory of the cluster's ranks; as training decides it."""
    return decide(predicted(plans, around), around.setup.policy, around.machine.cluster.memory_bytes)


def peaks(stages: Sequence[StepBytes], keeping: int) -> Floats:
    """Peak bytes by rank, stage by stage."""
    return np.concatenate([stage.peak(min(keeping, stage.layers)) for stage in stages])


def settled(plans: Sequence[Microbatch], around: Around) -> Setup:
    """The setup with `auto` decided: the policy of most layers, for figures of one layer."""
    if around.setup.policy != "auto":
        return around.setup
    decision = decided(plans, around)
    policy: Policy = "keep" if 2 * decision.keeping >= decision.layers else "replay"
    return replace(around.setup, policy=policy)
