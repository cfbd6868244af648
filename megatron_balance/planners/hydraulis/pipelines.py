"""The pipelines of a strategy on the ranks that a step is planned for: what they hold, what they cost,
and which sequences go where.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_balance.analysis.max_len import max_len
from megatron_balance.cost.moved import on_cluster
from megatron_balance.cost.parallel import wide_ranks
from megatron_balance.cost.schemes import check_scheme, fit_scheme, lengths_to_fit
from megatron_balance.errors import ConfigError
from megatron_balance.files import UnreadableError, read_text
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.model import Model
from megatron_balance.ir.strategy import Scheme, Strategy
from megatron_balance.planners.base import StepContext
from megatron_balance.solvers.dispatch import PipelineCost, dispatch
from megatron_balance.solvers.microbatches import microbatch_s, pack

UNLIMITED = 1 << 40
"""Tokens of a microbatch where nobody says what a rank holds."""

Microbatches = tuple[tuple[tuple[int, ...], ...], ...]


@dataclass(frozen=True, slots=True)
class Pipelines:
    """A strategy with the cost of each of its pipelines, and the context of the planner inside a
    microbatch of each.
    """

    strategy: Strategy
    costs: tuple[PipelineCost, ...]
    inside: tuple[StepContext, ...]

    @property
    def max_tokens(self) -> int:
        """Tokens of the longest microbatch of any pipeline; 0 where one holds not even its weights."""
        return max(cost.max_tokens for cost in self.costs) if min(cost.max_tokens for cost in self.costs) else 0

    def longer_with(self, length: int) -> str:
        """Advice on how to make a sequence fit."""
        limits = [
            inside.options.tokens_per_rank * inside.cluster.num_ranks if inside.options.tokens_per_rank else UNLIMITED
            for inside in self.inside
        ]
        if self.max_tokens < max(limits):
            return "a GPU's memory allows no more (MaxLen): use more tensor, pipeline or context parallelism"
        ranks = max(limit // inside.options.tokens_per_rank for limit, inside in zip(limits, self.inside, strict=True))
        return f"raise tokens_per_rank to at least {-(-length // ranks)}, use more context-parallel ranks"

    def deal(self, lengths: Sequence[int]) -> tuple[Microbatches, float]:
        """By pipeline and microbatch, positions in `lengths`; and seconds of the slowest pipeline."""
        made, seconds = deal(lengths, self.costs)
        return made, max(seconds)


def deal(lengths: Sequence[int], costs: Sequence[PipelineCost]) -> tuple[Microbatches, tuple[float, ...]]:
    """Dispatch sequences to pipelines, and pack those of each.

    Returns:
        By pipeline and microbatch, positions in `lengths`; and seconds of each pipeline.

    Raises:
        InfeasibleError: a sequence that no pipeline holds.
    """
    made: list[tuple[tuple[int, ...], ...]] = []
    seconds: list[float] = []
    for own, cost in zip(dispatch(lengths, costs), costs, strict=True):
        packed = pack([lengths[seq] for seq in own], cost)
        made.append(tuple(tuple(own[at] for at in microbatch) for microbatch in packed))
        seconds.append(pipeline_s([[lengths[seq] for seq in each] for each in made[-1]], cost))
    return tuple(made), tuple(seconds)


def pipeline_s(microbatches: Sequence[Sequence[int]], cost: PipelineCost) -> float:
    """Seconds of a pipeline's microbatches, by their lengths: their stage times, and the fullest one
    through the other stages (Eq. 2); 0 without any.
    """
    times = [microbatch_s(lengths, cost) for lengths in microbatches]
    return sum(times) + (cost.stages - 1) * max(times, default=0.0)


def read_strategies(given: Sequence[str] | str) -> tuple[Strategy, ...]:
    """The candidates of an option: texts, or the file that names one a line.

    Raises:
        ConfigError: a text that is no strategy, or a file that cannot be read.
    """
    if given == "auto":
        raise ConfigError(
            "strategies: auto: 'megatron-balance strategies --out FILE' proposes them; name that FILE, or list them"
        )
    if isinstance(given, str):
        try:
            lines = read_text(Path(given)).splitlines()
        except (OSError, UnreadableError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise ConfigError(
                f"strategies: {given}: cannot be read ({why}); name a file of strategies, or list them: "
                "[2*tp1-pp1-cp2, tp1-pp1-cp4]"
            ) from None
        given = [line for line in (each.partition("#")[0].strip() for each in lines) if line]
        if not given:
            raise ConfigError("strategies: the file names none")
    return tuple(Strategy.parse(each) for each in given)


def pipelines_of(strategy: Strategy, context: StepContext) -> Pipelines:
    """The pipelines of a strategy with their costs.

    Raises:
        ConfigError: a strategy that the ranks or the model cannot be split by.
    """
    if context.strategy is None:
        check_strategy(strategy, context.cluster, context.model)
    known: dict[Scheme, tuple[PipelineCost, StepContext]] = {}
    for scheme in strategy.pipelines:
        if scheme not in known:
            known[scheme] = _pipeline(scheme, context)
    costs, inside = zip(*(known[scheme] for scheme in strategy.pipelines), strict=True)
    return Pipelines(strategy, costs, inside)


def check_strategy(strategy: Strategy, cluster: Cluster, model: Model) -> None:
    """Reject a strategy that the ranks or the model cannot be split by.

    Raises:
        ConfigError: says what does not divide, how many ranks are missing, or which TP group would
            cross nodes.
    """
    strategy.check(cluster.num_ranks, cluster.node_size)
    for scheme in dict.fromkeys(strategy.pipelines):
        check_scheme(scheme, model, f"strategy {strategy}: ")


def _pipeline(scheme: Scheme, context: StepContext) -> tuple[PipelineCost, StepContext]:
    """The cost of a pipeline, and the context of the planner inside its microbatches."""
    # The ranks of a training job are tensor-parallel groups already.
    tensor = None if context.strategy is not None else scheme.tensor
    options = context.options
    if options.tokens_per_rank is not None and tensor is not None:
        options = replace(options, tokens_per_rank=options.tokens_per_rank * tensor)
    most = UNLIMITED if options.tokens_per_rank is None else options.tokens_per_rank * scheme.context
    if tensor is not None:  # a training job's memory is its own: recomputation, offloading
        most = min(most, max_len(scheme, context.model, context.cluster.memory_bytes, context.cluster.num_ranks))
    cluster = stage_cluster(context.cluster if tensor is None else wide_ranks(context.cluster, tensor), scheme.context)
    cost = on_cluster(context.cost, cluster, tensor)
    alone = Scheme(1, scheme.pipeline, scheme.context)
    fitted = fit_scheme(alone, context.model, cluster, lambda _cluster, _tensor: cost, lengths_to_fit(most))
    inside = replace(
        context,
        cluster=cluster,
        cost=cost,
        options=options,
        strategy=None,
        own_microbatches=False,
        may_carry=False,
    )
    return PipelineCost(fitted.a, fitted.b, fitted.c, scheme.pipeline, most), inside


def stage_cluster(cluster: Cluster, num_ranks: int) -> Cluster:
    """The first `num_ranks` of a cluster's ranks, which any of its pipelines' stages are like.

    Raises:
        ConfigError: pipelines of so many ranks would lie on nodes unevenly.
    """
    size = cluster.node_size
    if size % num_ranks and num_ranks % size:
        raise ConfigError(
            f"{num_ranks} context-parallel ranks of a pipeline would lie unevenly on nodes of {size}; use a number "
            "that divides a node, or whole nodes"
        )
    return replace(cluster, num_ranks=num_ranks, ranks_per_node=min(size, num_ranks))
