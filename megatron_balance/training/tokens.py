"""Tokens from the rank that read them to the ranks that compute them, and results back.

One exchange a step and direction: what a rank receives is its own rows only.
"""

from __future__ import annotations

from collections.abc import Sequence
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
from megatron_balance.training.lengths import PoolLengths
from megatron_balance.training.pool import Pool, StrategyRanks, TensorParallel
from megatron_balance.training.sequences import Sequences


class _Routes(NamedTuple):
    """Rows between two orders: those in which ranks read them, and those of the plans' layouts.

    `sent` [rows read here]: which of them go out, destination by destination, `send_counts` to each
    pool rank. `place` [rows of this rank's layouts]: of each, its place in what arrives, source by
    source, `receive_counts` from each.
    """

    send_counts: list[int]
    sent: Ints
    receive_counts: list[int]
    place: Ints


class TokenExchange:
    """The rows of a step on their way through the pool: there (`to_ranks`) and back (`to_readers`)."""

    def __init__(
        self,
        shared: PoolLengths,
        plans: Sequence[MicrobatchPlan],
        pool: Pool | StrategyRanks,
        pipelines: Sequence[int] | None = None,
    ) -> None:
        """Look up the layouts of this rank.

        `shared`: a microbatch for each of `plans`. `pipelines`: by plan, whose ranks of the pool it
        is over (`Pool.ranks_of`); None: the whole pool's.
        """
        self._shared = shared
        self._plans = plans
        self._pool = pool
        ranks = {pipeline: pool.ranks_of(pipeline) for pipeline in set(pipelines or (pool.pipeline,))}
        of_plans = tuple(pipelines or (pool.pipeline,) * len(plans))
        self._ranks = [ranks[each] for each in of_plans]
        """By microbatch: the pool rank of each rank of its plan."""
        holders = {pipeline: pool.holders_of(pipeline) for pipeline in ranks}
        self._holders = [holders[each] for each in of_plans]
        """By microbatch: the pool ranks that each rank's rows are sent to, a row for each copy."""
        self.layouts: list[Ints] = [
            layout(plan, ranks.index(pool.rank)) if pool.rank in ranks else np.empty((0, Fragment.WIDTH), np.int64)
            for plan, ranks in zip(plans, self._ranks, strict=True)
        ]
        """By microbatch: rows (seq, start, stop) of this rank, in order. None of another pipeline."""
        self.counts = [int((rows[:, Fragment.STOP] - rows[:, Fragment.START]).sum()) for rows in self.layouts]
        """By microbatch: tokens of this rank."""
        self._known: _Routes | None = None

    def to_ranks(
        self, mine: Sequence[Sequences], num_columns: int, tensor_parallel: TensorParallel, device: torch.device
    ) -> list[Tensor]:
        """Rows [T, C] int64 of this rank by microbatch, in the order of its layouts.

        Collective over the pool (under a strategy: all ranks) and the tensor-parallel group. Zeros
        on a pipeline stage that has no use for tokens.

        Args:
            mine: by microbatch, what was read here; empty on ranks whose microbatches do not count.
            num_columns: C, the same on all ranks.
            tensor_parallel: its rank 0 exchanges, and hands on.
            device: of the rows.
        """
        rows = torch.zeros(sum(self.counts), num_columns, dtype=torch.int64, device=device)
        if self._pool.exchanges(tensor_parallel):
            read = torch.cat([torch.empty(0, num_columns, dtype=torch.int64), *(each.rows for each in mine)])
            arrived = self.there(read.to(device))
            rows = arrived if self._is_holder else rows
        if self._pool.has_tokens and tensor_parallel.size > 1 and len(rows):
            dist.broadcast(rows, tensor_parallel.source, group=tensor_parallel.group)
        return list(rows.split(self.counts))

    def to_readers(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Per-token values back to the ranks that read the tokens: the inverse of `to_ranks`.

        `values[m]` [T, ...] in the order of this rank's layout, one dtype and form on all ranks.
        Returns by microbatch [rows read here, ...], in the order in which they were read.
        Collective over the pool; not differentiable.
        """
        return list(self.back(torch.cat(list(values))).split(self.read_counts))

    @property
    def _is_holder(self) -> bool:
        """Whether rows are sent to this rank, if it has some at all."""
        return any(self._pool.rank in row for rows in self._holders for row in rows)

    @property
    def read_counts(self) -> list[int]:
        """By microbatch: tokens that were read here."""
        return [
            int(np.array(lengths, dtype=np.int64)[owners == self._pool.rank].sum())
            for lengths, owners in zip(self._shared.lengths, self._shared.owners, strict=True)
        ]

    def there(self, read: Tensor) -> Tensor:
        """Values [rows read here, ...] of all microbatches to the ranks of the layouts.

        Returns [rows of this rank's layouts, ...]. One dtype and form on all ranks. Collective over
        the pool; not differentiable.
        """
        routes = self._routes()
        sent = read[torch.from_numpy(routes.sent).to(read.device)].contiguous()
        received = read.new_empty(len(routes.place), *read.shape[1:])
        received = self._all_to_all(sent, received, routes.receive_counts, routes.send_counts)
        return received[torch.from_numpy(routes.place).to(read.device)].contiguous()

    def back(self, given: Tensor) -> Tensor:
        """The inverse of `there`, over a pool: from [rows of this rank's layouts, ...] to [rows read
        here, ...].
        """
        routes = self._routes()
        sent = torch.empty_like(given, memory_format=torch.contiguous_format)
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

    def _routes(self) -> _Routes:
        if self._known is None:
            self._known = _Routes(*self._sends(), *self._receives())
        return self._known

    def _sends(self) -> tuple[list[int], Ints]:
        """Numbers of rows to send to each pool rank, and the rows, destination by destination.

        The latter are numbers of the rows read here.
        """
        rank, size, shared = self._pool.rank, self._pool.size, self._shared
        if not self._pool.reads:
            return [0] * size, np.empty(0, dtype=np.int64)
        counts = np.zeros(size, dtype=np.int64)
        read, destinations = [np.empty(0, dtype=np.int64)], [np.empty(0, dtype=np.int64)]
        starts = _starts(shared, rank)
        for plan, copies, owners, start in zip(self._plans, self._holders, shared.owners, starts, strict=True):
            rows = layouts(plan)
            rows = rows[owners[rows[:, Placed.SEQ]] == rank]
            first = start[rows[:, Placed.SEQ]]
            row, tokens = ranges(first + rows[:, Placed.START], first + rows[:, Placed.STOP])
            for ranks in copies:
                read.append(tokens)
                destinations.append(np.array(ranks, dtype=np.int64)[rows[row, Placed.RANK]])
                counts += np.bincount(destinations[-1], minlength=size)
        order = np.argsort(np.concatenate(destinations), kind="stable")
        return counts.tolist(), np.concatenate(read)[order]

    def _receives(self) -> tuple[list[int], Ints]:
        """Numbers of rows to receive from each pool rank, and the place of each layout row in them.

        Rows arrive source by source; from one source in the order of microbatch and layout.
        """
        none = np.empty(0, dtype=np.int64)
        if not self._is_holder:
            return [0] * self._pool.size, none
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
        order = np.argsort(sources, kind="stable")
        arrives = np.empty(len(order), dtype=np.int64)
        arrives[order] = np.cumsum(sizes[order]) - sizes[order]
        counts = np.bincount(sources, weights=sizes, minlength=self._pool.size).astype(np.int64)
        return counts.tolist(), ranges(arrives, arrives + sizes)[1]


def _starts(shared: PoolLengths, rank: int) -> list[Ints]:
    """By microbatch and sequence: the row of its first token, of all that `rank` read.

    Meaningless for sequences of other ranks.
    """
    result: list[Ints] = []
    base = 0
    for lengths, owners in zip(shared.lengths, shared.owners, strict=True):
        own = np.where(owners == rank, np.array(lengths, dtype=np.int64), 0)
        ends = np.cumsum(own) + base
        result.append(ends - own)
        base += int(own.sum())
    return result
