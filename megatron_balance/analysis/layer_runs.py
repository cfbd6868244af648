"""The runs in which a pass goes through layers under recomputation, and how many of them hold what
attention received at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple


@dataclass(frozen=True, slots=True)
class Recompute:
    """The forwards that a backward computes again.

    `what`: none; core attention alone; runs of `num_layers` layers each, all of them ("uniform");
    or the first `num_layers` layers, one by one ("block").
    """

    what: Literal["nothing", "core_attention", "uniform", "block"] = "nothing"
    num_layers: int = 1


class LayerRun(NamedTuple):
    """Consecutive layers. `again`: their forward is computed once more in the backward."""

    num_layers: int
    again: bool


def layer_runs(recompute: Recompute, num_layers: int, *, training: bool) -> tuple[LayerRun, ...]:
    """Split layers into the runs of full recomputation.

    Without it, or in evaluation, they are one run.
    """
    if recompute.what not in ("uniform", "block") or not training:
        return (LayerRun(num_layers, again=False),)
    size = recompute.num_layers
    if recompute.what == "block":
        again = min(size, num_layers)
        rest = (LayerRun(num_layers - again, again=False),) if again < num_layers else ()
        return (LayerRun(1, again=True),) * again + rest
    return tuple(LayerRun(min(size, num_layers - first), again=True) for first in range(0, num_layers, size))


def attention_runs(recompute: Recompute, num_layers: int, *, training: bool = True) -> tuple[LayerRun, ...]:
    """The runs in which attention calls are made: those of `layer_runs`, or every layer for itself
    where core attention alone is recomputed.
    """
    if training and recompute.what == "core_attention":
        return (LayerRun(1, again=True),) * num_layers
    return layer_runs(recompute, num_layers, training=training)


class HeldLayers(NamedTuple):
    """Layers of a model chunk as memory sees them.

    `numbers` [layers]: a layer keeps what it received if its number is at most the number of layers
    that shall keep at once. `most`: the largest of the numbers; the layers held at once if all
    keep. `saved`: layers that save all activations; `inputs`: runs that save their input; `again`:
    layers of the longest run that is computed again.
    """

    numbers: tuple[int, ...]
    most: int
    saved: int
    inputs: int
    again: int


def held_layers(recompute: Recompute, num_layers: int) -> HeldLayers:
    """Number the layers of a chunk by what keeping costs, the last ones first.

    The last layers hold for the shortest time. A run that is computed again holds what its layers
    received only while its own backward runs, so all such runs together cost as much as the longest
    of them, and come before layers that hold from forward to backward.
    """
    runs = attention_runs(recompute, num_layers)
    again = max((run.num_layers for run in runs if run.again), default=0)
    apart = sum(run.num_layers for run in runs if not run.again)
    numbers: list[int] = []
    seen = 0
    for run in runs:
        if run.again:
            numbers += range(run.num_layers, 0, -1)
        else:
            numbers += range(again + apart - seen, again + apart - seen - run.num_layers, -1)
            seen += run.num_layers
    whole = layer_runs(recompute, num_layers, training=True)
    return HeldLayers(
        tuple(numbers),
        max(numbers, default=0),
        sum(run.num_layers for run in whole if not run.again),
        sum(run.again for run in whole),
        max((run.num_layers for run in whole if run.again), default=0),
    )
