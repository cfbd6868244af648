"""Routed exchanges on real gloo ranks: same bits, other links; proxies that do not wait for
themselves; errors that reach everyone."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
import torch
from torch.autograd import profiler

from megatron_balance.compile.transpose import POLICIES, Policy
from megatron_balance.ir.batch import Batch
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.model import Model
from megatron_balance.ir.plan import REMAP, MicrobatchPlan, Routing
from megatron_balance.runtime import phase_run
from tests.support import by_hand, jobs, routed
from tests.support.jobs import Run
from tests.support.pool import Pool, RankError
from tests.support.routed import PhaseTrace
from tests.support.strategies import Case, bare_plan, plan, random_moves

pytestmark = pytest.mark.dist

CASE = Case(Batch((400, 90, 64, 33, 250)), Cluster(8, 4), Model(4, 2, 8), 130, seed=5)
PLANNERS = ["te_ring", "llama_all_gather", "ulysses", "zeppelin", "random_task_table", "random_zones"]
"""One of each comm pattern; tests/distributed/test_executor.py runs all planners, remapped and routed,
against the reference."""
# Ranks 0 and 2 share a sequence across two nodes of two; ranks 1 and 3 attend their own and pass on
# the others'.
TWO_NODES = by_hand.plan(
    (256, 40, 40),
    4,
    by_hand.ring((0, 2), 0),
    by_hand.local(1, 1),
    by_hand.local(3, 2),
    ranks_per_node=2,
    heads=(4, 2),
    routing=Routing(1, (0,)),
)


def everything_routed(planned: MicrobatchPlan, ranks_per_nic: int = 1) -> MicrobatchPlan:
    return replace(planned, routing=Routing(ranks_per_nic, (REMAP, *range(len(planned.zones))), pieces=2))


@pytest.mark.parametrize("remapped", [False, True])
@pytest.mark.parametrize("planner", PLANNERS)
def test_routing_changes_the_links_and_not_a_bit(pool: Pool, planner: str, remapped: bool) -> None:
    direct = bare_plan(planner, CASE)
    if remapped:
        direct = replace(direct, moves=random_moves(direct, CASE.seed))
    ways = [Run("keep", "float32"), Run("replay", "bfloat16")]
    # A collective sums in another order than its point-to-point transfers; a program that is routed
    # in part has none.
    by_node = replace(direct, routing=Routing(4, (REMAP, *range(len(direct.zones)))))
    ours, theirs = (pool.run(jobs.attend, 8, p, 8, ways) for p in (everything_routed(direct), by_node))
    for rank, (routed_runs, direct_runs) in enumerate(zip(ours, theirs, strict=True)):
        for one, other in zip(routed_runs, direct_runs, strict=True):
            for name in ("out", "q_grad", "k_grad", "v_grad"):
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
    assert (sum(c["routed_transfers"] for c in counters) > 0) == (
        sum(c["inter_node_bytes_sent_forward"] for c in plain) > 0
    )
    assert (sum(c["remap_tokens_received"] for c in counters) > 0) == remapped


def test_streams_joined_by_events_alone_give_the_same_bits(pool: Pool) -> None:
    """Order as NCCL needs it, with threads for streams: messages match by their order, and nothing
    waits in a circle."""
    ways = [Run("replay", "float32")]
    plans = [everything_routed(plan(name, replace(CASE, remapped=True))) for name in PLANNERS]
    plans += [plan(name, replace(CASE, remapped=True)) for name in ("te_ring", "llama_all_gather")]
    ours = pool.run(routed.streamed, 8, plans, 8, ways)
    for at, planned in enumerate(plans):
        theirs = pool.run(jobs.attend, 8, planned, 8, ways)
        for rank, (here, there) in enumerate(zip(ours, theirs, strict=True)):
            for one, other in zip(here[at], there, strict=True):
                summed = one.counters["exchanges_reduce_scatter"] > 0  # on its way, in another order
                for value in ("out", "q_grad", "k_grad", "v_grad"):
                    ours_, theirs_ = getattr(one, value), getattr(other, value)
                    same = (
                        np.allclose(ours_, theirs_, rtol=0, atol=1e-5)
                        if summed and value[0] in "kv"
                        else np.array_equal(ours_, theirs_)
                    )
                    assert same, (planned.planner, rank, value)
                differing = {name for name in one.counters if one.counters[name] != other.counters[name]}
                received = {"bytes_received_backward", "inter_node_bytes_received_backward"} if summed else set()
                assert differing <= received, (planned.planner, rank)
                assert all(one.counters[name] < other.counters[name] for name in differing)
    assert any(run.counters["exchanges_reduce_scatter"] for runs in ours[0] for run in runs)


def test_the_safe_order_gives_the_same_bits(pool: Pool) -> None:
    plans = [everything_routed(plan(name, replace(CASE, remapped=True))) for name in ("zeppelin", "te_ring")]
    ways = [Run("keep", "float32")]
    safe, passing = (pool.run(routed.streamed, 8, plans, 8, ways, is_safe) for is_safe in (True, False))
    for rank, (ours, theirs) in enumerate(zip(safe, passing, strict=True)):
        for one, other in zip(chain(*ours), chain(*theirs), strict=True):
            assert one.counters == other.counters, rank
            for value in ("out", "q_grad", "k_grad", "v_grad"):
                assert np.array_equal(getattr(one, value), getattr(other, value)), (rank, value)


def test_a_rendezvous_that_hangs_is_seen_on_every_rank(pool: Pool) -> None:
    """Odd ranks bind two plans the other way round: both ends of a pair stand in calls on
    different communicators."""
    zones = [((0, 1), (4, 5)), (range(4), range(4, 8))]
    plans = [
        by_hand.plan((64, 64), 8, *(by_hand.ring(ring, seq) for seq, ring in enumerate(rings)), ranks_per_node=2)
        for rings in zones
    ]
    assert not any(pool.run(routed.first_uses, 8, plans, False))
    for rank, said in enumerate(pool.run(routed.first_uses, 8, plans, True)):
        assert said[0].startswith(f"rank {rank} stands in a group call on ")
        assert said[0].endswith("ranks [0, 1, 2, 3, 4, 5, 6, 7] stand in group calls and no other comes")


def test_a_ring_between_nodes_uses_every_nic_in_both_directions(pool: Pool) -> None:
    planned = by_hand.pool("ring", (512,), 8, ranks_per_node=4, heads=(4, 2), routing=Routing(1, (0,)))
    counters = [runs[0].counters for runs in pool.run(jobs.attend, 8, planned, 8, (Run("keep", "float32"),))]
    for name in (
        "inter_node_bytes_sent_forward",
        "inter_node_bytes_received_forward",
        "inter_node_bytes_sent_backward",
    ):
        for node in (counters[:4], counters[4:]):
            assert len({c[name] for c in node}) == 1, name
            assert node[0][name] > 0, name


def test_ranks_that_share_a_nic_are_one_proxy(pool: Pool) -> None:
    planned = by_hand.pool("ring", (512,), 8, ranks_per_node=4, heads=(4, 2), routing=Routing(2, (0,)))
    counters = [runs[0].counters for runs in pool.run(jobs.attend, 8, planned, 8, (Run("keep", "float32"),))]
    by_nic = [sum(counters[rank]["inter_node_bytes_sent_forward"] for rank in (a, a + 1)) for a in range(0, 8, 2)]
    assert by_nic[0] == by_nic[1] > 0
    assert by_nic[2] == by_nic[3] > 0


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("planner", [*PLANNERS, "remapped zeppelin", "remapped te_ring"])
def test_streams_do_in_order_what_was_foreseen(pool: Pool, planner: str, policy: Policy) -> None:
    """The recorded order of each stream is that of `tests.support.foreseen`, which the simulator
    prices."""
    name = planner.removeprefix("remapped ")
    for planned in (plan(name, CASE), everything_routed(plan(name, replace(CASE, remapped=planner != name)))):
        for rank, phases in enumerate(pool.run(routed.traced, 8, planned, policy)):
            for phase in phases:
                assert_as_foreseen(rank, phase)


def assert_as_foreseen(rank: int, phase: PhaseTrace) -> None:
    own = [e for e in phase.recorded if e.role == "own" and e.leg != "finish"]
    for stream, issues in phase.expected.items():
        foreseen = [(i.op, i.leg) for i in issues if i.leg == "run" or "own" in i.roles]
        assert _distinct([(e.op, e.leg) for e in own if e.stream == stream]) == foreseen, (rank, stream)
        for role in ("send_proxy", "receive_proxy"):
            passed_on = [e for e in phase.recorded if (e.stream, e.role) == (stream, role)]
            assert {(e.op, e.leg) for e in passed_on} == {(i.op, i.leg) for i in issues if role in i.roles}, (
                rank,
                stream,
                role,
            )
            for group in phase.groups:
                foreseen = [(i.op, i.leg) for i in issues if role in i.roles and i.op in group]
                assert _distinct([(e.op, e.leg) for e in passed_on if e.op in group]) == foreseen, (rank, stream, role)
    assert {e.stream for e in own} <= set(phase.expected)
    assert 0.0 <= phase.hidden <= 1.0


def _distinct(items: list[tuple[int, str]]) -> list[tuple[int, str]]:
    return [item for at, item in enumerate(items) if not at or items[at - 1] != item]


def test_a_proxy_passes_on_while_it_computes(pool: Pool) -> None:
    slow = 1.0
    seconds = pool.run(routed.forward_seconds, 4, TWO_NODES, (1, 3), slow)
    assert min(seconds[1], seconds[3]) >= slow
    assert max(seconds[0], seconds[2]) < slow / 2, "the ring waited for what its proxies compute"


def test_a_rank_that_dies_ends_the_call_everywhere(pool: Pool) -> None:
    """Also where a rank only waits for a proxy, and where it only passes on."""
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


def test_a_step_that_fails_ends_the_call_everywhere(pool: Pool) -> None:
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
    """Megatron's --profile asks torch for NVTX so, which then needs a GPU."""
    for owner, name in (
        (profiler, "_enable_profiler"),
        (profiler, "_disable_profiler"),
        (torch.cuda, "synchronize"),
    ):
        monkeypatch.setattr(owner, name, lambda *_: None)
    assert not phase_run.recorded()
    with profiler.emit_nvtx():
        assert phase_run.recorded()
    assert not phase_run.recorded()
