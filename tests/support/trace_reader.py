"""A reader of Chrome's trace events that takes a file as Perfetto's trace processor (v58.2) does."""

# It refuses what that would move, drop, draw elsewhere or only guess at. Where the processor itself
# is, tests/unit/analysis/test_perfetto.py opens the same files, whole and broken, with both.

import csv
import json
import shutil
from collections import defaultdict
from dataclasses import dataclass, field
from math import floor
from pathlib import Path
from typing import Any

from tests.support.processes import ended

Event = dict[str, Any]
Track = tuple[int, int]

KEYS = {
    "X": {"name", "cat", "ph", "ts", "dur", "pid", "tid", "args"},
    "M": {"name", "ph", "pid", "tid", "args"},
    "s": {"name", "cat", "ph", "id", "ts", "pid", "tid"},
    "f": {"name", "cat", "ph", "id", "ts", "pid", "tid", "bp"},
    "C": {"name", "ph", "ts", "pid", "tid", "args"},
}
_METADATA = {"process_name": "name", "thread_name": "name", "process_sort_index": "sort_index"}


@dataclass
class Read:
    # The contents of a trace. `arrows`: spans, from and to; `processes`, `tracks`: names by
    # process, and by (process, thread); `counters`: (time, value) by (process, name of the counter,
    # series).
    spans: list[Event] = field(default_factory=list)
    arrows: list[tuple[Event, Event]] = field(default_factory=list)
    processes: dict[int, str] = field(default_factory=dict)
    tracks: dict[Track, str] = field(default_factory=dict)
    counters: dict[tuple[int, str, str], list[tuple[float, float]]] = field(default_factory=dict)

    def track(self, event: Event) -> str:
        return self.tracks[track_of(event)]


def ns(time_us: float) -> int:
    # The whole nanoseconds that a time is rounded to.
    return floor(time_us * 1000 + 0.5)


def track_of(event: Event) -> Track:
    # The track that an event is put on: thread 0 is taken for one that has its process's number.
    return event["pid"], event["tid"] or event["pid"]


def read(text: str) -> Read:
    # The trace in a JSON text; an AssertionError says what is wrong with it.
    document = json.loads(text, parse_constant=_refuse)
    assert isinstance(document["traceEvents"], list)
    assert document.get("displayTimeUnit", "ms") in ("ms", "ns")
    found = Read()
    for event in document["traceEvents"]:
        phase = event["ph"]
        assert set(event) == KEYS[phase], f"a {phase} event with keys {sorted(event)}"
        assert all(type(event[key]) is int and event[key] >= 0 for key in ("pid", "tid"))
        assert event.get("ts", 0) >= 0, "a time before 0"
        if phase == "M":
            _metadata(event, found)
        elif phase == "X":
            assert event["dur"] >= 0, "a duration below 0"
            assert event["cat"]
            found.spans.append(event)
    assert found.spans, "no spans"
    _in_order([event for event in document["traceEvents"] if event["ph"] != "M"], found)
    assert {track_of(e) for e in found.spans} <= found.tracks.keys(), "a track without a name"
    assert {e["pid"] for e in found.spans} <= found.processes.keys(), "a process without a name"
    return found


def _refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


def _metadata(event: Event, found: Read) -> None:
    key = _METADATA[event["name"]]
    assert set(event["args"]) == {key}
    assert event["args"][key] != "", f"a {event['name']} that is empty"
    if event["name"] == "process_name":
        assert event["pid"] not in found.processes, f"process {event['pid']} has two names"
        found.processes[event["pid"]] = event["args"]["name"]
    elif event["name"] == "thread_name":
        assert track_of(event) not in found.tracks, "a track with two names"
        found.tracks[track_of(event)] = event["args"]["name"]


def _in_order(events: list[Event], found: Read) -> None:
    # Take events as they come: by whole nanoseconds, those of one time in the order of the file.
    stacks: defaultdict[Track, list[Event]] = defaultdict(list)
    begun: dict[Any, Event] = {}
    ended: set[Any] = set()
    for event in sorted(events, key=lambda e: ns(e["ts"])):
        phase = event["ph"]
        if phase == "X":
            _put(event, stacks[track_of(event)], found)
            continue
        if phase == "C":
            assert event["args"], "a counter without values"
            for series, value in event["args"].items():
                assert type(value) in (int, float), f"a counter with the value {value!r}"
                found.counters.setdefault((event["pid"], event["name"], series), []).append((event["ts"], value))
            continue
        arrow = event["name"], event["cat"], event["id"]
        assert type(event["id"]) is int, f"arrow {event['id']!r} is no number"
        assert stacks[track_of(event)], f"an end of arrow {event['id']} before any span of its track"
        span = stacks[track_of(event)][-1]
        assert ns(event["ts"]) <= _end(span), f"an end of arrow {event['id']} between spans: it falls to {span['name']}"
        if phase == "s":
            assert arrow not in begun, f"arrow {event['id']} begins twice"
            begun[arrow] = span
            continue
        assert event["bp"] == "e", "an arrow binds to the span that encloses its end"
        assert arrow in begun, f"arrow {event['id']} ends before it begins"
        assert arrow not in ended, f"arrow {event['id']} ends twice"
        ended.add(arrow)
        start = begun[arrow]
        assert ns(start["ts"]) <= ns(span["ts"]), f"arrow {event['id']} is drawn backwards: its end has begun first"
        found.arrows.append((start, span))
    assert begun.keys() == ended, f"arrows that do not end: {sorted(map(str, begun.keys() - ended))}"


def _end(span: Event) -> int:
    return ns(span["ts"]) + ns(span["dur"])


def _put(span: Event, stack: list[Event], found: Read) -> None:
    # Put a span on its track, inside those that have not ended; points of one time stack up.
    start, end = ns(span["ts"]), _end(span)
    while stack and _end(stack[-1]) <= start and not ns(stack[-1]["ts"]) == start == end:
        stack.pop()
    for before in stack:
        assert not start < _end(before) < end, (
            f"{span['name']} overlaps {before['name']} of {found.tracks.get(track_of(span))} of process {span['pid']}"
        )
    stack.append(span)


NAMES = ("trace_processor_shell", "trace_processor")
NOT_FOUND = f"none of Perfetto's {', '.join(NAMES)} on PATH; CONTRIBUTING.md says where it is downloaded from"

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
    # A trace as the processor has it, if it opened it. `refused`: what it said if it did not;
    # `complaints`: events that it could not place as they stand, by its name for what was wrong.
    refused: str = ""
    complaints: dict[str, int] = field(default_factory=dict[str, int])
    slices: dict[Slice, dict[str, str]] = field(default_factory=dict[Slice, dict[str, str]])
    flows: list[tuple[Slice, Slice]] = field(default_factory=list[tuple[Slice, Slice]])
    processes: dict[int, str] = field(default_factory=dict[int, str])
    tracks: dict[tuple[int, int], str] = field(default_factory=dict[tuple[int, int], str])
    counters: dict[tuple[int, str], list[tuple[int, int]]] = field(default_factory=dict)


def find() -> str | None:
    # The program, where there is one.
    return next((path for name in NAMES if (path := shutil.which(name))), None)


def open_trace(trace: Path, scratch: Path) -> Opened:
    # Open a trace with the processor. `scratch`: a folder for the query.
    program = find()
    assert program is not None, NOT_FOUND
    query = scratch / "query.sql"
    query.write_text(_ALL, encoding="utf-8")
    run = ended([program, "-q", str(query), str(trace)], timeout=300)
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
    # The processor has of a trace what our reader has, where there is a processor.
    if find() is not None:
        assert_the_same(open_trace(trace, scratch), found)


def assert_the_same(opened: Opened, found: Read) -> None:
    # The processor has of a trace what our reader has of it.
    assert (opened.refused, opened.complaints) == ("", {})
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
    # A span as the processor has it.
    return *track_of(span), ns(span["ts"]), ns(span["dur"]), span["name"]


def flat(args: dict[str, Any]) -> dict[str, str]:
    # Arguments as the processor names them: `sent.3`, `peers[0]`.
    found: dict[str, str] = {}
    for name, value in args.items():
        if isinstance(value, dict):
            found |= {f"{name}.{key}": str(each) for key, each in value.items()}
        elif isinstance(value, list):
            found |= {f"{name}[{index}]": str(each) for index, each in enumerate(value)}
        else:
            found[name] = str(value)
    return found
