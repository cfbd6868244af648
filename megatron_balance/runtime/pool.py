"""Memory that a rank's attention calls share.

For received inputs, partials, gradients on their way and packed messages. Slabs are made when a
plan needs more than there is, sized by what the plan says (`runtime.lower.peak_bytes`), and divided
into buffers by best fit. The same calls on the same plan find the same places: from the second on
nothing is allocated, and shapes that vary from microbatch to microbatch leave the device's own
allocator alone.

A buffer is taken back when the last tensor on it is gone, whoever held it: autograd's saved
tensors, views and transports included. Where another stream read or wrote it, it is used again as
late as can be, and the compute stream waits for that other use first, on the device.
"""

from __future__ import annotations

import weakref
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import prod
from threading import Lock

import torch
from torch import Tensor
from torch.utils import dlpack

ALIGN = 256
"""Bytes; as CUDA's own allocations begin, so that the widest accesses and bulk copies serve."""
SLAB = 1 << 20
"""Least bytes of a slab."""

Extent = tuple[int, int]
"""Bytes [start, stop) of a slab."""
Fence = Callable[[], None]
"""Makes the compute stream wait, on the device, for another stream to be done with some memory."""


@dataclass(slots=True)
class _Slab:
    """One allocation.

    `free`: ascending, never touching one another. `fenced`: free once the fences are passed, the
    oldest first.
    """

    memory: Tensor
    free: list[Extent]
    fenced: deque[tuple[Extent, list[Fence]]] = field(default_factory=deque)

    def put(self, extent: Extent) -> None:
        start, stop = extent
        before = next((e for e in self.free if e[1] == start), None)
        behind = next((e for e in self.free if e[0] == stop), None)
        for neighbour in (before, behind):
            if neighbour is not None:
                self.free.remove(neighbour)
        insort(self.free, (before[0] if before else start, behind[1] if behind else stop))

    def take(self, at: Extent, num_bytes: int) -> Extent:
        self.free.remove(at)
        if at[1] - at[0] > num_bytes:
            insort(self.free, (at[0] + num_bytes, at[1]))
        return at[0], at[0] + num_bytes


class _Watch(weakref.ref[torch.UntypedStorage]):
    """Says when a storage is gone, and which."""

    __slots__ = ("address",)
    address: int


@dataclass(slots=True)
class _Lease:
    slab: _Slab
    extent: Extent
    watch: _Watch
    fences: list[Fence] = field(default_factory=list)


class BufferPool:
    """See the module. Of one rank; safe for several threads (autograd has its own on CUDA).

    It never gives memory back. On CPU memory comes from torch, unless `cpu`: the C library keeps
    what was freed, and a buffer from here costs more Python time.
    """

    def __init__(self, *, cpu: bool = False) -> None:
        self._cpu = cpu
        self._slabs: dict[tuple[torch.device, int], list[_Slab]] = {}
        self._leases: dict[int, _Lease] = {}  # by address
        self._returned: deque[int] = deque()
        self._lock = Lock()
        self.slab_bytes = SLAB
        self.held_bytes = 0
        self.used_bytes = 0
        self.peak_bytes = 0
        self.num_slabs = 0

    def lends(self, device: torch.device) -> bool:
        """Whether memory on `device` comes from here."""
        return self._cpu or device.type != "cpu"

    def reserve(self, num_bytes: int) -> None:
        """Make slabs from now on no smaller than what a plan needs for a call.

        Nothing is allocated yet.
        """
        self.slab_bytes = max(self.slab_bytes, _aligned(num_bytes))

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """A tensor that is not filled.

        Its memory is its own until the last tensor on it is gone.
        """
        if not self.lends(device):
            return torch.empty(shape, dtype=dtype, device=device)
        num_elements = prod(shape)
        num_bytes = _aligned(num_elements * dtype.itemsize)
        if not num_bytes:
            return torch.empty(shape, dtype=dtype, device=device)
        with self._lock:
            self._take_back()
            slab, extent, fences = self._find(num_bytes, device)
            self.used_bytes += num_bytes
            self.peak_bytes = max(self.peak_bytes, self.used_bytes)
            raw = slab.memory[extent[0] : extent[0] + num_elements * dtype.itemsize].view(dtype)
            # A tensor of its own storage on the slab's memory: that storage ends with the last
            # tensor on it, in C++ or in Python.
            lent = dlpack.from_dlpack(dlpack.to_dlpack(raw))  # pyright: ignore[reportPrivateImportUsage]
            watch = _Watch(lent.untyped_storage(), self._note)
            watch.address = lent.data_ptr()
            self._leases[watch.address] = _Lease(slab, extent, watch)
        for fence in fences:
            fence()
        return lent.view(shape)

    def _note(self, watch: weakref.ref[torch.UntypedStorage]) -> None:
        """Note that a buffer is gone. This runs anywhere, also inside `empty`: no lock, no work."""
        assert isinstance(watch, _Watch)
        self._returned.append(watch.address)

    def used(self, tensors: Iterable[Tensor], fence: Fence) -> None:
        """Note that another stream uses the tensors, until `fence` lets the compute stream go on.

        Those that are not of the pool are ignored.
        """
        with self._lock:
            for x in tensors:
                lease = self._leases.get(x.untyped_storage().data_ptr())
                if lease is not None:
                    lease.fences.append(fence)

    def _find(self, num_bytes: int, device: torch.device) -> tuple[_Slab, Extent, list[Fence]]:
        """The place of a buffer, and the fences that the compute stream has to wait for first.

        The smallest free extent that holds it, else one that other streams were given, the oldest
        first, else one of a new slab.
        """
        key = (device, torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0)
        slabs = self._slabs.setdefault(key, [])
        passed: list[Fence] = []
        while True:
            best, extent = None, (0, 0)
            for slab in slabs:
                for start, stop in slab.free:
                    if stop - start >= num_bytes and (best is None or stop - start < extent[1] - extent[0]):
                        best, extent = slab, (start, stop)
            if best is not None:
                return best, best.take(extent, num_bytes), passed
            oldest = next((slab for slab in slabs if slab.fenced), None)
            if oldest is None:
                break
            extent, fences = oldest.fenced.popleft()
            oldest.put(extent)
            passed += fences
        size = max(num_bytes, self.slab_bytes)
        slab = _Slab(torch.empty(size, dtype=torch.uint8, device=device), [(0, size)])
        slabs.append(slab)
        self.held_bytes += size
        self.num_slabs += 1
        return slab, slab.take((0, size), num_bytes), passed

    def _take_back(self) -> None:
        """Take back what was let go since the last call. Called with the lock."""
        while self._returned:
            lease = self._leases.pop(self._returned.popleft())
            self.used_bytes -= lease.extent[1] - lease.extent[0]
            if lease.fences:
                lease.slab.fenced.append((lease.extent, lease.fences))
            else:
                lease.slab.put(lease.extent)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGN) * ALIGN
