"""Cases that the contract suite draws, and every planner that it tests: the product's and some that
only tests have.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from hypothesis import strategies as st

from megatron_balance.compile.halo import under
from megatron_balance.compile.pipeline import Projector
from megatron_balance.cost.analytic import AnalyticCost
from megatron_balance.ir.batch import Batch
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.columns import Move, Rows
from megatron_balance.ir.mask import CAUSAL, kind_of
from megatron_balance.ir.model import Model
from megatron_balance.ir.plan import REMAP, MicrobatchPlan, Routing, TaskTable
from megatron_balance.planners import PLANNERS
from megatron_balance.planning.choice import PlannerChoice
from tests.support.task_tables import (
    random_once_per_node,
    random_shares,
    random_task_table,
    random_topology,
    random_zones,
)

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
EVERY_PATTERN = (
    *("te_ring", "llama_all_gather", "ulysses", "distca", "zeppelin", "random_task_table", "random_shares"),
)

_PER_NODE = {1: (1, 4), 2: (1, 2), 3: (1, 3), 4: (2, 4), 5: (1, 5), 6: (2, 3, 6), 7: (1, 7), 8: (2, 4, 8)}


@dataclass(frozen=True)
class Case:
    """Everything a planner decides from. `seed`: for the planners that cut at random, and for a
    remap at random.
    """

    batch: Batch
    cluster: Cluster
    model: Model
    tokens_per_rank: int | None
    seed: int
    remapped: bool = False
    # Ranks of a NIC and the fewest tokens that are routed.
    routing: tuple[int, int] | None = None


def lengths(
    max_length: int = 300, max_sequences: int = 7, *, min_sequences: int = 1
) -> st.SearchStrategy[tuple[int, ...]]:
    """Lengths of a batch: long ones, and, because they are where placements go wrong, many of a few
    tokens.
    """
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
    """Batches on clusters of one to several nodes; MHA, and GQA down to fewer key-value heads than
    ranks.
    """
    batch = Batch(draw(lengths(max_length, max_sequences, min_sequences=min_sequences)))
    ranks = draw(st.sampled_from(list(num_ranks)))
    cluster = Cluster(ranks, draw(st.sampled_from(_PER_NODE[ranks])))
    kv_heads, ratio = draw(st.sampled_from([(1, 1), (2, 1), (4, 1), (1, 3), (2, 2), (2, 4), (3, 2), (8, 1)]))
    model = Model(
        num_heads=kv_heads * ratio,
        num_kv_heads=kv_heads,
        head_dim=4,
        hidden_size=32,
        ffn_size=64,
        attention=draw(st.sampled_from(list(masks))),
    )
    average = -(-batch.num_tokens // ranks)
    capacity = draw(st.sampled_from([None, average, average + max(1, average // 10), 2 * average]))
    routing = draw(st.sampled_from([None, (1, 1), (2, 1), (1, 8)]))
    return Case(batch, cluster, model, capacity or None, draw(st.integers(0, 2**16)), draw(st.booleans()), routing)


def plan(planner: str, case: Case) -> MicrobatchPlan:
    """The plan of one of ALL_PLANNERS, with a remap at random and everything routed that can be,
    where the case says so.
    """
    planned = bare_plan(planner, case)
    if case.remapped:
        planned = replace(planned, moves=random_moves(planned, case.seed))
    if case.routing is not None:
        zones = (REMAP, *range(len(planned.zones)))
        planned = replace(planned, routing=Routing(case.routing[0], zones, case.routing[1]))
    return planned


def random_moves(planned: MicrobatchPlan, seed: int) -> Rows:
    """Some of every rank's tokens to other ranks, whatever that is good for."""
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
    """A planner's decision, without layers."""
    model = case.model
    if (
        planner not in TEST_PLANNERS
        and kind_of(model.mask) not in PLANNERS[VARIANTS.get(planner, (planner, {}))[0]].masks
    ):
        case = replace(case, model=replace(model, attention="causal"))
    if planner in TEST_PLANNERS:
        planned = TEST_PLANNERS[planner](case.batch, case.cluster, case.model, case.seed)
        if kind_of(planned.mask) == "window" and not all(isinstance(zone, TaskTable) for zone in planned.zones):
            return under(replace(planned, mask=CAUSAL), planned.mask)
        return planned
    name, options = VARIANTS.get(planner, (planner, {}))
    chosen, ranks = PLANNERS[name], case.cluster.num_ranks
    if ranks == 1:
        # a rank alone holds its tokens
        options = {key: value for key, value in options.items() if key != "servers"}
    holders = ranks if chosen.num_holders is None else chosen.num_holders(case.cluster, chosen.options(**options))
    room = case.tokens_per_rank and -(-case.tokens_per_rank * ranks // holders)
    cost = AnalyticCost(case.cluster, case.model)
    bare = PlannerChoice(name, options, options=chosen.options(tokens_per_rank=room, **options), planner=chosen)
    return bare.plan(case.batch, case.cluster, case.model, cost)
