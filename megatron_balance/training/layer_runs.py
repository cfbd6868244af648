"""The runs in which a pass goes through layers, and the attention calls that follow from it.

A pipeline stage without a microbatch of its own makes the calls of those that have one, so both ask
here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from megatron_balance.compile import ping_pong
from megatron_balance.compile.ping_pong import Segment
from megatron_balance.runtime.lower.steps import PhaseName


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


class Pass(NamedTuple):
    """A pass of attention calls through some layers."""

    backward: bool
    segments: tuple[Segment, ...]


def attention_passes(
    recompute: Recompute, num_layers: int, num_nano_batches: int, *, backward: bool, training: bool = True
) -> tuple[Pass, ...]:
    """The attention calls, in order, of a pass through the layers of a model chunk.

    Args:
        recompute: by the backward.
        num_layers: of the chunk.
        num_nano_batches: ping-pong nano-batches; 1: the microbatch runs whole.
        backward: the pass; one that computes forwards again makes their calls too.
        training: without it no forward is computed again.
    """
    runs = layer_runs(recompute, num_layers, training=training)
    if training and recompute.what == "core_attention":
        runs = (LayerRun(1, again=True),) * num_layers
    forwards = [Pass(False, ping_pong.forward(run.num_layers, num_nano_batches)) for run in runs]
    if not backward:
        return tuple(forwards)
    passes: list[Pass] = []
    for run, forward in zip(reversed(runs), reversed(forwards), strict=True):
        passes += [forward] * run.again + [Pass(True, ping_pong.backward(forward.segments))]
    return tuple(passes)


def phases(recompute: Recompute, num_layers: int, *, backward: bool, training: bool = True) -> frozenset[PhaseName]:
    """The phases of attention in such a pass: a backward that computes forwards again has both."""
    passes = attention_passes(recompute, num_layers, 1, backward=backward, training=training)
    return frozenset("backward" if each.backward else "forward" for each in passes)
