"""Rule `waves`: sequences on groups of ranks in uneven shares, all attended in one schedule
(`patterns.waves`; no such rule in the paper).

A group exchanges heads, so that it attends like one wide rank. How wide is a matter of price: from a
node on narrower groups are tried where keys hide, wider ones where they do not, until one is no
better than the one before. Of each size the placements from the fewest cuts to the most even one are
priced (`shares`, `estimate`). Where keys still show, the search begins with rings of groups too, which
share a sequence evenly with few neighbours and so move fewer keys. The cheapest placement gets the
lead that hides most of its exchange of heads (`lead`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import NamedTuple, TypeAlias

import numpy as np

from megatron_balance.cost.base import MachineCost
from megatron_balance.errors import ConfigError
from megatron_balance.ir.arrays import Ints, as_array, as_rows, sums
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.columns import Placed
from megatron_balance.ir.intervals import union
from megatron_balance.ir.model import Model
from megatron_balance.ir.plan import SharedZone
from megatron_balance.patterns.waves import ALIGN, lead_cuts, side_of
from megatron_balance.planners.zeppelin.estimate import WAVES, GroupCosts, PlacementEstimate, cheapest
from megatron_balance.planners.zeppelin.lead import with_lead
from megatron_balance.planners.zeppelin.shares import (
    KeptShares,
    Shares,
    Trimmed,
    num_parts,
    placements,
    placements_from,
    zigzag_edges,
)
from megatron_balance.solvers.placed import INTER_NODE, INTRA_NODE, LOCAL, Placement

_LEAST_SHARE = 0.03
_LEAST_OF_FEW = 0.1
"""Smaller shares of a sequence are left out; the second where cuts are to be fewer."""


class _Search(NamedTuple):
    """Ways to begin (`shares.placements`): those that are always tried, and those that are where
    keys that are waited for are `showing` of a layer's seconds.
    """

    always: tuple[float | None, ...]
    fewer_cuts: tuple[float, ...]
    showing: float


_SEARCH = _Search((0.0, None), (0.15, 0.3, 0.5, 0.8), 0.03)
_OF_MANY = _Search((0.0,), (0.3, 0.8), 0.12)
_MANY = 32
"""Over more groups than these the second search is made: the longest sequence alone never fills
them, and a way takes as much longer as there are more groups. Rings of groups are not tried there.
"""

_HIDDEN = 0.03
"""Share of a layer's seconds up to which that is not so; then narrower groups may pay."""

_FITTING = 0.5
"""Narrower groups are tried where one of them holds this much of the longest sequence."""

_ENOUGH = 1.1
"""A layer's seconds over those of even computation up to which a placement whose keys do not show is
good enough.
"""

_EXPOSED = 0.1
"""Share from which on wider groups may."""

_BETTER = 0.995
"""By how much another size must be cheaper to go on in its direction."""


Rings: TypeAlias = Callable[[int], Placement | None]
"""By the size of a group: the groups of each sequence where rings of groups are cheapest, a further
way to begin; None: there are no such rings.
"""


@dataclass(frozen=True, slots=True)
class WaveLimits:
    """Limits and wishes. `capacity`: tokens that a rank holds at most; `size`, `num_waves`: of groups
    of this many ranks, in this many waves; `call_s`, `replays`: as in `GroupCosts`.
    """

    capacity: int
    size: int | None = None
    num_waves: int | None = None
    call_s: float = 0.0
    replays: bool = False


@dataclass(frozen=True, slots=True)
class Chosen:
    """A placement of sequences over groups of `size` ranks and its predicted seconds, by `costs`;
    `of[seq]`: the share of each group.
    """

    of: list[dict[int, float]]
    lengths: Sequence[int]
    size: int
    estimate: PlacementEstimate
    costs: GroupCosts


def place(
    lengths: Sequence[int], cluster: Cluster, model: Model, cost: MachineCost, asked: WaveLimits, rings: Rings
) -> tuple[SharedZone, Chosen] | None:
    """The cheapest placement and its zone; None: it does not keep to the capacity.

    Raises:
        ConfigError: groups of a size that does not tile the cluster.
    """
    chosen = choose(lengths, cluster, model, cost, asked, rings)
    if chosen is None:
        return None
    for lead in dict.fromkeys((chosen.estimate.lead, 0)):  # runs of two parts may be a token longer
        zone = shared_zone(chosen, cluster, lead)
        rows = as_array(zone.fragments)
        held = sums(rows[:, Placed.RANK], rows[:, Placed.STOP] - rows[:, Placed.START], cluster.num_ranks)
        if held.max() <= asked.capacity:
            return zone, chosen
    return None


def choose(
    lengths: Sequence[int], cluster: Cluster, model: Model, cost: MachineCost, asked: WaveLimits, rings: Rings
) -> Chosen | None:
    """The cheapest placement within the capacity, over groups of the cheapest size."""
    sizes = group_sizes(cluster)
    if asked.size is not None:
        if asked.size not in sizes:
            raise ConfigError(
                f"zeppelin: group_size {asked.size} does not tile {cluster.num_ranks} ranks in nodes of "
                f"{cluster.node_size}; use one of {', '.join(map(str, sizes))}"
            )
        sizes = [asked.size]
    at = max((at for at, size in enumerate(sizes) if size <= cluster.node_size), default=0)
    costs = GroupCosts(cost, cluster, model, sizes[at], asked.call_s, asked.replays)
    found = _cheapest(lengths, costs, asked, rings)
    step = _direction(found.estimate) if found else 0
    while found and step and 0 <= at + step < len(sizes):
        at += step
        if step < 0 and max(lengths, default=0) * _FITTING * cluster.num_ranks > sum(lengths) * sizes[at]:
            break
        costs, below_s = costs.of_size(sizes[at]), _BETTER * found.estimate.seconds
        bound_s = costs.bound_s(sum(lengths), sum(costs.works_s(lengths)))
        other = None if bound_s >= below_s else _cheapest(lengths, costs, asked, rings)
        if other is None or other.estimate.seconds >= below_s:
            break
        found = other
    if found is None or found.size == 1:
        return found
    numbers = WAVES if asked.num_waves is None else (asked.num_waves,)
    return replace(found, estimate=with_lead(found.estimate, lengths, found.of, costs.of_size(found.size), numbers))


def _direction(price: PlacementEstimate) -> int:
    """Where a cheaper size of groups may be: wider groups exchange more heads and fewer keys."""
    if price.exposed_s < _HIDDEN * price.seconds:
        return -1
    return int(price.exposed_s > _EXPOSED * price.seconds)


def _cheapest(lengths: Sequence[int], costs: GroupCosts, asked: WaveLimits, rings: Rings) -> Chosen | None:
    """As `choose`, over groups of one size, without a lead."""
    numbers = WAVES if asked.num_waves is None else (asked.num_waves,)
    search = _OF_MANY if costs.num_groups > _MANY else _SEARCH
    placed = Shares.empty(costs.works_s(lengths), lengths, costs.num_groups)
    capacity = asked.capacity * costs.size

    def best(kept: Sequence[KeptShares], least: float, so_far: Chosen | None) -> Chosen | None:
        trimmed, below_s = Trimmed.of(placed, kept, [least] * len(kept)), so_far.estimate.seconds if so_far else inf
        found = cheapest(trimmed, costs, numbers, capacity=capacity, below_s=below_s)
        if found is None:
            return so_far
        at, price = found
        return Chosen(trimmed.shares(kept[at], at), lengths, costs.size, price, costs)

    found: Chosen | None = None
    for kept, least in _tried(placed, costs, search):
        found = best(kept, least, found)
        if costs.num_groups == 1 or (found and _is_good(found.estimate, placed, costs, search)):
            return found
    begun = None if costs.num_groups > _MANY else rings(costs.size)
    if begun is None:
        return found
    kept = [each.kept() for each in placements_from(placed.work, lengths, costs.num_groups, begun)]
    return best(kept, _LEAST_OF_FEW, found)


def _is_good(price: PlacementEstimate, placed: Shares, costs: GroupCosts, search: _Search) -> bool:
    """Whether a placement is good enough to look no further."""
    hidden = price.exposed_s < search.showing * price.seconds
    return hidden and price.seconds <= _ENOUGH * costs.bound_s(sum(placed.tokens), sum(placed.work))


def _tried(placed: Shares, costs: GroupCosts, search: _Search) -> Iterator[tuple[list[KeptShares], float]]:
    """Placements, and the smallest share of them: those that are always tried, then those of fewer
    cuts. `placed`: of no sequence.
    """
    work, lengths, num_groups = placed.work, placed.tokens, costs.num_groups
    for starts, least in ((search.always, _LEAST_SHARE), (search.fewer_cuts, _LEAST_OF_FEW)):
        kept: list[KeptShares] = []
        for above in _distinct(starts, work, num_groups) if num_groups > 1 else starts[:1]:
            kept += [each.kept() for each in placements(work, lengths, num_groups, above)]
        yield kept, least


def _distinct(starts: Sequence[float | None], work: Sequence[float], num_groups: int) -> list[float | None]:
    """The first of those that begin alike."""
    ways = {above: None if above is None else tuple(num_parts(work, num_groups, above)) for above in starts}
    first = {way: above for above, way in reversed(ways.items())}
    return [above for above in starts if first[ways[above]] == above]


def group_sizes(cluster: Cluster) -> list[int]:
    """Sizes of groups that tile the cluster, ascending: parts of a node that share NICs evenly, a
    node, and nodes in powers of two.
    """
    node, shared = cluster.node_size, cluster.ranks_per_nic
    inside = [size for size in range(1, node + 1) if node % size == 0 and (size % shared == 0 or shared % size == 0)]
    sizes = inside if inside[-1] == node else [*inside, node]
    while 2 * sizes[-1] <= cluster.num_ranks:
        sizes.append(2 * sizes[-1])
    return [size for size in sizes if cluster.num_ranks % size == 0]


def shared_zone(chosen: Chosen, cluster: Cluster, lead: int = 0) -> SharedZone:
    """The zone of a placement: every group's fragments in near-equal runs on its ranks, those of its
    lead and those of the others.
    """
    size, node_size = chosen.size, cluster.node_size
    held: list[tuple[int, int, int, int]] = []
    for seq, (length, own) in enumerate(zip(chosen.lengths, chosen.of, strict=True)):
        groups = sorted(own)
        if len(groups) == 1:
            held.append((groups[0], seq, 0, length))
            continue
        edges = zigzag_edges(length, [own[group] for group in groups], ALIGN)
        last = len(edges) - 2
        for at, group in enumerate(groups):
            for chunk in sorted({at, last - at}):
                if edges[chunk] < edges[chunk + 1]:
                    held.append((group, seq, edges[chunk], edges[chunk + 1]))
    crosses = size > node_size or any(
        min(groups) * size // node_size != max(groups) * size // node_size for groups in chosen.of
    )
    together = size > 1 or any(len(groups) > 1 for groups in chosen.of)
    name = INTER_NODE if crosses else INTRA_NODE if together else LOCAL
    rows = np.array(held, dtype=np.int64).reshape(-1, Placed.WIDTH)
    if not lead:
        return SharedZone(name, as_rows(_on_ranks(rows, cluster.num_ranks, size)), size, chosen.estimate.num_waves)
    cuts = lead_cuts(union(rows), cluster.num_ranks // size, lead)[rows[:, Placed.RANK], rows[:, Placed.SEQ]]
    parts = [_on_ranks(side_of(rows, cuts, ahead=ahead), cluster.num_ranks, size) for ahead in (True, False)]
    fragments = as_rows(np.concatenate(parts))
    return SharedZone(name, fragments, size, chosen.estimate.num_waves, lead)


def _on_ranks(rows: Ints, num_ranks: int, size: int) -> Ints:
    """`Placed` rows of the ranks: each group's rows (group, seq, start, stop) in near-equal runs."""
    by_group = rows[np.argsort(rows[:, Placed.RANK], kind="stable")]
    length = by_group[:, Placed.STOP] - by_group[:, Placed.START]
    begin = np.cumsum(length) - length
    tokens = sums(by_group[:, Placed.RANK], length, num_ranks // size)
    # Tokens of all groups in a row: where a rank's begin, and where rows are cut.
    edges = (np.cumsum(tokens) - tokens)[:, None] + tokens[:, None] * np.arange(size) // size
    cuts = np.unique(np.concatenate([begin, edges.ravel()[edges.ravel() < length.sum()]]))
    row = np.searchsorted(begin, cuts, side="right") - 1
    cut = by_group[row]
    cut[:, Placed.RANK] = np.searchsorted(edges.ravel(), cuts, side="right") - 1
    first = cuts - begin[row]
    cut[:, Placed.STOP] = cut[:, Placed.START] + first + np.diff(cuts, append=length.sum())
    cut[:, Placed.START] += first
    return cut
