"""Traces opened by Perfetto's own processor and our reader, and broken ones, which both refuse."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_balance.analysis.trace_format import Trace, TrackSpan
from tests.support import trace_reader
from tests.support.cli import CommandLine
from tests.support.trace_reader import Event

needs_processor = pytest.mark.skipif(trace_reader.find() is None, reason=trace_reader.NOT_FOUND)

SMALL = {"num_attention_heads": 8, "num_key_value_heads": 8, "num_hidden_layers": 2}
SMALL |= {"hidden_size": 512, "intermediate_size": 1024, "vocab_size": 1024}
SIMULATED = {
    "zones, moved tokens": "zeppelin --lengths 9000,3000,700,400",
    "a ring": "te_ring --lengths 4000,900",
    "routed, once a node": "distca --lengths 9000,900,400 --ping-pong false",
    "head exchanges": "ulysses --lengths 4000,900",
    "stages apart": "zeppelin --lengths 4000,900 --pipeline 2 --stages stages",
    "ticks of stages": "distca --lengths 4000,900 --pipeline 2 --stages joint --ping-pong false",
}


@needs_processor
@pytest.mark.parametrize("command", SIMULATED.values(), ids=SIMULATED)
def test_a_simulated_step_opens_without_a_complaint(capsys, tmp_path: Path, command: str) -> None:
    out, model = tmp_path / "step.json", tmp_path / "model.json"
    model.write_text(json.dumps(SMALL))
    machine = f"--ranks 8 --ranks-per-node 4 --model {model}"
    CommandLine(capsys).printed(f"simulate --planner {command} {machine} --trace {out}")
    found = trace_reader.read(out.read_text())
    trace_reader.assert_the_same(trace_reader.open_trace(out, tmp_path), found)
    assert_arrows_lead_from_senders_to_receivers(found)


def assert_arrows_lead_from_senders_to_receivers(found: trace_reader.Read) -> None:
    assert found.arrows
    for start, end in found.arrows:
        assert start["args"]["sent"][str(end["pid"])] > 0
        assert [start["args"][key] for key in FACTS] == [end["args"][key] for key in FACTS]
        assert end["name"] in (start["name"], f"arriving {start['args']['exchange']}")


# Changes the events of a trace.
Change = Callable[[list[Event]], object]
FACTS = ("phase", "microbatch", "call", "exchange", "track")


# What is wrong with a trace, and what says so
def whole() -> list[Event]:
    # Rank 0 sends to rank 1 twice: within a longer stay there, then as both begin together.
    spans = [
        TrackSpan(0, "inter_node", "direct", 3e-6, 9e-6, "forward", 0, 0, 0, sent={1: 64}),
        TrackSpan(1, "inter_node", "direct", 1e-6, 8e-6, "forward", 0, 0, 0, received={0: 64}),
        TrackSpan(0, "inter_node", "direct", 9e-6, 12e-6, "forward", 0, 0, 1, sent={1: 64}),
        TrackSpan(1, "inter_node", "direct", 9e-6, 11e-6, "forward", 0, 0, 1, received={0: 64}),
        TrackSpan(1, "compute", "attention", 2e-6, 4e-6, "forward", 0, 0),
    ]
    return Trace(spans, {rank: f"rank {rank}" for rank in (0, 1)}).document()["traceEvents"]


def of(events: list[Event], phase: str, index: int = 0) -> Event:
    # An event by its phase.
    return [event for event in events if event["ph"] == phase][index]


def with_(phase: str, index: int = 0, **values: Any) -> Change:
    def change(events: list[Event]) -> None:
        of(events, phase, index).update(values)

    return change


def to_the_outer_span(events: list[Event]) -> None:
    # As our traces were: to the span that received before the sender began.
    events.remove(next(event for event in events if event["name"] == "arriving 0"))


def numbered_from_0(events: list[Event]) -> None:
    # As our traces were: rank 1's track 0 is taken for its track 1.
    for event in events:
        if event["pid"] == 1:
            event["tid"] -= 3


BROKEN: dict[str, tuple[Change, str, str]] = {
    "thread 0": (numbered_from_0, "two names", "slice_spill_overlapping_complete_event"),
    "overlap of a nanosecond": (with_("X", 0, dur=6.001), "overlaps", "slice_spill_overlapping_complete_event"),
    "duration below 0": (with_("X", 0, dur=-1.0), "duration below 0", "slice_negative_duration"),
    "time before 0": (with_("X", 0, ts=-1.0), "time before 0", "trace_sorter_negative_timestamp_dropped"),
    "no duration": (lambda events: of(events, "X").pop("dur"), "keys", "json_parser_failure"),
    "no time": (lambda events: of(events, "X").pop("ts"), "keys", "json_tokenizer_failure"),
    "arrow without a beginning": (
        lambda events: events.remove(of(events, "s")),
        "ends before it begins",
        "flow_end_without_start",
    ),
    "arrow that begins twice": (lambda events: events.append(of(events, "s")), "begins twice", "flow_duplicate_id"),
    "arrow before any span": (with_("s", 0, ts=0.5), "before any span", "flow_no_enclosing_slice"),
    "arrow back in time": (with_("f", 0, ts=2.5), "ends before it begins", "flow_end_without_start"),
    "arrow without a number": (with_("s", 0, id="x y"), "is no number", "flow_invalid_id"),
    "counter of words": (with_("C", 0, args={"bytes": "many"}), "value 'many'", "json_parser_failure"),
    "process without a name": (with_("M", 0, args={"name": ""}), "is empty", "json_parser_failure"),
}
# The processor says nothing of these; what it shows is not what the file means.
MOVED: dict[str, tuple[Change, str]] = {
    "arrow without an end": (lambda events: events.remove(of(events, "f")), "do not end"),
    "arrow to what began first": (to_the_outer_span, "drawn backwards"),
    "counter without values": (with_("C", 0, args={}), "without values"),
}


def broken(tmp_path: Path, change: Change, said: str) -> Path:
    # A trace after a change, which our reader refuses.
    events = whole()
    trace_reader.read(json.dumps({"traceEvents": events}))
    change(events)
    file = tmp_path / "broken.json"
    file.write_text(json.dumps({"traceEvents": events}))
    with pytest.raises(AssertionError, match=said):
        trace_reader.read(file.read_text())
    return file


@pytest.mark.parametrize(("change", "said", "complaint"), BROKEN.values(), ids=BROKEN)
def test_our_reader_refuses_what_the_processor_complains_of(
    tmp_path: Path, change: Change, said: str, complaint: str
) -> None:
    file = broken(tmp_path, change, said)
    if trace_reader.find() is not None:
        assert complaint in trace_reader.open_trace(file, tmp_path).complaints


@pytest.mark.parametrize(("change", "said"), MOVED.values(), ids=MOVED)
def test_our_reader_refuses_what_the_processor_shows_otherwise(tmp_path: Path, change: Change, said: str) -> None:
    file = broken(tmp_path, change, said)
    if trace_reader.find() is not None:
        opened, meant = trace_reader.open_trace(file, tmp_path), trace_reader.read(json.dumps({"traceEvents": whole()}))
        assert (opened.refused, opened.complaints) == ("", {})
        with pytest.raises(AssertionError):
            trace_reader.assert_the_same(opened, meant)


def test_our_reader_refuses_an_arrow_that_falls_to_a_span_that_is_over(tmp_path: Path) -> None:
    # The processor takes it as it was meant, by luck: no other span has begun on that track.
    broken(tmp_path, with_("f", 0, ts=8.5), "between spans: it falls to arriving 0")


@needs_processor
def test_what_is_no_trace_is_refused_by_both(tmp_path: Path) -> None:
    for text in ('{"traceEvents": [{"ph": "X"', "no trace"):
        (tmp_path / "cut.json").write_text(text)
        assert trace_reader.open_trace(tmp_path / "cut.json", tmp_path).refused
        with pytest.raises(ValueError, match="Expecting"):
            trace_reader.read(text)
