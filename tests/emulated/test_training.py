"""Megatron's own loop over the emulated cluster, started as a user starts it."""

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("megatron.training")

from megatron_balance.cli import main
from tests.megatron.conftest import MODEL, RUN, write_corpus
from tests.support.processes import ended
from tools.megatron_flags import command_line

pytestmark = [pytest.mark.megatron, pytest.mark.usefixtures("permitted")]

ROOT = Path(__file__).resolve().parents[2]
NUM_RANKS = 4
STEPS = 2
BYTES_PER_TOKEN = 2 * 4 * 4 * 4  # keys and values of 4 heads of 4 numbers of 4 bytes each: MODEL


def test_training_runs_over_shaped_nics_and_finds_the_nodes_by_host_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus = write_corpus(tmp_path / "documents", (300, 140, 40, 20, 7, 1) * 10)
    (tmp_path / "balance.yaml").write_text("planner: {name: te_ring}\n")
    flags = {"context-parallel-size": NUM_RANKS, "train-iters": STEPS, "data-path": corpus}
    ours = {"balance-config": tmp_path / "balance.yaml", "balance-log": tmp_path / "log"}
    command = [sys.executable, "-m", "tools.emulated_cluster", "run", "--ranks-per-node", "2", "--intra-mbit", "800"]
    command += [
        "--logs",
        str(tmp_path / "ranks"),
        "--json",
        str(tmp_path / "figures.json"),
        "--deadline-s",
        "100",
        "--",
    ]
    command += ["-m", "megatron_balance.pretrain_gpt", *command_line(MODEL, RUN, flags, ours)]
    done = ended(command, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-6000:]
    steps = [json.loads(line) for line in (tmp_path / "log" / "steps.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [1, 2]
    assert all(step["kv_tokens_received_inter_node"] > 0 for step in steps)
    nics = json.loads((tmp_path / "figures.json").read_text())["nics"]
    assert [(nic["node"], nic["nic"]) for nic in nics] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    # A lower bound: the keys and values of one layer's forward pass, which two layers, their
    # gradients and the optimizer add to.
    forward = sum(step["kv_tokens_received_inter_node"] for step in steps) * BYTES_PER_TOKEN
    assert sum(nic["received"] for nic in nics) > forward
    asked = ["report", "--run", str(tmp_path / "log"), "--planner", "zeppelin", "--out", str(tmp_path / "gain.html")]
    assert main([*asked, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["baseline"], {row["planner"] for row in found["rows"]}) == ("te_ring", {"te_ring", "zeppelin"})
    assert found["lengths"]["num_batches"] == sum(len(step["lengths"]) for step in steps)
    assert found["asked"]["cluster"]["num_ranks"] == NUM_RANKS
