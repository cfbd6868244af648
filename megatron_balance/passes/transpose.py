"""The backward ops of one rank, derived by walking its forward ops in reverse.

Attend becomes AttendGrad. A transfer of keys or queries becomes one of their gradient, the other way; a transfer of partial
outputs becomes one of the output's gradient, the other way. Merges are put where a rank would hold two partial gradients of
one region. Policy `keep` leaves received inputs where they are until the backward; `replay` brings them again, just before
they are needed, by the forward exchange or by the one the schedule names (`RankProgram.replays`).

A replay needs what an exchange brings to be used before the rank's next exchange, as all schedules here do; `verify` finds
a program that does not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal, TypeAlias, assert_never

import numpy as np

from megatron_balance.core.program import MERGE_WIDTH, Attend, AttendGrad, Exchange, Kind, Merge, Op, Program, RankProgram
from megatron_balance.core.rows import Rows
from megatron_balance.passes.atoms import Atoms
from megatron_balance.passes.join import join, split
from megatron_balance.passes.tables import Ints, as_array, as_rows

Policy: TypeAlias = Literal["keep", "replay"]
POLICIES: tuple[Policy, ...] = ("keep", "replay")

_GRAD_OF = np.array([Kind.Q_GRAD, Kind.KV_GRAD, Kind.OUT_GRAD])  # of Q, KV, OUT


def transpose(program: RankProgram, policy: Policy, *, merges: bool = True) -> RankProgram:
    """`program` with its backward ops. Exchange ids: 2 (n - 1 - i) replays forward exchange i, the next odd one reverses it.

    `merges=False` leaves the Merge ops out, for an executor that sums gradients where they arrive.
    """
    ops = list(_reverse(program, policy))
    return replace(program, backward=tuple(_with_merges(ops, program.rank) if merges else ops))


def with_backward(program: Program, policy: Policy) -> Program:
    """A whole program, as parsed from text, with its backward."""
    ranks = [transpose(split(program, rank), policy) for rank in range(program.num_ranks)]
    return join(ranks, program.lengths, program.num_heads, program.num_kv_heads, policy)


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
    for at in sorted(set(segments) | set(replays), reverse=True):
        again = 2 * (program.num_exchanges - 1 - at)
        if policy == "replay" and at >= 0:
            source = replays[at] if at in replays else _inputs(exchanges[at])
            if source.transfers or source.group:
                yield Exchange(again, source.transfers, source.pattern, source.group)
        for op in reversed(segments.get(at, [])):
            yield AttendGrad(op.rank, op.pairs)
        if at in exchanges:
            yield _transposed(exchanges[at], again + 1)


def _inputs(op: Exchange) -> Exchange:
    """Only the queries and keys of an exchange (a group's collective is left out where it moves none at all)."""
    rows = as_array(op.transfers)
    rows = rows[rows[:, 0] <= Kind.KV]
    if not len(rows) and len(op.transfers):
        return Exchange(op.id, as_rows(rows))
    return Exchange(op.id, as_rows(rows), op.pattern, op.group)


def _transposed(op: Exchange, exchange_id: int) -> Exchange:
    rows = as_array(op.transfers).copy()
    rows[:, 0] = _GRAD_OF[rows[:, 0]]
    rows[:, [6, 7]] = rows[:, [7, 6]]
    return Exchange(exchange_id, as_rows(rows), "p2p" if op.pattern == "p2p" else "all_to_all", op.group)


def _with_merges(ops: list[Op], rank: int) -> Iterator[Op]:
    """`ops`, each followed by a Merge of the regions of which `rank` then holds two partial gradients or more."""
    tables = [_contributions(op, rank) for op in ops]
    origin = np.repeat(np.arange(len(ops)), [len(t) for t in tables])
    table = np.concatenate([np.empty((0, MERGE_WIDTH), dtype=np.int64), *tables])
    launches = np.array([isinstance(op, AttendGrad) for op in ops], dtype=bool)
    found: list[Ints] = [np.empty((0, 1 + MERGE_WIDTH), dtype=np.int64)]  # rows of (op, kind, region)
    for kind in (Kind.Q_GRAD, Kind.KV_GRAD):
        of_kind = table[:, 0] == kind
        rows, op_index = table[of_kind], origin[of_kind]
        if not len(rows):
            continue
        atoms = Atoms.of(rows[:, 1], rows[:, 2], rows[:, 3], rows[:, 4:6].ravel())
        row, atom = atoms.expand(*rows[:, 1:].T)
        at = op_index[row]
        order = np.argsort(atom * len(ops) + at, kind="stable")
        atom, at = atom[order], at[order]
        again = np.zeros(len(atom), dtype=bool)
        again[1:] = atom[1:] == atom[:-1]
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
            yield Merge(rank, Rows(MERGE_WIDTH, values[start:stop].tobytes()))


def _first_of(at: Ints, atom: Ints) -> Ints:
    """Where a sorted (atom, op) pair occurs for the first time."""
    fresh = np.ones(len(at), dtype=bool)
    fresh[1:] = (at[1:] != at[:-1]) | (atom[1:] != atom[:-1])
    return fresh


def _contributions(op: Op, rank: int) -> Ints:
    """Rows (kind, region) of the partial gradients that `op` leaves on `rank`."""
    if isinstance(op, AttendGrad):
        pairs = as_array(op.pairs)
        both = np.empty((2 * len(pairs), MERGE_WIDTH), dtype=np.int64)
        both[: len(pairs), 0], both[len(pairs) :, 0] = Kind.Q_GRAD, Kind.KV_GRAD
        both[: len(pairs), 1:] = pairs[:, [0, 1, 2, 3, 4]]
        both[len(pairs) :, 1:] = pairs[:, [0, 5, 6, 7, 8]]
        # Queries that see none of the keys, and keys that none of the queries sees, take no part.
        both[: len(pairs), 2] = np.maximum(pairs[:, 1], pairs[:, 5])
        both[len(pairs) :, 3] = np.minimum(pairs[:, 6], pairs[:, 2])
        return both
    if isinstance(op, Exchange):
        rows = as_array(op.transfers)
        return rows[(rows[:, 7] == rank) & (rows[:, 0] >= Kind.Q_GRAD), :MERGE_WIDTH]
    return np.empty((0, MERGE_WIDTH), dtype=np.int64)
