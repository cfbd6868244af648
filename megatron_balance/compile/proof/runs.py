"""Prove a plan as it will run: structure, program, and that ranks run what was proved."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple, TypeAlias, cast

import numpy as np

from megatron_balance.compile import order
from megatron_balance.compile.join import split
from megatron_balance.compile.ping_pong import NanoSegment
from megatron_balance.compile.pipeline import CompiledRank, PhaseOrder, Projector, compile_ranks, expand
from megatron_balance.compile.proof.meaning import verify, verify_rank
from megatron_balance.compile.proof.structure import misplaced, verify_plan
from megatron_balance.compile.remap import layouts
from megatron_balance.errors import InvalidProgramError
from megatron_balance.ir.arrays import Bools, Ints, as_array, as_rows, concat, numbered, overlaps, trim_pairs
from megatron_balance.ir.columns import Pair, Placed, Region, Route, Rows, Transfer
from megatron_balance.ir.mask import Mask
from megatron_balance.ir.plan import MicrobatchPlan
from megatron_balance.ir.program import (
    MOVED,
    Attend,
    AttendGrad,
    Exchange,
    Kind,
    Merge,
    Op,
    Policy,
    Program,
    RankProgram,
)


# `compile.proof.meaning` proves one program of all ranks. Ranks run projections of their own,
# lowered to steps. Here both are held against each other, and the steps of all ranks against what
# the executor needs of them.
def prove(plan: MicrobatchPlan, policy: Policy | None) -> Program:
    """Prove a plan, forward and, with a policy, backward; its program. Raises InvalidProgramError: it
    does not hold; names the planner, the op or the ranks.
    """
    verify_plan(plan)
    program = expand(plan, policy)
    verify(program)
    verify_runs(plan, program)
    return program


def verify_runs(plan: MicrobatchPlan, program: Program) -> None:
    """Check that the ranks of a plan run `program`: the same ops with the same exchange ids, groups
    and proxies, in steps that no rank waits in for ever. Raises InvalidProgramError: they do not;
    names the rank and the op.
    """
    verify_routes(plan, program)
    ranks = compile_ranks(plan, cast("Policy | None", program.policy))
    for rank, (compiled, proved) in enumerate(zip(ranks, split(program), strict=True)):
        if proved.owned != compiled.program.owned:
            raise InvalidProgramError(f"rank {rank} owns other tokens than in the program that was proved")
        _check_same(rank, "forward", proved.forward, compiled.program.forward)
        _check_same(rank, "backward", proved.backward, compiled.program.backward)
    for backward in (False, True) if program.policy else (False,):
        for rank, (ops, phase) in enumerate(_phases_of(ranks, backward=backward)):
            verify_steps(ops, phase.steps, rank, plan.mask)
        # No rank waits for ever, then. Take the first exchange, in the one order of all ranks, that
        # some rank has not started: that rank stands at the end of an exchange that it started before,
        # so of one that is earlier in the order, and that all of its ranks have started.
        verify_issue_order(issued(ranks, plan.ranks_per_node, backward=backward))


def _check_same(rank: int, phase: str, proved: Sequence[Op], runs: Sequence[Op]) -> None:
    """Reject a difference between what was proved and what a rank runs."""
    # Rows of an exchange may come in another order, but for those between two ranks; gradients are
    # merged where they arrive.
    proved = [op for op in proved if phase == "forward" or not isinstance(op, Merge)]
    for at, (wanted, op) in enumerate(zip(proved, runs, strict=False)):
        if wanted != op and _in_order(wanted) != _in_order(op):
            raise InvalidProgramError(
                f"rank {rank}: {phase} op {at} that runs is not the one that was proved: expected {wanted!r:.160}, got "
                f"{op!r:.160}"
            )
    if len(proved) != len(runs):
        raise InvalidProgramError(f"rank {rank}: {phase}: {len(proved)} ops were proved, {len(runs)} run")


def _in_order(op: Op) -> Op:
    if not isinstance(op, Exchange):
        return op
    rows = as_array(op.transfers)
    by_ends = np.lexsort((rows[:, Transfer.DST], rows[:, Transfer.SRC]))
    return replace(op, transfers=as_rows(rows[by_ends]), routes=Rows.of(Route.WIDTH, sorted(op.routes)))


def verify_routes(plan: MicrobatchPlan, program: Program | RankProgram) -> None:
    """Check the proxies of a program, or of one rank's part in it, against the plan's routing
    (Zeppelin, section 3.3), worked out here anew. Raises InvalidProgramError: a transfer that goes
    another way than the plan says; names its ends.
    """
    projector = Projector(plan)
    wanted = frozenset[int]() if plan.routing is None else projector.routed_ids()
    remap_in = 1 if plan.moves else 0
    num_exchanges = projector.total + 2 * remap_in
    routed: dict[int, set[tuple[int, int]]] = {}
    for op in program.forward:
        if isinstance(op, Exchange):
            routed[op.id] = _routed_pairs(plan, op) if op.id in wanted else set()
            _check_ways(plan, op, routed[op.id], "forward")
    for op in program.backward:
        if not isinstance(op, Exchange):
            continue
        at, replayed = op.id, op.id < remap_in
        if not replayed:
            at, odd = divmod(op.id - remap_in, 2)
            at, replayed = num_exchanges - 1 - at, not odd
        # what is brought again may be less than what was brought at first
        ends = {(src, dst) for src, dst, *_ in op.routes} if replayed else {(b, a) for a, b in routed.get(at, ())}
        _check_ways(plan, op, ends if at in wanted else set(), "backward")


def _routed_pairs(plan: MicrobatchPlan, op: Exchange) -> set[tuple[int, int]]:
    # The (src, dst) of an exchange that go over all NICs of both nodes.
    assert plan.routing is not None
    if -(-plan.ranks_per_node // plan.routing.ranks_per_nic) == 1:
        return set()
    tokens: Counter[tuple[int, int]] = Counter()
    for row in op.transfers:
        src, dst = row[Transfer.SRC], row[Transfer.DST]
        if src // plan.ranks_per_node != dst // plan.ranks_per_node:
            tokens[src, dst] += row[Transfer.STOP] - row[Transfer.START]
    return {ends for ends, number in tokens.items() if number >= plan.routing.min_tokens}


def _check_ways(plan: MicrobatchPlan, op: Exchange, ends: set[tuple[int, int]], phase: str) -> None:
    # Check that the pieces of `ends`, and of no others, go by their proxies.
    got: defaultdict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for src, dst, _, send_proxy, receive_proxy in op.routes:
        got[src, dst].append((send_proxy, receive_proxy))
    for src, dst in sorted(ends | got.keys()):
        expected = _ways(plan, src, dst) if (src, dst) in ends else []
        if got[src, dst] != expected:
            raise InvalidProgramError(
                f"{phase} exchange {op.id}: from rank {src} to rank {dst} expected proxies {expected}, got "
                f"{got[src, dst]}"
            )


def _ways(plan: MicrobatchPlan, src: int, dst: int) -> list[tuple[int, int]]:
    # (send proxy, receive proxy) of each piece: one for each NIC of a node, in turns.
    assert plan.routing is not None
    per_node, per_nic = plan.ranks_per_node, plan.routing.ranks_per_nic

    def proxy(rank: int, nic: int) -> int:
        place = rank % per_node
        sharing = range(nic * per_nic, min((nic + 1) * per_nic, per_node))
        return rank if place in sharing else rank - place + sharing[place % per_nic % len(sharing)]

    nics = range(-(-per_node // per_nic))
    return [(proxy(src, nic), proxy(dst, nic)) for nic in nics] * plan.routing.pieces


# The group calls of a rank in the order in which it issues them, and a proof that all ranks issue
# them in one order.

# In the order of their issue.
_LEGS: tuple[order.Leg, ...] = ("direct", *order.LEGS)

_BITS = 20  # more than a rank takes

_MASK = (1 << _BITS) - 1


# A batch is what a transport issues as one call: one leg of an exchange on one stream, or a
# collective. `runtime.transport` issues these, in this order.
class GroupCall(NamedTuple):
    """Identity of a group call, the same on all of its ranks.

    `call`: of a phase, where several run one after the other or interleaved: (layer, nano-batch).
    """

    call: tuple[int, int]
    exchange: int
    leg: order.Leg
    stream: str

    def __str__(self) -> str:
        within = f"; layer {self.call[0]}, nano-batch {self.call[1]}" if any(self.call) else ""
        return f"exchange {self.exchange} ({self.leg}, on {self.stream!r}{within})"


class IssuedCall(NamedTuple):
    """A group call as one of its ranks issues it.

    `op`: index of the exchange in the rank's ops. `group`: ranks of a collective. `pairs`: (from,
    to) of the transfers that the rank sends or receives.
    """

    call: GroupCall
    op: int
    group: tuple[int, ...]
    pairs: frozenset[tuple[int, int]]

    @property
    def ranks(self) -> frozenset[int]:
        return frozenset(self.group) if self.group else frozenset(rank for pair in self.pairs for rank in pair)


# Whether a collective's ranks have a process group; its transfers go point to point if not.
_OwnGroup: TypeAlias = Callable[[tuple[int, ...]], bool]

# (leg, stream, (from, to) pairs) of a rank's transfers in an exchange that are issued as one call.
Part: TypeAlias = tuple[order.Leg, str, frozenset[tuple[int, int]]]


def batches(
    ops: Sequence[Op],
    steps: Iterable[order.Step],
    rank: int,
    ranks_per_node: int,
    own_group: _OwnGroup = lambda _: True,
) -> Iterator[IssuedCall]:
    """Group calls of `rank` that the starts among `steps` issue, in order."""
    for step in steps:
        op = ops[step.op]
        if not isinstance(step, order.Start) or not isinstance(op, Exchange):
            continue
        if op.collective != "p2p" and own_group(op.group):
            stream = order.collective_stream(op.group, ranks_per_node)
            yield IssuedCall(GroupCall((0, 0), op.id, "direct", stream), step.op, op.group, frozenset())
            continue
        for leg, stream, pairs in parts(op, rank, ranks_per_node):
            yield IssuedCall(GroupCall((0, 0), op.id, leg, stream), step.op, (), pairs)


def parts(op: Exchange, rank: int, ranks_per_node: int) -> tuple[Part, ...]:
    """The group calls of a rank in a point-to-point exchange, in the order of their issue."""
    rows, routes = as_array(op.transfers), as_array(op.routes)
    if not len(routes):
        return _direct(rows, rank, ranks_per_node)
    code = rows[:, Transfer.SRC] << _BITS | rows[:, Transfer.DST]
    moved = np.unique(code[order.is_moved(rows[:, Transfer.KIND])])
    routed = routes[:, Route.SRC] << _BITS | routes[:, Route.DST]
    direct = code[~np.isin(code, routed)]
    stations = [routes[:, column] for column in Route.STATIONS]
    ends = [(0, direct, direct >> _BITS, direct & _MASK)]
    ends += [(1 + leg, routed, stations[leg], stations[leg + 1]) for leg in range(len(order.LEGS))]
    found: defaultdict[tuple[int, str], set[tuple[int, int]]] = defaultdict(set)
    for leg, pair, begin, end in ends:
        own = ((begin == rank) | (end == rank)) & (begin != end)
        carries: list[bool] = np.isin(pair[own], moved).tolist()
        hops = {*zip(begin[own].tolist(), end[own].tolist(), carries, strict=True)}
        for a, b, of in hops:
            stream = order.stream_name(
                _LEGS[leg], a // ranks_per_node != b // ranks_per_node, order.TRAFFIC_CLASSES[of]
            )
            found[leg, stream].add((a, b))
    return tuple((_LEGS[leg], stream, frozenset(found[leg, stream])) for leg, stream in sorted(found))


def _direct(rows: Ints, rank: int, ranks_per_node: int) -> tuple[Part, ...]:
    src, dst = rows[:, Transfer.SRC], rows[:, Transfer.DST]
    own = ((src == rank) | (dst == rank)) & (src != dst)
    codes: list[int] = (((src << _BITS | dst) << 1) | order.is_moved(rows[:, Transfer.KIND]))[own].tolist()
    # a pair that moves anything is of the class that moves
    moves = {code >> 1: bool(code & 1) for code in sorted(set(codes))}
    found: defaultdict[str, set[tuple[int, int]]] = defaultdict(set)
    for code, of in moves.items():
        a, b = code >> _BITS, code & _MASK
        stream = order.stream_name("direct", a // ranks_per_node != b // ranks_per_node, order.TRAFFIC_CLASSES[of])
        found[stream].add((a, b))
    return tuple(("direct", stream, frozenset(found[stream])) for stream in sorted(found))


def issued(ranks: Sequence[CompiledRank], ranks_per_node: int, *, backward: bool) -> list[list[IssuedCall]]:
    """Group calls of every rank in one phase of a plan."""
    return [
        list(batches(ops, phase.steps, rank, ranks_per_node))
        for rank, (ops, phase) in enumerate(_phases_of(ranks, backward=backward))
    ]


def interleaved(
    nano_batches: Sequence[Sequence[CompiledRank]],
    segments: Sequence[NanoSegment],
    ranks_per_node: int,
    *,
    backward: bool,
    own_group: _OwnGroup = lambda _: True,
) -> list[list[IssuedCall]]:
    """Every rank's group calls in a pass of several plans, by segment (`compile.ping_pong`)."""
    made: list[list[IssuedCall]] = []
    for rank in range(len(nano_batches[0])):
        segment_calls: dict[tuple[int, str], list[IssuedCall]] = {}
        for nano_batch, ranks in enumerate(nano_batches):
            ops, (steps, (attend, end), _) = _phases_of(ranks[rank : rank + 1], backward=backward)[0]
            of = {"start": steps[:attend], "attend": steps[attend:end], "end": steps[end:]}
            for part, own in of.items():
                segment_calls[nano_batch, part] = list(batches(ops, own, rank, ranks_per_node, own_group))
        made.append([])
        for nano_batch, layer, part in segments:
            for batch in segment_calls.get((nano_batch, part), ()):
                made[-1].append(batch._replace(call=batch.call._replace(call=(layer, nano_batch))))
    return made


def _phases_of(ranks: Sequence[CompiledRank], *, backward: bool) -> list[tuple[Sequence[Op], PhaseOrder]]:
    """Ops of each rank in one phase, with the order of its steps."""
    return [
        (each.program.backward, each.backward) if backward else (each.program.forward, each.forward) for each in ranks
    ]


def verify_issue_order(calls: Sequence[Sequence[IssuedCall]]) -> None:
    """Prove that there is one order in which every rank issues its group calls; `calls`: by rank.
    Raises InvalidProgramError: names the ranks that wait for one another, and the exchanges; or a
    transfer that only one of its ranks issues.
    """
    # So any two ranks that share two calls issue them in one order, and if every call held its
    # ranks' hosts until all of them have come to it, all would go through.
    members: defaultdict[GroupCall, set[int]] = defaultdict(set)
    needed: defaultdict[GroupCall, set[int]] = defaultdict(set)
    for rank, own in enumerate(calls):
        for batch in own:
            if rank in members[batch.call]:
                raise InvalidProgramError(f"rank {rank} issues {batch.call} twice; a call is issued once")
            members[batch.call].add(rank)
            needed[batch.call] |= batch.ranks
    for call, ranks in needed.items():
        if ranks - members[call]:
            absent, present = min(ranks - members[call]), min(members[call])
            raise InvalidProgramError(
                f"{call}: rank {absent} takes part in what rank {present} issues, but issues nothing of it; expected "
                "the call on both"
            )
    at = [0] * len(calls)
    arrived: defaultdict[GroupCall, int] = defaultdict(int)
    for own in calls:
        if own:
            arrived[own[0].call] += 1
    ready = [call for call, count in arrived.items() if count == len(members[call])]
    while ready:
        call = ready.pop()
        for rank in members[call]:
            at[rank] += 1
            if at[rank] < len(calls[rank]):
                following = calls[rank][at[rank]].call
                arrived[following] += 1
                if arrived[following] == len(members[following]):
                    ready.append(following)
    if any(place < len(own) for place, own in zip(at, calls, strict=True)):
        raise InvalidProgramError(_circle(calls, at, members))


def _circle(calls: Sequence[Sequence[IssuedCall]], at: Sequence[int], members: dict[GroupCall, set[int]]) -> str:
    # Ranks that wait for one another: each stands in a call that another has not come to.
    rank = next(rank for rank, own in enumerate(calls) if at[rank] < len(own))
    path: list[int] = []
    while rank not in path:
        path.append(rank)
        call = calls[rank][at[rank]].call
        rank = min(other for other in members[call] if calls[other][at[other]].call != call)
    circle = path[path.index(rank) :]
    lines = [
        f"rank {one} is at {calls[one][at[one]].call}, which rank {other} issues after {calls[other][at[other]].call}"
        for one, other in zip(circle, [*circle[1:], circle[0]], strict=True)
    ]
    return "ranks issue their exchanges in different orders and would wait for one another:\n  " + "\n  ".join(lines)


# The lowered steps of a rank: each op once, nothing read before it is there.


# `compile.order` moves starts of exchanges to the front and their ends to the back. These checks
# read its result alone. A send takes what is there at its start, and what an exchange brings is
# there from its end on.
class _OpRegions(NamedTuple):
    """Regions of one kind that ops read, give or take: `op` [n], `rows` [n, 5] of `Region`."""

    op: Ints
    rows: Ints


class _PhaseTables(NamedTuple):
    """All rows of a rank's ops in one phase, below one another, and the op of each row.

    `moved` [n, Transfer.WIDTH] of exchanges; `pairs` [m, Pair.WIDTH] of launches, without what the
    mask hides, and whether they are of the backward.
    """

    moved: Ints
    moving_op: Ints
    pairs: Ints
    launching_op: Ints
    of_backward: Bools

    @classmethod
    def of(cls, ops: Sequence[Op], mask: Mask) -> "_PhaseTables":
        exchanges = [(at, op.transfers) for at, op in enumerate(ops) if isinstance(op, Exchange)]
        launches = [(at, op.pairs) for at, op in enumerate(ops) if isinstance(op, Attend | AttendGrad)]
        pairs, launching_op = numbered(launches, Pair.WIDTH)
        backward = np.array([isinstance(op, AttendGrad) for op in ops], dtype=bool)
        moved = numbered(exchanges, Transfer.WIDTH)
        return cls(*moved, trim_pairs(pairs, mask), launching_op, backward[launching_op])

    def moving(self, rank: int, kind: Kind, side: int) -> _OpRegions:
        # Rows that `rank` gives (`side` `Transfer.SRC`) or is brought (`Transfer.DST`).
        chosen = (self.moved[:, side] == rank) & (self.moved[:, Transfer.KIND] == kind)
        return _OpRegions(self.moving_op[chosen], self.moved[chosen, Transfer.REGION])

    def read(self, kind: Kind) -> _OpRegions:
        chosen = self.of_backward if kind == Kind.OUT_GRAD else np.ones_like(self.of_backward)
        return self._of_launches(chosen, Pair.KEY if kind == Kind.KV else Pair.QUERY)

    def launched(self, kind: Kind) -> _OpRegions:
        chosen = ~self.of_backward if kind == Kind.OUT else self.of_backward
        return self._of_launches(chosen, Pair.KEY if kind == Kind.KV_GRAD else Pair.QUERY)

    def _of_launches(self, chosen: Bools, columns: slice | tuple[int, ...]) -> _OpRegions:
        return _OpRegions(self.launching_op[chosen], self.pairs[chosen][:, columns])


def verify_steps(ops: Sequence[Op], steps: Sequence[order.Step], rank: int, mask: Mask) -> None:
    """Check the steps of one phase of `rank`: every exchange starts and ends once, every launch
    runs once, all after what they need and before what they must not see. Raises
    InvalidProgramError: they do not; names the ops.
    """
    begin, end = _times(ops, steps, rank)
    tables = _PhaseTables.of(ops, mask)
    for kind in Kind:
        there, given = tables.moving(rank, kind, Transfer.DST), tables.moving(rank, kind, Transfer.SRC)
        if kind in MOVED:
            there = _joined(there, tables.launched(kind))
            reads = given
        else:
            reads = _joined(given, tables.read(kind))
        source, reader = _pairs(there, reads)
        early = end[source] < begin[reader]
        # A reader needs what earlier ops leave. Copies stay, so later ones do not matter; what moves
        # is taken along, so what later ops leave must not be there yet.
        wrong = (early != (source < reader)) if kind in MOVED else ((source < reader) & ~early)
        if wrong.any():
            at = int(np.flatnonzero(wrong)[0])
            word = "without" if source[at] < reader[at] else "with"
            raise InvalidProgramError(
                f"rank {rank}: op {int(reader[at])} takes {kind.name} {word} "
                f"what op {int(source[at])} leaves; its step is {'before' if not early[at] else 'behind'} that one's"
            )


def _times(ops: Sequence[Op], steps: Sequence[order.Step], rank: int) -> tuple[Ints, Ints]:
    # By op, the step that takes what it needs, and the one from which on its results are there.
    times = np.full((2, len(ops)), -1)
    for at, step in enumerate(steps):
        op = ops[step.op]
        if isinstance(step, order.RunLaunches) == isinstance(op, Exchange):
            raise InvalidProgramError(f"rank {rank}: step {at} does not fit op {step.op}, {type(op).__name__}")
        for side, does in enumerate((not isinstance(step, order.Finish), not isinstance(step, order.Start))):
            if does and times[side, step.op] >= 0:
                raise InvalidProgramError(f"rank {rank}: op {step.op} has two steps {type(step).__name__}")
            if does:
                times[side, step.op] = at
    for index, op in enumerate(ops):
        needed = isinstance(op, Exchange | Attend | AttendGrad)
        if needed and not 0 <= times[0, index] <= times[1, index]:
            raise InvalidProgramError(f"rank {rank}: op {index} has no step, or ends before it starts")
    return times[0], times[1]


def _joined(one: _OpRegions, other: _OpRegions) -> _OpRegions:
    return _OpRegions(np.concatenate([one.op, other.op]), np.concatenate([one.rows, other.rows]))


def _pairs(there: _OpRegions, reads: _OpRegions) -> tuple[Ints, Ints]:
    # (op that leaves, op that reads) of every two different ones that share a token and a head.
    kept = there.rows[:, Region.START] < there.rows[:, Region.STOP]
    there = _OpRegions(there.op[kept], there.rows[kept])
    read, left = overlaps(reads.rows, there.rows)
    meet = there.rows[left, Region.HEAD_START] < reads.rows[read, Region.HEAD_STOP]
    meet &= there.rows[left, Region.HEAD_STOP] > reads.rows[read, Region.HEAD_START]
    source, reader = there.op[left[meet]], reads.op[read[meet]]
    other = source != reader
    return source[other], reader[other]


# In which no partial output travels.
_ALONE = frozenset({"ring", "waves"})


def provable(plan: MicrobatchPlan) -> bool:
    """Whether ranks of a plan can be proved one by one, but for some collectives."""
    return all(zone.pattern in _ALONE for zone in plan.zones)


# The program of a ring of G ranks has G x G launches, so its whole proof (`proof.runs`) takes G x G
# steps. One rank's part takes G, and if every rank proves its own, the whole is proved:
#
# * Order. Starts of a rank's exchanges rise by the key of `compile.order`, and two ranks that
#   share an exchange have the same key for it. So of all exchanges that have not met, the one with
#   the least key has all its ranks: nobody waits for ever.
# * What a rank is brought is what the other rank's program sends, row by row; that the sender has it
#   is part of the sender's own proof, from exchanges with smaller ids only.
# * Outputs and gradients of queries travel only when they are complete, so a rank that is brought one
#   may take it as such. Each is complete at its owner in the end, in one piece, and lies nowhere
#   else: so each query meets its keys at one rank, and that rank proves that it meets each of them
#   once.
# * Partial gradients of keys travel as they are. They are added up, handed on whole, and lie with
#   their owner alone in the end; so nothing of them is lost, and no part is in them twice.
#
# Where outputs travel before they are complete (`provable`), or collectives demand that ranks send
# or are sent the same, a rank cannot be proved alone.
def prove_rank(plan: MicrobatchPlan, rank: int, policy: Policy | None) -> None:
    """Prove the part of `rank` in a plan that is `provable`; if this holds of every rank, the plan
    holds. Raises InvalidProgramError: it does not hold; names the planner, the op or the ranks;
    NotAloneError: it uses a collective other than all_to_all.
    """
    verify_plan(plan)
    (proved,) = compile_ranks(plan, policy, target="proof", ranks=(rank,))
    (runs,) = compile_ranks(plan, policy, ranks=(rank,))
    peers = peers_of(runs.program)
    programs = dict(zip(peers, (each.program for each in compile_ranks(plan, policy, ranks=peers)), strict=True))
    verify_owned(plan, proved.program)
    verify_rank(proved.program, (plan.lengths, plan.num_heads, plan.num_kv_heads), plan.num_ranks, policy)
    for phase in ("forward", "backward"):
        ours = getattr(proved.program, phase)
        _check_same(rank, phase, ours, getattr(runs.program, phase))
    verify_routes(plan, runs.program)
    verify_peers(runs.program, programs)
    verify_own_steps(runs, plan, backward=policy is not None)


def verify_owned(plan: MicrobatchPlan, program: RankProgram) -> None:
    """Check that every token has one owner, and that the rank takes those that it owns. Raises
    InvalidProgramError: it does not, or some token has none or several.
    """
    table = layouts(plan)
    if len(misplaced(table, plan.lengths)) or len(np.unique(table[:, Placed.SEQ])) != len(plan.lengths):
        raise InvalidProgramError("layout: each token has exactly one owner, and some have none, or several")
    own = table[table[:, Placed.RANK] == program.rank][:, Placed.FRAGMENT]
    if own.tolist() != as_array(program.owned).tolist():
        raise InvalidProgramError(f"rank {program.rank} owns other tokens than in the layout of all ranks")


def peers_of(program: RankProgram) -> list[int]:
    """The ranks that a rank's exchanges name, without itself."""
    exchanges = [op for op in (*program.forward, *program.backward) if isinstance(op, Exchange)]
    ends = concat([op.transfers for op in exchanges], Transfer.WIDTH)[:, Transfer.ENDS]
    ways = concat([op.routes for op in exchanges], Route.WIDTH)[:, Route.STATIONS]
    groups = np.array(sorted({rank for op in exchanges for rank in op.group}), dtype=np.int64)
    named: list[int] = np.unique(np.concatenate([ends.ravel(), ways.ravel(), groups])).tolist()
    return [rank for rank in named if rank != program.rank]


def verify_peers(own: RankProgram, others: Mapping[int, RankProgram]) -> None:
    """Check that a rank and each of those that it exchanges with list the same transfers between
    them, in one order, on the same ways, and the same collectives and traffic classes.

    `others`: programs by rank, of all that `own` names. Raises InvalidProgramError: they do not; names
    two ranks and an exchange.
    """
    for phase in ("forward", "backward"):
        ours = _Listed.of(getattr(own, phase))
        for rank, other in others.items():
            mine, yours = ours.shared(rank), _Listed.of(getattr(other, phase)).shared(own.rank)
            odd = [_first_difference(one, two) for one, two in zip(mine[:2], yours[:2], strict=True)]
            odd += [at for at in sorted(mine[2] | yours[2]) if mine[2].get(at) != yours[2].get(at)]
            for at in odd:
                if at is not None:
                    raise InvalidProgramError(
                        f"ranks {own.rank} and {rank}: {phase} exchange {at} is not the same transfers, ways, "
                        "collective and traffic class on both"
                    )


class _Listed(NamedTuple):
    """All that a rank lists in one phase: `rows` [n] of (id, *`Transfer`), `routes` [m] of (id,
    *`Route`), and by id what the ranks of an exchange call it by: whether it moves, its collective
    and group.
    """

    rows: Ints
    routes: Ints
    calls: dict[int, tuple[bool, str, tuple[int, ...]]]

    @classmethod
    def of(cls, ops: Sequence[Op]) -> "_Listed":
        exchanges = [op for op in ops if isinstance(op, Exchange)]
        rows = _with_ids([(op.id, op.transfers) for op in exchanges], Transfer.WIDTH)
        routes = _with_ids([(op.id, op.routes) for op in exchanges], Route.WIDTH)
        moved = set(rows[order.is_moved(rows[:, 1 + Transfer.KIND]), 0].tolist())
        calls = {op.id: (op.moves or op.id in moved, op.collective, op.group) for op in exchanges}
        return cls(rows, routes, calls)

    def shared(self, rank: int) -> tuple[Ints, Ints, dict[int, tuple[bool, str, tuple[int, ...]]]]:
        # Rows by id and ends, routes, and calls that concern `rank`, too.
        way = self.routes[(self.routes[:, 1:][:, Route.STATIONS] == rank).any(axis=1)]
        ends = _ends(self.rows, (1 + Transfer.SRC, 1 + Transfer.DST))
        chosen = (self.rows[:, 1:][:, Transfer.ENDS] == rank).any(axis=1)
        chosen |= np.isin(ends, _ends(way, (1 + Route.SRC, 1 + Route.DST)))
        routes = self.routes[np.isin(_ends(self.routes, (1 + Route.SRC, 1 + Route.DST)), ends[chosen])]
        rows = self.rows[chosen]
        rows = rows[np.lexsort((rows[:, 1 + Transfer.DST], rows[:, 1 + Transfer.SRC], rows[:, 0]))]
        ids = set(rows[:, 0].tolist())
        calls = {at: call for at, call in self.calls.items() if at in ids or rank in call[2]}
        return rows, np.unique(routes, axis=0), calls


def _ends(rows: Ints, columns: tuple[int, int]) -> Ints:
    return rows[:, 0] << 2 * _BITS | rows[:, columns[0]] << _BITS | rows[:, columns[1]]


def _with_ids(tables: Sequence[tuple[int, Rows]], width: int) -> Ints:
    rows, ids = numbered(tables, width)
    return np.column_stack([ids, rows])


def _first_difference(mine: Ints, yours: Ints) -> int | None:
    # The id of the first exchange of which two tables have different rows; None: they are equal.
    if mine.shape == yours.shape and (mine == yours).all():
        return None
    for one, other in zip(mine.tolist(), yours.tolist(), strict=False):
        if one != other:
            return min(one[0], other[0])
    longer = mine if len(mine) > len(yours) else yours
    return int(longer[min(len(mine), len(yours)), 0])


def verify_own_steps(runs: CompiledRank, plan: MicrobatchPlan, *, backward: bool) -> None:
    """Check the steps of a rank: nothing is read before it is there, and exchanges start in the
    order that all ranks keep to. Raises InvalidProgramError: they are not; names the ops.
    """
    program = runs.program
    for ops, phase in ((program.forward, runs.forward), (program.backward, runs.backward))[: 1 + backward]:
        verify_steps(ops, phase.steps, program.rank, plan.mask)
        started = [ops[step.op] for step in phase.steps if isinstance(step, order.Start)]
        exchanges = [op for op in started if isinstance(op, Exchange)]
        carried = (order.is_moved(as_array(op.transfers)[:, Transfer.KIND]).any() for op in exchanges)
        moves = (op.moves or bool(moved) for op, moved in zip(exchanges, carried, strict=True))
        keys = [phase.issue.key(op.id, moved=moved) for op, moved in zip(exchanges, moves, strict=True)]
        for (one, before), (other, behind) in pairwise(zip(exchanges, keys, strict=True)):
            if before >= behind:
                raise InvalidProgramError(
                    f"rank {program.rank} starts exchange {one.id} before exchange {other.id}; in the order of all "
                    "ranks it comes behind it"
                )
