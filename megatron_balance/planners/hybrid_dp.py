"""hybrid_dp: short sequences on one rank each, long ones in a ring, FLOPs even (ByteScale-like).

Paper: ByteScale (Ge et al., arXiv 2502.21231), hybrid data parallelism, as Zeppelin (arXiv
2509.21841, sections 2.2 and 5) describes it as its baseline. What we implement: a limit on a rank's
FLOPs, the mean and `tolerance` more. Sequences, longest first, take the fewest ranks (a power of
two, or all) that pass neither it nor the capacity: of the runs of neighbouring ranks, inside a node
where it fits, the fullest. If that cannot be, the limit is raised. `plan_batch`: as many
microbatches as memory asks for, and only the sum of FLOPs over them is limited.

What we leave out: offloading of activations; its variant for pipelines.

Where we differ and why: `plan` makes one microbatch, so memory bounds the balance, and FLOPs widen
a group, too (ByteScale sizes groups by memory alone).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from megatron_balance.cost.base import CostModel
from megatron_balance.errors import ConfigError
from megatron_balance.ir.batch import Batch
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.model import Model
from megatron_balance.ir.plan import MicrobatchPlan
from megatron_balance.ir.step import StepPlan
from megatron_balance.solvers.groups import Frame, blocks, capacity_of, check_each, check_pool, rank_tokens, sizes
from megatron_balance.solvers.packing import longest_first

# Factors on the limit of a rank's FLOPs, tried in turn.
_RAISES = (1.0, 1.2, inf)


@dataclass(frozen=True, slots=True)
class HybridDpOptions:
    tokens_per_rank: int | None = None
    """Capacity of a rank in tokens, per microbatch; `slack` decides if not given."""
    slack: float = 1.5
    """Without `tokens_per_rank`: capacity over the batch's mean tokens per rank, at least 1."""
    tolerance: float = 0.05
    """FLOPs of the busiest rank above the mean, relatively, at most; more only if there is no other
    way."""


def plan(batch: Batch, cluster: Cluster, model: Model, cost: CostModel, options: HybridDpOptions) -> MicrobatchPlan:
    """One microbatch; where nothing fits, all sequences over all ranks."""
    # FLOPs are what this system balances, whatever they take.
    del cost
    problem = _problem(batch, cluster, model, options)
    check_pool(batch.lengths, cluster.num_ranks, options.tokens_per_rank)
    placed = _search(problem, options.tolerance, most_microbatches=1)
    everywhere = [tuple(range(cluster.num_ranks))] * len(batch.lengths)
    return Frame("hybrid_dp", cluster, model).microbatch(
        batch.lengths, placed.ranks if placed is not None else everywhere
    )


def plan_batch(batch: Batch, cluster: Cluster, model: Model, cost: CostModel, options: HybridDpOptions) -> StepPlan:
    """As many microbatches as memory asks for; the batch may be larger than the pool."""
    del cost
    problem = _problem(batch, cluster, model, options)
    check_each(batch.lengths, cluster.num_ranks, options.tokens_per_rank)
    placed = _search(problem, options.tolerance, most_microbatches=max(1, len(batch.lengths)))
    # Each sequence may have a microbatch of its own.
    assert placed is not None
    return Frame("hybrid_dp", cluster, model).batch(batch.lengths, placed.ranks, placed.microbatch)


@dataclass(frozen=True, slots=True)
class _DealProblem:
    """`work`: forward FLOPs of each sequence in one layer."""

    lengths: tuple[int, ...]
    work: tuple[float, ...]
    cluster: Cluster
    capacity: int

    @property
    def mean(self) -> float:
        return sum(self.work) / self.cluster.num_ranks


def _problem(batch: Batch, cluster: Cluster, model: Model, options: HybridDpOptions) -> _DealProblem:
    capacity = capacity_of("hybrid_dp", options, batch.num_tokens, cluster.num_ranks)
    if options.tolerance < 0:
        raise ConfigError(f"hybrid_dp: tolerance {options.tolerance}: must be at least 0")
    pair, token = model.attention_flops_per_pair, model.linear_flops_per_token
    work = tuple(model.mask.num_pairs(n) * pair + n * token for n in batch.lengths)
    return _DealProblem(batch.lengths, work, cluster, capacity)


def _search(problem: _DealProblem, tolerance: float, most_microbatches: int) -> _Placing | None:
    """The placement with the lowest limit on FLOPs that is found; None: none fits the capacity."""
    for factor in _RAISES:
        placing = _Placing(problem, (1 + tolerance) * factor * problem.mean, most_microbatches)
        if placing.place_all():
            return placing
    return None


class _Placing:
    """A placement in the making. `work`: FLOPs of each rank; `tokens`: by microbatch."""

    def __init__(self, problem: _DealProblem, most_work: float, most_microbatches: int) -> None:
        self.problem, self.most_work, self.most_microbatches = problem, most_work, most_microbatches
        self.work = [0.0] * problem.cluster.num_ranks
        self.by_work = [(0.0, rank) for rank in range(problem.cluster.num_ranks)]
        self.tokens: list[list[int]] = []
        self.ranks: list[tuple[int, ...]] = [()] * len(problem.lengths)
        self.microbatch = [0] * len(problem.lengths)

    def place_all(self) -> bool:
        """Place every sequence on the fewest ranks that can take it; False if one finds none."""
        lengths, cluster = self.problem.lengths, self.problem.cluster
        order = longest_first(lengths)
        allowed = sizes(cluster.num_ranks)
        runs = {
            size: [tuple(run) for run in blocks(size, cluster.num_ranks, cluster.node_size)] for size in allowed[1:]
        }
        return all(
            self._place_alone(seq) or any(self._place(seq, size, runs[size]) for size in allowed[1:]) for seq in order
        )

    def _place_alone(self, seq: int) -> bool:
        """Place a sequence on the fullest rank that can take it (without a limit, the emptiest)."""
        most = self.most_work - self.problem.work[seq]
        if most == inf:
            return any(self._put(seq, (rank,)) for _, rank in self.by_work.copy())
        # The fullest that stays below the limit: entries before `at`, from the last down.
        at = bisect_right(self.by_work, (most, len(self.work)))
        return any(self._put(seq, (self.by_work[i][1],)) for i in range(at - 1, -1, -1))

    def _place(self, seq: int, size: int, runs: Sequence[tuple[int, ...]]) -> bool:
        most = self.most_work - self.problem.work[seq] / size
        if most < 0:
            return False
        sign = -1 if most < inf else 1
        loads = ((max(self.work[run[0] : run[-1] + 1]), run) for run in runs)
        ordered = sorted(((load, run) for load, run in loads if load <= most), key=lambda entry: sign * entry[0])
        return any(self._put(seq, run) for _, run in ordered)

    def _put(self, seq: int, run: tuple[int, ...]) -> bool:
        share = rank_tokens(self.problem.lengths[seq], len(run))
        microbatch = self._with_room(run, share)
        if microbatch is None:
            return False
        for rank in run:
            # `by_work` stays sorted: the old entry goes before the load changes.
            del self.by_work[bisect_left(self.by_work, (self.work[rank], rank))]
            self.work[rank] += self.problem.work[seq] / len(run)
            self.tokens[microbatch][rank] += share
            insort(self.by_work, (self.work[rank], rank))
        self.ranks[seq], self.microbatch[seq] = run, microbatch
        return True

    def _with_room(self, run: tuple[int, ...], share: int) -> int | None:
        most_held = self.problem.capacity - share
        for microbatch, held in enumerate(self.tokens):
            if max(held[run[0] : run[-1] + 1]) <= most_held:
                return microbatch
        # Near-equal chunks over all ranks may pass the capacity by rounding: a microbatch among
        # others takes that.
        too_large = most_held < 0 and (len(run) < len(self.work) or self.most_microbatches == 1)
        if too_large or len(self.tokens) == self.most_microbatches:
            return None
        self.tokens.append([0] * len(self.work))
        return len(self.tokens) - 1
