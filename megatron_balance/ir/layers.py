"""The two layers around any planner's decision, remapping and routing, as settings (Zeppelin,
sections 3.4 and 3.3).

`planning.layers` decides by these settings what a plan gets; `solvers.remap` solves the remap.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from megatron_balance.errors import ConfigError

When: TypeAlias = Literal["always", "pays", "never"]
RemapWhen: TypeAlias = Literal["always", "pays"]
MilpSolver: TypeAlias = Literal["gurobi", "highs"]
Solver: TypeAlias = Literal["exact", MilpSolver]


@dataclass(frozen=True, slots=True)
class Layers:
    """Remapping and routing around a planner.

    `routing`: when transfers between nodes go over all NICs, with `pieces` of each on one NIC.
    `remap`: balance tokens outside attention, `remap_when` always or where that saves time;
    `solver` as in `solvers.remap.solve`. `align`: token counts outside attention are multiples of
    this (the tensor-parallel size). `once_per_node`: task tables and
    head exchanges send rows that several ranks of a node need once, where that pays
    (`patterns.once_per_node`).
    """

    routing: When = "never"
    remap: bool = False
    remap_when: RemapWhen = "always"
    solver: Solver = "exact"
    align: int = 1
    pieces: int = 1
    once_per_node: bool = False

    def __post_init__(self) -> None:
        if self.pieces < 1:
            raise ConfigError(f"routing: pieces {self.pieces}: a transfer has at least 1 piece on each NIC")
        if self.align < 1:
            raise ConfigError(f"remap: align {self.align}: must be at least 1 token")
