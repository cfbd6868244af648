"""Planning by a measured cost table: in Python, on the command line, in a configuration and in the
process that plans ahead."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_balance import Cluster, Model, make_planner
from megatron_balance.cost.table import (
    FORMAT,
    AttentionTable,
    CostTable,
    Curve,
    LayerTable,
    LinkTable,
    Source,
    save_table,
)
from megatron_balance.errors import ConfigError
from megatron_balance.ir.plan import AnyPlanZone, Zone
from megatron_balance.ir.step import Layers
from megatron_balance.planning.choice import load_config, planning_cost
from megatron_balance.planning.step_planner import PlanAhead, PlanSpec
from tests.support.cli import CommandLine

CLUSTER, MODEL = Cluster(8, 4), Model(8, 8, 16)
LENGTHS = (4000, 300, 300, 300, 300, 300, 300, 300)


def table(file: Path, pair_s: float) -> Path:
    """A table with links of 1 GB/s, on which a (query, key) pair takes `pair_s`."""
    q, k = (16, 4096), (16, 8192)
    grid = tuple(tuple(pair_s * a * b for b in k) for a in q)
    attention = AttentionTable("plain", "float32", 8, 8, 16, q, k, k, 1e-6, 1e-6, grid, grid, grid, grid)
    layer = LayerTable(128, 512, False, (16, 4096), (1e-12, 1e-10), (2e-12, 2e-10))
    links = tuple(
        LinkTable(name, "gloo", (1000, 1000000), (1e-5 + 1e-6, 1e-5 + 1e-3)) for name in ("intra_node", "inter_node")
    )
    made = CostTable(
        FORMAT,
        Source("a CPU", "cpu", "2026-11-20", "0.1.0", "2.13.0", 1, 5),
        attention,
        Curve((16, 4096), (1e-6, 1e-5)),
        Curve((1000, 1000000), (1e-6, 1e-4)),
        layer,
        links,
    )
    save_table(made, file)
    return file


def num_ranks(zone: AnyPlanZone) -> int:
    assert isinstance(zone, Zone)
    return len(zone.ranks)


@pytest.fixture
def slow(tmp_path: Path) -> Path:
    """Attention so slow that links count for nothing."""
    return table(tmp_path / "slow.json", 1e-6)


@pytest.fixture
def quick(tmp_path: Path) -> Path:
    """Attention so quick that moving anything is dear."""
    return table(tmp_path / "quick.json", 1e-15)


def test_a_planner_that_prices_follows_the_table(slow: Path, quick: Path) -> None:
    spread = make_planner(
        "zeppelin", CLUSTER, MODEL, Layers(), slow, tokens_per_rank=4200, rule="groups", group_size=1
    )(LENGTHS)
    kept = make_planner("zeppelin", CLUSTER, MODEL, Layers(), quick, tokens_per_rank=4200, rule="groups", group_size=1)(
        LENGTHS
    )
    assert max(map(num_ranks, spread.zones)) == 8
    assert max(map(num_ranks, kept.zones)) < 8


def test_the_process_that_plans_ahead_has_the_same_table(slow: Path) -> None:
    spec = PlanSpec("zeppelin", CLUSTER, MODEL, Layers(), {"tokens_per_rank": 4200}, str(slow))
    ahead = PlanAhead(spec)
    try:
        ahead.submit("first", (LENGTHS,))
        ready = ahead.take("first")
    finally:
        ahead.close()
    assert ready is not None
    assert ready.step is not None
    assert ready.step.plans[0] == make_planner("zeppelin", CLUSTER, MODEL, Layers(), slow, tokens_per_rank=4200)(
        LENGTHS
    )


def test_command_line_and_configuration_name_the_table(
    slow: Path, quick: Path, tmp_path: Path, run: CommandLine
) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(
        "planner: {name: zeppelin, tokens_per_rank: 4200, rule: groups, group_size: 1}\n"
        "cluster: {num_ranks: 8, ranks_per_node: 4}\n"
        "model: {num_heads: 8, num_kv_heads: 8, head_dim: 16}\nrouting: never\nremap: false\n"
        f"lengths: {list(LENGTHS)}\nplan_costs: slow.json\n"
    )
    assert load_config(config).plan_costs == slow

    def fingerprint(*more: str) -> str:
        return run.json("plan --json --config", config, *more)["results"][0]["fingerprint"]

    cluster = load_config(config).cluster
    assert cluster is not None

    def planned(file: Path) -> str:
        planner = make_planner(
            "zeppelin", cluster.build(), MODEL, Layers(), file, tokens_per_rank=4200, rule="groups", group_size=1
        )
        return planner(LENGTHS).fingerprint()

    assert fingerprint() == planned(slow)
    assert fingerprint("--plan-costs", str(quick)) == planned(quick)
    assert planned(slow) != planned(quick)


def test_a_table_of_another_head_dim_or_none_at_all_is_refused(slow: Path, tmp_path: Path, run: CommandLine) -> None:
    with pytest.raises(ConfigError, match="measured with head dim 16, llama-7b has 128"):
        planning_cost(CLUSTER, Model(32, 32, 128, name="llama-7b"), slow)
    with pytest.raises(ConfigError, match=r"nowhere\.json"):
        planning_cost(CLUSTER, MODEL, tmp_path / "nowhere.json")
    assert "head dim 16" in run.error("plan --planner zeppelin --lengths 100,20 --ranks 4 --plan-costs", slow)
