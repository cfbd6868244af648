"""Plan the steps of a run by one spec, in the training process and in the one that plans ahead."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron_balance.analysis.estimate import estimate
from megatron_balance.analysis.machine import Machine
from megatron_balance.analysis.step_memory import StepMemory
from megatron_balance.compile.proof.structure import verify_plans
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.layers import Layers
from megatron_balance.ir.model import Model
from megatron_balance.ir.step import EMPTY, Carry, Lengths, StepPlan
from megatron_balance.ir.strategy import Strategy
from megatron_balance.planners.base import JointStages, StepContext
from megatron_balance.planners.pipelines import Pipelines, pipelines_of, stage_cluster
from megatron_balance.planning.choice import PlannerChoice, choose_planner, planning_cost


@dataclass(frozen=True, slots=True)
class PlanSpec:
    """All that another process needs to plan the same steps."""

    name: str
    cluster: Cluster
    model: Model
    layers: Layers
    options: Mapping[str, Any]
    plan_costs: str | None = None
    pipeline: JointStages | None = None
    ping_pong: bool = False
    strategy: str | None = None
    """Text of the job's layout, where its replicas are pipelines."""
    changes: bool = False
    """Whether the planner chooses the strategy, and with it the number of microbatches."""
    base: str | None = None
    """With `changes`: text of the job's layout, which owns weights."""
    prove_every: int = 0
    """How often the planning process proves a step (`planning.proofs.Prover`)."""
    prove_as: int | None = None
    """The rank of the pool whose part it proves of plans for many ranks; None: it proves all alone."""
    memory: StepMemory | None = None
    """As `StepContext.memory`."""

    def to_json(self) -> str:
        body = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)} | {
            "options": dict(self.options)
        }
        return json.dumps(body, default=dataclasses.asdict)

    @classmethod
    def from_json(cls, text: str | bytes) -> PlanSpec:
        body = json.loads(text)
        body |= {
            "cluster": Cluster(**body["cluster"]),
            "model": Model(**body["model"]),
            "layers": Layers(**body["layers"]),
        }
        if body["pipeline"] is not None:
            body["pipeline"] = JointStages(Cluster(**body["pipeline"]["cluster"]), body["pipeline"]["num_chunks"])
        if body["memory"] is not None:
            body["memory"] = StepMemory.from_json(body["memory"])
        return cls(**body)

    def choice(self) -> PlannerChoice:
        return choose_planner(self.name, dict(self.options), "planner", self.layers)


class StepPlanner:
    """Plans the steps of a spec; `choice`: the planner, where it is not the registry's own."""

    def __init__(self, spec: PlanSpec, choice: PlannerChoice | None = None) -> None:
        self.choice = choice or spec.choice()
        self._context = StepContext(
            spec.cluster,
            spec.model,
            planning_cost(spec.cluster, spec.model, spec.plan_costs),
            joint=spec.pipeline,
            ping_pong=spec.ping_pong,
            own_microbatches=spec.changes,
            of_ranks=spec.changes,
            strategy=None if spec.strategy is None else Strategy.parse(spec.strategy),
            base=None if spec.base is None else Strategy.parse(spec.base),
            memory=spec.memory,
        )
        self._evaluation = dataclasses.replace(self._context, may_carry=False, forward_only=True)

    def candidates(self) -> list[Pipelines]:
        assert self.choice.planner.strategies is not None, "asked of planners that choose among strategies"
        context = dataclasses.replace(self._context, options=self.choice.options)
        return [pipelines_of(each, context) for each in self.choice.planner.strategies(self.choice.options)]

    def plan(
        self, lengths: Sequence[Sequence[int]], carry: Carry = EMPTY, *, may_delay: bool = True
    ) -> tuple[StepPlan, Carry]:
        """The plan of a training step, proved to hold together, and what it carries on."""
        context = self._context if may_delay else dataclasses.replace(self._context, may_delay=False)
        step, carried = self.choice.plan_step(_frozen(lengths), context, carry)
        verify_plans(step)
        return step, carried

    def plan_evaluation(self, lengths: Sequence[Sequence[int]]) -> StepPlan:
        step = self.choice.plan_step(_frozen(lengths), self._evaluation)[0]
        verify_plans(step)
        return step


def _frozen(lengths: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(int(n) for n in microbatch) for microbatch in lengths)


class Predicted(NamedTuple):
    """Of a layer, modules outside attention included; less is better."""

    too_large: bool
    """Whether a rank's memory does not hold the step."""
    layer_s: float
    """Infinite where nobody can tell."""


def predict(spec: PlanSpec, lengths: Lengths) -> Predicted:
    """The step of these lengths (tokens, by microbatch), planned as `spec` says and priced by
    closed forms.

    Raises:
        InfeasibleError: a microbatch that the ranks cannot hold.
        ConfigError: as `StepPlanner.plan`, of the planner's options.
    """
    step, _ = StepPlanner(spec).plan(lengths)
    too_large, total = False, 0.0
    for plan in step.plans:
        ranks = spec.cluster
        # Of a pipeline's own.
        if plan.num_ranks != ranks.num_ranks:
            ranks = stage_cluster(ranks, plan.num_ranks)
        cost = planning_cost(ranks, spec.model, spec.plan_costs)
        found = estimate(plan, Machine(ranks, spec.model, cost, memory=spec.memory))
        total += found.layer_s
        too_large |= not found.backward.fits
    return Predicted(too_large, total)
