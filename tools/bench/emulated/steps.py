"""Steps of a run: the batch and the variant of each, and its record."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from megatron_balance.workloads.lengths import Lengths
from tools.bench.emulated.batches import DATASETS, draw_batches

WARM_UP = -1


@dataclass(frozen=True, slots=True)
class Planned:
    """A step to be run. `variant`: its place in the run's list; `repeat`: `WARM_UP`, or from 0."""

    dataset: str
    batch: int
    repeat: int
    variant: int
    lengths: Lengths


def interleaved(drawn: Mapping[str, Sequence[Lengths]], variants: Sequence[int], repeats: int) -> tuple[Planned, ...]:
    """A warm-up of every variant, then every batch under all variants in turn, in an order that
    rotates. `drawn`: by data set.
    """
    first = next(iter(drawn))
    steps = [Planned(first, 0, WARM_UP, variant, drawn[first][0]) for variant in variants]
    num_batches = len(drawn[first])
    turns = ((repeat, batch, name) for repeat in range(repeats) for batch in range(num_batches) for name in drawn)
    for turn, (repeat, batch, name) in enumerate(turns):
        rotated = (variants[(at + turn) % len(variants)] for at in range(len(variants)))
        steps += [Planned(name, batch, repeat, variant, drawn[name][batch]) for variant in rotated]
    return tuple(steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """A run of a benchmark; text for the process that does it."""

    out: str
    repeats: int
    seed: int
    layers: int
    backward: str
    nic_mbit: float | None
    """Rate of a NIC; None: by the operating point."""
    calibration_s: float
    core_share: float
    """Share that each compute thread asks for; 0: ranks share the cores as they come."""

    @property
    def folder(self) -> Path:
        """Where logs and records go."""
        return Path(self.out)

    def text(self) -> str:
        """One line that `parse` reads back."""
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: str) -> Self:
        """The experiment that `text` was made from."""
        keys: dict[str, Any] = json.loads(text)
        values: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in keys.items()
        }
        return cls(**values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ablation(Experiment):
    """Variants of the list, on several topologies."""

    nics: tuple[int, ...]
    """NICs of a node, by topology."""
    batches: tuple[int, ...]
    """Batches of each data set, by topology."""
    variants: tuple[int, ...]
    """Places in `VARIANTS`."""
    shape: str
    """Name in `SHAPES`."""

    def steps(self, topology: int) -> tuple[Planned, ...]:
        """The steps of one topology."""
        return interleaved(
            {name: draw_batches(name, self.batches[topology], self.seed) for name in DATASETS},
            self.variants,
            self.repeats,
        )
