"""auto chooses among the other planners: the fastest that fits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megatron_balance import Cluster, MicrobatchPlan, make_planner
from megatron_balance.analysis.estimate import estimate
from megatron_balance.analysis.machine import Machine
from megatron_balance.config import load_cluster, load_model
from megatron_balance.cost.analytic import AnalyticCost
from megatron_balance.errors import ConfigError, InfeasibleError
from megatron_balance.ir import plan as plans
from megatron_balance.ir.step import EMPTY, Carry, Layers
from megatron_balance.planners import PLANNERS
from megatron_balance.planners.base import StepContext
from megatron_balance.planning.choice import choose_planner
from megatron_balance.simulator.setup import Setup
from megatron_balance.simulator.step import simulate_step

MODEL = load_model("llama-7b")
CLUSTER = load_cluster("h200").build(num_ranks=16, ranks_per_node=8)
LONG = [40000, 9000, 7000, 5000, 3000, 1500]
SHORT = [4096] * 16
REMAPPED = [1786, 16857, 2484, 8655, 13212, 1377, 487, 10695, 1580, 4224, 1494]
MIXED = [20011, 9000, 7301, 6000, 5003, 4000, 3000, 2500, 2000, 1700, 1500, 1200, 900, 700, 400, 321]


def auto(lengths: list[int], cluster: Cluster = CLUSTER, **options: Any) -> MicrobatchPlan:
    return make_planner("auto", cluster, MODEL, **options)(lengths)


def step_s(plan: MicrobatchPlan, cluster: Cluster = CLUSTER) -> float:
    machine = Machine(cluster, MODEL, AnalyticCost(cluster, MODEL))
    return simulate_step([plan], machine, Setup(policy="auto", engine="rounds")).step_s


@pytest.mark.parametrize("lengths", [LONG, SHORT, MIXED], ids=["long", "short", "mixed"])
def test_it_is_no_slower_in_the_simulator_than_the_best_of_those_it_asks(lengths: list[int]) -> None:
    asked = [(name, each) for name, planner in PLANNERS.items() if not planner.left_out for each in planner.tries]
    best = min(step_s(make_planner(name, CLUSTER, MODEL, **each.options)(lengths)) for name, each in asked)
    assert step_s(auto(lengths)) <= 1.01 * best


def test_the_note_says_which_and_why() -> None:
    plan = auto(LONG)
    assert plan.note.startswith("zeppelin: ")
    assert "ms a layer by estimate" in plan.note
    assert "; then " in plan.note
    assert "not faster by their bounds: " in plan.note
    assert not any(name in plan.note for name, planner in PLANNERS.items() if planner.left_out)


def test_a_remap_that_gains_less_than_it_moves_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks with more tokens have less attention here."""
    cluster = load_cluster("a800").build(num_ranks=16, ranks_per_node=8)
    planner = make_planner("knapformer", cluster, MODEL, Layers(routing="pays", remap=True, remap_when="pays"))
    plan = planner(REMAPPED)
    assert not plan.moves
    monkeypatch.setattr("megatron_balance.planning.layers.best_first", lambda _: [0])
    before = planner(REMAPPED)
    assert before.moves
    assert step_s(plan, cluster) < step_s(before, cluster)


def test_a_note_is_no_decision() -> None:
    plan = auto(LONG)
    assert plan.fingerprint() == replace(plan, note="").fingerprint()
    assert plans.from_json(plans.to_json(plan)) == plan


def test_a_plan_that_does_not_fit_is_not_chosen() -> None:
    """hybrid_dp is faster, but holds more tokens on one rank than te_ring."""
    names = ("hybrid_dp", "te_ring")
    roomy = auto(MIXED, planners=names, layers=Layers())
    machine = Machine(CLUSTER, MODEL, AnalyticCost(CLUSTER, MODEL))
    fast, slow = (estimate(make_planner(name, CLUSTER, MODEL)(MIXED), machine) for name in names)
    assert fast is not None
    assert slow is not None
    most, least = (each.backward.replay_bytes for each in (fast, slow))
    assert (fast.layer_s < slow.layer_s, most > least, roomy.planner) == (True, True, "hybrid_dp")
    tight = replace(CLUSTER, memory_bytes=(most + least) / 2)
    chosen = auto(MIXED, tight, planners=names, layers=Layers())
    assert (chosen.planner, "hybrid_dp" in chosen.note, "(does not fit)" in chosen.note) == ("te_ring", True, True)


def test_where_nothing_fits_it_says_so() -> None:
    chosen = auto(MIXED, replace(CLUSTER, memory_bytes=1e9), planners=("te_ring", "ulysses"))
    assert "nothing fits: it needs " in chosen.note


def test_where_nothing_fits_a_little_memory_is_not_worth_seconds() -> None:
    """ulysses needs least by some MB, and takes two fifths longer than zeppelin."""
    tight, names = replace(CLUSTER, memory_bytes=1e10), ("ulysses", "zeppelin")
    machine = Machine(tight, MODEL, AnalyticCost(tight, MODEL))
    least, fast = (estimate(make_planner(name, tight, MODEL)(MIXED), machine) for name in names)
    assert least is not None
    assert fast is not None
    assert not fast.backward.fits
    assert 0 < fast.backward.peak_bytes - least.backward.peak_bytes < 0.02 * tight.memory_bytes
    assert fast.layer_s < 0.75 * least.layer_s
    assert auto(MIXED, tight, planners=names).planner == "zeppelin"


def test_where_nothing_fits_a_remap_is_left_out_all_the_same_if_it_gains_less_than_it_moves() -> None:
    cluster = replace(load_cluster("a800").build(num_ranks=16, ranks_per_node=8), memory_bytes=5e10)
    planner = make_planner("knapformer", cluster, MODEL, Layers(routing="pays", remap=True, remap_when="pays"))
    plan = planner(REMAPPED)
    assert not plan.moves


def test_refusals_of_some_do_not_matter_and_that_of_all_is_the_first_ones() -> None:
    assert auto(SHORT, tokens_per_rank=4096).num_tokens == sum(SHORT)
    with pytest.raises(InfeasibleError, match="tokens"):
        auto(SHORT, tokens_per_rank=4000)


def test_wrong_options_are_errors_that_say_what_to_do() -> None:
    with pytest.raises(ConfigError, match="wlb_llm is not one to ask; expected some of te_ring, "):
        auto(SHORT, planners=["wlb_llm"])
    with pytest.raises(ConfigError, match="use at least 1"):
        auto(SHORT, slack=0.5)
    with pytest.raises(ConfigError, match="expected at least 0"):
        auto(SHORT, margin=-1.0)


def test_steps_nano_batches_and_waiting_sequences_are_those_of_any_planner() -> None:
    cost = AnalyticCost(CLUSTER, MODEL)
    context = StepContext(CLUSTER, MODEL, cost, own_microbatches=False, ping_pong=True)
    choice = choose_planner("auto", {})
    step, carry = choice.plan_step((tuple(LONG), (500,)), context, Carry(waiting=((-1, 700),)))
    assert (carry, [len(each) for each in step.members]) == (EMPTY, [2, 2])
    assert sorted(seq for microbatch in step.members for part in microbatch for seq in part) == [-1, *range(7)]
    assert all(plan.note for plan in step.plans)
