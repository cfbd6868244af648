"""Whole steps: layers, pipeline, synchronisation, memory; from closed forms."""

import itertools
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_balance import Cluster, Model, make_planner, simulate
from megatron_balance.analysis import backward, rounds, statistics, tables
from megatron_balance.analysis.estimate.zones import zone_times
from megatron_balance.analysis.machine import Machine
from megatron_balance.analysis.memory import Holding, Sharding, rank_memory
from megatron_balance.compile.pipeline import compile_ranks
from megatron_balance.compile.transpose import POLICIES
from megatron_balance.cost import base, modules, parallel
from megatron_balance.cost.analytic import AnalyticCost
from megatron_balance.errors import ConfigError
from megatron_balance.ir.batch import Batch
from megatron_balance.ir.forest import checked
from megatron_balance.ir.plan import MicrobatchPlan, Zone
from megatron_balance.ir.program import Kind
from megatron_balance.ir.step import StepPlan
from megatron_balance.planners import PLANNERS
from megatron_balance.planners.base import JointStages, StepContext
from megatron_balance.planning.choice import StepMode, choose_planner, step_mode
from megatron_balance.planning.ticks import ticks
from megatron_balance.simulator import attention, pipeline
from megatron_balance.simulator import step as step_module
from megatron_balance.simulator.phase import phase_of, ring_names
from megatron_balance.simulator.setup import PLAIN, Setup, StageSetup, added_s, parts_of
from megatron_balance.simulator.step import Perturbation, simulate_plans, simulate_step, summary
from megatron_balance.simulator.ticks import _simulate_joint, most_held, simulate_planned
from tests.support import by_hand
from tests.support.flat_cost import MODEL, FlatCost, flat_machine
from tests.unit.simulator.test_simulated_ticks import planned, whole

LLAMA = Model(num_heads=32, num_kv_heads=32, head_dim=128, num_layers=8)


def bound(lengths: tuple[tuple[int, ...], ...], machine: Machine, setup: Setup = PLAIN) -> float:
    return step_module.bound_s([Batch(each) for each in lengths], machine, setup)


def local(*lengths: int, ranks_per_node: int = 2) -> MicrobatchPlan:
    count = len(lengths)
    return by_hand.plan(lengths, count, *by_hand.each_local(count), ranks_per_node=ranks_per_node, heads=(2, 2))


def ring(num_ranks: int, ranks_per_node: int, *lengths: int, heads: int = 2) -> MicrobatchPlan:
    return by_hand.pool("ring", lengths, num_ranks, ranks_per_node=ranks_per_node, heads=(heads, heads))


def test_a_step_is_its_layers_and_ranks_that_exchange_nothing_drift_apart():
    # A step of one rank is its layers and full recomputation runs the forward again.
    machine, plans = flat_machine(1, 1, launch=3.0, layer=0.01), [local(100, ranks_per_node=1)]
    step = simulate_step(plans, machine)
    # Forward 3 + 1, backward twice that, four layers.
    assert step.step_s == pytest.approx(4 * 3 * (3.0 + 1.0))
    assert step.phases_s["forward_attention"] == pytest.approx(4 * 3.0)
    assert step.phases_s["backward_linear"] == pytest.approx(4 * 2.0)
    assert step.utilisation == pytest.approx({"compute": 1.0, "link": 0.0, "nic": 0.0})
    again = simulate_step(plans, machine, Setup(recompute="full"))
    assert again.step_s == pytest.approx(4 * 4 * 4.0)
    assert again.attention_s == pytest.approx({"forward": 4 * 3.0, "backward": 4 * 3 * 3.0})
    # Ranks of a ring go through the layers together and others drift apart until the end.
    machine = flat_machine(2, 2, launch=0.0, layer=0.01)
    swapped = [local(100, 300), local(300, 100)]
    step = simulate_step(swapped, machine)
    assert step.step_s - step.phases_s["gradient_sync"] == pytest.approx(4 * 3 * (1.0 + 3.0))
    assert rounds.coupled(swapped[0]).tolist() == [0, 1]
    assert rounds.coupled(ring(4, 4, 100)).tolist() == [0, 0, 0, 0]
    zones = (Zone("a", "ring", (0, 2), (0,)), Zone("b", "ring", (1,), (1, 2, 3)))
    assert rounds.coupled(replace(local(100, 100, 100, 100), zones=zones)).tolist() == [0, 1, 0, 3]


def test_attention_s_is_the_most_of_any_rank_without_what_it_waits_behind_it():
    # Rank 1 ends last, with a tenth of the attention of rank 0.
    machine = flat_machine(2, 2, launch=0.0, layer=0.1, pair=1e-4)
    plan = by_hand.plan((200, *(10,) * 40), 2, by_hand.local(0, 0), by_hand.local(1, *range(1, 41)), heads=(2, 2))
    step = simulate_step([plan, plan], machine)
    assert step.phases_s["forward_attention"] == pytest.approx(2 * 4 * 0.3)
    assert step.attention_s == pytest.approx({"forward": 2 * 4 * 3.0, "backward": 2 * 2 * 4 * 3.0})
    assert summary([step])["attention_s"] == step.attention_s
    # Rank 1 sends rank 0 keys, has little to do, and waits for it at the end of the layer.
    machine = flat_machine(2, 2, launch=0.0, layer=0.1, pair=1e-2)
    table = by_hand.task_table([(1, 0, 0, 10), (0, 0, 10, 200)], [(1, 0, 0, 10, 0, 10), (0, 0, 10, 200, 0, 200)])
    step = simulate_step([by_hand.plan((200,), 2, table, heads=(2, 2))], machine)
    assert step.attention_s["forward"] == pytest.approx(4 * 190 * 200 * 1e-2, rel=0.01)


def test_a_step_with_two_masks_is_priced_by_both():
    # Three of four layers have a window, in which a query sees 64 keys and not up to 4,096.

    def step(**masks: object):
        cluster = Cluster(4, 2)
        model = Model(num_heads=8, num_kv_heads=8, head_dim=64, num_layers=4, hidden_size=512, ffn_size=512, **masks)  # pyright: ignore[reportArgumentType]
        machine = Machine(cluster, model, AnalyticCost(cluster, model))
        return simulate_step([ring(4, 2, 4096, heads=8)], machine), bound(((4096,),), machine)

    seen, windowed = step(), step(attention="causal", other_attention="window_64", other_layers=4)
    mixed = step(other_attention="window_64", other_layers=3)
    for at in (0, 1):
        expected = 0.25 * seen[0].layer_s[at] + 0.75 * windowed[0].layer_s[at]
        assert mixed[0].layer_s[at] == pytest.approx(expected)
        assert windowed[0].layer_s[at] < 0.9 * seen[0].layer_s[at]
    assert mixed[1] == pytest.approx(0.25 * seen[1] + 0.75 * windowed[1])
    assert windowed[1] < 0.9 * seen[1]


def test_equal_microbatches_are_simulated_once_and_synchronisation_hides_behind_the_backward(monkeypatch):
    # Equal microbatches are simulated once.
    calls, machine = [], flat_machine(4, 4)
    monkeypatch.setattr(step_module, "attention_call", lambda *a: calls.append(a) or attention.attention_call(*a))
    one = simulate_step([ring(4, 4, 400)], machine)
    many = simulate_step([ring(4, 4, 400)] * 8, machine)
    assert len(calls) == 2
    assert many.step_s - many.phases_s["gradient_sync"] == pytest.approx(
        8 * (one.step_s - one.phases_s["gradient_sync"])
    )
    # Synchronisation hides behind the backward.
    machine = flat_machine(4, 2, launch=0.01)
    apart_s, beside_s = (
        simulate_step([ring(4, 2, 400)], machine, Setup(overlap_sync=overlap)).phases_s["gradient_sync"]
        for overlap in (False, True)
    )
    assert apart_s / MODEL.num_layers - 1e-12 <= beside_s < apart_s


@pytest.mark.parametrize(
    ("stages", "microbatches", "chunks"), [(1, 3, 1), (2, 2, 1), (4, 8, 1), (4, 3, 1), (4, 8, 2), (2, 4, 4), (4, 4, 2)]
)
def test_the_bubble_of_a_pipeline_is_what_the_closed_form_says(stages, microbatches, chunks):
    forward_s, backward_s = 1.0, 2.0

    def each(_: int, step: pipeline.ChunkPass, ready: np.ndarray) -> np.ndarray:
        return ready + (backward_s if step.backward else forward_s) / chunks

    clocks = pipeline.run(stages, microbatches, chunks, 1, each, lambda _: np.zeros(1))
    work_s = microbatches * (forward_s + backward_s)
    bubble_share = (stages - 1) / (chunks * microbatches)
    assert clocks.total_s == pytest.approx(work_s * (1 + bubble_share))
    assert clocks.bubble_share == pytest.approx(bubble_share)
    assert [busy.tolist() for busy in clocks.busy_s] == [[pytest.approx(work_s)]] * stages


@given(st.integers(1, 5), st.integers(1, 9), st.integers(1, 3))
def test_every_stage_runs_every_pass_once(stages, groups, chunks):
    microbatches = groups if chunks == 1 else groups * stages
    for stage in range(stages):
        found = pipeline.order(stages, stage, microbatches, chunks)
        every = itertools.product((False, True), range(microbatches), range(chunks))
        assert Counter(found) == Counter(pipeline.ChunkPass(*each) for each in every)


def test_a_pipelined_step_has_the_bubble_of_1f1b():
    # Few bytes from stage to stage: as good as nothing beside seconds.
    machine = flat_machine(2, 2, launch=2.0, layer=0.01, inter=base.Link(0.0, 1e15))
    step = simulate_step([local(100, 100)] * 8, machine, Setup(pipeline=4))
    work_s = 8 * 3 * (2.0 + 1.0)
    assert step.step_s - step.phases_s["gradient_sync"] == pytest.approx(work_s * (1 + 3 / 8))
    assert sum(step.phases_s.values()) == pytest.approx(step.step_s)
    assert len(step.peak_bytes) == 4 * 2


def test_what_cannot_be_simulated_is_refused():
    machine, plans = flat_machine(2, 2), [local(10, 10)] * 3
    cases: list[tuple[Any, dict[str, Any], str]] = [
        (plans, {"pipeline": 3}, "4 layers of custom cannot be cut into 3 pipeline chunks"),
        (plans, {"pipeline": 2, "interleave": 2}, "3 microbatches are not a multiple of 2 pipeline stages"),
        (plans, {"interleave": 2}, "interleave 2 goes with a pipeline"),
        ([], {}, "at least one microbatch"),
        ([ring(4, 4, 100)], {}, "a plan for 4 ranks, 4 a node, on custom with 2 ranks"),
        (plans, {"engine": "rounds", "transport": "sockets"}, "the engine 'rounds' knows the transport 'streams' only"),
    ]
    for plan, setup, said in cases:
        with pytest.raises(ConfigError, match=said):
            simulate_step(plan, machine, Setup(**setup))
    with pytest.raises(ConfigError, match=r"slowdown names 3 ranks, custom has 2"):
        replace(machine, slowdown=(1.0, 1.0, 2.0))


def test_peaks_are_those_of_the_memory_model():
    machine = flat_machine(4, 2)
    planned = ring(4, 2, 400, 36)
    tokens = statistics.linear_tokens(planned)
    got, in_a_round = statistics.plan_statistics(planned, MODEL)["kv_tokens_received_per_rank"], [max(tokens)] * 4
    assert (backward.largest_exchange(planned) // MODEL.num_kv_heads).tolist() == in_a_round
    for policy, received in zip(POLICIES, (got, in_a_round), strict=True):
        peak = simulate_step([planned], machine, Setup(policy=policy)).peak_bytes
        parts = [(MODEL, t, r, Sharding(optimizer=4), Holding(policy)) for t, r in zip(tokens, received, strict=True)]
        assert peak.tolist() == [rank_memory(*each).total for each in parts]


@pytest.mark.parametrize("ranks_per_node", [8, 4])
def test_even_collectives_take_what_the_cost_models_closed_forms_say(ranks_per_node):
    machine, group = flat_machine(8, ranks_per_node, 2), np.arange(8)
    inter = replace(machine.inter, bytes_per_s=machine.inter.bytes_per_s * machine.nics.per_node)
    here = parallel.CollectiveGroup(8, ranks_per_node, machine.intra, inter)
    assert tables.ring_collective(group, 1000.0, machine).seconds == pytest.approx(parallel.all_gather_s(1000.0, here))
    even = np.full((8, 8), 125.0)
    found = tables.all_to_all(group, even, machine).seconds
    assert found == pytest.approx(parallel.all_to_all_s(1000.0, here))
    # NICs that an all-to-all does not fill.
    machine = replace(machine, cluster=replace(machine.cluster, all_to_all_efficiency=0.5))
    slow = tables.all_to_all(group, even, machine).seconds
    assert slow == pytest.approx(parallel.all_to_all_s(1000.0, replace(here, efficiency=0.5)))
    assert (slow > found) == (ranks_per_node == 4)


def test_simulate_takes_plans_and_whole_batches_and_perturbed_machines():
    # Perturbed machines spread step times and a seed repeats them.
    cluster, planned = Cluster(8, 4), [ring(8, 4, 30_000, heads=32)]
    machine = Machine(cluster, LLAMA, AnalyticCost(cluster, LLAMA))
    first, again = (summary(simulate_plans(planned, machine, Setup(), Perturbation(0.2, 6, seed=3))) for _ in range(2))
    assert first == again
    step = first["step_s"]
    assert step["p5"] < step["median"] < step["p95"]
    exact = summary(simulate_plans(planned, machine, Setup(), Perturbation()))["step_s"]
    assert exact["p5"] == exact["median"] == exact["p95"]
    # Simulate takes plans and whole batches.
    cluster = Cluster(4, 2)
    planned = ring(4, 2, 3000, 500, heads=32)
    one = simulate(planned, cluster, LLAMA)
    assert {"step_s", "tokens_per_s", "phases_s", "peak_bytes_per_rank", "utilisation"} <= set(one)
    assert one["tokens_per_s"] == pytest.approx(3500 / one["step_s"]["median"])
    assert len(one["peak_bytes_per_rank"]) == 4
    two = simulate([StepPlan.whole((planned, planned))], cluster, LLAMA, policy="replay")
    assert two["step_s"]["median"] > one["step_s"]["median"]
    assert max(two["peak_bytes_per_rank"]) < max(one["peak_bytes_per_rank"])
    with pytest.raises(ConfigError, match="unknown option 'overlap', did you mean 'overlap_sync'"):
        simulate(planned, cluster, LLAMA, overlap=False)


def test_a_mix_by_layer_takes_between_keep_and_replay_and_heads_keep_what_they_attend_with():
    # Kept keys of a head exchange count with their heads.
    # A rank of 32 attends with one head: a 32nd of what a ring keeps, and its queries.
    cluster, model = Cluster(32, 8), replace(LLAMA, num_layers=32)
    machine = Machine(cluster, model, AnalyticCost(cluster, model))
    plan = by_hand.pool("head_exchange", [32 * 4096], 32, ranks_per_node=8, heads=(32, 32))
    kept, replayed = (simulate_step([plan], machine, Setup(policy=policy)).peak_bytes.max() for policy in POLICIES)
    assert kept - replayed < 32 * 4096 * 32 * 3 * 128 * 2
    # A mix by layer takes between keep and replay.
    machine, plans = flat_machine(4, 2, launch=0.01), [ring(4, 2, 4000)]
    keep, replay = (simulate_step(plans, machine, Setup(policy=policy)) for policy in POLICIES)
    memory = (keep.peak_bytes.max() + replay.peak_bytes.max()) / 2
    tight = replace(machine, cluster=replace(machine.cluster, memory_bytes=memory / 0.9))
    mixed = simulate_step(plans, tight, Setup(policy="auto"))
    assert 0 < mixed.backward.kept_share < 1
    assert keep.step_s < mixed.step_s < replay.step_s
    assert mixed.peak_bytes.max() <= memory < keep.peak_bytes.max()
    assert simulate_step(plans, machine, Setup(policy="auto")).step_s == keep.step_s


# The bound: a lone rank reaches it, and no planner goes below it

WIDE = Model(num_heads=8, num_kv_heads=8, head_dim=128, num_layers=4, hidden_size=1024, ffn_size=4096)
SHORT_AND_LONG = (9000, 700, 4000, 2500, 128)


def nodes_of_four(ranks: int) -> Machine:
    cluster = Cluster(ranks, min(ranks, 4), nic_bytes_per_s=25e9, num_sms=108)
    return Machine(cluster, WIDE, AnalyticCost(cluster, WIDE))


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_lone_rank_reaches_the_bound(recompute):
    alone, setup = nodes_of_four(1), Setup(recompute=recompute)
    plan = by_hand.plan(SHORT_AND_LONG, 1, by_hand.head_exchange((0,), *range(len(SHORT_AND_LONG))), heads=(8, 8))
    step = simulate_step((plan,), alone, setup)
    # Beside it there are the optimizer and the summing of gradients, which moves memory only.
    compute_s, least_s = step.step_s - step.phases_s["optimizer"], bound((SHORT_AND_LONG,), alone, setup)
    assert least_s < compute_s < 1.03 * least_s


@pytest.mark.parametrize("name", [name for name in PLANNERS if PLANNERS[name].plan is not None])
def test_no_planner_goes_below_the_bound(name):
    four = nodes_of_four(8)
    plan = make_planner(name, four.cluster, WIDE)(SHORT_AND_LONG)
    assert simulate_step((plan,), four).step_s > bound((SHORT_AND_LONG,), four)


def test_the_bound_adds_up_documents_and_microbatches_and_stages_share_it():
    # Heads of 90, which kernels pad: each document's rows count, not those of the first alone.
    padded, one = replace(WIDE, head_dim=90), Cluster(1, 1)
    machine = Machine(one, padded, AnalyticCost(one, padded))
    assert bound(((9000,) * 3,), machine) == pytest.approx(bound(((9000,),) * 3, machine), rel=1e-2)
    # A long document's launch leaves no blocks of a backward without work beside short ones.
    one = one.with_kernel("flash_attn_3")
    machine = Machine(one, WIDE, AnalyticCost(one, WIDE))
    long, short = (32_768,), (256,) * 64
    assert bound((long + short,), machine) == pytest.approx(bound((long, short), machine), rel=1e-2)
    two = nodes_of_four(2)
    once = bound((SHORT_AND_LONG,), two)
    assert bound((SHORT_AND_LONG, SHORT_AND_LONG), two) == pytest.approx(2 * once)
    assert bound((SHORT_AND_LONG,), two, Setup(pipeline=2)) == pytest.approx(once / 2)


def test_the_bound_of_trees_is_of_what_they_show() -> None:
    machine = nodes_of_four(2)
    full, plain = (replace(machine, model=replace(machine.model, attention=name)) for name in ("full", "causal"))
    full = replace(full, cost=AnalyticCost(full.cluster, full.model))
    lengths = (9000, 2000)
    trees = checked([[(length, -1, True)] for length in lengths])
    of_trees = step_module.bound_s([Batch(lengths, trees)], plain)
    assert of_trees == pytest.approx(bound((lengths,), full))
    assert of_trees > 1.02 * bound((lengths,), plain)


# Seconds that experts add to a simulated layer: the busiest rank of a group, by its tokens.

LAYER_S = 0.01
MOE = replace(MODEL, num_experts=4, experts_per_token=1)
# Of two ranks that share four experts, the first one has two thirds of the visits.
SKEWED = modules.ExpertLoad.counted([2, 2, 1, 1])


def machine(num_ranks: int, ranks_per_node: int, model: Model = MOE):
    return replace(flat_machine(num_ranks, ranks_per_node, launch=0.0, layer=LAYER_S), model=model)


def exchange_s(around: StageSetup, tokens: float) -> float:
    group = parallel.group_of(around.machine.cluster, 2, 2, busy_nics=True)
    return 2 * parallel.all_to_all_s(tokens * MOE.hidden_size * MOE.bytes_per_element, group)


def test_ranks_that_share_experts_wait_for_the_busiest_of_them():
    # Ranks that share experts wait for the busiest of them.
    around, plan = StageSetup(machine(4, 2), Setup(experts=2, expert_load=SKEWED)), local(100, 300, 50, 10)
    moved = by_hand.plan((100, 1), 4, *by_hand.each_local(2), ranks_per_node=2, heads=(2, 2), moves=[(0, 2, 60)])
    for each, own, visits in (
        (plan, [100, 300, 50, 10], [400, 400, 60, 60]),
        # a remap moves 60 of 100 tokens to the other node, whose experts they visit then
        (moved, [40, 1, 60, 0], [41, 41, 60, 60]),
    ):
        found, busiest = added_s(each, around), np.array(visits) * 2 / 3
        exchange = np.array([exchange_s(around, tokens) for tokens in busiest])
        longer = modules.expert_part(MOE) * LAYER_S * (busiest - own)
        assert found[0] == pytest.approx(exchange + longer)
        assert found[1] == pytest.approx(exchange + 2 * longer), "the backward takes twice as long"
    # Without a load each rank computes for its own tokens.
    found = added_s(plan, StageSetup(machine(4, 2), Setup(experts=2)))
    assert found[0] == pytest.approx(np.full(4, exchange_s(around, 300)))
    for model, setup in ((MODEL, Setup(experts=2, expert_load=SKEWED)), (MOE, Setup(expert_load=SKEWED))):
        assert not np.any(added_s(plan, StageSetup(machine(4, 2, model), setup)))
    # A step takes as much longer.
    on, plan = machine(2, 2), local(100, 100)
    setups = [Setup(experts=2, expert_load=load) for load in (modules.ExpertLoad(), SKEWED)]
    even, skewed = (simulate_step([plan], on, setup).step_s for setup in setups)
    crossing = exchange_s(StageSetup(on, setups[1]), 400 / 3) - exchange_s(StageSetup(on, setups[1]), 100)
    longer = 3 * modules.expert_part(MOE) * LAYER_S * (400 / 3 - 100) + 2 * crossing
    assert skewed - even == pytest.approx(on.model.num_layers * longer, rel=1e-6)


# Gradients that a ring's backward adds up, in all three places that price it: each of a block that
# a hop brought is added once, as the runtime does (`tests/unit/runtime/test_kept_bytes.py`).

TOKENS, RANKS, HEADS = 64, 4, 2


@dataclass(frozen=True)
class Bytes(FlatCost):
    """Seconds are bytes that are moved in memory; everything else takes no time."""

    launch: float = 0.0

    def pack_s(self, num_bytes: float) -> float:
        return num_bytes


@pytest.mark.parametrize("pattern", ["ring", "head_ring"])
def test_what_a_hop_brought_is_not_added_around_the_launch(pattern: str) -> None:
    on = replace(flat_machine(RANKS, RANKS), cost=Bytes(MODEL))
    plan = by_hand.pool(pattern, (TOKENS * RANKS,), RANKS, heads=(HEADS, HEADS))
    row = on.payload.row_bytes
    queries, keys = TOKENS * HEADS * row[Kind.Q_GRAD], TOKENS * HEADS * row[Kind.KV_GRAD]
    seconds = tables.Tables(plan, on).zones[0].backward_s
    # Own keys are added to the caller's; of a block of a hop only the queries' gradients are.
    assert seconds[:, 0] == pytest.approx(base.ADD * (queries + keys))
    # The causal mask shows a later block to the late half of the queries only.
    assert set(np.round(seconds[:, 1:].ravel() / (base.ADD * queries), 6)) <= {0.5, 1.0}
    phase = phase_of(compile_ranks(plan, "keep"), on, backward=True, rings=ring_names(plan))
    for rank in range(RANKS):
        launches = [s for s, x in zip(phase.seconds[rank], phase.exchanges[rank], strict=True) if x < 0]
        assert sorted(launches) == pytest.approx(sorted(seconds[rank].tolist()))
    if pattern == "ring":
        estimated = zone_times(plan, on)[1][0].ring  # pyright: ignore[reportAttributeAccessIssue]
        assert estimated is not None
        assert estimated.backward_s == pytest.approx(seconds)


# Steps as training runs them: which way, what is planned, and what a step in ticks takes with all
# that is around it.

TRAINED = Model(8, 8, 128, num_layers=8, hidden_size=1024, ffn_size=4096, vocab_size=32000)
DISTCA, RING = (choose_planner(name, {"tokens_per_rank": 8192}) for name in ("distca", "te_ring"))


def training_machine(num_ranks: int) -> Machine:
    cluster = Cluster(num_ranks=num_ranks, ranks_per_node=4)
    return Machine(cluster, TRAINED, AnalyticCost(cluster, TRAINED))


def step_of(lengths: list[tuple[int, ...]], mode: StepMode, num_stages: int = 1) -> StepPlan:
    stage, joint = training_machine(4), JointStages(training_machine(4 * num_stages).cluster) if mode.joint else None
    context = StepContext(stage.cluster, TRAINED, stage.cost, joint=joint, ping_pong=mode.ping_pong)
    return DISTCA.plan_step(tuple(lengths), context)[0]


def test_plans_run_as_the_keys_of_a_configuration_say_and_nano_batches_hold_the_microbatch() -> None:
    # Plans run as the keys of a configuration say.
    cases: list[Any] = [
        (DISTCA, 1, "auto", None, StepMode(ping_pong=True)),
        (DISTCA, 1, False, "joint", StepMode()),
        (DISTCA, 2, "auto", None, StepMode(ping_pong=True, pipeline="joint")),
        (DISTCA, 2, False, "stages", StepMode(pipeline="stages")),
        (RING, 1, "auto", None, StepMode()),
        (RING, 2, True, None, StepMode(ping_pong=True, pipeline="stages")),
    ]
    for choice, num_stages, ping_pong, stages, mode in cases:
        assert step_mode(choice, num_stages, ping_pong, stages) == mode
    # Nano batches hold the microbatch and one sequence stays whole but in ticks.
    lengths = [(4000, 3000, 900, 100), (5000,)]
    ping_pong, alone = step_of(lengths, StepMode(ping_pong=True)).microbatches
    assert [sum(plan.lengths) for plan in parts_of(ping_pong)] == [4000, 4000]
    assert [plan.lengths for plan in parts_of(alone)] == [(5000,)]
    run = step_of(lengths, StepMode(ping_pong=True, pipeline="joint"), 2)
    assert [len(parts_of(each)) for each in run.microbatches] == [2, 2]
    assert [each.tick for each in run.ticks[0]] == [each.tick for each in run.ticks[1]] == list(ticks(2, 2))
    assert all(each.plan.num_ranks == 8 for nano_batch in run.ticks for each in nano_batch)
    assert sum(plan.num_tokens for plan in run.plans) == 13_000
    assert all(cell is not None for cell in run.fullest_tick().tick.cells)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_one_stage_in_ticks_is_the_step_without_them(recompute: str) -> None:
    plans, one = [whole(4096, 2048), whole(1024, 8192)], Cluster(2, 2)
    work = Machine(one, TRAINED, AnalyticCost(one, TRAINED))
    setup = Setup("replay", recompute)  # pyright: ignore[reportArgumentType]
    found, usual = _simulate_joint((planned(plans, 1),), plans, work, work, setup), simulate_step(plans, work, setup)
    # ranks that exchange nothing drift apart in a step, not in a tick
    assert found.step_s == pytest.approx(usual.step_s, rel=0.02)
    assert sum(found.phases_s.values()) == pytest.approx(found.step_s)
    assert found.peak_bytes == pytest.approx(usual.peak_bytes)
    assert found.utilisation["compute"] == pytest.approx(usual.utilisation["compute"], rel=0.03)


def test_a_stage_holds_what_the_ticks_leave_it_with() -> None:
    for chunks, held in ((1, [7, 5, 3, 1]), (2, [11, 9, 7, 5])):
        order = planned([whole(64, 64)] * 8, 4, chunks)
        assert [most_held(order, stage) for stage in range(4)] == held


def test_a_step_in_ticks_has_every_figure_and_nano_batches_hide_its_exchanges() -> None:
    lengths, setup = [(3000, 2500, 900, 100), (4500, 2000, 1000)], Setup(pipeline=2, engine="events")
    steps = [
        simulate_planned(step_of(lengths, mode, 2), training_machine(4), training_machine(8), setup)
        for mode in (StepMode(False, "joint"), StepMode(True, "joint"))
    ]
    for step in steps:
        assert step.num_tokens == sum(map(sum, lengths))
        assert sum(step.phases_s.values()) == pytest.approx(step.step_s)
        assert step.phases_s["waiting"] > 0
        assert step.phases_s["head"] > 0 or step.phases_s["forward_linear"] > 0
        assert len(step.peak_bytes) == 8
        assert step.peak_bytes[:4].max() > step.peak_bytes[4:].min()
        assert all(0 < share <= 1 for name, share in step.utilisation.items() if name != "nic")
    assert steps[0].step_s != steps[1].step_s
