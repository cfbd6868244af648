"""Options of a simulated step, and the type of its microbatches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from megatron_balance.analysis.change import Layouts
from megatron_balance.analysis.memory import Recompute
from megatron_balance.cost.experts import ExpertLoad
from megatron_balance.errors import ConfigError
from megatron_balance.ir.plan import MicrobatchPlan
from megatron_balance.ir.program import Backward, Policy
from megatron_balance.simulator.attention import EngineName
from megatron_balance.simulator.engine import Transport

Microbatch: TypeAlias = MicrobatchPlan | tuple[MicrobatchPlan, ...]
"""The plan of a microbatch, or of each of its nano-batches."""


@dataclass(frozen=True, slots=True)
class Setup:
    """Options of a step around its plans.

    `policy`, `recompute`: what is held for the backward; policy `auto`: as the cluster's memory
    allows, layer by layer. `pipeline`: stages, each with as many
    ranks as the plan; `interleave`: model chunks of a stage. `experts`: ranks that share a layer's
    experts; `expert_load`: how unevenly tokens are routed to them, else each rank computes for its own
    tokens. `overlap_sync`: gradients are synchronised layer by layer beside the last backward.
    `interleaved`: nano-batches run interleaved, else one after the other. `transport`: as in
    `simulator.engine`. `layouts`: what owns weights, and the strategies that share the memory of
    roles; None: weights stay where they are.
    """

    policy: Backward = "keep"
    recompute: Recompute = "none"
    pipeline: int = 1
    interleave: int = 1
    experts: int = 1
    expert_load: ExpertLoad | None = None
    overlap_sync: bool = True
    interleaved: bool = True
    engine: EngineName = "auto"
    transport: Transport = "streams"
    layouts: Layouts | None = None

    @property
    def drawn(self) -> Policy:
        """The policy of the layer that timelines show."""
        return "replay" if self.policy == "replay" else "keep"

    def __post_init__(self) -> None:
        for name in ("pipeline", "interleave", "experts"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} {getattr(self, name)}: must be at least 1")
        if self.interleave > 1 and self.pipeline == 1:
            raise ConfigError(f"interleave {self.interleave} goes with a pipeline of several stages; pipeline is 1")


PLAIN = Setup()


def parts_of(microbatch: Microbatch) -> tuple[MicrobatchPlan, ...]:
    """The plans of a microbatch: one, or one of each nano-batch."""
    return microbatch if isinstance(microbatch, tuple) else (microbatch,)
