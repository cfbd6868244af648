"""Rectangles of the parameters that ranks have: owned ones (optimizer shards of the base layout),
and held ones (weights and gradients of a role).

Source: Hydraulis, arXiv 2412.07894, section 5.2: parameters and optimizer states are cut
differently, and a strategy changes only the first. Megatron's optimizer shards are ranges of a flat
buffer (`DistributedOptimizer._build_model_gbuf_param_range_map`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from megatron_balance.errors import ConfigError
from megatron_balance.ir.arrays import Bools, Ints, ranges
from megatron_balance.ir.strategy import Scheme, Strategy


class Shard:
    """Columns of a table of shards: a rank has one rectangle of one parameter."""

    WIDTH = 9
    PARAMETER, ROW_START, ROW_STOP, COLUMN_START, COLUMN_STOP, RANK, TENSOR, DEGREE, END = range(9)
    RECTANGLE = slice(1, 5)
    STARTS = slice(1, 4, 2)
    STOPS = slice(2, 5, 2)
    COPY = slice(6, 9)
    """TENSOR, DEGREE: of a replicated parameter, the TP rank of this copy, and how many TP ranks
    have one; 0 and 1 where TP cuts. END: 1 for the copy on the last stage of a tied parameter."""


@dataclass(frozen=True, slots=True)
class Buffer:
    """A flat buffer of one stage of the base layout, the same on its TP ranks (Megatron's
    `_ParamAndGradBuffer`).

    `parameters` [n]: numbers; `starts` [n]: the element where each rank's TP shard of it begins.
    `buckets` [b + 1]: bounds of the buckets, padding included. Each bucket is cut evenly over the
    data- and context-parallel ranks.
    """

    stage: int
    parameters: Ints
    starts: Ints
    buckets: Ints


@dataclass(frozen=True, slots=True)
class Base:
    """The layout that Megatron builds from the command line: `replicas` pipelines of one scheme.

    Ranks are in Megatron's order tp-cp-dp-pp: rank = tp + TP * (cp + CP * (dp + DP * pp)).
    """

    scheme: Scheme
    replicas: int
    buffers: tuple[Buffer, ...]

    @property
    def num_shards(self) -> int:
        """Ranks over which an optimizer shard is cut: data- and context-parallel ones."""
        return self.scheme.context * self.replicas

    @property
    def num_ranks(self) -> int:
        return self.scheme.num_ranks * self.replicas

    def owned(self, parameters: ParameterTable) -> Ints:
        """Shards of the optimizer of all ranks [n, Shard.WIDTH].

        Every copy of a parameter is owned once, element by element: TP ranks own copies of a
        replicated one, both ends those of a tied one. A rank's rows stand in the order of its flat
        shard. Raises ConfigError: TP does not divide a parameter; a bucket is not cut evenly; a
        parameter is not once in the buffers of its stage.
        """
        return np.concatenate(
            [_empty(), *(self._owned(buffer, parameters) for buffer in self._checked(parameters))], axis=0
        )

    def _owned(self, buffer: Buffer, parameters: ParameterTable) -> Ints:
        tensor = self.scheme.tensor
        sizes = np.diff(buffer.buckets)
        parts = sizes[:, None] // self.num_shards * np.arange(self.num_shards)
        borders = np.append((buffer.buckets[:-1, None] + parts).reshape(-1), buffer.buckets[-1])
        degree = np.where(parameters.cut < 0, 1, tensor)
        numel = (parameters.shape.prod(axis=1) // degree)[buffer.parameters]
        order = np.argsort(buffer.starts, kind="stable")
        starts, numbers, stops = buffer.starts[order], buffer.parameters[order], (buffer.starts + numel)[order]
        if np.any(stops > np.append(starts[1:], buffer.buckets[-1])) or np.any(starts[:1] < buffer.buckets[0]):
            raise ConfigError(
                f"buffer of stage {buffer.stage}: parameters overlap, or lie outside of its "
                f"{buffer.buckets[-1] - buffer.buckets[0]} elements; give the starts of the flat buffer itself"
            )
        first = np.searchsorted(borders, starts, side="right") - 1
        which, shard = ranges(first, np.searchsorted(borders, stops, side="left"))
        begin = np.maximum(borders[shard], starts[which]) - starts[which]
        end = np.minimum(borders[shard + 1], stops[which]) - starts[which]
        index, rectangles = _of_ranges(begin, end, numbers[which], parameters, tensor)
        number, shard = numbers[which][index], shard[index] % self.num_shards
        last = parameters.tied[number] & (buffer.stage > 0)
        ranks = tensor * (shard + self.num_shards * buffer.stage)
        rows: list[Ints] = []
        for rank in range(tensor):
            table = np.empty((len(number), Shard.WIDTH), dtype=np.int64)
            table[:, Shard.PARAMETER] = number
            table[:, Shard.RECTANGLE] = rectangles + rank * _steps(number, parameters, tensor)
            table[:, Shard.RANK] = ranks + rank
            replicated = parameters.cut[number] < 0
            table[:, Shard.TENSOR] = np.where(replicated, rank, 0)
            table[:, Shard.DEGREE] = np.where(replicated, tensor, 1)
            table[:, Shard.END] = last
            rows.append(table)
        return np.concatenate(rows, axis=0)

    def _checked(self, parameters: ParameterTable) -> Sequence[Buffer]:
        for axis, blocks, shape, name in zip(
            parameters.cut, parameters.blocks, parameters.shape, parameters.names, strict=True
        ):
            if axis >= 0 and shape[axis] % (self.scheme.tensor * blocks):
                raise ConfigError(
                    f"parameter {name}: {shape[axis]} elements along dimension {axis} in {blocks} blocks; the base's "
                    f"TP {self.scheme.tensor} does not divide them"
                )
        for buffer in self.buffers:
            if np.any(np.diff(buffer.buckets) % self.num_shards):
                raise ConfigError(
                    f"buffer of stage {buffer.stage}: buckets of {np.diff(buffer.buckets).tolist()} elements; each "
                    f"must be a multiple of the {self.num_shards} data- and context-parallel ranks"
                )
        held, stages, _ = parameters.stages(np.arange(len(parameters)), self.scheme.pipeline)
        expected = sorted(zip(stages.tolist(), held.tolist(), strict=True))
        given = sorted((buffer.stage, number) for buffer in self.buffers for number in buffer.parameters.tolist())
        if expected != given:
            stage, number = min(
                ((Counter(expected) - Counter(given)) | (Counter(given) - Counter(expected))).elements()
            )
            raise ConfigError(
                f"buffers of the base layout: parameter {parameters.names[number]} of stage {stage} is "
                f"{given.count((stage, number))} times in them, expected {expected.count((stage, number))}; list every "
                "parameter of a stage once"
            )
        return self.buffers


def held(
    strategy: Strategy, parameters: ParameterTable, *, chosen: Ints | None = None, rank: int | None = None
) -> Ints:
    """Shards of weights that the ranks of a strategy hold [n, Shard.WIDTH].

    Inside a pipeline ranks are in Megatron's order tp-cp-pp. A degree need not divide a dimension:
    shards are then as even as it goes, and may be empty. `strategy`: the pipelines, from rank 0 on;
    `parameters`: all of them; `chosen`: numbers of the parameters that are asked for; None: all;
    `rank`: the rank that is asked for; None: all.
    """
    chosen = np.arange(len(parameters)) if chosen is None else chosen
    pipelines: dict[Scheme, list[int]] = {}
    first = 0
    for scheme in strategy.pipelines:
        if rank is None or first <= rank < first + scheme.num_ranks:
            pipelines.setdefault(scheme, []).append(first)
        first += scheme.num_ranks
    tables = [_held(scheme, np.array(firsts), parameters, chosen) for scheme, firsts in pipelines.items()]
    table = np.concatenate([_empty(), *tables], axis=0)
    return table if rank is None else table[table[:, Shard.RANK] == rank]


def _held(scheme: Scheme, firsts: Ints, parameters: ParameterTable, chosen: Ints) -> Ints:
    tensor, context = scheme.tensor, scheme.context
    number, stage, end = parameters.stages(chosen, scheme.pipeline)
    which, block = ranges(np.zeros_like(number), parameters.blocks[number])
    number, stage, end = number[which], stage[which], end[which]
    replicated = parameters.cut[number] < 0
    axis = np.maximum(parameters.cut[number], 0)
    entries = np.arange(len(number))
    size = parameters.shape[number, axis] // parameters.blocks[number]
    table = np.zeros((len(number), tensor, len(firsts), context, Shard.WIDTH), dtype=np.int64)
    rectangles = np.zeros((len(number), tensor, 4), dtype=np.int64)
    rectangles[..., 1::2] = parameters.shape[number][:, None, :]
    ranks = np.arange(tensor)
    for side in (0, 1):
        bound = (block * size)[:, None] + (ranks + side) * size[:, None] // tensor
        at = 2 * axis + side
        rectangles[entries, :, at] = np.where(replicated[:, None], rectangles[entries, :, at], bound)
    table[..., Shard.PARAMETER] = number[:, None, None, None]
    table[..., Shard.RECTANGLE] = rectangles[:, :, None, None, :]
    places = firsts[:, None] + tensor * np.arange(context)
    table[..., Shard.RANK] = ranks[:, None, None] + places + (tensor * context * stage)[:, None, None, None]
    table[..., Shard.TENSOR] = np.where(replicated[:, None], ranks, 0)[:, :, None, None]
    table[..., Shard.DEGREE] = np.where(replicated, tensor, 1)[:, None, None, None]
    table[..., Shard.END] = end[:, None, None, None]
    return table.reshape(-1, Shard.WIDTH)


def _of_ranges(begin: Ints, end: Ints, number: Ints, parameters: ParameterTable, tensor: int) -> tuple[Ints, Ints]:
    # Cut ranges of flat TP shards into rectangles: a range may begin inside a row, have whole rows,
    # and end inside a row; blocks are cut apart.
    #
    # Returns:
    # (index of the range [m], rectangle in the whole parameter [m, 4], for TP rank 0).
    axis, blocks = parameters.cut[number], parameters.blocks[number]
    shape = parameters.shape[number].copy()
    cut = np.flatnonzero(axis >= 0)
    shape[cut, axis[cut]] //= tensor
    width = shape[:, 1]
    top, left, bottom, right = begin // width, begin % width, end // width, end % width
    inside = top == bottom  # the range lies within one row, or is a row's beginning
    whole = top + (left > 0)
    zero = np.zeros_like(begin)
    pieces = np.stack(
        [
            np.stack([top, np.where(left > 0, top + 1, top), left, np.where(inside, right, width)], axis=1),
            np.stack([whole, np.maximum(bottom, whole), zero, width], axis=1),
            np.stack([bottom, np.where((right > 0) & ~(inside & (left > 0)), bottom + 1, bottom), zero, right], axis=1),
        ],
        axis=1,
    )
    index, piece = np.divmod(np.flatnonzero((pieces[..., 0] < pieces[..., 1]).reshape(-1)), 3)
    pieces = pieces[index, piece]
    which, block = ranges(np.zeros_like(index), blocks[index])
    index, pieces = index[which], pieces[which]
    height = shape[index, 0] // blocks[index]
    pieces[:, 0] = np.maximum(pieces[:, 0], block * height)
    pieces[:, 1] = np.minimum(pieces[:, 1], (block + 1) * height)
    there = pieces[:, 0] < pieces[:, 1]
    index, pieces, block, height = index[there], pieces[there], block[there], height[there]
    pieces[:, :2] += (block * (parameters.shape[number[index], 0] // blocks[index] - height))[:, None]
    return index, pieces


def _steps(number: Ints, parameters: ParameterTable, tensor: int) -> Ints:
    # How far a rectangle moves from one TP rank to the next [n, 4].
    axis = parameters.cut[number]
    steps = np.zeros((len(number), 4), dtype=np.int64)
    for dimension in (0, 1):
        size = parameters.shape[number, dimension] // parameters.blocks[number] // tensor
        steps[:, 2 * dimension : 2 * dimension + 2] = np.where(axis == dimension, size, 0)[:, None]
    return steps


def _empty() -> Ints:
    return np.empty((0, Shard.WIDTH), dtype=np.int64)


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
        """Number `parameters` in their order. Raises ConfigError: a name twice, or a layer that the
        model does not have.
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
