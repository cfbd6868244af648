"""Recurrent layers of Transformers' models under a batch, unmodified.

Their modules, the mixers, call functions of their own file (`SEAMS`). These are wrapped once, outside
the filter of keywords that Transformers has around them: in a mixer that runs under a batch they
compute each document by itself, wherever its tokens lie; anywhere else they are what they were.
"""

import inspect
import sys
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache, partial, wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.compiler import disable

from megatron_balance.errors import ConfigError
from megatron_balance.runtime.kernels.scans import gated_delta, mamba2
from megatron_balance.runtime.lower.memory import wide_dtype
from megatron_balance.torch import positions
from megatron_balance.torch.batch import BalancedBatch, balanced_convolution, balanced_recurrence

CALLS = "balanced_calls"
"""Attribute of the modules of a model with mixers: calls under the plan that a forward makes."""

_WRAPPED = "balanced_seam"  # attribute of functions that are wrapped
_ATTENDS = "ALL_ATTENTION_FUNCTIONS"  # named in the forward of every module that attends
_CONVOLUTION = "causal_conv1d_fn"
_FUSED = "mamba2_split_conv1d_scan_combined"  # of Mamba-2 in training: None says that there is none

# Names in the forward of modules that mix tokens where a plan cannot reach, and what they are.
UNREACHED = {**dict.fromkeys(("mamba_selective_scan", "mamba_inner_fn"), "Mamba-1"), "rwkv_linear_attention": "RWKV"}


@dataclass
class _Mixing:
    """A mixer that runs under `batch`, whose model's forward makes so many `calls` under the plan.

    `alone`: it has a convolution and no recurrence, so the convolution is the call that is counted.
    `reached`: functions of `SEAMS` that it called.
    """

    batch: BalancedBatch
    calls: int
    alone: bool
    reached: set[str] = field(default_factory=set[str])


_mixing: ContextVar[_Mixing | None] = ContextVar("mixing", default=None)


def treat(model: nn.Module) -> None:
    """Let the mixers of a model run under batches. Safe to call twice.

    ConfigError: one mixes tokens where no plan reaches.
    """
    from transformers import PreTrainedModel

    for part in (each for each in model.modules() if isinstance(each, PreTrainedModel)):
        names = {module: _named(type(module)) for module in part.modules()}
        for module, named in names.items():
            if wrong := sorted({what for name, what in UNREACHED.items() if name in named}):
                raise ConfigError(
                    f"{type(module).__name__} of {type(model).__name__} is {', '.join(wrong)}, which mixes tokens past "
                    "any plan, across documents; use a model of attention, gated delta nets, KDA, Mamba-2 or short "
                    "convolutions"
                )
        calls = sum(bool(_seams(named)) or _ATTENDS in named for named in names.values())
        if not any(map(_seams, names.values())):
            continue
        # Inner models come later, and have the last word on their modules.
        for module, named in names.items():
            setattr(module, CALLS, calls)
            if _seams(named):
                _wrap(sys.modules[positions.kind_of(module).__module__], named)
                module.forward = partial(_mix, module)


@cache
def _named(kind: type[nn.Module]) -> frozenset[str]:
    """Names of globals and attributes in the forward of a class."""
    code = getattr(inspect.unwrap(kind.forward), "__code__", None)
    return frozenset(code.co_names if code else ())


def _seams(named: frozenset[str]) -> frozenset[str]:
    # What a mixer has to call; Mamba-2 looks whether there is a fused kernel and need not call it.
    return named & SEAMS.keys() - {_FUSED}


def _wrap(file: Any, named: frozenset[str]) -> None:
    for name in named & SEAMS.keys():
        original = getattr(file, name)
        if not hasattr(original, _WRAPPED):
            setattr(file, name, _wrapped(original, name))


def _wrapped(original: Callable[..., Any], name: str) -> Callable[..., Any]:
    @wraps(original)
    def run(*args: Any, **given: Any) -> Any:
        mixing = _mixing.get()
        if mixing is None:
            return original(*args, **given)
        mixing.reached.add(name)
        return SEAMS[name](mixing, *args, **given)

    setattr(run, _WRAPPED, True)
    return run


@disable
def _mix(mixer: nn.Module, *args: Any, **given: Any) -> Tensor:
    """The `forward` of a mixer. ConfigError: the batch, or a call of it, did not get where it must."""
    forward, batch, name = type(mixer).forward, given.get("balanced"), type(mixer).__name__
    if batch is None:
        if positions.running(mixer) is not None:
            raise ConfigError(f"{name} runs in a forward with a batch and was not handed it; hand keywords through")
        return forward(mixer, *args, **given)
    seams = _seams(_named(type(mixer)))
    mixing = _Mixing(batch, getattr(mixer, CALLS), seams == {_CONVOLUTION})
    token = _mixing.set(mixing)
    try:
        out = forward(mixer, *args, **given)
    finally:
        _mixing.reset(token)
    if missed := seams - mixing.reached:
        raise ConfigError(
            f"{name} did not call {', '.join(sorted(missed))} and mixed tokens past the plan; leave out caches, and "
            "kernels that replace its forward"
        )
    return out


def _convolution(
    mixing: _Mixing,
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **_: Any,
) -> Tensor:
    """[1, D, T]."""
    counted: Any = {"alone": mixing.alone, "layers": mixing.calls}
    out = balanced_convolution(hidden_states[0].T.to(weight.dtype), weight, bias, mixing.batch, **counted)
    if activation is not None:
        from transformers.activations import ACT2FN

        out = ACT2FN[activation](out)
    return out.T[None].to(hidden_states.dtype)


def _gated_delta(  # noqa: PLR0913, PLR0917  Transformers' signature
    mixing: _Mixing,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[Tensor, None]:
    """q, k [1, T, heads of keys, K], v [1, T, H, V], g [1, T, H] or, of KDA, [1, T, H, K]."""
    _check_no_state(initial_state, output_final_state)
    q, k, v, g, beta = (x[0].to(wide_dtype(x.dtype)) for x in (query, key, value, g, beta))
    if use_qk_l2norm_in_kernel:
        q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q, k = (_of_heads(x, v.shape[1]) for x in (q * q.shape[-1] ** -0.5, k))
    recurrence = gated_delta(query, chunk_size, by_channel=g.ndim == v.ndim)
    out = balanced_recurrence(recurrence, mixing.batch, q, k, v, g, beta, layers=mixing.calls)
    return out[None].to(query.dtype), None


def _mamba2(  # noqa: PLR0913, PLR0917  Transformers' signature
    mixing: _Mixing,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    **_: Any,
) -> Tensor:
    """x [1, T, H, P], dt [1, T, H], A and D [H], B and C [1, T, groups, N]."""
    _check_no_state(initial_states, return_final_states)
    x, b, c = (each[0].to(wide_dtype(each.dtype)) for each in (hidden_states, B, C))
    dt = dt[0] if dt_bias is None else dt[0] + dt_bias.to(dt.dtype)
    dt = (F.softplus(dt) if dt_softplus else dt).clamp(*dt_limit).to(x.dtype)
    b, c = (_of_heads(each, x.shape[1]) for each in (b, c))
    out = balanced_recurrence(
        mamba2(hidden_states, chunk_size), mixing.batch, x, dt, dt * A.to(x.dtype), b, c, layers=mixing.calls
    )
    return (out if D is None else out + D[:, None].to(x.dtype) * x)[None]


def _fused(*_: Any, **__: Any) -> None:
    """No kernel that fuses the convolution and the scan: the mixer calls both by themselves."""


def _of_heads(x: Tensor, num_heads: int) -> Tensor:
    return x.repeat_interleave(num_heads // x.shape[1], dim=1)


def _check_no_state(first: Tensor | None, wants_last: bool) -> None:
    if first is not None or wants_last:
        raise ConfigError("expected no cache of states beside a batch, got one; call model(**hf.inputs(batch))")


SEAMS: dict[str, Callable[..., Any]] = {
    _CONVOLUTION: _convolution,
    "torch_chunk_gated_delta_rule": _gated_delta,
    "chunk_kimi_delta_attention": _gated_delta,
    "mamba2_chunk_scan": _mamba2,
    _FUSED: _fused,
}
"""Functions of modeling files that mixers call, and what they are under a batch."""
