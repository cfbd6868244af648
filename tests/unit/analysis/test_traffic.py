"""Bytes on every link of a whole program: by hand for small ones, and in the sizes that the
executor packs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from megatron_balance.analysis import wire
from megatron_balance.analysis.statistics import Traffic, traffic
from megatron_balance.analysis.wire import NicOf, Payload, is_collective
from megatron_balance.compile.pipeline import expand
from megatron_balance.ir.columns import Rows
from megatron_balance.ir.model import Model
from megatron_balance.ir.plan import REMAP, MicrobatchPlan, Routing, Zone
from megatron_balance.ir.program import Kind
from tests.support import by_hand

MODEL = Model(num_heads=2, num_kv_heads=1, head_dim=8, bytes_per_element=2)
TOKEN = 2 * 8 * 2  # bytes of the keys and values of a token
TOKEN_GRAD = 2 * 8 * 4  # of their gradients, in fp32


def plan_of(pattern: str, ranks_per_node: int, num_ranks: int = 4, tokens: int = 64) -> MicrobatchPlan:
    return by_hand.pool(
        pattern, (tokens,), num_ranks, ranks_per_node=ranks_per_node, heads=(MODEL.num_heads, MODEL.num_kv_heads)
    )


def traffic_of(plan: MicrobatchPlan, ranks_per_nic: int = 1, policy: str | None = None) -> Traffic:
    program = expand(plan, policy)  # pyright: ignore[reportArgumentType]
    return traffic(program, Payload.of(MODEL), ranks_per_node=plan.ranks_per_node, ranks_per_nic=ranks_per_nic)


def test_a_ring_crosses_a_node_at_one_rank_and_one_nic() -> None:
    moved = traffic_of(plan_of("ring", 2))
    # 16 tokens a rank. From rank 1 to rank 2 go those of rank 1, the first 8 of rank 0, whose
    # others nobody needs, and those of rank 3.
    crossing = moved.inter_node_sent
    assert (crossing > 0).tolist() == [False, True, False, True]
    assert moved.nic_sent.tolist() == [[0, int(crossing[1])], [0, int(crossing[3])]]
    assert moved.nic_received.tolist() == [[int(crossing[3]), 0], [int(crossing[1]), 0]]
    assert crossing[1] == TOKEN * (16 + 16 + 8)


def test_routed_every_nic_carries_its_share_and_the_node_passes_on_the_rest() -> None:
    plan = plan_of("ring", 2)
    direct = traffic_of(plan)
    routed = traffic_of(replace(plan, routing=Routing(1, (0,))))
    assert routed.nic_sent.sum() == direct.nic_sent.sum()
    for node in routed.nic_sent.tolist():
        assert node[0] == pytest.approx(node[1], abs=3 * wire.ALIGN)
    # Half of what crosses goes to a proxy first, and half comes from one.
    passed_on = routed.intra_node_sent.sum() - direct.intra_node_sent.sum()
    assert passed_on == pytest.approx(direct.nic_sent.sum(), abs=12 * wire.ALIGN)


def test_one_nic_for_both_ranks_of_a_node_leaves_nothing_to_route_over() -> None:
    plan = plan_of("ring", 2)
    assert (
        traffic_of(replace(plan, routing=Routing(2, (0,))), 2).nic_sent.tolist()
        == traffic_of(plan, 2).nic_sent.tolist()
    )


def test_gradients_come_back_in_fp32() -> None:
    plan = plan_of("ring", 2)
    forward, both = traffic_of(plan), traffic_of(plan, policy="keep")
    backward = both.nic_sent - forward.nic_sent
    # The other way, so what one node sent it now receives.
    assert backward.tolist() == (forward.nic_received * TOKEN_GRAD // TOKEN).tolist()


def test_an_all_gather_over_the_pool_is_gloos_ring_and_over_fewer_ranks_goes_directly() -> None:
    block = 16 * TOKEN
    pool = traffic_of(plan_of("all_gather", 2))
    assert pool.inter_node_sent.tolist() == [0, 3 * block, 0, 3 * block]
    some = replace(plan_of("all_gather", 2), zones=(Zone("some", "all_gather", (0, 2), (0,)),))
    assert traffic_of(some).inter_node_sent.tolist() == [32 * TOKEN, 0, 32 * TOKEN, 0]


def test_a_remap_moves_inputs_there_and_outputs_back() -> None:
    plan = by_hand.plan((8, 4), 2, *by_hand.each_local(2), ranks_per_node=1)
    moved = traffic_of(replace(plan, moves=Rows.of(3, [(0, 1, 2)]), routing=Routing(1, (REMAP,))))
    query, lse = 2 * 8 * 2, 2 * 4
    assert moved.inter_node_sent.tolist() == [2 * (query + lse), 2 * (query + TOKEN)]
    assert moved.inter_node_received.tolist() == [2 * (query + TOKEN), 2 * (query + lse)]


@pytest.mark.parametrize(("num_ranks", "ranks_per_node", "ranks_per_nic"), [(8, 4, 2), (6, 3, 2), (4, 8, 1)])
def test_neighbours_share_a_nic(num_ranks: int, ranks_per_node: int, ranks_per_nic: int) -> None:
    nics = NicOf(num_ranks, ranks_per_node, ranks_per_nic)
    ranks = np.arange(num_ranks)
    assert nics.sums(ranks, np.ones_like(ranks)).sum() == num_ranks
    for rank in range(num_ranks):
        same = [other for other in ranks.tolist() if nics.nic(np.array(other)) == nics.nic(np.array(rank))]
        assert len(same) <= ranks_per_nic
        assert len({other // ranks_per_node for other in same}) == 1


def test_sizes_are_those_that_the_executor_packs() -> None:
    torch = pytest.importorskip("torch")
    from megatron_balance.runtime.lower import memory

    rng = np.random.default_rng(0)
    for element, dtype, wide in (
        (2, torch.bfloat16, torch.float32),
        (4, torch.float32, torch.float32),
        (8, torch.float64, torch.float64),
    ):
        for dim in (4, 5, 64):
            ours = Payload.of(Model(4, 2, dim, bytes_per_element=element))
            form = memory.CallForm(dim, dtype, wide, wide)
            for _ in range(20):
                kinds = np.sort(rng.choice(len(Kind), int(rng.integers(1, 4)), replace=False))
                rows = [[0, 0, 1, int(kind), 0, int(rng.integers(1, 4)), int(rng.integers(1, 50))] for kind in kinds]
                carried = [(Kind(kind), tokens, heads) for *_, kind, _, heads, tokens in rows]
                found = ours.parcels(np.array(rows))
                assert found.packed.tolist() == [memory.parcel_bytes(carried, form)]
                tensors = [shape for message in carried for shape in memory.shapes(message, form)]
                assert found.direct.tolist() == [sum(int(np.prod(shape)) * kind.itemsize for shape, kind in tensors)]
                for count in (1, 3, 4, 8):
                    pieces = [stop - start for start, stop in wire.piece_bounds(int(found.packed[0]), count)]
                    assert wire.piece_bytes(found.packed, count)[:, 0].tolist() == pieces


@pytest.mark.parametrize(("size", "ranks_per_node"), [(1, 1), (4, 2), (8, 4), (6, 4), (4, 4), (4, 8), (4, 1)])
def test_collectives_are_where_the_runtime_has_groups(size: int, ranks_per_node: int) -> None:
    pytest.importorskip("torch")
    from megatron_balance.runtime import groups

    made = set(groups._wanted(size, ranks_per_node))  # pyright: ignore[reportPrivateUsage]
    candidates = {tuple(range(a, b)) for a in range(size) for b in range(a + 1, size + 1)} | {
        tuple(reversed(range(size)))
    }
    assert {group for group in candidates if is_collective(group, size, ranks_per_node)} == made
