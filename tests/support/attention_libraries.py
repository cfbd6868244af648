"""Flash-attn 2 and 3 and Transformer Engine by names and signatures, with the plain formula behind."""

# Signatures: flash-attn v2.8.3, `flash_attn/flash_attn_interface.py`; flash-attn 3,
# `hopper/flash_attn_interface.py` of the same tag and of main (August 2026, commit 0251105a);
# Transformer Engine v2.9 and v2.18, `transformer_engine/pytorch/cpp_extensions/fused_attn.py`.

import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from megatron_balance.runtime.kernels import NO_WINDOW, CuSeqlens
from megatron_balance.runtime.kernels.base import Entries, PlainKernel

# Whether Transformer Engine's stand-in returns LSE as cuDNN before 9.6 does.
padded_statistics = False


def entries_of(at: CuSeqlens) -> Entries:
    # The entries of one launch. They are what a kernel can be given: int32, and the largest are the
    # largest.
    assert at.cu_q.dtype == at.cu_k.dtype == torch.int32
    q, k = at.cu_q.tolist(), at.cu_k.tolist()
    assert at.max_q == max(b - a for a, b in zip(q, q[1:], strict=False))
    assert at.max_k == max(b - a for a, b in zip(k, k[1:], strict=False))
    spans = [tuple(zip(cu, cu[1:], strict=False)) for cu in (q, k)]
    windows = () if at.window == NO_WINDOW else (at.window,) * len(spans[0])
    return Entries(spans[0], spans[1], (at.causal,) * len(spans[0]), spans[0], windows)


class ByFormula:
    # Calls of `runtime.kernels`' libraries, counted. LSE strided as FlashAttention leaves it.
    def __init__(self, softcap: float = 0.0) -> None:
        self.forwards = self.backwards = 0
        self.plain = PlainKernel(softcap)

    def forward(self, at: CuSeqlens, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        self.forwards += 1
        assert (len(q), len(k), len(v)) == (at.cu_q[-1], at.cu_k[-1], at.cu_k[-1])
        out, lse = self.plain.forward(entries_of(at), q, k, v, scale)
        return out, lse.T.contiguous().T

    def backward(
        self, at: CuSeqlens, dout: Any, q: Tensor, k: Tensor, v: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        self.backwards += 1
        assert all(len(x) == at.cu_q[-1] for x in (q, *dout))
        dq, dk, dv = self.plain.backward(entries_of(at), dout, q, k, v, scale)
        return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype)


def _packed(*tensors: Tensor, contiguous: bool = False) -> None:
    for x in tensors:
        assert x.dim() == 3
        assert x.dtype == torch.bfloat16
        assert x.stride(-1) == 1
        assert not contiguous or x.is_contiguous()


def _flash_forward(
    at: CuSeqlens, q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float
) -> tuple[Tensor, Tensor]:
    _packed(q, k, v)
    out, lse = ByFormula(softcap).forward(at, q, k, v, scale)
    return out, lse.T  # [heads, queries]


def _flash_backward(
    at: CuSeqlens,
    final: tuple[Tensor, ...],
    inputs: tuple[Tensor, ...],
    grads: tuple[Tensor, ...],
    scoring: tuple[float, float],
) -> None:
    dout, out, lse = final
    q, k, v = inputs
    _packed(q, k, v, dout, out)
    assert lse.shape == (q.shape[1], q.shape[0])
    assert lse.dtype == torch.float32
    assert lse.is_contiguous()
    scale, softcap = scoring
    found = ByFormula(softcap).backward(at, (dout, out, lse.T), q, k, v, scale)
    for grad, x, value in zip(grads, inputs, found, strict=True):
        assert grad.shape == x.shape
        assert grad.is_contiguous()
        grad.copy_(value)


def _module(name: str, **content: Any) -> dict[str, ModuleType]:
    # A module and those above it, by name.
    made: dict[str, ModuleType] = {}
    parts = name.split(".")
    for depth in range(1, len(parts) + 1):
        made[".".join(parts[:depth])] = module = ModuleType(".".join(parts[:depth]))
        module.__path__ = []
    for key, value in content.items():
        setattr(made[name], key, value)
    return made


def _passed(older: Callable[..., Any], given: dict[str, Any], **others: Any) -> Any:
    # What a newer signature was given, passed on to an older one by name.
    names = inspect.signature(older).parameters
    return older(**{**{name: value for name, value in given.items() if name in names}, **others})


def _fa2_forward(  # the names and order of the source
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal, window_size_left=-1,
    window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False, block_table=None, leftpad_k=None, seqused_k=None,
    zero_tensors=False,
):  # fmt: skip
    assert dropout_p == 0.0
    assert alibi_slopes is block_table is leftpad_k is seqused_k is None
    assert not return_softmax
    assert not zero_tensors
    window = (window_size_left, window_size_right)
    at = CuSeqlens(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, window)
    return *_flash_forward(at, q, k, v, softmax_scale, softcap), None, None


def _fa2_backward(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale,
    causal, window_size_left, window_size_right, softcap, alibi_slopes, deterministic, rng_state=None, zero_tensors=False,
):  # fmt: skip
    assert (dropout_p, deterministic) == (0.0, False)
    assert alibi_slopes is rng_state is None
    assert not zero_tensors
    window = (window_size_left, window_size_right)
    at = CuSeqlens(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, window)
    _flash_backward(at, (dout, out, softmax_lse), (q, k, v), (dq, dk, dv), (softmax_scale, softcap))
    return softmax_lse


def _fa3_forward(
    q, k, v, k_new, v_new, qv, out, cu_seqlens_q, cu_seqlens_k, cu_seqlens_k_new, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k,
    page_table, kv_batch_idx, leftpad_k, rotary_cos, rotary_sin, seqlens_rotary, q_descale, k_descale, v_descale, softmax_scale, causal,
    window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True, scheduler_metadata=None, num_splits=1, pack_gqa=None,
    sm_margin=0,
):  # fmt: skip
    appended = (k_new, v_new, cu_seqlens_k_new, kv_batch_idx, page_table, leftpad_k)
    rotated = (rotary_cos, rotary_sin, seqlens_rotary)
    others = (qv, out, seqused_q, seqused_k, q_descale, k_descale, v_descale, scheduler_metadata, pack_gqa)
    assert all(each is None for each in (*appended, *rotated, *others))
    numbers = (window_size, attention_chunk, rotary_interleaved, num_splits, sm_margin)
    assert numbers == ((-1, -1), 0, True, 1, 0)
    at = CuSeqlens(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal)
    return *_flash_forward(at, q, k, v, softmax_scale, softcap), None, None


def _fa3_backward(
    dout, q, k, v, out, softmax_lse, cu_seqlens_q, cu_seqlens_k, sequed_q, sequed_k, max_seqlen_q, max_seqlen_k, dq, dk, dv,
    softmax_scale, causal, window_size=(-1, -1), softcap=0.0, deterministic=False, sm_margin=0,
):  # fmt: skip
    assert sequed_q is sequed_k is None
    assert (window_size, deterministic, sm_margin) == ((-1, -1), False, 0)
    at = CuSeqlens(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal)
    _flash_backward(at, (dout, out, softmax_lse), (q, k, v), (dq, dk, dv), (softmax_scale, softcap))
    return dq, dk, dv, softmax_lse


def _fa3_forward_main(
    q, k, v, k_new=None, v_new=None, qv=None, out_=None, cu_seqlens_q=None, cu_seqlens_k=None, cu_seqlens_k_new=None, seqused_q=None,
    seqused_k=None, max_seqlen_q=None, max_seqlen_k=None, page_table=None, kv_batch_idx=None, leftpad_k=None, rotary_cos=None,
    rotary_sin=None, seqlens_rotary=None, q_descale=None, k_descale=None, v_descale=None, softmax_scale=None, causal=False,
    window_size_left=-1, window_size_right=-1, attention_chunk=0, softcap=0.0, rotary_interleaved=True, scheduler_metadata=None,
    num_splits=1, pack_gqa=None, sm_margin=0,
):  # fmt: skip
    window = (window_size_left, window_size_right)
    return _passed(_fa3_forward, locals(), out=out_, window_size=window)


def _fa3_backward_main(
    dout, q, k, v, out, softmax_lse, cu_seqlens_q=None, cu_seqlens_k=None, sequed_q=None, sequed_k=None, max_seqlen_q=None,
    max_seqlen_k=None, dq=None, dk=None, dv=None, softmax_scale=None, is_causal=False, window_size_left=-1, window_size_right=-1,
    softcap=0.0, deterministic=False, sm_margin=0,
):  # fmt: skip
    window = (window_size_left, window_size_right)
    _passed(_fa3_backward, locals(), causal=is_causal, window_size=window)
    return softmax_lse


def _te_at(cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, options: dict[str, Any]) -> CuSeqlens:
    assert options["cu_seqlens_q_padded"] is cu_q
    assert options["cu_seqlens_kv_padded"] is cu_k
    causal = options["attn_mask_type"] == "padding_causal_bottom_right"
    assert causal or options["attn_mask_type"] == "padding"
    left, right = options["window_size"]
    assert right == (0 if causal else -1)
    assert causal or left == -1
    assert (options["qkv_layout"], options["attn_bias_type"], options["dropout"]) == ("thd_thd_thd", "no_bias", 0.0)
    return CuSeqlens(cu_q, cu_k, max_q, max_k, causal, (left, right) if left >= 0 else NO_WINDOW)


def _te_forward(
    is_training, max_seqlen_q, max_seqlen_kv, cu_seqlens_q, cu_seqlens_kv, q, k, v, fake_dtype, fused_attention_backend, attn_bias=None,
    cu_seqlens_q_padded=None, cu_seqlens_kv_padded=None, page_table_k=None, page_table_v=None, s_quantizer=None, o_quantizer=None,
    attn_scale: Any = None, dropout=0.0, fast_zero_fill=True, qkv_layout="sbh3d", attn_bias_type="no_bias", attn_mask_type="padding",
    softmax_type="vanilla", window_size=(-1, -1), rng_gen=None, softmax_offset=None, return_max_logit=False,
):  # fmt: skip
    assert is_training
    assert fake_dtype == q.dtype
    assert fused_attention_backend == "F16"
    _packed(q, k, v, contiguous=True)
    at = _te_at(cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv, locals())
    out, lse = ByFormula().forward(at, q, k, v, attn_scale)
    shape = (len(cu_seqlens_q) - 1, q.shape[1], max_seqlen_q, 1) if padded_statistics else (*lse.shape, 1)
    statistics = torch.zeros(shape) if padded_statistics else lse.contiguous()[..., None]
    return out, [statistics, torch.zeros(2, dtype=torch.int64)]


def _te_backward(
    max_seqlen_q, max_seqlen_kv, cu_seqlens_q, cu_seqlens_kv, q, k, v, o, d_o, fake_dtype, dqkv_dtype, aux_ctx_tensors,
    fused_attention_backend, cu_seqlens_q_padded=None, cu_seqlens_kv_padded=None, s_quantizer=None, dp_quantizer=None,
    dqkv_quantizer=None, attn_scale: Any = None, dropout=0.0, fast_zero_fill=True, qkv_layout="sbh3d", attn_bias_type="no_bias",
    attn_mask_type="padding", softmax_type="vanilla", window_size=(-1, -1), deterministic=False,
):  # fmt: skip
    assert dqkv_dtype == "kBFloat16"
    assert fake_dtype == q.dtype
    assert fused_attention_backend == "F16"
    assert not deterministic
    _packed(q, k, v, o, d_o, contiguous=True)
    lse, seed = aux_ctx_tensors
    assert lse.shape == (*q.shape[:2], 1)
    assert lse.is_contiguous()
    assert lse.dtype == torch.float32
    assert (seed.numel(), seed.dtype.itemsize) == (2, 8)
    at = _te_at(cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv, locals())
    return *ByFormula().backward(at, (d_o, o, lse[..., 0]), q, k, v, attn_scale), None


def _te_forward_from_2_15(
    is_training, max_seqlen_q, max_seqlen_kv, cu_seqlens_q, cu_seqlens_kv, q, k, v, fake_dtype, fused_attention_backend, attn_bias=None,
    cu_seqlens_q_padded=None, cu_seqlens_kv_padded=None, page_table_k=None, page_table_v=None, s_quantizer=None, o_quantizer=None,
    attn_scale=None, dropout=0.0, fast_zero_fill=True, qkv_layout="sbh3d", o_format="sbhd", qkv_scale_inv_format=None,
    attn_bias_type="no_bias", attn_mask_type="padding", softmax_type="vanilla", window_size=(-1, -1), bottom_right_diagonal=None,
    rng_gen=None, softmax_offset=None, return_max_logit=False, cuda_graph=False,
):  # fmt: skip
    assert o_format == "thd"
    return _passed(_te_forward, locals())


def _te_backward_from_2_15(
    max_seqlen_q, max_seqlen_kv, cu_seqlens_q, cu_seqlens_kv, q, k, v, o, d_o, fake_dtype, aux_ctx_tensors, fused_attention_backend,
    cu_seqlens_q_padded=None, cu_seqlens_kv_padded=None, s_quantizer=None, dp_quantizer=None, dqkv_quantizer=None, attn_scale=None,
    dropout=0.0, fast_zero_fill=True, qkv_layout="sbh3d", o_format="sbhd", do_format="sbhd", dqkv_layout="sbh3d",
    qkv_scale_inv_format=None, do_scale_inv_format=None, attn_bias_type="no_bias", attn_mask_type="padding", softmax_type="vanilla",
    window_size=(-1, -1), bottom_right_diagonal=None, deterministic=False, cuda_graph=False,
):  # fmt: skip
    assert (o_format, do_format, dqkv_layout) == ("thd", "thd", "thd_thd_thd")
    return _passed(_te_backward, locals(), dqkv_dtype="kBFloat16")


def _flash(name: str, kind: str, forward: Any, backward: Any) -> dict[str, ModuleType]:
    return _module(name, **{f"_flash_attn{kind}_forward": forward, f"_flash_attn{kind}_backward": backward})


def _te(forward: Any, backward: Any) -> dict[str, ModuleType]:
    called, backends = {"fused_attn_fwd": forward, "fused_attn_bwd": backward}, {"F16_arbitrary_seqlen": "F16"}
    return {
        **_module("transformer_engine.pytorch.cpp_extensions.fused_attn", **called, FusedAttnBackend=backends),
        **_module("transformer_engine.pytorch.constants", TE_DType={torch.bfloat16: "kBFloat16"}),
    }


# By kernel name and version, the modules to put into `sys.modules`.
LIBRARIES: dict[str, dict[str, ModuleType]] = {
    "flash_attn 2.8.3": _flash("flash_attn.flash_attn_interface", "_varlen", _fa2_forward, _fa2_backward),
    "flash_attn_3 2.8.3": _flash("flash_attn_interface", "", _fa3_forward, _fa3_backward),
    "flash_attn_3 main": _flash("flash_attn_3.flash_attn_interface", "", _fa3_forward_main, _fa3_backward_main),
    "te_fused 2.9": _te(_te_forward, _te_backward),
    "te_fused 2.18": _te(_te_forward_from_2_15, _te_backward_from_2_15),
}
