"""torchtitan's debug models, compiled as whole layers, train as each document alone."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import ended

RUN = Path(__file__).parents[1] / "support" / "titan_run.py"
RANKS = 2


def run(way: str, name: str, checkpointing: str, folder: Path) -> dict[str, Any]:
    file = folder / way / "found.json"
    file.parent.mkdir()
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)] if way == "balanced" else []
    command = [sys.executable, *ranks, str(RUN), name, checkpointing, str(file), way]
    variables = {"TORCHDYNAMO_DISABLE": "0" if way == "balanced" else "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = ended(command, env=os.environ | variables, cwd=file.parent)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(file.read_text(encoding="utf-8"))


@pytest.mark.dist
@pytest.mark.parametrize(
    ("name", "checkpointing", "kinds"),
    [
        ("llama3", "selective", 1),
        pytest.param("qwen3", "full", 1, marks=pytest.mark.product),
        pytest.param("deepseek_v3", "selective", 2, marks=pytest.mark.product),
    ],
)
def test_debug_models_train_as_each_document_alone(tmp_path: Path, name: str, checkpointing: str, kinds: int) -> None:
    pytest.importorskip("torchtitan")
    alone, balanced = (run(way, name, checkpointing, tmp_path) for way in ("alone", "balanced"))
    # torchtitan's experts multiply in bf16 whatever the precision.
    losses, norms = (1e-6, 1e-4) if kinds == 1 else (3e-5, 2e-3)
    for figure, allowed in (("losses", losses), ("validation", losses), ("norms", norms)):
        assert balanced[figure] == pytest.approx(alone[figure], rel=allowed), figure
    assert balanced["breaks"] == []
    graphs = balanced["graphs"]
    assert graphs[0] == kinds, "a graph for each kind of layer"
    assert graphs[-1] <= 4 * kinds, "one for the sizes of the first step, one for all, and as many to validate"
    assert graphs[2] == graphs[-1], "nothing is compiled behind the third step"
