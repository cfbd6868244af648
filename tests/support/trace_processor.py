"""Perfetto's own trace processor: opens a trace and says what it holds, and what it complained of."""

import csv
import shutil
import subprocess
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.trace_reader import Read, ns, track_of

NAMES = ("trace_processor_shell", "trace_processor")

NOT_FOUND = (
    f"no trace processor of Perfetto on PATH ({', '.join(NAMES)}); CONTRIBUTING.md says where it is downloaded from"
)

# Process, thread, beginning and duration in nanoseconds, name.
Slice = tuple[int, int, int, int, str]

_ALL = """
WITH spans AS (
  SELECT slice.id, pid, tid, ts, dur, slice.name AS name, process.name AS process, thread.name AS track,
    slice.arg_set_id
  FROM slice JOIN thread_track ON track_id = thread_track.id
  JOIN thread USING (utid) JOIN process USING (upid)
)
SELECT 'count' AS kind, COUNT(*) AS a, '' AS b, '' AS c, '' AS d, '' AS e, '' AS f, '' AS g, '' AS h FROM slice
UNION ALL SELECT 'span', id, pid, tid, ts, dur, name, process, track FROM spans
UNION ALL SELECT 'arg', spans.id, args.key, COALESCE(string_value, int_value), '', '', '', '', ''
  FROM spans JOIN args USING (arg_set_id)
UNION ALL SELECT 'flow', slice_out, slice_in, '', '', '', '', '', '' FROM flow
UNION ALL SELECT 'counter', pid, process_counter_track.name, ts, CAST(value AS INT), '', '', '', ''
  FROM counter JOIN process_counter_track ON track_id = process_counter_track.id JOIN process USING (upid)
UNION ALL SELECT 'complaint', name, value, '', '', '', '', '', '' FROM stats
  WHERE value > 0 AND (severity IN ('error', 'data_loss') OR name GLOB 'flow_*')
"""


@dataclass
class Opened:
    """A trace as the processor has it, if it opened it. `refused`: what it said if it did not;
    `complaints`: events that it could not place as they stand, by its name for what was wrong.
    """

    refused: str = ""
    complaints: dict[str, int] = field(default_factory=dict[str, int])
    slices: dict[Slice, dict[str, str]] = field(default_factory=dict[Slice, dict[str, str]])
    flows: list[tuple[Slice, Slice]] = field(default_factory=list[tuple[Slice, Slice]])
    processes: dict[int, str] = field(default_factory=dict[int, str])
    tracks: dict[tuple[int, int], str] = field(default_factory=dict[tuple[int, int], str])
    counters: dict[tuple[int, str], list[tuple[int, int]]] = field(default_factory=dict)

    @property
    def sound(self) -> bool:
        """Whether it was opened without a complaint."""
        return not self.refused and not self.complaints


def find() -> str | None:
    """The program, where there is one."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


def open_trace(trace: Path, scratch: Path) -> Opened:
    """Open a trace with the processor. `scratch`: a folder for the query."""
    program = find()
    assert program is not None, NOT_FOUND
    query = scratch / "query.sql"
    query.write_text(_ALL, encoding="utf-8")
    run = subprocess.run(
        [program, "-q", str(query), str(trace)], capture_output=True, text=True, check=False, timeout=300
    )
    if run.returncode:
        assert "Trace loaded" not in run.stderr, f"the query failed: {run.stderr}"
        return Opened(refused=run.stderr)
    rows: defaultdict[str, list[list[str]]] = defaultdict(list)
    for kind, *row in csv.reader(run.stdout.splitlines()):
        rows[kind].append(row)
    by_id: dict[str, Slice] = {}
    opened = Opened(complaints={name: int(value) for name, value, *_ in rows["complaint"]})
    for number, pid, tid, ts, dur, name, process, track in rows["span"]:
        by_id[number] = (int(pid), int(tid), int(ts), int(dur), name)
        opened.slices[by_id[number]] = {}
        opened.processes[int(pid)], opened.tracks[int(pid), int(tid)] = process, track
    for number, key, value, *_ in rows["arg"]:
        opened.slices[by_id[number]][key.removeprefix("args.")] = value
    elsewhere = int(rows["count"][0][0]) - len(opened.slices)
    if elsewhere:
        opened.complaints["spans beside their track, or of one name, time and track"] = elsewhere
    opened.flows = [(by_id[start], by_id[end]) for start, end, *_ in rows["flow"] if start in by_id and end in by_id]
    for pid, name, ts, value, *_ in rows["counter"]:
        opened.counters.setdefault((int(pid), name), []).append((int(ts), int(value)))
    for levels in opened.counters.values():
        levels.sort()
    return opened


def check(trace: Path, found: Read, scratch: Path) -> None:
    """The processor has of a trace what our reader has, where there is a processor."""
    if find() is not None:
        assert_the_same(open_trace(trace, scratch), found)


def assert_the_same(opened: Opened, found: Read) -> None:
    """The processor has of a trace what our reader has of it."""
    assert opened.sound, (opened.refused, opened.complaints)
    assert sorted(opened.slices) == sorted(key_of(span) for span in found.spans)
    assert sorted(opened.flows) == sorted((key_of(start), key_of(end)) for start, end in found.arrows)
    assert opened.processes == {pid: found.processes[pid] for pid in {span["pid"] for span in found.spans}}
    assert opened.tracks == {track: found.tracks[track] for track in map(track_of, found.spans)}
    assert opened.counters == {
        (pid, f"{name} {series}"): [(ns(at), value) for at, value in levels]
        for (pid, name, series), levels in found.counters.items()
    }
    for span in found.spans:
        assert opened.slices[key_of(span)] == flat(span["args"]), span


def key_of(span: dict[str, Any]) -> Slice:
    """A span as the processor has it."""
    return *track_of(span), ns(span["ts"]), ns(span["dur"]), span["name"]


def flat(args: dict[str, Any]) -> dict[str, str]:
    """Arguments as the processor names them: `sent.3`, `peers[0]`."""
    found: dict[str, str] = {}
    for name, value in args.items():
        if isinstance(value, dict):
            found |= {f"{name}.{key}": str(each) for key, each in value.items()}
        elif isinstance(value, list):
            found |= {f"{name}[{index}]": str(each) for index, each in enumerate(value)}
        else:
            found[name] = str(value)
    return found
