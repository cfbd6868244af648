"""Kernels against the plain one. How the varlen kernel groups and indexes entries, and what it
hands to the libraries, is tested on the CPU, with the plain formula behind stand-ins of their
signatures.
"""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from megatron_balance.errors import ConfigError  # noqa: E402
from megatron_balance.runtime.kernels import KERNELS, base, choose_kernel, libraries  # noqa: E402
from megatron_balance.runtime.kernels.base import Entries  # noqa: E402
from megatron_balance.runtime.kernels.cpu_flash import CpuFlashKernel  # noqa: E402
from megatron_balance.runtime.kernels.plain import PlainKernel  # noqa: E402
from megatron_balance.runtime.kernels.varlen import VarlenKernel  # noqa: E402
from tests.support import attention_libraries as stand_ins  # noqa: E402
from tests.support.attention_libraries import ByFormula  # noqa: E402

HEADS, KV_HEADS, DIM = 4, 2, 16
SCALE = 0.25
# Neighbouring and scattered rows, full and causal, square and not, one token, one entry in front of
# another in the key operand.
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


@pytest.mark.parametrize("entries", ENTRIES.values(), ids=ENTRIES)
def test_varlen_groups_and_indexes_entries(entries):
    kernel = VarlenKernel("by_formula", ByFormula())
    inputs = _inputs(torch.float64)
    _assert_equal(_both(kernel, entries, inputs), _both(PlainKernel(), entries, inputs), 1e-12)


def test_an_op_takes_one_launch_or_two_whatever_the_number_of_its_entries():
    """Two where some are full and some causal; a full entry of one query row is causal as well."""

    def launches(*entries):
        calls = ByFormula()
        q, k, causal = zip(*entries, strict=True)
        table = Entries(q, k, causal, q)
        kernel = VarlenKernel("by_formula", calls)
        _both(kernel, table, _inputs(torch.float64))
        assert calls.forwards == calls.backwards == kernel.launches(table)
        return calls.forwards

    squares = [((i, i + 2), (i, i + 2), True) for i in range(0, 32, 2)]
    rectangles = [((i, i + 2), (0, i + 1), False) for i in range(0, 32, 2)]
    rows = [((i, i + 1), (0, 9), False) for i in range(32)]
    assert launches(*squares) == launches(*rectangles) == launches(*rows) == 1
    assert launches(*squares, *rectangles) == 2
    assert launches(*squares, *rows) == 1


def test_a_kernel_that_does_not_serve_the_tensors_is_refused():
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    with pytest.raises(ConfigError, match="does not serve cpu tensors"):
        choose_kernel("torch_varlen", cpu, torch.bfloat16, 64)
    with pytest.raises(
        ConfigError, match="unknown kernel 'flash'; known: auto, plain, cpu_flash, torch_varlen, flash_attn, "
    ):
        choose_kernel("flash", cpu, torch.bfloat16, 64)
    with pytest.raises(ConfigError, match=r"serves head dims up to 256 in multiples of 8 \(head dim 20\)"):
        choose_kernel("torch_varlen", cuda, torch.bfloat16, 20)
    with pytest.raises(ConfigError, match=r"does not serve torch.float32, only torch.bfloat16, torch.float16"):
        choose_kernel("flash_attn", cuda, torch.float32, 64)


def test_a_kernel_that_is_not_installed_says_what_it_needs(monkeypatch):
    monkeypatch.setattr(base, "has_module", lambda _: False)
    for name, needs in (
        ("flash_attn", "flash_attn"),
        ("flash_attn_3", "flash_attn_interface or flash_attn_3"),
        ("te_fused", "transformer"),
    ):
        with pytest.raises(ConfigError, match=f"kernel {name} needs {needs}.* is not installed; .*or use kernel: auto"):
            choose_kernel(name, torch.device("cuda"), torch.bfloat16, 64)


def test_auto_takes_the_first_that_is_installed_and_fits(monkeypatch):
    def auto(*installed, device="cuda", dtype=torch.bfloat16, head_dim=128):
        monkeypatch.setattr(base, "has_module", lambda name: name in installed)
        monkeypatch.setitem(
            KERNELS, "flash_attn", replace(KERNELS["flash_attn"], make=lambda: VarlenKernel("flash_attn", ByFormula()))
        )
        monkeypatch.setitem(
            KERNELS,
            "flash_attn_3",
            replace(KERNELS["flash_attn_3"], make=lambda: VarlenKernel("flash_attn_3", ByFormula())),
        )
        return choose_kernel("auto", torch.device(device), dtype, head_dim).name

    assert auto() == "torch_varlen"
    assert auto("flash_attn.flash_attn_interface") == "flash_attn"
    assert auto("flash_attn.flash_attn_interface", "flash_attn_3.flash_attn_interface") == "flash_attn_3"
    assert auto("flash_attn_interface", head_dim=20) == auto("flash_attn_interface", dtype=torch.float32) == "plain"
    assert auto(device="cpu", dtype=torch.float32) == "cpu_flash"
    assert auto(device="cpu", dtype=torch.float64) == "plain"


@pytest.mark.parametrize("entries", ENTRIES.values(), ids=ENTRIES)
@pytest.mark.parametrize("name", stand_ins.LIBRARIES)
def test_a_library_is_called_as_its_source_says(name, entries, monkeypatch):
    """Modules of the libraries' names and signatures, that compute by the plain formula and refuse
    what the real ones would.
    """
    for module, stand_in in stand_ins.LIBRARIES[name].items():
        monkeypatch.setitem(sys.modules, module, stand_in)
    monkeypatch.setattr(libraries, "has_module", lambda module: module in stand_ins.LIBRARIES[name])
    kernel = KERNELS[name.split(" ")[0]].make()
    inputs = _inputs(torch.bfloat16)
    exact = _both(PlainKernel(), entries, [x.double() for x in inputs])
    _assert_equal(_both(kernel, entries, inputs), exact, 2e-2)


@pytest.mark.parametrize("name", ["bottom_right", "mixed"])
def test_torchs_own_operators_take_these_arguments(name):
    """On tensors without values: the operators' own shape rules are run, and tell a wrong argument."""
    entries, kernel = ENTRIES[name], KERNELS["torch_varlen"].make()
    meta = torch.device("meta")
    q, k, v = (x.to(meta) for x in _inputs(torch.bfloat16))
    prepared = kernel.prepare(entries, meta)
    out, lse = kernel.forward(prepared, q, k, v, SCALE)
    num_q, num_k = entries.num_q, sum(b - a for a, b in entries.k)
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == (
        (num_q, HEADS, DIM),
        torch.bfloat16,
        (num_q, HEADS),
        torch.float32,
    )
    rows = max(stop for _, stop in entries.dout)
    final = (q.new_empty(rows, HEADS, DIM), q.new_empty(rows, HEADS, DIM), lse.new_empty(rows, HEADS))
    grads = kernel.backward(prepared, final, q, k, v, SCALE)
    assert [tuple(x.shape) for x in grads] == [(num_q, HEADS, DIM), (num_k, KV_HEADS, DIM), (num_k, KV_HEADS, DIM)]


def test_padded_statistics_of_an_old_cudnn_are_refused(monkeypatch):
    for module, stand_in in stand_ins.LIBRARIES["te_fused 2.9"].items():
        monkeypatch.setitem(sys.modules, module, stand_in)
    monkeypatch.setattr(stand_ins, "padded_statistics", True)
    kernel, entries = KERNELS["te_fused"].make(), ENTRIES["one_square"]
    q, k, v = _inputs(torch.bfloat16)
    with pytest.raises(ConfigError, match=r"cuDNN >= 9\.6"):
        kernel.forward(kernel.prepare(entries, torch.device("cpu")), q, k, v, SCALE)


@pytest.mark.gpu
@pytest.mark.parametrize("entries", ENTRIES.values(), ids=ENTRIES)
@pytest.mark.parametrize("name", [name for name, offer in KERNELS.items() if "cpu" not in offer.devices])
def test_cuda_kernel_equals_plain(name, entries):
    if not KERNELS[name].installed:
        pytest.skip(f"{name} is not installed")
    inputs = _inputs(torch.bfloat16, "cuda")
    kernel = choose_kernel(name, torch.device("cuda"), torch.bfloat16, DIM)
    _assert_equal(_both(kernel, entries, inputs), _both(PlainKernel(), entries, [x.float() for x in inputs]), 2e-2)
