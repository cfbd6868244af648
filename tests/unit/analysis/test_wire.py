"""Bytes on the way: sizes on which all agree, pieces that tile them, tensors that stay as they are."""

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_balance.analysis import wire
from megatron_balance.analysis.statistics import Traffic, traffic
from megatron_balance.analysis.wire import ALIGN, HeadSizes, NicOf, Payload, is_collective
from megatron_balance.compile.pipeline import expand
from megatron_balance.ir.columns import Message, Rows
from megatron_balance.ir.model import Model
from megatron_balance.ir.plan import REMAP, MicrobatchPlan, Routing, Zone
from megatron_balance.ir.program import Kind
from megatron_balance.runtime.lower.memory import AttentionShape, CallForm, layout, pack, shapes, unpack
from megatron_balance.runtime.lower.regions import without
from tests.support import by_hand

torch = pytest.importorskip("torch")

FORMS = [
    CallForm.of(AttentionShape(1, 1, 5), torch.bfloat16, "fp32"),
    CallForm.of(AttentionShape(1, 1, 8, 3), torch.float32, "fp32"),
    CallForm.of(AttentionShape(1, 1, 3, latent=(4, 1)), torch.float64, "fp32"),
]
messages = st.lists(st.tuples(st.sampled_from(Kind), st.integers(1, 9), st.integers(1, 3)), min_size=1, max_size=4)


@given(carried=messages, form=st.sampled_from(FORMS), seed=st.integers(0, 99))
def test_what_is_packed_comes_out_bit_for_bit_without_another_copy(carried: list, form: CallForm, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    sent = [
        [torch.rand(shape, generator=generator).to(dtype) for shape, dtype in shapes(message, form)]
        for message in carried
    ]
    raw = pack([x for tensors in sent for x in tensors])
    assert raw.dtype == torch.uint8
    assert raw.numel() == layout(tuple(carried), form).num_bytes
    received = unpack(raw, carried, form)
    for ours, theirs in zip(sent, received, strict=True):
        for x, y in zip(ours, theirs, strict=True):
            assert x.dtype == y.dtype
            assert torch.equal(x, y)
            assert y.untyped_storage().data_ptr() == raw.untyped_storage().data_ptr()


def test_instances_lose_what_is_handed_over_and_a_single_tensor_is_sent_from_where_it_lies() -> None:
    # A single tensor is sent from where it lies.
    x = torch.arange(7.0)
    assert pack([x]).data_ptr() == x.data_ptr()
    form = CallForm.of(AttentionShape(1, 1, 1), torch.float32, "fp32")
    assert layout(((Kind.Q, 1, 7),), form).num_bytes == x.nbytes, "not padded: there is nothing behind it"
    # Instances lose the tokens that are handed over.
    # (seq, start, stop, head_start, head_stop, buffer, first row): rows 0-9 are s0[0:10), rows
    # 10-13 s2[4:8)
    own = np.array([(0, 0, 10, 0, 2, 0, 0), (2, 4, 8, 0, 2, 0, 10)])
    assert without(own, np.empty((0, 3), dtype=np.int64)) is own
    left = without(own, np.array([(2, 4, 8), (0, 3, 5), (0, 4, 6), (0, 3, 5), (1, 0, 99)]))
    assert left.tolist() == [[0, 0, 3, 0, 2, 0, 0], [0, 6, 10, 0, 2, 0, 6]]


# The wire format without torch: sizes of messages, parcels and pieces, one by one and in arrays.
def tensors_of(sizes: HeadSizes, kinds: Iterable[Kind] = Kind, rows: int = 1, heads: int = 1) -> dict[Kind, list[int]]:
    return {kind: list(wire.tensor_bytes([(kind, rows, heads)], sizes)) for kind in kinds}


def test_tensors_of_a_message() -> None:
    sizes = HeadSizes(dim=5, narrow_bytes=2, wide_bytes=4, gradient_bytes=4)
    head = 7 * 3 * 5  # 7 rows of 3 heads
    assert tensors_of(sizes, rows=7, heads=3) == {
        Kind.Q: [head * 2],
        Kind.KV: [2 * head * 2],
        Kind.OUT: [head * 2, 7 * 3 * 4],
        Kind.OUT_GRAD: [2 * head * 2, 7 * 3 * 4],
        Kind.Q_GRAD: [head * 4],
        Kind.KV_GRAD: [2 * head * 4],
    }
    # Keys and values of two widths are two tensors; a latent travels in place of both.
    assert tensors_of(sizes._replace(value_dim=3)) == {
        Kind.Q: [5 * 2],
        Kind.KV: [5 * 2, 3 * 2],
        Kind.OUT: [3 * 2, 4],
        Kind.OUT_GRAD: [2 * 3 * 2, 4],
        Kind.Q_GRAD: [5 * 4],
        Kind.KV_GRAD: [5 * 4, 3 * 4],
    }
    latents = tensors_of(sizes._replace(value_dim=3, latent_dim=7), (Kind.KV, Kind.OUT, Kind.KV_GRAD))
    assert latents == {Kind.KV: [7 * 2], Kind.OUT: [3 * 2, 4], Kind.KV_GRAD: [7 * 4]}


@given(num_bytes=st.integers(0, 3000), count=st.integers(1, 9))
def test_pieces_are_near_equal_aligned_and_tile_the_parcel(num_bytes: int, count: int) -> None:
    pieces = wire.piece_bounds(num_bytes, count)
    assert [0, *(stop for _, stop in pieces)] == [*(start for start, _ in pieces), num_bytes]
    assert all(start % ALIGN == 0 for start, stop in pieces if start < stop)
    sizes = [stop - start for start, stop in pieces]
    assert max(sizes) - min(sizes) < 2 * ALIGN
    assert wire.piece_bytes(np.array([num_bytes]), count)[:, 0].tolist() == sizes


@given(
    carried=messages, element=st.sampled_from([2, 4, 8]), dim=st.integers(1, 9), value_dim=st.none() | st.integers(1, 9)
)
def test_arrays_of_messages_have_the_sizes_of_each(
    carried: list[tuple[Kind, int, int]], element: int, dim: int, value_dim: int | None
) -> None:
    carried = list({(kind, heads): (kind, rows, heads) for kind, rows, heads in carried}.values())
    carried.sort(key=lambda message: (message[0], message[2]))
    table = np.zeros((len(carried), Message.WIDTH), dtype=np.int64)
    table[:, Message.DST] = 1
    for row, (kind, rows, heads) in zip(table, carried, strict=True):
        row[Message.KIND], row[Message.HEAD_STOP], row[Message.TOKENS] = kind, heads, rows
    parcels = Payload.of(Model(4, 2, dim, bytes_per_element=element, value_dim=value_dim)).parcels(table)
    sizes = HeadSizes(dim, element, max(4, element), max(4, element), value_dim)
    each = list(wire.tensor_bytes(carried, sizes))
    # Tensors begin aligned, and the last one is not padded.
    assert parcels.packed.tolist() == [sum(map(wire.padded, each[:-1])) + each[-1]]
    assert parcels.direct.tolist() == [sum(each)]
    assert parcels.padded.tolist() == [sum(wire.padded(size) for size in each)]


# Bytes on every link of a whole program: by hand for small ones, and in the sizes that the executor
# packs.
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


def test_a_ring_crosses_a_node_at_one_rank_and_one_nic_or_routed_over_every_nic() -> None:
    # A ring crosses a node at one rank and one NIC.
    plan = plan_of("ring", 2)
    direct = traffic_of(plan)
    # 16 tokens a rank. From rank 1 to rank 2 go those of rank 1, the first 8 of rank 0, whose
    # others nobody needs, and those of rank 3.
    crossing = direct.inter_node_sent
    assert (crossing > 0).tolist() == [False, True, False, True]
    assert direct.nic_sent.tolist() == [[0, int(crossing[1])], [0, int(crossing[3])]]
    assert direct.nic_received.tolist() == [[int(crossing[3]), 0], [int(crossing[1]), 0]]
    assert crossing[1] == TOKEN * (16 + 16 + 8)
    # Routed every NIC carries its share and the node passes on the rest.
    routed = traffic_of(replace(plan, routing=Routing(1, (0,))))
    assert routed.nic_sent.sum() == direct.nic_sent.sum()
    for node in routed.nic_sent.tolist():
        assert node[0] == pytest.approx(node[1], abs=3 * wire.ALIGN)
    # Half of what crosses goes to a proxy first, and half comes from one.
    passed_on = routed.intra_node_sent.sum() - direct.intra_node_sent.sum()
    assert passed_on == pytest.approx(direct.nic_sent.sum(), abs=12 * wire.ALIGN)
    # One NIC for both ranks of a node leaves nothing to route over.
    shared = [traffic_of(each, 2).nic_sent.tolist() for each in (plan, replace(plan, routing=Routing(2, (0,))))]
    assert shared[0] == shared[1]
    # Gradients come back in fp32.
    backward = traffic_of(plan, policy="keep").nic_sent - direct.nic_sent
    # The other way, so what one node sent it now receives.
    assert backward.tolist() == (direct.nic_received * TOKEN_GRAD // TOKEN).tolist()


def test_bytes_of_an_all_gather_and_of_a_remap() -> None:
    # An all gather over the pool is gloos ring and over fewer ranks goes directly.
    block = 16 * TOKEN
    pool = traffic_of(plan_of("all_gather", 2))
    assert pool.inter_node_sent.tolist() == [0, 3 * block, 0, 3 * block]
    some = replace(plan_of("all_gather", 2), zones=(Zone("some", "all_gather", (0, 2), (0,)),))
    assert traffic_of(some).inter_node_sent.tolist() == [32 * TOKEN, 0, 32 * TOKEN, 0]
    # A remap moves inputs there and outputs back.
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
                assert found.packed.tolist() == [memory.layout(tuple(carried), form).num_bytes]
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
