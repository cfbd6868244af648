"""The memory that a planner inside a pipeline is told: that of its scheme."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_balance.analysis.step_memory import StepMemory, stages_of
from megatron_balance.config import load_cluster, load_model
from megatron_balance.cost.analytic import AnalyticCost
from megatron_balance.ir.strategy import Strategy
from megatron_balance.planners.base import StepContext
from megatron_balance.planners.hydraulis import HydraulisOptions
from megatron_balance.planners.pipelines import pipelines_of

MODEL = load_model("llama-7b")
CLUSTER = load_cluster("h100").build(num_ranks=16, ranks_per_node=8)
TOLD = StepMemory(MODEL, tuple(stages_of(MODEL, 16, recompute="full")), "replay")
CONTEXT = StepContext(
    CLUSTER, MODEL, AnalyticCost(CLUSTER, MODEL), options=HydraulisOptions(tokens_per_rank=8192), memory=TOLD
)
STRATEGY = Strategy.parse("tp2-pp2-cp2+tp1-pp1-cp8")


def test_it_is_of_the_stages_of_its_scheme_and_of_all_ranks_that_share_the_optimizer() -> None:
    halves, whole = (inside.memory for inside in pipelines_of(STRATEGY, CONTEXT).inside)
    assert halves is not None
    assert whole is not None
    assert (halves.asked, halves.stages[0].recompute) == (TOLD.asked, TOLD.stages[0].recompute)
    assert [(each.num_layers, each.sharding.optimizer) for each in halves.stages] == [(16, 4), (16, 4)]
    assert [(each.num_layers, each.sharding.optimizer) for each in whole.stages] == [(32, 16)]


def test_a_rank_that_is_one_gpu_has_its_part_of_a_groups_state() -> None:
    of_groups, of_gpus = (
        pipelines_of(STRATEGY, replace(CONTEXT, of_ranks=of_ranks)).inside[0].memory for of_ranks in (False, True)
    )
    assert of_groups is not None
    assert of_gpus is not None
    for group, gpu in zip(of_groups.stages, of_gpus.stages, strict=True):
        assert gpu.state_bytes is not None
        assert group.state_bytes == pytest.approx(2 * gpu.state_bytes)
    assert of_gpus.model == MODEL.share(2)


def test_a_jobs_own_layout_is_what_it_is_told() -> None:
    own = Strategy.parse("2*tp1-pp1-cp8")
    assert [inside.memory for inside in pipelines_of(own, replace(CONTEXT, strategy=own)).inside] == [TOLD, TOLD]
