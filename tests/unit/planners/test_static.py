"""The planners that choose nothing: one zone over all ranks."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from megatron_balance import Batch, Cluster, MicrobatchPlan, Model, layout, make_planner, verify
from megatron_balance.analysis.estimate import estimate
from megatron_balance.analysis.machine import Machine
from megatron_balance.analysis.statistics import plan_statistics
from megatron_balance.config import load_cluster, load_model
from megatron_balance.cost.analytic import AnalyticCost
from megatron_balance.errors import ConfigError, InfeasibleError
from megatron_balance.ir import plan as plans
from megatron_balance.ir.columns import Task
from megatron_balance.ir.forest import checked
from megatron_balance.ir.plan import Zone
from megatron_balance.ir.step import EMPTY, Carry, Layers
from megatron_balance.planners import PLANNERS, baselines
from megatron_balance.planners.base import StepContext
from megatron_balance.planning import layers as planning_layers
from megatron_balance.planning.choice import choose_planner
from megatron_balance.runtime.kernels.latent import check_latent
from megatron_balance.simulator.setup import Setup
from megatron_balance.simulator.step import simulate_step
from tests.support import by_hand

pytest.importorskip("torch")

MODEL = Model(8, 2, 16)
PATTERN_OF = {"te_ring": "ring", "llama_all_gather": "all_gather", "ulysses": "head_exchange"}


@pytest.mark.parametrize(("planner", "pattern"), PATTERN_OF.items())
def test_all_sequences_share_one_zone_over_all_ranks(planner: str, pattern: str) -> None:
    plan = make_planner(planner, Cluster(4, 2), MODEL)([5, 1, 30])
    assert plan == replace(by_hand.pool(pattern, (5, 1, 30), 4, ranks_per_node=2, heads=(8, 2)), planner=planner)


def test_layouts_and_loads_of_small_plans() -> None:
    # A plan says where tokens lie.
    plan = make_planner("te_ring", Cluster(2, 2), MODEL)([8, 4])
    assert layout(plan, 0).tolist() == [[0, 0, 2], [0, 6, 8], [1, 0, 1], [1, 3, 4]]
    for rank in (-1, 2):
        with pytest.raises(ConfigError, match=f"rank {rank}: expected a rank of the plan, 0 to 1"):
            layout(plan, rank)
    # The ring balances attention of equal sequences exactly.
    report = plan_statistics(make_planner("te_ring", Cluster(4, 2), MODEL)([64, 64]), MODEL)
    assert report["imbalance"] == {"tokens": 1.0, "attention": 1.0}
    # With fewer heads than ranks Ulysses leaves ranks without attention.
    report = plan_statistics(make_planner("ulysses", Cluster(4, 2), Model(2, 1, 16))([64]), Model(2, 1, 16))
    assert sorted(report["attention_pairs_per_rank"]) == [0, 0, 64 * 65 // 4, 64 * 65 // 4]
    # Lengths and a batch mean the same.
    plan = make_planner("te_ring", Cluster(4, 2), MODEL)
    assert plan([3, 4]) == plan(Batch((3, 4)))


@pytest.mark.parametrize("planner", PATTERN_OF)
def test_a_batch_as_large_as_the_pool_is_legal_and_more_is_refused_by_name(planner: str) -> None:
    plan = make_planner(planner, Cluster(4, 2), MODEL, tokens_per_rank=10)
    assert plan([20, 20]).num_tokens == 40
    with pytest.raises(
        InfeasibleError,
        match=r"the batch has 41 tokens; 4 ranks x 10 tokens hold 40. Use at least 5 ranks, raise .* 11",
    ):
        plan([20, 21])
    with pytest.raises(
        InfeasibleError, match=r"sequence 1 has 95 tokens and needs 10 ranks of 10 tokens; 4 are available"
    ):
        make_planner(planner, Cluster(4, 2), MODEL, tokens_per_rank=10)([20, 95])


def test_usp_exchanges_heads_in_groups_and_has_a_ring_of_them() -> None:
    lengths, cluster = (5, 1, 30), Cluster(8, 4)
    asked: list[tuple[dict[str, Any], set[int]]] = [({}, {4}), ({"group_size": 2}, {2}), ({"context_parallel": 2}, {2})]
    for options, sizes in asked:
        zones = make_planner("usp", cluster, MODEL, **options)(lengths).zones
        assert {zone.group_size for zone in zones if isinstance(zone, Zone)} == sizes
        assert sorted(seq for zone in zones for seq in zone.seqs) == [0, 1, 2]
    pool = by_hand.zone("pool", "head_ring", range(8), [0, 1, 2], 4)
    assert make_planner("usp", cluster, MODEL)(lengths).zones == (pool,)


@pytest.mark.parametrize(
    ("pairs", "chunks_of"),
    [
        # The example of MagiAttention's own docstring, and the jobs of its test.
        ([8, 7, 6, 5, 4, 2, 2, 2], [[0, 3, 4, 5], [1, 2, 6, 7]]),
        ([2, 4, 3, 16, 13, 5, 9, 10], [[0, 3], [2, 4], [1, 7], [5, 6]]),
        # Of equal chunks the last one first; one chunk less on a rank than on the others.
        ([1, 1], [[1], [0]]),
        ([4, 1, 1], [[0], [1, 2]]),
    ],
)
def test_magi_deals_chunks_as_its_min_heap_does(pairs: list[int], chunks_of: list[list[int]]) -> None:
    rank_of = baselines._by_pairs(pairs, len(chunks_of))
    assert [[at for at, rank in enumerate(rank_of) if rank == own] for own in range(len(chunks_of))] == chunks_of


def test_magi_cuts_the_packed_sequences_and_asks_for_the_keys_that_are_seen() -> None:
    # Chunks of four tokens: s0 [0, 3) and s1 [0, 1) with 6 + 1 pairs, s1 [1, 5) with 14, s2 with 6.
    def tasks(lengths: list[int], **given: Any) -> list[tuple[int, ...]]:
        model = replace(MODEL, attention=given.pop("attention", "causal"))
        (zone,) = make_planner("magi", Cluster(2, 2), model, **{"chunk_tokens": 4, **given})(lengths).zones
        assert isinstance(zone, plans.TaskTable)
        return list(zone.tasks)

    first, second = (0, 1, 1, 5, 0, 5), (1, 0, 0, 3, 0, 3)
    assert tasks([3, 5, 3]) == [first, second, (1, 1, 0, 1, 0, 1), (1, 2, 0, 3, 0, 3)]
    # All keys under a full mask. Neighbouring chunks of a rank are one; groups deal for themselves.
    assert {row[Task.K_START :] for row in tasks([3, 5, 3], attention="full") if row[Task.SEQ] == 1} == {(0, 5)}
    assert tasks([8, 8], context_parallel=1) == [(0, 0, 0, 8, 0, 8), (1, 1, 0, 8, 0, 8)]
    # Eight chunks a rank; smaller ones where so many tokens are more than a rank holds.
    eighths = {stop - start for _, _, start, stop, *_ in tasks([128], chunk_tokens=None)}
    assert eighths == {8, 16}
    for capacity, largest in ((None, 80), (64, 66)):
        planned = make_planner("magi", Cluster(2, 2), MODEL, chunk_tokens=40, tokens_per_rank=capacity)([128])
        assert max(plan_statistics(planned, MODEL)["tokens_per_rank"]) == largest


def test_magi_deals_chunks_of_trees_by_the_pairs_that_are_seen() -> None:
    # A document of 4; a root of 8 and two leaves of 4, with 10, 26, 42 and 42 pairs by chunk. By
    # length the last two would have 42 and 58, and the second would go to the other rank.
    trees = checked([[(4, -1, False)], [(8, -1, False), (4, 0, False), (4, 0, False)]])
    cluster, options = Cluster(2, 2), baselines.MagiOptions(chunk_tokens=4)
    plan = baselines.magi(Batch((4, 16), trees), cluster, MODEL, AnalyticCost(cluster, MODEL), options)
    (zone,) = plan.zones
    assert isinstance(zone, plans.TaskTable)
    rows = [(rank, seq, start, stop) for rank, seq, start, stop in zone.fragments]
    assert rows == [(0, 1, 4, 8), (0, 1, 12, 16), (1, 0, 0, 4), (1, 1, 0, 4), (1, 1, 8, 12)]
    verify(plan, "keep")
    # A root that sees itself both ways has more, which each of two groups counts for its own.
    full = checked([[(4, -1, False)], [(8, -1, True), (4, 0, False), (4, 0, False)]])
    alone = baselines.MagiOptions(chunk_tokens=4, context_parallel=1)
    plan = baselines.magi(Batch((4, 16), full), cluster, MODEL, AnalyticCost(cluster, MODEL), alone)
    assert sorted(plan_statistics(plan, MODEL)["attention_pairs_per_rank"]) == [10, 64 + 42 + 42]
    verify(plan, "keep")


# Options out of range, which are named.
REFUSED: dict[str, dict[str, Any]] = {
    "distca": {"tolerance": -1, "block": -1, "least_score": -1, "max_kv_tokens": -1, "max_received_tokens": -1},
    "flexsp": {"slack": 0.9, "node_limit": 0, "num_buckets": 0, "most_variables": 0, "solver": "scip"},
    "hybrid_dp": {"slack": 0.9, "tolerance": -0.1},
    "knapformer": {"gamma": -1.0, "slack": 0.5, "tries": 0, "heads": "even"},
    "megatron_dynamic": {"slack": 0.9, "rules": "newest"},
    "magi": {"chunk_tokens": 0, "context_parallel": 3},
    "te_ring": {"token_per_rank": 3},  # unknown
    "ulysses": {"tokens_per_rank": 0, "context_parallel": 0},
    "wlb_llm": {"slack": 0.9, "window": 0, "context_tokens": 0, "node_limit": 0},
    "usp": {"group_size": 3},
    "zeppelin": {"slack": 0.9, "group_size": 3, "num_waves": 0, "rule": "printed"},
}


@pytest.mark.parametrize(
    ("planner", "option", "value"), [(name, *each) for name, options in REFUSED.items() for each in options.items()]
)
def test_an_option_out_of_range_is_an_error(planner: str, option: str, value: Any) -> None:
    with pytest.raises(ConfigError, match="token_per_rank.*tokens_per_rank" if planner == "te_ring" else option):
        make_planner(planner, Cluster(8, 4), MODEL, **{option: value})([4])


# auto chooses among the other planners: the fastest that fits.
LLAMA = load_model("llama-7b")
CLUSTER = load_cluster("h200").build(num_ranks=16, ranks_per_node=8)
LONG = [40000, 9000, 7000, 5000, 3000, 1500]
SHORT = [4096] * 16
REMAPPED = [1786, 16857, 2484, 8655, 13212, 1377, 487, 10695, 1580, 4224, 1494]
MIXED = [20011, 9000, 7301, 6000, 5003, 4000, 3000, 2500, 2000, 1700, 1500, 1200, 900, 700, 400, 321]


def auto(lengths: list[int], cluster: Cluster = CLUSTER, **options: Any) -> MicrobatchPlan:
    return make_planner("auto", cluster, LLAMA, **options)(lengths)


def step_s(plan: MicrobatchPlan, cluster: Cluster = CLUSTER) -> float:
    machine = Machine(cluster, LLAMA, AnalyticCost(cluster, LLAMA))
    return simulate_step([plan], machine, Setup(policy="auto", engine="rounds")).step_s


@pytest.mark.parametrize("lengths", [LONG, SHORT, MIXED], ids=["long", "short", "mixed"])
def test_it_is_no_slower_in_the_simulator_than_the_best_of_those_it_asks(lengths: list[int]) -> None:
    asked = [(name, each) for name, planner in PLANNERS.items() if not planner.left_out for each in planner.tries]
    best = min(step_s(make_planner(name, CLUSTER, LLAMA, **each.options)(lengths)) for name, each in asked)
    assert step_s(auto(lengths)) <= 1.01 * best


def test_the_note_says_which_and_why_and_is_no_decision() -> None:
    plan = auto(LONG)
    assert plan.note.startswith("zeppelin: ")
    assert "ms a layer by estimate" in plan.note
    assert "; then " in plan.note
    assert "not faster by their bounds: " in plan.note
    assert not any(name in plan.note for name, planner in PLANNERS.items() if planner.left_out)
    # A note is no decision.
    assert plan.fingerprint() == replace(plan, note="").fingerprint()
    assert plans.from_json(plans.to_json(plan)) == plan


def test_where_nothing_fits_a_plan_that_does_not_is_not_chosen() -> None:
    # A plan that does not fit is not chosen.
    # hybrid_dp is faster, but holds more tokens on one rank than te_ring.
    names = ("hybrid_dp", "te_ring")
    roomy = auto(MIXED, planners=names, layers=Layers())
    machine = Machine(CLUSTER, LLAMA, AnalyticCost(CLUSTER, LLAMA))
    fast, slow = (estimate(make_planner(name, CLUSTER, LLAMA)(MIXED), machine) for name in names)
    assert fast is not None
    assert slow is not None
    most, least = (each.backward.replay_bytes for each in (fast, slow))
    assert (fast.layer_s < slow.layer_s, most > least, roomy.planner) == (True, True, "hybrid_dp")
    tight = replace(CLUSTER, memory_bytes=(most + least) / 2)
    chosen = auto(MIXED, tight, planners=names, layers=Layers())
    assert (chosen.planner, "hybrid_dp" in chosen.note, "(does not fit)" in chosen.note) == ("te_ring", True, True)
    # Where nothing fits it says so and a little memory is not worth seconds.
    # Where nothing fits it says so.
    chosen = auto(MIXED, replace(CLUSTER, memory_bytes=1e9), planners=("te_ring", "ulysses"))
    assert "nothing fits: it needs " in chosen.note
    # Where nothing fits a little memory is not worth seconds.
    # ulysses needs least by some MB, and takes two fifths longer than zeppelin.
    tight, names = replace(CLUSTER, memory_bytes=1e10), ("ulysses", "zeppelin")
    machine = Machine(tight, LLAMA, AnalyticCost(tight, LLAMA))
    least, fast = (estimate(make_planner(name, tight, LLAMA)(MIXED), machine) for name in names)
    assert least is not None
    assert fast is not None
    assert not fast.backward.fits
    assert 0 < fast.backward.peak_bytes - least.backward.peak_bytes < 0.02 * tight.memory_bytes
    assert fast.layer_s < 0.75 * least.layer_s
    assert auto(MIXED, tight, planners=names).planner == "zeppelin"


def test_a_remap_that_gains_less_than_it_moves_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    # Ranks with more tokens have less attention here, on links by data sheets. Left out all the same
    # where nothing fits.
    cluster = load_cluster("a800").build(num_ranks=16, ranks_per_node=8)
    cluster = replace(cluster, intra_bytes_per_s=200e9, nic_bytes_per_s=25e9)
    layers = Layers(routing="pays", remap=True, remap_when="pays")
    assert not make_planner("knapformer", replace(cluster, memory_bytes=5e10), LLAMA, layers)(REMAPPED).moves
    planner = make_planner("knapformer", cluster, LLAMA, layers)
    plan = planner(REMAPPED)
    assert not plan.moves
    monkeypatch.setattr("megatron_balance.planning.layers.best_first", lambda _: [0])
    before = planner(REMAPPED)
    assert before.moves
    assert step_s(plan, cluster) < step_s(before, cluster)


def test_a_remap_of_a_plan_of_many_rounds_is_not_estimated(monkeypatch: pytest.MonkeyPatch) -> None:
    # Ring by ring that takes seconds on 1,024 ranks.
    asked: list[int] = []
    monkeypatch.setattr(planning_layers, "estimate", lambda plan, _: asked.append(plan.num_ranks))
    monkeypatch.setattr(planning_layers, "best_first", lambda _: [0])
    rng, layers = random.Random(0), Layers(remap=True, remap_when="pays")
    for num_ranks in (64, 1024):
        shares = [rng.lognormvariate(0, 1.3) for _ in range(4 * num_ranks)]
        lengths = [max(1, int(share * num_ranks * 8192 / sum(shares))) for share in shares]
        paper = {"rule": "paper", "tokens_per_rank": 10240}
        assert make_planner("zeppelin", Cluster(num_ranks, 8), LLAMA, layers, **paper)(lengths).moves
    assert asked == [64, 64]
    by_heads = make_planner("knapformer", Cluster(512, 8), LLAMA, topology="g8n64")([4096] * 512)
    assert planning_layers._num_rounds(by_heads) == 0  # exchanges of heads are quick to estimate


def test_refusals_and_options_of_auto() -> None:
    # Refusals of some do not matter and that of all is the first ones.
    assert auto(SHORT, tokens_per_rank=4096).num_tokens == sum(SHORT)
    with pytest.raises(InfeasibleError, match="tokens"):
        auto(SHORT, tokens_per_rank=4000)
    # Wrong options are errors that say what to do.
    with pytest.raises(ConfigError, match="wlb_llm is not one to ask; expected some of te_ring, "):
        auto(SHORT, planners=["wlb_llm"])
    with pytest.raises(ConfigError, match="slack: expected at least 1"):
        auto(SHORT, slack=0.5)
    with pytest.raises(ConfigError, match="margin: expected at least 0"):
        auto(SHORT, margin=-1.0)


def test_steps_nano_batches_and_waiting_sequences_are_those_of_any_planner() -> None:
    cost = AnalyticCost(CLUSTER, LLAMA)
    context = StepContext(CLUSTER, LLAMA, cost, own_microbatches=False, ping_pong=True)
    choice = choose_planner("auto", {})
    step, carry = choice.plan_step((tuple(LONG), (500,)), context, Carry(waiting=((-1, 700),)))
    assert (carry, [len(each) for each in step.members]) == (EMPTY, [2, 2])
    assert sorted(seq for microbatch in step.members for part in microbatch for seq in part) == [-1, *range(7)]
    assert all(plan.note for plan in step.plans)


# Planners where the latent of multi-latent attention travels: none that may goes by heads.
H100S = load_cluster("h100").build(num_ranks=16, ranks_per_node=8)
LATENT = Model(
    *(128, 1, 192, 61, 7168, 2048),
    name="deepseek-v3",
    value_dim=128,
    latent_rank=512,
    latent_rope=64,
    query_rank=1536,
    latent_travels=True,
)
BATCHES = ((16 * 4096,), (9000, 20000, *(700,) * 50), (40, 64, 3000))


def latent_plans(
    name: str, options: Mapping[str, Any], batches: Sequence[tuple[int, ...]] = BATCHES
) -> list[MicrobatchPlan]:
    context = StepContext(H100S, LATENT, AnalyticCost(H100S, LATENT))
    choice = choose_planner(name, {"tokens_per_rank": 8192, **options})
    return [plan for lengths in batches for plan in choice.plan_step((lengths,), context)[0].plans]


PARTING: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in PLANNERS if PLANNERS[name].parts({})),
    ("zeppelin", {"rule": "groups"}),
    ("zeppelin", {"group_size": 8}),
    ("wlb_llm", {"within": "ulysses"}),
]


def test_planners_that_part_heads_say_so_and_the_others_plan_for_latents() -> None:
    for name in PLANNERS:
        for plan in () if PLANNERS[name].parts({}) else latent_plans(name, {}):
            check_latent(plan)
    for name, options in PARTING:
        assert PLANNERS[name].parts(options)
        (plan,) = latent_plans(name, options, BATCHES[:1])
        with pytest.raises(ConfigError, match="parts heads"):
            check_latent(plan)
    # `auto` asks none of them.
    assert {plan.planner for plan in latent_plans("auto", {"planners": ["knapformer", "te_ring"]})} == {"te_ring"}
    with pytest.raises(ConfigError, match=r"auto: planners: ulysses part heads, .* name others"):
        latent_plans("auto", {"planners": ["ulysses"]})
