"""What carries the exchanges of one run of a phase: threads on gloo, streams on CUDA."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor

from megatron_balance.runtime.counters import Traffic
from megatron_balance.runtime.lower.steps import ExchangeStep

Parcel = tuple[int, Tensor]
"""(pool rank of the peer, contiguous tensor)."""


class Transport(Protocol):
    """One run of a phase. `traffic`: what it moved so far; `ahead`: how many exchanges are expected before they are due."""

    traffic: Traffic
    ahead: int

    def expect(self, exchange: ExchangeStep, receives: Sequence[Parcel], arriving: Mapping[int, Tensor]) -> None:
        """Where the tensors of an exchange that begins later go. `arriving`: by peer whose messages are routed, the memory for all that
        comes from it; these peers are not in `receives`.
        """
        ...

    def start(self, exchange: ExchangeStep, sends: Sequence[Parcel]) -> None:
        """Begin an exchange that was expected."""
        ...

    def arrived(self, exchange: ExchangeStep) -> None:
        """What the exchange brings is there, for whatever is issued next."""
        ...

    def end(self) -> None:
        """Every exchange has ended; what this rank passes on for others too, where that takes its threads.

        Raises RuntimeError: something could not be passed on.
        """
        ...

    def fail(self) -> None:
        """Let no one wait for this rank after an error.

        Raises RuntimeError: the error behind it, if that was met in passing something on.
        """
        ...
