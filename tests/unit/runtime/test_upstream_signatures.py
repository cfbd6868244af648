"""Our calls, and Megatron's, against the sources of Transformer Engine, FlashAttention-4 and torch."""

import ast
import inspect
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

torch = pytest.importorskip("torch")

from torch.nn.attention import _fa3, _fa4  # noqa: E402

from megatron_balance.runtime import kernels  # noqa: E402
from tests.support import attention_libraries as stand_ins  # noqa: E402
from tests.support.upstream import FLASH_ATTN_4, TRANSFORMER_ENGINE, found, keys, parsed, signature  # noqa: E402

ATTENTION = "transformer_engine/pytorch/attention/dot_product_attention"
FUSED = "transformer_engine/pytorch/cpp_extensions/fused_attn.py"


def test_transformer_engine_has_the_signatures_of_its_stand_in_and_the_words_that_we_pass() -> None:
    # The stand in of transformer engine has the real signature.
    # Names, order and defaults; `tests/gpu/test_kernels.py` calls it as the runtime does.
    module = stand_ins.LIBRARIES["te_fused 2.18"]["transformer_engine.pytorch.cpp_extensions.fused_attn"]
    for name in ("fused_attn_fwd", "fused_attn_bwd"):
        real, ours = signature(parsed(TRANSFORMER_ENGINE, FUSED), name), inspect.signature(getattr(module, name))
        given = [[(n, p.default) for n, p in each.parameters.items()] for each in (ours, real)]
        assert given[0] == given[1]
    # Transformer engine knows the words that we pass.
    module = parsed(TRANSFORMER_ENGINE, FUSED)
    for table, words in (
        ("FusedAttnBackend", {"F16_arbitrary_seqlen"}),
        ("QKVLayout", {"thd_thd_thd"}),
        ("QKVFormat", {"thd"}),
        ("AttnMaskType", {"padding", "padding_causal_bottom_right"}),
        ("AttnBiasType", {"no_bias"}),
    ):
        assert words <= keys(module, table)
    types = keys(parsed(TRANSFORMER_ENGINE, "transformer_engine/pytorch/constants.py"), "TE_DType")
    assert {"torch.bfloat16", "torch.half"} <= types
    version = signature(parsed(TRANSFORMER_ENGINE, "transformer_engine/pytorch/utils.py"), "get_cudnn_version")
    assert not version.parameters
    # The ring that `planners/baselines.py` names; its gradients travel in the model's type, as
    # `gradient_wire: bf16` has them.
    module = parsed(TRANSFORMER_ENGINE, f"{ATTENTION}/context_parallel.py")
    forward = signature(module, "AttnFuncWithCPAndKVP2P.forward")
    assert {"cu_seqlens_q", "cu_seqlens_kv", "cp_group", "cp_global_ranks", "cp_stream"} <= set(forward.parameters)
    assert "flash_attn_p2p_communicate" in ast.unparse(found(module, "AttnFuncWithCPAndKVP2P.backward"))


def test_megatron_makes_transformer_engines_attention_by_its_real_parameters() -> None:
    # So that what our stand-in for it takes without a look is what the real one takes.
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
    own = parsed(TRANSFORMER_ENGINE, f"{ATTENTION}/dot_product_attention.py")
    assert passed <= set(signature(own, "DotProductAttention.__init__").parameters)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """How the runtime calls torch's flash attention, forward and backward: arguments and keywords."""
    x, lse, cu = torch.zeros(4, 2, 8), torch.zeros(2, 4), torch.zeros(2, dtype=torch.int32)
    recorded = {
        "_flash_attention_forward": Mock(return_value=(x, lse, None, None, None)),
        "_flash_attention_backward": Mock(return_value=(x, x, x)),
    }
    for name, record in recorded.items():
        monkeypatch.setattr(torch.ops.aten, name, record)
    kernel, at = kernels.TorchCalls(), kernels.CuSeqlens(cu, cu, 4, 4, True, (3, 0))
    kernel.forward(at, x, x, x, 0.5)
    kernel.backward(at, (x, x, lse.T), x, x, x, 0.5)
    return {name: record.call_args for name, record in recorded.items()}


def test_torchs_operators_have_the_schema_that_we_call(calls: dict[str, Any]) -> None:
    # Torchs operators have the schema that we call.
    schemas = {
        name: next(s for s in torch._C._jit_get_schemas_for_operator(f"aten::{name}") if not s.overload_name)
        for name in calls
    }
    for name, call in calls.items():
        positional = [a for a in schemas[name].arguments if not a.kwarg_only]
        assert len(call.args) + len(set(call.kwargs) & {a.name for a in positional}) == len(positional), name
        assert set(call.kwargs) <= {a.name for a in schemas[name].arguments}, name
        for argument, value in zip(positional, call.args, strict=False):
            wanted = {"Tensor": torch.Tensor, "SymInt": int, "int": int, "float": float, "bool": bool}
            kind = str(argument.type).removeprefix("Optional[").removesuffix("]")
            assert isinstance(value, wanted[kind]), (name, argument.name, argument.type)
    assert [a.name for a in schemas["_flash_attention_forward"].returns[:2]] == ["output", "softmax_logsumexp"]
    # What torch puts behind its operators takes our calls.
    for module, names in (
        (_fa3, ("_fa3_flash_attention_forward_impl_default", "_fa3_flash_attention_backward_impl")),
        (_fa4, ("_fa4_flash_attention_forward_impl", "_fa4_flash_attention_backward_impl")),
    ):
        for name, call in zip(names, calls.values(), strict=True):
            inspect.signature(getattr(module, name)).bind(*call.args, **call.kwargs)


def test_flash_attention_4_is_what_torch_calls() -> None:
    # Every argument that torch 2.13 passes, and two results of the forward, as it reads them.
    interface = parsed(FLASH_ATTN_4, "flash_attn/cute/interface.py")
    passed = {name: torchs_keywords(name) for name in ("_flash_attn_fwd", "_flash_attn_bwd")}
    for name, keywords in passed.items():
        assert keywords <= set(signature(interface, name).parameters), name
        assert {"softmax_scale", "causal", "cu_seqlens_q", "cu_seqlens_k"} <= keywords
    forward: Any = found(interface, "_flash_attn_fwd")
    assert ast.unparse(forward.returns) == "Tuple[torch.Tensor, torch.Tensor]"
    assert FLASH_ATTN_4.rpartition("-")[2] in kernels.KERNELS["flash_attn_4"].mend, "the version that we name"


def test_flash_attention_4_is_given_no_windows_by_a_torch_whose_backward_refuses_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    offer, tensors = kernels.KERNELS["flash_attn_4"], (torch.device("meta"), torch.bfloat16, 64)

    def of_2_11(grad: Any, causal: Any) -> None: ...

    def of_2_13(grad: Any, causal: Any, window_size_left: Any) -> None: ...

    for backward, said in ((of_2_11, "cannot be called with sliding windows"), (of_2_13, "does not serve meta")):
        monkeypatch.setattr(_fa4, "_fa4_run_backward", backward)
        assert offer.refusal(*tensors, windows=True).startswith(said)
        assert offer.refusal(*tensors).startswith("does not serve meta")


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
