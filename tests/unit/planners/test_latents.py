"""Planners where the latent of multi-latent attention travels: none that may goes by heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

pytest.importorskip("torch")

from megatron_balance.config import load_cluster
from megatron_balance.cost.analytic import AnalyticCost
from megatron_balance.errors import ConfigError
from megatron_balance.ir.model import Model
from megatron_balance.ir.plan import MicrobatchPlan
from megatron_balance.planners import PLANNERS
from megatron_balance.planners.base import StepContext
from megatron_balance.planning.choice import choose_planner
from megatron_balance.runtime.kernels.latent import check_latent

CLUSTER = load_cluster("h100").build(num_ranks=16, ranks_per_node=8)
MODEL = Model(
    *(128, 1, 192, 61, 7168, 2048),
    name="deepseek-v3",
    value_dim=128,
    latent_rank=512,
    latent_rope=64,
    query_rank=1536,
    latent_travels=True,
)
BATCHES = ((16 * 4096,), (9000, 20000, *(700,) * 50), (40, 64, 3000))


def plans(name: str, options: Mapping[str, Any], batches: Sequence[tuple[int, ...]] = BATCHES) -> list[MicrobatchPlan]:
    context = StepContext(CLUSTER, MODEL, AnalyticCost(CLUSTER, MODEL))
    choice = choose_planner(name, {"tokens_per_rank": 8192, **options})
    return [plan for lengths in batches for plan in choice.plan_step((lengths,), context)[0].plans]


@pytest.mark.parametrize("name", [name for name in PLANNERS if not PLANNERS[name].parts({})])
def test_planners_that_do_not_part_heads_plan_for_latents(name: str) -> None:
    for plan in plans(name, {}):
        check_latent(plan)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {}) for name in PLANNERS if PLANNERS[name].parts({})),
        ("zeppelin", {"rule": "groups"}),
        ("zeppelin", {"group_size": 8}),
        ("wlb_llm", {"within": "ulysses"}),
    ],
)
def test_those_that_do_say_so(name: str, options: Mapping[str, Any]) -> None:
    assert PLANNERS[name].parts(options)
    (plan,) = plans(name, options, BATCHES[:1])
    with pytest.raises(ConfigError, match="parts heads"):
        check_latent(plan)


def test_auto_asks_none_of_them() -> None:
    assert {plan.planner for plan in plans("auto", {"planners": ["knapformer", "te_ring"]})} == {"te_ring"}
    with pytest.raises(ConfigError, match=r"auto: planners: ulysses part heads, .* name others"):
        plans("auto", {"planners": ["ulysses"]})
