"""TRL's training steps of one long sequence on 8 to 32 H100 (huggingface/trl, issues 6845 and 6846).

Published are seconds of whole steps: Qwen3 in bf16, FSDP2, PyTorch's context parallelism (a ring
with cuDNN's kernel), full recomputation with activations in host memory, nodes of 8.

Assumed:

- Ours is `te_ring` inside a node; over nodes `llama_all_gather`, which is within 0.2 % of it here.
- Weights, gradients and activations that travel to and from the host hide behind the layers.
- Qwen3-30B-A3B is priced as a dense model whose MLP is as wide as the experts that a token visits.

Attention is nearly all of these steps: they test kernel rates, recomputation and even balance, not
transfers.
"""

from dataclasses import dataclass
from functools import cached_property

from megatron_balance.config import load_cluster
from megatron_balance.cost.analytic import AnalyticCost
from megatron_balance.ir.model import Model
from megatron_balance.lab.papers.base import Effort, Ours, SimulatedCase, cases, paper
from megatron_balance.planners.base import StepContext
from megatron_balance.planning.choice import choose_planner
from megatron_balance.simulator.setup import Setup
from megatron_balance.simulator.step import simulate_step
from megatron_balance.workloads.distributions import K

NODE, M = 8, 1024 * K
VOCABULARY = 151936


# The models' cards; of 30B-A3B 8 experts of 768 are visited.
MODELS = {
    name: Model(*heads, 128, layers, hidden, ffn, name=name, vocab_size=VOCABULARY)
    for name, layers, hidden, ffn, heads in (
        ("Qwen3-0.6B", 28, 1024, 3072, (16, 8)),
        ("Qwen3-8B", 36, 4096, 12288, (32, 8)),
        ("Qwen3-30B-A3B", 48, 2048, 8 * 768, (32, 4)),
        ("Qwen3-32B", 64, 5120, 25600, (64, 8)),
    )
}


@dataclass(frozen=True)
class _TrlCase(SimulatedCase):
    """One sequence of a model on so many GPUs."""

    of: Model
    tokens: int
    num_gpus: int

    @cached_property
    def cost(self) -> AnalyticCost:
        return AnalyticCost(load_cluster("h100").build(num_ranks=self.num_gpus, ranks_per_node=NODE), self.of)

    @property
    def name(self) -> str:
        return f"{self.of.name}, {self.tokens // M}M tokens, {self.num_gpus} GPUs"

    @property
    def seconds(self) -> float:
        choice = choose_planner("te_ring" if self.num_gpus <= NODE else "llama_all_gather", {})
        context = StepContext(self.cluster, self.model, self.cost)
        plans = choice.plan_step(((self.tokens,),), context)[0].plans
        return simulate_step(plans, self.machine, Setup("replay", "full")).step_s


STEPS = tuple(_TrlCase(MODELS[name], tokens * M, gpus) for name, tokens, gpus in cases("trl", "steps"))


def _steps(effort: Effort) -> Ours:
    for step in effort.progress(STEPS, "steps"):
        yield step.name, step.seconds


PAPER = paper("trl", "TRL's steps of 1M to 4M tokens on H100 (issues 6845 and 6846)", {"steps": _steps})
