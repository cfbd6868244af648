"""The backward ops of one rank, derived by walking its forward ops in reverse.

Attend becomes AttendGrad. A transfer of keys or queries becomes one of their gradient, the other way; a transfer of partial
outputs becomes one of the output's gradient, the other way. Merges are put where a rank would hold two partial gradients of
one region. Policy `keep` leaves received inputs where they are until the backward; `replay` brings them again, just before
they are needed, by the forward exchange or by the one the schedule names (`RankProgram.replays`). What brings a rank its attention
layout (`RankProgram.remap_in`) is replayed at the start and stays.

A replay needs what any other exchange brings to be used before the rank's next exchange, as all schedules here do; `verify` finds
a program that does not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal, TypeAlias, assert_never

import numpy as np

from megatron_balance.compile.join import join, routes_of, split
from megatron_balance.ir.arrays import Ints, as_array, as_rows, concat
from megatron_balance.ir.columns import Pair, Transfer, Value
from megatron_balance.ir.intervals import Atoms
from megatron_balance.ir.program import Attend, AttendGrad, Collective, Exchange, Kind, Merge, Op, Program, RankProgram
from megatron_balance.ir.rows import Rows

Policy: TypeAlias = Literal["keep", "replay"]
POLICIES: tuple[Policy, ...] = ("keep", "replay")

_REVERSED: dict[Collective, Collective] = {
    "p2p": "p2p",
    "all_to_all": "all_to_all",
    "all_gather": "reduce_scatter",
    "reduce_scatter": "all_gather",
}
_GRAD_OF = np.array([Kind.Q_GRAD, Kind.KV_GRAD, Kind.OUT_GRAD])  # of Q, KV, OUT


def transpose(program: RankProgram, policy: Policy, *, merges: bool = True) -> RankProgram:
    """`program` with its backward ops. Exchange ids: opening + 2 (n - 1 - i) replays forward exchange i, the next one reverses it;
    an remap-in exchange i is replayed as i.

    `merges=False` leaves the Merge ops out, for an executor that sums gradients where they arrive.
    """
    ops = list(_reverse(program, policy))
    return replace(program, backward=tuple(_with_merges(ops, program.rank) if merges else ops))


def with_backward(program: Program, policy: Policy) -> Program:
    """A whole program, as parsed from text, with its backward."""
    ranks = [transpose(split(program, rank), policy) for rank in range(program.num_ranks)]
    return join(ranks, program.lengths, program.num_heads, program.num_kv_heads, policy)


def forward_id(backward_id: int, program: RankProgram) -> int:
    """The forward exchange that a backward exchange replays or reverses."""
    if backward_id < program.remap_in:
        return backward_id
    return program.num_exchanges - 1 - (backward_id - program.remap_in) // 2


def _reverse(program: RankProgram, policy: Policy) -> Iterator[Op]:
    segments: dict[int, list[Attend]] = {-1: []}  # by the exchange before them
    exchanges: dict[int, Exchange] = {}
    at = -1
    for op in program.forward:
        match op:
            case Exchange():
                at = op.id
                exchanges[at] = op
                segments[at] = []
            case Attend():
                segments[at].append(op)
            case Merge():
                pass
            case AttendGrad():
                raise ValueError("a forward program has no AttendGrad")
            case _:
                assert_never(op)
    replays = dict(program.replays) if policy == "replay" else {}
    gradients = _gradients(exchanges)

    def replay(at: int, exchange_id: int) -> Iterator[Exchange]:
        if policy != "replay":
            return
        source = replays[at] if at in replays else _inputs(exchanges[at])
        if source.transfers or source.group:
            yield Exchange(exchange_id, source.transfers, source.collective, source.group, source.routes)

    occurring = set(segments) | set(replays)
    for at in range(program.remap_in):
        if at in occurring:
            yield from replay(at, at)
    for at in sorted(occurring, reverse=True):
        again = program.remap_in + 2 * (program.num_exchanges - 1 - at)
        if at >= program.remap_in:
            yield from replay(at, again)
        for op in reversed(segments.get(at, [])):
            yield AttendGrad(op.rank, op.pairs)
        if at in exchanges:
            yield _transposed(exchanges[at], gradients[at], again + 1)


def _inputs(op: Exchange) -> Exchange:
    """Only the queries and keys of an exchange (a group's collective is left out where it moves none at all)."""
    rows = as_array(op.transfers)
    inputs = rows[:, 0] <= Kind.KV
    if inputs.all():
        return op
    rows = rows[inputs]
    if not len(rows):
        return Exchange(op.id, as_rows(rows))
    return Exchange(op.id, as_rows(rows), op.collective, op.group, routes_of(op.routes, rows))


def _gradients(exchanges: dict[int, Exchange]) -> dict[int, Rows]:
    """The transfers of each exchange as those of gradients, the other way; worked out for all of them at once."""
    rows = concat([op.transfers for op in exchanges.values()], Transfer.WIDTH)
    back = np.empty_like(rows)
    back[:, 0] = _GRAD_OF[rows[:, 0]]
    back[:, 1:6] = rows[:, 1:6]
    back[:, 6], back[:, 7] = rows[:, 7], rows[:, 6]
    data, at = back.tobytes(), 0
    found: dict[int, Rows] = {}
    for exchange_id, op in exchanges.items():
        found[exchange_id] = Rows(Transfer.WIDTH, data[at : at + len(op.transfers.data)])
        at += len(op.transfers.data)
    return found


def _transposed(op: Exchange, gradients: Rows, exchange_id: int) -> Exchange:
    """The other way, over the same proxies."""
    routes = as_rows(as_array(op.routes)[:, [1, 0, 2, 4, 3]]) if op.routes else op.routes
    return Exchange(exchange_id, gradients, _REVERSED[op.collective], op.group, routes)


def _with_merges(ops: list[Op], rank: int) -> Iterator[Op]:
    """`ops`, each followed by a Merge of the regions of which `rank` then holds two partial gradients or more."""
    table, origin = _events(ops, rank)
    launches = np.array([isinstance(op, AttendGrad) for op in ops], dtype=bool)
    found: list[Ints] = [np.empty((0, 1 + Value.WIDTH), dtype=np.int64)]  # rows of (op, kind, region)
    for kind in (Kind.Q_GRAD, Kind.KV_GRAD):
        of_kind = table[:, 1] == kind
        rows, op_index = table[of_kind], origin[of_kind]
        if not len(rows):
            continue
        atoms = Atoms.of(rows[:, 2], rows[:, 3], rows[:, 4], rows[:, 5:7].ravel())
        row, atom = atoms.expand(*rows[:, 2:].T)
        at, gained = op_index[row], rows[row, 0]
        order = np.argsort((atom * len(ops) + at) * 2 + gained, kind="stable")  # an exchange takes before it brings
        atom, at, gained = atom[order], at[order], gained[order]
        again = np.zeros(len(atom), dtype=bool)
        again[1:] = (atom[1:] == atom[:-1]) & (gained[1:] == 1) & (gained[:-1] == 1)
        # A launch sums what it computes for one token, so its repeats are no second partial; those of an exchange are.
        again[1:] &= ~(launches[at[1:]] & (at[1:] == at[:-1]))
        again[again] = _first_of(at[again], atom[again])
        group, regions = atoms.regions(at[again], atom[again])
        found.append(np.column_stack([group, np.full(len(group), kind), regions]))
    merges = np.concatenate(found)
    merges = merges[np.argsort(merges[:, 0], kind="stable")]
    ends = np.searchsorted(merges[:, 0], np.arange(len(ops) + 1)).tolist()
    values = np.ascontiguousarray(merges[:, 1:], dtype="<i8")
    for op, start, stop in zip(ops, ends, ends[1:], strict=False):
        yield op
        if start < stop:
            yield Merge(rank, Rows(Value.WIDTH, values[start:stop].tobytes()))


def _first_of(at: Ints, atom: Ints) -> Ints:
    """Where a sorted (atom, op) pair occurs for the first time."""
    fresh = np.ones(len(at), dtype=bool)
    fresh[1:] = (at[1:] != at[:-1]) | (atom[1:] != atom[:-1])
    return fresh


def _events(ops: Sequence[Op], rank: int) -> tuple[Ints, Ints]:
    """Rows (1 or 0, kind, region) of the partial gradients that `rank` gains by an op, or gives away; and the op of each."""
    launches = [(at, op.pairs) for at, op in enumerate(ops) if isinstance(op, AttendGrad)]
    exchanges = [(at, op.transfers) for at, op in enumerate(ops) if isinstance(op, Exchange)]
    (pairs, launch), (rows, exchange) = _listed(launches, Pair.WIDTH), _listed(exchanges, Transfer.WIDTH)
    moved = ((rows[:, 7] == rank) | (rows[:, 6] == rank)) & (rows[:, 0] >= Kind.Q_GRAD)
    rows, exchange, count = rows[moved], exchange[moved], len(pairs)
    table = np.empty((2 * count + len(rows), 1 + Value.WIDTH), dtype=np.int64)
    queries, keys, carried = table[:count], table[count : 2 * count], table[2 * count :]
    queries[:, 0], queries[:, 1], queries[:, 2:] = 1, Kind.Q_GRAD, pairs[:, :5]
    keys[:, 0], keys[:, 1], keys[:, 2:] = 1, Kind.KV_GRAD, pairs[:, [0, 5, 6, 7, 8]]
    # Queries that see none of the keys, and keys that none of the queries sees, take no part.
    queries[:, 3] = np.maximum(pairs[:, 1], pairs[:, 5])
    keys[:, 4] = np.minimum(pairs[:, 6], pairs[:, 2])
    carried[:, 0], carried[:, 1:] = rows[:, 7] == rank, rows[:, : Value.WIDTH]
    return table, np.concatenate([launch, launch, exchange])


def _listed(tables: Sequence[tuple[int, Rows]], width: int) -> tuple[Ints, Ints]:
    """All rows of numbered tables, and the number of each."""
    numbers = np.array([at for at, _ in tables], dtype=np.int64)
    return concat([rows for _, rows in tables], width), np.repeat(numbers, [len(rows) for _, rows in tables])
