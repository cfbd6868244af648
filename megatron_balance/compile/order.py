"""The order of one rank's steps, and what each of its streams does in turn, as data: executor and simulator read the same.

An exchange starts as early as what it sends allows and ends where something it brought is first read (Zeppelin, section 3.2). In a
ring the next round's keys are under way while the current ones are attended, and a later zone's first transfer starts while an
earlier zone computes, but never before the earlier zone's transfers.

What is copied (queries, keys, output gradients) and what is moved (partial outputs, gradients) are two lanes. Within a lane the
exchanges start in the order of their ids on every rank, so that transports that match messages by order (NCCL) can carry them; one
lane may pass the other, as the keys of a replayed ring's next round pass the gradients of the current one. Collectives keep the
order of their ids among each other whatever they carry.

This cannot deadlock: executed one after the other in the order of their ids, exchanges meet (`ir.program`); here a start only
moves to the front of what it does not need, and an end only to the back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from megatron_balance.ir.arrays import Bools, Ints, as_array, concat, run_bounds
from megatron_balance.ir.columns import Pair, Region, Transfer
from megatron_balance.ir.intervals import overlaps
from megatron_balance.ir.program import MOVED, Attend, AttendGrad, Exchange, Kind, Merge, Op

_MOVED = np.array([kind in MOVED for kind in Kind])
_COPIES, _MOVES, _COLLECTIVE = 1, 2, 4  # bits: which orders an exchange keeps to

TrafficClass: TypeAlias = Literal["copied", "moved"]
Leg: TypeAlias = Literal["direct", "dispatch", "across", "combine"]
LEGS: tuple[Leg, Leg, Leg] = ("dispatch", "across", "combine")
"""The hops of a routed piece, in order."""
Role: TypeAlias = Literal["own", "send_proxy", "receive_proxy"]


@dataclass(frozen=True, slots=True)
class Start:
    """Exchange `op` (an index into the phase's ops) is issued."""

    op: int


@dataclass(frozen=True, slots=True)
class Finish:
    """All that exchange `op` brings to this rank is there."""

    op: int


@dataclass(frozen=True, slots=True)
class Run:
    """The launches of attention op `op`."""

    op: int


Step: TypeAlias = Start | Finish | Run


@dataclass(frozen=True, slots=True)
class Issue:
    """One thing that a stream does: the launches of attention op `op` (leg "run"), or one leg of exchange `op`.

    `roles`: as whom this rank takes part in the leg; proxies pass on bytes as they come, whatever the rank itself is at.
    """

    op: int
    leg: Leg | Literal["run"]
    roles: tuple[Role, ...] = ()


def order(ops: Sequence[Op], rank: int) -> tuple[Step, ...]:
    """Steps of one phase of a rank's program (merges are no steps: they are part of whatever brings the second partial)."""
    tables = _Tables(ops, rank)
    steps = _Steps()
    for index, op in enumerate(ops):
        match op:
            case Exchange():
                steps.exchange(index, tables.needs[index], tables.orders[index], produced=tables.produced[index])
            case Attend() | AttendGrad():
                steps.run(index, tables.needs[index])
            case Merge():
                pass
    return steps.end()


class _Steps:
    """Steps so far, built op by op in program order."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.orders: dict[int, int] = {}
        self.under_way: dict[int, None] = {}  # started, not finished; in order

    def run(self, op: int, needs: Sequence[int]) -> None:
        self._finish(needs)
        self.steps.append(Run(op))

    def exchange(self, op: int, needs: Sequence[int], orders: int, *, produced: bool) -> None:
        """`needs`: exchanges that bring what it sends; `produced`: it sends what launches before it compute."""
        at = len(self.steps)
        if not self._finish(needs):
            while at and not self._holds(self.steps[at - 1], needs, orders, produced):
                at -= 1
        else:
            at = len(self.steps)
        self.steps.insert(at, Start(op))
        self.orders[op] = orders
        self.under_way[op] = None

    def end(self) -> tuple[Step, ...]:
        return (*self.steps, *(Finish(op) for op in self.under_way))

    def _holds(self, step: Step, needs: Sequence[int], orders: int, produced: bool) -> bool:
        """Whether an exchange cannot start before `step`."""
        match step:
            case Run():
                return produced
            case Start(op):
                return bool(self.orders[op] & orders)
            case Finish(op):
                return op in needs

    def _finish(self, needs: Sequence[int]) -> bool:
        found = [op for op in needs if op in self.under_way]
        for op in found:
            self.steps.append(Finish(op))
            del self.under_way[op]
        return bool(found)


class _Tables:
    """What each op of a phase needs, looked up for all ops at once.

    `needs[i]`: indices of the exchanges before op i that brought part of what it reads or sends; `orders[i]`: bits of the orders that
    exchange i keeps to; `produced[i]`: whether this rank sends partial results in it.
    """

    def __init__(self, ops: Sequence[Op], rank: int) -> None:
        exchanges = [i for i, op in enumerate(ops) if isinstance(op, Exchange)]
        tables = [op.transfers for op in ops if isinstance(op, Exchange)]
        rows = concat(tables, Transfer.WIDTH)
        op_of = np.repeat(np.array(exchanges, dtype=np.int64), [len(t) for t in tables])
        moved = is_moved(rows[:, 0])
        sent, brought = rows[:, 6] == rank, rows[:, 7] == rank
        self.produced = _marked(op_of[moved & sent], len(ops))
        copies, moves = _marked(op_of[~moved], len(ops)), _marked(op_of[moved], len(ops))
        self.orders = [_COPIES * c + _MOVES * m for c, m in zip(copies, moves, strict=True)]
        for i in exchanges:
            op = ops[i]
            assert isinstance(op, Exchange)
            if op.collective != "p2p":
                self.orders[i] |= _COLLECTIVE
        self.needs: list[tuple[int, ...]] = [()] * len(ops)
        launches = _Launches(ops)
        pairs: list[Ints] = []
        for kind in np.flatnonzero(np.bincount(rows[brought, 0], minlength=len(Kind))).tolist():
            there = brought & (rows[:, 0] == kind)
            readers, regions = launches.reads(Kind(kind))
            away = sent & (rows[:, 0] == kind)
            readers, regions = np.concatenate([readers, op_of[away]]), np.concatenate([regions, rows[away, 1:6]])
            pairs.append(_meet(readers, regions, op_of[there], rows[there, 1:6]))
        if pairs:
            self._set_needs(np.concatenate(pairs), len(ops))

    def _set_needs(self, pairs: Ints, num_ops: int) -> None:
        """`pairs`: rows (reading op, bringing op), in any order, with repeats."""
        code = pairs[:, 0] * num_ops + pairs[:, 1]
        code = np.sort(code[pairs[:, 1] < pairs[:, 0]])
        if not len(code):
            return
        distinct = code[run_bounds(code[1:] != code[:-1], len(code))[:-1]]
        reader, bringer = np.divmod(distinct, num_ops)
        bounds = run_bounds(reader[1:] != reader[:-1], len(reader))
        brought = bringer.tolist()
        for op, begin, end in zip(reader[bounds[:-1]].tolist(), bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
            self.needs[op] = tuple(brought[begin:end])


class _Launches:
    """What the launches of a phase read: all their pairs below one another."""

    def __init__(self, ops: Sequence[Op]) -> None:
        indices = [i for i, op in enumerate(ops) if isinstance(op, Attend | AttendGrad)]
        tables = [op.pairs for op in ops if isinstance(op, Attend | AttendGrad)]
        self.pairs = concat(tables, Pair.WIDTH)
        self.op_of = np.repeat(np.array(indices, dtype=np.int64), [len(t) for t in tables])

    def reads(self, kind: Kind) -> tuple[Ints, Ints]:
        """(op [n], region [n, 5]) of all they read of a kind; of queries and keys that see none of each other, nothing."""
        match kind:
            case Kind.Q | Kind.OUT_GRAD:
                regions = self.pairs[:, :5].copy()
                regions[:, 1] = np.maximum(regions[:, 1], self.pairs[:, 5])
            case Kind.KV:
                regions = self.pairs[:, [0, 5, 6, 7, 8]]
                regions[:, 2] = np.minimum(regions[:, 2], self.pairs[:, 2])
            case Kind.OUT | Kind.Q_GRAD | Kind.KV_GRAD:
                return self.op_of[:0], np.empty((0, 5), dtype=np.int64)
        return self.op_of, regions


def is_moved(kinds: Ints) -> Bools:
    """Of each kind, whether its lane is "moved"."""
    return _MOVED[kinds]


def _marked(indices: Ints, size: int) -> list[bool]:
    found = np.zeros(size, dtype=bool)
    found[indices] = True
    return found.tolist()


def _meet(readers: Ints, reads: Ints, bringers: Ints, brings: Ints) -> Ints:
    """Rows (reader, bringer) for every read region [n, 5] and brought region [m, 5] that share a token and a head."""
    read, brought = overlaps(reads, brings)
    meet = brings[brought, Region.HEAD_START] < reads[read, Region.HEAD_STOP]
    meet &= brings[brought, Region.HEAD_STOP] > reads[read, Region.HEAD_START]
    return np.column_stack([readers[read[meet]], bringers[brought[meet]]])


# Streams


def traffic_class(kinds: Sequence[int]) -> TrafficClass:
    """The lane of all that one exchange moves from one rank to another."""
    return "moved" if any(kind in MOVED for kind in kinds) else "copied"


def hops(route: Sequence[int]) -> list[tuple[Leg, int, int]]:
    """(leg, from, to) of each transfer of a piece: `route` is src, send proxy, receive proxy, dst; to itself is no transfer."""
    return [(leg, a, b) for leg, a, b in zip(LEGS, route[:-1], route[1:], strict=True) if a != b]


def roles(route: Sequence[int], rank: int) -> list[tuple[Leg, Role]]:
    """As whom `rank` takes part in each leg of a piece."""
    path = hops(route)
    found: list[tuple[Leg, Role]] = []
    for at, (leg, a, b) in enumerate(path):
        if a == rank:
            found.append((leg, "own" if at == 0 else relay_role(path[at - 1][0])))
        if b == rank:
            found.append((leg, "own" if at == len(path) - 1 else relay_role(leg)))
    return found


def relay_role(leg: Leg) -> Role:
    """The proxy that a piece reaches by this leg and is passed on by."""
    return "send_proxy" if leg == "dispatch" else "receive_proxy"


def streams(ops: Sequence[Op], rank: int, ranks_per_node: int) -> dict[str, tuple[Issue, ...]]:
    """What each stream of a rank does, in order: "compute", and those that its exchanges use.

    A transfer belongs to "inter_node" or "intra_node" by whether it crosses nodes; of a routed one, the way to the send proxies to
    "dispatch", between the nodes to "inter_node", from the receive proxies to "combine". What is moved and not copied (see above) has
    streams of its own: "inter_node moved" and so on; so have collectives: "inter_node collective" where their ranks are on several nodes.
    """
    found: dict[str, list[Issue]] = {"compute": []}
    for step in order(ops, rank):
        match step:
            case Run(op):
                found["compute"].append(Issue(op, "run"))
            case Start(index):
                op = ops[index]
                assert isinstance(op, Exchange)
                for (stream, leg), parts in sorted(_parts(op, rank, ranks_per_node)):
                    found.setdefault(stream, []).append(Issue(index, leg, parts))
            case Finish():
                pass
    return {stream: tuple(issues) for stream, issues in found.items()}


def stream_name(leg: Leg, crosses: bool, traffic_class: TrafficClass) -> str:
    """The stream of one leg of an exchange."""
    match leg:
        case "direct":
            link = "inter_node" if crosses else "intra_node"
        case "across":
            link = "inter_node"
        case "dispatch" | "combine":
            link = leg
    return link if traffic_class == "copied" else f"{link} moved"


def collective_stream(group: Sequence[int], ranks_per_node: int) -> str:
    """The stream of an exchange among exactly the ranks of `group`."""
    return "inter_node collective" if len({rank // ranks_per_node for rank in group}) > 1 else "intra_node collective"


def _parts(op: Exchange, rank: int, ranks_per_node: int) -> Iterator[tuple[tuple[str, Leg], tuple[Role, ...]]]:
    """(stream, leg) and roles of what `rank` does in an exchange."""
    rows = as_array(op.transfers)
    kinds: dict[tuple[int, int], set[int]] = {}
    for kind, src, dst in rows[:, [0, 6, 7]].tolist():
        kinds.setdefault((src, dst), set()).add(kind)
    if op.collective != "p2p":
        yield (collective_stream(op.group, ranks_per_node), "direct"), ("own",)
        return
    found: dict[tuple[str, Leg], set[Role]] = {}
    routed: set[tuple[int, int]] = set()
    for src, dst, _, send_proxy, receive_proxy in op.routes:
        routed.add((src, dst))
        for leg, role in roles((src, send_proxy, receive_proxy, dst), rank):
            found.setdefault((stream_name(leg, True, traffic_class(list(kinds[src, dst]))), leg), set()).add(role)
    for (src, dst), carried in kinds.items():
        if (src, dst) not in routed:
            crosses = src // ranks_per_node != dst // ranks_per_node
            found.setdefault((stream_name("direct", crosses, traffic_class(list(carried))), "direct"), set()).add("own")
    for place, parts in found.items():
        yield place, tuple(sorted(parts))
