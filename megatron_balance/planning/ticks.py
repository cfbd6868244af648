"""One plan for the attention of all stages of a tick: their microbatches side by side
(docs/adr/0004, 0014).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

from megatron_balance.compile.layouts import layouts
from megatron_balance.ir.arrays import Ints, as_rows
from megatron_balance.ir.columns import Rows
from megatron_balance.ir.plan import MicrobatchPlan
from megatron_balance.ir.step import Tick, TickPlan

PlanOwned: TypeAlias = Callable[[tuple[int, ...], Rows], MicrobatchPlan]
"""A plan for sequences of these lengths whose owners are rows (rank, seq, start, stop), those of a
rank in the order of its tokens."""


def plan_ticks(ticks: Sequence[Tick], plans: Sequence[MicrobatchPlan], plan_owned: PlanOwned) -> tuple[TickPlan, ...]:
    """Every tick with the plan of its attention.

    Args:
        ticks: of a step.
        plans: by microbatch, over the ranks of one stage; only where they leave tokens outside
            attention counts.
        plan_owned: the planner, over the ranks of all stages. Asked once for ticks of the same
            microbatches.
    """
    owned = [layouts(plan) for plan in plans]
    planned: dict[tuple[int | None, ...], MicrobatchPlan] = {}
    for tick in ticks:
        if tick.microbatches not in planned:
            planned[tick.microbatches] = plan_owned(*side_by_side(tick, plans, owned))
    return tuple(TickPlan(tick, planned[tick.microbatches]) for tick in ticks)


def side_by_side(tick: Tick, plans: Sequence[MicrobatchPlan], owned: Sequence[Ints]) -> tuple[tuple[int, ...], Rows]:
    """Lengths of all sequences of a tick, and rows (rank, seq, start, stop) of where they are
    owned, stage by stage.
    """
    lengths: tuple[int, ...] = ()
    parts = [np.empty((0, 4), dtype=np.int64)]
    num_sequences = [len(plan.lengths) for plan in plans]
    for stage, microbatch in enumerate(tick.microbatches):
        if microbatch is not None:
            plan = plans[microbatch]
            parts.append(
                owned[microbatch] + np.array([stage * plan.num_ranks, tick.first_sequence(stage, num_sequences), 0, 0])
            )
            lengths += plan.lengths
    return lengths, as_rows(np.concatenate(parts))
