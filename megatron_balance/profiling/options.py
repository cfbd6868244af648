"""Options of a profile: grids and samples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ProfileOptions:
    """Points to measure.

    Tokens of the attention grid and of the layer, bytes of packing and messages; `repeats`: samples
    of a figure.
    """

    q_tokens: tuple[int, ...] = (32, 128, 512, 1024, 2048, 4096)
    k_tokens: tuple[int, ...] = (32, 128, 512, 2048, 8192)
    before_tokens: tuple[int, ...] = (0, 128, 512, 2048, 8192)
    layer_tokens: tuple[int, ...] = (128, 512, 2048, 4096)
    pack_bytes: tuple[int, ...] = (1 << 14, 1 << 18, 1 << 22, 1 << 24)
    message_bytes: tuple[int, ...] = (1 << 10, 1 << 14, 1 << 18, 1 << 20, 1 << 22, 1 << 23)
    repeats: int = 7
    kernel: str = "auto"


QUICK = ProfileOptions(
    q_tokens=(32, 128, 512, 1024),
    k_tokens=(32, 256, 2048),
    before_tokens=(0, 256, 2048),
    layer_tokens=(128, 512, 1024),
    pack_bytes=(1 << 14, 1 << 20, 1 << 23),
    message_bytes=(1 << 10, 1 << 16, 1 << 20, 1 << 22),
    repeats=5,
)
"""A few seconds on a laptop for a small model: enough to plan with.

Too coarse to judge two planners within a few percent."""

Progress = Callable[[Iterable[Callable[[], None]], int, str], Iterator[Callable[[], None]]]
"""Wraps the points to measure: (points, how many, what they are) -> the same points."""
