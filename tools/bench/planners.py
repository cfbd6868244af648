"""How well each planner balances and how little it moves, on a file of batches.

python tools/bench/planners.py BATCHES.json [--slack 1.0 1.1 1.25 1.5 2.0] [--cluster h200] [--model llama-7b] [--json]

BATCHES.json: {"tokens_per_gpu": 4096, "gpus_per_node": 8, "gpus": {CONTEXT: ranks}, "batches": {"NAME/CONTEXT": [[length, ...], ...]}}.
Slack is the capacity of a rank over `tokens_per_gpu`. Times are CPU time of planning alone, on whatever machine this runs on.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from megatron_balance import MicrobatchPlan, Model, make_planner
from megatron_balance.config import load_cluster, load_model
from megatron_balance.planners import PLANNERS
from megatron_balance.schedules.figures import figures

ZONES = ("inter_node", "intra_node", "local")
Row = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    """Print one row per planner, slack and set of batches."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("batches", type=Path)
    parser.add_argument("--slack", type=float, nargs="+", default=[1.0, 1.1, 1.25, 1.5, 2.0])
    parser.add_argument("--cluster", default="h200")
    parser.add_argument("--model", default="llama-7b")
    parser.add_argument("--repeats", type=int, default=3, help="plans of each batch that are timed")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    rows = list(_rows(json.loads(options.batches.read_text()), options))
    if options.json:
        print(json.dumps({"cluster": options.cluster, "model": options.model, "rows": rows}))
    else:
        _show(rows)
    return 0


def _variants(slacks: Sequence[float]) -> Iterator[tuple[str, float | None, dict[str, Any]]]:
    for name in PLANNERS:
        if name != "zeppelin":
            yield name, None, {}  # the capacity only decides whether they refuse
    for slack in slacks:
        for rule in ("paper", "cost"):
            yield f"zeppelin {rule}", slack, {"rule": rule}
        yield "zeppelin cost, unrouted", slack, {"rule": "cost", "routed": False}


def _rows(document: dict[str, Any], options: argparse.Namespace) -> Iterator[Row]:
    model = load_model(options.model)
    for label, slack, given in _variants(options.slack):
        for key, batches in document["batches"].items():
            num_ranks = document["gpus"][key.split("/")[1]]
            cluster = load_cluster(options.cluster).build(num_ranks=num_ranks, ranks_per_node=document["gpus_per_node"])
            capacity = None if slack is None else int(slack * document["tokens_per_gpu"])
            plan = make_planner(label.split()[0], cluster, model, tokens_per_rank=capacity, **given)
            plans, times = [], []
            for batch in batches:
                for _ in range(options.repeats):
                    start = time.process_time()
                    made = plan(batch)
                    times.append(1e3 * (time.process_time() - start))
                plans.append(made)
            yield {"planner": label, "slack": slack, "batches": key, **_means(plans, model), "plan_ms": _spread(times)}


def _means(plans: Sequence[MicrobatchPlan], model: Model) -> Row:
    reports = [figures(plan, model) for plan in plans]
    return {
        "attention": fmean(r["imbalance"]["attention"] for r in reports),
        "tokens": fmean(r["imbalance"]["tokens"] for r in reports),
        "kv_tokens": fmean(fmean(r["kv_tokens_received_per_rank"]) for r in reports),
        "kv_tokens_inter_node": fmean(fmean(r["kv_tokens_received_inter_node_per_rank"]) for r in reports),
        "zones": {name: fmean(sum(zone.name == name for zone in plan.zones) for plan in plans) for name in (*ZONES, "pool")},
    }


def _spread(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {"median": median(ordered), "p5": ordered[len(ordered) // 20], "p95": ordered[-1 - len(ordered) // 20]}


def _show(rows: Sequence[Row]) -> None:
    print(
        "means over batches: attention and tokens max/mean over ranks; KV tokens a rank receives (layer, forward); zones inter/intra/local"
    )
    print(
        f"{'planner':17}{'slack':>6}  {'batches':16}{'attention':>10}{'tokens':>8}{'KV':>9}{'KV inter':>10}{'zones':>16}   plan ms (p5-p95)"
    )
    for row in rows:
        zones = "1 pool" if row["zones"]["pool"] else "/".join(f"{row['zones'][name]:.1f}" for name in ZONES)
        slack = "" if row["slack"] is None else f"{row['slack']:g}"
        cost = row["plan_ms"]
        print(
            f"{row['planner']:17}{slack:>6}  {row['batches']:16}{row['attention']:10.3f}{row['tokens']:8.3f}{row['kv_tokens']:9.0f}"
            f"{row['kv_tokens_inter_node']:10.0f}{zones:>16}   {cost['median']:.2f} ({cost['p5']:.2f}-{cost['p95']:.2f})"
        )
    print()
    for label, slack in dict.fromkeys((row["planner"], row["slack"]) for row in rows):
        same = [row for row in rows if (row["planner"], row["slack"]) == (label, slack)]
        means = {key: fmean(row[key] for row in same) for key in ("attention", "tokens", "kv_tokens", "kv_tokens_inter_node")}
        print(
            f"{label:17}{'' if slack is None else f'{slack:g}':>6}  {'all':16}{means['attention']:10.3f}{means['tokens']:8.3f}"
            f"{means['kv_tokens']:9.0f}{means['kv_tokens_inter_node']:10.0f}"
        )


if __name__ == "__main__":
    raise SystemExit(main())
