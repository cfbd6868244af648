"""Memory of a step around its plans: the layout that runs, told alike to planners, the simulator and
training.

A plan is of the ranks of one pipeline stage. What such a rank has room for depends on the stages, on
the ranks that share out experts and the optimizer's state, on recomputation, and on the microbatches
in flight.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_balance.analysis import backward
from megatron_balance.analysis.memory import OPTIMIZER_BYTES, Holding, Recompute, Sharding, rank_memory
from megatron_balance.cost.modules import num_parameters
from megatron_balance.ir.model import Model
from megatron_balance.ir.plan import MicrobatchPlan, Zone
from megatron_balance.ir.program import Backward
from megatron_balance.ir.strategy import Scheme


@dataclass(frozen=True, slots=True)
class StepMemory:
    """`model`: as activations of one rank see it; `stages`: of the pipeline; `asked`: the key
    `backward` of a configuration.
    """

    model: Model
    stages: tuple[backward.Stage, ...]
    asked: Backward = "auto"

    @classmethod
    def one_stage(cls, model: Model, num_ranks: int) -> StepMemory:
        """The memory of a step of one stage; all its ranks share out the optimizer's state."""
        return cls(model, (backward.Stage(model.num_layers, Sharding(optimizer=num_ranks)),))

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> StepMemory:
        """The one that `dataclasses.asdict` made a mapping of."""
        stages: list[Mapping[str, Any]] = [
            {**each, "sharding": Sharding(**each["sharding"]), "recompute": backward.Recomputed(**each["recompute"])}
            for each in body["stages"]
        ]
        return cls(Model(**body["model"]), tuple(backward.Stage(**each) for each in stages), body["asked"])

    def of_microbatches(self, number: int) -> StepMemory:
        """The memory of a step of so many microbatches that are alike; unchanged where the passes in
        flight are known. Stages that another one's peak is never below are left out.
        """
        if any(stage.in_flight is not None for stage in self.stages):
            return self
        kept: list[backward.Stage] = []
        for stage in self.stages:
            known = replace(stage, in_flight=stage.passes(number), state_bytes=backward.state_bytes(self.model, stage))
            if stage.is_last or not any(_covers(other, known) for other in kept):
                kept.append(known)
        return replace(self, stages=tuple(kept))

    def decide(self, microbatch: backward.MicrobatchBytes, memory_bytes: float | None) -> backward.Decision:
        """Decide how many layers keep in a step whose microbatches are all like this one."""
        found = [backward.step_bytes([microbatch], self.model, stage) for stage in self.stages]
        return backward.decide(found, self.asked, memory_bytes)


def _covers(stage: backward.Stage, other: backward.Stage) -> bool:
    # Whether `stage` holds at least what `other` does, whatever the microbatches; both with state
    # and passes, `other` without a head.
    assert stage.in_flight is not None and other.in_flight is not None  # noqa: PT018  both or neither
    assert stage.state_bytes is not None and other.state_bytes is not None  # noqa: PT018
    return (
        (stage.recompute, stage.chunks) == (other.recompute, other.chunks)
        and stage.num_layers >= other.num_layers
        and stage.in_flight >= other.in_flight
        and stage.state_bytes >= other.state_bytes
    )


_PROBE_TOKENS = 1024

# Ranks of a ring from which on a replayed backward holds no more for another one.
_PROBE_RANKS = 16


def stages_of(
    model: Model, num_ranks: int, *, recompute: Recompute = "none", pipeline: int = 1, chunks: int = 1, experts: int = 1
) -> list[backward.Stage]:
    """The pipeline stages of a step, each over `num_ranks` ranks that share out the optimizer's state.

    `chunks`: model chunks of a stage; `experts`: ranks that share out the experts of a layer.
    """
    again = backward.Recomputed("uniform") if recompute == "full" else backward.Recomputed()
    return [
        backward.Stage(
            model.num_layers // pipeline,
            Sharding(pipeline=pipeline, stage=at, optimizer=num_ranks, experts=experts),
            again,
            chunks,
        )
        for at in range(pipeline)
    ]


def most_tokens(
    model: Model, num_ranks: int, memory_bytes: float, stages: Sequence[backward.Stage], num_microbatches: int = 1
) -> int:
    """Tokens of each microbatch that a rank of every stage holds within `USABLE` of its memory; less
    than 1 where the state alone does not fit.

    Every sequence goes round a ring of all ranks, and the backward receives keys and values again
    (policy replay), as `auto` does where memory is short.
    """
    probe = [_probe(model, num_ranks)] * num_microbatches
    found = [backward.step_bytes(probe, model, stage) for stage in stages]
    # All but the state grows with the tokens.
    return min(
        int(_PROBE_TOKENS * (backward.USABLE * memory_bytes - each.state) / (float(each.peak(0).max()) - each.state))
        for each in found
    )


def _probe(model: Model, num_ranks: int) -> backward.MicrobatchBytes:
    # Bytes of a microbatch of `_PROBE_TOKENS` a rank, one sequence around a ring of them all.
    ranks = min(num_ranks, _PROBE_RANKS)
    plan = MicrobatchPlan(
        "probe",
        (_PROBE_TOKENS * ranks,),
        ranks,
        ranks,
        model.num_heads,
        model.num_kv_heads,
        (Zone("pool", "ring", tuple(range(ranks)), (0,)),),
    )
    return backward.microbatch_bytes([plan], model)


# Share of a GPU's memory that is left free.
MARGIN = 0.1


def max_len(scheme: Scheme, model: Model, memory_bytes: float, num_ranks: int) -> int:
    """Most tokens of a microbatch that the first and the last stage of a pipeline hold; 0 where the
    states alone do not fit.

    The optimizer's state is split over all `num_ranks` GPUs; weights and gradients are the stage's.
    The first stage holds the activations of PP microbatches, the last one those of one and its
    logits; with context parallelism, keys and values of one round and of the next. C.1 has one
    vocabulary table, two lie on a pipeline of one stage, and it has no logits.
    """
    ends = {0, scheme.pipeline - 1}
    return max(0, min(_stage_tokens(scheme, model, memory_bytes, num_ranks, at) for at in ends))


def _stage_tokens(scheme: Scheme, model: Model, memory_bytes: float, num_ranks: int, stage: int) -> int:
    sharding = Sharding(scheme.tensor, scheme.pipeline, stage)
    holding = Holding("replay", num_microbatches=scheme.pipeline)

    def used(tokens: float) -> float:
        own = tokens / scheme.context
        held = rank_memory(model, own, own if scheme.context > 1 else 0.0, sharding, holding)
        return replace(held, optimizer=OPTIMIZER_BYTES * num_parameters(model) / num_ranks).total

    empty = used(0.0)
    per_token = (used(float(_PROBE_TOKENS)) - empty) / _PROBE_TOKENS  # used bytes are linear in tokens
    return int(((1 - MARGIN) * memory_bytes - empty) / per_token)
