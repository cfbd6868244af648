"""Communication calls of exchanges: tagged sends and receives on gloo, and collectives.

A collective carries bytes: messages of several kinds and types to one peer are packed one after the
other, each aligned, so that queries and keys of different head counts, or outputs and their fp32
LSE, go in a single call. Those of an all-to-all are written into one block, peer by peer, and read
where they arrive (`is_block`): nothing is copied for the call.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_balance.analysis.wire import padded, piece_bounds
from megatron_balance.runtime.groups import SEVERAL, Groups, HostTimes, ThreadCall
from megatron_balance.runtime.lower.memory import Block, CallForm, as_bytes, is_collective, pack, piece_bytes
from megatron_balance.runtime.lower.steps import ExchangeStep, Hop, Phase, Piece, RelayTask
from megatron_balance.runtime.recorder import PhaseTraffic, Trace, Traced

Parcel = tuple[int, Tensor]
"""(pool rank of the peer, contiguous tensor)."""


_POISON_TAG = 2**31 - 1


@dataclass(slots=True)
class CollectiveCall:
    """A collective call, packed and not yet issued.

    `memory`: tensors that it reads and writes; `received`: tensors and the bytes that belong there,
    where they are not read in place.
    """

    call: Callable[[], dist.Work | None]
    memory: list[Tensor]
    received: list[tuple[Tensor, Tensor]]

    def issue(self) -> list[dist.Work]:
        work = self.call()
        return [work] if work is not None else []

    def unpack(self) -> None:
        for target, raw in self.received:
            target.copy_(raw.view(target.dtype).view(target.shape))


def send(x: Tensor, peer: int, tag: int, groups: Groups) -> dist.Work:
    """Begin to send a contiguous tensor to pool rank `peer`."""
    work = dist.isend(x, groups.ranks[peer], groups.pool, tag)
    assert work is not None, "this rank is not in its own pool"
    return work


def receive(x: Tensor, peer: int, tag: int, groups: Groups) -> dist.Work:
    """Begin to receive into a contiguous tensor."""
    work = dist.irecv(x, groups.ranks[peer], groups.pool, tag)
    assert work is not None, "this rank is not in its own pool"
    return work


def break_off(group: dist.ProcessGroup | None) -> bool:
    """Make all transfers of this rank in a group, and those that peers wait for, fail (gloo).

    A receive that times out closes the connections to all peers. It is the only way to wake another
    thread of this rank. False: the group also has another backend than gloo.
    """
    if group is None:
        return True
    backends = {group._get_backend(device).name() for device in group._device_types}
    for peer in dist.get_process_group_ranks(group) if "gloo" in backends else ():
        if peer != dist.get_rank():
            with suppress(RuntimeError):
                work = dist.irecv(torch.empty(1), peer, group, _POISON_TAG)
                assert work is not None, "this rank is in the group"
                work.wait(timedelta(milliseconds=1))
    return backends == {"gloo"}


def direct_and_routed(sends: Sequence[Parcel], exchange: ExchangeStep) -> tuple[list[Parcel], dict[int, Tensor]]:
    """Parcels that go directly; and by peer, the bytes of all that goes in pieces."""
    direct: list[Parcel] = []
    routed: dict[int, list[Tensor]] = {}
    for peer, x in sends:
        if peer in exchange.routed_sends:
            routed.setdefault(peer, []).append(x)
        elif x.numel():
            direct.append((peer, x))
    return direct, {peer: pack(tensors) for peer, tensors in routed.items()}


def pieces(raw: Tensor, routed: Sequence[Piece]) -> Iterator[tuple[Piece, Hop, Tensor]]:
    """The pieces of a parcel that are not empty, with their hop and bytes."""
    bounds = piece_bounds(raw.numel(), routed[0].count)
    for piece in routed:
        begin, end = bounds[piece.index]
        if begin < end:
            yield piece, piece.hop, raw[begin:end]


def pack_collective(
    sends: Sequence[Parcel] | Block, receives: Sequence[Parcel] | Block, exchange: ExchangeStep, groups: Groups
) -> CollectiveCall:
    group = groups.of(exchange.group)
    assert group is not None, "ranks without a process group"
    if isinstance(sends, Block) and isinstance(receives, Block):
        return _all_to_all(sends, receives, group)
    assert not isinstance(sends, Block), "a block goes out, parcels come back"
    assert not isinstance(receives, Block), "parcels go out, a block comes back"
    if exchange.collective == "all_gather":
        return _all_gather(sends, receives, exchange.group, groups)
    return _reduce_scatter(sends, receives, exchange.group, groups)


def far_bytes(parcels: Sequence[Parcel] | Block, far: frozenset[int], routed: Collection[int] = ()) -> int:
    """Bytes to or from peers on other nodes that are not `routed`."""
    own = parcels.arranged.peers if isinstance(parcels, Block) else ((peer, x.nbytes) for peer, x in parcels)
    return sum(num_bytes for peer, num_bytes in own if peer in far and peer not in routed)


def _size(parcels: Sequence[Parcel], peer: int) -> int:
    return sum(padded(x.nbytes) for p, x in parcels if p == peer)


def _slots(parcels: Sequence[Parcel], raw: Tensor, begin: int) -> list[tuple[Tensor, Tensor]]:
    """Tensors and the bytes of `raw` that belong to each, one after the other."""
    slots: list[tuple[Tensor, Tensor]] = []
    for _, x in parcels:
        slots.append((x, raw[begin : begin + x.nbytes]))
        begin += padded(x.nbytes)
    return slots


def _pack_into(parcels: Sequence[Parcel], raw: Tensor, begin: int) -> None:
    for x, place in _slots(parcels, raw, begin):
        place.copy_(as_bytes(x))


def _device(parcels: Sequence[Parcel], fallback: Sequence[Parcel]) -> torch.device:
    return next((x.device for _, x in (*parcels, *fallback)), torch.device("cpu"))


def _all_to_all(sends: Block, receives: Block, process_group: dist.ProcessGroup) -> CollectiveCall:
    packed, raw = sends.memory, receives.memory
    sizes = list(receives.arranged.sizes), list(sends.arranged.sizes)
    call = partial(dist.all_to_all_single, raw, packed, *sizes, group=process_group, async_op=True)
    return CollectiveCall(call, [packed, raw], [])


def _all_gather(
    sends: Sequence[Parcel], receives: Sequence[Parcel], group: tuple[int, ...], groups: Groups
) -> CollectiveCall:
    device = _device(sends, receives)
    others = [peer for peer in group if peer != groups.rank]
    mine = [p for p in sends if p[0] == others[0]]
    width = max([_size(sends, others[0]), *(_size(receives, peer) for peer in others)])
    packed = groups.buffers.empty((width,), torch.uint8, device)
    raw = groups.buffers.empty((width * len(group),), torch.uint8, device, received=True)
    _pack_into(mine, packed, 0)
    received: list[tuple[Tensor, Tensor]] = []
    for index, peer in enumerate(group):
        if peer != groups.rank:
            received += _slots([p for p in receives if p[0] == peer], raw, index * width)
    call = partial(dist.all_gather_into_tensor, raw, packed, group=groups.of(group), async_op=True)
    return CollectiveCall(call, [packed, raw], received)


def _reduce_scatter(
    sends: Sequence[Parcel], receives: Sequence[Parcel], group: tuple[int, ...], groups: Groups
) -> CollectiveCall:
    """A block for each rank, all as wide as the widest; this rank's own gradients stay here.
    `receives`: from one peer.
    """
    device = _device(sends, receives)
    dtype = next(x.dtype for _, x in (*sends, *receives))  # gradients: all of the wide type
    width = max([sum(padded(x.nbytes) for _, x in receives), *(_size(sends, peer) for peer in group)])
    packed = groups.buffers.empty((width * len(group),), torch.uint8, device).zero_()
    raw = groups.buffers.empty((width,), torch.uint8, device, received=True)
    for index, peer in enumerate(group):
        _pack_into([p for p in sends if p[0] == peer], packed, index * width)
    call = partial(
        dist.reduce_scatter_tensor, raw.view(dtype), packed.view(dtype), group=groups.of(group), async_op=True
    )
    return CollectiveCall(call, [packed, raw], _slots(receives, raw, 0))


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
    """An exchange's calls.

    `receiving`: with the pool rank that each comes from, or `SEVERAL`; `keep` holds the tensors
    that are still read; `packed`: those that a collective brings, in its own order.
    """

    receiving: list[tuple[int, dist.Work]]
    sending: list[dist.Work] = field(default_factory=list)
    keep: list[Tensor] = field(default_factory=list)
    packed: CollectiveCall | None = None

    def arrived(self, timeout: timedelta, times: HostTimes) -> None:
        """Block the thread until everything is here, and unpacked; no longer than `timeout` for each.

        Call once: gloo waits for ever for a message that has come before.
        """
        begin = time.perf_counter()
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
    """One run of a phase on gloo.

    gloo sends a message once its receiver has said that it is ready, and says so on the connection
    on which other messages travel. Where two ranks send each other pieces at once, as proxies of a
    ring do, the word for the next round would wait behind a whole piece of this one. So receives
    are posted two exchanges ahead.
    """

    ahead = 2

    def __init__(self, phase: Phase, form: CallForm, groups: Groups, trace: Trace | None) -> None:
        self.groups = groups
        self.traffic = PhaseTraffic()
        self.expected: dict[int, Sequence[Parcel] | Block] = {}  # receives of collectives not yet issued
        self.under_way: dict[int, _GlooCalls] = {}
        self.leaving: dict[int, _GlooCalls] = {}  # exchanges whose sends may still be under way
        self.relays = [_Relay(relay_tasks, form, groups, trace) for relay_tasks in phase.relay_tasks]
        self.relaying: list[ThreadCall] = groups.workers.run([relay.pass_on for relay in self.relays])

    def expect(
        self, exchange: ExchangeStep, receives: Sequence[Parcel] | Block, arriving: Mapping[int, Tensor]
    ) -> None:
        """Say where the tensors of an exchange that begins later go: a block, if that is one on both
        sides. `arriving`: the memory for all that comes from a peer whose messages are routed, which
        is not in `receives`.
        """
        if exchange.far:
            self.traffic.inter_node_bytes_received += far_bytes(receives, exchange.far)
        if isinstance(receives, Block) or is_collective(exchange, self.groups):
            self.expected[exchange.id] = receives
            return
        receiving = [(peer, receive(x, peer, exchange.tag, self.groups)) for peer, x in receives if x.numel()]
        for peer, raw in arriving.items():
            for _, hop, x in pieces(raw, exchange.routed_receives[peer]):
                receiving.append((hop.peer, receive(x, hop.peer, exchange.tag + hop.tag, self.groups)))
                self.traffic.inter_node_bytes_received += x.nbytes * hop.crosses
        self.under_way[exchange.id] = _GlooCalls(receiving)

    def start(self, exchange: ExchangeStep, sends: Sequence[Parcel] | Block) -> None:
        if exchange.far:
            self.traffic.inter_node_bytes_sent += far_bytes(sends, exchange.far, exchange.routed_sends)
        if exchange.id in self.expected:
            packed = pack_collective(sends, self.expected.pop(exchange.id), exchange, self.groups)
            receiving = [(SEVERAL, work) for work in packed.issue()]
            self.under_way[exchange.id] = _GlooCalls(receiving, keep=packed.memory, packed=packed)
            return
        assert not isinstance(sends, Block), "a block without a collective"
        under_way = self.leaving[exchange.id] = self.under_way[exchange.id]
        under_way.keep = [x for _, x in sends]
        direct, routed = direct_and_routed(sends, exchange)
        under_way.sending = [send(x, peer, exchange.tag, self.groups) for peer, x in direct]
        for peer, raw in routed.items():
            for _, hop, x in pieces(raw, exchange.routed_sends[peer]):
                under_way.sending.append(send(x, hop.peer, exchange.tag + hop.tag, self.groups))
                under_way.keep.append(x)
                self.traffic.inter_node_bytes_sent += x.nbytes * hop.crosses

    def launched(self) -> None:
        """Note that the host issued a launch: on a CPU it is over by then."""

    def attended(self) -> None:
        """Note that the host issued the last launch of the call: everything is under way."""

    def arrived(self, exchange: ExchangeStep) -> None:
        """Wait for the tensors of an exchange: whatever is issued next finds them."""
        self.under_way.pop(exchange.id).arrived(self.groups.timeout, self.groups.host_times)
        self.let_go([at for at in self.leaving if at < exchange.id])

    def let_go(self, exchanges: Sequence[int]) -> None:
        """Wait for the sends of exchanges.

        Where the rank has ended a later one, the peers have begun these: no deadlock.
        """
        for at in exchanges:
            self.leaving.pop(at).left(self.groups.timeout)

    def end(self) -> None:
        """Wait for the end of every exchange, and of relaying: RuntimeError where that failed."""
        self.let_go(list(self.leaving))
        for call in self.relaying:
            call.wait()
        self.raise_relays_error()
        for relay in self.relays:
            self.traffic.relayed_bytes += relay.num_bytes
            self.traffic.inter_node_bytes_received += relay.crossed_in
            self.traffic.inter_node_bytes_sent += relay.crossed_out

    def fail(self) -> None:
        """Abort after an error: unblock peers that wait for this rank; raise relaying's behind it."""
        self.raise_relays_error()
        break_off(self.groups.pool)
        for call in self.relaying:  # they end soon, since all connections are closed
            call.wait(_PATIENCE_S)

    def raise_relays_error(self) -> None:
        for relay in self.relays:
            if relay.error is not None:
                raise relay.error


_AHEAD = 16  # receives posted before the first of them is waited for


_BEHIND = 32  # sends under way before the first of them is waited for


_PATIENCE_S = 5.0


_CPU = torch.device("cpu")


class _Relay:
    """One group of relay tasks, in order, in its own thread. `num_bytes`: sent on so far; of these
    `crossed_in`, `crossed_out` nodes.
    """

    def __init__(self, relay_tasks: Sequence[RelayTask], form: CallForm, groups: Groups, trace: Trace | None) -> None:
        self.relay_tasks, self.form, self.groups, self.trace = relay_tasks, form, groups, trace
        self.num_bytes = self.crossed_in = self.crossed_out = 0
        self.error: RuntimeError | None = None

    def pass_on(self) -> None:
        """Receive and send on every piece. Where one fails, `error` says so, and all other
        transfers of the rank are broken off.
        """
        posted: deque[tuple[RelayTask, Tensor, dist.Work, float]] = deque()
        behind: deque[tuple[RelayTask, Tensor, dist.Work]] = deque()
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

    def sized(self) -> Iterator[tuple[RelayTask, int]]:
        for relay_task in self.relay_tasks:
            num_bytes = piece_bytes(relay_task.carried, self.form, relay_task.route.index, relay_task.route.count)
            if num_bytes:
                yield relay_task, num_bytes

    def post(
        self, upcoming: Iterator[tuple[RelayTask, int]], posted: deque[tuple[RelayTask, Tensor, dist.Work, float]]
    ) -> None:
        for relay_task, num_bytes in upcoming:
            x = self.groups.buffers.empty((num_bytes,), torch.uint8, _CPU)
            begin = time.perf_counter()
            arrives = relay_task.route.arrives
            posted.append((relay_task, x, receive(x, arrives.peer, relay_task.tag + arrives.tag, self.groups), begin))
            return

    def send(self, relay_task: RelayTask, x: Tensor, begin: float) -> dist.Work:
        now = time.perf_counter()
        work = send(x, relay_task.route.leaves.peer, relay_task.tag + relay_task.route.leaves.tag, self.groups)
        self.num_bytes += x.nbytes
        self.crossed_in += x.nbytes * relay_task.route.arrives.crosses
        self.crossed_out += x.nbytes * relay_task.route.leaves.crosses
        if self.trace is not None:
            for hop in (relay_task.route.arrives, relay_task.route.leaves):
                self.trace.append(Traced(hop.stream, relay_task.op, hop.leg, relay_task.route.role, begin, now))
        return work


def _described(relay_task: RelayTask, rank: int) -> str:
    route = relay_task.route
    path = f"rank {route.arrives.peer} -> rank {rank} -> rank {route.leaves.peer}"
    piece = f"piece {route.index} of {route.count} from rank {route.src} to rank {route.dst}"
    return f"exchange {relay_task.exchange}, {piece}, as {route.role.replace('_', ' ')}, {path}"
