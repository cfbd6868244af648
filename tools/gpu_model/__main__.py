"""Check the runtime on a model of the GPU: `python -m tools.gpu_model races` or `... timeline`.

`races [N]` records N random plans (1,000) of `drawn`. Prints the races, none of which there should
be (`python -m tools.faults races` counts them over many runs); in one of ten plans every wait and
every event is left out in turn, and every launch is let run beside what its stream had before it:
how many of those the check finds, and why the others are not needed (`dropped`). `timeline
[PLANNER ...]` prints a layer of each planner with batches issued as they were and as they are.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from tqdm import tqdm

from tools.gpu_model import findings
from tools.gpu_model.drawn import drawn
from tools.gpu_model.dropped import Counts, verdicts

COUNTED = 10
"""Of so many plans, the waits of one are left out in turn."""


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 1 where there is a race, or where the check misjudges what was left out."""
    parser = argparse.ArgumentParser(
        prog="tools.gpu_model", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    races = verbs.add_parser("races")
    races.add_argument("plans", type=int, nargs="?", default=1000)
    races.add_argument("--first", type=int, default=0, help="number of the first")
    verbs.add_parser("timeline").add_argument("planners", nargs="*", default=["zeppelin", "te_ring", "distca"])
    options = parser.parse_args(argv)
    return _races(options.plans, options.first) if options.verb == "races" else _timeline(options.planners)


def _races(num_plans: int, first: int) -> int:
    begin = time.monotonic()
    found, num_ops, counts = 0, 0, Counts()
    for number in tqdm(range(first, first + num_plans), unit="plan", file=sys.stderr, disable=None):
        program = drawn(number)
        recorded = program.recorded()
        num_ops += len(recorded.trace.ops)
        for race in recorded.races()[:1]:
            found += 1
            print(f"plan {number}, {program}: {race}")
        if number % COUNTED == 0:
            counts += verdicts(recorded)
    print(
        f"{found} of {num_plans} plans with a race, {num_ops} launches, events and waits, "
        f"{time.monotonic() - begin:.0f} s; left out one by one: {counts}"
    )
    return 1 if found or counts.wrong else 0


def _timeline(planners: Sequence[str]) -> int:
    print("planner       queues          as they were    later legs behind    and priorities")
    for name in planners:
        for one in findings.compare(name):
            times = "".join(f"{1e3 * seconds:>13.2f} ms" for seconds in (one.before_s, one.legs_s, one.after_s))
            print(f"{one.planner:<13} {one.queues:<14} {times}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
