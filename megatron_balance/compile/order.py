"""The order of one rank's steps, and the streams that its exchanges are on, as data."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, NamedTuple, TypeAlias

import numpy as np

from megatron_balance.compile.transpose import Policy
from megatron_balance.ir.arrays import Bools, Ints, numbered, overlaps, run_bounds, trim_pairs
from megatron_balance.ir.columns import Pair, Region, Transfer
from megatron_balance.ir.mask import CAUSAL, Mask
from megatron_balance.ir.plan import MicrobatchPlan
from megatron_balance.ir.program import MOVED, Attend, AttendGrad, Exchange, Kind, Op
from megatron_balance.patterns import pattern_of

# The one order in which all ranks issue the exchanges of a phase.

Key: TypeAlias = tuple[int, int]


# A rank issues its exchanges in this order, on whatever stream or communicator each of their legs
# is. So any two ranks that share two exchanges issue them in one order, and no set of ranks can
# wait for one another in a circle: of all exchanges that have not met, the first in this order has
# every rank that it needs (`compile.proof.runs` proves it of compiled programs). NCCL needs that
# twice. It connects two ranks of a communicator at their first send or receive, and their hosts
# stand in the call until both have made it (NVIDIA/nccl#783); and kernels of several communicators
# share a GPU's hardware queues.
#
# It is the order of ids, which follows the dependencies, but for two things. Exchanges that every
# rank can start when it enters the phase come first. And a copied exchange passes the moved one
# just before it: the keys of a replayed ring's next round go out ahead of the gradients of the
# current one, which wait for its attention. Every rank lets it pass, since id and traffic class of
# an exchange are the same everywhere; what a rank sends or receives in it, and when it could, has
# no part in this.
@dataclass(frozen=True, slots=True)
class IssueOrder:
    """Keys that sort the exchanges of one phase.

    `passing`: whether a copied exchange passes the moved one just before it. `first`: exchanges
    that come before all others: every rank that takes part in them can start them when it enters
    the phase, on all ranks alike.
    """

    passing: bool = True
    first: frozenset[int] = frozenset()

    def key(self, exchange_id: int, *, moved: bool) -> Key:
        """The key that an exchange is sorted by; `moved`: its traffic class."""
        if exchange_id in self.first:
            return 0, exchange_id
        # A moved one comes between the next exchange, if that is copied, and the one after it.
        return 1, 2 * exchange_id + 3 * (moved and self.passing)


# Of programs compiled without a plan: which exchanges can start at once is not known.
PASSING = IssueOrder()

# One after the other in the order of ids (`communication: safe`).
BY_ID = IssueOrder(passing=False)


class IssueOrders(NamedTuple):
    """Of both phases."""

    forward: IssueOrder
    backward: IssueOrder


def issue_orders(plan: MicrobatchPlan, policy: Policy, *, passing: bool = True) -> IssueOrders:
    """The issue orders of a plan's phases. Ids as in `compile.transpose`."""
    if not passing:
        return IssueOrders(BY_ID, BY_ID)
    return IssueOrders(*(IssueOrder(first=frozenset(ids)) for ids in _startable(plan, policy)))


def _startable(plan: MicrobatchPlan, policy: Policy) -> tuple[Iterable[int], Iterable[int]]:
    # Exchanges of the forward and of the backward that can start at once.
    # What they send lies at the owner: they need no launch, and no exchange but others of this set.
    # Of a forward of n exchanges the backward replays i as 2 (n - 1 - i) and reverses it as the id
    # behind that; the remap in, 0, is replayed as 0 and reversed as 2 (1 would replay the remap out).
    replays = policy == "replay"
    if plan.moves:  # those of the remap
        return (0,), ((0, 2) if replays else (2,))
    patterns = [pattern_of(zone) for zone in plan.zones]
    counts = [pattern.num_exchanges(zone) for pattern, zone in zip(patterns, plan.zones, strict=True)]
    bases = list(accumulate(counts, initial=0))
    at = [index for index, count in enumerate(counts) if count]
    # Those of the first zone (forward) and of the last zone (backward), or of all zones where these
    # start beside one another.
    beside = all(patterns[index].starts_beside for index in at)
    found = {index: patterns[index].startable(plan.zones[index]) for index in (at if beside else {*at[:1], *at[-1:]})}
    last_id = sum(counts) - 1
    backward: list[int] = []
    for index in at if beside else at[-1:]:
        backward += [2 * (last_id - bases[index] - own) + 1 for own in found[index].gradients]
        backward += [2 * (last_id - bases[index] - own) for own in found[index].replays] if replays else []
    return [bases[index] + own for index in (at if beside else at[:1]) for own in found[index].forward], backward


_MOVED = np.array([kind in MOVED for kind in Kind])

TrafficClass: TypeAlias = Literal["copied", "moved"]
TRAFFIC_CLASSES: tuple[TrafficClass, TrafficClass] = ("copied", "moved")
Leg: TypeAlias = Literal["direct", "dispatch", "across", "combine"]
# The hops of a routed piece, in order.
LEGS: tuple[Leg, Leg, Leg] = ("dispatch", "across", "combine")
Role: TypeAlias = Literal["own", "send_proxy", "receive_proxy"]


@dataclass(frozen=True, slots=True)
class Start:
    """Exchange `op` (an index into the phase's ops) is issued."""

    op: int


@dataclass(frozen=True, slots=True)
class Finish:
    """Exchange `op` is waited for: all that it brings to this rank is there."""

    op: int


@dataclass(frozen=True, slots=True)
class RunLaunches:
    """The launches of attention op `op`."""

    op: int


Step: TypeAlias = Start | Finish | RunLaunches


# An exchange starts as early as the values that it sends allow, and ends where something it brought
# is first read (Zeppelin, section 3.2). In a ring the next round's keys are under way while the
# current ones are attended, and a later zone's first transfer starts while an earlier zone
# computes, but never before the earlier zone's transfers.
#
# Exchanges start in one order on all ranks, whatever they carry and on which stream
# (`compile.order`). There are two traffic classes: copied values (queries, keys, output
# gradients) and moved ones (partial outputs, gradients). In that order a copied exchange passes the
# moved ones of the step before, as the keys of a replayed ring's next round pass the gradients of
# the current one.
#
# This cannot deadlock: executed one after the other in that order, exchanges meet; here a start
# only moves to the front of what it does not need, but never of another start, and an end only to
# the back.
def order(ops: Sequence[Op], rank: int, mask: Mask = CAUSAL, issue: IssueOrder = PASSING) -> tuple[Step, ...]:
    """Steps of one phase of a rank's program, in order; `issue`: the order of all ranks' exchanges."""
    # Merges are no steps: they are part of whatever brings the second partial.
    tables = _Needs(ops, rank, mask)
    steps = _Steps(tables)
    launches = [index for index, op in enumerate(ops) if isinstance(op, Attend | AttendGrad)][::-1]

    def key(index: int) -> Key:
        op = ops[index]
        assert isinstance(op, Exchange)
        return issue.key(op.id, moved=tables.moved[index])

    for exchange in sorted((index for index, op in enumerate(ops) if isinstance(op, Exchange)), key=key):
        op = ops[exchange]
        assert isinstance(op, Exchange)
        # What the rank only passes on, and what needs no launch on any rank, pushes none to the front.
        while launches and launches[-1] < exchange and tables.takes_part[exchange] and op.id not in issue.first:
            steps.run(launches.pop())
        steps.exchange(exchange)
    while launches:
        steps.run(launches.pop())
    return steps.end()


class _Steps:
    """Steps so far: exchanges in their order, between them the launches before them in the program."""

    def __init__(self, tables: "_Needs") -> None:
        self.tables = tables
        self.steps: list[Step] = []
        self.under_way: dict[int, None] = {}  # started, not finished; in order

    def run(self, op: int) -> None:
        self._finish(self.tables.needs[op])
        self.steps.append(RunLaunches(op))

    def exchange(self, op: int) -> None:
        at = len(self.steps)
        if not self._finish(self.tables.needs[op]):
            while at and not self._holds(self.steps[at - 1], op):
                at -= 1
        else:
            at = len(self.steps)
        self.steps.insert(at, Start(op))
        self.under_way[op] = None

    def end(self) -> tuple[Step, ...]:
        return (*self.steps, *(Finish(op) for op in self.under_way))

    def _holds(self, step: Step, exchange: int) -> bool:
        # Whether an exchange cannot start before `step`.
        match step:
            case RunLaunches(op):
                return self.tables.produced[exchange] and op < exchange
            case Start():
                return True
            case Finish(op):
                return op in self.tables.needs[exchange]

    def _finish(self, needs: Sequence[int]) -> bool:
        due = [op for op in needs if op in self.under_way]
        for op in due:
            self.steps.append(Finish(op))
            del self.under_way[op]
        return bool(due)


class _Needs:
    """Dependencies of each op of a phase, looked up for all ops at once.

    `needs[i]`: indices of the exchanges before op i that brought part of what it reads or sends;
    `moved[i]`: whether exchange i is of the traffic class "moved"; `produced[i]`: whether this rank
    sends partial results in it; `takes_part[i]`: whether it sends or receives of its own in it.
    """

    def __init__(self, ops: Sequence[Op], rank: int, mask: Mask) -> None:
        tables = [(i, op.transfers) for i, op in enumerate(ops) if isinstance(op, Exchange)]
        rows, op_of = numbered(tables, Transfer.WIDTH)
        kinds = rows[:, Transfer.KIND]
        moved = is_moved(kinds)
        sent, brought = rows[:, Transfer.SRC] == rank, rows[:, Transfer.DST] == rank
        self.produced = _marked(op_of[moved & sent], len(ops))
        collectives = [i for i, op in enumerate(ops) if isinstance(op, Exchange) and op.moves]
        self.moved = _marked(np.concatenate([op_of[moved], np.array(collectives, dtype=np.int64)]), len(ops))
        self.takes_part = _marked(op_of[sent | brought], len(ops))
        self.needs: list[tuple[int, ...]] = [()] * len(ops)
        launches = _PhaseLaunches(ops, mask)
        pairs: list[Ints] = []
        for kind in np.flatnonzero(np.bincount(kinds[brought], minlength=len(Kind))).tolist():
            there, away = brought & (kinds == kind), sent & (kinds == kind)
            readers, regions = launches.reads(Kind(kind))
            readers = np.concatenate([readers, op_of[away]])
            regions = np.concatenate([regions, rows[away, Transfer.REGION]])
            pairs.append(_meet(readers, regions, op_of[there], rows[there, Transfer.REGION]))
        if pairs:
            self._set_needs(np.concatenate(pairs), len(ops))

    def _set_needs(self, pairs: Ints, num_ops: int) -> None:
        # `pairs`: rows (reading op, bringing op), in any order, with repeats.
        reader, bringer = pairs.T
        code = reader * num_ops + bringer
        code = np.sort(code[bringer < reader])
        if not len(code):
            return
        distinct = code[run_bounds(code[1:] != code[:-1], len(code))[:-1]]
        reader, bringer = np.divmod(distinct, num_ops)
        bounds = run_bounds(reader[1:] != reader[:-1], len(reader))
        brought = bringer.tolist()
        for op, begin, end in zip(reader[bounds[:-1]].tolist(), bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
            self.needs[op] = tuple(brought[begin:end])


class _PhaseLaunches:
    """All pairs of the launches of a phase below one another, without what the mask hides."""

    def __init__(self, ops: Sequence[Op], mask: Mask) -> None:
        tables = [(i, op.pairs) for i, op in enumerate(ops) if isinstance(op, Attend | AttendGrad)]
        pairs, self.op_of = numbered(tables, Pair.WIDTH)
        self.pairs = trim_pairs(pairs, mask)

    def reads(self, kind: Kind) -> tuple[Ints, Ints]:
        # (op [n], `Region` rows [n, 5]) of all that they read of a kind; empty rows where the mask
        # hides all.
        match kind:
            case Kind.Q | Kind.OUT_GRAD:
                return self.op_of, self.pairs[:, Pair.QUERY]
            case Kind.KV:
                return self.op_of, self.pairs[:, Pair.KEY]
            case Kind.OUT | Kind.Q_GRAD | Kind.KV_GRAD:
                return self.op_of[:0], np.empty((0, Region.WIDTH), dtype=np.int64)


def is_moved(kinds: Ints) -> Bools:
    return _MOVED[kinds]


def _marked(indices: Ints, size: int) -> list[bool]:
    marks = np.zeros(size, dtype=bool)
    marks[indices] = True
    return marks.tolist()


def _meet(readers: Ints, reads: Ints, bringers: Ints, brings: Ints) -> Ints:
    # Rows (reader, bringer) for every read region [n, 5] and brought region [m, 5] that share a
    # token and a head.
    read, brought = overlaps(reads, brings)
    meet = brings[brought, Region.HEAD_START] < reads[read, Region.HEAD_STOP]
    meet &= brings[brought, Region.HEAD_STOP] > reads[read, Region.HEAD_START]
    return np.column_stack([readers[read[meet]], bringers[brought[meet]]])


# Streams


def hops(route: Sequence[int]) -> list[tuple[Leg, int, int]]:
    """(leg, from, to) of each transfer of a piece; `route`: src, send proxy, receive proxy, dst."""
    # From a rank to itself is no transfer.
    return [(leg, a, b) for leg, a, b in zip(LEGS, route[:-1], route[1:], strict=True) if a != b]


def relay_role(leg: Leg) -> Role:
    """The role of the proxy that a piece reaches by this leg and that passes it on."""
    return "send_proxy" if leg == "dispatch" else "receive_proxy"


def stream_name(leg: Leg, crosses: bool, traffic_class: TrafficClass) -> str:
    """The stream of one leg of a point-to-point exchange; `crosses`: goes from node to node."""
    # Moved values have streams of their own, and so have collectives (`collective_stream`).
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
