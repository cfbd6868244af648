"""Published results: a paper has tables, a table gives rows, a row is one number beside ours.

What a paper prints stands in its YAML beside this file, with titles, sources, units and notes:
`PRINTED`. A table's code gives names and our values alone.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar

import yaml

from megatron_balance.analysis.machine import Machine
from megatron_balance.cost.analytic import AnalyticCost
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.model import Model
from megatron_balance.lab import Progress

T = TypeVar("T")
# exact: follows from printed numbers and closed forms, or from a plan; simulated: on the
# simulator's clocks; measured: on a machine.
Kind: TypeAlias = Literal["exact", "simulated", "measured"]
Sign: TypeAlias = Literal["=", "<=", ">="]


class Published(float):
    """A number that a paper prints; a type of its own, so that tests can change all of them."""

    __slots__ = ()


# Input of a row whose own published number was used to make ours: there is nothing to compare.
ITSELF = "this number"


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
    """A table of a paper; `batches`: drawn for each number unless the user says otherwise."""

    title: str
    rows: Callable[[Effort], list[Row]]
    batches: int = 1


@dataclass(frozen=True, slots=True)
class Paper:
    """A paper. `tables` by the name that the command line takes, in the order of the paper."""

    title: str
    tables: Mapping[str, PaperTable]


# What papers print


def _read(path: Path) -> dict[str, dict[str, Any]]:
    """A paper's tables, by name. `rows`: by pattern of names, what a row has; later patterns override.

    A value alone is `published`: a number, a quotient of two ("3.64 / 3.51"), or `stated`, a ratio
    of 1: alike, ahead or behind, as a text says without a number. Notes have names in `notes`.
    `cases`: what runs, as the paper's table of its configurations says, for its code to read.
    """
    found: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    notes: dict[str, str] = found.pop("notes", {})
    found.pop("common", None)  # what tables merge

    def parsed(given: Any) -> Published:
        over, _, under = str(given).partition("/")
        return Published(1.0 if over == "stated" else float(over) / float(under or 1))

    def of_row(given: Any) -> dict[str, Any]:
        keys: dict[str, Any] = {**given} if isinstance(given, dict) else {"published": given}
        if keys.get("published") is not None:
            keys["published"] = parsed(keys["published"])
        if "note" in keys:
            keys["note"] = notes.get(keys["note"], keys["note"])
        return keys

    for table in found.values():
        table["rows"] = {pattern: of_row(given) for pattern, given in table.get("rows", {}).items()}
        table["numbers"] = {name: parsed(given) for name, given in table.get("numbers", {}).items()}
        table.update(of_row(table))
    return found


# By paper and table: title, source, batches, `numbers` that ours is made from, `cases`, and rows.
PRINTED = {path.stem: _read(path) for path in sorted(Path(__file__).parent.glob("*.yaml"))}

# Of a row, where neither its table nor itself says anything.
DEFAULTS: dict[str, Any] = {"published": None, "unit": "", "kind": "simulated", "sign": "=", "note": "", "inputs": ()}

# Names of rows with our values, and what a row's note says beside the table's, or what is printed.
Ours: TypeAlias = Iterable[tuple[str, float] | tuple[str, float, str | Published]]


def number(paper: str, table: str, name: str) -> Published:
    """A printed number that something of ours is made from."""
    return PRINTED[paper][table]["numbers"][name]


def cases(paper: str, table: str) -> Any:
    """Runs of a table, in the shape that its YAML gives them."""
    return PRINTED[paper][table]["cases"]


def paper(name: str, title: str, ours: Mapping[str, Callable[[Effort], Ours]]) -> Paper:
    """The paper of this name; `ours`: by table, in the order of the paper."""
    return Paper(title, {key: table(name, key, each) for key, each in ours.items()})


def table(paper: str, name: str, ours: Callable[[Effort], Ours]) -> PaperTable:
    """The table of this name, with what the paper prints beside our values."""

    def rows(effort: Effort) -> list[Row]:
        return [_row(PRINTED[paper][name], each[0], each[1], *each[2:]) for each in ours(effort)]

    printed = PRINTED[paper][name]
    return PaperTable(printed["title"], rows, printed.get("batches", 1))


def _row(printed: Mapping[str, Any], name: str, ours: float, more: str | Published = "") -> Row:
    keys = DEFAULTS.copy()
    for given in (printed, *(given for pattern, given in printed["rows"].items() if fnmatchcase(name, pattern))):
        keys |= {key: value for key, value in given.items() if key in keys}
    if isinstance(more, Published):
        keys["published"] = more
    else:
        keys["note"] = "; ".join(filter(None, (keys["note"], more)))
    keys["inputs"] = tuple(ITSELF if each == "itself" else each for each in keys["inputs"])
    return Row(name, ours=ours, **keys)


class SimulatedCase:
    """A job on the simulator's clocks; subclasses say by `cost` on which machine, of which model."""

    @cached_property
    def cost(self) -> AnalyticCost:
        raise NotImplementedError

    @property
    def model(self) -> Model:
        return self.cost.model

    @property
    def cluster(self) -> Cluster:
        return self.cost.cluster

    @cached_property
    def machine(self) -> Machine:
        return Machine(self.cluster, self.model, self.cost)
