"""Figures in closed form against the ops of the expanded program."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_balance.analysis.backward import largest_exchange
from megatron_balance.analysis.statistics import plan_statistics, traffic
from megatron_balance.analysis.wire import Payload
from megatron_balance.compile.pipeline import Projector, expand, layout
from megatron_balance.errors import InvalidProgramError
from megatron_balance.ir.model import Model
from megatron_balance.ir.plan import MicrobatchPlan, Zone
from megatron_balance.ir.program import Attend, Exchange, Kind
from tests.support import by_hand
from tests.support.masks import NAMES
from tests.support.strategies import ALL_PLANNERS, Case, cases
from tests.support.strategies import plan as plan_of

NO_MOVES = by_hand.plan((), 1).moves


def model_of(plan: MicrobatchPlan) -> Model:
    return Model(plan.num_heads, plan.num_kv_heads, head_dim=16)


def from_ops(plan: MicrobatchPlan) -> dict[str, Any]:
    """Figures of a plan by counting every row of the whole forward program."""
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
    """Token-heads of keys that the largest exchange of attention brings each rank; without a remap,
    which brings some of them itself.
    """
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
    assert largest_exchange(plan).tolist() == largest_exchange_from_ops(plan)
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


def test_figures_of_a_rank_with_heads_of_two_groups_are_those_of_the_ops() -> None:
    zone = by_hand.zone("pool", "head_ring", range(4), (0, 1), 4)
    plan = by_hand.plan((40, 7), 4, zone, ranks_per_node=2, heads=(6, 3))
    assert_figures_are_those_of_the_ops(plan, ranks_per_nic=1)


def test_imbalance_is_the_largest_load_over_the_mean() -> None:
    plan = by_hand.plan((4, 2), 2, *by_hand.each_local(2), heads=(1, 1))
    assert plan_statistics(plan, model_of(plan))["imbalance"] == {"tokens": 4 / 3, "attention": 10 / 6.5}


def test_an_empty_batch_is_balanced_and_moves_nothing() -> None:
    got = plan_statistics(by_hand.plan((), 2, heads=(1, 1)), Model(1, 1, 16))
    assert got["imbalance"] == {"tokens": 1.0, "attention": 1.0}
    assert got["tokens_per_rank"] == got["bytes_received_per_rank"]["total"] == [0, 0]


def test_only_the_first_rank_of_a_node_receives_across_nodes_in_a_ring_in_node_order() -> None:
    plan = by_hand.pool("ring", (64,), 4, ranks_per_node=2, heads=(1, 1))
    inter = plan_statistics(plan, model_of(plan))["kv_tokens_received_inter_node_per_rank"]
    assert [n > 0 for n in inter] == [True, False, True, False]


def test_an_unknown_comm_pattern_is_an_error() -> None:
    plan = by_hand.plan((4,), 1, Zone("z", "telepathy", (0,), (0,)))
    with pytest.raises(InvalidProgramError, match="zone z: unknown comm pattern 'telepathy'"):
        plan_statistics(plan, model_of(plan))
