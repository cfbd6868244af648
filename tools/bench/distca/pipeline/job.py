"""The process that builds the cluster and trains on it."""

from __future__ import annotations

import sys
from typing import Any

from tools.bench.distca import point as distca
from tools.bench.distca.pipeline.experiment import VARIANTS, Pipelined
from tools.bench.emulated.job import OnTopology, Task, carry_out


def _train(rank: int, controller: Any, run: Any) -> None:
    # imports Megatron, which may not be imported before its devices are chosen
    from tools.bench.distca.pipeline import training

    training.train(rank, controller, run)


def main() -> int:
    """Run the experiment that the only argument describes."""
    experiment = Pipelined.parse(sys.argv[1])
    task = Task((OnTopology(distca.NICS, experiment.steps()),), VARIANTS, experiment.flags(), train=_train)
    return carry_out(experiment, task, experiment.point)


if __name__ == "__main__":
    sys.exit(main())
