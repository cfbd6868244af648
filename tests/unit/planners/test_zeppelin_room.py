"""Whether layers keep what they receive under a placement in waves, and what is taken where not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_balance.analysis.backward import received_bytes
from megatron_balance.analysis.estimate import estimate
from megatron_balance.analysis.machine import Machine
from megatron_balance.analysis.statistics import tokens_per_rank
from megatron_balance.config import load_cluster, load_model
from megatron_balance.cost.analytic import AnalyticCost
from megatron_balance.ir.batch import Batch
from megatron_balance.ir.model import Model
from megatron_balance.ir.plan import MicrobatchPlan, SharedZone
from megatron_balance.model_config import pretrained
from megatron_balance.planners import zeppelin
from megatron_balance.planners.base import StepContext
from megatron_balance.planners.zeppelin import InWaves, Search, ZeppelinOptions, most_bytes
from megatron_balance.planning.choice import planning_cost
from megatron_balance.simulator.setup import Setup, StageSetup, step_memory
from megatron_balance.simulator.step import simulate_step
from tests.support.deepseek import DEEPSEEK_V3

EXPERTS, STAGES = 32, 16
DEEPSEEK = replace(
    Model(**pretrained({**DEEPSEEK_V3, "num_nextn_predict_layers": 1})), num_layers=64, expert_split=EXPERTS
)
SETUP = Setup("auto", experts=EXPERTS, pipeline=STAGES, recompute="full", engine="rounds")
LONG = (212_365, 42_000, 7_779)
"""As in a microbatch of 256k tokens: two waves of it leave no room on 32 H800 a stage, three do."""


def planned(lengths: tuple[int, ...], **options: Any) -> tuple[MicrobatchPlan, Machine, Machine]:
    """A plan for 512 H800, told their memory; prices and the simulated machine."""
    cluster = load_cluster("h800").build(num_ranks=32)
    machine, cost = Machine(cluster, DEEPSEEK, AnalyticCost(cluster, DEEPSEEK)), planning_cost(cluster, DEEPSEEK, None)
    memory = step_memory(StageSetup(machine, SETUP)).of_microbatches(STAGES)
    context = StepContext(cluster, DEEPSEEK, cost, memory=memory, options=ZeppelinOptions(**options))
    return zeppelin.plan_in(Batch(lengths), context), Machine(cluster, DEEPSEEK, cost, memory=memory), machine


def waves_of(plan: MicrobatchPlan) -> int:
    (zone,) = plan.zones
    assert isinstance(zone, SharedZone)
    return zone.waves


def test_a_placement_comes_in_the_waves_whose_keys_layers_have_room_to_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three waves of a long sequence are faster than two whose keys come again, as simulated too. In
    two, one such microbatch of 16 made all layers of the step replay.
    """
    kept, prices, machine = planned(LONG)
    monkeypatch.setattr(zeppelin, "_surely_keeps", lambda *_: True)
    replayed, *_ = planned(LONG)
    assert (waves_of(replayed), waves_of(kept)) == (2, 3)
    seconds: list[float] = []
    for plan, keeps in ((kept, True), (replayed, False)):
        found, step = estimate(plan, prices), simulate_step([plan] * STAGES, machine, SETUP)
        assert found is not None
        assert (found.backward.in_words, step.backward.in_words) == (("keep" if keeps else "replay"),) * 2
        forward_s, with_again_s = step.layer_s
        assert found.layer_s == pytest.approx(with_again_s, rel=0.05)
        assert found.forward_s == pytest.approx(forward_s, rel=0.05)
        seconds.append(step.step_s)
    assert seconds[0] < 0.98 * seconds[1]


def test_the_search_is_made_again_for_layers_that_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    told, placed = list[bool](), Search.placed

    def noted(self: Search, *, replays: bool) -> InWaves | None:
        told.append(replays)
        return placed(self, replays=replays)

    monkeypatch.setattr(Search, "placed", noted)
    planned(LONG)
    assert told == [False, True]


def test_a_number_of_waves_that_is_asked_for_stays() -> None:
    plan, *_ = planned(LONG, num_waves=2)
    assert waves_of(plan) == 2


def test_plans_with_room_are_not_estimated_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(Search, "with_room", never)
    cluster, model = load_cluster("h200").build(num_ranks=16), load_model("llama-7b")
    cost = AnalyticCost(cluster, model)
    assert zeppelin.plan(Batch((20_000, 9_000, *[1_000] * 20)), cluster, model, cost, ZeppelinOptions()).zones
    with pytest.raises(AssertionError):
        planned(LONG)


@settings(max_examples=40)
@given(
    st.lists(st.integers(1, 60_000), min_size=1, max_size=30),
    st.sampled_from(("llama-7b", "llama3-8b", "llama-30b", "deepseek")),
    st.sampled_from((8, 16)),
    st.sampled_from((1, 2, 4, 8)),
)
def test_no_rank_owns_or_receives_more_than_the_bound(lengths: list[int], name: str, ranks: int, size: int) -> None:
    cluster, model = load_cluster("h100").build(num_ranks=ranks), DEEPSEEK if name == "deepseek" else load_model(name)
    cost = AnalyticCost(cluster, model)
    found = search_of(lengths, StepContext(cluster, model, cost, options=ZeppelinOptions(group_size=size)))
    in_waves = found.placed(replays=False)
    assert in_waves is not None
    plan = in_waves.plan
    most, held = most_bytes(in_waves, found.machine), received_bytes(plan, model)
    assert tokens_per_rank(plan).max() <= most.tokens
    for what in ("kept", "replayed", "working"):
        assert getattr(held, what).max() <= getattr(most.received, what), what


def test_without_waves_that_leave_room_the_faster_of_both_searches_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of those that fit, the one of the shorter layer."""
    (kept, prices, _), (replayed, *_) = planned(LONG), planned(LONG, num_waves=2)
    context = StepContext(prices.cluster, prices.model, prices.cost, memory=prices.memory, options=ZeppelinOptions())
    search = search_of(LONG, context)
    found = search.placed(replays=False)
    assert found is not None
    chosen = found.chosen
    own, other, slow = (InWaves(plan, chosen) for plan in (replayed, kept, replace(replayed, zones=_in(replayed, 8))))

    def best(again: InWaves | None, numbers: tuple[int, ...], memory_bytes: float | None = None) -> InWaves:
        monkeypatch.setattr(zeppelin, "WAVES", numbers)
        monkeypatch.setattr(Search, "placed", lambda *_, **__: again)
        cluster = prices.cluster if memory_bytes is None else replace(prices.cluster, memory_bytes=memory_bytes)
        return search_of(LONG, replace(context, cluster=cluster)).with_room(own)

    assert best(other, ()) == other
    assert best(None, ()) == own
    assert best(own, (2,)) == own
    assert best(None, (1, 2, 3)).plan == replace(replayed, zones=_in(replayed, 3))
    cramped = replace(prices, cluster=replace(prices.cluster, memory_bytes=70e9))
    seconds = [known.layer_s for each in (own, slow) if (known := estimate(each.plan, cramped))]
    assert seconds[0] < seconds[1]
    assert best(slow, (), 70e9) == slow, "which fits"


def _in(plan: MicrobatchPlan, number: int) -> tuple[SharedZone]:
    (zone,) = plan.zones
    assert isinstance(zone, SharedZone)
    return (replace(zone, waves=number),)


def search_of(lengths: Sequence[int], context: StepContext) -> Search:
    """The search for a plan of one microbatch, whatever it holds."""
    return Search(tuple(lengths), context, sum(lengths))
