"""Our calls of other projects against their own sources: Transformer Engine's and
FlashAttention-4's wheels, torch's operators, and Megatron's calls of Transformer Engine.
"""

import ast
import inspect
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.nn.attention import _fa3, _fa4  # noqa: E402

from megatron_balance.runtime import kernels  # noqa: E402
from megatron_balance.runtime.kernels import KERNELS, CuSeqlens  # noqa: E402
from tests.support import attention_libraries as stand_ins  # noqa: E402
from tests.support.upstream import FLASH_ATTN_4, TRANSFORMER_ENGINE, found, keys, parsed, signature  # noqa: E402

ATTENTION = "transformer_engine/pytorch/attention/dot_product_attention"
FUSED = "transformer_engine/pytorch/cpp_extensions/fused_attn.py"


@pytest.mark.parametrize("name", ["fused_attn_fwd", "fused_attn_bwd"])
def test_the_stand_in_of_transformer_engine_has_the_real_signature(name: str) -> None:
    """Names, order and defaults; `tests/gpu/test_kernels.py` calls it as the runtime does."""
    real = signature(parsed(TRANSFORMER_ENGINE, FUSED), name)
    module = stand_ins.LIBRARIES["te_fused 2.18"]["transformer_engine.pytorch.cpp_extensions.fused_attn"]
    ours = inspect.signature(getattr(module, name))
    assert list(ours.parameters) == list(real.parameters)
    defaults = [{n: p.default for n, p in s.parameters.items()} for s in (ours, real)]
    assert defaults[0] == defaults[1]


def test_transformer_engine_knows_the_words_that_we_pass() -> None:
    module = parsed(TRANSFORMER_ENGINE, FUSED)
    assert "F16_arbitrary_seqlen" in keys(module, "FusedAttnBackend")
    assert "thd_thd_thd" in keys(module, "QKVLayout")
    assert "thd" in keys(module, "QKVFormat")
    assert {"padding", "padding_causal_bottom_right"} <= keys(module, "AttnMaskType")
    assert "no_bias" in keys(module, "AttnBiasType")
    types = keys(parsed(TRANSFORMER_ENGINE, "transformer_engine/pytorch/constants.py"), "TE_DType")
    assert {"torch.bfloat16", "torch.half"} <= types
    version = signature(parsed(TRANSFORMER_ENGINE, "transformer_engine/pytorch/utils.py"), "get_cudnn_version")
    assert not version.parameters


def test_megatron_makes_transformer_engines_attention_by_its_real_parameters() -> None:
    """So that what our stand-in for it takes without a look is what the real one takes."""
    spec = find_spec("megatron.core")
    if spec is None or spec.origin is None:
        pytest.skip("megatron-core is not installed")
    source = Path(spec.origin).parent / "extensions" / "transformer_engine.py"
    module = ast.parse(source.read_text(encoding="utf-8"))
    made = next(n for n in ast.walk(module) if isinstance(n, ast.ClassDef) and n.name == "TEDotProductAttention")
    passed: set[str] = set()
    for node in ast.walk(made):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "super().__init__":
            passed |= {keyword.arg for keyword in node.keywords if keyword.arg}
        if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "extra_kwargs":
            passed.add(ast.literal_eval(node.slice))
    assert {"kv_channels", "softmax_scale", "cp_comm_type"} <= passed
    real = signature(
        parsed(TRANSFORMER_ENGINE, f"{ATTENTION}/dot_product_attention.py"), "DotProductAttention.__init__"
    )
    assert passed <= set(real.parameters), passed - set(real.parameters)


def test_the_ring_that_te_ring_is_measured_by_is_there() -> None:
    """`planners/baselines.py` names it; its gradients travel in the model's type, as
    `gradient_wire: bf16` has them.
    """
    module = parsed(TRANSFORMER_ENGINE, f"{ATTENTION}/context_parallel.py")
    forward = signature(module, "AttnFuncWithCPAndKVP2P.forward")
    assert {"cu_seqlens_q", "cu_seqlens_kv", "cp_group", "cp_global_ranks", "cp_stream"} <= set(forward.parameters)
    backward = ast.unparse(found(module, "AttnFuncWithCPAndKVP2P.backward"))
    assert "flash_attn_p2p_communicate" in backward


class Recorded:
    """Stands for an operator of torch, and notes how it is called."""

    def __init__(self, results: tuple[Any, ...]) -> None:
        self.results = results
        self.args: tuple[Any, ...] = ()
        self.options: dict[str, Any] = {}

    def __call__(self, *args: Any, **options: Any) -> tuple[Any, ...]:
        self.args, self.options = args, options
        return self.results


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> dict[str, Recorded]:
    """How the runtime calls torch's flash attention, forward and backward."""
    x, lse, cu = torch.zeros(4, 2, 8), torch.zeros(2, 4), torch.zeros(2, dtype=torch.int32)
    recorded = {
        "_flash_attention_forward": Recorded((x, lse, None, None, None)),
        "_flash_attention_backward": Recorded((x, x, x)),
    }
    for name, record in recorded.items():
        monkeypatch.setattr(torch.ops.aten, name, record)
    kernel, at = kernels.TorchCalls(), CuSeqlens(cu, cu, 4, 4, True, (3, 0))
    kernel.forward(at, x, x, x, 0.5)
    kernel.backward(at, (x, x, lse.T), x, x, x, 0.5)
    return recorded


def test_torchs_operators_have_the_schema_that_we_call(calls: dict[str, Recorded]) -> None:
    schemas = {
        name: next(s for s in torch._C._jit_get_schemas_for_operator(f"aten::{name}") if not s.overload_name)
        for name in calls
    }
    for name, call in calls.items():
        positional = [a for a in schemas[name].arguments if not a.kwarg_only]
        assert len(call.args) + len(set(call.options) & {a.name for a in positional}) == len(positional), name
        assert set(call.options) <= {a.name for a in schemas[name].arguments}, name
        for argument, value in zip(positional, call.args, strict=False):
            wanted = {"Tensor": torch.Tensor, "SymInt": int, "int": int, "float": float, "bool": bool}
            kind = str(argument.type).removeprefix("Optional[").removesuffix("]")
            assert isinstance(value, wanted[kind]), (name, argument.name, argument.type)
    assert [a.name for a in schemas["_flash_attention_forward"].returns[:2]] == ["output", "softmax_logsumexp"]


@pytest.mark.parametrize("module", [_fa3, _fa4], ids=["FA3", "FA4"])
def test_what_torch_puts_behind_its_operators_takes_our_calls(module: Any, calls: dict[str, Recorded]) -> None:
    forward = "_fa3_flash_attention_forward_impl_default" if module is _fa3 else "_fa4_flash_attention_forward_impl"
    number = "3" if module is _fa3 else "4"
    for name, call in (
        (forward, calls["_flash_attention_forward"]),
        (f"_fa{number}_flash_attention_backward_impl", calls["_flash_attention_backward"]),
    ):
        inspect.signature(getattr(module, name)).bind(*call.args, **call.options)


def test_flash_attention_4_is_what_torch_calls() -> None:
    """Every argument that torch 2.13 passes, and two results of the forward, as it reads them."""
    interface = parsed(FLASH_ATTN_4, "flash_attn/cute/interface.py")
    passed = {name: torchs_keywords(name) for name in ("_flash_attn_fwd", "_flash_attn_bwd")}
    for name, keywords in passed.items():
        assert keywords <= set(signature(interface, name).parameters), name
        assert {"softmax_scale", "causal", "cu_seqlens_q", "cu_seqlens_k"} <= keywords
    forward = found(interface, "_flash_attn_fwd")
    assert isinstance(forward, ast.FunctionDef)
    assert forward.returns is not None
    assert ast.unparse(forward.returns) == "Tuple[torch.Tensor, torch.Tensor]"
    assert FLASH_ATTN_4.rpartition("-")[2] in KERNELS["flash_attn_4"].mend, "the version that we name"


def torchs_keywords(name: str) -> set[str]:
    """Keywords by which torch calls a function of FlashAttention-4."""
    run = _fa4._fa4_run_forward if name.endswith("fwd") else _fa4._fa4_run_backward
    tree = ast.parse(inspect.getsource(run))
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == f"module.{name}":
            given = {keyword.arg for keyword in node.keywords if keyword.arg}
            assigned = [n for n in ast.walk(tree) if isinstance(n, ast.AnnAssign) and ast.unparse(n.target) == "kwargs"]
            dicts = [n.value for n in assigned if isinstance(n.value, ast.Dict)]
            return given | {ast.literal_eval(key) for one in dicts for key in one.keys if key}
    raise AssertionError(f"torch no longer calls {name}")
