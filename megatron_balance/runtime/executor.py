"""Run a bound plan on tensors: the forward and backward steps of one attention call.

Shapes and types as in `runtime.phase_run`.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_balance.ir.program import Kind
from megatron_balance.runtime.bind import Bound
from megatron_balance.runtime.lower.memory import Buffers, Later, Sizes, Views, whole_of
from megatron_balance.runtime.lower.steps import GradLaunch, Launch, Packed, PeerMessage, Step, Sums, Value
from megatron_balance.runtime.movers.base import RowMove, Sent, Space
from megatron_balance.runtime.phase_run import Arrived, BufferOf, PhaseRun, Received


def run_forward(bound: Bound, q: Tensor, kv: tuple[Tensor, ...], scale: float) -> tuple[Tensor, Tensor, Received]:
    """Output [T, H, V] in q's dtype, LSE [T, H], and what the backward needs; q [T, H, D]."""
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
        super().__init__(bound, "forward", q, kv, Received())
        self.scale = scale
        sizes, blank = bound.query_rows, self.phase.blank_outputs
        # Not a method of this object, which would then end with a garbage collection only.
        empty = partial(bound.groups.buffers.empty, device=self.device)
        self.partials = bound.mover.partials(Space(sizes, blank, self.form.value_width, self.dtype, self.wide, empty))
        self.sending: list[Sent] = []  # for the next `fill`

    def outputs(self) -> tuple[Tensor, Tensor, Received]:
        """End the forward: output [T, H, V], LSE [T, H], and what the backward needs."""
        self.end()
        received = Received()
        if self.bound.policy == "keep":
            received = Received(self.q.received(), self.kv.received())
        return *self.partials.final(), received

    def launch(self, step: Step) -> None:
        assert isinstance(step, Launch), "a backward launch in the forward"
        self.open_operands()
        q, *kv = self.queries_and_keys(step)
        self.fill()
        kernel: Any = self.bound.kernel  # of keys and values, or of what travels in their place
        out, lse = kernel.forward(step.entries, q, *kv, self.scale)
        self.transport.launched()
        self.partials.add(step.out, step.merges, out, lse)

    def parcel(self, message: PeerMessage) -> list[Tensor]:
        if message.kind != Kind.OUT:
            return super().parcel(message)
        both = self.partials.as_they_lie(message.packed)
        if both is not None:
            return list(both)
        tensors = [self.empty(*place.shape, dtype=place.dtype) for place in self.tensor_places(message)]
        self.pack(message, tensors)
        return tensors

    def fill(self) -> None:
        super().fill()
        if self.sending:
            self.partials.send(self.sending)
            self.sending = []

    def pack(self, message: PeerMessage, into: Sequence[Tensor | Later]) -> None:
        if message.kind == Kind.OUT:
            self.sending.append(Sent(message.packed, *into))
        else:
            super().pack(message, into)

    def other_arrive(self, arrived: Sequence[Arrived]) -> None:
        for message, slots, at, _ in arrived:
            self.partials.add(message.packed, message.merges, *slots[at])


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
        super().__init__(bound, "backward", inputs[0], inputs[1:], received)
        self.scale = scale
        self.dout, self.out, self.lse = Buffers({0: dout}), Buffers({0: final[0]}), Buffers({0: final[1]})
        self.totals: dict[Value, tuple[Tensor, ...]] = {}  # [T, heads, D or V] each: dq, or dk and dv
        self.joined: dict[int, Tensor] = {}  # by buffer: both of totals of keys, [2, T, heads, D]
        self.pairs[Kind.KV_GRAD] = self.joined
        self.held: dict[Value, tuple[Tensor, ...]] = {}  # the only gradient of a buffer so far, as it came
        self.begun: list[RowMove] = []  # to be copied by the next `begin_sums`
        self.fresh: set[Value] = set()  # totals that were never written
        self.touched: set[Value] = set()  # by the next `add`
        self.made_room: dict[Value, tuple[Tensor, ...]] = {}  # of totals to come, beside others

    def gradients(self) -> tuple[Tensor, ...]:
        """End the backward: the gradients of q, k and v."""
        self.end()
        grads = (self.final(Kind.Q_GRAD, 0), *[self.final(Kind.KV_GRAD, part) for part in self.parts])
        self.fill()
        return grads

    def final(self, kind: Kind, part: int) -> Tensor:
        """A gradient of the caller's rows in its type, without gaps; filled by the next `fill`."""
        x = self.summed(kind, 0)[part]
        if x.dtype == self.dtype:
            return x.contiguous()
        target = torch.empty(x.shape, dtype=self.dtype, device=self.device)
        self.filling.append(RowMove(self.whole((kind, 0)), (x,), target))
        return target

    def whole(self, value: Value) -> Packed:
        return whole_of(value, self.sizes(value[0]))

    def let_go(self, kind: Kind, buffer: int) -> None:
        super().let_go(kind, buffer)
        self.totals.pop((kind, buffer), None)
        if kind == Kind.KV_GRAD:
            self.joined.pop(buffer, None)
        self.held.pop((kind, buffer), None)

    def sizes(self, kind: Kind) -> Sizes:
        return self.bound.query_rows if kind == Kind.Q_GRAD else self.bound.key_rows

    def summed(self, kind: Kind, buffer: int) -> tuple[Tensor, ...]:
        """Gradients of a buffer so far, in whatever type: dq, or dk and dv."""
        held = self.held.get((kind, buffer))
        if held is None:
            held = self.total((kind, buffer))
            if (kind, buffer) in self.fresh:
                self.fresh.discard((kind, buffer))
                for x in (self.joined[buffer],) if kind == Kind.KV_GRAD and self.form.joined else held:
                    x.zero_()
            self.begin_sums()
        return held

    def total(self, value: Value) -> tuple[Tensor, ...]:
        """Memory [T, heads, D or V] in the wide type that gradients of a buffer are added to."""
        # The first of them is there behind the next `begin_sums`, or the next `add`, which begins
        # it.
        before = self.totals.get(value)
        if before is not None and before[0].dtype == self.wide:
            return before
        if value not in self.made_room:
            self.make_room(value)
        total = self.made_room.pop(value)
        if value[0] == Kind.KV_GRAD and self.form.joined:
            self.joined[value[1]] = total[0]
            total = tuple(total[0].unbind(0))
        parts = self.held.pop(value, None) if before is None else before
        if parts is None:
            self.fresh.add(value)
        else:
            whole = self.whole(value)
            self.begun += [RowMove(whole, (x,), part) for x, part in zip(total, parts, strict=True)]
        self.totals[value] = total
        return total

    def make_room(self, value: Value) -> None:
        """Make the tensors of a total, and of those that share its memory."""
        together = self.memory.totals.get(value)
        if together is not None:
            views = Views(self.empty(together.num_bytes, dtype=torch.uint8), together.places)
            self.made_room |= {each: tuple(views[at]) for at, each in enumerate(together.values)}
            return
        # Handed to the caller as it is, so that it has memory of its own.
        kind, size = value[0], self.sizes(value[0])[value[1]]
        if kind == Kind.KV_GRAD and self.form.joined:
            shapes = [(2, *size, self.form.dim)]
        else:
            widths = self.form.kv_widths if kind == Kind.KV_GRAD else (self.form.dim,)
            shapes = [(*size, width) for width in widths]
        self.made_room[value] = tuple([torch.empty(shape, dtype=self.wide, device=self.device) for shape in shapes])

    def begin_sums(self) -> None:
        """Copy the gradients that others are added to, all of them at once."""
        if self.begun:
            self.bound.mover.place(self.begun)
            self.begun = []

    def add(self, places: Sequence[RowMove]) -> None:
        """Add gradients, behind those that begin their sums."""
        self.begin_sums()
        if places:
            self.bound.mover.add(places)
        if self.fresh:
            self.fresh -= self.touched
        self.touched.clear()

    def launch(self, step: Step) -> None:
        assert isinstance(step, GradLaunch), "a forward launch in the backward"
        self.open_operands()
        q, *kv = self.queries_and_keys(step)
        final = tuple([self.operand(step.dout, of.__getitem__) for of in (self.dout, self.out, self.lse)])
        self.fill()
        kernel: Any = self.bound.kernel
        dq, *dkv = kernel.backward(step.entries, final, q, *kv, self.scale)
        self.transport.launched()
        places = self.places(Kind.Q_GRAD, step.dq_sums, (dq,))
        places += self.places(Kind.KV_GRAD, step.dk_sums, dkv)
        self.add(places)

    def places(self, kind: Kind, sums: Sums, grads: Sequence[Tensor]) -> list[RowMove]:
        """Keep packed gradients that are a whole buffer's first; the places of the others."""
        for run in sums.kept:
            self.held[kind, run.buffer] = tuple(x.narrow(0, run.row, run.count) for x in grads)
        return self.added(kind, sums.added, grads)

    def added(self, kind: Kind, packed: Packed, grads: Sequence[Tensor | Later]) -> list[RowMove]:
        """The places of packed gradients that are added."""
        if not packed.runs:
            return []
        values = [(kind, run.buffer) for run in packed.runs]
        totals = [self.total(value) for value in values]
        fresh = ()
        if self.fresh:
            self.touched.update(values)
            fresh = tuple([number for number, value in enumerate(values) if value in self.fresh])
        return [RowMove(packed, tuple([total[i] for total in totals]), x, fresh) for i, x in enumerate(grads)]

    def received_places(self, message: PeerMessage, slots: Views, at: int, adopted: bool) -> list[RowMove]:
        """Where gradients that came in a message, [N, heads, D or V] or both joined, are added."""
        # To adopted ones, a whole buffer's, what this rank has of it is added where they lie: a
        # ring's rounds zero nothing and copy nothing.
        packed, value = message.packed, (message.kind, message.packed.runs[0].buffer)
        joined = message.kind == Kind.KV_GRAD and self.form.joined
        if adopted:
            self.totals[value] = grads = slots.parts(at, joined=joined)
            held = self.held.pop(value, ())
            if joined:
                self.joined[value[1]] = slots[at][0]
            # Nothing was held, nothing is added.
            return [RowMove(packed, (target,), x) for x, target in zip(held, grads, strict=False)]
        if not message.sums.kept:  # then no tensor is made before it is asked for
            parts = [(0, 0), (0, 1)] if joined else [(part, -1) for part in range(len(slots.places[at]))]
            return self.added(message.kind, message.sums.added, [slots.later(at, *part) for part in parts])
        places = self.places(message.kind, message.sums, slots.parts(at, joined=joined))
        if any(not run.buffer for run in message.sums.kept):  # the message's memory is not the caller's
            self.total((message.kind, 0))
        return places

    def sources(self, kind: Kind) -> list[tuple[BufferOf, ...]]:
        match kind:
            case Kind.OUT_GRAD:
                return [(self.dout.__getitem__, self.out.__getitem__), (self.lse.__getitem__,)]
            case Kind.Q_GRAD:
                return [(partial(self.part_of_sum, kind, 0),)]
            case Kind.KV_GRAD:
                return self.key_sources(partial(self.part_of_sum, kind))
            case _:
                return super().sources(kind)

    def part_of_sum(self, kind: Kind, part: int, buffer: int) -> Tensor:
        return self.summed(kind, buffer)[part]

    def other_arrive(self, arrived: Sequence[Arrived]) -> None:
        if arrived[0][0].kind == Kind.OUT_GRAD:
            self.place_final(arrived)
        else:
            self.add([place for each in arrived for place in self.received_places(*each)])

    def place_final(self, arrived: Sequence[Arrived]) -> None:
        """Unpack gradients, outputs and LSE of queries that this rank serves."""
        # Adopted ones are used where they lie.
        places: list[RowMove] = []
        for message, slots, at, adopted in arrived:
            runs = message.packed.runs
            if adopted:
                for run in runs:
                    rows = (run.row, run.count)
                    self.dout.later[run.buffer] = slots.later_rows(at, 0, 0, rows)
                    self.out.later[run.buffer] = slots.later_rows(at, 0, 1, rows)
                    self.lse.later[run.buffer] = slots.later_rows(at, 1, -1, rows)
                continue
            for buffer in {run.buffer for run in runs if run.buffer not in self.dout}:
                rows, heads = self.bound.query_rows[buffer]
                self.dout[buffer] = self.empty(rows, heads, self.form.value_width)
                self.out[buffer] = self.empty(rows, heads, self.form.value_width)
                self.lse[buffer] = self.empty(rows, heads, dtype=self.wide)
            both, lse = slots[at]
            held = ((both[0], self.dout), (both[1], self.out), (lse, self.lse))
            places += [RowMove(message.packed, tuple(of[run.buffer] for run in runs), x) for x, of in held]
        if places:
            self.bound.mover.place(places)
