"""The order in which a strategy's weights are pulled, and gradients pushed, where that runs beside
compute: slots, each an exchange of all ranks.

Slot 0 has the embedding, the last one what the last stage has alone. Between them are as many slots
as the longest stage of any pipeline has layers. A stage with fewer spreads them over these slots, so
that every rank's bytes go evenly, and each stage's first layer comes first. Weights come in the
order of slots, gradients go in the opposite one.
"""

from __future__ import annotations

import numpy as np

from megatron_balance.analysis.link.parameters import ParameterTable
from megatron_balance.analysis.link.table import WeightPiece
from megatron_balance.ir.arrays import Ints
from megatron_balance.ir.strategy import Strategy


def num_slots(strategy: Strategy, num_layers: int) -> int:
    """Slots of layers, each way."""
    return max(num_layers // scheme.pipeline for scheme in strategy.pipelines)


def layer_slot(layer: Ints, count: int | Ints, slots: int) -> Ints:
    """The slot of a stage's layers by their number in it, of `count`; slot 0 is the embedding's."""
    return 1 + layer * slots // count


def slots_of(numbers: Ints, ranks: Ints, strategy: Strategy, parameters: ParameterTable) -> Ints:
    """The slot in which each parameter of a role's rank moves [n].

    Args:
        numbers: of the parameters.
        ranks: that hold them in the strategy.
        strategy: whose PP divides the layers.
        parameters: all of the model's.
    """
    total = parameters.num_layers
    stages, stage = np.array([(seat.scheme.pipeline, seat.stage) for seat in strategy.seats()]).T[:, ranks]
    slots = num_slots(strategy, total)
    layer, count = parameters.layer[numbers], total // stages
    found = layer_slot(layer - stage * count, count, slots)
    found = np.where(layer < 0, 0, np.where(layer == total, slots + 1, found))
    tied_end = parameters.tied[numbers] & (stages > 1) & (stage == stages - 1)
    return np.where(tied_end, slots + 1, found)


def slots_of_pieces(pieces: Ints, end: int, strategy: Strategy, parameters: ParameterTable) -> Ints:
    """The slot of each transfer [n]; `end`: column of the role's rank, `WeightPiece.DST` in a pull."""
    return slots_of(pieces[:, WeightPiece.PARAMETER], pieces[:, end], strategy, parameters)
