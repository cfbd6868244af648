"""Things that a rank's calls share: process groups, made once by all ranks; threads; a queue."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from enum import IntEnum
from queue import SimpleQueue
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist

from megatron_balance.errors import ConfigError
from megatron_balance.runtime.cuda import CudaStreams, Streams, has_high_priority
from megatron_balance.runtime.pool import BufferPool

SEVERAL = -1  # source of what a collective brings: all its ranks together


@dataclass(slots=True)
class HostTimes:
    """Where a rank's host spent its time in attention calls, in seconds since `clear`."""

    # On gloo the host computes, and blocks until a transfer is there. On NCCL it issues launches and
    # transfers and waits for nothing, so what it counts there says nothing of its GPU.
    attended_s: float = 0.0
    waited_s: dict[int, float] = field(default_factory=dict[int, float])

    def waited_for(self, source: int, seconds: float) -> None:
        self.waited_s[source] = self.waited_s.get(source, 0.0) + seconds

    def clear(self) -> None:
        self.attended_s = 0.0
        self.waited_s.clear()


class _Workers:
    """Daemon threads that stay, as many as were ever needed at once."""

    # Starting one for every attention call would cost more than the call's own Python. A
    # `ThreadPoolExecutor` would wait at the end for one that hangs; these are daemons.

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[Future[None], Callable[[], None]]] = SimpleQueue()
        self._num_threads = 0
        self._under_way: list[Future[None]] = []  # those that may not have ended

    def run(self, calls: Sequence[Callable[[], None]]) -> list[Future[None]]:
        """Begin all calls at once, whatever earlier ones still do. A call catches its own errors."""
        begun = [Future[None]() for _ in calls]
        self._under_way = [*(each for each in self._under_way if not each.done()), *begun]
        while self._num_threads < len(self._under_way):
            Thread(target=self._work, name="proxy", daemon=True).start()
            self._num_threads += 1
        for each in zip(begun, calls, strict=True):
            self._queue.put(each)
        return begun

    def _work(self) -> None:
        while True:
            future, call = self._queue.get()
            try:
                call()
            finally:
                future.set_result(None)


class Behind(IntEnum):
    """Where a batch is issued."""

    NOTHING = 0  # at once, if no other batch is before it
    LAUNCH = 1  # behind the next launch
    LAUNCHES = 2  # behind the last launch of its call; earlier if another batch would have to wait for it


class IssueQueue:
    """Batches of all runs of a rank that are not issued yet, first in, first out."""

    # With CUDA_DEVICE_MAX_CONNECTIONS=1, which Megatron asks for with TP or CP before Blackwell,
    # all launches of a process go to the device through one queue: a batch at its head that waits
    # for another stream holds back every kernel behind it. So a batch that waits for an earlier leg
    # is issued behind the attention launch that it travels beside; and a receive that holds
    # multiprocessors until its sender has computed is issued behind the last launch. Batches never
    # pass one another, so the order in which two ranks issue what they share stays the program's
    # (`compile.order`).

    def __init__(self) -> None:
        self._waiting: deque[tuple[object, Behind, Callable[[], None]]] = deque()

    def put(self, key: object, issue: Callable[[], None], behind: Behind = Behind.NOTHING) -> None:
        """Issue a batch, now or later. `key`: what it belongs to, compared by identity."""
        if behind != Behind.LAUNCHES and any(entry[1] == Behind.LAUNCHES for entry in self._waiting):
            self.flush()
        if behind == Behind.NOTHING and not self._waiting:
            issue()
        else:
            self._waiting.append((key, behind, issue))

    def launched(self) -> None:
        """Issue what was to come behind a launch."""
        while self._waiting and self._waiting[0][1] != Behind.LAUNCHES:
            self._waiting.popleft()[2]()

    def attended(self) -> None:
        """Issue what was to come behind the last launch of a call."""
        while any(entry[1] == Behind.LAUNCHES for entry in self._waiting):
            self._waiting.popleft()[2]()

    def through(self, key: object) -> None:
        """Issue everything up to the last batch of `key`."""
        for _ in range(max((at + 1 for at, entry in enumerate(self._waiting) if entry[0] is key), default=0)):
            self._waiting.popleft()[2]()

    def flush(self) -> None:
        """Issue everything."""
        while self._waiting:
            self._waiting.popleft()[2]()

    def forget(self) -> None:
        """Issue nothing any more of what waits: after an error."""
        self._waiting.clear()


@dataclass(frozen=True, slots=True, eq=False)
class Groups:
    """One rank's view of its pool."""

    # In the pool, as plans count; of each pool rank `ranks` has the global one.
    rank: int
    size: int
    ranks: tuple[int, ...]
    pool: dist.ProcessGroup | None
    # Process groups by pool ranks. The executor runs a collective among exactly such a set, and
    # point-to-point transfers otherwise.
    by_ranks: dict[tuple[int, ...], dist.ProcessGroup] = field(default_factory=dict)
    workers: _Workers = field(default_factory=_Workers)
    # None on gloo, whose transfers are calls of `workers`.
    streams: Streams | None = None
    buffers: BufferPool = field(default_factory=BufferPool)
    issues: IssueQueue = field(default_factory=IssueQueue)
    # Exchanges are issued one after the other in the order of their ids (`communication: safe`).
    safe: bool = False
    # Links whose connection is open: (stream, pool rank that sends on it, and that receives).
    connected: set[tuple[str, int, int]] = field(default_factory=set)
    host_times: HostTimes = field(default_factory=HostTimes)
    # What collective calls run in, by what they are, in words (`training.roll_call.RollCall.of_pool`).
    inside: Callable[[str], AbstractContextManager[object]] = nullcontext

    def of(self, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        """The group of exactly these pool ranks, or None."""
        return self.by_ranks.get(ranks)

    @property
    def timeout(self) -> timedelta:
        """The pool's timeout as it is now (gloo)."""
        # Point-to-point waits keep to the one that the group was made with unless told, and Megatron
        # sets another after the first step.
        if self.pool is None:
            return timedelta.max
        backend: Any = self.pool._get_backend(torch.device("cpu"))
        return backend.options._timeout

    def process_groups(self) -> list[dist.ProcessGroup]:
        """All groups that this rank is in, those of its streams included."""
        own = [*([] if self.pool is None else [self.pool]), *self.by_ranks.values()]
        of_streams = self.streams.groups if isinstance(self.streams, CudaStreams) else ()
        return list(dict.fromkeys([*own, *of_streams]))

    def abort(self) -> None:
        """Abort the communicators (NCCL): what was issued ends, at the peers with an error."""
        # All in one NCCL group: one by one they could wait for one another
        # (pytorch/pytorch#119797).
        groups = self.process_groups()
        if not groups:
            return
        nccl: Any = groups[0]._get_backend(torch.device("cuda"))
        nccl._group_start()
        for group in groups:
            group.abort()
        nccl._group_end()


def single() -> Groups:
    """A pool of one rank: nothing to communicate, no process group needed."""
    return Groups(0, 1, (0,), None)


def make_groups(
    pools: Sequence[Sequence[int]],
    ranks_per_node: int = 0,
    *,
    timeout: timedelta | None = None,
    backend: str | None = None,
    sms: Mapping[str, int] | None = None,
    safe: bool = False,
) -> Groups:
    """Make the groups of the pool that this process belongs to, of `pools` by global ranks. Every
    process calls it with the same arguments: all groups are created by all processes in one order.

    Beside the pool, each of its nodes gets a group where there are several of as many ranks, so
    that zones on whole nodes can use collectives (`ranks_per_node` 0: not known, none). On NCCL
    each stream of transfers has a communicator (`stream_groups`). `timeout`, `backend`: default
    torch's and the world's. `sms`: the most multiprocessors of a GPU that a communicator of the
    links "inter_node" or "intra_node" may take. `safe`: as in `Groups`. ConfigError: this process
    is in no pool or in two.
    """
    me, nccl = dist.get_rank(), (backend or dist.get_backend()) == "nccl"
    mine = [tuple(pool) for pool in pools if me in pool]
    if len(mine) != 1:
        raise ConfigError(f"rank {me} is in {len(mine)} pools, expected exactly one of {[list(p) for p in pools]}")
    by_ranks: dict[tuple[int, ...], dist.ProcessGroup] = {}
    for pool in pools:
        for members in _wanted(len(pool), ranks_per_node):
            crosses = len(members) == len(pool) and not _on_one_node(len(pool), ranks_per_node)
            options = _nccl_options("inter_node" if crosses else "intra_node", sms or {}, timeout) if nccl else None
            group = dist.new_group([pool[i] for i in members], timeout=timeout, backend=backend, pg_options=options)
            if isinstance(group, dist.ProcessGroup) and tuple(pool) == mine[0] and pool.index(me) in members:
                by_ranks[members] = group
    pool = mine[0]
    whole = by_ranks.get(tuple(range(len(pool))))
    streams = None
    if nccl:
        # First use makes the communicator: not inside the first step.
        for members in sorted(by_ranks, key=len, reverse=True):
            dist.all_reduce(torch.zeros(1, device="cuda"), group=by_ranks[members])
        streams = _make_streams(pools, pool, ranks_per_node, timeout, sms or {})
    return Groups(pool.index(me), len(pool), pool, whole, by_ranks, streams=streams, safe=safe)


def _nccl_options(stream: str, sms: Mapping[str, int], timeout: timedelta | None = None) -> Any:
    """NCCL's options for a communicator of `stream`, whose kernels have the priority of ours."""
    inter_node = stream.startswith("inter_node")
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=has_high_priority(stream))
    limit = sms.get("inter_node" if inter_node else "intra_node")
    if limit is not None:
        options.config.max_ctas = limit
    if timeout is not None:
        options._timeout = timeout  # torch takes the group's, and warns where the options have another
    return options


def _on_one_node(size: int, ranks_per_node: int) -> bool:
    return 0 < size <= ranks_per_node


def _make_streams(
    pools: Sequence[Sequence[int]],
    mine: tuple[int, ...],
    ranks_per_node: int,
    timeout: timedelta | None,
    sms: Mapping[str, int],
) -> CudaStreams | None:
    groups: dict[str, dist.ProcessGroup] = {}
    for pool in pools:
        for name, members in stream_groups(len(pool), ranks_per_node):
            ranks, options = [pool[i] for i in members], _nccl_options(name, sms, timeout)
            group = dist.new_group(ranks, timeout=timeout, backend="nccl", pg_options=options)
            if isinstance(group, dist.ProcessGroup) and tuple(pool) == mine and dist.get_rank() in ranks:
                groups[name] = group
    for group in groups.values():
        dist.all_reduce(torch.zeros(1, device="cuda"), group=group)
    return CudaStreams(groups, mine) if groups else None


def stream_groups(size: int, ranks_per_node: int) -> list[tuple[str, tuple[int, ...]]]:
    """(stream, pool ranks) of every communicator of a pool's streams, in the order of their making.
    `ranks_per_node` 0: not known; the communicators are the pool's.
    """
    # A stream whose transfers stay inside a node has one for each node: in one communicator NCCL
    # gives every pair of ranks the channels of its worst pair. Across nodes those are a NIC's, and
    # fewer the more ranks there are, so that NVLink would go with them.
    nodes = [tuple(range(a, min(a + ranks_per_node, size))) for a in range(0, size, ranks_per_node or size)]
    return [
        (name, members)
        for name in stream_names(size, ranks_per_node)
        for members in (nodes if not name.startswith("inter_node") and ranks_per_node else [tuple(range(size))])
        if len(members) > 1
    ]


def stream_names(size: int, ranks_per_node: int) -> list[str]:
    """The streams (`compile.order.stream_name`) that a pool can need. `ranks_per_node` 0: unknown."""
    if size < 2:
        return []
    if _on_one_node(size, ranks_per_node):
        links = ["intra_node"]
    elif ranks_per_node == 1:
        links = ["inter_node"]
    else:
        links = ["inter_node", "intra_node", "dispatch", "combine"]
    return [link + moved for link in links for moved in ("", " moved")]


def _wanted(size: int, ranks_per_node: int) -> list[tuple[int, ...]]:
    whole = [tuple(range(size))] if size > 1 else []
    if 1 < ranks_per_node < size and size % ranks_per_node == 0:
        return whole + [tuple(range(a, a + ranks_per_node)) for a in range(0, size, ranks_per_node)]
    return whole
