"""Kernels of fla behind the seam of recurrences, by stand-ins with the signatures of the libraries."""

import inspect
import logging
import sys
from importlib import import_module
from operator import attrgetter
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_balance.compile.recurrent import program_of
from megatron_balance.ir.columns import Rows
from megatron_balance.runtime.groups import single
from megatron_balance.runtime.kernels import scans
from megatron_balance.runtime.kernels.recurrence import GatedDelta, Mamba2
from megatron_balance.runtime.kernels.scans import FlaGatedDelta, FlaMamba2
from megatron_balance.runtime.recurrent import bind_recurrent, recurrent_layer
from tests.support.upstream import FLA, MAMBA, NOT_LITERAL, parsed, signature

CPU, FP32 = torch.device("cpu"), torch.float32
STAND_INS = Path(__file__).parents[2] / "support" / "stand_in_kernels"
KERNELS = [(FlaGatedDelta(), scans.GATED_DELTA), (FlaGatedDelta(), scans.KDA), (FlaMamba2(), scans.MAMBA2)]
IDS = ["gated delta", "kda", "mamba-2"]
# Of mamba_ssm, what Megatron calls.
SCANS = ["mamba_split_conv1d_scan_combined", "mamba_chunk_scan_combined"]
NORM = ["RMSNorm.__init__", "RMSNorm.forward"]


@pytest.fixture
def libraries(monkeypatch):
    # Modules of these names, which go with the test.
    names = [name for name in sys.modules if name.split(".")[0] in ("fla", "mamba_ssm")]
    kept = {name: sys.modules.pop(name) for name in names}
    monkeypatch.syspath_prepend(STAND_INS)
    import_module("mamba_ssm")

    yield monkeypatch
    for name in [name for name in sys.modules if name.split(".")[0] in ("fla", "mamba_ssm")]:
        del sys.modules[name]
    sys.modules.update(kept)


@pytest.mark.usefixtures("libraries")
@pytest.mark.parametrize(("kernel", "called"), KERNELS, ids=IDS)
def test_a_library_gives_the_outputs_states_maps_and_gradients_of_plain_torch(kernel, called):
    apart = scans.differences(kernel, called == scans.KDA, CPU, FP32)
    assert {"out", "state", "M", "gradient 0"} <= set(apart)
    assert max(apart.values()) < 2e-5
    with torch.no_grad():  # as in a forward that is computed again
        assert scans.trial(kernel, called, CPU, FP32) == ""
    assert scans.trial(type(kernel)(dtype=torch.bfloat16), called, CPU, torch.bfloat16) == ""


@pytest.mark.usefixtures("libraries")
@pytest.mark.parametrize(("kernel", "called"), KERNELS, ids=IDS)
def test_a_layer_by_a_library_is_that_in_plain_torch_also_without_rows(kernel, called):
    plain = Mamba2() if isinstance(kernel, Mamba2) else GatedDelta()
    for rows in (150, 0):
        inputs, _ = scans.drawn(kernel, by_channel=called == scans.KDA, rows=rows)
        owned = [Rows.of(3, [(0, 0, rows)] if rows else [])]
        bound = bind_recurrent(program_of((rows,) if rows else (), owned, 2, 0), single())
        ours, wanted = (recurrent_layer(each, bound, *inputs) for each in (kernel, plain))
        assert ours.shape == wanted.shape
        assert np.abs((ours - wanted).numpy()).max(initial=0.0) < 1e-4


def test_a_kernel_is_taken_where_it_is_installed_and_right_and_said_once(libraries, caplog):
    caplog.set_level(logging.INFO)
    libraries.setattr(scans, "_serves", lambda *given: not scans._fault(*given, exact=False))
    scans._fault.cache_clear()
    like = torch.zeros(1, dtype=torch.bfloat16)
    assert scans.gated_delta(like) == FlaGatedDelta(64, torch.bfloat16)
    assert scans.gated_delta(like) == FlaGatedDelta(64, torch.bfloat16)
    assert caplog.text.count("recurrence fla.ops.gated_delta_rule.chunk_gated_delta_rule (torch.bfloat16)") == 1
    assert "its bits differ" in scans._fault(FlaGatedDelta(), scans.GATED_DELTA, CPU, FP32, exact=True)
    # Wrong, broken, not there: plain torch, with the reason.
    kda, mamba2 = (sys.modules[module] for module, _ in (scans.KDA, scans.MAMBA2))
    rule = kda.chunk_kda
    libraries.setattr(kda, "chunk_kda", lambda *args, **given: rule(*args, **given | {"scale": 1.1}))
    assert scans.gated_delta(like, by_channel=True) == GatedDelta(16)
    assert "chunk_kda differs from plain torch in its first call, out by" in caplog.text
    libraries.setattr(mamba2, "chunk_simple_gla", lambda *_: None)
    assert scans.mamba2(like, 32) == Mamba2(32)
    assert "chunk_simple_gla fails in its first call: " in caplog.text
    libraries.setitem(sys.modules, scans.MAMBA2[0], None)
    scans._fault.cache_clear()
    assert scans.mamba2(like) == Mamba2()
    assert "chunk_simple_gla is not installed" in caplog.text
    scans._fault.cache_clear()


def test_on_cpus_and_in_fp64_recurrences_are_in_plain_torch():
    assert scans.gated_delta(torch.zeros(1), 32) == GatedDelta(32)
    assert scans.gated_delta(torch.zeros(1), 64, by_channel=True) == GatedDelta(16)
    assert scans.mamba2(torch.zeros(1)) == Mamba2()
    assert not scans._serves(FlaMamba2(), scans.MAMBA2, torch.device("cuda"), torch.float64)


@pytest.mark.usefixtures("libraries")
@pytest.mark.parametrize(
    ("wheel", "path", "module", "names"),
    [
        (FLA, "fla/ops/gated_delta_rule/chunk.py", scans.GATED_DELTA[0], ["chunk_gated_delta_rule"]),
        (FLA, "fla/ops/kda/chunk.py", scans.KDA[0], ["chunk_kda"]),
        (FLA, "fla/ops/simple_gla/chunk.py", scans.MAMBA2[0], ["chunk_simple_gla"]),
        (FLA, "fla/modules/causal_conv1d/ops.py", "fla.modules.convolution", ["causal_conv1d"]),
        (FLA, "fla/modules/norm/l2norm.py", "fla.modules.l2norm", ["l2norm"]),
        (MAMBA, "mamba_ssm/ops/triton/ssd_combined.py", "mamba_ssm.ops.triton.ssd_combined", SCANS),
        (MAMBA, "mamba_ssm/ops/triton/layernorm_gated.py", "mamba_ssm.ops.triton.layernorm_gated", NORM),
    ],
)
def test_stand_ins_have_the_signatures_of_the_libraries(wheel: str, path: str, module: str, names: list[str]) -> None:
    source = parsed(wheel, path)
    for name in names:
        real, ours = signature(source, name), inspect.signature(attrgetter(name)(sys.modules[module]))
        default = {each.name: each.default for each in real.parameters.values() if each.default != NOT_LITERAL}
        assert [(each.name, each.kind) for each in ours.parameters.values()] == [
            (each.name, each.kind) for each in real.parameters.values()
        ]
        assert default == {each.name: each.default for each in ours.parameters.values() if each.name in default}
