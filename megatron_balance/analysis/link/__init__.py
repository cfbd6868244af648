"""The link between the base layout and a strategy: which rectangle of which parameter goes from
which rank to which, in a pull (weights to roles) and in a push (gradients to owners).

Source: Hydraulis, arXiv 2412.07894, section 5.2 and Appendix B.1.

- What we implement: parameters and optimizer states that are cut differently, and one exchange each
  way that carries a rank's weights and gradients from one cut to the other.
- Where we differ: the paper cuts every parameter into equal slices, as many as the LCM of the
  number of GPUs and the largest TP (for gradients: times replicas). Such a number need not divide
  a dimension. Transfers here are intersections of rectangles, so any degrees go together. Gradients
  go to their owner at once, without a reduce-scatter among replicas before.
  A rectangle that several ranks of a node have alike crosses its NICs once, and gradients are summed
  in the node first, where that pays (`nodes`).

Pure NumPy: no group, no tensor, no clock. Every rank computes its own rows, and those of two ranks
agree without a message ([0024](../../../docs/adr/0024-weights-move-optimizer-stays.md)).
"""

from megatron_balance.analysis.link.nodes import Twins, through_nodes
from megatron_balance.analysis.link.parameters import Parameter, ParameterTable
from megatron_balance.analysis.link.places import WeightPlace, places
from megatron_balance.analysis.link.shards import Base, Buffer, Shard, held
from megatron_balance.analysis.link.slots import layer_slot, num_slots, slots_of, slots_of_pieces
from megatron_balance.analysis.link.table import StrategyLink, WeightPiece, elements, link, link_of, traffic
from megatron_balance.analysis.link.volume import WeightTraffic, links_s, volume

__all__ = [
    "Base",
    "Buffer",
    "Parameter",
    "ParameterTable",
    "Shard",
    "StrategyLink",
    "Twins",
    "WeightPiece",
    "WeightPlace",
    "WeightTraffic",
    "elements",
    "held",
    "layer_slot",
    "link",
    "link_of",
    "links_s",
    "num_slots",
    "places",
    "slots_of",
    "slots_of_pieces",
    "through_nodes",
    "traffic",
    "volume",
]
