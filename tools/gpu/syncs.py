"""Host synchronisations of planned attention: none in forward, backward and binding, whatever the
size of a batch; nor is memory asked for.

One that is planted is found.
"""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from megatron_balance.profiling.host_syncs import HostSync, find_host_syncs, read_trace
from megatron_balance.runtime.bind import Bound
from megatron_balance.runtime.groups import Groups, single
from tools.gpu.rows import Context, Device, Figure, Row, Target
from tools.gpu.shapes import HEADS, bound, step_of

BUDGET_S = 20.0

ATTENTION = Figure("host waits in planned attention, forward and backward", "waits", Target("equal", 0))
# A CPU has no copies to a device.
BINDING = Figure("host waits in binding a plan", "waits", Target("equal", 0), speed=True)
PLANTED = Figure("host waits found of one .item() that is planted", "waits", Target("at least", 1))
ALLOCATED = Figure(
    "device memory asked for by planned attention once warm", "cudaMalloc", Target("equal", 0), speed=True
)
PINNED = Figure("pinned host memory asked for by binding once warm", "cudaHostAlloc", Target("equal", 0), speed=True)
FIGURES = (ATTENTION, BINDING, PLANTED, ALLOCATED, PINNED)

LENGTHS = {"cuda": (4096, 1500, 700, 129, 64, 32), "cpu": (120, 50, 33, 32)}
HALVED = 5
"""Times that a batch is halved: torch keeps pinned memory by the power of two, and a new class of it
stops the device.
"""
WARM = 3


def measure(context: Context) -> Iterator[Row]:
    device, pool = context.device, single()
    steps = [step_of(each, device) for each in bound_all(device, pool)]

    def run() -> None:
        for step in steps:
            step()

    def planted() -> None:
        run()
        torch.ones(8, device=device).sum().item()
        run()

    for _ in range(WARM):
        run()
    yield _row(ATTENTION, waits(run, device))
    yield _row(PLANTED, waits(planted, device))
    if context.on_gpu:
        bound_all(device, pool)
        yield _row(BINDING, waits(lambda: bound_all(device, pool), device))
        before = _asked()
        for _ in range(WARM):
            bound_all(device, pool)
            run()
        for figure, now, then in zip((ALLOCATED, PINNED), _asked(), before, strict=True):
            yield figure.measured(now - then, f"{WARM} times {1 + HALVED} sizes")


def bound_all(device: Device, pool: Groups) -> list[Bound]:
    """Plans of a batch, of one half as long, and so on."""
    batches = [tuple(max(1, length >> by) for length in LENGTHS[device]) for by in range(1 + HALVED)]
    return [bound(lengths, HEADS, device, pool) for lengths in batches]


def _asked() -> tuple[int, int]:
    """Calls so far of cudaMalloc, and of cudaHostAlloc."""
    return torch.cuda.memory_stats()["num_device_alloc"], torch.cuda.host_memory_stats()["num_host_alloc"]


def waits(step: Callable[[], object], device: Device) -> list[HostSync]:
    """The host's waits in a call of `step`, by the profiler."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    with tempfile.TemporaryDirectory() as folder:
        with profile(activities=activities) as profiler:
            with record_function("step"):
                step()
            if device == "cuda":
                # So that the trace has all that was issued; outside what is searched.
                torch.cuda.synchronize()
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        return _of_step(path)


def _of_step(path: Path) -> list[HostSync]:
    """Waits of the step and of the threads that autograd runs backward on, not of what comes after."""
    trace = read_trace(path)
    (begin, end) = next(
        (e["ts"], e["ts"] + e["dur"]) for e in trace["traceEvents"] if e.get("name") == "step" and e.get("ph") == "X"
    )
    inside = [
        e for e in trace["traceEvents"] if e.get("ph") != "X" or e.get("cat") == "gpu_memcpy" or begin <= e["ts"] < end
    ]
    return find_host_syncs({"traceEvents": inside})


def _row(figure: Figure, syncs: list[HostSync]) -> Row:
    return figure.measured(len(syncs), "; ".join(map(str, syncs[:3])))
