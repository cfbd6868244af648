"""A planned step as training would run it, on clocks: microbatches whole or as two nano-batches
(docs/adr/0013), pipeline stages each for itself or attending together (docs/adr/0014), pipelines
side by side (docs/adr/0023).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from megatron_balance.analysis.change import Layouts, PipelineWork, base_sync_s, change, held_bytes, role_bytes
from megatron_balance.analysis.machine import Machine
from megatron_balance.analysis.memory import OPTIMIZER_BYTES
from megatron_balance.cost.base import Floats
from megatron_balance.cost.modules import num_parameters
from megatron_balance.cost.parallel import joined_nodes, wide_ranks
from megatron_balance.cost.perturbed import on_cluster
from megatron_balance.errors import ConfigError
from megatron_balance.ir.model import Model
from megatron_balance.ir.step import StepPlan
from megatron_balance.ir.strategy import Scheme, Strategy
from megatron_balance.simulator.setup import Microbatch, Setup
from megatron_balance.simulator.step import Step, simulate_step
from megatron_balance.simulator.ticks import simulate_joint


def simulate_planned(plan: StepPlan, stage: Machine, pool: Machine, setup: Setup) -> Step:
    """The step on the machine of one stage's ranks and of all stages' (equal where there is one).

    Raises:
        ConfigError: layers or microbatches that the pipeline cannot be given evenly.
    """
    if plan.strategy is not None:
        return _simulate_strategy(plan, plan.strategy, stage, setup)
    microbatches: list[Microbatch] = [each[0] if len(each) == 1 else each for each in plan.microbatches]
    if plan.ticks:
        return simulate_joint(plan.ticks, microbatches, stage, pool, setup)
    return simulate_step(microbatches, stage, setup)


_MEETING = ("gradient_sync", "optimizer")
"""Phases in which all pipelines take part."""


_CHANGE = ("pull", "push")
"""Phases of a step whose weights came from another layout: what nothing covers of them."""


def _simulate_strategy(plan: StepPlan, strategy: Strategy, gpus: Machine, setup: Setup) -> Step:
    """The step of a strategy's pipelines on a machine whose ranks are GPUs.

    Phases are those of the slowest pipeline, and of the slowest one where all meet. `peak_bytes` is
    by GPU, 0 where the strategy leaves one over; with `setup.layouts` a GPU holds the weights and
    gradients of its largest role.

    Raises:
        ConfigError: degrees beside those of the strategy; slow ranks; layers that a pipeline cannot
            be given evenly.
    """
    if (setup.pipeline, setup.interleave, setup.experts) != (1, 1, 1) or gpus.slowdown:
        raise ConfigError(
            f"strategy {strategy} says the degrees of its pipelines, whose ranks are alike; leave out --pipeline, "
            "--interleave, --expert-parallel and --slow"
        )
    steps = [
        _simulate_pipeline(plan.of_pipeline(pipeline), scheme, gpus, setup)
        for pipeline, scheme in enumerate(strategy.pipelines)
    ]
    own_s = [step.step_s - sum(step.phases_s[name] for name in _MEETING) for step in steps]
    slowest = max(range(len(steps)), key=own_s.__getitem__)
    phases = {**steps[slowest].phases_s, **{name: max(step.phases_s[name] for step in steps) for name in _MEETING}}
    layouts, moved = setup.layouts, dict[str, float]()
    if layouts is not None:
        phases |= dict.fromkeys(_CHANGE, 0.0)
        if strategy == layouts.base:  # its weights are gathered when its model runs, beside nothing
            phases["gradient_sync"] = sum(base_sync_s(layouts.base, gpus.model, gpus.cluster))
        else:
            found = change(layouts.base, strategy, gpus.model, gpus.cluster)
            works = [
                PipelineWork(scheme.pipeline, own, *step.layer_s)
                for scheme, own, step in zip(strategy.pipelines, own_s, steps, strict=True)
            ]
            uncovered = found.uncovered_s(works, overlap=layouts.overlap)
            phases |= {"gradient_sync": 0.0, **dict(zip(_CHANGE, uncovered, strict=True))}
            moved = found.traffic.described(gpus.cluster)
    step_s = sum(phases.values())
    ranks = [scheme.num_ranks for scheme in strategy.pipelines]
    held = [np.repeat(step.peak_bytes / s.tensor, s.tensor) for step, s in zip(steps, strategy.pipelines, strict=True)]
    held.append(np.zeros(gpus.num_ranks - strategy.num_ranks))
    peaks = np.concatenate(held)
    if layouts is not None:
        peaks = _with_roles(peaks, strategy, layouts, gpus.model)
    return Step(
        step_s,
        sum(step.num_tokens for step in steps),
        phases,
        peaks,
        {
            name: sum(n * each.utilisation[name] * each.step_s for n, each in zip(ranks, steps, strict=True))
            / (gpus.num_ranks * step_s)
            for name in steps[0].utilisation
        },
        max((step.backward for step in steps), key=lambda each: each.peak_bytes),
        steps[slowest].bubble_share,
        change=moved,
    )


def _with_roles(peaks: Floats, strategy: Strategy, layouts: Layouts, model: Model) -> Floats:
    """Peak bytes of GPUs [num_ranks] where all roles share the memory of the largest. Weights (bf16)
    and gradients of the base layout's own model give their memory back meanwhile.

    `peaks`: with weights and gradients of `strategy` alone, without the optimizer where a GPU is
    left over.
    """
    num_ranks = len(peaks)
    roles = role_bytes(layouts, model, num_ranks)
    if strategy == layouts.base:
        return peaks + roles
    left_over = np.arange(num_ranks) >= strategy.num_ranks
    states = np.where(left_over, OPTIMIZER_BYTES * num_parameters(model) / num_ranks, 0.0)
    return peaks - held_bytes(strategy, model, num_ranks) + states + roles


def _simulate_pipeline(step: StepPlan, scheme: Scheme, gpus: Machine, setup: Setup) -> Step:
    """One pipeline's step; all GPUs share what the pipeline holds of the parameters."""
    wide = wide_ranks(joined_nodes(gpus.cluster, scheme.tensor), scheme.tensor)
    size = wide.node_size
    alike = max(scheme.context, wide.num_ranks // scheme.pipeline)
    alike -= alike % min(alike, size)
    own = replace(wide, num_ranks=scheme.context, ranks_per_node=min(scheme.context, size))
    shared = replace(wide, num_ranks=alike, ranks_per_node=min(alike, size))
    stage, everyone = (
        Machine(cluster, gpus.model, on_cluster(gpus.cost, cluster, scheme.tensor), host=gpus.host)
        for cluster in (own, shared)
    )
    microbatches: list[Microbatch] = [each[0] if len(each) == 1 else each for each in step.microbatches]
    return simulate_step(microbatches, stage, replace(setup, pipeline=scheme.pipeline), sharing=everyone)
