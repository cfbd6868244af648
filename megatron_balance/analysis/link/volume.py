"""Bytes that a pull and a push move, by rank, and the seconds that links alone take for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from megatron_balance.analysis.link.table import WeightPiece, elements
from megatron_balance.ir.arrays import Ints
from megatron_balance.ir.cluster import Cluster


@dataclass(frozen=True, slots=True)
class WeightTraffic:
    """Bytes that a pull and a push move [2, num_ranks, 2, 2] int64: of each rank inside its node and
    between nodes, sent and received.
    """

    SHAPE: ClassVar[tuple[int, ...]] = (2, 2, 2)
    table: Ints
    handed_on: bool = False
    """Whether transfers among ranks of a node follow those between nodes (`nodes`)."""

    def described(self, cluster: Cluster) -> dict[str, float]:
        """Bytes of all ranks, and the seconds that links alone take by a data sheet."""
        found: dict[str, float] = {}
        for name, way in zip(("pull", "push"), self.table, strict=True):
            found[f"{name}_bytes"] = int(way[:, :, 0].sum())
            found[f"{name}_bytes_inter_node"] = int(way[:, 1, 0].sum())
            found[f"predicted_{name}_s"] = links_s(way, cluster, handed_on=self.handed_on)
        return found


def links_s(way: Ints, cluster: Cluster, *, handed_on: bool = False) -> float:
    """Seconds of the busiest link or NIC, each direction for itself.

    Args:
        way: bytes [num_ranks, 2, 2], one direction of a `WeightTraffic`, or a part of it.
        cluster: whose rates count.
        handed_on: both count, one after the other.
    """
    inside, between = way[:, 0], way[:, 1]
    by_nic = np.zeros((-(-len(way) // cluster.ranks_per_nic), 2), dtype=np.int64)
    np.add.at(by_nic, np.arange(len(way)) // cluster.ranks_per_nic, between)
    link_s, nic_s = float(inside.max()) / cluster.intra_bytes_per_s, float(by_nic.max()) / cluster.nic_bytes_per_s
    return link_s + nic_s if handed_on else max(link_s, nic_s)


def volume(pieces: Ints, width: int, num_ranks: int, ranks_per_node: int) -> Ints:
    """Bytes of transfers of `width` bytes an element, as one direction of a `WeightTraffic`
    [num_ranks, 2, 2].
    """
    found = np.zeros((num_ranks, 2, 2), dtype=np.int64)
    src, dst = pieces[:, WeightPiece.SRC], pieces[:, WeightPiece.DST]
    moves = np.flatnonzero(src != dst)
    away = (src[moves] // ranks_per_node != dst[moves] // ranks_per_node).astype(np.int64)
    amounts = width * elements(pieces[moves])
    for way, ends in enumerate((src[moves], dst[moves])):
        np.add.at(found[..., way], (ends, away), amounts)
    return found
