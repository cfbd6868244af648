"""wlb_llm: packing by work, queues of outliers, the baselines of Table 2, and options out of range."""

from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_balance import Cluster, MicrobatchPlan, Model, make_planner
from megatron_balance.analysis.statistics import plan_statistics
from megatron_balance.config import load_cluster, load_model
from megatron_balance.cost.analytic import AnalyticCost
from megatron_balance.cost.base import Floats
from megatron_balance.errors import ConfigError, InfeasibleError
from megatron_balance.ir.plan import Zone
from megatron_balance.ir.step import EMPTY, Carry, Lengths, StepPlan
from megatron_balance.lab.papers import wlb_llm as table2
from megatron_balance.patterns.base import Context
from megatron_balance.planners import wlb_llm
from megatron_balance.planners.base import StepContext
from megatron_balance.planning.choice import choose_planner
from megatron_balance.simulator import pipeline
from megatron_balance.simulator.pipeline import ChunkPass
from megatron_balance.solvers.packing import PackingProblem, pack_better, pack_greedily
from tests.support.flat_cost import FlatCost

CLUSTER, MODEL = Cluster(2, 2), Model(4, 2, 16)
CONTEXT = StepContext(CLUSTER, MODEL, AnalyticCost(CLUSTER, MODEL), own_microbatches=False)


def plan(
    lengths: Lengths, carry: Carry = EMPTY, context: StepContext = CONTEXT, **options: Any
) -> tuple[StepPlan, Carry]:
    return choose_planner("wlb_llm", options).plan_step(lengths, context, carry)


def members(step: StepPlan) -> list[tuple[int, ...]]:
    return [tuple(chain.from_iterable(microbatch)) for microbatch in step.members]


def documents(*lengths: int) -> list[wlb_llm.Document]:
    return [wlb_llm.Document(number, length) for number, length in enumerate(lengths)]


def test_packing_by_work_and_by_equation_1() -> None:
    # Algorithm 1 by hand.
    # Work of n tokens: n + n^2 / 10. The 10 (20) goes first; three of 5 (7.5 each) follow into the
    # other microbatch. That has more then, so a 4 joins the 10; a 6 would be more than 15 tokens
    # with either.
    packed = wlb_llm._by_workload(documents(10, 5, 5, 5, 4), 2, 15, lambda n: n + n * n / 10)
    assert [[each.length for each in microbatch] for microbatch in packed.microbatches] == [[10, 4], [5, 5, 5]]
    assert packed.left == ()
    tight = wlb_llm._by_workload(documents(10, 5, 5, 5, 6), 2, 15, lambda n: n + n * n / 10)
    assert tight.left == (wlb_llm.Document(4, 6),)
    # Eq 1 is solved better than greedy where greedy errs.
    problem = PackingProblem((9, 9, 8, 8, 5, 2), 2, 22)
    bins = pack_greedily(problem)
    better = pack_better(problem, bins, 20)
    assert problem.largest(bins) == 170
    assert problem.largest(better) == 166, "the least of all 64 answers"
    assert pack_better(problem, better, 20) == better
    assert pack_greedily(PackingProblem((9, 8), 1, 10)) == [0, None]


def test_queues_of_outliers_are_emptied_each_for_itself() -> None:
    # A queue is emptied when it has one document for each microbatch.
    waiting = [wlb_llm.Document(-3, 120), wlb_llm.Document(-2, 210)]
    new = documents(130, 40, 99, 205)
    now, held = wlb_llm.release(waiting, new, (100, 200), 2)
    assert sorted(each.length for each in now) == [40, 99, 120, 130, 205, 210]
    assert held == []
    now, held = wlb_llm.release(waiting, new, (100, 200), 3)
    assert [each.length for each in now] == [40, 99]
    assert [each.length for each in held] == [120, 130, 210, 205], "queue by queue, first in, first out"
    now, held = wlb_llm.release([], documents(100, 101, 102, 103, 104), (100,), 2)
    assert [each.number for each in held] == [4], "no queue keeps as many as it could give"
    # Several queues are not one.
    short_and_long = ((120, 20), (30, 260))
    _, one = plan(short_and_long, thresholds=[100])
    _, two = plan(short_and_long, thresholds=[100, 200])
    assert one == EMPTY
    assert two.waiting == ((-4, 120), (-1, 260))


def test_outliers_wait_and_what_fits_no_microbatch_goes_first_in_the_next_step() -> None:
    first, carry = plan(((300, 20), (30, 40)), thresholds=[200])
    assert (sorted(chain(*members(first))), carry.waiting) == ([1, 2, 3], ((-4, 300),))
    _, carry = plan(((50,), (60, 70)), carry, thresholds=[200])
    assert carry.waiting == ((-7, 300),)
    third, after = plan(((250, 10), (11,)), carry, thresholds=[200])
    assert after == EMPTY
    assert {tuple(seq for seq in seqs if seq in (-7, 0)) for seqs in members(third)} == {(-7,), (0,)}
    assert sorted(each.lengths for each in third.plans) == [(250, 10, 11), (300,)]
    # What fits no microbatch goes first in the next step.
    step, carry = plan(((90, 60), (80, 50)), tokens_per_rank=60)
    assert all(each.num_tokens <= 120 for each in step.plans)
    assert carry.waiting == ((-3, 60), (-1, 50))
    step, carry = plan(((40,), (20,)), carry, tokens_per_rank=60)
    assert (sorted(members(step)), carry) == ([(-3, 1), (-1, 0)], EMPTY)
    # In the last steps nothing is delayed and what waits goes first.
    carry = Carry.of("wlb_llm", {"remained": []}, ((-2, 300), (-1, 210)))
    last = replace(CONTEXT, may_delay=False)
    step, after = plan(((250,), (20,)), carry, last, thresholds=[200], tokens_per_rank=200)
    assert after.waiting == ((-2, 250),), "the new one found no room"
    assert sorted(chain(*members(step))) == [-2, -1, 1]
    with pytest.raises(InfeasibleError, match="780 tokens in 4 documents do not fit 2 microbatches of S_max = 350"):
        plan(((250,), (20,)), carry, replace(last, may_carry=False), tokens_per_rank=175)


def test_delay_off_trains_what_was_dealt_and_repacking_moves_it() -> None:
    lengths = ((400, 300), (20, 20, 20))
    step, carry = plan(lengths)
    assert (sorted(chain(*members(step))), carry) == ([0, 1, 2, 3, 4], EMPTY)
    assert members(step) == [(0,), (1, 2, 3, 4)]
    assert members(plan(lengths, packing="original")[0]) == [(0, 1), (2, 3, 4)]
    # Without a capacity and a next step what fits no microbatch of one length is trained too.
    # It failed, since no capacity is no whole number.
    once = replace(CONTEXT, may_carry=False)
    step, carry = plan(((400, 300), (200, 150)), context=once, packing="fixed", context_tokens=500)
    assert (sorted(chain(*members(step))), carry) == ([0, 1, 2, 3], EMPTY)
    # A window of several batches brings like microbatches together.
    lengths = ((900, 50), (60, 70), (880, 20), (40, 30))
    step, _ = plan(lengths, packing="fixed", window=2, context_tokens=1000)
    work = [sum(n * n for n in each.lengths) for each in step.plans]
    assert work == sorted(work, reverse=True)
    assert sorted(chain(*members(step))) == list(range(8))
    assert plan(lengths, packing="ilp", window=2, context_tokens=1000)[1] == EMPTY


def test_any_planner_may_follow_inside_a_microbatch() -> None:
    lengths = ((400, 300), (20, 20, 20))
    for within in ("llama_all_gather", "zeppelin", "te_ring", "distca"):
        step, _ = plan(lengths, within=within, packing="original")
        assert step.plans == choose_planner(within, {}).plan_step(lengths, CONTEXT)[0].plans
    for sharding in ("document", "sequence"):  # options of the planner inside
        step, _ = plan(lengths, within="wlb_sharding", within_options={"sharding": sharding}, packing="original")
        asked = choose_planner("wlb_sharding", {"sharding": sharding})
        assert step.plans == asked.plan_step(lengths, CONTEXT)[0].plans
    halves, _ = plan(lengths, context=replace(CONTEXT, ping_pong=True), within="distca", packing="original")
    assert [len(microbatch) for microbatch in halves.members] == [2, 2]
    with pytest.raises(ConfigError, match="unknown planner"):
        plan(lengths, within="zepelin")
    with pytest.raises(ConfigError, match="within: expected the planner of one microbatch"):
        plan(lengths, within="wlb_llm")
    with pytest.raises(ConfigError, match="planner wlb_sharding: shardin: unknown key, did you mean 'sharding'"):
        plan(lengths, within="wlb_sharding", within_options={"shardin": "mixed"})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"thresholds": [300, 200]}, r"thresholds: expected lengths in tokens that rise .* got \[300, 200\]"),
        ({"thresholds": [200, 200]}, "thresholds: expected lengths in tokens that rise"),
        ({"thresholds": [0]}, "thresholds: expected lengths in tokens that rise"),
        ({"thresholds": [9], "packing": "fixed"}, r"thresholds \[9\] go with packing: workload, got packing: fixed"),
        ({"within_options": {"tokens_per_rank": 9}}, "within_options: tokens_per_rank is an option of wlb_llm itself"),
        ({"slack": 0.5}, "slack: expected at least 1"),
        (
            {"window": 2, "order": "rise_and_fall"},
            "order: rise_and_fall orders the microbatches of one step; window: 2",
        ),
        ({"window": 3}, "window: expected a divisor of the 2 microbatches that are planned at once, got 3"),
        ({"tokens_per_rank": 100}, "a document of 400 tokens is longer than S_max, 200 tokens .2 ranks x 100.; raise"),
    ],
)
def test_options_out_of_range_are_told_in_one_sentence(options: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, InfeasibleError), match=message):
        plan(((400, 300), (20, 20, 20)), **options)


def test_the_longest_microbatches_run_in_the_middle_and_a_pipeline_waits_less() -> None:
    lengths = ((900,), (100,), (500,), (301,), (502,), (300,))
    packed, _ = plan(lengths, packing="original")
    ordered, _ = plan(lengths, packing="original", order="rise_and_fall")
    assert [each.lengths for each in packed.plans] == [*lengths]
    assert [each.num_tokens for each in ordered.plans] == [100, 301, 502, 900, 500, 300]
    assert members(ordered) == [(1,), (3,), (4,), (0,), (2,), (5,)]

    def seconds(step: StepPlan) -> float:
        def after(_stage: int, one: ChunkPass, ready: Floats) -> Floats:
            return ready + (1 + one.backward) * step.plans[one.microbatch].num_tokens ** 2

        return pipeline.run(3, len(lengths), 1, 1, after, lambda _: np.zeros(1)).total_s

    assert seconds(ordered) < 0.9 * seconds(packed)


def test_tune_weighs_imbalance_against_delay() -> None:
    generator = np.random.default_rng(0)
    draw = [
        tuple(np.minimum(4096, (20 * (1 - generator.random(40)) ** -0.95).astype(int)).tolist()) for _ in range(120)
    ]
    steps = [tuple(draw[at : at + 4]) for at in range(0, 120, 4)]
    context = replace(CONTEXT, options=wlb_llm.WlbLlmOptions())
    trials = wlb_llm.tune(steps, context, most_delay=0.5, most_queues=2)
    (chosen,) = (trial for trial in trials if trial.chosen)
    assert trials[0].thresholds == ()
    assert trials[0].delay == 0
    assert chosen.imbalance < trials[0].imbalance
    assert 0 < chosen.delay <= 0.5
    unbeaten = [trial.imbalance for trial in trials if not trial.chosen]
    assert unbeaten == sorted(unbeaten, reverse=True), "less imbalance for more delay"
    with pytest.raises(ConfigError, match="steps of at least 2 microbatches"):
        wlb_llm.tune([((5, 6),)], context, most_delay=0.5, most_queues=3)


def test_table_2_counts_and_ours_reaches_it() -> None:
    # Fewer batches than the figures in docs have; the bounds that hold there hold here, too.
    batches = table2.global_batches("wlb-skew", 96)
    assert all(sum(sample) <= table2.WINDOW for batch in batches for sample in batch)
    original = table2.measure(batches, table2.context(packing="original"))
    assert original.imbalance == pytest.approx(1.44, abs=0.1)
    ours = table2.measure(batches, table2.context(thresholds=table2.THRESHOLDS["wlb-skew"][2]))
    assert ours.imbalance <= 1.05
    assert ours.delay <= 0.5
    assert ours.delayed >= 0.05


# wlb_sharding: equal tokens, even attention, and the choice by kernel time.
LLAMA, H100 = load_model("llama-7b"), load_cluster("h200").build(num_ranks=4)
COST = AnalyticCost(H100, LLAMA)
SHORT, ONE_LONG = (300,) * 64, (16_000, *(200,) * 200)


def made(sharding: str, lengths: tuple[int, ...], num_ranks: int = 4) -> MicrobatchPlan:
    return make_planner("wlb_sharding", Cluster(num_ranks, num_ranks), LLAMA, sharding=sharding)(lengths)


def slowest_s(planned: MicrobatchPlan) -> float:
    zones = [zone for zone in planned.zones if isinstance(zone, Zone)]
    return wlb_llm.predicted_s(zones, Context.of(planned), H100, LLAMA, COST)


@given(
    lengths=st.lists(st.one_of(st.integers(1, 20), st.integers(1, 5000)), min_size=1, max_size=9),
    num_ranks=st.integers(1, 8),
)
def test_ranks_differ_by_one_token_at_most_with_both_shardings_in_one_microbatch(
    lengths: list[int], num_ranks: int
) -> None:
    for zones in wlb_llm.candidates(lengths, num_ranks, "mixed"):
        planned = MicrobatchPlan("wlb_sharding", tuple(lengths), num_ranks, num_ranks, 2, 1, zones)
        held = plan_statistics(planned, LLAMA)["attention_tokens_per_rank"]
        assert max(held) - min(held) <= 1
        assert sum(held) == sum(lengths)


def test_a_fixed_sharding_is_even_only_where_documents_are_cut_on_their_own() -> None:
    for sharding, pattern in (("document", "gather_documents"), ("sequence", "gather_sequence")):
        assert [(zone.pattern, zone.seqs) for zone in made(sharding, (5, 1, 30)).zones] == [(pattern, (0, 1, 2))]
    # Long documents cut on their own are even and packed ones are not.
    even, packed = (plan_statistics(made(s, ONE_LONG), LLAMA)["imbalance"] for s in ("document", "sequence"))
    assert even["attention"] < 1.001
    assert packed["attention"] > 1.1
    assert even["tokens"] == packed["tokens"] == pytest.approx(1.0, abs=1e-4)


def test_the_sooner_sharding_is_chosen_and_a_mixture_is_never_above_it() -> None:
    # Many short documents are better packed, a long one on its own.
    for lengths, better, worse in ((SHORT, "sequence", "document"), ((40_000, 4000, 4000), "document", "sequence")):
        assert slowest_s(made(better, lengths)) < slowest_s(made(worse, lengths))
        assert made("adaptive", lengths) == made(better, lengths)
    # A mixture is never predicted above the better of both and below it where a microbatch has
    # both.
    for lengths in (SHORT, ONE_LONG, (7, 3, 1)):
        assert slowest_s(made("mixed", lengths)) <= slowest_s(made("adaptive", lengths))
    mixed = made("mixed", ONE_LONG)
    assert [(zone.pattern, zone.seqs) for zone in mixed.zones] == [
        ("gather_documents", (0,)),
        ("gather_sequence", tuple(range(1, 201))),
    ]
    assert slowest_s(mixed) < 0.99 * slowest_s(made("adaptive", ONE_LONG))


def test_candidates_of_a_mixture() -> None:
    # The second zone begins with the ranks that have no token more yet.
    (zones,) = [zones for zones in wlb_llm.candidates((13, 6), 4, "mixed") if len(zones) == 2]
    assert [zone.ranks for zone in zones] == [(0, 1, 2, 3), (1, 2, 3, 0)]

    # No document too short for all chunks is cut beside packed ones.
    def alone(lengths: tuple[int, ...]) -> list[int]:
        # Documents on their own of each candidate.
        tried = wlb_llm.candidates(lengths, 4, "mixed")
        return [sum(len(zone.seqs) for zone in zones if zone.name == "document") for zones in tried]

    assert alone(SHORT) == [0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64]
    assert alone((7,) * 9) == [0, 9], "all packed, or all on their own"
    # Bad input is one sentence.
    with pytest.raises(
        ConfigError, match="sharding: expected 'document', 'sequence', 'adaptive' or 'mixed', got 'chunk'"
    ):
        make_planner("wlb_sharding", Cluster(4, 4), LLAMA, sharding="chunk")
    with pytest.raises(InfeasibleError, match="the batch has 41 tokens; 4 ranks x 10 tokens hold 40"):
        make_planner("wlb_sharding", Cluster(4, 4), LLAMA, tokens_per_rank=10)([20, 21])


def test_predicted_seconds_are_of_all_launches_and_of_what_is_gathered() -> None:
    # Predicted seconds are of all launches forward and backward.
    # Each rank launches once a zone; the flat machine takes 1 s forward and 2 s backward.
    model = Model(2, 2, 16)
    context = Context(np.array([64, 64]), 2, 2, 4, 4)
    zones = [
        Zone("document", "gather_documents", (0, 1, 2, 3), (0,)),
        Zone("sequence", "gather_sequence", (1, 0), (1,)),
    ]
    assert wlb_llm.kernel_s(zones, context, FlatCost(model)).tolist() == [6.0, 6.0, 3.0, 3.0]
    # What is gathered and its gradients count at the rate of the slowest link.
    # A rank of each of two nodes, 10 tokens each: a step of 1,280 bytes out and 2,560 back.
    cluster, model = Cluster(2, 1, ranks_per_nic=1), Model(2, 2, 16, bytes_per_element=2)
    context = Context(np.array([20]), 2, 2, 2, 1)
    (zones,) = wlb_llm.candidates([20], 2, "document")
    flat = FlatCost(model)
    expected = 3.0 + flat.inter_node_s(10 * 2 * 2 * 16 * 2 * 3)
    assert wlb_llm.predicted_s(zones, context, cluster, model, flat) == pytest.approx(expected)
    (whole,) = wlb_llm.candidates([1], 2, "document")
    assert wlb_llm.predicted_s(whole, replace(context, lengths=np.array([1])), cluster, model, flat) == 3.0, (
        "nothing travels"
    )
