"""The process that builds the clusters and trains on them, one pipeline depth after the other."""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import asdict
from typing import Any

from tools.bench.emulated import device
from tools.bench.emulated.job import DEADLINE_S, POINT_FILE, STEPS_FILE, calibrated, writer
from tools.bench.emulated.point import NUM_RANKS, Point
from tools.bench.microbatches.experiment import NICS, Microbatches
from tools.emulated_cluster import run


def main() -> int:
    """Run the experiment that the only argument describes."""
    experiment = Microbatches.parse(sys.argv[1])
    from megatron_balance.megatron import cpu

    cpu.install()
    import torch

    torch.set_num_threads(1)
    from megatron_balance.patches.selection import every

    every()  # imports Megatron, which looks at the device while it is imported
    # which torch imports in a process's first backward
    importlib.import_module("torch.fx.experimental.symbolic_shapes")
    from tools.bench.emulated.training import Run
    from tools.bench.microbatches.training import train

    folder = experiment.folder
    share = device.share_of_core(experiment.core_share, NUM_RANKS) if experiment.core_share else None
    kernels = calibrated(share, experiment.calibration_s, folder / "kernels")
    point = Point.of(kernels) if experiment.nic_mbit is None else Point(kernels, round(1e6 * experiment.nic_mbit))
    (folder / POINT_FILE).write_text(json.dumps(asdict(point)) + "\n")
    with (folder / STEPS_FILE).open("w") as records:
        for stages in experiment.stages:
            of_depth = Run(
                topology=point.topology(NICS),
                cluster=point.cluster(NICS),
                steps=experiment.steps(stages),
                layers=experiment.layers,
                backward=experiment.backward,
                folder=folder,
                share=kernels.share,
                record=writer(records),
                flags=experiment.flags(stages),
            )

            def on_rank(rank: int, controller: Any, of_depth: Run = of_depth) -> None:
                train(rank, controller, of_depth, experiment)

            run(of_depth.topology, on_rank, folder / f"pp{stages}", deadline_s=DEADLINE_S, may_schedule=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
