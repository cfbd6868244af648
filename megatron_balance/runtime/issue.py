"""Queue of the batches that a rank has still to issue to its communication streams.

First in, first out.

With CUDA_DEVICE_MAX_CONNECTIONS=1, which Megatron asserts, all launches of a process go to the
device through one queue: a batch at its head that waits for another stream holds back every kernel
behind it. So a batch that waits for an earlier leg is issued behind the attention launch that it
travels beside, not before it; and a receive that holds multiprocessors until its sender has computed
is issued behind the last launch.

Both only move a batch towards later launches. Batches never pass one another, so the order in which
two ranks issue what they share stays the one of the program (`compile.order`), whatever each of them
launches between.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from enum import IntEnum


class Behind(IntEnum):
    """Where a batch is issued."""

    NOTHING = 0
    """At once, if no other batch is before it."""
    LAUNCH = 1
    """Behind the next launch."""
    LAUNCHES = 2
    """Behind the last launch of its call; earlier if another batch would have to wait for it."""


class IssueQueue:
    """Batches of all runs of a rank that are not issued yet.

    `eager`: issue everything at once (tests, and measurements of what waiting gains).
    """

    def __init__(self, *, eager: bool = False) -> None:
        self.eager = eager
        self._waiting: deque[tuple[object, Behind, Callable[[], None]]] = deque()

    def put(self, key: object, issue: Callable[[], None], behind: Behind = Behind.NOTHING) -> None:
        """Issue a batch, now or later. `key`: what it belongs to, compared by identity."""
        if behind != Behind.LAUNCHES and any(entry[1] == Behind.LAUNCHES for entry in self._waiting):
            self.flush()
        if self.eager or (behind == Behind.NOTHING and not self._waiting):
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
