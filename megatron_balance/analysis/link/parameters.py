"""The model's parameters by global name, as tensors of TP 1: what every layout is a cut of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from megatron_balance.errors import ConfigError
from megatron_balance.ir.arrays import Bools, Ints


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter as a matrix `[rows, columns]` of TP 1; a vector of n elements is `[n, 1]`.

    `cut`: the dimension that TP cuts (Megatron's `partition_dim`), None if every TP rank has all
    of it. `blocks`: equal blocks of the rows that are cut each for itself (`partition_stride`), 2
    for a gated fc1. `parts`: the gradient that a TP rank has of a replicated parameter is only a
    part, and the sum is over TP ranks; so it is under sequence parallelism. `tied`: the first and
    the last stage have it, with a gradient each.
    """

    name: str
    rows: int
    columns: int
    layer: int | Literal["first", "last"]
    """The global number of its layer; or the stage that has it."""
    cut: Literal[0, 1] | None = None
    blocks: int = 1
    parts: bool = False
    tied: bool = False

    def __post_init__(self) -> None:
        if min(self.rows, self.columns, self.blocks) < 1:
            raise ConfigError(
                f"parameter {self.name}: {self.rows} rows, {self.columns} columns and {self.blocks} blocks; each must "
                "be 1 or more"
            )
        if self.blocks > 1 and (self.cut != 0 or self.rows % self.blocks):
            raise ConfigError(
                f"parameter {self.name}: {self.blocks} blocks of {self.rows} rows, cut along {self.cut}; blocks divide "
                "the rows and are cut along dimension 0"
            )
        if self.parts and self.cut is not None:
            raise ConfigError(f"parameter {self.name}: only a replicated gradient comes in parts; TP cuts this one")
        if self.tied and self.layer != "first":
            raise ConfigError(f"parameter {self.name}: tied, so its layer is 'first', not {self.layer!r}")


@dataclass(frozen=True, slots=True)
class ParameterTable:
    """The table of all parameters [n], by number: one array a property."""

    names: tuple[str, ...]
    num_layers: int
    shape: Ints
    """[n, 2] rows and columns."""
    cut: Ints
    """[n] 0, 1, or -1 for a replicated one."""
    blocks: Ints
    layer: Ints
    """[n] -1: the first stage; `num_layers`: the last."""
    parts: Bools
    tied: Bools

    @classmethod
    def of(cls, parameters: Sequence[Parameter], num_layers: int) -> ParameterTable:
        """Number `parameters` in their order.

        Raises:
            ConfigError: a name twice, or a layer that the model does not have.
        """
        twice = [name for name, count in Counter(p.name for p in parameters).items() if count > 1]
        if twice:
            raise ConfigError(f"parameters: {twice[0]} comes twice; give each global name once")
        layers = {"first": -1, "last": num_layers}
        for parameter in parameters:
            if isinstance(parameter.layer, int) and not 0 <= parameter.layer < num_layers:
                raise ConfigError(
                    f"parameter {parameter.name}: layer {parameter.layer} of a model with {num_layers}; layers are "
                    "counted from 0 through all stages"
                )
        return cls(
            names=tuple(p.name for p in parameters),
            num_layers=num_layers,
            shape=np.array([(p.rows, p.columns) for p in parameters], dtype=np.int64).reshape(-1, 2),
            cut=np.array([-1 if p.cut is None else p.cut for p in parameters], dtype=np.int64),
            blocks=np.array([p.blocks for p in parameters], dtype=np.int64),
            layer=np.array([layers[p.layer] if isinstance(p.layer, str) else p.layer for p in parameters], np.int64),
            parts=np.array([p.parts for p in parameters], dtype=bool),
            tied=np.array([p.tied for p in parameters], dtype=bool),
        )

    def __len__(self) -> int:
        return len(self.names)

    def stages(self, chosen: Ints, num_stages: int) -> tuple[Ints, Ints, Ints]:
        """Where the `chosen` parameters lie in a pipeline: parameter, stage and end, one element a
        copy.

        Stages have neighbouring layers, as evenly as it goes. `end` is 1 for the copy of a tied
        parameter on the last of several stages, 0 for all others.
        """
        layer = self.layer[chosen]
        # Stage s begins with layer s * L // P, so layer l lies on the last s with s * L < (l + 1) * P.
        inside = ((layer + 1) * num_stages - 1) // max(self.num_layers, 1)
        stage = np.where(layer < 0, 0, np.where(layer == self.num_layers, num_stages - 1, inside))
        if num_stages == 1:
            return chosen, stage, np.zeros_like(chosen)
        tied = chosen[self.tied[chosen]]
        return (
            np.concatenate([chosen, tied]),
            np.concatenate([stage, np.full(len(tied), num_stages - 1, dtype=np.int64)]),
            np.repeat(np.array([0, 1], dtype=np.int64), [len(chosen), len(tied)]),
        )
