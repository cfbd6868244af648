"""The operating point: how fast the emulated NICs are, from what attention takes on this machine.
Derived in docs/operating-point.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tools.emulated_cluster import Topology
from tools.emulated_cluster.wiring import MTU

GOODPUT = (MTU - 20 - 32) / (MTU + 14)
"""Of what a NIC carries, the share that is no header of IP, TCP or Ethernet."""

NUM_NODES, RANKS_PER_NODE = 2, 4
NUM_RANKS = NUM_NODES * RANKS_PER_NODE

PAPER_TOKENS = 64 * 1024
"""Zeppelin's timeline (section 5.4.1): 64k tokens on 16 GPUs of cluster A."""
SCALE = 4
TOKENS = PAPER_TOKENS // SCALE
TOKENS_PER_RANK = TOKENS // NUM_RANKS

HEADS, HEAD_DIM = 2, 64
BYTES_PER_ELEMENT = 4
HOP_BYTES = TOKENS_PER_RANK * 2 * HEADS * HEAD_DIM * BYTES_PER_ELEMENT
"""Keys and values of one rank: what a round of the ring sends over a NIC."""
ROUND_PAIRS = TOKENS_PER_RANK * TOKENS_PER_RANK // 2
"""(query, key) pairs of a rank in one round of a zigzag ring over a single sequence."""
ROUND_FLOPS = 4 * HEADS * HEAD_DIM * ROUND_PAIRS

FFN_SIZE = 768
"""Makes linear modules take 0.38 of the time of a full context's attention, as in the paper's 3B
model (docs/operating-point.md).
"""

TRANSFER_TO_ROUND = 3.5
"""Seconds of an inter-node transfer over seconds of the attention it should hide behind, forward, a
full context over all ranks.
"""
INTRA_TO_NIC = 8.0
"""A rank's link in its node over one NIC: 200 GB/s and 25 GB/s, each in one direction."""


@dataclass(frozen=True, slots=True)
class Kernels:
    """Measured while all ranks compute at once: seconds of a round of the ring, forward and
    backward, and FLOP/s of matrix products.
    """

    forward_s: float
    backward_s: float
    linear_flops_per_s: float
    share: float | None
    """Of a core, for each rank's compute thread; None: the ranks share the cores as they come."""


@dataclass(frozen=True, slots=True)
class Point:
    """Rates of the links, and the cluster as planners are told of it."""

    kernels: Kernels
    nic_bits_per_s: int

    @staticmethod
    def of(kernels: Kernels) -> Point:
        """The point at which a transfer takes `TRANSFER_TO_ROUND` times as long as the attention of
        its round.
        """
        payload_bytes_per_s = HOP_BYTES / (TRANSFER_TO_ROUND * kernels.forward_s)
        return Point(kernels, round(8 * payload_bytes_per_s / GOODPUT))

    @property
    def intra_bits_per_s(self) -> int:
        """Rate of a rank's link in its node."""
        return round(INTRA_TO_NIC * self.nic_bits_per_s)

    @property
    def transfer_to_round(self) -> float:
        """The ratio that this point has; not `TRANSFER_TO_ROUND` if the rate was given."""
        return HOP_BYTES / self._payload(self.nic_bits_per_s) / self.kernels.forward_s

    def topology(self, nics_per_node: int) -> Topology:
        """The emulated cluster."""
        return Topology(NUM_NODES, RANKS_PER_NODE, nics_per_node, self.nic_bits_per_s, self.intra_bits_per_s)

    def cluster(self, nics_per_node: int) -> dict[str, Any]:
        """The `cluster` section of a configuration: what planners are told."""
        flops_per_s = ROUND_FLOPS / self.kernels.forward_s
        return {
            "base": "emulated",
            "num_ranks": NUM_RANKS,
            "ranks_per_node": RANKS_PER_NODE,
            "ranks_per_nic": RANKS_PER_NODE // nics_per_node,
            "nic_bytes_per_s": self._payload(self.nic_bits_per_s),
            "intra_bytes_per_s": self._payload(self.intra_bits_per_s),
            "flops_per_s": flops_per_s,
            "attention_efficiency": 1.0,
            "linear_efficiency": min(1.0, self.kernels.linear_flops_per_s / flops_per_s),
        }

    def text(self) -> str:
        """A paragraph for people."""
        k = self.kernels
        speed = "the ranks share the cores; imbalance between them costs less than on a cluster"
        if k.share is not None:
            speed = f"each rank computes at {100 * k.share:.0f} % of a core, by the deadline scheduler"
        return (
            f"{NUM_NODES} nodes x {RANKS_PER_NODE} ranks, {TOKENS_PER_RANK} tokens a rank, {HEADS} heads x "
            f"{HEAD_DIM}, fp32; {speed}.\n"
            f"Attention of a ring round, all ranks at once: forward {1e3 * k.forward_s:.1f} ms, backward "
            f"{1e3 * k.backward_s:.1f} ms "
            f"({ROUND_FLOPS / k.forward_s / 1e9:.1f} GFLOP/s a rank; matrix products "
            f"{k.linear_flops_per_s / 1e9:.1f}).\n"
            f"A hop carries {HOP_BYTES / 1e6:.3f} MB; NIC {self.nic_bits_per_s / 1e6:.1f} Mbit/s, links in a node "
            f"{self.intra_bits_per_s / 1e6:.1f} Mbit/s: a hop between nodes takes {self.transfer_to_round:.2f} times "
            "its round's attention."
        )

    @staticmethod
    def _payload(bits_per_s: float) -> float:
        return bits_per_s / 8 * GOODPUT
