"""Run a bound plan on tensors: the forward and backward steps of one attention call.

Shape legend: T rows of this rank, H query heads, G key-value heads, D head dim; keys and values of a buffer are [2, T, G, D]
or, for the caller's own, two tensors. Partial outputs, their LSE and all gradients are accumulated in fp32 (fp64 for fp64);
gradients travel in that type, everything else in the input's.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter

import torch
from torch import Tensor

from megatron_balance.core.program import Kind
from megatron_balance.runtime.bind import Bound
from megatron_balance.runtime.kernels import merge
from megatron_balance.runtime.lowered import Finish, GradLaunch, Launch, Message, Operand, Packed, Phase, Start, Step, Swap, describe
from megatron_balance.runtime.parcels import Form, parcel_bytes, shapes, unpacked
from megatron_balance.runtime.trace import Traced
from megatron_balance.runtime.transport import open_transport

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Received:
    """Inputs that the forward leaves for the backward under policy `keep`: buffers by number."""

    q: dict[int, Tensor] = field(default_factory=dict)
    kv: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)


def run_forward(bound: Bound, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor, Received]:
    """Output [T, H, D] in q's dtype, LSE [T, H], and what the backward needs. q [T, H, D], k and v [T, G, D]."""
    return _Forward(bound, q, k, v, scale).run()


def run_backward(
    bound: Bound, dout: Tensor, inputs: tuple[Tensor, Tensor, Tensor], final: tuple[Tensor, Tensor], received: Received, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `inputs` (q, k, v) in their dtypes. `final`: output and LSE of the forward."""
    return _Backward(bound, dout, inputs, final, received, scale).run()


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type that partials are accumulated in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def part(x: Tensor, start: int, stop: int, head: int, num_heads: int) -> Tensor:
    """Rows [start, stop) and heads [head, head + num_heads) of `x` [T, heads, ...]: a view, `x` itself if that is all of it."""
    rows = x if stop - start == x.shape[0] else x[start:stop]
    return part_heads(rows, head, num_heads)


def part_heads(x: Tensor, head: int, num_heads: int) -> Tensor:
    """Heads [head, head + num_heads) of `x`: a view, `x` itself if that is all of them."""
    return x if num_heads == x.shape[1] else x[:, head : head + num_heads]


def part_pair(x: Tensor, start: int, stop: int, head: int, num_heads: int) -> Tensor:
    """The same of a pair [2, T, heads, D]."""
    rows = x if stop - start == x.shape[1] else x[:, start:stop]
    return rows if num_heads == x.shape[2] else rows[:, :, head : head + num_heads]


class _Phase:
    """What both phases share: buffers, gathering rows, and exchanges."""

    def __init__(self, bound: Bound, phase: Phase, q: Tensor, k: Tensor, v: Tensor, received: Received) -> None:
        self.bound = bound
        self.phase = phase
        self.q = {0: q, **received.q}
        self.kv = {0: (k, v), **received.kv}
        self.stacked: dict[int, Tensor] = {}  # received keys and values as they came, [2, T, G, D]
        self.dtype = q.dtype
        self.wide = wide_dtype(q.dtype)
        self.device = q.device
        self.dim = q.shape[2]
        self.form = Form(self.dim, self.dtype, self.wide)
        self.upcoming = (step.swap for step in phase.steps if isinstance(step, Start))
        self.under_way: dict[int, list[list[Tensor]]] = {}  # by exchange: the tensors of each message received
        self.transport = open_transport(bound, phase, self.form)

    @property
    def forward(self) -> bool:
        return self.phase is self.bound.forward

    def take_steps(self) -> None:
        """All steps in order, and what the rank passes on for others. An error is logged with the step that met it before it goes on.

        Raises RuntimeError: a transfer failed, here or in what is passed on.
        """
        index = 0
        try:
            for _ in range(self.transport.ahead):
                self.expect()
            for index, step in enumerate(self.phase.steps):
                if self.bound.trace is None:
                    self.take(step)
                else:
                    self.take_traced(step)
                self.free(index)
            self.transport.end()
        except Exception:
            self.log_failure(index)
            self.transport.fail()
            raise
        self.bound.counters.ran(self.phase.work)
        self.bound.counters.carried(self.transport.traffic, forward=self.forward)

    def take(self, step: Step) -> None:
        match step:
            case Start():
                self.start(step.swap)
            case Finish():
                self.finish(step.swap)
            case Launch() | GradLaunch():
                self.launch(step)

    def take_traced(self, step: Step) -> None:
        begin = time.perf_counter()
        self.take(step)
        places = [("compute", "run")]
        match step:
            case Start(swap):
                op, places = swap.op, swap.places()
            case Finish(swap):
                op, places = swap.op, [("", "finish")]
            case Launch() | GradLaunch():
                op = step.op
        assert self.bound.trace is not None
        self.bound.trace.extend(Traced(stream, op, leg, "own", begin, time.perf_counter()) for stream, leg in places)

    def log_failure(self, index: int) -> None:
        bound, steps = self.bound, self.phase.steps
        log.error(
            "rank %d of %d, %s step %d of %d of the plan %s: %s",
            *(bound.rank, bound.groups.size, "forward" if self.forward else "backward", index, len(steps)),
            *(bound.plan.fingerprint(), describe(steps[index]) if steps else "passing on"),
        )

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(shape, dtype=dtype or self.dtype, device=self.device)

    def gather(self, packed: Packed, of: Callable[[int], Tensor], dtype: torch.dtype) -> Tensor:
        """Rows [N, heads, ...] of `packed` from the tensors `of(buffer)`; a view where that is possible."""
        if packed.direct:
            run = packed.runs[0]
            return part(of(run.buffer), run.start, run.stop, run.buffer_head, run.num_heads)
        tail = of(packed.runs[0].buffer).shape[2:]
        out = self.empty(packed.num_rows, packed.num_heads, *tail, dtype=dtype)
        for run, index in zip(packed.runs, packed.indices, strict=True):
            source = of(run.buffer)
            rows = source[run.start : run.stop] if index is None else source.index_select(0, index)
            part(out, run.row, run.row + run.count, run.head, run.num_heads).copy_(part(rows, 0, run.count, run.buffer_head, run.num_heads))
        return out

    def query_operand(self, operand: Operand) -> Tensor:
        if operand.buffer >= 0:
            return part_heads(self.q[operand.buffer], operand.head, operand.num_heads)
        return self.gather(operand.packed, self.q.__getitem__, self.dtype)

    def key_operand(self, operand: Operand) -> tuple[Tensor, Tensor]:
        if operand.buffer >= 0:
            k, v = self.kv[operand.buffer]
            return part_heads(k, operand.head, operand.num_heads), part_heads(v, operand.head, operand.num_heads)
        return (
            self.gather(operand.packed, lambda b: self.kv[b][0], self.dtype),
            self.gather(operand.packed, lambda b: self.kv[b][1], self.dtype),
        )

    def free(self, index: int) -> None:
        for kind, buffer in self.phase.frees[index]:
            (self.q if kind == Kind.Q else self.kv).pop(buffer, None)
            if kind == Kind.KV:
                self.stacked.pop(buffer, None)

    # Exchanges

    def expect(self) -> None:
        """Make ready for the next exchange that is not yet expected, if there is one."""
        for swap in self.upcoming:
            arriving, slots = self.slots(swap)
            receives = [(m.peer, x) for m, tensors in zip(swap.receives, slots, strict=True) if m.peer not in arriving for x in tensors]
            self.transport.expect(swap, receives, arriving)
            self.under_way[swap.id] = slots
            return

    def start(self, swap: Swap) -> None:
        self.expect()
        self.transport.start(swap, [(m.peer, x) for m in swap.sends for x in self.parcel(m)])

    def finish(self, swap: Swap) -> None:
        self.transport.arrived(swap)
        for message, tensors in zip(swap.receives, self.under_way.pop(swap.id), strict=True):
            self.arrive(message, tensors)
            self.transport.traffic.bytes_received += sum(x.nbytes for x in tensors)

    def parcel(self, message: Message) -> list[Tensor]:
        """The contiguous tensors that carry a message."""
        packed = message.packed
        match message.kind:
            case Kind.Q:
                return [self.gather(packed, self.q.__getitem__, self.dtype).contiguous()]
            case Kind.KV:
                run = packed.runs[0]
                if packed.direct and run.buffer in self.stacked:  # passed on as it came
                    return [part_pair(self.stacked[run.buffer], run.start, run.stop, run.buffer_head, run.num_heads).contiguous()]
                return [torch.stack([self.gather(packed, lambda b, i=i: self.kv[b][i], self.dtype) for i in (0, 1)])]
            case _:
                return self.other_parcel(message)

    def slots(self, swap: Swap) -> tuple[dict[int, Tensor], list[list[Tensor]]]:
        """Empty contiguous tensors for each message received, shaped as the sender's `parcel`.

        With them, by peer whose messages are routed, the memory that holds all of the peer's.
        """
        if not swap.routed_receives:
            return {}, [[self.empty(*shape, dtype=dtype) for shape, dtype in shapes(m.carried, self.form)] for m in swap.receives]
        arriving: dict[int, Tensor] = {}
        slots: list[list[Tensor]] = []
        for peer, messages in groupby(swap.receives, attrgetter("peer")):
            carried = [m.carried for m in messages]
            if peer in swap.routed_receives:
                arriving[peer] = self.empty(parcel_bytes(carried, self.form), dtype=torch.uint8)
                slots += unpacked(arriving[peer], carried, self.form)
            else:
                slots += [[self.empty(*shape, dtype=dtype) for shape, dtype in shapes(c, self.form)] for c in carried]
        return arriving, slots

    def arrive(self, message: Message, tensors: list[Tensor]) -> None:
        match message.kind:
            case Kind.Q:
                self.q[message.buffer] = tensors[0]
            case Kind.KV:
                self.stacked[message.buffer] = tensors[0]
                self.kv[message.buffer] = (tensors[0][0], tensors[0][1])
            case _:
                self.other_arrive(message, tensors)

    def launch(self, step: Step) -> None:
        raise NotImplementedError

    def other_parcel(self, message: Message) -> list[Tensor]:
        raise NotImplementedError

    def other_arrive(self, message: Message, tensors: list[Tensor]) -> None:
        raise NotImplementedError


class _Forward(_Phase):
    def __init__(self, bound: Bound, q: Tensor, k: Tensor, v: Tensor, scale: float) -> None:
        super().__init__(bound, bound.forward, q, k, v, Received())
        self.scale = scale
        self.out: dict[int, Tensor] = {}
        self.lse: dict[int, Tensor] = {}
        for buffer in bound.forward.blank_outputs:
            self.space(buffer)
            self.out[buffer].zero_()
            self.lse[buffer].fill_(-torch.inf)

    def space(self, buffer: int) -> None:
        if buffer not in self.out:
            rows, heads = self.bound.query_rows[buffer]
            self.out[buffer] = self.empty(rows, heads, self.dim, dtype=self.wide)
            self.lse[buffer] = self.empty(rows, heads, dtype=self.wide)

    def run(self) -> tuple[Tensor, Tensor, Received]:
        self.space(0)
        self.take_steps()
        received = Received()
        if self.bound.policy == "keep":
            received = Received({b: x for b, x in self.q.items() if b}, {b: x for b, x in self.kv.items() if b})
        return self.out[0].to(self.dtype), self.lse[0], received

    def launch(self, step: Step) -> None:
        assert isinstance(step, Launch), "a backward launch in the forward"
        k, v = self.key_operand(step.k)
        out, lse = self.bound.kernel.forward(step.entries, self.query_operand(step.q), k, v, self.scale)
        self.store(step.out, step.merges, out, lse)

    def store(self, packed: Packed, merges: tuple[bool, ...], out: Tensor, lse: Tensor) -> None:
        """Packed partials to their rows: written where they are the first, merged by LSE where not."""
        for run, index, merging in zip(packed.runs, packed.indices, merges, strict=True):
            if not merging and (run.count, run.num_heads) == self.bound.query_rows[run.buffer] == tuple(out.shape[:2]) and index is None:
                self.out[run.buffer], self.lse[run.buffer] = out.to(self.wide), lse  # all of a buffer at once: no copy
                continue
            self.space(run.buffer)
            new_out = part(out, run.row, run.row + run.count, run.head, run.num_heads)
            new_lse = part(lse, run.row, run.row + run.count, run.head, run.num_heads)
            held_out = part_heads(self.out[run.buffer], run.buffer_head, run.num_heads)
            held_lse = part_heads(self.lse[run.buffer], run.buffer_head, run.num_heads)
            rows = slice(run.start, run.stop) if index is None else index
            if merging:
                new_out, new_lse = merge((held_out[rows], held_lse[rows]), (new_out, new_lse))
            held_out[rows] = new_out.to(self.wide)
            held_lse[rows] = new_lse

    def other_parcel(self, message: Message) -> list[Tensor]:
        packed = message.packed
        out = self.gather(packed, self.out.__getitem__, self.wide)
        return [out.to(self.dtype).contiguous(), self.gather(packed, self.lse.__getitem__, self.wide).contiguous()]

    def other_arrive(self, message: Message, tensors: list[Tensor]) -> None:
        self.store(message.packed, message.merges, tensors[0], tensors[1])


class _Backward(_Phase):
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
        self.dq = {0: torch.zeros(q.shape, dtype=self.wide, device=self.device)}
        self.dkv = {0: torch.zeros((2, *k.shape), dtype=self.wide, device=self.device)}

    def run(self) -> tuple[Tensor, Tensor, Tensor]:
        self.take_steps()
        return self.dq[0].to(self.dtype), self.dkv[0][0].to(self.dtype), self.dkv[0][1].to(self.dtype)

    def query_grad(self, buffer: int) -> Tensor:
        if buffer not in self.dq:
            self.dq[buffer] = torch.zeros(*self.bound.query_rows[buffer], self.dim, dtype=self.wide, device=self.device)
        return self.dq[buffer]

    def key_grad(self, buffer: int) -> Tensor:
        if buffer not in self.dkv:
            self.dkv[buffer] = torch.zeros(2, *self.bound.key_rows[buffer], self.dim, dtype=self.wide, device=self.device)
        return self.dkv[buffer]

    def launch(self, step: Step) -> None:
        assert isinstance(step, GradLaunch), "a forward launch in the backward"
        k, v = self.key_operand(step.k)
        final = (
            self.final_operand(step.dout, self.dout, self.dtype),
            self.final_operand(step.dout, self.out, self.dtype),
            self.final_operand(step.dout, self.lse, self.wide),
        )
        dq, dk, dv = self.bound.kernel.backward(step.entries, final, self.query_operand(step.q), k, v, self.scale)
        self.add(step.dq, self.query_grad, dq)
        self.add(step.dk, lambda b: self.key_grad(b)[0], dk)
        self.add(step.dk, lambda b: self.key_grad(b)[1], dv)

    def final_operand(self, operand: Operand, of: dict[int, Tensor], dtype: torch.dtype) -> Tensor:
        if operand.buffer >= 0:
            return part_heads(of[operand.buffer], operand.head, operand.num_heads)
        return self.gather(operand.packed, of.__getitem__, dtype)

    def add(self, packed: Packed, of: Callable[[int], Tensor], grad: Tensor) -> None:
        """Packed gradient rows added to their rows; rows of one run may repeat (a key that several entries use)."""
        for run, index in zip(packed.runs, packed.indices, strict=True):
            added = part(grad, run.row, run.row + run.count, run.head, run.num_heads)
            if index is None:
                part(of(run.buffer), run.start, run.stop, run.buffer_head, run.num_heads).add_(added)
            else:
                part_heads(of(run.buffer), run.buffer_head, run.num_heads).index_add_(0, index, added.to(self.wide))

    def other_parcel(self, message: Message) -> list[Tensor]:
        packed = message.packed
        match message.kind:
            case Kind.OUT_GRAD:
                pair = torch.stack([self.gather(packed, of.__getitem__, self.dtype) for of in (self.dout, self.out)])
                return [pair, self.gather(packed, self.lse.__getitem__, self.wide).contiguous()]
            case Kind.Q_GRAD:
                return [self.gather(packed, self.query_grad, self.wide).contiguous()]
            case _:
                run = packed.runs[0]
                if packed.direct:
                    return [part_pair(self.key_grad(run.buffer), run.start, run.stop, run.buffer_head, run.num_heads).contiguous()]
                return [torch.stack([self.gather(packed, lambda b, i=i: self.key_grad(b)[i], self.wide) for i in (0, 1)])]

    def other_arrive(self, message: Message, tensors: list[Tensor]) -> None:
        match message.kind:
            case Kind.OUT_GRAD:
                self.place_final(message.packed, tensors)
            case Kind.Q_GRAD:
                self.add(message.packed, self.query_grad, tensors[0])
            case _ if message.packed.direct:
                run = message.packed.runs[0]
                part_pair(self.key_grad(run.buffer), run.start, run.stop, run.buffer_head, run.num_heads).add_(tensors[0])
            case _:
                self.add(message.packed, lambda b: self.key_grad(b)[0], tensors[0][0])
                self.add(message.packed, lambda b: self.key_grad(b)[1], tensors[0][1])

    def place_final(self, packed: Packed, tensors: list[Tensor]) -> None:
        for run, index in zip(packed.runs, packed.indices, strict=True):
            rows, heads = self.bound.query_rows[run.buffer]
            if run.buffer not in self.dout:
                self.dout[run.buffer] = self.empty(rows, heads, self.dim)
                self.out[run.buffer] = self.empty(rows, heads, self.dim)
                self.lse[run.buffer] = self.empty(rows, heads, dtype=self.wide)
            place = slice(run.start, run.stop) if index is None else index
            span = slice(run.buffer_head, run.buffer_head + run.num_heads)
            own = (slice(run.row, run.row + run.count), slice(run.head, run.head + run.num_heads))
            self.dout[run.buffer][place, span] = tensors[0][0][own]
            self.out[run.buffer][place, span] = tensors[0][1][own]
            self.lse[run.buffer][place, span] = tensors[1][own]
