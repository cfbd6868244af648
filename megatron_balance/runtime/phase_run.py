"""One run of a phase on tensors: its buffers, its exchanges and its steps.

It has three segments, `start`, `attend` and `end`; those of another call may lie between them.

Shape legend: T rows of this rank, H query heads, G key-value heads, D width of queries and keys, V
of values and outputs; keys and values of a buffer are [2, T, G, D] or, for the caller's own and where
V is not D, two tensors. Partial outputs, their LSE and all
gradients are accumulated in fp32 (fp64 for fp64); gradients travel in that type or in bf16
(`gradient_wire`), everything else in the input's.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import TypeAlias

import torch
from torch import Tensor
from torch.profiler import record_function

from megatron_balance.analysis.trace_format import ATTENTION, COMPUTE, PACK, PLACE, WAIT
from megatron_balance.analysis.wire import padded
from megatron_balance.ir.program import Kind
from megatron_balance.runtime import ranges
from megatron_balance.runtime.bind import Bound
from megatron_balance.runtime.lower.parcels import Form, parcel_bytes, shapes, unpack, wide_dtype
from megatron_balance.runtime.lower.steps import (
    ExchangeStep,
    Finish,
    GradLaunch,
    Launch,
    Message,
    Operand,
    Packed,
    Phase,
    Start,
    Step,
    describe,
)
from megatron_balance.runtime.movers.base import Fill, heads_view, rows_view
from megatron_balance.runtime.trace import Mark, Trace, Traced
from megatron_balance.runtime.transport import open_transport
from megatron_balance.runtime.transport.comm import brought, is_block, sent

log = logging.getLogger(__name__)

_UNNAMED = nullcontext()


@dataclass(slots=True)
class Received:
    """Inputs that the forward leaves for the backward under policy `keep`: buffers by number."""

    q: dict[int, Tensor] = field(default_factory=dict)
    kv: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)


Arrived: TypeAlias = tuple[Message, list[Tensor]]
"""A message, and the tensors that carry it."""


def pair_view(x: Tensor, start: int, stop: int, head: int, num_heads: int) -> Tensor:
    """Rows [start, stop) and heads [head, head + num_heads) of a pair [2, T, heads, D]: a view."""
    rows = x if stop - start == x.shape[1] else x[:, start:stop]
    return rows if num_heads == x.shape[2] else rows[:, :, head : head + num_heads]


def _of(of: Callable[[int, int], Tensor], which: int, buffer: int) -> Tensor:
    return of(buffer, which)


class PhaseRun:
    """Base of both phases: buffers, gathering rows, and exchanges."""

    def __init__(self, bound: Bound, phase: Phase, q: Tensor, kv: tuple[Tensor, ...], received: Received) -> None:
        self.bound = bound
        self.phase = phase
        self.q = {0: q, **received.q}
        self.kv = {0: kv, **received.kv}
        self.stacked: dict[int, Tensor] = {}  # received keys and values as they came, [2, T, G, D]
        self.dtype = q.dtype
        self.wide = wide_dtype(q.dtype)
        self.device = q.device
        self.form = Form.of(bound.shape, self.dtype, bound.gradient_wire)
        self.upcoming = (step.exchange for step in phase.steps if isinstance(step, Start))
        self.under_way: dict[int, list[list[Tensor]]] = {}  # by exchange: tensors of each message
        self.at = 0  # the step that is next
        self.arrived: Mark = 0.0  # when the tensors of the last finished exchange were there
        self.filling: list[Fill] = []  # gathered since the last `fill`
        self.recorder = bound.recorder
        self.trace: Trace | None = bound.trace if bound.recorder is None else []
        self.on_device = bound.recorder is not None and bound.recorder.streams is not None
        self.transport = open_transport(phase, self.form, bound.groups, self.trace, timed=self.on_device)

    @property
    def forward(self) -> bool:
        return self.phase is self.bound.phases.get("forward")

    def start(self) -> None:
        """Issue what sends inputs out; `attend`, then `end` follow.

        Segments of other calls on the same ranks may lie between, in one order on all of them
        (`compile.ping_pong`).

        Raises:
            RuntimeError: a transfer failed, here or in what this rank relays. All three segments
                raise it. It is logged with the step that met it.
        """
        with self.guarded():
            for _ in range(self.transport.ahead):
                self.expect()
            self.take_steps(self.phase.cuts.attend)

    def attend(self) -> None:
        """Take every step up to the last launch, and issue what brings results to their owners."""
        with self.guarded():
            self.take_steps(self.phase.cuts.end)
            self.transport.attended()

    def end(self) -> None:
        """Wait for results of owned rows, and for all that the rank relays for others."""
        with self.guarded():
            self.take_steps(len(self.phase.steps))
            self.transport.end()
        self.bound.counters.ran(self.phase.work)
        self.bound.counters.carried(self.transport.traffic, forward=self.forward)
        if self.recorder is not None and self.trace is not None:
            self.recorder.ended(self.bound, self.phase, self.trace, self.form, forward=self.forward)

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Abort on an error: unblock peers that wait for this rank."""
        try:
            yield
        except Exception:
            self.log_failure()
            self.transport.fail()
            raise

    def take_steps(self, stop: int) -> None:
        """Take the steps before `stop` that are still to be taken."""
        steps = self.phase.steps
        take = self.take if self.trace is None else self.take_traced
        while self.at < stop:
            take(steps[self.at])
            self.free(self.at)
            self.at += 1

    def take(self, step: Step) -> None:
        match step:
            case Start(exchange):
                with self.named(PACK, exchange.zone, exchange.id):
                    self.issue(exchange)
            case Finish():
                self.receive(step.exchange)
            case Launch() | GradLaunch():
                with self.named(ATTENTION, step.zone):
                    self.launch(step)

    def named(self, what: str, zone: str, exchange: int = -1) -> AbstractContextManager[object]:
        """A range of the profiler that listens, if one does."""
        if not ranges.recorded():
            return _UNNAMED
        return record_function(ranges.name_of(what, zone, exchange, forward=self.forward))

    def take_traced(self, step: Step) -> None:
        begin = self.mark()
        self.take(step)
        end, trace = self.mark(), self.trace
        assert trace is not None
        match step:
            case Start(exchange):
                if self.recorder is not None:
                    trace.append(Traced(COMPUTE, exchange.op, PACK, "own", begin, end))
                if not self.on_device:
                    trace.extend(Traced(at, exchange.op, leg, "own", begin, end) for at, leg in exchange.places())
            case Finish(exchange):
                # Unpacking is computation: the exchange ends when its tensors are there.
                trace.append(Traced("", exchange.op, "finish", "own", begin, self.arrived))
                if self.recorder is not None:
                    trace.append(Traced(COMPUTE, exchange.op, "run", "own", self.arrived, end))
            case Launch() | GradLaunch():
                trace.append(Traced(COMPUTE, step.op, "run", "own", begin, end))

    def mark(self) -> Mark:
        """Now, for the trace."""
        return time.perf_counter() if self.recorder is None else self.recorder.mark()

    def log_failure(self) -> None:
        bound, steps = self.bound, self.phase.steps
        log.error(
            "rank %d of %d, %s step %d of %d of the plan %s: %s",
            *(bound.rank, bound.groups.size, "forward" if self.forward else "backward", self.at, len(steps)),
            *(bound.plan.fingerprint(), describe(steps[self.at]) if self.at < len(steps) else "passing on"),
        )

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Memory of the rank's pool, not filled."""
        return self.bound.groups.buffers.empty(shape, dtype or self.dtype, self.device)

    def slot(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """As `empty`; the transport is the first to write it."""
        return self.bound.groups.buffers.empty(shape, dtype, self.device, received=True)

    def gather(
        self, packed: Packed, of: Callable[[int], Tensor], dtype: torch.dtype, into: Tensor | None = None
    ) -> Tensor:
        """Rows [N, heads, ...] of `packed` from the tensors `of(buffer)`.

        A view where that is possible and no `into` is given; else filled by the next `fill`,
        together with everything else that was gathered.
        """
        if packed.direct and into is None:
            run = packed.runs[0]
            return rows_view(of(run.buffer), run.start, run.stop, run.buffer_head, run.num_heads)
        sources = tuple(of(run.buffer) for run in packed.runs)
        target = (
            self.empty(packed.num_rows, packed.num_heads, *sources[0].shape[2:], dtype=dtype) if into is None else into
        )
        self.filling.append(Fill(packed, sources, target))
        return target

    def fill(self) -> None:
        """Copy what was gathered, all of it at once."""
        if self.filling:
            self.bound.mover.fill(self.filling)
            self.filling = []

    def carried(self, packed: Packed, of: Callable[[int], Tensor], dtype: torch.dtype, into: Tensor | None) -> Tensor:
        """Rows of `packed` without gaps, as a message needs them; else as `gather`."""
        if into is None:
            x = self.gather(packed, of, dtype)
            if not packed.direct or (x.dtype == dtype and x.is_contiguous()):
                return x
            into = self.empty(*x.shape, dtype=dtype)
        return self.gather(packed, of, dtype, into)

    def query_operand(self, operand: Operand) -> Tensor:
        if operand.buffer >= 0:
            return heads_view(self.q[operand.buffer], operand.head, operand.num_heads)
        return self.gather(operand.packed, self.q.__getitem__, self.dtype)

    def key_operand(self, operand: Operand) -> tuple[Tensor, ...]:
        if operand.buffer >= 0:
            return tuple(heads_view(x, operand.head, operand.num_heads) for x in self.kv[operand.buffer])
        which = range(len(self.form.kv_widths))
        return tuple(self.gather(operand.packed, partial(_of, self.kv_of, i), self.dtype) for i in which)

    def kv_of(self, buffer: int, which: int) -> Tensor:
        """Keys (0) or values (1) of a buffer, or what travels in their place (0)."""
        return self.kv[buffer][which]

    def free(self, index: int) -> None:
        for kind, buffer in self.phase.last_uses[index]:
            self.let_go(kind, buffer)

    def let_go(self, kind: Kind, buffer: int) -> None:
        """Drop a received input, which no later step touches.

        Its memory is free once no transfer holds it.
        """
        if kind == Kind.Q:
            self.q.pop(buffer, None)
        elif kind == Kind.KV:
            self.kv.pop(buffer, None)
            self.stacked.pop(buffer, None)

    # Exchanges

    def expect(self) -> None:
        """Prepare the next exchange that is not yet expected, if there is one."""
        for exchange in self.upcoming:
            arriving, slots = self.slots(exchange)
            messages = brought(exchange, self.bound.groups)
            receives = [
                (m.peer, x)
                for m, tensors in zip(messages, slots, strict=True)
                if m.peer not in arriving
                for x in tensors
            ]
            self.transport.expect(exchange, receives, arriving)
            self.under_way[exchange.id] = slots
            return

    def issue(self, exchange: ExchangeStep) -> None:
        self.expect()
        messages = sent(exchange, self.bound.groups)
        spaces = self.parcel_space(exchange, messages)
        sends = [(m.peer, x) for m, into in zip(messages, spaces, strict=True) for x in self.parcel(m, into)]
        self.fill()
        if len(messages) < len(exchange.sends):  # the others get the same
            peers = dict.fromkeys(m.peer for m in exchange.sends)
            sends = [(peer, x) for peer in peers for _, x in sends]
        self.transport.start(exchange, sends)

    def parcel_space(self, exchange: ExchangeStep, messages: Sequence[Message]) -> list[Sequence[Tensor | None]]:
        """For each of the messages sent, the tensors that it is written to.

        None: memory of its own, or sent from where it lies. Several messages that go to a peer in
        pieces lie one after the other, and so do all of a block, so that they need not be packed
        again.
        """
        if messages and is_block(exchange, self.bound.groups):
            return [*self.block(messages, received=False)]
        spaces: list[Sequence[Tensor | None]] = []
        for peer, group in groupby(messages, attrgetter("peer")):
            carried = [m.carried for m in group]
            if peer in exchange.routed_sends and sum(len(shapes(c, self.form)) for c in carried) > 1:
                spaces += unpack(self.empty(parcel_bytes(carried, self.form), dtype=torch.uint8), carried, self.form)
            else:
                spaces += [(None,) * len(shapes(c, self.form)) for c in carried]
        return spaces

    def block(self, messages: Sequence[Message], *, received: bool = True) -> list[list[Tensor]]:
        """Tensors of messages in one memory, one after the other, each aligned."""
        carried = [m.carried for m in messages]
        num_bytes = padded(parcel_bytes(carried, self.form))
        memory = self.slot(num_bytes, dtype=torch.uint8) if received else self.empty(num_bytes, dtype=torch.uint8)
        return unpack(memory, carried, self.form)

    def receive(self, exchange: ExchangeStep) -> None:
        with self.named(WAIT, exchange.zone, exchange.id):
            self.transport.arrived(exchange)
        if self.trace is not None:
            self.arrived = self.mark()
        messages, slots = brought(exchange, self.bound.groups), self.under_way.pop(exchange.id)
        with self.named(PLACE, exchange.zone, exchange.id):
            for together in exchange.arrivals or [(at,) for at in range(len(messages))]:
                self.arrive([(messages[at], slots[at]) for at in together])
        self.transport.traffic.bytes_received += sum(x.nbytes for tensors in slots for x in tensors)

    def parcel(self, message: Message, into: Sequence[Tensor | None]) -> list[Tensor]:
        """The contiguous tensors that carry a message, filled by the next `fill`.

        `into`: tensors to write to, where there are some.
        """
        packed = message.packed
        match message.kind:
            case Kind.Q:
                return [self.carried(packed, self.q.__getitem__, self.dtype, into[0])]
            case Kind.KV:
                return self.both(packed, self.stacked, self.kv_of, self.dtype, into)
            case _:
                return self.other_parcel(message, into)

    def both(
        self,
        packed: Packed,
        stacked: Mapping[int, Tensor],
        of: Callable[[int, int], Tensor],
        dtype: torch.dtype,
        into: Sequence[Tensor | None],
    ) -> list[Tensor]:
        """Rows of keys and values, or of their gradients: as `pair`, or two where widths differ."""
        if self.form.joined:
            return [self.pair(packed, stacked, of, dtype, into[0])]
        which = range(len(self.form.kv_widths))
        return [self.carried(packed, partial(_of, of, i), dtype, into[i]) for i in which]

    def pair(
        self,
        packed: Packed,
        stacked: Mapping[int, Tensor],
        of: Callable[[int, int], Tensor],
        dtype: torch.dtype,
        into: Tensor | None,
    ) -> Tensor:
        """Rows of two tensors of one width, `of(buffer, 0 or 1)`, as one [2, N, heads, V].

        `stacked`: buffers that hold both already.
        """
        run = packed.runs[0]
        if into is None and packed.direct and run.buffer in stacked:
            held = pair_view(stacked[run.buffer], run.start, run.stop, run.buffer_head, run.num_heads)
            if held.is_contiguous():
                return held
        width = self.form.value_width
        both = self.empty(2, packed.num_rows, packed.num_heads, width, dtype=dtype) if into is None else into
        for i in (0, 1):
            self.gather(packed, lambda b, i=i: of(b, i), dtype, both[i])
        return both

    def slots(self, exchange: ExchangeStep) -> tuple[dict[int, Tensor], list[list[Tensor]]]:
        """Empty contiguous tensors for each message received, shaped as the sender's `parcel`.

        Before them, by peer whose messages are routed, the memory that holds all of the peer's. They
        lie in one memory, which is free again when the last of them is let go.
        """
        messages = brought(exchange, self.bound.groups)
        if not messages:
            return {}, []
        if not exchange.routed_receives:
            return {}, self.block(messages)
        parcels = [(peer, [m.carried for m in of]) for peer, of in groupby(messages, attrgetter("peer"))]
        sizes = [parcel_bytes(carried, self.form) for _, carried in parcels]
        memory = self.slot(sum(map(padded, sizes)), dtype=torch.uint8)
        arriving: dict[int, Tensor] = {}
        slots: list[list[Tensor]] = []
        at = 0
        for (peer, carried), num_bytes in zip(parcels, sizes, strict=True):
            raw = memory[at : at + num_bytes]
            at += padded(num_bytes)
            slots += unpack(raw, carried, self.form)
            if peer in exchange.routed_receives:
                arriving[peer] = raw
        return arriving, slots

    def arrive(self, arrived: Sequence[Arrived]) -> None:
        """Take messages of one kind that touch no row in common."""
        match arrived[0][0].kind:
            case Kind.Q:
                for message, tensors in arrived:
                    self.q[message.buffer] = tensors[0]
            case Kind.KV:
                for message, tensors in arrived:
                    self.kv[message.buffer] = self.parts(tensors)
                    if self.form.joined:
                        self.stacked[message.buffer] = tensors[0]
            case _:
                self.other_arrive(arrived)

    def parts(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Keys and values, or their gradients, of a message that is carried by these."""
        return tuple(tensors[0].unbind(0)) if self.form.joined else tuple(tensors)

    def launch(self, step: Step) -> None:
        raise NotImplementedError

    def other_parcel(self, message: Message, into: Sequence[Tensor | None]) -> list[Tensor]:
        raise NotImplementedError

    def other_arrive(self, arrived: Sequence[Arrived]) -> None:
        raise NotImplementedError
