"""Cases by number, and the record of what became of them.

A suite is a function from the number of a case to its outcome, so a run can be ended at any time
and go on, and a fault can be tried again by its number.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

MOST_NAMED = 20
"""Faults that a line of the record tells in words; it counts all."""


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
    seconds: float = 0.0
    slowest: tuple[float, int] = (0.0, -1)

    def add(self, line: dict[str, Any]) -> None:
        self.tried += line["after"] - line["first"]
        self.kinds.update(line["kinds"])
        self.faults += line["faults"]
        self.seconds += line["seconds"]
        self.slowest = max(self.slowest, (line["slowest"][0], line["slowest"][1]))


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
    """The file that a suite's lines are in."""
    return folder / f"{suite}.jsonl"


def read(path: Path) -> Tally:
    """Read what a record says; a line that a kill cut short is as if its cases were not tried."""
    tally = Tally()
    if path.is_file():
        for line in path.read_text().splitlines():
            try:
                tally.add(json.loads(line))
            except ValueError:
                continue
    return tally


def run(suite: Suite, count: int, folder: Path) -> Tally:
    """Try cases until `count` have been tried over all runs with this folder."""
    path = record_of(suite.name, folder)
    folder.mkdir(parents=True, exist_ok=True)
    tally = read(path)
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
