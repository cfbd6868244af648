"""Where tensors of messages, operands and sums lie in memory that they share: known at bind, made
when asked for; and how much of it one call needs at once (`peak_bytes`).

Messages are packed as `analysis.wire` has them: source, target and proxies compute the same sizes,
from rows, heads and element types alone. A head exchange brings some twenty tensors in one memory;
a launch takes the memory and a table of what lies where, so most of them are never made.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate, chain, pairwise
from math import prod
from typing import NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor

from megatron_balance.analysis import wire
from megatron_balance.analysis.wire import ALIGN, Carried, padded, tensor_bytes
from megatron_balance.compile.pipeline import PhaseName
from megatron_balance.ir.model import GradientWire
from megatron_balance.ir.program import KEY_SIDE, Kind
from megatron_balance.runtime.groups import Groups
from megatron_balance.runtime.lower import steps

Shape: TypeAlias = tuple[tuple[int, ...], torch.dtype]


@dataclass(frozen=True, slots=True)
class CallForm:
    """Element types of one attention call, and widths of its heads."""

    # Of queries and keys.
    dim: int
    dtype: torch.dtype
    # Of partials and of summed gradients.
    wide: torch.dtype
    # In which gradients travel.
    gradient: torch.dtype
    # Of values and outputs; None: the same as of keys.
    value_dim: int | None = None
    # Of what travels in place of keys and values; None: they do.
    latent_dim: int | None = None

    @classmethod
    def of(cls, shape: AttentionShape, dtype: torch.dtype, gradient_wire: GradientWire) -> CallForm:
        wide = wide_dtype(dtype)
        gradient = torch.bfloat16 if gradient_wire == "bf16" else wide
        value_dim = None if shape.value_dim == shape.head_dim else shape.value_dim
        return cls(shape.head_dim, dtype, wide, gradient, value_dim, shape.latent_dim)

    @property
    def value_width(self) -> int:
        return self.dim if self.value_dim is None else self.value_dim

    @property
    def kv_widths(self) -> tuple[int, ...]:
        """Widths of keys and of values, or of what travels in their place."""
        return self.sizes.kv_widths

    @property
    def joined(self) -> bool:
        """Whether keys and values are of one width, so that one tensor carries both."""
        return self.value_dim is None and self.latent_dim is None

    @property
    def sizes(self) -> wire.HeadSizes:
        elements = (self.dtype.itemsize, self.wide.itemsize, self.gradient.itemsize)
        return wire.HeadSizes(self.dim, *elements, self.value_dim, self.latent_dim)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type that partials are accumulated in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def shapes(message: Carried, form: CallForm) -> tuple[Shape, ...]:
    """Shapes and types of the tensors that carry a message (`wire.tensor_shapes`)."""
    types = {"narrow": form.dtype, "wide": form.wide, "gradient": form.gradient}
    return tuple([(shape, types[element]) for shape, element in wire.tensor_shapes(message, form.sizes)])


class BytesPlace(NamedTuple):
    """A contiguous tensor in packed bytes, from byte `begin` on; `strides` in elements."""

    begin: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def places_of(shapes: Sequence[Shape], behind: BytesPlace | None = None) -> tuple[BytesPlace, ...]:
    """Tensors one after the other, `behind` a place of the same memory if there is one."""
    places: list[BytesPlace] = []
    for shape, dtype in shapes:
        begin = 0 if behind is None else padded(behind.begin + behind.num_bytes)
        behind = BytesPlace(begin, dtype, shape, tuple(prod(shape[at:]) for at in range(1, len(shape) + 1)))
        places.append(behind)
    return tuple(places)


class Together(NamedTuple):
    """Tensors in one memory: `places` of those of each message, or of each of `values`."""

    num_bytes: int
    places: tuple[tuple[BytesPlace, ...], ...]
    values: tuple[steps.Value, ...] = ()


@lru_cache(maxsize=4096)
def layout(messages: tuple[Carried, ...], form: CallForm) -> Together:
    """The layout of messages one after the other; every layer asks for the same ones."""
    of_messages = [shapes(message, form) for message in messages]
    each = places_of(list(chain.from_iterable(of_messages)))
    ends = list(accumulate(map(len, of_messages), initial=0))
    num_bytes = each[-1].begin + each[-1].num_bytes if each else 0
    return Together(num_bytes, tuple(each[first:stop] for first, stop in pairwise(ends)))


@lru_cache(maxsize=4096)
def piece_bytes(messages: tuple[Carried, ...], form: CallForm, index: int, count: int) -> int:
    """Bytes of piece `index` of `count` of messages that go in pieces, alike in every layer."""
    begin, end = wire.piece_bounds(layout(messages, form).num_bytes, count)[index]
    return end - begin


def as_bytes(x: Tensor) -> Tensor:
    return x.view(-1).view(torch.uint8)


def _adjacent_bytes(tensors: Sequence[Tensor]) -> Tensor | None:
    """The bytes of tensors that already lie packed in one memory: a view; else None."""
    first, at = tensors[0], tensors[0].data_ptr()
    memory = first.untyped_storage()
    for x in tensors:
        if x.data_ptr() != at or x.untyped_storage().data_ptr() != memory.data_ptr() or not x.is_contiguous():
            return None
        at = x.data_ptr() + padded(x.nbytes)
    size = tensors[-1].data_ptr() + tensors[-1].nbytes - first.data_ptr()
    return as_bytes(first).as_strided((size,), (1,))


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """Contiguous tensors as packed bytes: a view of one or of adjacent ones, else a copy."""
    if len(tensors) == 1:
        return as_bytes(tensors[0])
    together = _adjacent_bytes(tensors)
    if together is not None:
        return together
    starts, at = [], 0
    for x in tensors:
        starts.append(at)
        at = padded(at + x.nbytes)
    raw = torch.empty(starts[-1] + tensors[-1].nbytes, dtype=torch.uint8, device=tensors[0].device)
    for start, x in zip(starts, tensors, strict=True):
        raw[start : start + x.nbytes].copy_(as_bytes(x))
    return raw


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Heads that this rank's attention sees; under tensor parallelism those of its share."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    # Width of values and outputs, where it is not that of queries and keys, `head_dim`.
    value_dim: int | None = None
    # Where the latent of multi-latent attention travels in place of keys and values, its rank and
    # the width of the rotary key beside it; then `num_kv_heads` is 1.
    latent: tuple[int, int] | None = None
    # Scores stay below it in magnitude: softcap * tanh(score / softcap). 0: they are as they are.
    softcap: float = 0.0

    @property
    def latent_dim(self) -> int | None:
        """Width of what travels in place of keys and values; None: they do."""
        return None if self.latent is None else sum(self.latent)

    @property
    def value_width(self) -> int:
        return self.head_dim if self.value_dim is None else self.value_dim

    @property
    def widths(self) -> tuple[int, int]:
        """Of a head's queries and keys, and of its values and outputs."""
        return self.head_dim, self.value_width


T = TypeVar("T")
Later: TypeAlias = Callable[[], Tensor]  # makes a tensor
Sizes: TypeAlias = Mapping[int, tuple[int, int]]  # (rows, heads) of buffers by number


def made(x: Tensor | Later) -> Tensor:
    return x if isinstance(x, Tensor) else x()


class Views:
    """Tensors of messages in one memory (uint8 [bytes]), each made when it is asked for and then
    kept.

    `places`: of each message's tensors.
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
        held = self._made.get(at)
        if held is None:
            held = self._made[at] = [self._view(place) for place in self.places[at]]
        return held

    def parts(self, at: int, *, joined: bool) -> tuple[Tensor, ...]:
        """The tensors of message `at`; `joined`: the two of the pair that it is."""
        return tuple(self[at][0].unbind(0) if joined else self[at])

    def later(self, at: int, part: int, half: int = -1) -> Later:
        """Tensor `part` of message `at`, or half of that pair, made when it is called."""
        if half < 0:
            return lambda: self[at][part]
        return lambda: self[at][part][half]

    def later_rows(self, at: int, part: int, half: int, rows: tuple[int, int]) -> Later:
        whole = self.later(at, part, half)
        return lambda: whole().narrow(0, *rows)

    def _view(self, place: BytesPlace) -> Tensor:
        begin, dtype, shape, strides = place
        seen = self._typed.get(dtype)
        if seen is None:
            typed = self.memory.view(dtype)
            seen = self._typed[dtype] = typed, int(typed.storage_offset())
        return seen[0].as_strided(shape, strides, seen[1] + begin // dtype.itemsize)


def unpack(raw: Tensor, messages: Sequence[Carried], form: CallForm) -> list[list[Tensor]]:
    """The tensors of each message, as views of the bytes that `pack` made of them."""
    whole = raw.narrow(0, 0, raw.shape[0] // ALIGN * ALIGN)  # what can be seen as elements of any type
    return list(Views(whole, layout(tuple(messages), form).places))


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
        self.pop(buffer, None)
        self.later.pop(buffer, None)

    def received(self) -> Buffers[T]:
        """All but the caller's own, buffer 0."""
        return Buffers({b: x for b, x in self.items() if b}, self.later)

    def all(self) -> dict[int, T]:
        for buffer in [*self.later]:
            self[buffer]
        return dict(self)


@dataclass(frozen=True, slots=True)
class Arranged:
    """Messages that lie one after the other in one memory, each tensor aligned."""

    places: tuple[tuple[BytesPlace, ...], ...]
    # Of the memory.
    num_bytes: int
    # (rank, bytes of its tensors without what aligns them).
    peers: tuple[tuple[int, int], ...]
    # Bytes of each rank of the exchange's group, with it, as an all-to-all is told.
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, messages: Sequence[steps.PeerMessage], group: Sequence[int], form: CallForm) -> Arranged:
        """Of an exchange's messages, those of a peer together."""
        num_bytes, places, _ = layout(tuple([m.carried for m in messages]), form)
        own, parts = dict.fromkeys((m.peer for m in messages), 0), dict.fromkeys(group, 0)
        for message, tensors in zip(messages, places, strict=True):
            sizes = [place.num_bytes for place in tensors]
            own[message.peer] += sum(sizes)
            parts[message.peer] = parts.get(message.peer, 0) + sum(map(padded, sizes))
        return cls(places, padded(num_bytes), tuple(own.items()), tuple(parts[rank] for rank in group))

    @property
    def tensor_bytes(self) -> int:
        return sum(num_bytes for _, num_bytes in self.peers)


class Block(NamedTuple):
    """Memory, uint8 [bytes], with all messages that an exchange sends, or brings."""

    memory: Tensor
    arranged: Arranged


def is_collective(exchange: steps.ExchangeStep, groups: Groups) -> bool:
    return exchange.collective != "p2p" and groups.of(exchange.group) is not None


def _is_block(exchange: steps.ExchangeStep, groups: Groups) -> bool:
    """Whether an exchange sends one block and brings another, peer by peer, each tensor aligned."""
    return exchange.collective != "all_gather" and is_collective(exchange, groups) and not _is_summed(exchange, groups)


def _is_summed(exchange: steps.ExchangeStep, groups: Groups) -> bool:
    """Whether an exchange is a reduce-scatter that brings one block, the sum of all (NCCL)."""
    # gloo's reduce-scatter is an all-reduce of everything inside, so there each block goes to its
    # rank, which adds them up.
    return exchange.collective == "reduce_scatter" and groups.streams is not None and is_collective(exchange, groups)


def _brought(exchange: steps.ExchangeStep, groups: Groups) -> Sequence[steps.PeerMessage]:
    """The messages that an exchange brings: those of one peer where it sums on the way."""
    if not _is_summed(exchange, groups):
        return exchange.receives
    return [m for m in exchange.receives if m.peer == exchange.receives[0].peer]


def _sent(exchange: steps.ExchangeStep, groups: Groups) -> Sequence[steps.PeerMessage]:
    """The messages that are packed to be sent: those to one peer where all get the same."""
    if exchange.collective != "all_gather" or not is_collective(exchange, groups):
        return exchange.sends
    return [m for m in exchange.sends if m.peer == exchange.sends[0].peer]


@dataclass(frozen=True, slots=True)
class ExchangeForm:
    """Facts of an exchange that are the same in every layer, worked out once."""

    # Messages that are packed, and that arrive: fewer than the exchange's where all peers get the
    # same, or it sums on the way.
    sent: Sequence[steps.PeerMessage]
    brought: Sequence[steps.PeerMessage]
    is_block: bool
    # Of each one sent its number in `out`; -1: sent apart, from where it lies if it can be.
    packed: tuple[int, ...]
    out: Arranged
    # Where those brought lie.
    back: Arranged
    # Numbers of those brought that one call of the mover takes.
    together: Sequence[tuple[int, ...]]

    @classmethod
    def of(
        cls, exchange: steps.ExchangeStep, form: CallForm, groups: Groups, sizes: tuple[Sizes, Sizes]
    ) -> ExchangeForm:
        """`sizes`: of query and key buffers."""
        sent, brought, is_block = _sent(exchange, groups), _brought(exchange, groups), _is_block(exchange, groups)
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
            _taken_together(exchange, len(brought), wide=form.gradient == form.wide),
        )


@dataclass(slots=True)
class PhaseMemory:
    """Where the tensors of one run of a phase lie, the same in every layer."""

    # Messages, by the exchange's id.
    exchanges: Mapping[int, ExchangeForm]
    # (The exchange's id, number of a message that it brings) of those that are used, or added to,
    # where they came.
    adopted: set[tuple[int, int]] = field(default_factory=set[tuple[int, int]])
    # Sums of gradients, by what they are of.
    totals: dict[steps.Value, Together] = field(default_factory=dict[steps.Value, Together])
    # Gathered ones, by the number of the step.
    operands: dict[int, Together] = field(default_factory=dict[int, Together])

    @classmethod
    def of(cls, phase: steps.Phase, form: CallForm, groups: Groups, sizes: tuple[Sizes, Sizes]) -> PhaseMemory:
        """Where messages lie; `lower.moves` adds the rest. `sizes`: of query and key buffers."""
        ended = [step.exchange for step in phase.steps if isinstance(step, steps.FinishStep)]
        return cls({each.id: ExchangeForm.of(each, form, groups, sizes) for each in ended})


def _is_packed(message: steps.PeerMessage, exchange: steps.ExchangeStep, form: CallForm, keys: Sizes) -> bool:
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


def _taken_together(exchange: steps.ExchangeStep, num_brought: int, *, wide: bool = False) -> list[tuple[int, ...]]:
    """`arrivals` of the first messages of an exchange: one that sums on the way brings no others."""
    # `wide`: gradients travel in the type that they are summed in. Then all are added in one call,
    # which takes those of a row in order. In a narrower type the first of a buffer may have to be
    # added to before it is converted.
    of_call = [tuple(number for number in numbers if number < num_brought) for numbers in exchange.arrivals]
    calls = [numbers for numbers in of_call if numbers]
    if not wide:
        return calls
    grads = [numbers for numbers in calls if exchange.receives[numbers[0]].kind in steps.GRADS]
    others = [numbers for numbers in calls if numbers not in grads]
    return [*others, *([tuple(chain.from_iterable(grads))] if grads else [])]


@lru_cache(maxsize=4096)
def _whole(buffer: int, rows: int, heads: int, kind: Kind) -> steps.Packed:
    del kind  # movers know packed rows by identity: each kind has its own
    return steps.Packed((steps.RowRun(0, rows, buffer, 0, rows, None, 0, heads, 0),), rows, heads, (None,), direct=True)


def whole_of(value: steps.Value, sizes: Mapping[int, tuple[int, int]]) -> steps.Packed:
    """All rows and heads of a buffer of these (rows, heads): the same object for the same value."""
    return _whole(value[1], *sizes[value[1]], value[0])


AHEAD = 2  # exchanges whose receives are posted before they are due: the most of any transport


@dataclass(frozen=True, slots=True)
class PeakBytes:
    """Bytes of a call at once, and `kept_bytes` of them for the backward (policy keep)."""

    call_bytes: int
    kept_bytes: int


def peak_bytes(
    phases: Mapping[PhaseName, steps.Phase], sizes: tuple[Sizes, Sizes], form: CallForm, *, keep: bool
) -> PeakBytes:
    """Peak bytes of one call. `sizes`: of query and of key buffers."""
    kept = sum(_message_bytes(m, form) for m in received_in(phases["forward"]) if m.kind in steps.INPUTS) if keep else 0
    partials = sum(rows * heads * (form.value_width + 1) * form.wide.itemsize for rows, heads in sizes[0].values())
    forward = partials + _peak(phases["forward"], form, {}) if "forward" in phases else 0
    backward = kept + _backward_bytes(phases["backward"], sizes, form) if "backward" in phases else 0
    return PeakBytes(max(forward, backward), kept)


def _backward_bytes(phase: steps.Phase, sizes: tuple[Sizes, Sizes], form: CallForm) -> int:
    queries, keys = sizes
    wide = form.wide.itemsize
    finals = sum(
        rows * heads * (2 * form.value_width * form.dtype.itemsize + wide)
        for buffer, (rows, heads) in queries.items()
        if buffer
    )
    grads = {(Kind.Q_GRAD, buffer): rows * heads * form.dim * wide for buffer, (rows, heads) in queries.items()}
    grads |= {
        (Kind.KV_GRAD, buffer): rows * heads * sum(form.kv_widths) * wide for buffer, (rows, heads) in keys.items()
    }
    owned = grads[Kind.Q_GRAD, 0] + grads[Kind.KV_GRAD, 0]
    return owned + finals + _peak(phase, form, grads)


def _message_bytes(message: steps.PeerMessage, form: CallForm) -> int:
    """Bytes of the tensors that carry a message, each aligned."""
    return sum(padded(num_bytes) for num_bytes in tensor_bytes([message.carried], form.sizes))


def received_in(phase: steps.Phase) -> list[steps.PeerMessage]:
    """The messages that a phase receives, in order."""
    return [m for step in phase.steps if isinstance(step, steps.FinishStep) for m in step.exchange.receives]


def _peak(phase: steps.Phase, form: CallForm, grads: Mapping[steps.Value, int]) -> int:
    """Most bytes of messages, gathered operands and gradients beside received inputs, at any step."""
    live = peak = 0
    made: dict[steps.Value, int] = {}  # gradients so far
    held: dict[steps.Value, int] = {
        (m.kind, m.buffer): _message_bytes(m, form) for m in received_in(phase) if m.kind in steps.INPUTS
    }
    upcoming = [step.exchange for step in phase.steps if isinstance(step, steps.IssueStep)]
    started = expected = 0
    for index, step in enumerate(phase.steps):
        # Those of the caller's rows, buffer 0, are there from the beginning (`_backward_bytes`).
        new = {value: grads[value] for value in steps.grads_of(step) - made.keys() if value[1]}
        made |= new
        live += sum(new.values())
        match step:
            case steps.IssueStep(exchange):
                started += 1
                # What posted receives bring has memory before it is due.
                live += sum(_side(s.receives, form) for s in upcoming[expected : started + AHEAD])
                expected = started + AHEAD
                live += _side(exchange.sends, form) + _call(exchange, form)
                peak = max(peak, live)
            case steps.FinishStep(exchange):
                live -= (
                    _side(exchange.sends, form)
                    + _call(exchange, form)
                    + _side([m for m in exchange.receives if m.kind not in steps.INPUTS], form)
                )
            case steps.Launch() | steps.GradLaunch():
                peak = max(peak, live + _gathered(step, form))
        live -= sum(held.get(value, 0) + made.get(value, 0) for value in phase.last_uses[index])
    return peak


def _side(messages: Sequence[steps.PeerMessage], form: CallForm) -> int:
    return sum(_message_bytes(m, form) for m in messages)


def _call(exchange: steps.ExchangeStep, form: CallForm) -> int:
    """Bytes that a collective call takes beside its messages, which an all-to-all has in place."""
    if exchange.collective in ("p2p", "all_to_all"):
        return 0
    if exchange.collective != "all_gather":
        return _side(exchange.sends, form) + _side(exchange.receives, form)
    by_peer = Counter[tuple[bool, int]]()
    for sent, side in ((True, exchange.sends), (False, exchange.receives)):
        for message in side:
            by_peer[sent, message.peer] += _message_bytes(message, form)
    return (len(exchange.group) + 1) * max(by_peer.values(), default=0)  # as wide for all as for the widest


def _gathered(step: steps.Launch | steps.GradLaunch, form: CallForm) -> int:
    def rows(operand: steps.Operand, width: int) -> int:
        if operand.buffer >= 0:
            return 0
        return operand.packed.num_rows * operand.num_heads * width * form.dtype.itemsize

    num_bytes = rows(step.q, form.dim) + rows(step.k, sum(form.kv_widths))
    if isinstance(step, steps.GradLaunch):
        dout = step.dout
        num_bytes += rows(dout, 2 * form.value_width)
        num_bytes += (dout.buffer < 0) * dout.packed.num_rows * dout.num_heads * form.wide.itemsize
    return num_bytes
