"""Threads that stay and wait for the next job.

Starting one for every attention call would cost more than the call's own Python.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from queue import SimpleQueue
from threading import Event, Thread


class ThreadCall:
    """One call in a thread."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call
        self._done = Event()

    def run(self) -> None:
        try:
            self._call()
        finally:
            self._done.set()

    @property
    def ended(self) -> bool:
        return self._done.is_set()

    def wait(self, timeout_s: float | None = None) -> None:
        """Block until the call has ended, or for `timeout_s`."""
        self._done.wait(timeout_s)


class Workers:
    """Threads, as many as were ever needed at once. They end with the process."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[ThreadCall] = SimpleQueue()
        self._num_threads = 0
        self._jobs: list[ThreadCall] = []  # those that may not have ended

    def run(self, calls: Sequence[Callable[[], None]]) -> list[ThreadCall]:
        """Begin all calls at once, whatever earlier jobs still do."""
        jobs = [ThreadCall(call) for call in calls]
        self._jobs = [*(job for job in self._jobs if not job.ended), *jobs]
        while self._num_threads < len(self._jobs):
            Thread(target=self._work, name="proxy", daemon=True).start()
            self._num_threads += 1
        for job in jobs:
            self._queue.put(job)
        return jobs

    def _work(self) -> None:
        while True:
            self._queue.get().run()
