"""Every wait, event and order within a stream of a recorded rank, left out in turn: is it needed.

Three answers, and each thing left out has one of them:

- found: the check of races (`races`) finds two accesses that nothing orders any more.
- implied: every two launches that were ordered still are, by the others.
- idle: some launches are no longer ordered, and no two of them touch the same bytes, one of them
  writing.

The last two are worked out without the check: which launches are no longer ordered from all clocks,
and what touches the same bytes by comparing every access with every other, where the check looks at
the last ones only. `verdicts` says where the two disagree: a thing left out that is needed and not
found, or found and not needed. A launch that runs beside what its stream had before it may also be
the first to touch memory that the device's allocator lent it: that is handed out again in the order
of its stream, so this order is needed though no byte shows it (`lent`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from tools.gpu_model.races import Clocks, Recorded
from tools.gpu_model.trace import Extent

Verdict: TypeAlias = Literal["found", "implied", "idle", "lent"]
What: TypeAlias = Literal["wait", "event", "order"]
Bools: TypeAlias = npt.NDArray[np.bool_]


@dataclass(slots=True)
class Counts:
    """Things left out by verdict, and those whose verdict the check of races does not share.

    Attributes:
        by: of each kind of thing, its verdicts.
        wrong: kind and number of those that are needed and not found, or the other way round.
    """

    by: dict[What, dict[Verdict, int]] = field(default_factory=dict)
    wrong: list[tuple[What, int]] = field(default_factory=list)

    def note(self, what: What, number: int, verdict: Verdict, *, found: bool) -> None:
        of = self.by.setdefault(what, dict.fromkeys(("found", "implied", "idle", "lent"), 0))
        of[verdict] += 1
        if found != (verdict == "found"):
            self.wrong.append((what, number))

    def __add__(self, other: Counts) -> Counts:
        total = Counts(wrong=self.wrong + other.wrong)
        for counts in (self, other):
            for what, verdicts in counts.by.items():
                of = total.by.setdefault(what, dict.fromkeys(("found", "implied", "idle", "lent"), 0))
                for verdict, count in verdicts.items():
                    of[verdict] += count
        return total

    def __str__(self) -> str:
        parts = [
            f"of {sum(verdicts.values())} {what}s " + ", ".join(f"{count} {name}" for name, count in verdicts.items())
            for what, verdicts in self.by.items()
        ]
        return "; ".join([*parts, f"{len(self.wrong)} that the check judges otherwise"])


def verdicts(recorded: Recorded) -> Counts:
    """Leave out every wait, event and order of a trace in turn."""
    counts, conflicts, clocks = Counts(), Conflicts(recorded), recorded.clocks()
    for index in recorded.waits:
        without = recorded.clocks(without=index)
        counts.note("wait", index, conflicts.verdict(clocks, without), found=not recorded.is_safe(without))
    for event in recorded.waited_for:
        without = recorded.clocks(no_event=event)
        counts.note("event", event, conflicts.verdict(clocks, without), found=not recorded.is_safe(without))
    for index in recorded.launches:
        counts.note("order", index, conflicts.verdict_of_order(clocks, index), found=recorded.is_found_unchained(index))
    return counts


class Conflicts:
    """All launches of a trace that touch the same bytes, one of them writing: each with each.

    `of` [ops, ops]: whether the earlier and the later do so; also where the later is memory let go.
    """

    def __init__(self, recorded: Recorded) -> None:
        self.recorded = recorded
        ops = recorded.trace.ops
        self.runs = np.array([op.what in ("launch", "free") for op in ops], dtype=np.bool_)
        self.of = np.zeros((len(ops), len(ops)), dtype=np.bool_)
        self.first: list[list[Extent]] = [[] for _ in ops]  # extents that no launch touched before
        self._note_all()
        self.streams = [
            np.flatnonzero((recorded.stream_of == number) & self.runs) for number in range(len(recorded.streams))
        ]
        self.lent = self._lent()

    def _note_all(self) -> None:
        held = _Accesses()
        for index, op in enumerate(self.recorded.trace.ops):
            if op.what == "free":
                for extent in op.writes:
                    before, _ = held.meeting(extent)
                    streams = [self.recorded.trace.ops[at].stream for at in before.tolist()]
                    kept = [at for at, stream in zip(before.tolist(), streams, strict=True) if stream not in op.spared]
                    self.of[kept, index] = True
                    held.forget(extent)
                continue
            for extents, writes in ((op.reads, False), (op.writes, True)):
                for extent in extents:
                    before, wrote = held.meeting(extent)
                    self.of[before if writes else before[wrote], index] = True
                    if not len(before):
                        self.first[index].append(extent)
            for extents, writes in ((op.reads, False), (op.writes, True)):
                for extent in extents:
                    held.add(extent, index, writes)
        np.fill_diagonal(self.of, val=False)

    def _lent(self) -> Bools:
        """Launches that are the first to touch memory which is let go later: the allocator's."""
        let_go = [
            (index, extent)
            for index, op in enumerate(self.recorded.trace.ops)
            for extent in op.writes
            if op.what == "free"
        ]
        found = np.zeros(len(self.first), dtype=np.bool_)
        for index, extents in enumerate(self.first):
            found[index] = any(
                at > index and start <= a and b <= stop for a, b in extents for at, (start, stop) in let_go
            )
        return found

    def lost(self, clocks: Clocks, without: Clocks) -> Iterator[tuple[int, npt.NDArray[np.int64]]]:
        """Launches that are ordered behind fewer others: each with those others."""
        for later in np.flatnonzero((clocks != without).any(axis=1) & self.runs).tolist():
            for number, of in enumerate(self.streams):
                chosen = of[(of >= without[later, number]) & (of < clocks[later, number]) & (of != later)]
                if len(chosen):
                    yield later, chosen

    def verdict(self, clocks: Clocks, without: Clocks) -> Verdict:
        """The verdict on what makes `clocks` those `without` it."""
        answer: Verdict = "implied"
        for later, earlier in self.lost(clocks, without):
            if self.of[earlier, later].any():
                return "found"
            answer = "idle"
        return answer

    def verdict_of_order(self, clocks: Clocks, index: int) -> Verdict:
        """The verdict on a launch that runs beside what its stream had before it: it then waits for
        nothing at all.
        """
        if self.of[:, index].any():
            return "found"
        before = any(len(of[(of < clocks[index, number]) & (of != index)]) for number, of in enumerate(self.streams))
        if not before:
            return "implied"
        return "lent" if self.lent[index] else "idle"


class _Accesses:
    """Accesses so far: extents, launches, and whether they write."""

    def __init__(self) -> None:
        self.rows = np.empty((1024, 4), dtype=np.int64)
        self.count = 0

    def add(self, extent: Extent, index: int, writes: bool) -> None:
        if self.count == len(self.rows):
            self.rows = np.concatenate([self.rows, np.empty_like(self.rows)])
        self.rows[self.count] = *extent, index, writes
        self.count += 1

    def meeting(self, extent: Extent) -> tuple[npt.NDArray[np.int64], Bools]:
        """Launches that touched some of these bytes, and whether each wrote them."""
        rows = self.rows[: self.count]
        met = rows[(rows[:, 0] < extent[1]) & (rows[:, 1] > extent[0])]
        return met[:, 2], met[:, 3].astype(np.bool_)

    def forget(self, extent: Extent) -> None:
        """Drop accesses of memory that is let go."""
        rows = self.rows[: self.count]
        kept = rows[(rows[:, 0] >= extent[1]) | (rows[:, 1] <= extent[0])]
        self.rows[: len(kept)] = kept
        self.count = len(kept)
