"""From the tokens that ranks hold to the attention tasks that they run: `schedule`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from math import inf
from typing import Literal

import numpy as np

from megatron_balance.cost.base import CostModel, Floats
from megatron_balance.errors import ConfigError
from megatron_balance.ir.arrays import Ints, run_bounds
from megatron_balance.planners.distca.caps import enforce_caps
from megatron_balance.planners.distca.greedy import Drain, Rule
from megatron_balance.planners.distca.light_servers import empty_light_servers
from megatron_balance.planners.distca.servers import Caps, Servers
from megatron_balance.planners.distca.shards import HeadTail, Plain, TaskSizes
from megatron_balance.planners.distca.work import RANK, SEQ, START, STOP, Edges, Seconds

_AIM = 0.95
"""Share of the tolerance with which the limit starts.

Where no block fits it gives way by small steps, the first of which are within the rest.
"""

_LEAST, _MOST_PADDING = 0.25, 2.0
"""Shares of the tolerance: the least that the limit leaves above the mean; and the mean padding up
to which pairs have a limit of their own.
"""


@dataclass(frozen=True, slots=True)
class Scheduling:
    """Options of the scheduler; `DistcaOptions` documents the fields."""

    tolerance: float = 0.02
    block: int = 128
    shards: Literal["plain", "head_tail"] = "plain"
    empty_light_servers: bool = True
    least_score: float = 0.0
    max_kv_tokens: int | None = None
    max_received_tokens: int | None = None

    def __post_init__(self) -> None:
        for name, least in (
            ("tolerance", 0),
            ("block", 1),
            ("least_score", 0),
            ("max_kv_tokens", 1),
            ("max_received_tokens", 0),
        ):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"distca: {name} {value}: must be at least {least}")


def schedule(owned: Ints, lengths: Sequence[int], num_ranks: int, cost: CostModel, scheduling: Scheduling) -> Ints:
    """Attention tasks of the given tokens; none makes a rank take longer than the tolerance allows.

    A pure function of its arguments, for any layout: some ranks may hold nothing, and several
    fragments of a sequence may lie on one.

    Args:
        owned: rows (rank, seq, start, stop) [n, 4] of the linear layout; every query is attended.
        lengths: tokens of each sequence; `seq` indexes it. Parts of a sequence that nobody holds
            are not attended.
        num_ranks: all of them are attention servers.
        cost: predicts seconds of attention, and bytes.
        scheduling: see `DistcaOptions`.

    Returns:
        Rows (rank, seq, q_start, q_stop, k_start, k_stop) [m, 6] by rank, sequence and query. Keys
        are all those before: k_start is 0 and k_stop is q_stop.

    Raises:
        InfeasibleError: what a rank must hold or receive for its own tokens passes a cap, and no
            other rank can take these over.
    """
    owned = owned[owned[:, STOP] > owned[:, START]]
    if not len(owned):
        return np.empty((0, 6), dtype=np.int64)
    owned = owned[np.argsort(owned[:, RANK], kind="stable")]
    seconds = Seconds.of(cost, max(lengths))
    edges = Edges.of(owned, min(scheduling.block, max(lengths)), seconds)
    sizes = TaskSizes(2.0 * cost.query_bytes(1), float(cost.kv_bytes(1)))
    shards = Plain(edges, sizes) if scheduling.shards == "plain" else HeadTail(edges, sizes)
    caps = Caps(
        scheduling.max_kv_tokens or inf,
        inf if scheduling.max_received_tokens is None else scheduling.max_received_tokens,
    )
    servers = Servers(edges, shards, num_ranks, caps)
    enforce_caps(servers)
    least_score = scheduling.least_score * cost.inter_node_s(1, 0)
    limit, limit_of_pairs = _limits(servers, owned, seconds, scheduling.tolerance)
    rule = Rule(limit, scheduling.tolerance, sizes, least_score)
    if scheduling.empty_light_servers:
        empty_light_servers(servers, rule)
    if limit_of_pairs < limit:
        servers.load += np.maximum(limit - limit_of_pairs - _padding(servers, seconds, limit_of_pairs), 0.0)
    Drain(servers, rule).run()
    return _tasks(servers)


def _limits(servers: Servers, owned: Ints, seconds: Seconds, tolerance: float) -> tuple[float, float]:
    """The load that no server may exceed, and what it may have of that in pairs, so that both are
    within the tolerance.

    Runs that are short or end inside a tile take more time a pair, so a server with long ones only
    may be within the tolerance in seconds and beyond it in pairs. A limit of the mean's pairs at
    the best rate rules that out. Where it would leave too little above the mean seconds, there are
    two limits, unless padding is so much that even pairs are no aim. Neither is below what somebody
    has to take: the heaviest block.
    """
    start, stop = owned[:, START].astype(np.float64), owned[:, STOP].astype(np.float64)
    mean = float(servers.load.mean())
    mean_pairs_s = float(_pairs(start, stop).sum()) * seconds.pair_s / len(servers.load)
    by_pairs = max((1 + _AIM * tolerance) * mean_pairs_s, servers.heaviest_block())
    limit = max(by_pairs, (1 + _LEAST * tolerance) * mean)
    return limit, by_pairs if mean <= (1 + _MOST_PADDING * tolerance) * mean_pairs_s else limit


def _padding(servers: Servers, seconds: Seconds, most: float) -> Floats:
    """Seconds of each server beyond those of its pairs; 0 where it has to give away some of its
    work, which may be those.
    """
    rank, _, start, stop = _spans(servers)
    of_pairs = np.bincount(rank, _pairs(start, stop) * seconds.pair_s, len(servers.load))
    return np.where(servers.load > most, 0.0, servers.load - of_pairs)


def _pairs(start: Ints | Floats, stop: Ints | Floats) -> Floats:
    """Number of visible (query, key) pairs of the queries [start, stop), causal."""
    return (stop * (stop + 1.0) - start * (start + 1.0)) / 2


def _spans(servers: Servers) -> tuple[Ints, Ints, Ints, Ints]:
    """Rank, sequence, start and stop of the queries of all pieces."""
    held = [len(pieces) for pieces in servers.pieces]
    flat = chain.from_iterable(chain.from_iterable(servers.pieces))
    pieces = np.fromiter(flat, np.int64, 3 * sum(held)).reshape(-1, 3)
    which, start, stop = servers.shards.spans(pieces)
    return np.repeat(np.arange(len(held)), held)[which], servers.edges.owned[pieces[which, 0], SEQ], start, stop


def _tasks(servers: Servers) -> Ints:
    """Rows of tasks. Pieces of a sequence on a rank that touch are one."""
    rank, seq, start, stop = _spans(servers)
    order = np.lexsort((start, seq, rank))
    rank, seq, start, stop = rank[order], seq[order], start[order], stop[order]
    runs = run_bounds((rank[1:] != rank[:-1]) | (seq[1:] != seq[:-1]) | (start[1:] != stop[:-1]), len(rank))
    first, stop = runs[:-1], stop[runs[1:] - 1]
    return np.stack((rank[first], seq[first], start[first], stop, np.zeros_like(stop), stop), axis=1)
