"""The remapping solver against its budget (CPU time of one core; targets, not tests), and the
general solvers beside it.

python tools/bench/remap.py [--repeats 50] [--solvers exact highs gurobi] [--json]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import numpy as np

from megatron_balance.solvers.milp import SOLVERS
from megatron_balance.solvers.remap import Solver, solve

BUDGET_MS = {1024: 2.0}
SIZES = (64, 256, 1024)
MILP_RANKS = 64
"""A program has a variable per pair of ranks: the general solvers are timed up to this size only.
"""
NODE_SIZE = 8
INTER = 8.0
"""Cost of a token between nodes; within one it is 1."""


def main(argv: Sequence[str] | None = None) -> int:
    """Print median, range and ratio to the budget of each solver and size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=50, help="instances of each size, every one solved once")
    parser.add_argument("--solvers", nargs="+", choices=["exact", *SOLVERS], default=["exact"])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    rows = [
        _measure(solver, num_ranks, options.repeats)
        for solver in options.solvers
        for num_ranks in SIZES
        if solver == "exact" or num_ranks <= MILP_RANKS
    ]
    if options.json:
        print(json.dumps({"rows": rows}))
        return 0
    print(f"{'':40}{'median ms':>10}{'min':>9}{'max':>9}{'moves':>8}{'budget':>8}{'ratio':>7}")
    for row in rows:
        budget = (
            ("", "")
            if row["budget_ms"] is None
            else (f"{row['budget_ms']:g}", f"{row['median_ms'] / row['budget_ms']:.2f}")
        )
        times = f"{row['median_ms']:10.2f}{row['min_ms']:9.2f}{row['max_ms']:9.2f}"
        print(f"{row['what']:40}{times}{row['moves']:8.0f}{budget[0]:>8}{budget[1]:>7}")
    return 0


def _measure(solver: Solver, num_ranks: int, repeats: int) -> dict[str, Any]:
    times: list[float] = []
    moves: list[int] = []
    rng = np.random.default_rng(20261203)
    for repeat in range(-1, repeats):  # the first, not counted, imports the solver
        held = (rng.lognormal(0.0, 1.3, num_ranks) * 4096).astype(np.int64)
        start = time.process_time()
        remapping = solve(held, NODE_SIZE, intra_s=1.0, inter_s=INTER, solver=solver)
        if repeat >= 0:
            times.append(1e3 * (time.process_time() - start))
            moves.append(len(remapping.moves))
    return {
        "what": f"{solver}: {num_ranks} ranks in nodes of {NODE_SIZE}",
        "budget_ms": BUDGET_MS.get(num_ranks),
        "median_ms": median(times),
        "min_ms": min(times),
        "max_ms": max(times),
        "moves": median(moves),
    }


if __name__ == "__main__":
    raise SystemExit(main())
