"""Protocol of movers: rows from buffers into packed tensors and back, and partials merged.

`PlainMover` is torch, run by run: the CPU's, and the one that the other is tested against.
`movers.triton` does each call in one launch where it can. No mover uses atomics: every destination
row is written by one thread block, in an order that depends on the plan alone.

Shape legend: T rows of a buffer, N packed rows, H heads, D elements of a head, V those of an output's.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from megatron_balance.runtime.kernels.base import merge_partials
from megatron_balance.runtime.lower.memory import CallForm, Later, made
from megatron_balance.runtime.lower.moves import MoverCall
from megatron_balance.runtime.lower.steps import Packed, RowRun

# Makes a tensor of this shape and type, not filled, for as long as someone holds it.
Empty = Callable[[tuple[int, ...], torch.dtype], Tensor]

# Most partials of a buffer that wait to be merged at once. Merging n new partials of bf16 into an
# accumulator moves 2 n + 8 bytes an element. With 3 that is less than half of merging each as it
# comes; more of them would take more memory than the accumulator does.
HELD_PARTS = 4


class RowMove(NamedTuple):
    """Packed rows that are taken from buffers (`Mover.fill`), written to them or added."""

    packed: Packed
    # Of each run, its buffer [T, H, ...].
    buffers: Sequence[Tensor]
    # The packed rows [N, H, ...].
    own: Tensor | Later
    # Of an addition, numbers of the runs whose buffers were never written: what is added begins
    # them, and all other rows become zero.
    fresh: tuple[int, ...] = ()


class Sent(NamedTuple):
    """Packed rows of outputs that are sent: `out` [N, H, V] in the inputs' type, `lse` [N, H] wide."""

    packed: Packed
    out: Tensor | Later
    lse: Tensor | Later


@dataclass(frozen=True, slots=True)
class Space:
    """Memory for the partials of one forward."""

    # (rows, heads) of each query buffer.
    sizes: Mapping[int, tuple[int, int]]
    # Those whose output must start empty.
    blank: tuple[int, ...]
    # V.
    dim: int
    # Of inputs and of the final output.
    dtype: torch.dtype
    # Of accumulators and LSE.
    wide: torch.dtype
    empty: Empty
    # As `HELD_PARTS`.
    held: int = HELD_PARTS


class Partials(Protocol):
    """The outputs of one forward so far, by query buffer."""

    def add(self, packed: Packed, merges: tuple[bool, ...], out: Tensor, lse: Tensor) -> None:
        """Add packed partials out [N, H, V], LSE [N, H], for good; `merges`: as of a `Launch`."""

    def as_they_lie(self, packed: Packed) -> tuple[Tensor, Tensor] | None:
        """Out in its final type and LSE of packed rows where they lie, if both are contiguous so."""
        ...

    def send(self, messages: Sequence[Sent]) -> None:
        """Fill messages with outputs and LSE; nothing is added to their rows any more."""

    def final(self) -> tuple[Tensor, Tensor]:
        """Out [T, H, V] in its final type, LSE [T, H] of buffer 0, without gaps, for the caller."""
        ...


class Mover(Protocol):
    """Moves rows. `name` as in `choose_mover`."""

    name: str

    def prepare(
        self, moves: Iterable[MoverCall], sizes: Mapping[int, tuple[int, int]], form: CallForm
    ) -> Sequence[Tensor]:
        """Tables of calls to come, on the host, to be shipped. `sizes`: (rows, heads) of buffers."""
        ...

    def fill(self, moves: Sequence[RowMove]) -> None:
        """Fill packed rows from their buffers; types are converted."""

    def place(self, moves: Sequence[RowMove]) -> None:
        """Write packed rows to their buffers. No row and head is named twice in one call."""

    def add(self, moves: Sequence[RowMove]) -> None:
        """Add packed rows to their buffers. A row may be named often, in one move and in several."""

    def partials(self, space: Space) -> Partials:
        """Start the partials of a forward: none so far."""
        ...


def heads_view(x: Tensor, head: int, num_heads: int, dim: int = 1) -> Tensor:
    """Heads [head, head + num_heads) of `x`: a view; `x` itself if that is all of it."""
    return x if num_heads == x.shape[dim] else x.narrow(dim, head, num_heads)


def buffer_rows(x: Tensor, run: RowRun, dim: int = 0) -> Tensor:
    """A view of a run in its buffer [..., T, H, ...], where its rows (`dim`) are consecutive."""
    rows = x if run.count == x.shape[dim] else x.narrow(dim, run.start, run.count)
    return heads_view(rows, run.buffer_head, run.num_heads, dim + 1)


def _packed_rows(x: Tensor, run: RowRun) -> Tensor:
    rows = x if run.count == x.shape[0] else x.narrow(0, run.row, run.count)
    return heads_view(rows, run.head, run.num_heads)


def _runs_of(moves: Sequence[RowMove]) -> Iterator[tuple[RowRun, Tensor | None, Tensor, Tensor]]:
    """Every run, its index, its buffer and its packed rows."""
    for move in moves:
        own = made(move.own)
        for run, index, buffer in zip(move.packed.runs, move.packed.indices, move.buffers, strict=True):
            yield run, index, buffer, _packed_rows(own, run)


# Rows moved and partials merged with torch's own calls, run by run.


class PlainMover:
    """See `Mover`: torch's own calls, a few for each run."""

    name = "plain"

    def prepare(
        self, moves: Iterable[MoverCall], sizes: Mapping[int, tuple[int, int]], form: CallForm
    ) -> Sequence[Tensor]:
        del moves, sizes, form  # runs are copied one by one
        return ()

    def fill(self, moves: Sequence[RowMove]) -> None:
        for run, index, buffer, own in _runs_of(moves):
            if index is None:
                own.copy_(buffer_rows(buffer, run))
            else:
                own.copy_(heads_view(buffer.index_select(0, index), run.buffer_head, run.num_heads))

    def place(self, moves: Sequence[RowMove]) -> None:
        for run, index, buffer, own in _runs_of(moves):
            if index is None:
                buffer_rows(buffer, run).copy_(own)
            else:
                heads_view(buffer, run.buffer_head, run.num_heads)[index] = own.to(buffer.dtype)

    def add(self, moves: Sequence[RowMove]) -> None:
        for buffer in {id(x): x for move in moves for x in map(move.buffers.__getitem__, move.fresh)}.values():
            buffer.zero_()
        for run, index, buffer, own in _runs_of(moves):
            if index is None:
                buffer_rows(buffer, run).add_(own)
            else:
                heads_view(buffer, run.buffer_head, run.num_heads).index_add_(0, index, own.to(buffer.dtype))

    def partials(self, space: Space) -> Partials:
        return _PlainPartials(space, self)


class _PlainPartials:
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
        """Make tensors for the outputs of a buffer, if there are none."""
        if buffer not in self.out:
            rows, heads = self.space.sizes[buffer]
            self.out[buffer] = self.space.empty((rows, heads, self.space.dim), self.space.wide)
            self.lse[buffer] = self.space.empty((rows, heads), self.space.wide)

    def add(self, packed: Packed, merges: tuple[bool, ...], out: Tensor, lse: Tensor) -> None:
        for run, index, merging in zip(packed.runs, packed.indices, merges, strict=True):
            if (
                not merging
                and (run.count, run.num_heads) == self.space.sizes[run.buffer] == tuple(out.shape[:2])
                and index is None
            ):
                # All of a buffer at once: no copy.
                self.out[run.buffer], self.lse[run.buffer] = out.to(self.space.wide), lse
                continue
            self.make(run.buffer)
            new_out, new_lse = _packed_rows(out, run), _packed_rows(lse, run)
            held = self.out[run.buffer], self.lse[run.buffer]
            if index is None:
                held_out, held_lse = (buffer_rows(x, run) for x in held)
                if merging:
                    new_out, new_lse = merge_partials((held_out, held_lse), (new_out, new_lse))
                held_out.copy_(new_out)
                held_lse.copy_(new_lse)
                continue
            held_out, held_lse = (heads_view(x, run.buffer_head, run.num_heads) for x in held)
            if merging:
                new_out, new_lse = merge_partials((held_out[index], held_lse[index]), (new_out, new_lse))
            held_out[index] = new_out.to(self.space.wide)
            held_lse[index] = new_lse

    def as_they_lie(self, packed: Packed) -> tuple[Tensor, Tensor] | None:
        if packed.direct and self.space.dtype == self.space.wide:
            run = packed.runs[0]
            out, lse = (buffer_rows(held[run.buffer], run) for held in (self.out, self.lse))
            if out.is_contiguous() and lse.is_contiguous():
                return out, lse  # nothing is added to them any more
        return None

    def send(self, messages: Sequence[Sent]) -> None:
        for packed, out, lse in messages:
            for held, target in ((self.out, out), (self.lse, lse)):
                self.mover.fill([RowMove(packed, [held[run.buffer] for run in packed.runs], target)])

    def final(self) -> tuple[Tensor, Tensor]:
        self.make(0)
        return self.out[0].to(self.space.dtype).contiguous(), self.lse[0]
