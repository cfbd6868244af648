"""A pattern that says no more than it must: its sends and work answer all other questions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from megatron_balance import patterns
from megatron_balance.analysis.backward import largest_exchange
from megatron_balance.analysis.machine import Machine
from megatron_balance.analysis.rounds import coupled
from megatron_balance.analysis.statistics import plan_statistics
from megatron_balance.compile.order import IssueOrder, issue_orders
from megatron_balance.compile.pipeline import Projector, expand
from megatron_balance.compile.proof.meaning import verify
from megatron_balance.compile.remap import fragments
from megatron_balance.compile.transpose import POLICIES, Policy
from megatron_balance.cost.analytic import AnalyticCost
from megatron_balance.ir.arrays import Ints, as_rows
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.columns import Held
from megatron_balance.ir.model import Model
from megatron_balance.ir.plan import MicrobatchPlan, Zone, from_json, to_json
from megatron_balance.ir.program import Kind
from megatron_balance.lab.report.study import placement
from megatron_balance.patterns.base import CommPattern, Context, ZoneWork, prefix_pairs
from megatron_balance.patterns.sends import Blocks, Send, Sends, table_of
from megatron_balance.planning.layers import Layers, with_layers
from megatron_balance.simulator.attention import EngineName, attention_call
from tests.unit.analysis.test_statistics import assert_figures_are_those_of_the_ops

MODEL = Model(4, 2, 16)
ENGINES: tuple[EngineName, ...] = ("events", "rounds")


class Broadcast(CommPattern[Zone]):
    """All tokens lie on the first rank; every rank attends an equal part of each sequence's
    queries."""

    def ranks(self, zone: Zone, num_ranks: int) -> Sequence[int]:
        del num_ranks
        return zone.ranks

    def num_exchanges(self, zone: Zone) -> int:
        del zone
        return 2

    def place(self, zone: Zone, lengths: Ints, rank: int) -> Ints:
        rows = np.array([(seq, 0, lengths[seq]) for seq in zone.seqs], dtype=np.int64).reshape(-1, 3)
        return rows if rank == zone.ranks[0] else rows[:0]

    def sends(self, zone: Zone, context: Context, rank: int | None = None, *, across: bool = False) -> Sends:
        del across
        first, whole = zone.ranks[0], self.place(zone, context.lengths, zone.ranks[0])
        blocks = Blocks.of([whole, *(part(whole, at, len(zone.ranks)) for at in range(1, len(zone.ranks)))])
        block, others = np.arange(1, len(zone.ranks)), np.array(zone.ranks[1:])
        there = [
            table_of(0, first, others, Kind.Q, 0, context.num_heads, block, 0),
            table_of(0, first, others, Kind.KV, 0, context.num_kv_heads, 0, 0),
        ]
        rows = np.concatenate([*there, table_of(1, others, first, Kind.OUT, 0, context.num_heads, block, 0)])
        if rank is not None:
            rows = rows[(rows[:, [Send.SRC, Send.DST]] == rank).any(axis=1)]
        sizes = np.append(0, np.cumsum(blocks.rows[:, 2] - blocks.rows[:, 1]))
        return Sends(rows, lambda: np.diff(sizes[blocks.begin]), lambda: blocks)

    def work(self, zone: Zone, context: Context, rank: int) -> Iterable[ZoneWork]:
        whole = self.place(zone, context.lengths, zone.ranks[0])
        own = part(whole, zone.ranks.index(rank), len(zone.ranks))
        yield ZoneWork(1, as_rows(prefix_pairs(own, context)))


def part(whole: Ints, at: int, size: int) -> Ints:
    rows = whole.copy()
    rows[:, 1], rows[:, 2] = whole[:, 2] * at // size, whole[:, 2] * (at + 1) // size
    return rows[rows[:, 1] < rows[:, 2]]


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch) -> MicrobatchPlan:
    monkeypatch.setitem(patterns.PATTERNS, "broadcast", Broadcast())
    zones = Zone("far", "broadcast", (1, 0, 3), (0, 2)), Zone("ring", "ring", (2, 3), (1,))
    return MicrobatchPlan("by_hand", (30, 12, 7), 4, 2, 4, 2, zones)


def test_it_is_verified_counted_and_laid_out(plan: MicrobatchPlan) -> None:
    verify(expand(plan, "replay"))
    assert_figures_are_those_of_the_ops(plan, ranks_per_nic=1)
    held = fragments(plan)
    for rank in range(4):
        assert (
            held[held[:, Held.RANK] == rank][:, Held.FRAGMENT].tolist()
            == Projector(plan).attention_layout(rank).tolist()
        )
    assert from_json(to_json(plan)) == plan


def test_it_is_remapped_and_routed(plan: MicrobatchPlan) -> None:
    cluster = Cluster(4, 2)
    cost = AnalyticCost(cluster, MODEL)
    layered = with_layers(plan, cluster, cost, Layers(routing="always", remap=True))
    assert layered.moves
    assert layered.routing is not None
    verify(expand(layered, "replay"))
    assert_figures_are_those_of_the_ops(layered, ranks_per_nic=1)
    # Its load decides whether routing pays: one rank of each node sends all, the other's NIC is
    # idle.
    heavy = replace(plan, lengths=(300_000, 12, 7))
    paying = with_layers(heavy, cluster, cost, Layers(routing="pays"))
    assert paying.routing is not None
    assert 0 in paying.routing.zones


@pytest.mark.parametrize("policy", POLICIES)
def test_it_is_simulated_by_both_engines(plan: MicrobatchPlan, policy: Policy) -> None:
    cluster = Cluster(4, 2)
    machine = Machine(cluster, MODEL, AnalyticCost(cluster, MODEL))
    alone = replace(plan, zones=(replace(plan.zones[0], seqs=(0, 1, 2)),))
    exact, rounds = (attention_call(alone, machine, policy, name=name) for name in ENGINES)
    for a, b in zip(exact, rounds, strict=True):
        assert b.end_s.max() == pytest.approx(a.end_s.max(), rel=0.15)
        assert b.bytes_moved.sum() == pytest.approx(a.bytes_moved.sum(), rel=1e-9)


def test_the_rest_is_answered_too(plan: MicrobatchPlan) -> None:
    assert coupled(plan).tolist() == [0, 0, 0, 0]
    assert largest_exchange(plan).tolist() == [74, 0, 12, 74]  # of two heads
    # the ring alone says what starts at once
    assert issue_orders(plan, "replay") == (IssueOrder(), IssueOrder(first=frozenset({0})))
    longest = placement(plan)["longest"]
    assert [(row["seq"], row["num_ranks"]) for row in longest] == [(0, 3), (1, 2), (2, 3)]
    assert plan_statistics(plan, MODEL)["partial_tokens_received_per_rank"] == [0, 25, 0, 0]
