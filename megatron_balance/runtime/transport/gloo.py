"""Exchanges on gloo: asynchronous sends and receives, and threads that relay for others beside a
rank's own work.

Every point-to-point message has a tag, so that transfers of several exchanges under way between the
same two ranks, and those that a proxy relays beside its own, are never taken for one another.

A proxy must not wait for its own computation (Zeppelin, section 3.3). gloo needs someone to wait
for a piece before it can be sent on, so threads do it; torch releases the interpreter while they
wait. Tasks of one group come one after the other (rounds of a ring, say); groups wait for nothing
in one another, so each has a thread.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_balance.analysis.wire import piece_bounds
from megatron_balance.runtime.counters import PhaseTraffic
from megatron_balance.runtime.groups import SEVERAL, Groups, HostTimes, ThreadCall
from megatron_balance.runtime.lower.memory import Block, CallForm, is_collective, parcel_bytes
from megatron_balance.runtime.lower.steps import ExchangeStep, Phase, RelayTask
from megatron_balance.runtime.recorder import Trace, Traced
from megatron_balance.runtime.transport.comm import (
    CollectiveCall,
    Parcel,
    break_off,
    direct_and_routed,
    far_bytes,
    pack_collective,
    pieces,
    receive,
    send,
)


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
        self.relay = Relay(phase.relay_tasks, form, groups, trace) if phase.relay_tasks else None

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
        if self.relay is not None:
            self.relay.finish(self.traffic)

    def fail(self) -> None:
        """Abort after an error: unblock peers that wait for this rank; raise relaying's behind it."""
        if self.relay is not None:
            self.relay.raise_error()
        break_off(self.groups.pool)
        if self.relay is not None:
            self.relay.abandon()


_AHEAD = 16  # receives posted before the first of them is waited for


_BEHIND = 32  # sends under way before the first of them is waited for


_PATIENCE_S = 5.0


_CPU = torch.device("cpu")


class Relay:
    """All relay tasks of a rank in one run of a phase."""

    def __init__(
        self, groups_of_relay_tasks: Sequence[Sequence[RelayTask]], form: CallForm, groups: Groups, trace: Trace | None
    ) -> None:
        self.threads = [_Thread(relay_tasks, form, groups, trace) for relay_tasks in groups_of_relay_tasks]
        self.jobs: list[ThreadCall] = groups.workers.run([thread.pass_on for thread in self.threads])

    def raise_error(self) -> None:
        """Raise the error of a relay task, if one met any."""
        for thread in self.threads:
            if thread.error is not None:
                raise thread.error

    def abandon(self) -> None:
        """Wait a while for the threads to end after an error. They do, since all connections are
        closed.
        """
        for job in self.jobs:
            job.wait(_PATIENCE_S)

    def finish(self, traffic: PhaseTraffic) -> None:
        for job in self.jobs:
            job.wait()
        self.raise_error()
        for thread in self.threads:
            traffic.relayed_bytes += thread.num_bytes
            traffic.inter_node_bytes_received += thread.crossed_in
            traffic.inter_node_bytes_sent += thread.crossed_out


class _Thread:
    """One group of relay tasks, in order. `num_bytes`: sent on so far; of those `crossed_in`,
    `crossed_out` nodes.
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
            begin, end = piece_bounds(parcel_bytes(relay_task.carried, self.form), relay_task.route.count)[
                relay_task.route.index
            ]
            if begin < end:
                yield relay_task, end - begin

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
