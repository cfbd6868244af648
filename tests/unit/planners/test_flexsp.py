"""flexsp: groups of different sizes, the integer program against brute force, life without SciPy."""

import importlib
import logging
from dataclasses import replace
from itertools import combinations, product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_balance import Batch, Cluster, Model, make_planner, verify
from megatron_balance.analysis.statistics import plan_statistics
from megatron_balance.analysis.step_memory import StepMemory, stages_of
from megatron_balance.config import load_cluster, load_model
from megatron_balance.cost.analytic import AnalyticCost
from megatron_balance.errors import InfeasibleError
from megatron_balance.ir.plan import MicrobatchPlan, TaskTable, Zone
from megatron_balance.ir.strategy import Strategy
from megatron_balance.planners import flexsp
from megatron_balance.planners.base import StepContext
from megatron_balance.planners.baselines import redundant_pairs
from megatron_balance.planners.hydraulis import HydraulisOptions
from megatron_balance.planners.pipelines import pipelines_of
from megatron_balance.solvers.milp import NoAnswerError
from megatron_balance.solvers.packing import best_fit

MODEL = Model(32, 8, 128)
LENGTHS = [24957, 8593, 25756, 17251, 28869, 6177, 5610, 592, 9331, 15506]


def plan_of(lengths: list[int], cluster: Cluster, **options: Any) -> MicrobatchPlan:
    return make_planner("flexsp", cluster, MODEL, **options)(lengths)


def groups_of(plan: MicrobatchPlan) -> list[tuple[int, list[int]]]:
    assert all(isinstance(zone, Zone) and zone.pattern == "head_exchange" for zone in plan.zones)
    return [
        (len(zone.ranks), [plan.lengths[seq] for seq in zone.seqs]) for zone in plan.zones if isinstance(zone, Zone)
    ]


# The planner
def test_groups_are_as_the_network_heads_and_nodes_ask() -> None:
    # Short sequences stay alone and a long one takes a node that it does not leave.
    # All ranks together would be even, too, but the all-to-all would cross the slow network.
    plan = plan_of([24000, *[3000] * 8], Cluster(16, 8, nic_bytes_per_s=1e9), slack=2.0, solver="greedy")
    assert groups_of(plan) == [(8, [24000]), *[(1, [3000])] * 8]
    # On a fast network one group may be the most even.
    assert groups_of(plan_of([16000, 4000, 4000, 4000, 4000], Cluster(8, 8), slack=2.0)) == [
        (8, [16000, 4000, 4000, 4000, 4000])
    ]
    # Groups are disjoint and inside nodes where they fit.
    plan = plan_of(LENGTHS, Cluster(32, 8))
    groups = [zone.ranks for zone in plan.zones if isinstance(zone, Zone)]
    taken = [rank for ranks in groups for rank in ranks]
    assert len(taken) == len(set(taken))
    assert len(groups) > 1
    assert all(len({rank // 8 for rank in ranks}) == 1 for ranks in groups if len(ranks) <= 8)
    # Groups of more ranks than heads are avoided where memory allows.
    plan = make_planner("flexsp", Cluster(8, 8), Model(2, 2, 128), slack=4.0)([4000] * 4)
    assert max(len(zone.ranks) for zone in plan.zones if isinstance(zone, Zone)) <= 2


def test_the_program_is_never_worse_than_the_greedy_answer_or_gives_none(monkeypatch: pytest.MonkeyPatch) -> None:
    # The program is never worse than the greedy answer.
    pytest.importorskip("scipy")
    cluster = Cluster(16, 8)
    pricing = flexsp._GroupSeconds(cluster, MODEL, AnalyticCost(cluster, MODEL))  # pyright: ignore[reportPrivateUsage]
    problem = pricing.problem(LENGTHS, 8000)
    by_program, by_greed = (
        problem.makespan(pricing.groups(LENGTHS, 8000, flexsp.FlexSpOptions(solver=solver)))
        for solver in ("highs", "greedy")
    )
    assert by_program <= by_greed
    # Items in groups that are not there are no answer.
    monkeypatch.setattr(flexsp._IntegerProgram, "solve", lambda *_: iter([(0, [(0, 1)]), (1, [(0, 1)])]))
    problem = flexsp._GroupsProblem((5, 5), ((1.0, 0.6), (1.0, 0.6)), (1, 2), 2, 10)
    with pytest.raises(NoAnswerError, match="groups that are not there"):
        flexsp.improve(problem, ((2, (0, 1)),), flexsp.FlexSpOptions())


def test_without_scipy_one_warning_and_the_greedy_answer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing(name: str) -> None:
        raise ImportError(name)

    wanted = plan_of(LENGTHS, Cluster(16, 8), solver="greedy")
    flexsp._warn_once.cache_clear()  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(importlib, "import_module", missing)
    with caplog.at_level(logging.WARNING):
        cost, batch = AnalyticCost(Cluster(16, 8), MODEL), Batch(tuple(LENGTHS))
        plans = [flexsp.plan(batch, Cluster(16, 8), MODEL, cost, flexsp.FlexSpOptions()) for _ in range(2)]
    assert plans == [wanted, wanted]
    assert [record.message for record in caplog.records] == [
        "flexsp: scipy.optimize cannot be imported (scipy.optimize): pip install 'megatron-balance[highs]', or do "
        "without highs; the greedy answer stands"
    ]


def test_a_program_that_would_be_too_large_or_slow_is_not_tried(caplog: pytest.LogCaptureFixture) -> None:
    # A program whose first node would take seconds is not tried.
    greedy = plan_of(LENGTHS, Cluster(16, 8), solver="greedy")
    assert plan_of(LENGTHS, Cluster(16, 8), most_variables=10) == greedy
    with caplog.at_level("INFO"):
        assert plan_of(LENGTHS, Cluster(16, 8), most_cells=100) == greedy
    assert "constraints make more than 100 cells" in caplog.text


@pytest.mark.parametrize("tokens_per_rank", [10**7, 10**9])
def test_a_capacity_beyond_any_batch_loses_no_sequence(tokens_per_rank: int, caplog: pytest.LogCaptureFixture) -> None:
    # As that of a small model on a GPU, which `report --run` of a trial has.
    small = Model(8, 4, 4, num_layers=2, hidden_size=32, ffn_size=64, bytes_per_element=4)
    for lengths in ((300, 1, 1, 7, 300), (1, 1, 140, 300, 20, 20, 20, 7, 1, 20, 300, 20, 20, 7, 7, 7)):
        with caplog.at_level(logging.DEBUG):
            made = make_planner("flexsp", Cluster(4, 2), small, tokens_per_rank=tokens_per_rank)(lengths)
        assert len(made.zones) > 1
    assert "tolerance" not in caplog.text, "the program can be solved"


def test_microbatches_are_cut_by_the_blaster_and_hold_every_sequence_once_within_the_capacity() -> None:
    assert flexsp._blast([5, 100, 20, 30, 40, 5], 2) == [[1], [4, 3, 2, 0, 5]]
    assert flexsp._blast([7], 3) == [[0]]
    assert flexsp._blast([], 2) == []
    # Microbatches hold every sequence once within the capacity.
    given = Batch(tuple(LENGTHS)), Cluster(8, 4), MODEL, AnalyticCost(Cluster(8, 4), MODEL)
    made = flexsp.plan_batch(*given, flexsp.FlexSpOptions(tokens_per_rank=5000))
    assert len(made.plans) >= -(-sum(LENGTHS) // 40000)
    assert sorted(seq for (seqs,) in made.members for seq in seqs) == list(range(len(LENGTHS)))
    for plan, (seqs,) in zip(made.plans, made.members, strict=True):
        assert plan.lengths == tuple(LENGTHS[seq] for seq in seqs)
        assert max(plan_statistics(plan, MODEL)["tokens_per_rank"]) <= 5000
        verify(plan)
    # A sequence longer than the pool is named.
    with pytest.raises(InfeasibleError, match="sequence 4 has 28869 tokens"):
        flexsp.plan_batch(*given, flexsp.FlexSpOptions(tokens_per_rank=100))


# The problem behind it
@st.composite
def problems(draw: st.DrawFn) -> flexsp._GroupsProblem:
    tokens = draw(st.lists(st.integers(1, 12), min_size=1, max_size=5))
    sizes = (1, 2, 4)
    fixed = draw(st.sampled_from([0.0, 1.0]))  # what each further rank costs
    seconds = [[n * n / size + fixed * (size - 1) for size in sizes] for n in tokens]
    return flexsp._GroupsProblem(tokens, seconds, sizes, 4, draw(st.integers(-(-sum(tokens) // 4), sum(tokens))))


def brute_force(problem: flexsp._GroupsProblem) -> float:
    # The lowest makespan over all sizes and assignments.
    best = float("inf")
    for count in range(1, problem.num_ranks + 1):
        for sizes in product(problem.sizes, repeat=count):
            if sum(sizes) > problem.num_ranks or list(sizes) != sorted(sizes):
                continue
            for owner in product(range(count), repeat=len(problem.tokens)):
                groups: flexsp.Groups = tuple(
                    (s, tuple(k for k, o in enumerate(owner) if o == g)) for g, s in enumerate(sizes)
                )
                if all(sum(problem.tokens[k] for k in items) <= size * problem.capacity for size, items in groups):
                    best = min(best, problem.makespan(groups))
    return best


@given(problem=problems())
@settings(max_examples=40)
def test_the_program_finds_the_optimum_of_small_problems(problem: flexsp._GroupsProblem) -> None:
    pytest.importorskip("scipy")
    together: flexsp.Groups = ((4, tuple(range(len(problem.tokens)))),)
    start = flexsp.greedy(problem) or together
    try:
        found = flexsp.improve(problem, start, flexsp.FlexSpOptions(node_limit=1000))
    except NoAnswerError:
        found = start
    assert sorted(k for _, items in found for k in items) == list(range(len(problem.tokens)))
    assert sum(size for size, _ in found) <= 4
    assert all(sum(problem.tokens[k] for k in items) <= size * problem.capacity for size, items in found)
    optimum = brute_force(problem)
    assert optimum <= problem.makespan(found) * (1 + 1e-9)
    assert problem.makespan(found) <= optimum * 1.011  # two tolerances


@given(tokens=st.lists(st.integers(1, 12), min_size=1, max_size=9), num_buckets=st.integers(1, 4))
def test_buckets_round_up_by_as_little_as_can_be(tokens: list[int], num_buckets: int) -> None:
    made = flexsp.bucket(tokens, num_buckets)
    assert len(made) <= num_buckets
    assert sorted(item for items in made for item in items) == list(range(len(tokens)))
    order = sorted(tokens, reverse=True)
    least = min(
        sum(order[a] * (b - a) - sum(order[a:b]) for a, b in zip([0, *cuts], [*cuts, len(order)], strict=True))
        for count in range(min(num_buckets, len(order)))
        for cuts in combinations(range(1, len(order)), count)
    )
    assert sum(tokens[items[0]] - tokens[item] for items in made for item in items) == least


# packing: packs of one size, what is cut attends to its own beginning only, redundant attention
# counted apart.
PACKED = Model(8, 2, 16)


def packed_plan(lengths: list[int], num_ranks: int = 4) -> MicrobatchPlan:
    return make_planner("packing", Cluster(num_ranks, num_ranks), PACKED)(lengths)


def test_sequences_that_fill_packs_stay_whole_and_what_fits_none_is_cut_where_packs_end() -> None:
    plan = packed_plan([6, 4, 10, 3, 7, 8, 2])
    assert plan.zones == (
        Zone("local", "ring", (0,), (2,)),
        Zone("local", "ring", (1,), (5, 6)),
        Zone("local", "ring", (2,), (3, 4)),
        Zone("local", "ring", (3,), (0, 1)),
    )
    # What fits no pack is cut where packs end and sees all its earlier keys.
    plan = packed_plan([25, 9, 6])  # packs of 10: 9 and 6 whole, 25 into what is left, 1 + 4 + 10 + 10
    cut = plan.zones[0]
    assert isinstance(cut, TaskTable)
    assert list(cut.fragments) == [(0, 0, 0, 1), (1, 0, 1, 5), (2, 0, 5, 15), (3, 0, 15, 25)]
    assert list(cut.tasks) == [(0, 0, 0, 1, 0, 1), (1, 0, 1, 5, 0, 5), (2, 0, 5, 15, 0, 15), (3, 0, 15, 25, 0, 25)]
    assert plan.zones[1:] == (Zone("local", "ring", (0,), (1,)), Zone("local", "ring", (1,), (2,)))
    assert plan_statistics(plan, PACKED)["kv_tokens_received_per_rank"] == [0, 1, 5, 15]
    verify(plan, "replay")
    # Best fit takes the bin with the least room and the lower of two.
    assert best_fit([5, 5, 4, 9, 2], [6, 5, 10, 10]) == [1, 0, 2, 3, 2]
    assert best_fit([3, 3], [3]) == [0, None]
    assert best_fit([], []) == []


@given(lengths=st.lists(st.integers(1, 300), max_size=12), num_ranks=st.integers(1, 9))
def test_every_rank_has_the_same_tokens(lengths: list[int], num_ranks: int) -> None:
    tokens = plan_statistics(packed_plan(lengths, num_ranks), PACKED)["tokens_per_rank"]
    assert max(tokens) - min(tokens) <= 1


@given(pack=st.lists(st.integers(1, 100), max_size=8))
def test_a_pack_with_its_redundant_pairs_is_one_causal_sequence(pack: list[int]) -> None:
    # Those of each query with the sequences before its own.
    assert redundant_pairs([3, 2, 4]) == (0, 6, 20)
    own = sum(n * (n + 1) // 2 for n in pack)
    assert own + sum(redundant_pairs(pack)) == sum(pack) * (sum(pack) + 1) // 2


# The memory that a planner inside a pipeline is told: that of its scheme.
LLAMA = load_model("llama-7b")
CLUSTER = load_cluster("h100").build(num_ranks=16, ranks_per_node=8)
TOLD = StepMemory(LLAMA, tuple(stages_of(LLAMA, 16, recompute="full")), "replay")
CONTEXT = StepContext(
    CLUSTER, LLAMA, AnalyticCost(CLUSTER, LLAMA), options=HydraulisOptions(tokens_per_rank=8192), memory=TOLD
)
STRATEGY = Strategy.parse("tp2-pp2-cp2+tp1-pp1-cp8")


def test_memory_that_pipelines_are_told_is_of_their_stages_and_of_all_ranks_that_share_the_optimizer() -> None:
    halves, whole = (inside.memory for inside in pipelines_of(STRATEGY, CONTEXT).inside)
    assert halves is not None
    assert whole is not None
    assert (halves.asked, halves.stages[0].recompute) == (TOLD.asked, TOLD.stages[0].recompute)
    assert [(each.num_layers, each.sharding.optimizer) for each in halves.stages] == [(16, 4), (16, 4)]
    assert [(each.num_layers, each.sharding.optimizer) for each in whole.stages] == [(32, 16)]
    # A rank that is one GPU has its part of a groups state.
    of_groups, of_gpus = (
        pipelines_of(STRATEGY, replace(CONTEXT, of_ranks=of_ranks)).inside[0].memory for of_ranks in (False, True)
    )
    assert of_groups is not None
    assert of_gpus is not None
    for group, gpu in zip(of_groups.stages, of_gpus.stages, strict=True):
        assert gpu.state_bytes is not None
        assert group.state_bytes == pytest.approx(2 * gpu.state_bytes)
    assert of_gpus.model == LLAMA.share(2)
    # A jobs own layout is what it is told.
    own = Strategy.parse("2*tp1-pp1-cp8")
    assert [inside.memory for inside in pipelines_of(own, replace(CONTEXT, strategy=own)).inside] == [TOLD, TOLD]
