"""Protocol of transports, which carry the exchanges of one run of a phase."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor

from megatron_balance.runtime.counters import PhaseTraffic
from megatron_balance.runtime.lower.steps import ExchangeStep
from megatron_balance.runtime.lower.views import Block

Parcel = tuple[int, Tensor]
"""(pool rank of the peer, contiguous tensor)."""


class Transport(Protocol):
    """One run of a phase.

    `traffic`: bytes that it moved so far; `ahead`: how many exchanges are expected before they are
    due.
    """

    traffic: PhaseTraffic
    ahead: int

    def expect(
        self, exchange: ExchangeStep, receives: Sequence[Parcel] | Block, arriving: Mapping[int, Tensor]
    ) -> None:
        """Say where the tensors of an exchange that begins later go: a block, if that is one on both
        sides.

        `arriving`: by peer whose messages are routed, the memory for all that comes from it; these
        peers are not in `receives`.
        """
        ...

    def start(self, exchange: ExchangeStep, sends: Sequence[Parcel] | Block) -> None:
        """Begin an exchange that was expected."""
        ...

    def launched(self) -> None:
        """Note that the host issued a launch: what an exchange has to issue behind it may follow."""
        ...

    def attended(self) -> None:
        """Note that the host issued the last launch of the call."""
        ...

    def arrived(self, exchange: ExchangeStep) -> None:
        """Wait for the tensors of an exchange: whatever is issued next finds them."""
        ...

    def end(self) -> None:
        """Wait for the end of every exchange, and of relaying where that takes this rank's threads.

        Raises:
            RuntimeError: a piece could not be relayed.
        """
        ...

    def fail(self) -> None:
        """Abort after an error: unblock peers that wait for this rank.

        Raises:
            RuntimeError: the error behind it, if that was met in relaying.
        """
        ...
