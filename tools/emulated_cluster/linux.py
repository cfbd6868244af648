"""System calls that Python has no function for, and work done inside a network namespace."""

import ctypes
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_balance.errors import BalanceError

NAMESPACES = Path("/run/netns")
"""Where iproute2 keeps named network namespaces."""

_PR_SET_PDEATHSIG = 1
_PR_CAPBSET_DROP = 24
_PR_SET_NO_NEW_PRIVS = 38
_CAPABILITY_VERSION_3 = 0x20080522
_CAP_SYS_NICE = 23
_MS_REC = 1 << 14
_MS_PRIVATE = 1 << 18

_libc = ctypes.CDLL(None, use_errno=True)


class ClusterError(BalanceError):
    """The cluster cannot be built, found or shaped; the message says what refused and what would be
    right.
    """


def die_with_parent() -> None:
    """Kill this process when its parent ends, however it ends."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, "PR_SET_PDEATHSIG")


def drop_capabilities(*, may_schedule: bool = False) -> None:
    """Give up every capability of this process for good: no program that it starts gains one, whatever
    user it is, and none can be had by a set-user-ID program. `may_schedule`: the process itself keeps
    the one to raise its priority and to reserve time of a core, if it has it.
    """
    _prctl(_PR_SET_NO_NEW_PRIVS, 1, "PR_SET_NO_NEW_PRIVS")
    last = int(Path("/proc/sys/kernel/cap_last_cap").read_text())
    for capability in range(last + 1):
        _prctl(_PR_CAPBSET_DROP, capability, "PR_CAPBSET_DROP")
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)  # this thread
    kept = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable, twice 32 bits each
    if may_schedule:
        if _libc.capget(header, kept):
            raise OSError(ctypes.get_errno(), "capget")
        kept[:] = [word & (1 << _CAP_SYS_NICE) if at < 2 else 0 for at, word in enumerate(kept)]
    if _libc.capset(header, kept):
        raise OSError(ctypes.get_errno(), "capset")


def _prctl(option: int, value: int, name: str) -> None:
    if _libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({name})")


def make_mounts_private() -> None:
    """From here on no mount of this mount namespace is seen outside it."""
    _mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE)


def mount(kind: str, target: Path) -> None:
    _mount(kind.encode(), os.fsencode(target), kind.encode(), 0)


def _mount(source: bytes, target: bytes, kind: bytes | None, flags: int) -> None:
    if _libc.mount(source, target, kind, ctypes.c_ulong(flags), None):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), os.fsdecode(target))


def enter(namespace: str) -> None:
    """Move this thread into a named network namespace; threads it starts later are there too.

    Raises:
        ClusterError: there is none, or this process may not enter it.
    """
    try:
        file = os.open(NAMESPACES / namespace, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.setns(file, os.CLONE_NEWNET)
        finally:
            os.close(file)
    except OSError as error:
        raise ClusterError(f"network namespace {namespace}: {error.strerror}") from error


@contextmanager
def entered(namespace: str) -> Iterator[None]:
    """This thread, and the programs it starts, inside a named network namespace; back where it was
    afterwards.
    """
    before = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        enter(namespace)
        try:
            yield
        finally:
            os.setns(before, os.CLONE_NEWNET)
    finally:
        os.close(before)
