"""A rank's compute thread as a device of fixed speed: a reservation of the kernel's deadline
scheduler.

Eight ranks on two cores share them, so a rank that waits makes the others faster, and imbalance
costs nothing. A reservation gives each compute thread so much of a core in every period, no more
however idle the rest is, and no less however busy. Transfers are other threads' work and are not
held back; nor is what a host does between two steps. Attention is computed as before, only at that
speed.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from megatron_balance.errors import ConfigError

SHARE = 0.2
"""Of a core, for each compute thread, if nothing else is asked for. Faster ranks need rates that
emulated links do not keep.
"""
ALL_SHARES = 0.8
"""Of all cores, for all compute threads together; transfers need the rest."""
PERIOD_NS = 5_000_000

_SYS_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}
_SCHED_DEADLINE = 6
_RESET_ON_FORK = 1
_ATTRIBUTES = struct.Struct("=IIQiIQQQ")
_TRANSFERS_NICE = -10
_STAT = Path("/proc/stat")
_PATIENCE_S = 20.0  # for reservations of threads that have just ended


def share_of_core(wanted: float, num_ranks: int) -> float:
    """Share of a core that each of `num_ranks` ranks gets here, if each wants `share`."""
    return min(wanted, ALL_SHARES * len(os.sched_getaffinity(0)) / num_ranks)


def reserve(share: float) -> bool:
    """Run this thread at `share` of a core; False if not permitted. Threads that it makes are
    ordinary ones.

    Raises:
        ConfigError: the cores are promised to others.
    """
    assert threading.get_native_id() == os.getpid(), "a process's first thread computes"
    number = _SYS_SCHED_SETATTR.get(os.uname().machine)
    if sys.platform != "linux" or number is None:
        return False
    runtime = round(share * PERIOD_NS)
    wanted = _ATTRIBUTES.pack(_ATTRIBUTES.size, _SCHED_DEADLINE, _RESET_ON_FORK, 0, 0, runtime, PERIOD_NS, PERIOD_NS)
    call = ctypes.CDLL(None, use_errno=True).syscall
    until = time.monotonic() + _PATIENCE_S
    while call(number, 0, wanted, 0):
        if ctypes.get_errno() != errno.EBUSY:
            return False
        if time.monotonic() > until:
            raise ConfigError(
                f"{share:g} of a core for each rank is more than the deadline scheduler has left; is another "
                "benchmark running? "
                "Wait for it, or ask for less by --core-share"
            )
        time.sleep(0.02)
    return True


def release() -> None:
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


class Used(NamedTuple):
    """Seconds of cores used so far: by this process, and by all programs of this machine."""

    own_s: float
    machine_s: float

    @staticmethod
    def now() -> Used:
        """Of the machine also what its host took from it; work of the network is no program's."""
        user, nice, system, _idle, _io, _irq, _network, stolen, *_ = map(int, _STAT.read_text().split(maxsplit=9)[1:9])
        machine_s = (user + nice + system + stolen) / os.sysconf("SC_CLK_TCK")
        return Used(time.process_time(), machine_s)


def prefer_transfers() -> None:
    """Run all other threads of this process before those of other jobs, where that is permitted."""
    for task in Path("/proc/self/task").iterdir():
        if int(task.name) != os.getpid():
            with suppress(OSError):  # a thread that has ended meanwhile, or no right to
                os.setpriority(os.PRIO_PROCESS, int(task.name), _TRANSFERS_NICE)
