"""Balance, moved bytes and predicted time of each planner, on a file of batches.

python tools/bench/planners.py BATCHES.json [--slack 1.0 1.25 1.5 2.0] [--cluster h200]
    [--model llama-7b] [--links 1] [--planners distca] [--joined 8] [--json]

BATCHES.json: {"tokens_per_gpu": 4096, "gpus_per_node": 8, "gpus": {CONTEXT: ranks}, "batches":
{"NAME/CONTEXT": [[length, ...], ...]}}. Slack is the capacity of a rank over `tokens_per_gpu`. Plan
times are CPU time of planning alone, on whatever machine this runs on.

Predicted is one layer's forward pass by estimate (`analysis.estimate`). wlb_sharding is printed
with each of its shardings, distca at tolerances 0.02 and 0.1. Each planner has the layers that its
system comes with (te_ring: no routing, no remap); planning time includes them. `--links 1000` makes
all links a thousand times as fast, which shows what balance alone a planner finds. `--joined 8`
plans eight batches in a row as one, on eight times the ranks.
"""

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from megatron_balance import Cluster, MicrobatchPlan, Model, make_planner
from megatron_balance.analysis.estimate import estimate
from megatron_balance.analysis.machine import Machine
from megatron_balance.analysis.statistics import plan_statistics
from megatron_balance.config import load_cluster, load_model
from megatron_balance.cost.analytic import AnalyticCost
from megatron_balance.planners import PLANNERS
from megatron_balance.planners.wlb_llm import SHARDINGS
from megatron_balance.planning.layers import Layers

ZONES = ("inter_node", "intra_node", "local")
TOLERANCES = (0.02, 0.1)
"""Of distca."""
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Variant:
    """A planner with options and layers (None: those its own system comes with)."""

    label: str
    planner: str
    slack: float | None
    options: dict[str, Any]
    layers: Layers | None = None


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("batches", type=Path)
    parser.add_argument("--slack", type=float, nargs="+", default=[1.0, 1.25, 1.5, 2.0])
    parser.add_argument("--cluster", default="h200")
    parser.add_argument("--model", default="llama-7b")
    parser.add_argument("--links", type=float, default=1.0, help="all links are so many times as fast")
    parser.add_argument(
        "--joined", type=int, default=1, help="so many batches in a row are one, on so many times the ranks"
    )
    parser.add_argument("--repeats", type=int, default=3, help="plans of each batch that are timed")
    parser.add_argument("--planners", nargs="+", choices=tuple(PLANNERS), default=tuple(PLANNERS))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    rows = list(_rows(json.loads(options.batches.read_text()), options))
    if options.json:
        print(json.dumps({"cluster": options.cluster, "model": options.model, "rows": rows}))
    else:
        _show(rows)
    return 0


def _variants(slacks: Sequence[float]) -> Iterator[Variant]:
    for name in PLANNERS:
        if name not in ("zeppelin", "distca", "wlb_sharding"):
            yield Variant(name, name, None, {})  # the capacity only decides whether they refuse
    for sharding in SHARDINGS:
        yield Variant(f"wlb {sharding}", "wlb_sharding", None, {"sharding": sharding})
    for tolerance in TOLERANCES:
        yield Variant(f"distca {tolerance:g}", "distca", None, {"tolerance": tolerance})
    for slack in slacks:
        yield Variant("zeppelin paper", "zeppelin", slack, {"rule": "paper"})
        yield Variant("zeppelin groups", "zeppelin", slack, {"rule": "groups"})
        yield Variant("zeppelin", "zeppelin", slack, {})
        yield Variant("zeppelin unrouted", "zeppelin", slack, {"rule": "groups"}, Layers(remap=True))
        yield Variant("zeppelin unremapped", "zeppelin", slack, {"rule": "groups"}, Layers(routing="pays"))


def _rows(document: dict[str, Any], options: argparse.Namespace) -> Iterator[Row]:
    model = load_model(options.model)
    for variant in (each for each in _variants(options.slack) if each.planner in options.planners):
        for key, single in document["batches"].items():
            batches = list(_joined(single, options.joined))
            num_ranks = options.joined * document["gpus"][key.split("/")[1]]
            preset = load_cluster(options.cluster).build(num_ranks=num_ranks, ranks_per_node=document["gpus_per_node"])
            cluster = replace(
                preset,
                intra_bytes_per_s=options.links * preset.intra_bytes_per_s,
                nic_bytes_per_s=options.links * preset.nic_bytes_per_s,
            )
            capacity = None if variant.slack is None else int(variant.slack * document["tokens_per_gpu"])
            plan = make_planner(
                variant.planner, cluster, model, variant.layers, tokens_per_rank=capacity, **variant.options
            )
            plans, times = [], []
            for batch in batches:
                for _ in range(options.repeats):
                    start = time.process_time()
                    made = plan(batch)
                    times.append(1e3 * (time.process_time() - start))
                plans.append(made)
            means = _means(plans, model) | {"predicted_ms": _predicted_ms(plans, cluster, model)}
            row = {"planner": variant.label, "slack": variant.slack, "batches": key, **means}
            yield row | {"plan_ms": _spread(times)}


def _joined(batches: Sequence[Sequence[int]], count: int) -> Iterator[list[int]]:
    """As many batches as there are, each of so many in a row; after the last one comes the first."""
    for first in range(len(batches)):
        yield [length for at in range(first, first + count) for length in batches[at % len(batches)]]


def _means(plans: Sequence[MicrobatchPlan], model: Model) -> Row:
    reports = [plan_statistics(plan, model) for plan in plans]
    return {
        "attention": fmean(r["imbalance"]["attention"] for r in reports),
        "tokens": fmean(
            max(held) * len(held) / sum(held) for held in (r["attention_tokens_per_rank"] for r in reports)
        ),
        "kv_tokens": fmean(fmean(r["kv_tokens_received_per_rank"]) for r in reports),
        "largest_attention": max(r["imbalance"]["attention"] for r in reports),
        "query_tokens": fmean(fmean(r["query_tokens_received_per_rank"]) for r in reports),
        "kv_tokens_inter_node": fmean(fmean(r["kv_tokens_received_inter_node_per_rank"]) for r in reports),
        "remapped": fmean(r["remap"]["tokens_moved"] / r["num_tokens"] for r in reports),
        "zones": {
            name: fmean(sum(zone.name == name for zone in plan.zones) for plan in plans) for name in (*ZONES, "pool")
        },
    }


def _predicted_ms(plans: Sequence[MicrobatchPlan], cluster: Cluster, model: Model) -> float:
    """Milliseconds of a layer."""
    machine = Machine(cluster, model, AnalyticCost(cluster, model))
    return 1e3 * fmean(estimate(plan, machine).forward_s for plan in plans)


def _spread(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {"median": median(ordered), "p5": ordered[len(ordered) // 20], "p95": ordered[-1 - len(ordered) // 20]}


def _show(rows: Sequence[Row]) -> None:
    print(
        "means over batches: attention and tokens in its layout, max/mean over ranks; KV tokens a rank receives "
        "(layer, forward); tokens"
        "\nthat a remap moves, of all; predicted time of a layer, forward; zones inter/intra/local"
    )
    columns = f"{'attention':>10}{'tokens':>8}{'KV':>9}{'KV inter':>10}{'remap':>8}{'ms':>9}"
    print(f"{'planner':19}{'slack':>6}  {'batches':16}{columns}{'zones':>16}   plan ms (p5-p95)")
    for row in rows:
        zones = "1 pool" if row["zones"]["pool"] else "/".join(f"{row['zones'][name]:.1f}" for name in ZONES)
        cost = row["plan_ms"]
        print(f"{_line(row, row['batches'])}{zones:>16}   {cost['median']:.2f} ({cost['p5']:.2f}-{cost['p95']:.2f})")
    print()
    for label, slack in dict.fromkeys((row["planner"], row["slack"]) for row in rows):
        same = [row for row in rows if (row["planner"], row["slack"]) == (label, slack)]
        keys = ("attention", "tokens", "kv_tokens", "kv_tokens_inter_node", "remapped", "predicted_ms")
        means = {key: None if same[0][key] is None else fmean(row[key] for row in same) for key in keys}
        print(_line({"planner": label, "slack": slack, **means}, "all"))


def _line(row: Row, batches: str) -> str:
    slack = "" if row["slack"] is None else f"{row['slack']:g}"
    remap = f"{100 * row['remapped']:.1f} %"
    predicted = f"{row['predicted_ms']:.2f}"
    return (
        f"{row['planner']:19}{slack:>6}  "
        f"{batches:16}{row['attention']:10.3f}{row['tokens']:8.3f}{row['kv_tokens']:9.0f}"
        f"{row['kv_tokens_inter_node']:10.0f}{remap:>8}{predicted:>9}"
    )


if __name__ == "__main__":
    raise SystemExit(main())
