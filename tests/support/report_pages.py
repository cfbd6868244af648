"""Reports for tests: a simulated one and one of two training runs, made with names that want to be
scripts.
"""

import json
import re
from pathlib import Path
from typing import Any

from megatron_balance.cli import main

HOSTILE = "</script><script>document.title='pwned'</script>"
PICTURE = "<img src=x onerror=document.title='pwned'>"


def make(folder: Path) -> dict[str, Path]:
    """The pages `simulated` and `trained`."""
    lengths = folder / f"{PICTURE}.json"
    lengths.write_text("[9000, 1200, 700, 64]", encoding="utf-8")
    (folder / "cluster.yaml").write_text(f'base: h200\nname: "{HOSTILE}"\n', encoding="utf-8")
    (folder / "model.yaml").write_text(f'base: llama-3b\nname: "{PICTURE}"\n', encoding="utf-8")
    made = {"simulated": folder / "simulated.html", "trained": folder / "trained.html"}
    inputs = [
        "--cluster",
        str(folder / "cluster.yaml"),
        "--model",
        str(folder / "model.yaml"),
        "--lengths-file",
        str(lengths),
    ]
    shape = [
        "--ranks",
        "8",
        "--ranks-per-node",
        "4",
        "--tokens-per-rank",
        "4000",
        "--planner",
        "zeppelin",
        "--planner",
        "ulysses",
    ]
    assert main(["report", *inputs, *shape, "--out", str(made["simulated"])]) == 0
    steps = [
        {
            "step": at,
            "step_ms": 100.0 + at,
            "loss": 6.0 - 0.1 * at,
            "planner": HOSTILE,
            "imbalance_after": {"tokens": 1.0, "attention": 1.1},
            "imbalance_before": {"tokens": 1.0, "attention": 1.4},
            "kv_tokens_received": 10.0 + at,
            "plan_ms": 3.0,
            "plan_wait_ms": 1.0,
            "predicted_ms": 50.0 + at,
        }
        for at in range(1, 13)
    ]
    runs = [folder / PICTURE, folder / "other"]
    for run in runs:
        run.mkdir()
        (run / "steps.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps), encoding="utf-8")
    assert main(["report", "--steps", str(runs[0]), "--steps", str(runs[1]), "--out", str(made["trained"])]) == 0
    return made


def embedded(text: str) -> list[dict[str, Any]]:
    """The figures of a page's plots."""
    found = re.search(r'<script type="application/json" id="plots">(.*?)</script>', text, re.DOTALL)
    assert found
    return json.loads(found[1])
