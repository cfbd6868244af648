"""Jobs of recurrent layers for the ranks of the pool: a rank imports no pytest."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from megatron_balance import MicrobatchPlan
from megatron_balance.compile.pipeline import layout
from megatron_balance.ir.columns import Rows
from megatron_balance.ir.recurrent import RecurrentProgram
from megatron_balance.recurrent_reference import Floats, Recurrence
from megatron_balance.reference import owned_rows
from megatron_balance.runtime.attention import AttentionCall, balanced_attention
from megatron_balance.runtime.bind import AttentionShape, bind
from megatron_balance.runtime.groups import Groups
from megatron_balance.runtime.kernels.recurrence import AffineRecurrence, GatedDelta, Mamba2
from megatron_balance.runtime.recurrent import (
    RecurrentBound,
    _Halo,
    _Summaries,
    bind_recurrent,
    causal_convolution,
    recurrent_layer,
)
from tests.support.jobs import Run, tensors
from tests.support.jobs import inputs as inputs_of
from tests.support.pool import World
from tests.support.stream_threads import with_streams


@dataclass(frozen=True)
class RecurrentRun:
    # What a rank made of its rows: output and gradients in the order of its layout, with the names of
    # `Recurrence`; gradient of the taps; bytes received by exchange.
    out: Floats
    grads: dict[str, Floats]
    taps_grad: Floats
    received: dict[int, int] = field(default_factory=dict)


def _none(held: Any, *_: Any) -> Tensor:
    return torch.zeros(held.bound.program.num_heads, *held.shapes[1], dtype=held.like.dtype)


def _lost_rows(_ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return grad.new_zeros(len(_ctx.bound.order), grad.shape[2]), None


def _shifted(self: Any, number: int, sends: Any, receives: Any, *, exchange: Any = RecurrentBound.exchange) -> None:
    exchange(self, number, sends, receives)
    for x in receives.values() if number == 0 else ():
        x.copy_(x.roll(1, 0) * 0.5)


def _one_branch(self: Any, join: Any, *, whole: Any = _Summaries.join) -> None:
    if join.siblings:
        self.put(join.made, join.head_start, None, self.of_heads(join.one, join.head_start, join.head_stop)[1])
    else:
        whole(self, join)


# Faults of a runtime: what is put in place of what.
FAULTS: dict[str, tuple[Any, str, Any]] = {
    "M not transposed": (GatedDelta, "apply", lambda _self, m, state, **_: m @ state),
    "no M": (GatedDelta, "apply", lambda _self, _m, state, **_: state),
    "states and their gradients lost": (_Summaries, "state", _none),
    "gradients of other branches lost": (_Summaries, "join", _one_branch),
    "halo rows shifted": (RecurrentBound, "exchange", _shifted),
    "gradient of halo rows lost": (_Halo, "backward", staticmethod(_lost_rows)),
}


def faulty_run(world: World, fault: str, *given: Any) -> RecurrentRun:
    with patch.object(*FAULTS[fault]):
        return recurrent_run(world, *given)


def recurrent_run(
    world: World,
    program: RecurrentProgram,
    of: tuple[str, str, bool],
    inputs: Sequence[Recurrence],
    taps: Floats,
    dout: Sequence[Floats],
    groups: Groups | None = None,
) -> RecurrentRun:
    # Convolution and recurrence of this rank's rows, forward and backward. `of`: kind, type, whether
    # all of it is computed again in the backward.
    kind, dtype, again = of
    bound = bind_recurrent(program, groups or world.groups)
    given: dict[str, Tensor] = {}
    for name in ("q", "k", "v", "decay", "write", "erase"):
        rows = owned_rows(program.owned[world.rank], [getattr(x, name) for x in inputs])
        given[name] = torch.tensor(rows, dtype=getattr(torch, dtype)).requires_grad_()
    width = given["v"][0:1].numel() if len(given["v"]) else taps[0].size
    weight = torch.tensor(taps.reshape(len(taps), width).T.copy(), dtype=given["v"].dtype).requires_grad_()
    recurrence: AffineRecurrence = Mamba2(7) if kind == "mamba-2" else GatedDelta(7)

    def layer(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, write: Tensor) -> Tensor:
        mixed = causal_convolution(v.reshape(len(v), width), weight, None, bound).view(v.shape)
        g = decay.log() if kind == "kda" else decay.log().mean(-1)  # as many of one head
        if kind == "mamba-2":
            return recurrent_layer(recurrence, bound, mixed, write, g, k, q)
        return recurrent_layer(recurrence, bound, q, k, mixed, g, write)

    tensors = [given[name] for name in ("q", "k", "v", "decay", "write")]
    out = checkpoint(layer, *tensors, use_reentrant=False) if again else layer(*tensors)
    assert isinstance(out, Tensor)
    out.backward(torch.tensor(owned_rows(program.owned[world.rank], dout), dtype=out.dtype))
    grads = {name: x.grad.numpy().astype(np.float64) for name, x in given.items() if x.grad is not None}
    assert weight.grad is not None
    taps_grad = weight.grad.T.reshape(taps.shape).numpy().astype(np.float64)
    return RecurrentRun(out.detach().numpy().astype(np.float64), grads, taps_grad, dict(bound.received))


def on_streams(
    world: World, cases: Sequence[Any], planned: MicrobatchPlan, program: RecurrentProgram
) -> tuple[list[RecurrentRun], float]:
    # Runs on threads in the place of CUDA's streams; and beside attention there.
    groups = with_streams(world.groups, 4)
    ran = [recurrent_run(world, *case, groups=groups) for case in cases]
    return ran, beside_attention(world, planned, program, groups)


def narrow(world: World, program: RecurrentProgram) -> tuple[float, float, int]:
    # Largest differences of outputs and gradients by states in bf16 on the wire, over the largest, and
    # bytes of states received in fp32 for one there.
    rows = sum(stop - start for _, start, stop in program.owned[world.rank])
    random, found = torch.Generator().manual_seed(world.rank), list[tuple[Tensor, Tensor, int]]()
    x, c = (torch.randn(rows, program.num_heads, 8, generator=random) for _ in range(2))
    a = torch.full((rows, program.num_heads), -0.005)
    for wire in (None, torch.bfloat16):
        bound = bind_recurrent(program, world.groups, wire=wire)
        x = x.detach().requires_grad_()
        out = recurrent_layer(Mamba2(), bound, x, torch.ones_like(a), a, c, c)
        out.square().sum().backward()
        assert x.grad is not None
        found.append((out.detach(), x.grad, sum(bound.received.values())))
    (out, grad, wide), (out2, grad2, num_bytes) = found
    apart, apart2 = (float((b - a).abs().max() / a.abs().max()) for a, b in ((out, out2), (grad, grad2)))
    return apart, apart2, wide // max(1, num_bytes)


def beside_attention(
    world: World, planned: MicrobatchPlan, program: RecurrentProgram, groups: Groups | None = None
) -> float:
    # A layer with attention and a recurrence side by side, whose exchanges are under way between those
    # of attention, forward and backward: the largest difference to each by itself.
    owned, run = Rows.of(3, layout(planned, world.rank).tolist()), Run("keep", "float64")
    shape = AttentionShape(planned.num_heads, planned.num_kv_heads, 8)
    groups = groups or world.groups
    bound = bind(planned, world.rank, shape, groups=groups, dtype=torch.float64)
    recurrent = bind_recurrent(program, groups)
    q, k, v, dout = tensors(inputs_of(planned, 8), owned, shape, run)
    rows, random = (bound.num_tokens, program.num_heads), torch.Generator().manual_seed(world.rank)
    x = [torch.randn(*rows, *width, dtype=torch.float64, generator=random) for width in ((3,), (3,), (2,), (), ())]
    x[1], x[3], x[4] = 0.5 * functional.normalize(x[1], dim=-1), -0.1 * x[3].abs(), x[4].sigmoid()
    leaves = [q, k, v, *(each.requires_grad_() for each in x)]
    call = AttentionCall(bound)
    call.start(q, k, v)
    beside = recurrent_layer(GatedDelta(), recurrent, *x)
    call.attend()
    got = torch.autograd.grad([call.end(), beside], leaves, [dout, torch.ones_like(beside)])
    apart = recurrent_layer(GatedDelta(), recurrent, *x)
    wanted = torch.autograd.grad(balanced_attention(q, k, v, bound), (q, k, v), dout)
    wanted += torch.autograd.grad(apart, x, torch.ones_like(apart))
    found = [*zip(got, wanted, strict=True), (beside, apart)]
    return max((float((a - b).abs().max()) for a, b in found if a.numel()), default=0.0)


def kept_bytes(world: World, program: RecurrentProgram) -> int:
    # Bytes of the memory that a layer's backward keeps.
    bound = bind_recurrent(program, world.groups)
    rows, memory = (len(bound.order), program.num_heads), dict[int, int]()
    widths = ((3,), (3,), (2,), (), ())
    x = [torch.full((*rows, *width), -0.1, dtype=torch.float64, requires_grad=True) for width in widths]

    def note(kept: Tensor) -> Tensor:
        memory[kept.untyped_storage().data_ptr()] = kept.untyped_storage().nbytes()
        return kept

    with torch.autograd.graph.saved_tensors_hooks(note, lambda kept: kept):
        out = recurrent_layer(GatedDelta(), bound, *x)
    del out
    return sum(memory.values())
