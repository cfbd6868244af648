"""Attention by a plan: one differentiable call, or its three segments with other work between."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor

from megatron_balance.compile.ping_pong import NanoSegment
from megatron_balance.errors import ConfigError, InvalidProgramError
from megatron_balance.ir.program import Kind
from megatron_balance.runtime.bind import Bound
from megatron_balance.runtime.executor import BackwardRun, ForwardRun, run_backward, run_forward
from megatron_balance.runtime.kernels.latent import LatentKernel
from megatron_balance.runtime.lower.memory import Buffers, CallForm, received_in, shapes, wide_dtype
from megatron_balance.runtime.lower.steps import INPUTS
from megatron_balance.runtime.phase_run import PhaseRun, Received

T = TypeVar("T")


def differentiable_once(backward: Callable[..., T]) -> Callable[..., T]:
    """The backward of an autograd Function, refused under `create_graph=True`."""
    # torch's `once_differentiable` refuses only where the gradient of the output needs a gradient
    # itself, and leaves out the terms by queries, keys and values without a word.

    @wraps(backward)
    def checked(ctx: Any, *grads: Tensor) -> T:
        if torch.is_grad_enabled():  # autograd has it so in a backward under create_graph alone
            raise ConfigError(
                "create_graph=True: second derivatives through balanced attention and its exchanges are not "
                "implemented; call backward without it (retain_graph=True keeps the graph for another backward)"
            )
        return backward(ctx, *grads)

    return checked


@dataclass(slots=True)
class BackwardSlot:
    """Where the backward of a call finds its plan, put there before the backward pass begins."""

    # A pipeline stage attends backward with other stages than forward.
    bound: Bound | None = None

    def bound_for(self, num_tokens: int) -> Bound:
        """The plan that was put here. InvalidProgramError: none, or one of other numbers of rows."""
        if self.bound is None or self.bound.num_tokens != num_tokens:
            held = "none" if self.bound is None else f"one with {self.bound.num_tokens}"
            raise InvalidProgramError(
                f"the backward of {num_tokens} rows needs a plan in which this rank owns as many, got {held}; "
                "put the plan of its tick into the BackwardSlot before the backward pass"
            )
        return self.bound


def balanced_attention(  # noqa: PLR0913  three tensors and how to run them
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bound: Bound,
    softmax_scale: float | None = None,
    backward: BackwardSlot | None = None,
    *,
    hooked: bool = False,
    sink: Tensor | None = None,
) -> Tensor:
    """Attention [T, H, V] of this rank's queries q [T, H, D], in the order of `bound.owned`, over
    keys k [T, G, D] and values v [T, G, V] of their sequences under the plan's mask, wherever these
    lie.

    Differentiable. Collective: every rank of the pool calls it, also one without tokens (T = 0).
    `softmax_scale`: default 1 / sqrt(D). `backward`: where the backward finds its plan, if that is
    not `bound`; then both are bound with policy `replay`. `hooked`: save what was received by
    autograd's means, so that hooks on saved tensors see it (activation checkpointing drops it and
    computes it again, offloading moves it); else the backward lets it go piece by piece. `sink`
    [H]: a logit of each head that every query has beside its keys, without a value; its gradient is
    of this rank's queries alone.

    ConfigError: the tensors do not have the plan's rows and heads. InvalidProgramError: in the
    backward, as `BackwardSlot.bound_for`.
    """
    _check(q, k, v, bound, sink)
    call = (bound, backward or BackwardSlot(bound), _scale(softmax_scale, bound), hooked)
    return _Attention.apply(call, None, sink, q, k, v)


def latent_attention(
    q: Tensor,
    latent: Tensor,
    weight: Tensor,
    bound: Bound,
    softmax_scale: float | None = None,
    backward: BackwardSlot | None = None,
) -> Tensor:
    """`balanced_attention` over latents [T, 1, L] of multi-latent attention, which travel in place
    of keys and values: the normalised latent, and behind it the rotary key that all heads share.

    `weight` [H * (D - R + V), C] makes keys (without rotary part) and values of it; its gradient is
    of this rank's queries over all keys that they see: the sum over the pool is the whole one.
    `bound`: its shape has `latent`. Others, and errors, as there.
    """
    shape = bound.shape
    if not isinstance(bound.kernel, LatentKernel):
        raise ConfigError("the plan was bound for keys and values, not for latents; give AttentionShape(latent=...)")
    _check_rows(bound, ("q", q, (shape.num_heads, shape.head_dim)), ("latent", latent, (1, shape.latent_dim)))
    call = (bound, backward or BackwardSlot(bound), _scale(softmax_scale, bound), False)
    return _Attention.apply(call, weight, None, q, latent)


def _of_layer(bound: Bound, weight: Tensor | None) -> Bound:
    """The plan as a layer with this weight runs it; None: all layers run it alike."""
    if weight is None:
        return bound
    kernel: Any = bound.kernel
    return replace(bound, kernel=kernel.with_weight(weight))


def attend_flat(  # noqa: PLR0913, PLR0917  as `balanced_attention`
    bound: Bound, q: Tensor, k: Tensor, v: Tensor, scale: float | None, sink: Tensor | None, room: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The forward of `balanced_attention` for a caller that keeps tensors itself, as an operator's
    does: output [T, H, V], LSE [T, H], and what was received for the backward, one behind the other
    in `room` elements. ConfigError: as there.
    """
    _check(q, k, v, bound, sink)
    out, lse, received = run_forward(bound, q, (k, v), _scale(scale, bound))
    flat = q.new_empty(room)
    kept = _received_in(flat, bound)
    for buffer, x in kept.q.items():
        x.copy_(received.q[buffer])
    for buffer, parts in kept.kv.items():
        for x, got in zip(parts, received.kv[buffer], strict=True):
            x.copy_(got)
    return *_with_sink(out, lse, sink), flat


def attend_flat_back(  # noqa: PLR0913, PLR0917  what the forward took and gave
    bound: Bound,
    dout: Tensor,
    inputs: tuple[Tensor, Tensor, Tensor],
    final: tuple[Tensor, Tensor],
    flat: Tensor,
    scale: float | None,
    sink: Tensor | None,
) -> tuple[tuple[Tensor, ...], Tensor | None]:
    """Gradients of q, k and v, and that of the sink; `final`: output and LSE of `attend_flat`."""
    received = _received_in(flat, bound)
    grads = run_backward(bound, dout, inputs, final, received, _scale(scale, bound))
    return grads, _sink_gradient(dout, final, sink)


def room_of(bound: Bound) -> int:
    """Elements of what a call receives and keeps for its backward."""
    return sum(math.prod(shape) for _, _, shapes in _kept(bound) for shape in shapes)


def _kept(bound: Bound) -> list[tuple[Kind, int, list[tuple[int, ...]]]]:
    """Kind, buffer and shapes of each input that a call keeps for its backward."""
    if bound.policy != "keep":
        return []
    form = _form(bound)
    messages = [m for m in received_in(bound.phase("forward")) if m.kind in INPUTS]
    return [(m.kind, m.buffer, [shape for shape, _ in shapes(m.carried, form)]) for m in messages]


def _received_in(flat: Tensor, bound: Bound) -> Received:
    """The inputs that lie in `flat`, as views of it."""
    received, at = Received(), 0
    for kind, buffer, of in _kept(bound):
        parts: list[Tensor] = []
        for shape in of:
            parts.append(flat[at : at + math.prod(shape)].view(shape))
            at += math.prod(shape)
        if kind == Kind.Q:
            received.q[buffer] = parts[0]
        else:
            received.kv[buffer] = tuple(parts[0].unbind(0) if _form(bound).joined else parts)
    return received


def _form(bound: Bound) -> CallForm:
    return CallForm.of(bound.shape, torch.float32, bound.gradient_wire)  # for shapes, alike in all types


class AttentionCall:
    """`balanced_attention` in three segments: `start`, `attend`, `end`, once each. Differentiable."""

    # Calls of two plans that were bound as different nano-batches may be under way at once, with
    # other work between their segments, in one order on all ranks (`compile.ping_pong`). Autograd
    # goes back through what ran in reverse, so the backwards' segments lie between one another
    # likewise.

    def __init__(
        self,
        bound: Bound,
        softmax_scale: float | None = None,
        backward: BackwardSlot | None = None,
        sink: Tensor | None = None,
    ) -> None:
        self._bound, self._sink = bound, sink
        self._runs = _Runs(backward or BackwardSlot(bound), bound.num_tokens, _scale(softmax_scale, bound))
        self._link: Tensor | None = None
        self._inputs: tuple[Tensor, Tensor, Tensor] | None = None

    def start(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Issue what sends inputs to other ranks. ConfigError: the tensors are not the plan's."""
        _check(q, k, v, self._bound, self._sink)
        self._inputs = (q.detach(), k.detach(), v.detach())
        self._link = _FirstSegment.apply(q, k, v, self._bound, self._runs)

    def attend(self) -> None:
        """Attend to what has come, and issue what goes back to owners."""
        assert self._link is not None, "an attention call begins with its start"
        self._link = _AttentionFunction.apply(self._link, self._runs)

    def end(self) -> Tensor:
        """Wait for results of owned rows: the output [T, H, V]."""
        assert self._link is not None, "an attention call begins with its start"
        assert self._inputs is not None
        out = _End.apply(self._link, *self._inputs, self._sink, self._runs)
        self._link = self._inputs = None
        return out


def _check(q: Tensor, k: Tensor, v: Tensor, bound: Bound, sink: Tensor | None) -> None:
    shape = bound.shape
    keys, values = shape.widths
    heads, kv_heads = shape.num_heads, shape.num_kv_heads
    _check_rows(bound, ("q", q, (heads, keys)), ("k", k, (kv_heads, keys)), ("v", v, (kv_heads, values)))
    if sink is not None and tuple(sink.shape) != (heads,):
        raise ConfigError(f"the sink is {tuple(sink.shape)}, expected a logit of each head, {(heads,)}")


def _check_rows(bound: Bound, *tensors: tuple[str, Tensor, tuple[int | None, ...]]) -> None:
    for name, x, wanted in tensors:
        if tuple(x.shape) != (bound.num_tokens, *wanted):
            raise ConfigError(f"{name} is {tuple(x.shape)}, the plan gives this rank {(bound.num_tokens, *wanted)}")


def _with_sink(out: Tensor, lse: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor]:
    """Output and LSE [T, H] with one more key of each query: its score the sink, its value zero."""
    # The backward of attention takes them as those of its own keys: its weights are exp(score -
    # LSE), and the rest of the sum is the sink's.
    if sink is None:
        return out, lse
    whole = torch.logaddexp(lse, sink.detach().to(lse.dtype))
    return (out * torch.exp(lse - whole)[..., None]).to(out.dtype), whole


def _sink_gradient(dout: Tensor, final: tuple[Tensor, Tensor], sink: Tensor | None) -> Tensor | None:
    """The gradient [H] of the sink. `final`: output and LSE of `_with_sink`."""
    if sink is None:
        return None
    out, lse = final
    weight = torch.exp(sink.detach().to(lse.dtype) - lse)
    return -(weight * (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1)).sum(0).to(sink.dtype)


def _scale(softmax_scale: float | None, bound: Bound) -> float:
    return 1.0 / math.sqrt(bound.shape.head_dim) if softmax_scale is None else softmax_scale


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        call: tuple[Bound, BackwardSlot, float, bool],
        weight: Tensor | None,
        sink: Tensor | None,
        q: Tensor,
        *kv: Tensor,
    ) -> Tensor:
        bound, ctx.slot, ctx.scale, hooked = call
        out, lse, received = run_forward(_of_layer(bound, weight), q, kv, ctx.scale)
        out, lse = _with_sink(out, lse, sink)
        ctx.received = None if hooked else received
        queries, keys = (received.q.all(), received.kv.all()) if hooked else ({}, {})
        ctx.saved = tuple(queries), tuple(keys)
        ctx.width = len(kv)
        own = (weight, sink, q, *kv, out, lse)
        ctx.save_for_backward(*own, *queries.values(), *chain.from_iterable(keys.values()))
        ctx.num_tokens = bound.num_tokens
        return out

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # asked for once: checkpointing computes them again
        weight, sink, *inputs = saved[: 3 + ctx.width]
        out, lse, *rest = saved[3 + ctx.width :]
        received = _take(ctx)
        if received is None:
            queries, keys = ctx.saved
            parts = rest[len(queries) :]
            each = (tuple(parts[at : at + ctx.width]) for at in range(0, len(parts), ctx.width))
            received = Received(
                Buffers(dict(zip(queries, rest, strict=False))), Buffers(dict(zip(keys, each, strict=True)))
            )
        bound = _of_layer(ctx.slot.bound_for(ctx.num_tokens), weight)
        grads = run_backward(bound, dout, tuple(inputs), (out, lse), received, ctx.scale)
        of_sink = _sink_gradient(dout, (out, lse), sink)
        if not isinstance(bound.kernel, LatentKernel):
            return (None, None, of_sink, *grads)
        found = bound.kernel.weight_grad
        return (None, torch.zeros_like(weight) if found is None else found.to(weight.dtype), of_sink, *grads)


def _take(ctx: Any) -> Received | None:
    """Received inputs, if `ctx` holds them: for this backward, or for others too (`retain_graph`)."""
    received = ctx.received
    if not torch._C._autograd._get_current_graph_task_keep_graph():  # pyright: ignore[reportAttributeAccessIssue]
        ctx.received = None
    return received


@dataclass(slots=True)
class _Runs:
    """State that a call's segments share."""

    # Without the forward's plan: the backward may have another, and need not keep it.
    slot: BackwardSlot
    num_tokens: int
    scale: float
    forward: ForwardRun | None = None
    backward: BackwardRun | None = None


class _FirstSegment(torch.autograd.Function):
    """The first segment. An empty tensor links the segments: autograd keeps their order by it."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bound: Bound, runs: _Runs) -> Tensor:
        ctx.runs = runs
        runs.forward = ForwardRun(bound, q, (k, v), runs.scale)
        runs.forward.start()
        bound.groups.issues.flush()  # other work follows, that this call knows nothing of
        return q.new_empty(0)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, _link: Tensor) -> tuple[Tensor | None, ...]:
        run, ctx.runs.backward = ctx.runs.backward, None
        assert run is not None, "the backward of an attention call begins with its output"
        return (*run.gradients(), None, None)


class _AttentionFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, link: Tensor, runs: _Runs) -> Tensor:
        ctx.runs = runs
        assert runs.forward is not None, "an attention call attends once"
        runs.forward.attend()
        return link.new_empty(0)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, link: Tensor) -> tuple[Tensor | None, ...]:
        assert ctx.runs.backward is not None, "the backward of an attention call begins with its output"
        ctx.runs.backward.attend()
        return link.new_empty(0), None


class _End(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, _link: Tensor, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, runs: _Runs) -> Tensor:
        assert runs.forward is not None, "an attention call ends once"
        out, lse, ctx.received = runs.forward.outputs()
        out, lse = _with_sink(out, lse, sink)
        runs.forward = None
        ctx.save_for_backward(q, k, v, out, lse, sink)
        ctx.runs = runs
        return out

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, sink = ctx.saved_tensors
        runs: _Runs = ctx.runs
        received = _take(ctx)
        assert received is not None, "what was received is gone, and saved tensors are not"
        runs.backward = BackwardRun(
            runs.slot.bound_for(runs.num_tokens), dout, (q, k, v), (out, lse), received, runs.scale
        )
        del received  # the run lets it go piece by piece
        runs.backward.start()
        runs.backward.bound.groups.issues.flush()
        return dout.new_empty(0), None, None, None, _sink_gradient(dout, (out, lse), sink), None


@dataclass(frozen=True, slots=True)
class Server:
    """A stage that attends for the others in a tick without a microbatch (DistCA, section 4.1)."""

    # Of their queries; it makes their attention calls without rows of its own.
    dtype: torch.dtype
    device: torch.device
    # Of scores.
    scale: float

    def serve(self, bounds: Sequence[Bound], segments: Sequence[NanoSegment], *, backward: bool) -> None:
        """Serve a pass through some layers: attend to what others send, and send it back. `bounds`:
        by nano-batch; `segments`: of the pass (`compile.ping_pong`), in the order in which the
        others make them. InvalidProgramError: this rank owns rows of a plan.
        """
        for bound in bounds:
            if bound.num_tokens:
                raise InvalidProgramError(
                    f"rank {bound.rank} has {bound.num_tokens} rows of its own in a call that it only serves"
                )
        runs: dict[int, PhaseRun] = {}
        for nano_batch, _, part in segments:
            match part:
                case "linear":
                    pass
                case "start":
                    runs[nano_batch] = self._run(bounds[nano_batch], backward=backward)
                    runs[nano_batch].start()
                    bounds[nano_batch].groups.issues.flush()
                case "attend":
                    runs[nano_batch].attend()
                case "end":
                    runs.pop(nano_batch).end()

    def _run(self, bound: Bound, *, backward: bool) -> PhaseRun:
        shape = bound.shape
        q = torch.empty(0, shape.num_heads, shape.head_dim, dtype=self.dtype, device=self.device)
        kv = tuple(q.new_empty(0, shape.num_kv_heads, width) for width in shape.widths)
        if not backward:
            return ForwardRun(bound, q, kv, self.scale)
        lse = torch.empty(0, shape.num_heads, dtype=wide_dtype(self.dtype), device=self.device)
        out = q.new_empty(0, shape.num_heads, shape.value_width)
        return BackwardRun(bound, torch.empty_like(out), (q, *kv), (out, lse), Received(), self.scale)
