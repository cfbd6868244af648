"""The attention calls of a pass through layers.

A pipeline stage without a microbatch of its own makes the calls of those that have one, so both ask
here.
"""

from __future__ import annotations

from typing import NamedTuple

from megatron_balance.analysis.backward import Recompute, attention_runs
from megatron_balance.compile import ping_pong
from megatron_balance.compile.ping_pong import Segment
from megatron_balance.runtime.lower.steps import PhaseName


class LayerPass(NamedTuple):
    """A pass of attention calls through some layers."""

    backward: bool
    segments: tuple[Segment, ...]


def attention_passes(
    recompute: Recompute, num_layers: int, num_nano_batches: int, *, backward: bool, training: bool = True
) -> tuple[LayerPass, ...]:
    """The attention calls, in order, of a pass through the layers of a model chunk.

    Args:
        recompute: by the backward.
        num_layers: of the chunk.
        num_nano_batches: ping-pong nano-batches; 1: the microbatch runs whole.
        backward: the pass; one that computes forwards again makes their calls too.
        training: without it no forward is computed again.
    """
    runs = attention_runs(recompute, num_layers, training=training)
    forwards = [LayerPass(False, ping_pong.forward(run.num_layers, num_nano_batches)) for run in runs]
    if not backward:
        return tuple(forwards)
    passes: list[LayerPass] = []
    for run, forward in zip(reversed(runs), reversed(forwards), strict=True):
        passes += [forward] * run.again + [LayerPass(True, ping_pong.backward(forward.segments))]
    return tuple(passes)


def phases(recompute: Recompute, num_layers: int, *, backward: bool, training: bool = True) -> frozenset[PhaseName]:
    """The phases of attention in such a pass: a backward that computes forwards again has both."""
    passes = attention_passes(recompute, num_layers, 1, backward=backward, training=training)
    return frozenset("backward" if each.backward else "forward" for each in passes)
