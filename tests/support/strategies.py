"""Cases that the contract suite draws, and every planner that it tests."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st

from megatron_balance.compile.halo import under
from megatron_balance.compile.pipeline import Projector
from megatron_balance.cost.analytic import AnalyticCost
from megatron_balance.ir.arrays import as_rows
from megatron_balance.ir.batch import Batch
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.columns import Move, Rows
from megatron_balance.ir.forest import Forest, over
from megatron_balance.ir.mask import CAUSAL, FULL, Mask, SlidingWindow, kind_of
from megatron_balance.ir.model import Model
from megatron_balance.ir.plan import REMAP, AnyPlanZone, MicrobatchPlan, Routing, SharedZone, TaskTable, Zone
from megatron_balance.planners import PLANNERS, knapformer
from megatron_balance.planning.choice import PlannerChoice
from tests.support import by_hand

# Planners that only tests have: attention cut at random, to show that the vocabulary carries any
# task table and any mix of zones.
PATTERNS = ("ring", "all_gather", "gather_documents", "gather_sequence", "head_exchange", "chunk_exchange")
PATTERNS += ("head_exchange_once", "chunk_exchange_once", "head_ring")

Lengths = st.SearchStrategy[tuple[int, ...]]
Rectangle = tuple[int, int, int, int]  # q_start, q_stop, k_start, k_stop


def random_task_table(batch: Batch, cluster: Cluster, model: Model, seed: int) -> MicrobatchPlan:
    # Random rectangles of every sequence's (query, key) triangle on random ranks; tokens at the
    # owner anywhere, in any order.
    rng = np.random.default_rng(seed)
    zone = _random_tasks(rng, "random", range(len(batch.lengths)), batch, cluster, model)
    return _plan("random_task_table", batch, cluster, model, (zone,))


def random_once_per_node(batch: Batch, cluster: Cluster, model: Model, seed: int) -> MicrobatchPlan:
    # Rows that cross once to each node: sequences dealt to a random task table and to a head
    # exchange on a random ordered choice of ranks; under a window to the task table only.
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
        parts = _rectangles(rng, (0, length, 0, length), int(rng.integers(0, 5)), model.mask)
        tasks += [(_rank(rng, cluster), seq, *part) for part in parts]
    return TaskTable(name, as_rows(_shuffled(rng, fragments, 4)), as_rows(_shuffled(rng, tasks, 6)))


def random_zones(batch: Batch, cluster: Cluster, model: Model, seed: int) -> MicrobatchPlan:
    # Sequences dealt to a few zones, each on a random ordered choice of ranks with a random comm
    # pattern (a task table is one).
    rng = np.random.default_rng(seed)
    num_zones = int(rng.integers(1, 5))
    zone_of = rng.integers(0, num_zones, len(batch.lengths))
    zones = [_random_zone(rng, f"zone{i}", np.flatnonzero(zone_of == i), cluster) for i in range(num_zones)]
    return _plan("random_zones", batch, cluster, model, tuple(zones))


def random_shares(batch: Batch, cluster: Cluster, model: Model, seed: int) -> MicrobatchPlan:
    # Sequences dealt to a few zones, of which most cut them anywhere over groups of a size of their
    # own, in up to three waves, with a lead or without.
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
    # Sequences on a random ordered choice of ranks with a random comm pattern.
    ranks = rng.permutation(cluster.num_ranks)[: int(rng.integers(1, cluster.num_ranks + 1))]
    pattern = PATTERNS[int(rng.integers(len(PATTERNS)))]
    sizes = [size for size in range(1, len(ranks) + 1) if len(ranks) % size == 0]
    group_size = int(rng.choice(sizes)) if pattern == "head_ring" else 0
    return by_hand.zone(name, pattern, ranks.tolist(), rng.permutation(seqs).tolist(), group_size)


def _plan(name: str, batch: Batch, cluster: Cluster, model: Model, zones: tuple) -> MicrobatchPlan:
    heads = (model.num_heads, model.num_kv_heads)
    per_node = cluster.ranks_per_node
    planned = by_hand.plan(batch.lengths, cluster.num_ranks, *zones, ranks_per_node=per_node, heads=heads, name=name)
    return replace(planned, mask=model.mask)


def random_topology(batch: Batch, cluster: Cluster, model: Model, seed: int) -> MicrobatchPlan:
    # knapformer on groups of random sizes, of which some may be empty.
    rng = np.random.default_rng(seed)
    cuts = np.flatnonzero(rng.integers(0, 2, cluster.num_ranks - 1)) + 1
    sizes = np.diff([0, *cuts.tolist(), cluster.num_ranks])
    topology = "+".join(f"g{size}n1" for size in sizes)
    options = knapformer.KnapFormerOptions(topology=topology, heads=("uneven", "ring")[int(rng.integers(2))])
    return knapformer.plan(batch, cluster, model, AnalyticCost(cluster, model), options)


def _rank(rng: np.random.Generator, cluster: Cluster) -> int:
    return int(rng.integers(cluster.num_ranks))


def _shuffled(rng: np.random.Generator, rows: Sequence[tuple[int, ...]], width: int) -> np.ndarray:
    return rng.permutation(np.array(rows, dtype=np.int64).reshape(-1, width))


def _pieces(rng: np.random.Generator, length: int) -> Iterator[tuple[int, int]]:
    # [0, length) cut at up to three random places.
    cuts = sorted({0, length, *rng.integers(0, length, int(rng.integers(0, 4))).tolist()})
    yield from zip(cuts, cuts[1:], strict=False)


def _rectangles(rng: np.random.Generator, whole: Rectangle, depth: int, mask: Mask) -> Iterator[Rectangle]:
    # `whole` cut again and again, along queries or keys; what no query may see is left out.
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


TEST_PLANNERS = {
    "random_task_table": random_task_table,
    "random_once_per_node": random_once_per_node,
    "random_zones": random_zones,
    "knapformer, random groups": random_topology,
    "random_shares": random_shares,
}
# Other ways through a planner: its name and options.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "zeppelin, rule paper": ("zeppelin", {"rule": "paper"}),
    "zeppelin, rings": ("zeppelin", {"rule": "groups", "group_size": 1}),
    "zeppelin, rule groups": ("zeppelin", {"rule": "groups"}),
    "distca, small blocks": ("distca", {"block": 4, "tolerance": 0.0}),
    "distca, a pool": ("distca", {"block": 4, "servers": "pool"}),
}

ALL_PLANNERS = (*PLANNERS, *(name for name, (planner, _) in VARIANTS.items() if planner in PLANNERS), *TEST_PLANNERS)

# Planners that between them have every comm pattern, and stand for all where these take long.
EVERY_PATTERN = ("te_ring", "llama_all_gather", "ulysses", "distca", "zeppelin", "random_task_table", "random_shares")

_PER_NODE = {1: (1, 4), 2: (1, 2), 3: (1, 3), 4: (2, 4), 5: (1, 5), 6: (2, 3, 6), 7: (1, 7), 8: (2, 4, 8)}


@dataclass(frozen=True)
class Case:
    # Everything a planner decides from. `seed`: for the planners that cut at random, and for a
    # remap at random.
    batch: Batch
    cluster: Cluster
    model: Model
    tokens_per_rank: int | None
    seed: int
    remapped: bool = False
    # Ranks of a NIC and the fewest tokens that are routed.
    routing: tuple[int, int] | None = None


def lengths(max_length: int = 300, max_sequences: int = 7, *, min_sequences: int = 1) -> Lengths:
    # Lengths of a batch: long ones, and, because they are where placements go wrong, many of a few
    # tokens.
    one = st.one_of(st.integers(1, 5), st.integers(1, min(40, max_length)), st.integers(1, max_length))
    return st.lists(one, min_size=min_sequences, max_size=max_sequences).map(tuple)


@st.composite
def cases(
    draw: st.DrawFn,
    num_ranks: Sequence[int] = range(1, 9),
    max_length: int = 300,
    max_sequences: int = 7,
    min_sequences: int = 0,
    masks: Sequence[str] = ("causal",),
) -> Case:
    # Batches on clusters of one to several nodes; MHA, and GQA down to fewer key-value heads than
    # ranks.
    batch = Batch(draw(lengths(max_length, max_sequences, min_sequences=min_sequences)))
    ranks = draw(st.sampled_from(list(num_ranks)))
    cluster = Cluster(ranks, draw(st.sampled_from(_PER_NODE[ranks])))
    kv_heads, ratio = draw(st.sampled_from([(1, 1), (2, 1), (4, 1), (1, 3), (2, 2), (2, 4), (3, 2), (8, 1)]))
    mask = draw(st.sampled_from(list(masks)))
    model = Model(kv_heads * ratio, kv_heads, head_dim=4, hidden_size=32, ffn_size=64, attention=mask)
    average = -(-batch.num_tokens // ranks)
    capacity = draw(st.sampled_from([None, average, average + max(1, average // 10), 2 * average]))
    routing = draw(st.sampled_from([None, (1, 1), (2, 1), (1, 8)]))
    return Case(batch, cluster, model, capacity or None, draw(st.integers(0, 2**16)), draw(st.booleans()), routing)


def plan(planner: str, case: Case) -> MicrobatchPlan:
    # The plan of one of ALL_PLANNERS, with a remap at random and everything routed that can be,
    # where the case says so.
    planned = bare_plan(planner, case)
    if case.remapped:
        planned = replace(planned, moves=random_moves(planned, case.seed))
    if case.routing is not None:
        zones = (REMAP, *range(len(planned.zones)))
        planned = replace(planned, routing=Routing(case.routing[0], zones, case.routing[1]))
    return planned


def random_moves(planned: MicrobatchPlan, seed: int) -> Rows:
    # Some of every rank's tokens to other ranks, whatever that is good for.
    rng = random.Random(seed)
    rows: list[tuple[int, int, int]] = []
    for src in range(planned.num_ranks):
        held = sum(stop - start for _, start, stop in Projector(planned).attention_layout(src).tolist())
        targets = [r for r in range(planned.num_ranks) if r != src]
        for dst in sorted(rng.sample(targets, rng.randint(0, len(targets)))):
            tokens = rng.randint(0, held)
            held -= tokens
            if tokens:
                rows.append((src, dst, tokens))
    return Rows.of(Move.WIDTH, rows)


def bare_plan(planner: str, case: Case) -> MicrobatchPlan:
    # A planner's decision, without layers.
    if planner in TEST_PLANNERS:
        return _of_tests(planner, case)
    name, options = VARIANTS.get(planner, (planner, {}))
    chosen, ranks = PLANNERS[name], case.cluster.num_ranks
    if kind_of(case.model.mask) not in chosen.masks:
        case = replace(case, model=replace(case.model, attention="causal"))
    if ranks == 1:
        # a rank alone holds its tokens
        options = {key: value for key, value in options.items() if key != "servers"}
    holders = ranks if chosen.num_holders is None else chosen.num_holders(case.cluster, chosen.options(**options))
    room = case.tokens_per_rank and -(-case.tokens_per_rank * ranks // holders)
    cost = AnalyticCost(case.cluster, case.model)
    bare = PlannerChoice(name, options, options=chosen.options(tokens_per_rank=room, **options), planner=chosen)
    return bare.plan(case.batch, case.cluster, case.model, cost)


def _of_tests(planner: str, case: Case) -> MicrobatchPlan:
    trees, model = case.batch.trees, case.model
    mask = over(model.mask, trees)
    if isinstance(mask, Forest):
        # Any rectangle shows something of some tree.
        model = replace(
            model, attention="full" if planner in ("random_task_table", "random_once_per_node") else "causal"
        )
    planned = TEST_PLANNERS[planner](case.batch, case.cluster, model, case.seed)
    if isinstance(mask, Forest) and all(isinstance(zone, TaskTable) for zone in planned.zones):
        return replace(planned, mask=mask)
    if isinstance(mask, Forest) or (
        planned.mask.window_size and not all(isinstance(zone, TaskTable) for zone in planned.zones)
    ):
        return under(replace(planned, mask=CAUSAL), mask)
    return planned


# Examples of a property that says nothing else, in the profile `ci`.
CI = 60


def examples(count: int) -> settings:
    # `count` examples in the profile `ci`, and in proportion in the others: `dev` has half as many,
    # `long` twenty times as many, drawn anew every time.
    return settings(max_examples=max(1, count * settings().max_examples // CI))
