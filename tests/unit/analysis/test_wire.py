"""Bytes on the way: sizes that source, target and proxies agree on, pieces that tile them, and
tensors that come out as they went in."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from megatron_balance.ir.program import Kind  # noqa: E402
from megatron_balance.runtime.lower.memory import AttentionShape, CallForm, pack, parcel_bytes, shapes, unpack  # noqa: E402
from megatron_balance.runtime.lower.regions import without  # noqa: E402
from megatron_balance.runtime.recorder import Traced, hidden_share  # noqa: E402

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
    assert raw.numel() == parcel_bytes(carried, form)
    received = unpack(raw, carried, form)
    for ours, theirs in zip(sent, received, strict=True):
        for x, y in zip(ours, theirs, strict=True):
            assert x.dtype == y.dtype
            assert torch.equal(x, y)
            assert y.untyped_storage().data_ptr() == raw.untyped_storage().data_ptr()


def test_a_single_tensor_is_sent_from_where_it_lies() -> None:
    x = torch.arange(7.0)
    assert pack([x]).data_ptr() == x.data_ptr()
    assert (
        parcel_bytes([(Kind.Q, 1, 7)], CallForm.of(AttentionShape(1, 1, 1), torch.float32, "fp32")) == x.nbytes
    )  # not padded: there is nothing behind it


def test_instances_lose_the_tokens_that_are_handed_over() -> None:
    # (seq, start, stop, head_start, head_stop, buffer, first row): rows 0-9 are s0[0:10), rows
    # 10-13 s2[4:8)
    own = np.array([(0, 0, 10, 0, 2, 0, 0), (2, 4, 8, 0, 2, 0, 10)])
    assert without(own, np.empty((0, 3), dtype=np.int64)) is own
    left = without(own, np.array([(2, 4, 8), (0, 3, 5), (0, 4, 6), (0, 3, 5), (1, 0, 99)]))
    assert left.tolist() == [[0, 0, 3, 0, 2, 0, 0], [0, 6, 10, 0, 2, 0, 6]]


def test_hidden_share_is_what_was_not_waited_for() -> None:
    trace = [
        Traced("inter_node", 0, "direct", "own", 0.0, 0.1),
        Traced("compute", 1, "run", "own", 0.1, 3.0),
        Traced(
            "inter_node", 0, "across", "send_proxy", 0.5, 9.0
        ),  # passed on for others: no concern of this rank's launches
        Traced("", 0, "finish", "own", 3.0, 4.0),
    ]
    assert hidden_share(trace) == pytest.approx(0.75)
    assert hidden_share(trace[1:2]) == 1.0
