"""Memory that calls share: when it is taken back, what is waited for first, and that the same calls
need it only once.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from megatron_balance.runtime.lower.memory import adjacent_bytes, pack  # noqa: E402
from megatron_balance.runtime.pool import ALIGN, SLAB, BufferPool  # noqa: E402

CPU = torch.device("cpu")


def buffer(pool: BufferPool, num_bytes: int) -> Any:
    return pool.empty((num_bytes,), torch.uint8, CPU)


def address(x: Any) -> int:
    return x.untyped_storage().data_ptr()


def test_memory_comes_back_with_the_last_tensor_on_it() -> None:
    pool = BufferPool(cpu=True)
    first = buffer(pool, 100)
    at, view = address(first), first[10:20].view(5, 2)
    del first
    assert address(buffer(pool, 100)) != at
    del view
    assert address(buffer(pool, 100)) == at


def test_what_autograd_saves_is_in_use() -> None:
    pool = BufferPool(cpu=True)
    x = pool.empty((8,), torch.float32, CPU).fill_(3.0)
    at, weight = address(x), torch.ones(8, requires_grad=True)
    y = x * weight
    del x
    gc.collect()
    for _ in range(20):
        assert address(pool.empty((8,), torch.float32, CPU).fill_(0.0)) != at
    y.sum().backward()
    assert torch.equal(weight.grad, torch.full((8,), 3.0))
    del y
    assert address(buffer(pool, 32)) == at


def test_shapes_and_types_and_alignment() -> None:
    pool = BufferPool(cpu=True)
    held = [pool.empty((3, 5), dtype, CPU) for dtype in (torch.uint8, torch.bfloat16, torch.float32, torch.float64)]
    assert [(tuple(x.shape), x.is_contiguous(), x.data_ptr() % 16) for x in held] == [((3, 5), True, 0)] * 4
    assert pool.empty((0, 4), torch.float32, CPU).shape == (0, 4)
    assert pool.used_bytes == 4 * ALIGN
    for value, x in enumerate(held):
        x.fill_(value)
    assert [int(x.sum()) for x in held] == [0, 15, 30, 45]


@given(sizes=st.lists(st.tuples(st.integers(1, 5 * ALIGN), st.integers(0, 5)), min_size=1, max_size=40))
def test_the_same_calls_find_the_same_places(sizes: list[tuple[int, int]]) -> None:
    """Each buffer lives for some of the next ones. No two at once share a byte, and a second time
    round takes no slab more.
    """
    pool = BufferPool(cpu=True)
    places = []
    for _ in range(3):
        held: list[tuple[int, Any]] = []
        places.append([])
        for index, (num_bytes, life) in enumerate(sizes):
            held = [(until, x) for until, x in held if until > index]
            held.append((index + life, buffer(pool, num_bytes)))
            ends = sorted((address(x), address(x) + x.numel()) for _, x in held)
            assert all(a[1] <= b[0] for a, b in zip(ends, ends[1:], strict=False))
            places[-1].append(address(held[-1][1]))
        del held
    assert places[0] == places[1] == places[2]
    assert pool.num_slabs == 1
    assert pool.peak_bytes <= pool.held_bytes == SLAB


def test_slabs_are_as_large_as_a_plan_asks_for() -> None:
    pool = BufferPool(cpu=True)
    pool.reserve(3 * SLAB)
    assert pool.held_bytes == 0
    parts = [buffer(pool, SLAB // 2) for _ in range(6)]
    assert (pool.num_slabs, pool.held_bytes) == (1, 3 * SLAB)
    parts.append(buffer(pool, 1))
    assert pool.num_slabs == 2
    large = buffer(pool, 7 * SLAB)
    assert (pool.num_slabs, large.numel()) == (3, 7 * SLAB)


def test_what_another_stream_uses_is_used_again_last_and_waited_for() -> None:
    pool, waited = BufferPool(cpu=True), []
    whole = buffer(pool, SLAB // 2)
    sent = buffer(pool, SLAB // 4)
    later = buffer(pool, SLAB // 8)
    pool.used([sent[5:9], torch.empty(3)], pool.fence("stream", "sent", waited.append))
    pool.used([later], pool.fence("stream", "later", waited.append))
    at = address(sent)
    del sent, later
    # There is memory that no one has used.
    assert address(buffer(pool, SLAB // 8)) not in (at, address(whole))
    assert waited == []
    again = buffer(pool, SLAB // 4)  # there is none left of this size
    assert (address(again), waited) == (at, ["sent"])
    last = [buffer(pool, SLAB // 8) for _ in range(2)]
    assert waited == ["sent", "later"]
    assert (pool.num_slabs, len(last)) == (1, 2)


def test_a_fence_that_was_passed_is_not_waited_for_again() -> None:
    """Received, waited for and read: the memory is as free as any other."""
    pool, waited = BufferPool(cpu=True), []
    received = pool.empty((SLAB // 2,), torch.uint8, CPU, received=True)
    early, late = (pool.fence("stream", name, waited.append) for name in ("early", "late"))
    pool.used([received], early)
    pool.passed.wait(late)
    pool.passed.wait(early)
    at = address(received)
    del received
    assert address(buffer(pool, SLAB // 2)) == at
    assert waited == ["late"]


def test_a_fence_is_for_who_needs_it_and_for_its_own_bytes_only() -> None:
    """Three buffers that other streams use are all the memory there is. What is received into one of
    them is no matter of the compute stream, and the other two stay behind their fences.
    """
    pool, waited = BufferPool(cpu=True), []
    held = [buffer(pool, SLAB // 4) for _ in range(3)] + [buffer(pool, SLAB // 4 - ALIGN), buffer(pool, ALIGN)]
    ends = [pool.fence(f"stream {at}", at, waited.append) for at in range(3)]
    for x, fence in zip(held, ends, strict=False):
        pool.used([x], fence)
    places = [address(x) for x in held]
    del x
    for _ in range(3):
        del held[0]
    received = pool.empty((SLAB // 4,), torch.uint8, CPU, received=True)
    assert (address(received), waited) == (places[0], [])
    assert pool.fences([received[3:5]]) == ends[:1]
    half = buffer(pool, SLAB // 8)
    assert (address(half), waited) == (places[1], [1])
    whole = buffer(pool, SLAB // 4)
    assert (address(whole), waited) == (places[1] + SLAB // 8, [1, 2])  # of both that were left
    del received  # no stream touched it: its fence stays
    assert (address(buffer(pool, SLAB // 4)), waited) == (places[0], [1, 2, 0])


def test_what_lies_in_one_piece_is_sent_without_a_copy() -> None:
    raw = torch.arange(64, dtype=torch.uint8)
    parts = [raw[16:21], raw[32:48].view(torch.float32), raw[48:60]]
    packed = pack(parts)
    assert (packed.data_ptr(), packed.numel()) == (parts[0].data_ptr(), 44)
    assert adjacent_bytes([parts[0], parts[2]]) is None
    assert adjacent_bytes([parts[1], parts[0]]) is None
    assert pack([parts[1], parts[0]]).tolist() == [*range(32, 48), *range(16, 21)]
