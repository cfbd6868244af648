"""Find the ranks that are missing: after a collective failed, those that still run say which do not.

Every rank has a thread that waits for a call in the store through which the job's ranks found one
another, and answers it, whatever its rank is busy with. In plain PyTorch, where nobody tells others
what ended a rank, the thread also `watches`: a rank that ends by an exception rings all others first,
and what they wait for is broken off. An exception that somebody catches ends no rank, and nothing
happens, unless others are left waiting: in one of our calls that it left, or in one that it never
made, since it went on to the next step. (All ranks of a pool make the same calls in the same order.)

| key of the store | written by | read by |
|---|---|---|
| call/R | who looks for missing ranks, or has news | rank R's thread, once: it stays set |
| answer/R | rank R's thread | who looks for missing ranks |
| reason/R | rank R that fails, before its news; nothing in it: R came to its end | all |
| news | a rank that ends or left, the latest one | threads that watch |
| heard | threads that have seen that a rank ends | that rank, before it ends |
| rung | who calls all ranks, which the first few do | the same |
| waits/P | of pool P, a rank that waits long, the one with the fewest calls | others that wait long |
"""

import atexit
import logging
import os
import sys
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta
from functools import partial
from threading import Event, Thread
from types import TracebackType
from typing import Any, Literal, NamedTuple, TypeVar

import torch.distributed as dist

from megatron_balance.errors import RankFailedError
from megatron_balance.runtime.transport import break_off

log = logging.getLogger(__name__)
NAME = "megatron_balance/roll_call"
PATIENCE_S = 3.0  # how long answers are waited for, and a rank that left a step by an error, which may come back
MOST_NAMED, MOST_CHARACTERS = 8, 300  # ranks that a sentence names, and of the reason of each
_POLL_S, _WATCH_S = 0.1, 1.0
_MOST_CALLS = 4096
_FOREVER = timedelta(days=365)
_NEWS, _RUNG, _HEARD = f"{NAME}/news", f"{NAME}/rung", f"{NAME}/heard"
T = TypeVar("T")


class _News(NamedTuple):
    """A rank that `ends`, or `left` `pool` at call `number`, its `count`th; `over`: the store ends."""

    rank: int
    what: str
    count: int = 0
    pool: str = ""
    number: int = 0


class _PoolCalls:
    """This rank's collective calls with the ranks of a pool: how many, and the last ones in words."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self.pool = f"{zlib.crc32(str(tuple(ranks)).encode()):x}"
        self.count = 0
        self.last: deque[str] = deque(maxlen=_MOST_CALLS)

    def made(self, number: int) -> str | None:
        """The call of this number; None: not known any more, or not made yet."""
        back = self.count - number
        return self.last[-1 - back] if 0 <= back < len(self.last) else None


class RollCall:
    """This rank's part: it answers the calls of others, from the start to `close`."""

    def __init__(self, *, watches: bool = False) -> None:
        """Stand by, if the job has several ranks (whose process groups are made). `watches`: see
        the module; then an exception that ends the process is told by `sys.excepthook`.
        """
        self._thread: Thread | None = None
        self._size = dist.get_world_size() if dist.is_initialized() else 1
        self._watches = watches and self._size > 1
        self._closing = Event()
        self._since: float | None = None  # when the collective call began in which this rank is
        self._calls = _PoolCalls(())  # of the pool of that call, or of the last one
        self._left: BaseException | None = None  # the error by which this rank left one
        self._num_left = 0
        self.found = ""  # the ranks that failed, in words, once they told this one
        if self._size > 1:
            self._store, self._rank = _store(), dist.get_rank()
            # a wait keeps its connection busy, so it has its own
            self._thread = Thread(target=self._answer, args=(self._store.clone(),), daemon=True)
            self._thread.start()
        if self._watches:
            Thread(target=self._compare, args=(self._store.clone(),), daemon=True).start()
            self._process, self._hooked = os.getpid(), sys.excepthook
            sys.excepthook = self._on_exception
            atexit.register(self._at_exit)

    def failed(self, error: Exception) -> None:
        """Tell the others why this rank ends; or, if `error` is about another, log who is missing."""
        if self._thread is None:
            return
        thread, self._thread = self._thread, None  # it answers until this call or the process ends
        store, size = self._store, self._size
        if _of_communication(error):
            found = _in_time(lambda: (missing(store, size), _reasons(store, size)), 3 * PATIENCE_S)
            log.error("%s", in_words(*(found or (None, {})), size))
        elif not isinstance(error, RankFailedError):
            _in_time(lambda: self._tell(error, "ends"), PATIENCE_S)
            if self._watches:  # the store may end with this process
                _in_time(self._until_heard, PATIENCE_S)
        if self._watches:
            self._closing.set()
            thread.join(_POLL_S)

    def left(self, error: BaseException) -> None:
        """Tell the others that this rank left what they are in by an error, which may be caught."""
        if self._thread is None or not self._watches or error is self._left or isinstance(error, RankFailedError):
            return
        self._left = error
        self._num_left += 1
        _in_time(lambda: self._tell(error, "left"), PATIENCE_S)

    def of_pool(self, ranks: Sequence[int]) -> Callable[[str], AbstractContextManager[None]]:
        """The context of a pool's collective calls (global ranks); it takes the call, in words.

        There, in place of an error of communication, comes RankFailedError: the ranks that failed or
        ended, or that wait in another call.
        """
        return partial(self._inside, _PoolCalls(ranks))

    @contextmanager
    def _inside(self, calls: _PoolCalls, call: str) -> Iterator[None]:
        outer = self._since
        if outer is None:
            if self._left is not None:
                self._come_back()
            self._calls = calls
            calls.last.append(call)
            calls.count += 1
            self._since = time.monotonic()
        try:
            yield
        except Exception as error:
            if _of_communication(error):
                raise RankFailedError(self._who()) from error
            self.left(error)
            raise
        finally:
            self._since = outer

    def close(self) -> None:
        """End the thread; for the others this rank has answered. Safe to call twice."""
        self._close(lambda: _in_time(self._end, PATIENCE_S))

    def _at_exit(self) -> None:
        if os.getpid() == self._process:  # not of a fork
            with suppress(RuntimeError):
                self._close(self._end)  # no thread can be started any more

    def _close(self, end: Callable[[], None]) -> None:
        if self._watches and sys.excepthook == self._on_exception:
            sys.excepthook = self._hooked
        thread, self._thread = self._thread, None
        if thread is not None:
            self._closing.set()
            end()
            thread.join(PATIENCE_S)

    def _end(self) -> None:
        if self._watches and self._left is None:
            self._store.set(_key("reason", self._rank), "")
        self._store.set(_key("call", self._rank), "")
        if self._watches and self._rank == 0 and _news(self._store) is None:
            self._store.set(_NEWS, "0 over 0 - 0")  # who waits for the store would complain of its end
            _ring(self._store, range(self._size))

    def _on_exception(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, Exception) and os.getpid() == self._process:  # not of a fork
            self.failed(error)
        self._hooked(kind, error, trace)

    def _tell(self, error: BaseException, what: str) -> None:
        text = " ".join(str(error).split())
        self._store.set(_key("reason", self._rank), f"{type(error).__name__}: {text[:MOST_CHARACTERS]}")
        if self._watches:
            # a rank that does not come back is missed in all later calls
            self._store.set(_NEWS, f"{self._rank} {what} {self._num_left} {self._calls.pool} {sys.maxsize}")
            _ring(self._store, range(self._size))

    def _until_heard(self) -> None:
        while self._store.add(_HEARD, 0) < self._size - 1:
            time.sleep(_POLL_S)

    def _come_back(self) -> None:
        """Once more, that this rank left a call: it is in the next one now."""
        self._left, number = None, self._calls.count

        def unless_newer() -> None:
            news = _news(self._store)
            if news is not None and (news.rank, news.what) == (self._rank, "left"):
                self._store.set(_NEWS, " ".join(map(str, news._replace(number=number))))

        _in_time(unless_newer, PATIENCE_S)

    def _who(self) -> str:
        """The ranks that failed or are missing, in words; waits a while for what they say."""
        store, size = self._store, self._size

        def told() -> bool:
            news = _news(store)
            return bool(self.found) or (news is not None and news.rank != self._rank and news.what != "over")

        found = _in_time(lambda: (missing(store, size, until=told), _reasons(store, size)), 3 * PATIENCE_S)
        return self.found or in_words(*(found or (None, {})), size)

    def _answer(self, store: Any) -> None:
        """In the thread: answer the call, and watch. Ends with the store."""
        try:
            store.wait([_key("call", self._rank)], _FOREVER)
            while True:
                news = _news(store) if self._watches and not self._closing.is_set() else None
                reason = _reasons(store, self._size, [news.rank]) if news is not None and news.what != "over" else {}
                store.set(_key("answer", self._rank), "")
                if news is not None and news.what == "ends" and news.rank != self._rank:
                    store.add(_HEARD, 1)
                if not self._watches or (news is not None and self._ends_with(news, reason)):
                    return
                if self._closing.wait(_WATCH_S):
                    return
        except RuntimeError:
            log.debug("the job's store ended before a call")

    def _ends_with(self, news: _News, reason: Mapping[int, str]) -> bool:
        """Whether the watch is over with what a rank says of itself; break off what waits for it."""
        if self._thread is None or news.what == "over":  # this rank says itself why it ends
            return True
        if news.rank == self._rank:
            return False
        waits_s = 0.0 if self._since is None else time.monotonic() - self._since
        if news.what == "left":
            # Nobody is left waiting where this rank left as often, so that the error was of all ranks,
            # or came through the call that the other one left.
            stuck = self._calls.pool == news.pool and waits_s >= PATIENCE_S
            if not stuck or self._num_left >= news.count or self._calls.count > news.number:
                return False
        self._end_with(in_words([], reason, self._size))
        return True

    def _end_with(self, found: str) -> None:
        self.found = found
        log.error("%s", found)
        _break_off_all()

    def _compare(self, store: Any) -> None:
        """In a thread: while this rank waits long, look for one that waits where this one made another
        call: then both would wait for ever.
        """
        told: tuple[str, str] | None = None
        with suppress(RuntimeError):  # the store has ended
            while not self._closing.wait(_WATCH_S):
                since, calls = self._since, self._calls
                if since is None or time.monotonic() - since < PATIENCE_S:
                    if told is not None and store.get(told[0]).decode() == told[1]:
                        store.set(told[0], "")
                    told = None
                    continue
                key, mine = f"{NAME}/waits/{calls.pool}", f"{calls.count} {self._rank} {calls.last[-1]}"
                there = store.get(key).decode() if store.check([key]) else ""
                number, rank, call = there.split(maxsplit=2) if there else (calls.count + 1, -1, "")
                if calls.made(int(number)) not in (None, call) and not self.found:
                    error = RankFailedError(
                        f"rank {rank} waits in {call}, rank {self._rank} in {calls.last[-1]}: one of them went on from "
                        "an error in a step that the others did not leave, or made one call more than they"
                    )
                    self._tell(error, "ends")
                    self._end_with(str(error))
                elif int(number) > calls.count:
                    store.set(key, mine)
                    told = key, mine


def _break_off_all() -> None:
    """End all that this process waits for; with a group of another backend than gloo, the process."""
    groups: Any = dist.distributed_c10d._world.pg_map  # pyright: ignore[reportPrivateUsage]
    # A communicator of NCCL could be aborted, and what waits for it would go on with numbers that
    # never came. So a process with one is given a while to end by itself, and ends, as torch's own
    # watchdog has it.
    if not all([break_off(group) for group in list(groups)]):  # noqa: C419  each of them
        time.sleep(PATIENCE_S)
        logging.shutdown()
        sys.stderr.flush()
        os._exit(1)


def missing(
    store: Any, size: int, patience_s: float = PATIENCE_S, until: Callable[[], bool] | None = None
) -> list[int] | None:
    """Ranks that did not answer within `patience_s`, or before `until`; None: the store is gone."""
    waiting = list(range(size))
    try:
        _ring(store, waiting)
        deadline = time.monotonic() + patience_s
        while True:
            waiting = [rank for rank in waiting if not store.check([_key("answer", rank)])]
            done = not waiting and (until is None or until())
            if done or time.monotonic() > deadline:
                break
            time.sleep(_POLL_S)
    except RuntimeError:
        return None
    return waiting


def _reasons(store: Any, size: int, ranks: Sequence[int] | None = None) -> dict[int, str]:
    """By rank (of `ranks`; None: of all) that failed by itself, why; nothing: it came to its end."""
    try:
        told = [rank for rank in (range(size) if ranks is None else ranks) if store.check([_key("reason", rank)])]
        return {rank: store.get(_key("reason", rank)).decode() for rank in told}
    except RuntimeError:
        return {}


def in_words(silent: list[int] | None, failed: Mapping[int, str], size: int) -> str:
    """One sentence on what `missing` and `_reasons` found."""
    if silent is None:
        return "the process that holds the job's store has ended, or is frozen: rank 0, or the launcher"
    told = [
        f"rank {rank} failed ({reason})" if reason else f"rank {rank} came to its end before the others"
        for rank, reason in list(failed.items())[:MOST_NAMED]
    ]
    silent = [rank for rank in silent if rank not in failed]
    if silent:
        some = ", ".join(map(str, silent[:MOST_NAMED]))
        more = f" and {len(silent) - MOST_NAMED} more" if len(silent) > MOST_NAMED else ""
        one = len(silent) == 1
        does = "does" if one else "do"
        told.append(f"rank{'' if one else 's'} {some}{more} of {size} {does} not answer: ended, or frozen")
    return "; ".join(told) or f"all {size} ranks still run: none of them ended or is frozen"


def _in_time(ask: Callable[[], T], patience_s: float) -> T | None:
    """The answer of `ask`; None: the store has ended, or says nothing for so long."""
    answers: list[T] = []

    def asked() -> None:
        with suppress(RuntimeError):
            answers.append(ask())

    # A call of the store has no timeout where its process is frozen, or where another process holds
    # the connections of one that ended: so a thread asks, which may hang.
    thread = Thread(target=asked, daemon=True)
    thread.start()
    thread.join(patience_s)
    return answers[0] if answers else None


def _of_communication(error: Exception) -> bool:
    """Whether an error is about what another rank did."""
    # gloo's are RuntimeErrors without a class of their own.
    by_gloo = any(words in str(error) for words in ("gloo", "imed out", "pair closure"))
    return (type(error) is RuntimeError and by_gloo) or isinstance(error, dist.DistError)


def _ring(store: Any, ranks: Iterable[int]) -> None:
    """Call all these ranks, which need it once: not each of a thousand that fail calls a thousand."""
    if store.add(_RUNG, 1) <= MOST_NAMED:
        for rank in ranks:
            store.set(_key("call", rank), "")


def _news(store: Any) -> _News | None:
    if not store.check([_NEWS]):
        return None
    rank, what, count, pool, number = store.get(_NEWS).decode().split()
    return _News(int(rank), what, int(count), pool, int(number))


def _key(what: Literal["call", "answer", "reason"], rank: int) -> str:
    return f"{NAME}/{what}/{rank}"


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()  # pyright: ignore[reportPrivateUsage]
