"""The remapping and the routing layer as they are laid around a planner's decision."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_balance.analysis.statistics import tokens_per_rank
from megatron_balance.compile.pipeline import Projector, expand, layout
from megatron_balance.compile.proof.meaning import verify
from megatron_balance.cost.analytic import AnalyticCost
from megatron_balance.errors import ConfigError
from megatron_balance.ir.arrays import as_array
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.columns import Rows
from megatron_balance.ir.model import Model
from megatron_balance.ir.plan import REMAP, MicrobatchPlan, TaskTable, Zone
from megatron_balance.planning.layers import Layers, fewest_routed_tokens, remap_saves_s, with_layers
from tests.support import by_hand

MODEL = Model(2, 2, 64, hidden_size=128, ffn_size=256)
TWO_NODES = Cluster(8, 4, intra_bytes_per_s=400e9, nic_bytes_per_s=25e9)


def plan(lengths: tuple[int, ...], *zones: Zone | TaskTable, num_ranks: int = 8, per_node: int = 4) -> MicrobatchPlan:
    return by_hand.plan(lengths, num_ranks, *zones, ranks_per_node=per_node, heads=(2, 2))


def laid(bare: MicrobatchPlan, cluster: Cluster, layers: Layers) -> MicrobatchPlan:
    return with_layers(bare, cluster, AnalyticCost(cluster, MODEL), layers)


LONG = plan((64_000,), by_hand.ring(range(8), 0))
UNEVEN = plan((4000, 900, 100), by_hand.local(0, 0), by_hand.local(1, 1), by_hand.local(5, 2))


def counts(remapped: MicrobatchPlan) -> list[int]:
    return [
        int((rows[:, 2] - rows[:, 1]).sum()) for rows in (layout(remapped, rank) for rank in range(remapped.num_ranks))
    ]


def test_no_layers_leave_a_plan_as_it_is() -> None:
    assert laid(UNEVEN, TWO_NODES, Layers()) == UNEVEN


def test_a_remap_gives_every_rank_as_many_tokens_to_one() -> None:
    remapped = laid(UNEVEN, TWO_NODES, Layers(remap=True))
    assert counts(remapped) == [625] * 8
    assert tokens_per_rank(remapped).tolist() == [4000, 900, 0, 0, 0, 100, 0, 0]
    assert Projector(remapped).attention_layout(0).tolist() == [[0, 0, 2000], [0, 2000, 4000]]
    verify(expand(remapped, "keep"))


@pytest.mark.parametrize("align", [2, 4, 8])
def test_a_remap_aligns_token_counts_for_tensor_parallel_ranks(align: int) -> None:
    odd = replace(UNEVEN, lengths=(4003, 900, 101))
    found = counts(laid(odd, TWO_NODES, Layers(remap=True, align=align)))
    assert sum(found) == 5004
    assert max(found) - min(found) <= align
    assert sum(count % align != 0 for count in found) <= 1


def test_tokens_stay_in_their_node_as_far_as_they_can() -> None:
    moves = as_array(laid(UNEVEN, TWO_NODES, Layers(remap=True)).moves)
    across = moves[moves[:, 0] // 4 != moves[:, 1] // 4]
    assert int(moves[:, 2].sum()) == (4000 - 625) + (900 - 625)
    assert int(across[:, 2].sum()) == 4 * 625 - 100  # what the second node lacks


def test_a_plan_that_is_even_moves_nothing() -> None:
    assert not laid(LONG, TWO_NODES, Layers(remap=True)).moves


def test_a_remap_is_made_where_it_saves_more_than_it_costs() -> None:
    pays = Layers(remap=True, remap_when="pays")
    model = Model(32, 32, 128)
    fast, slow = (AnalyticCost(replace(TWO_NODES, nic_bytes_per_s=rate), model) for rate in (50e9, 1e8))
    assert with_layers(UNEVEN, fast.cluster, fast, pays).moves
    assert not with_layers(UNEVEN, slow.cluster, slow, pays).moves
    cost = slow
    saved = cost.linear_s(4000) - cost.linear_s(625)
    per_token = cost.kv_bytes(1) + 2 * cost.query_bytes(1)
    crossing = 4900 - 2500
    moved = cost.intra_node_s(3375 * per_token, 2) + cost.inter_node_s(crossing * per_token, 2, 4)
    assert remap_saves_s(tokens_per_rank(UNEVEN), slow.cluster, cost) == pytest.approx(saved - moved)


def test_an_empty_batch_has_no_remap_and_no_routing() -> None:
    assert laid(plan(()), TWO_NODES, Layers("always", remap=True)) == plan(())


def test_a_rank_count_of_an_alignment_is_checked() -> None:
    with pytest.raises(ConfigError, match="align 0: must be at least 1"):
        Layers(align=0)


@pytest.mark.parametrize("when", ["always", "pays"])
def test_a_long_ring_between_nodes_is_routed(when: str) -> None:
    routing = laid(LONG, TWO_NODES, Layers(when)).routing  # pyright: ignore[reportArgumentType]
    assert routing is not None
    assert (routing.zones, routing.ranks_per_nic) == ((0,), 1)


@pytest.mark.parametrize(
    ("bare", "cluster"),
    [
        (LONG, replace(TWO_NODES, ranks_per_nic=4)),  # one NIC
        (replace(LONG, ranks_per_node=8), replace(TWO_NODES, ranks_per_node=8)),  # one node
        (UNEVEN, TWO_NODES),  # nothing crosses
    ],
)
def test_there_is_nothing_to_route(bare: MicrobatchPlan, cluster: Cluster) -> None:
    assert laid(bare, cluster, Layers("always")).routing is None


def test_routing_does_not_pay_where_links_inside_a_node_are_hardly_faster() -> None:
    slow = replace(TWO_NODES, intra_bytes_per_s=2 * TWO_NODES.nic_bytes_per_s)
    assert laid(LONG, slow, Layers("pays")).routing is None
    assert laid(LONG, slow, Layers("always")).routing is not None


@pytest.mark.parametrize("num_nics", [2, 4, 8])
@pytest.mark.parametrize("speedup", [2.5, 8.0, 16.0])
def test_the_fewest_routed_tokens_are_where_the_two_sides_of_equation_1_meet(num_nics: int, speedup: float) -> None:
    cost = AnalyticCost(replace(TWO_NODES, intra_bytes_per_s=speedup * 25e9), MODEL)
    fewest = fewest_routed_tokens(cost, num_nics)
    assert fewest is not None

    def gain(tokens: int) -> float:
        num_bytes = cost.kv_bytes(tokens)
        return cost.inter_node_s(num_bytes) - cost.routed_s(num_bytes, 1, num_nics)

    assert gain(fewest) >= 0
    assert fewest == 1 or gain(fewest - 1) < 0


def test_collectives_are_routed_only_by_order() -> None:
    gather = replace(LONG, zones=(Zone("pool", "all_gather", tuple(range(8)), (0,)),))
    assert laid(gather, TWO_NODES, Layers("pays")).routing is None
    routed = laid(gather, TWO_NODES, Layers("always"))
    assert routed.routing is not None
    verify(expand(routed, "replay"))


def test_a_remap_between_nodes_is_routed_where_one_nic_would_carry_it() -> None:
    one_heavy = plan((64_000,), Zone("local", "ring", (0,), (0,)))
    remapped = laid(one_heavy, TWO_NODES, Layers("pays", remap=True))
    assert remapped.routing is not None
    assert remapped.routing.zones == (REMAP,)
    verify(expand(remapped, "keep"))


def test_a_tiling_is_routed_by_the_load_of_its_nics() -> None:
    fragments = Rows.of(4, [(0, 0, 0, 32_000)])
    lopsided = TaskTable(
        "tiles", fragments, Rows.of(6, [(0, 0, 0, 32_000, 0, 16_000), (4, 0, 16_000, 32_000, 16_000, 32_000)])
    )
    routed = laid(plan((32_000,), lopsided), TWO_NODES, Layers("pays"))
    assert routed.routing is not None
    assert routed.routing.zones == (0,)
    quarter = 8_000
    even = TaskTable(
        "tiles",
        Rows.of(4, [(rank, rank, 0, quarter) for rank in range(4)]),
        Rows.of(6, [(rank + 4, rank, 0, quarter, 0, quarter) for rank in range(4)]),
    )
    assert laid(plan((quarter,) * 4, even), TWO_NODES, Layers("pays")).routing is None


@pytest.mark.parametrize(("num_tokens", "pattern"), [(40_000, "dispatch_once"), (120_000, "dispatch")])
def test_the_load_of_a_nic_is_that_of_its_busiest_exchange(num_tokens: int, pattern: str) -> None:
    """Rank 0 sends its keys to four ranks of the other node, attends `num_tokens` of theirs, and sends
    these back in the next exchange. Keys once to the node save nothing where what arrives at rank 0
    takes longer than all that it sends in one exchange, if not than what it sends in both.
    """
    keys, far = 40_000, range(4, 8)
    lengths = (keys + 4, *[num_tokens // 4] * 4)
    owned = [(0, 0, 0, keys), *((rank, 0, keys + at, keys + at + 1) for at, rank in enumerate(far))]
    owned += [(rank, 1 + at, 0, num_tokens // 4) for at, rank in enumerate(far)]
    tasks = [(0, 0, 0, keys, 0, keys)]
    tasks += [(rank, 0, keys + at, keys + at + 1, 0, keys + at + 1) for at, rank in enumerate(far)]
    tasks += [(0, 1 + at, 0, num_tokens // 4, 0, num_tokens // 4) for at in range(4)]
    bare = plan(lengths, by_hand.task_table(owned, tasks))
    once = laid(bare, TWO_NODES, Layers(once_per_node=True))
    verify(expand(once, "keep"))
    assert [zone.pattern for zone in once.zones] == [pattern]
