"""Measure this machine for a cost table.

Kernels (`profiling.kernels`) and links (`profiling.links`).

Each figure is of several samples of warm calls: their median on the device's own clock (CUDA
events), the shortest on the processor's, where what others take of the machine only adds; with one
thread its own time is counted, not theirs.
"""

from __future__ import annotations

import datetime
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from megatron_balance.cost.table import FORMAT, CostTable, LinkTable, Source
from megatron_balance.errors import ConfigError
from megatron_balance.ir.model import Model
from megatron_balance.profiling.kernels import KernelBench
from megatron_balance.profiling.options import ProfileOptions, Progress
from megatron_balance.runtime.kernels import choose_kernel

DEVICES = ("cpu", "cuda")


def profile(
    model: Model, device_name: str, options: ProfileOptions, progress: Progress, links: tuple[LinkTable, ...] = ()
) -> CostTable:
    """Measure this machine for `model`'s heads and layers in its element type.

    Raises:
        ConfigError: no such device here, or a kernel that does not serve it.
    """
    device = open_device(device_name)
    dtype = torch.float32 if model.bytes_per_element == 4 else torch.bfloat16
    bench = KernelBench(model, device, dtype, choose_kernel(options.kernel, device, dtype, model.head_dim), options)
    return CostTable(
        FORMAT,
        _source(device, options),
        bench.attention(progress),
        bench.merge(),
        bench.pack(),
        bench.layer(progress),
        links,
    )


def best_device() -> str:
    """Cuda where there is one, else cpu."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def prepare(device_name: str, threads: int | None) -> None:
    """Check the device and set the threads of the CPU kernels (None: torch's own choice).

    Raises:
        ConfigError: no such device here.
    """
    open_device(device_name)
    if threads:
        torch.set_num_threads(threads)


def open_device(name: str) -> torch.device:
    """The device called `name`, cpu or cuda.

    Raises:
        ConfigError: unknown, or CUDA where there is none.
    """
    if name not in DEVICES:
        raise ConfigError(f"--device {name!r}: choose one of {', '.join(DEVICES)}")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "--device cuda: torch finds no CUDA device here; use --device cpu, or see 'megatron-balance doctor'"
        )
    return torch.device(name)


def _source(device: torch.device, options: ProfileOptions) -> Source:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _processor()
    try:
        ours = version("megatron-balance")
    except PackageNotFoundError:  # run from a checkout that is not installed
        ours = "unknown"
    today = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
    return Source(name, device.type, today, ours, str(torch.__version__), torch.get_num_threads(), options.repeats)


def _processor() -> str:
    """The processor's name as the system gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
    return named or platform.processor() or platform.machine()
