"""The process that builds the cluster: imports Megatron, measures the kernels, fixes the rate of the NICs, trains."""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_balance.layers import Layers
from megatron_balance.planners import PLANNERS
from tools.bench.distca import point as distca
from tools.bench.emulated.job import DEADLINE_S, POINT_FILE, STEPS_FILE, calibrated, writer
from tools.bench.emulated.point import GOODPUT, NUM_RANKS, Point
from tools.bench.emulated.steps import WARM_UP, Planned
from tools.bench.emulated.variants import BASELINE, Variant
from tools.emulated_cluster import run

VARIANTS = (
    Variant(BASELINE, "te_ring", Layers()),
    Variant("zeppelin", "zeppelin", PLANNERS["zeppelin"].layers),
    Variant("distca, whole batch", "distca", PLANNERS["distca"].layers),
    Variant("distca, halves one by one", "distca", PLANNERS["distca"].layers, halved=True, in_turns=False),
    Variant("distca, ping-pong", "distca", PLANNERS["distca"].layers, halved=True),
)


@dataclass(frozen=True, slots=True)
class Experiment:
    """What a run of the benchmark does; text for the process that does it."""

    out: str
    batches: int
    """Of each data set."""
    repeats: int
    seed: int
    layers: int
    backward: str
    nic_mbit: float | None
    """Rate of a NIC; None: by the operating point."""
    calibration_s: float
    core_share: float

    @property
    def folder(self) -> Path:
        """Where logs and records go."""
        return Path(self.out)

    def steps(self) -> tuple[Planned, ...]:
        """A warm-up of every variant, then every batch under all variants in turn, in an order that rotates."""
        drawn = distca.batches(self.batches, self.seed)
        first, ids = next(iter(drawn)), list(range(len(VARIANTS)))
        steps = [Planned(first, 0, WARM_UP, variant, drawn[first][0]) for variant in ids]
        turns = [(repeat, batch, name) for repeat in range(self.repeats) for batch in range(self.batches) for name in drawn]
        for turn, (repeat, batch, name) in enumerate(turns):
            rotated = [ids[(at + turn) % len(ids)] for at in ids]
            steps += [Planned(name, batch, repeat, variant, drawn[name][batch]) for variant in rotated]
        return tuple(steps)

    def text(self) -> str:
        """One line that `Experiment.parse` reads back."""
        return json.dumps(asdict(self))

    @staticmethod
    def parse(text: str) -> Experiment:
        """The experiment that `text` was made from."""
        return Experiment(**json.loads(text))


def main() -> int:
    """Run the experiment that the only argument describes."""
    from megatron_balance.megatron import cpu

    cpu.install()
    import torch

    torch.set_num_threads(1)
    from megatron_balance.patches.selection import for_training

    for_training(script=True)  # imports Megatron, which looks at the device while it is imported
    importlib.import_module("torch.fx.experimental.symbolic_shapes")  # which torch imports in a process's first backward
    from tools.bench.emulated import device, training

    experiment = Experiment.parse(sys.argv[1])
    folder = experiment.folder
    share = device.share_of_core(experiment.core_share, NUM_RANKS) if experiment.core_share else None
    kernels = calibrated(share, experiment.calibration_s, folder / "kernels")
    point = Point.of(kernels)
    rate = experiment.nic_mbit
    if rate is None:
        drawn = [lengths for of_set in distca.batches(experiment.batches, experiment.seed).values() for lengths in of_set]
        needed = distca.needed_bytes_per_s(drawn, distca.machine(point, experiment.layers))
        rate = 8e-6 * distca.MARGIN * needed / GOODPUT
    point = Point(kernels, round(1e6 * rate))
    # Written before anything is compared: the point must not depend on how planners fare there.
    (folder / POINT_FILE).write_text(json.dumps(asdict(point)) + "\n")
    with (folder / STEPS_FILE).open("w") as records:
        job = training.Run(
            topology=point.topology(distca.NICS),
            cluster=point.cluster(distca.NICS),
            steps=experiment.steps(),
            layers=experiment.layers,
            backward=experiment.backward,
            folder=folder,
            share=kernels.share,
            record=writer(records),
            variants=VARIANTS,
            flags=distca.FLAGS,
        )
        run(job.topology, lambda rank, controller: training.train(rank, controller, job), folder / "ranks", deadline_s=DEADLINE_S)
    return 0


def records(file: Path) -> list[dict[str, Any]]:
    """What has been measured so far."""
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")]


if __name__ == "__main__":
    sys.exit(main())
