"""Rows that a phase's steps move, known before it runs: movers make the tables of these at bind.

A step hands a mover several packed tensors at once, and a table is of all of them that one launch
may move. Which received messages are adopted (used, or added to, where they came) is decided here
alone, and the executor obeys; the rest is worked out as `phase_run` and `executor` do it, from the
same facts of `lower.memory`, and where it depends on the caller's tensors, both ways are listed. A
move that is missing here is no error: its table is made, and copied by itself, when the first layer
runs.
"""

from collections.abc import Hashable, Iterator, Sequence
from typing import Literal, NamedTuple, TypeAlias

import torch

from megatron_balance.analysis.wire import ALIGN, padded
from megatron_balance.ir.program import KEY_SIDE, Kind
from megatron_balance.runtime.lower import steps
from megatron_balance.runtime.lower.memory import (
    BytesPlace,
    CallForm,
    ExchangeForm,
    PhaseMemory,
    Shape,
    Sizes,
    Together,
    places_of,
    whole_of,
)

# A mover's method; or a method of its partials: "partial", outputs of one packed tensor that are
# added, and "send", of which each message gives output and LSE.
Call: TypeAlias = Literal["fill", "place", "add", "partial", "send"]


class Site(NamedTuple):
    """Where a tensor [T, heads, ...] begins in memory that it may share with others."""

    # Equal for tensors of one memory.
    memory: Hashable
    # Bytes.
    begin: int = 0
    # Elements from a row to the next; 0: not asked for.
    row: int = 0
    # Rows that it lies behind a tensor that begins there.
    first_row: int = 0


# Equal for tensors that one launch may move: types of sources and targets, elements of a head.
Alike: TypeAlias = tuple[torch.dtype, torch.dtype, int]


class Moved(NamedTuple):
    packed: steps.Packed
    # What one launch may move together; None where rows are merged, not moved.
    kind: Alike | None = None
    # Of each run, where its buffer lies; empty: each buffer is a tensor of its own.
    of: tuple[Site, ...] = ()
    # Where the packed rows lie; None: a tensor of its own.
    own: Site | None = None
    # Number of each run whose buffer was never written, and (rows, heads) of that: rows that are
    # added begin it, and all others become zero.
    fresh: tuple[tuple[int, tuple[int, int]], ...] = ()


class MoverCall(NamedTuple):
    call: Call
    moved: tuple[Moved, ...]


# By what it is, buffer, and which of its tensors: where received inputs, sums and the like lie.
Sites: TypeAlias = dict[tuple[Hashable, int, int], Site]


def moves_of(
    phase: steps.Phase, sizes: tuple[Sizes, Sizes], form: CallForm, memory: PhaseMemory, sites: Sites
) -> list[MoverCall]:
    """The calls that one run of a phase makes; sums and gathered operands are added to `memory`.

    `sizes`: of query and of key buffers; `sites`: of what an earlier phase left.
    """
    walk = _Walk(*sizes, form, sites, phase, memory)
    calls = list(walk.calls())
    memory.totals |= walk.made()
    return calls


_LSE = "lse"


def _gathered(operand: steps.Operand) -> bool:
    return operand.buffer < 0 and not operand.packed.direct


class _Walk:
    """The state of a phase's run that decides what is moved."""

    def __init__(
        self, queries: Sizes, keys: Sizes, form: CallForm, sites: Sites, phase: steps.Phase, memory: PhaseMemory
    ) -> None:
        self.queries, self.keys, self.form, self.sites = queries, keys, form, sites
        self.sizes = {Kind.Q_GRAD: queries, Kind.KV_GRAD: keys}
        self.steps, self.memory, self.phase = phase.steps, memory, id(phase)
        self.let_go = {value: index for index, values in enumerate(phase.last_uses) for value in values}
        self.step = self.launches = 0
        self.fresh: set[steps.Value] = set()
        self.shared: dict[tuple[int, int], list[tuple[steps.Value, tuple[BytesPlace, ...]]]] = {}
        self.finals = {0}
        self.rows: Alike = (form.dtype, form.dtype, form.dim)
        self.values: Alike = (form.dtype, form.dtype, form.value_width)
        self.keyed: tuple[Alike, ...] = tuple((form.dtype, form.dtype, width) for width in form.kv_widths)
        self.lse: Alike = (form.wide, form.wide, 1)
        self.held: dict[steps.Value, torch.dtype] = {}
        self.totals: dict[steps.Value, torch.dtype] = {}
        self.begun: list[Moved] = []
        self.named: list[tuple[Kind, steps.Packed]] = []  # of the addition that comes

    def calls(self) -> Iterator[MoverCall]:
        for index, step in enumerate(self.steps):
            self.step = index
            match step:
                case steps.Launch():
                    yield MoverCall("fill", self.operands(step))
                    yield MoverCall("partial", (Moved(step.out),))
                case steps.GradLaunch():
                    yield MoverCall("fill", self.operands(step))
                    yield from self.summing(self.launched(step))
                case steps.IssueStep(exchange):
                    form = self.memory.exchanges[exchange.id]
                    yield MoverCall("send", self.merged(exchange, form))
                    filled = list(self.sent(exchange, form))
                    yield MoverCall("fill", tuple(moved for moved, maybe in filled if not maybe))
                    yield MoverCall("fill", tuple(moved for moved, _ in filled))
                case steps.FinishStep(exchange):
                    yield from self.received(exchange, self.memory.exchanges[exchange.id])
        if any(isinstance(step, steps.GradLaunch) for step in self.steps) or self.totals or self.held:
            yield from self.ended()

    # Where tensors lie

    def of(self, packed: steps.Packed, what: Hashable, part: int = 0) -> tuple[Site, ...]:
        """Where the buffers of packed rows lie: in memory of their own, if nothing else is known."""
        keys = [(what, run.buffer, part) for run in packed.runs]
        return tuple([self.sites.get(key) or Site(key) for key in keys])

    def lie(self, what: Hashable, buffer: int, sites: Sequence[Site] | None) -> None:
        """Note where the tensors of a buffer lie, from now on; None: in memory of their own."""
        for part in (0, 1):
            if sites is None:
                self.sites.pop((what, buffer, part), None)
            elif part < len(sites):
                self.sites[what, buffer, part] = sites[part]

    @staticmethod
    def placed(messages: Sequence[Sequence[BytesPlace]], memory: Hashable) -> list[list[Site]]:
        return [[site for place in places for site in _halves(place, memory)] for places in messages]

    def operands(self, step: steps.Launch | steps.GradLaunch) -> tuple[Moved, ...]:
        """The operands of a launch that are gathered, in one memory."""
        moved = [
            Moved(operand.packed, row, self.of(operand.packed, kind, part))
            for operand, kind, rows in ((step.q, Kind.Q, (self.rows,)), (step.k, Kind.KV, self.keyed))
            for part, row in enumerate(rows if _gathered(operand) else ())
        ]
        shapes: list[Shape] = [
            ((one.packed.num_rows, one.packed.num_heads, width), dtype)
            for one in moved
            for _, dtype, width in [one.kind or self.rows]
        ]
        if isinstance(step, steps.GradLaunch) and _gathered(step.dout):
            packed = step.dout.packed
            moved += self.final(packed)
            shapes += [((packed.num_rows, packed.num_heads, self.form.value_width), self.form.dtype)] * 2
            shapes.append(((packed.num_rows, packed.num_heads), self.form.wide))
        if not moved:
            return ()
        places = places_of(shapes)
        self.memory.operands[self.step] = Together(padded(places[-1].begin + places[-1].num_bytes), (places,))
        own = [Site(("operands", self.phase, self.step), place.begin, place.strides[0]) for place in places]
        return tuple(one._replace(own=site) for one, site in zip(moved, own, strict=True))

    def final(self, packed: steps.Packed, own: Sequence[Site | None] = (None,) * 3) -> tuple[Moved, ...]:
        kinds = (self.values, self.values, self.lse)
        return tuple(
            Moved(packed, kind, self.of(packed, Kind.OUT_GRAD if part < 2 else _LSE, part % 2), own[part])
            for part, kind in enumerate(kinds)
        )

    # What is sent

    def merged(self, exchange: steps.ExchangeStep, form: ExchangeForm) -> tuple[Moved, ...]:
        """Output and LSE of the messages of outputs that an exchange sends."""
        sites = self.outgoing(exchange, form)
        return tuple(
            Moved(message.packed, own=at)
            for message, own in zip(form.sent, sites, strict=True)
            for at in (own[:2] if message.kind == Kind.OUT else ())
        )

    def outgoing(self, exchange: steps.ExchangeStep, form: ExchangeForm) -> list[Sequence[Site | None]]:
        sites = self.placed(form.out.places, ("out", self.phase, exchange.id))
        return [sites[number] if number >= 0 else (None,) * 3 for number in form.packed]

    def sent(self, exchange: steps.ExchangeStep, form: ExchangeForm) -> Iterator[tuple[Moved, bool]]:
        """Tensors of messages that are filled, and whether only if a given one has gaps."""
        # The others are sent from where they lie.
        for message, number, at in zip(form.sent, form.packed, self.outgoing(exchange, form), strict=True):
            apart = number < 0  # packed with others it is always filled
            if message.kind == Kind.OUT or (apart and self.stacked(message)):
                continue
            for tensor in self.sources(message.kind, message.packed, at):
                lies = self.lies(message, tensor) if apart else "no"
                if lies != "yes":
                    yield from [(one, lies == "maybe") for one in tensor]

    def sources(self, kind: Kind, packed: steps.Packed, at: Sequence[Site | None]) -> list[tuple[Moved, ...]]:
        """As `phase_run.PhaseRun.sources`: what each tensor of a message, at `at`, holds rows of."""
        match kind:
            case Kind.OUT_GRAD:
                gradient, out, lse = self.final(packed, own=at)
                return [(gradient, out), (lse,)]
            case Kind.Q | Kind.KV:
                rows = (self.rows,) if kind == Kind.Q else self.keyed
            case _:
                dtype = self.summed(kind, packed)
                rows = tuple([(dtype, self.form.gradient, width) for width in self.widths(kind)])
        each = tuple([Moved(packed, row, self.of(packed, kind, part), at[part]) for part, row in enumerate(rows)])
        return [each] if kind in KEY_SIDE and self.form.joined else [(one,) for one in each]

    def stacked(self, message: steps.PeerMessage) -> bool:
        """Whether keys and values, or their gradients, lie as one tensor: a whole buffer's."""
        packed, kind = message.packed, message.kind
        if not (kind in KEY_SIDE and self.form.joined and packed.direct):
            return False
        run = packed.runs[0]
        if (run.count, run.num_heads) != self.keys[run.buffer]:
            return False
        return run.buffer > 0 if kind == Kind.KV else self.totals.get((kind, run.buffer)) == self.form.gradient

    def lies(self, message: steps.PeerMessage, tensor: tuple[Moved, ...]) -> Literal["yes", "no", "maybe"]:
        """Whether a tensor of a message lies in a buffer without gaps; "maybe": a caller's does."""
        packed, kind, run = message.packed, message.kind, message.packed.runs[0]
        of = self.keys if kind in KEY_SIDE else self.queries
        source, target, _ = tensor[0].kind or self.rows
        if len(tensor) > 1 or not packed.direct or run.num_heads != of[run.buffer][1] or source != target:
            return "no"
        unknown = (kind, run.buffer) in self.held or (kind not in steps.GRADS and not run.buffer)
        return "maybe" if unknown else "yes"

    def widths(self, kind: Kind) -> tuple[int, ...]:
        return (self.form.dim,) if kind == Kind.Q_GRAD else self.form.kv_widths

    # Gradients, as `executor.BackwardRun` sums them

    def summed(self, kind: Kind, packed: steps.Packed) -> torch.dtype:
        values = [(kind, run.buffer) for run in packed.runs]
        for value in values:
            if value not in self.held:
                self.total(value)
                self.fresh.discard(value)
        return self.held.get(values[0], self.form.wide)

    def total(self, value: steps.Value) -> None:
        if self.totals.get(value) == self.form.wide:
            return
        dtype = self.held.pop(value, None) or self.totals.get(value)
        whole = whole_of(value, self.sizes[value[0]])
        widths = self.widths(value[0])
        sites = [self.of(whole, value[0], part)[0] for part in range(len(widths))]
        self.lie(*value, self.room(value))
        self.totals[value] = self.form.wide
        if dtype is None:
            self.fresh.add(value)
        else:
            self.begun += [
                Moved(whole, (dtype, self.form.wide, widths[part]), self.of(whole, value[0], part), site)
                for part, site in enumerate(sites)
            ]

    def room(self, value: steps.Value) -> Sequence[Site] | None:
        """Where a new sum lies, beside others that live as long; None: in memory of its own."""
        form, (kind, buffer) = self.form, value
        if not buffer and form.dtype == form.wide:  # handed to the caller as it is
            return None
        rows, heads = self.sizes[kind][buffer]
        if kind == Kind.KV_GRAD and form.joined:
            shapes: list[Shape] = [((2, rows, heads, form.dim), form.wide)]
        else:
            shapes = [((rows, heads, width), form.wide) for width in self.widths(kind)]
        key = (self.step, self.let_go.get(value, -1))
        beside = self.shared.setdefault(key, [])
        places = places_of(shapes, beside[-1][1][-1] if beside else None)
        beside.append((value, places))
        return [site for place in places for site in _halves(place, ("sums", self.phase, *key))]

    def made(self) -> dict[steps.Value, Together]:
        found: dict[steps.Value, Together] = {}
        for beside in self.shared.values():
            last = beside[-1][1][-1]
            values, places = zip(*beside, strict=True)
            together = Together(padded(last.begin + last.num_bytes), places, values)
            found |= dict.fromkeys(together.values, together)
        return found

    def summing(self, added: tuple[Moved, ...]) -> Iterator[MoverCall]:
        """The calls that add gradients, behind those that begin their sums."""
        if self.begun:
            yield MoverCall("place", tuple(self.begun))
            self.begun = []
        yield MoverCall("add", added)
        self.fresh -= {(kind, run.buffer) for kind, packed in self.named for run in packed.runs}
        self.named = []

    def ended(self) -> Iterator[MoverCall]:
        """The conversion of sums to the caller's type."""
        form, moved = self.form, list[Moved]()
        for kind, sizes in self.sizes.items():
            if (kind, 0) not in self.held and form.wide != form.dtype:
                self.total((kind, 0))
                whole = whole_of((kind, 0), sizes)
                moved += [
                    Moved(whole, (form.wide, form.dtype, width), self.of(whole, kind, part))
                    for part, width in enumerate(self.widths(kind))
                ]
        yield MoverCall("fill", tuple(moved))

    def launched(self, step: steps.GradLaunch) -> tuple[Moved, ...]:
        """The additions of a launch's gradients, which kernels leave in the type of the inputs."""
        self.launches += 1
        dq, *dkv = (Site((part, self.phase, self.launches)) for part in range(1 + len(self.form.kv_widths)))
        return (
            *self.added(Kind.Q_GRAD, step.dq_sums, self.form.dtype, [dq]),
            *self.added(Kind.KV_GRAD, step.dk_sums, self.form.dtype, dkv),
        )

    def added(self, kind: Kind, sums: steps.Sums, dtype: torch.dtype, own: Sequence[Site]) -> tuple[Moved, ...]:
        for run in sums.kept:
            self.held[kind, run.buffer] = dtype
            self.lie(kind, run.buffer, [site._replace(first_row=run.row) for site in own])
        for run in sums.added.runs:
            self.total((kind, run.buffer))
        return self.each(kind, sums.added, own, dtype) if sums.added.runs else ()

    def each(self, kind: Kind, packed: steps.Packed, own: Sequence[Site], dtype: torch.dtype) -> tuple[Moved, ...]:
        total = self.totals[kind, packed.runs[0].buffer]
        self.named.append((kind, packed))
        numbered = [(number, run.buffer) for number, run in enumerate(packed.runs)]
        fresh = tuple((at, self.sizes[kind][buffer]) for at, buffer in numbered if (kind, buffer) in self.fresh)
        return tuple(
            Moved(packed, (dtype, total, width), self.of(packed, kind, part), site, fresh)
            for part, (width, site) in enumerate(zip(self.widths(kind), own, strict=True))
        )

    def received(self, exchange: steps.ExchangeStep, form: ExchangeForm) -> Iterator[MoverCall]:
        sites = self.placed(form.back.places, ("in", self.phase, exchange.id))
        for together in form.together:
            arrived = [(form.brought[at], sites[at]) for at in together]
            match arrived[0][0].kind:
                case Kind.Q | Kind.KV:  # they become buffers
                    for message, own in arrived:
                        self.lie(message.kind, message.buffer, own)
                case Kind.OUT:
                    for message, _ in arrived:
                        yield MoverCall("partial", (Moved(message.packed),))
                case Kind.OUT_GRAD:
                    adopted = [self.adopts_final(*each) for each in arrived]
                    self.note(exchange, together, adopted)
                    rest = [each for each, one in zip(arrived, adopted, strict=True) if not one]
                    yield MoverCall("place", tuple(moved for m, own in rest for moved in self.final(m.packed, own=own)))
                case Kind.Q_GRAD | Kind.KV_GRAD:
                    adopted = list[bool]()
                    moved = list[Moved]()
                    for message, own in arrived:
                        adopted.append(self.adopts(message))
                        moved += self.received_grads(message, own, adopts=adopted[-1])
                    self.note(exchange, together, adopted)
                    yield from self.summing(tuple(moved))

    def note(self, exchange: steps.ExchangeStep, together: Sequence[int], adopted: Sequence[bool]) -> None:
        self.memory.adopted |= {(exchange.id, at) for at, one in zip(together, adopted, strict=True) if one}

    def adopts_final(self, message: steps.PeerMessage, at: Sequence[Site]) -> bool:
        """Whether gradients, outputs and LSE of whole buffers are used where they came."""
        packed, form = message.packed, self.form
        named = {run.buffer for run in packed.runs}
        first, self.finals = not named & self.finals, self.finals | named
        head_bytes = (form.value_width * form.dtype.itemsize, form.wide.itemsize)
        if not first or not _become_buffers(packed, self.queries, head_bytes):
            return False
        row_bytes = [packed.num_heads * head_bytes[number] for number in (0, 0, 1)]
        for run in packed.runs:
            own = [site._replace(begin=site.begin + run.row * n) for site, n in zip(at, row_bytes, strict=True)]
            self.lie(Kind.OUT_GRAD, run.buffer, own[:2])
            self.lie(_LSE, run.buffer, own[2:])
        return True

    def received_grads(self, message: steps.PeerMessage, at: Sequence[Site], *, adopts: bool) -> tuple[Moved, ...]:
        packed, kind = message.packed, message.kind
        value = (kind, packed.runs[0].buffer)
        if adopts:
            held = self.held.pop(value, None)
            own = [self.of(packed, kind, part)[0] for part in range(len(self.widths(kind)))]
            self.totals[value] = self.form.gradient
            self.lie(*value, at)
            return self.each(kind, packed, own, held) if held is not None else ()
        moved = self.added(kind, message.sums, self.form.gradient, at)
        if any(not run.buffer for run in message.sums.kept):
            self.total((kind, 0))
        return moved

    def adopts(self, message: steps.PeerMessage) -> bool:
        """Whether received gradients can be what others are added to."""
        # In bf16 only where they travel on in it, so that every rank of a ring rounds once; not in
        # the pool's memory what is handed to the caller.
        packed, form = message.packed, self.form
        run, size = packed.runs[0], self.sizes[message.kind][packed.runs[0].buffer]
        begun = (message.kind, run.buffer) in self.totals
        if begun or len(packed.runs) != 1 or not steps.is_whole(run, packed, size):
            return False
        return run.buffer > 0 or form.gradient == form.wide != form.dtype


def _halves(place: BytesPlace, memory: Hashable) -> list[Site]:
    """Where a tensor of rows [N, heads, ...] lies, or the two of a pair [2, N, heads, dim]."""
    row = place.strides[0] if len(place.shape) < 4 else place.strides[1]
    halves = place.shape[0] if len(place.shape) == 4 else 1
    return [Site(memory, place.begin + half * place.strides[0] * place.dtype.itemsize, row) for half in range(halves)]


def _become_buffers(packed: steps.Packed, sizes: Sizes, head_bytes: Sequence[int]) -> bool:
    """Whether packed rows that came in a message are all of one or of several buffers, none of them
    the caller's, and may be used where they lie: each begins aligned. `head_bytes`: of a head of a
    row, of each tensor.
    """
    return len({run.buffer for run in packed.runs}) == len(packed.runs) and all(
        run.buffer > 0
        and steps.is_whole(run, packed, sizes[run.buffer])
        and not any(run.row * packed.num_heads * num_bytes % ALIGN for num_bytes in head_bytes)
        for run in packed.runs
    )
