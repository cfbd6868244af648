"""Cost model with scaled parts, to simulate plans on a machine that was measured wrong."""

from dataclasses import dataclass, replace
from math import inf
from typing import Any

import numpy as np

from megatron_balance.cost.analytic import AnalyticCost
from megatron_balance.cost.base import Contention, Host, Link, MachineCost
from megatron_balance.cost.measured import MeasuredCost
from megatron_balance.errors import ConfigError
from megatron_balance.ir.arrays import Floats, Ints
from megatron_balance.ir.cluster import Cluster


@dataclass(frozen=True, slots=True)
class Factors:
    """Factors on times: of attention, of the other modules and memory-bound work, of transfers
    inside a node and between nodes.
    """

    attention: float = 1.0
    linear: float = 1.0
    intra_node: float = 1.0
    inter_node: float = 1.0

    @staticmethod
    def draw(spread: float, seed: int) -> "Factors":
        """Factors exp(N(0, spread)), each on its own: a spread of 0.1 is about 10 % up or down."""
        return Factors(*np.exp(np.random.default_rng(seed).normal(0.0, spread, 4)).tolist())


@dataclass(frozen=True, slots=True)
class PerturbedCost(MachineCost):
    """`base` with its times multiplied, but for launches, calls and the host."""

    base: MachineCost
    factors: Factors

    def attention_s(self, num_pairs: float, run_tokens: float = inf) -> float:
        return self.factors.attention * self.base.attention_s(num_pairs, run_tokens)

    def launch_s(self, num_launches: float) -> float:
        return self.base.launch_s(num_launches)

    def linear_s(self, num_tokens: float) -> float:
        return self.factors.linear * self.base.linear_s(num_tokens)

    def experts_s(self, num_tokens: float) -> float:
        return self.factors.linear * self.base.experts_s(num_tokens)

    def query_bytes(self, num_tokens: float) -> float:
        return self.base.query_bytes(num_tokens)

    def kv_bytes(self, num_tokens: float) -> float:
        return self.base.kv_bytes(num_tokens)

    def attend_s(self, pairs: Ints, launch: Ints, num_launches: int, *, backward: bool = False) -> Floats:
        return self.factors.attention * self.base.attend_s(pairs, launch, num_launches, backward=backward)

    def merge_s(self, num_tokens: float) -> float:
        return self.factors.linear * self.base.merge_s(num_tokens)

    def pack_s(self, num_bytes: float) -> float:
        return self.factors.linear * self.base.pack_s(num_bytes)

    def layer_s(self, num_tokens: float, *, backward: bool = False) -> float:
        return self.factors.linear * self.base.layer_s(num_tokens, backward=backward)

    def head_s(self, num_tokens: float, *, backward: bool = False) -> float:
        return self.factors.linear * self.base.head_s(num_tokens, backward=backward)

    def scan_s(self, flops: float, elements: float) -> float:
        return self.factors.linear * self.base.scan_s(flops, elements)

    def optimizer_s(self, num_parameters: float) -> float:
        return self.factors.linear * self.base.optimizer_s(num_parameters)

    def link(self, *, inter_node: bool) -> Link:
        link = self.base.link(inter_node=inter_node)
        factor = self.factors.inter_node if inter_node else self.factors.intra_node
        return replace(link, alpha_s=factor * link.alpha_s, bytes_per_s=link.bytes_per_s / factor)

    @property
    def call_s(self) -> float:
        return self.base.call_s

    @property
    def host(self) -> Host:
        return self.base.host

    @property
    def contention(self) -> Contention:
        return self.base.contention


def on_cluster(cost: MachineCost, cluster: Cluster, tensor_parallel: int | None = None) -> MachineCost:
    """`cost` for the ranks of `cluster`: of GPUs of the same kind, or of wide ranks
    (`cost.parallel.wide_ranks`).

    `tensor_parallel`: GPUs of such a rank; None: as many as in `cost`. Raises ConfigError of a cost
    model that knows nothing of clusters.
    """
    gpus = {} if tensor_parallel is None else {"tensor_parallel": tensor_parallel}
    return changed(cost, "other ranks", cluster=cluster, **gpus)


def changed(cost: MachineCost, what: str, **fields: Any) -> MachineCost:
    """`cost` with other fields; `what`: of what, for the error. Raises ConfigError as `on_cluster`."""
    if isinstance(cost, PerturbedCost):
        return replace(cost, base=changed(cost.base, what, **fields))
    if not isinstance(cost, AnalyticCost | MeasuredCost):
        raise ConfigError(
            f"costs of {what}: expected the costs of a data sheet or of a cost table, got {type(cost).__name__}"
        )
    return replace(cost, **fields)
