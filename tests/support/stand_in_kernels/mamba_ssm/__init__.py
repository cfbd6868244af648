# type: ignore  # modules made at run time
"""mamba_ssm by name: what Megatron calls, which needs a GPU, token by token."""

import sys
import types

import torch
import torch.nn.functional as F
from fla import causal_conv1d

__version__ = "2.3.2"


def mamba_split_conv1d_scan_combined(
    zxbcdt, conv1d_weight, conv1d_bias, dt_bias, A, D, chunk_size, initial_states=None, seq_idx=None,
    dt_limit=(0.0, float("inf")), return_final_states=False, activation="silu", rmsnorm_weight=None, rmsnorm_eps=1e-6,
    outproj_weight=None, outproj_bias=None, headdim=None, ngroups=1, norm_before_gate=True,
):  # fmt: skip
    assert initial_states is seq_idx is rmsnorm_weight is outproj_weight is outproj_bias is None
    assert dt_limit == (0.0, float("inf"))
    assert not return_final_states
    heads, (batch, length, _) = len(A), zxbcdt.shape
    headdim = headdim if D.dim() == 1 else D.shape[1]
    states = (len(conv1d_weight) - heads * headdim) // (2 * ngroups)
    z, x, b, c, dt = zxbcdt.split([heads * headdim, heads * headdim, ngroups * states, ngroups * states, heads], -1)
    mixed, _ = causal_conv1d(torch.cat([x, b, c], -1), conv1d_weight, conv1d_bias, activation=activation)
    x, b, c = mixed.split([heads * headdim, ngroups * states, ngroups * states], -1)
    x = x.view(batch, length, heads, headdim)
    b, c = (each.view(batch, length, ngroups, states).repeat_interleave(heads // ngroups, 2) for each in (b, c))
    dt = F.softplus(dt + dt_bias)
    state, outs = x.new_zeros(batch, heads, headdim, states), []
    for at in range(length):
        write = (dt[:, at, :, None] * x[:, at])[..., None] * b[:, at, :, None]
        state = state * (dt[:, at] * A).exp()[..., None, None] + write
        outs.append((state * c[:, at, :, None]).sum(-1))
    out = (torch.stack(outs, 1) if outs else x) + (D if D.dim() == 2 else D[:, None]) * x
    return out.flatten(2) * F.silu(z)


def mamba_chunk_scan_combined(
    x, dt, A, B, C, chunk_size, D=None, z=None, dt_bias=None, initial_states=None, seq_idx=None, cu_seqlens=None,
    dt_softplus=False, dt_limit=(0.0, float("inf")), return_final_states=False, return_varlen_states=False,
):  # fmt: skip
    raise NotImplementedError("what trains calls mamba_split_conv1d_scan_combined")


class RMSNorm(torch.nn.Module):
    def __init__(self, hidden_size, eps=1e-5, group_size=None, norm_before_gate=True, device=None, dtype=None):  # noqa: ARG002
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))
        self.eps, self.group_size = eps, group_size or hidden_size

    def forward(self, x, z=None):
        assert z is None
        groups = x.unflatten(-1, (-1, self.group_size))
        normed = groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + self.eps)
        return normed.flatten(-2) * self.weight


def _module(name, **content):
    module = types.ModuleType(f"{__name__}.{name}")
    module.__path__ = []
    for key, value in content.items():
        setattr(module, key, value)
    sys.modules[module.__name__] = module


_module("ops")
_module("ops.triton")
_module("ops.triton.layernorm_gated", RMSNorm=RMSNorm)
_module(
    "ops.triton.ssd_combined",
    mamba_chunk_scan_combined=mamba_chunk_scan_combined,
    mamba_split_conv1d_scan_combined=mamba_split_conv1d_scan_combined,
)
