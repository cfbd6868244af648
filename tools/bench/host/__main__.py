"""Host time of a layer on one rank of real plans, beside the attention kernel's predicted time.

python -m tools.bench.host [--plan NAME] [--policy keep] [--repeats 30] [--json]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from megatron_balance.compile.transpose import POLICIES, Policy
from tools.bench.host import budget, counted, plans

COLUMNS = (
    *("plan", "group calls", "launches", "operators", "priced ms", "Python ms", "kernel ms"),
    *("ratio", "budget", "copies", "bind ms"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Print a row for each plan."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", choices=tuple(plans.PLANS), action="append", help="only this one; repeatable")
    parser.add_argument("--policy", choices=POLICIES, default="keep")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    rows = [row(name, options.policy, options.repeats) for name in options.plan or plans.PLANS]
    if options.json:
        print(json.dumps({"rows": rows, "prices": dataclasses.asdict(budget.PRICES)}))
        return 0
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    for each in rows:
        print(
            f"| {each['plan']} | {each['group_calls']} | {each['launches']} | {each['operators']} | "
            f"{1e3 * each['priced_s']:.1f} | {1e3 * each['python_s']:.1f} | {1e3 * each['kernel_s']:.1f} | "
            f"{each['ratio']:.2f} | {each['budget'] or ''} | {each['copies']} | {1e3 * each['bind_s']:.0f} |"
        )
    return 0


def row(name: str, policy: Policy, repeats: int) -> dict[str, Any]:
    """Counts and times of one plan."""
    plan = plans.plan(name)
    rank = plans.rank_of(name, plan)
    found = counted.measured(plan, rank, policy, repeats)
    host = budget.host_time(found, plan)
    return {
        "plan": name,
        **dataclasses.asdict(found),
        **dataclasses.asdict(host),
        "ratio": host.ratio,
        "budget": budget.BUDGETS.get(name),
        "bind_s": min(_bind_s(plan, rank, policy) for _ in range(3)),
    }


def _bind_s(plan: Any, rank: int, policy: Policy) -> float:
    counts: Counter[str] = Counter()
    with counted.stand_ins(counts):
        begin = time.thread_time()
        counted.bound_rank(plan, rank, counts, policy)
        return time.thread_time() - begin


if __name__ == "__main__":
    sys.exit(main())
