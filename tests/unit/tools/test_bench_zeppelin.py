"""The benchmarks of zeppelin's transfers: one document over all ranks, and nano-batches."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools.bench import heads_hidden, lone_documents


def test_a_lone_document_is_priced_alike_by_the_simulator_and_the_estimate(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lone_documents, "CASES", (lone_documents.Case("h200", 16, 1.5),))
    monkeypatch.setattr(lone_documents, "NUMBERS", (2, 4))
    assert lone_documents.main(["--tokens", "65536", "--widths"]) == 0
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()[2:]]
    found = {name: (float(ratio), float(closed)) for _, name, ratio, closed, *_ in rows}
    assert list(found)[:6] == [
        *("te_ring", "ulysses", "zeppelin, printed rule", "zeppelin, rings of groups", "zeppelin (aim 1.50)", "auto")
    ]
    assert {f"groups of {size}" for size in (1, 2, 4, 8, 16)} < set(found)
    ratio, closed = found["zeppelin (aim 1.50)"]
    assert 1 < ratio < found["te_ring"][0]
    assert closed == pytest.approx(ratio, rel=0.02)
    assert ratio == pytest.approx(min(found[f"groups of {size}"][0] for size in (2, 4, 8)), rel=0.03)


def test_exchanges_of_one_nano_batch_hide_behind_the_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "batches.json"
    file.write_text(json.dumps({"gpus": {"32k": 8}, "batches": {"made/32k": [[20000, 9000, 3768], [32768]]}}))
    assert heads_hidden.main([str(file), "--batches", "2", "--only", "h200/llama-7b"]) == 0
    title, *lines = capsys.readouterr().out.strip().splitlines()
    assert title == "h200/llama-7b: means of 1 batches of two sequences or more"  # one has nothing to put beside
    shown = {
        name: [float(cell) for cell in cells] for name, *cells in (line.strip("| ").split(" | ") for line in lines[3:])
    }
    assert list(shown) == [*heads_hidden.WAYS, "the better of both for each batch"]
    assert all(step - free == pytest.approx(shows, abs=0.002) for step, free, shows in shown.values())
    assert shown["two nano-batches"][2] < 0.5 * shown["two nano-batches, one by one"][2]
