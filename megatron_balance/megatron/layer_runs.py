"""Layers in the runs in which a pass goes through them, and the attention calls that follow from it, rank by rank the same.

A pipeline stage without a microbatch of its own makes the calls of those that have one, so both ask here.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from megatron_balance.compile import ping_pong
from megatron_balance.compile.ping_pong import Segment
from megatron_balance.runtime.lower.steps import PhaseName


class LayerRun(NamedTuple):
    """Layers that come one after the other. `again`: their forward is computed once more in the backward."""

    num_layers: int
    again: bool


def layer_runs(config: Any, num_layers: int, *, training: bool) -> tuple[LayerRun, ...]:
    """So many layers, cut as full recomputation has it (`--recompute-method`)."""
    if config.recompute_granularity != "full" or not training:
        return (LayerRun(num_layers, again=False),)
    size = config.recompute_num_layers or 1
    if config.recompute_method == "block":
        again = min(size, num_layers)
        rest = (LayerRun(num_layers - again, again=False),) if again < num_layers else ()
        return (LayerRun(1, again=True),) * again + rest
    return tuple(LayerRun(min(size, num_layers - first), again=True) for first in range(0, num_layers, size))


class Pass(NamedTuple):
    """A pass of attention calls through some layers."""

    backward: bool
    segments: tuple[Segment, ...]


def attention_passes(config: Any, num_layers: int, num_nano_batches: int, *, backward: bool, training: bool = True) -> tuple[Pass, ...]:
    """The attention calls of a forward or backward pass through so many layers, in order.

    Args:
        config: of the transformer.
        num_layers: of a model chunk.
        num_nano_batches: nano-batches that take turns; 1: none do.
        backward: the pass; one that computes forwards again makes their calls too.
        training: without it nothing is computed again.
    """
    runs = layer_runs(config, num_layers, training=training)
    if training and config.recompute_granularity == "selective" and "core_attn" in config.recompute_modules:
        runs = (LayerRun(1, again=True),) * num_layers
    forwards = [Pass(False, ping_pong.forward(run.num_layers, num_nano_batches)) for run in runs]
    if not backward:
        return tuple(forwards)
    found: list[Pass] = []
    for run, forward in zip(reversed(runs), reversed(forwards), strict=True):
        found += [forward] * run.again + [Pass(True, ping_pong.backward(forward.segments))]
    return tuple(found)


def phases(config: Any, num_layers: int, *, backward: bool, training: bool = True) -> frozenset[PhaseName]:
    """The phases of attention in such a pass: a backward that computes forwards again has both."""
    passes = attention_passes(config, num_layers, 1, backward=backward, training=training)
    return frozenset("backward" if each.backward else "forward" for each in passes)
