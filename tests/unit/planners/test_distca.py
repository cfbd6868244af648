"""distca: closed forms against all block cuts, the linear layout, the scheduler, balance, caps."""

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, pairwise
from math import inf
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_balance import Cluster, Model, make_planner, verify
from megatron_balance.analysis.statistics import plan_statistics
from megatron_balance.compile.pipeline import layout
from megatron_balance.config import load_cluster, load_model
from megatron_balance.cost.analytic import AnalyticCost
from megatron_balance.cost.base import Floats
from megatron_balance.errors import ConfigError, InfeasibleError
from megatron_balance.ir.arrays import Ints, as_array, as_rows
from megatron_balance.ir.plan import MicrobatchPlan, TaskTable
from megatron_balance.planners.distca import DistcaOptions, linear_owned, plan_owned, schedule
from megatron_balance.planners.distca import servers as parts
from megatron_balance.planners.distca.servers import Piece, Servers
from tests.support import flat_cost
from tests.support.flat_cost import FlatCost

MODEL, GROUPED = Model(num_heads=32, num_kv_heads=32, head_dim=128), Model(num_heads=32, num_kv_heads=8, head_dim=128)
CLUSTER, FOUR = Cluster(16, 8), Cluster(4, 4)
COST = AnalyticCost(CLUSTER, MODEL)
BATCHES = (  # 64k tokens: one long sequence, a mixture, none of the lengths a multiple of anything
    [63121, 2415],
    [49872, 1433, 14231],
    [23963, 18841, 14321, 8411],
    [5010, 1379, 42261, 331, 129, 16426],
)


def figures(lengths: list[int], **options: Any) -> dict[str, Any]:
    return plan_statistics(make_planner("distca", CLUSTER, MODEL, **options)(lengths), MODEL)


sizes = st.tuples(st.integers(1, 40), st.integers(1, 40)).map(lambda pair: (float(pair[0]), float(pair[1])))


def plain(start: float, stop: float, share: float, resident: float, size_q: float, size_kv: float) -> list[float]:
    # The best plain shard of one item.
    items = parts._PlainItems(3, parts.TaskSizes(size_q, size_kv))
    items.set(1, (start, stop), seconds=1.0)
    queries, key_stop = items.cheapest(np.full(3, share), np.full(3, resident))
    return [float(queries[1]), float(key_stop[1])]


@given(st.integers(0, 400), st.integers(1, 300), st.integers(0, 800), sizes)
def test_no_cut_at_blocks_costs_fewer_bytes_than_the_closed_form_for_plain_shards(
    start: int, tokens: int, resident: int, size: tuple[float, float]
) -> None:
    stop, block = start + tokens, max(1, tokens // 12)
    size_q, size_kv = size
    edges = [*range(start, stop, block), stop]
    for low in range(len(edges) - 1):
        for high in range(low + 1, len(edges)):
            area = edges[high] ** 2 - edges[low] ** 2
            share = area / (stop**2 - start**2)
            queries, key_stop = plain(start, stop, share, resident, size_q, size_kv)
            # It is a part of the item, and it has the share.
            assert start - 1e-6 <= key_stop - queries <= key_stop <= stop
            assert key_stop**2 - (key_stop - queries) ** 2 == pytest.approx(area, rel=1e-6)
            cut = size_q * (edges[high] - edges[low]) + size_kv * max(0, edges[high] - resident)
            assert size_q * queries + size_kv * max(0.0, key_stop - resident) <= cut * (1 + 1e-9)


def test_the_best_plain_shard_follows_the_price_of_queries_and_the_keys_at_hand() -> None:
    # The best plain shard moves from the head of an item to its end as queries grow dearer.
    found = [plain(0, 1000, 0.25, 0, size_q, 1.0)[1] for size_q in (1e-9, 1.0, 1e9)]
    assert found == pytest.approx([500, 577.35, 1000], rel=1e-3)
    # Keys at hand are free so that a shard reaches as far as they do.
    assert plain(0, 1000, 0.25, 0, 1e-9, 1.0)[1] == pytest.approx(500)
    assert plain(0, 1000, 0.25, 800, 1e-9, 1.0)[1] == pytest.approx(800)


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=20), st.integers(1, 20), st.integers(0, 5))
def test_sequences_lie_one_after_the_other_as_many_tokens_on_each_rank(
    lengths: list[int], num_ranks: int, first: int
) -> None:
    owned = linear_owned(lengths, range(first, first + num_ranks))
    held = np.bincount(owned[:, 0] - first, owned[:, 3] - owned[:, 2], num_ranks)
    assert held.sum() == sum(lengths)
    assert held.max() - held.min() <= 1
    assert (np.diff(owned[:, 0]) >= 0).all()
    ends = [(seq, token) for _, seq, start, stop in owned.tolist() for token in (start, stop - 1)]
    assert ends == sorted(ends)


def attended(tasks: Ints, lengths: list[int]) -> list[list[tuple[int, int]]]:
    return [sorted((q0, q1) for _, s, q0, q1, _, _ in tasks.tolist() if s == seq) for seq in range(len(lengths))]


layouts = st.tuples(
    st.lists(st.integers(1, 700), min_size=1, max_size=6),
    st.integers(1, 9),
    st.integers(0, 2**16),
    st.sampled_from([1, 3, 16, 128]),
)


@pytest.mark.parametrize("shards", ["plain", "head_tail"])
@pytest.mark.parametrize("empty_light_servers", [False, True])
@given(given_layout=layouts, tolerance=st.sampled_from([0.0, 0.02, 0.5]))
def test_any_layout_is_attended_once_at_multiples_of_the_block(
    given_layout: tuple[list[int], int, int, int], tolerance: float, shards: str, empty_light_servers: bool
) -> None:
    lengths, num_ranks, seed, block = given_layout
    rng = np.random.default_rng(seed)
    rows: list[tuple[int, int, int, int]] = []
    for seq, length in enumerate(lengths):
        cuts = sorted({0, length, *rng.integers(0, length + 1, 3).tolist()})
        rows += [(int(rng.integers(num_ranks)), seq, a, b) for a, b in zip(cuts, cuts[1:], strict=False)]
    owned = np.array(sorted(rows), dtype=np.int64)
    how = DistcaOptions(tolerance=tolerance, block=block, shards=shards, empty_light_servers=empty_light_servers)  # pyright: ignore[reportArgumentType]
    tasks = schedule(owned, lengths, Cluster(num_ranks, num_ranks), COST, how)
    for seq, spans in enumerate(attended(tasks, lengths)):
        assert [0, *(b for _, b in spans)] == [*(a for a, _ in spans), lengths[seq]]
    assert (tasks[:, 4] == 0).all()
    assert (tasks[:, 5] == tasks[:, 3]).all()
    starts = {(seq, start): stop for _, seq, start, stop in rows}
    inside = {(seq, edge) for (seq, start), stop in starts.items() for edge in (*range(start, stop, block), stop)}
    if shards == "head_tail":  # tails are cut in blocks of the same edges
        inside |= {(seq, edge) for (seq, start), stop in starts.items() for edge in range(start, stop, block)}
    assert {(seq, edge) for _, seq, q0, q1, _, _ in tasks.tolist() for edge in (q0, q1)} <= inside
    assert (tasks == schedule(owned, lengths, Cluster(num_ranks, num_ranks), COST, how)).all()


@pytest.mark.parametrize("lengths", BATCHES)
def test_no_server_is_above_the_tolerance_in_pairs_nor_in_seconds_and_tokens_are_even(lengths: list[int]) -> None:
    for tolerance in (0.02, 0.1):
        made = make_planner("distca", CLUSTER, MODEL, tolerance=tolerance)(lengths)
        report = plan_statistics(made, MODEL)
        assert report["imbalance"]["attention"] <= 1 + tolerance
        assert max(report["tokens_per_rank"]) - min(report["tokens_per_rank"]) <= 1
        assert report["partial_tokens_received_per_rank"] == _sent_away(made.zones[0])
        seconds = _kernel_s(made)  # padding is little here
        assert tolerance > 0.02 or max(seconds) <= 1.04 * sum(seconds) / len(seconds)


def test_fewer_pieces_are_cut_where_a_backward_pays_for_each() -> None:
    # And nothing else is another where it does not, or where a tolerance is given.
    lengths, hopper = BATCHES[0], load_cluster("h100").build(num_ranks=16)

    def planned(kernel: str, **options: Any) -> MicrobatchPlan:
        return make_planner("distca", replace(hopper, attention_kernel=kernel), MODEL, **options)(lengths)  # type: ignore[arg-type]

    assert planned("te_fused") == planned("te_fused", tolerance=0.02)
    assert planned("flash_attn_3") == planned("flash_attn_3", tolerance=0.1)
    few, many = (
        as_array(each.zones[0].tasks)
        for each in (planned("flash_attn_3"), planned("flash_attn_3", tolerance=0.02))
        if isinstance(each.zones[0], TaskTable)
    )
    assert len(few) <= len(many)


def _kernel_s(made: MicrobatchPlan) -> list[float]:
    # Seconds of the cost model's kernel for each rank's tasks, tiles computed whole.
    (zone,) = made.zones
    assert isinstance(zone, TaskTable)
    tasks = as_array(zone.tasks)
    heads = np.tile([0, MODEL.num_heads], (len(tasks), 1))
    regions = np.column_stack((tasks[:, 1:4], heads, tasks[:, 4:6], heads // (MODEL.num_heads // MODEL.num_kv_heads)))
    return COST.attend_s(regions, tasks[:, 0], made.num_ranks).tolist()


def test_batches_that_are_hard_to_even_out_are_even() -> None:
    # Work is as even in the kernels seconds tiles computed whole.
    # Half of the tokens are in documents that end just inside their second tile: a fifth of the
    # pairs and half of the time.
    lengths = [137] * (8 * 4096 // 137) + [640] * (8 * 4096 // 640)
    seconds = _kernel_s(make_planner("distca", CLUSTER, MODEL, tolerance=0.02)(lengths))
    assert max(seconds) <= 1.15 * sum(seconds) / len(seconds)
    # Light work is shed by any server before the limit gives way.
    # 262,144 tokens of code. In the end nobody has room for a block of the long sequence, and the
    # two servers with most room have only blocks that no other one has room for.
    lengths = [1369, 1425, 1981, 1945, 7850, 2906, 2260, 6228, 1761, 139378, 47015, 15674, 32352]
    made = make_planner("distca", Cluster(64, 8), GROUPED, tolerance=0.02)(lengths)
    assert plan_statistics(made, MODEL)["imbalance"]["attention"] <= 1.02
    # Room is not made back and forth.
    # 2,048 short sequences and blocks of the longest ones that take half of a server's time: room
    # for one is made in several moves.
    weights = [random.Random(seq).lognormvariate(0, 1.3) for seq in range(2048)]
    lengths = [max(1, int(2**21 * weight / sum(weights))) for weight in weights]
    made = make_planner("distca", Cluster(512, 8), GROUPED, tolerance=0.02)(lengths)
    # padding is an eighth of the time, so that seconds decide
    assert plan_statistics(made, MODEL)["imbalance"]["attention"] <= 1.07
    # Tolerance zero is as even as whole blocks come.
    made = make_planner("distca", CLUSTER, MODEL, tolerance=0.0)(BATCHES[0])
    # a block at the end of the long sequence is 6 % of a rank's work
    assert plan_statistics(made, MODEL)["imbalance"]["attention"] < 1.03


def _sent_away(zone: object) -> list[int]:
    # Outputs that come back to the owner to each rank: of its queries that another one attends.
    assert isinstance(zone, TaskTable)
    away = [0] * CLUSTER.num_ranks
    for owner, seq, start, stop in zone.fragments:
        for server, s, q0, q1, _, _ in zone.tasks:
            if s == seq and server != owner:
                away[owner] += max(0, min(stop, q1) - max(start, q0))
    return away


def test_less_is_received_the_more_the_tolerance_allows_and_migrations_not_worth_it_are_left() -> None:
    each = [figures(BATCHES[1], tolerance=tolerance) for tolerance in (0.02, 0.1, 0.3, 1.0)]
    received = [sum(figures["kv_tokens_received_per_rank"]) for figures in each]
    assert all(later <= 1.01 * earlier for earlier, later in pairwise(received))  # greedily: hardly ever more
    assert received[-1] < 0.8 * received[0]
    # Migrations that are not worth their bytes are left.
    everything, nothing = (
        figures(BATCHES[1], empty_light_servers=False, least_score=score)["query_tokens_received_per_rank"]
        for score in (0.0, 1e9)
    )
    assert nothing == [0] * 16
    assert sum(everything) > 0


def test_a_server_takes_of_the_sequence_whose_keys_it_has_and_shares_what_caps_leave_no_room_for() -> None:
    # Ranks 1 and 2 have equally much too much; rank 0 has the first keys of rank 2's sequence and
    # rank 3 those of rank 1's.
    owned = np.array([(0, 1, 0, 1024), (1, 0, 1024, 4096), (2, 1, 1024, 4096), (3, 0, 0, 1024)], dtype=np.int64)
    alone = DistcaOptions(tolerance=0.1, empty_light_servers=False)
    tasks = schedule(owned, [4096, 4096], FOUR, COST, alone).tolist()
    assert {rank for rank, seq, q0, _, _, _ in tasks if seq == 0 and q0 >= 1024} == {1, 3}
    assert {rank for rank, seq, q0, _, _, _ in tasks if seq == 1 and q0 >= 1024} == {2, 0}
    # What a rank gives away for a cap is shared where nobody has room for all.
    # Rank 1 has no room for 3,000 keys, and rank 0 none for those of rank 1. Ranks 2 and 3, which
    # hold nothing, have room for all keys, and for half of rank 1's 1,000 queries of sequence 0.
    owned = np.array([(0, 0, 0, 3000), (0, 2, 0, 500), (1, 0, 3000, 4000), (1, 1, 0, 900)], dtype=np.int64)
    scheduling = DistcaOptions(tolerance=100.0, max_kv_tokens=4000, max_received_tokens=4500)
    tasks = schedule(owned, [4000, 900, 500], FOUR, COST, scheduling)
    given = tasks[(tasks[:, 1] == 0) & (tasks[:, 2] >= 3000)]
    assert sorted(given[:, 0].tolist()) == [2, 3]


def test_ranks_of_a_pool_hold_no_tokens_and_serve_and_are_one_a_node_unless_said_otherwise() -> None:
    made = make_planner("distca", CLUSTER, MODEL, servers="pool", pool_ranks=4)(BATCHES[1])
    held = [len(layout(made, rank)) for rank in range(16)]
    assert [rank for rank, fragments in enumerate(held) if not fragments] == [3, 7, 11, 15]
    report = plan_statistics(made, MODEL)
    assert min(report["attention_pairs_per_rank"]) > 0
    assert report["imbalance"]["attention"] <= 1.1
    verify(make_planner("distca", Cluster(3, 3), MODEL, servers="pool", block=8)([100, 41]))
    # The pool is one rank a node unless said otherwise and cannot be all ranks.
    made = make_planner("distca", CLUSTER, MODEL, servers="pool")(BATCHES[1])
    assert [rank for rank in range(16) if not len(layout(made, rank))] == [7, 15]
    with pytest.raises(ConfigError, match=r"pool_ranks 16 of 16 ranks.*1 \.\. 15"):
        make_planner("distca", CLUSTER, MODEL, servers="pool", pool_ranks=16)([10])
    with pytest.raises(ConfigError, match="pool_ranks 2 with servers in_place"):
        make_planner("distca", CLUSTER, MODEL, pool_ranks=2)([10])


def test_caps_keep_migrations_within_what_a_server_may_receive_and_hold() -> None:
    def most(report: dict[str, Any]) -> int:
        keys, queries = (report[f"{what}_tokens_received_per_rank"] for what in ("kv", "query"))
        return max(map(sum, zip(keys, queries, strict=True)))

    free = figures(BATCHES[2])
    cap = most(free) - 2000
    assert most(figures(BATCHES[2], max_received_tokens=cap)) <= cap
    cap = max(free["kv_tokens_received_per_rank"]) + 4096 - 2000
    assert max(figures(BATCHES[2], max_kv_tokens=cap)["kv_tokens_received_per_rank"]) + 4096 <= cap
    # A cap that a ranks own queries pass is an error that says what would do.
    said = r"rank \d+ would have \d+ tokens .* max_received_tokens is 100, .*Set max_received_tokens to 61440"
    with pytest.raises(InfeasibleError, match=said):
        make_planner("distca", CLUSTER, MODEL, max_received_tokens=100)(BATCHES[0])
    make_planner("distca", CLUSTER, MODEL, max_received_tokens=61440)(BATCHES[0])
    # Caps that nobody can keep are told at once.
    lengths = [random.Random(seq).randint(1000, 3000) for seq in range(900)] + [200_000] * 2
    with pytest.raises(InfeasibleError, match="max_received_tokens is 150000"):
        make_planner("distca", Cluster(512, 8), MODEL, max_received_tokens=150_000)(lengths)


@pytest.mark.parametrize("shards", ["plain", "head_tail"])
def test_a_rank_that_a_cap_leaves_no_room_for_its_own_queries_gives_them_away(shards: str) -> None:
    # Rank 0 has the first 2,000 tokens of sequence 0, rank 1 the other 1,000 and all of sequence 1:
    # 4,000 keys.
    made = make_planner("distca", Cluster(2, 2), MODEL, tolerance=1.0, max_kv_tokens=3500, shards=shards)([3000, 1000])
    report = plan_statistics(made, MODEL)
    assert report["kv_tokens_received_per_rank"] == [1000, 0]
    verify(make_planner("distca", Cluster(2, 2), Model(2, 2, 8), max_kv_tokens=35, block=4, shards=shards)([30, 10]))
    # An empty rank takes what needs all 8,706 keys of sequence 0: rank 2, where it ends, holds
    # 6,760 tokens and nobody else needs so many.
    limits: dict[str, Any] = {"servers": "pool", "pool_ranks": 2, "max_kv_tokens": 13047, "shards": shards}
    made = make_planner("distca", Cluster(4, 4), MODEL, **limits)([8706, 89, 4726])
    own, received = (plan_statistics(made, MODEL)[f"{what}_per_rank"] for what in ("tokens", "kv_tokens_received"))
    assert all(tokens + keys <= 13047 for tokens, keys in zip(own, received, strict=True))


# Cases in which a surplus is so small that it is lost in the rounding of sums of seconds.
SMALL_BLOCKS = [
    (Cluster(4, 2), Model(3, 3, 4, hidden_size=32, ffn_size=64), [12], 1),
    (Cluster(3, 3), Model(6, 3, 4, hidden_size=32, ffn_size=64), [40], 2),
    (Cluster(4, 4), Model(3, 3, 4, hidden_size=32, ffn_size=64), [46], 4),
    (Cluster(3, 1), Model(1, 1, 4, hidden_size=32, ffn_size=64), [15, 36, 4, 1, 3, 3], 2),
]


@pytest.mark.parametrize(("cluster", "model", "lengths", "block"), SMALL_BLOCKS)
def test_no_task_is_empty_where_a_surplus_is_lost_in_rounding(
    cluster: Cluster, model: Model, lengths: list[int], block: int
) -> None:
    verify(make_planner("distca", cluster, model, block=block, tolerance=0)(lengths))


@pytest.mark.filterwarnings("error")
def test_a_part_that_moves_for_no_bytes_is_no_division_by_zero() -> None:
    # So light that it rounds to no query, where all its keys are at hand.
    cluster, model = load_cluster("h200").build(num_ranks=32, ranks_per_node=8), load_model("llama3-8b")
    plan = make_planner("distca", cluster, model, tolerance=0.01, least_score=10.0)([22, 48, 45, 12, 5])
    assert plan.num_tokens == 132


# distca moves few bytes: what a shard costs, which keys are free, who is joined. Layouts by hand,
# brute force over blocks and tokens.

# Layouts are whole blocks, and whole tiles of the kernel.
BLOCK = 128
LONG = 128 * BLOCK
PAIR_S = 1e-9
# Of `MODEL`: a query with its output; a key and its value.
QUERY_BYTES, KEY_BYTES = 2 * 64, 128

Owner = tuple[int, int, int, int]
Span = tuple[int, int]


def planned(owned: list[Owner], num_ranks: int, model: Model = flat_cost.MODEL, **options: object) -> MicrobatchPlan:
    # The plan of tokens at the owner at (rank, seq, start, stop), each pair as dear as any other.
    lengths = [0] * (1 + max(seq for _, seq, _, _ in owned))
    for _, seq, _, stop in owned:
        lengths[seq] = max(lengths[seq], stop)
    how = DistcaOptions(block=BLOCK, **{"tolerance": 0.1, **options})  # pyright: ignore[reportArgumentType]
    rows = as_rows(np.array(sorted(owned), dtype=np.int64))
    return plan_owned(tuple(lengths), rows, Cluster(num_ranks, num_ranks), model, FlatCost(model, pair=PAIR_S), how)


def attended_spans(plan: MicrobatchPlan, rank: int, seq: int) -> list[Span]:
    # Queries of a sequence that a rank attends.
    (zone,) = plan.zones
    assert isinstance(zone, TaskTable)
    return [(q0, q1) for server, s, q0, q1, _, _ in zone.tasks if (server, s) == (rank, seq)]


def cheapest_cut(item: Span, num_pairs: float, query_bytes: float, at_hand: int = 0) -> Span:
    # Of all runs of an item's blocks that have so many pairs or more, one of the fewest bytes.
    edges = range(item[0], item[1] + 1, BLOCK)
    enough = [cut for cut in combinations(edges, 2) if pairs(*cut) >= num_pairs]
    return min(enough, key=lambda cut: cut_bytes(cut, query_bytes, at_hand))


def cut_bytes(cut: Span, query_bytes: float, at_hand: int = 0) -> float:
    # Bytes that a server receives for a run of queries, their outputs' way back included in
    # `query_bytes`.
    return (cut[1] - cut[0]) * query_bytes + max(0, cut[1] - at_hand) * KEY_BYTES


def pairs(start: int, stop: int) -> float:
    return (stop * (stop + 1) - start * (start + 1)) / 2


# ---- Closed forms
@given(st.integers(0, 400), st.integers(1, 60), st.sampled_from([(1.0, 1.0), (8.0, 1.0), (1.0, 8.0)]))
def test_the_closed_form_of_head_tail_pairs_has_its_keys_and_is_the_best_of_all_pairs(
    start: int, nano_batch: int, size: tuple[float, float]
) -> None:
    stop = start + 2 * nano_batch
    items = parts._PairItems(nano_batch)
    for row in range(nano_batch):
        items.set(row, (stop - nano_batch, stop), seconds=1.0)
    queries, key_stop = items.cheapest(np.arange(1, nano_batch + 1) / nano_batch)
    for moved, got, keys in zip(range(1, nano_batch + 1), queries.tolist(), key_stop.tolist(), strict=True):
        # The tail's keys.
        cuts = [2 * moved * size[0] + (stop - outer) * size[1] for outer in range(nano_batch - moved + 1)]
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
def made_servers(owned: list[Owner], num_ranks: int, shards: str, most_held: float = inf) -> Servers:
    # State of a scheduling that has not begun.
    seconds = parts.Seconds.of(FlatCost(flat_cost.MODEL, pair=PAIR_S), max(stop for _, _, _, stop in owned))
    edges = parts.Edges.of(np.array(owned, dtype=np.int64), BLOCK, seconds)
    kind = parts.Plain if shards == "plain" else parts.HeadTail
    return Servers(edges, kind(edges, parts.TaskSizes(QUERY_BYTES, KEY_BYTES)), num_ranks, most_held)


def keys_of(spans: list[Span]) -> set[int]:
    # Keys by number of their block, which is exact: everything here is whole blocks.
    return {block for start, stop in spans for block in range(start // BLOCK, stop // BLOCK)}


def held(servers: Servers, server: int, seq: int) -> set[int]:
    return keys_of([(start, stop) for rank, s, start, stop in servers.owned if (rank, s) == (server, seq)])


def needed(servers: Servers, server: int, seq: int, but: Piece | None = None) -> set[int]:
    # Keys of a sequence that the pieces of a server see, but for one piece.
    own = [piece for piece in servers.pieces[server] if servers.seq(piece) == seq and piece != but]
    return keys_of([(0, servers.shards.key_stop(piece)) for piece in own])


def assert_books_are_right(servers: Servers, num_seqs: int) -> None:
    # Compare the keys missing, freed, at hand and received of every server and piece with sets of
    # keys.
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
                assert servers.at_hand(server, seq, key_stops).tolist() == free
            else:
                assert not any(free)
            queries = [servers.shards.num_queries((piece[0], piece[1], each)) for each in range(stop, piece[2] + 1)]
            costs = servers.num_bytes(piece, (low, stop, np.zeros(len(low))), server)
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
    servers = made_servers(sorted(owned), num_ranks, shards, most_held=1e9)
    assert_books_are_right(servers, len(lengths))
    for _ in range(25):
        source = int(rng.choice([server for server, pieces in enumerate(servers.pieces) if pieces]))
        piece = servers.pieces[source][int(rng.integers(len(servers.pieces[source])))]
        high = int(rng.integers(max(servers.shards.first_stop(piece), piece[1] + 1), piece[2] + 1))
        low = int(rng.integers(piece[1], high))
        servers.move(piece, low, high, source, int((source + rng.integers(1, num_ranks)) % num_ranks))
        assert_books_are_right(servers, len(lengths))


def test_a_cut_reaches_as_far_as_the_keys_at_hand_or_at_home() -> None:
    # Rank 1 needs all keys of rank 0 for its own queries: then the queries with most keys are the
    # cheapest part, not those further in.
    owned, own = (0, 8192), (8192, 9216)
    plan = planned([(0, 0, *owned), (1, 0, *own)], 2)
    report = plan_statistics(plan, flat_cost.MODEL)
    assert report["kv_tokens_received_per_rank"] == [0, 8192]
    start, stop = min(attended_spans(plan, 1, 0))
    cut = (start, min(stop, owned[1]))
    assert cut[1] - cut[0] == report["query_tokens_received_per_rank"][1] > 0
    best = cheapest_cut(owned, pairs(*cut), QUERY_BYTES, own[1])
    assert cut_bytes(cut, QUERY_BYTES, own[1]) <= 1.01 * cut_bytes(best, QUERY_BYTES, own[1])
    # Keys at home count for a server that has given their queries away.
    # Rank 0 is emptied into rank 1, and then takes of the sequence whose first keys it still holds;
    # of the other one it has none.
    first = LONG * 5 // 16
    plan = planned([(0, 1, 0, first), (1, 2, 0, first // 2), (2, 0, 0, LONG), (2, 1, first, LONG)], 16, tolerance=0.03)
    start, stop = attended_spans(plan, 1, 1)[0]
    assert start == 0, "rank 0 was to be emptied"
    assert stop >= first
    taken = [sum(q1 - q0 for q0, q1 in attended_spans(plan, 0, seq)) for seq in (0, 1)]
    assert taken[1] > taken[0]
    # A server is not emptied into one that lacks the keys which it holds.
    # Rank 2 holds half of the keys that its queries see, and would save the other nano-batch; rank
    # 1 would need all of them.
    light: list[Owner] = [(0, 0, 0, LONG), (0, 1, 0, 512), (1, 2, 0, 1024), (2, 1, 512, 1024)]
    joined, apart = (planned(light, 16, empty_light_servers=each) for each in (True, False))
    assert attended_spans(joined, 2, 1)[-1][1] == 1024
    assert attended_spans(joined, 1, 1) == []
    reports = [plan_statistics(plan, flat_cost.MODEL) for plan in (joined, apart)]
    total = [sum(report["bytes_received_per_rank"]["total"]) for report in reports]
    assert total[0] <= total[1]


# ---- Bytes that count
def test_a_query_costs_the_bytes_of_its_output_too() -> None:
    # Eight query heads to a key head: a part of few queries lies far out.
    # Were outputs free, the cheapest one would lie further in.
    model = Model(num_heads=16, num_kv_heads=2, head_dim=16)  # keys of `KEY_BYTES`
    query_bytes, item = 2 * 512, (0, LONG)
    plan = planned([(0, 0, *item), (1, 1, 0, 102 * BLOCK)], 2, model, tolerance=0.02)
    (cut,) = attended_spans(plan, 1, 0)
    best, without = (cheapest_cut(item, pairs(*cut), size) for size in (query_bytes, query_bytes / 2))
    assert cut_bytes(without, query_bytes) > 1.05 * cut_bytes(best, query_bytes), "it makes no difference here"
    assert cut_bytes(cut, query_bytes) <= 1.01 * cut_bytes(best, query_bytes)


def _one_long_and_28(short: int, *, empty_light_servers: bool = True) -> tuple[MicrobatchPlan, int]:
    # A sequence on 4 servers and a short one on each of 28.
    # The plan, and how many short ones the busiest of these servers attends.
    num_long, num_ranks = 4, 32
    owned: list[Owner] = [(rank, 0, rank * LONG // num_long, (rank + 1) * LONG // num_long) for rank in range(num_long)]
    owned += [(num_long + seq, 1 + seq, 0, short) for seq in range(num_ranks - num_long)]
    plan = planned(owned, num_ranks, empty_light_servers=empty_light_servers)
    both = [
        sum(len(attended_spans(plan, rank, seq)) for _, seq, _, _ in owned if seq)
        for rank in range(num_long, num_ranks)
    ]
    return plan, max(both)


def test_light_servers_are_joined_where_that_saves_keys_and_fills_them() -> None:
    # Light servers that together fill none stay apart.
    # Joined, two would have four fifths of the mean, and need the long sequence's keys for what is
    # left.
    assert _one_long_and_28(18 * BLOCK)[1] == 1
    # Light servers are joined where that saves keys.
    # Half full ones: two of these joined are full, and take nothing of the long one, whose keys one
    # fills.
    (joined, most), (apart, _) = (_one_long_and_28(22 * BLOCK, empty_light_servers=each) for each in (True, False))
    assert most == 2
    reports = [plan_statistics(plan, flat_cost.MODEL) for plan in (joined, apart)]
    keys = [sum(report["kv_tokens_received_per_rank"]) for report in reports]
    total = [sum(report["bytes_received_per_rank"]["total"]) for report in reports]
    assert keys[0] < 0.8 * keys[1]
    assert total[0] < 0.9 * total[1]


# ---- Seconds, not pairs
def test_short_sequences_count_as_long_as_they_take() -> None:
    # As many pairs on either rank, but one of a run of a single tile takes 1.7 times as long as one
    # of a long run.
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
    # Of two ranks: of the queries (rank, seq, start, stop), those up to `stop` less those up to
    # `start`.
    upto = {at: cost.attention_s(pairs(0, at), at) if at else 0.0 for _, _, *span in spans for at in span}
    rank = [rank for rank, *_ in spans]
    return np.bincount(rank, [upto[stop] - upto[start] for _, _, start, stop in spans], 2)
