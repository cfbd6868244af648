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
| merge_gradients | Merge ops of the backward |
| order | the order of steps (`compile.order`), exchanges in one order on all ranks
  (`compile.issue_order`), and the bounds of segments (`compile.ping_pong`) |

Each pass does nothing where a plan or a target does not ask for it. A target is what the program is
for:

* "proof": all ops, for `verify`, `reference` and people. There is no order of steps: the program is
  one global order.
* "execution": steps in order. There are no gradient merges: launches and receives add to what is
  already there.

A callback sees the program after each pass, to print (`ir.text`) or prove it (`compile.proof`).
Only `expand` builds more than one rank's program (and, routed, what those of its node exchange with
other nodes).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple, TypeAlias

from megatron_balance.compile import remap, route
from megatron_balance.compile.issue_order import PASSING, IssueOrder, IssueOrders, issue_orders
from megatron_balance.compile.join import join
from megatron_balance.compile.order import Step, order
from megatron_balance.compile.ping_pong import Cuts, cut_segments
from megatron_balance.compile.projector import Projector
from megatron_balance.compile.remap_merge import RemapMerge
from megatron_balance.compile.route import Nics
from megatron_balance.compile.transpose import Policy, merge_gradients, transpose
from megatron_balance.ir.arrays import Ints
from megatron_balance.ir.columns import Fragment, Transfer
from megatron_balance.ir.plan import MicrobatchPlan
from megatron_balance.ir.program import Op, Program, RankProgram
from megatron_balance.ir.rows import Rows
from megatron_balance.patterns import PATTERNS, CommPattern, pattern_of

__all__ = [
    "PASSES",
    "PATTERNS",
    "CommPattern",
    "CompiledRank",
    "Pass",
    "PhaseOrder",
    "attention_layout",
    "compile_policies",
    "compile_rank",
    "compile_ranks",
    "expand",
    "in_order",
    "layout",
    "pattern_of",
    "project",
]

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


@dataclass(frozen=True)
class Job:
    """A plan and what it is compiled for: the facts that the passes of all ranks share.

    `policy`: of the backward; None: forward only. `phases`: those that will run. `replays`: whether
    the forward programs say what a replayed backward brings again. `passing`: as in
    `compile.issue_order`.
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
    """A rank's program, and the orders of its phases (without steps before the pass `order`, or
    where the target has none).
    """

    program: RankProgram
    forward: PhaseOrder = _NO_ORDER
    backward: PhaseOrder = _NO_ORDER
    remap_merge: RemapMerge | None = None
    """The remap among the ranks that this one must know of, from the pass `remap` on."""


class Pass(NamedTuple):
    """One pass. `complete`: whether the programs of all ranks after it are one that `verify`
    accepts.
    """

    name: str
    run: Callable[[Job, CompiledRank], CompiledRank]
    complete: bool = True


def _project(job: Job, compiled: CompiledRank) -> CompiledRank:
    program = job.projector.attention(compiled.program.rank)
    return replace(compiled, program=replace(program, mask=job.plan.mask))


def _remap(job: Job, compiled: CompiledRank) -> CompiledRank:
    plan, projector, rank = job.plan, job.projector, compiled.program.rank
    if not plan.moves:
        return compiled
    around = range(rank, rank + 1) if plan.routing is None else projector.node(rank)  # routing serves the whole node
    merge = projector.remap_merge(around)
    sent_on = remap.SentOn(*(rows[(rows[:, Transfer.ENDS] == rank).any(axis=1)] for rows in merge.sent_on))
    heads = (plan.num_heads, plan.num_kv_heads)
    program = remap.remap(
        projector.without_hops(compiled.program, merge), merge.linear(rank), merge.own(rank), heads, sent_on
    )
    return CompiledRank(program if job.replays else replace(program, replays=()), remap_merge=merge)


def _route(job: Job, compiled: CompiledRank) -> CompiledRank:
    routing, projector = job.plan.routing, job.projector
    if routing is None:
        return compiled
    nics = Nics(job.plan.ranks_per_node, routing.ranks_per_nic, routing.min_tokens, routing.pieces)
    passing = projector.passing(compiled.program.rank, compiled.remap_merge)
    return replace(compiled, program=route.route(compiled.program, passing, projector.routed_ids(), nics))


def _transpose(job: Job, compiled: CompiledRank) -> CompiledRank:
    if job.backward_policy is None:
        return compiled
    return replace(compiled, program=transpose(compiled.program, job.backward_policy, merges=False))


def _merge_gradients(job: Job, compiled: CompiledRank) -> CompiledRank:
    if job.target != "proof" or job.backward_policy is None:
        return compiled
    return replace(compiled, program=merge_gradients(compiled.program))


def _order(job: Job, compiled: CompiledRank) -> CompiledRank:
    return compiled if job.target != "execution" else in_order(compiled.program, job.issue, job.phases)


def in_order(
    program: RankProgram,
    issue: IssueOrders = _OF_NO_PLAN,
    phases: Collection[PhaseName] = BOTH_PHASES,
) -> CompiledRank:
    """`program` with its steps in order: the pass `order`, also for programs that are no plan's
    (from text, say).
    """

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
    Pass("transpose", _transpose, complete=False),
    Pass("merge_gradients", _merge_gradients),
    Pass("order", _order),
)
_OF_A_POLICY = [step.name for step in PASSES].index("transpose")
"""The first pass whose work depends on the policy of the backward."""


def compile_rank(  # noqa: PLR0913  what it is compiled for is four keyword-only facts, each with a default
    plan: MicrobatchPlan,
    rank: int,
    policy: Policy | None,
    *,
    target: Target = "execution",
    phases: Collection[PhaseName] = BOTH_PHASES,
    passing: bool = True,
    after: Callable[[str, RankProgram], None] | None = None,
) -> CompiledRank:
    """Compile one rank's program, without building those of the others.

    `policy`: of the backward; None: forward only. `phases`: those that will run. `passing`: whether
    copied exchanges may pass moved ones (`compile.issue_order`). `after`: called with the name of
    each pass and the program after it.

    Raises InvalidProgramError: an unknown comm pattern.
    """
    return _compile(_job(plan, policy, target, phases, passing=passing), rank, after)


def compile_policies(
    plan: MicrobatchPlan,
    rank: int,
    policies: Sequence[Policy],
    *,
    phases: Collection[PhaseName] = BOTH_PHASES,
    passing: bool = True,
) -> list[CompiledRank]:
    """`compile_rank` by each policy; what they have in common is compiled once."""
    if len(policies) == 1:
        return [compile_rank(plan, rank, policies[0], phases=phases, passing=passing)]
    job = _job(plan, "replay", "execution", phases, passing=passing)
    shared = _start(job, rank)
    for step in PASSES[:_OF_A_POLICY]:
        shared = step.run(job, shared)
    compiled: list[CompiledRank] = []
    for policy in policies:
        own = _job(plan, policy, "execution", phases, passing=passing)
        one = shared if own.replays else replace(shared, program=replace(shared.program, replays=()))
        for step in PASSES[_OF_A_POLICY:]:
            one = step.run(own, one)
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
    """`compile_rank` of some ranks; None: of every one, in order."""
    job = _job(plan, policy, target, BOTH_PHASES, passing=passing)
    return [_compile(job, rank) for rank in (range(plan.num_ranks) if ranks is None else ranks)]


def expand(
    plan: MicrobatchPlan, policy: Policy | None = None, after: Callable[[Pass, Program], None] | None = None
) -> Program:
    """The whole program, for proofs and pictures; with a policy, the backward too.

    `after`: called with each pass and the whole program after it; `verify` accepts it where the
    pass is `complete`.

    Raises InvalidProgramError: an unknown comm pattern, or projections that do not fit together.
    """
    job = _job(plan, policy, "proof", BOTH_PHASES)

    def whole(programs: list[RankProgram], policy: Policy | None) -> Program:
        return join(programs, plan.lengths, plan.num_heads, plan.num_kv_heads, policy)

    if after is None:
        return whole([_compile(job, rank).program for rank in range(plan.num_ranks)], policy)
    ranks = [_start(job, rank) for rank in range(plan.num_ranks)]
    for step in PASSES:
        ranks = [step.run(job, compiled) for compiled in ranks]
        programs = [compiled.program for compiled in ranks]
        after(step, whole(programs, policy if any(program.backward for program in programs) else None))
    return whole([compiled.program for compiled in ranks], policy)


def project(plan: MicrobatchPlan, rank: int, *, replays: bool = True) -> RankProgram:
    """The forward ops of one rank. `replays`: with what policy replay needs of it.

    Raises InvalidProgramError: an unknown comm pattern.
    """
    return _compile(Job(plan, None, "proof", BOTH_PHASES, replays), rank).program


def attention_layout(plan: MicrobatchPlan, rank: int) -> Ints:
    """`Fragment` rows: what the zones place on `rank`, in order."""
    return Projector(plan).attention_layout(rank)


def layout(plan: MicrobatchPlan, rank: int) -> Ints:
    """`Fragment` rows: the fragments of `rank` outside attention, in the order of its tokens."""
    return Projector(plan).layout(rank)


def _job(
    plan: MicrobatchPlan, policy: Policy | None, target: Target, phases: Collection[PhaseName], *, passing: bool = True
) -> Job:
    return Job(plan, policy, target, phases, replays=policy == "replay" and "backward" in phases, passing=passing)


def _start(job: Job, rank: int) -> CompiledRank:
    return CompiledRank(RankProgram(rank, Rows(Fragment.WIDTH), (), 0, mask=job.plan.mask))


def _compile(job: Job, rank: int, after: Callable[[str, RankProgram], None] | None = None) -> CompiledRank:
    compiled = _start(job, rank)
    for step in PASSES:
        compiled = step.run(job, compiled)
        if after is not None:
            after(step.name, compiled.program)
    return compiled
