"""A loop that never calls Megatron's `pretrain`: the losses of the same loop without plans."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

pytest.importorskip("megatron.training")

from tests.support.loop_runs import LENGTHS
from tests.support.megatron_run import Job, Trainer

pytestmark = pytest.mark.megatron


def trained(
    trainer: Trainer, folder: Path, num_ranks: int, yaml: str = "", library: str = "bridge"
) -> tuple[list[list[float]], str]:
    """Loss, gradient norm and evaluated loss of every step, and rank 0's log."""
    folder.mkdir()
    (folder / "balance.yaml").write_text(yaml)
    with_plans = (str(folder / "balance.yaml"), str(folder / "log")) if yaml else ()
    result = trainer.run(Job("loop", num_ranks, (library, *with_plans), str(folder)))
    log = result.log(0)
    steps = [json.loads(line[5:]) for line in log.splitlines() if line.startswith("step ")]
    assert yaml.count("refused") or result.failed is None, result.tail(result.failed or 0)
    return steps, log


@pytest.fixture(scope="module")
def plain(trainer: Trainer, tmp_path_factory: pytest.TempPathFactory) -> list[list[float]]:
    """The loop without plans, on one rank."""
    steps, log = trained(trainer, tmp_path_factory.mktemp("plain") / "run", 1)
    assert len(steps) == 3
    assert "own forward steps 48" in log
    return steps


def test_a_loop_of_its_own_trains_as_without_plans(trainer: Trainer, plain: list[list[float]], tmp_path: Path) -> None:
    """With a self-check before it, a step that runs again, and a record of each."""
    yaml = "planner: {name: zeppelin, slack: 2.0}\nself_check: true\nplan_ahead: false\n"
    ours, log = trained(trainer, tmp_path / "ours", 2, yaml)
    for got, wanted in zip(ours, plain, strict=True):
        assert got == pytest.approx(wanted, rel=1e-5)
    assert "self-check before step 1" in log
    assert "those that the loop hands over are not called" in log
    assert "own forward steps 0" in log
    leapt = re.findall(r"at iteration #(\d+) .*message='Spiky loss'", log)
    assert leapt == ["2"], "sums leap in every step, the loss of a token in one"
    assert log.count("Need to rerun step") == 1
    records = [json.loads(line) for line in (tmp_path / "ours" / "log" / "steps.jsonl").read_text().splitlines()]
    assert [each["step"] for each in records] == [1, 2, 3]
    assert [each["loss"] for each in records] == pytest.approx([step[0] for step in plain], rel=1e-5)
    assert [each["grad_norm"] for each in records] == pytest.approx([step[1] for step in plain], rel=1e-5)
    assert [each["num_tokens"] for each in records] == [sum(LENGTHS)] * 3
    read = [json.loads(line[5:]) for line in log.splitlines() if line.startswith("read ")]
    assert read == [[[length] for length in LENGTHS[::2]]] * 3, "of rank 0's replica, without padding"


@pytest.mark.parametrize("library", ["nemo", "verl"])
def test_calls_of_other_libraries_train_alike(
    trainer: Trainer, plain: list[list[float]], tmp_path: Path, library: str
) -> None:
    yaml = "planner: {name: zeppelin, slack: 2.0}\nplan_ahead: false\n"
    ours, _ = trained(trainer, tmp_path / "ours", 2, yaml, library)
    for got, wanted in zip(ours, plain, strict=True):
        assert got == pytest.approx(wanted, rel=1e-5)


def test_a_planner_of_microbatches_is_refused(trainer: Trainer, tmp_path: Path) -> None:
    _, log = trained(trainer, tmp_path / "run", 1, "# refused\nplanner: {name: wlb_llm}\n")
    assert "planner wlb_llm: a loop of its own needs a planner that keeps the microbatches it is given" in log
