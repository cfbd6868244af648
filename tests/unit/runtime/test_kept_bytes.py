"""Received bytes as the plan predicts them, beside the buffers that the runtime counts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from megatron_balance.analysis.backward import ReceivedBytes, received_bytes
from megatron_balance.compile.transpose import POLICIES, Policy
from megatron_balance.cost.analytic import AnalyticCost
from megatron_balance.errors import ConfigError
from megatron_balance.ir.batch import Batch
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.model import Model
from megatron_balance.ir.plan import MicrobatchPlan
from megatron_balance.planners import PLANNERS
from megatron_balance.planning.choice import choose_layers, choose_planner
from megatron_balance.runtime.bind import AttentionShape, bind
from megatron_balance.runtime.groups import Groups
from megatron_balance.runtime.lower.memory import PeakBytes
from megatron_balance.runtime.pool import BufferPool
from tests.support.strategies import EVERY_PATTERN

HEADS, KV_HEADS, DIM, RANKS = 8, 4, 64, 8
MODEL, CLUSTER = Model(HEADS, KV_HEADS, DIM), Cluster(RANKS, 4)
PLANNED = [*((name, "") for name in PLANNERS), ("zeppelin", "groups")]
"""Planners, and the rule of one whose other rule takes another comm pattern."""
IN_THE_SUITE = (*EVERY_PATTERN, "wlb_sharding", "knapformer")
CASES = [
    pytest.param((name, rule, moved), marks=() if name in IN_THE_SUITE else (pytest.mark.product,))
    for name, rule in PLANNED
    for moved in (False, True)
]
LENGTHS = (900, 4000, 333, 70, 1200, 2500, 64, 1500)


@dataclass(frozen=True)
class Counted:
    """Counts of each rank's bound plan, by policy, beside the prediction."""

    predicted: ReceivedBytes
    by_policy: dict[Policy, list[PeakBytes]]


def plan_of(planner: str, rule: str, *, remapped: bool) -> MicrobatchPlan:
    options = {"tokens_per_rank": 2200} | ({"rule": rule} if rule else {})
    choice = choose_planner(planner, options, layers=choose_layers(planner, "always", remapped))
    return choice.plan(Batch(LENGTHS), CLUSTER, MODEL, AnalyticCost(CLUSTER, MODEL))


def count(plan: MicrobatchPlan, rank: int, policy: Policy) -> PeakBytes:
    groups = Groups(rank, RANKS, tuple(range(RANKS)), None, buffers=BufferPool(cpu=True))
    shape = AttentionShape(HEADS, KV_HEADS, DIM)
    found = bind(plan, rank, shape, groups=groups, dtype=torch.bfloat16, policy=policy, kernel="plain").peak_bytes
    assert found is not None
    return found


@pytest.fixture(scope="module", params=CASES, ids=str)
def counted(request: pytest.FixtureRequest) -> Counted:
    planner, rule, remapped = request.param
    try:
        plan = plan_of(planner, rule, remapped=remapped)
    except ConfigError as error:
        pytest.skip(str(error))
    return Counted(
        received_bytes(plan, MODEL), {policy: [count(plan, r, policy) for r in range(RANKS)] for policy in POLICIES}
    )


def test_kept_bytes_are_those_that_the_runtime_counts(counted):
    assert counted.predicted.kept.tolist() == [each.kept_bytes for each in counted.by_policy["keep"]]
    assert all(each.kept_bytes == 0 for each in counted.by_policy["replay"])


def test_a_call_needs_about_the_bytes_predicted_on_the_fullest_rank(counted):
    """Gradients and messages on their way are estimated, within a factor of 1.7."""
    held = {"keep": counted.predicted.kept, "replay": counted.predicted.replayed}
    for policy, found in counted.by_policy.items():
        beside = np.array([each.call_bytes for each in found])
        predicted = held[policy] + counted.predicted.working
        assert 0.6 * predicted.max() < beside.max() < 1.5 * predicted.max()


def test_a_replayed_call_never_holds_more_inputs_than_a_kept_one(counted):
    assert (counted.predicted.replayed <= counted.predicted.kept).all()
