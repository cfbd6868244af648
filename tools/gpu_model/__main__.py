"""Check the runtime on a model of the GPU: `python -m tools.gpu_model races` or `... timeline`.

`races [N]` records N random plans (1,000): every planner, remapped, routed, both policies, both
movers, alone or as two nano-batches. Prints the races, none of which there should be; in one of ten
plans every wait and every event is left out in turn, and every launch is let run beside what its
stream had before it: how many of those the check finds. Of the others nothing is used by two streams
at once, or another wait orders the same. `timeline [PLANNER ...]` prints a layer
of each planner with batches issued as they were and as they are.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Sequence

from tqdm import tqdm

from megatron_balance.compile.transpose import POLICIES
from megatron_balance.ir.batch import Batch
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.model import Model
from tests.support.strategies import ALL_PLANNERS, Case, plan, replace
from tools.gpu_model import findings
from tools.gpu_model.races import Recorded, WaitCount, count_waits, found_unchained, found_without_event
from tools.gpu_model.record import MOVERS, Way, record

CLUSTERS = ((2, 1), (4, 2), (8, 4), (8, 2), (6, 3))
HEADS = ((1, 1), (2, 1), (4, 1), (2, 2))
COUNTED = 10
"""Of so many plans, the waits of one are left out in turn."""


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 1 where there is a race."""
    parser = argparse.ArgumentParser(
        prog="tools.gpu_model", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    races = verbs.add_parser("races")
    races.add_argument("plans", type=int, nargs="?", default=1000)
    races.add_argument("--seed", type=int, default=0)
    verbs.add_parser("timeline").add_argument("planners", nargs="*", default=["zeppelin", "te_ring", "distca"])
    options = parser.parse_args(argv)
    return _races(options.plans, options.seed) if options.verb == "races" else _timeline(options.planners)


def _races(num_plans: int, seed: int) -> int:
    rng, begin = random.Random(seed), time.monotonic()
    found, num_ops, waits = 0, 0, WaitCount(0, 0, 0)
    events, orders = [0, 0], [0, 0]  # found missing, and all
    for number in tqdm(range(num_plans), unit="plan", file=sys.stderr, disable=None):
        name, case, way, nano_batches = _draw(rng)
        plans = [plan(name, case)]
        if nano_batches:
            plans.append(plan(name, replace(case, batch=Batch(case.batch.lengths[::-1][:3]))))
        recorded = Recorded(record(plans, rng.randrange(case.cluster.num_ranks), way))
        num_ops += len(recorded.trace.ops)
        for race in recorded.races()[:1]:
            found += 1
            print(f"{name}, {way}, {case}: {race}")
        if number % COUNTED == 0:
            waits += count_waits(recorded)
            launches = [at for at, op in enumerate(recorded.trace.ops) if op.what == "launch"]
            for counts, missed, of in (
                (events, found_without_event(recorded), recorded.waited_for),
                (orders, found_unchained(recorded, launches), launches),
            ):
                counts[0] += sum(1 for _ in missed)
                counts[1] += len(of)
    print(
        f"{found} of {num_plans} plans with a race, {num_ops} launches, events and waits, "
        f"{time.monotonic() - begin:.0f} s; left out one by one, {waits.found} waits are found missing, "
        f"{waits.implied} are implied by others, {waits.needless} nothing needs; of {events[1]} events {events[0]} are "
        f"found missing, of {orders[1]} orders within a stream {orders[0]}"
    )
    return 1 if found else 0


def _draw(rng: random.Random) -> tuple[str, Case, Way, bool]:
    lengths = [rng.randint(1, rng.choice((5, 40, 300))) for _ in range(rng.randint(1, 7))]
    kv_heads, ratio = rng.choice(HEADS)
    model = Model(kv_heads * ratio, kv_heads, 4, 32, 64)
    routing = rng.choice([None, (1, 1), (1, 1), (2, 1)])
    remapped = rng.random() < 0.5
    case = Case(
        Batch(tuple(lengths)), Cluster(*rng.choice(CLUSTERS)), model, None, rng.randrange(1 << 16), remapped, routing
    )
    return rng.choice(ALL_PLANNERS), case, Way(rng.choice(POLICIES), rng.choice(MOVERS)), rng.random() < 0.4


def _timeline(planners: Sequence[str]) -> int:
    print("planner       queues          as they were    later legs behind    and priorities")
    for name in planners:
        for one in findings.compare(name):
            times = "".join(f"{1e3 * seconds:>13.2f} ms" for seconds in (one.before_s, one.legs_s, one.after_s))
            print(f"{one.planner:<13} {one.queues:<14} {times}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
