"""Costs of the same GPUs in another cluster: the ranks of one pipeline, or wider ranks."""

from __future__ import annotations

from dataclasses import replace

from megatron_balance.cost.analytic import AnalyticCost
from megatron_balance.cost.base import MachineCost
from megatron_balance.cost.measured import MeasuredCost
from megatron_balance.cost.perturbed import PerturbedCost
from megatron_balance.errors import ConfigError
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.model import Model


def on_cluster(cost: MachineCost, cluster: Cluster, tensor_parallel: int | None = None) -> MachineCost:
    """`cost` for the ranks of `cluster`.

    Args:
        cost: a planner's cost model.
        cluster: of GPUs of the same kind, or of wide ranks (`cost.parallel.wide_ranks`).
        tensor_parallel: GPUs of such a rank; None: as many as in `cost`.

    Raises:
        ConfigError: a cost model that knows nothing of clusters.
    """
    if isinstance(cost, PerturbedCost):
        return replace(cost, base=on_cluster(cost.base, cluster, tensor_parallel))
    if not isinstance(cost, AnalyticCost | MeasuredCost):
        raise ConfigError(
            f"costs of other ranks: expected the costs of a data sheet or of a cost table, got {type(cost).__name__}"
        )
    gpus = cost.tensor_parallel if tensor_parallel is None else tensor_parallel
    return replace(cost, cluster=cluster, tensor_parallel=gpus)


def of_model(cost: MachineCost, model: Model) -> MachineCost:
    """`cost` of the same ranks running `model`.

    Raises:
        ConfigError: a cost model that knows nothing of models.
    """
    if isinstance(cost, PerturbedCost):
        return replace(cost, base=of_model(cost.base, model))
    if not isinstance(cost, AnalyticCost | MeasuredCost):
        raise ConfigError(
            f"costs of layers of another mask: expected the costs of a data sheet or of a cost table, got "
            f"{type(cost).__name__}"
        )
    return replace(cost, model=model)


def of_share(cost: MachineCost, cluster: Cluster, model: Model) -> MachineCost:
    """`cost` of one tensor-parallel rank's share of the model, without what the ranks exchange.

    Args:
        cost: a planner's cost model.
        cluster: of one rank of each tensor-parallel group (`cost.parallel.one_of_each`).
        model: that share (`Model.share`).

    Raises:
        ConfigError: as `on_cluster`.
    """
    moved = on_cluster(cost, cluster, 1)
    if isinstance(moved, PerturbedCost):
        return replace(moved, base=of_share(moved.base, cluster, model))
    assert isinstance(moved, AnalyticCost | MeasuredCost), "as `on_cluster` has it"
    return replace(moved, model=model)
