"""The process that builds the clusters: imports Megatron, measures the kernels, fixes the operating
point, trains on each topology.

Started by `python -m tools.bench.emulated`, which shows how far it is.
"""

import importlib
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tools.bench.emulated import device
from tools.bench.emulated.ablation import Ablation
from tools.bench.emulated.point import Kernels, Shape
from tools.emulated_cluster import Topology, run

POINT_FILE = "operating-point.json"
STEPS_FILE = "steps.jsonl"
DEADLINE_S = 7200.0


def main() -> int:
    """Do the run that the argument describes."""
    carry_out(Ablation.parse(sys.argv[1]))
    return 0


def carry_out(ablation: Ablation) -> None:
    """Import Megatron, measure the kernels, fix the point, train."""
    from megatron_balance.megatron import cpu

    cpu.install()
    import torch

    torch.set_num_threads(1)
    from megatron_balance.patches.selection import every

    every()  # imports Megatron, which looks at the device while it is imported
    # which torch imports in a process's first backward
    importlib.import_module("torch.fx.experimental.symbolic_shapes")
    from tools.bench.emulated import training

    folder, shape = ablation.folder, ablation.cluster_shape
    share = device.share_of_core(ablation.core_share, shape.num_ranks) if ablation.core_share else None
    point = ablation.point(calibrated(share, ablation.calibration_s, folder / "kernels", shape))
    # Written before anything is compared: the point must not depend on how planners fare there.
    (folder / POINT_FILE).write_text(json.dumps(asdict(point)) + "\n")
    with (folder / STEPS_FILE).open("w") as records:

        def record(step: dict[str, Any]) -> None:
            records.write(json.dumps(step) + "\n")
            records.flush()

        for each in ablation.trainings():
            job = training.Run(ablation, each, point, record)
            run(
                point.topology(each.nics),
                lambda rank, controller, job=job: training.train(rank, controller, job),
                folder / f"{each.nics}-nics",
                deadline_s=DEADLINE_S,
                may_schedule=True,
            )


def calibrated(share: float | None, seconds: float, logs: Path, shape: Shape) -> Kernels:
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
