"""Published results: a paper has tables, a table is a function that gives rows, a row is one number
beside ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias, TypeVar

from megatron_balance.errors import ConfigError, suggest

T = TypeVar("T")
Kind: TypeAlias = Literal["exact", "simulated", "measured"]
"""exact: follows from printed numbers and closed forms, or from a plan; simulated: on the
simulator's clocks; measured: on a machine.
"""

Sign: TypeAlias = Literal["=", "<=", ">="]


class Published(float):
    """A number that a paper prints; a constant of a module, so that tests can change all of them and
    see which of ours move.
    """

    __slots__ = ()


def published(*numbers: float) -> tuple[Published, ...]:
    """Numbers that a paper prints, in one row of a table."""
    return tuple(map(Published, numbers))


STATED = Published(1.0)
"""A ratio that a text states without a number: alike, ahead or behind."""

ITSELF = "this number"
"""Input of a row whose own published number was used to make ours: there is nothing to compare."""


@dataclass(frozen=True, slots=True)
class Row:
    """One number.

    `published` is what the paper prints, None where it only draws; `sign`: printed as this, at
    most, or at least this.

    `inputs`: what of the paper's numbers ours is made from, beside the case itself (model, GPUs,
    lengths, tolerances); empty: all of ours is computed. `note`: context that a reader needs to
    compare the two.
    """

    name: str
    published: Published | None
    ours: float
    unit: str
    kind: Kind
    sign: Sign = "="
    note: str = ""
    inputs: tuple[str, ...] = ()

    @property
    def ratio(self) -> float | None:
        """Ours over published; None where one was made from the other."""
        return self.ours / self.published if self.published and ITSELF not in self.inputs else None

    @property
    def remark(self) -> str:
        """The note, and what was taken from the paper."""
        taken = f"taken from the paper: {', '.join(self.inputs)}" if self.inputs else ""
        return "; ".join(filter(None, (self.note, taken)))


class Progress(Protocol):
    """A progress bar around a loop."""

    def __call__(self, items: Sequence[T], what: str, /) -> Iterable[T]:
        """`items`, one after another."""
        ...


def silent(items: Sequence[T], what: str, /) -> Iterable[T]:  # noqa: ARG001  the shape of `Progress`
    """No progress shown."""
    return items


@dataclass(frozen=True, slots=True)
class Effort:
    """Amount of simulation: `batches` drawn for each number."""

    batches: int
    progress: Progress = silent


@dataclass(frozen=True, slots=True)
class PaperTable:
    """A table or figure of a paper.

    `rows` computes it; `batches`: how many are drawn for each number unless the user says
    otherwise.
    """

    title: str
    rows: Callable[[Effort], list[Row]]
    batches: int = 1


@dataclass(frozen=True, slots=True)
class Paper:
    """A paper. `tables` by the name that the command line takes, in the order of the paper."""

    title: str
    tables: Mapping[str, PaperTable]

    def chosen(self, name: str, table: str | None) -> dict[str, PaperTable]:
        """One table of the paper `name`, or all.

        Raises:
            ConfigError: there is no such table.
        """
        if table is None:
            return dict(self.tables)
        return {table: of_name(self.tables, table, f"{name} has no table")}


def of_name(known: Mapping[str, T], name: str, missing: str) -> T:
    """The entry of a mapping by its name.

    Raises:
        ConfigError: no such name; the message has the closest one, or all.
    """
    if name not in known:
        hint = suggest(name, known) or f"there are {', '.join(known)}"
        raise ConfigError(f"{missing} {name!r}; {hint}")
    return known[name]
