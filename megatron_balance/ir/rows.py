"""An immutable table of integers: how ops and layouts hold many regions without one Python object
per region.

A plan for 1,024 ranks has a million regions; a frozen dataclass for each would take seconds. A
`Rows` is one `bytes` object of row-major int64, hashable and comparable, that NumPy reads without a
copy (`numpy.frombuffer(rows.data, "<i8")`) and the standard library reads through
`memoryview.cast`.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

assert sys.byteorder == "little", "plans are exchanged as little-endian int64"


@dataclass(frozen=True, slots=True)
class Rows:
    """`len(self)` rows of `width` int64 each."""

    width: int
    data: bytes = b""

    @classmethod
    def of(cls, width: int, rows: Iterable[Sequence[int]]) -> Rows:
        """Rows from Python sequences, each of length `width`."""
        flat = array("q")
        for row in rows:
            if len(row) != width:
                raise ValueError(f"row {tuple(row)} has {len(row)} columns, expected {width}")
            flat.extend(row)
        return cls(width, flat.tobytes())

    def __len__(self) -> int:
        return len(self.data) // (8 * self.width)

    def __bool__(self) -> bool:
        return bool(self.data)

    def __repr__(self) -> str:
        shown = [row for row, _ in zip(self, range(8), strict=False)]
        more = f", ... {len(self) - 8} more" if len(self) > 8 else ""
        return f"Rows({self.width}, [{', '.join(map(str, shown))}{more}])"

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        flat = memoryview(self.data).cast("q")
        for i in range(0, len(flat), self.width):
            yield tuple(flat[i : i + self.width])
