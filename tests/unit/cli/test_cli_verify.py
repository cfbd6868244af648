"""`plan --out` and `verify`: a plan file is proved, and any change to it is found."""

import json
from pathlib import Path

import pytest

from megatron_balance.cli import verify
from megatron_balance.ir.plan import from_json


@pytest.fixture
def plan_file(tmp_path, run) -> Path:
    path = tmp_path / "plan.json"
    run.printed(
        "plan --planner zeppelin --ranks 4 --ranks-per-node 2 --tokens-per-rank 512 --lengths 900,300,60,7 --out "
        f"{path}"
    )
    return path


def change(path: Path, **keys: object) -> Path:
    body = json.loads(path.read_text()) | keys
    path.write_text(json.dumps(body))
    return path


def body_of(path: Path) -> dict:
    return json.loads(path.read_text())


def test_written_plan_verifies_and_json_says_what_was_proved(plan_file, run):
    for policy in ("keep", "replay"):
        code, out, err = run("verify", plan_file, "--policy", policy)
        assert (code, err) == (0, "")
        assert "verified: zeppelin" in out
        assert "the program written with it is right too" in out
    report = run.json("verify --json", plan_file)
    assert report["verified"] is True
    assert report["results"][0]["num_ops"] > 0
    assert report["results"][0]["fingerprint"] == body_of(plan_file)["fingerprint"]


def test_dropping_any_line_of_the_program_is_found(tmp_path, run):
    # Of a dispatch, whose program is short and has every kind of line.
    plan_file = tmp_path / "plan.json"
    run.printed(f"plan --planner distca --ranks 2 --ranks-per-node 2 --lengths 900,7 --out {plan_file}")
    lines = body_of(plan_file)["program"]
    every = ("program", "owner", "forward", "exchange", "attend", "merge", "backward")  # what begins a block
    every += ("q", "kv", "out", "over", "dq", "dkv", "dout")
    assert {word for line in lines for word in line.split()} >= {*every}
    found = 0
    # a heading that reading does without
    for dropped in (number for number, line in enumerate(lines) if line != "forward"):
        change(plan_file, program=lines[:dropped] + lines[dropped + 1 :])
        code, out, err = run("verify", plan_file)
        # A missing op, transfer or route is a program that is not the planned one (1); a missing
        # header cannot be read (2).
        assert code in (1, 2), lines[dropped]
        assert err
        assert out == ""
        found += code == 1
    assert found > len(lines) // 2


def refused(run, path: Path, command: str = "verify") -> str:
    # What is said of a plan that does not hold.
    code, _, err = run(command, path)
    assert code == 1
    return err


def test_a_changed_program_or_plan_is_found(plan_file, tmp_path, run):
    # With another exchange id it computes the same, but it is not what the ranks run.
    lines = body_of(plan_file)["program"]
    last = max(number for number, line in enumerate(lines) if line.startswith("exchange "))
    word, number, rest = lines[last].split(" ", 2)
    change(plan_file, program=[*lines[:last], f"{word} {int(number) + 1} {rest}", *lines[last + 1 :]])
    assert "not the one that was proved" in refused(run, plan_file)
    # The program of another plan; another length under the old fingerprint.
    other = tmp_path / "other.json"
    run.printed(f"plan --planner te_ring --ranks 4 --ranks-per-node 2 --lengths 900,300,60,7 --out {other}")
    change(plan_file, program=body_of(other)["program"])
    assert "the program written is not the plan's" in refused(run, plan_file)
    change(plan_file, lengths=[901, 300, 60, 7], program=None)
    assert "the plan was changed" in refused(run, plan_file)


def test_forged_plan_that_forgets_a_sequence_is_found(plan_file, run):
    body = body_of(plan_file)
    body["zones"] = body["zones"][1:]
    body["program"] = None
    body["fingerprint"] = from_json(json.dumps(body)).fingerprint()
    plan_file.write_text(json.dumps(body))
    code, out, err = run("verify --json", plan_file)
    assert code == 1
    assert json.loads(out)["verified"] is False
    assert "not verified" in err


def test_several_batches_are_proved_one_by_one(tmp_path, run):
    lengths, path = tmp_path / "l.json", tmp_path / "plan.json"
    lengths.write_text("[[500, 20], [64, 64, 3]]")
    run.printed(f"plan --planner te_ring --ranks 2 --lengths-file {lengths} --out {path}")
    assert run.printed("verify", path).count("verified: te_ring") == 2
    body = body_of(path)
    body["plans"][1]["fingerprint"] = "0" * 16
    path.write_text(json.dumps(body))
    code, out, err = run("verify", path)
    assert code == 1
    assert "plan 1: not verified" in err
    assert out.count("verified: te_ring") == 1


def test_long_program_is_left_out_and_the_plan_still_proved(tmp_path, run, monkeypatch):
    monkeypatch.setattr(verify, "MAX_PROGRAM_LINES", 5)
    path = tmp_path / "plan.json"
    run.printed(f"plan --planner te_ring --ranks 2 --lengths 64 --out {path}")
    assert body_of(path)["program"] is None
    assert "program written" not in run.printed("verify", path)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "cannot be read: No such file or directory"),
        ("{", "not JSON"),
        ("[1]", "not a plan"),
        ("{}", "not a plan of this version"),
        ('{"format": "megatron-balance plan 3"}', "damaged plan"),
        ('{"format": "megatron-balance plans 1", "plans": []}', "holds no plans"),
        ('{"format": "megatron-balance plan 3", "program": 3}', "program: expected a list of lines or null"),
    ],
)
def test_unreadable_file_is_one_line_and_exit_code_2(tmp_path, run, content, expected):
    path = tmp_path / "plan.json"
    if content is not None:
        path.write_text(content)
    assert expected in run.error("verify", path)
