"""Ticks of a pipeline in which all stages attend together (DistCA, section 4.1): what each stage
runs, and the attention of all of them.

A tick is one forward or one backward pass of every stage that has work in it. Its plan (a
`MicrobatchPlan`) has the ranks of all stages, stage by stage, and the sequences of all microbatches
that are in the tick side by side, stage by stage; layer after layer, one attention call serves them
all.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_balance.ir.plan import MicrobatchPlan


class Cell(NamedTuple):
    """The work of a stage in a tick: a microbatch through one of the stage's model chunks."""

    microbatch: int
    chunk: int = 0


@dataclass(frozen=True, slots=True)
class Tick:
    """One phase of all stages. `cells[s]`: what stage s runs, None: nothing of its own, it only
    attends for others.
    """

    backward: bool
    cells: tuple[Cell | None, ...]

    @property
    def microbatches(self) -> tuple[int | None, ...]:
        """By stage. Ticks with the same have the same attention."""
        return tuple(None if cell is None else cell.microbatch for cell in self.cells)

    def first_sequence(self, stage: int, num_sequences: Sequence[int]) -> int:
        """The id, in the tick's plan, of sequence 0 of the microbatch on `stage`; the others
        follow. `num_sequences`: by microbatch.
        """
        return sum(num_sequences[m] for m in self.microbatches[:stage] if m is not None)


@dataclass(frozen=True, slots=True)
class TickPlan:
    """A tick and the plan of its attention, whose ranks are stage * (ranks of a stage) + rank."""

    tick: Tick
    plan: MicrobatchPlan


def fingerprint(ticks: Sequence[TickPlan]) -> str:
    """Sixteen hex digits that differ when any tick or plan does."""
    return hashlib.sha256("".join(f"{t.tick} {t.plan.fingerprint()}" for t in ticks).encode()).hexdigest()[:16]
