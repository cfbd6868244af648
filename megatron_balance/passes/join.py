"""All ranks' projections to one program, and back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from typing import assert_never

import numpy as np

from megatron_balance.core.program import TRANSFER_WIDTH, Attend, AttendGrad, Exchange, Kind, Merge, Op, Program, RankProgram
from megatron_balance.core.rows import Rows
from megatron_balance.errors import InvalidProgramError
from megatron_balance.passes.tables import Ints, as_array, as_rows, concat


def join(ranks: Sequence[RankProgram], lengths: tuple[int, ...], num_heads: int, num_kv_heads: int, policy: str | None = None) -> Program:
    """The program whose projections are `ranks` (one for each rank, in order).

    Raises InvalidProgramError: a send that no one receives, a receive that no one sends, another order between two ranks,
    or an exchange that ranks describe differently.
    """
    return Program(
        lengths,
        num_heads,
        num_kv_heads,
        tuple(r.home for r in ranks),
        tuple(_merge_orders([r.forward for r in ranks])),
        tuple(_merge_orders([r.backward for r in ranks])),
        policy,
    )


def _merge_orders(ranks: Sequence[Sequence[Op]]) -> Iterator[Op]:
    position = [0] * len(ranks)

    def advance(rank: int) -> Iterator[Op]:
        """Ops of `rank` up to its next exchange."""
        ops = ranks[rank]
        while position[rank] < len(ops) and not isinstance(ops[position[rank]], Exchange):
            yield ops[position[rank]]
            position[rank] += 1

    due: dict[int, list[int]] = {}
    for rank, ops in enumerate(ranks):
        last = -1
        for op in ops:
            if isinstance(op, Exchange):
                if op.id <= last:
                    raise InvalidProgramError(f"rank {rank}: exchange {op.id} comes after exchange {last}; ids must rise")
                last = op.id
                due.setdefault(op.id, []).append(rank)
    for exchange_id in sorted(due):
        shares: list[tuple[int, Exchange]] = []
        for rank in due[exchange_id]:
            yield from advance(rank)
            op = ranks[rank][position[rank]]
            assert isinstance(op, Exchange)
            shares.append((rank, op))
            position[rank] += 1
        yield _join_exchange(exchange_id, shares)
    for rank in range(len(ranks)):
        yield from advance(rank)


def _join_exchange(exchange_id: int, shares: list[tuple[int, Exchange]]) -> Exchange:
    first = shares[0][1]
    for rank, op in shares:
        if (op.pattern, op.group) != (first.pattern, first.group):
            raise InvalidProgramError(
                f"exchange {exchange_id}: rank {rank} sees {op.pattern} in {op.group}, rank {shares[0][0]} {first.pattern} in {first.group}"
            )
    rows = concat([op.transfers for _, op in shares], TRANSFER_WIDTH)
    listed_by = np.repeat([rank for rank, _ in shares], [len(op.transfers) for _, op in shares])
    sends, receives = rows[:, 6] == listed_by, rows[:, 7] == listed_by
    if not (sends | receives).all():
        rank = listed_by[int(np.flatnonzero(~(sends | receives))[0])]
        raise InvalidProgramError(f"exchange {exchange_id}: rank {rank} lists a transfer of other ranks")
    sent, received = _by_ranks(rows[sends]), _by_ranks(rows[receives])
    if first.pattern != "p2p" and {rank for rank, _ in shares} != set(first.group):
        raise InvalidProgramError(
            f"exchange {exchange_id}: {first.pattern} in {first.group}, but only {sorted(r for r, _ in shares)} take part"
        )
    if sent.shape != received.shape or not (sent == received).all():
        raise InvalidProgramError(f"exchange {exchange_id}: {_difference(sent, received)}")
    return Exchange(exchange_id, as_rows(sent), first.pattern, first.group)


def _by_ranks(rows: Ints) -> Ints:
    return rows[np.lexsort((rows[:, 7], rows[:, 6]))]


def _difference(sent: Ints, received: Ints) -> str:
    def listed(rows: Ints) -> set[tuple[int, ...]]:
        return {tuple(row) for row in rows.tolist()}

    lonely = sorted(listed(sent) - listed(received))
    if lonely:
        return f"rank {lonely[0][6]} sends {lonely[0][:6]} to rank {lonely[0][7]}, which does not expect it"
    lonely = sorted(listed(received) - listed(sent))
    if lonely:
        return f"rank {lonely[0][7]} waits for {lonely[0][:6]} from rank {lonely[0][6]}, which does not send it"
    return "two ranks list the same transfers in different orders"


def split(program: Program, rank: int) -> RankProgram:
    """The projection of `rank`: what `join` would need to make `program` again (exchange ids are counted anew)."""
    return RankProgram(
        rank,
        program.homes[rank],
        tuple(_ops_of(program.forward, rank)),
        sum(isinstance(op, Exchange) for op in program.forward),
        tuple(_ops_of(program.backward, rank)),
        tuple(_silent(program)),
    )


def _silent(program: Program) -> Iterator[tuple[int, Exchange]]:
    """Exchanges that carry no inputs: a replay skips them, which a rank without rows in them could not know."""
    exchanges = [op for op in program.forward if isinstance(op, Exchange)]
    for index, op in enumerate(exchanges):
        if not (as_array(op.transfers)[:, 0] <= Kind.KV).any():
            yield index, Exchange(index, Rows(TRANSFER_WIDTH))


def _ops_of(ops: Sequence[Op], rank: int) -> Iterator[Op]:
    ids = count()
    for op in ops:
        match op:
            case Exchange(_, transfers, pattern, group):
                exchange_id = next(ids)
                rows = as_array(transfers)
                rows = rows[(rows[:, 6] == rank) | (rows[:, 7] == rank)]
                if len(rows) or rank in group:
                    yield Exchange(exchange_id, as_rows(rows), pattern, group)
            case Attend() | AttendGrad() | Merge():
                if op.rank == rank:
                    yield op
            case _:
                assert_never(op)
