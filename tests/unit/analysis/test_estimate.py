"""The estimate of a layer against the simulator, and bounds below it."""

from __future__ import annotations

from typing import Any

import pytest

import megatron_balance.analysis.estimate as module
from megatron_balance import Cluster, MicrobatchPlan, Model, make_planner
from megatron_balance.analysis.estimate import Bounds, Estimate, estimate, zones
from megatron_balance.analysis.estimate.times import Machine as Prices
from megatron_balance.config import load_cluster, load_model
from megatron_balance.cost.analytic import AnalyticCost
from megatron_balance.planners import PLANNERS
from megatron_balance.simulator.machine import Machine
from megatron_balance.simulator.setup import Setup
from megatron_balance.simulator.step import Step, simulate_step

LENGTHS = [20011, 9000, 7301, 6000, 5003, 4000, 3000, 2500, 2000, 1700, 1500, 1200, 900, 700, 400, 321]
MODEL = load_model("llama3-8b")
H200, A800 = (load_cluster(name).build(num_ranks=16, ranks_per_node=8) for name in ("h200", "a800"))
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in ("te_ring", "ulysses", "hybrid_dp", "megatron_dynamic", "packing")),
    *((name, {}) for name in ("llama_all_gather", "wlb_sharding")),
    ("zeppelin", {"rule": "cost"}),
    ("zeppelin", {"rule": "groups"}),
    ("zeppelin", {"rule": "groups", "group_size": 4}),
    ("knapformer", {"slack": 2.0}),
    ("zeppelin", {}),
    ("zeppelin", {"group_size": 2, "num_waves": 3}),
    ("zeppelin", {"group_size": 16}),
]


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


@pytest.mark.parametrize("cluster", [H200, A800], ids=lambda each: each.name)
@pytest.mark.parametrize(("name", "options"), VARIANTS, ids=str)
def test_an_estimate_is_near_what_the_simulator_says(name: str, options: dict[str, Any], cluster: Cluster) -> None:
    plan = make_planner(name, cluster, MODEL, **options)(LENGTHS)
    found, step = estimated(plan, cluster, MODEL), simulated(plan, cluster, MODEL)
    rel = 0.1 if name == "packing" else 0.08  # messages of one rank that share a NIC end one by one
    if name == "zeppelin" and "rule" not in options:
        several_on_a_nic = options.get("group_size") == 2 and cluster.ranks_per_nic > 1  # and here, too
        rel = 0.05 if several_on_a_nic else 0.02
    assert found.layer_s == pytest.approx(layer_s(step, MODEL), rel=rel)
    assert found.backward.peak_bytes == pytest.approx(step.backward.peak_bytes, rel=0.02)
    assert found.backward.fits == step.backward.fits
    assert abs(found.backward.keeping - step.backward.keeping) <= 1


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


def test_no_plan_is_faster_than_the_bound_of_its_planner() -> None:
    for cluster in (H200, A800):
        bounds = Bounds.of(LENGTHS, cluster, MODEL, AnalyticCost(cluster, MODEL))
        for name, planner in PLANNERS.items():
            for each in planner.tries if not planner.left_out else ():
                plan = make_planner(name, cluster, MODEL, **each.options)(LENGTHS)
                assert each.least(bounds) <= 1.001 * layer_s(simulated(plan, cluster, MODEL), MODEL), name
        assert bounds.even() <= min(bounds.rings(), bounds.pool_gather(), bounds.pool_heads())


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
