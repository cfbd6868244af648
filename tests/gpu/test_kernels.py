"""Kernels against the plain one. The varlen kernel's grouping and indexing is tested on the CPU with the plain formula behind it."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from megatron_balance.errors import ConfigError  # noqa: E402
from megatron_balance.runtime import varlen  # noqa: E402
from megatron_balance.runtime.kernels import CpuFlashKernel, Entries, PlainKernel, choose_kernel  # noqa: E402

HEADS, KV_HEADS, DIM = 4, 2, 16
SCALE = 0.25
# Neighbouring and scattered rows, full and causal, square and not, one token, one entry in front of another in the key operand.
ENTRIES = {
    "one_square": Entries(((0, 24),), ((0, 24),), (True,), ((0, 24),)),
    "one_full": Entries(((5, 24),), ((0, 11),), (False,), ((0, 19),)),
    "bottom_right": Entries(((3, 9),), ((0, 20),), (True,), ((3, 9),)),
    "mixed": Entries(
        ((0, 6), (6, 7), (10, 20), (20, 24)),
        ((12, 18), (0, 1), (2, 19), (19, 32)),
        (True, False, True, False),
        ((0, 6), (6, 7), (7, 17), (17, 21)),
    ),
    "shared_keys": Entries(((0, 4), (8, 12)), ((0, 16), (0, 16)), (False, False), ((0, 4), (4, 8))),
}


def _inputs(dtype, device="cpu"):
    torch.manual_seed(0)
    return [torch.randn(32, heads, DIM, dtype=dtype, device=device) for heads in (HEADS, KV_HEADS, KV_HEADS)]


def _both(kernel, entries, inputs):
    """Packed out, LSE and gradients of a kernel, whose own packed output is the final one here."""
    q, k, v = inputs
    prepared = kernel.prepare(entries, q.device)
    out, lse = kernel.forward(prepared, q, k, v, SCALE)
    rows = max(stop for _, stop in entries.dout)
    final_out, final_lse = out.new_zeros(rows, HEADS, DIM), lse.new_zeros(rows, HEADS)
    at = 0
    for start, stop in entries.dout:
        final_out[start:stop], final_lse[start:stop] = out[at : at + stop - start], lse[at : at + stop - start]
        at += stop - start
    dout = torch.ones_like(final_out) * torch.arange(1, rows + 1, device=out.device)[:, None, None] / rows
    return out, lse, *kernel.backward(prepared, (dout.to(out.dtype), final_out, final_lse), q, k, v, SCALE)


def _assert_equal(found, expected, tolerance):
    for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), found, expected, strict=True):
        scale = float(b.abs().max())
        assert float((a.double() - b.double()).abs().max()) <= tolerance * scale, name


@pytest.mark.parametrize("entries", ENTRIES.values(), ids=ENTRIES)
def test_cpu_flash_equals_plain(entries):
    inputs = _inputs(torch.float32)
    _assert_equal(_both(CpuFlashKernel(), entries, inputs), _both(PlainKernel(), entries, inputs), 1e-5)


@pytest.mark.parametrize("entries", ENTRIES.values(), ids=ENTRIES)
def test_plain_equals_autograd(entries):
    """The plain kernel's backward, when its own output is final, is the gradient of its forward."""
    inputs = [x.requires_grad_() for x in _inputs(torch.float64)]
    found = _both(PlainKernel(), entries, [x.detach() for x in inputs])
    dq, dk, dv = (torch.zeros_like(x) for x in inputs)
    rows = max(stop for _, stop in entries.dout)
    outs = []
    for (a, b), (c, d), mask, (e, f) in zip(entries.q, entries.k, entries.causal, entries.dout, strict=True):
        one = Entries(((a, b),), ((c, d),), (mask,))
        out, _ = PlainKernel().forward(one, inputs[0], inputs[1], inputs[2], SCALE)
        grad = (torch.arange(e + 1, f + 1) / rows)[:, None, None].expand_as(out).double()
        for total, part in zip((dq, dk, dv), torch.autograd.grad(out, inputs, grad), strict=True):
            total.add_(part)
        outs.append(out)
    torch.testing.assert_close(found[0], torch.cat(outs))
    for packed, total, spans in ((found[2], dq, entries.q), (found[3], dk, entries.k), (found[4], dv, entries.k)):
        summed, at = torch.zeros_like(total), 0
        for start, stop in spans:
            summed[start:stop] += packed[at : at + stop - start]
            at += stop - start
        torch.testing.assert_close(summed, total)


class _PlainCalls:
    """FlashAttention's two varlen calls by the plain formula, entry by entry of cu_seqlens."""

    def forward(self, half, q, k, v, scale):
        out, lse = PlainKernel().forward(_of(half), q, k, v, scale)
        return out, lse.T.contiguous()

    def backward(self, half, dout, q, k, v, scale):
        entries = _of(half)
        entries = Entries(entries.q, entries.k, entries.causal, entries.q)
        return PlainKernel().backward(entries, (dout[0], dout[1], dout[2].T), q, k, v, scale)


def _of(half):
    assert half.cu_q.dtype == half.cu_k.dtype == torch.int32
    q, k = half.cu_q.tolist(), half.cu_k.tolist()
    assert half.max_q == max(b - a for a, b in zip(q, q[1:], strict=False))
    assert half.max_k == max(b - a for a, b in zip(k, k[1:], strict=False))
    spans = [tuple(zip(cu, cu[1:], strict=False)) for cu in (q, k)]
    return Entries(spans[0], spans[1], (half.causal,) * len(spans[0]))


@pytest.mark.parametrize("entries", ENTRIES.values(), ids=ENTRIES)
def test_varlen_groups_and_indexes_entries(entries, monkeypatch):
    calls = _PlainCalls()
    monkeypatch.setattr(varlen, "_torch_forward", calls.forward)
    monkeypatch.setattr(varlen, "_torch_backward", calls.backward)
    kernel = varlen.VarlenKernel("torch_varlen")
    inputs = _inputs(torch.float64)
    _assert_equal(_both(kernel, entries, inputs), _both(PlainKernel(), entries, inputs), 1e-12)
    assert kernel.launches(entries) == len(set(entries.causal))


def test_a_kernel_that_does_not_serve_the_device_is_refused():
    with pytest.raises(ConfigError, match="does not serve cpu tensors"):
        choose_kernel("torch_varlen", torch.device("cpu"), torch.bfloat16, 64)
    with pytest.raises(ConfigError, match="unknown kernel 'flash'"):
        choose_kernel("flash", torch.device("cpu"), torch.bfloat16, 64)


@pytest.mark.gpu
@pytest.mark.parametrize("entries", ENTRIES.values(), ids=ENTRIES)
@pytest.mark.parametrize("name", ["torch_varlen", "flash_attn"])
def test_cuda_kernel_equals_plain(name, entries):
    if name == "flash_attn" and not varlen.has_flash_attn():
        pytest.skip("flash-attn is not installed")
    inputs = _inputs(torch.bfloat16, "cuda")
    kernel = choose_kernel(name, torch.device("cuda"), torch.bfloat16, DIM)
    _assert_equal(_both(kernel, entries, inputs), _both(PlainKernel(), entries, [x.float() for x in inputs]), 2e-2)
