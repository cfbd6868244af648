"""The estimate of a layer against the simulator, and bounds below it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import megatron_balance.analysis.estimate as module
from megatron_balance import Cluster, MicrobatchPlan, Model, make_planner
from megatron_balance.analysis.backward import GB, Decision
from megatron_balance.analysis.estimate import Bounds, Estimate, best_first, estimate, zones
from megatron_balance.analysis.estimate.times import PricedMachine as Prices
from megatron_balance.config import load_cluster, load_model
from megatron_balance.cost.analytic import AnalyticCost
from megatron_balance.planners import PLANNERS
from megatron_balance.simulator.machine import Machine
from megatron_balance.simulator.setup import Setup
from megatron_balance.simulator.step import Step, bound_s, simulate_step

LENGTHS = [20011, 9000, 7301, 6000, 5003, 4000, 3000, 2500, 2000, 1700, 1500, 1200, 900, 700, 400, 321]
MODEL = load_model("llama3-8b")
H200, A800 = (load_cluster(name).build(num_ranks=16, ranks_per_node=8) for name in ("h200", "a800"))
Range = tuple[float, float]
NEAR: list[tuple[str, dict[str, Any], dict[str, Range]]] = [
    # Layers keep or replay by the same memory on both sides (policy auto): beside layers that all
    # keep, rings that replay for want of memory look 1.19 to 1.28 times too slow.
    ("te_ring", {}, {"causal": (0.98, 1.08), "full": (0.98, 1.02), "window": (0.98, 1.0)}),
    ("hydraulis", {}, {"causal": (0.98, 1.08), "full": (0.98, 1.02), "window": (0.98, 1.0)}),
    ("megatron", {}, {"causal": (0.98, 1.08), "full": (0.98, 1.02), "window": (0.98, 1.0)}),
    ("hybrid_dp", {}, {"causal": (0.99, 1.02), "full": (0.99, 1.03), "window": (0.96, 1.0)}),
    ("megatron_dynamic", {}, {"causal": (0.99, 1.03), "full": (0.99, 1.03), "window": (0.98, 1.02)}),
    ("zeppelin", {"rule": "paper"}, {"causal": (0.98, 1.02), "full": (0.98, 1.02), "window": (0.95, 1.0)}),
    # Full, latents: a routed ring over 8 + 2 ranks with a remap, which all ranks wait for here.
    (
        "zeppelin",
        {"rule": "groups", "group_size": 1},
        {"causal": (0.98, 1.09), "full": (0.99, 1.11), "window": (0.97, 1.09)},
    ),
    ("zeppelin", {"rule": "groups"}, {"causal": (0.97, 1.01), "full": (0.98, 1.03), "window": (0.97, 1.09)}),
    ("zeppelin", {"rule": "groups", "group_size": 4}, {"causal": (0.95, 1.06), "full": (0.97, 1.03)}),
    ("zeppelin", {}, {"causal": (0.98, 1.01), "full": (0.99, 1.01), "window": (0.97, 1.09)}),
    ("zeppelin", {"group_size": 2, "num_waves": 3}, {"causal": (0.95, 1.1)}),  # several ranks on a NIC
    ("zeppelin", {"group_size": 16}, {"causal": (0.98, 1.02)}),
    ("ulysses", {}, {"causal": (0.99, 1.01), "full": (0.99, 1.01), "window": (0.98, 1.01)}),
    ("flexsp", {}, {"causal": (0.99, 1.01), "full": (0.99, 1.01), "window": (0.98, 1.0)}),
    ("knapformer", {}, {"causal": (0.99, 1.01), "full": (0.99, 1.01), "window": (0.97, 1.0)}),
    ("knapformer", {"slack": 2.0}, {"causal": (0.99, 1.01)}),
    ("llama_all_gather", {}, {"causal": (0.95, 1.0), "full": (0.93, 1.0), "window": (0.98, 1.0)}),
    ("wlb_sharding", {}, {"causal": (0.95, 1.0), "full": (0.93, 1.0), "window": (0.97, 1.0)}),
    ("wlb_llm", {}, {"causal": (0.95, 1.0), "full": (0.93, 1.0), "window": (0.98, 1.0)}),
    # Messages of one rank that share a NIC end one by one; full, latents: what is passed on inside a
    # node in a replay waits for other zones' launches in the round engine, not in that of events.
    ("packing", {}, {"causal": (0.97, 1.0), "full": (0.88, 1.0), "window": (0.98, 1.0)}),
    # All ranks pack and place as much as the fullest one here.
    ("distca", {}, {"causal": (1.03, 1.27), "window": (0.98, 1.14)}),
    ("auto", {}, {"causal": (0.97, 1.01), "full": (0.88, 1.03), "window": (0.97, 1.01)}),
]
"""By planner and mask, the estimate of a layer over that of the round engine, of all of `MACHINES`. A
mask that is not there: none of the planner, or no case of its own.
"""


def machine_of(model: Model, cluster: str) -> tuple[Model, Cluster]:
    return model, load_cluster(cluster).build(num_ranks=16, ranks_per_node=8)


LATENTS = replace(
    Model(128, 1, 192, 61, 7168, 2048, value_dim=128, num_experts=256, experts_per_token=9, vocab_size=129280),
    latent_rank=512,
    latent_rope=64,
    query_rank=1536,
    latent_travels=True,
)
MACHINES = [
    machine_of(load_model("llama-7b"), "a800"),
    machine_of(MODEL, "h200"),
    machine_of(MODEL, "a800"),
    machine_of(LATENTS, "h200"),
]
MASKS = {"causal": "causal", "full": "full", "window": "window_2048"}


def simulated(plan: MicrobatchPlan, cluster: Cluster, model: Model) -> Step:
    machine = Machine(cluster, model, AnalyticCost(cluster, model))
    return simulate_step([plan], machine, Setup(policy="auto", engine="rounds"))


def layer_s(step: Step, model: Model) -> float:
    around = ("head", "gradient_sync", "optimizer")
    return (step.step_s - sum(step.phases_s[name] for name in around)) / model.num_layers


def estimated(plan: MicrobatchPlan, cluster: Cluster, model: Model) -> Estimate:
    found = estimate(plan, Prices.of(cluster, model, AnalyticCost(cluster, model)))
    assert found is not None
    return found


CASES = [(name, options, mask, near) for name, options, masks in NEAR for mask, near in masks.items()]
HALF = [pytest.param(*case, MACHINES[at % 2 :: 2]) for at, case in enumerate(CASES)]
OTHER = [pytest.param(*case, MACHINES[1 - at % 2 :: 2], marks=pytest.mark.product) for at, case in enumerate(CASES)]
"""Each planner and mask on two of the machines, and on the two others."""


@pytest.mark.parametrize(("name", "options", "mask", "near", "machines"), [*HALF, *OTHER])
def test_an_estimate_is_near_what_the_simulator_says(
    name: str, options: dict[str, Any], mask: str, near: Range, machines: list[tuple[Model, Cluster]]
) -> None:
    """And neither is below what the planner cannot come below, nor the estimate below the physical
    bound that `compare` prints.
    """
    for causal, cluster in machines:
        if causal.latent_travels and PLANNERS[name].parts(options):
            continue
        model = replace(causal, attention=MASKS[mask])
        plan = make_planner(name, cluster, model, **options)(LENGTHS)
        found, step = estimated(plan, cluster, model), simulated(plan, cluster, model)
        assert near[0] <= found.layer_s / layer_s(step, model) <= near[1], (cluster.name, model.name)
        assert found.backward.peak_bytes == pytest.approx(step.backward.peak_bytes, rel=0.01)
        assert found.backward.fits == step.backward.fits
        assert abs(found.backward.keeping - step.backward.keeping) <= 1
        cost = AnalyticCost(cluster, model)
        bounds, mean = Bounds.of(LENGTHS, cluster, model, cost), sum(LENGTHS) / cluster.num_ranks
        head_s = sum(cost.head_s(mean, backward=backward) for backward in (False, True))
        assert model.num_layers * found.layer_s + head_s >= bound_s((tuple(LENGTHS),), Machine(cluster, model, cost))
        for each in PLANNERS[name].tries if not options else ():
            made = make_planner(name, cluster, model, **each.options)(LENGTHS) if each.options else plan
            assert each.least(bounds) <= 1.001 * layer_s(simulated(made, cluster, model), model)


def test_every_planner_has_its_tolerances() -> None:
    there = {(name, mask) for name, options, masks in NEAR for mask in masks if not options or name == "zeppelin"}
    assert there >= {(name, mask) for name, planner in PLANNERS.items() for mask in planner.masks}


@pytest.mark.parametrize(
    ("name", "options"), [("knapformer", {"slack": 2.0}), ("zeppelin", {"rule": "groups", "group_size": 2})], ids=str
)
def test_zones_that_lie_alike_are_priced_as_one_by_one(
    name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for cluster in (H200, A800):
        plan = make_planner(name, cluster, MODEL, **options)(LENGTHS)
        machine = Prices.of(cluster, MODEL, AnalyticCost(cluster, MODEL))
        together = zones.zone_times(plan, machine)
        found = estimated(plan, cluster, MODEL)
        with monkeypatch.context() as patch:
            patch.setattr(zones, "_together", lambda own, _: [(at, [zone]) for at, zone in enumerate(own)])
            apart = zones.zone_times(plan, machine)
            one_by_one = estimated(plan, cluster, MODEL)
        assert together is not None
        assert apart is not None
        assert len(together) < len(apart)
        assert (found.forward_s, found.backward_s) == pytest.approx((one_by_one.forward_s, one_by_one.backward_s))
        assert found.backward == one_by_one.backward


def test_what_the_bound_of_a_ring_counts() -> None:
    """One long document: rings cannot bring its keys round in the time that attending to it takes."""
    lengths, model = [16384], load_model("llama-7b")
    bounds = Bounds.of(lengths, A800, model, AnalyticCost(A800, model))
    assert bounds.rings() > 1.3 * bounds.even()


def test_what_the_bound_of_sequences_whole_on_groups_counts() -> None:
    """A long document takes as many ranks as heads reach at most; one of many sizes exchanges more."""
    model = load_model("llama-7b")
    cluster = load_cluster("h200").build(num_ranks=256, ranks_per_node=8)

    def over_even(lengths: list[int]) -> float:
        bounds = Bounds.of(lengths, cluster, model, AnalyticCost(cluster, model))
        return bounds.whole_on_groups() / bounds.even()

    assert over_even([262144]) > 6
    assert over_even([2048] * 256) == pytest.approx(1.0, abs=0.01)
    assert 1.02 < over_even([65536, *[2048] * 480]) < over_even([131072, *[2048] * 448])


def test_of_plans_that_do_not_fit_the_fastest_of_those_that_need_about_the_least_comes_first() -> None:
    def needs(seconds: float, gigabytes: float) -> Estimate:
        return Estimate(seconds, 0.0, Decision(0, 1, gigabytes * GB, 0.0, 0.0, 0, 0, 80 * GB))

    least, alike, more, fits = needs(0.1, 100.0), needs(0.065, 101.6), needs(0.05, 101.7), needs(0.2, 80.0)
    assert best_first([least, alike, more]) == [1, 0, 2]
    assert best_first([least, alike, more, fits]) == [3, 0, 1, 2]
    assert best_first([]) == []


def test_a_plan_is_estimated_once_on_one_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_planner("te_ring", H200, MODEL)([4096])
    asked: list[object] = []
    inner = module._estimate
    monkeypatch.setattr(module, "_estimate", lambda *given: asked.append(given) or inner(*given))
    machines = [Prices.of(cluster, MODEL, AnalyticCost(cluster, MODEL)) for cluster in (H200, A800)]
    first, other, again = (estimate(plan, machines[at]) for at in (0, 1, 0))
    assert again is first
    assert first != other
    assert len(asked) == 2


def test_a_batch_of_nothing_has_an_estimate() -> None:
    plan = make_planner("te_ring", H200, MODEL)([])
    assert estimated(plan, H200, MODEL).layer_s >= 0
