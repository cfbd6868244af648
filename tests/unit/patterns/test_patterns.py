"""Placements and comm patterns: facts about where tokens lie and what small programs look like."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from megatron_balance.compile.join import join, split
from megatron_balance.compile.pipeline import expand, layout, project
from megatron_balance.compile.proof.meaning import verify
from megatron_balance.errors import InvalidProgramError
from megatron_balance.ir.arrays import as_array
from megatron_balance.ir.columns import Rows
from megatron_balance.ir.plan import REMAP, Routing, TaskTable, Zone
from megatron_balance.ir.program import Attend, Exchange, Kind
from megatron_balance.ir.text import text
from megatron_balance.patterns import zigzag as zigzag_module
from megatron_balance.patterns.head_exchange import head_slices
from megatron_balance.patterns.zigzag import fragments, tokens, zigzag
from tests.support import by_hand
from tests.support.by_hand import plan, pool

PATTERNS = ("ring", "all_gather", "head_exchange", "chunk_exchange", "head_exchange_once", "head_ring")


def cut(length: int, size: int) -> list[list[tuple[int, int]]]:
    """The fragments of one sequence on each of `size` ranks."""
    placed = zigzag(np.array([length]), np.array([0]), size)
    return [[(a, b) for _, a, b in fragments(placed, rank).tolist()] for rank in range(size)]


# Zigzag


def test_zigzag_gives_each_rank_chunk_i_and_chunk_2g_minus_1_minus_i() -> None:
    assert cut(16, 4) == [[(0, 2), (14, 16)], [(2, 4), (12, 14)], [(4, 6), (10, 12)], [(6, 8), (8, 10)]]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_no_token_is_lost_or_doubled_whatever_the_length(size: int) -> None:
    for length in range(1, 70):
        tokens = [token for rank in cut(length, size) for a, b in rank for token in range(a, b)]
        assert sorted(tokens) == list(range(length)), (length, size)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_chunks_differ_by_at_most_one_token(size: int) -> None:
    for length in range(2 * size, 70):
        sizes = [b - a for rank in cut(length, size) for a, b in rank]
        assert len(sizes) == 2 * size
        assert max(sizes) - min(sizes) <= 1, (length, size)


@pytest.mark.parametrize("size", [2, 3, 8])
def test_ranks_attend_nearly_the_same(size: int) -> None:
    """The causal pairs of a rank differ from the mean by less than two query rows."""
    for length in range(2 * size, 70):
        pairs = [sum(q + 1 for a, b in rank for q in range(a, b)) for rank in cut(length, size)]
        assert max(pairs) - min(pairs) <= 2 * length, (length, size)


@pytest.mark.parametrize(("length", "holders"), [(1, 1), (2, 1), (3, 1), (4, 2), (7, 3), (15, 7), (16, 8)])
def test_a_sequence_shorter_than_two_tokens_a_rank_lies_on_fewer_ranks(length: int, holders: int) -> None:
    assert sum(bool(rank) for rank in cut(length, 8)) == holders


@pytest.mark.parametrize(("name", "value"), [("_NARROW", 1 << 15), ("_NARROW", 0), ("_BLOCK", 1)])
def test_tokens_of_a_rank_are_those_of_its_fragments(monkeypatch: pytest.MonkeyPatch, name: str, value: int) -> None:
    monkeypatch.setattr(zigzag_module, name, value)
    lengths = np.array([1, 2, 3, 5, 7, 1, 16, 17, 33, 64, 1001, 4096])
    for size in range(1, 36):
        placed = zigzag(lengths, np.arange(len(lengths)), size)
        held = [fragments(placed, rank) for rank in range(size)]
        assert tokens(lengths, size).tolist() == [int((rows[:, 2] - rows[:, 1]).sum()) for rows in held]


def test_short_sequences_do_not_pile_up_on_the_first_rank() -> None:
    placed = zigzag(np.ones(12, dtype=np.int64), np.arange(12), 4)
    assert [len(fragments(placed, rank)) for rank in range(4)] == [3, 3, 3, 3]


# Head slices


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size"),
    [(8, 8, 4), (8, 2, 4), (8, 2, 8), (6, 2, 4), (12, 3, 5), (4, 1, 3), (2, 1, 8), (7, 7, 3), (6, 3, 6)],
)
def test_head_slices_cover_every_query_head_once_and_map_evenly(heads: int, kv_heads: int, size: int) -> None:
    slices = head_slices(heads, kv_heads, size)
    ratio = heads // kv_heads
    assert len(slices) == size
    assert sorted(head for rank in slices for a, b, _, _ in rank for head in range(a, b)) == list(range(heads))
    for a, b, g, h in (one for rank in slices for one in rank):
        assert (a // ratio, -(-b // ratio)) == (g, h)
        assert h - g == 1 or (a % ratio == 0 and b % ratio == 0)


def test_head_slices_are_near_equal() -> None:
    counts = [sum(b - a for a, b, _, _ in rank) for rank in head_slices(10, 5, 4)]
    assert sorted(counts) == [2, 2, 3, 3]


def test_with_fewer_heads_than_ranks_some_ranks_attend_nothing() -> None:
    assert [len(rank) for rank in head_slices(2, 1, 4)] == [0, 1, 0, 1]


# Programs


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_zone_on_one_rank_moves_nothing(pattern: str) -> None:
    program = expand(pool(pattern, (5, 1, 8), 1))
    verify(program)
    assert [type(op) for op in program.forward] == [Attend]


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("policy", ["keep", "replay"])
def test_one_token_on_eight_ranks(pattern: str, policy: str) -> None:
    program = expand(pool(pattern, (1,), 8, heads=(8, 2)), policy)  # pyright: ignore[reportArgumentType]
    verify(program)
    assert sum(len(owned) for owned in program.owned) == 1


@pytest.mark.parametrize("pattern", PATTERNS)
def test_no_sequence_at_all(pattern: str) -> None:
    program = expand(pool(pattern, (), 3), "replay")
    verify(program)
    assert (program.forward, program.backward) == ((), ())


def test_a_ring_of_two_trades_only_what_is_needed() -> None:
    """Rank 0 needs both chunks of rank 1; rank 1 needs only the low chunk of rank 0 (the high one
    comes last)."""
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


def test_a_replayed_ring_turns_the_other_way() -> None:
    program = expand(pool("ring", (24,), 3), "replay")

    def directions(ops: tuple, kind: Kind) -> set[int]:
        rows = np.concatenate([as_array(op.transfers) for op in ops if isinstance(op, Exchange)])
        rows = rows[rows[:, 0] == kind]
        return set(((rows[:, 7] - rows[:, 6]) % 3).tolist())

    assert directions(program.forward, Kind.KV) == {1}
    assert directions(program.backward, Kind.KV) == {2}
    assert directions(program.backward, Kind.KV_GRAD) == {2}


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_program_without_replays_is_the_same_but_for_them(pattern: str) -> None:
    zone = by_hand.zone("pool", pattern, (0, 1, 2, 3), (0, 1))
    routing, moves = Routing(1, (REMAP, 0)), [(0, 1, 3), (3, 1, 2)]
    remapped = plan((9, 30), 4, zone, ranks_per_node=2, heads=(4, 2), moves=moves, routing=routing)
    for rank in range(4):
        whole = project(remapped, rank)
        assert whole.replays
        assert project(remapped, rank, replays=False) == replace(whole, replays=())


def test_a_ring_passes_a_fragment_no_further_than_it_is_needed() -> None:
    """Of 2G chunks only 2G - 1 leave owner at all: no other query may see the last one."""
    program = expand(pool("ring", (24,), 3))
    sent = {row[1:4] for op in program.forward if isinstance(op, Exchange) for row in op.transfers}
    assert (0, 20, 24) not in sent
    assert len(sent) == 5


def test_an_all_gather_leaves_out_sequences_that_one_rank_holds() -> None:
    exchange = expand(pool("all_gather", (9, 1, 3), 2)).forward[0]
    assert isinstance(exchange, Exchange)
    assert (exchange.collective, exchange.group) == ("all_gather", (0, 1))
    assert {row[1] for row in exchange.transfers} == {0}


def test_a_head_exchange_brings_a_shared_key_value_head_to_every_rank_that_needs_it() -> None:
    exchange = expand(pool("head_exchange", (8,), 4, heads=(4, 2))).forward[0]
    assert isinstance(exchange, Exchange)
    heads_of = {(row[6], row[7]): row[4:6] for row in exchange.transfers if row[0] == Kind.KV}
    assert [heads_of[0, dst] for dst in (1, 2, 3)] == [(0, 1), (1, 2), (1, 2)]


def test_a_dispatch_merges_partials_where_the_queries_live() -> None:
    task_table = TaskTable(
        "tiles", Rows.of(4, [(0, 0, 0, 4)]), Rows.of(6, [(0, 0, 0, 4, 2, 4), (0, 0, 0, 2, 0, 2), (1, 0, 2, 4, 0, 2)])
    )
    expected = """\
program lengths 4 heads 2 kv_heads 1 policy none
owner r0 s0[0:4)
owner r1
forward
exchange 0 p2p
  r1 <- r0 q s0[2:4)
  r1 <- r0 kv s0[0:2)
attend r0
  q s0[2:4) over s0[2:4)
  q s0[0:2) over s0[0:2)
attend r1
  q s0[2:4) over s0[0:2)
exchange 1 p2p
  r0 <- r1 out s0[2:4)
merge r0
  out s0[2:4)
backward
"""
    assert text(expand(plan((4,), 2, task_table))) == expected


def test_zones_run_in_the_order_of_the_plan_and_homes_follow_it() -> None:
    two = plan((8, 4), 2, Zone("intra-node", "ring", (0, 1), (0,)), Zone("local", "ring", (1,), (1,)))
    assert layout(two, 0).tolist() == [[0, 0, 2], [0, 6, 8]]
    assert layout(two, 1).tolist() == [[0, 2, 4], [0, 4, 6], [1, 0, 2], [1, 2, 4]]
    last = project(two, 1).forward[-1]
    assert isinstance(last, Attend)
    assert {row[0] for row in last.pairs} == {1}


def test_an_unknown_comm_pattern_is_refused() -> None:
    with pytest.raises(
        InvalidProgramError,
        match=r"zone pool: unknown comm pattern 'rings'; known: ring, all_gather, gather_documents, gather_sequence, ",
    ):
        expand(pool("rings", (8,), 2))


# Projections and the whole


def test_projections_that_do_not_fit_are_refused() -> None:
    ring = pool("ring", (16,), 2)
    ours, theirs = project(ring, 0), project(pool("ring", (18,), 2), 1)
    with pytest.raises(
        InvalidProgramError, match=r"exchange 0: rank 1 sends \(1, 0, 4, 9, 0, 1\) to rank 0, which does not expect it"
    ):
        join([ours, theirs], ring.lengths, 2, 1)
    gather = project(pool("all_gather", (16,), 2), 1)
    with pytest.raises(
        InvalidProgramError, match=r"exchange 0: rank 1 sees all_gather in \(0, 1\), rank 0 p2p in \(\)"
    ):
        join([ours, gather], ring.lengths, 2, 1)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_splitting_and_joining_gives_the_whole_again(pattern: str) -> None:
    one = pool(pattern, (17, 3, 1, 40), 4, heads=(4, 2))
    whole = expand(one)
    assert join(split(whole), one.lengths, 4, 2) == whole
    for rank, own in enumerate(split(whole)):
        assert own.owned == project(one, rank).owned


def test_pairs_and_shared_tokens_of_a_rank_are_those_of_its_fragments() -> None:
    lengths = np.array([1, 2, 3, 5, 7, 1, 16, 17, 33, 64, 1001, 4096])
    for size in range(1, 36):
        placed = zigzag(lengths, np.arange(len(lengths)), size)
        held = [fragments(placed, rank) for rank in range(size)]
        causal = [sum(b * (b + 1) // 2 - a * (a + 1) // 2 for _, a, b in rows.tolist()) for rows in held]
        assert zigzag_module.pairs_per_rank(placed).tolist() == causal
        shared = [int((rows[:, 2] - rows[:, 1])[placed.parts[rows[:, 0]] > 1].sum()) for rows in held]
        assert zigzag_module.shared_tokens(placed).tolist() == shared
