"""flexsp: sequence-parallel groups of different sizes, chosen by an integer program.

Paper: FlexSP: Accelerating Large Language Model Training via Flexible Sequence Parallelism (Wang et
al., arXiv 2412.01523): planner, bucketing, blaster. What we implement: disjoint groups of one to
all ranks (powers of two, and all), Ulysses inside; the program chooses groups and sequences so that
the longest group is as short as possible. HiGHS (in SciPy) solves it within a number of nodes, so
that a plan depends on no clock; a greedy answer stands where the program does not beat it, where
SciPy is missing (one warning), and where the program would be too large. `plan_batch` is the
blaster.

What we leave out: model states in the memory constraint, ZeRO's communication, solving ahead.

Where we differ and why: ranks may stay idle. Seconds come from our cost model instead of fitted
constants, and count ranks without heads. Where nothing holds the batch, sequences go over all
ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil
from typing import Literal

from megatron_balance.cost.base import CostModel
from megatron_balance.errors import ConfigError
from megatron_balance.ir.batch import Batch
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.model import Model
from megatron_balance.ir.plan import MicrobatchPlan
from megatron_balance.ir.step import StepPlan
from megatron_balance.solvers.groups import Frame, arrange, by_sequence, capacity_of, check_each, check_pool, sizes
from megatron_balance.solvers.milp import NoAnswerError, NoSolverError
from megatron_balance.solvers.packing import longest_first
from megatron_balance.solvers.sized_groups import (
    Groups,
    GroupsProblem,
    Limits,
    TooLargeError,
    greedy,
    improve,
)

log = logging.getLogger(__name__)

# Numbers of microbatches that `plan_batch` tries, from the least that fits on.
BLASTS = 3


@dataclass(frozen=True, slots=True)
class FlexSpOptions:
    tokens_per_rank: int | None = None
    """Capacity of a rank in tokens, per microbatch; `slack` decides if not given."""
    slack: float = 1.5
    """Without `tokens_per_rank`: capacity over the batch's mean tokens per rank, at least 1."""
    solver: Literal["highs", "greedy"] = "highs"
    """`highs` improves the greedy answer by the integer program; `greedy` does without SciPy."""
    node_limit: int = 50
    """Nodes of the program's search."""
    num_buckets: int = 16
    """Lengths that the program tells apart."""
    most_variables: int = 3000
    """A program of more variables is not tried; the greedy answer stands."""
    most_cells: int = 2_000_000
    """Nor is one of more variables times constraints: one node of its search may take ten seconds."""


def plan(batch: Batch, cluster: Cluster, model: Model, cost: CostModel, options: FlexSpOptions) -> MicrobatchPlan:
    capacity = _capacity(batch, cluster, options)
    check_pool(batch.lengths, cluster.num_ranks, options.tokens_per_rank)
    groups = _GroupSeconds(cluster, model, cost).groups(batch.lengths, capacity, options)
    placement, _ = by_sequence(((0, *each) for each in _on_ranks(groups, cluster)), len(batch.lengths))
    return Frame("flexsp", cluster, model, "head_exchange").microbatch(batch.lengths, placement)


def plan_batch(batch: Batch, cluster: Cluster, model: Model, cost: CostModel, options: FlexSpOptions) -> StepPlan:
    """The microbatches of the blaster: the fastest of the least numbers that fit."""
    capacity = _capacity(batch, cluster, options)
    check_each(batch.lengths, cluster.num_ranks, options.tokens_per_rank)
    pricing = _GroupSeconds(cluster, model, cost)
    pool_tokens = capacity * cluster.num_ranks
    fewest = max(1, -(-batch.num_tokens // pool_tokens))
    tried = (blast(batch.lengths, count) for count in range(fewest, max(fewest + BLASTS, len(batch.lengths) + 1)))
    fitting = [
        microbatches
        for microbatches in tried
        if all(sum(batch.lengths[seq] for seq in seqs) <= pool_tokens for seqs in microbatches)
    ][:BLASTS]
    best_s, best = None, None
    for microbatches in fitting:
        grouped = [pricing.groups([batch.lengths[seq] for seq in seqs], capacity, options) for seqs in microbatches]
        total_s = sum(
            pricing.problem([batch.lengths[s] for s in seqs], capacity).makespan(g)
            for seqs, g in zip(microbatches, grouped, strict=True)
        )
        if best_s is None or total_s < best_s:
            best_s, best = total_s, (microbatches, grouped)
    placed = (
        (microbatch, ranks, [seqs[at] for at in own])
        for microbatch, (seqs, groups) in enumerate(zip(*best, strict=True) if best is not None else ())
        for ranks, own in _on_ranks(groups, cluster)
    )
    placement, microbatch_of = by_sequence(placed, len(batch.lengths))
    return Frame("flexsp", cluster, model, "head_exchange").batch(batch.lengths, placement, microbatch_of)


def blast(lengths: Sequence[int], count: int) -> list[list[int]]:
    """Sequences by length, cut into at most `count` runs of about equal tokens."""
    order = longest_first(lengths)
    total = sum(lengths)
    microbatches: list[list[int]] = [[] for _ in range(count)]
    before = 0
    for seq in order:
        microbatches[min(count - 1, (2 * before + lengths[seq]) * count // (2 * total))].append(
            seq
        )  # where its middle lies
        before += lengths[seq]
    return [seqs for seqs in microbatches if seqs]


def _capacity(batch: Batch, cluster: Cluster, options: FlexSpOptions) -> int:
    capacity = capacity_of("flexsp", options, batch.num_tokens, cluster.num_ranks)
    for name in ("node_limit", "num_buckets", "most_variables", "most_cells"):
        if getattr(options, name) < 1:
            raise ConfigError(f"flexsp: {name} {getattr(options, name)}: must be at least 1")
    return capacity


def _on_ranks(groups: Groups, cluster: Cluster) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Ranks and sequences of each group."""
    ranks_of = arrange([size for size, _ in groups], cluster.num_ranks, cluster.node_size)
    return zip(ranks_of, (seqs for _, seqs in groups), strict=True)


@dataclass(frozen=True, slots=True)
class _GroupSeconds:
    cluster: Cluster
    model: Model
    cost: CostModel

    def groups(self, lengths: Sequence[int], capacity: int, options: FlexSpOptions) -> Groups:
        """The groups of one microbatch; all ranks together where nothing else holds it."""
        if not lengths:
            return ()
        problem = self.problem(lengths, capacity)
        chosen = greedy(problem)
        together: Groups = ((self.cluster.num_ranks, tuple(range(len(lengths)))),)
        if chosen is None or problem.makespan(together) <= problem.makespan(chosen):
            chosen = together
        if options.solver == "highs":
            try:
                limits = Limits(options.num_buckets, options.node_limit, options.most_variables, options.most_cells)
                return improve(problem, chosen, limits)
            except NoSolverError as error:
                _warn_once(str(error))
            except NoAnswerError as error:
                level = logging.INFO if isinstance(error, TooLargeError) else logging.DEBUG
                log.log(level, "flexsp: the greedy answer stands: %s", error)
        return chosen

    def problem(self, lengths: Sequence[int], capacity: int) -> GroupsProblem:
        allowed = sizes(self.cluster.num_ranks)
        seconds = {n: [self._seconds(n, size) for size in allowed] for n in set(lengths)}
        return GroupsProblem(lengths, [seconds[n] for n in lengths], allowed, self.cluster.num_ranks, capacity)

    def _seconds(self, length: int, size: int) -> float:
        heads = ceil(self.model.num_heads / size) / self.model.num_heads
        busy_s = heads * self.cost.attention_s(self.model.mask.num_pairs(length)) + self.cost.linear_s(length / size)
        # Peers on the node and beyond it; each pair exchanges 1 / size^2 of the sequence.
        inside, outside = min(size, self.cluster.node_size) - 1, max(0, size - self.cluster.node_size)
        part = (
            length / size / size
        )  # tokens of which a rank sends another one all heads, or all tokens of as many heads
        per_peer = self.cost.kv_bytes(part) + 2 * self.cost.query_bytes(part)
        inside_s = self.cost.intra_node_s(inside * per_peer, 0) if inside else 0.0
        outside_s = self.cost.inter_node_s(outside * per_peer, 0, 1 / self.cluster.ranks_per_nic) if outside else 0.0
        return busy_s + max(inside_s, outside_s)


@lru_cache(maxsize=1)
def _warn_once(reason: str) -> None:
    log.warning("flexsp: %s; the greedy answer stands", reason)
