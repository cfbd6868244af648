"""The passes from a plan to the program of each rank, as one named list.

`PASSES` is the only place where their order is written. The executor (`runtime.bind`), the
simulator, `verify` and `reference` all compile through it, so they agree on the ops and on their
order.

| pass | adds |
|---|---|
| project | the ops of the zones, from their comm patterns, in the attention layout |
| remap | the exchanges between the linear and the attention layout (Zeppelin, section 3.4) |
| route | proxies for transfers between nodes (Zeppelin, section 3.3) |
| transpose | the backward ops |
| order | the order of steps (`compile.order`), exchanges in one order on all ranks
  (`compile.order`), and the bounds of segments (`compile.ping_pong`) |

Each pass does nothing where a plan or a target does not ask for it. A target is what the program is
for:

* "proof": all ops, for `verify`, `reference` and people. There is no order of steps: the program is
  one global order.
* "execution": steps in order. There are no gradient merges: launches and receives add to what is
  already there.

The program is valid after each pass: a callback of `expand` sees it, to print (`ir.text`) or prove
it (`compile.proof`).
Only `expand` builds more than one rank's program (and, routed, what those of its node exchange with
other nodes).
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, chain, islice
from typing import Literal, NamedTuple, TypeAlias

import numpy as np

from megatron_balance.compile.join import join
from megatron_balance.compile.order import PASSING, IssueOrder, IssueOrders, Step, issue_orders, order
from megatron_balance.compile.ping_pong import Cuts, cut_segments
from megatron_balance.compile.remap import RemapMerge, remap
from megatron_balance.compile.route import Nics, Passing, route
from megatron_balance.compile.transpose import Policy, transpose
from megatron_balance.ir.arrays import Ints, as_array, as_rows
from megatron_balance.ir.columns import Fragment, Rows, Transfer
from megatron_balance.ir.plan import REMAP, MicrobatchPlan
from megatron_balance.ir.program import Exchange, Op, Program, RankProgram
from megatron_balance.patterns import pattern_of
from megatron_balance.patterns.base import Context, ZoneProgram

Target: TypeAlias = Literal["proof", "execution"]
PhaseName: TypeAlias = Literal["forward", "backward"]
BOTH_PHASES: tuple[PhaseName, PhaseName] = ("forward", "backward")


class PhaseOrder(NamedTuple):
    """Steps of one phase of a rank, as `compile.order` has them.

    `cuts`: the boundaries of its segments; `issue`: the order of the exchanges of all ranks.
    """

    steps: tuple[Step, ...]
    cuts: Cuts
    issue: IssueOrder


_NO_ORDER = PhaseOrder((), Cuts(0, 0), PASSING)
_OF_NO_PLAN = IssueOrders(PASSING, PASSING)


class Projector:
    """A plan with what has been worked out for some of its ranks.

    `replays`: whether programs say what a replayed backward brings again.
    """

    def __init__(self, plan: MicrobatchPlan, *, replays: bool = True) -> None:
        self.plan, self.replays = plan, replays
        self.context = Context.of(plan)
        self.counts = [pattern_of(zone).num_exchanges(zone) for zone in plan.zones]
        self.ends = list(accumulate(self.counts))
        self.total = sum(self.counts)
        self._merge: tuple[tuple[int, ...], RemapMerge] | None = None
        self._sent: tuple[range, dict[tuple[int, int], Passing]] = (range(0), {})

    @cached_property
    def _members(self) -> tuple[Ints, Ints]:
        # Zones by member rank, and where those of each rank begin. Looked up: a plan may have a
        # zone for each rank.
        ranks = [pattern_of(zone).ranks(zone, self.plan.num_ranks) for zone in self.plan.zones]
        sizes = np.array([len(members) for members in ranks], dtype=np.int64)
        members = np.fromiter(chain.from_iterable(ranks), np.int64, int(sizes.sum()))
        order = np.argsort(members, kind="stable")
        zones = np.repeat(np.arange(len(ranks)), sizes)[order]
        return zones, np.searchsorted(members[order], np.arange(self.plan.num_ranks + 1))

    def zones(self, rank: int) -> list[int]:
        # Indices of the zones that `rank` takes part in.
        zones, begin = self._members
        return zones[begin[rank] : begin[rank + 1]].tolist()

    def attention_layout(self, rank: int) -> Ints:
        # Rows (seq, start, stop): the fragments that the zones place on `rank`, in order.
        zones = [self.plan.zones[index] for index in self.zones(rank)]
        placed = (pattern_of(zone).place(zone, self.context.lengths, rank) for zone in zones)
        return np.concatenate([np.empty((0, Fragment.WIDTH), dtype=np.int64), *placed])

    def layout(self, rank: int) -> Ints:
        # Rows (seq, start, stop): the fragments of `rank` outside attention, in order.
        return self.remap_merge([rank]).linear(rank) if self.plan.moves else self.attention_layout(rank)

    def node(self, rank: int) -> range:
        first = rank - rank % self.plan.ranks_per_node
        return range(first, min(first + self.plan.ranks_per_node, self.plan.num_ranks))

    def remap_merge(self, ranks: Sequence[int]) -> RemapMerge:
        # The remap as `ranks` know it; kept until others are asked about, since a node's ranks ask
        # in turn.
        asked = tuple(ranks)
        if self._merge is None or self._merge[0] != asked:
            self._merge = asked, RemapMerge(self.plan, ranks, [self.zones(rank) for rank in ranks])
        return self._merge[1]

    # Attention

    def _zone_program(self, index: int, rank: int, *, attends: bool = True) -> ZoneProgram:
        zone, base = self.plan.zones[index], self.ends[index] - self.counts[index]
        context = replace(self.context, base=base, attends=attends, replays=self.replays)
        return pattern_of(zone).project(zone, context, rank)

    def attention(self, rank: int) -> RankProgram:
        ops: list[Op] = []
        replays: list[tuple[int, Exchange]] = []
        queues: list[tuple[str, int]] = []
        for index in self.zones(rank):
            part = self._zone_program(index, rank)
            ops += part.ops
            replays += part.replays
            queues.append((self.plan.zones[index].name, len(part.ops)))
        owned = as_rows(self.attention_layout(rank))
        return RankProgram(rank, owned, tuple(ops), self.total, replays=tuple(replays), queues=tuple(queues))

    def _opens(self, index: int, number: int) -> bool:
        # Whether `number` is of the first exchange of zone `index`, of which a remap makes a part.
        first = self.ends[index] - self.counts[index]
        return number == first and pattern_of(self.plan.zones[index]).merges_remap

    def without_hops(self, program: RankProgram, remap_merge: RemapMerge) -> RankProgram:
        # `program` without the first hops that the owner of what is remote makes instead.
        forward: list[Op] = []
        queues: list[tuple[str, int]] = []
        ops = iter(program.forward)
        for index, (name, count) in zip(self.zones(program.rank), program.queues, strict=True):
            before = len(forward)
            for op in islice(ops, count):
                if isinstance(op, Exchange) and self._opens(index, op.id):
                    stay = remap_merge.stays(as_array(op.transfers))
                    forward += [replace(op, transfers=as_rows(stay))] if len(stay) else []
                else:
                    forward.append(op)
            queues.append((name, len(forward) - before))
        return replace(program, forward=tuple(forward), queues=tuple(queues))

    # The routing

    def routed_ids(self) -> frozenset[int]:
        assert self.plan.routing is not None
        remap_in = 1 if self.plan.moves else 0
        ids: set[int] = set()
        for index in self.plan.routing.zones:
            if index != REMAP:
                ids.update(range(remap_in + self.ends[index] - self.counts[index], remap_in + self.ends[index]))
            elif remap_in:
                ids.update((0, remap_in + self.total))
        return frozenset(ids)

    def passing(self, rank: int, remap_merge: RemapMerge | None) -> Passing:
        # Transfers of the other ranks of its node with other nodes, where these are routed.
        assert self.plan.routing is not None
        forward: list[tuple[int, Ints]] = []
        replays: list[tuple[int, Ints]] = []
        remap_in = 0 if remap_merge is None else 1
        routed = set(self.plan.routing.zones)
        for other in self.node(rank):
            for index in self.zones(other) if other != rank else ():
                zone = self.plan.zones[index]
                if index in routed and pattern_of(zone).reaches_out(zone, other, self.plan.ranks_per_node):
                    sent = self._between_nodes(index, other)
                    forward += [(at + remap_in, self._left(index, at, rows, remap_merge)) for at, rows in sent.forward]
                    replays += [(at + remap_in, rows) for at, rows in sent.replays]
        if remap_merge is not None and REMAP in routed:
            ends = remap_merge.ends()
            forward += [(0, ends.inputs), (1 + self.total, ends.outputs)]
            replays.append((0, ends.again))
        return Passing(forward, replays if self.replays else ())

    def _left(self, index: int, at: int, rows: Ints, remap_merge: RemapMerge | None) -> Ints:
        # `rows` of exchange `at` in zone `index` without those that the remap makes instead.
        return remap_merge.stays(rows) if remap_merge is not None and self._opens(index, at) else rows

    def _between_nodes(self, index: int, rank: int) -> Passing:
        # Transfers of `rank` with other nodes in zone `index`, by the exchanges' ids in the zones
        # alone. Kept for one node, whose ranks ask for one another's.
        node, kept = self._sent
        if rank not in node:
            node, kept = self._sent = self.node(rank), {}
        if (index, rank) not in kept:
            part = self._zone_program(index, rank, attends=False)
            kept[index, rank] = Passing(
                [(op.id, self._crossing(op)) for op in part.ops if isinstance(op, Exchange)],
                [(at, self._crossing(op)) for at, op in part.replays],
            )
        return kept[index, rank]

    def _crossing(self, exchange: Exchange) -> Ints:
        rows = as_array(exchange.transfers)
        src_node, dst_node = (rows[:, Transfer.ENDS] // self.plan.ranks_per_node).T
        return rows[src_node != dst_node]


@dataclass(frozen=True)
class _Job:
    """A plan and what it is compiled for: the facts that the passes of all ranks share.

    `policy`: of the backward; None: forward only. `phases`: those that will run. `replays`: whether
    the forward programs say what a replayed backward brings again. `passing`: as in
    `compile.order`.
    """

    plan: MicrobatchPlan
    policy: Policy | None
    target: Target
    phases: Collection[PhaseName]
    replays: bool
    passing: bool = True

    @property
    def backward_policy(self) -> Policy | None:
        """The policy if there will be a backward."""
        return self.policy if "backward" in self.phases else None

    @cached_property
    def projector(self) -> Projector:
        return Projector(self.plan, replays=self.replays)

    @cached_property
    def issue(self) -> IssueOrders:
        return issue_orders(self.plan, self.policy or "keep", passing=self.passing)


@dataclass(frozen=True)
class CompiledRank:
    """A rank's program, and its phases' orders: no steps before the pass `order`, or in proofs."""

    program: RankProgram
    forward: PhaseOrder = _NO_ORDER
    backward: PhaseOrder = _NO_ORDER
    remap_merge: RemapMerge | None = None
    """The remap among the ranks that this one must know of, from the pass `remap` on."""


class Pass(NamedTuple):
    """One pass; `apply` makes a rank's program of what the passes before made of it."""

    name: str
    apply: Callable[[_Job, CompiledRank], CompiledRank]


def _project(job: _Job, compiled: CompiledRank) -> CompiledRank:
    program = job.projector.attention(compiled.program.rank)
    return replace(compiled, program=replace(program, mask=job.plan.mask))


def _remap(job: _Job, compiled: CompiledRank) -> CompiledRank:
    projector, rank = job.projector, compiled.program.rank
    if not job.plan.moves:
        return compiled
    # Routing serves the whole node.
    merge = projector.remap_merge((rank,) if job.plan.routing is None else projector.node(rank))
    program = remap(projector.without_hops(compiled.program, merge), merge)
    return CompiledRank(program if job.replays else replace(program, replays=()), remap_merge=merge)


def _route(job: _Job, compiled: CompiledRank) -> CompiledRank:
    routing, projector = job.plan.routing, job.projector
    if routing is None:
        return compiled
    nics = Nics(job.plan.ranks_per_node, routing.ranks_per_nic, routing.min_tokens, routing.pieces)
    passing = projector.passing(compiled.program.rank, compiled.remap_merge)
    return replace(compiled, program=route(compiled.program, passing, projector.routed_ids(), nics))


def _transpose(job: _Job, compiled: CompiledRank) -> CompiledRank:
    if job.backward_policy is None:
        return compiled
    merges = job.target == "proof"
    return replace(compiled, program=transpose(compiled.program, job.backward_policy, merges=merges))


def _order(job: _Job, compiled: CompiledRank) -> CompiledRank:
    return compiled if job.target != "execution" else in_order(compiled.program, job.issue, job.phases)


def in_order(
    program: RankProgram, issue: IssueOrders = _OF_NO_PLAN, phases: Collection[PhaseName] = BOTH_PHASES
) -> CompiledRank:
    """`program` with its steps in order: the pass `order`, also for programs that are no plan's."""

    def ordered(phase: PhaseName, ops: tuple[Op, ...], issue: IssueOrder) -> PhaseOrder:
        steps = order(ops, program.rank, program.mask, issue) if phase in phases else ()
        return PhaseOrder(steps, cut_segments(ops, steps, issue.first), issue)

    return CompiledRank(
        program,
        ordered("forward", program.forward, issue.forward),
        ordered("backward", program.backward, issue.backward),
    )


PASSES: tuple[Pass, ...] = (
    Pass("project", _project),
    Pass("remap", _remap),
    Pass("route", _route),
    Pass("transpose", _transpose),
    Pass("order", _order),
)
# The first pass whose work depends on the policy of the backward.
_OF_A_POLICY = [step.name for step in PASSES].index("transpose")


def compile_policies(
    plan: MicrobatchPlan,
    rank: int,
    policies: Sequence[Policy],
    *,
    phases: Collection[PhaseName] = BOTH_PHASES,
    passing: bool = True,
) -> list[CompiledRank]:
    """One rank's program for execution by each policy of the backward; `phases`: those that will run.

    Raises InvalidProgramError: an unknown comm pattern.
    """
    # What a replayed backward needs of the forward is there to be left out, not the other way.
    most: Policy = "replay" if "replay" in policies else "keep"
    job = _job(plan, most, "execution", phases, passing=passing)
    shared = _start(job, rank)
    for step in PASSES[:_OF_A_POLICY]:
        shared = step.apply(job, shared)
    compiled: list[CompiledRank] = []
    for policy in policies:
        own = _job(plan, policy, "execution", phases, passing=passing)
        one = shared if own.replays else replace(shared, program=replace(shared.program, replays=()))
        for step in PASSES[_OF_A_POLICY:]:
            one = step.apply(own, one)
        compiled.append(one)
    return compiled


def compile_ranks(
    plan: MicrobatchPlan,
    policy: Policy | None,
    *,
    target: Target = "execution",
    passing: bool = True,
    ranks: Iterable[int] | None = None,
) -> list[CompiledRank]:
    """The programs of some ranks; None: of every one, in order.

    `policy`: of the backward; None: forward only. `passing`: whether copied exchanges may pass moved
    ones (`compile.order`).

    Raises InvalidProgramError: an unknown comm pattern.
    """
    job = _job(plan, policy, target, BOTH_PHASES, passing=passing)
    return [_compile(job, rank) for rank in (range(plan.num_ranks) if ranks is None else ranks)]


def expand(
    plan: MicrobatchPlan, policy: Policy | None = None, after: Callable[[Pass, Program], None] | None = None
) -> Program:
    """The whole program, for proofs and pictures; with a policy, the backward too.

    `after`: called with each pass and the whole program after it, which `verify` accepts.

    Raises InvalidProgramError: an unknown comm pattern, or projections that do not fit together.
    """
    job = _job(plan, policy, "proof", BOTH_PHASES)

    def whole(programs: list[RankProgram], policy: Policy | None) -> Program:
        return join(programs, plan.lengths, plan.num_heads, plan.num_kv_heads, policy)

    if after is None:
        return whole([_compile(job, rank).program for rank in range(plan.num_ranks)], policy)
    ranks = [_start(job, rank) for rank in range(plan.num_ranks)]
    for step in PASSES:
        ranks = [step.apply(job, compiled) for compiled in ranks]
        programs = [compiled.program for compiled in ranks]
        after(step, whole(programs, policy if any(program.backward for program in programs) else None))
    return whole([compiled.program for compiled in ranks], policy)


def project(plan: MicrobatchPlan, rank: int, *, replays: bool = True) -> RankProgram:
    """The forward ops of one rank. `replays`: with what policy replay needs of it."""
    return _compile(_Job(plan, None, "proof", BOTH_PHASES, replays), rank).program


def layout(plan: MicrobatchPlan, rank: int) -> Ints:
    """`Fragment` rows: the fragments of `rank` outside attention, in the order of its tokens."""
    return Projector(plan).layout(rank)


def _job(
    plan: MicrobatchPlan, policy: Policy | None, target: Target, phases: Collection[PhaseName], *, passing: bool = True
) -> _Job:
    return _Job(plan, policy, target, phases, replays=policy == "replay" and "backward" in phases, passing=passing)


def _start(job: _Job, rank: int) -> CompiledRank:
    return CompiledRank(RankProgram(rank, Rows(Fragment.WIDTH), (), 0, mask=job.plan.mask))


def _compile(job: _Job, rank: int) -> CompiledRank:
    compiled = _start(job, rank)
    for step in PASSES:
        compiled = step.apply(job, compiled)
    return compiled
