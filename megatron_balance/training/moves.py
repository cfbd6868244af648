"""A step's pull and push beside its compute: slots of layers one after the other, on a lane of their
own, in one order on all ranks.

Source: Hydraulis, arXiv 2412.07894, section 5.3: subgraphs that pull and push run on a stream of their
own, between the operators that compute.

All pulls are issued when the step begins. A push is issued when the last microbatch's backward has
left the slot's layers; ranks behind a pipeline's first stage, which waits for them, issue theirs when
their last backward is over. So any two ranks that share another communicator issue its calls and
these in the same order.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from megatron_balance.training.stopwatch import Stopwatch
from megatron_balance.training.weights import Flat, WeightExchange


@dataclass(frozen=True, slots=True)
class RoleMemory:
    """Weights and gradients of a role, and the slot of each, by number of the parameter. `first`:
    whether the rank computes on its pipeline's first stage.
    """

    weights: Flat
    gradients: Flat
    slots: Mapping[int, int]
    first: bool


class Lane:
    """Runs functions one after the other beside the caller: a stream of the device, or a thread where
    it has none. Not `beside`: at once.
    """

    def __init__(self, device: torch.device, *, beside: bool) -> None:
        """Make the stream, or the thread."""
        self.beside = beside
        self._stream: Any = torch.cuda.Stream(device) if beside and device.type == "cuda" else None
        self._thread = ThreadPoolExecutor(1, "weights") if beside and self._stream is None else None

    def issue(self, work: Callable[[], None]) -> Callable[[], None]:
        """Run `work` behind all that the caller has issued on its stream, and what was issued here.

        Returns:
            A function that makes the caller wait for it, and raises what it raised.
        """
        if not self.beside:
            work()
            return lambda: None
        if self._thread is not None:
            future: Future[None] = self._thread.submit(work)
            return future.result
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            work()
            done = torch.cuda.Event()
            done.record()
        return lambda: torch.cuda.current_stream().wait_event(done)

    def close(self) -> None:
        """Start nothing more; what runs ends by itself."""
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)


class Moves:
    """Pull and push of one step of a role; what the caller waits for them is measured."""

    def __init__(
        self, exchange: WeightExchange, role: RoleMemory, owned: Flat, lane: Lane, stopwatch: Stopwatch
    ) -> None:
        """Issue nothing yet.

        `exchange`: of the role, cut in slots or whole; `owned`: gradients of what this rank owns.
        """
        self._exchange, self._role, self._lane, self._stopwatch = exchange, role, lane, stopwatch
        self._coming: list[Callable[[], None]] = []
        self._arrived = 0
        """Slots whose weights are there."""
        self._owned = owned
        self._restore: Callable[[], None] = _nothing
        self._missing: Counter[int] | None = None
        """Gradients that are still to come, by slot; None: nobody counts them."""
        self._pushed: list[Callable[[], None]] = []

    def pull(self, owned: Flat, dtype: torch.dtype) -> None:
        """Issue all pulls. Arguments as for `WeightExchange.pull`."""
        weights = self._role.weights
        with self._stopwatch.measured("pull"):
            for slot in range(len(self._exchange.pulls)):
                work = functools.partial(self._exchange.pull_slot, slot, owned, weights, dtype)
                self._coming.append(self._lane.issue(work))

    def need(self, slot: int) -> None:
        """Wait for the weights of a slot, and of those before it."""
        if slot < self._arrived:
            return
        with self._stopwatch.measured("pull"):
            for wait in self._coming[self._arrived : slot + 1]:
                wait()
        self._arrived = slot + 1

    def expect(self, num_microbatches: int, restore: Callable[[], None]) -> None:
        """Push each slot when its gradients of so many microbatches are there.

        `restore` gives the owners' gradients their memory back, before the first push.
        """
        self._restore = restore
        if self._role.first and self._lane.beside:
            counts = Counter(self._role.slots.values())
            self._missing = Counter({slot: count * num_microbatches for slot, count in counts.items()})

    def left(self, number: int) -> None:
        """Count a gradient of one microbatch that was added to the role's: of this parameter."""
        if self._missing is None:
            return
        slot = self._role.slots[number]
        self._missing[slot] -= 1
        assert self._missing[slot] >= 0, "a gradient came behind the push of its slot"
        while self._next >= 0 and not self._missing[self._next]:
            self._issue()

    def issue_rest(self) -> None:
        """Issue the pushes that are left: no gradient is still to come."""
        self.need(len(self._coming) - 1)
        while self._next >= 0:
            self._issue()

    def finish(self) -> None:
        """Issue what is left, and wait for all of it."""
        self.issue_rest()
        with self._stopwatch.measured("push"):
            for wait in self._pushed:
                wait()

    @property
    def _next(self) -> int:
        return len(self._exchange.pushes) - 1 - len(self._pushed)

    def _issue(self) -> None:
        if not self._pushed:
            self._restore()
        work = functools.partial(self._exchange.push_slot, self._next, self._role.gradients, self._owned)
        with self._stopwatch.measured("push"):
            self._pushed.append(self._lane.issue(work))


def _nothing() -> None:
    """Do nothing."""
