"""Host synchronisations of planned attention: none in forward, backward and binding.

One that is planted is found.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from megatron_balance.ir.plan import MicrobatchPlan, Zone
from megatron_balance.profiling.host_syncs import HostSync, find_host_syncs, read_trace
from megatron_balance.runtime.attention import balanced_attention
from megatron_balance.runtime.bind import AttentionShape, Bound, bind
from megatron_balance.runtime.groups import single
from tools.gpu.rows import Context, Device, Figure, Row, Target

BUDGET_S = 25.0

ATTENTION = Figure("host waits in planned attention, forward and backward", "waits", Target("equal", 0))
# A CPU has no copies to a device.
BINDING = Figure("host waits in binding a plan", "waits", Target("equal", 0), speed=True)
PLANTED = Figure("host waits found of one .item() that is planted", "waits", Target("at least", 1))
ALLOCATED = Figure(
    "device memory asked for by planned attention once warm", "cudaMalloc", Target("equal", 0), speed=True
)
FIGURES = (ATTENTION, BINDING, PLANTED, ALLOCATED)

SHAPE = AttentionShape(num_heads=8, num_kv_heads=4, head_dim=64)
LENGTHS = {"cuda": (4096, 1500, 700, 129, 64, 1), "cpu": (120, 50, 33, 9, 1)}
WARM = 3


def measure(context: Context) -> Iterator[Row]:
    bound = _bind(context.device)
    step = _step(bound, context.device)
    for _ in range(WARM):
        step()
    yield _row(ATTENTION, waits(step, context.device))

    def planted() -> None:
        step()
        torch.ones(8, device=context.device).sum().item()
        step()

    yield _row(PLANTED, waits(planted, context.device))
    if context.on_gpu:
        yield _row(BINDING, waits(lambda: _bind(context.device), context.device))
        before = torch.cuda.memory_stats()["num_device_alloc"]
        for _ in range(WARM):
            step()
        yield ALLOCATED.measured(torch.cuda.memory_stats()["num_device_alloc"] - before, f"in {WARM} calls")


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


def _bind(device: Device) -> Bound:
    lengths = LENGTHS[device]
    plan = MicrobatchPlan(
        "by_hand",
        lengths,
        1,
        1,
        SHAPE.num_heads,
        SHAPE.num_kv_heads,
        (Zone("local", "ring", (0,), tuple(range(len(lengths)))),),
    )
    return bind(
        plan, 0, SHAPE, groups=single(), device=device, dtype=torch.bfloat16 if device == "cuda" else torch.float32
    )


def _step(bound: Bound, device: Device) -> Callable[[], None]:
    """Forward and backward of one attention call, on tensors that are there already."""
    heads = (SHAPE.num_heads, SHAPE.num_kv_heads, SHAPE.num_kv_heads)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    q, k, v = (
        torch.randn(bound.num_tokens, h, SHAPE.head_dim, device=device, dtype=dtype, requires_grad=True) for h in heads
    )
    dout = torch.randn_like(q)

    def step() -> None:
        torch.autograd.grad(balanced_attention(q, k, v, bound), (q, k, v), dout)

    return step
