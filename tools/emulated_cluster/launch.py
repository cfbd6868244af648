"""Ranks forked after one import, each in its namespace; watched until all have ended or one has
failed.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn

from megatron_balance.errors import BalanceError
from tools.emulated_cluster import linux
from tools.emulated_cluster.cluster import EmulatedCluster
from tools.emulated_cluster.linux import ClusterError
from tools.emulated_cluster.sandbox import in_sandbox
from tools.emulated_cluster.topology import NicBytes, Topology

LOOK_S = 0.02  # between two looks at what has ended
GRACE_S = 2.0  # for the others to fail by themselves, and say why, once one rank has
STACKS_S = 1.0  # for ranks that passed the deadline to write where they stand
TAIL_LINES = 20

_SMALL = Topology(num_nodes=1, ranks_per_node=2, nics_per_node=1, nic_bits_per_s=1_000_000, intra_bits_per_s=8_000_000)
"""With a shared NIC and shaped fast links: every kind of device, queue and setting is in it."""


class RankError(BalanceError):
    """A rank failed, died or did not end in time, and the job with it; names the rank and shows its
    last lines.
    """

    def __init__(self, message: str, rank: int = -1) -> None:
        super().__init__(message)
        self.rank = rank


class Controller:
    """The launcher, seen from a rank. Its answers come at once: put barriers around a request where
    ranks must agree on the moment.
    """

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def nic_bytes(self) -> tuple[NicBytes, ...]:
        """The counters of every NIC, by node and NIC; what ranks have received by now has been
        counted.
        """
        return self._ask("nic_bytes")

    def reshape(self, nic_bits_per_s: int, intra_bits_per_s: int | None) -> None:
        """Set the rates of all links; `None`: intra-node links as fast as memory allows.

        Raises:
            BalanceError: a rate that no link has.
        """
        self._ask("reshape", nic_bits_per_s, intra_bits_per_s)

    def disturb(self, node: int, nic: int, bits_per_s: int, queue_bytes: int) -> None:
        """Slow what one NIC sends, or have it lose packets (`EmulatedCluster.disturb`)."""
        self._ask("disturb", node, nic, bits_per_s, queue_bytes)

    def dropped(self, node: int, nic: int) -> int:
        return self._ask("dropped", node, nic)

    def _ask(self, name: str, *arguments: Any) -> Any:
        self._pipe.send((name, arguments))
        answer = self._pipe.recv()
        if isinstance(answer, BalanceError):
            raise answer
        return answer


Target = Callable[[int, Controller], Any]
"""Called as `target(rank, controller)` in every rank's process and namespace, with torchrun's
environment; what it returns is pickled.
"""


@dataclass(frozen=True)
class Result:
    """A job whose ranks have all ended well.

    Attributes: seconds: From the first rank's start to the last one's end; set-up and tear-down of
        the cluster are not in it. nic_bytes: What every NIC carried in the job, by node and NIC.
        values: What `target` returned, by rank. logs: The folder with each rank's output,
        `rank<n>.log`.
    """

    seconds: float
    nic_bytes: tuple[NicBytes, ...]
    values: tuple[Any, ...]
    logs: Path

    def log(self, rank: int) -> str:
        """All that a rank wrote to its standard output and error."""
        return _log(self.logs, rank).read_text(errors="replace")


def run(
    where: Topology | EmulatedCluster,
    target: Target,
    logs: Path,
    *,
    deadline_s: float = 3600.0,
    show: int | None = None,
    may_schedule: bool = False,
) -> Result:
    """Run `target` on every rank of a cluster; of nothing it started is anything left when this
    returns or raises.

    The ranks are forks of this process: import what they need before, and start no threads (run no
    parallel torch operation) until then.

    Args:
        where: a topology to be built for this job alone, or a standing cluster.
        target: `target(rank, controller)`.
        logs: folder for the ranks' output.
        deadline_s: what the job may take.
        show: the rank whose output is copied to this process's standard output as it comes.
        may_schedule: ranks keep the right, if this process has it, to raise their priority and to
            reserve time of a core; else they have no capability at all.

    Raises:
        RankError: a rank failed or died, or the deadline passed.
        ClusterError: the cluster could not be built.
    """
    logs.mkdir(parents=True, exist_ok=True)
    for old in logs.glob("rank*.log"):
        old.unlink()
    if isinstance(where, EmulatedCluster):
        ranks = _Ranks(where, logs, may_schedule=may_schedule)
        return in_sandbox(lambda: _run(ranks, target, deadline_s, show), own_network=False)

    def alone() -> Result:
        with EmulatedCluster(where, "job") as cluster:
            return _run(_Ranks(cluster, logs, may_schedule=may_schedule), target, deadline_s, show)

    return in_sandbox(alone)


def _run(ranks: _Ranks, target: Target, deadline_s: float, show: int | None) -> Result:
    cluster, logs = ranks.cluster, ranks.logs
    before = cluster.nic_bytes()
    start = time.monotonic()
    ranks.start(target)
    _watch(ranks, start + deadline_s, None if show is None else _Copy(_log(logs, show)))
    seconds = time.monotonic() - start
    carried = tuple(
        NicBytes(a.node, a.nic, b.sent - a.sent, b.received - a.received)
        for a, b in zip(before, cluster.nic_bytes(), strict=True)
    )
    return Result(seconds, carried, tuple(ranks.values.get(rank) for rank in range(cluster.topology.world_size)), logs)


class _Ranks:
    """The processes of a job, their pipes, and how they ended. `self.codes`: exit codes by rank,
    negative if killed by that signal.
    """

    def __init__(self, cluster: EmulatedCluster, logs: Path, *, may_schedule: bool) -> None:
        self.cluster = cluster
        self.logs = logs
        self.may_schedule = may_schedule
        self.start_s = 0.0
        self.pids: dict[int, int] = {}
        self.pipes: dict[Connection, int] = {}
        self.codes: dict[int, int] = {}
        self.values: dict[int, Any] = {}

    @property
    def running(self) -> list[int]:
        return [rank for rank in range(self.cluster.topology.world_size) if rank not in self.codes]

    def start(self, target: Target) -> None:
        self.start_s = time.monotonic()
        for rank in range(self.cluster.topology.world_size):
            ours, theirs = multiprocessing.Pipe()
            pid = os.fork()
            if pid == 0:
                self._be_rank(rank, target, theirs)
            theirs.close()
            self.pids[pid] = rank
            self.pipes[ours] = rank

    def _be_rank(self, rank: int, target: Target, pipe: Connection) -> NoReturn:
        """In a rank's process: its output, namespace and environment, then the target."""
        code = 1
        try:
            _redirect(_log(self.logs, rank))
            faulthandler.register(signal.SIGUSR1, all_threads=True)
            self.cluster.enter(rank)
            linux.drop_capabilities(may_schedule=self.may_schedule)  # a rank needs none of what built the cluster
            os.environ.update(self.cluster.topology.environment(rank))
            pipe.send(("value", (target(rank, Controller(pipe)),)))
            code = 0
        except SystemExit as end:
            code = _exit_code(end)
        except BaseException:  # a forked rank must not return into its parent's code
            traceback.print_exc()
        finally:
            with contextlib.suppress(OSError, ValueError):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    def serve(self, timeout_s: float) -> None:
        """Answer what ranks ask, for at most this long."""
        if not self.pipes:
            time.sleep(timeout_s)
        for pipe in wait(list(self.pipes), timeout_s):
            assert isinstance(pipe, Connection)
            try:
                name, arguments = pipe.recv()
            except (EOFError, ConnectionError):
                del self.pipes[pipe]
                pipe.close()
                continue
            if name == "value":
                self.values[self.pipes[pipe]] = arguments[0]
            else:
                _reply(pipe, self._answer(name, arguments))

    def _answer(self, name: str, arguments: tuple[Any, ...]) -> Any:
        try:
            asked: dict[str, Callable[..., Any]] = {
                "nic_bytes": self.cluster.nic_bytes,
                "reshape": self.cluster.reshape,
                "disturb": self.cluster.disturb,
                "dropped": self.cluster.dropped,
            }
            return asked[name](*arguments)
        except BalanceError as error:
            return error

    def reap(self) -> list[int]:
        """Ranks found to have failed since the last look, those killed by a signal first: the
        others of one look fail because of them.
        """
        failed: list[int] = []
        for pid, status in _ended():
            rank = self.pids.get(pid)
            if rank is not None:  # else something that a rank left behind; process 1 inherits it
                self.codes[rank] = os.waitstatus_to_exitcode(status)
                if self.codes[rank]:
                    failed.append(rank)
        return sorted(failed, key=lambda rank: (self.codes[rank] > 0, rank))

    def signal(self, number: signal.Signals) -> None:
        for pid, rank in self.pids.items():
            if rank not in self.codes:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)


def _watch(ranks: _Ranks, deadline: float, copy: _Copy | None) -> None:
    """Returns once every rank has ended well.

    Raises:
        RankError: one has not, or the deadline passed; no rank runs any more.
    """
    culprit: int | None = None
    ended_s = 0.0
    while ranks.running:
        ranks.serve(LOOK_S)
        if copy is not None:
            copy.go_on()
        failed = ranks.reap()
        if failed and culprit is None:
            culprit, ended_s = failed[0], time.monotonic() - ranks.start_s
            deadline = min(deadline, time.monotonic() + GRACE_S)
        if ranks.running and time.monotonic() > deadline:
            break
    late = ranks.running
    if late and culprit is None:
        ranks.signal(signal.SIGUSR1)  # faulthandler writes the stacks, see `_be_rank`
        time.sleep(STACKS_S)
    ranks.signal(signal.SIGKILL)
    if copy is not None:
        copy.go_on()
    if culprit is not None:
        raise RankError(_failure(ranks, culprit, ended_s, late), culprit)
    if late:
        raise RankError(_overdue(ranks, late), late[0])
    ranks.serve(0.0)


def _failure(ranks: _Ranks, rank: int, ended_s: float, late: list[int]) -> str:
    code = ranks.codes[rank]
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"failed with exit code {code}"
    others = f"; {_plural(late)} still running {GRACE_S:g} s later and ended" if late else ""
    return f"{_place(ranks, rank)} {how} after {ended_s:.1f} s, and the job with it{others}. {_tail(ranks, rank)}"


def _overdue(ranks: _Ranks, late: list[int]) -> str:
    passed_s = time.monotonic() - ranks.start_s
    return (
        f"the deadline passed after {passed_s:.0f} s: {_plural(late)} still running and ended; first "
        f"{_place(ranks, late[0])}. " + _tail(ranks, late[0])
    )


def _plural(ranks: list[int]) -> str:
    return f"rank {ranks[0]} was" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} were"


def _place(ranks: _Ranks, rank: int) -> str:
    topology = ranks.cluster.topology
    return f"rank {rank} (node {topology.node(rank)}, local rank {topology.local_rank(rank)})"


def _tail(ranks: _Ranks, rank: int) -> str:
    file = _log(ranks.logs, rank)
    lines = file.read_text(errors="replace").splitlines() if file.exists() else []
    if not lines:
        return f"It wrote nothing to its log, {file}"
    return "\n".join([f"Last lines of its log, {file}:", *(f"    {line}" for line in lines[-TAIL_LINES:])])


def _log(logs: Path, rank: int) -> Path:
    return logs / f"rank{rank}.log"


def _reply(pipe: Connection, answer: Any) -> None:
    # a rank that died while it waited is found by `reap`
    with contextlib.suppress(ConnectionError):
        pipe.send(answer)


def _ended() -> list[tuple[int, int]]:
    """(process, status) of every child that has ended since the last call."""
    found: list[tuple[int, int]] = []
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            found.append((pid, status))
    return found


class _Copy:
    """A growing log, copied to standard output."""

    def __init__(self, log: Path) -> None:
        log.touch()
        self._log = log.open("rb")

    def go_on(self) -> None:
        """Copy what has come since the last call."""
        new = self._log.read()
        while new:
            new = new[os.write(1, new) :]


def _redirect(log: Path) -> None:
    """Standard output and error to the log, and no input; also for what writes to the descriptors."""
    empty = os.open(os.devnull, os.O_RDONLY)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for source, to in ((empty, 0), (file, 1), (file, 2)):
        os.dup2(source, to)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)


def _exit_code(end: SystemExit) -> int:
    if end.code is None:
        return 0
    if isinstance(end.code, int):
        return end.code & 0xFF
    sys.stderr.write(f"{end.code}\n")
    return 1


def check() -> str | None:
    """Why no emulated cluster can be built here, found by building a small one; None if one can."""

    def build() -> None:
        with EmulatedCluster(_SMALL, "check"):
            pass

    try:
        in_sandbox(build)
    except ClusterError as error:
        return str(error)
    return None
