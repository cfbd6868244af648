"""Figures of a training run's report: kinds of damaged logs; what is said follows from the steps."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_balance.cli import main
from megatron_balance.errors import ConfigError
from megatron_balance.lab.report import run
from scripts.demo import write_page


def record(step: int, **changes: Any) -> dict[str, Any]:
    """A step as `training.log` writes it, with the keys that a report reads."""
    return {
        "step": step,
        "loss": 6.0 - 0.1 * step,
        "grad_norm": 1.0,
        "planner": "zeppelin",
        "num_sequences": 5,
        "num_tokens": 4000,
        "num_microbatches": 2,
        "imbalance_before": {"tokens": 1.5, "attention": 2.5},
        "imbalance_after": {"tokens": 1.0, "attention": 1.02},
        "kv_tokens_received": 1000.0,
        "kv_tokens_received_inter_node": 100.0,
        "predicted_ms": 80.0,
        "plan_ms": 5.0,
        "plan_wait_ms": 0.5,
        "step_ms": 100.0,
        "kernel_calls": 8.0,
        "counters": {"kernel_calls": [8, 8, 8, 8]},
        "fingerprint": "0" * 16,
        **changes,
    }


def write(folder: Path, records: list[dict[str, Any]], *, end: str = "\n") -> Path:
    folder.mkdir(exist_ok=True, parents=True)
    file = folder / "steps.jsonl"
    file.write_text("\n".join(json.dumps(each) for each in records) + end, encoding="utf-8")
    return file


def shown(folder: Path, records: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures of one run of these steps."""
    return run.document([write(folder / "run", records)])


def test_empty_lines_and_a_line_cut_short_are_left_out_and_said(tmp_path):
    file = write(tmp_path / "run", [record(1), record(2)])
    assert run.read(file.parent) == run.read(file)
    assert run.read(file).label == "run"
    whole = file.read_text()
    file.write_text(whole.replace("\n", "\n\n  \n", 1) + '{"step": 3, "lo', encoding="utf-8")
    found = run.read(file)
    assert [step["step"] for step in found.steps] == [1, 2]
    assert any(note.startswith("2 empty lines") for note in found.notes)
    assert any("Line 5, the last, is incomplete" in note for note in found.notes)
    # Also where a run was killed and another went on.
    file.write_text(whole.replace("\n", '\n{"step": 2, "lo\n', 1), encoding="utf-8")
    found = run.read(file)
    assert [step["step"] for step in found.steps] == [1, 2]
    assert any(note.startswith("Line 2 is incomplete") for note in found.notes)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('"step": 2, "lo', "steps.jsonl, line 2: is damaged"),
        ("[1, 2]", "line 2: expected an object with the keys of a step, got [1, 2]"),
        ('{"loss": 1.0, "step_ms": 3}', "line 2: expected the number of the step in the key 'step', which is missing"),
        ('{"step": "two", "step_ms": 3}', "the key 'step', got \"two\""),
        ('{"step": 2}', "line 2: expected milliseconds in the key 'step_ms', which is missing"),
        ('{"step": 2, "step_ms": -3}', "the key 'step_ms', got -3"),
        ('{"step": 2, "step_ms": NaN}', "the key 'step_ms', got NaN"),
        ('{"step": 2, "step_ms": 3, "loss": "low"}', 'line 2: loss: expected a number, got "low"'),
        ('{"step": 2, "step_ms": 3, "imbalance_after": 2}', "expected an object with 'tokens' and 'attention', got 2"),
        ('{"step": 2, "step_ms": 3, "imbalance_after": {"tokens": "x"}}', "after.tokens: expected a number, got"),
        ('{"step": 2, "step_ms": 3, "planner": 7}', "planner: expected a name, got 7"),
        ("[" * 100_000, "line 2: is damaged (not JSON that can be read: brackets nest too deeply)"),
        ('{"loss": ' + "9" * 5000 + "}", "line 2: is damaged (a whole number beyond 64 bits: 99999999999999999999...)"),
    ],
)
def test_a_damaged_line_is_named_with_what_was_expected(tmp_path, line, message):
    file = write(tmp_path / "run", [record(1)])
    file.write_text(f"{file.read_text()}{line}\n{json.dumps(record(3))}\n", encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        run.read(file)
    assert message in str(caught.value)


def test_a_missing_or_empty_log_is_said(tmp_path):
    for log, message in (
        (tmp_path / "none.jsonl", "cannot be read: No such file or directory"),
        (tmp_path, "holds no steps.jsonl"),
        (write(tmp_path / "empty", [], end=""), "has no steps"),
        (write(tmp_path / "blank", [], end="\n\n"), "has no steps"),
    ):
        with pytest.raises(ConfigError, match=message):
            run.read(log)
    (tmp_path / "steps.jsonl").write_bytes(b"\x80\x03}q\x00\n")
    with pytest.raises(ConfigError, match="line 1: is damaged"):
        run.read(tmp_path)


def test_steps_that_ran_again_after_a_restart_count_once_and_what_is_no_number_is_a_gap(tmp_path):
    # Steps that ran again after a restart count once.
    file = write(tmp_path / "run", [record(1), record(2, loss=9.0), record(3), record(2, loss=5.5), record(6)])
    found = run.read(file)
    assert [step["step"] for step in found.steps] == [1, 2, 3, 6]
    assert found.series("loss")[1] == 5.5
    assert any("1 step ran more than once" in note for note in found.notes)
    assert any("2 steps between 1 and 6 are not in the log" in note for note in found.notes)
    # A loss that is no number is a gap and missing keys leave their parts out.
    found = shown(tmp_path, [record(1), record(2, loss=float("nan")), record(3, loss=None)])["runs"][0]
    assert found["curves"]["loss"] == [5.9, None, None]
    assert any("2 steps have no loss" in note for note in found["notes"])
    found = shown(tmp_path, [{"step": step, "step_ms": 100.0 + step} for step in range(1, 9)])
    each = found["runs"][0]
    assert set(each["missing"]) == {*run.NUMBERS, *run.LOADS}
    assert (each["tokens_per_s"], each["loss"]) == (None, None)
    assert set(each["curves"]) == {"steps_per_point", "step", "step_ms"}
    assert "the log holds no prediction" in found["answer"][0]


def test_means_are_without_the_warm_up_and_long_runs_are_drawn_as_means_of_neighbours(tmp_path):
    slow_start = [record(1, step_ms=9000.0), record(2, step_ms=5000.0), *(record(step) for step in range(3, 11))]
    each = shown(tmp_path, slow_start)["runs"][0]
    assert (each["num_steps"], each["steady_steps"], each["num_ranks"]) == (10, 8, 4)
    assert each["step_ms"]["median"] == each["means"]["step_ms"] == 100.0
    assert each["tokens_per_s"] == pytest.approx(40_000)
    assert each["curves"]["step_ms"][0] == 9000.0
    curves = shown(tmp_path, [record(step, loss=float(step)) for step in range(1, 4001)])["runs"][0]["curves"]
    assert curves["steps_per_point"] == 3
    assert len(curves["step"]) == len(curves["loss"]) == 1334
    assert curves["loss"][:2] == [2.0, 5.0]


def test_step_time_is_said_to_follow_what_it_follows(tmp_path):
    varied = []
    for step in range(1, 31):
        crossed, tokens = float(step % 7), 4000 + (step * 37) % 11
        varied.append(
            record(step, kv_tokens_received_inter_node=crossed, step_ms=100.0 + 10 * crossed, num_tokens=tokens)
        )
    found = shown(tmp_path, varied)
    follows = found["runs"][0]["follows"]
    assert follows["kv_tokens_received_inter_node"] == pytest.approx(1.0)
    assert abs(follows["num_tokens"]) < 0.6
    assert "predicted_ms" not in follows  # it never varied
    assert found["limits"]["run"]["follows_most"] == "kv_tokens_received_inter_node"


WAITS, ALONE = {"plan_wait_ms": 60.0, "predicted_ms": 20.0}, {"predicted_ms": 10.0}
UNEVEN, CROSSING = {"imbalance_after": {"tokens": 1.0, "attention": 2.0}}, {"kv_tokens_received_inter_node": 900.0}
PREDICTED = "Computing limits it: by the plans' predictions (simulated) 80 % of it"


@pytest.mark.parametrize(
    ("changes", "limit", "sentence", "suggestion"),
    [
        (WAITS, "plan_wait", "waiting for plans limits it: 60.0 ms, 60 % of it", "60.0 ms for plans"),
        ({}, "computing", PREDICTED, "--tokens 2000"),
        (ALONE, "rest", "the rest, 89.5 ms, 90 % of it, is what they leave out", "megatron-balance profile"),
        (UNEVEN, None, "Computing limits it", "2.00 times the mean load"),
        (CROSSING, "computing", "Computing limits it", "90 % of the received keys and values"),
    ],
)
def test_what_limits_a_run_and_what_to_try_are_from_its_figures(tmp_path, changes, limit, sentence, suggestion):
    found = shown(tmp_path, [record(step, **changes) for step in range(1, 4)])
    each = found["limits"]["run"]
    assert sum(each["parts_ms"].values()) == pytest.approx(each["step_ms"]) == 100.0
    if limit is None:
        assert each["parts_ms"]["imbalance"] == pytest.approx(40.0)
    else:
        assert each["limit"] == limit
    assert sentence in each["sentence"]
    assert any(suggestion in said for said in found["try_next"]["run"]), found["try_next"]


def test_real_keys_are_those_that_are_read_and_the_command_to_simulate_next_names_the_run(tmp_path):
    # The command to simulate next names the run.
    config = tmp_path / "run" / "config.yaml"
    config.parent.mkdir()
    config.write_text("planner: zeppelin\n", encoding="utf-8")
    said = shown(tmp_path, [record(step) for step in range(1, 4)])["try_next"]["run"][-1]
    assert f"megatron-balance report --config {config} --ranks 4 --dataset YOUR_CORPUS --tokens 2000" in said
    # Real keys are those that are read.
    # The record that `training.log` writes has every key that a report reads.
    room = Path(__file__).resolve().parents[3] / "megatron_balance" / "training"
    written = "".join((room / name).read_text(encoding="utf-8") for name in ("log.py", "figures.py"))
    read = ("step", "step_ms", "planner", "counters", *run.NUMBERS, *run.LOADS)
    assert [key for key in read if f'"{key}"' not in written] == []


# Two runs


def test_two_runs_are_held_against_each_other_on_their_common_steps(tmp_path):
    slow = write(tmp_path / "te_ring", [record(step, step_ms=300.0) for step in range(1, 9)])
    near = [record(step, step_ms=150.0, loss=(6.0 - 0.1 * step) * (1 + 1e-6)) for step in range(3, 12)]
    fast = write(tmp_path / "zeppelin", near)
    compared = run.document([slow, fast])["compared"]
    assert compared["common_steps"] == 6
    assert compared["times_as_fast"] == pytest.approx(2.0)
    assert compared["largest_loss_difference"] == pytest.approx(1e-6, rel=1e-3)
    assert compared["same_data"]
    backwards = run.document([fast, slow])["compared"]
    assert backwards["times_as_fast"] == pytest.approx(0.5)
    said = "zeppelin is 2.00 times as fast as te_ring: 150 ms instead of 300 ms a step"
    assert all(each["sentence"].startswith(said) for each in (compared, backwards))


def test_runs_of_other_data_or_other_steps_are_said_to_be_and_those_of_one_name_told_apart(tmp_path):
    # Runs of other data or other steps are said to be.
    one = write(tmp_path / "one", [record(1), record(2)])
    other = write(tmp_path / "other", [record(1), record(2, num_tokens=5000)])
    later = write(tmp_path / "later", [record(7)])
    assert "not known to have seen the same sequences" in run.document([one, other])["compared"]["sentence"]
    bare = [{key: value for key, value in record(1).items() if key != "num_tokens"}]
    unknown = [write(tmp_path / name, bare) for name in ("a", "b")]
    assert not run.document(unknown)["compared"]["same_data"], "nobody counted"
    assert "no step in common" in run.document([one, later])["compared"]["sentence"]
    assert main(["report", "--steps", str(one), "--steps", str(later), "--out", str(tmp_path / "r.html")]) == 0
    # One run twice is a mistake and two of one name are told apart.
    one, other = (write(tmp_path / name / "log", [record(1)]) for name in ("a", "b"))
    with pytest.raises(ConfigError, match="is given twice"):
        run.document([one, one.parent])
    assert [each["label"] for each in run.document([one, other])["runs"]] == [str(one), str(other)]


def test_the_demo_ends_with_a_page_of_its_first_and_last_planner(tmp_path):
    for planner in ("te_ring", "hybrid_dp", "zeppelin"):
        write(tmp_path / planner, [record(1, planner=planner), record(2, planner=planner)])
    page = write_page(tmp_path, ("te_ring", "hybrid_dp", "zeppelin"))
    assert page == tmp_path / "report.html"
    text = page.read_text()
    assert "The loss of te_ring goes from 5.9000" in text
    assert "The loss of zeppelin goes from 5.9000" in text
    assert "The loss of hybrid_dp" not in text
    write_page(tmp_path, ("te_ring",))
    assert "zeppelin goes from" not in page.read_text()
