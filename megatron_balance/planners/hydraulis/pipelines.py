"""The pipelines of a strategy on the ranks that a step is planned for: what they hold, what they cost,
and which sequences go where.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_balance.cost.moved import on_cluster
from megatron_balance.cost.parallel import wide_ranks
from megatron_balance.cost.schemes import fit_scheme
from megatron_balance.errors import ConfigError
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.model import Model
from megatron_balance.ir.strategy import Scheme, Strategy
from megatron_balance.planners.base import StepContext
from megatron_balance.solvers.dispatch import PipelineCost, dispatch
from megatron_balance.solvers.microbatches import pack

UNLIMITED = 1 << 40
"""Tokens of a microbatch where nobody says what a rank holds."""
FITTED = tuple(1 << power for power in range(8, 18))
"""Lengths through whose predicted times the quadratic of a scheme goes."""
MAX_TOKENS_FITTED = 4
"""Those longer than this many times the longest microbatch are left out, as long as three stay."""

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
        """Tokens of the longest microbatch of any pipeline."""
        return max(cost.max_tokens for cost in self.costs)

    def tokens_per_rank_for(self, length: int) -> int:
        """Tokens that a rank must hold for a sequence to fit."""
        holders = [
            each.max_tokens // inside.options.tokens_per_rank if inside.options.tokens_per_rank else 1
            for each, inside in zip(self.costs, self.inside, strict=True)
        ]
        return -(-length // max(holders))

    def deal(self, lengths: Sequence[int]) -> tuple[Microbatches, float]:
        """By pipeline and microbatch, positions in `lengths`; and seconds of the slowest pipeline."""
        dealt = dispatch(lengths, self.costs)
        made: list[tuple[tuple[int, ...], ...]] = []
        seconds: list[float] = []
        for own, cost in zip(dealt, self.costs, strict=True):
            packed = pack([lengths[seq] for seq in own], cost)
            made.append(tuple(tuple(own[at] for at in microbatch) for microbatch in packed))
            seconds.append(pipeline_s([[lengths[seq] for seq in each] for each in made[-1]], cost))
        return tuple(made), max(seconds)


def pipeline_s(microbatches: Sequence[Sequence[int]], cost: PipelineCost) -> float:
    """Seconds of a pipeline's microbatches, by their lengths: their stage times, and the fullest one
    through the other stages (Eq. 2); 0 without any.
    """
    times = [sum((cost.a * n + cost.b) * n for n in lengths) + cost.c for lengths in microbatches]
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
            lines = Path(given).read_text(encoding="utf-8").splitlines()
        except OSError as error:
            raise ConfigError(
                f"strategies: {given}: cannot be read ({error.strerror}); name a file of strategies, or list them: "
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
        ConfigError: says what does not divide, or how many ranks are missing.
    """
    if strategy.num_ranks > cluster.num_ranks:
        raise ConfigError(
            f"strategy {strategy} takes {strategy.num_ranks} ranks, and there are {cluster.num_ranks}; use more ranks "
            "(--ranks), or fewer or smaller pipelines"
        )
    for scheme in dict.fromkeys(strategy.pipelines):
        for what, number, degree in (
            ("heads", model.num_heads, scheme.tensor),
            ("key-value heads (query groups)", model.num_kv_heads, scheme.tensor),
            ("layers", model.num_layers, scheme.pipeline),
        ):
            if number % degree:
                raise ConfigError(
                    f"strategy {strategy}: {scheme} splits the {number} {what} of {model.name} {degree} ways; choose a "
                    f"divisor of {number}"
                )


def _pipeline(scheme: Scheme, context: StepContext) -> tuple[PipelineCost, StepContext]:
    """The cost of a pipeline, and the context of the planner inside its microbatches."""
    # The ranks of a training job are tensor-parallel groups already.
    tensor = None if context.strategy is not None else scheme.tensor
    options = context.options
    if options.tokens_per_rank is not None and tensor is not None:
        options = replace(options, tokens_per_rank=options.tokens_per_rank * tensor)
    most = UNLIMITED if options.tokens_per_rank is None else options.tokens_per_rank * scheme.context
    cluster = stage_cluster(context.cluster if tensor is None else wide_ranks(context.cluster, tensor), scheme.context)
    cost = on_cluster(context.cost, cluster, tensor)
    alone = Scheme(1, scheme.pipeline, scheme.context)
    lengths = [length for at, length in enumerate(FITTED) if at < 3 or length <= MAX_TOKENS_FITTED * most]
    fitted = fit_scheme(alone, context.model, cluster, lambda _cluster, _tensor: cost, lengths)
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
