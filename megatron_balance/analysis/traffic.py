"""Bytes on every link by the ops of a whole program, forward and backward, with its routes, as a
kernel should count them.

For measurements and tests: it walks all transfers; `analysis.inter_node` counts the forward from
the zones. A collective is counted as gloo runs it: an all-gather as a ring of blocks as wide as the
widest, each rank sending to the next of the group (gloo/allgather.cc); an all-to-all directly
between each pair of ranks (gloo/alltoallv.cc), and so a reduce-scatter, which on gloo is lowered to
one (`runtime.comm`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_balance.analysis.wire import NicOf, Parcels, Payload, is_collective, piece_bounds
from megatron_balance.ir.arrays import Ints, as_array, sums
from megatron_balance.ir.columns import Route
from megatron_balance.ir.program import Exchange, Program
from megatron_balance.patterns.sends import messages_of


@dataclass(frozen=True, slots=True)
class Traffic:
    """Payload bytes of one attention call, one layer.

    By rank, int64 [num_ranks]: bytes that it sends and receives inside its node and to or from
    other nodes, those that it passes on for others included. By NIC, int64 [nodes, NICs of a node]:
    bytes that it sends and receives.
    """

    intra_node_sent: Ints
    intra_node_received: Ints
    inter_node_sent: Ints
    inter_node_received: Ints
    nic_sent: Ints
    nic_received: Ints


def traffic(program: Program, payload: Payload, *, ranks_per_node: int, ranks_per_nic: int = 1) -> Traffic:
    """Traffic of the forward and, where the program has one, of the backward."""
    nics = NicOf(program.num_ranks, ranks_per_node, ranks_per_nic)
    hops = [np.empty((0, 3), dtype=np.int64)]
    hops += [_hops(op, payload, nics) for op in (*program.forward, *program.backward) if isinstance(op, Exchange)]
    src, dst, num_bytes = np.concatenate(hops).T
    across = nics.node(src) != nics.node(dst)

    def by_rank(rank: Ints, inter_node: bool) -> Ints:
        return sums(rank[across == inter_node], num_bytes[across == inter_node], program.num_ranks)

    return Traffic(
        intra_node_sent=by_rank(src, False),
        intra_node_received=by_rank(dst, False),
        inter_node_sent=by_rank(src, True),
        inter_node_received=by_rank(dst, True),
        nic_sent=nics.sums(src[across], num_bytes[across]),
        nic_received=nics.sums(dst[across], num_bytes[across]),
    )


def _hops(op: Exchange, payload: Payload, nics: NicOf) -> Ints:
    """Rows (src, dst, bytes) of the transfers that one exchange is carried by."""
    parcels = payload.parcels(messages_of(op.id, as_array(op.transfers)))
    if op.collective != "p2p" and is_collective(op.group, nics.num_ranks, nics.ranks_per_node):
        if op.collective == "all_gather":
            return _ring(op.group, int(parcels.padded.max()) if len(parcels.padded) else 0)
        return np.column_stack([parcels.src, parcels.dst, parcels.padded])
    return np.concatenate([_direct(op, parcels), *_routed(op, parcels)])


def _ring(group: tuple[int, ...], block_bytes: int) -> Ints:
    members = np.array(group)
    return np.column_stack([members, np.roll(members, -1), np.full(len(members), (len(members) - 1) * block_bytes)])


def _direct(op: Exchange, parcels: Parcels) -> Ints:
    routed = {row[Route.PAIR] for row in op.routes}
    free = [pair not in routed for pair in zip(parcels.src.tolist(), parcels.dst.tolist(), strict=True)]
    return np.column_stack([parcels.src, parcels.dst, parcels.direct])[np.array(free, dtype=bool)]


def _routed(op: Exchange, parcels: Parcels) -> list[Ints]:
    """The hops of every piece: to its send proxy, across, and from its receive proxy."""
    packed = dict(
        zip(zip(parcels.src.tolist(), parcels.dst.tolist(), strict=True), parcels.packed.tolist(), strict=True)
    )
    counts: dict[tuple[int, ...], int] = {}
    for row in op.routes:
        counts[row[Route.PAIR]] = counts.get(row[Route.PAIR], 0) + 1
    hops_of: list[Ints] = []
    for src, dst, piece, send_proxy, receive_proxy in op.routes:
        start, stop = piece_bounds(packed[src, dst], counts[src, dst])[piece]
        path = (src, send_proxy, receive_proxy, dst)
        hops = [(a, b, stop - start) for a, b in zip(path, path[1:], strict=False) if a != b]
        hops_of.append(np.array(hops, dtype=np.int64))
    return hops_of
