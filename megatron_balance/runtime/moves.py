"""Rows between tensors: what a packed tensor takes from buffers, what goes back into them, and partials merged on the way.

Shape legend: T rows of a buffer, N packed rows, H heads, D head dim. There are two movers. `PlainMover` is torch, run by run: the CPU's,
and what the other one is tested against. `runtime.triton.mover.TritonMover` does each of these calls in one launch where it can.
No mover uses atomics: every destination row is written by one thread block, in an order that depends on the plan alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from megatron_balance.errors import ConfigError
from megatron_balance.runtime.kernels import merge
from megatron_balance.runtime.lowered import Packed

Empty = Callable[[tuple[int, ...], torch.dtype], Tensor]
"""Makes a tensor of this shape and type, not filled, for as long as someone holds it."""


HELD_PARTS = 4
"""Merging n new partials of bf16 into an accumulator moves 2 n + 8 bytes an element: with 3 that is less than half of what merging each as
it comes moves, and more of them would take more memory than the accumulator does."""


class Fill(NamedTuple):
    """Packed rows taken from buffers. `sources`: of each run, its buffer [T, H, ...]; `target`: [N, H, ...]."""

    packed: Packed
    sources: tuple[Tensor, ...]
    target: Tensor


class Place(NamedTuple):
    """Packed rows put, or added, to rows of buffers. `source`: [N, H, ...]; `targets`: of each run, its buffer [T, H, ...]."""

    packed: Packed
    source: Tensor
    targets: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class Space:
    """What the partials of one forward need. `sizes`: (rows, heads) of each query buffer; `blank`: buffers that start empty.

    `dtype`: of the output; `wide`: of LSE and of what is accumulated. `held`: most partials of a buffer that wait to be merged at once.
    """

    sizes: Mapping[int, tuple[int, int]]
    blank: tuple[int, ...]
    dim: int
    dtype: torch.dtype
    wide: torch.dtype
    empty: Empty
    held: int = HELD_PARTS


class Partials(Protocol):
    """The outputs of one forward so far, by query buffer."""

    def add(self, packed: Packed, merges: tuple[bool, ...], out: Tensor, lse: Tensor) -> None:
        """Packed partials out [N, H, D] and LSE [N, H] to their rows. They are not changed later. `merges`: as in `lowered.Launch`."""
        ...

    def send(self, packed: Packed, into: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
        """Out [N, H, D] in its final type and LSE [N, H] of packed rows, both contiguous, and `into` tensors where there are some."""
        ...

    def final(self) -> tuple[Tensor, Tensor]:
        """Out [T, H, D] in its final type and LSE [T, H] of buffer 0; they belong to the caller."""
        ...


class Mover(Protocol):
    """Moves rows. `name` as in `choose_mover`."""

    name: str

    def fill(self, fills: Sequence[Fill]) -> None:
        """Fill the targets; types are converted."""
        ...

    def place(self, places: Sequence[Place]) -> None:
        """Write the sources to their rows. No row and head is named twice in one call."""
        ...

    def add(self, places: Sequence[Place]) -> None:
        """Add the sources to their rows; a row may be named often (a key that several entries use)."""
        ...

    def partials(self, space: Space) -> Partials:
        """Nothing so far."""
        ...


MOVERS = ("auto", "plain", "triton")


def choose_mover(name: str, device: torch.device) -> Mover:
    """The mover called `name`; "auto": triton on CUDA, plain elsewhere. triton on CPU tensors needs its interpreter.

    Raises ConfigError: no such mover, or Triton is not installed.
    """
    if name == "auto":
        name = "triton" if device.type == "cuda" else "plain"
    match name:
        case "plain":
            return PlainMover()
        case "triton":
            if find_spec("triton") is None:
                raise ConfigError("the mover triton needs the package triton, which is not installed; pip install triton, or mover: plain")
            from megatron_balance.runtime.triton.mover import TritonMover

            return TritonMover(device)
        case _:
            raise ConfigError(f"unknown mover {name!r}; known: {', '.join(MOVERS)}")


def part(x: Tensor, start: int, stop: int, head: int, num_heads: int) -> Tensor:
    """Rows [start, stop) and heads [head, head + num_heads) of `x` [T, heads, ...]: a view, `x` itself if that is all of it."""
    rows = x if stop - start == x.shape[0] else x.narrow(0, start, stop - start)
    return rows if num_heads == rows.shape[1] else rows.narrow(1, head, num_heads)


def part_heads(x: Tensor, head: int, num_heads: int) -> Tensor:
    """Heads [head, head + num_heads) of `x`: a view, `x` itself if that is all of them."""
    return x if num_heads == x.shape[1] else x.narrow(1, head, num_heads)


class PlainMover:
    """See `Mover`: torch's own calls, a few for each run."""

    name = "plain"

    def fill(self, fills: Sequence[Fill]) -> None:
        for packed, sources, target in fills:
            for run, index, source in zip(packed.runs, packed.indices, sources, strict=True):
                if index is None:
                    taken = part(source, run.start, run.stop, run.buffer_head, run.num_heads)
                else:
                    taken = part_heads(source.index_select(0, index), run.buffer_head, run.num_heads)
                part(target, run.row, run.row + run.count, run.head, run.num_heads).copy_(taken)

    def place(self, places: Sequence[Place]) -> None:
        for packed, source, targets in places:
            for run, index, target in zip(packed.runs, packed.indices, targets, strict=True):
                own = part(source, run.row, run.row + run.count, run.head, run.num_heads)
                if index is None:
                    part(target, run.start, run.stop, run.buffer_head, run.num_heads).copy_(own)
                else:
                    part_heads(target, run.buffer_head, run.num_heads)[index] = own.to(target.dtype)

    def add(self, places: Sequence[Place]) -> None:
        for packed, source, targets in places:
            for run, index, target in zip(packed.runs, packed.indices, targets, strict=True):
                added = part(source, run.row, run.row + run.count, run.head, run.num_heads)
                if index is None:
                    part(target, run.start, run.stop, run.buffer_head, run.num_heads).add_(added)
                else:
                    part_heads(target, run.buffer_head, run.num_heads).index_add_(0, index, added.to(target.dtype))

    def partials(self, space: Space) -> Partials:
        return PlainPartials(space, self)


class PlainPartials:
    """See `Partials`: accumulated two at a time, as they come."""

    def __init__(self, space: Space, mover: PlainMover) -> None:
        self.space, self.mover = space, mover
        self.out: dict[int, Tensor] = {}
        self.lse: dict[int, Tensor] = {}
        for buffer in space.blank:
            self.make(buffer)
            self.out[buffer].zero_()
            self.lse[buffer].fill_(-torch.inf)

    def make(self, buffer: int) -> None:
        """Room for the outputs of a buffer, if there is none."""
        if buffer not in self.out:
            rows, heads = self.space.sizes[buffer]
            self.out[buffer] = self.space.empty((rows, heads, self.space.dim), self.space.wide)
            self.lse[buffer] = self.space.empty((rows, heads), self.space.wide)

    def add(self, packed: Packed, merges: tuple[bool, ...], out: Tensor, lse: Tensor) -> None:
        for run, index, merging in zip(packed.runs, packed.indices, merges, strict=True):
            if not merging and (run.count, run.num_heads) == self.space.sizes[run.buffer] == tuple(out.shape[:2]) and index is None:
                self.out[run.buffer], self.lse[run.buffer] = out.to(self.space.wide), lse  # all of a buffer at once: no copy
                continue
            self.make(run.buffer)
            new_out = part(out, run.row, run.row + run.count, run.head, run.num_heads)
            new_lse = part(lse, run.row, run.row + run.count, run.head, run.num_heads)
            held = self.out[run.buffer], self.lse[run.buffer]
            if index is None:
                held_out, held_lse = (part(x, run.start, run.stop, run.buffer_head, run.num_heads) for x in held)
                if merging:
                    new_out, new_lse = merge((held_out, held_lse), (new_out, new_lse))
                held_out.copy_(new_out)
                held_lse.copy_(new_lse)
                continue
            held_out, held_lse = (part_heads(x, run.buffer_head, run.num_heads) for x in held)
            if merging:
                new_out, new_lse = merge((held_out[index], held_lse[index]), (new_out, new_lse))
            held_out[index] = new_out.to(self.space.wide)
            held_lse[index] = new_lse

    def send(self, packed: Packed, into: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
        if into is None and packed.direct and self.space.dtype == self.space.wide:
            run = packed.runs[0]
            out, lse = (part(held[run.buffer], run.start, run.stop, run.buffer_head, run.num_heads) for held in (self.out, self.lse))
            if out.is_contiguous() and lse.is_contiguous():
                return out, lse  # nothing is added to them any more
        shape = (packed.num_rows, packed.num_heads)
        out, lse = into or (self.space.empty((*shape, self.space.dim), self.space.dtype), self.space.empty(shape, self.space.wide))
        for held, target in ((self.out, out), (self.lse, lse)):
            self.mover.fill([Fill(packed, tuple(held[run.buffer] for run in packed.runs), target)])
        return out, lse

    def final(self) -> tuple[Tensor, Tensor]:
        self.make(0)
        return self.out[0].to(self.space.dtype), self.lse[0]
