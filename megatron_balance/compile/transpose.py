"""The backward ops of one rank, derived by walking its forward ops in reverse.

Attend becomes AttendGrad. A transfer of keys or queries becomes one of their gradient, the other
way; a transfer of partial outputs becomes one of the output's gradient, the other way. Merges are
put where a rank would hold two partial gradients of one region.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple, assert_never

import numpy as np

from megatron_balance.compile.join import routes_of
from megatron_balance.ir.arrays import Atoms, Ints, as_array, as_rows, concat, numbered, run_starts, trim_pairs
from megatron_balance.ir.columns import Pair, Route, Rows, Transfer, Value
from megatron_balance.ir.mask import Mask
from megatron_balance.ir.program import Attend, AttendGrad, Collective, Exchange, Kind, Merge, Op, Policy, RankProgram

POLICIES: tuple[Policy, ...] = ("keep", "replay")

_REVERSED: dict[Collective, Collective] = {
    "p2p": "p2p",
    "all_to_all": "all_to_all",
    "all_gather": "reduce_scatter",
    "reduce_scatter": "all_gather",
}
_REVERSED_ROUTE = [Route.DST, Route.SRC, Route.PIECE, Route.RECEIVE_PROXY, Route.SEND_PROXY]
_GRAD_OF = np.array([Kind.Q_GRAD, Kind.KV_GRAD, Kind.OUT_GRAD])  # of Q, KV, OUT


def transpose(program: RankProgram, policy: Policy, *, merges: bool = True) -> RankProgram:
    """`program` with its backward ops.

    Of n forward exchanges, exchange i is replayed as remap_in + 2 (n - 1 - i) and reversed as the
    id behind that; a remap-in exchange i is replayed as i. `merges`: whether to add the Merge ops of
    partial gradients, which a proof needs, and an executor that sums them where they arrive does not.
    """
    backward = list(_reverse(program, policy))
    if merges:
        backward = list(_with_merges(backward, program.rank, program.mask))
    return replace(program, backward=tuple(backward))


def forward_id(backward_id: int, program: RankProgram) -> int:
    """The forward exchange that a backward exchange replays or reverses."""
    if backward_id < program.remap_in:
        return backward_id
    return program.num_exchanges - 1 - (backward_id - program.remap_in) // 2


# Policy `keep` leaves received inputs where they are until the backward; `replay` brings them
# again, just before they are needed, by the forward exchange or by the one that the comm pattern
# names (`RankProgram.replays`). The remap in (`RankProgram.remap_in`) is replayed at the start, and
# what it brings stays.
#
# A replay needs the values of any other exchange to be used before the rank's next exchange, as in
# all comm patterns here; `verify` finds a program in which they are not.
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
            yield replace(source, id=exchange_id)

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
    # Only the queries and keys of an exchange (a group's collective is left out where it moves none
    # at all).
    rows = as_array(op.transfers)
    inputs = rows[:, Transfer.KIND] <= Kind.KV
    if inputs.all() and not op.moves:
        return op
    rows = rows[inputs]
    if not len(rows):
        return Exchange(op.id, as_rows(rows))
    return Exchange(op.id, as_rows(rows), op.collective, op.group, routes_of(op.routes, rows))


def _gradients(exchanges: dict[int, Exchange]) -> dict[int, Rows]:
    # The transfers of gradients that reverse each exchange, by its id; worked out for all of them
    # at once.
    rows = concat([op.transfers for op in exchanges.values()], Transfer.WIDTH)
    back = np.empty_like(rows)
    back[:, Transfer.KIND] = _GRAD_OF[rows[:, Transfer.KIND]]
    back[:, Transfer.REGION] = rows[:, Transfer.REGION]
    back[:, Transfer.SRC], back[:, Transfer.DST] = rows[:, Transfer.DST], rows[:, Transfer.SRC]
    data, at = back.tobytes(), 0
    gradients: dict[int, Rows] = {}
    for exchange_id, op in exchanges.items():
        gradients[exchange_id] = Rows(Transfer.WIDTH, data[at : at + len(op.transfers.data)])
        at += len(op.transfers.data)
    return gradients


def _transposed(op: Exchange, gradients: Rows, exchange_id: int) -> Exchange:
    routes = as_rows(as_array(op.routes)[:, _REVERSED_ROUTE]) if op.routes else op.routes
    moves = op.collective != "p2p" and not op.moves
    return Exchange(exchange_id, gradients, _REVERSED[op.collective], op.group, routes, moves)


def _with_merges(ops: list[Op], rank: int, mask: Mask) -> Iterator[Op]:
    # `ops`, each followed by a Merge of the regions of which `rank` then holds two partial
    # gradients or more.
    partials, gains, op_of = _events(ops, rank, mask)
    launches = np.array([isinstance(op, AttendGrad) for op in ops], dtype=bool)
    tables: list[Ints] = [np.empty((0, 1 + Value.WIDTH), dtype=np.int64)]  # rows of (op, kind, region)
    for kind in (Kind.Q_GRAD, Kind.KV_GRAD):
        of_kind = partials[:, Value.KIND] == kind
        if not of_kind.any():
            continue
        regions, op_index, gains_of_kind = partials[of_kind, Value.REGION], op_of[of_kind], gains[of_kind]
        seq, start, stop, head_start, head_stop = regions.T
        atoms = Atoms.of(seq, start, stop, np.concatenate([head_start, head_stop]))
        row, atom = atoms.expand(seq, start, stop, head_start, head_stop)
        at, gained = op_index[row], gains_of_kind[row]
        order = np.argsort((atom * len(ops) + at) * 2 + gained, kind="stable")  # an exchange takes before it brings
        atom, at, gained = atom[order], at[order], gained[order]
        again = np.zeros(len(atom), dtype=bool)
        again[1:] = (atom[1:] == atom[:-1]) & (gained[1:] == 1) & (gained[:-1] == 1)
        # A launch sums what it computes for one token, so its repeats are no second partial; those
        # of an exchange are.
        again[1:] &= ~(launches[at[1:]] & (at[1:] == at[:-1]))
        again[again] = run_starts(
            (at[again][1:] != at[again][:-1]) | (atom[again][1:] != atom[again][:-1]), int(again.sum())
        )
        group, regions = atoms.regions(at[again], atom[again])
        tables.append(np.column_stack([group, np.full(len(group), kind), regions]))
    merges = np.concatenate(tables)
    merges = merges[np.argsort(merges[:, 0], kind="stable")]
    ends = np.searchsorted(merges[:, 0], np.arange(len(ops) + 1)).tolist()
    values = np.ascontiguousarray(merges[:, 1:], dtype="<i8")
    for op, start, stop in zip(ops, ends, ends[1:], strict=False):
        yield op
        if start < stop:
            yield Merge(rank, Rows(Value.WIDTH, values[start:stop].tobytes()))


def _events(ops: Sequence[Op], rank: int, mask: Mask) -> tuple[Ints, Ints, Ints]:
    # Partial gradients that a rank gains by an op (gains 1) or gives away: `Value` rows; gains, ops.
    launches = [(at, op.pairs) for at, op in enumerate(ops) if isinstance(op, AttendGrad)]
    exchanges = [(at, op.transfers) for at, op in enumerate(ops) if isinstance(op, Exchange)]
    (pairs, launch), (rows, exchange) = numbered(launches, Pair.WIDTH), numbered(exchanges, Transfer.WIDTH)
    mine = (rows[:, Transfer.DST] == rank) | (rows[:, Transfer.SRC] == rank)
    mine &= rows[:, Transfer.KIND] >= Kind.Q_GRAD
    rows, exchange, count = rows[mine], exchange[mine], len(pairs)
    pairs = trim_pairs(pairs, mask)  # queries that see none of the keys, and keys that no query sees, take no part
    values = np.empty((2 * count + len(rows), Value.WIDTH), dtype=np.int64)
    queries, keys, carried = values[:count], values[count : 2 * count], values[2 * count :]
    queries[:, Value.KIND], queries[:, Value.REGION] = Kind.Q_GRAD, pairs[:, Pair.QUERY]
    keys[:, Value.KIND], keys[:, Value.REGION] = Kind.KV_GRAD, pairs[:, Pair.KEY]
    carried[:] = rows[:, Transfer.VALUE]
    gains = np.concatenate([np.ones(2 * count, dtype=np.int64), rows[:, Transfer.DST] == rank])
    return values, gains, np.concatenate([launch, launch, exchange])


class OpZones(NamedTuple):
    """By op: its queue, and the name of its zone."""

    queues: list[int]
    zones: list[str]


def places(program: RankProgram, *, backward: bool) -> OpZones:
    """Queues and zones of a phase's ops."""
    queues = [(at, name) for at, (name, count) in enumerate(program.queues) for _ in range(count)]
    forward = list(zip(program.forward, queues or [(0, "")] * len(program.forward), strict=True))
    if not backward:
        return OpZones([queue for _, (queue, _) in forward], [name for _, (_, name) in forward])
    # Launches are the forward ones in reverse; an exchange belongs to the forward one it comes from.
    launches = [place for op, place in forward if isinstance(op, Attend)][::-1]
    exchanges = {op.id: place for op, place in forward if isinstance(op, Exchange)}
    found: list[tuple[int, str]] = []
    remaining = iter(launches)
    place = launches[0] if launches else (0, "")
    for op in program.backward:
        if isinstance(op, AttendGrad):
            place = next(remaining)
        found.append(exchanges.get(forward_id(op.id, program), place) if isinstance(op, Exchange) else place)
    return OpZones([queue for queue, _ in found], [name for _, name in found])
