"""Messages in one memory: where each tensor lies, known at bind, and the tensors, made when asked for.

A head exchange brings some twenty tensors in one memory. A launch takes the memory and a table of
what lies where, so most of those tensors are never needed, and making them would cost the host more
than anything else it does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor

from megatron_balance.analysis.wire import padded
from megatron_balance.ir.program import KEY_SIDE, Kind
from megatron_balance.runtime.lower.arrivals import taken_together
from megatron_balance.runtime.lower.last_use import Value
from megatron_balance.runtime.lower.parcels import BytesPlace, CallForm, layout, shapes
from megatron_balance.runtime.lower.regions import RowRun
from megatron_balance.runtime.lower.steps import ExchangeStep, PeerMessage
from megatron_balance.runtime.lower.sums import become_buffers

T = TypeVar("T")
Later: TypeAlias = Callable[[], Tensor]
"""Makes a tensor."""
Sizes: TypeAlias = Mapping[int, tuple[int, int]]
"""(rows, heads) of buffers by number."""


def made(x: Tensor | Later) -> Tensor:
    """A tensor, made now if it was not."""
    return x if isinstance(x, Tensor) else x()


class Views:
    """Tensors of messages in one memory, each made when it is asked for and then kept.

    `memory`: uint8 [bytes]; `places`: of each message's tensors in it.
    """

    __slots__ = ("_made", "_typed", "memory", "places")

    def __init__(self, memory: Tensor, places: Sequence[Sequence[BytesPlace]]) -> None:
        self.memory, self.places = memory, places
        self._made: dict[int, list[Tensor]] = {}
        self._typed: dict[torch.dtype, tuple[Tensor, int]] = {}

    def __len__(self) -> int:
        return len(self.places)

    def __iter__(self) -> Iterator[list[Tensor]]:
        return (self[at] for at in range(len(self.places)))

    def __getitem__(self, at: int) -> list[Tensor]:
        """The tensors of message `at`."""
        held = self._made.get(at)
        if held is None:
            held = self._made[at] = [self._view(place) for place in self.places[at]]
        return held

    def later(self, at: int, part: int, half: int = -1) -> Later:
        """Tensor `part` of message `at`, or half of that pair, made when it is called."""
        if half < 0:
            return lambda: self[at][part]
        return lambda: self[at][part][half]

    def later_rows(self, at: int, part: int, half: int, rows: tuple[int, int]) -> Later:
        """`rows` (first, number) of what `later` makes."""
        whole = self.later(at, part, half)
        return lambda: whole().narrow(0, *rows)

    def _view(self, place: BytesPlace) -> Tensor:
        begin, dtype, shape, strides = place
        seen = self._typed.get(dtype)
        if seen is None:
            typed = self.memory.view(dtype)
            seen = self._typed[dtype] = typed, int(typed.storage_offset())
        return seen[0].as_strided(shape, strides, seen[1] + begin // dtype.itemsize)


class Sources(Sequence[Tensor]):
    """The buffers of packed rows, each made when it is asked for. `of`: a buffer's tensor."""

    __slots__ = ("_of", "_runs")

    def __init__(self, runs: Sequence[RowRun], of: Callable[[int], Tensor]) -> None:
        self._runs, self._of = runs, of

    def __len__(self) -> int:
        return len(self._runs)

    def __getitem__(self, at: int) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self._of(self._runs[at].buffer)


class Buffers(dict[int, T]):
    """Tensors by buffer. Those that are made later are there once they are asked for."""

    def __init__(
        self, given: Mapping[int, T] | None = None, later: Mapping[int, Callable[[], T]] | None = None
    ) -> None:
        super().__init__(given or {})
        self.later = dict(later or {})

    def __missing__(self, buffer: int) -> T:
        self[buffer] = x = self.later.pop(buffer)()
        return x

    def __contains__(self, buffer: object) -> bool:
        return super().__contains__(buffer) or buffer in self.later

    def let_go(self, buffer: int) -> None:
        """Drop a buffer, if it is there."""
        self.pop(buffer, None)
        self.later.pop(buffer, None)

    def received(self) -> Buffers[T]:
        """All but the caller's own, buffer 0."""
        return Buffers({b: x for b, x in self.items() if b}, self.later)

    def all(self) -> dict[int, T]:
        """Each made."""
        for buffer in [*self.later]:
            self[buffer]
        return dict(self)


@dataclass(frozen=True, slots=True)
class Arranged:
    """Messages that lie one after the other in one memory, each tensor aligned.

    Attributes:
        places: of each message's tensors.
        num_bytes: of the memory.
        peers: (peer, bytes of its tensors), in order.
        sizes: bytes of each peer's part of the memory, by rank of the exchange's group.
    """

    places: tuple[tuple[BytesPlace, ...], ...]
    num_bytes: int
    peers: tuple[tuple[int, int], ...]
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, messages: Sequence[PeerMessage], group: Sequence[int], form: CallForm) -> Arranged:
        """Of an exchange's messages, those of a peer together."""
        num_bytes, places = layout(tuple([m.carried for m in messages]), form)
        own, parts = dict.fromkeys((m.peer for m in messages), 0), dict.fromkeys(group, 0)
        for message, tensors in zip(messages, places, strict=True):
            sizes = [place.num_bytes for place in tensors]
            own[message.peer] += sum(sizes)
            parts[message.peer] = parts.get(message.peer, 0) + sum(map(padded, sizes))
        return cls(places, padded(num_bytes), tuple(own.items()), tuple(parts[rank] for rank in group))

    @property
    def tensor_bytes(self) -> int:
        return sum(num_bytes for _, num_bytes in self.peers)


class Together(NamedTuple):
    """Tensors that are made and let go together, in one memory.

    Attributes:
        values: which buffers they are of, if any.
        places: of the tensors of each.
        num_bytes: of the memory.
    """

    values: tuple[Value, ...]
    places: tuple[tuple[BytesPlace, ...], ...]
    num_bytes: int


@dataclass(slots=True)
class Rooms:
    """Memory that tensors of a phase share.

    Attributes:
        totals: of each sum of gradients, that which it shares with others.
        operands: by number of a launch's step, that of its operands which are gathered: queries, keys,
            values, output gradients, outputs and LSE.
    """

    totals: dict[Value, Together] = field(default_factory=dict[Value, Together])
    operands: dict[int, Together] = field(default_factory=dict[int, Together])


class Block(NamedTuple):
    """Memory, uint8 [bytes], with all messages that an exchange sends, or brings."""

    memory: Tensor
    arranged: Arranged


@dataclass(frozen=True, slots=True)
class ExchangeForm:
    """Facts of an exchange that are the same in every layer, worked out once.

    Attributes:
        sent: the messages that leave this rank's memory.
        brought: those that arrive.
        is_block: whether a collective takes all that are sent from one memory, as it is, and brings
            all that arrive in another.
        packed: of each message sent, its number in the memory that several are written to; -1: it
            has memory of its own, or is sent from where it lies.
        out: where packed messages lie.
        back: where those lie that arrive.
        together: numbers of those that are taken in one call (`lower.arrivals`).
        become: of each message that arrives, whether its output gradients are all of one or several
            buffers, which are used where they lie.
    """

    sent: Sequence[PeerMessage]
    brought: Sequence[PeerMessage]
    is_block: bool
    packed: tuple[int, ...]
    out: Arranged
    back: Arranged
    together: Sequence[tuple[int, ...]]
    become: tuple[bool, ...]

    @classmethod
    def of(
        cls,
        exchange: ExchangeStep,
        sides: tuple[Sequence[PeerMessage], Sequence[PeerMessage]],
        form: CallForm,
        sizes: tuple[Sizes, Sizes],
        *,
        is_block: bool,
    ) -> ExchangeForm:
        """`sides`: messages that leave, and those that arrive; `sizes`: of query and key buffers."""
        sent, brought = sides
        row_bytes = (form.value_width * form.dtype.itemsize, form.wide.itemsize)
        chosen = [m for m in sent if is_block or _is_packed(m, exchange, form, sizes[1])]
        if not is_block and len(chosen) < 2:
            chosen = []
        numbers = {id(m): number for number, m in enumerate(chosen)}
        return cls(
            sent,
            brought,
            is_block,
            tuple([numbers.get(id(m), -1) for m in sent]),
            Arranged.of(chosen, exchange.group, form),
            Arranged.of(brought, exchange.group, form),
            taken_together(exchange, len(brought), wide=form.gradient == form.wide),
            tuple([m.kind == Kind.OUT_GRAD and become_buffers(m.packed, sizes[0], row_bytes) for m in brought]),
        )


def _is_packed(message: PeerMessage, exchange: ExchangeStep, form: CallForm, keys: Sizes) -> bool:
    """Whether a message is written to memory in any case, or must lie beside its peer's others."""
    if message.peer in exchange.routed_sends:
        parts = sum(len(shapes(m.carried, form)) for m in exchange.sends if m.peer == message.peer)
        if parts > 1:
            return True
    if message.kind in KEY_SIDE and form.joined and message.packed.direct:
        run = message.packed.runs[0]
        if (run.count, run.num_heads) != keys[run.buffer]:  # rows of two tensors, which lie apart
            return True
    match message.kind:
        case Kind.OUT_GRAD:
            return True
        case Kind.KV:  # the caller's are two tensors
            return not message.packed.direct or message.packed.runs[0].buffer == 0
        case Kind.OUT:
            return not message.packed.direct or form.dtype != form.wide
        case _:
            return not message.packed.direct
