"""A reader of Chrome's trace event format that takes a file as Perfetto's trace processor takes it
(v58.2), and refuses what that would move, drop, draw elsewhere or only guess at.

The processor itself is a program that not every machine has. Where one is,
tests/unit/analysis/test_perfetto.py opens the same files, whole and broken, with both.
"""

import json
from collections import defaultdict
from dataclasses import dataclass, field
from math import floor
from typing import Any

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
    """The contents of a trace. `arrows`: spans, from and to; `processes`, `tracks`: names by process,
    and by (process, thread); `counters`: (time, value) by (process, name of the counter, series).
    """

    spans: list[Event] = field(default_factory=list)
    arrows: list[tuple[Event, Event]] = field(default_factory=list)
    processes: dict[int, str] = field(default_factory=dict)
    tracks: dict[Track, str] = field(default_factory=dict)
    counters: dict[tuple[int, str, str], list[tuple[float, float]]] = field(default_factory=dict)

    def track(self, event: Event) -> str:
        return self.tracks[track_of(event)]


def ns(time_us: float) -> int:
    """The whole nanoseconds that a time is rounded to."""
    return floor(time_us * 1000 + 0.5)


def track_of(event: Event) -> Track:
    """The track that an event is put on: thread 0 is taken for one that has its process's number."""
    return event["pid"], event["tid"] or event["pid"]


def read(text: str) -> Read:
    """The trace in a JSON text; an AssertionError says what is wrong with it."""
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
    """Take events as they come: by whole nanoseconds, those of one time in the order of the file."""
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
    """Put a span on its track, inside those that have not ended; points of one time stack up."""
    start, end = ns(span["ts"]), _end(span)
    while stack and _end(stack[-1]) <= start and not ns(stack[-1]["ts"]) == start == end:
        stack.pop()
    for before in stack:
        assert not start < _end(before) < end, (
            f"{span['name']} overlaps {before['name']} of {found.tracks.get(track_of(span))} of process {span['pid']}"
        )
    stack.append(span)
