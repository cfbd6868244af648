"""distca: the closed forms against all block cuts, the linear layout, the scheduler for layouts
that are given, balance and caps.
"""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_balance import Batch, Cluster, Model, make_planner, verify
from megatron_balance.analysis.statistics import plan_statistics
from megatron_balance.compile.pipeline import layout
from megatron_balance.config import load_cluster, load_model
from megatron_balance.cost.analytic import AnalyticCost
from megatron_balance.errors import ConfigError, InfeasibleError
from megatron_balance.ir.arrays import Ints, as_array
from megatron_balance.ir.plan import MicrobatchPlan, TaskTable
from megatron_balance.planners.distca import DistcaOptions, linear_owned, plan, schedule
from megatron_balance.planners.distca.servers import PlainItems, TaskSizes

MODEL, GROUPED = Model(num_heads=32, num_kv_heads=32, head_dim=128), Model(num_heads=32, num_kv_heads=8, head_dim=128)
CLUSTER = Cluster(16, 8)
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


def plain(
    start: float, stop: float, share: float, resident: float, size_q: float, size_kv: float
) -> tuple[float, float]:
    """The best plain shard of one item."""
    items = PlainItems(3, TaskSizes(size_q, size_kv))
    items.set(1, (start, stop), seconds=1.0)
    queries, key_stop = items.cheapest(np.full(3, share), np.full(3, resident))
    return float(queries[1]), float(key_stop[1])


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


def test_the_best_plain_shard_moves_from_the_head_of_an_item_to_its_end_as_queries_grow_dearer() -> None:
    found = [plain(0, 1000, 0.25, 0, size_q, 1.0)[1] for size_q in (1e-9, 1.0, 1e9)]
    assert found == pytest.approx([500, 577.35, 1000], rel=1e-3)


def test_keys_at_hand_are_free_so_that_a_shard_reaches_as_far_as_they_do() -> None:
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
    assert [(seq, token) for _, seq, start, stop in owned.tolist() for token in (start, stop - 1)] == sorted(
        (seq, token) for _, seq, start, stop in owned.tolist() for token in (start, stop - 1)
    )


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
    tasks = schedule(owned, lengths, num_ranks, COST, how)
    for seq, spans in enumerate(attended(tasks, lengths)):
        assert [0, *(b for _, b in spans)] == [*(a for a, _ in spans), lengths[seq]]
    assert (tasks[:, 4] == 0).all()
    assert (tasks[:, 5] == tasks[:, 3]).all()
    starts = {(seq, start): stop for _, seq, start, stop in rows}
    inside = {(seq, edge) for (seq, start), stop in starts.items() for edge in (*range(start, stop, block), stop)}
    if shards == "head_tail":  # tails are cut in blocks of the same edges
        inside |= {(seq, edge) for (seq, start), stop in starts.items() for edge in range(start, stop, block)}
    assert {(seq, edge) for _, seq, q0, q1, _, _ in tasks.tolist() for edge in (q0, q1)} <= inside
    assert (tasks == schedule(owned, lengths, num_ranks, COST, how)).all()


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


def _kernel_s(made: MicrobatchPlan) -> list[float]:
    """Seconds of the cost model's kernel for each rank's tasks, tiles computed whole."""
    (zone,) = made.zones
    assert isinstance(zone, TaskTable)
    tasks = as_array(zone.tasks)
    heads = np.tile([0, MODEL.num_heads], (len(tasks), 1))
    regions = np.column_stack((tasks[:, 1:4], heads, tasks[:, 4:6], heads // (MODEL.num_heads // MODEL.num_kv_heads)))
    return COST.attend_s(regions, tasks[:, 0], made.num_ranks).tolist()


def test_work_is_as_even_in_the_kernels_seconds_tiles_computed_whole() -> None:
    # Half of the tokens are in documents that end just inside their second tile: a fifth of the
    # pairs and half of the time.
    lengths = [137] * (8 * 4096 // 137) + [640] * (8 * 4096 // 640)
    seconds = _kernel_s(make_planner("distca", CLUSTER, MODEL, tolerance=0.02)(lengths))
    assert max(seconds) <= 1.15 * sum(seconds) / len(seconds)


def _sent_away(zone: object) -> list[int]:
    """Outputs that come back to the owner to each rank: of its queries that another one attends."""
    assert isinstance(zone, TaskTable)
    away = [0] * CLUSTER.num_ranks
    for owner, seq, start, stop in zone.fragments:
        for server, s, q0, q1, _, _ in zone.tasks:
            if s == seq and server != owner:
                away[owner] += max(0, min(stop, q1) - max(start, q0))
    return away


def test_light_work_is_shed_by_any_server_before_the_limit_gives_way() -> None:
    # 262,144 tokens of code. In the end nobody has room for a block of the long sequence, and the
    # two servers with most room have only blocks that no other one has room for.
    lengths = [1369, 1425, 1981, 1945, 7850, 2906, 2260, 6228, 1761, 139378, 47015, 15674, 32352]
    made = make_planner("distca", Cluster(64, 8), GROUPED, tolerance=0.02)(lengths)
    assert plan_statistics(made, MODEL)["imbalance"]["attention"] <= 1.02


def test_room_is_not_made_back_and_forth() -> None:
    # 2,048 short sequences and blocks of the longest ones that take half of a server's time: room
    # for one is made in several moves.
    weights = [random.Random(seq).lognormvariate(0, 1.3) for seq in range(2048)]
    lengths = [max(1, int(2**21 * weight / sum(weights))) for weight in weights]
    made = make_planner("distca", Cluster(512, 8), GROUPED, tolerance=0.02)(lengths)
    # padding is an eighth of the time, so that seconds decide
    assert plan_statistics(made, MODEL)["imbalance"]["attention"] <= 1.07


def test_tolerance_zero_is_as_even_as_whole_blocks_come() -> None:
    made = make_planner("distca", CLUSTER, MODEL, tolerance=0.0)(BATCHES[0])
    # a block at the end of the long sequence is 6 % of a rank's work
    assert plan_statistics(made, MODEL)["imbalance"]["attention"] < 1.03


def test_less_is_received_the_more_the_tolerance_allows_and_the_more_is_known_to_be_at_hand() -> None:
    received = [
        sum(figures(BATCHES[1], tolerance=tolerance)["kv_tokens_received_per_rank"])
        for tolerance in (0.02, 0.1, 0.3, 1.0)
    ]
    assert all(later <= 1.01 * earlier for earlier, later in pairwise(received))  # greedily: hardly ever more
    assert received[-1] < 0.8 * received[0]


def test_a_server_takes_of_the_sequence_whose_keys_it_has() -> None:
    # Ranks 1 and 2 have equally much too much; rank 0 has the first keys of rank 2's sequence and
    # rank 3 those of rank 1's.
    owned = np.array([(0, 1, 0, 1024), (1, 0, 1024, 4096), (2, 1, 1024, 4096), (3, 0, 0, 1024)], dtype=np.int64)
    tasks = schedule(owned, [4096, 4096], 4, COST, DistcaOptions(tolerance=0.1, empty_light_servers=False)).tolist()
    assert {rank for rank, seq, q0, _, _, _ in tasks if seq == 0 and q0 >= 1024} == {1, 3}
    assert {rank for rank, seq, q0, _, _, _ in tasks if seq == 1 and q0 >= 1024} == {2, 0}


def test_ranks_of_a_pool_hold_no_tokens_and_serve() -> None:
    made = make_planner("distca", CLUSTER, MODEL, servers="pool", pool_ranks=4)(BATCHES[1])
    held = [len(layout(made, rank)) for rank in range(16)]
    assert [rank for rank, fragments in enumerate(held) if not fragments] == [3, 7, 11, 15]
    report = plan_statistics(made, MODEL)
    assert min(report["attention_pairs_per_rank"]) > 0
    assert report["imbalance"]["attention"] <= 1.1
    verify(make_planner("distca", Cluster(3, 3), MODEL, servers="pool", block=8)([100, 41]))


def test_the_pool_is_one_rank_a_node_unless_said_otherwise_and_cannot_be_all_ranks() -> None:
    made = make_planner("distca", CLUSTER, MODEL, servers="pool")(BATCHES[1])
    assert [rank for rank in range(16) if not len(layout(made, rank))] == [7, 15]
    with pytest.raises(ConfigError, match=r"pool_ranks 16 of 16 ranks.*1 \.\. 15"):
        make_planner("distca", CLUSTER, MODEL, servers="pool", pool_ranks=16)([10])
    with pytest.raises(ConfigError, match="pool_ranks 2 with servers in_place"):
        make_planner("distca", CLUSTER, MODEL, pool_ranks=2)([10])


def test_caps_keep_migrations_within_what_a_server_may_receive_and_hold() -> None:
    def most(report: dict[str, Any]) -> int:
        return max(
            map(sum, zip(*(report[f"{what}_tokens_received_per_rank"] for what in ("kv", "query")), strict=True))
        )

    free = figures(BATCHES[2])
    cap = most(free) - 2000
    assert most(figures(BATCHES[2], max_received_tokens=cap)) <= cap
    cap = max(free["kv_tokens_received_per_rank"]) + 4096 - 2000
    assert max(figures(BATCHES[2], max_kv_tokens=cap)["kv_tokens_received_per_rank"]) + 4096 <= cap


def test_a_cap_that_a_ranks_own_queries_pass_is_an_error_that_says_what_would_do() -> None:
    with pytest.raises(
        InfeasibleError,
        match=r"rank \d+ would have \d+ tokens .* max_received_tokens is 100, .*Set max_received_tokens to 61440",
    ):
        make_planner("distca", CLUSTER, MODEL, max_received_tokens=100)(BATCHES[0])
    make_planner("distca", CLUSTER, MODEL, max_received_tokens=61440)(BATCHES[0])


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
    made = make_planner(
        "distca", Cluster(4, 4), MODEL, servers="pool", pool_ranks=2, max_kv_tokens=13047, shards=shards
    )([8706, 89, 4726])
    own, received = (plan_statistics(made, MODEL)[f"{what}_per_rank"] for what in ("tokens", "kv_tokens_received"))
    assert all(tokens + keys <= 13047 for tokens, keys in zip(own, received, strict=True))


def test_what_a_rank_gives_away_for_a_cap_is_shared_where_nobody_has_room_for_all() -> None:
    # Rank 1 has no room for 3,000 keys, and rank 0 none for those of rank 1. Ranks 2 and 3, which
    # hold nothing, have room for all keys, and for half of rank 1's 1,000 queries of sequence 0.
    owned = np.array([(0, 0, 0, 3000), (0, 2, 0, 500), (1, 0, 3000, 4000), (1, 1, 0, 900)], dtype=np.int64)
    scheduling = DistcaOptions(tolerance=100.0, max_kv_tokens=4000, max_received_tokens=4500)
    tasks = schedule(owned, [4000, 900, 500], 4, COST, scheduling)
    given = tasks[(tasks[:, 1] == 0) & (tasks[:, 2] >= 3000)]
    assert sorted(given[:, 0].tolist()) == [2, 3]


def test_caps_that_nobody_can_keep_are_told_at_once() -> None:
    lengths = [random.Random(seq).randint(1000, 3000) for seq in range(900)] + [200_000] * 2
    with pytest.raises(InfeasibleError, match="max_received_tokens is 150000"):
        make_planner("distca", Cluster(512, 8), MODEL, max_received_tokens=150_000)(lengths)


def test_migrations_that_are_not_worth_their_bytes_are_left() -> None:
    everything, nothing = (
        figures(BATCHES[1], empty_light_servers=False, least_score=score)["query_tokens_received_per_rank"]
        for score in (0.0, 1e9)
    )
    assert nothing == [0] * 16
    assert sum(everything) > 0


@pytest.mark.parametrize("option", ["tolerance", "block", "least_score", "max_kv_tokens", "max_received_tokens"])
def test_an_option_out_of_range_is_an_error(option: str) -> None:
    with pytest.raises(ConfigError, match=f"distca: {option} -1: must be at least"):
        plan(Batch((10,)), CLUSTER, MODEL, COST, replace(DistcaOptions(), **{option: -1}))


SMALL_BLOCKS = [
    (Cluster(4, 2), Model(3, 3, 4, hidden_size=32, ffn_size=64), [12], 1),
    (Cluster(3, 3), Model(6, 3, 4, hidden_size=32, ffn_size=64), [40], 2),
    (Cluster(4, 4), Model(3, 3, 4, hidden_size=32, ffn_size=64), [46], 4),
    (Cluster(3, 1), Model(1, 1, 4, hidden_size=32, ffn_size=64), [15, 36, 4, 1, 3, 3], 2),
]
"""Cases in which a surplus is so small that it is lost in the rounding of sums of seconds."""


@pytest.mark.parametrize(("cluster", "model", "lengths", "block"), SMALL_BLOCKS)
def test_no_task_is_empty_where_a_surplus_is_lost_in_rounding(
    cluster: Cluster, model: Model, lengths: list[int], block: int
) -> None:
    verify(make_planner("distca", cluster, model, block=block, tolerance=0)(lengths))


@pytest.mark.filterwarnings("error")
def test_a_part_that_moves_for_no_bytes_is_no_division_by_zero() -> None:
    """So light that it rounds to no query, where all its keys are at hand."""
    cluster, model = load_cluster("h200").build(num_ranks=32, ranks_per_node=8), load_model("llama3-8b")
    plan = make_planner("distca", cluster, model, tolerance=0.01, least_score=10.0)([22, 48, 45, 12, 5])
    assert plan.num_tokens == 132
