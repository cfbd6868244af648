"""The wire format without torch: sizes of messages, parcels and pieces, one by one and in arrays."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_balance.analysis import wire
from megatron_balance.analysis.wire import ALIGN, HeadSizes, Payload
from megatron_balance.ir.columns import Message
from megatron_balance.ir.model import Model
from megatron_balance.ir.program import Kind

messages = st.lists(st.tuples(st.sampled_from(Kind), st.integers(1, 9), st.integers(1, 3)), min_size=1, max_size=4)


@pytest.mark.parametrize(
    ("kind", "num_bytes"),
    [
        (Kind.Q, [7 * 3 * 5 * 2]),
        (Kind.KV, [2 * 7 * 3 * 5 * 2]),
        (Kind.OUT, [7 * 3 * 5 * 2, 7 * 3 * 4]),
        (Kind.OUT_GRAD, [2 * 7 * 3 * 5 * 2, 7 * 3 * 4]),
        (Kind.Q_GRAD, [7 * 3 * 5 * 4]),
        (Kind.KV_GRAD, [2 * 7 * 3 * 5 * 4]),
    ],
)
def test_tensors_of_a_message(kind: Kind, num_bytes: list[int]) -> None:
    assert (
        list(wire.tensor_bytes([(kind, 7, 3)], HeadSizes(dim=5, narrow_bytes=2, wide_bytes=4, gradient_bytes=4)))
        == num_bytes
    )


def test_a_latent_travels_in_place_of_keys_and_values() -> None:
    sizes = HeadSizes(dim=5, narrow_bytes=2, wide_bytes=4, gradient_bytes=4, value_dim=3, latent_dim=7)
    found = {kind: list(wire.tensor_bytes([(kind, 1, 1)], sizes)) for kind in (Kind.KV, Kind.OUT, Kind.KV_GRAD)}
    assert found == {Kind.KV: [7 * 2], Kind.OUT: [3 * 2, 4], Kind.KV_GRAD: [7 * 4]}


def test_keys_and_values_of_two_widths_are_two_tensors() -> None:
    sizes = HeadSizes(dim=5, narrow_bytes=2, wide_bytes=4, gradient_bytes=4, value_dim=3)
    expected = {
        Kind.Q: [5 * 2],
        Kind.KV: [5 * 2, 3 * 2],
        Kind.OUT: [3 * 2, 4],
        Kind.OUT_GRAD: [2 * 3 * 2, 4],
        Kind.Q_GRAD: [5 * 4],
        Kind.KV_GRAD: [5 * 4, 3 * 4],
    }
    assert {kind: list(wire.tensor_bytes([(kind, 1, 1)], sizes)) for kind in Kind} == expected


@given(num_bytes=st.integers(0, 3000), count=st.integers(1, 9))
def test_pieces_are_near_equal_aligned_and_tile_the_parcel(num_bytes: int, count: int) -> None:
    pieces = wire.piece_bounds(num_bytes, count)
    assert [0, *(stop for _, stop in pieces)] == [*(start for start, _ in pieces), num_bytes]
    assert all(start % ALIGN == 0 for start, stop in pieces if start < stop)
    sizes = [stop - start for start, stop in pieces]
    assert max(sizes) - min(sizes) < 2 * ALIGN
    assert wire.piece_bytes(np.array([num_bytes]), count)[:, 0].tolist() == sizes


@given(
    carried=messages,
    element=st.sampled_from([2, 4, 8]),
    dim=st.integers(1, 9),
    value_dim=st.none() | st.integers(1, 9),
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
