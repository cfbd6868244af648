"""Run a bound plan on tensors: the forward and backward steps of one attention call.

Shapes and types as in `runtime.phase_run`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_balance.ir.program import Kind
from megatron_balance.runtime.bind import Bound
from megatron_balance.runtime.lower.last_use import Value
from megatron_balance.runtime.lower.steps import GradLaunch, Launch, Message, Operand, Packed, Step, Sums
from megatron_balance.runtime.lower.sums import is_whole
from megatron_balance.runtime.movers.base import Place, Space, heads_view
from megatron_balance.runtime.phase_run import Arrived, PhaseRun, Received


def run_forward(bound: Bound, q: Tensor, kv: tuple[Tensor, ...], scale: float) -> tuple[Tensor, Tensor, Received]:
    """Output [T, H, V] in q's dtype, LSE [T, H], and what the backward needs.

    q [T, H, D], kv: k [T, G, D] and v [T, G, V]; the output is [T, H, V].
    """
    run = ForwardRun(bound, q, kv, scale)
    run.start()
    run.attend()
    return run.outputs()


def run_backward(
    bound: Bound,
    dout: Tensor,
    inputs: tuple[Tensor, ...],
    final: tuple[Tensor, Tensor],
    received: Received,
    scale: float,
) -> tuple[Tensor, ...]:
    """Gradients of `inputs` (q, k, v) in their dtypes. `final`: output and LSE of the forward."""
    run = BackwardRun(bound, dout, inputs, final, received, scale)
    run.start()
    run.attend()
    return run.gradients()


class ForwardRun(PhaseRun):
    """The forward of one call: `start`, `attend`, then `outputs`."""

    def __init__(self, bound: Bound, q: Tensor, kv: tuple[Tensor, ...], scale: float) -> None:
        super().__init__(bound, bound.forward, q, kv, Received())
        self.scale = scale
        sizes, blank = bound.query_rows, bound.forward.blank_outputs
        # Not a method of this object, which would then end with a garbage collection only.
        empty = partial(bound.groups.buffers.empty, device=self.device)
        self.partials = bound.mover.partials(Space(sizes, blank, self.form.value_width, self.dtype, self.wide, empty))

    def outputs(self) -> tuple[Tensor, Tensor, Received]:
        """End the forward: output [T, H, V], LSE [T, H], and what the backward needs."""
        self.end()
        received = Received()
        if self.bound.policy == "keep":
            received = Received({b: x for b, x in self.q.items() if b}, {b: x for b, x in self.kv.items() if b})
        return *self.partials.final(), received

    def launch(self, step: Step) -> None:
        assert isinstance(step, Launch), "a backward launch in the forward"
        q, kv = self.query_operand(step.q), self.key_operand(step.k)
        self.fill()
        kernel: Any = self.bound.kernel  # of keys and values, or of what travels in their place
        out, lse = kernel.forward(step.entries, q, *kv, self.scale)
        self.transport.launched()
        self.partials.add(step.out, step.merges, out, lse)

    def other_parcel(self, message: Message, into: Sequence[Tensor | None]) -> list[Tensor]:
        out, lse = into
        return list(self.partials.send(message.packed, None if out is None or lse is None else (out, lse)))

    def other_arrive(self, arrived: Sequence[Arrived]) -> None:
        for message, (out, lse) in arrived:
            self.partials.add(message.packed, message.merges, out, lse)


class BackwardRun(PhaseRun):
    """The backward of one call: `start`, `attend`, then `gradients`."""

    def __init__(
        self,
        bound: Bound,
        dout: Tensor,
        inputs: tuple[Tensor, ...],
        final: tuple[Tensor, Tensor],
        received: Received,
        scale: float,
    ) -> None:
        super().__init__(bound, bound.backward, inputs[0], inputs[1:], received)
        self.scale = scale
        self.dout, self.out, self.lse = {0: dout}, {0: final[0]}, {0: final[1]}
        self.totals: dict[Value, tuple[Tensor, ...]] = {}  # [T, heads, D or V] each: dq, or dk and dv
        self.joined: dict[int, Tensor] = {}  # by buffer: both of totals of keys, [2, T, heads, D]
        self.held: dict[Value, tuple[Tensor, ...]] = {}  # the only gradient of a buffer so far, as it came

    def gradients(self) -> tuple[Tensor, ...]:
        """End the backward: the gradients of q, k and v."""
        self.end()
        grads = (*self.summed(Kind.Q_GRAD, 0), *self.summed(Kind.KV_GRAD, 0))
        return tuple(x.to(self.dtype).contiguous() for x in grads)

    def let_go(self, kind: Kind, buffer: int) -> None:
        super().let_go(kind, buffer)
        self.totals.pop((kind, buffer), None)
        if kind == Kind.KV_GRAD:
            self.joined.pop(buffer, None)
        self.held.pop((kind, buffer), None)

    def size(self, value: Value) -> tuple[int, int]:
        """(rows, heads) of a gradient's buffer."""
        kind, buffer = value
        return (self.bound.query_rows if kind == Kind.Q_GRAD else self.bound.key_rows)[buffer]

    def summed(self, kind: Kind, buffer: int) -> tuple[Tensor, ...]:
        """Gradients of a buffer so far, in whatever type: dq, or dk and dv."""
        held = self.held.get((kind, buffer))
        return self.total((kind, buffer)) if held is None else held

    def total(self, value: Value) -> tuple[Tensor, ...]:
        """Memory [T, heads, D or V] in the wide type that gradients of a buffer are added to."""
        before = self.totals.get(value)
        if before is not None and before[0].dtype == self.wide:
            return before
        total = self.new_total(value)
        parts = self.held.pop(value, None) if before is None else before
        for at, target in enumerate(total):
            if parts is None:
                target.zero_()
            else:
                target.copy_(parts[at])
        self.totals[value] = total
        return total

    def new_total(self, value: Value) -> tuple[Tensor, ...]:
        """Memory for a total, not filled."""
        kind, buffer = value
        owned = not buffer and self.dtype == self.wide  # handed to the caller as it is
        empty = partial(torch.empty, device=self.device) if owned else self.groups_empty
        if kind == Kind.KV_GRAD and self.form.joined:
            both = self.joined[buffer] = empty((2, *self.size(value), self.form.dim), dtype=self.wide)
            return tuple(both.unbind(0))
        widths = self.form.kv_widths if kind == Kind.KV_GRAD else (self.form.dim,)
        return tuple(empty((*self.size(value), width), dtype=self.wide) for width in widths)

    def groups_empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return self.empty(*shape, dtype=dtype)

    def launch(self, step: Step) -> None:
        assert isinstance(step, GradLaunch), "a forward launch in the backward"
        q, kv = self.query_operand(step.q), self.key_operand(step.k)
        final = (
            self.final_operand(step.dout, self.dout, self.dtype),
            self.final_operand(step.dout, self.out, self.dtype),
            self.final_operand(step.dout, self.lse, self.wide),
        )
        self.fill()
        kernel: Any = self.bound.kernel
        dq, *dkv = kernel.backward(step.entries, final, q, *kv, self.scale)
        self.transport.launched()
        places = self.places(Kind.Q_GRAD, step.dq_sums, (dq,))
        places += self.places(Kind.KV_GRAD, step.dk_sums, dkv)
        if places:
            self.bound.mover.add(places)

    def places(self, kind: Kind, sums: Sums, grads: Sequence[Tensor]) -> list[Place]:
        """Keep packed gradients that are a whole buffer's first; the places of the others."""
        for run in sums.kept:
            self.held[kind, run.buffer] = tuple(x.narrow(0, run.row, run.count) for x in grads)
        if not sums.added.runs:
            return []
        totals = [self.total((kind, run.buffer)) for run in sums.added.runs]
        return [Place(sums.added, x, tuple([total[i] for total in totals])) for i, x in enumerate(grads)]

    def received_places(self, message: Message, tensors: Sequence[Tensor]) -> list[Place]:
        """Where gradients that came in a message, [N, heads, D or V] or both joined, are added.

        Where they are a whole buffer's, what this rank has of it is added to them, where they lie:
        a ring's rounds zero nothing and copy nothing.
        """
        packed, value = message.packed, (message.kind, message.packed.runs[0].buffer)
        grads: tuple[Tensor, ...] = tuple(tensors) if message.kind == Kind.Q_GRAD else self.parts(tensors)
        if self.adopts(packed, value, grads[0].dtype):
            held = self.held.pop(value, ())
            self.totals[value] = grads
            if message.kind == Kind.KV_GRAD and self.form.joined:
                self.joined[value[1]] = tensors[0]
            return [Place(packed, x, (target,)) for x, target in zip(held, grads, strict=False)]
        places = self.places(message.kind, message.sums, grads)
        if any(not run.buffer for run in message.sums.kept):  # the message's memory is not the caller's
            self.total((message.kind, 0))
        return places

    def adopts(self, packed: Packed, value: Value, dtype: torch.dtype) -> bool:
        """Whether received gradients of type `dtype` can be what others are added to.

        In bf16 only where they travel on in it, so that every rank of a ring rounds once; not in
        the pool's memory what is handed to the caller.
        """
        if value in self.totals or len(packed.runs) != 1 or not is_whole(packed.runs[0], packed, self.size(value)):
            return False
        return value[1] > 0 or (dtype == self.wide and self.dtype != self.wide)

    def final_operand(self, operand: Operand, of: dict[int, Tensor], dtype: torch.dtype) -> Tensor:
        if operand.buffer >= 0:
            return heads_view(of[operand.buffer], operand.head, operand.num_heads)
        return self.gather(operand.packed, of.__getitem__, dtype)

    def other_parcel(self, message: Message, into: Sequence[Tensor | None]) -> list[Tensor]:
        packed = message.packed
        match message.kind:
            case Kind.OUT_GRAD:
                both = self.pair(packed, {}, lambda b, i: (self.dout, self.out)[i][b], self.dtype, into[0])
                return [both, self.carried(packed, self.lse.__getitem__, self.wide, into[1])]
            case Kind.Q_GRAD:
                return [self.carried(packed, lambda b: self.summed(Kind.Q_GRAD, b)[0], self.form.gradient, into[0])]
            case _:
                joined = {b: x for b, x in self.joined.items() if x.dtype == self.form.gradient}
                of = partial(self.summed, Kind.KV_GRAD)
                return self.both(packed, joined, lambda b, i: of(b)[i], self.form.gradient, into)

    def other_arrive(self, arrived: Sequence[Arrived]) -> None:
        match arrived[0][0].kind:
            case Kind.OUT_GRAD:
                self.place_final(arrived)
            case _:
                places = [place for each in arrived for place in self.received_places(*each)]
                if places:
                    self.bound.mover.add(places)

    def place_final(self, arrived: Sequence[Arrived]) -> None:
        """Unpack the gradients, outputs and LSE of queries that this rank serves for others."""
        places: list[Place] = []
        for message, (both, lse) in arrived:
            runs = message.packed.runs
            for buffer in {run.buffer for run in runs} - self.dout.keys():
                rows, heads = self.bound.query_rows[buffer]
                self.dout[buffer] = self.empty(rows, heads, self.form.value_width)
                self.out[buffer] = self.empty(rows, heads, self.form.value_width)
                self.lse[buffer] = self.empty(rows, heads, dtype=self.wide)
            held = ((both[0], self.dout), (both[1], self.out), (lse, self.lse))
            places += [Place(message.packed, x, tuple(of[run.buffer] for run in runs)) for x, of in held]
        self.bound.mover.place(places)
