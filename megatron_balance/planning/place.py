"""Lift a planner that places microbatches to a planner of steps: whole or as nano-batches
(docs/adr/0013), stages each for itself or tick by tick (docs/adr/0014), with sequences that another
planner held back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import TypeAlias

from megatron_balance.analysis.estimate import best_first, estimate
from megatron_balance.analysis.machine import Machine
from megatron_balance.compile.halo import under
from megatron_balance.compile.ping_pong import NUM_NANO_BATCHES
from megatron_balance.cost.perturbed import on_cluster
from megatron_balance.errors import ConfigError, InfeasibleError, InvalidProgramError
from megatron_balance.ir.batch import Batch
from megatron_balance.ir.columns import Rows
from megatron_balance.ir.mask import CAUSAL, SlidingWindow
from megatron_balance.ir.model import Model
from megatron_balance.ir.plan import MicrobatchPlan
from megatron_balance.ir.step import EMPTY, Carry, Lengths, StepPlan, dealt, held_back
from megatron_balance.planners.base import JointStages, Planner, StepContext, renumbered
from megatron_balance.planning.layers import with_layers
from megatron_balance.planning.ticks import PlanOwned, plan_ticks, ticks
from megatron_balance.solvers.packing import join_late, nano_batches

# Of one microbatch: which of its sequences are in each nano-batch, ascending. One: it runs whole.
NanoBatches: TypeAlias = tuple[tuple[int, ...], ...]


def place_step(
    planner: Planner, lengths: Lengths, context: StepContext, carry: Carry, most_tokens: float
) -> tuple[StepPlan, Carry]:
    """`plan_step` of a planner that places one microbatch at a time.

    It carries nothing itself. Sequences that wait join the microbatches as dealt, of at most
    `most_tokens`: the longest first, each in the one with the fewest tokens. What finds no room waits
    on; training draws less then.

    Raises:
        InfeasibleError: also for one that waits and no microbatch can hold, or no step follows for.
    """
    if not carry.waiting:
        return _place(planner, lengths, context), EMPTY
    longest = max(length for _, length in carry.waiting)
    if longest > most_tokens:
        raise InfeasibleError(
            f"a sequence of {longest} tokens was held back, and a microbatch has at most {most_tokens:.0f}; raise "
            "tokens_per_rank, or use more ranks"
        )
    joined, _ = join_late(lengths, sorted(carry.waiting, key=lambda each: (-each[1], each[0])), most_tokens)
    inner = _place(planner, tuple(tuple(length for _, length in microbatch) for microbatch in joined), context)
    step = renumbered(inner, [number for number, _ in chain.from_iterable(joined)])
    waiting = held_back(step, lengths, carry.waiting)
    if waiting and not context.may_carry:
        raise InfeasibleError(
            f"{len(waiting)} sequences that were held back do not fit {len(lengths)} microbatches of "
            f"{most_tokens:.0f} tokens, and no step follows that takes them; raise tokens_per_rank"
        )
    return step, Carry(waiting=waiting)


def nano_batches_of(
    microbatches: Sequence[Sequence[int]], *, ping_pong: bool, aligned: bool = False
) -> list[NanoBatches]:
    """The nano-batches of each microbatch; one sequence alone makes no second half. `aligned`: as many
    of all, since their sequences meet in one attention call.
    """
    halved = [ping_pong and len(lengths) >= NUM_NANO_BATCHES for lengths in microbatches]
    if aligned:
        halved = [any(halved)] * len(halved)
    return [
        nano_batches(lengths) if both else (tuple(range(len(lengths))),)
        for lengths, both in zip(microbatches, halved, strict=True)
    ]


def _place(planner: Planner, lengths: Lengths, context: StepContext) -> StepPlan:
    members = dealt(lengths)
    pooled = tuple(chain.from_iterable(lengths))
    if planner.plan_batch is not None and context.own_microbatches:
        own = planner.plan_batch(Batch(pooled), context.cluster, context.model, context.cost, context.options)
        if not context.ping_pong:
            context = _of_microbatches(context, len(own.plans))
            plans = tuple(_layered(plan, context) for plan in own.plans)
            return _with_ticks(planner, replace(own, plans=plans), context)
        members = tuple(nano_batch for (nano_batch,) in own.members)
    context = _of_microbatches(context, len(members))
    microbatches = [[pooled[seq] for seq in seqs] for seqs in members]
    parts = nano_batches_of(microbatches, ping_pong=context.ping_pong, aligned=context.joint is not None)
    split = tuple(tuple(tuple(seqs[i] for i in part) for part in of) for seqs, of in zip(members, parts, strict=True))
    plans = tuple(
        _place_one(planner, Batch(tuple(pooled[seq] for seq in part)), context) for part in chain.from_iterable(split)
    )
    return _with_ticks(planner, StepPlan(split, plans), context)


def _of_microbatches(context: StepContext, number: int) -> StepContext:
    return context if context.memory is None else replace(context, memory=context.memory.of_microbatches(number))


def _place_one(planner: Planner, batch: Batch, context: StepContext) -> MicrobatchPlan:
    """The plan of one microbatch or nano-batch, layers included."""
    if planner.plan_by_others is not None:
        return planner.plan_by_others(batch, context)
    assert planner.plan is not None
    if planner.plan_in is not None:
        plan = planner.plan_in(batch, context)
    else:
        plan = planner.plan(batch, context.cluster, context.model, context.cost, context.options)
    if plan.lengths != batch.lengths:
        raise InvalidProgramError(
            f"planner {plan.planner} was given {batch.num_tokens} tokens in {len(batch.lengths)} sequences, and its "
            f"plan has {plan.num_tokens} in {len(plan.lengths)}; expected the same sequences"
        )
    return _layered(plan, context)


def _layered(plan: MicrobatchPlan, context: StepContext) -> MicrobatchPlan:
    cluster, cost, layers = context.cluster, context.cost, context.layers
    plan = _under(plan, context.model)
    made = with_layers(plan, cluster, cost, layers)
    if not made.moves or layers.remap_when != "pays":
        return made
    stays = with_layers(plan, cluster, cost, replace(layers, remap=False))
    machine = Machine(cluster, context.model, cost, memory=context.memory)
    return (made, stays)[best_first([estimate(each, machine) for each in (made, stays)])[0]]


def _under(plan: MicrobatchPlan, model: Model) -> MicrobatchPlan:
    if not isinstance(model.mask, SlidingWindow):
        return plan
    return under(replace(plan, mask=CAUSAL), model.mask)


def _with_ticks(planner: Planner, step: StepPlan, context: StepContext) -> StepPlan:
    if context.joint is None:
        return step
    num_stages = context.joint.cluster.num_ranks // context.cluster.num_ranks
    order = ticks(num_stages, len(step.members), context.joint.num_chunks, forward_only=context.forward_only)
    by_nano_batch = zip(*step.microbatches, strict=True)
    return replace(
        step,
        ticks=tuple(
            plan_ticks(order, plans, _joint_planner(planner, context, context.joint)) for plans in by_nano_batch
        ),
    )


def _joint_planner(planner: Planner, context: StepContext, joint: JointStages) -> PlanOwned:
    """Plan the attention of a tick; no remap, since every rank keeps its own stage's tokens."""
    plan_owned = planner.plan_owned
    if plan_owned is None:
        raise ConfigError("this planner plans the attention of each pipeline stage for itself")
    layers, cost = replace(context.layers, remap=False), on_cluster(context.cost, joint.cluster)

    def plan(lengths: tuple[int, ...], owned: Rows) -> MicrobatchPlan:
        owned_plan = plan_owned(lengths, owned, joint.cluster, context.model, cost, context.options)
        return with_layers(_under(owned_plan, context.model), joint.cluster, cost, layers)

    return plan
