"""A loop that never calls Megatron's `pretrain`: the losses of the same loop without plans."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("megatron.training")

from tests.support.megatron_run import Job, Trainer

pytestmark = pytest.mark.megatron


def trained(trainer: Trainer, folder: Path, num_ranks: int, yaml: str = "") -> tuple[list[list[float]], str]:
    """Loss, gradient norm and evaluated loss of every step, and rank 0's log."""
    folder.mkdir()
    (folder / "balance.yaml").write_text(yaml)
    result = trainer.run(Job("loop", num_ranks, (str(folder / "balance.yaml"),) if yaml else (), str(folder)))
    log = result.log(0)
    steps = [json.loads(line[5:]) for line in log.splitlines() if line.startswith("step ")]
    assert yaml.count("refused") or result.failed is None, result.tail(result.failed or 0)
    return steps, log


def test_a_loop_of_its_own_trains_as_without_plans(trainer: Trainer, tmp_path: Path) -> None:
    plain, alone = trained(trainer, tmp_path / "plain", 1)
    yaml = "planner: {name: zeppelin, slack: 2.0}\nself_check: true\nplan_ahead: false\n"
    ours, log = trained(trainer, tmp_path / "ours", 2, yaml)
    assert len(plain) == 3
    for got, wanted in zip(ours, plain, strict=True):
        assert got == pytest.approx(wanted, rel=1e-5)
    assert "self-check before step 1" in log
    assert "own forward steps 48" in alone
    assert "own forward steps 0" in log


def test_a_planner_of_microbatches_is_refused(trainer: Trainer, tmp_path: Path) -> None:
    _, log = trained(trainer, tmp_path / "run", 1, "# refused\nplanner: {name: wlb_llm}\n")
    assert "planner wlb_llm: a loop of its own needs a planner that keeps the microbatches it is given" in log
