"""The order of a pipeline in which all stages are in the same phase at any time (DistCA, section
4.1, Fig. 8).

S stages, M microbatches, V model chunks a stage. A stage takes its V M passes in Megatron's order:
groups of S microbatches go through chunk 0, then 1, ...; backwards from the last chunk. In forward
tick t stage s takes its pass t - s, in backward tick t its pass t - (S - 1 - s). The first V S
ticks are forward; then backward and forward take turns; what is left is backward. Every input is
there when it is needed, and a stage is done after 2 (V M + S - 1) ticks, as with one forward, one
backward.

What it costs is memory, without interleaving: stage s holds up to 2 (S - 1 - s) + 1 microbatches
instead of S - s, because the backward passes that would come early wait for a tick of their own.
With V > 1 it holds V S + S - 1 - 2 s chunks' worth, as Megatron's own does.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_balance.errors import ConfigError
from megatron_balance.ir.step import Cell, Tick


def ticks(
    num_stages: int, num_microbatches: int, num_chunks: int = 1, *, forward_only: bool = False
) -> tuple[Tick, ...]:
    """All ticks of a step, in order.

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
    ahead = min(num_stages * num_chunks, count)
    turns = [tick for pair in zip(backwards, forwards[ahead:], strict=False) for tick in pair]
    return (*forwards[:ahead], *turns, *backwards[count - ahead :])


def passes_on(tick: Tick, stage: int, num_chunks: int = 1) -> Cell | None:
    """Where the result of `stage` in this tick goes: a cell of the next stage, in a backward tick
    of the one before it.

    Stages form a ring: the last one's chunk goes on as the next chunk of the first. None: the stage
    has none, or its result is the loss or the gradient of the embedding.
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
    """The passes of a stage, in order."""
    size = num_stages if num_chunks > 1 else 1
    order = range(num_chunks - 1, -1, -1) if backward else range(num_chunks)
    return [
        Cell(first + m, chunk) for first in range(0, num_microbatches, size) for chunk in order for m in range(size)
    ]


def _at(passes: Sequence[Cell], index: int) -> Cell | None:
    return passes[index] if 0 <= index < len(passes) else None
