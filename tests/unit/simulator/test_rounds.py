"""The round engine against the event engine: equal for one ring or collective, near for zones."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_balance import Batch, Cluster, MicrobatchPlan, Model
from megatron_balance.analysis import tables
from megatron_balance.analysis.backward import USABLE
from megatron_balance.analysis.change import Layouts, base_sync_s, change, held_bytes
from megatron_balance.analysis.clocks import Outcome
from megatron_balance.analysis.estimate import estimate
from megatron_balance.analysis.machine import Machine
from megatron_balance.analysis.statistics import tokens_per_rank
from megatron_balance.analysis.step_memory import StepMemory
from megatron_balance.compile.pipeline import project
from megatron_balance.compile.transpose import POLICIES, Policy
from megatron_balance.config import load_cluster, load_model
from megatron_balance.cost.analytic import AnalyticCost
from megatron_balance.cost.base import Link
from megatron_balance.errors import ConfigError, InfeasibleError
from megatron_balance.ir import arrays, program
from megatron_balance.ir.mask import CAUSAL, FULL
from megatron_balance.ir.step import StepPlan
from megatron_balance.ir.strategy import Scheme, Strategy
from megatron_balance.patterns import head_ring
from megatron_balance.patterns.base import HeadsThenHops, HopByHop
from megatron_balance.patterns.zigzag import Zigzag
from megatron_balance.planners import PLANNERS
from megatron_balance.planners.base import StepContext
from megatron_balance.planners.hydraulis import fastest, layouts_of
from megatron_balance.planning.choice import choose_planner
from megatron_balance.planning.layers import Layers, with_layers
from megatron_balance.planning.strategies import with_proposed
from megatron_balance.simulator.attention import attention_call
from megatron_balance.simulator.setup import Setup
from megatron_balance.simulator.step import simulate_step
from megatron_balance.simulator.ticks import simulate_planned
from megatron_balance.workloads.lengths import draw
from tests.support import by_hand
from tests.support.cli import CommandLine
from tests.support.dense import NAMES
from tests.support.flat_cost import flat_machine
from tests.support.strategies import ALL_PLANNERS, Case, cases, plan
from tests.unit.simulator.test_simulated_step import TRAINED, training_machine

LLAMA = Model(num_heads=32, num_kv_heads=32, head_dim=128, num_layers=32)


def pool(pattern: str, num_ranks: int, ranks_per_node: int, lengths: tuple[int, ...], heads: int = 2) -> MicrobatchPlan:
    return by_hand.pool(pattern, lengths, num_ranks, ranks_per_node=ranks_per_node, heads=(heads, heads))


def in_both(plan: MicrobatchPlan, machine: Machine, policy: Policy, *enter: Any) -> list[tuple[Outcome, Outcome]]:
    calls = (attention_call(plan, machine, policy, *(enter or (None,)), name=name) for name in ("events", "rounds"))
    return list(zip(*calls, strict=True))


@settings(max_examples=15, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 600), min_size=1, max_size=5).map(tuple),
    shape=st.sampled_from([(2, 2), (3, 3), (6, 3), (8, 4), (8, 2)]),
    pattern=st.sampled_from(["ring", "all_gather", "head_exchange", "head_exchange_once"]),
    entered=st.lists(st.floats(0.0, 2.0), min_size=8, max_size=8),
)
def test_one_zone_over_all_ranks_takes_the_same_in_both_engines(lengths, shape, pattern, entered):
    ranks, per_node = shape
    machine = flat_machine(ranks, per_node, launch=0.01, pair=1e-6)
    planned = pool(pattern, ranks, per_node, lengths)
    enter = np.array(entered[:ranks]), np.array(entered[:ranks])
    for a, b in in_both(planned, machine, "keep", enter):
        # Collectives carry every tensor padded to 16 bytes, which the round engine leaves out: two
        # tensors, and as many again going back.
        padding_s = 0.0 if pattern == "ring" else 4 * 16 * ranks / machine.inter.bytes_per_s
        assert b.end_s == pytest.approx(a.end_s, rel=1e-9, abs=padding_s)
        assert b.compute_s == pytest.approx(a.compute_s, rel=1e-9)


@settings(max_examples=12, deadline=None)
@given(
    case=cases(num_ranks=(4, 8), max_length=200, max_sequences=5, min_sequences=1, masks=NAMES),
    name=st.sampled_from(ALL_PLANNERS),
)
def test_every_nic_carries_the_same_bytes_in_both_engines(case: Case, name: str):
    planned = plan(name, case)
    case = replace(case, model=replace(case.model, attention=planned.mask.name))
    heads = [f"{kind}_exchange{once}" for kind in ("head", "chunk") for once in ("", "_once")]
    collectives = ("all_gather", "gather_documents", "gather_sequence", *heads)
    if planned.routing is not None and any(zone.pattern in collectives for zone in planned.zones):
        # collectives are routed by `always` only, and the round engine leaves them whole
        planned = replace(planned, routing=None)
    cluster = replace(case.cluster, ranks_per_nic=planned.routing.ranks_per_nic if planned.routing is not None else 1)
    machine = Machine(cluster, case.model, AnalyticCost(cluster, case.model))
    (exact, rounds), _ = in_both(planned, machine, "keep")
    first = 2 * machine.num_ranks
    # Tensors of collectives are padded, and pieces cut, to 16 bytes; here evenly.
    assert rounds.bytes_moved[first:] == pytest.approx(exact.bytes_moved[first:], abs=64 * machine.num_ranks**2)


BATCHES = {
    "one long": (50651, 12380, 1301, 1204),
    "mixed": (9000, 8000, 7000, 6000, 5000, 4000, 3000, 2000, *range(200, 1600, 100)),
    "short": tuple(range(300, 3000, 60)),
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("zone", "ranks_per_nic"), [((8, 1), 1), ((8, 2), 2), ((8, 4), 1), ((8, 8), 2), ((6, 3), 1)], ids=str
)
def test_a_head_ring_takes_about_as_long_in_both_engines(zone: tuple[int, int], ranks_per_nic: int, policy: Policy):
    ranks, group_size = zone
    cluster = Cluster(ranks, ranks // 2, ranks_per_nic=ranks_per_nic, nic_bytes_per_s=25e9, num_sms=108)
    zone_ = by_hand.zone("pool", "head_ring", range(ranks), range(3), group_size)
    planned = by_hand.plan((9000, 12_000, 300), ranks, zone_, ranks_per_node=ranks // 2, heads=(32, 32))
    for a, b in in_both(planned, Machine(cluster, LLAMA, AnalyticCost(cluster, LLAMA)), policy):
        assert b.end_s.max() == pytest.approx(a.end_s.max(), rel=0.1)
        assert b.bytes_moved[2 * ranks :] == pytest.approx(a.bytes_moved[2 * ranks :], rel=1e-3)


@pytest.mark.parametrize("policy", POLICIES)
def test_rings_of_groups_behind_one_another_take_as_long_in_both_engines_and_by_estimate(policy: Policy):
    # Inputs of a later zone pass no outputs of several groups, no gradients, and no collective that
    # is under way; what rings bring back is added up before it goes on. Without that the forward was
    # 24 % too fast here.
    cluster = Cluster(8, 4, nic_bytes_per_s=25e9, intra_bytes_per_s=100e9, num_sms=108)
    zones = [
        by_hand.zone(name, "head_ring", ranks, (seq,), 4)
        for seq, (name, ranks) in enumerate([("inter", range(8)), ("one", range(4)), ("other", range(4, 8))])
    ]
    planned = by_hand.plan((9000, 12_000, 12_000), 8, *zones, ranks_per_node=4, heads=(32, 32))
    machine = Machine(cluster, LLAMA, AnalyticCost(cluster, LLAMA))
    for a, b in in_both(planned, machine, policy):
        assert b.end_s.max() == pytest.approx(a.end_s.max(), rel=0.015 if policy == "keep" else 0.03)
    if policy == "keep":
        linear = sum(machine.cost.layer_s(max(tokens_per_rank(planned)), backward=b) for b in (False, True))
        attended = sum(b.end_s.max() for _, b in in_both(planned, machine, policy))
        assert estimate(planned, machine).layer_s == pytest.approx(linear + attended, rel=0.015)


@pytest.mark.parametrize("policy", POLICIES)
def test_what_a_head_exchange_passes_on_takes_as_long_in_both_engines(policy: Policy):
    # Links inside the node are as slow as NICs, so that it takes a fifth of the time. In a replay the
    # round engine passes on behind the gradients of the outputs, the event engine beside them.
    cluster = Cluster(8, 4, nic_bytes_per_s=25e9, intra_bytes_per_s=25e9, num_sms=108)
    model = replace(LLAMA, num_kv_heads=2)
    machine = Machine(cluster, model, AnalyticCost(cluster, model))
    planned = by_hand.pool("head_exchange_once", (9000, 700), 8, ranks_per_node=4, heads=(32, 2))
    for a, b in in_both(planned, machine, policy):
        assert b.end_s.max() == pytest.approx(a.end_s.max(), rel=0.05 if policy == "replay" else 0.01)
        assert b.bytes_moved == pytest.approx(a.bytes_moved, rel=1e-3)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(
    "name", ["te_ring", "llama_all_gather", "wlb_sharding", "ulysses", "packing", "hybrid_dp", "zeppelin"]
)
def test_planners_take_about_as_long_in_both_engines(name: str, batch: str):
    cluster = Cluster(8, 4, ranks_per_nic=2, nic_bytes_per_s=25e9, intra_bytes_per_s=200e9, num_sms=108)
    cost = AnalyticCost(cluster, LLAMA)
    planner = PLANNERS[name]
    assert planner.plan is not None
    planned = planner.plan(Batch(BATCHES[batch]), cluster, LLAMA, cost, planner.options(tokens_per_rank=12_000))
    planned = with_layers(planned, cluster, cost, planner.layers)
    for policy in POLICIES:
        for a, b in in_both(planned, Machine(cluster, LLAMA, cost), policy):
            assert b.end_s.max() == pytest.approx(a.end_s.max(), rel=0.15)


@given(
    lengths=st.lists(st.integers(1, 90), min_size=1, max_size=5),
    size=st.integers(2, 9),
    mask=st.sampled_from([CAUSAL, FULL]),
)
def test_blocks_walk_as_far_as_the_ops_of_a_ring_take_them(lengths, size, mask):
    cut = Zigzag.of(np.array(lengths), np.arange(len(lengths)), size, mask)
    forward, back = head_ring.walks(cut)
    for walked, blocks in ((forward, head_ring.hops_of(cut)), (back, head_ring.hops_of(cut, back=True))):
        assert blocks.reach is not None
        tokens, block = blocks.rows[:, 2] - blocks.rows[:, 1], np.repeat(np.arange(size), np.diff(blocks.begin))
        assert blocks.reach.min(initial=1) == 1
        for hop in range(1, size):
            going = np.bincount(block, tokens * (blocks.reach >= hop), minlength=size)
            assert walked[:, hop].tolist() == going.tolist()


def hops_of(zone: tables.ZoneTable) -> HopByHop:
    assert isinstance(zone.traffic, HeadsThenHops)
    assert zone.traffic.hops is not None
    return zone.traffic.hops


def test_a_zone_that_meets_another_has_less_of_a_nic_and_an_owner_makes_a_first_hop():
    # A first hop that an owner makes is not made by the holder.
    zones, machine = (by_hand.ring(range(4), 0), by_hand.local(4, 1, 2)), flat_machine(8, 4)
    planned = by_hand.plan((4000, 100, 90), 8, *zones, ranks_per_node=4, heads=(2, 2))
    moved = with_layers(planned, machine.cluster, machine.cost, Layers(remap=True))
    assert moved.moves
    first = next(op for op in project(moved, 1).forward if isinstance(op, program.Exchange) and op.id == 1)
    rows = arrays.as_array(first.transfers)
    stays = int((rows[:, 3] - rows[:, 2])[(rows[:, 6] == 0) & (rows[:, 0] == program.Kind.KV)].sum())
    assert hops_of(tables.Tables(moved, machine).zones[0]).forward[0, 1] == stays
    # A zone that meets another on a nic has less of it.
    # Two rings of two ranks, both between the nodes, over one NIC a node.
    zones = tuple(by_hand.ring((rank, rank + 2), rank) for rank in (0, 1))
    planned = by_hand.plan((4000, 4000), 4, *zones, ranks_per_node=2, heads=(2, 2))
    alone = replace(planned, zones=zones[:1], lengths=(4000,))
    machine = flat_machine(4, 2, 2, launch=1e-6, inter=Link(0.0, 1e5), call_s=0.0)
    both_s, one_s = (attention_call(p, machine, name="rounds").forward.end_s.max() for p in (planned, alone))
    exact_s = attention_call(planned, machine, name="events").forward.end_s.max()
    assert exact_s == pytest.approx(2 * one_s, rel=1e-3)
    assert both_s == pytest.approx(exact_s, rel=0.05)


@pytest.mark.parametrize("lengths", [(65536, 32768, 16384), (65536, 700, 300, 90, 17, 5, 2, 1)])
def test_launches_by_kind_cost_what_the_launches_themselves_do(lengths, monkeypatch):
    cluster, planned = Cluster(32, 8), pool("ring", 32, 8, lengths, heads=32)
    machine = Machine(cluster, LLAMA, AnalyticCost(cluster, LLAMA))
    each = tables.Tables(planned, machine).zones[0]
    monkeypatch.setattr(head_ring, "_EXACT", 0)
    by_kind = tables.Tables(planned, machine).zones[0]
    assert by_kind.forward_s == pytest.approx(each.forward_s, rel=0.02)
    assert by_kind.backward_s == pytest.approx(each.backward_s, rel=0.02)
    assert np.array_equal(hops_of(by_kind).forward, hops_of(each).forward)


# Steps of pipelines side by side on clocks.

LENGTHS = ((6000, 3000, 900), (4000, 2000, 100))


def planned(strategy: str, num_ranks: int = 8) -> StepPlan:
    gpus = training_machine(num_ranks)
    choice = choose_planner("hydraulis", {"strategies": [strategy], "tokens_per_rank": 4096})
    return choice.plan_step(LENGTHS, StepContext(gpus.cluster, TRAINED, gpus.cost))[0]


def played(step: StepPlan, setup: Setup = Setup()) -> Any:  # noqa: B008
    return simulate_planned(step, training_machine(8), training_machine(8), setup)


def test_a_step_ends_with_its_slowest_pipeline_and_ranks_left_over_hold_nothing() -> None:
    # One pipeline of all ranks takes what its step takes.
    step = planned("tp1-pp2-cp4")
    found, stage = played(step), simulate_step(step.plans, training_machine(4), Setup(pipeline=2))
    assert found.step_s == pytest.approx(stage.step_s)
    assert found.num_tokens == sum(map(sum, LENGTHS))
    assert len(found.peak_bytes) == 8
    # A step ends with its slowest pipeline and ranks left over hold nothing.
    step, own, attended = planned("tp1-pp1-cp2+tp1-pp1-cp4"), [], []
    found = played(step)
    for pipeline, ranks in ((0, 2), (1, 4)):
        alone = simulate_step(step.of_pipeline(pipeline).plans, training_machine(ranks), Setup())
        own.append(alone.step_s - alone.phases_s["gradient_sync"] - alone.phases_s["optimizer"])
        attended.append(alone.attention_s["backward"])
    assert found.attention_s["backward"] == max(attended)
    assert found.step_s - found.phases_s["gradient_sync"] - found.phases_s["optimizer"] == pytest.approx(max(own))
    assert found.phases_s["gradient_sync"] > 0
    assert found.peak_bytes[6:].tolist() == [0, 0]
    assert (found.peak_bytes[:6] > 0).all()


COMMON_CRAWL = tuple(min(length, 16384) for length in draw("commoncrawl", 60_000, 1, 0)[0])
SCHEMES = [f"tp{t}-pp{p}-cp{c}" for t in (1, 2, 4, 8) for p in (1, 2, 4) for c in (1, 2, 4, 8, 16) if t * p * c <= 16]


SOME = ("tp8-pp1-cp1", "tp2-pp2-cp1", "tp1-pp4-cp2", "tp4-pp1-cp4", "tp1-pp1-cp8", "tp1-pp2-cp4")


@pytest.mark.parametrize(
    ("cluster", "model", "schemes"),
    [
        ("a800-ib", "llama-7b", SOME),
        pytest.param("a800-ib", "llama-7b", SCHEMES, marks=pytest.mark.product),
        pytest.param("h100", "llama3-8b", SCHEMES, marks=pytest.mark.product),
    ],
    ids=["some", "a800-ib", "h100"],
)
def test_a_strategy_is_priced_as_it_is_simulated_and_fits(cluster: str, model: str, schemes: Sequence[str]) -> None:
    # What a pipeline is priced at is 5 % less to 15 % more: stages count as if all had the logits, and
    # microbatches as if they kept as much as the fullest.
    on, of = load_cluster(cluster).build(num_ranks=16), load_model(model)
    machine, checked = Machine(on, of, AnalyticCost(on, of)), 0
    context = StepContext(on, of, machine.cost, memory=StepMemory.one_stage(of, 16))
    for lengths in (COMMON_CRAWL, (8192,) * 7, (500,) * 120):
        for scheme in map(Scheme.parse, schemes):
            strategy = Strategy((scheme,) * (16 // scheme.num_ranks))
            choice = choose_planner("hydraulis", {"strategies": [str(strategy)]})
            try:
                _, _, priced_s = fastest(lengths, [strategy], replace(context, options=choice.options))
            except InfeasibleError:
                continue
            found = simulate_planned(choice.plan_step((lengths,), context)[0], machine, machine, Setup("auto"))
            own_s = found.step_s - found.phases_s["gradient_sync"] - found.phases_s["optimizer"]
            assert 0.95 < priced_s / own_s < 1.16, (str(scheme), priced_s, own_s)
            assert found.peak_bytes.max() <= USABLE * on.memory_bytes, str(scheme)
            checked += 1
    assert checked > len(schemes)


def test_strategies_that_are_proposed_fit_with_the_roles_of_all_of_them() -> None:
    on, of = load_cluster("a800-ib").build(num_ranks=16), load_model("llama-7b")
    machine = Machine(on, of, AnalyticCost(on, of))
    context = StepContext(on, of, machine.cost, memory=StepMemory.one_stage(of, 16))
    lengths = COMMON_CRAWL * 2
    # The base layout holds its own weights beside the largest role; microbatches are as long as fits.
    given = {"strategies": ["4*tp2-pp1-cp2", "2*tp2-pp1-cp4"]}
    proposed = with_proposed(choose_planner("hydraulis", {"strategies": "auto"}), [(lengths,)], context)
    seconds: list[float] = []
    for choice in (choose_planner("hydraulis", given), proposed):
        layouts = layouts_of(choice.options, 16)
        step = choice.plan_step((lengths,), context)[0]
        found = simulate_planned(step, machine, machine, Setup("auto", layouts=layouts))
        assert found.peak_bytes.max() <= USABLE * on.memory_bytes, str(step.strategy)
        seconds.append(found.step_s)
    assert seconds[1] < seconds[0]


SHORT = "--ranks 8 --ranks-per-node 4 --model llama-3b --cluster h200 --lengths 9000,700,300,4000 --microbatches 1"
HYDRAULIS = f"simulate {SHORT} --planner hydraulis -o"


def test_simulate_runs_whole_steps_of_a_strategy_and_says_what_they_pulled_and_pushed(run: CommandLine) -> None:
    # Degrees beside those of a strategy are refused.
    with pytest.raises(ConfigError, match=r"says the degrees of its pipelines.*leave out --pipeline"):
        played(planned("2*tp1-pp1-cp4"), Setup(pipeline=2))
    said = run.error(f"{HYDRAULIS} strategies=[2*tp1-pp1-cp4] --tensor-parallel 2")
    assert "--tensor-parallel 2: a strategy says the degrees" in said
    # Simulate runs whole steps of a strategy.
    # Those of auto and the baseline of full microbatches, too, with a group of TP larger than a node.
    for asked in (
        f"{HYDRAULIS} strategies=[2*tp2-pp1-cp1+tp1-pp2-cp2,2*tp1-pp1-cp4]",
        f"{HYDRAULIS} strategies=auto",
        f"simulate {SHORT} --planner megatron -o strategy=tp8-pp1-cp1",
    ):
        found = run.json(f"{asked} --json")
        assert found["step_s"]["median"] > 0
        assert len(found["peak_bytes_per_rank"]) == 8


def test_weights_that_came_from_another_layout_are_pulled_and_gradients_pushed() -> None:
    # A base layout of TP 2; what the step adds, and the memory of the largest role.
    gpus = training_machine(8)
    mixed, whole, base = map(Strategy.parse, ("2*tp1-pp1-cp2+2*tp2-pp1-cp1", "tp1-pp1-cp8", "4*tp2-pp1-cp1"))
    step = planned(str(mixed))
    alone = played(step)
    found, off = (played(step, Setup(layouts=Layouts(base, (mixed, whole), overlap))) for overlap in (True, False))
    moved = change(base, mixed, gpus.model, gpus.cluster)
    assert (off.phases_s["pull"], off.phases_s["push"]) == moved.whole_s
    assert off.phases_s["gradient_sync"] == 0
    assert off.step_s == pytest.approx(alone.step_s - alone.phases_s["gradient_sync"] + sum(moved.whole_s))
    assert found.change == off.change == moved.traffic.described(gpus.cluster)
    assert 0 < found.phases_s["pull"] + found.phases_s["push"] < sum(moved.whole_s)
    # Ranks of TP 2 hold the memory of TP 1.
    half = held_bytes(base, gpus.model, 8)[0]
    assert found.peak_bytes == pytest.approx(alone.peak_bytes + half * (np.arange(8) >= 4))
    itself = played(planned(str(base)), Setup(layouts=Layouts(base, (mixed, base))))
    assert itself.change == {}
    assert itself.phases_s["gradient_sync"] == pytest.approx(sum(base_sync_s(base, gpus.model, gpus.cluster)))


def test_simulate_says_what_steps_pulled_and_pushed(run: CommandLine) -> None:
    given = "strategies=[2*tp2-pp1-cp1+tp1-pp2-cp2] -o base=4*tp2-pp1-cp1"
    changes = run.json(f"{HYDRAULIS} {given} --json")["changes"]
    assert changes["steps"] == 1
    assert changes["push_bytes"] == 2 * changes["pull_bytes"] > 0
    said = run.printed(f"{HYDRAULIS} {given}")
    assert "1 step of another strategy than the base layout: pull" in said
    (row,) = run.json(f"compare {SHORT} --planner hydraulis -o {given} --json")["rows"]
    assert row["changes"] == changes
