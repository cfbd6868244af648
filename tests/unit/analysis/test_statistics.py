"""Figures in closed form against the ops of the expanded program."""

import re
from collections import Counter, defaultdict
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_balance import Cluster, MicrobatchPlan, Model
from megatron_balance.analysis import backward
from megatron_balance.analysis import change as changes
from megatron_balance.analysis.change import base_for, base_sync_s, change, held_bytes
from megatron_balance.analysis.link import WeightTraffic, layer_slot
from megatron_balance.analysis.memory import Sharding, layer_activation_bytes
from megatron_balance.analysis.statistics import plan_statistics, traffic
from megatron_balance.analysis.wire import Payload
from megatron_balance.compile.pipeline import Projector, expand, layout
from megatron_balance.config import load_cluster, load_model
from megatron_balance.errors import InfeasibleError
from megatron_balance.ir.program import Attend, Exchange, Kind
from megatron_balance.ir.strategy import Strategy
from tests.support import by_hand
from tests.support.dense import NAMES
from tests.support.strategies import ALL_PLANNERS, Case, cases
from tests.support.strategies import plan as plan_of

NO_MOVES = by_hand.plan((), 1).moves


def model_of(plan: MicrobatchPlan) -> Model:
    return Model(plan.num_heads, plan.num_kv_heads, head_dim=16)


def from_ops(plan: MicrobatchPlan) -> dict[str, Any]:
    # Figures of a plan by counting every row of the whole forward program.
    model, ranks = model_of(plan), range(plan.num_ranks)
    kv: list[set[tuple[int, ...]]] = [set() for _ in ranks]
    inter: list[set[tuple[int, ...]]] = [set() for _ in ranks]
    queries: list[set[tuple[int, ...]]] = [set() for _ in ranks]
    partials: list[set[tuple[int, ...]]] = [set() for _ in ranks]
    remapped: list[set[tuple[int, ...]]] = [set() for _ in ranks]
    total, total_inter, pairs = defaultdict(int), defaultdict(int), defaultdict(int)
    each = {Kind.KV: 2 * 16 * 2, Kind.Q: 16 * 2, Kind.OUT: 16 * 2 + 4}
    program = expand(plan)
    exchanges = [op for op in program.forward if isinstance(op, Exchange)]
    remap_out = exchanges[-1].id if plan.moves else None
    routed = 0
    placed = [
        {(seq, t) for seq, a, b in Projector(plan).attention_layout(r).tolist() for t in range(a, b)} for r in ranks
    ]
    for op in exchanges:
        routed += len({row[:2] for row in op.routes})
        for kind, seq, start, stop, head_start, head_stop, src, dst in op.transfers:
            crosses = src // plan.ranks_per_node != dst // plan.ranks_per_node
            num_bytes = (stop - start) * (head_stop - head_start) * each[Kind(kind)]
            total[dst] += num_bytes
            total_inter[dst] += num_bytes * crosses
            tokens = {(seq, t) for t in range(start, stop)}
            if op.id < program.remap_in and tokens <= placed[dst]:
                remapped[dst] |= tokens  # to attend with; what an owner sends on for a holder is attention's
            elif op.id == remap_out:
                pass
            elif kind == Kind.KV:
                kv[dst] |= tokens
                inter[dst] |= tokens if crosses else set()
            elif kind == Kind.Q:
                queries[dst] |= tokens
            else:
                partials[dst] |= {(seq, t, src) for _, t in tokens}
    for op in program.forward:
        if isinstance(op, Attend):
            for _, q0, q1, h0, h1, k0, k1, _, _ in op.pairs:
                shown = [plan.mask.keys(0, q) for q in range(q0, q1)]
                pairs[op.rank] += (h1 - h0) * sum(max(0, min(k1, stop) - max(k0, first)) for first, stop in shown)
    return {
        "tokens_per_rank": [int((rows[:, 2] - rows[:, 1]).sum()) for rows in (layout(plan, r) for r in ranks)],
        "attention_tokens_per_rank": [len(x) for x in placed],
        "attention_pairs_per_rank": [pairs[r] / model.num_heads for r in ranks],
        "kv_tokens_received_per_rank": [len(x) for x in kv],
        "kv_tokens_received_inter_node_per_rank": [len(x) for x in inter],
        "query_tokens_received_per_rank": [len(x) for x in queries],
        "partial_tokens_received_per_rank": [len(x) for x in partials],
        "remap_tokens_received_per_rank": [len(x) for x in remapped],
        "bytes_received_per_rank": {"total": [total[r] for r in ranks], "inter_node": [total_inter[r] for r in ranks]},
        "routed_transfers": routed,
    }


def largest_exchange_from_ops(plan: MicrobatchPlan) -> list[int]:
    # Token-heads of keys that the largest exchange of attention brings each rank; without a remap,
    # which brings some of them itself.
    program = expand(replace(plan, moves=NO_MOVES, routing=None) if plan.moves else plan)
    brought = [Counter[int]() for _ in range(plan.num_ranks)]
    for op in (op for op in program.forward if isinstance(op, Exchange)):
        for kind, _, start, stop, head_start, head_stop, _, dst in op.transfers:
            brought[dst][op.id] += (stop - start) * (head_stop - head_start) * (kind == Kind.KV)
    return [max(each.values(), default=0) for each in brought]


def assert_figures_are_those_of_the_ops(plan: MicrobatchPlan, ranks_per_nic: int) -> None:
    shared = plan.routing.ranks_per_nic if plan.routing is not None else ranks_per_nic
    got, want = plan_statistics(plan, model_of(plan), ranks_per_nic), from_ops(plan)
    pairs = want.pop("attention_pairs_per_rank")
    assert {key: got[key] for key in want} == want
    # With heads that do not divide by the ranks a rank's share of the pairs is a fraction, rounded;
    # the sum is exact.
    assert got["attention_pairs_per_rank"] == pytest.approx(pairs, abs=len(plan.zones))
    assert sum(got["attention_pairs_per_rank"]) == sum(map(plan.mask.num_pairs, plan.lengths))
    assert sum(got["tokens_per_rank"]) == got["num_tokens"] == sum(plan.lengths)
    assert backward.largest_exchange(plan).tolist() == largest_exchange_from_ops(plan)
    assert got["remap"]["tokens_moved"] == sum(got["remap_tokens_received_per_rank"])
    moved = traffic(expand(plan), Payload.of(model_of(plan)), ranks_per_node=plan.ranks_per_node, ranks_per_nic=shared)
    assert got["bytes_sent_per_nic"] == moved.nic_sent.tolist()
    assert got["bytes_received_per_nic"] == moved.nic_received.tolist()


@pytest.mark.parametrize("planner", ALL_PLANNERS)
@settings(max_examples=5)
@given(case=cases(masks=NAMES), ranks_per_nic=st.integers(1, 4), pieces=st.integers(1, 3))
def test_figures_of_any_planner_remapped_and_routed_are_those_of_the_ops(
    planner: str, case: Case, ranks_per_nic: int, pieces: int
) -> None:
    plan = plan_of(planner, case)
    if plan.routing is not None:
        plan = replace(plan, routing=replace(plan.routing, pieces=pieces))
    assert_figures_are_those_of_the_ops(plan, ranks_per_nic)


def test_figures_of_small_plans() -> None:
    # Figures of a rank with heads of two groups are those of the ops.
    zone = by_hand.zone("pool", "head_ring", range(4), (0, 1), 4)
    plan = by_hand.plan((40, 7), 4, zone, ranks_per_node=2, heads=(6, 3))
    assert_figures_are_those_of_the_ops(plan, ranks_per_nic=1)
    # Imbalance is the largest load over the mean.
    plan = by_hand.plan((4, 2), 2, *by_hand.each_local(2), heads=(1, 1))
    assert plan_statistics(plan, model_of(plan))["imbalance"] == {"tokens": 4 / 3, "attention": 10 / 6.5}
    # An empty batch is balanced and moves nothing.
    got = plan_statistics(by_hand.plan((), 2, heads=(1, 1)), Model(1, 1, 16))
    assert got["imbalance"] == {"tokens": 1.0, "attention": 1.0}
    assert got["tokens_per_rank"] == got["bytes_received_per_rank"]["total"] == [0, 0]
    # Only the first rank of a node receives across nodes in a ring in node order.
    plan = by_hand.pool("ring", (64,), 4, ranks_per_node=2, heads=(1, 1))
    inter = plan_statistics(plan, model_of(plan))["kv_tokens_received_inter_node_per_rank"]
    assert [n > 0 for n in inter] == [True, False, True, False]


# Keep or replay by layer: the prediction, the decision and its sentence.
LLAMA = load_model("llama-7b")
MODEL = Model(8, 8, 64, num_layers=4, hidden_size=512, ffn_size=1024, vocab_size=1)
GB = 1e9


def microbatch(tokens: int = 1000, kept: int = 1_000_000) -> backward.MicrobatchBytes:
    return backward.MicrobatchBytes(*(np.full(2, each) for each in (tokens, kept, 100_000, 0)))


def of(other: float, kept: list[float], replayed: float = 0.0, layers: int = 4) -> backward.StepBytes:
    each = np.zeros(len(kept))
    return backward.StepBytes(
        other, each, each, np.array(kept), np.full(len(kept), replayed), tuple(range(layers, 0, -1))
    )


def step_of(plan: MicrobatchPlan) -> backward.StepBytes:
    stage = backward.Stage(32, Sharding(optimizer=plan.num_ranks))
    return backward.step_bytes([backward.microbatch_bytes([plan], LLAMA)], LLAMA, stage)


def test_a_ring_keeps_the_keys_of_all_others_and_a_head_exchange_its_heads_only():
    plan = by_hand.pool("ring", [64 * 4096], 64, ranks_per_node=8, heads=(32, 32))
    found = step_of(plan)
    assert found.layers * found.kept.max() == 63 * 4096 * LLAMA.kv_bytes_per_token * 32
    assert round(found.layers * found.kept.max() / GB) == 135
    plan = by_hand.pool("head_exchange", [32 * 8192], 32, ranks_per_node=8, heads=(32, 32))
    found = step_of(plan)
    # A rank attends with one of 32 heads to all tokens: queries, keys and values of 31 of 32 tokens.
    assert found.kept.max() == 31 * 8192 * 3 * 128 * 2
    assert found.layers * found.kept.max() < 10 * GB


@pytest.mark.parametrize(
    ("recompute", "numbers", "words"),
    [
        (backward.Recomputed(), (5, 4, 3, 2, 1), "keep in 1 of 5 layers, replay in 4"),
        (backward.Recomputed("core_attention"), (1, 1, 1, 1, 1), "keep"),
        (backward.Recomputed("uniform", 1), (1, 1, 1, 1, 1), "keep"),
        (backward.Recomputed("uniform", 2), (2, 1, 2, 1, 1), "keep in 3 of 5 layers, replay in 2"),
        (backward.Recomputed("block", 2), (1, 1, 4, 3, 2), "keep in 2 of 5 layers, replay in 3"),
    ],
)
def test_layers_are_numbered_by_what_keeping_costs(recompute, numbers, words):
    step = backward.step_bytes([microbatch()], MODEL, backward.Stage(5, recompute=recompute))
    assert step.numbers == numbers
    one = backward.decide([step], "auto", float(step.peak(1).max() + 1) / backward.USABLE)
    assert (one.keeping, one.in_words) == (1, words), "of layers held at once, told in layers"


def test_auto_keeps_in_as_many_layers_as_fit():
    step = of(10.0, [2.0, 1.0], replayed=1.0)
    for memory, keeping in ((18.0, 4), (17.9, 3), (17.0, 3), (16.9, 2), (13.0, 1), (12.9, 0), (1.0, 0)):
        decision = backward.decide([step], "auto", memory / backward.USABLE)
        assert decision.keeping == keeping, memory
    assert backward.decide([step], "auto", None).keeping == 4
    assert backward.decide([step], "keep", 1.0).keeping == 4
    assert backward.decide([step], "replay", 100.0).keeping == 0
    # Stages decide together by the fullest.
    first, last = of(10.0, [2.0]), replace(of(10.0, [1.0]), stage=1)
    assert backward.decide([first, last], "auto", 14.0 / backward.USABLE).keeping == 2
    assert backward.decide([last], "auto", 14.0 / backward.USABLE).keeping == 4


held = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=4)


@given(held, st.integers(0, 3), st.integers(1, 6), st.integers(1, 60))
def test_a_mix_fits_and_one_layer_more_would_not(ranks, replayed, layers, memory):
    other, kept = (np.array(column, dtype=float) for column in zip(*ranks, strict=True))
    step = backward.StepBytes(
        1.0, other, np.zeros(len(ranks)), kept, np.minimum(replayed, kept), tuple(range(layers, 0, -1))
    )
    keeping = backward.decide([step], "auto", memory / backward.USABLE).keeping
    fits = [float(step.peak(k).max()) <= memory + 1e-9 for k in range(layers + 1)]
    assert fits[keeping] or not any(fits)
    assert not any(fits[keeping + 1 :])


def test_microbatches_in_flight_are_held_and_what_is_computed_again_one_run_at_a_time():
    # Pipeline stages hold what their microbatches in flight received.
    batches = [microbatch(kept=kept) for kept in (1, 5, 7, 2, 1)]
    stages = [backward.Stage(2, Sharding(pipeline=2, stage=stage)) for stage in (0, 1)]
    assert [backward.step_bytes(batches, MODEL, stage).kept.max() for stage in stages] == [12, 7]
    # Interleaved: warm-up of 2 x 1 + 1 x 2 passes and one more, of chunks of one layer.
    interleaved = backward.Stage(2, Sharding(pipeline=2, stage=0), chunks=2)
    assert interleaved.passes(5) == 5
    assert backward.step_bytes(batches, MODEL, interleaved).kept.max() == pytest.approx(14 / 3 * 5)
    # What is computed again is held for one run at a time.
    full = backward.step_bytes([microbatch()], MODEL, backward.Stage(4, recompute=backward.Recomputed("uniform", 2)))
    plain = backward.step_bytes([microbatch()], MODEL, backward.Stage(4))
    assert (full.layers, plain.layers) == (2, 4)
    assert plain.activations.max() == 4 * 1000 * layer_activation_bytes(MODEL)
    assert full.activations.max() == 2 * 1000 * layer_activation_bytes(MODEL, "full")
    assert full.working.max() == 2 * 1000 * layer_activation_bytes(MODEL)


def test_the_sentence_says_the_decision_and_a_step_that_fits_in_no_way_what_would_fit():
    # The sentence says the decision the peak and the alternatives.
    mixed = backward.decide([of(10 * GB, [2 * GB, 3 * GB], replayed=1 * GB)], "auto", 20 * GB)
    assert mixed.sentence() == (
        "backward: keep in 2 of 4 layers, replay in 2; predicted peak 17.0 of 20.0 GB on rank 1 "
        "(all keep: 22.0 GB, all replay: 11.0 GB)"
    )
    assert (
        "17.0 of 17.5 GB on rank 1, which leaves less than 10% for what"
        in replace(mixed, memory_bytes=17.5 * GB).sentence()
    )
    told = backward.decide([replace(of(10 * GB, [3 * GB]), stage=1)], "keep", 20 * GB)
    assert told.sentence().startswith(
        "backward: keep as configured; predicted peak 22.0 of 20.0 GB on rank 0 of stage 1, which does not fit"
    )
    # A step that fits in no way is an error that says what would fit.
    batch, stage = microbatch(tokens=100_000), backward.Stage(4, Sharding(optimizer=2))
    step = backward.step_bytes([batch], MODEL, stage)
    needs = float(step.peak(0).max())
    decision = backward.decide([step], "auto", 0.9 * needs)
    with pytest.raises(InfeasibleError) as failed:
        backward.check_fits(decision, [batch], MODEL, [stage])
    told = str(failed.value)
    (fewer,) = re.findall(r"at most ([\d,]+) tokens", told)  # a change that is said to fit does
    batch_of_fewer = microbatch(tokens=int(fewer.replace(",", "")))
    assert backward.decide([backward.step_bytes([batch_of_fewer], MODEL, stage)], "auto", 0.9 * needs).fits
    assert "full activation recomputation" in told
    assert "tokens on a rank, in place of 100,000" in told
    assert "set 'backward: replay'" in told
    for decided in (backward.decide([step], "replay", 0.9 * needs), backward.decide([step], "auto", 1.2 * needs)):
        backward.check_fits(decided, [batch], MODEL, [stage])


# Pull and push of a change, on links.
SMALL = Model(8, 8, 16, num_layers=4, hidden_size=128, ffn_size=256, vocab_size=512)
CLUSTER = Cluster(num_ranks=8, ranks_per_node=4, intra_bytes_per_s=1e9, nic_bytes_per_s=1e8)
BASE = Strategy.parse("4*tp2-pp1-cp1")


def test_weights_that_ranks_lack_move_and_roles_share_memory() -> None:
    # The base as a strategy moves what all gather and reduce scatter do.
    # 32B on 64 A800s, <16,1,1> x 4: a quarter of a sixteenth from each of three others.
    cluster, model = load_cluster("a800-ib").build(), load_model("llama2-32b")
    model = replace(model, num_heads=64, num_kv_heads=64, head_dim=104)
    base = Strategy.parse("4*tp16-pp1-cp1")
    assert change(base, base, model, cluster).whole_s == pytest.approx(base_sync_s(base, model, cluster), rel=1e-3)
    # Bytes are those of weights that ranks lack.
    # Each of four TP 2 ranks of two pipelines pulls its half but for the quarter that it owns.
    strategy = Strategy.parse("2*tp2-pp1-cp1")
    found = change(BASE, strategy, SMALL, CLUSTER).traffic.described(CLUSTER)
    per_rank = held_bytes(strategy, SMALL, 8)[0] / 6
    assert found["pull_bytes"] == pytest.approx(4 * 2 * per_rank * 3 / 4, rel=0.01)
    assert found["push_bytes"] == 2 * found["pull_bytes"]
    # Roles share the memory of the largest.
    # The base layout is no role.
    strategies = tuple(map(Strategy.parse, ("tp1-pp1-cp1+tp2-pp1-cp1", "tp4-pp1-cp1", "4*tp2-pp1-cp1")))
    found = changes.role_bytes(changes.Layouts(BASE, strategies), SMALL, 8)
    whole = held_bytes(Strategy.parse("tp1-pp1-cp1"), SMALL, 8)[0]
    assert found == pytest.approx(np.array([1, 1 / 2, 1 / 2, 1 / 4, 0, 0, 0, 0]) * whole)
    # The base where nobody says one.
    mixed, even = Strategy.parse("tp4-pp1-cp1+tp2-pp2-cp1"), Strategy.parse("2*tp1-pp2-cp2")
    assert base_for([mixed, even], 8) == even
    assert base_for([mixed], 8) == Strategy.parse("2*tp4-pp1-cp1")
    assert base_for([Strategy.parse("tp3-pp1-cp1+tp2-pp1-cp1")], 8) == Strategy.parse("4*tp2-pp1-cp1")


@given(
    st.lists(st.tuples(st.sampled_from([1, 2, 4]), st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=3),
    *(st.lists(st.integers(0, 9), min_size=6, max_size=6),) * 2,
)
def test_what_is_uncovered_is_what_a_clock_says(
    given_works: list[tuple[int, int, int]], pull: list[int], push: list[int]
) -> None:
    # One microbatch a pipeline, four layers, at most four slots of them.
    slots = max(4 // stages for stages, _, _ in given_works)
    pull_s, push_s = (np.array([*each[: slots + 1], each[5]], dtype=float) for each in (pull, push))
    moved = changes.Change(4, pull_s, push_s, (0.0, 0.0), WeightTraffic(np.zeros((2, 1, 2, 2), dtype=np.int64)))
    works = [changes.PipelineWork(stages, 4.0 * (f + b), f, b) for stages, f, b in given_works]
    arrived, ends = np.cumsum(pull_s), list[float]()
    ready = np.zeros(slots + 2)
    for work in works:
        count, now = 4 // work.stages, float(arrived[0])
        slot_of = [int(layer_slot(np.array(layer % count), count, slots)) for layer in range(4)]
        for layer in range(4):
            now = max(now, float(arrived[slot_of[layer]])) + work.forward_s
        now = max(now, float(arrived[-1]))
        ready[-1] = max(ready[-1], now)
        for layer in reversed(range(4)):
            now += work.backward_s
            ready[slot_of[layer]] = max(ready[slot_of[layer]], now)
        ready[0] = max(ready[0], now)
        ends.append(now)
    done = 0.0
    for slot in reversed(range(slots + 2)):
        done = max(done, float(ready[slot])) + push_s[slot]
    first, second = moved.uncovered_s(works, overlap=True)
    assert first == pytest.approx(max(ends) - max(work.own_s for work in works))
    assert second == pytest.approx(done - max(ends))
    assert first + second >= moved.least_s(overlap=True) - 1e-9


def test_without_overlap_all_is_uncovered_and_seconds_are_of_the_fullest_link() -> None:
    # Without overlap all of it is uncovered.
    moved = change(BASE, Strategy.parse("8*tp1-pp1-cp1"), SMALL, CLUSTER)
    works = [changes.PipelineWork(1, 1.0, 0.05, 0.1)] * 8
    assert moved.uncovered_s(works, overlap=False) == moved.whole_s
    assert moved.least_s(overlap=False) == sum(moved.whole_s)
    assert sum(moved.uncovered_s(works, overlap=True)) < sum(moved.whole_s)
    assert moved.pull_s.sum() == pytest.approx(moved.whole_s[0], rel=0.01)
    # Bytes of pulls and pushes, and the seconds that links take for them
    # Seconds are those of the fullest link or NIC.
    # Four ranks on two nodes, a NIC for two; [way, rank, inside or between nodes, direction].
    table = np.zeros((2, 4, 2, 2), dtype=np.int64)
    table[0, :, 0] = [[100, 40], [40, 100], [0, 0], [0, 0]]
    table[0, :, 1] = [[30, 0], [30, 0], [0, 20], [0, 40]]
    table[1, 3, 0] = [0, 500]
    cluster = Cluster(4, 2, intra_bytes_per_s=100.0, nic_bytes_per_s=10.0, ranks_per_nic=2)
    pulled = {"pull_bytes": 200, "pull_bytes_inter_node": 60, "predicted_pull_s": 6.0}
    pushed = {"push_bytes": 0, "push_bytes_inter_node": 0, "predicted_push_s": 5.0}
    assert WeightTraffic(table).described(cluster) == pulled | pushed
    handed_on = WeightTraffic(table, handed_on=True).described(cluster)
    assert (handed_on["predicted_pull_s"], handed_on["predicted_push_s"]) == (6.0 + 1.0, 0.0 + 5.0)
