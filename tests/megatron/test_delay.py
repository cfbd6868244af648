"""Documents that wait, in Megatron's loop: their tokens come back after a resume, also on another
number of ranks, and nothing is left at the end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("megatron.training")

from tests.megatron.conftest import Run, Train

pytestmark = pytest.mark.megatron

STEPS, SAVED = 6, 3
DELAY = {"name": "wlb_llm", "thresholds": [250]}
FOUR = {"global-batch-size": 4}


def adds_up(run: Run, before: int = 0) -> None:
    """Check the tokens of every step: those that waited and those drawn are trained or wait."""
    for step in run.steps:
        assert before + step["drawn_tokens"] == step["trained_tokens"] + step["waiting_tokens"], step["step"]
        assert step["trained_tokens"] == step["num_tokens"]
        assert step["run_tokens"]["drawn"] == step["run_tokens"]["trained"] + step["waiting_tokens"]
        before = step["waiting_tokens"]


def test_documents_wait_over_a_resume_and_other_ranks_and_none_is_left(train: Train, tmp_path: Path) -> None:
    flags: dict[str, Any] = {**FOUR, "train-iters": STEPS, "ckpt-format": "torch_dist"}
    whole = train(2, DELAY, {**flags, "save": tmp_path, "save-interval": SAVED})
    adds_up(whole)
    waiting = whole.column("waiting_tokens")
    assert waiting[SAVED - 1] > 0, "documents wait in the checkpoint"
    assert waiting[-1] == 0, "flushed at the end"
    assert whole.steps[-1]["run_tokens"]["trained"] == sum(whole.column("drawn_tokens"))
    (tmp_path / "latest_checkpointed_iteration.txt").write_text(str(SAVED))
    resumed = train(2, DELAY, {**flags, "load": tmp_path}, config={"plan_ahead": True})
    elsewhere = train(1, DELAY, {**flags, "load": tmp_path})
    another = train(2, "te_ring", {**flags, "load": tmp_path})
    for run in (resumed, elsewhere, another):
        assert run.column("step") == list(range(SAVED + 1, STEPS + 1))
        adds_up(run, before=waiting[SAVED - 1])
        assert run.steps[-1]["waiting_tokens"] == 0
    for name in ("loss", "grad_norm", "fingerprint", "waiting_tokens"):
        assert resumed.column(name) == whole.column(name)[SAVED:], name
    assert elsewhere.column("waiting_tokens") == resumed.column("waiting_tokens")
    assert elsewhere.column("loss") == pytest.approx(resumed.column("loss"), rel=1e-5)
