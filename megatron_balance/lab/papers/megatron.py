"""Megatron-LM's benchmark of dynamic context parallelism (examples/dynamic_context_parallel, June
2026): milliseconds of an iteration with replicas of four ranks, and with groups by length.

Its model, lengths, samples (eight a replica), capacity (2,048 tokens a rank) and mean (20 iterations
after 10, a tenth left out at either end) are ours. Assumed:

- It names no card: four H100 a node here, FlashAttention-3.
- Lengths are dealt as its mock data set draws them, in order.
- The baseline is `megatron`, samples by first fit, where the benchmark's packs are balanced.

Where devices wait for hosts, those of attention alone are counted.
"""

from dataclasses import dataclass, replace
from functools import cache, cached_property
from math import log

import numpy as np

from megatron_balance.config import load_cluster
from megatron_balance.cost.analytic import AnalyticCost
from megatron_balance.ir.model import Model
from megatron_balance.lab.papers.base import Effort, Ours, SimulatedCase, paper
from megatron_balance.planners.base import StepContext
from megatron_balance.planning.choice import choose_planner
from megatron_balance.simulator.setup import PLAIN
from megatron_balance.simulator.ticks import simulate_planned
from megatron_balance.workloads.distributions import LogNormal
from megatron_balance.workloads.lengths import Lengths

GPUS = (4, 8, 16, 32, 64)
NODE, REPLICA, SAMPLES, CAPACITY, WARM_UP = 4, 4, 8, 2048, 10
GPT = Model(
    *(16, 16, 128, 12, 2048, 8192), gated_ffn=False, vocab_size=131072, tied_embeddings=True, name="benchmark_dcp.sh"
)
WAYS = {
    "fixed": choose_planner("megatron", {"context_parallel": REPLICA, "tokens_per_rank": CAPACITY}),
    "dynamic": choose_planner("megatron_dynamic", {"tokens_per_rank": CAPACITY}),
}


@cache
def _drawn() -> np.ndarray:
    """The benchmark's lengths: a million of one seed, of mean 1,024 before they are cut."""
    own = LogNormal.of_mean(1024, 1.5)
    lengths = np.random.RandomState(0).lognormal(log(own.median), own.sigma, 1_000_000)
    return np.clip(lengths, 128, 8192).astype(np.int64)


@dataclass(frozen=True)
class _DynamicCpCase(SimulatedCase):
    """The benchmark on so many GPUs."""

    num_gpus: int

    @cached_property
    def cost(self) -> AnalyticCost:
        on = load_cluster("h100").build(num_ranks=self.num_gpus, ranks_per_node=NODE).with_kernel("flash_attn_3")
        return AnalyticCost(on, GPT)

    def iteration(self, at: int) -> Lengths:
        count = SAMPLES * self.num_gpus // REPLICA
        return tuple(_drawn()[at * count : (at + 1) * count].tolist())

    def ms(self, way: str, iterations: int) -> float:
        """The mean without the tenth of the iterations that is fastest, and the slowest."""
        context, machine = StepContext(self.cluster, self.model, self.cost), replace(self.machine, host=self.cost.host)
        steps = (WAYS[way].plan_step((self.iteration(WARM_UP + at),), context)[0] for at in range(iterations))
        seconds = sorted(simulate_planned(step, machine, machine, PLAIN).step_s for step in steps)
        cut = iterations // 10
        return 1e3 * float(np.mean(seconds[cut : iterations - cut]))


def _dynamic_cp(effort: Effort) -> Ours:
    for num_gpus in effort.progress(GPUS, "dynamic_cp"):
        ms = {way: _DynamicCpCase(num_gpus).ms(way, effort.batches) for way in WAYS}
        for way in WAYS:
            yield f"{num_gpus} GPUs: {way}", ms[way]
        yield f"{num_gpus} GPUs: speedup", ms["fixed"] / ms["dynamic"]


PAPER = paper(
    "megatron", "Megatron-LM's benchmark of dynamic context parallelism (June 2026)", {"dynamic_cp": _dynamic_cp}
)
