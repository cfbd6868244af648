"""Properties of every planner, every batch and every cluster."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_balance import Batch, Cluster, Model, make_planner, verify
from megatron_balance.analysis.statistics import plan_statistics
from megatron_balance.compile.pipeline import layout
from megatron_balance.errors import BalanceError
from megatron_balance.ir.mask import kind_of
from megatron_balance.planners import PLANNERS
from megatron_balance.planners.zeppelin import paper_placement
from megatron_balance.solvers.groups import with_rounding
from tests.support.strategies import examples

pytestmark = pytest.mark.filterwarnings("error")

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {name: (name, {}) for name in PLANNERS}
VARIANTS |= {
    "zeppelin paper": ("zeppelin", {"rule": "paper"}),
    "zeppelin rings": ("zeppelin", {"rule": "groups", "group_size": 1}),
    "zeppelin groups": ("zeppelin", {"rule": "groups"}),
}
VARIANTS |= {"distca pairs": ("distca", {"shards": "head_tail", "block": 16, "tolerance": 0.02})}

lengths_of = st.lists(st.one_of(st.integers(1, 3), st.integers(1, 90), st.integers(1, 2000)), max_size=10)
clusters = st.builds(lambda nodes, per_node: Cluster(nodes * per_node, per_node), st.integers(1, 3), st.integers(1, 3))
models = st.sampled_from([Model(8, 8, 16), Model(8, 2, 16), Model(3, 1, 16)])
masks = st.sampled_from(["causal", "full", "window_64"])
slacks = st.sampled_from([1.0, 1.05, 1.3, 2.0, 10.0])


@pytest.mark.parametrize("variant", VARIANTS)
@examples(12)
@given(lengths=lengths_of, cluster=clusters, model=models, slack=slacks, policy=st.sampled_from(["keep", "replay"]))
def test_a_plan_is_proved_and_every_token_has_one_owner_and_every_pair_one_rank_within_the_capacity(
    variant: str, lengths: list[int], cluster: Cluster, model: Model, slack: float, policy: Any
) -> None:
    # No rank attends more tokens than the capacity, but for rounding.
    capacity = max(1, int(slack * -(-sum(lengths) // cluster.num_ranks)))
    name, options = VARIANTS[variant]
    plan = make_planner(name, cluster, model, tokens_per_rank=capacity, **options)(lengths)
    verify(plan, policy)
    held = [tuple(row) for rank in range(cluster.num_ranks) for row in layout(plan, rank).tolist()]
    for seq, length in enumerate(lengths):
        spans = sorted((start, stop) for s, start, stop in held if s == seq)
        assert [0, *(stop for _, stop in spans)] == [*(start for start, _ in spans), length]
    report = plan_statistics(plan, model)
    assert sum(report["tokens_per_rank"]) == sum(lengths)
    assert sum(report["attention_pairs_per_rank"]) == sum(n * (n + 1) // 2 for n in lengths)
    assert max(report["attention_tokens_per_rank"]) <= with_rounding(capacity, len(lengths))


@pytest.mark.parametrize("variant", VARIANTS)
@examples(25)
@given(lengths=lengths_of, cluster=clusters, nic=st.integers(1, 4), model=models, mask=masks)
def test_no_planner_refuses_a_cluster_or_a_mask_that_others_plan(
    variant: str, lengths: list[int], cluster: Cluster, nic: int, model: Model, mask: str
) -> None:
    name, options = VARIANTS[variant]
    cluster, model = replace(cluster, ranks_per_nic=nic), replace(model, attention=mask)
    if kind_of(model.mask) in PLANNERS[name].masks:
        assert make_planner(name, cluster, model, **options)(lengths).num_tokens == sum(lengths)


@pytest.mark.parametrize("variant", VARIANTS)
@given(lengths=lengths_of.filter(bool), cluster=clusters, model=models)
def test_one_token_too_many_is_an_error_that_says_what_would_do(
    variant: str, lengths: list[int], cluster: Cluster, model: Model
) -> None:
    name, options = VARIANTS[variant]
    capacity = (sum(lengths) - 1) // cluster.num_ranks
    if capacity:
        with pytest.raises(BalanceError, match=f"{cluster.num_ranks}.*{capacity}.*raise .*tokens_per_rank"):
            make_planner(name, cluster, model, tokens_per_rank=capacity, **options)(lengths)


@given(lengths=lengths_of.filter(bool), cluster=clusters, slack=slacks)
def test_the_printed_rule_passes_the_capacity_by_rounding_only(
    lengths: list[int], cluster: Cluster, slack: float
) -> None:
    capacity = max(1, int(slack * -(-sum(lengths) // cluster.num_ranks)))
    held = [0.0] * cluster.num_ranks
    for seq, ranks in enumerate(paper_placement(Batch(tuple(lengths)).lengths, cluster, capacity)):
        for rank in ranks:
            held[rank] += lengths[seq] / len(ranks)
    assert max(held) <= capacity + 1
