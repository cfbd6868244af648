"""Communication calls of exchanges: tagged sends and receives on gloo, batches on streams of CUDA, and
collectives.

A collective carries bytes: messages of several kinds and types to one peer are packed one after the
other, each aligned, so that queries and keys of different head counts, or outputs and their fp32
LSE, go in a single call. Those of an all-to-all are written into one block, peer by peer, and read
where they arrive (`is_block`): nothing is copied for the call.
"""

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from itertools import chain, groupby
from operator import itemgetter
from typing import Any, TypeAlias, cast

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_balance.analysis.wire import padded, piece_bounds
from megatron_balance.compile.order import LEGS, Leg
from megatron_balance.ir.program import MOVED
from megatron_balance.runtime.cuda import StreamMessage, Streams
from megatron_balance.runtime.groups import SEVERAL, Behind, Groups, HostTimes
from megatron_balance.runtime.lower import steps
from megatron_balance.runtime.lower.memory import Block, CallForm, as_bytes, is_collective, pack, piece_bytes
from megatron_balance.runtime.pool import Fence
from megatron_balance.runtime.recorder import PhaseTraffic, Trace, Traced

Parcel = tuple[int, Tensor]  # (pool rank of the peer, contiguous tensor)
_Parcels: TypeAlias = Sequence[Parcel]
_Goods: TypeAlias = _Parcels | Block  # all of an exchange that goes out, or comes: by message, or as one block
_POISON_TAG = 2**31 - 1


@dataclass(slots=True)
class _CollectiveCall:
    """A collective call, packed and not yet issued."""

    call: Callable[[], dist.Work | None]
    # Tensors that it reads and writes.
    memory: list[Tensor]
    # Tensors, and the bytes that belong there, where they are not read in place.
    received: list[tuple[Tensor, Tensor]]

    def issue(self) -> list[dist.Work]:
        work = self.call()
        return [work] if work is not None else []

    def unpack(self) -> None:
        for target, raw in self.received:
            target.copy_(raw.view(target.dtype).view(target.shape))


def send(x: Tensor, peer: int, tag: int, groups: Groups) -> dist.Work:
    """Begin to send a contiguous tensor to pool rank `peer`."""
    return cast("dist.Work", dist.isend(x, groups.ranks[peer], groups.pool, tag))


def receive(x: Tensor, peer: int, tag: int, groups: Groups) -> dist.Work:
    """Begin to receive into a contiguous tensor."""
    return cast("dist.Work", dist.irecv(x, groups.ranks[peer], groups.pool, tag))


def break_off(group: dist.ProcessGroup | None) -> bool:
    """Make all transfers of this rank in a group, and those that peers wait for, fail (gloo);
    False: the group also has another backend.
    """
    # A receive that times out closes the connections to all peers. It is the only way to wake
    # another thread of this rank.
    if group is None:
        return True
    backends = {group._get_backend(device).name() for device in group._device_types}
    for peer in dist.get_process_group_ranks(group) if "gloo" in backends else ():
        if peer != dist.get_rank():
            with suppress(RuntimeError):
                cast("dist.Work", dist.irecv(torch.empty(1), peer, group, _POISON_TAG)).wait(timedelta(milliseconds=1))
    return backends == {"gloo"}


def _direct_and_routed(sends: _Parcels, exchange: steps.ExchangeStep) -> tuple[list[Parcel], dict[int, Tensor]]:
    """Parcels that go directly; and by peer, the bytes of all that goes in pieces."""
    direct: list[Parcel] = []
    routed: dict[int, list[Tensor]] = {}
    for peer, x in sends:
        if peer in exchange.routed_sends:
            routed.setdefault(peer, []).append(x)
        elif x.numel():
            direct.append((peer, x))
    return direct, {peer: pack(tensors) for peer, tensors in routed.items()}


def _pieces(raw: Tensor, routed: Sequence[steps.Piece]) -> Iterator[tuple[steps.Piece, steps.Hop, Tensor]]:
    """The pieces of a parcel that are not empty, with their hop and bytes."""
    bounds = piece_bounds(raw.numel(), routed[0].count)
    for piece in routed:
        begin, end = bounds[piece.index]
        if begin < end:
            yield piece, piece.hop, raw[begin:end]


def _pack_collective(sends: _Goods, receives: _Goods, exchange: steps.ExchangeStep, groups: Groups) -> _CollectiveCall:
    group = groups.of(exchange.group)
    assert group is not None, "ranks without a process group"
    if isinstance(sends, Block) and isinstance(receives, Block):
        return _all_to_all(sends, receives, group)
    assert not isinstance(sends, Block), "a block goes out, parcels come back"
    assert not isinstance(receives, Block), "parcels go out, a block comes back"
    if exchange.collective == "all_gather":
        return _all_gather(sends, receives, exchange.group, groups)
    return _reduce_scatter(sends, receives, exchange.group, groups)


def _far_bytes(parcels: _Goods, far: frozenset[int], routed: Collection[int] = ()) -> int:
    """Bytes to or from peers on other nodes that are not `routed`."""
    own = parcels.arranged.peers if isinstance(parcels, Block) else ((peer, x.nbytes) for peer, x in parcels)
    return sum(num_bytes for peer, num_bytes in own if peer in far and peer not in routed)


def _of(parcels: _Parcels, peer: int) -> list[Parcel]:
    return [parcel for parcel in parcels if parcel[0] == peer]


def _size(parcels: _Parcels) -> int:
    return sum(padded(x.nbytes) for _, x in parcels)


def _slots(parcels: _Parcels, raw: Tensor, begin: int) -> list[tuple[Tensor, Tensor]]:
    """Tensors and the bytes of `raw` that belong to each, one after the other."""
    slots: list[tuple[Tensor, Tensor]] = []
    for _, x in parcels:
        slots.append((x, raw[begin : begin + x.nbytes]))
        begin += padded(x.nbytes)
    return slots


def _pack_into(parcels: _Parcels, raw: Tensor, begin: int) -> None:
    for x, place in _slots(parcels, raw, begin):
        place.copy_(as_bytes(x))


def _all_to_all(sends: Block, receives: Block, process_group: dist.ProcessGroup) -> _CollectiveCall:
    packed, raw = sends.memory, receives.memory
    sizes = list(receives.arranged.sizes), list(sends.arranged.sizes)
    call = partial(dist.all_to_all_single, raw, packed, *sizes, group=process_group, async_op=True)
    return _CollectiveCall(call, [packed, raw], [])


def _all_gather(sends: _Parcels, receives: _Parcels, group: tuple[int, ...], groups: Groups) -> _CollectiveCall:
    device = next((x.device for _, x in (*sends, *receives)), torch.device("cpu"))
    others = [peer for peer in group if peer != groups.rank]
    mine = _of(sends, others[0])
    width = max(map(_size, [mine, *(_of(receives, peer) for peer in others)]))
    packed = groups.buffers.empty((width,), torch.uint8, device)
    raw = groups.buffers.empty((width * len(group),), torch.uint8, device, received=True)
    _pack_into(mine, packed, 0)
    received: list[tuple[Tensor, Tensor]] = []
    for peer in others:
        received += _slots(_of(receives, peer), raw, group.index(peer) * width)
    call = partial(dist.all_gather_into_tensor, raw, packed, group=groups.of(group), async_op=True)
    return _CollectiveCall(call, [packed, raw], received)


def _reduce_scatter(sends: _Parcels, receives: _Parcels, group: tuple[int, ...], groups: Groups) -> _CollectiveCall:
    """A block for each other rank, all as wide as the widest. `receives`: from one peer."""
    # Gradients: all of the wide type.
    device, dtype = next((x.device, x.dtype) for _, x in (*sends, *receives))
    by_rank = [_of(sends, peer) for peer in group]
    width = max(map(_size, [receives, *by_rank]))
    packed = groups.buffers.empty((width * len(group),), torch.uint8, device).zero_()
    raw = groups.buffers.empty((width,), torch.uint8, device, received=True)
    for index, mine in enumerate(by_rank):
        _pack_into(mine, packed, index * width)
    tensors = raw.view(dtype), packed.view(dtype)
    call = partial(dist.reduce_scatter_tensor, *tensors, group=groups.of(group), async_op=True)
    return _CollectiveCall(call, [packed, raw], _slots(receives, raw, 0))


# Exchanges on gloo: asynchronous sends and receives, and threads that relay for others beside a
# rank's own work.
#
# Every point-to-point message has a tag, so that transfers of several exchanges under way between the
# same two ranks, and those that a proxy relays beside its own, are never taken for one another.
#
# A proxy must not wait for its own computation (Zeppelin, section 3.3). gloo needs someone to wait
# for a piece before it can be sent on, so threads do it; torch releases the interpreter while they
# wait. Tasks of one group come one after the other (rounds of a ring, say); groups wait for nothing
# in one another, so each has a thread.


@dataclass(slots=True)
class _GlooCalls:
    # Each with the pool rank that it comes from, or `SEVERAL`.
    receiving: list[tuple[int, dist.Work]]
    sending: list[dist.Work] = field(default_factory=list)
    # Tensors that are still read.
    keep: list[Tensor] = field(default_factory=list)
    packed: _CollectiveCall | None = None

    def arrived(self, timeout: timedelta, times: HostTimes) -> None:
        """Block the thread until everything is here, and unpacked: for each `timeout` at most."""
        begin = time.perf_counter()  # called once: gloo waits for ever for a message that has come before
        for source, work in self.receiving:
            work.wait(timeout)
            end = time.perf_counter()
            times.waited_for(source, end - begin)
            begin = end
        self.receiving = []
        if self.packed is not None:
            self.packed.unpack()
            self.packed = None

    def left(self, timeout: timedelta) -> None:
        for work in self.sending:
            work.wait(timeout)
        self.sending, self.keep = [], []


class Gloo:
    """One run of a phase on gloo."""

    # gloo sends a message once its receiver has said that it is ready, and says so on the
    # connection on which other messages travel. Where two ranks send each other pieces at once, as
    # proxies of a ring do, the word for the next round would wait behind a whole piece of this one.
    # So receives are posted two exchanges ahead.

    ahead = 2

    def __init__(self, phase: steps.Phase, form: CallForm, groups: Groups, trace: Trace | None) -> None:
        self.groups = groups
        self.traffic = PhaseTraffic()
        self.expected: dict[int, _Goods] = {}  # receives of collectives not yet issued
        self.under_way: dict[int, _GlooCalls] = {}
        self.leaving: dict[int, _GlooCalls] = {}  # exchanges whose sends may still be under way
        self.relays = [_Relay(relay_tasks, form, groups, trace) for relay_tasks in phase.relay_tasks]
        self.relaying = groups.workers.run([relay.pass_on for relay in self.relays])

    def expect(self, exchange: steps.ExchangeStep, receives: _Goods, arriving: Mapping[int, Tensor]) -> None:
        """Say where the tensors of an exchange that begins later go: a block if both sides have one.
        `arriving`: by peer whose messages are routed, not in `receives`, the memory of all of them.
        """
        if exchange.far:
            self.traffic.inter_node_bytes_received += _far_bytes(receives, exchange.far)
        if isinstance(receives, Block) or is_collective(exchange, self.groups):
            self.expected[exchange.id] = receives
            return
        receiving = [(peer, receive(x, peer, exchange.tag, self.groups)) for peer, x in receives if x.numel()]
        for peer, raw in arriving.items():
            for _, hop, x in _pieces(raw, exchange.routed_receives[peer]):
                receiving.append((hop.peer, receive(x, hop.peer, exchange.tag + hop.tag, self.groups)))
                self.traffic.inter_node_bytes_received += x.nbytes * hop.crosses
        self.under_way[exchange.id] = _GlooCalls(receiving)

    def start(self, exchange: steps.ExchangeStep, sends: _Goods) -> None:
        if exchange.far:
            self.traffic.inter_node_bytes_sent += _far_bytes(sends, exchange.far, exchange.routed_sends)
        if exchange.id in self.expected:
            packed = _pack_collective(sends, self.expected.pop(exchange.id), exchange, self.groups)
            receiving = [(SEVERAL, work) for work in packed.issue()]
            self.under_way[exchange.id] = _GlooCalls(receiving, keep=packed.memory, packed=packed)
            return
        assert not isinstance(sends, Block), "a block without a collective"
        under_way = self.leaving[exchange.id] = self.under_way[exchange.id]
        under_way.keep = [x for _, x in sends]
        direct, routed = _direct_and_routed(sends, exchange)
        under_way.sending = [send(x, peer, exchange.tag, self.groups) for peer, x in direct]
        for peer, raw in routed.items():
            for _, hop, x in _pieces(raw, exchange.routed_sends[peer]):
                under_way.sending.append(send(x, hop.peer, exchange.tag + hop.tag, self.groups))
                under_way.keep.append(x)
                self.traffic.inter_node_bytes_sent += x.nbytes * hop.crosses

    def launched(self) -> None:
        """Note that the host issued a launch: on a CPU it is over by then."""

    def attended(self) -> None:
        """Note that the host issued the last launch of the call: everything is under way."""

    def arrived(self, exchange: steps.ExchangeStep) -> None:
        """Wait for the tensors of an exchange: whatever is issued next finds them."""
        self.under_way.pop(exchange.id).arrived(self.groups.timeout, self.groups.host_times)
        self.let_go([at for at in self.leaving if at < exchange.id])

    def let_go(self, exchanges: Sequence[int]) -> None:
        """Wait for the sends of exchanges."""
        # Where the rank has ended a later one, the peers have begun these: no deadlock.
        for at in exchanges:
            self.leaving.pop(at).left(self.groups.timeout)

    def end(self) -> None:
        """Wait for the end of every exchange, and of relaying: RuntimeError where that failed."""
        self.let_go(list(self.leaving))
        wait(self.relaying)
        self.raise_relays_error()
        for relay in self.relays:
            self.traffic.relayed_bytes += relay.num_bytes
            self.traffic.inter_node_bytes_received += relay.crossed_in
            self.traffic.inter_node_bytes_sent += relay.crossed_out

    def fail(self) -> None:
        """Abort after an error: unblock peers that wait for this rank; raise relaying's behind it."""
        self.raise_relays_error()
        break_off(self.groups.pool)
        wait(self.relaying, _PATIENCE_S)  # they end soon, since all connections are closed

    def raise_relays_error(self) -> None:
        for relay in self.relays:
            if relay.error is not None:
                raise relay.error


_AHEAD = 16  # receives posted before the first of them is waited for
_BEHIND = 32  # sends under way before the first of them is waited for
_PATIENCE_S = 5.0


class _Relay:
    """One group of relay tasks, in order, in its own thread. `num_bytes`: sent on so far."""

    def __init__(
        self, relay_tasks: Sequence[steps.RelayTask], form: CallForm, groups: Groups, trace: Trace | None
    ) -> None:
        self.relay_tasks, self.form, self.groups, self.trace = relay_tasks, form, groups, trace
        self.num_bytes = self.crossed_in = self.crossed_out = 0
        self.error: RuntimeError | None = None

    def pass_on(self) -> None:
        """Receive and send on every piece. One that fails is `error`, and breaks all others off."""
        posted: deque[tuple[steps.RelayTask, Tensor, dist.Work, float]] = deque()
        behind: deque[tuple[steps.RelayTask, Tensor, dist.Work]] = deque()
        upcoming = iter(self.sized())
        relay_task, what = self.relay_tasks[0], "arrive"
        try:
            for _ in range(_AHEAD):
                self.post(upcoming, posted)
            while posted:
                relay_task, x, arriving, begin = posted.popleft()
                what = "arrive"
                arriving.wait(self.groups.timeout)
                what = "leave"
                behind.append((relay_task, x, self.send(relay_task, x, begin)))
                self.post(upcoming, posted)
                if len(behind) > _BEHIND:
                    relay_task, _, leaving = behind.popleft()
                    leaving.wait(self.groups.timeout)
            what = "leave"
            while behind:
                relay_task, _, leaving = behind.popleft()
                leaving.wait(self.groups.timeout)
        except Exception as error:
            self.error = RuntimeError(f"{_described(relay_task, self.groups.rank)}: it did not {what}: {error}")
            break_off(self.groups.pool)

    def sized(self) -> Iterator[tuple[steps.RelayTask, int]]:
        for relay_task in self.relay_tasks:
            num_bytes = piece_bytes(relay_task.carried, self.form, relay_task.route.index, relay_task.route.count)
            if num_bytes:
                yield relay_task, num_bytes

    def post(
        self,
        upcoming: Iterator[tuple[steps.RelayTask, int]],
        posted: deque[tuple[steps.RelayTask, Tensor, dist.Work, float]],
    ) -> None:
        for relay_task, num_bytes in upcoming:
            x = self.groups.buffers.empty((num_bytes,), torch.uint8, torch.device("cpu"))
            begin = time.perf_counter()
            arrives = relay_task.route.arrives
            posted.append((relay_task, x, receive(x, arrives.peer, relay_task.tag + arrives.tag, self.groups), begin))
            return

    def send(self, relay_task: steps.RelayTask, x: Tensor, begin: float) -> dist.Work:
        now = time.perf_counter()
        work = send(x, relay_task.route.leaves.peer, relay_task.tag + relay_task.route.leaves.tag, self.groups)
        self.num_bytes += x.nbytes
        self.crossed_in += x.nbytes * relay_task.route.arrives.crosses
        self.crossed_out += x.nbytes * relay_task.route.leaves.crosses
        if self.trace is not None:
            for hop in (relay_task.route.arrives, relay_task.route.leaves):
                self.trace.append(Traced(hop.stream, relay_task.op, hop.leg, relay_task.route.role, begin, now))
        return work


def _described(relay_task: steps.RelayTask, rank: int) -> str:
    route = relay_task.route
    path = f"rank {route.arrives.peer} -> rank {rank} -> rank {route.leaves.peer}"
    piece = f"piece {route.index} of {route.count} from rank {route.src} to rank {route.dst}"
    return f"exchange {relay_task.exchange}, {piece}, as {route.role.replace('_', ' ')}, {path}"


# Exchanges on CUDA: communication streams beside the compute stream, joined by events.
#
# The host waits for nothing: what ranks must connect they connect when they bind a plan (`connect`).
# Each stream of `compile.order.stream_name` has a communicator of its own
# (`runtime.groups.stream_groups`), so that what it carries is only in order with itself. NCCL matches
# messages by their order between two ranks; ranks issue exchanges in one order (`compile.order`),
# their legs and streams as `compile.proof.runs` has them, and messages within a batch by source,
# target and piece. Collectives have streams too, but go by the communicators of their ranks.

_LATER_LEGS: tuple[Leg, ...] = ("across", "combine")  # legs that wait for an earlier one, here or on another rank


@dataclass(slots=True)
class _UnderWay:
    """An exchange that was started."""

    # By stream, that behind which all that comes to this rank is there.
    fences: dict[str, Fence] = field(default_factory=dict)
    # Streams that have waited for what the compute stream did before it.
    joined: set[str] = field(default_factory=set)
    # It is in a collective's own order.
    packed: _CollectiveCall | None = None


_Place = tuple[Leg, str]  # (leg, stream) of a batch


class _Batches:
    """The batches of one exchange."""

    def __init__(self, op: int) -> None:
        self.op = op
        self.transfers: dict[_Place, list[StreamMessage]] = {}
        self.after: dict[_Place, set[_Place]] = {}
        self.ended: dict[_Place, Fence] = {}

    def add(self, place: _Place, transfer: StreamMessage) -> None:
        self.transfers.setdefault(place, []).append(transfer)

    def places(self) -> list[_Place]:
        """In the order in which every rank issues them."""
        return sorted(self.transfers, key=lambda place: (("direct", *LEGS).index(place[0]), place[1]))


class Streamed:
    """One run of a phase on NCCL; calls as `Gloo` has them. Pieces are relayed in batches."""

    ahead = 0

    def __init__(self, phase: steps.Phase, form: CallForm, groups: Groups, trace: Trace | None, *, timed: bool) -> None:
        assert groups.streams is not None, "no streams were made for this pool"
        self.groups, self.form, self.trace, self.timed = groups, form, trace, timed
        self.streams: Streams = groups.streams
        self.traffic = PhaseTraffic()
        launch = next((step for step in phase.steps if isinstance(step, steps.Launch | steps.GradLaunch)), None)
        # Later legs come behind the launch that they travel beside. A backward launch is three
        # kernels, each of which waits at the head of a single hardware queue for the one before, so a
        # leg behind it reaches the device when the main kernel has ended: early enough for the next
        # round of a ring, late for what other ranks need for their first launch. So legs of exchanges
        # before this rank's first backward launch come at once.
        self.later_legs = Behind.LAUNCH if isinstance(launch, steps.Launch) else Behind.NOTHING
        self.expected: dict[int, tuple[_Goods, Mapping[int, Tensor]]] = {}
        self.under_way: dict[int, _UnderWay] = {}
        self.relay_tasks: dict[int, list[steps.RelayTask]] = {}
        for relay_task in chain.from_iterable(phase.relay_tasks):
            self.relay_tasks.setdefault(relay_task.op, []).append(relay_task)

    def expect(self, exchange: steps.ExchangeStep, receives: _Goods, arriving: Mapping[int, Tensor]) -> None:
        self.expected[exchange.id] = receives, arriving

    def start(self, exchange: steps.ExchangeStep, sends: _Goods) -> None:
        receives, arriving = self.expected.pop(exchange.id)
        if exchange.far:
            self.traffic.inter_node_bytes_sent += _far_bytes(sends, exchange.far, exchange.routed_sends)
            self.traffic.inter_node_bytes_received += _far_bytes(receives, exchange.far)
        if isinstance(sends, Block) or isinstance(receives, Block) or is_collective(exchange, self.groups):
            self.start_collective(exchange, _pack_collective(sends, receives, exchange, self.groups))
            return
        batches = _Batches(exchange.op)
        self.add_own(exchange, sends, receives, arriving, batches)
        relay_tasks = self.relay_tasks.get(exchange.op, ())
        self.add_relay_tasks(relay_tasks, batches)
        brings_back = all(m.kind in MOVED for m in exchange.receives)
        # Values that only come back to this rank are received behind the last launch.
        late = not sends and not relay_tasks and brings_back
        under_way = self.under_way[exchange.id] = _UnderWay()
        ready = None if late else self.streams.now()
        for place in batches.places():
            transfers = sorted(batches.transfers[place], key=lambda t: t[:3])
            before = self.groups.buffers.fences([t.tensor for t in transfers if not t.sends])
            issue = partial(self.issue, batches, place, transfers, (under_way, ready, before))
            behind = Behind.LAUNCHES if late else self.later_legs if place[0] in _LATER_LEGS else Behind.NOTHING
            if self.groups.safe:
                behind = Behind.NOTHING
            self.groups.issues.put(under_way, issue, behind)

    def issue(
        self,
        batches: _Batches,
        place: _Place,
        transfers: Sequence[StreamMessage],
        started: tuple[_UnderWay, Any, Sequence[Fence]],
    ) -> None:
        """Issue one batch. `started`: its exchange, when it may begin, and what it comes behind."""
        # Behind `ready` the compute stream has written what is sent, and let go of the memory that is
        # filled (None: that is now); `before`: other streams' uses of that memory.
        under_way, ready, before = started
        (leg, name), own = place, any(self.groups.rank in (t.src, t.dst) for t in transfers)
        stream = self.streams.of(name)
        if own and name not in under_way.joined:  # what is only relayed does not wait for this rank's own work
            stream.wait(self.streams.now() if ready is None else ready)
            under_way.joined.add(name)
        before = [*before, *(batches.ended[bringing] for bringing in sorted(batches.after.get(place, ())))]
        tensors, batch = [t.tensor for t in transfers], partial(stream.batch, transfers)
        fence = batches.ended[place] = self.issued((name, batches.op, leg), tensors, before, batch)
        if any(not t.sends and t.dst == self.groups.rank for t in transfers):
            under_way.fences[name] = fence

    def issued(
        self, of: tuple[str, int, str], tensors: Sequence[Tensor], before: Sequence[Fence], call: Callable[[], None]
    ) -> Fence:
        """Issue a call `of` (stream, op, leg) on `tensors`, behind other streams: its end."""
        stream, buffers = self.streams.of(of[0]), self.groups.buffers
        for fence in before:
            if fence.stream != of[0]:
                stream.wait(fence.event)
        for x in tensors:
            stream.uses(x)
        begun = stream.record() if self.timed else None
        call()
        fence = buffers.fence(of[0], stream.record(), self.streams.wait)
        if begun is not None and self.trace is not None:
            self.trace.append(Traced(*of, "own", begun, fence.event))
        buffers.used(tensors, fence)
        return fence

    def start_collective(self, exchange: steps.ExchangeStep, packed: _CollectiveCall) -> None:
        """Put one call on the communicator of its ranks; the compute stream packs and unpacks."""
        under_way = self.under_way[exchange.id] = _UnderWay(packed=packed)
        ready, before = self.streams.now(), self.groups.buffers.fences(packed.memory)

        def issue() -> None:
            stream = self.streams.of(exchange.stream)
            stream.wait(ready)
            of, call = (exchange.stream, exchange.op, "direct"), partial(stream.call, packed.issue)
            under_way.fences[exchange.stream] = self.issued(of, packed.memory, before, call)

        self.groups.issues.put(under_way, issue)

    def add_own(
        self,
        exchange: steps.ExchangeStep,
        sends: _Parcels,
        receives: _Parcels,
        arriving: Mapping[int, Tensor],
        batches: _Batches,
    ) -> None:
        rank, streams = self.groups.rank, {m.peer: m.stream for m in (*exchange.sends, *exchange.receives)}
        direct, routed = _direct_and_routed(sends, exchange)
        for index, (peer, x) in enumerate(direct):
            batches.add(("direct", streams[peer]), StreamMessage(rank, peer, index, True, peer, x))
        for index, (peer, x) in enumerate((p, x) for p, x in receives if x.numel()):
            batches.add(("direct", streams[peer]), StreamMessage(peer, rank, index, False, peer, x))
        for peer, raw in routed.items():
            for piece, hop, x in _pieces(raw, exchange.routed_sends[peer]):
                batches.add((hop.leg, hop.stream), StreamMessage(rank, peer, piece.index, True, hop.peer, x))
                self.traffic.inter_node_bytes_sent += x.nbytes * hop.crosses
        for peer, raw in arriving.items():
            for piece, hop, x in _pieces(raw, exchange.routed_receives[peer]):
                batches.add((hop.leg, hop.stream), StreamMessage(peer, rank, piece.index, False, hop.peer, x))
                self.traffic.inter_node_bytes_received += x.nbytes * hop.crosses

    def add_relay_tasks(self, relay_tasks: Sequence[steps.RelayTask], batches: _Batches) -> None:
        """Add relayed pieces: received in one leg, sent in a later one."""
        for relay_task in relay_tasks:
            route = relay_task.route
            num_bytes = piece_bytes(relay_task.carried, self.form, route.index, route.count)
            if not num_bytes:
                continue
            x = self.streams.of(route.arrives.stream).empty(num_bytes)
            for hop, sends in ((route.arrives, False), (route.leaves, True)):
                batches.add((hop.leg, hop.stream), StreamMessage(route.src, route.dst, route.index, sends, hop.peer, x))
                self.record(relay_task, hop)
            leaving = (route.leaves.leg, route.leaves.stream)
            batches.after.setdefault(leaving, set()).add((route.arrives.leg, route.arrives.stream))
            self.traffic.relayed_bytes += x.nbytes
            self.traffic.inter_node_bytes_received += x.nbytes * route.arrives.crosses
            self.traffic.inter_node_bytes_sent += x.nbytes * route.leaves.crosses

    def record(self, relay_task: steps.RelayTask, hop: steps.Hop) -> None:
        if self.trace is not None and not self.timed:
            now = time.perf_counter()
            self.trace.append(Traced(hop.stream, relay_task.op, hop.leg, relay_task.route.role, now, now))

    def launched(self) -> None:
        self.later_legs = Behind.LAUNCH
        self.groups.issues.launched()

    def attended(self) -> None:
        self.groups.issues.attended()

    def arrived(self, exchange: steps.ExchangeStep) -> None:
        under_way = self.under_way.pop(exchange.id)
        self.groups.issues.through(under_way)
        for fence in under_way.fences.values():
            self.groups.buffers.passed.wait(fence)
        if under_way.packed is not None:
            under_way.packed.unpack()

    def end(self) -> None:
        """Do nothing: what was sent is kept by the streams until they have read it."""

    def fail(self) -> None:
        """Issue nothing more and abort: peers end with an error, and this process can end."""
        self.groups.issues.forget()
        self.groups.abort()


def connect(phases: Iterable[steps.Phase], groups: Groups) -> int:
    """Connect ranks that the phases need and no earlier call connected; the number of new links
    (NCCL). All ranks of the pool bind the same plans, for the same phases, in one order, from the
    thread that issues their steps.
    """
    # NCCL connects two ranks of a communicator at their first send or receive, each direction for
    # itself, and the host stands in the group call until the other end is in its own (NCCL 2.29.7,
    # `ncclTransportP2pSetup`; NVIDIA/nccl#783). A warm-up all-reduce connects rings, not pairs. So
    # each new pair is connected when a plan is bound, by one byte: one group call for each
    # communicator, in one order on all ranks, before anything of the step is issued.
    if groups.streams is None:
        return 0
    rank = groups.rank
    new = {link for phase in phases for link in _links(phase, groups)} - groups.connected
    for name, together in groupby(sorted(new), itemgetter(0)):  # in one order everywhere
        stream = groups.streams.of(name)
        ends = [(src, dst, 0, src == rank, dst if src == rank else src) for _, src, dst in together]
        stream.batch([StreamMessage(*end, stream.empty(1)) for end in ends])
    groups.connected.update(new)
    return len(new)


def _links(phase: steps.Phase, groups: Groups) -> Iterator[tuple[str, int, int]]:
    """Links of this rank point to point in a phase, with repeats."""
    rank = groups.rank
    for step in phase.steps:
        if isinstance(step, steps.IssueStep) and not is_collective(step.exchange, groups):
            for stream, _, sent, peer in step.exchange.legs():
                yield (stream, rank, peer) if sent else (stream, peer, rank)
    for relay_task in chain.from_iterable(phase.relay_tasks):
        arrives, leaves = relay_task.route.arrives, relay_task.route.leaves
        yield arrives.stream, arrives.peer, rank
        yield leaves.stream, rank, leaves.peer
