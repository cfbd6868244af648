"""Traces of simulated steps, read strictly (`tests.support.trace_reader`)."""

import itertools
import json
from typing import Any

import pytest

from megatron_balance import MicrobatchPlan, make_planner
from megatron_balance.analysis import trace_format
from megatron_balance.compile.pipeline import compile_ranks
from megatron_balance.errors import ConfigError
from megatron_balance.simulator.phase import phase_of
from megatron_balance.simulator.setup import Setup
from megatron_balance.simulator.step import simulate_step
from megatron_balance.simulator.timeline import layer_trace, step_trace
from tests.support import by_hand, trace_reader
from tests.support.flat_cost import MODEL, flat_machine
from tests.support.trace_reader import Read

MACHINE = flat_machine(8, 4, layer=1e-4)
RING = by_hand.pool("ring", (4000, 300), 8, ranks_per_node=4, heads=(2, 2))


@pytest.fixture(scope="module", params=["ring", "distca"])
def plan(request: pytest.FixtureRequest) -> MicrobatchPlan:
    # Of a ring, with one peer each way in an exchange, and of distca, with several.
    distca = make_planner("distca", MACHINE.cluster, MODEL, block=64)
    return RING if request.param == "ring" else distca((4000, 300, 900, 40, 1200, 700))


@pytest.fixture(scope="module")
def found(plan: MicrobatchPlan) -> Read:
    return _read(layer_trace(plan, MACHINE))


def _read(trace: trace_format.Trace) -> Read:
    return trace_reader.read(json.dumps(trace.document(), allow_nan=False))


def test_spans_say_the_bytes_peers_and_zones_of_the_program(found: Read, plan: MicrobatchPlan) -> None:
    # Every rank has a process and arrows point forward to another one.
    assert found.processes[5] == "rank 5, node 1"
    assert set(found.processes) == set(range(8))
    assert found.arrows
    assert all(s["ts"] <= f["ts"] and s["pid"] != f["pid"] for s, f in found.arrows)
    # Counters of bytes begin above nothing and end at nothing.
    assert {rank for rank, _, _ in found.counters} == set(range(8))
    for times in found.counters.values():
        levels = [level for _, level in times]
        assert min(levels) >= 0 < max(levels)
        assert levels[-1] == 0
    # Spans of exchanges say the bytes and peers of the program.
    ranks = compile_ranks(plan, "keep")
    for name, backward in (("forward", False), ("backward", True)):
        flows = phase_of(ranks, MACHINE, backward=backward).flows
        own = [e for e in found.spans if e["cat"] == name and "peers" in e["args"]]
        for way, end in (("sent", "a"), ("received", "b")):
            for rank in range(8):
                said = sum(e["args"][f"{way}_bytes"] for e in own if e["pid"] == rank)
                assert said == sum(flow.num_bytes for flow in flows if getattr(flow, end) == rank)
        peers = {(e["pid"], peer) for e in own for peer in e["args"]["peers"]}
        assert peers == {pair for flow in flows for pair in ((flow.a, flow.b), (flow.b, flow.a))}
        hops = {(flow.exchange, flow.leg, flow.stream, flow.a, flow.b) for flow in flows}
        assert sum(s["cat"] == name for s, _ in found.arrows) == len(hops)
    kinds = ("attention", "direct", "pack", "wait", "place")
    zones = {e["args"]["zone"] for e in found.spans if e["args"]["what"] in kinds}
    assert zones == {zone.name for zone in plan.zones}


def test_a_ring_has_a_track_for_each_stream_and_says_what_it_waits_for() -> None:
    # A ring has a track for each stream and all its launches.
    found = _read(layer_trace(RING, MACHINE))
    tracks = {"compute", "inter_node", "inter_node moved", "intra_node", "intra_node moved"}
    assert sorted(found.tracks)[0][1] == 8, "no track has the number of a rank"
    assert len({number for _, number in found.tracks}) == len(found.tracks)
    assert next(name for (rank, _), name in sorted(found.tracks.items()) if rank == 3) == "compute"
    assert set(found.tracks.values()) == tracks
    assert sum(e["name"] == "attention" for e in found.spans) == 2 * 8 * 8
    # A rank that waits for an exchange says so until it is there.
    spans = layer_trace(RING, flat_machine(8, 4, launch=1e-4)).spans
    came: dict[tuple[Any, ...], float] = {}
    for span in spans:
        if span.received:
            key = (span.rank, span.exchange, span.phase)
            came[key] = max(span.stop_s, came.get(key, 0.0))
    waits = [span for span in spans if span.what == "wait"]
    assert waits
    for wait in waits:
        assert wait.start_s < wait.stop_s == pytest.approx(came[wait.rank, wait.exchange, wait.phase])


def test_what_is_read_back_makes_the_same_document(plan: MicrobatchPlan) -> None:
    document = layer_trace(plan, MACHINE).document()
    again = trace_format.read(json.loads(json.dumps(document)), "x.json").document()
    assert json.dumps(again["otherData"]) == json.dumps(document["otherData"])
    assert len(again["traceEvents"]) == len(document["traceEvents"])
    for a, b in zip(again["traceEvents"], document["traceEvents"], strict=True):
        assert a == {**b, **{key: pytest.approx(b[key], abs=1e-6) for key in ("ts", "dur") if key in b}}


@pytest.mark.parametrize(("pipeline", "interleave", "recompute"), [(1, 1, "none"), (2, 2, "none"), (2, 1, "full")])
def test_a_step_is_drawn_whole_and_ends_when_it_does(pipeline: int, interleave: int, recompute) -> None:
    setup = Setup(pipeline=pipeline, interleave=interleave, recompute=recompute, engine="events")
    short = by_hand.pool("ring", (2000, 100), 8, ranks_per_node=4, heads=(2, 2))
    found = _read(step_trace([RING, short], MACHINE, setup))
    step = simulate_step([RING, short], MACHINE, setup)
    assert max(e["ts"] + e["dur"] for e in found.spans) == pytest.approx(1e6 * step.step_s)
    assert set(found.processes) == set(range(8 * pipeline))
    linear = [e for e in found.spans if e["name"] == "linear" and e["pid"] == 8 * pipeline - 1]
    expected = itertools.product((0, 1), ("forward", "backward"), range(MODEL.num_layers // pipeline))
    calls = [(e["args"]["microbatch"], e["cat"], e["args"]["call"]) for e in sorted(linear, key=lambda e: e["ts"])]
    assert set(calls) == set(expected)
    for of_phase in itertools.product((0, 1), ("forward", "backward")):
        numbers = [call for *each, call in calls if tuple(each) == of_phase]
        assert numbers == sorted(numbers), "calls are counted as they come"
    steps = {e["name"] for e in found.spans if found.track(e) == "step"}
    assert steps >= {"forward 0", "forward 1", "backward 0", "backward 1", "gradient sync"}
    assert all({s["pid"] // 8, f["pid"] // 8} == {s["pid"] // 8} for s, f in found.arrows), "stages attend apart"
    assert ("recompute" in {e["name"] for e in found.spans}) == (recompute == "full")


def test_layers_beyond_what_can_be_opened_are_one_span_and_a_rank_is_joined_once() -> None:
    # Layers beyond what can be opened are one span.
    whole, few = (step_trace([RING], MACHINE, most_spans=most) for most in (10**6, 1))
    assert whole.facts["layers_drawn"] == MODEL.num_layers
    assert few.facts["layers_drawn"] == 1
    assert max(s.stop_s for s in few.spans) == pytest.approx(max(s.stop_s for s in whole.spans))
    last = MODEL.num_layers - 1  # the backward opens the last layer, which it begins with
    names = {"forward": f"layers 1 to {last}", "backward": f"layers 0 to {last - 1}"}
    blocks = [s for s in few.spans if s.phase in names and s.what == names[s.phase]]
    assert {(s.rank, s.phase) for s in blocks} == set(itertools.product(range(8), ("forward", "backward")))
    drawn_s = sum(s.stop_s - s.start_s for s in blocks if s.rank == 0)
    step = [s for s in whole.spans if s.rank == 0 and s.track == "step" and s.microbatch == 0]
    assert drawn_s == pytest.approx(sum(s.stop_s - s.start_s for s in step) * (1 - 1 / MODEL.num_layers))
    # A rank is joined once and what is no trace is refused.
    trace = layer_trace(RING, MACHINE)
    with pytest.raises(ConfigError, match="rank 0 is in two of the traces; give each rank's file once"):
        trace_format.joined([trace, trace])
    with pytest.raises(ConfigError, match=r"x\.json: is not a trace of this package"):
        trace_format.read({"traceEvents": [{"ph": "X", "name": "a"}]}, "x.json")
