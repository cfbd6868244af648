"""Relaying for others on gloo, beside a rank's own work (Zeppelin, section 3.3).

A proxy must not wait for its own computation. gloo needs someone to wait for a piece before it can
be sent on, so threads do it; torch releases the interpreter while they wait. All relay tasks of a
phase are known when it starts, and handed to the threads then. Tasks of one group come one after
the other (rounds of a ring, say); groups wait for nothing in one another, so each has a thread.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_balance.analysis.wire import piece_bounds
from megatron_balance.runtime.counters import PhaseTraffic
from megatron_balance.runtime.groups import Groups
from megatron_balance.runtime.lower.parcels import CallForm, parcel_bytes
from megatron_balance.runtime.lower.steps import RelayTask
from megatron_balance.runtime.trace import Trace, Traced
from megatron_balance.runtime.transport import comm
from megatron_balance.runtime.workers import ThreadCall

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
        """Wait a while for the threads to end after an error.

        They do, since all connections are closed; one that does not is left behind.
        """
        for job in self.jobs:
            job.wait(_PATIENCE_S)

    def finish(self, traffic: PhaseTraffic) -> None:
        """Wait until everything is sent on, and count it."""
        for job in self.jobs:
            job.wait()
        self.raise_error()
        for thread in self.threads:
            traffic.relayed_bytes += thread.num_bytes
            traffic.inter_node_bytes_received += thread.crossed_in
            traffic.inter_node_bytes_sent += thread.crossed_out


class _Thread:
    """One group of relay tasks, in order.

    `num_bytes`: sent on so far; `crossed_in`, `crossed_out`: of those, from and to other nodes.
    """

    def __init__(self, relay_tasks: Sequence[RelayTask], form: CallForm, groups: Groups, trace: Trace | None) -> None:
        self.relay_tasks, self.form, self.groups, self.trace = relay_tasks, form, groups, trace
        self.num_bytes = self.crossed_in = self.crossed_out = 0
        self.error: RuntimeError | None = None

    def pass_on(self) -> None:
        """Receive and send on every piece.

        Where one does not come or cannot be sent, `error` says so, and all other transfers of the
        rank are broken off.
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
            comm.break_off(self.groups.pool)

    def sized(self) -> Iterator[tuple[RelayTask, int]]:
        """Relay tasks with the bytes of their pieces, without empty pieces."""
        for relay_task in self.relay_tasks:
            begin, end = piece_bounds(parcel_bytes(relay_task.carried, self.form), relay_task.route.count)[
                relay_task.route.index
            ]
            if begin < end:
                yield relay_task, end - begin

    def post(
        self, upcoming: Iterator[tuple[RelayTask, int]], posted: deque[tuple[RelayTask, Tensor, dist.Work, float]]
    ) -> None:
        """Begin to receive the next piece, if there is one."""
        for relay_task, num_bytes in upcoming:
            x = self.groups.buffers.empty((num_bytes,), torch.uint8, _CPU)
            begin = time.perf_counter()
            arrives = relay_task.route.arrives
            posted.append(
                (relay_task, x, comm.receive(x, arrives.peer, relay_task.tag + arrives.tag, self.groups), begin)
            )
            return

    def send(self, relay_task: RelayTask, x: Tensor, begin: float) -> dist.Work:
        """Begin to send a piece on, and count it. `begin`: when it was first waited for."""
        now = time.perf_counter()
        work = comm.send(x, relay_task.route.leaves.peer, relay_task.tag + relay_task.route.leaves.tag, self.groups)
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
