"""`megatron-balance trace`: files of ranks become one, or a sentence says what is missing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_balance.analysis.trace_format import Trace, TrackSpan, file_name, joined
from tests.support import trace_reader
from tests.support.cli import CommandLine


def write(folder: Path, step: int, rank: int, late_s: float = 0.0, **facts: object) -> None:
    """One rank of two: rank 0 sends 64 bytes to rank 1, whose clock is `late_s` behind."""
    way = {"sent": {1: 64}} if not rank else {"received": {0: 64}}
    start_s, stop_s = (5.0, 7.0) if not rank else (5.5 - late_s, 8.0 - late_s)
    spans = [
        TrackSpan(rank, "inter_node", "direct", start_s, stop_s, "forward", 0, 2, exchange=7, zone="far", **way),
        TrackSpan(rank, "inter_node", "direct", start_s + 0.5, stop_s + 0.5, "forward", 0, 2, exchange=8),
    ]
    facts = {"kind": "measured", "step": step, "rank": rank, "world_size": 2, **facts}
    folder.mkdir(parents=True, exist_ok=True)
    document = Trace(spans, {rank: f"rank {rank}, node {rank}"}, facts).document()
    (folder / file_name(step, rank)).write_text(json.dumps(document))


def test_the_ranks_of_a_step_are_joined_and_arrows_lead_between_them(run: CommandLine, tmp_path: Path) -> None:
    for rank in (0, 1):
        write(tmp_path / "traces", 12, rank)
    out = tmp_path / "joined.json"
    assert run.printed(f"trace {tmp_path} --out {out}") == f"{out}: step 12, 2 ranks, 4 spans\n"
    found = trace_reader.read(out.read_text())
    ((start, end),) = found.arrows
    assert (start["pid"], start["ts"], start["name"]) == (0, 5e6, "direct 7")
    assert (end["pid"], end["ts"], end["name"]) == (1, 5.5e6, "direct 7")
    assert found.processes == {0: "rank 0, node 0", 1: "rank 1, node 1"}
    assert set(found.tracks.values()) == {"inter_node", "inter_node (2)"}, "two exchanges are under way at once"
    assert json.loads(run.printed(f"trace {tmp_path / 'traces'} --out -")) == json.loads(out.read_text())


def test_clocks_that_disagree_are_told_and_no_arrow_points_back_in_time(run: CommandLine, tmp_path: Path) -> None:
    for rank in (0, 1):
        write(tmp_path, 12, rank, late_s=3.5)
    out = tmp_path / "joined.json"
    assert (
        "clocks of ranks differ by at least 500.000 ms; arrows left out that would point back in time: 1"
        in run.printed(f"trace {tmp_path} --out {out}")
    )
    assert trace_reader.read(out.read_text()).arrows == []
    assert json.loads(out.read_text())["otherData"]["arrows_left_out"] == 1


def test_clocks_of_nodes_are_moved_until_nothing_arrives_before_it_is_sent(run: CommandLine, tmp_path: Path) -> None:
    for rank in (0, 1):
        write(tmp_path, 12, rank, late_s=3.5, node=rank)
    out = tmp_path / "joined.json"
    said = run.printed(f"trace {tmp_path} --out {out}")
    assert said.endswith("; clocks of nodes moved by 500.001 ms, for nothing to arrive before it is sent\n")
    found = trace_reader.read(out.read_text())
    ((start, end),) = found.arrows
    assert (start["ts"], end["ts"], end["name"]) == (5e6, 5e6, "arriving 7")
    assert {e["pid"]: e["ts"] for e in found.spans if e["name"] == "direct 7"} == {0: 5e6, 1: pytest.approx(2500001)}


def test_clocks_of_nodes_that_no_move_puts_right_stay() -> None:
    """Each of two nodes hears from the other a second before that speaks."""

    def of(rank: int) -> Trace:
        spans = [
            TrackSpan(rank, "inter_node", "direct", 5.0, 6.0, exchange=0, sent={1 - rank: 64}),
            TrackSpan(rank, "inter_node", "direct", 3.0, 4.0, exchange=0, received={1 - rank: 64}),
        ]
        return Trace(spans, {rank: f"rank {rank}"}, {"node": rank})

    found = joined([of(0), of(1)])
    assert (found.facts["moved_s"], found.facts["skew_s"]) == (0.0, 1.0)
    assert found.document()["otherData"]["arrows_left_out"] == 2


def test_ranks_of_a_node_are_put_on_its_one_clock() -> None:
    def of(rank: int, node: int, began: float) -> Trace:
        facts = {"node": node, "began_unix_s": began}
        return Trace([TrackSpan(rank, "compute", "attention", 1.0, 2.0)], {rank: f"rank {rank}"}, facts)

    spans = joined([of(0, 0, 100.0), of(1, 0, 100.25), of(2, 1, 7.5), of(3, 1, 7.0)]).spans
    assert [span.start_s for span in spans] == [1.0, 1.25, 1.5, 1.0]


def test_mistakes_are_one_sentence(run: CommandLine, tmp_path: Path) -> None:
    assert "no traces; train with trace_steps: [N]" in run.error(f"trace {tmp_path} --out x.json")
    write(tmp_path, 12, 1)
    assert "step 12 has no trace of ranks 0 of 2" in run.error(f"trace {tmp_path} --out x.json")
    write(tmp_path, 13, 0)
    assert "traces of steps 12, 13; choose one with --step N" in run.error(f"trace {tmp_path} --out x.json")
    assert "--step 14: " in run.error(f"trace {tmp_path} --step 14 --out x.json")
    (tmp_path / file_name(13, 0)).write_text("[]")
    assert "is not a trace of this package" in run.error(f"trace {tmp_path} --step 13 --out x.json")
    for facts in (
        *({"world_size": wrong} for wrong in ({}, None, 1.5, 1 << 40)),
        *({"began_unix_s": wrong} for wrong in (float("inf"), "x")),
        {"node": []},
        {"planner": float("nan")},
    ):
        document = Trace([], {0: "rank 0"}, {"step": 13, "rank": 0, "world_size": 1, **facts}).document()
        (tmp_path / file_name(13, 0)).write_text(json.dumps(document))
        assert "is not a trace of this package" in run.error(f"trace {tmp_path} --step 13 --out x.json"), facts
    spans = [TrackSpan(1, "compute", "attention", 1.0, 2.0)]
    document = Trace(spans, {0: "rank 0"}, {"step": 13, "rank": 0, "world_size": 1}).document()
    (tmp_path / file_name(13, 0)).write_text(json.dumps(document))
    assert "rank 1 without a name" in run.error(f"trace {tmp_path} --step 13 --out x.json")
    (tmp_path / file_name(13, 0)).write_text("{")
    assert file_name(13, 0) in run.error(f"trace {tmp_path} --step 13 --out x.json")
