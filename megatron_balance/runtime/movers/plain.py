"""Rows moved and partials merged with torch's own calls, run by run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from megatron_balance.runtime.kernels.base import merge_partials
from megatron_balance.runtime.lower.memory import CallForm, made
from megatron_balance.runtime.lower.moves import MoverCall
from megatron_balance.runtime.lower.steps import Packed
from megatron_balance.runtime.movers.base import Fill, Partials, Place, Sent, Space, heads_view, rows_view


class PlainMover:
    """See `Mover`: torch's own calls, a few for each run."""

    name = "plain"

    def prepare(
        self, moves: Iterable[MoverCall], sizes: Mapping[int, tuple[int, int]], form: CallForm
    ) -> Sequence[Tensor]:
        del moves, sizes, form  # runs are copied one by one
        return ()

    def fill(self, fills: Sequence[Fill]) -> None:
        for packed, sources, into in fills:
            target = made(into)
            for run, index, source in zip(packed.runs, packed.indices, sources, strict=True):
                if index is None:
                    taken = rows_view(source, run.start, run.stop, run.buffer_head, run.num_heads)
                else:
                    taken = heads_view(source.index_select(0, index), run.buffer_head, run.num_heads)
                rows_view(target, run.row, run.row + run.count, run.head, run.num_heads).copy_(taken)

    def place(self, places: Sequence[Place]) -> None:
        for packed, of, targets, _ in places:
            source = made(of)
            for run, index, target in zip(packed.runs, packed.indices, targets, strict=True):
                own = rows_view(source, run.row, run.row + run.count, run.head, run.num_heads)
                if index is None:
                    rows_view(target, run.start, run.stop, run.buffer_head, run.num_heads).copy_(own)
                else:
                    heads_view(target, run.buffer_head, run.num_heads)[index] = own.to(target.dtype)

    def add(self, places: Sequence[Place]) -> None:
        for target in {id(x): x for place in places for x in map(place.targets.__getitem__, place.fresh)}.values():
            target.zero_()
        for packed, of, targets, _ in places:
            source = made(of)
            for run, index, target in zip(packed.runs, packed.indices, targets, strict=True):
                added = rows_view(source, run.row, run.row + run.count, run.head, run.num_heads)
                if index is None:
                    rows_view(target, run.start, run.stop, run.buffer_head, run.num_heads).add_(added)
                else:
                    heads_view(target, run.buffer_head, run.num_heads).index_add_(0, index, added.to(target.dtype))

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
            new_out = rows_view(out, run.row, run.row + run.count, run.head, run.num_heads)
            new_lse = rows_view(lse, run.row, run.row + run.count, run.head, run.num_heads)
            held = self.out[run.buffer], self.lse[run.buffer]
            if index is None:
                held_out, held_lse = (rows_view(x, run.start, run.stop, run.buffer_head, run.num_heads) for x in held)
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
            out, lse = (
                rows_view(held[run.buffer], run.start, run.stop, run.buffer_head, run.num_heads)
                for held in (self.out, self.lse)
            )
            if out.is_contiguous() and lse.is_contiguous():
                return out, lse  # nothing is added to them any more
        return None

    def send(self, messages: Sequence[Sent]) -> None:
        for packed, out, lse in messages:
            for held, target in ((self.out, out), (self.lse, lse)):
                self.mover.fill([Fill(packed, [held[run.buffer] for run in packed.runs], target)])

    def final(self) -> tuple[Tensor, Tensor]:
        self.make(0)
        return self.out[0].to(self.space.dtype).contiguous(), self.lse[0]
