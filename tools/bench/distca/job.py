"""The process that builds the cluster: imports Megatron, measures the kernels, fixes the rate of
the NICs, trains.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from megatron_balance.planners import PLANNERS
from megatron_balance.planning.layers import Layers
from tools.bench.distca import point as distca
from tools.bench.emulated.job import OnTopology, Task, carry_out
from tools.bench.emulated.point import Kernels, Point
from tools.bench.emulated.steps import Experiment, Planned, interleaved
from tools.bench.emulated.variants import BASELINE, Variant

VARIANTS = (
    Variant(BASELINE, "te_ring", Layers()),
    Variant("zeppelin", "zeppelin", PLANNERS["zeppelin"].layers),
    Variant("distca, whole batch", "distca", PLANNERS["distca"].layers),
    Variant("distca, nano-batches one by one", "distca", PLANNERS["distca"].layers, ping_pong=True, interleaved=False),
    Variant("distca, ping-pong", "distca", PLANNERS["distca"].layers, ping_pong=True),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns(Experiment):
    """All variants on one topology."""

    batches: int
    """Of each data set."""

    def steps(self) -> tuple[Planned, ...]:
        """All of them."""
        return interleaved(distca.batches(self.batches, self.seed), range(len(VARIANTS)), self.repeats)

    def point(self, kernels: Kernels) -> Point:
        """The point at which the NICs are as fast as these batches need, and a margin."""
        drawn = [lengths for of_set in distca.batches(self.batches, self.seed).values() for lengths in of_set]
        return distca.point(kernels, drawn, self.layers)


def main() -> int:
    """Run the experiment that the only argument describes."""
    experiment = Turns.parse(sys.argv[1])
    return carry_out(
        experiment, Task((OnTopology(distca.NICS, experiment.steps()),), VARIANTS, distca.FLAGS), experiment.point
    )


if __name__ == "__main__":
    sys.exit(main())
