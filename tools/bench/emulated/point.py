"""The operating point: how fast the emulated NICs are, from what attention takes on this machine
(derived in docs/operating-point.md), and batches scaled down to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from megatron_balance.workloads.lengths import Lengths, draw
from tools.emulated_cluster import Topology
from tools.emulated_cluster.wiring import GOODPUT

NUM_NODES, RANKS_PER_NODE = 2, 4
NUM_RANKS = NUM_NODES * RANKS_PER_NODE

PAPER_TOKENS = 64 * 1024
"""Zeppelin's timeline (section 5.4.1): 64k tokens on 16 GPUs of cluster A."""
SCALE = 4
TOKENS = PAPER_TOKENS // SCALE

HEADS, HEAD_DIM = 2, 64
BYTES_PER_ELEMENT = 4
FFN_SIZE = 768
"""Makes linear modules take 0.38 of the time of a full context's attention, as in the paper's 3B
model (docs/operating-point.md).
"""


@dataclass(frozen=True, slots=True)
class Shape:
    """Ranks and the model that is trained on them; the defaults are those of most benchmarks."""

    nodes: int = NUM_NODES
    ranks_per_node: int = RANKS_PER_NODE
    heads: int = HEADS
    """Of queries and, as many, of keys."""
    head_dim: int = HEAD_DIM
    ffn_size: int = FFN_SIZE

    @property
    def num_ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def hidden_size(self) -> int:
        return self.heads * self.head_dim

    @property
    def tokens_per_rank(self) -> int:
        return TOKENS // self.num_ranks

    @property
    def hop_bytes(self) -> int:
        """Keys and values of one rank: what a round of the ring sends over a NIC."""
        return self.tokens_per_rank * 2 * self.hidden_size * BYTES_PER_ELEMENT

    @property
    def round_pairs(self) -> int:
        """(query, key) pairs of a rank in one round of a zigzag ring over a single sequence."""
        return self.tokens_per_rank**2 // 2

    @property
    def round_flops(self) -> int:
        """Of attention, forward."""
        return 4 * self.hidden_size * self.round_pairs


SHAPE = Shape()
SHAPES = {
    "2x4": Shape(heads=8, head_dim=16, ffn_size=1152),
    "2x8": Shape(ranks_per_node=8, heads=16, head_dim=16, ffn_size=960),
    "4x4": Shape(nodes=4, heads=16, head_dim=16, ffn_size=960),
    "2x4, 2 heads": SHAPE,
}
"""By nodes x ranks: a head for each rank, so that heads can be exchanged between all of them. A
kernel on heads of 16 takes 1.4 times as long for the same FLOPs as on heads of 64, and the MLP is
as much wider. With two heads for eight ranks most ranks of an exchange of heads would be idle.
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
    shape: Shape = SHAPE

    @staticmethod
    def of(kernels: Kernels, shape: Shape = SHAPE) -> Point:
        """A transfer takes `TRANSFER_TO_ROUND` times as long as the attention of its round."""
        payload_bytes_per_s = shape.hop_bytes / (TRANSFER_TO_ROUND * kernels.forward_s)
        return Point(kernels, round(8 * payload_bytes_per_s / GOODPUT), shape)

    @property
    def intra_bits_per_s(self) -> int:
        return round(INTRA_TO_NIC * self.nic_bits_per_s)

    @property
    def transfer_to_round(self) -> float:
        """The ratio that this point has; not `TRANSFER_TO_ROUND` if the rate was given."""
        return self.shape.hop_bytes / self._payload(self.nic_bits_per_s) / self.kernels.forward_s

    def topology(self, nics_per_node: int) -> Topology:
        shape = self.shape
        return Topology(shape.nodes, shape.ranks_per_node, nics_per_node, self.nic_bits_per_s, self.intra_bits_per_s)

    def cluster(self, nics_per_node: int) -> dict[str, Any]:
        """The `cluster` section of a configuration: what planners are told."""
        shape = self.shape
        flops_per_s = shape.round_flops / self.kernels.forward_s
        return {
            "base": "emulated",
            "num_ranks": shape.num_ranks,
            "ranks_per_node": shape.ranks_per_node,
            "ranks_per_nic": shape.ranks_per_node // nics_per_node,
            "nic_bytes_per_s": self._payload(self.nic_bits_per_s),
            "intra_bytes_per_s": self._payload(self.intra_bits_per_s),
            "flops_per_s": flops_per_s,
            "attention_efficiency": 1.0,
            "linear_efficiency": min(1.0, self.kernels.linear_flops_per_s / flops_per_s),
        }

    def text(self) -> str:
        k, shape = self.kernels, self.shape
        speed = "the ranks share the cores; imbalance between them costs less than on a cluster"
        if k.share is not None:
            speed = f"each rank computes at {100 * k.share:.0f} % of a core, by the deadline scheduler"
        return (
            f"{shape.nodes} nodes x {shape.ranks_per_node} ranks, {shape.tokens_per_rank} tokens a rank, {shape.heads} "
            f"heads x {shape.head_dim}, fp32; {speed}.\n"
            f"Attention of a ring round, all ranks at once: forward {1e3 * k.forward_s:.1f} ms, backward "
            f"{1e3 * k.backward_s:.1f} ms "
            f"({shape.round_flops / k.forward_s / 1e9:.1f} GFLOP/s a rank; matrix products "
            f"{k.linear_flops_per_s / 1e9:.1f}).\n"
            f"A hop carries {shape.hop_bytes / 1e6:.3f} MB; NIC {self.nic_bits_per_s / 1e6:.1f} Mbit/s, links in a "
            f"node {self.intra_bits_per_s / 1e6:.1f} Mbit/s: a hop between nodes takes {self.transfer_to_round:.2f} "
            "times its round's attention."
        )

    @staticmethod
    def _payload(bits_per_s: float) -> float:
        return bits_per_s / 8 * GOODPUT


DATASETS = ("arxiv", "github", "prolong64k")


def draw_batches(name: str, count: int, seed: int, scale: int = SCALE) -> list[Lengths]:
    """Batches of a data set as Zeppelin draws them (arXiv 2509.21841, Table 2 and section 5.4.1):
    `PAPER_TOKENS` tokens divided by `scale`.

    Documents come until a batch is full; the last one is cut, so that none is longer than the
    context.
    """
    # Of each data set its own random numbers: the same ones would give alike batches.
    return [scaled(batch, scale) for batch in draw(name, PAPER_TOKENS, count, (seed, DATASETS.index(name)))]


def scaled(lengths: Sequence[int], scale: int = SCALE) -> Lengths:
    """Fewer tokens: every boundary between documents divided by `scale`, rounded down."""
    bounds = (bound // scale for bound in accumulate(lengths, initial=0))
    return tuple(stop - start for start, stop in pairwise(bounds) if start < stop)
