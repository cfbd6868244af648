"""The table of our planners beside the peers'."""

from __future__ import annotations

import json
from typing import Any

from tools.bench.peers import PEERS, lines


def ours(planner: str, batches: str, attention: float) -> dict[str, Any]:
    figures = {"attention": attention, "tokens": 1.25, "kv_tokens": 20_400.0, "kv_tokens_inter_node": 1_600.0}
    return {
        "planner": planner,
        "slack": 1.5,
        "batches": batches,
        **figures,
        "plan_ms": {"median": 2.5, "p5": 2.0, "p95": 3.0},
    }


def test_a_row_for_each_planner_and_a_mean_over_its_sets() -> None:
    rows = [ours("zeppelin", "arxiv/64k", 1.1), ours("zeppelin", "github/64k", 1.3)]
    page = list(lines({"model": "llama-7b", "cluster": "h200", "rows": rows}, json.loads(PEERS.read_text())))
    cell = "1.100 (tokens 1.25) / 20.4k (1.6k) / 2.50"
    assert (
        f"| zeppelin, slack 1.5 | {cell.replace('1.100', '1.200')} | {cell} | {cell.replace('1.100', '1.300')} |"
        in page
    )
    assert "| planner | mean | arxiv/64k | github/64k |" in page


def test_the_peers_table_has_all_sets_of_the_common_batches_and_says_whose_figures_they_are() -> None:
    peers = json.loads(PEERS.read_text())
    page = "\n".join(
        lines({"model": "llama-7b", "cluster": "h200", "rows": [ours("zeppelin", "arxiv/64k", 1.1)]}, peers)
    )
    assert "not measured by this tool" in page
    assert {len(row["batches"]) for row in peers["rows"]} == {9}
    distca = next(row["batches"] for row in peers["rows"] if row["planner"] == "DistCA Planner tol=0.02")
    assert max(cell["attention"] for cell in distca.values()) == 1.021
    assert (min(cell["kv_tokens"] for cell in distca.values()), max(cell["kv_tokens"] for cell in distca.values())) == (
        26_000,
        93_000,
    )
