"""Surroundings of a step's attention calls: options, synchronisation, optimizer, experts, memory."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from megatron_balance.analysis.backward import Stage, StepBytes, decide, microbatch_bytes, step_bytes
from megatron_balance.analysis.change import Layouts
from megatron_balance.analysis.machine import Machine
from megatron_balance.analysis.memory import Parameters, Recompute, Sharding, parameters_of_rank
from megatron_balance.analysis.statistics import linear_tokens
from megatron_balance.analysis.step_memory import StepMemory, stages_of
from megatron_balance.compile.remap import layouts
from megatron_balance.cost import parallel
from megatron_balance.cost.base import Link
from megatron_balance.cost.modules import ExpertLoad, expert_part
from megatron_balance.cost.parallel import CollectiveGroup, group_of
from megatron_balance.errors import ConfigError
from megatron_balance.ir.arrays import Floats
from megatron_balance.ir.columns import Placed
from megatron_balance.ir.plan import MicrobatchPlan
from megatron_balance.ir.program import Backward, Policy
from megatron_balance.simulator.attention import EngineName, Transport

# The plan of a microbatch, or of each of its nano-batches.
Microbatch: TypeAlias = MicrobatchPlan | tuple[MicrobatchPlan, ...]


@dataclass(frozen=True, slots=True)
class Setup:
    """Options of a step around its plans.

    `policy`, `recompute`: what is held for the backward; policy `auto`: layer by layer, as the
    cluster's memory allows. `pipeline`: stages, each with as many ranks as the plan; `interleave`:
    model chunks of a stage. `experts`: ranks that share a layer's experts; `expert_load`: how
    unevenly tokens are routed to them; None: each rank computes for its own tokens. `overlap_sync`:
    gradients are synchronised layer by layer beside the last backward. `interleaved`: nano-batches
    run interleaved, else one after the other. `transport`: the clocks of exchanges, CUDA streams or
    gloo's sockets. `layouts`: what owns weights, and the strategies that share the memory of
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


@dataclass(frozen=True, slots=True)
class StageSetup:
    """A setup on the machine of one pipeline stage's ranks."""

    machine: Machine
    setup: Setup

    def layers_per_chunk(self) -> int:
        """Layers of each model chunk of the pipeline. Raises ConfigError: the chunks cannot be
        given as many each.
        """
        model, chunks = self.machine.model, self.setup.pipeline * self.setup.interleave
        layers, rest = divmod(model.num_layers, chunks)
        if rest:
            raise ConfigError(f"{model.num_layers} layers of {model.name} cannot be cut into {chunks} pipeline chunks")
        return layers

    def sync_s(self, num_layers: int, backward_s: float) -> float:
        """Seconds of gradient synchronisation that nothing hides.

        `backward_s`: of each of a stage's layers in the last backward.
        """
        if self.machine.cluster.num_ranks == 1:
            return 0.0
        held = self._held()
        seconds = parallel.gradient_sync_s(held.others, self._group())
        if held.experts and self.machine.num_ranks > self.setup.experts:
            seconds += parallel.gradient_sync_s(held.experts, self._group_of_experts())
        if not self.setup.overlap_sync:
            return seconds
        # The first layer's gradients come last and have nothing left to hide behind.
        return max(seconds / num_layers, seconds - (num_layers - 1) * backward_s)

    def experts_s(self, num_tokens: float) -> float:
        """Seconds of a layer's exchange of tokens between experts, one way through the layer."""
        return parallel.experts_s(self.machine.model, num_tokens, self.machine.cluster, self.setup.experts)

    def optimizer_s(self) -> float:
        ranks, held = self.machine.num_ranks, self._held()
        own = held.others / ranks + held.experts / max(1.0, ranks / self.setup.experts)
        return self.machine.cost.optimizer_s(own) * float(self.machine.slow().max())

    def stages(self) -> list[Stage]:
        """The pipeline stages as memory sees them."""
        setup, machine = self.setup, self.machine
        return stages_of(
            machine.model,
            machine.num_ranks,
            recompute=setup.recompute,
            pipeline=setup.pipeline,
            chunks=setup.interleave,
            experts=setup.experts,
        )

    def step_bytes(self, plans: Sequence[Microbatch]) -> list[StepBytes]:
        """Predicted bytes of each stage's ranks."""
        model = self.machine.model
        # Microbatches of one plan object are counted once.
        found = {id(plan): microbatch_bytes(parts_of(plan), model) for plan in plans}
        return [step_bytes([found[id(plan)] for plan in plans], model, stage) for stage in self.stages()]

    def _held(self) -> Parameters:
        # Parameters of a rank of the stage with the most.
        setup, machine = self.setup, self.machine
        ends = [
            Sharding(pipeline=setup.pipeline, stage=at, optimizer=machine.num_ranks, experts=setup.experts)
            for at in (0, setup.pipeline - 1)
        ]
        return max((parameters_of_rank(machine.model, sharding) for sharding in ends), key=sum)

    def _group_of_experts(self) -> CollectiveGroup:
        # The ranks that have the same experts, one of `experts`, with that part of a node's NICs.
        every, whole = self.setup.experts, self._group()
        here = max(1, whole.ranks_per_node // every)
        inter = Link(whole.inter.alpha_s, whole.inter.bytes_per_s * here / whole.ranks_per_node)
        return CollectiveGroup(whole.num_ranks // every, here, whole.intra, inter)

    def _group(self) -> CollectiveGroup:
        machine = self.machine
        group = group_of(machine.cluster, machine.num_ranks, machine.cluster.node_size, busy_nics=True)
        nics = machine.cluster.node_size / machine.cluster.ranks_per_nic
        inter = Link(machine.inter.alpha_s, machine.inter.bytes_per_s * max(1.0, nics))
        return CollectiveGroup(group.num_ranks, group.ranks_per_node, machine.intra, inter)


def step_memory(stage: StageSetup) -> StepMemory:
    """The memory of a step around its plans, for planners."""
    return StepMemory(stage.machine.model, tuple(stage.stages()), stage.setup.policy)


def peaks(stages: Sequence[StepBytes], keeping: int) -> Floats:
    """Peak bytes by rank, stage by stage."""
    return np.concatenate([stage.peak(min(keeping, stage.layers)) for stage in stages])


def settled(plans: Sequence[Microbatch], stage: StageSetup) -> Setup:
    """The setup with `auto` decided: the policy of most layers, for figures of one layer."""
    if stage.setup.policy != "auto":
        return stage.setup
    decision = decide(stage.step_bytes(plans), "auto", stage.machine.cluster.memory_bytes)
    return replace(stage.setup, policy="keep" if decision.kept_share >= 0.5 else "replay")


def added_s(plan: MicrobatchPlan, stage: StageSetup, pool: int | None = None) -> tuple[Floats, Floats]:
    """Seconds that experts add to a layer on each rank [R], forward and backward: their exchange,
    and waiting for the busiest rank (`Setup.expert_load`).

    With a load, the ranks that share the experts (consecutive ones) share their visits, and wait for
    the busiest of them, whose part of the layer's products grows with its visits. Without, each rank
    computes for as many as its own tokens make. `pool`: ranks of one pipeline stage, the first `pool`
    ranks being the first stage's; None: all.
    """
    size, model, load = pool or plan.num_ranks, stage.machine.model, stage.setup.expert_load
    if not model.num_experts or stage.setup.experts == 1:
        return np.zeros(plan.num_ranks), np.zeros(plan.num_ranks)
    tokens = linear_tokens(plan)
    if load is None:
        most = tokens.reshape(-1, size).max(axis=1)  # [stages]
        exchange = np.repeat([stage.experts_s(float(each)) if each else 0.0 for each in most], size)
        return exchange, exchange
    visits = _visits(plan, load, stage)
    exchange = np.array([stage.experts_s(each) if each else 0.0 for each in visits.tolist()])
    part, cost, slow = expert_part(model), stage.machine.cost, stage.machine.slow()

    def added(backward: bool) -> Floats:
        own, busiest = (
            np.array([cost.layer_s(each, backward=backward) for each in counts.tolist()]) for counts in (tokens, visits)
        )
        return exchange + part * (busiest - own) * slow

    return added(False), added(True)


def _visits(plan: MicrobatchPlan, load: ExpertLoad, stage: StageSetup) -> Floats:
    # Of the busiest rank of each rank's group, as tokens [R].
    ranks, model = stage.setup.experts, stage.machine.model
    rows = layouts(plan)
    tokens = np.zeros((plan.num_ranks // ranks, len(plan.lengths)))  # [groups, sequences]
    at = (rows[:, Placed.RANK] // ranks, rows[:, Placed.SEQ])
    np.add.at(tokens, at, rows[:, Placed.STOP] - rows[:, Placed.START])
    return np.repeat(load.busiest(tokens, model, ranks), ranks)
