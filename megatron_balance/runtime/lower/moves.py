"""Rows that a phase's steps move, known before it runs: movers make the tables of these at bind.

A step hands a mover several packed tensors at once, and a table is of all of them that one launch
may move. `executor` and `phase_run` decide whether rows are copied or sent from where they lie, and
which gradients are kept, adopted or added; the same is decided here, and where it depends on the
caller's tensors, both ways are listed. A move that is missing here is no error: its table is made,
and copied by itself, when the first layer runs.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Literal, NamedTuple, TypeAlias

import torch

from megatron_balance.ir.program import KEY_SIDE, Kind
from megatron_balance.runtime.lower.last_use import Value
from megatron_balance.runtime.lower.parcels import Form, shapes
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
    Sums,
)
from megatron_balance.runtime.lower.sums import is_whole

Call: TypeAlias = Literal["fill", "place", "add", "partial"]
"""A mover's method, or "partial": outputs that are added to its partials, of one packed tensor."""
Sizes: TypeAlias = Mapping[int, tuple[int, int]]
"""(rows, heads) of buffers by number."""


class Handling(NamedTuple):
    """Questions about an exchange that its transport answers.

    Attributes:
        sent: the messages that are packed.
        brought: those that arrive.
        is_block: whether all that are sent are packed into one memory.
    """

    sent: Callable[[ExchangeStep], Sequence[Message]]
    brought: Callable[[ExchangeStep], Sequence[Message]]
    is_block: Callable[[ExchangeStep], bool]


class Moved(NamedTuple):
    """Rows that are moved. `kind`: equal for tensors that one launch may move (type and head)."""

    packed: Packed
    kind: Hashable = None


class Move(NamedTuple):
    """A call of a mover."""

    call: Call
    moved: tuple[Moved, ...]


class _Filled(NamedTuple):
    """Rows that are copied to a message. `maybe`: only if a tensor that was given has gaps."""

    moved: Moved
    maybe: bool = False


def moves_of(phase: Phase, sizes: tuple[Sizes, Sizes], form: Form, handling: Handling) -> Iterator[Move]:
    """The calls that one run of a phase makes. `sizes`: of query and of key buffers."""
    walk = _Walk(*sizes, form)
    for step in phase.steps:
        match step:
            case Launch():
                yield Move("fill", walk.operands(step))
                yield Move("partial", (Moved(step.out),))
            case GradLaunch():
                yield Move("fill", (*walk.operands(step), *walk.final(step.dout.packed, gathered=_gathered(step.dout))))
                yield Move("add", walk.launched(step))
            case Start(exchange):
                filled = list(walk.sent(exchange, handling))
                yield Move("fill", tuple(one.moved for one in filled if not one.maybe))
                yield Move("fill", tuple(one.moved for one in filled))
            case Finish(exchange):
                messages = handling.brought(exchange)
                for together in exchange.arrivals or [(at,) for at in range(len(messages))]:
                    yield from walk.received([messages[at] for at in together])


def _gathered(operand: Operand) -> bool:
    return operand.buffer < 0 and not operand.packed.direct


class _Walk:
    """The state of a phase's run that decides what is moved.

    Attributes:
        held: types of the only gradients of buffers so far.
        totals: types of the sums of gradients of buffers.
    """

    def __init__(self, queries: Sizes, keys: Sizes, form: Form) -> None:
        self.queries, self.keys, self.form = queries, keys, form
        self.rows: Hashable = (form.dtype, form.dtype, form.dim)
        self.values: Hashable = (form.dtype, form.dtype, form.value_width)
        self.keyed: tuple[Hashable, ...] = tuple((form.dtype, form.dtype, width) for width in form.kv_widths)
        self.lse: Hashable = (form.wide, form.wide, 1)
        self.held: dict[Value, torch.dtype] = {}
        self.totals: dict[Value, torch.dtype] = {}

    def operands(self, step: Launch | GradLaunch) -> tuple[Moved, ...]:
        return tuple(
            Moved(operand.packed, kind)
            for operand, kinds in ((step.q, (self.rows,)), (step.k, self.keyed))
            for kind in (kinds if _gathered(operand) else ())
        )

    def final(self, packed: Packed, *, gathered: bool = True) -> tuple[Moved, ...]:
        """The gradient, output and LSE of queries."""
        kinds = (self.values, self.values, self.lse) if gathered else ()
        return tuple(Moved(packed, kind) for kind in kinds)

    # What is sent

    def sent(self, exchange: ExchangeStep, handling: Handling) -> Iterator[_Filled]:
        is_block = handling.is_block(exchange)
        for peer, group in groupby(handling.sent(exchange), attrgetter("peer")):
            messages = list(group)
            parts = sum(len(shapes(m.carried, self.form)) for m in messages)
            together = is_block or (peer in exchange.routed_sends and parts > 1)
            for message in messages:
                yield from self.filled(message, together=together)

    def filled(self, message: Message, *, together: bool) -> Iterator[_Filled]:
        """The tensors of a message that are filled, the others being sent from where they lie.

        `together`: packed with others, so never from there.
        """
        packed = message.packed
        own = packed.direct and packed.runs[0].buffer == 0
        rows = packed.direct and not together and packed.runs[0].num_heads == self.heads(message)
        if not self.form.joined and message.kind in KEY_SIDE:
            yield from self.apart(message.kind, packed, rows=rows, own=own)
            return
        match message.kind:
            case Kind.OUT:
                pass  # merged
            case Kind.Q:
                if not rows or own:
                    yield _Filled(Moved(packed, self.rows), maybe=rows)
            case Kind.OUT_GRAD:
                gradient, out, lse = self.final(packed)
                yield from (_Filled(gradient), _Filled(out))
                if not rows or own:
                    yield _Filled(lse, maybe=rows)
            case Kind.KV:  # the caller's are two tensors
                if not (rows and not own and self.has_all_rows(packed, self.keys)):
                    yield from (_Filled(Moved(packed, self.rows)), _Filled(Moved(packed, self.values)))
            case Kind.Q_GRAD:
                dtype = self.summed(Kind.Q_GRAD, packed)
                held = (Kind.Q_GRAD, packed.runs[0].buffer) in self.held
                as_it_lies = rows and dtype == self.form.gradient
                if not as_it_lies or held:
                    yield _Filled(self.sum_of(packed, dtype, self.form.dim), maybe=as_it_lies)
            case Kind.KV_GRAD:
                stacked = self.totals.get((Kind.KV_GRAD, packed.runs[0].buffer)) == self.form.gradient
                if not (rows and stacked and self.has_all_rows(packed, self.keys)):
                    dtype = self.summed(Kind.KV_GRAD, packed)
                    yield from (_Filled(self.sum_of(packed, dtype, width)) for width in self.form.kv_widths)

    def apart(self, kind: Kind, packed: Packed, *, rows: bool, own: bool) -> Iterator[_Filled]:
        """Keys and values, or their gradients, as a tensor each, sent as it lies if it can be."""
        if kind == Kind.KV:
            filled, maybe, kinds = not rows or own, rows, self.keyed
        else:
            dtype = self.summed(kind, packed)
            maybe = rows and dtype == self.form.gradient
            filled = not maybe or (kind, packed.runs[0].buffer) in self.held
            kinds = tuple(self.sum_of(packed, dtype, width).kind for width in self.form.kv_widths)
        if filled:
            yield from (_Filled(Moved(packed, each), maybe=maybe) for each in kinds)

    def heads(self, message: Message) -> int:
        of = self.keys if message.kind in (Kind.KV, Kind.KV_GRAD) else self.queries
        return of[message.packed.runs[0].buffer][1]

    @staticmethod
    def has_all_rows(packed: Packed, of: Sizes) -> bool:
        run = packed.runs[0]
        return run.stop - run.start == of[run.buffer][0]

    def sum_of(self, packed: Packed, dtype: torch.dtype, width: int) -> Moved:
        return Moved(packed, (dtype, self.form.gradient, width))

    # Gradients, as `executor.BackwardRun` sums them

    def summed(self, kind: Kind, packed: Packed) -> torch.dtype:
        """The type of the first of the gradients that are read."""
        values = [(kind, run.buffer) for run in packed.runs]
        for value in values:
            if value not in self.held:
                self.total(value)
        return self.held.get(values[0], self.form.wide)

    def total(self, value: Value) -> None:
        self.held.pop(value, None)
        self.totals[value] = self.form.wide

    def launched(self, step: GradLaunch) -> tuple[Moved, ...]:
        """The additions of a launch's gradients, which kernels leave in the type of the inputs."""
        return (
            *self.added(Kind.Q_GRAD, step.dq_sums, self.form.dtype),
            *self.added(Kind.KV_GRAD, step.dk_sums, self.form.dtype),
        )

    def added(self, kind: Kind, sums: Sums, dtype: torch.dtype) -> tuple[Moved, ...]:
        for run in sums.kept:
            self.held[kind, run.buffer] = dtype
        for run in sums.added.runs:
            self.total((kind, run.buffer))
        return self.each(kind, sums.added) if sums.added.runs else ()

    def each(self, kind: Kind, packed: Packed) -> tuple[Moved, ...]:
        widths = (self.form.dim,) if kind == Kind.Q_GRAD else self.form.kv_widths
        return tuple(Moved(packed, width) for width in widths)

    def received(self, messages: Sequence[Message]) -> Iterator[Move]:
        """The calls for messages of one kind that arrive together."""
        match messages[0].kind:
            case Kind.OUT:
                for message in messages:
                    yield Move("partial", (Moved(message.packed),))
            case Kind.OUT_GRAD:
                yield Move("place", tuple(moved for m in messages for moved in self.final(m.packed)))
            case Kind.Q_GRAD | Kind.KV_GRAD:
                yield Move("add", tuple(moved for m in messages for moved in self.received_grads(m)))
            case Kind.Q | Kind.KV:
                pass  # they become buffers

    def received_grads(self, message: Message) -> tuple[Moved, ...]:
        packed, kind = message.packed, message.kind
        value = (kind, packed.runs[0].buffer)
        if self.adopts(packed, value):
            moved = self.each(kind, packed) if self.held.pop(value, None) is not None else ()
            self.totals[value] = self.form.gradient
            return moved
        moved = self.added(kind, message.sums, self.form.gradient)
        if any(not run.buffer for run in message.sums.kept):
            self.total((kind, 0))
        return moved

    def adopts(self, packed: Packed, value: Value) -> bool:
        form, size = self.form, (self.queries if value[0] == Kind.Q_GRAD else self.keys)[value[1]]
        if value in self.totals or len(packed.runs) != 1 or not is_whole(packed.runs[0], packed, size):
            return False
        return value[1] > 0 or form.gradient == form.wide != form.dtype
