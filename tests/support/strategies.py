"""What the contract suite draws, and every planner it holds to it: the product's and two that only tests have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from megatron_balance.core.batch import Batch
from megatron_balance.core.cluster import Cluster
from megatron_balance.core.model import Model
from megatron_balance.core.plan import MicrobatchPlan
from megatron_balance.cost.analytic import AnalyticCost
from megatron_balance.planners import PLANNERS
from tests.support.tilings import random_tiling, random_zones

TEST_PLANNERS = {"random_tiling": random_tiling, "random_zones": random_zones}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {"zeppelin, rule paper": ("zeppelin", {"rule": "paper"})}
"""Other ways through a planner: its name and options."""

ALL_PLANNERS = (*PLANNERS, *(name for name, (planner, _) in VARIANTS.items() if planner in PLANNERS), *TEST_PLANNERS)

_PER_NODE = {1: (1, 4), 2: (1, 2), 3: (1, 3), 4: (2, 4), 5: (1, 5), 6: (2, 3, 6), 7: (1, 7), 8: (2, 4, 8)}


@dataclass(frozen=True)
class Case:
    """Everything a planner decides from. `seed`: for the planners that cut at random."""

    batch: Batch
    cluster: Cluster
    model: Model
    tokens_per_rank: int | None
    seed: int


def lengths(max_length: int = 300, max_sequences: int = 7, *, min_sequences: int = 1) -> st.SearchStrategy[tuple[int, ...]]:
    """Lengths of a batch: long ones, and, because they are where placements go wrong, many of a few tokens."""
    one = st.one_of(st.integers(1, 5), st.integers(1, min(40, max_length)), st.integers(1, max_length))
    return st.lists(one, min_size=min_sequences, max_size=max_sequences).map(tuple)


@st.composite
def cases(
    draw: st.DrawFn, num_ranks: Sequence[int] = range(1, 9), max_length: int = 300, max_sequences: int = 7, min_sequences: int = 0
) -> Case:
    """Batches on clusters of one to several nodes; MHA, and GQA down to fewer key-value heads than ranks."""
    batch = Batch(draw(lengths(max_length, max_sequences, min_sequences=min_sequences)))
    ranks = draw(st.sampled_from(list(num_ranks)))
    cluster = Cluster(ranks, draw(st.sampled_from(_PER_NODE[ranks])))
    kv_heads, ratio = draw(st.sampled_from([(1, 1), (2, 1), (4, 1), (1, 3), (2, 2), (2, 4), (3, 2), (8, 1)]))
    model = Model(num_heads=kv_heads * ratio, num_kv_heads=kv_heads, head_dim=4, hidden_size=32, ffn_size=64)
    average = -(-batch.num_tokens // ranks)
    capacity = draw(st.sampled_from([None, average, average + max(1, average // 10), 2 * average]))
    return Case(batch, cluster, model, capacity or None, draw(st.integers(0, 2**16)))


def plan(planner: str, case: Case) -> MicrobatchPlan:
    """The plan of one of ALL_PLANNERS."""
    if planner in TEST_PLANNERS:
        return TEST_PLANNERS[planner](case.batch, case.cluster, case.model, case.seed)
    name, options = VARIANTS.get(planner, (planner, {}))
    cost = AnalyticCost(case.cluster, case.model)
    return PLANNERS[name].plan(
        case.batch, case.cluster, case.model, cost, PLANNERS[name].options(tokens_per_rank=case.tokens_per_rank, **options)
    )
