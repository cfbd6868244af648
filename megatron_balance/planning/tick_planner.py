"""Plans of whole steps for pipeline stages that attend together, in the training process and in the one that plans ahead."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_balance.config import choose_planner, planning_cost
from megatron_balance.ir.batch import Batch
from megatron_balance.ir.plan import MicrobatchPlan
from megatron_balance.ir.rows import Rows
from megatron_balance.ir.tick import Tick, TickPlan
from megatron_balance.planning.ahead import PlanSpec
from megatron_balance.planning.tick_order import ticks
from megatron_balance.planning.ticks import plan_ticks

Lengths = Sequence[Sequence[int]]
"""In tokens, of the sequences of each microbatch."""


class TickPlanner:
    """A planner, over the ranks of a stage and over those of all stages."""

    def __init__(self, spec: PlanSpec) -> None:
        """Make the planner that `spec` describes; it names a pipeline."""
        assert spec.pipeline is not None
        self._spec = spec
        self._pipeline = spec.pipeline
        self._choice = choose_planner(spec.name, dict(spec.options), "planner", spec.layers)
        self._cost = planning_cost(spec.cluster, spec.model, spec.plan_costs)
        self._joint_cost = planning_cost(spec.pipeline.cluster, spec.model, spec.plan_costs)

    def plan(self, lengths: Lengths, *, forward_only: bool = False) -> tuple[tuple[MicrobatchPlan, ...], tuple[TickPlan, ...]]:
        """Where the tokens of each microbatch are owned by the ranks of a stage, and the attention of all stages, tick by tick.

        Raises:
            InfeasibleError: a microbatch that the ranks of a stage cannot hold.
            ConfigError: interleaved stages, and microbatches that do not come in whole groups.
        """
        order = self.order(len(lengths), forward_only=forward_only)
        owned = tuple(self._choice.plan(Batch(tuple(m)), self._spec.cluster, self._spec.model, self._cost) for m in lengths)
        return owned, self._choice.plan_ticks(order, owned, self._pipeline.cluster, self._spec.model, self._joint_cost)

    def order(self, num_microbatches: int, *, forward_only: bool) -> tuple[Tick, ...]:
        """The ticks of a step."""
        num_stages = self._pipeline.cluster.num_ranks // self._spec.cluster.num_ranks
        return ticks(num_stages, num_microbatches, self._pipeline.num_chunks, forward_only=forward_only)

    def flat(self, lengths: Lengths) -> tuple[MicrobatchPlan, ...]:
        """The plans of a training step in a row: by microbatch, then those of the ticks, each once."""
        owned, planned = self.plan(lengths)
        return (*owned, *{each.tick.microbatches: each.plan for each in planned}.values())

    def from_flat(self, plans: Sequence[MicrobatchPlan], num_microbatches: int) -> tuple[tuple[MicrobatchPlan, ...], tuple[TickPlan, ...]]:
        """What `plan` returned, from `flat`'s row of it."""
        owned, left = tuple(plans[:num_microbatches]), iter(plans[num_microbatches:])

        def ready(_lengths: tuple[int, ...], _owned: Rows) -> MicrobatchPlan:
            return next(left)

        return owned, plan_ticks(self.order(num_microbatches, forward_only=False), owned, ready)
