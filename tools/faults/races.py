"""Random plans on a model of the GPU, checked for races: every planner, remapped, routed, both
policies of the backward, both movers, alone or as two nano-batches.

Of every `CHECKED`th plan each wait, event and order within a stream is also left out in turn, and the
check has to find those that are needed (`tools.gpu_model.dropped`).
"""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from megatron_balance.compile.transpose import POLICIES
from megatron_balance.ir.batch import Batch
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.model import Model
from tests.support.strategies import ALL_PLANNERS, Case, plan
from tools.faults.cases import Outcome
from tools.gpu_model.dropped import verdicts
from tools.gpu_model.races import Recorded
from tools.gpu_model.record import MOVERS, Way, record

CLUSTERS = ((2, 1), (4, 2), (8, 4), (8, 2), (6, 3))
HEADS = ((1, 1), (2, 1), (4, 1), (2, 2))
CHECKED = 10


@dataclass(frozen=True)
class Drawn:
    """One plan, or two nano-batches, as one rank runs it."""

    planner: str
    case: Case
    way: Way
    two_nano_batches: bool
    rank: int

    def __str__(self) -> str:
        return f"{self.planner}, {self.way}, {self.case}"

    def recorded(self) -> Recorded:
        """Launches, events and waits that the rank gives to its streams, forward and backward."""
        plans = [plan(self.planner, self.case)]
        if self.two_nano_batches:
            plans.append(plan(self.planner, replace(self.case, batch=Batch(self.case.batch.lengths[::-1][:3]))))
        return Recorded(record(plans, self.rank, self.way))


def drawn(number: int) -> Drawn:
    """Plan `number`, the same in every run."""
    rng = random.Random(f"races {number}")
    lengths = [rng.randint(1, rng.choice((5, 40, 300))) for _ in range(rng.randint(1, 7))]
    kv_heads, ratio = rng.choice(HEADS)
    model = Model(kv_heads * ratio, kv_heads, 4, 32, 64)
    routing = rng.choice([None, (1, 1), (1, 1), (2, 1)])
    remapped = rng.random() < 0.5
    cluster = Cluster(*rng.choice(CLUSTERS))
    case = Case(Batch(tuple(lengths)), cluster, model, None, rng.randrange(1 << 16), remapped, routing)
    way = Way(rng.choice(POLICIES), rng.choice(MOVERS))
    return Drawn(rng.choice(ALL_PLANNERS), case, way, rng.random() < 0.4, rng.randrange(cluster.num_ranks))


@contextmanager
def races() -> Iterator[Callable[[int], Outcome]]:
    yield try_races


def try_races(number: int) -> Outcome:
    """No two accesses of the same bytes that nothing orders: plan `number`."""
    program = drawn(number)
    recorded = program.recorded()
    found = next(iter(recorded.races()), None)
    if found:
        return Outcome(f"{program.planner}: a race", f"{program}: {found}")
    wrong = verdicts(recorded).wrong if number % CHECKED == 0 else []
    return Outcome(f"{program.planner}: no race, {program.way.policy}", f"misjudged: {wrong}" if wrong else "")
