"""Price of the proof of a plan: processor time and memory of each of its parts.

    python -m tools.bench.proof [--planner te_ring] [--ranks 128] [--sequences N] [--of-rank R]

Nodes of eight ranks, backward by replay. Lengths are GitHub's, 4,096 tokens a rank; with
`--sequences`, N sequences that every rank shares. With `--of-rank`, the part of that rank alone.
"""

import argparse
import random
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

from megatron_balance.compile.pipeline import expand
from megatron_balance.compile.proof.meaning import verify
from megatron_balance.compile.proof.runs import prove_rank, verify_runs
from megatron_balance.compile.proof.structure import verify_plan
from megatron_balance.ir.batch import Batch
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.model import Model
from megatron_balance.workloads.lengths import draw
from tests.support.strategies import ALL_PLANNERS, Case, plan


def main() -> int:
    parser = argparse.ArgumentParser(prog="tools.bench.proof", description="What the proof of a plan costs.")
    parser.add_argument("--planner", choices=ALL_PLANNERS, default="te_ring")
    parser.add_argument("--ranks", type=int, default=128)
    parser.add_argument("--sequences", type=int, help="that every rank shares; default: lengths as GitHub's")
    parser.add_argument("--of-rank", type=int, help="the rank whose part is proved; default: all")
    options = parser.parse_args()
    ranks, rng = options.ranks, random.Random(0)
    if options.sequences is None:
        lengths = draw("github", 4096 * ranks, 1, 0)[0]
    else:
        lengths = tuple(rng.randint(4 * ranks, 40 * ranks) for _ in range(options.sequences))
    planned = plan(
        options.planner, Case(Batch(tuple(lengths)), Cluster(ranks, 8), Model(8, 2, 8), None, 0, False, None)
    )
    print(f"{options.planner}, {ranks} ranks, {len(lengths)} sequences")
    _timed("structure", lambda: verify_plan(planned))
    if options.of_rank is not None:
        _timed("part of a rank", lambda: prove_rank(planned, options.of_rank, "replay"))
        return 0
    program = _timed("program", lambda: expand(planned, "replay"))
    _timed("proof of it", lambda: verify(program))
    _timed("what ranks run", lambda: verify_runs(planned, program))
    return 0


def _timed(part: str, job: Callable[[], Any]) -> Any:
    begin = time.process_time()
    result = job()
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    print(f"{part:<16}{time.process_time() - begin:8.2f} CPU s, peak so far {peak_mb:7,.0f} MB", flush=True)
    return result


if __name__ == "__main__":
    sys.exit(main())
