"""The systems that Zeppelin compares (section 5), as planners on the simulator's clocks.

`keep` is the policy of all: Transformer Engine's backward ring brings keys and values again and
carries their gradients, both in bf16 (section 5.4.1: 4.41 ms a round, twice the forward's). Our
gradients travel in fp32, so holding the keys and values moves the same bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from megatron_balance.config import load_cluster, load_model
from megatron_balance.cost.analytic import AnalyticCost
from megatron_balance.cost.experts import ExpertLoad
from megatron_balance.cost.parallel import wide_ranks
from megatron_balance.ir.layers import When
from megatron_balance.ir.plan import MicrobatchPlan
from megatron_balance.lab.papers.base import SimulatedCase
from megatron_balance.planners.base import StepContext
from megatron_balance.planning.choice import choose_layers, choose_planner
from megatron_balance.simulator.step import Setup, simulate_step
from megatron_balance.workloads.distributions import K
from megatron_balance.workloads.lengths import Lengths, draw

TOKENS_PER_GPU = 4 * K
DATASETS = {"arxiv": "ArXiv", "github": "GitHub", "prolong64k": "ProLong64k"}
SEED = 0


@dataclass(frozen=True)
class ZeppelinCase(SimulatedCase):
    """A model on GPUs, 4k tokens each; `tensor`: GPUs of a group, `experts`: ranks that share them."""

    model_name: str
    cluster_name: str
    num_gpus: int
    tensor: int = 1
    experts: int = 1
    expert_load: ExpertLoad | None = None

    @cached_property
    def cost(self) -> AnalyticCost:
        model = load_model(self.model_name)
        machine = load_cluster(self.cluster_name).build(num_ranks=self.num_gpus)
        cluster = wide_ranks(machine.with_kernel("flash_attn"), self.tensor)  # 2.4.3, section 5
        return AnalyticCost(cluster, model, self.tensor, pads=False)

    @property
    def num_tokens(self) -> int:
        """Tokens of a batch, the total context length."""
        return self.num_gpus * TOKENS_PER_GPU

    @property
    def setup(self) -> Setup:
        return Setup(policy="keep", experts=self.experts, expert_load=self.expert_load)

    def batches(self, dataset: str, count: int) -> list[Lengths]:
        """Documents until the context is full, the last one cut."""
        return draw(dataset, self.num_tokens, count, SEED)


@dataclass(frozen=True, slots=True)
class ZeppelinSystem:
    """A planner with its options and the layers around it."""

    name: str
    planner: str
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    routing: When | None = None
    remap: bool | None = None

    def plans(self, case: ZeppelinCase, lengths: Sequence[int]) -> tuple[MicrobatchPlan, ...]:
        """The microbatches of a step: one, unless the system makes its own."""
        choice = choose_planner(
            self.planner, self.options, layers=choose_layers(self.planner, self.routing, self.remap)
        )
        return choice.plan_step((tuple(lengths),), StepContext(case.cluster, case.model, case.cost))[0].plans

    def step_s(self, case: ZeppelinCase, lengths: Sequence[int]) -> float:
        return simulate_step(self.plans(case, lengths), case.machine, case.setup).step_s


TE = ZeppelinSystem("TE CP", "te_ring")
TE_ROUTED = ZeppelinSystem("TE CP, routed", "te_ring", routing="always")
LLAMA = ZeppelinSystem("LLaMA CP", "llama_all_gather")
HYBRID = ZeppelinSystem("Hybrid DP", "hybrid_dp")
PRINTED: dict[str, Any] = {"rule": "paper"}
ENGINE = ZeppelinSystem("Zeppelin's engine", "zeppelin", PRINTED, routing="never", remap=False)
ENGINE_ROUTED = ZeppelinSystem("engine and routing", "zeppelin", PRINTED, routing="always", remap=False)
ZEPPELIN = ZeppelinSystem("Zeppelin", "zeppelin", PRINTED, routing="always", remap=True)
OURS = ZeppelinSystem("zeppelin, rule groups", "zeppelin", {"rule": "groups"})
DEFAULT = ZeppelinSystem("zeppelin, default", "zeppelin")


def tokens_per_s(system: ZeppelinSystem, case: ZeppelinCase, batches: Sequence[Lengths]) -> float:
    return sum(map(sum, batches)) / sum(system.step_s(case, lengths) for lengths in batches)
