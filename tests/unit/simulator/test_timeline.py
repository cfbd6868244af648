"""Traces read strictly, by the rules of Chrome's trace event format: every arrow has two ends inside
spans, every track a name, and counters end where they began."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

import pytest

from megatron_balance import make_planner
from megatron_balance.compile.pipeline import compile_ranks
from megatron_balance.ir.plan import MicrobatchPlan
from megatron_balance.simulator.phase import phase_of
from megatron_balance.simulator.timeline import timeline
from tests.support import by_hand
from tests.support.flat_cost import MODEL, flat_machine

MACHINE = flat_machine(8, 4, layer=1e-4)
Event = dict[str, Any]


@pytest.fixture(scope="module", params=["ring", "distca"])
def plan(request: pytest.FixtureRequest) -> MicrobatchPlan:
    """Of a ring, with one peer each way in an exchange, and of distca, with several."""
    if request.param == "ring":
        return by_hand.pool("ring", (4000, 300), 8, ranks_per_node=4, heads=(2, 2))
    return make_planner("distca", MACHINE.cluster, MODEL, block=64)((4000, 300, 900, 40, 1200, 700))


@pytest.fixture(scope="module")
def events(plan: MicrobatchPlan) -> list[Event]:
    return json.loads(json.dumps(timeline(plan, MACHINE), allow_nan=False))["traceEvents"]


def test_every_event_has_the_keys_of_its_phase_and_every_track_a_name(events: list[Event]) -> None:
    keys = {
        "X": {"name", "cat", "ph", "ts", "dur", "pid", "tid", "args"},
        "M": {"name", "ph", "pid", "tid", "args"},
        "s": {"name", "cat", "ph", "id", "ts", "pid", "tid"},
        "f": {"name", "cat", "ph", "id", "ts", "pid", "tid", "bp"},
        "C": {"name", "ph", "ts", "pid", "args"},
    }
    assert all(set(event) == keys[event["ph"]] for event in events)
    assert {event["ph"] for event in events} == set(keys)
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert {(e["pid"], e["tid"]) for e in events if e["ph"] in "Xsf"} <= named
    assert all(isinstance(e[key], int) for e in events for key in ("pid", "tid") if key in e)
    assert min(e["ts"] for e in events if "ts" in e) >= 0


def test_arrows_have_two_ends_each_inside_a_span_of_its_track_and_point_forward(events: list[Event]) -> None:
    spans: dict[tuple[int, int], list[Event]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            spans[event["pid"], event["tid"]].append(event)
    ends: dict[int, dict[str, Event]] = defaultdict(dict)
    for event in events:
        if event["ph"] in "sf":
            assert event["ph"] not in ends[event["id"]], "an arrow's number is its own"
            ends[event["id"]][event["ph"]] = event
            own = spans[event["pid"], event["tid"]]
            assert any(span["ts"] <= event["ts"] <= span["ts"] + span["dur"] for span in own)
    assert all(set(each) == {"s", "f"} and each["s"]["ts"] <= each["f"]["ts"] for each in ends.values())
    assert all(each["s"]["pid"] != each["f"]["pid"] for each in ends.values())


def test_spans_of_exchanges_say_the_bytes_and_peers_of_the_program(events: list[Event], plan: MicrobatchPlan) -> None:
    ranks = compile_ranks(plan, "keep")
    for name, backward in (("forward", False), ("backward", True)):
        flows = phase_of(ranks, MACHINE, backward=backward).flows
        own = [e for e in events if e["ph"] == "X" and e["cat"] == name and "peers" in e["args"]]
        for way, end in (("sent", "a"), ("received", "b")):
            for rank in range(8):
                said = sum(e["args"].get(f"{way}_bytes", 0) for e in own if e["pid"] == rank)
                assert said == sum(flow.num_bytes for flow in flows if getattr(flow, end) == rank)
        peers = {(e["pid"], peer) for e in own for peer in e["args"]["peers"]}
        assert peers == {pair for flow in flows for pair in ((flow.a, flow.b), (flow.b, flow.a))}
        assert sum(e["ph"] == "s" and e["cat"] == name for e in events) == len(flows)


def test_counters_of_bytes_begin_above_and_end_at_nothing(events: list[Event]) -> None:
    for rank in range(8):
        counted = [e for e in events if e["ph"] == "C" and e["pid"] == rank]
        levels = [e["args"]["bytes"] for e in counted]
        assert min(levels) >= 0 < max(levels)
        assert levels[-1] == 0
        assert [e["ts"] for e in counted] == sorted(e["ts"] for e in counted)
