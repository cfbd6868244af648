"""A step as training would run it: microbatches whole or as two nano-batches (docs/adr/0013), stages apart or attending together (0014)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from megatron_balance.compile.ping_pong import NUM_NANO_BATCHES
from megatron_balance.config import PING_PONG_BY_DEFAULT, PlannerChoice
from megatron_balance.cost.base import CostModel
from megatron_balance.errors import ConfigError
from megatron_balance.ir.batch import Batch
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.model import Model
from megatron_balance.ir.plan import BatchPlan, MicrobatchPlan
from megatron_balance.ir.tick import TickPlan
from megatron_balance.planners import PLANNERS
from megatron_balance.planning.tick_order import ticks
from megatron_balance.simulator.joint import simulate_joint
from megatron_balance.simulator.machine import Machine
from megatron_balance.simulator.setup import Microbatch, Setup, parts_of
from megatron_balance.simulator.step import Step, simulate_step
from megatron_balance.solvers.nano_batches import nano_batches

PingPong: TypeAlias = bool | Literal["auto"]
Stages: TypeAlias = Literal["joint", "stages"] | None


@dataclass(frozen=True, slots=True)
class StepMode:
    """`ping_pong`: microbatches of two sequences or more run as two nano-batches. `pipeline`: whether its stages attend together or each
    for itself; None: there is one.
    """

    ping_pong: bool = False
    pipeline: Stages = None

    @property
    def joint(self) -> bool:
        return self.pipeline == "joint"


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The plans of a step. `ticks`: by nano-batch, if all stages attend together; then `microbatches` say where tokens are owned."""

    way: StepMode
    microbatches: tuple[Microbatch, ...]
    ticks: tuple[tuple[TickPlan, ...], ...] = ()

    @property
    def plans(self) -> BatchPlan:
        """All plans of microbatches, or of their nano-batches."""
        return BatchPlan(tuple(plan for each in self.microbatches for plan in parts_of(each)))

    @property
    def attention(self) -> tuple[MicrobatchPlan, ...]:
        """The plans of all that attends."""
        return tuple(each.plan for nano_batch in self.ticks for each in nano_batch) or self.plans.microbatches

    def fullest_tick(self) -> TickPlan:
        """The first in which the most stages have something of their own."""
        return max(self.ticks[0], key=lambda each: sum(cell is not None for cell in each.tick.cells))


@dataclass(frozen=True, slots=True)
class Ranks:
    """What is planned for, and by which prices."""

    cluster: Cluster
    cost: CostModel


@dataclass(frozen=True, slots=True)
class Pipeline:
    """The ranks of one stage and those of all (the same where there is one); `interleave`: model chunks of a stage."""

    stage: Ranks
    pool: Ranks
    interleave: int = 1

    @property
    def num_stages(self) -> int:
        return self.pool.cluster.num_ranks // self.stage.cluster.num_ranks


def step_mode(choice: PlannerChoice, num_stages: int, ping_pong: PingPong = "auto", stages: Stages = None) -> StepMode:
    """How training runs this planner's plans under the keys `ping_pong` and `pipeline` of a configuration.

    Raises:
        ConfigError: stages shall attend together, which the planner cannot plan.
    """
    ping_pong = choice.name == PING_PONG_BY_DEFAULT if ping_pong == "auto" else ping_pong
    able = PLANNERS[choice.name].plan_owned is not None
    if num_stages > 1 and stages == "joint" and not able:
        raise ConfigError(f"pipeline: joint: planner {choice.name} plans each stage for itself; choose distca, or 'stages'")
    pipeline: Stages = "joint" if able and stages != "stages" else "stages"
    return StepMode(ping_pong, pipeline if num_stages > 1 else None)


def plan_step(choice: PlannerChoice, batches: Sequence[Batch], way: StepMode, model: Model, pipeline: Pipeline) -> StepPlan:
    """The plans of one step, of a microbatch for each batch; a system that makes microbatches of its own makes them.

    Raises:
        InfeasibleError: a microbatch that the ranks cannot hold.
        ConfigError: interleaved stages, and microbatches that do not come in whole groups.
    """
    stage, pool = pipeline.stage, pipeline.pool

    def plan(lengths: Sequence[int]) -> MicrobatchPlan:
        return choice.plan(Batch(tuple(lengths)), stage.cluster, model, stage.cost)

    if way.ping_pong:
        if PLANNERS[choice.name].plan_batch is not None:
            batches = [Batch(each.lengths) for each in choice.plan_step(batches, stage.cluster, model, stage.cost).microbatches]
        alike = way.joint and any(len(batch.lengths) >= NUM_NANO_BATCHES for batch in batches)
        microbatches: list[Microbatch] = []
        for batch in batches:
            two = alike or len(batch.lengths) >= NUM_NANO_BATCHES
            parts = nano_batches(batch.lengths) if two else (range(len(batch.lengths)),)
            planned = tuple(plan([batch.lengths[i] for i in part]) for part in parts)
            microbatches.append(planned if two else planned[0])
    else:
        microbatches = list(choice.plan_step(batches, stage.cluster, model, stage.cost).microbatches)
    if not way.joint:
        return StepPlan(way, tuple(microbatches))
    order = ticks(pipeline.num_stages, len(microbatches), pipeline.interleave)
    of_nano_batches = zip(*(parts_of(each) for each in microbatches), strict=True)
    return StepPlan(
        way, tuple(microbatches), tuple(choice.plan_ticks(order, owned, pool.cluster, model, pool.cost) for owned in of_nano_batches)
    )


def simulate_planned(plan: StepPlan, stage: Machine, pool: Machine, setup: Setup) -> Step:
    """The step on the machine of one stage's ranks and of all stages' (the same where there is one).

    Raises:
        ConfigError: layers or microbatches that the pipeline cannot be given evenly.
    """
    if plan.ticks:
        return simulate_joint(plan.ticks, plan.microbatches, stage, pool, setup)
    return simulate_step(plan.microbatches, stage, setup)
