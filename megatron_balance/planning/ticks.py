"""Ticks of a pipeline in which all stages are in the same phase (DistCA, section 4.1, Fig. 8), and
one plan for the attention of all stages of each: their microbatches side by side (docs/adr/0004,
0014).
"""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

from megatron_balance.compile.remap import layouts
from megatron_balance.errors import ConfigError
from megatron_balance.ir.arrays import Ints, as_rows
from megatron_balance.ir.columns import Rows
from megatron_balance.ir.plan import MicrobatchPlan
from megatron_balance.ir.step import Cell, Tick, TickPlan

# A plan for sequences of these lengths whose owners are rows (rank, seq, start, stop), those of a
# rank in the order of its tokens.
PlanOwned: TypeAlias = Callable[[tuple[int, ...], Rows], MicrobatchPlan]


def plan_ticks(ticks: Sequence[Tick], plans: Sequence[MicrobatchPlan], plan_owned: PlanOwned) -> tuple[TickPlan, ...]:
    """Every tick with the plan of its attention. `plans`: by microbatch, over the ranks of one
    stage; `plan_owned`: over the ranks of all, asked once for ticks of the same microbatches.
    """
    owned = [layouts(plan) for plan in plans]
    planned: dict[tuple[int | None, ...], MicrobatchPlan] = {}
    for tick in ticks:
        if tick.microbatches not in planned:
            planned[tick.microbatches] = plan_owned(*_side_by_side(tick, plans, owned))
    return tuple(TickPlan(tick, planned[tick.microbatches]) for tick in ticks)


def _side_by_side(tick: Tick, plans: Sequence[MicrobatchPlan], owned: Sequence[Ints]) -> tuple[tuple[int, ...], Rows]:
    """Lengths of a tick's sequences, and rows (rank, seq, start, stop) of their owners."""
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


def ticks(
    num_stages: int, num_microbatches: int, num_chunks: int = 1, *, forward_only: bool = False
) -> tuple[Tick, ...]:
    """All ticks of a step: a stage takes its passes in Megatron's order (groups of S microbatches
    through chunk 0, then 1, ...; backwards from the last), pass t - s in forward tick t, t - (S - 1
    - s) in backward tick t. The first V S ticks are forward; then backward and forward take turns.
    A stage is done after 2 (V M + S - 1) ticks, as with 1F1B, and holds up to 2 (S - 1 - s) + 1
    microbatches instead of S - s.

    Raises:
        ConfigError: model chunks of microbatches that do not come in whole groups of `num_stages`.
    """
    if num_chunks > 1 and num_microbatches % num_stages:
        raise ConfigError(
            f"{num_microbatches} microbatches are not a multiple of {num_stages} pipeline stages, as interleaved "
            "stages need; "
            "choose a --global-batch-size that gives a multiple, or leave out interleaving"
        )
    passes = [_passes(num_stages, num_microbatches, num_chunks, backward=backward) for backward in (False, True)]
    count = num_microbatches * num_chunks + num_stages - 1
    forwards = [Tick(False, tuple(_at(passes[0], t - s) for s in range(num_stages))) for t in range(count)]
    if forward_only:
        return tuple(forwards)
    backwards = [
        Tick(True, tuple(_at(passes[1], t - (num_stages - 1 - s)) for s in range(num_stages))) for t in range(count)
    ]
    # The first ones only go forward; then backward and forward take turns.
    ahead = min(num_stages * num_chunks, count)
    turns = [tick for pair in zip(backwards, forwards[ahead:], strict=False) for tick in pair]
    return (*forwards[:ahead], *turns, *backwards[count - ahead :])


def passes_on(tick: Tick, stage: int, num_chunks: int = 1) -> Cell | None:
    """Where the result of `stage` goes: a cell of the next stage (backward: of the one before); the
    last stage's chunk goes on as the next one of the first. None: there is none, or it is the loss.
    """
    cell, num_stages = tick.cells[stage], len(tick.cells)
    if cell is None:
        return None
    ends = stage == (0 if tick.backward else num_stages - 1)
    chunk = cell.chunk + ends * (-1 if tick.backward else 1)
    return Cell(cell.microbatch, chunk) if 0 <= chunk < num_chunks else None


def neighbour(tick: Tick, stage: int) -> int:
    """The stage whose result reaches `stage` after this tick."""
    return (stage + (1 if tick.backward else -1)) % len(tick.cells)


def _passes(num_stages: int, num_microbatches: int, num_chunks: int, *, backward: bool) -> list[Cell]:
    size = num_stages if num_chunks > 1 else 1
    order = range(num_chunks - 1, -1, -1) if backward else range(num_chunks)
    return [
        Cell(first + m, chunk) for first in range(0, num_microbatches, size) for chunk in order for m in range(size)
    ]


def _at(passes: Sequence[Cell], index: int) -> Cell | None:
    return passes[index] if 0 <= index < len(passes) else None
