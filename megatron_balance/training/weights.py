"""Weights from their owners to a role and gradients back: a link (`analysis/link/`) on tensors, and
a step's pull and push beside its compute (Hydraulis, arXiv 2412.07894, section 5.3).

Both ends of a message pack and unpack its rectangles in the link's order, so a message is values
alone.
"""

import functools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_balance.analysis import link
from megatron_balance.analysis.shards import Base, ParameterTable, Shard, held
from megatron_balance.ir.arrays import Ints, sums
from megatron_balance.ir.strategy import Strategy

# By number of a parameter, what a rank has of it: a contiguous tensor, read as a flat one.
Flat = Mapping[int, torch.Tensor]


@dataclass(frozen=True, slots=True)
class _LinkWay:
    """One direction of a link on one rank, each [n, 5], and elements by peer."""

    # In the order of the receiving ranks.
    packed: Ints
    # In that of the sending ones.
    unpacked: Ints
    # The order [m] in which they are unpacked: by slot as slots are pushed, then by sending rank.
    # So sums have the same bits whether slots move one by one or at once.
    turns: Ints
    sent: tuple[int, ...]
    received: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Slot:
    """Transfers of one slot of layers (`analysis.link`), or of all."""

    across: _LinkWay
    # Among ranks of a node, behind `across` in a pull and before it in a push; None: there are none
    # on any rank, so that no rank waits for the call.
    inside: _LinkWay | None


@dataclass(frozen=True, slots=True)
class Apart:
    """How an exchange is cut."""

    # Layer by layer, to run beside compute; else all at once.
    slots: bool = False
    # What its ranks have alike crosses a node's NICs once; None: they do not care.
    ranks_per_node: int | None = None


@dataclass(frozen=True, slots=True)
class WeightExchange:
    """A rank's part in the change to one strategy, made without a message."""

    # Slots are pulled forwards and pushed backwards.
    pulls: tuple[_Slot, ...]
    pushes: tuple[_Slot, ...]
    group: dist.ProcessGroup
    device: torch.device

    @classmethod
    def of(
        cls,
        layout: tuple[Base, Ints, ParameterTable],
        strategy: Strategy,
        group: dist.ProcessGroup,
        device: torch.device,
        apart: Apart = Apart(),
    ) -> "WeightExchange":
        """The exchange of this rank of `group`, which has all ranks of the base. `layout`: the
        base, its shards, and the parameters; `device`: of the messages. Errors as for `link`.
        """
        base, owned, parameters = layout
        rank = group.rank()
        parts: list[link.StrategyLink] = [link.link(base, owned, strategy, parameters, rank)]
        if apart.ranks_per_node is not None:
            twins = link.Twins.of(strategy, base.num_ranks, apart.ranks_per_node)
            parts = list(link.through_nodes(parts[0], parameters, twins, rank))
        own, mine = owned[owned[:, Shard.RANK] == rank], held(strategy, parameters, rank=rank)
        # Embedding and output have slots of their own, beside those of layers.
        count = link.num_slots(strategy, parameters.num_layers) + 2 if apart.slots else 1

        def way(pieces: Ints, slots: Ints, sending: Ints, receiving: Ints) -> _LinkWay:
            out, into = (pieces[pieces[:, end] == rank] for end in (link.WeightPiece.SRC, link.WeightPiece.DST))
            return _LinkWay(
                packed=link.places(out, sending),
                unpacked=link.places(into, receiving),
                turns=np.argsort(-slots[pieces[:, link.WeightPiece.DST] == rank], kind="stable"),
                sent=tuple(sums(out[:, link.WeightPiece.DST], link.elements(out), base.num_ranks).tolist()),
                received=tuple(sums(into[:, link.WeightPiece.SRC], link.elements(into), base.num_ranks).tolist()),
            )

        made: list[tuple[_Slot, ...]] = []
        for name, role, sending, receiving in (
            ("pull", link.WeightPiece.DST, own, mine),
            ("push", link.WeightPiece.SRC, mine, own),
        ):
            tables = [getattr(part, name) for part in parts]
            # Of each transfer, the slot in which it moves: by the parameter that the role's rank
            # has.
            slots = [link.slots_of(t[:, link.WeightPiece.PARAMETER], t[:, role], strategy, parameters) for t in tables]
            # Two ends where what ranks of a node have alike crosses its NICs once: then from role
            # to role.
            ends = [(sending, receiving), (mine, mine)]
            cut: list[_Slot] = []
            for slot in range(count):
                # A slot of all transfers, where nothing runs beside compute.
                chosen = [of == slot if apart.slots else slice(None) for of in slots]
                ways = [
                    way(table[which], of[which], *shards)
                    for shards, table, of, which in zip(ends, tables, slots, chosen, strict=False)
                ]
                cut.append(_Slot(ways[0], ways[1] if ways[1:] else None))
            made.append(tuple(cut))
        return cls(*made, group=group, device=device)

    def pull_slot(self, slot: int, owned: Flat, weights: Flat, dtype: torch.dtype) -> None:
        """Bring the owners' fp32 weights of a slot to this role, as `dtype`. Collective, in order."""
        part = self.pulls[slot]
        # First over the nodes' borders, then from the one that received to its node.
        for there, message in self._exchanged(part.across, owned, weights, dtype):
            there.copy_(message)
        if part.inside is not None:
            for there, message in self._exchanged(part.inside, weights, weights, dtype):
                there.copy_(message)

    def push_slot(self, slot: int, gradients: Flat, owned: Flat) -> None:
        """Add the fp32 gradients of all roles to the owners', by rank, so that two runs have the same
        bits. Sums of a node's roles are made in place. Collective over the group, slots from the last.
        """
        part = self.pushes[slot]
        # The other way round than a pull: sums of a node's roles are made, then cross its border.
        if part.inside is not None:
            for there, message in self._exchanged(part.inside, gradients, gradients, torch.float32):
                there.add_(message)
        for there, message in self._exchanged(part.across, gradients, owned, torch.float32):
            there.add_(message)

    def traffic(self, weight_bytes: int, ranks_per_node: int) -> list[list[list[int]]]:
        """Bytes of this rank's pull and push, as `WeightTraffic`; `weight_bytes`: of a weight."""
        me, ranks = self.group.rank(), np.arange(self.group.size())
        # [ranks] bool: on this rank's node.
        near = ranks // ranks_per_node == me // ranks_per_node
        found: list[list[list[int]]] = []
        for slots, width in ((self.pulls, weight_bytes), (self.pushes, torch.float32.itemsize)):
            ways = [way for slot in slots for way in (slot.across, slot.inside) if way is not None]
            sent, received = (
                width * np.sum([getattr(way, name) for way in ways], axis=0) for name in ("sent", "received")
            )
            # [(inside the node, across), (sent, received)] bytes.
            found.append([[int(sent[at].sum()), int(received[at].sum())] for at in (near & (ranks != me), ~near)])
        return found

    def _exchanged(
        self, way: _LinkWay, source: Flat, target: Flat, dtype: torch.dtype
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Where each arrived rectangle belongs, and its values."""
        out = torch.empty(sum(way.sent), dtype=dtype, device=self.device)
        into = torch.empty(sum(way.received), dtype=dtype, device=self.device)
        for there, message in _matched(way.packed, source, out):
            message.copy_(there)
        width = dtype.itemsize  # as bytes: gloo does not exchange all types
        dist.all_to_all_single(
            into.view(torch.uint8),
            out.view(torch.uint8),
            [width * count for count in way.received],
            [width * count for count in way.sent],
            group=self.group,
        )
        pairs = _matched(way.unpacked, target, into)
        return [pairs[turn] for turn in way.turns.tolist()]


def _matched(table: Ints, flat: Flat, message: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Pairs of views [rows, columns]: a place in memory, and its part of the message."""
    at = 0
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
    for number, start, rows, columns, stride in table.tolist():
        tensor = flat[number]
        there = tensor.as_strided((rows, columns), (stride, 1), tensor.storage_offset() + start)
        pairs.append((there, message[at : at + rows * columns].view(rows, columns)))
        at += rows * columns
    return pairs


class Stopwatch:
    """Measures named parts of a step, by the device's own clock if it has one, which nobody awaits."""

    def __init__(self, device: torch.device) -> None:
        self._on_device = device.type == "cuda"
        self._marks: dict[str, list[tuple[Any, Any]]] = {}

    @contextmanager
    def measured(self, name: str) -> Iterator[None]:
        """Measure the block under `name`; blocks of one name are added up."""
        begin = self._mark()
        yield
        self._marks.setdefault(name, []).append((begin, self._mark()))

    def seconds(self) -> dict[str, float]:
        """Seconds by name with `_s` behind it. Waits for the device, and forgets."""
        found = {f"{name}_s": sum(self._between(*each) for each in marks) for name, marks in self._marks.items()}
        self._marks.clear()
        return found

    def _mark(self) -> Any:
        if not self._on_device:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, begin: Any, end: Any) -> float:
        if not self._on_device:
            return end - begin
        end.synchronize()
        return begin.elapsed_time(end) / 1e3


@dataclass(frozen=True, slots=True)
class RoleMemory:
    """Weights, gradients and slots by number of the parameter; `first`: of the pipeline's stages."""

    weights: Flat
    gradients: Flat
    slots: Mapping[int, int]
    first: bool


class Lane:
    """Runs functions in order `beside` the caller, on a stream or a thread; else at once."""

    def __init__(self, device: torch.device, *, beside: bool) -> None:
        self.beside = beside
        self._stream: Any = torch.cuda.Stream(device) if beside and device.type == "cuda" else None
        self._thread = ThreadPoolExecutor(1, "weights") if beside and self._stream is None else None

    def issue(self, work: Callable[[], None]) -> Callable[[], None]:
        """Run `work` behind all that the caller has issued on its stream, and what was issued here.
        Returns a function that makes the caller wait for it, and raises what it raised.
        """
        if not self.beside:
            work()
            return lambda: None
        if self._thread is not None:
            future: Future[None] = self._thread.submit(work)
            return future.result
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            work()
            # Event of the lane's stream, so that the caller's stream waits and the host does not.
            done = torch.cuda.Event()
            done.record()
        return lambda: torch.cuda.current_stream().wait_event(done)

    def close(self) -> None:
        """Start nothing more; what runs ends by itself."""
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)


class Moves:
    """Pull and push of one step of a role; what the caller waits for them is measured."""

    # All pulls are issued when the step begins; a push when the last microbatch's backward has left
    # the slot's layers. Ranks behind a pipeline's first stage, which waits for them, issue theirs
    # when their last backward is over. So any two ranks that share another communicator issue its
    # calls and these in the same order.

    def __init__(
        self, exchange: WeightExchange, role: RoleMemory, owned: Flat, lane: Lane, stopwatch: Stopwatch
    ) -> None:
        """Issue nothing yet. `owned`: gradients of what this rank owns."""
        self._exchange, self._role, self._lane, self._stopwatch = exchange, role, lane, stopwatch
        self._coming: list[Callable[[], None]] = []
        self._arrived = 0
        self._owned = owned
        self._restore: Callable[[], None] = lambda: None
        # Gradients that are still to come, by slot; None: nobody counts them.
        self._missing: Counter[int] | None = None
        self._pushed: list[Callable[[], None]] = []

    def pull(self, owned: Flat, dtype: torch.dtype) -> None:
        weights = self._role.weights
        with self._stopwatch.measured("pull"):
            for slot in range(len(self._exchange.pulls)):
                work = functools.partial(self._exchange.pull_slot, slot, owned, weights, dtype)
                self._coming.append(self._lane.issue(work))

    def need(self, slot: int) -> None:
        """Wait for the weights of a slot, and of those before it."""
        if slot < self._arrived:
            return
        with self._stopwatch.measured("pull"):
            for wait in self._coming[self._arrived : slot + 1]:
                wait()
        self._arrived = slot + 1

    def expect(self, num_microbatches: int, restore: Callable[[], None]) -> None:
        """Push each slot when gradients of so many microbatches are there; `restore` comes before."""
        # It gives the owners' gradients their memory back.
        self._restore = restore
        if self._role.first and self._lane.beside:
            counts = Counter(self._role.slots.values())
            self._missing = Counter({slot: count * num_microbatches for slot, count in counts.items()})

    def left(self, number: int) -> None:
        """Count a gradient of one microbatch that was added to the role's: of this parameter."""
        if self._missing is None:
            return
        slot = self._role.slots[number]
        self._missing[slot] -= 1
        assert self._missing[slot] >= 0, "a gradient came behind the push of its slot"
        while self._next >= 0 and not self._missing[self._next]:
            self._issue()

    def issue_rest(self) -> None:
        """Issue the pushes that are left: no gradient is still to come."""
        self.need(len(self._coming) - 1)
        while self._next >= 0:
            self._issue()

    def finish(self) -> None:
        self.issue_rest()
        with self._stopwatch.measured("push"):
            for wait in self._pushed:
                wait()

    @property
    def _next(self) -> int:
        return len(self._exchange.pushes) - 1 - len(self._pushed)

    def _issue(self) -> None:
        if not self._pushed:
            self._restore()
        work = functools.partial(self._exchange.push_slot, self._next, self._role.gradients, self._owned)
        with self._stopwatch.measured("push"):
            self._pushed.append(self._lane.issue(work))
