"""CPU time that zeppelin and auto take to plan a batch.

python -m tools.bench.zeppelin_plan_times BATCHES.json [--joined 1 4 16] [--batches 3]
    [--repeats 5] [--least] [--json]

BATCHES.json as for `tools/bench/planners.py`; of it the sets of 256k tokens (64 ranks) are planned,
so many batches in a row as one as `--joined` says, on as many times the ranks, and a batch of 512
sequences alike in tokens. A row is a cluster and model: median over batches of the median of
`--repeats` plans of each, least and most of these, and auto's median over zeppelin's. A plan is made
as of a batch that is new: schedules of waves that were kept are forgotten before it. `--least`: the
least of the repeats instead of their median, for machines that do other work too.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from megatron_balance import make_planner
from megatron_balance.config import load_cluster, load_model
from megatron_balance.patterns.waves import schedule
from tools.bench.zeppelin_rules import CASES, batches_of

TOKENS = "256k"
SHORT, SHORT_RANKS = [512] * 512, 64
"""512 sequences on 64 ranks."""


def main(argv: Sequence[str] | None = None) -> int:
    """Print a row for each cluster, model and number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("batches_file", type=Path)
    parser.add_argument("--joined", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--batches", type=int, default=3, help="of each set")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--least", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    document = json.loads(options.batches_file.read_text())
    document["batches"] = {key: own for key, own in document["batches"].items() if key.endswith(TOKENS)}
    rows = [
        _row(case, own, options.repeats, min if options.least else median)
        for case in CASES
        for own in _batches(document, options.joined, options.batches)
    ]
    if options.json:
        print(json.dumps({"rows": rows}))
        return 0
    print("| cluster, model | ranks | sequences | zeppelin, ms | auto, ms | auto over zeppelin |")
    print("|---|---:|---:|---:|---:|---:|")
    for row in rows:
        figures = [
            f"{middle:.1f} ({least:.1f} to {most:.1f})" for middle, least, most in (row["zeppelin"], row["auto"])
        ]
        times = f"{row['auto'][0] / row['zeppelin'][0]:.1f}"
        print(f"| {row['case']} | {row['ranks']} | {row['sequences']} | {' | '.join(figures)} | {times} |")
    return 0


def _batches(document: dict[str, Any], joined: Sequence[int], count: int) -> Iterator[list[tuple[int, list[int]]]]:
    """Batches of a row: ranks and lengths."""
    yield [(SHORT_RANKS, SHORT)]
    for each in joined:
        yield [(ranks, lengths) for _, ranks, lengths in batches_of(document, count, each)]


def _row(
    case: tuple[str, str, str],
    batches: Sequence[tuple[int, list[int]]],
    repeats: int,
    of_repeats: Callable[[list[float]], float],
) -> dict[str, Any]:
    counts = [len(lengths) for _, lengths in batches]
    row: dict[str, Any] = {
        "case": ", ".join(case[:2]),
        "ranks": batches[0][0],
        "sequences": f"{min(counts)} to {max(counts)}" if len(counts) > 1 else str(counts[0]),
    }
    for name in ("zeppelin", "auto"):
        taken: list[float] = []
        for ranks, lengths in batches:
            cluster = replace(load_cluster(case[0]).build(num_ranks=ranks), attention_kernel=case[2])
            plan = make_planner(name, cluster, load_model(case[1]))
            plan(lengths)
            taken.append(of_repeats([_ms(plan, lengths) for _ in range(repeats)]))
        row[name] = median(taken), min(taken), max(taken)
    return row


def _ms(plan: Any, lengths: list[int]) -> float:
    schedule.cache_clear()
    started = time.process_time()
    plan(lengths)
    return 1e3 * (time.process_time() - started)


if __name__ == "__main__":
    raise SystemExit(main())
