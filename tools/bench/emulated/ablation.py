"""The ablation of Zeppelin's Fig. 11, and other planners beside it: variants, steps and their order
(docs/operating-point.md).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from megatron_balance.planners import PLANNERS
from megatron_balance.planning.choice import PlannerChoice, choose_planner
from megatron_balance.planning.layers import Layers
from megatron_balance.workloads.lengths import Lengths
from tools.bench.emulated.point import DATASETS, SHAPES, Kernels, Point, Shape, draw_batches

WARM_UP = -1
BASELINE = "te_ring"


@dataclass(frozen=True, slots=True)
class Variant:
    """A planner, the layers around it, and its options by name."""

    name: str
    planner: str
    layers: Layers
    options: Mapping[str, Any] = field(default_factory=dict)

    def choice(self) -> PlannerChoice:
        """As a configuration would say it."""
        return choose_planner(self.planner, dict(self.options), self.name, self.layers)


def usual(name: str, planner: str, **options: Any) -> Variant:
    return Variant(name, planner, PLANNERS[planner].layers, options)


RINGS = {"rule": "groups", "group_size": 1}
ABLATION = (
    Variant(BASELINE, "te_ring", Layers()),
    Variant("te_ring + routing", "te_ring", Layers(routing="always")),
    usual("zeppelin, printed rule", "zeppelin", rule="paper"),
    Variant("zeppelin, rings", "zeppelin", Layers(), RINGS),
    Variant("zeppelin, rings + routing", "zeppelin", Layers(routing="pays"), RINGS),
    Variant("zeppelin, rings, remap always", "zeppelin", Layers(routing="pays", remap=True), RINGS),
    usual("zeppelin, rings of groups", "zeppelin", rule="groups"),
    usual("zeppelin", "zeppelin"),
    usual("auto", "auto"),
    usual("ulysses", "ulysses"),
    usual("flexsp", "flexsp"),
    Variant("llama_all_gather", "llama_all_gather", Layers()),
    # gloo gathers round one ring, over one NIC of a node; NCCL uses all of them, as this does.
    Variant("llama_all_gather + routing", "llama_all_gather", Layers(routing="always")),
)
QUICK = (0, 2, 4, 6, 7, 8)
"""Places of what a short run compares."""


@dataclass(frozen=True, slots=True)
class Planned:
    """A step to be run. `variant`: its place in the list; `repeat`: `WARM_UP`, or from 0."""

    dataset: str
    batch: int
    repeat: int
    variant: int
    lengths: Lengths


class Training(NamedTuple):
    """One job, on a cluster with so many NICs a node."""

    nics: int
    steps: tuple[Planned, ...]


def in_turns(drawn: Mapping[str, Sequence[Lengths]], variants: Sequence[int], repeats: int) -> tuple[Planned, ...]:
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
class Ablation:
    """A run of the benchmark; text for the process that does it."""

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
    nics: tuple[int, ...]
    """NICs of a node, by topology."""
    batches: tuple[int, ...]
    """Batches of each data set, by topology."""
    chosen: tuple[int, ...]
    """Places in `ABLATION`."""
    shape: str
    """Name in `SHAPES`."""

    @property
    def folder(self) -> Path:
        return Path(self.out)

    @property
    def cluster_shape(self) -> Shape:
        """Ranks, and the model that they train."""
        return SHAPES[self.shape]

    def trainings(self) -> tuple[Training, ...]:

        def steps(count: int) -> tuple[Planned, ...]:
            drawn = {name: draw_batches(name, count, self.seed) for name in DATASETS}
            return in_turns(drawn, self.chosen, self.repeats)

        return tuple(Training(nics, steps(count)) for nics, count in zip(self.nics, self.batches, strict=True))

    def point(self, kernels: Kernels) -> Point:
        """The operating point: rates as the paper's ratio needs them, or as given."""
        found = Point.of(kernels, self.cluster_shape)
        return found if self.nic_mbit is None else replace(found, nic_bits_per_s=round(1e6 * self.nic_mbit))

    def text(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def parse(text: str) -> Ablation:
        found: dict[str, Any] = json.loads(text)
        keys: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in found.items()}
        return Ablation(**keys)
