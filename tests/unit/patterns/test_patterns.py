"""Placements and comm patterns: facts about where tokens lie and what small programs look like."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron_balance import Batch, Cluster, Model, patterns
from megatron_balance.analysis.backward import largest_exchange
from megatron_balance.analysis.machine import Machine
from megatron_balance.analysis.rounds import coupled
from megatron_balance.analysis.statistics import plan_statistics
from megatron_balance.compile import remap
from megatron_balance.compile.join import join, split
from megatron_balance.compile.order import IssueOrder, issue_orders
from megatron_balance.compile.pipeline import Projector, expand, layout, project
from megatron_balance.compile.proof.meaning import verify
from megatron_balance.compile.proof.runs import prove
from megatron_balance.compile.transpose import POLICIES, Policy
from megatron_balance.cost.analytic import AnalyticCost
from megatron_balance.errors import InvalidProgramError
from megatron_balance.ir.arrays import Ints, as_array, as_rows
from megatron_balance.ir.columns import Held, Transfer
from megatron_balance.ir.mask import CAUSAL, FULL, Mask
from megatron_balance.ir.plan import REMAP, AnyPlanZone, MicrobatchPlan, Routing, Zone, from_json, to_json
from megatron_balance.ir.program import Attend, Exchange, Kind
from megatron_balance.ir.text import text
from megatron_balance.lab.report.study import placement
from megatron_balance.patterns import pattern_of
from megatron_balance.patterns import zigzag as zigzag_module
from megatron_balance.patterns.base import CommPattern, Context, Load, ZoneMessages, ZoneWork, prefix_pairs
from megatron_balance.patterns.head_exchange import HeadShares
from megatron_balance.patterns.sends import Blocks, Send, Sends, table_of
from megatron_balance.patterns.zigzag import Zigzag, tokens
from megatron_balance.planning.layers import Layers, with_layers
from megatron_balance.simulator.attention import EngineName, attention_call
from tests.support import by_hand, dense, programs
from tests.support.by_hand import plan, pool
from tests.support.strategies import random_once_per_node, random_shares, random_zones
from tests.unit.analysis.test_statistics import assert_figures_are_those_of_the_ops

PATTERNS = ("ring", "all_gather", "head_exchange", "chunk_exchange", "head_exchange_once", "head_ring")


def cut(length: int, size: int) -> list[list[tuple[int, int]]]:
    # The fragments of one sequence on each of `size` ranks.
    placed = Zigzag.of(np.array([length]), np.array([0]), size)
    return [[(a, b) for _, a, b in placed.fragments(rank).tolist()] for rank in range(size)]


# Zigzag
def test_zigzag_gives_each_rank_chunk_i_and_chunk_2g_minus_1_minus_i_of_long_sequences() -> None:
    assert cut(16, 4) == [[(0, 2), (14, 16)], [(2, 4), (12, 14)], [(4, 6), (10, 12)], [(6, 8), (8, 10)]]
    # Short ones lie on fewer ranks, and do not pile up on the first.
    holders = {length: sum(bool(rank) for rank in cut(length, 8)) for length in (1, 2, 3, 4, 7, 15, 16)}
    assert holders == {1: 1, 2: 1, 3: 1, 4: 2, 7: 3, 15: 7, 16: 8}
    placed = Zigzag.of(np.ones(12, dtype=np.int64), np.arange(12), 4)
    assert [len(placed.fragments(rank)) for rank in range(4)] == [3, 3, 3, 3]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_chunks_differ_by_at_most_one_token_and_ranks_attend_nearly_the_same(size: int) -> None:
    for length in range(2 * size, 70):
        ranks = cut(length, size)
        sizes = [b - a for rank in ranks for a, b in rank]
        assert len(sizes) == 2 * size
        assert max(sizes) - min(sizes) <= 1, (length, size)
        # The causal pairs of a rank differ from the mean by less than two query rows.
        pairs = [sum(q + 1 for a, b in rank for q in range(a, b)) for rank in ranks]
        assert max(pairs) - min(pairs) <= 2 * length, (length, size)


@pytest.mark.parametrize(("name", "value"), [("_NARROW", 1 << 15), ("_NARROW", 0), ("_BLOCK", 1)])
def test_tokens_and_pairs_of_a_rank_are_those_of_its_fragments(
    monkeypatch: pytest.MonkeyPatch, name: str, value: int
) -> None:
    monkeypatch.setattr(zigzag_module, name, value)
    lengths = np.array([1, 2, 3, 5, 7, 1, 16, 17, 33, 64, 1001, 4096])
    for size in range(1, 36):
        placed = Zigzag.of(lengths, np.arange(len(lengths)), size)
        held = [placed.fragments(rank) for rank in range(size)]
        assert tokens(lengths, size).tolist() == [int((rows[:, 2] - rows[:, 1]).sum()) for rows in held]
        causal = [sum(b * (b + 1) // 2 - a * (a + 1) // 2 for _, a, b in rows.tolist()) for rows in held]
        assert placed.pairs_per_rank().tolist() == causal
        shared = [int((rows[:, 2] - rows[:, 1])[placed.parts[rows[:, 0]] > 1].sum()) for rows in held]
        assert placed.shared_tokens().tolist() == shared


# Head slices
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size"),
    [(8, 8, 4), (8, 2, 4), (8, 2, 8), (6, 2, 4), (12, 3, 5), (4, 1, 3), (2, 1, 8), (7, 7, 3), (6, 3, 6)],
)
def test_head_slices_cover_every_query_head_once_and_map_evenly(heads: int, kv_heads: int, size: int) -> None:
    slices = HeadShares.of(heads, kv_heads, size).slices
    ratio = heads // kv_heads
    assert len(slices) == size
    assert sorted(head for rank in slices for a, b, _, _ in rank for head in range(a, b)) == list(range(heads))
    for a, b, g, h in (one for rank in slices for one in rank):
        assert (a // ratio, -(-b // ratio)) == (g, h)
        assert h - g == 1 or (a % ratio == 0 and b % ratio == 0)
    # Nearly as many on each rank; where there are fewer than ranks, some attend nothing.
    assert sorted(sum(b - a for a, b, _, _ in rank) for rank in HeadShares.of(10, 5, 4).slices) == [2, 2, 3, 3]
    assert [len(rank) for rank in HeadShares.of(2, 1, 4).slices] == [0, 1, 0, 1]


# Programs
@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_zone_of_any_pattern(pattern: str) -> None:
    # A zone on one rank moves nothing.
    program = expand(pool(pattern, (5, 1, 8), 1))
    verify(program)
    assert [type(op) for op in program.forward] == [Attend]
    # A program without replays is the same but for them.
    zone = by_hand.zone("pool", pattern, (0, 1, 2, 3), (0, 1))
    routing, moves = Routing(1, (REMAP, 0)), [(0, 1, 3), (3, 1, 2)]
    remapped = plan((9, 30), 4, zone, ranks_per_node=2, heads=(4, 2), moves=moves, routing=routing)
    for rank in range(4):
        whole = project(remapped, rank)
        assert whole.replays
        assert project(remapped, rank, replays=False) == replace(whole, replays=())
    # Splitting and joining gives the whole again.
    one = pool(pattern, (17, 3, 1, 40), 4, heads=(4, 2))
    whole = expand(one)
    assert join(split(whole), one.lengths, 4, 2) == whole
    for rank, own in enumerate(split(whole)):
        assert own.owned == project(one, rank).owned


def test_a_ring_of_two_trades_only_what_is_needed() -> None:
    # Rank 0 needs both chunks of rank 1; rank 1 needs only the low chunk of rank 0 (the high one
    # comes last).
    expected = """\
program lengths 8 heads 2 kv_heads 1 policy none
owner r0 s0[0:2) s0[6:8)
owner r1 s0[2:4) s0[4:6)
forward
attend r0
  q s0[0:2) over s0[0:2)
  q s0[6:8) over s0[0:2) s0[6:8)
attend r1
  q s0[2:4) over s0[2:4)
  q s0[4:6) over s0[2:4) s0[4:6)
exchange 0 p2p
  r1 <- r0 kv s0[0:2)
  r0 <- r1 kv s0[2:4)
  r0 <- r1 kv s0[4:6)
attend r0
  q s0[6:8) over s0[2:4) s0[4:6)
merge r0
  out s0[6:8)
attend r1
  q s0[2:4) over s0[0:2)
  q s0[4:6) over s0[0:2)
merge r1
  out s0[2:4)
  out s0[4:6)
backward
"""
    assert text(expand(pool("ring", (8,), 2))) == expected


def test_rings_of_three_and_exchanges_bring_what_is_needed_where_it_is_needed() -> None:
    # A replayed ring turns the other way.
    program = expand(pool("ring", (24,), 3), "replay")

    def directions(ops: tuple, kind: Kind) -> set[int]:
        rows = np.concatenate([as_array(op.transfers) for op in ops if isinstance(op, Exchange)])
        rows = rows[rows[:, 0] == kind]
        return set(((rows[:, 7] - rows[:, 6]) % 3).tolist())

    assert directions(program.forward, Kind.KV) == {1}
    assert directions(program.backward, Kind.KV) == {2}
    assert directions(program.backward, Kind.KV_GRAD) == {2}
    # A ring passes a fragment no further than it is needed.
    # Of 2G chunks only 2G - 1 leave owner at all: no other query may see the last one.
    program = expand(pool("ring", (24,), 3))
    sent = {row[1:4] for op in program.forward if isinstance(op, Exchange) for row in op.transfers}
    assert (0, 20, 24) not in sent
    assert len(sent) == 5
    # Exchanges bring what is needed where it is needed.
    # An all gather leaves out sequences that one rank holds.
    exchange = expand(pool("all_gather", (9, 1, 3), 2)).forward[0]
    assert isinstance(exchange, Exchange)
    assert (exchange.collective, exchange.group) == ("all_gather", (0, 1))
    assert {row[1] for row in exchange.transfers} == {0}
    # A head exchange brings a shared key value head to every rank that needs it.
    exchange = expand(pool("head_exchange", (8,), 4, heads=(4, 2))).forward[0]
    assert isinstance(exchange, Exchange)
    heads_of = {(row[6], row[7]): row[4:6] for row in exchange.transfers if row[0] == Kind.KV}
    assert [heads_of[0, dst] for dst in (1, 2, 3)] == [(0, 1), (1, 2), (1, 2)]
    # Zones run in the order of the plan and homes follow it.
    two = plan((8, 4), 2, Zone("intra-node", "ring", (0, 1), (0,)), Zone("local", "ring", (1,), (1,)))
    assert layout(two, 0).tolist() == [[0, 0, 2], [0, 6, 8]]
    assert layout(two, 1).tolist() == [[0, 2, 4], [0, 4, 6], [1, 0, 2], [1, 2, 4]]
    last = project(two, 1).forward[-1]
    assert isinstance(last, Attend)
    assert {row[0] for row in last.pairs} == {1}


def test_a_dispatch_merges_partials_where_queries_live_and_gathers_bring_all_blocks() -> None:
    tasks = [(0, 0, 0, 2, 0, 2), (0, 0, 0, 4, 2, 4), (1, 0, 2, 4, 0, 2)]
    tiles = by_hand.task_table([(0, 0, 0, 4)], tasks)
    assert text(expand(plan((4,), 2, tiles, heads=(1, 1)))) == programs.DISPATCH
    # An all gather brings each rank the blocks of all others.
    rows = np.array([(0, rank, -1, 1, 0, 2, tokens) for rank, tokens in enumerate((3, 4, 0))])
    load = Load(3)
    load.receive(ZoneMessages(rows, "all_gather", (0, 1, 2)))
    assert load.tokens[1].tolist() == [4, 3, 7]
    assert load.token_heads[1].tolist() == [8, 6, 14]


# Projections and the whole
def test_what_does_not_fit_or_is_unknown_is_refused() -> None:
    # Projections that do not fit are refused.
    ring = pool("ring", (16,), 2)
    ours, theirs = project(ring, 0), project(pool("ring", (18,), 2), 1)
    for other, message in (
        (theirs, r"exchange 0: rank 1 sends \(1, 0, 4, 9, 0, 1\) to rank 0, which does not expect it"),
        (project(pool("all_gather", (16,), 2), 1), r"0: rank 1 sees all_gather in \(0, 1\), rank 0 p2p in \(\)"),
    ):
        with pytest.raises(InvalidProgramError, match=message):
            join([ours, other], ring.lengths, 2, 1)
    # An unknown comm pattern is refused.
    with pytest.raises(InvalidProgramError, match="zone pool: unknown comm pattern 'rings'; known: ring, all_"):
        expand(pool("rings", (8,), 2))


# A pattern that says no more than it must: its sends and work answer all other questions.
MODEL = Model(4, 2, 16)
ENGINES: tuple[EngineName, ...] = ("events", "rounds")


class Broadcast(CommPattern[Zone]):
    # All tokens lie on the first rank; every rank attends an equal part of each sequence's queries.
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
def broadcast_plan(monkeypatch: pytest.MonkeyPatch) -> MicrobatchPlan:
    monkeypatch.setitem(patterns.PATTERNS, "broadcast", Broadcast())
    zones = Zone("far", "broadcast", (1, 0, 3), (0, 2)), Zone("ring", "ring", (2, 3), (1,))
    return MicrobatchPlan("by_hand", (30, 12, 7), 4, 2, 4, 2, zones)


def test_it_is_verified_counted_laid_out_remapped_and_routed(broadcast_plan: MicrobatchPlan) -> None:
    verify(expand(broadcast_plan, "replay"))
    assert_figures_are_those_of_the_ops(broadcast_plan, ranks_per_nic=1)
    held = remap.fragments(broadcast_plan)
    for rank in range(4):
        assert (
            held[held[:, Held.RANK] == rank][:, Held.FRAGMENT].tolist()
            == Projector(broadcast_plan).attention_layout(rank).tolist()
        )
    assert from_json(to_json(broadcast_plan)) == broadcast_plan
    # It is remapped and routed.
    cluster = Cluster(4, 2)
    cost = AnalyticCost(cluster, MODEL)
    layered = with_layers(broadcast_plan, cluster, cost, Layers(routing="always", remap=True))
    assert layered.moves
    assert layered.routing is not None
    verify(expand(layered, "replay"))
    assert_figures_are_those_of_the_ops(layered, ranks_per_nic=1)
    # Its load decides whether routing pays: one rank of each node sends all, the other's NIC is
    # idle.
    heavy = replace(broadcast_plan, lengths=(300_000, 12, 7))
    paying = with_layers(heavy, cluster, cost, Layers(routing="pays"))
    assert paying.routing is not None
    assert 0 in paying.routing.zones
    # The rest is answered too.
    assert coupled(broadcast_plan).tolist() == [0, 0, 0, 0]
    assert largest_exchange(broadcast_plan).tolist() == [74, 0, 12, 74]  # of two heads
    # the ring alone says what starts at once
    assert issue_orders(broadcast_plan, "replay") == (IssueOrder(), IssueOrder(first=frozenset({0})))
    longest = placement(broadcast_plan)["longest"]
    assert [(row["seq"], row["num_ranks"]) for row in longest] == [(0, 3), (1, 2), (2, 3)]
    assert plan_statistics(broadcast_plan, MODEL)["partial_tokens_received_per_rank"] == [0, 25, 0, 0]


@pytest.mark.parametrize("policy", POLICIES)
def test_it_is_simulated_by_both_engines(broadcast_plan: MicrobatchPlan, policy: Policy) -> None:
    cluster = Cluster(4, 2)
    machine = Machine(cluster, MODEL, AnalyticCost(cluster, MODEL))
    alone = replace(broadcast_plan, zones=(replace(broadcast_plan.zones[0], seqs=(0, 1, 2)),))
    exact, rounds = (attention_call(alone, machine, policy, name=name) for name in ENGINES)
    for a, b in zip(exact, rounds, strict=True):
        assert b.end_s.max() == pytest.approx(a.end_s.max(), rel=0.15)
        assert b.bytes_moved.sum() == pytest.approx(a.bytes_moved.sum(), rel=1e-9)


# The table of what all ranks send, against that of each rank and against closed forms.
CLUSTER = Cluster(12, 4)


def zones(mask: Mask) -> Iterator[tuple[Context, AnyPlanZone]]:
    # Zones of every kind, of random plans, each in its context.
    model = Model(8, 2, 16, attention="full" if mask == FULL else "causal")
    for seed in range(12):
        rng = np.random.default_rng(seed)
        batch = Batch(tuple(rng.integers(1, int(rng.choice([9, 400])), 6).tolist()))
        for make in (random_zones, random_once_per_node, random_shares):
            plan = make(batch, CLUSTER, model, seed)
            yield from ((Context.of(plan), zone) for zone in plan.zones)


def rows_of(sends: Sends, rank: int | None = None) -> list[tuple[int, ...]]:
    # (exchange, transfer) of all that moves, or that `rank` sends; without targets of all-gathers.
    number, rows = sends.transfers()
    gathers = [at for at, call in sends.calls.items() if call.collective == "all_gather"]
    table = np.column_stack([number, rows])
    table[np.isin(number, gathers), 1 + Transfer.DST] = -1
    return sorted(set(map(tuple, table[(rows[:, Transfer.SRC] == rank) | (rank is None)].tolist())))


@pytest.mark.parametrize("mask", [CAUSAL, FULL], ids=str)
def test_the_table_of_all_ranks_says_what_ranks_closed_forms_and_messages_say(mask: Mask) -> None:
    # The table of all ranks is the union of those of each.
    for context, zone in zones(mask):
        pattern = pattern_of(zone)
        whole, ranks = pattern.sends(zone, context), pattern.ranks(zone, context.num_ranks)
        each = {rank: pattern.sends(zone, context, rank) for rank in ranks}
        assert rows_of(whole) == sorted(row for rank, own in each.items() for row in rows_of(own, rank))
        assert whole.calls == {at: call for own in each.values() for at, call in own.calls.items()}
        if whole.again is not None:
            again = [(rank, own.again) for rank, own in each.items() if own.again is not None]
            assert rows_of(whole.again) == sorted(row for rank, own in again for row in rows_of(own, rank))
        # Messages count the tokens of the rows.
        _, rows = whole.transfers()
        tokens = rows[:, Transfer.STOP] - rows[:, Transfer.START]
        assert int(whole.messages()[:, -1].sum()) == int(tokens.sum())
        # Closed forms say what the table says.
        if not pattern.num_exchanges(zone):
            continue
        closed, counted = Load(context.num_ranks), Load(context.num_ranks)
        pattern.receive(closed, zone, context)
        CommPattern.receive(pattern, counted, zone, context)
        if "once" not in zone.pattern:  # there a token comes in parts of its heads, and counts once
            assert (closed.tokens == counted.tokens).all()
        assert (closed.token_heads == counted.token_heads).all()
        most = CommPattern.largest_exchange(pattern, zone, context)
        assert pattern.largest_exchange(zone, context).tolist() == most.tolist()
        if isinstance(zone, Zone):
            assert pattern.tokens([zone], context).tolist() == CommPattern.tokens(pattern, [zone], context).tolist()


# A stored plan of every comm pattern is read, proved and run, whichever class its name stands for.

# By comm pattern: a plan with a remap and routing as `to_json` wrote it, and its fingerprint.
STORED = json.loads((Path(__file__).parent / "stored_plans.json").read_text())


@pytest.mark.parametrize("policy", ["keep", "replay"])
@pytest.mark.parametrize("pattern", STORED)
def test_a_stored_plan_is_read_proved_and_run(pattern: str, policy: Policy) -> None:
    assert STORED.keys() == patterns.PATTERNS.keys()
    plan = from_json(json.dumps(STORED[pattern]["plan"]))
    assert plan.fingerprint() == STORED[pattern]["fingerprint"]
    assert json.loads(to_json(plan)) == STORED[pattern]["plan"]
    assert dense.worst_of(prove(plan, policy), head_dim=5) < 1e-12
