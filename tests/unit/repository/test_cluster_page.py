"""docs/cluster.md names flags, files and keys that exist."""

from __future__ import annotations

import re
from pathlib import Path

from megatron_balance.config import CommunicationChoice
from megatron_balance.planning.choice import load_config

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "cluster.md").read_text()


def test_files_that_it_names_are_there():
    named = set(re.findall(r"(?:scripts|tests|docs|tools)/[\w./-]+\.(?:sh|sbatch|md|py)", PAGE))
    assert sorted(path for path in named if not (ROOT / path).is_file()) == ["tools/preprocess_data.py"]  # Megatron's
    assert len(named) > 1


def test_its_configurations_load(tmp_path):
    blocks = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) == 3
    (tmp_path / "cluster.yaml").write_text("base: h200\n")
    for at, block in enumerate(blocks):
        path = tmp_path / f"balance{at}.yaml"
        path.write_text(block if "planner" in block else f"planner: zeppelin\n{block}")
        config = load_config(path)
        assert config.planner is not None
    assert config.communication == CommunicationChoice(inter_node_sms=4, intra_node_sms=12)


def test_its_step_figures_are_written():
    package = ROOT / "megatron_balance"
    written = "".join(
        (package / file).read_text() for file in ("training/log.py", "training/figures.py", "runtime/counters.py")
    )
    names = {
        name.partition(".")[0]
        for row in PAGE.partition("look at this first")[2].partition("## NCCL")[0].splitlines()
        if row.startswith("| ")
        for name in re.findall(r"`([a-z_.]+)`", row.split("|")[1])
    }
    assert {"plan_wait_ms", "imbalance_after", "bytes_sent_per_nic"} <= names
    assert not [name for name in names if not re.search(rf"\b{name}\b", written)]
