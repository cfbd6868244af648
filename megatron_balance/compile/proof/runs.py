"""Prove a plan as it will run: its structure, its program, and that what each rank runs is what was
proved.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import numpy as np

from megatron_balance.compile.join import split
from megatron_balance.compile.pipeline import Projector, compile_ranks, expand
from megatron_balance.compile.proof.issued import issued, phases_of, verify_issue_order
from megatron_balance.compile.proof.meaning import verify
from megatron_balance.compile.proof.steps import verify_meeting, verify_steps
from megatron_balance.compile.proof.structure import verify_plan
from megatron_balance.errors import InvalidProgramError
from megatron_balance.ir.arrays import as_array, as_rows
from megatron_balance.ir.columns import Route, Rows, Transfer
from megatron_balance.ir.plan import MicrobatchPlan
from megatron_balance.ir.program import Exchange, Merge, Op, Policy, Program, RankProgram


# `compile.proof.meaning` proves one program of all ranks. Ranks run projections of their own,
# lowered to steps. Here both are held against each other, and the steps of all ranks against what
# the executor needs of them (`compile.proof.steps`, `compile.proof.issued`).
def prove(plan: MicrobatchPlan, policy: Policy | None, *, passing: bool = True) -> Program:
    """Prove a plan, forward and, with a policy, backward; its program. `passing`: as in
    `compile.issue_order`.

    Raises:
        InvalidProgramError: it does not hold; names the planner, the op or the ranks.
    """
    verify_plan(plan)
    program = expand(plan, policy)
    verify(program)
    verify_runs(plan, program, passing=passing)
    return program


def verify_runs(plan: MicrobatchPlan, program: Program, *, passing: bool = True) -> None:
    """Check that the ranks of a plan run `program`: the same ops with the same exchange ids, groups
    and proxies, in steps that no rank waits in for ever.

    Raises:
        InvalidProgramError: they do not; names the rank and the op.
    """
    verify_routes(plan, program)
    ranks = compile_ranks(plan, cast("Policy | None", program.policy), passing=passing)
    for rank, (compiled, proved) in enumerate(zip(ranks, split(program), strict=True)):
        if proved.owned != compiled.program.owned:
            raise InvalidProgramError(f"rank {rank} owns other tokens than in the program that was proved")
        check_same(rank, "forward", proved.forward, compiled.program.forward)
        check_same(rank, "backward", proved.backward, compiled.program.backward)
    for backward in (False, True) if program.policy else (False,):
        lowered = [(ops, phase.steps) for ops, phase in phases_of(ranks, backward=backward)]
        for rank, (ops, steps) in enumerate(lowered):
            verify_steps(ops, steps, rank, plan.mask)
        verify_meeting(lowered)
        verify_issue_order(issued(ranks, plan.ranks_per_node, backward=backward))


def check_same(rank: int, phase: str, proved: Sequence[Op], runs: Sequence[Op]) -> None:
    """Reject a difference between what was proved and what a rank runs."""
    # Rows of an exchange may come in another order, but for those between two ranks; gradients are
    # merged where they arrive.
    one = [op for op in proved if phase == "forward" or not isinstance(op, Merge)]
    other = runs
    for at, (ours, theirs) in enumerate(zip(one, other, strict=False)):
        if ours != theirs and _in_order(ours) != _in_order(theirs):
            raise InvalidProgramError(
                f"rank {rank}: {phase} op {at} that runs is not the one that was proved: expected {ours!r:.160}, got "
                f"{theirs!r:.160}"
            )
    if len(one) != len(other):
        raise InvalidProgramError(f"rank {rank}: {phase}: {len(one)} ops were proved, {len(other)} run")


def _in_order(op: Op) -> Op:
    if not isinstance(op, Exchange):
        return op
    rows = as_array(op.transfers)
    order = np.lexsort((rows[:, Transfer.DST], rows[:, Transfer.SRC]))
    return replace(op, transfers=as_rows(rows[order]), routes=Rows.of(Route.WIDTH, sorted(op.routes)))


def verify_routes(plan: MicrobatchPlan, program: Program | RankProgram) -> None:
    """Check the proxies of a program, or of one rank's part in it, against the plan's routing
    (Zeppelin, section 3.3), worked out here anew.

    Raises:
        InvalidProgramError: a transfer that goes another way than the plan says; names its ends.
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
