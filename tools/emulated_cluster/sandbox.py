"""A function run as process 1 of new namespaces, so that nothing of it outlives it, however it
ends.

    caller -- supervisor -- process 1 -- whatever it starts

Process 1 has its own process, mount and (unless a standing cluster is used) network namespaces.
When it ends, the kernel kills all that it started and frees every network namespace it made. It
ends with its supervisor, and that with the caller (PR_SET_PDEATHSIG), by SIGKILL too.
"""

import multiprocessing
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from megatron_balance.errors import BalanceError
from tools.emulated_cluster import linux
from tools.emulated_cluster.linux import ClusterError

T = TypeVar("T")

_PERMIT = "needs root or user namespaces; in a container, the capabilities SYS_ADMIN and NET_ADMIN"


def in_sandbox(job: Callable[[], T], own_network: bool = True) -> T:
    """Result of `job()`, from a sandbox; all its processes are gone when this returns or raises.

    The sandbox is a fork of this process: call it before there are threads that `job` relies on.

    Args:
        job: its result, or the `BalanceError` it raises, is pickled.
        own_network: start with no network and no named namespaces; else with those of this process.

    Raises:
        ClusterError: the kernel refuses the namespaces, or process 1 was killed.
        BalanceError: what `job` raised.
        RuntimeError: anything else that `job` raised, with its traceback.
    """
    if not hasattr(os, "setns"):
        raise ClusterError(
            f"needs Linux and Python 3.12 or later; this is Python {sys.version.split()[0]} on {sys.platform}"
        )
    answers, theirs = multiprocessing.Pipe(duplex=False)
    sys.stdout.flush()
    sys.stderr.flush()
    caller = os.getpid()
    supervisor = os.fork()
    if supervisor == 0:
        _supervise(job, theirs, own_network, caller)
    theirs.close()
    try:
        good, answer = _received(answers)
    finally:
        os.kill(supervisor, signal.SIGTERM)  # it has nothing left to do, or we are stopping early
        os.waitpid(supervisor, 0)
        answers.close()
    if good:
        return answer
    raise answer


def _supervise(job: Callable[[], Any], answers: Connection, own_network: bool, caller: int) -> NoReturn:
    """In the first child: starts process 1, and kills it when told to end."""
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # not the caller's handler
        os.setsid()  # Ctrl-C is for the caller, which then ends this orderly
        _unshare(own_network)
        linux.die_with_parent()  # after new credentials, which clear it
        if os.getppid() == caller:
            lifeline, held = os.pipe()
            first = os.fork()
            if first == 0:
                os.close(held)
                _be_first(job, answers, own_network, lifeline)
            signal.signal(signal.SIGTERM, lambda *_: os.kill(first, signal.SIGKILL))
            answers.close()
            os.waitpid(first, 0)
    except OSError as error:
        _answer(answers, False, ClusterError(f"this machine permits no namespaces: {error.strerror} ({_PERMIT})"))
    finally:
        os._exit(0)


def _unshare(own_network: bool) -> None:
    """New namespaces; with those of a user in whose eyes it is root, if this one is not."""
    flags = os.CLONE_NEWNS | os.CLONE_NEWPID | (os.CLONE_NEWNET if own_network else 0)
    uid, gid = os.geteuid(), os.getegid()
    try:
        os.unshare(flags)
    except PermissionError:
        os.unshare(flags | os.CLONE_NEWUSER)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
        Path("/proc/self/gid_map").write_text(f"0 {gid} 1")


def _be_first(job: Callable[[], Any], answers: Connection, own_network: bool, lifeline: int) -> NoReturn:
    """In process 1: mounts, then the job."""
    try:
        # process 1 ignores what it does not handle; SIGKILL ends it
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        linux.die_with_parent()
        if not _ended(lifeline):  # else the supervisor was gone before we asked to die with it
            outcome = _outcome(job, own_network)
            sys.stdout.flush()  # the caller ends us as soon as it has the answer
            _answer(answers, *outcome)
    except BaseException:  # a forked process must not return into its parent's code
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _outcome(job: Callable[[], Any], own_network: bool) -> tuple[bool, Any]:
    try:
        _mount(own_network)
    except OSError as error:
        return False, ClusterError(
            f"this machine permits no mounts in a namespace: {error.filename}: {error.strerror} ({_PERMIT})"
        )
    try:
        return True, job()
    except BalanceError as error:
        return False, error
    except Exception:
        return False, RuntimeError(f"the emulated cluster's process 1 failed:\n{traceback.format_exc()}")


def _mount(own_network: bool) -> None:
    linux.make_mounts_private()
    linux.mount("proc", Path("/proc"))
    if own_network:
        # Over the host's named namespaces, so that tags never clash; over all of /run where nobody
        # has made that folder yet.
        linux.mount("tmpfs", linux.NAMESPACES if linux.NAMESPACES.is_dir() else linux.NAMESPACES.parent)


def _ended(lifeline: int) -> bool:
    """Whether the other end of a pipe on which nothing is ever written has been closed."""
    os.set_blocking(lifeline, False)
    try:
        return os.read(lifeline, 1) == b""
    except BlockingIOError:
        return False


def _received(answers: Connection) -> tuple[bool, Any]:
    try:
        return pickle.loads(answers.recv_bytes())
    except EOFError:
        return False, ClusterError("the emulated cluster's process 1 was killed, and all ranks with it")


def _answer(answers: Connection, good: bool, value: Any) -> None:
    answers.send_bytes(pickle.dumps((good, value)))
