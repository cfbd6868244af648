"""Kernels that can be chosen: what each serves, and whether it can be used on this machine."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec

import torch

from megatron_balance.runtime.kernels.base import Kernel

Capability = tuple[int, int]
"""Compute capability of a GPU, (major, minor)."""

NOT_INSTALLED = "not installed"


def capability_of(device: torch.device) -> Capability | None:
    """Compute capability of a CUDA device; None for a CPU, or where no GPU is here to ask."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_capability(device)


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Compute capabilities from `first` on, up to `last` (None: all later ones), as told to a user."""

    first: Capability
    last: Capability | None = None

    def __contains__(self, capability: Capability) -> bool:
        return self.first <= capability and (self.last is None or capability <= self.last)

    def __str__(self) -> str:
        low = ".".join(map(str, self.first))
        if self.last is None:
            return f"{low} and later"
        return low if self.last == self.first else f"{low} to {'.'.join(map(str, self.last))}"


def any_head_dim(_: Capability | None) -> int:
    """More than any head dim."""
    return 1 << 30


@dataclass(frozen=True, slots=True)
class Offer:
    """A kernel that can be chosen.

    Attributes:
        make: makes it for tensors of a head dim.
        devices: types that it serves.
        dtypes: that it serves.
        largest: head dim, by compute capability.
        modules: one of them must be there and can be imported.
        mend: how to get it.
        capabilities: that it serves.
        check: further needs; the reason why it cannot be used here, "" if it can.
        windows: whether its calls here take sliding windows.
        two_widths: values may have another width than keys; else the narrower are padded.
    """

    make: Callable[[int], Kernel]
    devices: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    largest: Callable[[Capability | None], int] = any_head_dim
    modules: tuple[str, ...] = ()
    mend: str = ""
    capabilities: Capabilities = Capabilities((0, 0))
    check: Callable[[], str] = str
    windows: bool = True
    two_widths: bool = False

    def fault(self) -> str:
        """The reason why it cannot be used on this machine: `NOT_INSTALLED`, an error at import, or
        a version; "" if it can.
        """
        faults = [import_fault(name) for name in self.modules]
        if faults and "" not in faults:
            return next((fault for fault in faults if fault != NOT_INSTALLED), NOT_INSTALLED)
        return self.check()

    @property
    def installed(self) -> bool:
        """Whether it can be used on this machine."""
        return not self.fault()

    def refusal(self, device: torch.device, dtype: torch.dtype, head_dim: int, *, windows: bool = False) -> str:
        """The reason why it does not serve such tensors; "" if it does."""
        if windows and not self.windows:
            return "is not called with sliding windows here"
        if device.type not in self.devices:
            return f"does not serve {device.type} tensors"
        if dtype not in self.dtypes:
            return f"does not serve {dtype}, only {', '.join(map(str, self.dtypes))}"
        capability = capability_of(device)
        if capability is not None and capability not in self.capabilities:
            return f"serves compute capability {self.capabilities}, this GPU has {'.'.join(map(str, capability))}"
        largest = self.largest(capability)
        return "" if head_dim <= largest else f"serves head dims up to {largest}"


@cache
def import_fault(name: str) -> str:
    """The reason why a module cannot be imported, `NOT_INSTALLED` or the error; "" if it can.

    A wheel that was built for another torch fails with an OSError, or with an ImportError for an
    undefined symbol.
    """
    top = name.partition(".")[0]
    if top not in sys.modules and find_spec(top) is None:
        return NOT_INSTALLED
    try:
        import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(f"{error.name}.")):
            return NOT_INSTALLED  # the package is there, but not this part of it
        return first_line(error)
    except Exception as error:
        return first_line(error)
    return ""


def first_line(error: BaseException) -> str:
    """An error's type and first line."""
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
