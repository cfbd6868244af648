"""Run a bound plan on tensors: the forward and backward steps of one attention call.

Shapes and types as in `runtime.phase_run`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from megatron_balance.ir.program import Kind
from megatron_balance.runtime.bind import Bound
from megatron_balance.runtime.lower.steps import GradLaunch, Launch, Message, Operand, Packed, Step
from megatron_balance.runtime.movers.base import Place, Space, heads_view
from megatron_balance.runtime.phase_run import PhaseRun, Received


def run_forward(bound: Bound, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor, Received]:
    """Output [T, H, D] in q's dtype, LSE [T, H], and what the backward needs.

    q [T, H, D], k and v [T, G, D].
    """
    run = ForwardRun(bound, q, k, v, scale)
    run.start()
    run.attend()
    return run.outputs()


def run_backward(
    bound: Bound,
    dout: Tensor,
    inputs: tuple[Tensor, Tensor, Tensor],
    final: tuple[Tensor, Tensor],
    received: Received,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `inputs` (q, k, v) in their dtypes. `final`: output and LSE of the forward."""
    run = BackwardRun(bound, dout, inputs, final, received, scale)
    run.start()
    run.attend()
    return run.gradients()


class ForwardRun(PhaseRun):
    """The forward of one call: `start`, `attend`, then `outputs`."""

    def __init__(self, bound: Bound, q: Tensor, k: Tensor, v: Tensor, scale: float) -> None:
        super().__init__(bound, bound.forward, q, k, v, Received())
        self.scale = scale
        sizes, blank = bound.query_rows, bound.forward.blank_outputs
        # Not a method of this object, which would then end with a garbage collection only.
        empty = partial(bound.groups.buffers.empty, device=self.device)
        self.partials = bound.mover.partials(Space(sizes, blank, self.dim, self.dtype, self.wide, empty))

    def outputs(self) -> tuple[Tensor, Tensor, Received]:
        """End the forward: output [T, H, D], LSE [T, H], and what the backward needs."""
        self.end()
        received = Received()
        if self.bound.policy == "keep":
            received = Received({b: x for b, x in self.q.items() if b}, {b: x for b, x in self.kv.items() if b})
        return *self.partials.final(), received

    def launch(self, step: Step) -> None:
        assert isinstance(step, Launch), "a backward launch in the forward"
        q, (k, v) = self.query_operand(step.q), self.key_operand(step.k)
        self.fill()
        out, lse = self.bound.kernel.forward(step.entries, q, k, v, self.scale)
        self.transport.launched()
        self.partials.add(step.out, step.merges, out, lse)

    def other_parcel(self, message: Message, into: Sequence[Tensor | None]) -> list[Tensor]:
        out, lse = into
        return list(self.partials.send(message.packed, None if out is None or lse is None else (out, lse)))

    def other_arrive(self, message: Message, tensors: list[Tensor]) -> None:
        self.partials.add(message.packed, message.merges, tensors[0], tensors[1])


class BackwardRun(PhaseRun):
    """The backward of one call: `start`, `attend`, then `gradients`."""

    def __init__(
        self,
        bound: Bound,
        dout: Tensor,
        inputs: tuple[Tensor, Tensor, Tensor],
        final: tuple[Tensor, Tensor],
        received: Received,
        scale: float,
    ) -> None:
        q, k, v = inputs
        super().__init__(bound, bound.backward, q, k, v, received)
        self.scale = scale
        self.dout, self.out, self.lse = {0: dout}, {0: final[0]}, {0: final[1]}
        self.dq: dict[int, Tensor] = {}
        self.dkv: dict[int, Tensor] = {}
        if self.dtype == self.wide:  # these are handed to the caller as they are
            self.dq[0] = torch.zeros(q.shape, dtype=self.wide, device=self.device)
            self.dkv[0] = torch.zeros((2, *k.shape), dtype=self.wide, device=self.device)

    def gradients(self) -> tuple[Tensor, Tensor, Tensor]:
        """End the backward: the gradients of q, k and v."""
        self.end()
        dq, (dk, dv) = self.query_grad(0), self.key_grad(0)
        return dq.to(self.dtype), dk.to(self.dtype), dv.to(self.dtype)

    def let_go(self, kind: Kind, buffer: int) -> None:
        super().let_go(kind, buffer)
        if kind == Kind.Q_GRAD:
            self.dq.pop(buffer, None)
        elif kind == Kind.KV_GRAD:
            self.dkv.pop(buffer, None)

    def query_grad(self, buffer: int) -> Tensor:
        if buffer not in self.dq:
            self.dq[buffer] = self.empty(*self.bound.query_rows[buffer], self.dim, dtype=self.wide).zero_()
        return self.dq[buffer]

    def key_grad(self, buffer: int) -> Tensor:
        if buffer not in self.dkv:
            self.dkv[buffer] = self.empty(2, *self.bound.key_rows[buffer], self.dim, dtype=self.wide).zero_()
        return self.dkv[buffer]

    def launch(self, step: Step) -> None:
        assert isinstance(step, GradLaunch), "a forward launch in the backward"
        q, (k, v) = self.query_operand(step.q), self.key_operand(step.k)
        final = (
            self.final_operand(step.dout, self.dout, self.dtype),
            self.final_operand(step.dout, self.out, self.dtype),
            self.final_operand(step.dout, self.lse, self.wide),
        )
        self.fill()
        dq, dk, dv = self.bound.kernel.backward(step.entries, final, q, k, v, self.scale)
        self.transport.launched()
        self.bound.mover.add([self.query_place(step.dq, dq), *self.key_places(step.dk, (dk, dv))])

    def query_place(self, packed: Packed, grad: Tensor) -> Place:
        return Place(packed, grad, tuple([self.query_grad(run.buffer) for run in packed.runs]))

    def key_places(self, packed: Packed, grads: Sequence[Tensor]) -> list[Place]:
        both = [self.key_grad(run.buffer).unbind(0) for run in packed.runs]
        return [Place(packed, grads[i], tuple([pair[i] for pair in both])) for i in (0, 1)]

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
                return [self.carried(packed, self.query_grad, self.wide, into[0])]
            case _:
                for run in packed.runs:
                    self.key_grad(run.buffer)
                return [self.pair(packed, self.dkv, lambda b, i: self.dkv[b][i], self.wide, into[0])]

    def other_arrive(self, message: Message, tensors: list[Tensor]) -> None:
        packed = message.packed
        match message.kind:
            case Kind.OUT_GRAD:
                self.place_final(packed, (tensors[0][0], tensors[0][1], tensors[1]))
            case Kind.Q_GRAD:
                self.bound.mover.add([self.query_place(packed, tensors[0])])
            case _:
                self.bound.mover.add(self.key_places(packed, tensors[0].unbind(0)))

    def place_final(self, packed: Packed, tensors: tuple[Tensor, Tensor, Tensor]) -> None:
        """Unpack the gradient, output and LSE of queries that this rank serves for another."""
        for buffer in {run.buffer for run in packed.runs} - self.dout.keys():
            rows, heads = self.bound.query_rows[buffer]
            self.dout[buffer] = self.empty(rows, heads, self.dim)
            self.out[buffer] = self.empty(rows, heads, self.dim)
            self.lse[buffer] = self.empty(rows, heads, dtype=self.wide)
        held = (self.dout, self.out, self.lse)
        self.bound.mover.place(
            [
                Place(packed, x, tuple(of[run.buffer] for run in packed.runs))
                for x, of in zip(tensors, held, strict=True)
            ]
        )
