"""The record of a step, its file and its scalars."""

import errno
import json
import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megatron_balance import make_planner
from megatron_balance.config import load_cluster, load_model
from megatron_balance.cost.analytic import AnalyticCost
from megatron_balance.errors import ConfigError, DataError
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.forest import Segment, document
from megatron_balance.ir.model import Model
from megatron_balance.ir.step import StepPlan
from megatron_balance.ir.strategy import Strategy
from megatron_balance.planning.proofs import Proofs
from megatron_balance.runtime.groups import single
from megatron_balance.runtime.recorder import Counters
from megatron_balance.training import log
from megatron_balance.training.figures import JobFacts, imbalance_after, imbalance_before
from megatron_balance.training.log import LineFile, LogTarget, StepLog
from megatron_balance.training.plans import PlannedStep
from megatron_balance.training.pool import Pool, TensorParallel
from megatron_balance.training.tokens import PoolLengths, share_lengths

pytest.importorskip("torch")

LENGTHS = (30, 20, 40)
CLUSTER, MODEL = Cluster(num_ranks=1, ranks_per_node=1), Model(8, 8, 16)

CHANGE = {"pull_bytes": 2500000, "pull_s": 0.0125, "predicted_pull_s": 0.01}
CHANGE |= {"push_bytes": 5000000, "push_s": 0.025, "predicted_push_s": 0.02}


def finished(
    steps: StepLog,
    strategy: Strategy | None = None,
    change: Mapping[str, float] | None = None,
    numbers: Sequence[int] = (7,),
    loss: float | None = None,
) -> None:
    # Finish a step that never began, then step 7 or `numbers`, perhaps under a strategy. `loss`:
    # also the norm; None: 1.5 and 0.25.
    steps.describe(JobFacts(Pool(single(), 1, (0,), (0,)), MODEL, AnalyticCost(CLUSTER, MODEL)), torch.device("cpu"))
    steps.finish(1, None, None)
    plan = make_planner("zeppelin", CLUSTER, MODEL, tokens_per_rank=90)(LENGTHS)
    step = StepPlan.whole((plan,))
    if strategy is not None:
        step = StepPlan.side_by_side(strategy, [step])
    planned = PlannedStep(step, plan_s=0.25, wait_s=0.125, proofs=Proofs(4, 1))
    for number in numbers:
        steps.begin(number)
        steps.ran(planned, PoolLengths((LENGTHS,), (np.zeros(3, dtype=np.int64),)), [Counters(kernel_calls=5)])
        if change is not None:
            steps.changed(lambda: change)
        steps.finish(number, torch.tensor(1.5) if loss is None else loss, 0.25 if loss is None else loss)
    steps.close()


def test_a_step_under_a_strategy_says_it_and_bytes_and_seconds_predicted_and_measured(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    strategy = Strategy.parse("tp1-pp1-cp1")
    for folder, change, moved in (
        ("moved", CHANGE, "pull 2.5 MB in 12.5 ms (predicted 10.0), push 5.0 MB in 25.0 ms (predicted 20.0)"),
        ("own", None, "on the command line's layout"),
    ):
        with caplog.at_level(logging.INFO):
            finished(StepLog(LogTarget(folder=tmp_path / folder)), strategy, change)
        assert f"step 7: strategy {strategy}, {moved}" in caplog.text
        (record,) = map(json.loads, (tmp_path / folder / "steps.jsonl").read_text().splitlines())
        assert (record["strategy"], record["change"]) == (str(strategy), change or {})


def test_scalars_go_to_the_writers_of_a_step_under_the_names_of_the_log_and_the_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    written: list[tuple[str, float, int]] = []
    writers: Any = lambda step: [lambda *scalar: written.append(scalar)] if step == 7 else []  # noqa: E731
    with caplog.at_level(logging.INFO):
        finished(StepLog(LogTarget(folder=tmp_path, writers=writers)))
    scalars = {name: value for name, value, _ in written}
    assert {step for _, _, step in written} == {7}, "evaluation is not a step"
    assert scalars["balance/imbalance_after/attention"] == 1.0
    assert scalars["balance/kernel_calls"] == 5
    assert scalars["balance/num_tokens"] == 90
    assert "step 7: planner zeppelin, num_sequences 3, num_tokens 90, imbalance_before/tokens 1, " in caplog.text
    assert "step 7: plans of 4 steps proved so far; 1 were too large to prove beside training" in caplog.text
    record = json.loads((tmp_path / "steps.jsonl").read_text())
    (line,) = [message for message in caplog.messages if message.startswith("step 7: planner")]
    said = dict(part.rsplit(" ", 1) for part in line.removeprefix("step 7: ").split(", "))
    assert said.pop("planner") == record["planner"]
    assert {f"balance/{name}": float(value) for name, value in said.items()} == pytest.approx(scalars)
    for name, value in scalars.items():
        of = record
        for key in name.split("/")[1:]:
            of = of[key]
        assert of == value


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_number_that_json_does_not_have_is_null(tmp_path: Path, loss: float) -> None:
    # The loss of a step without targets, as Megatron has it, and the norm of one that overflows.
    finished(StepLog(LogTarget(folder=tmp_path)), loss=loss)
    text = (tmp_path / "steps.jsonl").read_text()
    record = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert (record["step"], record["loss"], record["grad_norm"]) == (7, None, None)


def test_records_and_the_configuration_lie_in_the_folder(tmp_path: Path) -> None:
    finished(StepLog(LogTarget(folder=tmp_path / "log", config="planner: zeppelin\n")))
    assert (tmp_path / "log" / "config.yaml").read_text() == "planner: zeppelin\n"
    (line,) = (tmp_path / "log" / "steps.jsonl").read_text().splitlines()
    record = json.loads(line)
    assert (record["step"], record["loss"], record["grad_norm"], record["plan_ms"]) == (7, 1.5, 0.25, 250)
    assert record["counters"]["kernel_calls"] == [5]
    assert (record["proved_steps"], record["unproved_steps"], record["announced"]) == (4, 1, False)
    (tmp_path / "file").write_text("")
    assert record["lengths"] == [[30, 20, 40]]
    assert load_model(str(tmp_path / "log" / "model.yaml")) == MODEL
    assert load_cluster(str(tmp_path / "log" / "cluster.yaml")).build() == CLUSTER
    with pytest.raises(ConfigError, match="file: cannot be written"):
        StepLog(LogTarget(folder=tmp_path / "file"))


def test_steps_that_run_again_are_in_the_file_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    # Steps 7 and 8 of a run that was killed; the run that resumes goes on at 7.
    steps, lines = tmp_path / "steps.jsonl", ['{"step": 6}', '{"step": 7}', '{"step": 8, "lo']
    steps.write_text("\n".join(lines))
    finished(StepLog(LogTarget(folder=tmp_path)))
    assert [json.loads(line)["step"] for line in steps.read_text().splitlines()] == [6, 7]
    assert (tmp_path / "steps.replaced.jsonl").read_text().splitlines() == lines[1:]
    assert "2 lines from step 7 on, which run again" in caplog.text


def test_the_log_has_a_line_of_the_first_step_and_of_every_interval(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    # Of other steps figures are computed where a file takes them.
    computed: list[int] = []
    figures = log.step_figures
    monkeypatch.setattr(log, "step_figures", lambda *given: computed.append(1) or figures(*given))
    for folder, number in ((None, 3), (tmp_path, 5)):
        computed.clear()
        caplog.clear()
        with caplog.at_level(logging.INFO):
            finished(StepLog(LogTarget(folder=folder, interval=3)), numbers=(7, 8, 9, 11, 12))
        told = [record.getMessage().split(":")[0] for record in caplog.records if "planner " in record.getMessage()]
        assert told == ["step 7", "step 9", "step 12"]
        assert len(computed) == number
    computed.clear()
    with caplog.at_level(logging.WARNING, "megatron_balance"):
        finished(StepLog(LogTarget()))
    assert not computed, "nobody reads them"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_or_a_writer_that_fails_ends_no_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("the dashboard is away")

    (tmp_path / "steps.jsonl").symlink_to("/dev/full")
    with caplog.at_level(logging.INFO):
        finished(StepLog(LogTarget(folder=tmp_path, writers=lambda _: [fails])))
    assert "steps.jsonl: a line could not be written (No space left on device); training goes on" in caplog.text
    assert "step 7: a writer of scalars failed (RuntimeError('the dashboard is away'))" in caplog.text


def test_lines_after_one_cut_short_or_left_out_are_whole(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "lo')
    lines = LineFile(path)
    lines.add("third")
    short = Short(lines._file)
    lines._file = short  # pyright: ignore[reportAttributeAccessIssue]
    for text in ("fourth", "fifth"):
        lines.add(text)
    short.room = 100
    lines.add("sixth")
    lines.close()
    assert path.read_text().splitlines() == ['{"step": 1}', '{"step": 2, "lo', "third", "fou", "sixth"]
    assert caplog.text.count("a line could not be written") == 1
    assert "written again; 2 lines before this one are missing" in caplog.text


class Short:
    # A disk with room for so many bytes.
    def __init__(self, file: Any, room: int = 3) -> None:
        self.file, self.room = file, room

    def write(self, data: bytes) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = self.file.write(data[: self.room])
        self.room -= written
        return written

    def close(self) -> None:
        self.file.close()


# Imbalance of a step, before and after planning.


def test_imbalance_before_is_that_of_replicas_and_after_of_every_microbatchs_slowest_rank() -> None:
    pool = Pool(SimpleNamespace(rank=0, size=4), 4, (0, 0, 1, 1), (0, 2))  # pyright: ignore[reportArgumentType]
    shared = PoolLengths(((3, 1), (2,)), (np.array([0, 2]), np.array([2])))
    assert imbalance_before(shared, pool) == {"tokens": 1.0, "attention": pytest.approx(6 / 5)}
    trees = ((Segment(1, -1), Segment(1, 0), Segment(1, 0)), document(1)), (document(2),)
    branched = PoolLengths(shared.lengths, shared.owners, trees=trees)
    assert imbalance_before(branched, pool)["attention"] == pytest.approx(5 / 4.5), "siblings do not see one another"
    assert imbalance_after(np.array([[1.0, 3.0], [3.0, 1.0]])) == 1.5
    assert imbalance_after(np.zeros((1, 2))) == 1.0
    # pipelines each by their own microbatches, which meet once a step
    assert imbalance_after(np.array([[2.0, 2.0]]), np.array([[1.0, 1.0], [1.0, 1.0]])) == 1.0
    assert imbalance_after(np.array([[3.0, 1.0]]), np.array([[1.0, 3.0], [3.0, 1.0]])) == 2.0
    wide, narrow = np.array([[8.0]]), np.array([[4.0]])
    assert imbalance_after(wide, narrow, gpus=(2, 1)) == 1, "twice the load on a rank of two GPUs is none"
    assert imbalance_after(wide, narrow) == pytest.approx(8 / 6)


# The error of a rank that could not read, told with what caused it.


def test_an_error_of_a_data_set_is_told_with_all_its_causes() -> None:
    def fails() -> None:
        try:
            raise KeyError("shard 7")
        except KeyError as error:
            raise OSError("no such\nobject") from error

    try:
        fails()
    except OSError as error:
        failure = error
    with pytest.raises(DataError) as told:
        share_lengths([], failure, 1, Pool(single(), 1, (0,), (0,)), TensorParallel(), torch.device("cpu"))
    message = str(told.value)
    assert message.startswith("rank 0 could not read its microbatches: OSError: no such object (")
    assert "caused by KeyError: 'shard 7' (" in message
    assert message.count("test_log.py:") == 2
    assert told.value.__cause__ is failure
