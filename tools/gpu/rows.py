"""The suite's report: one row a figure, measured or not, with its target where it has one."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, TypeAlias

Kind: TypeAlias = Literal["measured", "not measured"]
Device: TypeAlias = Literal["cuda", "cpu"]

NEEDS_GPU = "needs a GPU"
OUT_OF_TIME = "out of time"


@dataclass(frozen=True, slots=True)
class Target:
    """Target of a figure: `at least` or `at most` a limit, or `equal` to it."""

    sense: Literal["at least", "at most", "equal"]
    limit: float

    def met(self, value: float) -> bool:
        """A value that is no number is not."""
        match self.sense:
            case "at least":
                return value >= self.limit
            case "at most":
                return value <= self.limit
            case "equal":
                return value == self.limit

    def __str__(self) -> str:
        sign = {"at least": ">=", "at most": "<=", "equal": "="}[self.sense]
        return f"{sign} {self.limit:g}"


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the report.

    `ok`: None where there is no target, or nothing was measured for want of a GPU or of time.
    """

    name: str
    value: float | None
    unit: str
    target: str
    kind: Kind
    ok: bool | None
    note: str


@dataclass(frozen=True, slots=True)
class Figure:
    """Something a part of the suite measures.

    `speed`: it says how fast the machine is, so that on a CPU (Triton's interpreter) it is left
    out; the part is not asked for it there.
    """

    name: str
    unit: str
    target: Target | None = None
    speed: bool = False

    def measured(self, value: float, note: str = "") -> Row:
        return Row(
            self.name,
            value,
            self.unit,
            self._shown(),
            "measured",
            None if self.target is None else self.target.met(value),
            note,
        )

    def not_measured(self, why: str) -> Row:
        """Left out on purpose."""
        return Row(self.name, None, self.unit, self._shown(), "not measured", None, why)

    def failed(self, why: str) -> Row:
        """It should have been measured: a failure of the suite."""
        return Row(self.name, None, self.unit, self._shown(), "not measured", False, why)

    def _shown(self) -> str:
        return "" if self.target is None else str(self.target)


@dataclass(frozen=True, slots=True)
class Context:
    """Arguments of a part.

    `device`: what it runs on; "cpu" is for trying it out. `deadline`: until when, by
    `time.monotonic`. `prefix`: how the files begin that it may leave beside its rows, folder and
    all, such as docs/measurements/h200; None: it leaves none. `ranks`: of a part over several, of
    which `ranks_per_gpu` share a GPU. `state`: where a part leaves what later ones read.
    """

    device: Device
    deadline: float
    prefix: Path | None = None
    ranks: int = 1
    ranks_per_gpu: int = 1
    state: Path = Path()

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    @property
    def worlds(self) -> tuple[int, ...]:
        """Numbers of ranks that a part over several runs with, the smallest first."""
        return tuple(size for size in (2, 4, 8) if size <= self.ranks)

    def left_s(self) -> float:
        """Seconds that the part still has; it is ended when they are over."""
        return self.deadline - time.monotonic()


class Part(Protocol):
    """A module of this package that measures.

    It runs in a process of its own, with TRITON_INTERPRET=1 on a CPU.
    """

    FIGURES: tuple[Figure, ...]
    """All that it can measure, in the order of the report."""
    BUDGET_S: float
    """Seconds after which it is ended, its start included; where fewer are left, it has those."""

    @staticmethod
    def measure(context: Context) -> Iterator[Row]:
        """Rows as they are measured, each of one of `FIGURES`.

        A row that came before an error or the deadline counts.
        """
        ...
