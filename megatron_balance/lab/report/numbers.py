"""Numbers as people read them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))
_BYTES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def seconds(value: float) -> str:
    """Three figures and the unit that fits: '1.32 s', '21.5 ms'."""
    for size, unit in _SECONDS:
        if abs(value) >= size:
            return f"{_three(value / size)} {unit}"
    return f"{_three(value * 1e6)} us" if value else "0 s"


def size(num_bytes: float) -> str:
    """Three figures and a decimal unit: '4.23 GB'."""
    for unit_bytes, unit in _BYTES:
        if abs(num_bytes) >= unit_bytes:
            return f"{_three(num_bytes / unit_bytes)} {unit}"
    return f"{num_bytes:.0f} bytes"


def rate(bytes_per_s: float) -> str:
    """'400 Gbit/s (50 GB/s)': NICs are sold in bits."""
    return f"{_three(bytes_per_s * 8e-9)} Gbit/s ({size(bytes_per_s)}/s)"


def percent(share: float) -> str:
    """'41 %', with one decimal below ten."""
    value = 100 * share
    if 0 < value < 0.05:
        return "under 0.1 %"
    return f"{value:.1f} %" if 0 < abs(value) < 9.95 else f"{value:.0f} %"


def times(ratio: float) -> str:
    """'1.61 times'."""
    return f"{ratio:.2f} times"


def tokens(number: float) -> str:
    """'4,096'."""
    return f"{number:,.0f}"


def count(number: int, one: str, several: str | None = None) -> str:
    """'1 rank', '8 ranks'."""
    return f"{number:,} {one if number == 1 else several or one + 's'}"


def runs(ranks: Iterable[int]) -> list[tuple[int, int]]:
    """First and last of each run of neighbours."""
    bounds: list[tuple[int, int]] = []
    for rank in sorted(ranks):
        if bounds and bounds[-1][1] == rank - 1:
            bounds[-1] = bounds[-1][0], rank
        else:
            bounds.append((rank, rank))
    return bounds


def listed(parts: Sequence[str]) -> str:
    """'a', 'a and b', 'a, b and c'."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}" if parts else ""


def _three(value: float) -> str:
    """Three figures, never in powers of ten."""
    size = abs(value)
    return f"{value:,.0f}" if size >= 99.95 else f"{value:.1f}" if size >= 9.995 else f"{value:.2f}"
