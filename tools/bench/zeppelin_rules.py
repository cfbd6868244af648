"""Zeppelin's rules on a file of batches: simulated step over the bound, each step of the way a row.

python -m tools.bench.zeppelin_rules BATCHES.json [--batches 2] [--joined 1] [--only h200/llama-7b]
    [--json]

BATCHES.json as for `tools/bench/planners.py`. Of each set the first `--batches` are planned; `--joined
4` plans four in a row as one, on four times the ranks. The step is forward and backward with policy
keep; gradient synchronisation and optimizer, which no plan changes, are left out, as in the bound
(`simulator.bound`). `hosts`: with the host time of the cluster's preset. `uneven`: compute of the
busiest rank over the mean.

Rows: rings of single ranks and of groups (`rule: groups`), and uneven shares (`rule: waves`, the
default). Batches on which the default is more than 2 % slower than one of the others are listed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from megatron_balance import MicrobatchPlan, Model, make_planner
from megatron_balance.analysis.statistics import plan_statistics
from megatron_balance.config import load_cluster, load_model
from megatron_balance.cost.analytic import AnalyticCost
from megatron_balance.ir.cluster import Cluster
from megatron_balance.simulator.bound import bound_s
from megatron_balance.simulator.machine import Machine
from megatron_balance.simulator.step import simulate_step

CASES = (
    ("h200", "llama-7b", "flash_attn"),
    ("h200", "llama3-8b", "flash_attn"),
    ("a800", "llama-7b", "flash_attn"),
    ("h100", "llama3-8b", "flash_attn_3"),
)
"""Cluster, model and attention kernel."""

RULES: dict[str, dict[str, Any]] = {
    "rings": {"rule": "groups", "group_size": 1},
    "rings of groups": {"rule": "groups"},
    "uneven shares": {"rule": "waves"},
}
ROWS = tuple(RULES)
SLOWER = 1.02


@dataclass(frozen=True, slots=True)
class Point:
    """A batch under one rule: seconds over the bound, without hosts and with them."""

    over_bound: float
    with_hosts: float
    uneven: float


def case_parser(description: str | None) -> argparse.ArgumentParser:
    """The arguments that say which cases and batches are run."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("batches_file", type=Path)
    parser.add_argument("--batches", type=int, default=2)
    parser.add_argument("--joined", type=int, default=1)
    parser.add_argument("--only", default="", help="CLUSTER/MODEL")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Print a table for each cluster and model."""
    parser = case_parser(__doc__)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    document = json.loads(options.batches_file.read_text())
    results = [
        _case(document, case, options.batches, options.joined)
        for case in CASES
        if options.only in ("", f"{case[0]}/{case[1]}")
    ]
    if options.json:
        print(json.dumps({"batches": options.batches, "joined": options.joined, "cases": results}))
        return 0
    for result in results:
        print(f"\n{result['case']}: means of {result['count']} batches\n")
        print("| | over bound | with hosts | uneven |\n|---|---|---|---|")
        for name, row in result["rows"].items():
            print(f"| {name} | {row['over_bound']:.3f} | {row['with_hosts']:.3f} | {row['uneven']:.3f} |")
        for name in result["slower"]:
            print(f"slower: {name}")
    return 0


def _case(document: dict[str, Any], case: tuple[str, str, str], count: int, joined: int) -> dict[str, Any]:
    points: dict[str, list[Point]] = {name: [] for name in ROWS}
    slower: list[str] = []
    for name, ranks, lengths in batches_of(document, count, joined):
        cluster = replace(load_cluster(case[0]).build(num_ranks=ranks), attention_kernel=case[2])
        model = load_model(case[1])
        found = {row: _point(plan, cluster, model) for row, plan in _plans(lengths, cluster, model).items()}
        for row, point in found.items():
            points[row].append(point)
        best = min(ROWS[:-1], key=lambda row: found[row].over_bound)
        ours = found[ROWS[-1]].over_bound
        if ours > SLOWER * found[best].over_bound:
            slower.append(f"{name}: {ours:.3f}, {best} {found[best].over_bound:.3f}")
    rows = {
        row: {key: fmean(getattr(point, key) for point in own) for key in Point.__slots__}
        for row, own in points.items()
    }
    return {"case": "/".join(case), "count": len(points[ROWS[0]]), "rows": rows, "slower": slower}


def batches_of(document: dict[str, Any], count: int, joined: int) -> Iterator[tuple[str, int, list[int]]]:
    """(name, ranks, lengths)."""
    for key, batches in document["batches"].items():
        for at in range(min(count, len(batches) // joined)):
            own = batches[at * joined : (at + 1) * joined]
            ranks = joined * document["gpus"][key.split("/")[1]]
            yield f"{key} {at}", ranks, [length for batch in own for length in batch]


def _plans(lengths: list[int], cluster: Cluster, model: Model) -> dict[str, MicrobatchPlan]:
    return {row: make_planner("zeppelin", cluster, model, **options)(lengths) for row, options in RULES.items()}


def _point(plan: MicrobatchPlan, cluster: Cluster, model: Model) -> Point:
    cost = AnalyticCost(cluster, model)
    machine = Machine(cluster, model, cost)
    bound = bound_s((plan.lengths,), machine)

    def over_bound(machine: Machine) -> float:
        step = simulate_step([plan], machine)
        return (step.step_s - step.phases_s["gradient_sync"] - step.phases_s["optimizer"]) / bound

    pairs = np.array(plan_statistics(plan, model)["attention_pairs_per_rank"], dtype=np.float64)
    with_hosts = over_bound(replace(machine, host=cost.host))
    return Point(over_bound(machine), with_hosts, float(pairs.max() / pairs.mean()))


if __name__ == "__main__":
    raise SystemExit(main())
