"""Join the projections of all ranks to one program, and split it again."""

from collections.abc import Iterator, Sequence
from typing import assert_never

import numpy as np

from megatron_balance.errors import InvalidProgramError
from megatron_balance.ir.arrays import Bools, Ints, as_array, as_rows, numbered
from megatron_balance.ir.columns import Route, Rows, Transfer
from megatron_balance.ir.mask import CAUSAL
from megatron_balance.ir.program import MOVED, NO_ROUTES, Attend, AttendGrad, Exchange, Merge, Op, Program, RankProgram


def join(
    ranks: Sequence[RankProgram], lengths: tuple[int, ...], num_heads: int, num_kv_heads: int, policy: str | None = None
) -> Program:
    """The program whose projections are `ranks` (one for each rank, in order).

    Raises InvalidProgramError: a send without its receive or the other way, another order between
    two ranks, or a mask, an exchange or a route that ranks describe differently.
    """
    for rank in ranks:
        if rank.mask != ranks[0].mask:
            raise InvalidProgramError(
                f"rank {rank.rank} has mask {rank.mask.name}, rank {ranks[0].rank} {ranks[0].mask.name}"
            )
        if rank.remap_in != ranks[0].remap_in:
            raise InvalidProgramError(
                f"rank {rank.rank} has {rank.remap_in} remap-in exchange, rank {ranks[0].rank} {ranks[0].remap_in}"
            )
    return Program(
        lengths,
        num_heads,
        num_kv_heads,
        tuple(r.owned for r in ranks),
        tuple(_merge_orders([r.forward for r in ranks])),
        tuple(_merge_orders([r.backward for r in ranks])),
        policy,
        ranks[0].remap_in if ranks else 0,
        ranks[0].mask if ranks else CAUSAL,
    )


def _merge_orders(ranks: Sequence[Sequence[Op]]) -> Iterator[Op]:
    position = [0] * len(ranks)

    def advance(rank: int) -> Iterator[Op]:
        # Ops of `rank` up to its next exchange.
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
                    raise InvalidProgramError(
                        f"rank {rank}: exchange {op.id} comes after exchange {last}; ids must rise"
                    )
                last = op.id
                due.setdefault(op.id, []).append(rank)
    for exchange_id in sorted(due):
        projections: list[tuple[int, Exchange]] = []
        for rank in due[exchange_id]:
            yield from advance(rank)
            op = ranks[rank][position[rank]]
            assert isinstance(op, Exchange)
            projections.append((rank, op))
            position[rank] += 1
        yield _join_exchange(exchange_id, projections)
    for rank in range(len(ranks)):
        yield from advance(rank)


def _join_exchange(exchange_id: int, projections: list[tuple[int, Exchange]]) -> Exchange:
    first = projections[0][1]
    for rank, op in projections:
        if (op.collective, op.group) != (first.collective, first.group):
            raise InvalidProgramError(
                f"exchange {exchange_id}: rank {rank} sees {op.collective} in {op.group}, "
                f"rank {projections[0][0]} {first.collective} in {first.group}"
            )
    rows, listed_by = numbered([(rank, op.transfers) for rank, op in projections], Transfer.WIDTH)
    sends, receives = rows[:, Transfer.SRC] == listed_by, rows[:, Transfer.DST] == listed_by
    passed_on = ~(sends | receives)
    routes = _join_routes(exchange_id, projections)
    _check_proxies(exchange_id, rows[passed_on], listed_by[passed_on], rows[sends], as_array(routes))
    sent, received = _by_ranks(rows[sends]), _by_ranks(rows[receives])
    if first.collective != "p2p" and {rank for rank, _ in projections} != set(first.group):
        raise InvalidProgramError(
            f"exchange {exchange_id}: {first.collective} in {first.group}, but only "
            f"{sorted(r for r, _ in projections)} take part"
        )
    if sent.shape != received.shape or not (sent == received).all():
        raise InvalidProgramError(f"exchange {exchange_id}: {_difference(sent, received)}")
    return Exchange(exchange_id, as_rows(sent), first.collective, first.group, routes)


def _join_routes(exchange_id: int, projections: list[tuple[int, Exchange]]) -> Rows:
    # The routes of all pairs of ranks, each of which every rank on it lists in full.
    listed: dict[tuple[int, ...], set[int]] = {}
    for rank, op in projections:
        for row in op.routes:
            listed.setdefault(row, set()).add(rank)
    on_the_way: dict[tuple[int, ...], set[int]] = {}
    for src, dst, _, send_proxy, receive_proxy in listed:
        on_the_way.setdefault((src, dst), set()).update((src, dst, send_proxy, receive_proxy))
    for row, ranks in sorted(listed.items()):
        src, dst, piece, send_proxy, receive_proxy = row
        if ranks != on_the_way[src, dst]:
            odd = min(ranks ^ on_the_way[src, dst])
            on_it = odd in on_the_way[src, dst]
            wrong = f"of which rank {odd} does not know" if on_it else f"listed by rank {odd}, which is not on the way"
            raise InvalidProgramError(
                f"exchange {exchange_id}: piece {piece} from rank {src} to rank {dst} goes by ranks {send_proxy} and "
                f"{receive_proxy}, {wrong}"
            )
    return Rows.of(Route.WIDTH, sorted(listed))


def _check_proxies(exchange_id: int, passed_on: Ints, listed_by: Ints, sent: Ints, routes: Ints) -> None:
    # Check that proxies list exactly what the source sends between the pairs of ranks that they
    # serve.
    expected: dict[tuple[int, int, int], Ints] = {}
    for src, dst, _, *proxies in routes.tolist():
        for proxy in {*proxies} - {src, dst}:
            expected[proxy, src, dst] = sent[_between(sent, src, dst)]
    for proxy, src, dst in sorted(
        {(p, *r) for p, r in zip(listed_by.tolist(), passed_on[:, Transfer.ENDS].tolist(), strict=True)} | set(expected)
    ):
        rows = passed_on[(listed_by == proxy) & _between(passed_on, src, dst)]
        if (proxy, src, dst) not in expected:
            raise InvalidProgramError(
                f"exchange {exchange_id}: rank {proxy} lists a transfer of other ranks, from {src} to {dst}"
            )
        if rows.tolist() != expected[proxy, src, dst].tolist():
            raise InvalidProgramError(
                f"exchange {exchange_id}: proxy {proxy} expects other rows from rank {src} to rank {dst} than are sent"
            )


def _between(rows: Ints, src: int, dst: int) -> Bools:
    # Whether each `Transfer` row goes from `src` to `dst`.
    return (rows[:, Transfer.SRC] == src) & (rows[:, Transfer.DST] == dst)


def routes_of(routes: Rows, transfers: Ints) -> Rows:
    """The routes of the pairs of ranks that `transfers` still has."""
    if not routes:
        return routes
    table = as_array(routes)
    pairs = {(src, dst) for src, dst in transfers[:, Transfer.ENDS].tolist()}
    return as_rows(table[[(src, dst) in pairs for src, dst in table[:, Route.PAIR].tolist()]])


def _by_ranks(rows: Ints) -> Ints:
    return rows[np.lexsort((rows[:, Transfer.DST], rows[:, Transfer.SRC]))]


def _difference(sent: Ints, received: Ints) -> str:
    def listed(rows: Ints) -> set[tuple[int, ...]]:
        return {tuple(row) for row in rows.tolist()}

    for *value, src, dst in sorted(listed(sent) - listed(received)):
        return f"rank {src} sends {tuple(value)} to rank {dst}, which does not expect it"
    for *value, src, dst in sorted(listed(received) - listed(sent)):
        return f"rank {dst} waits for {tuple(value)} from rank {src}, which does not send it"
    return "two ranks list the same transfers in different orders"


def split(program: Program) -> list[RankProgram]:
    """The projections of all ranks, in order, from which `join` would make `program` again."""
    ids = [op.id for op in program.forward if isinstance(op, Exchange)]
    forward, backward = (_shared_out(ops, program.num_ranks) for ops in (program.forward, program.backward))
    return [
        RankProgram(
            rank,
            program.owned[rank],
            tuple(forward[rank]),
            max(ids, default=-1) + 1,
            tuple(backward[rank]),
            remap_in=program.remap_in,
            mask=program.mask,
        )
        for rank in range(program.num_ranks)
    ]


def _shared_out(ops: Sequence[Op], num_ranks: int) -> list[list[Op]]:
    own: list[list[Op]] = [[] for _ in range(num_ranks)]
    for op in ops:
        match op:
            case Exchange():
                for rank, part in _shares(op, num_ranks):
                    own[rank].append(part)
            case Attend() | AttendGrad() | Merge():
                own[op.rank].append(op)
            case _:
                assert_never(op)
    return own


def _shares(op: Exchange, num_ranks: int) -> Iterator[tuple[int, Exchange]]:
    # The part of each rank in an exchange: what it sends, receives, and passes on as a proxy.
    rows = as_array(op.transfers)
    listed = [np.column_stack([rows[:, side], np.arange(len(rows))]) for side in (Transfer.SRC, Transfer.DST)]
    routes: dict[int, set[tuple[int, int]]] = {}
    for src, dst, _, *proxies in op.routes:
        for rank in (src, dst, *proxies):
            routes.setdefault(rank, set()).add((src, dst))
    for rank, pairs in routes.items():
        for src, dst in pairs:
            if rank not in (src, dst):
                passed_on = np.flatnonzero(_between(rows, src, dst))
                listed.append(np.column_stack([np.full(len(passed_on), rank), passed_on]))
    whose, which = np.unique(np.concatenate(listed), axis=0).T
    begin = np.searchsorted(whose, np.arange(num_ranks + 1))
    moves = op.collective != "p2p" and bool(np.isin(rows[:, Transfer.KIND], MOVED).any())
    present = np.union1d(whose, np.array(op.group, dtype=np.int64))
    for rank in present[(present >= 0) & (present < num_ranks)].tolist():
        mine = rows[which[begin[rank] : begin[rank + 1]]]
        of = routes_of(op.routes, mine) if rank in routes else NO_ROUTES
        yield rank, Exchange(op.id, as_rows(mine), op.collective, op.group, of, moves)
