"""Zones to ops: where a plan's fragments lie, and what each rank does in one attention call.

Each comm pattern is one module with `place(zone, lengths, rank)`, `num_exchanges(zone)` and `project(zone, context, rank)`.
Over them lie the two layers that work for any plan: the remap (`compile.remap`) and the routing (`compile.route`). Nothing here builds
more than one rank's share (and, routed, what those of its node exchange with other nodes), except `expand`, which is for proofs and
pictures.
"""

from __future__ import annotations

from megatron_balance.compile.join import join
from megatron_balance.compile.projector import Projector
from megatron_balance.compile.transpose import Policy, transpose
from megatron_balance.ir.arrays import Ints
from megatron_balance.ir.plan import MicrobatchPlan
from megatron_balance.ir.program import Program, RankProgram
from megatron_balance.patterns import PATTERNS, CommPattern, pattern_of

__all__ = ["PATTERNS", "CommPattern", "attention_layout", "expand", "layout", "pattern_of", "project"]


def attention_layout(plan: MicrobatchPlan, rank: int) -> Ints:
    """Rows (seq, start, stop) int64 [n, 3]: the fragments that the zones place on `rank`, in order."""
    return Projector(plan).attention_layout(rank)


def layout(plan: MicrobatchPlan, rank: int) -> Ints:
    """Rows (seq, start, stop) int64 [n, 3]: the fragments of `rank` outside attention, in the order of its tokens."""
    return Projector(plan).layout(rank)


def project(plan: MicrobatchPlan, rank: int, *, replays: bool = True) -> RankProgram:
    """The forward ops of one rank, without building those of the others. `replays`: with what policy replay needs of it.

    Raises InvalidProgramError: an unknown comm pattern.
    """
    return Projector(plan, replays=replays).project(rank)


def expand(plan: MicrobatchPlan, policy: Policy | None = None) -> Program:
    """The whole program, from every rank's projection; with a policy, the backward too.

    Raises InvalidProgramError: the projections do not fit together.
    """
    projector = Projector(plan)
    ranks = [projector.project(rank) for rank in range(plan.num_ranks)]
    if policy is not None:
        ranks = [transpose(rank, policy) for rank in ranks]
    return join(ranks, plan.lengths, plan.num_heads, plan.num_kv_heads, policy)
