"""The variants that are compared: the bars of Fig. 11 with rings as the paper has them, zeppelin's
newer rules, `auto`, and other planners beside them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_balance.planners import PLANNERS
from megatron_balance.planning.choice import PlannerChoice, choose_planner
from megatron_balance.planning.layers import Layers


@dataclass(frozen=True, slots=True)
class Variant:
    """A planner and the layers around it. `ping_pong`: microbatches run as two nano-batches,
    `interleaved` or one after the other; `options`: the planner's, by name.
    """

    name: str
    planner: str
    layers: Layers
    ping_pong: bool = False
    interleaved: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)

    def choice(self) -> PlannerChoice:
        """As a configuration would say it; zeppelin's own options `routed` and `remapped` follow
        the layers.
        """
        return choose_planner(self.planner, self.options, self.name, self.layers)


def _default(name: str, planner: str, **options: Any) -> Variant:
    """A planner with the layers that it has by default."""
    return Variant(name, planner, PLANNERS[planner].layers, options=options)


BASELINE = "te_ring"
RINGS = {"rule": "groups", "group_size": 1}
VARIANTS = (
    Variant(BASELINE, "te_ring", Layers()),
    Variant("te_ring + routing", "te_ring", Layers(routing="always")),
    _default("zeppelin, printed rule", "zeppelin", rule="paper"),
    Variant("zeppelin, rings", "zeppelin", Layers(), options=RINGS),
    Variant("zeppelin, rings + routing", "zeppelin", Layers(routing="pays"), options=RINGS),
    Variant("zeppelin, rings, remap always", "zeppelin", Layers(routing="pays", remap=True), options=RINGS),
    _default("zeppelin, rings of groups", "zeppelin", rule="groups"),
    _default("zeppelin", "zeppelin"),
    _default("auto", "auto"),
    _default("ulysses", "ulysses"),
    _default("flexsp", "flexsp"),
    Variant("llama_all_gather", "llama_all_gather", Layers()),
    # gloo gathers round one ring, over one NIC of a node; NCCL uses all of them, as this does.
    Variant("llama_all_gather + routing", "llama_all_gather", Layers(routing="always")),
)
QUICK = (0, 2, 4, 6, 7, 8)
"""Places of what a short run compares."""
