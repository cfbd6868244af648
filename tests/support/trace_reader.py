"""A strict reader of Chrome's trace event format, as its documentation has it: what Perfetto's own
trace processor would take, and nothing that it would only guess at.

That processor is a program that its Python package fetches from the network when it is first used, so
no test can run it.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

Event = dict[str, Any]

KEYS = {
    "X": {"name", "cat", "ph", "ts", "dur", "pid", "tid", "args"},
    "M": {"name", "ph", "pid", "tid", "args"},
    "s": {"name", "cat", "ph", "id", "ts", "pid", "tid"},
    "f": {"name", "cat", "ph", "id", "ts", "pid", "tid", "bp"},
    "C": {"name", "ph", "ts", "pid", "args"},
}
_METADATA = {"process_name": "name", "thread_name": "name", "process_sort_index": "sort_index"}
ROUNDING_US = 1e-3


@dataclass
class Read:
    """The contents of a trace. `tracks`: names by (process, thread); `arrows`: pairs of events, start
    and end; `counters`: (time, value) by (process, name of the counter, series).
    """

    spans: list[Event] = field(default_factory=list)
    arrows: list[tuple[Event, Event]] = field(default_factory=list)
    processes: dict[int, str] = field(default_factory=dict)
    tracks: dict[tuple[int, int], str] = field(default_factory=dict)
    counters: dict[tuple[int, str, str], list[tuple[float, float]]] = field(default_factory=dict)

    def track(self, event: Event) -> str:
        return self.tracks[event["pid"], event["tid"]]


def read(text: str, *, nested: bool = True) -> Read:
    """The trace in a JSON text; an AssertionError says what the format does not allow.

    `nested`: spans of a track lie inside one another or apart, as the format asks of complete events;
    Perfetto puts others on a track of their own.
    """
    document = json.loads(text, parse_constant=_refuse)
    assert isinstance(document["traceEvents"], list)
    assert document.get("displayTimeUnit", "ms") in ("ms", "ns")
    found, ends = Read(), defaultdict[Any, dict[str, Event]](dict)
    for event in document["traceEvents"]:
        phase = event["ph"]
        assert set(event) == KEYS[phase], f"a {phase} event with keys {sorted(event)}"
        assert all(type(event[key]) is int for key in ("pid", "tid") if key in event)
        assert event.get("ts", 0) >= 0
        if phase == "M":
            _metadata(event, found)
        elif phase == "X":
            assert event["dur"] >= 0
            assert event["cat"]
            found.spans.append(event)
        elif phase == "C":
            for series, value in event["args"].items():
                assert isinstance(value, int | float)
                found.counters.setdefault((event["pid"], event["name"], series), []).append((event["ts"], value))
        else:
            assert phase not in ends[event["id"]], f"two ends {phase} of arrow {event['id']}"
            ends[event["id"]][phase] = event
    assert found.spans, "no spans"
    assert {(e["pid"], e["tid"]) for e in found.spans} <= found.tracks.keys(), "a track without a name"
    assert {e["pid"] for e in found.spans} <= found.processes.keys(), "a process without a name"
    for times in found.counters.values():
        assert [ts for ts, _ in times] == sorted(ts for ts, _ in times), "a counter that goes back"
    _arrows(ends, found)
    if nested:
        _check_nesting(found)
    return found


def _refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


def _metadata(event: Event, found: Read) -> None:
    key = _METADATA[event["name"]]
    assert set(event["args"]) == {key}
    if event["name"] == "process_name":
        assert event["pid"] not in found.processes, f"process {event['pid']} has two names"
        found.processes[event["pid"]] = event["args"]["name"]
    elif event["name"] == "thread_name":
        assert (event["pid"], event["tid"]) not in found.tracks, "a track with two names"
        found.tracks[event["pid"], event["tid"]] = event["args"]["name"]


def _arrows(ends: dict[Any, dict[str, Event]], found: Read) -> None:
    by_track: defaultdict[tuple[int, int], list[Event]] = defaultdict(list)
    for span in found.spans:
        by_track[span["pid"], span["tid"]].append(span)
    for number, each in ends.items():
        assert set(each) == {"s", "f"}, f"arrow {number} has one end"
        start, end = each["s"], each["f"]
        assert (start["name"], start["cat"]) == (end["name"], end["cat"]), "ends are matched by name and category"
        for event in (start, end):
            assert any(
                span["ts"] - ROUNDING_US <= event["ts"] <= span["ts"] + span["dur"] + ROUNDING_US
                for span in by_track[event["pid"], event["tid"]]
            ), "an arrow binds to the span that encloses its end"
        found.arrows.append((start, end))


def _check_nesting(found: Read) -> None:
    by_track: defaultdict[tuple[int, int], list[Event]] = defaultdict(list)
    for span in found.spans:
        by_track[span["pid"], span["tid"]].append(span)
    for track, spans in by_track.items():
        open_until: list[float] = []
        for span in sorted(spans, key=lambda e: (e["ts"], -e["dur"])):
            while open_until and open_until[-1] <= span["ts"] + ROUNDING_US:
                open_until.pop()
            end = span["ts"] + span["dur"]
            assert not open_until or end <= open_until[-1] + ROUNDING_US, (
                f"{span['name']} overlaps another span of {found.tracks[track]} of {found.processes[track[0]]}"
            )
            open_until.append(end)
