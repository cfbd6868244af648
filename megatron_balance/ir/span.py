"""Half-open token intervals: the one way this package talks about tokens of a sequence."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """Tokens [start, stop) of one sequence, in that sequence's own positions (also used for heads)."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop:
            raise ValueError(f"empty or negative span [{self.start}, {self.stop})")

    def __len__(self) -> int:
        return self.stop - self.start

    def __str__(self) -> str:
        return f"[{self.start}:{self.stop})"

    def split(self, parts: int) -> list[Span]:
        """Cut into at most `parts` nearly equal spans (sizes differ by at most one; empty ones are
        left out).
        """
        cuts = [self.start + len(self) * i // parts for i in range(parts + 1)]
        return [Span(a, b) for a, b in zip(cuts, cuts[1:], strict=False) if a < b]


def tiles(spans: Iterable[Span], whole: Span) -> bool:
    """True if `spans` cover `whole` exactly once, with no gap and no overlap."""
    ordered = sorted(spans)
    ends = [whole.start, *(s.stop for s in ordered)]
    starts = [*(s.start for s in ordered), whole.stop]
    return ends == starts
