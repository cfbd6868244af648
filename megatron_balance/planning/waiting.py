"""Train sequences that another planner held back by a planner that knows nothing of them."""

from __future__ import annotations

from itertools import chain

from megatron_balance.errors import InfeasibleError
from megatron_balance.ir.step import EMPTY, Carry, Lengths, StepPlan, held_back
from megatron_balance.planners.base import PlanStep, StepContext


def with_waiting(plan_step: PlanStep, most_tokens: float) -> PlanStep:
    """`plan_step` of a planner that carries nothing, with the sequences that wait before each step.

    They join the microbatches as dealt: the longest first, each in the one with the fewest tokens.
    What finds no room waits on; training draws less then.

    Args:
        plan_step: of that planner.
        most_tokens: that a microbatch may have.
    """

    def plan(lengths: Lengths, context: StepContext, carry: Carry, /) -> tuple[StepPlan, Carry]:
        if not carry.waiting:
            return plan_step(lengths, context, EMPTY)
        longest = max(length for _, length in carry.waiting)
        if longest > most_tokens:
            raise InfeasibleError(
                f"a sequence of {longest} tokens was held back, and a microbatch has at most {most_tokens:.0f}; raise "
                "tokens_per_rank, or use more ranks"
            )
        tokens = [sum(microbatch) for microbatch in lengths]
        joined: list[list[tuple[int, int]]] = []
        first = 0
        for microbatch in lengths:
            joined.append([(first + at, length) for at, length in enumerate(microbatch)])
            first += len(microbatch)
        for number, length in sorted(carry.waiting, key=lambda each: (-each[1], each[0])):
            m = min(range(len(tokens)), key=tokens.__getitem__)
            if tokens[m] + length <= most_tokens:
                tokens[m] += length
                joined[m].append((number, length))
        numbers = [number for microbatch in joined for number, _ in microbatch]
        inner, _ = plan_step(tuple(tuple(n for _, n in microbatch) for microbatch in joined), context, EMPTY)
        members = tuple(
            tuple(tuple(numbers[seq] for seq in part) for part in microbatch) for microbatch in inner.members
        )
        step = StepPlan(members, inner.plans, inner.ticks)
        waiting = held_back(step, lengths, carry.waiting)
        if waiting and not context.may_carry:
            raise InfeasibleError(
                f"{len(waiting)} sequences that were held back do not fit {len(lengths)} microbatches of "
                f"{most_tokens:.0f} tokens, and no step follows that takes them; raise tokens_per_rank"
            )
        trained = sum(map(len, chain.from_iterable(step.members)))
        assert trained + len(waiting) == first + len(carry.waiting), (trained, waiting)
        return step, Carry(waiting=waiting)

    return plan
