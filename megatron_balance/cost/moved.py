"""Costs of the same GPUs in another cluster: the ranks of one pipeline, or wider ranks."""

from __future__ import annotations

from dataclasses import replace

from megatron_balance.cost.analytic import AnalyticCost
from megatron_balance.cost.base import MachineCost
from megatron_balance.cost.measured import MeasuredCost
from megatron_balance.errors import ConfigError
from megatron_balance.ir.cluster import Cluster


def on_cluster(cost: MachineCost, cluster: Cluster, tensor_parallel: int | None = None) -> MachineCost:
    """`cost` for the ranks of `cluster`.

    Args:
        cost: a planner's cost model.
        cluster: of GPUs of the same kind, or of wide ranks (`cost.parallel.wide_ranks`).
        tensor_parallel: GPUs of such a rank; None: as many as in `cost`.

    Raises:
        ConfigError: a cost model that knows nothing of clusters.
    """
    if not isinstance(cost, AnalyticCost | MeasuredCost):
        raise ConfigError(
            f"costs of other ranks: expected the costs of a data sheet or of a cost table, got {type(cost).__name__}"
        )
    gpus = cost.tensor_parallel if tensor_parallel is None else tensor_parallel
    return replace(cost, cluster=cluster, tensor_parallel=gpus)
