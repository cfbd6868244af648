"""The process that builds the clusters: imports Megatron, measures the kernels, fixes the operating
point, trains on each topology.

Started by `python -m tools.bench.emulated`, which shows how far it is.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import IO, Any, NamedTuple

from tools.bench.emulated import device
from tools.bench.emulated.point import SHAPE, SHAPES, Kernels, Point, Shape
from tools.bench.emulated.steps import Ablation, Experiment, Planned
from tools.bench.emulated.variants import VARIANTS, Variant
from tools.emulated_cluster import Topology, run

POINT_FILE = "operating-point.json"
STEPS_FILE = "steps.jsonl"
DEADLINE_S = 7200.0


class OnTopology(NamedTuple):
    """The training on one topology. `nics`: of a node."""

    nics: int
    steps: tuple[Planned, ...]


@dataclass(frozen=True, slots=True)
class Task:
    """The trainings of a benchmark: variants, and Megatron's flags beside the usual ones."""

    topologies: tuple[OnTopology, ...]
    variants: tuple[Variant, ...]
    flags: Mapping[str, Any] = field(default_factory=dict)
    shape: Shape = SHAPE
    train: Callable[[int, Any, Any], None] | None = None
    """A rank's work with its number, its controller and its `training.Run`; not given: one
    microbatch a step under each variant.
    """


def main() -> int:
    """Run the ablation that the only argument describes."""
    experiment = Ablation.parse(sys.argv[1])
    topologies = [OnTopology(nics, experiment.steps(at)) for at, nics in enumerate(experiment.nics)]
    shape = SHAPES[experiment.shape]
    return carry_out(
        experiment, Task(tuple(topologies), VARIANTS, shape=shape), lambda kernels: Point.of(kernels, shape)
    )


def carry_out(experiment: Experiment, task: Task, point_of: Callable[[Kernels], Point]) -> int:
    """Import Megatron, measure the kernels, fix the point (by `point_of`, if the rate is not
    given), train.
    """
    from megatron_balance.megatron import cpu

    cpu.install()
    import torch

    torch.set_num_threads(1)
    from megatron_balance.patches.selection import every

    every()  # imports Megatron, which looks at the device while it is imported
    # which torch imports in a process's first backward
    importlib.import_module("torch.fx.experimental.symbolic_shapes")
    from tools.bench.emulated import training

    train = task.train or training.train
    folder = experiment.folder
    share = device.share_of_core(experiment.core_share, task.shape.num_ranks) if experiment.core_share else None
    kernels = calibrated(share, experiment.calibration_s, folder / "kernels", task.shape)
    point = point_of(kernels)
    if experiment.nic_mbit is not None:
        point = replace(point, nic_bits_per_s=round(1e6 * experiment.nic_mbit))
    # Written before anything is compared: the point must not depend on how planners fare there.
    (folder / POINT_FILE).write_text(json.dumps(asdict(point)) + "\n")
    with (folder / STEPS_FILE).open("w") as records:
        for nics, steps in task.topologies:
            job = training.Run(
                topology=point.topology(nics),
                cluster=point.cluster(nics),
                steps=steps,
                layers=experiment.layers,
                backward=experiment.backward,
                folder=folder,
                share=kernels.share,
                record=writer(records),
                variants=task.variants,
                flags=task.flags,
                shape=task.shape,
            )
            run(
                job.topology,
                lambda rank, controller, job=job: train(rank, controller, job),
                folder / f"{nics}-nics",
                deadline_s=DEADLINE_S,
                may_schedule=True,
            )
    return 0


def writer(records: IO[str]) -> Callable[[dict[str, Any]], None]:
    """Writes what each step measured as a line of JSON."""

    def write(record: dict[str, Any]) -> None:
        records.write(json.dumps(record) + "\n")
        records.flush()

    return write


def calibrated(share: float | None, seconds: float, logs: Path, shape: Shape = SHAPE) -> Kernels:
    """Kernels on all ranks at once, as they compute in training; the mean over ranks, since they
    share the cores evenly.
    """
    size = shape.num_ranks
    result = run(
        Topology(1, size, size, 10**9, None), lambda *_: _measure(share, seconds, shape), logs, may_schedule=True
    )
    reserved = all(value[3] for value in result.values)
    forward, backward, linear = (sum(value[i] for value in result.values) / size for i in range(3))
    return Kernels(forward, backward, linear, share if reserved else None)


def _measure(share: float | None, seconds: float, shape: Shape) -> tuple[float, float, float, bool]:
    """Seconds of a round's attention, forward and backward, and FLOP/s of an MLP's product, while
    all ranks do the same.

    And whether the compute thread got its share of a core.
    """
    import torch
    import torch.distributed as dist

    from megatron_balance.runtime.kernels import choose_kernel
    from megatron_balance.runtime.kernels.base import Entries

    dist.init_process_group("gloo")
    kernel = choose_kernel("auto", torch.device("cpu"), torch.float32, shape.head_dim)
    tokens = shape.tokens_per_rank
    q, k, v, out, dout = torch.randn(5, tokens, shape.heads, shape.head_dim).unbind()
    lse = torch.full((tokens, shape.heads), 8.0)
    whole, nano_batch = (0, tokens), tokens // 2
    # The two kinds of round of a zigzag ring: keys of an earlier rank, keys of a later one.
    kinds = [
        Entries((whole,), ((0, nano_batch),), (False,), (whole,)),
        Entries(((nano_batch, tokens),), (whole,), (False,), ((nano_batch, tokens),)),
    ]
    x, w = torch.randn(tokens, shape.hidden_size), torch.randn(shape.hidden_size, 2 * shape.ffn_size)
    forward = [lambda e=e: kernel.forward(kernel.prepare(e, q.device), q, k, v, 0.125) for e in kinds]
    backward = [
        lambda e=e: kernel.backward(kernel.prepare(e, q.device), (dout, out, lse), q, k, v, 0.125) for e in kinds
    ]
    reserved = share is not None and device.reserve(share)
    times = [_mean_s(calls, seconds) for calls in (forward, backward, [lambda: x @ w])]
    dist.barrier()
    dist.destroy_process_group()
    return times[0], times[1], 2.0 * x.shape[0] * w.numel() / times[2], reserved


def _mean_s(calls: list[Callable[[], Any]], seconds: float) -> float:
    """Mean seconds of a call, over that long, between barriers."""
    import torch.distributed as dist

    calls[0]()
    dist.barrier()
    start, count = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        for call in calls:
            call()
        count += len(calls)
    mean = (time.perf_counter() - start) / count
    dist.barrier()
    return mean


if __name__ == "__main__":
    sys.exit(main())
