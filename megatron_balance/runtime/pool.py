"""Memory that a rank's attention calls share: received inputs, partials, gradients on their way and
packed messages.

Slabs are made when a plan needs more than there is, sized by what the plan says
(`runtime.lower.memory`), and divided into buffers by best fit. The same calls on the same plan
find the same places: from the second on nothing is allocated.

A buffer is taken back when the last tensor on it is gone, whoever held it: autograd's saved
tensors, views and transports included. Where another stream read or wrote it and the compute stream
has not waited for that, it is used again as late as can be, behind a fence: whoever touches it
first waits for that other use, on the device.
"""

import weakref
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import prod
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor

ALIGN = 256  # bytes; as CUDA's own allocations begin, so that the widest accesses and bulk copies serve
SLAB = 1 << 20  # least bytes of a slab
_PINNED_ROOM = 2  # pinned blocks over the power of two above the largest need: two to four times of that
Extent = tuple[int, int]  # bytes [start, stop) of a slab


class Fence(NamedTuple):
    """The end of another stream's use of some memory."""

    stream: str
    # Of the event among those of the stream, rising.
    number: int
    # The use is over when it has happened.
    event: Any
    # Makes the compute stream wait for an event, on the device.
    wait: Callable[[Any], None]


class _Passed(dict[str, int]):
    """The number of the last fence of each other stream that the compute stream has waited for."""

    def has(self, fence: Fence) -> bool:
        return self.get(fence.stream, 0) >= fence.number

    def wait(self, fence: Fence) -> None:
        if not self.has(fence):
            fence.wait(fence.event)
            self[fence.stream] = fence.number


@dataclass(slots=True)
class _Slab:
    memory: Tensor
    free: list[Extent]
    fenced: deque[tuple[Extent, list[Fence]]] = field(default_factory=deque)
    guards: list[tuple[Extent, list[Fence]]] = field(default_factory=list)
    typed: dict[torch.dtype, Tensor] = field(default_factory=dict)

    def of(self, dtype: torch.dtype) -> Tensor:
        if dtype not in self.typed:
            self.typed[dtype] = self.memory.view(dtype)
        return self.typed[dtype]

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

    def fences(self, extent: Extent) -> list[Fence]:
        """The fences in front of an extent that was taken; of what is left they stay."""
        found: list[Fence] = []
        left: list[tuple[Extent, list[Fence]]] = []
        for (start, stop), fences in self.guards:
            if extent[1] <= start or stop <= extent[0]:
                left.append(((start, stop), fences))
                continue
            found += fences
            left += [(part, fences) for part in ((start, extent[0]), (extent[1], stop)) if part[0] < part[1]]
        self.guards = left
        return found


class _Watch(weakref.ref[torch.UntypedStorage]):
    __slots__ = ("address",)
    address: int


@dataclass(slots=True)
class _Lease:
    slab: _Slab
    extent: Extent
    watch: _Watch
    before: list[Fence]
    fences: list[Fence] = field(default_factory=list)


class BufferPool:
    """See the module. Of one rank; safe for several threads; never gives memory back. On CPU memory
    comes from torch, unless `cpu`: that keeps what was freed, and costs less Python time.
    """

    def __init__(self, *, cpu: bool = False) -> None:
        self._cpu = cpu
        self._slabs: dict[tuple[torch.device, int], list[_Slab]] = {}
        self._leases: dict[int, _Lease] = {}  # by address
        self._returned: deque[int] = deque()
        self._lock = Lock()
        self._num_fences = 0
        self.passed = _Passed()
        self.slab_bytes = SLAB
        self._pinned_bytes = 0
        self.held_bytes = 0
        self.used_bytes = 0
        self.peak_bytes = 0
        self.num_slabs = 0

    def lends(self, device: torch.device) -> bool:
        return self._cpu or device.type != "cpu"

    def reserve(self, num_bytes: int) -> None:
        """Make slabs from now on no smaller than what a plan needs for a call."""
        self.slab_bytes = max(self.slab_bytes, _aligned(num_bytes))

    def pinned_bytes(self, num_bytes: int) -> int:
        """The size to ask torch for where so many bytes of pinned host memory are needed: mostly that
        of the last time.
        """
        # torch keeps pinned blocks by the power of two above their size and lends those of exactly
        # that class again; a new one stops the device. Tables of ever-new plans cross a power of two
        # at any time, so all take one class, with room above the largest so far.
        if num_bytes > self._pinned_bytes:
            self._pinned_bytes = _PINNED_ROOM << (num_bytes - 1).bit_length()
        return self._pinned_bytes

    def empty(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, *, received: bool = False
    ) -> Tensor:
        """A tensor that is not filled; its memory is its own until the last tensor on it is gone.
        `received`: another stream is the first to touch it, and waits for its `fences`; else the
        compute stream has.
        """
        if not self.lends(device):
            return torch.empty(shape, dtype=dtype, device=device)
        num_elements = prod(shape)
        num_bytes = _aligned(num_elements * dtype.itemsize)
        if not num_bytes:
            return torch.empty(shape, dtype=dtype, device=device)
        with self._lock:
            self._take_back()
            slab, extent = self._find(num_bytes, device)
            fences = slab.fences(extent)
            self.used_bytes += num_bytes
            self.peak_bytes = max(self.peak_bytes, self.used_bytes)
            raw = slab.of(dtype).narrow(0, extent[0] // dtype.itemsize, num_elements)
            # A tensor of its own storage on the slab's memory: that storage ends with the last
            # tensor on it, in C++ or in Python.
            lent: Tensor = torch._C._from_dlpack(torch._C._to_dlpack(raw))
            watch = _Watch(lent.untyped_storage(), self._note)
            watch.address = lent.data_ptr()
            self._leases[watch.address] = _Lease(slab, extent, watch, fences if received else [])
        if not received:
            for fence in sorted(fences, key=lambda f: f.number, reverse=True):
                self.passed.wait(fence)
        return lent if len(shape) == 1 else lent.view(shape)

    def _note(self, watch: weakref.ref[torch.UntypedStorage]) -> None:
        """Note that a buffer is gone. This runs anywhere, also inside `empty`: no lock, no work."""
        assert isinstance(watch, _Watch)
        self._returned.append(watch.address)

    def fence(self, stream: str, event: Any, wait: Callable[[Any], None]) -> Fence:
        """The next fence of a stream. `wait`: makes the compute stream wait for `event`."""
        self._num_fences += 1
        return Fence(stream, self._num_fences, event, wait)

    def fences(self, tensors: Iterable[Tensor]) -> list[Fence]:
        """The last fence of each stream to pass before memory lent for receiving is written."""
        last: dict[str, Fence] = {}
        with self._lock:
            for x in tensors:
                lease = self._leases.get(x.untyped_storage().data_ptr())
                for fence in lease.before if lease is not None else ():
                    if fence.stream not in last or last[fence.stream].number < fence.number:
                        last[fence.stream] = fence
        return [fence for fence in last.values() if not self.passed.has(fence)]

    def used(self, tensors: Iterable[Tensor], fence: Fence) -> None:
        """Note that another stream uses those of the tensors that are of the pool, until `fence`."""
        with self._lock:
            for x in tensors:
                lease = self._leases.get(x.untyped_storage().data_ptr())
                if lease is not None:
                    lease.fences.append(fence)

    def _find(self, num_bytes: int, device: torch.device) -> tuple[_Slab, Extent]:
        """The smallest free extent that fits, else the oldest behind fences, else of a new slab."""
        key = (device, torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0)
        slabs = self._slabs.setdefault(key, [])
        while True:
            best, extent = None, (0, 0)
            for slab in slabs:
                for start, stop in slab.free:
                    if stop - start >= num_bytes and (best is None or stop - start < extent[1] - extent[0]):
                        best, extent = slab, (start, stop)
            if best is not None:
                return best, best.take(extent, num_bytes)
            oldest = next((slab for slab in slabs if slab.fenced), None)
            if oldest is None:
                break
            extent, fences = oldest.fenced.popleft()
            oldest.put(extent)
            fences = [fence for fence in fences if not self.passed.has(fence)]
            if fences:
                oldest.guards.append((extent, fences))
        size = max(num_bytes, self.slab_bytes)
        slabs.append(_Slab(torch.empty(size, dtype=torch.uint8, device=device), [(0, size)]))
        self.held_bytes += size
        self.num_slabs += 1
        return slabs[-1], slabs[-1].take((0, size), num_bytes)

    def _take_back(self) -> None:
        """Take back what was let go since the last call. Called with the lock."""
        while self._returned:
            lease = self._leases.pop(self._returned.popleft())
            self.used_bytes -= lease.extent[1] - lease.extent[0]
            # Streams that used it have waited for what was before it.
            fences = [fence for fence in lease.fences or lease.before if not self.passed.has(fence)]
            if fences:
                lease.slab.fenced.append((lease.extent, fences))
            else:
                lease.slab.put(lease.extent)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGN) * ALIGN
