"""A step under DistCA: nano-batches interleaved, and with a pipeline all stages attending together,
tick by tick.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

from megatron_balance.analysis.memory import Recompute
from megatron_balance.analysis.statistics import plan_statistics
from megatron_balance.cost.analytic import AnalyticCost
from megatron_balance.ir.batch import Batch
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.plan import MicrobatchPlan
from megatron_balance.ir.rows import Rows
from megatron_balance.ir.tick import Tick, TickPlan
from megatron_balance.lab.papers.distca.cases import ROUNDS, TENSOR, DistcaCase, HeldTokens, chunks
from megatron_balance.planners.distca import DistcaOptions, plan, plan_owned
from megatron_balance.planning.ticks import plan_ticks, ticks
from megatron_balance.simulator.step import Setup
from megatron_balance.simulator.ticks import simulate_ticks
from megatron_balance.solvers.packing import nano_batches

OPTIONS = DistcaOptions()


def distca_s(case: DistcaCase, documents: Sequence[int]) -> float:
    """Seconds of a step in the best configuration; infinite if none fits the memory.

    Microbatches are whole samples, documents as they come.
    """
    return min(_stages_s(case, documents, stages, size) for stages in case.stages for size in _sizes(case, stages))


def _stages_s(case: DistcaCase, documents: Sequence[int], stages: int, size: int) -> float:
    microbatches = chunks(documents, size * case.max_doc)
    return _in_a_row_s(case, microbatches) if stages == 1 else _CasePipeline(case, stages, microbatches).step_s()


def _sizes(case: DistcaCase, stages: int) -> list[int]:
    """Samples of a microbatch that are tried: the most that fit without recomputation, one for a
    rank at most.

    Without a pipeline half as many, too.
    """
    ranks, samples = case.num_nodes // stages, case.num_tokens // case.max_doc
    sizes = [1 << i for i in reversed(range(min(ranks, samples).bit_length()))]
    fitting = [
        size
        for size in sizes
        if case.fits(
            _held(stages, size * case.max_doc / ranks, float(size * case.max_doc), -(-samples // size), "none")
        )
    ]
    return fitting[: 2 if stages == 1 else 1] or sizes[:1]


def _held(stages: int, tokens: float, received: float, num_microbatches: int, recompute: Recompute) -> HeldTokens:
    """Tokens that the first stage holds; in ticks up to 2 S - 1 microbatches are in flight instead
    of S (`planning.ticks`).
    """
    usual, in_ticks = min(stages, num_microbatches), min(2 * stages - 1, num_microbatches)
    return HeldTokens(tokens * in_ticks / usual, received, stages, recompute, usual, "replay")


def _received(ping_pong: Sequence[MicrobatchPlan], case: DistcaCase) -> list[int]:
    """Tokens whose keys and values a rank receives at most, by nano-batch."""
    return [max(plan_statistics(nano_batch, case.model)["kv_tokens_received_per_rank"]) for nano_batch in ping_pong]


def _in_a_row_s(case: DistcaCase, microbatches: Sequence[Sequence[int]]) -> float:
    seconds = 0.0
    for documents in microbatches:
        tokens = sum(documents) / case.num_nodes
        received = _received(case.ping_pong(documents), case)
        seconds += case.cost.head_s(tokens) + case.cost.head_s(tokens, backward=True)
        if case.fits(HeldTokens(tokens, sum(received))):
            seconds += sum(case.passes_s(documents))
        elif case.fits(HeldTokens(tokens, max(received), policy="replay")):
            seconds += sum(case.passes_s(documents, way=replace(ROUNDS, policy="replay")))
        elif case.fits(HeldTokens(tokens, sum(received), recompute="full")):
            forward_s, backward_s = case.passes_s(documents)
            seconds += 2 * forward_s + backward_s
        else:
            return inf
    return seconds


@dataclass(frozen=True, slots=True)
class _CasePipeline:
    case: DistcaCase
    stages: int
    microbatches: Sequence[Sequence[int]]

    def step_s(self) -> float:
        """Seconds with the least recomputation that fits the memory."""
        order = ticks(self.stages, len(self.microbatches))
        first, second = (self._ticks(order, nano_batch) for nano_batch in (0, 1))
        for recompute in ("none", "full"):
            if self._fits([first, second], recompute):
                setup = Setup("replay", recompute, pipeline=self.stages, engine="rounds")
                return simulate_ticks(first, self.case.machine, setup, second).step_s
        return inf

    def _ticks(self, order: Sequence[Tick], nano_batch: int) -> tuple[TickPlan, ...]:
        """The ticks of one half of each microbatch."""
        case = self.case
        stage = Cluster(case.num_nodes // self.stages, case.cluster.ranks_per_node)
        cost = AnalyticCost(case.cluster, case.model, TENSOR)
        plans = [
            plan(
                Batch(tuple(documents[i] for i in nano_batches(documents)[nano_batch])),
                stage,
                case.model,
                cost,
                OPTIONS,
            )
            for documents in self.microbatches
        ]

        def of_all(lengths: tuple[int, ...], owned: Rows) -> MicrobatchPlan:
            return plan_owned(lengths, owned, case.cluster, case.model, cost, OPTIONS)

        return plan_ticks(order, plans, of_all)

    def _fits(self, ping_pong: Sequence[Sequence[TickPlan]], recompute: Recompute) -> bool:
        """Whether the first stage holds its microbatches."""
        received = max(max(_received([one.plan for one in nano_batch], self.case)) for nano_batch in ping_pong)
        tokens = max(map(sum, self.microbatches)) / (self.case.num_nodes // self.stages)
        return self.case.fits(_held(self.stages, tokens, float(received), len(self.microbatches), recompute))
