"""One process of those that share a folder goes first; needs neither ranks nor torch.distributed."""

import fcntl
import logging
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, sleep
from typing import TextIO

log = logging.getLogger(__name__)
_LOCK = "megatron-balance.lock"
WAIT_S = 300.0


@contextmanager
def first_of_node(folder: Path, wait_s: float = WAIT_S) -> Generator[None]:
    """Let one process go first, to compile what the others then find in the folder. They go on
    together when it leaves or ends, however it ends, or after `wait_s` seconds.
    """
    # The lock is the system's, which frees that of a process that died.
    try:
        folder.mkdir(parents=True, exist_ok=True)
        stream = (folder / _LOCK).open("a")
    except OSError as error:
        log.warning("%s cannot be written, so every process compiles for itself: %s", folder, error)
        yield
        return
    with stream:
        if not _locked(stream, fcntl.LOCK_EX):
            log.info("another process of this machine compiles; waiting for what it puts into %s", folder)
            begin = monotonic()
            while not _locked(stream, fcntl.LOCK_SH):
                if monotonic() - begin > wait_s:
                    log.warning("the process that compiles has not ended after %.0f s; compiling here, too", wait_s)
                    break
                sleep(0.05)
        yield


def _locked(stream: TextIO, kind: int) -> bool:
    try:
        fcntl.flock(stream, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        log.warning("no locks in %s, so every process compiles for itself: %s", stream.name, error)
    return True
