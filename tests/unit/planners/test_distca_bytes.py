"""distca moves few bytes: what a shard costs, which keys are free, who is joined.

Layouts by hand, brute force over blocks and tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_balance import Cluster, Model
from megatron_balance.analysis.statistics import plan_statistics
from megatron_balance.cost.analytic import AnalyticCost
from megatron_balance.cost.base import Floats
from megatron_balance.ir.arrays import as_rows
from megatron_balance.ir.plan import MicrobatchPlan, TaskTable
from megatron_balance.planners.distca import DistcaOptions, plan_owned
from megatron_balance.planners.distca.servers import (
    Caps,
    Edges,
    HeadTail,
    PairItems,
    Piece,
    Plain,
    Seconds,
    Servers,
    TaskSizes,
    at_hand,
    num_bytes,
)
from tests.support.flat_cost import MODEL, FlatCost

BLOCK = 128
"""Layouts are whole blocks, and whole tiles of the kernel."""
LONG = 128 * BLOCK
PAIR_S = 1e-9
QUERY_BYTES, KEY_BYTES = 2 * 64, 128
"""Of `MODEL`: a query with its output; a key and its value."""

Owner = tuple[int, int, int, int]
Span = tuple[int, int]


def planned(owned: list[Owner], num_ranks: int, model: Model = MODEL, **options: object) -> MicrobatchPlan:
    """The plan of tokens at the owner at (rank, seq, start, stop), each pair as dear as any other."""
    lengths = [0] * (1 + max(seq for _, seq, _, _ in owned))
    for _, seq, _, stop in owned:
        lengths[seq] = max(lengths[seq], stop)
    how = DistcaOptions(block=BLOCK, **{"tolerance": 0.1, **options})  # pyright: ignore[reportArgumentType]
    rows = as_rows(np.array(sorted(owned), dtype=np.int64))
    return plan_owned(tuple(lengths), rows, Cluster(num_ranks, num_ranks), model, FlatCost(model, pair=PAIR_S), how)


def attended(plan: MicrobatchPlan, rank: int, seq: int) -> list[Span]:
    """Queries of a sequence that a rank attends."""
    (zone,) = plan.zones
    assert isinstance(zone, TaskTable)
    return [(q0, q1) for server, s, q0, q1, _, _ in zone.tasks if (server, s) == (rank, seq)]


def cheapest_cut(item: Span, num_pairs: float, query_bytes: float, at_hand: int = 0) -> Span:
    """Of all runs of an item's blocks that have so many pairs or more, one of the fewest bytes."""
    edges = range(item[0], item[1] + 1, BLOCK)
    enough = [cut for cut in combinations(edges, 2) if pairs(*cut) >= num_pairs]
    return min(enough, key=lambda cut: cut_bytes(cut, query_bytes, at_hand))


def cut_bytes(cut: Span, query_bytes: float, at_hand: int = 0) -> float:
    """Bytes that a server receives for a run of queries, their outputs' way back included in
    `query_bytes`.
    """
    return (cut[1] - cut[0]) * query_bytes + max(0, cut[1] - at_hand) * KEY_BYTES


def pairs(start: int, stop: int) -> float:
    return (stop * (stop + 1) - start * (start + 1)) / 2


# ---- Closed forms


@given(st.integers(0, 400), st.integers(1, 60), st.sampled_from([(1.0, 1.0), (8.0, 1.0), (1.0, 8.0)]))
def test_the_closed_form_of_head_tail_pairs_has_its_keys_and_is_the_best_of_all_pairs(
    start: int, nano_batch: int, size: tuple[float, float]
) -> None:
    stop = start + 2 * nano_batch
    items = PairItems(nano_batch)
    for row in range(nano_batch):
        items.set(row, (stop - nano_batch, stop), seconds=1.0)
    queries, key_stop = items.cheapest(np.arange(1, nano_batch + 1) / nano_batch)
    for moved, got, keys in zip(range(1, nano_batch + 1), queries.tolist(), key_stop.tolist(), strict=True):
        cuts = [
            2 * moved * size[0] + (stop - outer) * size[1] for outer in range(nano_batch - moved + 1)
        ]  # the tail's keys
        assert got == pytest.approx(2 * moved)
        assert keys == pytest.approx(stop - nano_batch + moved), "the tail's last query sees all keys up to itself"
        assert got * size[0] + keys * size[1] == pytest.approx(min(cuts))


@pytest.mark.parametrize("blocks", [(0, 12), (5, 12), (3, 4)])
def test_the_closed_form_of_head_tail_pairs_is_what_the_cut_at_blocks_takes(blocks: Span) -> None:
    servers = made_servers([(0, 0, blocks[0] * BLOCK, (blocks[0] + blocks[1]) * BLOCK)], 1, "head_tail")
    shards, (piece,) = servers.shards, servers.pieces[0]
    items = shards.items(1)
    items.set(0, shards.bounds(piece), servers.seconds(piece))
    for low in range(piece[1], piece[2]):
        inner = (piece[0], low, piece[2])
        queries, key_stop = items.cheapest(np.array([servers.seconds(inner)]))
        assert queries[0] == pytest.approx(shards.num_queries(inner), rel=0.02)
        assert key_stop[0] == pytest.approx(shards.key_stop(inner), rel=0.02)


# ---- Keys that are there already


def made_servers(owned: list[Owner], num_ranks: int, shards: str, caps: Caps | None = None) -> Servers:
    """State of a scheduling that has not begun."""
    seconds = Seconds.of(FlatCost(MODEL, pair=PAIR_S), max(stop for _, _, _, stop in owned))
    edges = Edges.of(np.array(owned, dtype=np.int64), BLOCK, seconds)
    kind = Plain if shards == "plain" else HeadTail
    return Servers(edges, kind(edges, TaskSizes(QUERY_BYTES, KEY_BYTES)), num_ranks, caps or Caps())


def keys_of(spans: list[Span]) -> set[int]:
    """Keys by number of their block, which is exact: everything here is whole blocks."""
    return {block for start, stop in spans for block in range(start // BLOCK, stop // BLOCK)}


def held(servers: Servers, server: int, seq: int) -> set[int]:
    return keys_of([(start, stop) for rank, s, start, stop in servers.owned if (rank, s) == (server, seq)])


def needed(servers: Servers, server: int, seq: int, but: Piece | None = None) -> set[int]:
    """Keys of a sequence that the pieces of a server see, but for one piece."""
    own = [piece for piece in servers.pieces[server] if servers.seq(piece) == seq and piece != but]
    return keys_of([(0, servers.shards.key_stop(piece)) for piece in own])


def assert_books_are_right(servers: Servers, num_seqs: int) -> None:
    """Compare the keys missing, freed, at hand and received of every server and piece with sets of
    keys.
    """
    pieces = [(source, piece) for source, own in enumerate(servers.pieces) for piece in own]
    for server in range(len(servers.pieces)):
        arrives = [needed(servers, server, seq) - held(servers, server, seq) for seq in range(num_seqs)]
        assert servers.keys[server] == BLOCK * sum(map(len, arrives))
        foreign = [piece for piece in servers.pieces[server] if servers.owned[piece[0]][0] != server]
        assert servers.queries[server] == sum(map(servers.shards.num_queries, foreign))
        for source, piece in pieces:
            seq = servers.seq(piece)
            key_stop, there = servers.shards.key_stop(piece), arrives[seq] | held(servers, server, seq)
            assert servers.missing(server, seq, key_stop) == BLOCK * len(keys_of([(0, key_stop)]) - there)
            if source == server:
                left = needed(servers, server, seq, but=piece) - held(servers, server, seq)
                assert servers.freed(server, piece) == BLOCK * len(arrives[seq] - left)
            stop = max(piece[1] + 1, servers.shards.first_stop(piece))
            low = np.full(piece[2] + 1 - stop, piece[1])
            key_stops = servers.shards.key_stops(piece, low, stop)
            free = [BLOCK * len(keys_of([(0, each)]) & there) for each in key_stops.tolist()]
            if seq in servers.reach[server]:
                assert at_hand(servers, server, seq, key_stops).tolist() == free
            else:
                assert not any(free)
            queries = [servers.shards.num_queries((piece[0], piece[1], each)) for each in range(stop, piece[2] + 1)]
            costs = num_bytes(
                servers, piece, (low, stop, np.zeros(len(low))), server, TaskSizes(QUERY_BYTES, KEY_BYTES)
            )
            wanted = np.array(queries) * QUERY_BYTES + (key_stops - np.array(free)) * KEY_BYTES
            assert costs == pytest.approx(wanted)


@pytest.mark.parametrize("shards", ["plain", "head_tail"])
@pytest.mark.parametrize("seed", range(3))
def test_keys_at_home_and_of_earlier_tasks_are_free_whatever_moves_where(shards: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_ranks, lengths = 4, (14, 9)
    owned: list[Owner] = []
    for seq, blocks in enumerate(lengths):
        cuts = [0, *sorted(rng.choice(np.arange(1, blocks), 4, replace=False).tolist()), blocks]
        owned += [
            (int(rng.integers(num_ranks)), seq, a * BLOCK, b * BLOCK) for a, b in zip(cuts, cuts[1:], strict=False)
        ]
    servers = made_servers(sorted(owned), num_ranks, shards, Caps(held=1e9))
    assert_books_are_right(servers, len(lengths))
    for _ in range(25):
        source = int(rng.choice([server for server, pieces in enumerate(servers.pieces) if pieces]))
        piece = servers.pieces[source][int(rng.integers(len(servers.pieces[source])))]
        high = int(rng.integers(max(servers.shards.first_stop(piece), piece[1] + 1), piece[2] + 1))
        low = int(rng.integers(piece[1], high))
        servers.move(piece, low, high, source, int((source + rng.integers(1, num_ranks)) % num_ranks))
        assert_books_are_right(servers, len(lengths))


def test_a_cut_reaches_as_far_as_the_keys_that_are_at_hand() -> None:
    """Rank 1 needs all keys of rank 0 for its own queries: then the queries with most keys are the
    cheapest part, not those further in.
    """
    owned, own = (0, 8192), (8192, 9216)
    plan = planned([(0, 0, *owned), (1, 0, *own)], 2)
    report = plan_statistics(plan, MODEL)
    assert report["kv_tokens_received_per_rank"] == [0, 8192]
    start, stop = min(attended(plan, 1, 0))
    cut = (start, min(stop, owned[1]))
    assert cut[1] - cut[0] == report["query_tokens_received_per_rank"][1] > 0
    best = cheapest_cut(owned, pairs(*cut), QUERY_BYTES, own[1])
    assert cut_bytes(cut, QUERY_BYTES, own[1]) <= 1.01 * cut_bytes(best, QUERY_BYTES, own[1])


def test_keys_at_home_count_for_a_server_that_has_given_their_queries_away() -> None:
    """Rank 0 is emptied into rank 1, and then takes of the sequence whose first keys it still
    holds; of the other one it has none.
    """
    first = LONG * 5 // 16
    plan = planned([(0, 1, 0, first), (1, 2, 0, first // 2), (2, 0, 0, LONG), (2, 1, first, LONG)], 16, tolerance=0.03)
    start, stop = attended(plan, 1, 1)[0]
    assert start == 0, "rank 0 was to be emptied"
    assert stop >= first
    taken = [sum(q1 - q0 for q0, q1 in attended(plan, 0, seq)) for seq in (0, 1)]
    assert taken[1] > taken[0]


def test_a_server_is_not_emptied_into_one_that_lacks_the_keys_which_it_holds() -> None:
    """Rank 2 holds half of the keys that its queries see, and would save the other nano-batch; rank
    1 would need all of them.
    """
    owned: list[Owner] = [(0, 0, 0, LONG), (0, 1, 0, 512), (1, 2, 0, 1024), (2, 1, 512, 1024)]
    joined, apart = (
        planned(owned, 16, empty_light_servers=empty_light_servers) for empty_light_servers in (True, False)
    )
    assert attended(joined, 2, 1)[-1][1] == 1024
    assert attended(joined, 1, 1) == []
    assert sum(plan_statistics(joined, MODEL)["bytes_received_per_rank"]["total"]) <= sum(
        plan_statistics(apart, MODEL)["bytes_received_per_rank"]["total"]
    )


# ---- Bytes that count


def test_a_query_costs_the_bytes_of_its_output_too() -> None:
    """Eight query heads to a key head: a part of few queries lies far out.

    Were outputs free, the cheapest one would lie further in.
    """
    model = Model(num_heads=16, num_kv_heads=2, head_dim=16)  # keys of `KEY_BYTES`
    query_bytes, item = 2 * 512, (0, LONG)
    plan = planned([(0, 0, *item), (1, 1, 0, 102 * BLOCK)], 2, model, tolerance=0.02)
    (cut,) = attended(plan, 1, 0)
    best, without = (cheapest_cut(item, pairs(*cut), size) for size in (query_bytes, query_bytes / 2))
    assert cut_bytes(without, query_bytes) > 1.05 * cut_bytes(best, query_bytes), (
        "a layout in which it makes no difference"
    )
    assert cut_bytes(cut, query_bytes) <= 1.01 * cut_bytes(best, query_bytes)


def _one_long_and_28(short: int, *, empty_light_servers: bool = True) -> tuple[MicrobatchPlan, int]:
    """A sequence on 4 servers and a short one on each of 28.

    The plan, and how many short ones the busiest of these servers attends.
    """
    num_long, num_ranks = 4, 32
    owned: list[Owner] = [(rank, 0, rank * LONG // num_long, (rank + 1) * LONG // num_long) for rank in range(num_long)]
    owned += [(num_long + seq, 1 + seq, 0, short) for seq in range(num_ranks - num_long)]
    plan = planned(owned, num_ranks, empty_light_servers=empty_light_servers)
    both = [sum(len(attended(plan, rank, seq)) for _, seq, _, _ in owned if seq) for rank in range(num_long, num_ranks)]
    return plan, max(both)


def test_light_servers_that_together_fill_none_stay_apart() -> None:
    """Joined, two would have four fifths of the mean, and need the long sequence's keys for what is
    left.
    """
    assert _one_long_and_28(18 * BLOCK)[1] == 1


def test_light_servers_are_joined_where_that_saves_keys() -> None:
    """Half full ones: two of these joined are full, and take nothing of the long one, whose keys
    one fills.
    """
    (joined, most), (apart, _) = (
        _one_long_and_28(22 * BLOCK, empty_light_servers=empty_light_servers) for empty_light_servers in (True, False)
    )
    assert most == 2
    reports = [plan_statistics(plan, MODEL) for plan in (joined, apart)]
    keys = [sum(report["kv_tokens_received_per_rank"]) for report in reports]
    total = [sum(report["bytes_received_per_rank"]["total"]) for report in reports]
    assert keys[0] < 0.8 * keys[1]
    assert total[0] < 0.9 * total[1]


# ---- Seconds, not pairs


def test_short_sequences_count_as_long_as_they_take() -> None:
    """As many pairs on either rank, but one of a run of a single tile takes 1.7 times as long as
    one of a long run.
    """
    model, cluster = Model(num_heads=32, num_kv_heads=32, head_dim=128), Cluster(2, 2)
    cost = AnalyticCost(cluster, model)
    num_short, length = 512, 22 * BLOCK
    owned = [(0, seq, 0, BLOCK) for seq in range(num_short)] + [(1, num_short, 0, length)]
    lengths = (*[BLOCK] * num_short, length)
    plan = plan_owned(lengths, as_rows(np.array(owned)), cluster, model, cost, DistcaOptions(tolerance=0.05))
    (zone,) = plan.zones
    assert isinstance(zone, TaskTable)
    before, after = (seconds(spans, cost) for spans in (owned, [task[:4] for task in zone.tasks]))
    assert before[0] > 1.2 * before.mean(), "a layout that is even as it is"
    assert after.max() <= 1.1 * after.mean()


def seconds(spans: Sequence[tuple[int, ...]], cost: AnalyticCost) -> Floats:
    """Of two ranks: of the queries (rank, seq, start, stop), those up to `stop` less those up to
    `start`.
    """
    upto = {at: cost.attention_s(pairs(0, at), at) if at else 0.0 for _, _, *span in spans for at in span}
    rank = [rank for rank, *_ in spans]
    return np.bincount(rank, [upto[stop] - upto[start] for _, _, start, stop in spans], 2)
