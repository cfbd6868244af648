"""Does auto choose the fastest planner, and does zeppelin lose to any? Simulated step over the bound.

python -m tools.bench.choices BATCHES.json [--batches 20] [--joined 1] [--only h200/llama-7b]
    [--results FILE.jsonl]

BATCHES.json as for `tools/bench/planners.py`; cases and bound as for `tools/bench/zeppelin_rules.py`,
with as many layers that keep as fit the memory. Of each batch all planners plan that plan within a
step; those are simulated that come within 12 % of the best by the estimate (`analysis/estimate`), or
have none. A planner competes where its plan fits the memory. What `--results` holds is not run again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from megatron_balance import MicrobatchPlan, make_planner
from megatron_balance.analysis.estimate import estimate
from megatron_balance.analysis.estimate.times import PricedMachine as Prices
from megatron_balance.config import load_cluster, load_model
from megatron_balance.cost.analytic import AnalyticCost
from megatron_balance.errors import BalanceError
from megatron_balance.planners import PLANNERS
from megatron_balance.simulator.bound import bound_s
from megatron_balance.simulator.machine import Machine
from megatron_balance.simulator.setup import Setup
from megatron_balance.simulator.step import simulate_step
from tools.bench.zeppelin_rules import CASES, batches_of, case_parser

SINGLE: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in PLANNERS if name not in ("auto", "flexsp", "wlb_llm", "distca")},
    "zeppelin, rule groups": ("zeppelin", {"rule": "groups"}),
}
"""Planners of one microbatch that plan within a step and hide their transfers without a second
nano-batch, by label: name and options."""

NEAR = 1.12
AUTO, ZEPPELIN = 1.01, 1.02
"""Over the best planner of a batch, from where a batch is listed."""


def main(argv: Sequence[str] | None = None) -> int:
    """Print means by cluster and model, and the batches on which auto or zeppelin lose."""
    parser = case_parser(__doc__)
    parser.add_argument("--results", type=Path, help="one line of JSON a batch; a run goes on where it stopped")
    options = parser.parse_args(argv)
    known = [] if options.results is None or not options.results.exists() else _lines(options.results)
    rows = {(row["case"], row["batch"]): row for row in known}
    document = json.loads(options.batches_file.read_text())
    wanted: list[tuple[str, str]] = []
    for case in (each for each in CASES if options.only in ("", "/".join(each[:2]))):
        for name, ranks, lengths in batches_of(document, options.batches, options.joined):
            key = "/".join(case[:2]), name if options.joined == 1 else f"{name}, {options.joined} joined"
            wanted.append(key)
            if key not in rows:
                rows[key] = {"case": key[0], "batch": key[1], **_row(case, ranks, lengths)}
                if options.results is not None:
                    with options.results.open("a") as file:
                        file.write(json.dumps(rows[key]) + "\n")
    for line in _report([rows[key] for key in wanted]):
        print(line)
    return 0


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _row(case: tuple[str, str, Any], ranks: int, lengths: list[int]) -> dict[str, Any]:
    """Seconds over the bound of auto, of zeppelin and of those near the best."""
    cluster = replace(load_cluster(case[0]).build(num_ranks=ranks), attention_kernel=case[2])
    model = load_model(case[1])
    cost = AnalyticCost(cluster, model)
    machine, prices, plans = Machine(cluster, model, cost), Prices.of(cluster, model, cost), dict[str, MicrobatchPlan]()
    for label, (name, given) in SINGLE.items():
        try:
            plans[label] = make_planner(name, cluster, model, **given)(lengths)
        except BalanceError:
            continue
    found = {label: estimate(plan, prices) for label, plan in plans.items()}
    near = NEAR * min(each.layer_s for each in found.values() if each is not None)
    bound = bound_s((tuple(lengths),), machine)

    def over_bound(plan: MicrobatchPlan) -> tuple[float, bool]:
        step = simulate_step([plan], machine, Setup(policy="auto", engine="rounds"))
        taken = step.step_s - step.phases_s["gradient_sync"] - step.phases_s["optimizer"]
        return taken / bound, bool(step.backward.fits)

    simulated: dict[str, float] = {}
    for label, each in found.items():
        if label == "zeppelin" or each is None or each.layer_s < near:
            seconds, fits = over_bound(plans[label])
            if fits:
                simulated[label] = seconds
    auto = make_planner("auto", cluster, model)(lengths)
    return {"auto": over_bound(auto)[0], "chosen": auto.note.split(":")[0], "single": simulated}


def _report(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    yield "| cluster, model | batches | auto | zeppelin | the best single planner of each batch |"
    yield "|---|---:|---:|---:|---:|"
    for case in dict.fromkeys(row["case"] for row in rows):
        own = [row for row in rows if row["case"] == case and "zeppelin" in row["single"]]
        means = (
            fmean(values)
            for values in zip(
                *((row["auto"], row["single"]["zeppelin"], min(row["single"].values())) for row in own), strict=True
            )
        )
        yield f"| {case} | {len(own)} | " + " | ".join(f"{mean:.4f}" for mean in means) + " |"
    for who, limit in (("auto", AUTO), ("zeppelin", ZEPPELIN)):
        for row in rows:
            single = row["single"]
            ours = row["auto"] if who == "auto" else single.get("zeppelin")
            best = min(single, key=single.__getitem__)
            if ours is not None and ours > limit * single[best]:
                yield f"{who} slower: {row['case']} {row['batch']}: {ours:.3f}, {best} {single[best]:.3f}"


if __name__ == "__main__":
    raise SystemExit(main())
