"""Planners that only tests have: attention cut at random, to show that the vocabulary carries any
task table and any mix of zones.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from megatron_balance.cost.analytic import AnalyticCost
from megatron_balance.ir.arrays import as_rows
from megatron_balance.ir.batch import Batch
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.mask import CAUSAL, FULL, Mask, SlidingWindow
from megatron_balance.ir.model import Model
from megatron_balance.ir.plan import AnyPlanZone, MicrobatchPlan, SharedZone, TaskTable, Zone
from megatron_balance.planners import knapformer
from tests.support import by_hand

PATTERNS = (
    "ring",
    "all_gather",
    "gather_documents",
    "gather_sequence",
    "head_exchange",
    "chunk_exchange",
    "head_exchange_once",
    "chunk_exchange_once",
    "head_ring",
)

Rectangle = tuple[int, int, int, int]  # q_start, q_stop, k_start, k_stop


def random_task_table(batch: Batch, cluster: Cluster, model: Model, seed: int) -> MicrobatchPlan:
    """Random rectangles of every sequence's (query, key) triangle on random ranks; tokens at the
    owner anywhere, in any order.
    """
    rng = np.random.default_rng(seed)
    zone = _random_tasks(rng, "random", range(len(batch.lengths)), batch, cluster, model)
    return _plan("random_task_table", batch, cluster, model, (zone,))


def random_once_per_node(batch: Batch, cluster: Cluster, model: Model, seed: int) -> MicrobatchPlan:
    """Rows that cross once to each node: sequences dealt to a random task table and to a head
    exchange on a random ordered choice of ranks; under a window to the task table only.
    """
    rng = np.random.default_rng(seed)
    by_heads = rng.integers(0, 2, len(batch.lengths)) > 0
    by_heads &= not isinstance(model.mask, SlidingWindow)
    zones: list[AnyPlanZone] = []
    if by_heads.any():
        ranks = rng.permutation(cluster.num_ranks)[: int(rng.integers(1, cluster.num_ranks + 1))]
        pattern = ("head_exchange_once", "chunk_exchange_once")[int(rng.integers(2))]
        zones.append(by_hand.zone("heads", pattern, ranks.tolist(), np.flatnonzero(by_heads).tolist()))
    tasks = _random_tasks(rng, "random", np.flatnonzero(~by_heads).tolist(), batch, cluster, model)
    zones.append(replace(tasks, pattern="dispatch_once"))
    return _plan("random_once_per_node", batch, cluster, model, tuple(zones))


def _random_tasks(
    rng: np.random.Generator, name: str, seqs: Sequence[int], batch: Batch, cluster: Cluster, model: Model
) -> TaskTable:
    fragments: list[tuple[int, ...]] = []
    tasks: list[tuple[int, ...]] = []
    for seq in seqs:
        length = batch.lengths[seq]
        fragments += [(_rank(rng, cluster), seq, a, b) for a, b in _pieces(rng, length)]
        tasks += [
            (_rank(rng, cluster), seq, *r)
            for r in _rectangles(rng, (0, length, 0, length), int(rng.integers(0, 5)), model.mask)
        ]
    return TaskTable(name, as_rows(_shuffled(rng, fragments, 4)), as_rows(_shuffled(rng, tasks, 6)))


def random_zones(batch: Batch, cluster: Cluster, model: Model, seed: int) -> MicrobatchPlan:
    """Sequences dealt to a few zones, each on a random ordered choice of ranks with a random comm
    pattern (a task table is one).
    """
    rng = np.random.default_rng(seed)
    num_zones = int(rng.integers(1, 5))
    zone_of = rng.integers(0, num_zones, len(batch.lengths))
    zones = [_random_zone(rng, f"zone{i}", np.flatnonzero(zone_of == i), cluster) for i in range(num_zones)]
    return _plan("random_zones", batch, cluster, model, tuple(zones))


def random_shares(batch: Batch, cluster: Cluster, model: Model, seed: int) -> MicrobatchPlan:
    """Sequences dealt to a few zones, of which most cut them anywhere over groups of a size of their
    own, in up to three waves, with a lead or without.
    """
    rng = np.random.default_rng(seed)
    sizes = [size for size in range(1, cluster.num_ranks + 1) if cluster.num_ranks % size == 0]
    num_zones = int(rng.integers(1, 4))
    zone_of = rng.integers(0, num_zones, len(batch.lengths))
    zones: list[AnyPlanZone] = []
    for i in range(num_zones):
        seqs = np.flatnonzero(zone_of == i)
        if rng.integers(3) == 0:
            zones.append(_random_zone(rng, f"zone{i}", seqs, cluster))
            continue
        fragments: list[tuple[int, ...]] = []
        for seq in seqs.tolist():
            fragments += [(_rank(rng, cluster), seq, a, b) for a, b in _pieces(rng, batch.lengths[seq])]
        size, waves = int(rng.choice(sizes)), int(rng.integers(1, 4))
        lead = int(rng.integers(0, max(2, sum(batch.lengths) // 2))) if rng.integers(2) else 0
        lead = 0 if model.mask == FULL else lead
        zones += [SharedZone(f"zone{i}", as_rows(_shuffled(rng, fragments, 4)), size, waves, lead)] if fragments else []
    mask = FULL if model.mask == FULL else CAUSAL
    return replace(_plan("random_shares", batch, cluster, model, tuple(zones)), mask=mask)


def _random_zone(rng: np.random.Generator, name: str, seqs: np.ndarray, cluster: Cluster) -> Zone:
    """Sequences on a random ordered choice of ranks with a random comm pattern."""
    ranks = rng.permutation(cluster.num_ranks)[: int(rng.integers(1, cluster.num_ranks + 1))]
    pattern = PATTERNS[int(rng.integers(len(PATTERNS)))]
    sizes = [size for size in range(1, len(ranks) + 1) if len(ranks) % size == 0]
    group_size = int(rng.choice(sizes)) if pattern == "head_ring" else 0
    return by_hand.zone(name, pattern, ranks.tolist(), rng.permutation(seqs).tolist(), group_size)


def _plan(name: str, batch: Batch, cluster: Cluster, model: Model, zones: tuple) -> MicrobatchPlan:
    heads = (model.num_heads, model.num_kv_heads)
    planned = by_hand.plan(
        batch.lengths, cluster.num_ranks, *zones, ranks_per_node=cluster.ranks_per_node, heads=heads, name=name
    )
    return replace(planned, mask=model.mask)


def random_topology(batch: Batch, cluster: Cluster, model: Model, seed: int) -> MicrobatchPlan:
    """knapformer on groups of random sizes, of which some may be empty."""
    rng = np.random.default_rng(seed)
    cuts = np.flatnonzero(rng.integers(0, 2, cluster.num_ranks - 1)) + 1
    sizes = np.diff([0, *cuts.tolist(), cluster.num_ranks])
    options = knapformer.KnapFormerOptions(
        topology="+".join(f"g{size}n1" for size in sizes), heads=("uneven", "ring")[int(rng.integers(2))]
    )
    return knapformer.plan(batch, cluster, model, AnalyticCost(cluster, model), options)


def _rank(rng: np.random.Generator, cluster: Cluster) -> int:
    return int(rng.integers(cluster.num_ranks))


def _shuffled(rng: np.random.Generator, rows: Sequence[tuple[int, ...]], width: int) -> np.ndarray:
    return rng.permutation(np.array(rows, dtype=np.int64).reshape(-1, width))


def _pieces(rng: np.random.Generator, length: int) -> Iterator[tuple[int, int]]:
    """[0, length) cut at up to three random places."""
    cuts = sorted({0, length, *rng.integers(0, length, int(rng.integers(0, 4))).tolist()})
    yield from zip(cuts, cuts[1:], strict=False)


def _rectangles(rng: np.random.Generator, whole: Rectangle, depth: int, mask: Mask) -> Iterator[Rectangle]:
    """`whole` cut again and again, along queries or keys; what no query may see is left out."""
    q0, q1, k0, k1 = whole
    if mask == CAUSAL and k0 >= q1:
        return
    along_queries = bool(rng.integers(2))
    start, stop = (q0, q1) if along_queries else (k0, k1)
    if depth == 0 or stop - start < 2:
        yield whole
        return
    at = int(rng.integers(start + 1, stop))
    halves = ((q0, at, k0, k1), (at, q1, k0, k1)) if along_queries else ((q0, q1, k0, at), (q0, q1, at, k1))
    for half in halves:
        yield from _rectangles(rng, half, depth - 1, mask)
