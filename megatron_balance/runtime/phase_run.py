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
from typing import TypeAlias

import torch
from torch import Tensor
from torch.profiler import record_function

from megatron_balance.analysis.trace_format import ATTENTION, COMPUTE, PACK, PLACE, WAIT
from megatron_balance.ir.program import Kind
from megatron_balance.runtime import ranges
from megatron_balance.runtime.bind import Bound
from megatron_balance.runtime.lower.parcels import CallForm, wide_dtype
from megatron_balance.runtime.lower.steps import (
    ExchangeStep,
    FinishStep,
    GradLaunch,
    IssueStep,
    Launch,
    Operand,
    Packed,
    PeerMessage,
    Phase,
    Step,
    describe,
)
from megatron_balance.runtime.lower.views import Arranged, Block, Buffers, ExchangeForm, Later, Sources, Views
from megatron_balance.runtime.movers.base import Fill, heads_view, rows_view
from megatron_balance.runtime.trace import Mark, Trace, Traced
from megatron_balance.runtime.transport import open_transport
from megatron_balance.runtime.transport.base import Parcel

log = logging.getLogger(__name__)

_UNNAMED = nullcontext()


@dataclass(slots=True)
class Received:
    """Inputs that the forward leaves for the backward under policy `keep`: buffers by number."""

    q: Buffers[Tensor] = field(default_factory=Buffers[Tensor])
    kv: Buffers[tuple[Tensor, ...]] = field(default_factory=Buffers[tuple[Tensor, ...]])


Arrived: TypeAlias = tuple[PeerMessage, Views, int]
"""A message, and the tensors that carry it: what arrived with it, and its number there."""


def _halves(both: Later) -> Callable[[], tuple[Tensor, Tensor]]:
    def halves() -> tuple[Tensor, Tensor]:
        pair = both()
        return pair[0], pair[1]

    return halves


def _tensors(slots: Views, at: int) -> tuple[Tensor, ...]:
    return tuple(slots[at])


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
        self.q = Buffers({0: q, **received.q}, received.q.later)
        self.kv = Buffers({0: kv, **received.kv}, received.kv.later)
        self.stacked: Buffers[Tensor] = Buffers()  # received keys and values as they came, [2, T, G, D]
        self.dtype = q.dtype
        self.wide = wide_dtype(q.dtype)
        self.device = q.device
        self.form = CallForm.of(bound.shape, self.dtype, bound.gradient_wire)
        self.upcoming = (step.exchange for step in phase.steps if isinstance(step, IssueStep))
        self.forms = bound.exchange_forms[id(phase)]
        self.rooms = bound.rooms[id(phase)]
        self.operands: Iterator[Tensor] = iter(())  # of a launch, to be gathered
        self.under_way: dict[int, Views] = {}  # by exchange: what it brings
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
        with self.bound.groups.inside():
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
            case IssueStep(exchange):
                with self.named(PACK, exchange.zone, exchange.id):
                    self.issue(exchange)
            case FinishStep():
                self.receive(step.exchange)
            case Launch() | GradLaunch():
                begin = time.perf_counter()
                with self.named(ATTENTION, step.zone):
                    self.launch(step)
                self.bound.groups.host_times.attended_s += time.perf_counter() - begin

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
            case IssueStep(exchange):
                if self.recorder is not None:
                    trace.append(Traced(COMPUTE, exchange.op, PACK, "own", begin, end))
                if not self.on_device:
                    trace.extend(Traced(at, exchange.op, leg, "own", begin, end) for at, leg in exchange.places())
            case FinishStep(exchange):
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

    def gather(self, packed: Packed, of: Callable[[int], Tensor], dtype: torch.dtype) -> Tensor:
        """Rows [N, heads, ...] of `packed` from the tensors `of(buffer)`.

        A view where that is possible; else filled by the next `fill`, together with everything else
        that was gathered.
        """
        if packed.direct:
            run = packed.runs[0]
            return rows_view(of(run.buffer), run.start, run.stop, run.buffer_head, run.num_heads)
        tail = of(packed.runs[0].buffer).shape[2:]
        into = self.empty(packed.num_rows, packed.num_heads, *tail, dtype=dtype)
        self.write(packed, of, into)
        return into

    def fill(self) -> None:
        """Copy what was gathered, all of it at once."""
        if self.filling:
            self.bound.mover.fill(self.filling)
            self.filling = []

    def carried(self, packed: Packed, of: Callable[[int], Tensor], dtype: torch.dtype) -> Tensor:
        """Rows of `packed` without gaps, as a message needs them; else as `gather`."""
        x = self.gather(packed, of, dtype)
        if not packed.direct or (x.dtype == dtype and x.is_contiguous()):
            return x
        into = self.empty(*x.shape, dtype=dtype)
        self.write(packed, of, into)
        return into

    def write(self, packed: Packed, of: Callable[[int], Tensor], into: Tensor | Later) -> None:
        """Rows of `packed` to a message's tensor; written by the next `fill`."""
        self.filling.append(Fill(packed, Sources(packed.runs, of), into))

    def open_operands(self) -> None:
        """Make the memory of the operands that the launch of this step gathers."""
        room = self.rooms.operands.get(self.at)
        if room is not None:
            self.operands = iter(Views(self.empty(room.num_bytes, dtype=torch.uint8), room.places)[0])

    def operand(self, packed: Packed, of: Callable[[int], Tensor]) -> Tensor:
        """As `gather`, into the memory of the launch's operands, of which it is the next."""
        if packed.direct:
            run = packed.runs[0]
            return rows_view(of(run.buffer), run.start, run.stop, run.buffer_head, run.num_heads)
        into = next(self.operands)
        self.write(packed, of, into)
        return into

    def query_operand(self, operand: Operand) -> Tensor:
        if operand.buffer >= 0:
            return heads_view(self.q[operand.buffer], operand.head, operand.num_heads)
        return self.operand(operand.packed, self.q.__getitem__)

    def key_operand(self, operand: Operand) -> tuple[Tensor, ...]:
        if operand.buffer >= 0:
            return tuple(heads_view(x, operand.head, operand.num_heads) for x in self.kv[operand.buffer])
        which = range(len(self.form.kv_widths))
        return tuple([self.operand(operand.packed, partial(_of, self.kv_of, i)) for i in which])

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
            self.q.let_go(buffer)
        elif kind == Kind.KV:
            self.kv.let_go(buffer)
            self.stacked.let_go(buffer)

    # Exchanges

    def expect(self) -> None:
        """Prepare the next exchange that is not yet expected, if there is one."""
        for exchange in self.upcoming:
            form = self.forms[exchange.id]
            slots = self.under_way[exchange.id] = self.views(form.back, received=True)
            if form.is_block:
                self.transport.expect(exchange, Block(slots.memory, form.back), {})
                return
            arriving = self.arriving(exchange, form, slots) if exchange.routed_receives else {}
            receives = [
                (m.peer, x)
                for m, tensors in zip(form.brought, slots, strict=True)
                if m.peer not in arriving
                for x in tensors
            ]
            self.transport.expect(exchange, receives, arriving)
            return

    def issue(self, exchange: ExchangeStep) -> None:
        self.expect()
        form = self.forms[exchange.id]
        views = self.views(form.out) if form.out.places or form.is_block else None
        sends: list[Parcel] = []
        for message, number in zip(form.sent, form.packed, strict=True):
            if number < 0 or views is None:
                sends += [(message.peer, x) for x in self.parcel(message)]
                continue
            self.pack(message, [views.later(number, part) for part in range(len(views.places[number]))])
            if not form.is_block:
                sends += [(message.peer, x) for x in views[number]]
        self.fill()
        if form.is_block and views is not None:
            self.transport.start(exchange, Block(views.memory, form.out))
            return
        if len(form.sent) < len(exchange.sends):  # the others get the same
            peers = dict.fromkeys(m.peer for m in exchange.sends)
            sends = [(peer, x) for peer in peers for _, x in sends]
        self.transport.start(exchange, sends)

    def views(self, arranged: Arranged, *, received: bool = False) -> Views:
        """Memory for messages. `received`: the transport is the first to write it."""
        empty = self.slot if received else self.empty
        return Views(empty(arranged.num_bytes, dtype=torch.uint8), arranged.places)

    def arriving(self, exchange: ExchangeStep, form: ExchangeForm, slots: Views) -> dict[int, Tensor]:
        """By peer whose messages are routed, the memory that holds all of the peer's."""
        found: dict[int, Tensor] = {}
        for peer, numbered in groupby(range(len(form.brought)), lambda at: form.brought[at].peer):
            if peer in exchange.routed_receives:
                places = [place for at in numbered for place in slots.places[at]]
                found[peer] = slots.memory[places[0].begin : places[-1].begin + places[-1].num_bytes]
        return found

    def receive(self, exchange: ExchangeStep) -> None:
        with self.named(WAIT, exchange.zone, exchange.id):
            self.transport.arrived(exchange)
        if self.trace is not None:
            self.arrived = self.mark()
        form, slots = self.forms[exchange.id], self.under_way.pop(exchange.id)
        with self.named(PLACE, exchange.zone, exchange.id):
            for together in form.together:
                self.arrive([(form.brought[at], slots, at) for at in together], form)
        self.transport.traffic.bytes_received += form.back.tensor_bytes

    def pack(self, message: PeerMessage, into: Sequence[Later]) -> None:
        """Write a message to tensors, with the next `fill`."""
        packed = message.packed
        match message.kind:
            case Kind.Q:
                self.write(packed, self.q.__getitem__, into[0])
            case Kind.KV:
                self.write_both(packed, self.kv_of, into)
            case _:
                self.other_pack(message, into)

    def write_both(self, packed: Packed, of: Callable[[int, int], Tensor], into: Sequence[Later]) -> None:
        """Rows of keys and values, or of their gradients: as `write_pair`, or to a tensor each."""
        if self.form.joined:
            self.write_pair(packed, of, into[0])
            return
        for i, target in enumerate(into):
            self.write(packed, partial(_of, of, i), target)

    def write_pair(self, packed: Packed, of: Callable[[int, int], Tensor], into: Later) -> None:
        """Rows of two tensors `of(buffer, 0 or 1)` to one [2, N, heads, D]."""
        for i in (0, 1):
            self.write(packed, lambda b, i=i: of(b, i), lambda i=i: into()[i])

    def parcel(self, message: PeerMessage) -> list[Tensor]:
        """The contiguous tensors that carry a message, filled by the next `fill`.

        From where it lies, if it does so without gaps, or in memory of its own.
        """
        packed = message.packed
        match message.kind:
            case Kind.Q:
                return [self.carried(packed, self.q.__getitem__, self.dtype)]
            case Kind.KV:
                return self.both(packed, self.stacked, self.kv_of, self.dtype)
            case _:
                return self.other_parcel(message)

    def both(
        self,
        packed: Packed,
        stacked: Mapping[int, Tensor],
        of: Callable[[int, int], Tensor],
        dtype: torch.dtype,
    ) -> list[Tensor]:
        """Rows of keys and values, or of their gradients: as `pair`, or two where widths differ."""
        if self.form.joined:
            return [self.pair(packed, stacked, of, dtype)]
        return [self.carried(packed, partial(_of, of, i), dtype) for i in range(len(self.form.kv_widths))]

    def pair(
        self, packed: Packed, stacked: Mapping[int, Tensor], of: Callable[[int, int], Tensor], dtype: torch.dtype
    ) -> Tensor:
        """Rows of two tensors of one width, `of(buffer, 0 or 1)`, as one [2, N, heads, V].

        `stacked`: buffers that hold both already.
        """
        run = packed.runs[0]
        if packed.direct and run.buffer in stacked:
            held = pair_view(stacked[run.buffer], run.start, run.stop, run.buffer_head, run.num_heads)
            if held.is_contiguous():
                return held
        both = self.empty(2, packed.num_rows, packed.num_heads, self.form.value_width, dtype=dtype)
        for i in (0, 1):
            self.write(packed, lambda b, i=i: of(b, i), both[i])
        return both

    def arrive(self, arrived: Sequence[Arrived], form: ExchangeForm) -> None:
        """Take messages of one kind, or of gradients, that `form` says are taken together."""
        match arrived[0][0].kind:
            case Kind.Q:
                for message, slots, at in arrived:
                    self.q.later[message.buffer] = slots.later(at, 0)
            case Kind.KV:
                for message, slots, at in arrived:
                    if not self.form.joined:
                        self.kv.later[message.buffer] = partial(_tensors, slots, at)
                        continue
                    self.stacked.later[message.buffer] = both = slots.later(at, 0)
                    self.kv.later[message.buffer] = _halves(both)
            case _:
                self.other_arrive(arrived, form)

    def parts(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Keys and values, or their gradients, of a message that is carried by these."""
        return tuple(tensors[0].unbind(0)) if self.form.joined else tuple(tensors)

    def launch(self, step: Step) -> None:
        raise NotImplementedError

    def other_parcel(self, message: PeerMessage) -> list[Tensor]:
        raise NotImplementedError

    def other_pack(self, message: PeerMessage, into: Sequence[Later]) -> None:
        raise NotImplementedError

    def other_arrive(self, arrived: Sequence[Arrived], form: ExchangeForm) -> None:
        raise NotImplementedError
