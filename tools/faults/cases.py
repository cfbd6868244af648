"""Cases by number, and the record of what became of them.

A suite is a function from the number of a case to its outcome, so a run can be ended at any time
and go on, and a fault can be tried again by its number.

A record is lines of JSON: cases [first, after), or faults tried again and found mended. What earlier
runs found is kept in `KEPT`, which is committed; a run goes on behind it, and the lines of a record
that it holds already count once.
"""

import json
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

KEPT = Path(__file__).parents[2] / "docs" / "measurements" / "faults.json"
"""By suite: one line for all cases of earlier runs, wherever they ran."""


class Outcome(NamedTuple):
    """How a case ended: `kind`, a few words to count by; `fault`: what is wrong, empty: nothing."""

    kind: str
    fault: str = ""


@dataclass(frozen=True)
class Suite:
    """One thing that is tried. `wanted`: how many cases a whole run has; `step`: after how many a line
    of the record is written. `open`: once a run, in a context; `try_one`: one case.
    """

    name: str
    tries: str
    wanted: int
    step: int
    open: Callable[[], Any]


@dataclass
class Tally:
    """Cases of a suite so far."""

    tried: int = 0
    kinds: Counter[str] = field(default_factory=Counter[str])
    faults: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    mended: list[int] = field(default_factory=list[int])
    seconds: float = 0.0
    slowest: tuple[float, int] = (0.0, -1)

    def add(self, line: dict[str, Any]) -> None:
        """Count a line: its cases if it begins where the last ended, and what it found mended."""
        mended = [number for number in line.get("mended", []) if number not in self.mended]
        if line["first"] == self.tried < line["after"]:
            self.tried = line["after"]
            self.kinds.update(line["kinds"])
            self.faults += line["faults"]
            self.seconds += line["seconds"]
            self.slowest = max(self.slowest, (line["slowest"][0], line["slowest"][1]))
        self.mended += mended
        self.faults = [fault for fault in self.faults if fault["number"] not in mended]

    def line(self) -> dict[str, Any]:
        """All of it as one line, as `add` takes it."""
        return {
            "first": 0,
            "after": self.tried,
            "kinds": dict(sorted(self.kinds.items())),
            "faults": self.faults,
            "mended": self.mended,
            "seconds": round(self.seconds, 3),
            "slowest": self.slowest,
        }


class SlowError(Exception):
    """A case that took more processor time than it may."""


@contextmanager
def within(cpu_s: float) -> Iterator[None]:
    """Raise `SlowError` inside the block once it has taken `cpu_s` of processor time."""

    def ended(*_: object) -> None:
        raise SlowError(f"more than {cpu_s:g} CPU seconds")

    before = signal.signal(signal.SIGPROF, ended)
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def record_of(suite: str, folder: Path) -> Path:
    return folder / f"{suite}.jsonl"


def read(suite: str, folder: Path) -> Tally:
    """Read what is kept of earlier runs and what the record in `folder` adds.

    A line that a kill cut short is as if its cases were not tried.
    """
    tally = Tally()
    kept = json.loads(KEPT.read_text()) if KEPT.is_file() else {}
    if suite in kept:
        tally.add(kept[suite])
    path = record_of(suite, folder)
    if path.is_file():
        for line in path.read_text().splitlines():
            try:
                tally.add(json.loads(line))
            except ValueError:
                continue
    return tally


def run(suite: Suite, count: int, folder: Path) -> Tally:
    """Try cases until `count` have been tried over all runs with this folder."""
    path = _record(suite, folder)
    tally = read(suite.name, folder)
    with suite.open() as try_one, path.open("a") as stream:
        while tally.tried < count:
            first = tally.tried
            after = min(count, (first // suite.step + 1) * suite.step)
            line = _try(try_one, first, after)
            tally.add(line)
            stream.write(json.dumps(line) + "\n")
            stream.flush()
            sys.stderr.write(f"{suite.name}: {tally.tried} of {count}, {len(tally.faults)} faults\n")
    return tally


def again(suite: Suite, folder: Path) -> Tally:
    """Try the cases again that were faults, and note those that are none any more."""
    path, tally = _record(suite, folder), read(suite.name, folder)
    numbers = [fault["number"] for fault in tally.faults]
    with suite.open() as try_one, path.open("a") as stream:
        mended = [number for number in numbers if not try_one(number).fault]
        line = {"first": tally.tried, "after": tally.tried, "mended": mended}
        tally.add(line)
        stream.write(json.dumps(line) + "\n")
    return tally


def keep(suites: Iterable[str], folder: Path) -> None:
    """Write what all runs so far found, earlier ones and that of `folder`, into `KEPT`."""
    tallies = {name: read(name, folder) for name in suites}
    lines = {name: tally.line() for name, tally in tallies.items() if tally.tried}
    KEPT.write_text(json.dumps(lines, indent=1) + "\n")


def _record(suite: Suite, folder: Path) -> Path:
    """The suite's record, to be written to: a line that a kill cut short is ended."""
    folder.mkdir(parents=True, exist_ok=True)
    path = record_of(suite.name, folder)
    if path.is_file() and not path.read_bytes().endswith(b"\n"):
        with path.open("a") as stream:
            stream.write("\n")
    return path


def _try(try_one: Callable[[int], Outcome], first: int, after: int) -> dict[str, Any]:
    kinds, faults = Counter[str](), list[dict[str, Any]]()
    begin, slowest = time.monotonic(), (0.0, first)
    for number in range(first, after):
        start = time.monotonic()
        outcome = try_one(number)
        slowest = max(slowest, (round(time.monotonic() - start, 3), number))
        kinds[outcome.kind] += 1
        if outcome.fault:
            faults.append({"number": number, "kind": outcome.kind, "fault": outcome.fault[:500]})
    return {
        "first": first,
        "after": after,
        "kinds": dict(kinds),
        "faults": faults,
        "seconds": round(time.monotonic() - begin, 3),
        "slowest": slowest,
    }
