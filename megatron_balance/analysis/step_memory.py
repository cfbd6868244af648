"""Memory of a step around its plans: the layout that runs, told alike to planners, the simulator and
training.

A plan is of the ranks of one pipeline stage. What such a rank has room for depends on the stages, on
the ranks that share out experts and the optimizer's state, on recomputation, and on the microbatches
in flight.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from megatron_balance.analysis.backward import (
    Decision,
    MicrobatchBytes,
    Stage,
    decide,
    state_bytes,
    step_bytes,
)
from megatron_balance.analysis.layer_runs import Recompute
from megatron_balance.analysis.memory import Sharding
from megatron_balance.ir.model import Model
from megatron_balance.ir.program import Backward


@dataclass(frozen=True, slots=True)
class StepMemory:
    """`model`: as activations of one rank see it; `stages`: of the pipeline; `asked`: the key
    `backward` of a configuration.
    """

    model: Model
    stages: tuple[Stage, ...]
    asked: Backward = "auto"

    @classmethod
    def one_stage(cls, model: Model, num_ranks: int) -> StepMemory:
        """The memory of a step of one stage; all its ranks share out the optimizer's state."""
        return cls(model, (Stage(model.num_layers, Sharding(optimizer=num_ranks)),))

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> StepMemory:
        """The one that `dataclasses.asdict` made a mapping of."""
        stages: list[Mapping[str, Any]] = [
            {**each, "sharding": Sharding(**each["sharding"]), "recompute": Recompute(**each["recompute"])}
            for each in body["stages"]
        ]
        return cls(Model(**body["model"]), tuple(Stage(**each) for each in stages), body["asked"])

    def of_microbatches(self, number: int) -> StepMemory:
        """The memory of a step of so many microbatches that are alike; unchanged where the passes in
        flight are known. Stages that another one's peak is never below are left out.
        """
        if any(stage.in_flight is not None for stage in self.stages):
            return self
        kept: list[Stage] = []
        for stage in self.stages:
            known = replace(stage, in_flight=stage.passes(number), state_bytes=state_bytes(self.model, stage))
            if stage.is_last or not any(_covers(other, known) for other in kept):
                kept.append(known)
        return replace(self, stages=tuple(kept))

    def decide(self, microbatch: MicrobatchBytes, memory_bytes: float | None) -> Decision:
        """Decide how many layers keep in a step whose microbatches are all like this one."""
        found = [step_bytes([microbatch], self.model, stage) for stage in self.stages]
        return decide(found, self.asked, memory_bytes)


def _covers(stage: Stage, other: Stage) -> bool:
    """Whether `stage` holds at least what `other` does, whatever the microbatches; both with state and
    passes, `other` without a head.
    """
    assert stage.in_flight is not None and other.in_flight is not None  # noqa: PT018  both or neither
    assert stage.state_bytes is not None and other.state_bytes is not None  # noqa: PT018
    return (
        (stage.recompute, stage.chunks) == (other.recompute, other.chunks)
        and stage.num_layers >= other.num_layers
        and stage.in_flight >= other.in_flight
        and stage.state_bytes >= other.state_bytes
    )
