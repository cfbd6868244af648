"""Stand-ins that record: streams, NCCL's calls, torch's operators, Triton's launches, the allocator.

Everything else is the product's: the real transport, pool, movers and executor run on CPU tensors,
one rank at a time. Nothing is sent and no value is right; what is recorded is which bytes each
stream reads and writes, in which order the host issued it, and what waits for what.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_balance.runtime import bind as binding
from megatron_balance.runtime import transport
from megatron_balance.runtime.cuda import StreamMessage
from megatron_balance.runtime.kernels import CuSeqlens, Grads, VarlenKernel
from megatron_balance.runtime.movers.triton import mover as triton_mover
from megatron_balance.runtime.movers.triton.kernels import BLOCK_ROWS, AddBlock, CopyBlock
from megatron_balance.runtime.movers.triton.mover import UNIT
from megatron_balance.runtime.pool import SLAB
from tools.gpu_model.trace import COMPUTE, Extent, Kind, Trace

_NOTHING = frozenset(("aten::empty", "aten::new_empty", "aten::empty_like", "aten::empty_strided", "aten::detach"))
"""Operators that touch no memory."""


class Recorder:
    """Notes what one rank does. `stream`: the one that operators run on."""

    def __init__(self, rank: int) -> None:
        self.trace = Trace(rank)
        self.stream = COMPUTE
        self._watched: dict[int, weakref.ref[Any]] = {}
        self._owners: dict[int, str] = {}
        self._users: dict[int, set[str]] = {}
        self._slabs: dict[int, int] = {}  # of the pool: address and end
        self._on = True

    def launch(self, label: str, reads: Sequence[Extent], writes: Sequence[Extent], kind: Kind = "rows") -> None:
        self.trace.launch(self.stream, label, tuple(reads), tuple(writes), kind)

    def rows(self, label: str, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
        self.launch(label, extents(reads), extents(writes))

    def allocated(self, x: Tensor, stream: str | None = None) -> None:
        """Note memory that the device's allocator lends, until the last tensor on it is gone."""
        storage = x.untyped_storage()
        at, num_bytes = storage.data_ptr(), storage.nbytes()
        if not num_bytes or at in self._watched or any(a <= at < b for a, b in self._slabs.items()):
            return
        if num_bytes >= SLAB:
            self._slabs[at] = at + num_bytes
        self._owners[at] = stream or self.stream
        self._users[at] = set()
        self._watched[at] = weakref.ref(storage, lambda _: self._gone(at, num_bytes))

    def uses(self, x: Tensor, stream: str) -> None:
        """`Tensor.record_stream`: nothing for memory that is not the allocator's."""
        if x.untyped_storage().data_ptr() in self._users:
            self._users[x.untyped_storage().data_ptr()].add(stream)

    def _gone(self, at: int, num_bytes: int) -> None:
        del self._watched[at]
        self._slabs.pop(at, None)
        if self._on:
            self.trace.free(self._owners.pop(at), (at, at + num_bytes), frozenset(self._users.pop(at)))

    def close(self) -> None:
        """Note nothing any more: what is let go from now on belongs to the recording."""
        self._on = False


def extent(x: Tensor) -> Extent:
    """First and last byte of a tensor, with the gaps between them."""
    size = 1 + sum((n - 1) * abs(stride) for n, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + size * x.element_size()


def extents(tensors: Sequence[Tensor]) -> list[Extent]:
    """Extents of the tensors that are not empty; heads out of rows as the rows have them."""
    found: list[Extent] = []
    for x in tensors:
        if x.numel():
            found += _row_extents(x)
    return found


def _row_extents(x: Tensor) -> list[Extent]:
    """Extents without the gaps between rows, where there are few rows."""
    if x.is_contiguous() or x.dim() < 2 or x.shape[0] > MOST_ROWS or _dense(x):
        return [extent(x)]
    return [extent(row) for row in x.unbind(0)]


MOST_ROWS = 64
"""Rows of a strided tensor that are told apart; of more, the gaps count as touched, too."""


def _dense(x: Tensor) -> bool:
    """Whether it covers its extent, in whatever order of dimensions."""
    start, stop = extent(x)
    return stop - start == x.numel() * x.element_size()


class Operators(TorchDispatchMode):
    """Records every operator of torch as a launch on the recorder's stream."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        schema = func._schema
        made = list(_tensors(out))
        given = list(zip(schema.arguments, args, strict=False))
        given += [(a, (kwargs or {})[a.name]) for a in schema.arguments if a.name in (kwargs or {})]
        written = [x for a, value in given if a.alias_info and a.alias_info.is_write for x in _tensors(value)]
        read = [x for a, value in given if not (a.alias_info and a.alias_info.is_write) for x in _tensors(value)]
        inputs = {x.untyped_storage().data_ptr() for x in (*written, *read)}
        fresh = [x for x in made if x.untyped_storage().data_ptr() not in inputs]
        for x in (*read, *written, *fresh):  # also what was made without an operator, as by torch.tensor
            self.recorder.allocated(x)
        if schema.name not in _NOTHING and (written or fresh):
            self.recorder.rows(schema.name, read, [*written, *fresh])
        return out


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors(one)


class RecordedStreams:
    """See `runtime.cuda.Streams`."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.made: dict[str, RecordedStream] = {}

    def of(self, name: str) -> RecordedStream:
        return self.made.setdefault(name, RecordedStream(name, self.recorder))

    def now(self) -> int:
        return self.recorder.trace.record(COMPUTE)

    def wait(self, event: int) -> None:
        self.recorder.trace.wait(COMPUTE, event)

    def timed(self, on: bool) -> None:
        del on

    def seconds(self, begin: int, end: int) -> float:
        raise NotImplementedError("recorded events have no times")


class RecordedStream:
    """See `runtime.cuda.Stream`."""

    def __init__(self, name: str, recorder: Recorder) -> None:
        self.name, self.recorder = name, recorder

    def wait(self, event: int) -> None:
        self.recorder.trace.wait(self.name, event)

    def batch(self, transfers: Sequence[StreamMessage]) -> None:
        label = "; ".join(
            f"{'to' if t.sends else 'from'} rank {t.peer} (of {t.src} -> {t.dst}, {t.index})" for t in transfers
        )
        self.recorder.trace.launch(
            self.name,
            label,
            tuple(extents([t.tensor for t in transfers if t.sends])),
            tuple(extents([t.tensor for t in transfers if not t.sends])),
            "batch",
        )

    def call(self, issue: Callable[[], Sequence[Any]]) -> None:
        with _on(self.recorder, self.name):
            issue()

    def empty(self, num_bytes: int) -> Tensor:
        with _on(self.recorder, self.name):
            return torch.empty(num_bytes, dtype=torch.uint8)

    def uses(self, x: Tensor) -> None:
        self.recorder.uses(x, self.name)

    def record(self) -> int:
        return self.recorder.trace.record(self.name)


@contextmanager
def _on(recorder: Recorder, stream: str) -> Iterator[None]:
    before, recorder.stream = recorder.stream, stream
    try:
        yield
    finally:
        recorder.stream = before


class AttentionCalls:
    """In place of a library of `runtime.kernels`: a launch that touches what a library's would."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def forward(self, at: CuSeqlens, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        del scale
        out, lse = torch.empty_like(q), torch.empty(q.shape[1], q.shape[0], dtype=_wide(q))
        reads = extents((q, k, v, at.cu_q, at.cu_k))
        self.recorder.launch("attention forward", reads, extents((out, lse)), "forward")
        return out, lse.T

    def backward(
        self, at: CuSeqlens, dout: tuple[Tensor, Tensor, Tensor], q: Tensor, k: Tensor, v: Tensor, scale: float
    ) -> Grads:
        del scale
        grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        reads = extents((q, k, v, *dout, at.cu_q, at.cu_k))
        self.recorder.launch("attention backward", reads, extents(grads), "backward")
        return grads


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


class TritonLaunch:
    """One of the mover's kernels, recorded instead of launched, with the rows that its tables name."""

    def __init__(self, name: str, recorder: Recorder) -> None:
        self.name, self.recorder = name, recorder

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        del grid
        return self.merge if self.name == "merge_rows" else self.move

    def move(self, sources: Sequence[Tensor], targets: Sequence[Tensor], *rest: Any, **constants: Any) -> None:
        blocks, index = (x.to(torch.int64).numpy() for x in rest[2:4])
        del constants
        reads: list[Extent] = list(extents(rest[2:4]))
        writes: list[Extent] = []
        for block in blocks.tolist():
            if self.name == "copy_rows":
                of = _rows(index, block[CopyBlock.SOURCE_ROW], block[CopyBlock.SOURCE_LIST], block[CopyBlock.COUNT])
                to = _rows(index, block[CopyBlock.TARGET_ROW], block[CopyBlock.TARGET_LIST], block[CopyBlock.COUNT])
            else:
                count = block[AddBlock.COUNT]
                to = _rows(index, 0, block[AddBlock.TARGET_LIST], count)
                first = _rows(index, 0, block[AddBlock.FIRST_LIST], count)
                number = _rows(index, 0, block[AddBlock.NUMBER_LIST], count)
                at = [a + i for a, n in zip(first, number, strict=True) for i in range(n)]
                of, begins = index[at].tolist(), UNIT * index[[i + block[AddBlock.BEHIND] for i in at]]
            # Pair and heads are the same columns of both tables.
            pair, heads, source_head = block[CopyBlock.PAIR], block[CopyBlock.HEADS], block[CopyBlock.SOURCE_HEAD]
            if self.name == "copy_rows":
                reads += _of_rows(sources[pair], of, source_head, heads, UNIT * block[CopyBlock.SOURCE_BEGIN])
            else:
                for row, begin in zip(of, begins.tolist(), strict=True):
                    reads += _of_rows(sources[pair], [row], source_head, heads, begin)
            writes += _of_rows(
                targets[pair], to, block[CopyBlock.TARGET_HEAD], heads, UNIT * block[CopyBlock.TARGET_BEGIN]
            )
        self.recorder.launch(self.name, joined(reads), joined(writes))

    def merge(
        self, outs: Sequence[Tensor], lses: Sequence[Tensor], maps: Sequence[Tensor], *rest: Any, **_: Any
    ) -> None:
        sums, rows, ends = rest[2:4], rest[5], rest[7:9]
        self.recorder.rows("merge_rows", [*outs, *lses, *maps, *sums, rows], ends)


def _rows(index: Any, first: int, listed: int, count: int) -> list[int]:
    return list(range(first, first + count)) if listed < 0 else index[listed : listed + count].tolist()


def _of_rows(x: Tensor, rows: Sequence[int], head: int, num_heads: int, behind: int) -> list[Extent]:
    """Extents of heads of some rows of a tensor like `x` [T, H, ...], whose rows have no gaps inside,
    `behind` bytes behind it.
    """
    size = x.element_size()
    per_head = size * (x[0, 0].numel() if x.dim() > 2 else 1)
    begin, stride = x.data_ptr() + behind + head * per_head, x.stride(0) * size
    return [(begin + row * stride, begin + row * stride + num_heads * per_head) for row in rows]


def joined(of: Sequence[Extent]) -> list[Extent]:
    """Extents in order, those that touch as one."""
    found: list[Extent] = []
    for start, stop in sorted(of):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], stop)
        else:
            found.append((start, stop))
    return found


class Nccl:
    """torch.distributed's collectives, recorded on the stream that they are issued on."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def all_to_all_single(self, out: Tensor, given: Tensor, *_: Any, group: Any, async_op: bool) -> None:
        self._note("all_to_all", out, given, group, async_op)

    def all_gather_into_tensor(self, out: Tensor, given: Tensor, *, group: Any, async_op: bool) -> None:
        self._note("all_gather", out, given, group, async_op)

    def reduce_scatter_tensor(self, out: Tensor, given: Tensor, *, group: Any, async_op: bool) -> None:
        self._note("reduce_scatter", out, given, group, async_op)

    def _note(self, what: str, out: Tensor, given: Tensor, group: Any, async_op: bool) -> None:
        assert async_op, "a collective that makes the host wait"
        label = f"{what} of ranks {list(group.ranks)}"
        self.recorder.launch(label, extents([given]), extents([out]), "collective")


class Communicator(SimpleNamespace):
    """A process group that only knows its ranks."""

    ranks: tuple[int, ...]


@contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """Put every stand-in in place of what it stands for; binding then chooses the model's kernel."""
    kernel = VarlenKernel("model", AttentionCalls(recorder))
    with ExitStack() as stack:
        for name in ("copy_rows", "add_rows", "merge_rows"):
            stack.enter_context(mock.patch.object(triton_mover, name, TritonLaunch(name, recorder)))
        stack.enter_context(mock.patch.object(binding, "choose_kernel", return_value=kernel))
        stack.enter_context(mock.patch.object(transport, "dist", Nccl(recorder)))
        stack.enter_context(Operators(recorder))
        try:
            yield
        finally:
            recorder.close()


assert BLOCK_ROWS <= MOST_ROWS
