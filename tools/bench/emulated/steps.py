"""Which step of a run trains which batch under which variant, and what is recorded of it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

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


@dataclass(frozen=True, slots=True)
class Experiment:
    """What a run of the benchmark does; text for the process that does it."""

    out: str
    nics: tuple[int, ...]
    """NICs of a node, by topology."""
    batches: tuple[int, ...]
    """Batches of each data set, by topology."""
    repeats: int
    seed: int
    layers: int
    backward: str
    variants: tuple[int, ...]
    """Places in `VARIANTS`."""
    nic_mbit: float | None
    """Rate of a NIC; None: by the operating point."""
    calibration_s: float
    core_share: float
    """What each compute thread asks for; 0: ranks share the cores as they come."""

    @property
    def folder(self) -> Path:
        """Where logs and records go."""
        return Path(self.out)

    def steps(self, topology: int) -> list[Planned]:
        """The steps of one topology: a warm-up of every variant, then every batch under all variants in turn, in an order that rotates."""
        drawn = {name: draw_batches(name, self.batches[topology], self.seed) for name in DATASETS}
        first = DATASETS[0]
        steps = [Planned(first, 0, WARM_UP, variant, drawn[first][0]) for variant in self.variants]
        turns = ((repeat, batch, name) for repeat in range(self.repeats) for batch in range(self.batches[topology]) for name in DATASETS)
        for turn, (repeat, batch, name) in enumerate(turns):
            steps += [Planned(name, batch, repeat, variant, drawn[name][batch]) for variant in _rotated(self.variants, turn)]
        return steps

    def text(self) -> str:
        """One line that `Experiment.parse` reads back."""
        return json.dumps(asdict(self))

    @staticmethod
    def parse(text: str) -> Experiment:
        """The experiment that `text` was made from."""
        keys: dict[str, Any] = json.loads(text)
        values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in keys.items()}
        return Experiment(**values)


def _rotated(variants: Sequence[int], by: int) -> Iterator[int]:
    for at in range(len(variants)):
        yield variants[(at + by) % len(variants)]
