"""Megatron's gated delta nets and Mamba mixers over the rows of a plan; their own code is not changed.

A mixer runs as over one sequence, without Megatron's context parallelism. While it does, the names
by which its module calls kernels stand for functions that know the plan (`runtime.recurrent`).
"""

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.ssm import mamba_mixer
from megatron.core.ssm.gated_delta_net import GatedDeltaNet
from megatron.core.ssm.mamba_mixer import MambaMixer
from torch import Tensor

from megatron_balance.errors import ConfigError
from megatron_balance.megatron.core_attention import BalancedSeqParams
from megatron_balance.runtime.kernels.scans import gated_delta, mamba2
from megatron_balance.runtime.recurrent import RecurrentBound, causal_convolution, recurrent_layer


class _BalancedGatedDeltaNet(GatedDeltaNet):
    """Megatron's gated delta net, which runs the plan of its microbatch over this rank's heads."""

    def __init__(self, *args: Any, pg_collection: Any, **kwargs: Any) -> None:
        super().__init__(*args, pg_collection=_without_context_parallelism(pg_collection), **kwargs)

    def forward(self, *args: Any, packed_seq_params: object = None, **kwargs: Any) -> Any:
        halo = self.conv1d.kernel_size[0] - 1
        bound = _bound_of(packed_seq_params, self, self.num_v_heads_local_tp, halo)
        # Ours gives the same bits each time; Megatron's deterministic code calls torch's convolution.
        config = copy.copy(self.config)
        config.deterministic_mode = False
        kernels = {"gated_delta_rule": _delta_rule(bound), "config": config}
        kwargs.pop("pg_collection", None)  # of Megatron's branch dev, in place of the module's
        with _in_place(inspect.getmodule(GatedDeltaNet), causal_conv1d=_convolution(bound)), _in_place(self, **kernels):
            return super().forward(*args, packed_seq_params=None, **kwargs)


class _BalancedMambaMixer(MambaMixer):
    """Megatron's Mamba mixer, which runs the plan of its microbatch over this rank's heads."""

    def __init__(self, *args: Any, pg_collection: Any, **kwargs: Any) -> None:
        super().__init__(*args, pg_collection=_without_context_parallelism(pg_collection), **kwargs)

    def forward(self, *args: Any, packed_seq_params: object = None, **kwargs: Any) -> Any:
        bound = _bound_of(packed_seq_params, self, self.nheads_local_tp, self.d_conv - 1)
        with _in_place(mamba_mixer, mamba_split_conv1d_scan_combined=_convolution_and_scan(bound)):
            return super().forward(*args, packed_seq_params=None, **kwargs)


# By Megatron's class, ours.
MIXERS: dict[type, type] = {GatedDeltaNet: _BalancedGatedDeltaNet, MambaMixer: _BalancedMambaMixer}


class _OneRank:
    """A process group of one rank, which nobody has to make."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


def _without_context_parallelism(groups: Any) -> Any:
    # Megatron would exchange heads for tokens around a mixer, for which they must be divisible.
    own = copy.copy(groups)
    own.cp = _OneRank()
    return own


def _bound_of(params: object, mixer: Any, num_heads: int, halo: int) -> RecurrentBound:
    """The program that a mixer runs. ConfigError: its microbatch has no plan."""
    if not isinstance(params, BalancedSeqParams):
        raise ConfigError(
            f"layer {mixer.layer_number}: {type(mixer).__name__} was called without a plan. The forward step must come "
            "from megatron_balance; a script that calls the model itself (inference, a custom loop) cannot run with "
            "--balance-config"
        )
    return params.recurrent_now(num_heads, halo, next(mixer.parameters()).device)


@contextmanager
def _in_place(owner: Any, **values: Any) -> Iterator[None]:
    kept = {name: getattr(owner, name) for name in values}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in kept.items():
            setattr(owner, name, value)


def _own(bound: RecurrentBound, x: Tensor) -> Tensor:
    # Rows [T, ...] that sequences own, of Megatron's [1, rows, ...]; padding comes last.
    return x[0, : len(bound.order)]


def _padded(out: Tensor, rows: int) -> Tensor:
    return torch.cat([out, out.new_zeros(rows - len(out), *out.shape[1:])])[None]


# The signatures of fla-core 0.6.0, of which what a mixer may give is taken, and anything else is an
# error of Python's.
def _convolution(bound: RecurrentBound) -> Callable[..., Any]:
    def causal_conv1d(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        activation: str,
        initial_state: None,
        output_final_state: bool,
        cu_seqlens: None,
        cp_context: None = None,
    ) -> tuple[Tensor, None]:
        assert initial_state is cu_seqlens is cp_context is None
        assert not output_final_state
        assert activation in ("silu", "swish")
        out = F.silu(causal_convolution(_own(bound, x), weight, bias, bound))
        return _padded(out, x.shape[1]), None

    return causal_conv1d


def _delta_rule(bound: RecurrentBound) -> Callable[..., Any]:
    def chunk_gated_delta_rule(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        initial_state: None,
        output_final_state: bool,
        use_qk_l2norm_in_kernel: bool,
        cu_seqlens: None,
        cp_context: None = None,
    ) -> tuple[Tensor, None]:
        assert initial_state is cu_seqlens is cp_context is None
        assert not output_final_state
        assert not use_qk_l2norm_in_kernel
        rows = v.shape[1]
        # Of grouped heads a kernel may be given one query and key for several values.
        q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], dim=2) for x in (q, k))
        q, k, v, g, beta = (_own(bound, x) for x in (q, k, v, g, beta))
        return _padded(recurrent_layer(gated_delta(v), bound, q * q.shape[2] ** -0.5, k, v, g, beta), rows), None

    return chunk_gated_delta_rule


# As of mamba_ssm 2.3.2.
def _convolution_and_scan(bound: RecurrentBound) -> Callable[..., Tensor]:
    def mamba_split_conv1d_scan_combined(
        zxbcdt: Tensor,
        conv1d_weight: Tensor,
        conv1d_bias: Tensor,
        dt_bias: Tensor,
        A: Tensor,
        D: Tensor,
        chunk_size: int,
        activation: str,
        headdim: int | None,
        ngroups: int,
        norm_before_gate: bool,
        seq_idx: None,
        state_dtype: torch.dtype | None = None,
    ) -> Tensor:
        del chunk_size, norm_before_gate, state_dtype  # states are fp32; there is no norm inside
        assert seq_idx is None
        assert activation in ("silu", "swish")
        num_heads, per_head = len(A), headdim or D.shape[1]
        inner = num_heads * per_head
        rows = _own(bound, zxbcdt)
        z, mixed, dt = rows.split([inner, len(conv1d_weight), num_heads], dim=1)
        mixed = F.silu(causal_convolution(mixed, conv1d_weight, conv1d_bias, bound))
        states = (len(conv1d_weight) - inner) // 2
        x, b, c = mixed.split([inner, states, states], dim=1)
        x = x.unflatten(1, (num_heads, per_head))
        # Heads of a group share what they write and read by.
        b, c = (
            each.unflatten(1, (ngroups, states // ngroups)).repeat_interleave(num_heads // ngroups, dim=1)
            for each in (b, c)
        )
        dt = F.softplus(dt.float() + dt_bias)
        y = recurrent_layer(mamba2(x), bound, x, dt, dt * A, b, c) + (D if D.dim() == 2 else D[:, None]) * x
        return _padded((y.flatten(1) * F.silu(z)).to(zxbcdt.dtype), zxbcdt.shape[1])

    return mamba_split_conv1d_scan_combined
