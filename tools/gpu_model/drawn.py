"""Random plans for the model of the GPU, by number: every planner, remapped, routed, both policies of
the backward, both movers, alone or as two nano-batches.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from megatron_balance.compile.transpose import POLICIES
from megatron_balance.ir.batch import Batch
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.model import Model
from tests.support.strategies import ALL_PLANNERS, Case, plan
from tools.gpu_model.races import Recorded
from tools.gpu_model.record import MOVERS, Way, record

CLUSTERS = ((2, 1), (4, 2), (8, 4), (8, 2), (6, 3))
HEADS = ((1, 1), (2, 1), (4, 1), (2, 2))


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
