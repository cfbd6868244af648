"""Costs of pipelines by scheme: predicted for a model on a cluster, or from a table that somebody
fitted (Hydraulis, arXiv 2412.07894, Appendix C).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Protocol

from megatron_balance.analysis.step_memory import MARGIN, max_len
from megatron_balance.config import SchemeTable
from megatron_balance.cost.base import MachineCost
from megatron_balance.cost.parallel import joined_nodes
from megatron_balance.cost.perturbed import on_cluster
from megatron_balance.cost.schemes import check_scheme, fit_scheme, lengths_to_fit
from megatron_balance.errors import ConfigError
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.model import Model
from megatron_balance.ir.strategy import Scheme, Strategy
from megatron_balance.solvers.dispatch import PipelineCost

MOST_NODES_OF_TENSOR = 2
"""Nodes that a tensor-parallel group may span."""


class SchemeCosts(Protocol):
    """Costs of pipelines in a job of so many GPUs."""

    def schemes(self, num_ranks: int) -> tuple[Scheme, ...]:
        """Schemes with costs that `num_ranks` GPUs can run, MaxLen of at least one token."""
        ...

    def pipeline(self, scheme: Scheme, num_ranks: int) -> PipelineCost:
        """The cost of a pipeline in a job of `num_ranks` GPUs, which split the optimizer's state.

        Raises:
            ConfigError: no coefficients for the scheme, or a model that it cannot split.
        """
        ...


@dataclass(frozen=True, slots=True)
class TableCosts:
    """Costs from a table of fitted coefficients."""

    table: SchemeTable
    _milliseconds: dict[Scheme, list[float]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        found: dict[Scheme, list[float]] = {}
        for name, numbers in self.table.milliseconds.items():
            schemes = Strategy.parse(name).pipelines
            if len(schemes) != 1:
                raise ConfigError(f"{self.table.name}: milliseconds: {name}: expected one scheme, such as tp4-pp2-cp1")
            found[schemes[0]] = numbers
        object.__setattr__(self, "_milliseconds", found)

    def schemes(self, num_ranks: int) -> tuple[Scheme, ...]:
        """As in `SchemeCosts`."""
        fit = (scheme for scheme in self._milliseconds if scheme.num_ranks <= num_ranks)
        return tuple(scheme for scheme in fit if self._max_tokens(scheme, num_ranks) > 0)

    def pipeline(self, scheme: Scheme, num_ranks: int) -> PipelineCost:
        """As in `SchemeCosts`."""
        if scheme not in self._milliseconds:
            known = ", ".join(map(str, self._milliseconds))
            raise ConfigError(f"{self.table.name} has no coefficients for {scheme}; it has {known}")
        a, b, c = (number / 1e3 for number in self._milliseconds[scheme])
        return PipelineCost(a, b, c, scheme.pipeline, self._max_tokens(scheme, num_ranks))

    def _max_tokens(self, scheme: Scheme, num_ranks: int) -> int:
        """MaxLen by C.1, two vocabulary tables where one stage holds both."""
        table, tensor = self.table, scheme.tensor
        if tensor not in table.activation_bytes:
            raise ConfigError(
                f"{table.name} has no activation_bytes for tensor parallelism {tensor}; add it beside "
                f"{', '.join(map(str, table.activation_bytes))}"
            )
        hidden, sharded = table.hidden_size, table.sharded_share
        layers = table.num_layers * hidden**2 * table.state_bytes
        vocabulary = hidden * table.vocab_size * table.vocabulary_bytes
        ends = 2 if scheme.pipeline == 1 else 1
        states = (layers + 2 * vocabulary) * sharded / num_ranks
        states += (layers / scheme.pipeline + ends * vocabulary) * (1 - sharded) / tensor
        free = table.gpu_memory_bytes - table.reserved_bytes - states
        per_token = table.num_layers * hidden / (tensor * scheme.context) * table.activation_bytes[tensor]
        return max(0, int(free / per_token))


@dataclass(frozen=True, slots=True)
class PredictedCosts:
    """Costs predicted for a model on a cluster, by data sheets or a measured cost table.

    `cost`: of one GPU of `cluster`. Tensor parallelism beyond a node takes nodes together as one.
    `tokens_per_rank`: most tokens of a GPU, beside what its memory holds.
    """

    cost: MachineCost
    cluster: Cluster
    model: Model
    margin: float = MARGIN
    tokens_per_rank: int | None = None
    _known: dict[tuple[Scheme, int], PipelineCost] = field(
        default_factory=dict[tuple[Scheme, int], PipelineCost], init=False, repr=False, compare=False
    )
    _most: dict[tuple[Scheme, int], int] = field(
        default_factory=dict[tuple[Scheme, int], int], init=False, repr=False, compare=False
    )

    def schemes(self, num_ranks: int) -> tuple[Scheme, ...]:
        """As in `SchemeCosts`: degrees of tensor and context parallelism are powers of two."""
        tensors = [
            degree
            for degree in _powers_of_two(min(num_ranks, MOST_NODES_OF_TENSOR * self.cluster.node_size))
            if self._splits(degree)
        ]
        found = [
            Scheme(tensor, stages, context)
            for tensor in tensors
            for stages in _divisors(self.model.num_layers, num_ranks // tensor)
            for context in _powers_of_two(num_ranks // tensor // stages)
            if self._lies_well(tensor, context)
        ]
        return tuple(scheme for scheme in found if self._max_tokens(scheme, num_ranks) > 0)

    def pipeline(self, scheme: Scheme, num_ranks: int) -> PipelineCost:
        """As in `SchemeCosts`."""
        if (scheme, num_ranks) not in self._known:
            check_scheme(scheme, self.model)
            most = self._max_tokens(scheme, num_ranks)
            lengths = lengths_to_fit(most)
            fitted = fit_scheme(scheme, self.model, self._cluster_for(scheme), self._cost_of, lengths)
            found = PipelineCost(fitted.a, fitted.b, fitted.c, scheme.pipeline, most)
            self._known[scheme, num_ranks] = found
        return self._known[scheme, num_ranks]

    def _cost_of(self, wide: Cluster, tensor: int) -> MachineCost:
        return on_cluster(self.cost, wide, tensor)

    def _max_tokens(self, scheme: Scheme, num_ranks: int) -> int:
        if (scheme, num_ranks) not in self._most:
            most = max_len(scheme, self.model, self.cluster.memory_bytes, num_ranks, self.margin)
            if self.tokens_per_rank is not None:
                most = min(most, self.tokens_per_rank * scheme.tensor * scheme.context)
            self._most[scheme, num_ranks] = most
        return self._most[scheme, num_ranks]

    def _splits(self, tensor: int) -> bool:
        model = self.model
        return not (model.num_heads % tensor or model.num_kv_heads % tensor)

    def _lies_well(self, tensor: int, context: int) -> bool:
        """Whether context-parallel ranks fill nodes, or parts of one."""
        wide = max(1, self.cluster.node_size // tensor)
        return context % wide == 0 or wide % context == 0

    def _cluster_for(self, scheme: Scheme) -> Cluster:
        """Nodes for one pipeline."""
        joined = joined_nodes(self.cluster, scheme.tensor)
        return replace(joined, num_ranks=-(-scheme.num_ranks // joined.node_size) * joined.node_size)


def _powers_of_two(most: int) -> list[int]:
    return [1 << power for power in range(most.bit_length()) if 1 << power <= most]


def _divisors(number: int, most: int) -> list[int]:
    return [divisor for divisor in range(1, min(number, most) + 1) if number % divisor == 0]
