"""One run of a phase on tensors: its buffers, its exchanges and its steps, in three segments,
`start`, `attend` and `end`.

Shape legend: T rows of this rank, H query heads, G key-value heads, D width of queries and keys, V
of values and outputs; keys and values of a buffer are [2, T, G, D] or, for the caller's own and
where V is not D, two tensors. Partial outputs, their LSE and all gradients are accumulated in fp32
(fp64 for fp64); gradients travel in that type or in bf16 (`gradient_wire`), everything else in the
input's.
"""

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
from torch.autograd import profiler
from torch.profiler import record_function

from megatron_balance.analysis.trace_format import ATTENTION, COMPUTE, PACK, PLACE, WAIT, named
from megatron_balance.compile.pipeline import PhaseName
from megatron_balance.ir.program import Kind
from megatron_balance.runtime.bind import Bound
from megatron_balance.runtime.lower import memory, steps
from megatron_balance.runtime.movers.base import RowMove, buffer_rows, heads_view
from megatron_balance.runtime.recorder import Mark, Trace, Traced
from megatron_balance.runtime.transport import Gloo, Parcel, Streamed

log = logging.getLogger(__name__)
_UNNAMED = nullcontext()


@dataclass(slots=True)
class Received:
    """Inputs that the forward leaves for the backward under policy `keep`: buffers by number."""

    q: memory.Buffers[Tensor] = field(default_factory=memory.Buffers[Tensor])
    kv: memory.Buffers[tuple[Tensor, ...]] = field(default_factory=memory.Buffers[tuple[Tensor, ...]])


BufferOf: TypeAlias = Callable[[int], Tensor]  # the tensor of a buffer
# A message, the tensors that carry it (what arrived with it, and its number there), and whether it
# is adopted (`lower.memory.PhaseMemory`).
Arrived: TypeAlias = tuple[steps.PeerMessage, memory.Views, int, bool]


def _half(pair: Tensor | memory.Later, which: int) -> Tensor:
    return memory.made(pair)[which]


class _Sources(Sequence[Tensor]):
    """The buffers of packed rows, each made when it is asked for. `of`: a buffer's tensor."""

    __slots__ = ("_of", "_runs")

    def __init__(self, runs: Sequence[steps.RowRun], of: Callable[[int], Tensor]) -> None:
        self._runs, self._of = runs, of

    def __len__(self) -> int:
        return len(self._runs)

    def __getitem__(self, at: int) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self._of(self._runs[at].buffer)


class PhaseRun:
    """Base of both phases. Raises InvalidProgramError where the plan was bound without this one."""

    def __init__(self, bound: Bound, name: PhaseName, q: Tensor, kv: tuple[Tensor, ...], received: Received) -> None:
        self.bound, self.forward = bound, name == "forward"
        self.phase = phase = bound.phase(name)
        self.q = memory.Buffers({0: q, **received.q}, received.q.later)
        self.kv = memory.Buffers({0: kv, **received.kv}, received.kv.later)
        self.stacked: memory.Buffers[Tensor] = memory.Buffers()  # received keys and values as they came, [2, T, G, D]
        # By kind and buffer, both tensors of a pair as one.
        self.pairs: dict[Kind, Mapping[int, Tensor]] = {Kind.KV: self.stacked}
        self.dtype = q.dtype
        self.wide = memory.wide_dtype(q.dtype)
        self.device = q.device
        self.form = memory.CallForm.of(bound.shape, self.dtype, bound.gradient_wire)
        self.upcoming = (step.exchange for step in phase.steps if isinstance(step, steps.IssueStep))
        self.memory = bound.memory[name]
        self.operands: Iterator[Tensor] = iter(())  # of a launch, to be gathered
        self.parts = range(len(self.form.kv_widths))
        self.under_way: dict[int, memory.Views] = {}  # by exchange: what it brings
        self.at = 0  # the step that is next
        self.arrived: Mark = 0.0  # when the tensors of the last finished exchange were there
        self.filling: list[RowMove] = []  # gathered since the last `fill`
        self.recorder = bound.recorder
        self.trace: Trace | None = bound.trace if bound.recorder is None else []
        self.on_device = bound.recorder is not None and bound.recorder.streams is not None
        groups = bound.groups
        self.transport = (
            Gloo(phase, self.form, groups, self.trace)
            if groups.streams is None
            else Streamed(phase, self.form, groups, self.trace, timed=self.on_device)
        )

    def start(self) -> None:
        """Issue what sends inputs out; `attend`, then `end` follow. RuntimeError, of all three: a
        transfer failed, here or in what this rank relays; it is logged with the step that met it.
        """
        # Segments of other calls on the same ranks may lie between, in one order on all of them
        # (`compile.ping_pong`).
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
        with self.bound.groups.inside("the attention of a layer" if self.forward else "an attention's backward"):
            try:
                yield
            except Exception:
                self.log_failure()
                self.transport.fail()
                raise

    def take_steps(self, stop: int) -> None:
        every = self.phase.steps
        take = self.take if self.trace is None else self.take_traced
        while self.at < stop:
            take(every[self.at])
            for kind, buffer in self.phase.last_uses[self.at]:
                self.let_go(kind, buffer)
            self.at += 1

    def take(self, step: steps.Step) -> None:
        match step:
            case steps.IssueStep(exchange):
                with self.named(PACK, exchange.zone, exchange.id):
                    self.issue(exchange)
            case steps.FinishStep():
                self.receive(step.exchange)
            case steps.Launch() | steps.GradLaunch():
                begin = time.perf_counter()
                with self.named(ATTENTION, step.zone):
                    self.launch(step)
                self.bound.groups.host_times.attended_s += time.perf_counter() - begin

    def named(self, what: str, zone: str, exchange: int = -1) -> AbstractContextManager[object]:
        """A range of the profiler that listens, if one does."""
        if not recorded():
            return _UNNAMED
        return record_function(name_of(what, zone, exchange, forward=self.forward))

    def take_traced(self, step: steps.Step) -> None:
        begin = self.mark()
        self.take(step)
        end, trace = self.mark(), self.trace
        assert trace is not None
        match step:
            case steps.IssueStep(exchange):
                if self.recorder is not None:
                    trace.append(Traced(COMPUTE, exchange.op, PACK, "own", begin, end))
                if not self.on_device:
                    trace.extend(Traced(at, exchange.op, leg, "own", begin, end) for at, leg in exchange.places())
            case steps.FinishStep(exchange):
                # Unpacking is computation: the exchange ends when its tensors are there.
                trace.append(Traced("", exchange.op, "finish", "own", begin, self.arrived))
                if self.recorder is not None:
                    trace.append(Traced(COMPUTE, exchange.op, "run", "own", self.arrived, end))
            case steps.Launch() | steps.GradLaunch():
                trace.append(Traced(COMPUTE, step.op, "run", "own", begin, end))

    def mark(self) -> Mark:
        return time.perf_counter() if self.recorder is None else self.recorder.mark()

    def log_failure(self) -> None:
        bound, every = self.bound, self.phase.steps
        log.error(
            "rank %d of %d, %s step %d of %d of the plan %s: %s",
            *(bound.rank, bound.groups.size, "forward" if self.forward else "backward", self.at, len(every)),
            *(bound.plan.fingerprint(), steps.describe(every[self.at]) if self.at < len(every) else "passing on"),
        )

    def empty(self, *shape: int, dtype: torch.dtype | None = None, received: bool = False) -> Tensor:
        """Memory of the rank's pool, not filled. `received`: first written by the transport."""
        return self.bound.groups.buffers.empty(shape, dtype or self.dtype, self.device, received=received)

    def fill(self) -> None:
        """Copy what was gathered, all of it at once."""
        if self.filling:
            self.bound.mover.fill(self.filling)
            self.filling = []

    def write(self, packed: steps.Packed, of: BufferOf, into: Tensor | memory.Later) -> None:
        self.filling.append(RowMove(packed, _Sources(packed.runs, of), into))

    def open_operands(self) -> None:
        room = self.memory.operands.get(self.at)
        if room is not None:
            self.operands = iter(memory.Views(self.empty(room.num_bytes, dtype=torch.uint8), room.places)[0])

    def operand(self, operand: steps.Operand, of: BufferOf) -> Tensor:
        """A view, or the next of the launch's gathered operands, filled by the next `fill`."""
        if operand.buffer >= 0:
            return heads_view(of(operand.buffer), operand.head, operand.num_heads)
        packed = operand.packed
        if packed.direct:
            run = packed.runs[0]
            return buffer_rows(of(run.buffer), run)
        into = next(self.operands)
        self.write(packed, of, into)
        return into

    def queries_and_keys(self, step: steps.Launch | steps.GradLaunch) -> tuple[Tensor, ...]:
        """Queries, keys and values of a launch, or what travels in place of these two."""
        q = self.operand(step.q, self.q.__getitem__)  # first: operands are gathered in this order
        return q, *[self.operand(step.k, partial(self.kv_of, part)) for part in self.parts]

    def kv_of(self, which: int, buffer: int) -> Tensor:
        return self.kv[buffer][which]

    def let_go(self, kind: Kind, buffer: int) -> None:
        """Drop a received input that no later step touches."""
        # Its memory is free once no transfer holds it.
        if kind == Kind.Q:
            self.q.let_go(buffer)
        elif kind == Kind.KV:
            self.kv.let_go(buffer)
            self.stacked.let_go(buffer)

    # Exchanges

    def expect(self) -> None:
        """Prepare the next exchange that is not yet expected, if there is one."""
        for exchange in self.upcoming:
            form = self.memory.exchanges[exchange.id]
            slots = self.under_way[exchange.id] = self.views(form.back, received=True)
            if form.is_block:
                self.transport.expect(exchange, memory.Block(slots.memory, form.back), {})
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

    def issue(self, exchange: steps.ExchangeStep) -> None:
        self.expect()
        form = self.memory.exchanges[exchange.id]
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
            self.transport.start(exchange, memory.Block(views.memory, form.out))
            return
        if len(form.sent) < len(exchange.sends):  # the others get the same
            peers = dict.fromkeys(m.peer for m in exchange.sends)
            sends = [(peer, x) for peer in peers for _, x in sends]
        self.transport.start(exchange, sends)

    def views(self, arranged: memory.Arranged, *, received: bool = False) -> memory.Views:
        """Memory for messages. `received`: the transport is the first to write it."""
        return memory.Views(self.empty(arranged.num_bytes, dtype=torch.uint8, received=received), arranged.places)

    def arriving(
        self, exchange: steps.ExchangeStep, form: memory.ExchangeForm, slots: memory.Views
    ) -> dict[int, Tensor]:
        """By peer whose messages are routed, the memory that holds all of the peer's."""
        found: dict[int, Tensor] = {}
        for peer, numbered in groupby(range(len(form.brought)), lambda at: form.brought[at].peer):
            if peer in exchange.routed_receives:
                places = [place for at in numbered for place in slots.places[at]]
                found[peer] = slots.memory[places[0].begin : places[-1].begin + places[-1].num_bytes]
        return found

    def receive(self, exchange: steps.ExchangeStep) -> None:
        with self.named(WAIT, exchange.zone, exchange.id):
            self.transport.arrived(exchange)
        if self.trace is not None:
            self.arrived = self.mark()
        form, slots = self.memory.exchanges[exchange.id], self.under_way.pop(exchange.id)
        adopted = self.memory.adopted
        with self.named(PLACE, exchange.zone, exchange.id):
            for together in form.together:
                self.arrive([(form.brought[at], slots, at, (exchange.id, at) in adopted) for at in together])
        self.transport.traffic.bytes_received += form.back.tensor_bytes

    def sources(self, kind: Kind) -> list[tuple[BufferOf, ...]]:
        """By buffer, what each tensor of a message holds rows of: a tensor, or two of one width."""
        if kind == Kind.Q:
            return [(self.q.__getitem__,)]
        return self.key_sources(self.kv_of)

    def key_sources(self, of: Callable[[int, int], Tensor]) -> list[tuple[BufferOf, ...]]:
        """`sources` of keys and values, or of their gradients: `of(part, buffer)`."""
        each = tuple([partial(of, part) for part in self.parts])
        return [each] if self.form.joined else [(one,) for one in each]

    def pack(self, message: steps.PeerMessage, into: Sequence[Tensor | memory.Later]) -> None:
        """Write a message to tensors, with the next `fill`."""
        for of, target in zip(self.sources(message.kind), into, strict=True):
            self.pack_tensor(message.packed, of, target)

    def pack_tensor(self, packed: steps.Packed, of: tuple[BufferOf, ...], target: Tensor | memory.Later) -> None:
        if len(of) == 1:
            self.write(packed, of[0], target)
            return
        for half, one in enumerate(of):  # of a pair [2, N, heads, D]
            self.write(packed, one, partial(_half, target, half))

    def parcel(self, message: steps.PeerMessage) -> list[Tensor]:
        """The contiguous tensors that carry a message."""
        # Each from where it lies, if it does so without gaps, or in memory that the next `fill`
        # fills.
        tensors: list[Tensor] = []
        for of, place in zip(self.sources(message.kind), self.tensor_places(message), strict=True):
            x = self.as_it_lies(message, of)
            if x is None or x.dtype != place.dtype or not x.is_contiguous():
                x = self.empty(*place.shape, dtype=place.dtype)
                self.pack_tensor(message.packed, of, x)
            tensors.append(x)
        return tensors

    def tensor_places(self, message: steps.PeerMessage) -> tuple[memory.BytesPlace, ...]:
        """Shapes and types of the tensors that carry a message."""
        return memory.layout((message.carried,), self.form).places[0]

    def as_it_lies(self, message: steps.PeerMessage, of: tuple[BufferOf, ...]) -> Tensor | None:
        """The rows of one of a message's tensors, where they are consecutive rows of one buffer."""
        packed = message.packed
        if not packed.direct:
            return None
        run = packed.runs[0]
        if len(of) == 1:
            return buffer_rows(of[0](run.buffer), run)
        pairs = self.pairs.get(message.kind, {})
        return buffer_rows(pairs[run.buffer], run, dim=1) if run.buffer in pairs else None

    def arrive(self, arrived: Sequence[Arrived]) -> None:
        match arrived[0][0].kind:
            case Kind.Q:
                for message, slots, at, _ in arrived:
                    self.q.later[message.buffer] = slots.later(at, 0)
            case Kind.KV:
                for message, slots, at, _ in arrived:
                    self.kv.later[message.buffer] = partial(slots.parts, at, joined=self.form.joined)
                    if self.form.joined:
                        self.stacked.later[message.buffer] = slots.later(at, 0)
            case _:
                self.other_arrive(arrived)

    def launch(self, step: steps.Step) -> None:
        raise NotImplementedError

    def other_arrive(self, arrived: Sequence[Arrived]) -> None:
        raise NotImplementedError


def recorded() -> bool:
    """Whether a profiler is listening; ranges cost host time even where none is."""
    return profiler._is_profiler_enabled  # pyright: ignore[reportPrivateUsage]


def name_of(what: str, zone: str, exchange: int = -1, *, forward: bool) -> str:
    """The name of a range in the traces of PyTorch's profiler, and in Nsight's where NVTX is asked
    for: as `analysis.trace_format` has it, between phase and zone (`balance backward pack 7
    inter-node`).
    """
    return f"balance {'forward' if forward else 'backward'} {named(what, exchange)} {zone}"
