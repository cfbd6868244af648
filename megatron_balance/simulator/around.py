"""A step around its layers: gradient synchronisation, the optimizer, the spread of the model."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_balance.analysis import memory
from megatron_balance.analysis.memory import Sharding
from megatron_balance.cost import parallel
from megatron_balance.cost.base import Link
from megatron_balance.cost.parallel import CollectiveGroup, group_of
from megatron_balance.simulator.machine import Machine
from megatron_balance.simulator.setup import Setup


@dataclass(frozen=True, slots=True)
class Around:
    """The parts of a step around the layers of one pipeline stage, whose ranks are those of
    `machine`.
    """

    machine: Machine
    setup: Setup

    def sharding(self, stage: int) -> Sharding:
        """Spread of the state of a stage's layers over ranks."""
        return Sharding(
            pipeline=self.setup.pipeline, stage=stage, optimizer=self.machine.num_ranks, experts=self.setup.experts
        )

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
        """Seconds of the optimizer's update."""
        ranks, held = self.machine.num_ranks, self._held()
        own = held.others / ranks + held.experts / max(1.0, ranks / self.setup.experts)
        return self.machine.cost.optimizer_s(own) * float(self.machine.slow().max())

    def _held(self) -> memory.Parameters:
        """Parameters of a rank of the stage with the most."""
        ends = (0, self.setup.pipeline - 1)
        return max((memory.parameters_of_rank(self.machine.model, self.sharding(s)) for s in ends), key=sum)

    def _group_of_experts(self) -> CollectiveGroup:
        """The ranks that have the same experts, one of `experts`, with that part of a node's NICs."""
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
