"""Every planner on nine sets of batches, four clusters and four models, simulated: step over the
bound; in the results also memory, launches, plan time.

python -m tools.bench.landscape BATCHES.json [--batches 1] [--cell h200/llama-7b] [--planner NAME]
    [--results FILE.jsonl] [--out docs/measurements/landscape.md]

BATCHES.json: {"tokens_per_gpu": 4096, "gpus_per_node": 8, "gpus": {CONTEXT: ranks}, "batches":
{"NAME/CONTEXT": [[length, ...], ...]}}. What `--results` holds already is not run again, so a run
goes on where it stopped, and `--batches 20` adds to `--batches 1`. Steps run as training would run
them: whole or as nano-batches, as many layers keep as fit the memory. Plan times are CPU time of one
core, on whatever machine this runs on.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from tqdm import tqdm

from megatron_balance.analysis.machine import Machine
from megatron_balance.config import load_cluster, load_model
from megatron_balance.cost.analytic import AnalyticCost
from megatron_balance.errors import BalanceError
from megatron_balance.ir.batch import Batch
from megatron_balance.ir.cluster import AttentionKernel, Cluster
from megatron_balance.ir.plan import MicrobatchPlan
from megatron_balance.patterns import pattern_of
from megatron_balance.patterns.base import Context
from megatron_balance.planners import PLANNERS
from megatron_balance.planners.base import StepContext
from megatron_balance.planning.choice import PlannerChoice, choose_planner, step_mode
from megatron_balance.simulator.setup import Setup
from megatron_balance.simulator.step import bound_s
from megatron_balance.simulator.ticks import simulate_planned

CLUSTERS: dict[str, AttentionKernel] = {
    "h200": "flash_attn",
    "h100": "flash_attn_3",
    "a800": "flash_attn",
    "a800-ib": "flash_attn",
}
"""Clusters, with the attention kernel that each runs."""

MODELS = ("llama-7b", "llama3-8b", "llama-3b", "moe-8x550m")
"""Models that fit a rank of every cluster without tensor parallelism."""

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in PLANNERS if name not in ("hydraulis", "megatron")},
    "zeppelin, printed rule": ("zeppelin", {"rule": "paper"}),
    "zeppelin, rings of groups": ("zeppelin", {"rule": "groups"}),
}
"""By label: a planner and its options. `hydraulis` and `megatron` are not among them: they plan for
replicas of a size that somebody says, and are te_ring over all ranks where nobody does.
"""

OURS = ("auto", "zeppelin")
"""Held beside the fastest of each batch."""

SETUP = Setup(policy="auto")
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Case:
    """One batch on one cluster and model, for one variant of a planner."""

    cell: str
    batches: str
    number: int
    label: str

    @property
    def key(self) -> tuple[str, str, int, str]:
        return self.cell, self.batches, self.number, self.label


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("batches_file", type=Path, metavar="BATCHES.json")
    parser.add_argument("--batches", type=int, default=1, metavar="N", help="of each set, the first N (default 1)")
    parser.add_argument("--cell", action="append", metavar="CLUSTER/MODEL", help="only this one; repeatable")
    parser.add_argument("--planner", action="append", choices=tuple(VARIANTS), help="only this one; repeatable")
    parser.add_argument("--results", type=Path, default=Path("landscape.jsonl"), metavar="FILE")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the page (default: print it)")
    options = parser.parse_args(argv)
    document = json.loads(options.batches_file.read_text())
    cells = options.cell or [f"{cluster}/{model}" for model in MODELS for cluster in CLUSTERS]
    cases = [
        Case(cell, batches, number, label)
        for cell in cells
        for batches in document["batches"]
        for number in range(options.batches)
        for label in options.planner or VARIANTS
    ]
    known = {_key(row): row for row in _read(options.results)}
    missing = [case for case in cases if case.key not in known]
    with options.results.open("a") as out:
        for case in tqdm(missing, file=sys.stderr, disable=None):
            row = run(case, document)
            known[case.key] = row
            out.write(json.dumps(row) + "\n")
            out.flush()
    page = "\n".join(lines([known[case.key] for case in cases])) + "\n"
    if options.out is None:
        sys.stdout.write(page)
    else:
        options.out.write_text(page)
    return 0


def _read(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _key(row: Row) -> tuple[str, str, int, str]:
    return row["cell"], row["batches"], row["number"], row["label"]


def run(case: Case, document: Row) -> Row:
    """The figures of one case; `error` in their place where the planner refuses the batch."""
    cluster, model_name = case.cell.split("/")
    kernel = CLUSTERS.get(cluster)
    num_ranks, per_node = document["gpus"][case.batches.split("/")[1]], document["gpus_per_node"]
    built = load_cluster(cluster).build(num_ranks=num_ranks, ranks_per_node=per_node)
    built = built if kernel is None else replace(built, attention_kernel=kernel)
    model = load_model(model_name)
    machine = Machine(built, model, AnalyticCost(built, model))
    lengths = (tuple(document["batches"][case.batches][case.number]),)
    row: Row = {"cell": case.cell, "batches": case.batches, "number": case.number, "label": case.label}
    row["bound_s"] = bound_s([*map(Batch, lengths)], machine, SETUP)
    name, given = VARIANTS[case.label]
    choice = choose_planner(name, given)
    try:
        begin = time.process_time()
        step, _ = choice.plan_step(lengths, _context(choice, machine))
        row["plan_ms"] = 1e3 * (time.process_time() - begin)
    except BalanceError as error:
        return row | {"error": str(error)}
    found, hosted = (simulate_planned(step, each, each, SETUP) for each in (machine, _with_host(machine)))
    row |= {"step_s": found.step_s, "with_host_s": hosted.step_s, "peak_bytes": float(found.peak_bytes.max())}
    row |= {"launches": max(map(launches, step.plans)) * len(step.plans), "fits": _fits(row, built)}
    row["picked"] = step.plans[0].planner
    return row


def _context(choice: PlannerChoice, machine: Machine) -> StepContext:
    ping_pong = step_mode(choice, 1).ping_pong
    return StepContext(
        machine.cluster, machine.model, machine.cost, ping_pong=ping_pong, own_microbatches=False, may_carry=False
    )


def _with_host(machine: Machine) -> Machine:
    return replace(machine, host=machine.cost.host)


def _fits(row: Row, cluster: Cluster) -> bool:
    return row["peak_bytes"] <= cluster.memory_bytes


def launches(plan: MicrobatchPlan) -> int:
    """Attention launches of the rank that has most, of a layer's forward."""
    count, context = np.zeros(plan.num_ranks, dtype=np.int64), Context.of(plan)
    for zone in plan.zones:
        found = pattern_of(zone).rounds(zone, context)
        filled = np.bincount(found.launches.launch, minlength=int(found.launches.of_round.max(initial=-1)) + 1) > 0
        count[found.ranks] += filled[found.launches.of_round].sum(axis=1)
    return int(count.max(initial=0))


def lines(rows: Sequence[Row]) -> Iterator[str]:
    """The page, line by line: a table for each model."""
    number = len({row["number"] for row in rows})
    cells = list(dict.fromkeys(row["cell"] for row in rows))
    missing = [f"{cluster}/{model}" for model in MODELS for cluster in CLUSTERS if f"{cluster}/{model}" not in cells]
    kernels = ", ".join(f"{kernel} on {name}" for name, kernel in CLUSTERS.items())
    yield from (
        "# Landscape: every planner on every cluster",
        "",
        "Simulated, not measured: nine sets of batches (arxiv, github and prolong64k with 64k, 128k and 256k",
        f"tokens, 4,096 a rank), {number} of each set. Numbers are a step over the bound (even computation,",
        "nothing moves), without hosts: the mean of the sets, and the worst set of all clusters. `!`: a",
        "rank's peak is more than its memory. Left out: `hydraulis` and `megatron`, which without a size of",
        "replicas are te_ring.",
        "",
        f"Attention: {kernels}.",
        *([f"Not run: {', '.join(missing)}."] if missing else []),
        "",
        f"    python -m tools.bench.landscape BATCHES.json --batches {number} --out FILE",
    )
    for model in dict.fromkeys(cell.split("/")[1] for cell in cells):
        yield from ("", f"## {model}", "")
        yield from _table([row for row in rows if row["cell"].endswith(f"/{model}")])
    if not {row["label"] for row in rows}.issuperset(OURS):
        return
    yield from ("", "## Beside the fastest that fits of each batch", "")
    yield f"| | fastest | {' | '.join(OURS)} |"
    yield f"|---|---:|{'---:|' * len(OURS)}"
    for cell in cells:
        yield f"| {cell} | {' | '.join(_beside_fastest([row for row in rows if row['cell'] == cell]))} |"
    yield from ("", "Means; in brackets, by how much it is behind in its worst batch.")


def _table(rows: Sequence[Row]) -> Iterator[str]:
    clusters = list(dict.fromkeys(row["cell"].split("/")[0] for row in rows))
    yield f"| planner | {' | '.join(clusters)} | worst |"
    yield f"|---|{'---:|' * (len(clusters) + 1)}"
    by_label = {label: [row for row in rows if row["label"] == label] for label in (row["label"] for row in rows)}
    for label, own in sorted(by_label.items(), key=lambda each: _mean_over_bound(each[1])):
        done = [row for row in own if "error" not in row]
        refused = "" if len(done) == len(own) else f" (refuses {len(own) - len(done)} of {len(own)})"
        figures = [_figure([row for row in done if row["cell"].startswith(f"{name}/")]) for name in clusters]
        sets = dict.fromkeys((row["cell"], row["batches"]) for row in done)
        of_sets = [_mean_over_bound(row for row in done if (row["cell"], row["batches"]) == each) for each in sets]
        worst = f"{max(of_sets):.2f}" if of_sets else ""
        yield f"| {label}{refused} | {' | '.join([*figures, worst])} |"


def _beside_fastest(rows: Sequence[Row]) -> Iterator[str]:
    """Steps over the bound: of the fastest that fits of each batch, and of ours."""
    batches: dict[tuple[str, int], dict[str, Row]] = {}
    for row in rows:
        if "error" not in row:
            batches.setdefault((row["batches"], row["number"]), {})[row["label"]] = row
    fastest = [min(each.values(), key=lambda row: (not row["fits"], _over_bound(row))) for each in batches.values()]
    yield f"{_mean_over_bound(fastest):.4f}"
    for label in OURS:
        own = [each[label] for each in batches.values()]
        behind = max(_over_bound(row) / _over_bound(best) for row, best in zip(own, fastest, strict=True)) - 1
        yield f"{_mean_over_bound(own):.4f} ({max(behind, 0):.1%})".replace("%", " %")


def _figure(rows: Sequence[Row]) -> str:
    """The mean over the bound on one cluster, with what is said where a plan does not fit there."""
    if not rows:
        return ""
    return f"{_mean_over_bound(rows):.3f}{'' if all(row['fits'] for row in rows) else ' !'}"


def _mean_over_bound(rows: Iterable[Row]) -> float:
    ratios = [_over_bound(row) for row in rows if "error" not in row]
    return fmean(ratios) if ratios else float("inf")


def _over_bound(row: Row) -> float:
    return row["step_s"] / row["bound_s"]


if __name__ == "__main__":
    raise SystemExit(main())
