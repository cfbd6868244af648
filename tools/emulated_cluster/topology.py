"""Shape of an emulated cluster: counts, rates, addresses and the environment of each rank."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass

from megatron_balance.errors import ConfigError

NIC = "nic"
"""The interface of a rank that leads to the other nodes; it holds the rank's only address."""

MASTER_PORT = 29500
MAX_NODES = 256
MAX_RANKS_PER_NODE = 254


@dataclass(frozen=True, slots=True)
class Topology:
    """Nodes, their ranks and NICs, and how fast the links are.

    Attributes: num_nodes: Nodes. ranks_per_node: Ranks of each node. nics_per_node: NICs of each
        node; divides `ranks_per_node`. Consecutive ranks share a NIC. nic_bits_per_s: Rate of one
        NIC, the same in either direction. intra_bits_per_s: Rate of one rank's link to the others
        of its node, the same in either direction; None: as fast as memory allows.

    Raises:
        ConfigError: counts or rates that no cluster has.
    """

    num_nodes: int
    ranks_per_node: int
    nics_per_node: int
    nic_bits_per_s: int
    intra_bits_per_s: int | None

    def __post_init__(self) -> None:
        _within("num_nodes", self.num_nodes, MAX_NODES)
        _within("ranks_per_node", self.ranks_per_node, MAX_RANKS_PER_NODE)
        if self.nics_per_node < 1 or self.ranks_per_node % self.nics_per_node:
            allowed = [count for count in range(1, self.ranks_per_node + 1) if self.ranks_per_node % count == 0]
            raise ConfigError(
                f"nics_per_node = {self.nics_per_node}: every NIC serves as many ranks, so with {self.ranks_per_node} "
                "ranks per node "
                f"choose one of {', '.join(map(str, allowed))}"
            )
        _positive("nic_bits_per_s", self.nic_bits_per_s)
        if self.intra_bits_per_s is not None:
            _positive("intra_bits_per_s", self.intra_bits_per_s)

    @property
    def world_size(self) -> int:
        return self.num_nodes * self.ranks_per_node

    @property
    def ranks_per_nic(self) -> int:
        return self.ranks_per_node // self.nics_per_node

    def node(self, rank: int) -> int:
        return rank // self.ranks_per_node

    def local_rank(self, rank: int) -> int:
        return rank % self.ranks_per_node

    def address(self, rank: int) -> str:
        """The rank's only address; the third number is its node."""
        return f"10.201.{self.node(rank)}.{self.local_rank(rank) + 1}"

    def environment(self, rank: int) -> dict[str, str]:
        """Variables that torchrun would set for this rank, and the interface gloo must listen on
        (unset, it takes the loopback).
        """
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(self.local_rank(rank)),
            "GROUP_RANK": str(self.node(rank)),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.ranks_per_node),
            "GROUP_WORLD_SIZE": str(self.num_nodes),
            "MASTER_ADDR": self.address(0),
            "MASTER_PORT": str(MASTER_PORT),
            "GLOO_SOCKET_IFNAME": NIC,
        }

    def at_rates(self, nic_bits_per_s: int, intra_bits_per_s: int | None) -> Topology:
        return dataclasses.replace(self, nic_bits_per_s=nic_bits_per_s, intra_bits_per_s=intra_bits_per_s)

    def text(self) -> str:
        return json.dumps(dataclasses.astuple(self), separators=(",", ":"))

    @staticmethod
    def parse(text: str) -> Topology:
        return Topology(*json.loads(text))


@dataclass(frozen=True, slots=True)
class NicBytes:
    """Bytes that one NIC has carried since the cluster is up, headers included, as the kernel
    counted them.
    """

    node: int
    nic: int
    sent: int
    received: int


def _within(name: str, value: int, limit: int) -> None:
    if not 1 <= value <= limit:
        raise ConfigError(f"{name} = {value}: choose 1 to {limit}")


def _positive(name: str, value: int) -> None:
    if value < 1:
        raise ConfigError(f"{name} = {value}: choose a rate of at least 1 bit/s")
