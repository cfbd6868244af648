"""Attention of pipeline stages and nano-batches on gloo ranks: each microbatch's is its own."""

import functools
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_balance import Batch, Cluster, MicrobatchPlan, Model
from megatron_balance.analysis.machine import Machine
from megatron_balance.analysis.trace_format import COMPUTE, Trace, TrackSpan, joined
from megatron_balance.compile import ping_pong
from megatron_balance.compile.pipeline import expand, layout
from megatron_balance.compile.proof.meaning import verify
from megatron_balance.compile.transpose import Policy
from megatron_balance.cost.analytic import AnalyticCost
from megatron_balance.errors import ConfigError, InvalidProgramError
from megatron_balance.ir.columns import Rows
from megatron_balance.ir.plan import REMAP, Routing
from megatron_balance.planning.ticks import plan_ticks, ticks
from megatron_balance.reference import owned_rows
from megatron_balance.runtime.attention import BackwardSlot, Server, balanced_attention
from megatron_balance.runtime.bind import AttentionShape, bind
from megatron_balance.runtime.groups import single
from megatron_balance.simulator.timeline import layer_trace
from tests.support import by_hand, dense, jobs, nano_batches, routed, trace_reader
from tests.support.nano_batches import LAYERS, NanoBatches, NanoBatchStep, Way, alone, attend_in_ticks, seed_of
from tests.support.pool import NUM_RANKS, Pool
from tests.support.strategies import Case, bare_plan, random_moves

HEADS, KV_HEADS, DIM, RANKS = 4, 2, 8, 8
Lengths = tuple[tuple[int, ...], ...]
FIRST = ((37, 20, 3), (60,), (11, 12, 13, 14), (1,))
# Of the same microbatches, of which one has no second nano-batch.
SECOND = ((41,), (), (25, 9), (7, 1, 5))


def dealt(lengths: tuple[int, ...], owned: Rows, pattern: str = "dispatch") -> MicrobatchPlan:
    # Shards of 8 queries dealt to all ranks, with or without tokens of their own.
    shards = [(seq, a, min(a + 8, stop)) for _, seq, start, stop in owned for a in range(start, stop, 8)]
    tasks = sorted((at % RANKS, seq, a, b, 0, b) for at, (seq, a, b) in enumerate(shards))
    zones = (replace(by_hand.task_table(owned, tasks), pattern=pattern),) if lengths else ()
    return by_hand.plan(lengths, RANKS, *zones, ranks_per_node=2, heads=(HEADS, KV_HEADS))


def spread(lengths: tuple[int, ...], ranks: int) -> MicrobatchPlan:
    # Each sequence in as many parts as a stage has ranks.
    parts = [(r, s, n * r // ranks, n * (r + 1) // ranks) for r in range(ranks) for s, n in enumerate(lengths)]
    zones = (by_hand.task_table([row for row in parts if row[2] < row[3]]),) if lengths else ()
    return by_hand.plan(lengths, ranks, *zones, ranks_per_node=2, heads=(HEADS, KV_HEADS))


def step_of(lengths: Lengths, num_stages: int = 2, num_chunks: int = 1, pattern: str = "dispatch") -> NanoBatchStep:
    plans = tuple(spread(each, RANKS // num_stages) for each in lengths)
    in_tick = functools.partial(dealt, pattern=pattern)
    return NanoBatchStep(plans, plan_ticks(ticks(num_stages, len(plans), num_chunks), plans, in_tick))


@pytest.mark.dist
@pytest.mark.parametrize(
    ("num_stages", "num_chunks", "nano_batches", "way", "pattern"),
    [
        (2, 1, (FIRST,), Way(again=True), "dispatch"),
        pytest.param(2, 1, (FIRST, SECOND), Way(streams=True), "dispatch", marks=pytest.mark.product),
        (2, 2, (FIRST, SECOND), Way(again=True, streams=True), "dispatch_once"),
        pytest.param(4, 2, (FIRST, SECOND), Way(), "dispatch", marks=pytest.mark.product),
    ],
)
def test_every_stage_gets_the_attention_of_its_own_microbatches(
    pool: Pool, num_stages: int, num_chunks: int, nano_batches: tuple[Lengths, ...], way: Way, pattern: str
) -> None:
    steps = [step_of(microbatches, num_stages, num_chunks, pattern) for microbatches in nano_batches]
    ranks = pool.run(attend_in_ticks, RANKS, steps, DIM, way)
    for number, attended in enumerate(ranks):
        stage, rank = divmod(number, RANKS // num_stages)
        assert len(attended.values) == len(nano_batches) * len(FIRST) * num_chunks
        for (cell, nano_batch), values in attended.values.items():
            plan = steps[nano_batch].plans[cell.microbatch]
            owned = Rows.of(3, layout(plan, rank).tolist())
            assert len(values[0]) == sum(stop - start for _, start, stop in owned)
            truth = alone(plan, DIM, seed_of(stage, cell, nano_batch)) if len(owned) else [[]] * 4
            where = (number, cell, nano_batch)
            for name, value, wanted in zip(("out", "q_grad", "k_grad", "v_grad"), values, truth, strict=True):
                assert not len(owned) or dense.worst([value], [owned_rows(owned, wanted)]) < 1e-10, (*where, name)
        assert attended.order == ranks[0].order, "who serves makes the calls of those that compute, in their order"
    segments = ping_pong.forward(LAYERS, len(nano_batches))
    both = (segments, ping_pong.backward(segments))
    forwards, backwards = (sum(segment.part != "linear" for segment in ts) for ts in both)
    num_ticks = len(steps[0].ticks) // 2
    assert len(ranks[0].order) == num_ticks * (forwards * (1 + way.again) + backwards)


def test_ticks_are_proved_like_any_plan() -> None:
    step = step_of(FIRST[:3])
    forward, backward = [(0, None), (1, 0), (2, 1), (None, 2)], [(None, 0), (0, 1), (1, 2), (2, None)]
    assert {one.tick.microbatches for one in step.ticks} == {*forward, *backward}
    for one in step.ticks:
        verify(expand(one.plan, "replay"))


def test_a_backward_without_its_plan_is_an_error() -> None:
    shape = AttentionShape(HEADS, KV_HEADS, DIM)

    def alone(length: int) -> MicrobatchPlan:
        table = by_hand.task_table([(0, 0, 0, length)], [(0, 0, 0, length, 0, length)])
        return by_hand.plan((length,), 1, table, heads=(HEADS, KV_HEADS))

    bound = bind(alone(5), 0, shape, groups=single(), policy="replay")
    q, k, v = (torch.randn(5, heads, DIM, requires_grad=True) for heads in (HEADS, KV_HEADS, KV_HEADS))
    slot = BackwardSlot()
    out = balanced_attention(q, k, v, bound, 1.0, slot)
    with pytest.raises(InvalidProgramError, match="needs a plan in which this rank owns as many, got none"):
        out.sum().backward()
    slot.bound = bind(alone(6), 0, shape, groups=single(), policy="replay")
    with pytest.raises(InvalidProgramError, match="got one with 6"):
        balanced_attention(q, k, v, bound, 1.0, slot).sum().backward()
    slot.bound = bind(alone(5), 0, shape, groups=single(), policy="replay", phases=["forward"])
    with pytest.raises(InvalidProgramError, match="shall run on rank 0, which bound it for its forward only"):
        balanced_attention(q, k, v, bound, 1.0, slot).sum().backward()
    with pytest.raises(ConfigError, match="bind both phases, or with policy replay"):
        bind(alone(5), 0, shape, groups=single(), phases=["forward"])
    with pytest.raises(InvalidProgramError, match="rank 0 has 5 rows of its own"):
        Server(torch.float32, torch.device("cpu"), 1.0).serve([bound], ping_pong.forward(1, 1), backward=False)


# Two nano-batches through layers of attention on real gloo ranks: interleaved, the bits of one
# after the other; nothing is mixed up.

NANO_LAYERS = 2
CASE = Case(Batch((200, 90, 33)), Cluster(8, 4), Model(4, 2, 8), None, seed=5)
CASES = (CASE, replace(CASE, batch=Batch((250, 70)), seed=6))
# One of each comm pattern; tests/unit/compile/test_streams.py plays all planners' steps against
# each other.
PLANNERS = ["random_task_table", "llama_all_gather", "ulysses", "zeppelin"]


def nano_batches_of(planner: str, *, layered: bool) -> tuple[MicrobatchPlan, ...]:
    # A plan for each nano-batch; `layered`: remapped, and routed wherever that can be.
    plans = [bare_plan(planner, case) for case in CASES]
    if layered:
        plans = [replace(p, moves=random_moves(p, seed)) for seed, p in enumerate(plans)]
        plans = [replace(p, routing=Routing(1, (REMAP, *range(len(p.zones))), pieces=2)) for p in plans]
    return tuple(plans)


def assert_same_bits(ours: list[NanoBatches], theirs: list[NanoBatches]) -> None:
    for rank, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        for nano_batch in (0, 1):
            assert np.array_equal(one.out[nano_batch], other.out[nano_batch]), (rank, nano_batch)
            for got, wanted in zip(one.grads[nano_batch], other.grads[nano_batch], strict=True):
                assert np.array_equal(got, wanted), (rank, nano_batch)
        assert one.counters == other.counters


@pytest.mark.parametrize(
    ("planner", "layered", "policy"),
    [
        *((planner, False, "keep") for planner in PLANNERS),
        *((planner, True, "replay") for planner in ("llama_all_gather", "zeppelin")),
        *(pytest.param(name, True, "replay", marks=pytest.mark.product) for name in ("random_task_table", "ulysses")),
    ],
)
def test_nano_batches_give_the_bits_of_one_by_one(pool: Pool, planner: str, layered: bool, policy: Policy) -> None:
    plans = nano_batches_of(planner, layered=layered)
    segments = ping_pong.forward(NANO_LAYERS)
    alone = pool.run(nano_batches.layers, 8, plans, None, policy)
    assert_same_bits(pool.run(nano_batches.layers, 8, plans, segments, policy), alone)
    for result in alone:
        assert [counted["forward_calls"] for counted in result.counters] == [NANO_LAYERS, NANO_LAYERS]


# Order as NCCL needs it: both nano-batches on the same communicators, whose messages match by order.
@pytest.mark.parametrize(
    ("planner", "layered", "policy"),
    [
        pytest.param("random_task_table", False, "keep", marks=pytest.mark.product),
        ("random_task_table", True, "replay"),
        ("zeppelin", True, "keep"),
    ],
)
def test_streams_joined_by_events_carry_nano_batches(pool: Pool, planner: str, layered: bool, policy: Policy) -> None:
    job = (nano_batches.layers, 8, nano_batches_of(planner, layered=layered), ping_pong.forward(NANO_LAYERS), policy)
    assert_same_bits(*(pool.run(*job, streams) for streams in (True, False)))


# Also in the backward, which autograd orders: a rank issues an exchange of one nano-batch under the
# computation of the other.
@pytest.mark.parametrize("interleaved", [True, False])
def test_segments_run_in_the_order_that_the_simulator_prices(pool: Pool, interleaved: bool) -> None:
    segments = (ping_pong.forward if interleaved else ping_pong.one_by_one)(NANO_LAYERS)
    both = (("forward", segments), ("backward", ping_pong.backward(segments)))
    expected = [(each.nano_batch, phase, each.part) for phase, ts in both for each in ts if each.part != "linear"]
    plans = nano_batches_of("random_task_table", layered=False)
    for ran in pool.run(nano_batches.layers, 8, plans, segments, "replay"):
        assert ran.order == expected


# Documents reach the ranks that compute them, and results come back; no Megatron.

# Two microbatches; one rank reads no document of the first, and one a document that fills two
# ranks.
LENGTHS = (((700, 3), (5,)), ((), (90, 1, 33)), ((40,), (200, 7)), ((1, 1, 60), (12,)))


@pytest.mark.parametrize(("planner", "ping_pong"), [("zeppelin", False), ("distca", True), ("te_ring", False)])
def test_rows_arrive_in_the_order_of_the_plan_and_results_come_back(pool: Pool, planner: str, ping_pong: bool) -> None:
    ranks = pool.run(jobs.step, len(LENGTHS), LENGTHS, planner, ping_pong)
    assert len(ranks[0].rows) == (4 if ping_pong else 2)
    for received in ranks:
        assert received.rows == received.planned
        assert received.back == received.read
    total = sum(n for of_rank in LENGTHS for microbatch in of_rank for n in microbatch)
    rows = [row for received in ranks for each in received.rows for row in each]
    assert len(rows) == len(set(rows)) == total
    (received,) = pool.run(jobs.step, 1, LENGTHS[1:2], planner, ping_pong)
    assert (received.rows, received.back) == (received.planned, received.read), "one rank exchanges nothing"


def test_every_rank_hears_of_one_that_cannot_read(pool: Pool) -> None:
    heard = pool.run(jobs.read_with_failure, 4, 2)
    assert heard.pop(2) == "this rank was asked to fail"
    assert set(heard) == {"ranks [2] could not read their microbatches; the error of each of them says why"}


@pytest.mark.parametrize(
    ("tensor_parallel", "odd", "heard"),
    [
        (2, None, "2 microbatches"),
        (1, 1, "but ranks [0, 2, 3, 4, 5, 6, 7] run 2, ranks [1] run 3; give all ranks as many (Megatron: start all"),
        (2, 6, "but ranks [0, 2, 4] run 2, ranks [6] run 2 to 3 (with their tensor-parallel ranks); give all"),
    ],
)
def test_ranks_that_run_other_numbers_of_microbatches_are_named(
    pool: Pool, tensor_parallel: int, odd: int | None, heard: str
) -> None:
    numbers = [2 + (rank == odd) for rank in range(NUM_RANKS)]
    answers = pool.run(jobs.read_other_numbers, NUM_RANKS, numbers, tensor_parallel)
    for rank, answer in enumerate(answers):
        peer = rank % tensor_parallel  # each tensor-parallel coordinate has a pool of its own, and names that one's
        assert (answer if not peer else answer.replace("[1, 3, 5]", "[0, 2, 4]").replace("[7]", "[6]")).find(heard) >= 0


def test_every_group_of_a_pool_has_the_timeout_it_was_given_and_a_plain_process_group_is_a_pool(pool: Pool) -> None:
    timeouts = pool.run(jobs.timeouts_of_pools, NUM_RANKS, 7)
    assert timeouts == [[7.0] * 3] * NUM_RANKS, "pool, node, joint pool"
    everyone = tuple(range(NUM_RANKS))
    assert pool.run(jobs.pool_of_group, NUM_RANKS) == [(rank, NUM_RANKS, 4, everyone) for rank in everyone]


# Traces of real attention calls beside those of the simulated ones: the same spans, zones, peers
# and bytes, whatever carries them.

CLUSTER = Cluster(8, 4)
ZONES = (by_hand.ring((1, 2, 5, 6), 0, name="far"), by_hand.local(0, 1), by_hand.local(3, 2))
ROUTED = Routing(1, (REMAP, 0), pieces=2)
RING = by_hand.plan((256, 40, 40), 8, *ZONES, ranks_per_node=4, heads=(4, 2), moves=[(1, 6, 16)], routing=ROUTED)
TRACED_HEADS = by_hand.pool("head_exchange", (100, 64), 8, ranks_per_node=4, heads=(8, 8))
GATHER = by_hand.pool("all_gather", (100, 64), 8, ranks_per_node=4, heads=(4, 2))


def moved(spans: Sequence[TrackSpan]) -> Counter[tuple[object, ...]]:
    # All that travels in a layer, without times.
    bytes_ = ((s, tuple(sorted(s.sent.items())), tuple(sorted(s.received.items()))) for s in spans)
    return Counter((s.rank, s.track, s.name, s.phase, s.zone, *both) for s, *both in bytes_ if any(both))


@pytest.mark.parametrize("streamed", [False, True], ids=["gloo", "streams"])
@pytest.mark.parametrize(
    ("plan", "policy"), [(RING, "replay"), (TRACED_HEADS, "keep"), (GATHER, "keep")], ids=["routed", "heads", "gather"]
)
def test_a_real_call_moves_what_the_simulated_one_moves_under_the_same_names(
    pool: Pool, tmp_path: Path, plan: MicrobatchPlan, policy: Policy, streamed: bool
) -> None:
    runs = pool.run(routed.recorded, 8, plan, policy, streamed)
    model = Model(plan.num_heads, plan.num_kv_heads, routed.HEAD_DIM, bytes_per_element=4)
    simulated = layer_trace(plan, Machine(CLUSTER, model, AnalyticCost(CLUSTER, model)), policy).spans
    expected = moved(simulated)
    for call in (0, 1):
        real = [s for spans, _, _ in runs for s in spans if s.call == call]
        assert moved(real) == expected
        for what in ("attention", "pack", "place"):
            names = {(s.rank, s.phase, s.name, s.zone) for s in real if s.what == what}
            assert names >= {(s.rank, s.phase, s.name, s.zone) for s in simulated if s.what == what}
        assert {s.microbatch for s in real} == {5}
    for rank, (spans, names, _) in enumerate(runs):
        linear = [s for s in spans if s.what == "linear"]
        assert {(s.rank, s.phase) for s in linear} == {(rank, "forward"), (rank, "backward")}
        assert {s.track for s in spans} <= {COMPUTE, *names, *(f"{name} collective" for name in names)}
        assert all(s.stop_s >= s.start_s >= 0 for s in spans)
    facts = [{"node": 0, "began_unix_s": began} for _, _, began in runs]
    trace = joined([Trace(run[0], {rank: f"rank {rank}"}, facts[rank]) for rank, run in enumerate(runs)])
    assert trace.facts["skew_s"] == 0, "one machine has one clock"
    file = tmp_path / "step.json"
    file.write_text(json.dumps(trace.document(), allow_nan=False))
    found = trace_reader.read(file.read_text())
    trace_reader.check(file, found, tmp_path)
    assert len(found.arrows) == 2 * sum(len(s.sent) for s in simulated)
