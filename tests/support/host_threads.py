"""The hosts of all ranks as threads of this process, on the real transport of CUDA."""

# Streams carry nothing, and group calls hold a host until its peers have come
# (`tests.support.rendezvous`).

from collections.abc import Callable, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from threading import Condition, Thread, local
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import torch
import torch.distributed as dist

from megatron_balance.analysis.wire import is_collective
from megatron_balance.compile.transpose import Policy
from megatron_balance.ir.plan import MicrobatchPlan
from megatron_balance.runtime import bind as binding
from megatron_balance.runtime import transport
from megatron_balance.runtime.bind import AttentionShape, bind
from megatron_balance.runtime.cuda import StreamMessage
from megatron_balance.runtime.executor import run_backward, run_forward
from megatron_balance.runtime.groups import Groups
from tests.support.rendezvous import GroupCall, Meeting
from tests.support.silent import ShapeKernel, SilentStream, SilentStreams

_here = local()


# Hosts stand in group calls for ever.
class HangError(AssertionError): ...


class Hosts:
    # Where the hosts of all ranks meet. `issued`: the group calls of each rank, in order.
    def __init__(self, num_ranks: int) -> None:
        self.meeting = Meeting()
        self.issued: list[list[GroupCall]] = [[] for _ in range(num_ranks)]
        self.standing: dict[int, GroupCall] = {}
        self.left: set[int] = set()
        self.running = num_ranks
        self.hangs: dict[int, GroupCall] = {}
        self._changed = Condition()

    def enter(self, rank: int, call: GroupCall) -> None:
        # Stand in a group call until it lets the host go.
        with self._changed:
            self.issued[rank].append(call)
            left = self.meeting.enter(rank, call)
            if rank in left:
                for other in left:
                    self.standing.pop(other, None)
                self.left |= set(left) - {rank}
                self._changed.notify_all()
                return
            self.standing[rank] = call
            self._check()
            while rank not in self.left and not self.hangs:
                self._changed.wait()
            if rank not in self.left:
                raise HangError(f"rank {rank} stands in {call.name or call.communicator}")
            self.left.discard(rank)

    def end(self) -> None:
        # A host has issued all that it had to.
        with self._changed:
            self.running -= 1
            self._check()

    def _check(self) -> None:
        if self.standing and len(self.standing) == self.running:
            self.hangs = dict(self.standing)
            self._changed.notify_all()


@dataclass
class HostStream(SilentStream):
    # A stream whose group calls hold the host.
    name: str
    rank: int
    hosts: Hosts

    def batch(self, transfers: Sequence[StreamMessage]) -> None:
        pairs = frozenset((self.rank, t.peer) if t.sends else (t.peer, self.rank) for t in transfers)
        self.hosts.enter(self.rank, GroupCall(self.name, pairs))

    def call(self, issue: Callable[[], Sequence[dist.Work]]) -> None:
        _here.rank, _here.hosts, _here.stream = self.rank, self.hosts, self.name
        issue()


@dataclass
class HostStreams(SilentStreams):
    # Streams of one rank. No event is waited for.
    rank: int
    hosts: Hosts
    streams: dict[str, HostStream] = field(default_factory=dict)

    def of(self, name: str) -> HostStream:
        return self.streams.setdefault(name, HostStream(name, self.rank, self.hosts))


@contextmanager
def _collectives_meet():
    # Collectives hold the host of their rank, too.
    def enter(*_: Any, group: tuple[int, ...], async_op: bool) -> None:
        assert async_op
        _here.hosts.enter(_here.rank, GroupCall(f"{_here.stream} {group}", group=group))

    calls = dict.fromkeys(("all_to_all_single", "all_gather_into_tensor", "reduce_scatter_tensor"), enter)
    stand_in = SimpleNamespace(**calls, Work=dist.Work)
    with patch.object(transport, "dist", stand_in), patch.object(Groups, "abort"):  # there is nothing to abort
        yield


def run(
    plans: Sequence[MicrobatchPlan], policy: Policy, *, safe: bool = False, connects: bool = True
) -> tuple[dict[int, GroupCall], list[list[GroupCall]]]:
    # The ranks that hang, and the group calls of every rank, where all ranks bind plans and run a
    # forward and a backward of each, one after the other.
    #
    # `connects`: binding connects what is new.
    size = plans[0].num_ranks
    hosts = Hosts(size)
    errors: list[Exception] = []

    def host(rank: int) -> None:
        try:
            _run_rank(rank, plans, policy, hosts, safe=safe)
        except HangError:
            pass
        except Exception as error:  # shown by the test's thread
            errors.append(error)
        finally:
            hosts.end()

    with _collectives_meet(), nullcontext() if connects else patch.object(binding, "connect"):
        threads = [Thread(target=host, args=(rank,), daemon=True) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]
    return hosts.hangs, hosts.issued


def _run_rank(rank: int, plans: Sequence[MicrobatchPlan], policy: Policy, hosts: Hosts, *, safe: bool) -> None:
    size, per_node = plans[0].num_ranks, plans[0].ranks_per_node
    members = [tuple(range(size)), *(tuple(range(a, a + per_node)) for a in range(0, size, per_node))]
    own = {group: cast("Any", group) for group in members if is_collective(group, size, per_node) and rank in group}
    everyone = tuple(range(size))
    streams: Any = HostStreams(rank, hosts)
    groups = Groups(rank, size, everyone, None, own, streams=streams, safe=safe)
    for plan in plans:
        shape = AttentionShape(plan.num_heads, plan.num_kv_heads, 4)
        bound = bind(plan, rank, shape, groups=groups, policy=policy, kernel="plain", mover="plain")
        bound = replace(bound, kernel=ShapeKernel())
        q, k, v = (torch.empty(bound.num_tokens, h, 4) for h in (plan.num_heads, plan.num_kv_heads, plan.num_kv_heads))
        out, lse, received = run_forward(bound, q, (k, v), 1.0)
        run_backward(bound, torch.empty_like(out), (q, k, v), (out, lse), received, 1.0)
