"""The machine that the suite runs on."""

import importlib.metadata
import os
import platform
import re
from dataclasses import dataclass

import torch

from tools.gpu.rows import Device

PACKAGES = ("torch", "triton", "megatron-core", "transformer-engine", "apex", "flash-attn")


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine and its packages.

    `name`: of the GPU, or of the processor where there is none. `versions`: by package, None for
    those that are not installed. `gpus`: how many.
    """

    device: Device
    name: str
    memory_bytes: int
    cuda: str | None
    cores: int
    python: str
    versions: dict[str, str | None]
    gpus: int = 0

    @property
    def slug(self) -> str:
        """The GPU's name as a file's begins: 'NVIDIA H200' is h200."""
        words = re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")
        return words.removeprefix("nvidia-")


def describe() -> Machine:
    gpu = torch.cuda.is_available()
    return Machine(
        device="cuda" if gpu else "cpu",
        name=torch.cuda.get_device_name(0) if gpu else platform.machine(),
        memory_bytes=torch.cuda.get_device_properties(0).total_memory if gpu else 0,
        cuda=torch.version.cuda if gpu else None,
        cores=os.cpu_count() or 1,
        python=platform.python_version(),
        versions={name: _version(name) for name in PACKAGES},
        gpus=torch.cuda.device_count() if gpu else 0,
    )


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
