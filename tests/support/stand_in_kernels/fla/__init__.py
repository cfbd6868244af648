# type: ignore  # modules made at run time
"""flash-linear-attention by name: what Megatron and we call, which needs a GPU, token by token."""

import sys
import types

import torch
import torch.nn.functional as F


def causal_conv1d(
    x, weight=None, bias=None, residual=None, initial_state=None, output_final_state=False, activation=None,
    backend="triton", cu_seqlens=None, cu_seqlens_cpu=None, chunk_indices=None, cp_context=None, **kwargs,
):  # fmt: skip
    assert residual is initial_state is cu_seqlens is cu_seqlens_cpu is chunk_indices is cp_context is None
    assert not kwargs
    assert not output_final_state
    assert activation in (None, "silu", "swish")
    width = weight.shape[1]
    padded = F.pad(x, (0, 0, width - 1, 0))
    out = sum(padded[:, at : at + x.shape[1]] * weight[:, at] for at in range(width))
    out = out if bias is None else out + bias
    return out if activation is None else F.silu(out), None


def l2norm(x, eps=1e-6, output_dtype=None):
    assert output_dtype is None
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)


def chunk_gated_delta_rule(
    q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False,
    use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, state_v_first=False, cu_seqlens=None,
    cu_seqlens_cpu=None, chunk_indices=None, cp_context=None, **kwargs,
):  # fmt: skip
    assert cu_seqlens is cu_seqlens_cpu is chunk_indices is cp_context is None
    assert not any((use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval, state_v_first))
    assert not kwargs
    assert g.shape == v.shape[:3]
    return _delta(q, k, v, g[..., None], beta, scale, initial_state, output_final_state)


def chunk_kda(
    q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False,
    use_gate_in_kernel=False, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, safe_gate=False,
    lower_bound=None, disable_recompute=False, return_intermediate_states=False, state_v_first=False, cu_seqlens=None,
    cu_seqlens_cpu=None, cp_context=None, use_graph=False, max_num_seqs=None, **kwargs,
):  # fmt: skip
    assert lower_bound is cu_seqlens is cu_seqlens_cpu is cp_context is max_num_seqs is None
    assert not any((use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval))
    assert not any((safe_gate, disable_recompute, return_intermediate_states, state_v_first, use_graph, kwargs))
    assert g.shape == (*v.shape[:3], k.shape[3])
    assert k.shape[3] <= 256
    assert initial_state is None or initial_state.dtype == torch.float32
    return _delta(q, k, v, g, beta, scale, initial_state, output_final_state)


def chunk_simple_gla(
    q, k, v, g=None, g_gamma=None, scale=None, initial_state=None, output_final_state=False, state_v_first=False,
    cu_seqlens=None, cu_seqlens_cpu=None, **kwargs,
):  # fmt: skip
    assert g_gamma is cu_seqlens is cu_seqlens_cpu is None
    assert not state_v_first
    assert not kwargs
    assert g.shape == v.shape[:3] == k.shape[:3] == q.shape[:3]
    state = v.new_zeros(len(v), v.shape[2], k.shape[3], v.shape[3]) if initial_state is None else initial_state
    outs = []
    for at in range(v.shape[1]):
        state = state * g[:, at].exp()[..., None, None] + k[:, at, :, :, None] * v[:, at, :, None]
        outs.append((q[:, at, :, :, None] * state).sum(2))
    out = torch.stack(outs, 1) * (k.shape[3] ** -0.5 if scale is None else scale)
    return out.to(v.dtype), state if output_final_state else None


def _delta(q, k, v, g, beta, scale, initial_state, output_final_state):
    assert beta.shape == v.shape[:3]
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], dim=2) for x in (q, k))
    shape = len(v), v.shape[2], k.shape[3], v.shape[3]
    assert initial_state is None or initial_state.shape == shape
    state = v.new_zeros(shape) if initial_state is None else initial_state
    outs = []
    for at in range(v.shape[1]):
        key, decay = k[:, at, :, :, None], g[:, at].exp()[..., None]
        state = state * decay
        change = beta[:, at, :, None] * (v[:, at] - (key * state).sum(2))
        state = state + key * change[:, :, None]
        outs.append((q[:, at, :, :, None] * state).sum(2))
    out = torch.stack(outs, 1) if outs else v
    out = out * (k.shape[3] ** -0.5 if scale is None else scale)
    return out.to(v.dtype), state if output_final_state else None


def _module(name, **content):
    module = types.ModuleType(f"{__name__}.{name}")
    module.__path__ = []
    for key, value in content.items():
        setattr(module, key, value)
    sys.modules[module.__name__] = module


_module("modules")
_module("modules.convolution", causal_conv1d=causal_conv1d)
_module("modules.l2norm", l2norm=l2norm)
_module("ops")
_module("ops.cp", build_cp_context=None)
_module("ops.simple_gla", chunk_simple_gla=chunk_simple_gla)
_module("ops.kda", chunk_kda=chunk_kda)
_module("ops.gated_delta_rule", chunk_gated_delta_rule=chunk_gated_delta_rule)
