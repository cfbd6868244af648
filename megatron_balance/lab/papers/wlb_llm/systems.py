"""The systems that WLB-LLM compares (section 7.1) and its parts (Figure 13), on the simulator's
clocks.

Plain-4D trains samples as the data loader deals them, each cut as one sequence. Fixed-4D packs the
documents of a global batch greedily into microbatches of the context window, with the sharding that
is faster over the whole run. WLB-LLM packs by workload, with two queues for outliers, and chooses
the sharding of each microbatch; the thresholds are those of Table 2, in proportion to the window. All
are planners: `wlb_llm` for packing and delay, `wlb_sharding`
inside a microbatch. Every system trains all documents of a run: steps without new ones come behind
it until nothing waits, and count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from statistics import stdev
from typing import Any

from megatron_balance.ir.batch import Batch
from megatron_balance.ir.plan import MicrobatchPlan
from megatron_balance.ir.step import EMPTY
from megatron_balance.lab.papers.wlb_llm.cases import WlbCase
from megatron_balance.lab.papers.wlb_llm.table2 import THRESHOLDS, WINDOW
from megatron_balance.planners.base import StepContext
from megatron_balance.planners.wlb_sharding import WlbShardingOptions
from megatron_balance.planners.wlb_sharding import plan as shard
from megatron_balance.planning.choice import choose_planner
from megatron_balance.simulator.step import simulate_step
from megatron_balance.workloads.lengths import Lengths

BLOCKS = 4
"""Parts of a run, by which its standard error is estimated."""

Block = tuple[int, float]
"""Tokens that some steps of a run train, and their seconds."""

QUEUES = 2
"""Of WLB-LLM's own choice (section 7.4: with a third the imbalance stays the same)."""


@dataclass(frozen=True, slots=True)
class WlbSystem:
    """How documents come to microbatches, and how a microbatch is cut."""

    name: str
    sharding: str
    packing: Mapping[str, Any] = field(default_factory=dict[str, Any])
    delays: bool = False

    def steps(self, case: WlbCase, dataset: str, batches: Sequence[tuple[Lengths, ...]]) -> list[tuple[Lengths, ...]]:
        """The documents of each microbatch of each step; further steps train what waits at the end."""
        if not self.packing:
            return list(batches)
        options: dict[str, Any] = {**self.packing, "context_tokens": case.window}
        if self.delays:
            options |= {
                "thresholds": [each * case.window // WINDOW for each in THRESHOLDS[dataset][QUEUES]],
                "tokens_per_rank": case.most_tokens() // case.context,
            }
        plan_step = choose_planner("wlb_llm", options).plan_step
        context, carry = StepContext(case.cluster, case.model, case.cost), EMPTY
        packed: list[tuple[Lengths, ...]] = []
        for batch in batches:
            planned, carry = plan_step(batch, context, carry)
            packed.append(tuple(plan.lengths for plan in planned.plans))
        while carry.waiting:
            nothing_new: tuple[Lengths, ...] = ((),) * case.num_microbatches
            planned, carry = plan_step(nothing_new, replace(context, may_delay=False), carry)
            packed.append(tuple(plan.lengths for plan in planned.plans))
        return packed

    def plan(self, case: WlbCase, lengths: Lengths) -> MicrobatchPlan:
        """The plan of a microbatch on the context-parallel ranks of a stage."""
        options = WlbShardingOptions(sharding=self.sharding)  # pyright: ignore[reportArgumentType]  one of SHARDINGS
        return shard(Batch(lengths), case.cluster, case.model, case.cost, options)

    def blocks(self, case: WlbCase, dataset: str, num_batches: int) -> list[Block]:
        """The steps of the run in order, in `BLOCKS` blocks (of fewer steps: one each)."""
        steps = self.steps(case, dataset, case.batches(dataset, num_batches))
        return in_blocks([(sum(map(sum, step)), self.step_s(case, step)) for step in steps])

    def step_s(self, case: WlbCase, step: Sequence[Lengths]) -> float:
        """Simulated seconds of a step: of its slowest replica."""
        replicas = [step[first :: case.replicas] for first in range(case.replicas)]
        return max(_step_s(case, tuple(self.plan(case, lengths) for lengths in own)) for own in replicas)


FIXED: dict[str, Any] = {"packing": "fixed"}
WORKLOAD: dict[str, Any] = {"packing": "workload"}
PLAIN = WlbSystem("Plain-4D", "sequence")
PER_DOCUMENT = WlbSystem("per-document sharding", "document")
ADAPTIVE = WlbSystem("adaptive sharding", "adaptive")
FIXED_SEQUENCE = WlbSystem("Fixed-4D, per sequence", "sequence", FIXED)
FIXED_DOCUMENT = WlbSystem("Fixed-4D, per document", "document", FIXED)
PACKED = WlbSystem("packing and delay", "sequence", WORKLOAD, delays=True)
WLB = WlbSystem("WLB-LLM", "adaptive", WORKLOAD, delays=True)
MIXED = WlbSystem("WLB-LLM, a choice for each document", "mixed", WORKLOAD, delays=True)


@lru_cache(maxsize=4096)
def _step_s(case: WlbCase, plans: tuple[MicrobatchPlan, ...]) -> float:
    """Several tables and systems share steps."""
    return simulate_step(plans, case.machine, case.setup).step_s


def fixed_blocks(case: WlbCase, dataset: str, num_batches: int) -> list[Block]:
    """Fixed-4D's run: the better of its two shardings."""
    each = (system.blocks(case, dataset, num_batches) for system in (FIXED_SEQUENCE, FIXED_DOCUMENT))
    return min(each, key=lambda found: sum(seconds for _, seconds in found))


def in_blocks(each: Sequence[Block]) -> list[Block]:
    """Steps, summed in their order to `BLOCKS` blocks, or fewer."""
    borders = [len(each) * at // BLOCKS for at in range(BLOCKS + 1)]
    parts = [each[begin:end] for begin, end in pairwise(borders) if begin < end]
    return [(sum(tokens for tokens, _ in part), sum(seconds for _, seconds in part)) for part in parts]


def speedups(of: Sequence[Block], over: Sequence[Block]) -> list[float]:
    """Speedup in tokens per second: of all blocks together, then of each."""
    pairs = [(of, over), *(([one], [other]) for one, other in zip(of, over, strict=False))]
    return [tokens_per_s(one) / tokens_per_s(other) for one, other in pairs]


def tokens_per_s(blocks: Sequence[Block]) -> float:
    """Tokens trained per second."""
    return sum(tokens for tokens, _ in blocks) / sum(seconds for _, seconds in blocks)


def error_of(each: Sequence[float]) -> str:
    """The standard error of the first number by the blocks behind it."""
    return f"standard error {stdev(each[1:]) / (len(each) - 1) ** 0.5:.3f}" if len(each) > 2 else ""
