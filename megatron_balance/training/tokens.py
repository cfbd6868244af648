"""Tokens from the rank that read them to the ranks that compute them, and results back: one exchange a
step and direction. And the rows that one rank computes, with positions and padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_balance.compile.layouts import layouts
from megatron_balance.compile.pipeline import layout
from megatron_balance.ir.arrays import Ints
from megatron_balance.ir.columns import Fragment, Placed
from megatron_balance.ir.intervals import ranges
from megatron_balance.ir.plan import MicrobatchPlan
from megatron_balance.training.pool import Pool, StrategyRanks, TensorParallel
from megatron_balance.training.sequences import PoolLengths, Sequences


class _Routes(NamedTuple):
    """Rows between two orders: those in which ranks read them, and those of the plans' layouts.

    `sent` [rows read here]: which of them go out, destination by destination, `send_counts` to each
    pool rank. `place` [rows of this rank's layouts]: of each, its place in what arrives, source by
    source.
    """

    send_counts: list[int]
    sent: Ints
    receive_counts: list[int]
    place: Ints


class TokenExchange:
    """The rows of a step on their way through the pool: there (`to_ranks`) and back (`back`)."""

    def __init__(
        self,
        shared: PoolLengths,
        plans: Sequence[MicrobatchPlan],
        pool: Pool | StrategyRanks,
        pipelines: Sequence[int] | None = None,
    ) -> None:
        """Look up the layouts of this rank. `shared`: a microbatch for each of `plans`.
        `pipelines`: by plan, whose ranks of the pool it is over (`Pool.ranks_of`); None: the whole
        pool's.
        """
        self._shared = shared
        self._plans = plans
        self._pool = pool
        ranks = {pipeline: pool.ranks_of(pipeline) for pipeline in set(pipelines or (pool.pipeline,))}
        of_plans = tuple(pipelines or (pool.pipeline,) * len(plans))
        self._ranks = [ranks[each] for each in of_plans]
        holders = {pipeline: pool.holders_of(pipeline) for pipeline in ranks}
        self._holders = [holders[each] for each in of_plans]
        self.layouts: list[Ints] = [
            # Of another pipeline's plan this rank has no row.
            layout(plan, ranks.index(pool.rank)) if pool.rank in ranks else np.empty((0, Fragment.WIDTH), np.int64)
            for plan, ranks in zip(plans, self._ranks, strict=True)
        ]
        """By microbatch: rows (seq, start, stop) of this rank, in order."""
        self.counts = [int((rows[:, Fragment.STOP] - rows[:, Fragment.START]).sum()) for rows in self.layouts]
        """By microbatch: tokens of this rank."""

    def to_ranks(
        self, mine: Sequence[Sequences], num_columns: int, tensor_parallel: TensorParallel, device: torch.device
    ) -> list[Tensor]:
        """Rows [T, C] int64 of this rank by microbatch, in the order of its layouts; zeros on a
        pipeline stage that has no use for tokens. Collective over the pool (under a strategy: all
        ranks) and the tensor-parallel group.

        `mine`: by microbatch, what was read here; empty on ranks whose microbatches do not count.
        """
        rows = torch.zeros(sum(self.counts), num_columns, dtype=torch.int64, device=device)
        # A tensor-parallel source receives, and its peers take the rows from it; the middle stages
        # of a pipeline keep zeros.
        if self._pool.exchanges(tensor_parallel):
            read = torch.cat([torch.empty(0, num_columns, dtype=torch.int64), *(each.rows for each in mine)])
            arrived = self.there(read.to(device))
            rows = arrived if self._is_holder else rows
        if self._pool.has_tokens and tensor_parallel.size > 1 and len(rows):
            dist.broadcast(rows, tensor_parallel.source, group=tensor_parallel.group)
        return list(rows.split(self.counts))

    @property
    def _is_holder(self) -> bool:
        return any(self._pool.rank in row for rows in self._holders for row in rows)

    def local(self, rows: Sequence[Tensor], own: Sequence[int], multiple: int) -> LocalMicrobatch:
        """This rank's rows of a microbatch, of the nano-batches `own` of what `to_ranks` gave."""
        return interleave([assemble(rows[at], self.layouts[at], multiple) for at in own], multiple)

    def there(self, read: Tensor) -> Tensor:
        """Values [rows read here, ...] of all microbatches to the ranks of the layouts: [rows of
        this rank's layouts, ...]. One dtype and form on all ranks. Collective over the pool; not
        differentiable.
        """
        routes = self._routes
        # [rows sent, ...]: gathered, so that destinations are contiguous.
        sent = read[torch.from_numpy(routes.sent).to(read.device)].contiguous()
        received = read.new_empty(len(routes.place), *read.shape[1:])
        received = self._all_to_all(sent, received, routes.receive_counts, routes.send_counts)
        return received[torch.from_numpy(routes.place).to(read.device)].contiguous()

    def back(self, given: Tensor) -> Tensor:
        """The inverse of `there`, over a pool: [rows of this rank's layouts, ...] to [rows read
        here, ...].
        """
        routes = self._routes
        sent = torch.empty_like(given, memory_format=torch.contiguous_format)
        # Scattered, as the inverse of the gather in `there`.
        sent[torch.from_numpy(routes.place).to(given.device)] = given
        received = given.new_empty(len(routes.sent), *given.shape[1:])
        received = self._all_to_all(sent, received, routes.send_counts, routes.receive_counts)
        read = torch.empty_like(received)
        read[torch.from_numpy(routes.sent).to(given.device)] = received
        return read

    def _all_to_all(self, sent: Tensor, received: Tensor, receive_counts: list[int], send_counts: list[int]) -> Tensor:
        if self._pool.size == 1:  # a pool of one has no process group
            return sent
        with self._pool.groups.inside():
            dist.all_to_all_single(received, sent, receive_counts, send_counts, group=self._pool.groups.pool)
        return received

    @cached_property
    def _routes(self) -> _Routes:
        # Both ends derive the same order from the plan and the shared lengths, so no counts are
        # exchanged.
        return _Routes(*self._sends(), *self._receives())

    def _sends(self) -> tuple[list[int], Ints]:
        """Numbers of rows to send to each pool rank, and the rows read here, destination by
        destination.
        """
        rank, size, shared = self._pool.rank, self._pool.size, self._shared
        if not self._pool.reads:
            return [0] * size, np.empty(0, dtype=np.int64)
        counts = np.zeros(size, dtype=np.int64)
        read, destinations = [np.empty(0, dtype=np.int64)], [np.empty(0, dtype=np.int64)]
        starts = _starts(shared, rank)
        for plan, copies, owners, start in zip(self._plans, self._holders, shared.owners, starts, strict=True):
            rows = layouts(plan)
            # rows [spans, Placed.WIDTH]: the layouts of all ranks; those of sequences that were
            # read here stay.
            rows = rows[owners[rows[:, Placed.SEQ]] == rank]
            # [spans]: the row at which the sequence begins among all that this rank read.
            first = start[rows[:, Placed.SEQ]]
            # row [tokens]: the span of each token; tokens: its row among those read here.
            row, tokens = ranges(first + rows[:, Placed.START], first + rows[:, Placed.STOP])
            for ranks in copies:
                read.append(tokens)
                # ranks [plan ranks] to pool ranks, picked by the span's rank of the plan.
                destinations.append(np.array(ranks, dtype=np.int64)[rows[row, Placed.RANK]])
                counts += np.bincount(destinations[-1], minlength=size)
        # Stable: rows for one destination keep the order of microbatch and layout, on which the
        # receiver counts.
        order = np.argsort(np.concatenate(destinations), kind="stable")
        return counts.tolist(), np.concatenate(read)[order]

    def _receives(self) -> tuple[list[int], Ints]:
        """Numbers of rows to receive from each pool rank, and the place of each layout row in them."""
        none = np.empty(0, dtype=np.int64)
        if not self._is_holder:
            return [0] * self._pool.size, none
        # [spans of this rank's layouts], over all microbatches: the pool rank that read each.
        sources = np.concatenate(
            [
                none,
                *(
                    owners[rows[:, Fragment.SEQ]]
                    for owners, rows in zip(self._shared.owners, self.layouts, strict=True)
                ),
            ]
        )
        sizes = np.concatenate([none, *(rows[:, Fragment.STOP] - rows[:, Fragment.START] for rows in self.layouts)])
        # Spans arrive source by source; from one source in the order of microbatch and layout.
        order = np.argsort(sources, kind="stable")
        arrives = np.empty(len(order), dtype=np.int64)
        # Of each span, in the order of the layouts, the row at which it arrives.
        arrives[order] = np.cumsum(sizes[order]) - sizes[order]
        counts = np.bincount(sources, weights=sizes, minlength=self._pool.size).astype(np.int64)
        return counts.tolist(), ranges(arrives, arrives + sizes)[1]


def _starts(shared: PoolLengths, rank: int) -> list[Ints]:
    """By microbatch and sequence: the row of its first token, of all that `rank` read."""
    result: list[Ints] = []
    base = 0
    for lengths, owners in zip(shared.lengths, shared.owners, strict=True):
        # Sequences of other ranks count for nothing: their starts are meaningless.
        own = np.where(owners == rank, np.array(lengths, dtype=np.int64), 0)
        ends = np.cumsum(own) + base
        result.append(ends - own)
        base += int(own.sum())
    return result


@dataclass(frozen=True, slots=True, eq=False)
class LocalMicrobatch:
    """Rows of this rank in the plan's order, padding rows last.

    `rows` [T, C] int64, zeros where padded. `positions` [T] int64: of each token in its own
    sequence. `padding` [T]: True where a row belongs to no sequence. `nano_batches`: those that
    `interleave` brought into these rows; empty: it runs whole.
    """

    rows: Tensor
    positions: Tensor
    padding: Tensor
    nano_batches: tuple[LocalMicrobatch, ...] = ()


def assemble(rows: Tensor, layout: Ints, multiple: int) -> LocalMicrobatch:
    """Pad the rows [T, C] of this rank, which lie as `layout` (seq, start, stop) says, to a
    positive multiple of `multiple`.
    """
    # A rank without tokens still takes part in every collective of a layer, so it computes masked
    # padding.
    padding = padded(len(rows), multiple) - len(rows)
    positions = torch.from_numpy(ranges(layout[:, Fragment.START], layout[:, Fragment.STOP])[1]).to(rows.device)
    assert len(positions) == len(rows), f"the exchange brought {len(rows)} tokens, the layout has {len(positions)}"
    rows = torch.nn.functional.pad(rows, (0, 0, 0, padding))
    positions = torch.nn.functional.pad(positions, (0, padding))
    return LocalMicrobatch(rows, positions, torch.arange(len(rows), device=rows.device) >= len(rows) - padding)


def padded(num_tokens: int, multiple: int) -> int:
    """Rows of a rank that holds so many tokens: the next positive multiple of `multiple`."""
    return max(1, -(-num_tokens // multiple)) * multiple


def interleave(nano_batches: Sequence[LocalMicrobatch], shares: int) -> LocalMicrobatch:
    """One microbatch of its nano-batches' rows: share by share of the tensor-parallel ranks that
    split them, and in each share nano-batch by nano-batch. `shares`: 1: rows are not split.
    """
    if len(nano_batches) == 1:
        return nano_batches[0]

    def joined(name: str) -> Tensor:
        columns = [getattr(each, name) for each in nano_batches]
        # Sequence parallelism splits the rows of a microbatch evenly over the tensor-parallel
        # ranks, and each of these must hold its share of every nano-batch: [shares, rows of a
        # share, ...].
        return torch.cat([column.view(shares, -1, *column.shape[1:]) for column in columns], dim=1).flatten(0, 1)

    return LocalMicrobatch(joined("rows"), joined("positions"), joined("padding"), tuple(nano_batches))
