"""Where a rank's host spent its time in attention calls, counted where its calls block it.

On gloo the host computes, and blocks until a transfer is there. On NCCL it issues launches and
transfers and waits for nothing, so what it counts there says nothing of its GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, field

SEVERAL = -1
"""Source of what a collective brings: all its ranks together."""


@dataclass(slots=True)
class HostTimes:
    """Seconds since `clear`.

    Attributes:
        attended_s: in launches, with the gathering of their operands.
        waited_s: by pool rank that the transfer came from (the proxy, of a routed one), or
            `SEVERAL`: blocked until it was there.
    """

    attended_s: float = 0.0
    waited_s: dict[int, float] = field(default_factory=dict[int, float])

    def waited_for(self, source: int, seconds: float) -> None:
        """Count one wait."""
        self.waited_s[source] = self.waited_s.get(source, 0.0) + seconds

    def clear(self) -> None:
        """Begin anew."""
        self.attended_s = 0.0
        self.waited_s.clear()
