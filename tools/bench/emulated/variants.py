"""The variants that are compared: the bars of Fig. 11 and, beside them, llama_all_gather."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_balance.planners import PLANNERS
from megatron_balance.planning.choice import PlannerChoice, choose_planner
from megatron_balance.planning.layers import Layers


@dataclass(frozen=True, slots=True)
class Variant:
    """A planner and the layers around it. `ping_pong`: microbatches run as two nano-batches,
    `interleaved` or one after the other.
    """

    name: str
    planner: str
    layers: Layers
    ping_pong: bool = False
    interleaved: bool = True

    def choice(self) -> PlannerChoice:
        """As a configuration would say it; zeppelin's own options `routed` and `remapped` follow
        the layers.
        """
        return choose_planner(self.planner, {}, self.name, self.layers)


BASELINE = "te_ring"
VARIANTS = (
    Variant(BASELINE, "te_ring", Layers()),
    Variant("te_ring + routing", "te_ring", Layers(routing="always")),
    Variant("zeppelin engine", "zeppelin", Layers()),
    Variant("zeppelin engine + routing", "zeppelin", Layers(routing="pays")),
    Variant("zeppelin, remap always", "zeppelin", Layers(routing="pays", remap=True)),
    Variant("zeppelin, as it is by default", "zeppelin", PLANNERS["zeppelin"].layers),
    Variant("llama_all_gather", "llama_all_gather", Layers()),
    # gloo gathers round one ring, over one NIC of a node; NCCL uses all of them, as this does.
    Variant("llama_all_gather + routing", "llama_all_gather", Layers(routing="always")),
)
