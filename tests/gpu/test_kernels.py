"""Kernels against the plain one."""

# How the varlen kernel groups and indexes entries, and what it hands to the libraries, is tested on
# the CPU, with the plain formula behind stand-ins of their signatures.

import sys
from dataclasses import replace
from itertools import accumulate
from types import ModuleType, SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from megatron_balance.cost.kernel import LAWS, TILE_TOKENS  # noqa: E402
from megatron_balance.errors import ConfigError  # noqa: E402
from megatron_balance.runtime import kernels  # noqa: E402
from megatron_balance.runtime.kernels import KERNELS, PaddedKernel, VarlenKernel, choose_kernel, cpu_flash  # noqa: E402
from megatron_balance.runtime.kernels.base import Entries, PlainKernel, hidden  # noqa: E402
from megatron_balance.runtime.kernels.cpu_flash import CpuFlashKernel  # noqa: E402
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
# Of one window: with keys before the first query, without, and more queries than the window.
ROWS = ((0, 10), (10, 13), (13, 32))
HALO = Entries(ROWS, ((0, 14), (14, 17), (9, 32)), (False,) * 3, ROWS, ((4, 0),) * 3)
WINDOWS = {
    "halo": HALO,
    "two_keys": replace(HALO, windows=((1, 0),) * 3),
    # Keys of the last queries are elsewhere: alone, and after whole windows.
    "cut_off": Entries(((0, 5), (5, 25)), ((0, 5), (3, 20)), (False,) * 2, ((0, 5), (5, 25)), ((0, 4), (2, 3))),
}


def _inputs(dtype, device="cpu"):
    torch.manual_seed(0)
    return [torch.randn(32, heads, DIM, dtype=dtype, device=device) for heads in (HEADS, KV_HEADS, KV_HEADS)]


def _both(kernel, entries, inputs):
    # Packed out, LSE and gradients of a kernel, whose own packed output is the final one here.
    q, k, v = inputs
    prepared = kernel.prepare(entries, q.device)
    out, lse = kernel.forward(prepared, q, k, v, SCALE)
    rows = max(stop for _, stop in entries.dout)
    final_out, final_lse = out.new_zeros(rows, *out.shape[1:]), lse.new_zeros(rows, HEADS)
    at = 0
    for start, stop in entries.dout:
        final_out[start:stop], final_lse[start:stop] = out[at : at + stop - start], lse[at : at + stop - start]
        at += stop - start
    dout = torch.ones_like(final_out) * torch.arange(1, rows + 1, device=out.device)[:, None, None] / rows
    return out, lse, *kernel.backward(prepared, (dout.to(out.dtype), final_out, final_lse), q, k, v, SCALE)


def _launches(kernel, entries):
    return kernel.launches(kernel.prepare(entries, torch.device("cpu")))


def _assert_equal(found, expected, tolerance):
    for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), found, expected, strict=True):
        scale = float(b.abs().max())
        assert float((a.double() - b.double()).abs().max()) <= tolerance * scale, name


@pytest.mark.parametrize("entries", {**ENTRIES, **WINDOWS}.values(), ids={**ENTRIES, **WINDOWS})
def test_cpu_flash_and_varlen_which_groups_and_indexes_entries_equal_plain(entries, monkeypatch):
    monkeypatch.setattr(cpu_flash, "_BLOCK", 3)
    varlen = VarlenKernel("by_formula", ByFormula())
    for kernel, dtype, tolerance in ((CpuFlashKernel(), torch.float32, 1e-5), (varlen, torch.float64, 1e-12)):
        inputs = _inputs(dtype)
        _assert_equal(_both(kernel, entries, inputs), _both(PlainKernel(), entries, inputs), tolerance)


@pytest.mark.parametrize("softcap", [0.0, 0.5], ids=["", "capped"])
@pytest.mark.parametrize("entries", {**ENTRIES, **WINDOWS}.values(), ids={**ENTRIES, **WINDOWS})
def test_plain_equals_autograd(entries, softcap):
    # The plain kernel's backward, when its own output is final, is the gradient of its forward.
    inputs = [x.requires_grad_() for x in _inputs(torch.float64)]
    found = _both(PlainKernel(softcap), entries, [x.detach() for x in inputs])
    dq, dk, dv = (torch.zeros_like(x) for x in inputs)
    rows = max(stop for _, stop in entries.dout)
    outs = []
    parts = zip(entries.q, entries.k, entries.causal, entries.dout, strict=True)
    for at, ((a, b), (c, d), mask, (e, f)) in enumerate(parts):
        one = Entries(((a, b),), ((c, d),), (mask,), windows=entries.windows[at : at + 1])
        out, _ = PlainKernel(softcap).forward(one, inputs[0], inputs[1], inputs[2], SCALE)
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


@pytest.mark.parametrize(("window", "keys"), [((4, 0), range(-4, 1)), ((0, 3), range(4)), ((2, 1), range(-2, 2))])
def test_a_window_shows_the_keys_around_a_querys_own(window, keys):
    # Eight queries, twelve keys: the first query's own key is the fifth, as in FlashAttention.
    entries = Entries(((0, 8),), ((0, 12),), (False,), ((0, 8),), (window,))
    masked = hidden(entries, 0, torch.device("cpu"))
    assert masked is not None
    assert masked.tolist() == [[key - (query + 4) not in keys for key in range(12)] for query in range(8)]


def test_an_op_takes_one_launch_or_two_whatever_the_number_of_its_entries():
    # Two where some are full and some causal; a full entry of one query row is causal as well.
    def launches(*entries):
        calls = ByFormula()
        q, k, causal = zip(*entries, strict=True)
        table = Entries(q, k, causal, q)
        kernel = VarlenKernel("by_formula", calls)
        _both(kernel, table, _inputs(torch.float64))
        assert calls.forwards == calls.backwards == _launches(kernel, table)
        return calls.forwards

    squares = [((i, i + 2), (i, i + 2), True) for i in range(0, 32, 2)]
    rectangles = [((i, i + 2), (0, i + 1), False) for i in range(0, 32, 2)]
    rows = [((i, i + 1), (0, 9), False) for i in range(32)]
    assert launches(*squares) == launches(*rectangles) == launches(*rows) == 1
    assert launches(*squares, *rectangles) == 2
    assert launches(*squares, *rows) == 1
    kernel = VarlenKernel("by_formula", ByFormula())
    assert [_launches(kernel, each) for each in WINDOWS.values()] == [1, 1, 2]


def test_a_backward_is_launched_by_key_length_where_that_pays(monkeypatch):
    # Two entries of long keys among nine of a block or two; a forward is launched once a mask.
    law = LAWS["flash_attn_3"]
    assert law.key_blocks is not None
    calls, grids = ByFormula(), []
    backward = calls.backward
    kernel = VarlenKernel("flash_attn_3", calls)

    def counted(at, *given):
        grids.append(HEADS * -(-at.max_k // TILE_TOKENS) * (len(at.cu_k) - 1))
        return backward(at, *given)

    monkeypatch.setattr(calls, "backward", counted)
    sizes = [(30, 900), (20, 20), (9, 150), (1, 1), (40, 1000), (5, 128), (4, 4), (6, 70), (7, 7), (8, 90), (3, 30)]
    stops_q, stops_k = (list(accumulate(each)) for each in zip(*sizes, strict=True))
    q, k = (tuple(zip((0, *stops), stops, strict=False)) for stops in (stops_q, stops_k))
    entries = Entries(q, k, (True, False) * 5 + (True,), q, heads=(HEADS, KV_HEADS))
    torch.manual_seed(0)
    inputs = [
        torch.randn(rows, heads, DIM, dtype=torch.float64)
        for rows, heads in ((stops_q[-1], HEADS), (stops_k[-1], KV_HEADS), (stops_k[-1], KV_HEADS))
    ]
    exact = _both(PlainKernel(), entries, inputs)
    # Blocks of keys, causal: 8, 2, 8, and 1 of four entries; full: 1 of four.
    needed, one_launch_each = HEADS * (22 + 4), HEADS * (7 * 8 + 4)
    # A launch that is dearer than all it would save; the long ones apart; those of two blocks, too.
    for price, launches, empty in ((200, 2, one_launch_each - needed), (20, 3, HEADS * 4), (4, 4, 0)):
        cheap = replace(law.key_blocks, launch_blocks=price, copy_blocks=0)
        monkeypatch.setitem(LAWS, "flash_attn_3", replace(law, key_blocks=cheap))
        grids.clear()
        _assert_equal(_both(kernel, entries, inputs), exact, 1e-12)
        assert len(grids) == _launches(kernel, entries) == launches
        assert _launches(kernel, replace(entries, dout=())) == 2
        assert sum(grids) - needed == empty


@pytest.fixture
def machine(monkeypatch):
    # A machine with a GPU of a capability, and libraries that are there, broken or missing; and
    # `trial`, the outcome of each kernel's first launch.
    monkeypatch.setattr(kernels, "_told", set())

    def have(capability, *installed, broken=None, trial=None, cudnn=""):
        def fault(name):
            return (broken or {}).get(name, "" if name in installed else kernels.NOT_INSTALLED)

        monkeypatch.setattr(kernels, "_import_fault", fault)
        monkeypatch.setattr(kernels, "capability_of", lambda device: capability if device.type == "cuda" else None)
        monkeypatch.setattr(kernels, "_trial_failure", lambda kernel, *_, **__: (trial or {}).get(kernel.name, ""))
        for name, one in KERNELS.items():
            if one.modules:
                made = replace(one, make=lambda *_, name=name: VarlenKernel(name, ByFormula()), check=lambda: cudnn)
                monkeypatch.setitem(KERNELS, name, made)

    return have


def chosen(device="cuda", dtype=torch.bfloat16, head_dim=128):
    return choose_kernel("auto", torch.device(device), dtype, head_dim).name


FA2, FA3, FA4 = "flash_attn.flash_attn_interface", "flash_attn_3.flash_attn_interface", "flash_attn.cute.interface"
TE = "transformer_engine.pytorch.cpp_extensions.fused_attn"


def test_a_kernel_that_is_not_there_or_does_not_serve_the_tensors_is_refused(machine):
    machine((9, 0))
    for name, device, dtype, dim, said in (
        ("torch_varlen", "cpu", torch.bfloat16, 64, "does not serve cpu tensors"),
        ("flash", "cpu", torch.bfloat16, 64, "'flash'; known: auto, plain, cpu_flash, torch_varlen, flash_attn, "),
        ("torch_varlen", "cuda", torch.bfloat16, 264, r"serves head dims up to 256 \(head dim 264\)"),
        ("flash_attn", "cuda", torch.float32, 64, "does not serve torch.float32, only torch.bfloat16, torch.float16"),
    ):
        with pytest.raises(ConfigError, match=said):
            choose_kernel(name, torch.device(device), dtype, dim)
    for name, needs in (
        ("flash_attn", "flash_attn"),
        ("flash_attn_3", "flash_attn_interface or flash_attn_3"),
        ("flash_attn_4", "flash_attn.cute"),
        ("te_fused", "transformer"),
    ):
        with pytest.raises(ConfigError, match=f"kernel {name} needs {needs}.* is not installed; .*or use kernel: auto"):
            choose_kernel(name, torch.device("cuda"), torch.bfloat16, 64)


@pytest.mark.parametrize(
    ("capability", "installed", "expected"),
    [
        ((9, 0), (), "torch_varlen"),
        ((9, 0), (FA2,), "flash_attn"),
        ((9, 0), (FA2, FA4), "flash_attn_4"),
        ((9, 0), (FA2, FA4, TE), "te_fused"),
        ((9, 0), (FA2, FA3, FA4, TE), "flash_attn_3"),
        ((8, 0), (FA3, FA4, TE), "torch_varlen"),
        ((8, 0), (FA2, FA3, FA4, TE), "flash_attn"),
        ((10, 0), (FA2, FA3, FA4, TE), "flash_attn_4"),
        ((10, 3), (FA2, FA3, TE), "te_fused"),
        ((12, 0), (FA3, FA4, TE), "torch_varlen"),
    ],
)
def test_auto_chooses_by_capability_and_by_what_is_installed(machine, capability, installed, expected):
    machine(capability, *installed)
    assert chosen() == expected
    assert chosen(device="cpu", dtype=torch.float32) == "cpu_flash"
    assert chosen(device="cpu", dtype=torch.float64) == "plain"


def test_auto_never_takes_the_formula_on_cuda_and_pads_heads_of_100(machine):
    # Tensors that no kernel serves are an error that says why, and what to install.
    machine((9, 0), FA2)
    with pytest.raises(ConfigError, match=r"torch.float32 and head dim 64 on cuda.*flash_attn_3: build.*kernel: plain"):
        chosen(dtype=torch.float32, head_dim=64)
    with pytest.raises(ConfigError, match=r"head dim 264 on cuda: .*flash_attn serves head dims up to 256"):
        chosen(head_dim=264)
    assert chosen(head_dim=100) == "flash_attn"
    machine((7, 5), FA2)
    with pytest.raises(ConfigError, match=r"flash_attn serves compute capability 8.0 and later, this GPU has 7.5"):
        chosen()
    assert choose_kernel("plain", torch.device("cuda"), torch.float32, 264).name == "plain"
    made = KERNELS["torch_varlen"].make(100, 0.0)
    assert isinstance(made, PaddedKernel)
    assert made.wide == 104


@pytest.mark.parametrize("fault", ["OSError: libcudart.so.12: cannot open", "ImportError: undefined symbol: _ZN3c104"])
def test_a_broken_wheel_is_reported_once_and_skipped(machine, caplog, fault):
    machine((9, 0), FA2, broken={FA3: fault})
    with caplog.at_level("INFO"):
        assert chosen() == chosen() == "flash_attn"
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        f"attention kernel flash_attn_3 is installed, but is skipped: {fault}",
        "attention kernel flash_attn (cuda, torch.bfloat16, head dim 128)",
    ]
    with pytest.raises(ConfigError, match=r"flash_attn_3 cannot be used here: .*build hopper/.*or use kernel: auto"):
        choose_kernel("flash_attn_3", torch.device("cuda"), torch.bfloat16, 128)


def test_a_kernel_whose_first_launch_is_wrong_is_skipped(machine, caplog):
    machine((9, 0), FA2, FA4, trial={"flash_attn_4": "its first call fails: ValueError: too many values to unpack"})
    assert chosen() == "flash_attn"
    assert "flash_attn_4 is installed, but is skipped: its first call fails: ValueError: too many" in caplog.text


def test_windows_are_refused_where_torchs_backward_of_flash_attention_4_does(machine, monkeypatch):
    # As torch 2.11 and 2.13 define it.
    def without(grad_out, query, key, value, out, logsumexp, cu_seq_q, cu_seq_k, scale, is_causal):
        raise AssertionError

    def with_windows(grad_out, query, key, value, window_size_left, window_size_right):
        raise AssertionError

    machine((9, 0), FA2, FA4)
    for backward, expected in ((without, "flash_attn"), (with_windows, "flash_attn_4")):
        monkeypatch.setattr(torch.nn.attention, "_fa4", SimpleNamespace(_fa4_run_backward=backward), raising=False)
        kernel = choose_kernel("auto", torch.device("cuda"), torch.bfloat16, 128, windows=True)
        assert (kernel.name, chosen()) == (expected, "flash_attn_4")
    monkeypatch.setattr(torch.nn.attention._fa4, "_fa4_run_backward", without)
    with pytest.raises(
        ConfigError, match=r"flash_attn_4 cannot be called with sliding windows: backward torch .* refuses"
    ):
        choose_kernel("flash_attn_4", torch.device("cuda"), torch.bfloat16, 128, windows=True)


def test_a_soft_cap_goes_to_the_libraries_that_have_one_and_is_refused_by_name(machine):
    machine((9, 0), FA2, FA3, FA4, TE)
    cuda, kind = torch.device("cuda"), torch.bfloat16
    assert choose_kernel("auto", cuda, kind, 128, softcap=50.0).name == "flash_attn_3"
    assert choose_kernel("auto", cuda, kind, 128, softcap=50.0, windows=True).name == "flash_attn"
    for name in ("te_fused", "flash_attn_4", "torch_varlen", "cpu_flash"):
        with pytest.raises(ConfigError, match=rf"kernel {name} cannot cap scores softly .*; use kernel: auto"):
            choose_kernel(name, cuda, kind, 128, softcap=50.0)
    machine((9, 0), FA4, TE)
    with pytest.raises(ConfigError, match=r"no attention kernel .*torch_varlen cannot cap .* flash_attn: pip install"):
        choose_kernel("auto", cuda, kind, 128, softcap=50.0)
    assert choose_kernel("auto", torch.device("cpu"), torch.float32, 16, softcap=50.0).name == "plain"


def test_a_cudnn_that_wants_multiples_of_64_is_skipped(machine, monkeypatch):
    machine((9, 0), TE, cudnn="cuDNN 9.6.0: ")
    assert chosen() == "torch_varlen"
    utils = SimpleNamespace()
    monkeypatch.setattr(kernels, "import_module", lambda _: utils)
    versions = (((9, 6, 0), "multiples of 64"), ((9, 7, 0), ""), ((9, 10, 1), "known faults"), ((9, 20, 0), ""))
    for version, fault in versions:
        utils.get_cudnn_version = lambda version=version: version
        found = kernels._cudnn_fault()
        assert (fault in found) if fault else not found


@pytest.mark.parametrize("error", ["OSError('libcudart.so.12: cannot')", "ImportError('undefined symbol: x')", "0 / 0"])
def test_an_import_that_raises_is_a_fault_and_no_end(tmp_path, monkeypatch, error):
    # The error is raised by the package above the module that is asked for, as flash-attn's is.
    name = f"broken_wheel_{abs(hash(error))}"
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text(error if "/" in error else f"raise {error}")
    monkeypatch.syspath_prepend(str(tmp_path))
    said = ("OSError: lib", "ImportError: undef", "ZeroDivisionError: ")
    assert kernels._import_fault(f"{name}.interface").startswith(said)
    (tmp_path / f"{name}_2").mkdir()
    (tmp_path / f"{name}_2" / "__init__.py").write_text("")
    for missing in (f"{name}_2.interface", "no_such_package.part"):
        assert kernels._import_fault(missing) == kernels.NOT_INSTALLED
    (tmp_path / f"{name}_2" / "inner.py").write_text("import no_such_dependency")
    assert kernels._import_fault(f"{name}_2.inner") == "ModuleNotFoundError: No module named 'no_such_dependency'"


class Misaligned(ByFormula):
    # Causal at the top left, as in FlashAttention before 2.1.
    def forward(self, at, q, k, v, scale):
        if not at.causal:
            return super().forward(at, q, k, v, scale)
        sizes, begins = at.cu_q.diff().tolist(), at.cu_k.tolist()
        rows = torch.cat([torch.arange(a, a + size) for a, size in zip(begins, sizes, strict=False)])
        return super().forward(replace(at, cu_k=at.cu_q, max_k=at.max_q), q, k[rows], v[rows], scale)


class WithoutWindows(ByFormula):
    # Takes a window, and attends to all keys before a query.
    def forward(self, at, q, k, v, scale):
        return super().forward(replace(at, window=kernels.NO_WINDOW), q, k, v, scale)


def test_the_trial_tells_a_kernel_that_means_something_else():
    cpu = torch.device("cpu")
    narrow = kernels._Tensors(cpu, torch.bfloat16, 64)
    ignores = VarlenKernel("without windows", WithoutWindows())
    assert kernels._trial_failure(ignores, narrow) == ""
    found = kernels._trial_failure(ignores, narrow._replace(windows=True))
    assert found.startswith("its first call differs from the formula, out by")
    right = VarlenKernel("right", ByFormula())
    padded = PaddedKernel(VarlenKernel("padded", ByFormula()), (100, 100), 104)
    assert kernels._trial_failure(right, narrow._replace(windows=True)) == ""
    assert kernels._trial_failure(padded, kernels._Tensors(cpu, torch.float32, 100)) == ""
    found = kernels._trial_failure(VarlenKernel("misaligned", Misaligned()), narrow)
    assert found.startswith("its first call differs from the formula, out by")


@pytest.mark.parametrize("entries", ENTRIES.values(), ids=ENTRIES)
@pytest.mark.parametrize("dim", [100, 20])
def test_padded_head_dims_give_exact_results(entries, dim):
    # llama-3b's heads of 100 on a kernel that takes multiples of 8.
    class Multiples(ByFormula):
        def forward(self, at, q, k, v, scale):
            assert {x.shape[-1] % 8 for x in (q, k, v)} == {0}
            return super().forward(at, q, k, v, scale)

        def backward(self, at, dout, q, k, v, scale):
            assert {x.shape[-1] % 8 for x in (q, k, v, *dout[:2])} == {0}
            return super().backward(at, dout, q, k, v, scale)

    torch.manual_seed(0)
    inputs = [torch.randn(32, heads, dim, dtype=torch.float64) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    padded = PaddedKernel(VarlenKernel("padded", Multiples()), (dim, dim), dim + -dim % 8)
    found = _both(padded, entries, inputs)
    _assert_equal(found, _both(PlainKernel(), entries, inputs), 1e-14)
    assert all(x.is_contiguous() for x in (found[0], *found[2:]))


@pytest.mark.parametrize("entries", {**ENTRIES, "halo": HALO}.values(), ids=[*ENTRIES, "halo"])
@pytest.mark.parametrize("name", stand_ins.LIBRARIES)
def test_a_library_is_called_as_its_source_says(name, entries, monkeypatch):
    # Modules of the libraries' names and signatures, that compute by the plain formula and refuse
    # what the real ones would.
    if entries.windows and KERNELS[name.split(" ")[0]].window_fault():
        pytest.skip(f"{name} is not called with windows")
    for module, stand_in in stand_ins.LIBRARIES[name].items():
        monkeypatch.setitem(sys.modules, module, stand_in)
    fault_of = dict.fromkeys(stand_ins.LIBRARIES[name], "")
    monkeypatch.setattr(kernels, "_import_fault", lambda module: fault_of.get(module, kernels.NOT_INSTALLED))
    offer, inputs = KERNELS[name.split(" ")[0]], _inputs(torch.bfloat16)
    for softcap in (0.0, 0.5) if offer.caps else (0.0,):
        exact = _both(PlainKernel(softcap), entries, [x.double() for x in inputs])
        _assert_equal(_both(offer.make(DIM, softcap), entries, inputs), exact, 2e-2)


@pytest.mark.parametrize("entries", [ENTRIES["bottom_right"], ENTRIES["mixed"], HALO], ids=["right", "mixed", "halo"])
def test_torchs_own_operators_take_these_arguments(entries):
    # On tensors without values: the operators' own shape rules are run, and tell a wrong argument.
    kernel = KERNELS["torch_varlen"].make(DIM, 0.0)
    meta = torch.device("meta")
    q, k, v = (x.to(meta) for x in _inputs(torch.bfloat16))
    prepared = kernel.prepare(entries, meta)
    out, lse = kernel.forward(prepared, q, k, v, SCALE)
    num_q, num_k = entries.num_q, sum(b - a for a, b in entries.k)
    assert (out.shape, out.dtype) == ((num_q, HEADS, DIM), torch.bfloat16)
    assert (lse.shape, lse.dtype) == ((num_q, HEADS), torch.float32)
    rows = max(stop for _, stop in entries.dout)
    final = (q.new_empty(rows, HEADS, DIM), q.new_empty(rows, HEADS, DIM), lse.new_empty(rows, HEADS))
    grads = kernel.backward(prepared, final, q, k, v, SCALE)
    assert [tuple(x.shape) for x in grads] == [(num_q, HEADS, DIM), (num_k, KV_HEADS, DIM), (num_k, KV_HEADS, DIM)]


def test_flash_attention_4_lies_behind_torchs_operators_while_it_is_chosen(monkeypatch):
    # torch's own registry, with a module that has what it looks for.
    interface = ModuleType(FA4)
    vars(interface).update(_flash_attn_fwd=None, _flash_attn_bwd=None)
    for depth in range(1, 3):
        monkeypatch.setitem(sys.modules, ".".join(FA4.split(".")[:depth]), ModuleType(""))
    monkeypatch.setitem(sys.modules, FA4, interface)
    assert not kernels._flash_attention_4_fault()
    own = kernels.TorchCalls()
    four = kernels.TorchCalls("FA4")
    try:
        assert kernels._current_impl() == "FA4"
        at = kernels.CuSeqlens(torch.zeros(1), torch.zeros(1), 1, 1, False)
        q, k, v = _inputs(torch.bfloat16)
        with pytest.raises(RuntimeError, match="is now FA4, this kernel was made for FlashAttention-2; make it anew"):
            own.forward(at, q, k, v, SCALE)
        assert four.impl == "FA4"
        kernels.TorchCalls()
        assert kernels._current_impl() is None
        kernels.TorchCalls("FA4")
    finally:
        kernels._restore_flash_attention()
    assert kernels._current_impl() is None


def test_padded_statistics_of_an_old_cudnn_are_refused(monkeypatch):
    for module, stand_in in stand_ins.LIBRARIES["te_fused 2.9"].items():
        monkeypatch.setitem(sys.modules, module, stand_in)
    monkeypatch.setattr(stand_ins, "padded_statistics", True)
    kernel, entries = KERNELS["te_fused"].make(DIM, 0.0), ENTRIES["one_square"]
    q, k, v = _inputs(torch.bfloat16)
    with pytest.raises(ConfigError, match=r"cuDNN >= 9\.7"):
        kernel.forward(kernel.prepare(entries, torch.device("cpu")), q, k, v, SCALE)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU here")
@pytest.mark.parametrize("entries", {**ENTRIES, "halo": HALO}.values(), ids=[*ENTRIES, "halo"])
@pytest.mark.parametrize("name", [name for name, offer in KERNELS.items() if "cpu" not in offer.devices])
def test_cuda_kernel_equals_plain(name, entries):
    cuda, windows = torch.device("cuda"), bool(entries.windows)
    if reason := KERNELS[name].refusal(cuda, torch.bfloat16, DIM, windows=windows) or KERNELS[name].fault():
        pytest.skip(f"{name}: {reason}")
    inputs = _inputs(torch.bfloat16, "cuda")
    for softcap in (0.0, 0.5) if KERNELS[name].caps else (0.0,):
        kernel = choose_kernel(name, cuda, torch.bfloat16, DIM, windows=windows, softcap=softcap)
        exact = _both(PlainKernel(softcap), entries, [x.float() for x in inputs])
        _assert_equal(_both(kernel, entries, inputs), exact, 2e-2)
