"""The recorder of plans, programs and steps: equal where nothing changed, and it says what did."""

from __future__ import annotations

import json

import pytest

from tools import seams

DOCUMENT = {
    "gpus": {"64k": 4},
    "gpus_per_node": 2,
    "batches": {"mixed/64k": [[9000, 4000, 300, 20], [8000, 8000]]},
}


@pytest.fixture
def recorder(monkeypatch) -> seams.Recorder:
    monkeypatch.setattr(seams, "VARIANTS", {"te_ring": ("te_ring", {}), "zeppelin": ("zeppelin", {})})
    return seams.Recorder(DOCUMENT, sample=True)


@pytest.mark.parametrize("part", ["plans", "programs"])
def test_a_record_is_equal_to_itself_and_differs_by_planner(recorder, part):
    first, again = ({key: job() for key, job in getattr(recorder, part)()} for _ in range(2))
    assert first == again
    assert list(seams.compare({part: first}, {part: again}))[seams.PARTS.index(part)] == (
        f"{part}: {len(dict(seams.flat(first)))} of {len(dict(seams.flat(first)))} equal"
    )
    causal = {key.split(" | ")[0]: value for key, value in first.items() if " | causal | " in key}
    assert causal["te_ring"] != causal["zeppelin"]


def test_a_refusal_is_recorded_as_its_kind(recorder):
    assert seams.said(lambda: recorder.step("zeppelin", "causal", "a800", 3, (5,)).fingerprint()) == "ConfigError"


def test_what_differs_is_said(tmp_path, capsys):
    paths = [tmp_path / name for name in ("before.json", "after.json")]
    paths[0].write_text(json.dumps({"landscape": {"a": 2.0, "b": 1.0, "c": 1.0}, "plans": {"p": {"s": "x"}}}))
    paths[1].write_text(json.dumps({"landscape": {"a": 1.0, "b": 1.0}, "plans": {"p": {"s": "y"}}}))
    assert seams.main(["compare", *map(str, paths)]) == 1
    told = capsys.readouterr().out
    assert "plans: p / s: x -> y\nplans: 0 of 1 equal\n" in told
    assert "landscape: a: 2.0 -> 1.0 (0.5000)" in told
    assert "landscape: 1 of 2 equal, mean ratio 0.7500, worst 1.0000; 1 only before, 0 only after" in told
    assert seams.main(["compare", str(paths[0]), str(paths[0])]) == 0
