"""The machine a plan is made for: ranks, nodes, links. Plain data."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_balance.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Cluster:
    """Ranks numbered node by node, and what their links and kernels sustain.

    `intra_bytes_per_s` is one rank's link inside the node, one direction; `nic_bytes_per_s` one
    NIC, one direction; `ranks_per_nic` ranks share a NIC. The alphas are the fixed seconds of a
    message. `flops_per_s` is the peak of a rank in dense bf16 matrix products,
    `attention_efficiency` the share of it that the forward attention kernel reaches over long
    sequences without a mask, `linear_efficiency` the share that a large matrix product reaches.
    `memory_bytes_per_s` is the rank's memory, read or written. `num_sms`: processors of a rank that
    communication takes some of; 0: it takes none. `transfers_wait`: a transfer waits for processors
    that an attention kernel under way holds (`cost.contention`).
    """

    num_ranks: int
    ranks_per_node: int
    name: str = "custom"
    intra_bytes_per_s: float = 400e9
    nic_bytes_per_s: float = 50e9
    ranks_per_nic: int = 1
    flops_per_s: float = 989e12
    attention_efficiency: float = 0.5
    memory_bytes: float = 141e9
    linear_efficiency: float = 0.8
    memory_bytes_per_s: float = 4.8e12
    num_sms: int = 132
    transfers_wait: bool = False
    intra_alpha_s: float = 3.4e-6
    inter_alpha_s: float = 9.6e-6

    def __post_init__(self) -> None:
        if self.num_ranks < 1 or self.ranks_per_node < 1:
            raise ConfigError(
                f"a cluster needs at least one rank and one rank per node, got {self.num_ranks} ranks, "
                f"{self.ranks_per_node} per node"
            )
        if self.num_ranks % self.ranks_per_node and self.num_ranks > self.ranks_per_node:
            raise ConfigError(
                f"{self.num_ranks} ranks are not divisible by {self.ranks_per_node} ranks per node; "
                f"use a multiple of {self.ranks_per_node} ranks or another --ranks-per-node"
            )

    @property
    def node_size(self) -> int:
        """Ranks on a node (a cluster smaller than a node is one node)."""
        return min(self.ranks_per_node, self.num_ranks)

    @property
    def num_nodes(self) -> int:
        return self.num_ranks // self.node_size

    def node(self, rank: int) -> int:
        return rank // self.node_size

    def ranks_of(self, node: int) -> range:
        return range(node * self.node_size, (node + 1) * self.node_size)
