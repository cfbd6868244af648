"""Find the ranks that are missing: after a collective failed, those that still run say which do not.

torch's errors name a socket, or nothing. Every rank has a thread that waits for a call in the store
through which the job's ranks found one another, and answers it, whatever its rank is busy with. A
rank that failed or is frozen does not; one that came to the end of its training has answered.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from threading import Thread
from typing import Any, TypeVar

import torch.distributed as dist

log = logging.getLogger(__name__)

NAME = "megatron_balance/roll_call"
PATIENCE_S = 3.0
"""How long answers are waited for."""
MOST_NAMED, MOST_CHARACTERS = 8, 300
"""Ranks that a sentence names, and of the reason of each."""
_POLL_S = 0.1
_FOREVER = timedelta(days=365)
T = TypeVar("T")


class RollCall:
    """This rank's part: it answers the calls of others, from the start to `close`."""

    def __init__(self) -> None:
        """Stand by, if the job has several ranks (whose process groups are made)."""
        self._thread: Thread | None = None
        self._size = dist.get_world_size() if dist.is_initialized() else 1
        if self._size > 1:
            self._store, self._rank = _store(), dist.get_rank()
            # a wait keeps its connection busy, so it has its own
            self._thread = Thread(target=_answer, args=(self._store.clone(), self._rank), daemon=True)
            self._thread.start()

    def failed(self, error: Exception) -> None:
        """Tell the others why this rank ends; or, if `error` is about another, log who is missing."""
        if self._thread is None:
            return
        self._thread = None  # it answers until the process ends
        store, size = self._store, self._size
        if _of_communication(error):
            found = _in_time(lambda: (missing(store, size), reasons(store, size)), 3 * PATIENCE_S)
            log.error("%s", in_words(*(found or (None, {})), size))
            return
        text = " ".join(str(error).split())
        reason = f"{type(error).__name__}: {text[:MOST_CHARACTERS]}"
        _in_time(lambda: store.set(_reason_of(self._rank), reason), PATIENCE_S)

    def close(self) -> None:
        """End the thread; for the others this rank has answered. Safe to call twice."""
        if self._thread is not None:
            _in_time(lambda: self._store.set(_call_of(self._rank), ""), PATIENCE_S)
            self._thread.join(PATIENCE_S)
            self._thread = None


def missing(store: Any, size: int, patience_s: float = PATIENCE_S) -> list[int] | None:
    """The ranks of `size` that did not answer within `patience_s`; None: the store itself is gone.

    `store`: of the job, a `torch.distributed.Store`.
    """
    waiting = list(range(size))
    try:
        for rank in waiting:
            store.set(_call_of(rank), "")
        deadline = time.monotonic() + patience_s
        while waiting:
            waiting = [rank for rank in waiting if not store.check([_answer_of(rank)])]
            if not waiting or time.monotonic() > deadline:
                break
            time.sleep(_POLL_S)
    except RuntimeError:
        return None
    return waiting


def reasons(store: Any, size: int) -> dict[int, str]:
    """By rank that failed by itself, why."""
    try:
        told = [rank for rank in range(size) if store.check([_reason_of(rank)])]
        return {rank: store.get(_reason_of(rank)).decode() for rank in told}
    except RuntimeError:
        return {}


def in_words(silent: list[int] | None, failed: Mapping[int, str], size: int) -> str:
    """One sentence on what `missing` and `reasons` found."""
    if silent is None:
        return "the process that holds the job's store has ended, or is frozen: rank 0, or the launcher"
    told = [f"rank {rank} failed ({reason})" for rank, reason in list(failed.items())[:MOST_NAMED]]
    silent = [rank for rank in silent if rank not in failed]
    if silent:
        some = ", ".join(map(str, silent[:MOST_NAMED]))
        more = f" and {len(silent) - MOST_NAMED} more" if len(silent) > MOST_NAMED else ""
        one = len(silent) == 1
        does = "does" if one else "do"
        told.append(f"rank{'' if one else 's'} {some}{more} of {size} {does} not answer: ended, or frozen")
    return "; ".join(told) or f"all {size} ranks still run: none of them ended or is frozen"


def _in_time(ask: Callable[[], T], patience_s: float) -> T | None:
    """The answer of `ask`; None: the store has ended, or says nothing for so long.

    A call of the store has no timeout where its process is frozen, or where another process holds
    the connections of one that ended.
    """
    answers: list[T] = []

    def asked() -> None:
        with suppress(RuntimeError):
            answers.append(ask())

    thread = Thread(target=asked, daemon=True)
    thread.start()
    thread.join(patience_s)
    return answers[0] if answers else None


def _of_communication(error: Exception) -> bool:
    """Whether an error is about what another rank did: gloo's are RuntimeErrors without a class of
    their own.
    """
    by_gloo = any(words in str(error) for words in ("gloo", "imed out", "pair closure"))
    return (type(error) is RuntimeError and by_gloo) or isinstance(error, dist.DistError)


def _answer(store: Any, rank: int) -> None:
    """In a thread: answer the call, once. Ends with the store."""
    try:
        store.wait([_call_of(rank)], _FOREVER)
        store.set(_answer_of(rank), "")
    except RuntimeError:
        log.debug("the job's store ended before a call")


def _call_of(rank: int) -> str:
    return f"{NAME}/call/{rank}"


def _answer_of(rank: int) -> str:
    return f"{NAME}/answer/{rank}"


def _reason_of(rank: int) -> str:
    return f"{NAME}/reason/{rank}"


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()  # pyright: ignore[reportPrivateUsage]
