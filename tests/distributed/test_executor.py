"""The executor on real gloo ranks against the reference: values, gradients, and what it counted."""

import functools
import random
import time
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch.autograd import profiler

from megatron_balance import Batch, Cluster, MicrobatchPlan, Model, reference
from megatron_balance.analysis.statistics import plan_statistics, traffic
from megatron_balance.analysis.wire import Payload
from megatron_balance.compile.pipeline import expand, layout, project
from megatron_balance.compile.transpose import POLICIES, Policy
from megatron_balance.errors import ConfigError
from megatron_balance.ir.columns import Rows
from megatron_balance.ir.forest import num_pairs
from megatron_balance.ir.mask import SlidingWindow
from megatron_balance.ir.plan import REMAP, Routing
from megatron_balance.ir.program import Attend, Exchange, Program
from megatron_balance.runtime import phase_run
from megatron_balance.runtime.kernels.latent import check_latent
from tests.support import by_hand, dense, forests, jobs, routed, strategies
from tests.support.jobs import DIM, HEADS, LATENT, VALUES, Ran, Run, Widths
from tests.support.pool import WORLDS, Pool, RankError
from tests.support.strategies import plan

PARTS = ("out", "q_grad", "k_grad", "v_grad")
TOLERANCE = {"float32": 1e-5, "float64": 1e-10}
SOME = strategies.Case(Batch((70, 9, 1, 33)), Cluster(4, 2), Model(4, 2, 8), 40, seed=5)
RUNS = tuple(Run(policy, dtype) for policy in POLICIES for dtype in TOLERANCE)
EITHER_WAY = (Run("replay", "float32"), Run("keep", "float64"))

EVERY, OTHERS = strategies.EVERY_PATTERN, {*strategies.ALL_PLANNERS}.difference(strategies.EVERY_PATTERN)
EACH = [*EVERY, *(pytest.param(name, marks=pytest.mark.product) for name in sorted(OTHERS))]


# The pool's ranks in all worlds by what has every comm pattern, in two nodes by all planners.
@pytest.mark.parametrize(
    ("planner", "num_ranks"),
    [(name, n) for name in strategies.ALL_PLANNERS for n in WORLDS if n == 4 or name in EVERY],
)
# a failure costs new ranks: shrinking would take minutes
@settings(max_examples=2, phases=(Phase.explicit, Phase.generate))
@given(data=st.data(), head_dim=st.sampled_from([8, (8, 4), (4, 12)]))
def test_the_executor_equals_the_reference(
    pool: Pool, planner: str, num_ranks: int, data: st.DataObject, head_dim: Widths
) -> None:
    case: strategies.Case = data.draw(strategies.cases([num_ranks], max_sequences=5, masks=dense.NAMES))
    planned = plan(planner, case)
    per_rank = pool.run(jobs.attend, num_ranks, planned, head_dim, EITHER_WAY)
    for index, run in enumerate(EITHER_WAY):
        assert_equals_reference(planned, head_dim, run, [results[index] for results in per_rank])
        attended = sum(results[index].counters["attended_pairs"] for results in per_rank)
        pairs = sum(map(planned.mask.num_pairs, planned.lengths))
        assert attended == 2 * planned.num_heads * pairs, "each pair once in the forward and once in the backward"
    figures_are_what_ran(planned, head_dim, [results[0].counters for results in per_rank])


# Of placements by lengths alone, and of tasks cut at random.
@pytest.mark.parametrize("planner", ["te_ring", "zeppelin", "random_task_table", "random_once_per_node"])
def test_the_executor_attends_along_paths(pool: Pool, planner: str) -> None:
    rng = random.Random(planner)
    for window in (0, 0, 3, 9):
        forest = forests.some_forest(rng, trees=3, longest=9, window=window)
        attention = SlidingWindow(window).name if window else "causal"
        batch, model = Batch(forest.lengths, forest.trees), replace(SOME.model, attention=attention)
        planned = plan(planner, replace(SOME, batch=batch, model=model, tokens_per_rank=None, seed=window))
        runs = (Run("replay", "float32"), Run("keep", "float64"))
        per_rank = pool.run(jobs.attend, 4, planned, 8, runs)
        for index, run in enumerate(runs):
            assert_equals_reference(planned, 8, run, [results[index] for results in per_rank])
            attended = sum(results[index].counters["attended_pairs"] for results in per_rank)
            assert attended == 2 * planned.num_heads * sum(num_pairs(tree, window) for tree in forest.trees)


def assert_equals_reference(planned: MicrobatchPlan, head_dim: Widths, run: Run, ranks: list[Ran]) -> None:
    truth, owned = truth_of(planned, head_dim, run.policy)
    assert [ran.gaps for ran in ranks] == [()] * len(ranks)
    for name in PARTS:
        values = getattr(truth, name)
        theirs = [reference.owned_rows(rows, values) for rows in owned] if values else []
        ours = [getattr(ran, name) for ran in ranks] if values else []
        assert dense.worst(ours, theirs) < TOLERANCE[run.dtype], (run, name)


@functools.lru_cache(maxsize=2)  # the runs of a test differ also in their types
def truth_of(planned: MicrobatchPlan, head_dim: Widths, policy: Policy) -> tuple[reference.Result, list[Rows]]:
    # Results of the reference for the plan, and the rows that each rank owns.
    x = jobs.inputs(planned, head_dim)
    truth = reference.run(expand(planned, policy), x.q, x.k, x.v, x.scale, x.dout)
    return truth, [Rows.of(3, layout(planned, rank).tolist()) for rank in range(planned.num_ranks)]


def figures_are_what_ran(planned: MicrobatchPlan, head_dim: Widths, counters: list[dict[str, int]]) -> None:
    # The fp32 run of one call: what `plan --json` predicts is what arrived, and each rank ran the
    # ops of its projection; between nodes ranks sent and received what the program says.
    keys, values = jobs.split(head_dim)
    model = Model(planned.num_heads, planned.num_kv_heads, keys, bytes_per_element=4, value_dim=values)
    predicted = plan_statistics(planned, model)
    assert [c["bytes_received_forward"] for c in counters] == predicted["bytes_received_per_rank"]["total"]
    received, said = [c["kv_tokens_received"] for c in counters], predicted["kv_tokens_received_per_rank"]
    # The executor counts every part of a token's heads, the plan's figures the token.
    in_parts = any(zone.pattern.endswith("exchange_once") for zone in planned.zones)
    assert received == said or (in_parts and all(a >= b for a, b in zip(received, said, strict=True)))
    assert [c["q_tokens_received"] for c in counters] == predicted["query_tokens_received_per_rank"]
    assert [c["partial_tokens_received"] for c in counters] == predicted["partial_tokens_received_per_rank"]
    for rank, counted in enumerate(counters):
        ops = project(planned, rank).forward
        launches = any(isinstance(op, Attend) for op in ops)
        assert (counted["kernel_calls"] > 0) == launches
        assert (counted["bytes_received_forward"] > 0) <= any(isinstance(op, Exchange) for op in ops)
        assert (counted["forward_calls"], counted["backward_calls"]) == (1, 1)
    if bytes_between_nodes_are_the_programs(expand(planned, EITHER_WAY[0].policy), model, planned, counters):
        sent = sum(map(sum, predicted["bytes_sent_per_nic"]))
        assert sent == sum(c["inter_node_bytes_sent_forward"] for c in counters)
        assert predicted["routed_transfers"] <= sum(c["routed_transfers"] for c in counters)


def bytes_between_nodes_are_the_programs(
    program: Program, model: Model, planned: MicrobatchPlan, counters: list[dict[str, int]]
) -> bool:
    # Whether that can be said: who sends how much in a collective is the backend's business, and
    # the emulated cluster's counters show it.
    if any(isinstance(op, Exchange) and op.collective != "p2p" for op in (*program.forward, *program.backward)):
        return False
    moved = traffic(program, Payload.of(model), ranks_per_node=planned.ranks_per_node)
    for way, expected in (("sent", moved.inter_node_sent), ("received", moved.inter_node_received)):
        names = [f"inter_node_bytes_{way}_{phase}" for phase in ("forward", "backward")]
        assert [sum(c[name] for name in names) for c in counters] == expected.tolist(), way
    return True


@pytest.mark.parametrize("planner", EACH)
def test_gradients_that_travel_in_bf16_differ_by_its_rounding(pool: Pool, planner: str) -> None:
    # Half the bytes between nodes, as the wire format says; the output and LSE are not touched.
    planned = plan(planner, SOME)
    runs = [Run(policy, gradient_wire=wire) for policy in POLICIES for wire in ("fp32", "bf16")]
    per_rank = pool.run(jobs.attend, 4, planned, 8, runs)
    for index, run in enumerate(runs):
        truth, owned = truth_of(planned, 8, run.policy)
        ran = [results[index] for results in per_rank]
        for name in PARTS:
            exact = [reference.owned_rows(rows, getattr(truth, name)) for rows in owned]
            error = dense.worst([getattr(one, name) for one in ran], exact)
            # A value of bf16 is off by 2 ** -9 of itself at most; a ring of four rounds three times.
            rounded = run.gradient_wire == "bf16" and name != "out"
            assert error < (3 * 2**-8 if rounded else 1e-5), (run, name, error)
        heads = (planned.num_heads, planned.num_kv_heads)
        model = Model(*heads, 8, bytes_per_element=4, gradient_wire=run.gradient_wire)
        counters = [one.counters for one in ran]
        bytes_between_nodes_are_the_programs(expand(planned, run.policy), model, planned, counters)


@pytest.mark.parametrize("planner", EACH)
def test_one_bound_plan_serves_many_calls_at_once(pool: Pool, planner: str) -> None:
    # Layers share a bound plan: their forwards come before their backwards, nothing is mixed up,
    # and each is counted; their tensors need not be contiguous.
    planned = plan(planner, SOME)
    ways = [Run(policy, "float64", calls, strided=calls > 1) for policy in POLICIES for calls in (1, 3)]
    per_rank = pool.run(jobs.attend, 4, planned, 8, ways)
    for index, run in enumerate(ways):
        assert_equals_reference(planned, 8, run, [results[index] for results in per_rank])
    for keep, keep_thrice, replay, replay_thrice in per_rank:
        assert keep_thrice.counters == {name: 3 * count for name, count in keep.counters.items()}
        assert replay_thrice.counters == {name: 3 * count for name, count in replay.counters.items()}
        assert replay.counters["bytes_received_backward"] >= keep.counters["bytes_received_backward"]


@pytest.mark.parametrize("segments", [False, True], ids=["call", "segments"])
@pytest.mark.parametrize("planner", EACH)
def test_a_second_backward_adds_up_though_another_batch_ran_between(pool: Pool, planner: str, segments: bool) -> None:
    # `retain_graph=True` keeps what was received, and the backward without it lets that go.
    planned = plan(planner, SOME)
    other = plan(planner, replace(SOME, batch=Batch((21, 50, 42))))
    per_rank = pool.run(jobs.attend_again, 4, planned, other, segments)
    for index in range(len(per_rank[0])):
        truth, owned = truth_of(planned, 8, "keep" if index != 1 else "replay")
        for number, values in enumerate((truth.q_grad, truth.k_grad, truth.v_grad)):
            assert values is not None
            theirs = [3 * reference.owned_rows(rows, values) for rows in owned]
            assert dense.worst([results[index].grads[number] for results in per_rank], theirs) < 1e-10
        for results in per_rank:
            again = results[index]
            assert (again.held > 0) >= (again.kv_tokens_received > 0 and index != 1), "kept for the second"
            assert again.left == 0, "nothing is held behind the last"
            assert "Trying to backward through the graph a second time" in again.told


@pytest.mark.parametrize(
    "planner", ["te_ring", "distca", "zeppelin, rule groups", "random_shares", "random_once_per_node"]
)
def test_sources_that_come_late_at_random_change_no_bit(pool: Pool, planner: str) -> None:
    # Head rings, waves, dispatches: sums are made in the program's order, not as their parts come.
    planned = plan(planner, replace(SOME, routing=(1, 1)))
    for run in EITHER_WAY:
        for ran in pool.run(jobs.attend_late, 4, planned, 8, run, range(4)):
            first, *others = ran
            for name in PARTS:
                assert {getattr(other, name).tobytes() for other in others} == {getattr(first, name).tobytes()}, name


@pytest.mark.parametrize("planner", ["te_ring", "zeppelin, rule groups", "random_task_table"])
def test_soft_capped_scores_are_those_of_attention_written_out(pool: Pool, planner: str) -> None:
    # By the executor and by the reference; values narrower than keys.
    for mask in ("causal", "window_9"):
        planned = plan(planner, replace(SOME, model=replace(SOME.model, attention=mask)))
        x, cap = jobs.inputs(planned, (8, 4)), 0.7
        exact = dense.attention(x, dense.visible(planned.mask), softcap=cap)
        for policy in POLICIES:
            judged = reference.run(expand(planned, policy), x.q, x.k, x.v, x.scale, x.dout, softcap=cap)
            per_rank = pool.run(jobs.attend, 4, planned, (8, 4), [Run(policy, "float64", softcap=cap)])
            for name in PARTS:
                assert dense.worst(getattr(judged, name), getattr(exact, name)) < 1e-12, name
                theirs = [
                    reference.owned_rows(Rows.of(3, layout(planned, rank).tolist()), getattr(exact, name))
                    for rank in range(4)
                ]
                assert dense.worst([getattr(ran, name) for (ran,) in per_rank], theirs) < 1e-12, name


def test_each_kind_of_exchange_and_each_queue_runs(pool: Pool) -> None:
    # Collectives in the pool and in a node, point-to-point in a ring, and a zone on one rank:
    # counted where they run.
    zones = (
        by_hand.ring(range(8), 0, name="inter_node"),
        by_hand.zone("inter_node", "head_exchange_once", range(8), [1]),
        by_hand.all_gather((4, 5, 6, 7), 2, name="intra_node"),
        by_hand.all_gather((1, 3), 3, name="intra_node"),
        by_hand.local(2, 4),
    )
    planned = by_hand.plan((96, 40, 33, 21, 7), 8, *zones, ranks_per_node=4, heads=(8, 2))
    per_rank = pool.run(jobs.attend, 8, planned, 8, RUNS)
    for index, run in enumerate(RUNS):
        assert_equals_reference(planned, 8, run, [results[index] for results in per_rank])
    counters = [results[0].counters for results in per_rank]
    assert all(c["exchanges_p2p"] > 0 and c["exchanges_all_to_all"] > 0 for c in counters)
    for collective in ("all_gather", "reduce_scatter"):
        assert [c[f"exchanges_{collective}"] > 0 for c in counters] == [rank in (1, 3, 4, 5, 6, 7) for rank in range(8)]
    assert [c["kernel_calls_local"] > 0 for c in counters] == [rank == 2 for rank in range(8)]
    assert [c["kernel_calls_intra_node"] > 0 for c in counters] == [rank in (1, 3, 4, 5, 6, 7) for rank in range(8)]
    assert all(c["kernel_calls_inter_node"] > 0 for c in counters)


def test_half_precision_comes_close(pool: Pool) -> None:
    # bf16 keeps 8 bits: a hundredth of the largest value, with partials merged in fp32.
    planned = strategies.random_task_table(Batch((120, 31)), Cluster(4, 4), Model(4, 2, 8), seed=3)
    per_rank = pool.run(jobs.attend, 4, planned, 8, (Run("keep", "bfloat16"), Run("keep", "float64")))
    for name in PARTS:
        ours, theirs = ([getattr(results[i], name) for results in per_rank] for i in (0, 1))
        assert 0 < dense.worst(ours, theirs) < 2e-2, name
    assert [results[0].gaps for results in per_rank] == [()] * 4, "so that a model may view them"


def test_a_rank_without_tokens_still_serves_the_others(pool: Pool) -> None:
    # Ranks 1 and 2 hold nothing, yet rank 2 attends a tile for rank 0.
    whole = strategies.random_task_table(Batch((40,)), Cluster(3, 3), Model(2, 1, 8), seed=0)
    table = by_hand.task_table([(0, 0, 0, 40)], [(0, 0, 0, 40, 20, 40), (2, 0, 0, 40, 0, 20)])
    planned = replace(whole, zones=(table,))
    per_rank = pool.run(jobs.attend, 3, planned, 8, RUNS)
    for index, run in enumerate(RUNS):
        assert_equals_reference(planned, 8, run, [results[index] for results in per_rank])
    assert [results[0].out.shape[0] for results in per_rank] == [40, 0, 0]
    assert [results[0].counters["kernel_calls"] > 0 for results in per_rank] == [True, False, True]


@pytest.mark.parametrize("planner", ["te_ring", "llama_all_gather", "ulysses", "distca", "zeppelin"])
@pytest.mark.parametrize("mask", ["causal", "window_12"])
def test_a_sink_is_one_more_key_of_every_query(pool: Pool, planner: str, mask: str) -> None:
    # By the formula, with a key whose score is the sink and whose value is zero; its gradient is
    # summed over the ranks.
    planned = plan(planner, replace(SOME, model=replace(SOME.model, attention=mask), tokens_per_rank=None))
    per_rank = pool.run(jobs.attend_with_sink, 4, planned, 8)
    exact = dense.attention(jobs.inputs(planned, 8), dense.visible(planned.mask), jobs.sinks(planned.num_heads))
    owned = [Rows.of(3, layout(planned, rank).tolist()) for rank in range(4)]
    for policy in range(2):
        ran = [results[policy] for results in per_rank]
        for number, values in enumerate((exact.out, exact.q_grad, exact.k_grad, exact.v_grad)):
            theirs = [reference.owned_rows(rows, values) for rows in owned]
            assert dense.worst([each[number] for each in ran], theirs) < 1e-10
        assert sum(each[4] for each in ran) == pytest.approx(exact.sink_grad, rel=1e-10)


# The latent of multi-latent attention travels in place of keys and values: the same results, fewer
# bytes.

LATENTS = replace(SOME, model=Model(HEADS, 1, DIM))


@pytest.mark.parametrize("policy", ["keep", "replay"])
@pytest.mark.parametrize("planner", ["te_ring", "llama_all_gather", "distca", "random_task_table"])
def test_latents_give_what_their_keys_and_values_give(pool: Pool, planner: str, policy: Policy) -> None:
    planned, of_heads = plan(planner, LATENTS), plan(planner, replace(SOME, model=Model(HEADS, HEADS, DIM)))
    runs = pool.run(jobs.both, 4, planned, of_heads, policy)
    for found, _ in runs:
        for name, ours, theirs in zip(("out", "dq", "dlatent", "dweight"), *found, strict=True):
            assert np.allclose(ours, theirs, atol=1e-10), name
    by_latent, by_heads = (sum(received[way] for _, received in runs) for way in (0, 1))
    assert 0 < by_latent < by_heads
    sizes: dict[str, Any] = {"value_dim": VALUES, "latent_rank": LATENT[0], "latent_rope": LATENT[1]}
    model = Model(HEADS, 1, DIM, bytes_per_element=8, latent_travels=True, **sizes)
    predicted = plan_statistics(planned, model)["bytes_received_per_rank"]["total"]
    assert all(of_rank[1][0] >= expected for of_rank, expected in zip(runs, predicted, strict=True))
    assert any(predicted)


def test_a_plan_that_parts_heads_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"parts heads \(head_exchange\), and with 'latent_kv: true'"):
        check_latent(plan("ulysses", LATENTS))


# Routed exchanges on real gloo ranks: same bits, other links; proxies that do not wait for
# themselves; errors that reach everyone.

CASE = strategies.Case(Batch((400, 90, 64, 33, 250)), Cluster(8, 4), Model(4, 2, 8), 130, seed=5)
# One of each comm pattern; tests/distributed/test_executor.py runs all planners, remapped and
# routed, against the reference.
PLANNERS = ["te_ring", "llama_all_gather", "ulysses", "zeppelin", "random_task_table", "random_zones"]
# Ranks 0 and 2 share a sequence across two nodes of two; ranks 1 and 3 attend their own and pass on
# the others'.
TWO = (by_hand.ring((0, 2), 0), by_hand.local(1, 1), by_hand.local(3, 2))
TWO_NODES = by_hand.plan((256, 40, 40), 4, *TWO, ranks_per_node=2, heads=(4, 2), routing=Routing(1, (0,)))


def everything_routed(planned: MicrobatchPlan, ranks_per_nic: int = 1) -> MicrobatchPlan:
    return replace(planned, routing=Routing(ranks_per_nic, (REMAP, *range(len(planned.zones))), pieces=2))


@pytest.mark.parametrize("remapped", [False, True])
@pytest.mark.parametrize("planner", PLANNERS)
def test_routing_changes_the_links_and_not_a_bit(pool: Pool, planner: str, remapped: bool) -> None:
    direct = strategies.bare_plan(planner, CASE)
    if remapped:
        direct = replace(direct, moves=strategies.random_moves(direct, CASE.seed))
    ways = [Run("keep", "float32"), Run("replay", "bfloat16")]
    # A collective sums in another order than its point-to-point transfers; a program that is routed
    # in part has none.
    by_node = replace(direct, routing=Routing(4, (REMAP, *range(len(direct.zones)))))
    ours, theirs = (pool.run(jobs.attend, 8, p, 8, ways) for p in (everything_routed(direct), by_node))
    for rank, (routed_runs, direct_runs) in enumerate(zip(ours, theirs, strict=True)):
        for one, other in zip(routed_runs, direct_runs, strict=True):
            for name in PARTS:
                assert np.array_equal(getattr(one, name), getattr(other, name)), (rank, name)
    counters = [runs[0].counters for runs in ours]
    plain = [runs[0].counters for runs in theirs]
    assert not any(c["routed_transfers"] or c["relayed_bytes_forward"] or c["relayed_bytes_backward"] for c in plain)
    for phase in ("forward", "backward"):
        sent, received = ([c[f"inter_node_bytes_{way}_{phase}"] for c in counters] for way in ("sent", "received"))
        before = [c[f"inter_node_bytes_sent_{phase}"] for c in plain]
        assert sum(sent) == sum(received) == sum(before)
        assert max(sent) <= max(before)
        assert sum(c[f"relayed_bytes_{phase}"] for c in counters) >= sum(before) > 0 or not any(before)
    crosses = any(c["inter_node_bytes_sent_forward"] for c in plain)
    assert any(c["routed_transfers"] for c in counters) == crosses
    assert (sum(c["remap_tokens_received"] for c in counters) > 0) == remapped


def test_streams_joined_by_events_alone_give_the_same_bits_in_the_safe_order_too(pool: Pool) -> None:
    # Order as NCCL needs it, with threads for streams: messages match by their order, and nothing
    # waits in a circle.
    ways = [Run("replay", "float32")]
    plans = [everything_routed(plan(name, replace(CASE, remapped=True))) for name in PLANNERS]
    plans += [plan(name, replace(CASE, remapped=True)) for name in ("te_ring", "llama_all_gather")]
    ours = pool.run(routed.streamed, 8, plans, 8, ways)
    for at, planned in enumerate(plans):
        theirs = pool.run(jobs.attend, 8, planned, 8, ways)
        for rank, (here, there) in enumerate(zip(ours, theirs, strict=True)):
            ((one,), (other,)) = here[at], there
            summed = one.counters["exchanges_reduce_scatter"] > 0  # on its way, in another order
            for value in PARTS:
                mine, wanted = getattr(one, value), getattr(other, value)
                if summed and value[0] in "kv":
                    assert np.allclose(mine, wanted, rtol=0, atol=1e-5), (planned.planner, rank, value)
                else:
                    assert np.array_equal(mine, wanted), (planned.planner, rank, value)
            differing = {name for name in one.counters if one.counters[name] != other.counters[name]}
            received = {"bytes_received_backward", "inter_node_bytes_received_backward"} if summed else set()
            assert differing <= received, (planned.planner, rank)
            assert all(one.counters[name] < other.counters[name] for name in differing)
    assert any(run.counters["exchanges_reduce_scatter"] for runs in ours[0] for run in runs)
    some = [at for at, name in enumerate(PLANNERS) if name in ("zeppelin", "te_ring")]
    safe = pool.run(routed.streamed, 8, [plans[at] for at in some], 8, ways, True)
    for rank, (careful, passing) in enumerate(zip(safe, ours, strict=True)):
        for one, other in zip(chain(*careful), chain(*(passing[at] for at in some)), strict=True):
            assert one.counters == other.counters, rank
            for value in PARTS:
                assert np.array_equal(getattr(one, value), getattr(other, value)), (rank, value)


def test_a_rendezvous_that_hangs_is_seen_on_every_rank(pool: Pool) -> None:
    # Odd ranks bind two plans the other way round: both ends of a pair stand in calls on different
    # communicators.
    zones = [((0, 1), (4, 5)), (range(4), range(4, 8))]
    rings = [(by_hand.ring(one, 0), by_hand.ring(other, 1)) for one, other in zones]
    plans = [by_hand.plan((64, 64), 8, *each, ranks_per_node=2) for each in rings]
    assert not any(pool.run(routed.first_uses, 8, plans, False))
    for rank, said in enumerate(pool.run(routed.first_uses, 8, plans, True)):
        assert said[0].startswith(f"rank {rank} stands in a group call on ")
        assert said[0].endswith("ranks [0, 1, 2, 3, 4, 5, 6, 7] stand in group calls and no other comes")


def test_a_ring_between_nodes_uses_every_nic_both_ways_and_ranks_that_share_one_are_one_proxy(pool: Pool) -> None:
    for ranks_per_nic in (1, 2):
        routing = Routing(ranks_per_nic, (0,))
        planned = by_hand.pool("ring", (512,), 8, ranks_per_node=4, heads=(4, 2), routing=routing)
        counters = [runs[0].counters for runs in pool.run(jobs.attend, 8, planned, 8, (Run("keep", "float32"),))]
        ways = ("sent_forward", "received_forward", "sent_backward") if ranks_per_nic == 1 else ("sent_forward",)
        for way in ways:
            by_rank = [c[f"inter_node_bytes_{way}"] for c in counters]
            by_nic = [sum(by_rank[at : at + ranks_per_nic]) for at in range(0, 8, ranks_per_nic)]
            for node in (by_nic[: len(by_nic) // 2], by_nic[len(by_nic) // 2 :]):
                assert len(set(node)) == 1, way
                assert node[0] > 0, way


FORESEEN = [*PLANNERS, "remapped zeppelin", "remapped te_ring"]


@pytest.mark.parametrize("planner", FORESEEN)
def test_streams_do_in_order_what_was_foreseen(pool: Pool, planner: str) -> None:
    # The recorded order of each stream is that of `tests.support.foreseen`, which the simulator
    # prices. Planners take turns in which policy is routed.
    name, turn = planner.removeprefix("remapped "), FORESEEN.index(planner) % 2
    remapped = everything_routed(plan(name, replace(CASE, remapped=planner != name)))
    for planned, policy in ((plan(name, CASE), POLICIES[turn]), (remapped, POLICIES[1 - turn])):
        for rank, phases in enumerate(pool.run(routed.traced, 8, planned, policy)):
            for phase in phases:
                assert_as_foreseen(rank, phase)


def assert_as_foreseen(rank: int, phase: routed.PhaseTrace) -> None:
    own = [e for e in phase.recorded if e.role == "own" and e.leg != "finish"]
    for stream, issues in phase.expected.items():
        foreseen = [(i.op, i.leg) for i in issues if i.leg == "run" or "own" in i.roles]
        assert _distinct([(e.op, e.leg) for e in own if e.stream == stream]) == foreseen, (rank, stream)
        for role in ("send_proxy", "receive_proxy"):
            passed_on = [e for e in phase.recorded if (e.stream, e.role) == (stream, role)]
            taken = {(i.op, i.leg) for i in issues if role in i.roles}
            assert {(e.op, e.leg) for e in passed_on} == taken, (rank, stream, role)
            for group in phase.groups:
                foreseen = [(i.op, i.leg) for i in issues if role in i.roles and i.op in group]
                assert _distinct([(e.op, e.leg) for e in passed_on if e.op in group]) == foreseen, (rank, stream, role)
    assert {e.stream for e in own} <= set(phase.expected)


def _distinct(items: list[tuple[int, str]]) -> list[tuple[int, str]]:
    return [item for at, item in enumerate(items) if not at or items[at - 1] != item]


def test_a_proxy_passes_on_while_it_computes(pool: Pool) -> None:
    slow = 1.0
    seconds = pool.run(routed.forward_seconds, 4, TWO_NODES, (1, 3), slow)
    assert min(seconds[1], seconds[3]) >= slow
    assert max(seconds[0], seconds[2]) < slow / 2, "the ring waited for what its proxies compute"


# Also where a rank only waits for a proxy, and where it only passes on.
def test_a_rank_that_dies_or_fails_ends_the_call_everywhere(pool: Pool) -> None:
    ring = by_hand.pool("ring", (512,), 8, ranks_per_node=4, heads=(4, 2), routing=Routing(1, (0,)))
    start = time.monotonic()
    with pytest.raises(RankError) as caught:
        pool.run(routed.die_in_attention, 8, ring, 5)
    assert time.monotonic() - start < 30.0
    said = str(caught.value)
    assert "rank 5 of 8 failed:\nthe process died" in said
    assert "did not answer in time" not in said
    for rank in (0, 1, 2, 3, 4, 6, 7):
        assert f"rank {rank} of 8 failed:\nTraceback" in said
    ring = by_hand.pool("ring", (256,), 4, ranks_per_node=2, heads=(4, 2), routing=Routing(1, (0,)))
    said = pool.run(routed.fail_in_attention, 4, ring, 0)
    assert said[0] == "the kernel was asked to fail"
    assert all(said)
    pool.close()  # connections are closed; the next job gets new ranks


def test_a_profiler_sees_every_exchange_and_launch_by_name(pool: Pool) -> None:
    plan = by_hand.pool("ring", (40, 9), 4, ranks_per_node=2)
    for seen, steps in pool.run(routed.ranged, 4, plan):
        assert seen == steps
        assert {"balance forward attention pool", "balance backward attention pool"} <= set(seen)
        kinds = {" ".join(name.split()[1:3]) for name in seen}
        assert kinds >= {f"{phase} {what}" for phase in ("forward", "backward") for what in ("pack", "wait", "place")}


def test_ranges_are_named_for_nsight_too(monkeypatch: pytest.MonkeyPatch) -> None:
    # Megatron's --profile asks torch for NVTX so, which then needs a GPU.
    for owner, name in ((profiler, "_enable_profiler"), (profiler, "_disable_profiler"), (torch.cuda, "synchronize")):
        monkeypatch.setattr(owner, name, lambda *_: None)
    assert not phase_run.recorded()
    with profiler.emit_nvtx():
        assert phase_run.recorded()
    assert not phase_run.recorded()
