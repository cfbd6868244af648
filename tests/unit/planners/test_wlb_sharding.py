"""wlb_sharding: equal tokens, even attention, and the choice by kernel time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_balance import Batch, Cluster, MicrobatchPlan, Model, make_planner
from megatron_balance.analysis.statistics import plan_statistics
from megatron_balance.config import load_cluster, load_model
from megatron_balance.cost.analytic import AnalyticCost
from megatron_balance.errors import ConfigError, InfeasibleError
from megatron_balance.ir.plan import Zone
from megatron_balance.patterns.base import Context
from megatron_balance.planners.wlb_llm import WlbShardingOptions, candidates, kernel_s, predicted_s, shard
from tests.support.flat_cost import FlatCost

LLAMA, H100 = load_model("llama-7b"), load_cluster("h200").build(num_ranks=4)
COST = AnalyticCost(H100, LLAMA)
SHORT, ONE_LONG = (300,) * 64, (16_000, *(200,) * 200)


def made(sharding: str, lengths: tuple[int, ...], num_ranks: int = 4) -> MicrobatchPlan:
    return make_planner("wlb_sharding", Cluster(num_ranks, num_ranks), LLAMA, sharding=sharding)(lengths)


def slowest_s(planned: MicrobatchPlan) -> float:
    zones = [zone for zone in planned.zones if isinstance(zone, Zone)]
    return predicted_s(zones, Context.of(planned), H100, LLAMA, COST)


@pytest.mark.parametrize(
    ("sharding", "patterns"), [("document", ["gather_documents"]), ("sequence", ["gather_sequence"])]
)
def test_a_fixed_sharding_is_one_zone_over_all_ranks(sharding: str, patterns: list[str]) -> None:
    planned = made(sharding, (5, 1, 30))
    assert [zone.pattern for zone in planned.zones] == patterns
    assert [zone.seqs for zone in planned.zones] == [(0, 1, 2)]


@pytest.mark.parametrize("sharding", ["document", "sequence", "adaptive", "mixed"])
def test_an_empty_batch_has_no_zones(sharding: str) -> None:
    assert made(sharding, ()).zones == ()


@given(
    lengths=st.lists(st.one_of(st.integers(1, 20), st.integers(1, 5000)), min_size=1, max_size=9),
    num_ranks=st.integers(1, 8),
)
def test_ranks_differ_by_one_token_at_most_with_both_shardings_in_one_microbatch(
    lengths: list[int], num_ranks: int
) -> None:
    for zones in candidates(lengths, num_ranks, "mixed"):
        planned = MicrobatchPlan("wlb_sharding", tuple(lengths), num_ranks, num_ranks, 2, 1, zones)
        held = plan_statistics(planned, LLAMA)["attention_tokens_per_rank"]
        assert max(held) - min(held) <= 1
        assert sum(held) == sum(lengths)


def test_long_documents_cut_on_their_own_are_even_and_packed_ones_are_not() -> None:
    even, packed = (plan_statistics(made(s, ONE_LONG), LLAMA)["imbalance"] for s in ("document", "sequence"))
    assert even["attention"] < 1.001
    assert packed["attention"] > 1.1
    assert even["tokens"] == packed["tokens"] == pytest.approx(1.0, abs=1e-4)


def test_the_sooner_one_is_chosen_for_each_microbatch() -> None:
    """Many short documents are better packed, a long one on its own."""
    for lengths, better, worse in ((SHORT, "sequence", "document"), ((40_000, 4000, 4000), "document", "sequence")):
        assert slowest_s(made(better, lengths)) < slowest_s(made(worse, lengths))
        assert made("adaptive", lengths) == made(better, lengths)


def test_a_mixture_is_never_predicted_above_the_better_of_both_and_below_it_where_a_microbatch_has_both() -> None:
    for lengths in (SHORT, ONE_LONG, (7, 3, 1)):
        assert slowest_s(made("mixed", lengths)) <= slowest_s(made("adaptive", lengths))
    mixed = made("mixed", ONE_LONG)
    assert [(zone.pattern, zone.seqs) for zone in mixed.zones] == [
        ("gather_documents", (0,)),
        ("gather_sequence", tuple(range(1, 201))),
    ]
    assert slowest_s(mixed) < 0.99 * slowest_s(made("adaptive", ONE_LONG))


def test_the_second_zone_begins_with_the_ranks_that_have_no_token_more_yet() -> None:
    (zones,) = [zones for zones in candidates((13, 6), 4, "mixed") if len(zones) == 2]
    assert [zone.ranks for zone in zones] == [(0, 1, 2, 3), (1, 2, 3, 0)]


def test_no_document_too_short_for_all_chunks_is_cut_beside_packed_ones() -> None:
    def alone(lengths: tuple[int, ...]) -> list[int]:
        """Documents on their own of each candidate."""
        tried = candidates(lengths, 4, "mixed")
        return [sum(len(zone.seqs) for zone in zones if zone.name == "document") for zones in tried]

    assert alone(SHORT) == [0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64]
    assert alone((7,) * 9) == [0, 9], "all packed, or all on their own"


def test_predicted_seconds_are_of_all_launches_forward_and_backward() -> None:
    """Each rank launches once a zone; the flat machine takes 1 s forward and 2 s backward."""
    model = Model(2, 2, 16)
    context = Context(np.array([64, 64]), 2, 2, 4, 4)
    zones = [
        Zone("document", "gather_documents", (0, 1, 2, 3), (0,)),
        Zone("sequence", "gather_sequence", (1, 0), (1,)),
    ]
    assert kernel_s(zones, context, FlatCost(model)).tolist() == [6.0, 6.0, 3.0, 3.0]


def test_what_is_gathered_and_its_gradients_count_at_the_rate_of_the_slowest_link() -> None:
    """A rank of each of two nodes, 10 tokens each: a step of 1,280 bytes out and 2,560 back."""
    cluster, model = Cluster(2, 1, ranks_per_nic=1), Model(2, 2, 16, bytes_per_element=2)
    context = Context(np.array([20]), 2, 2, 2, 1)
    (zones,) = candidates([20], 2, "document")
    flat = FlatCost(model)
    expected = 3.0 + flat.inter_node_s(10 * 2 * 2 * 16 * 2 * 3)
    assert predicted_s(zones, context, cluster, model, flat) == pytest.approx(expected)
    (whole,) = candidates([1], 2, "document")
    assert predicted_s(whole, replace(context, lengths=np.array([1])), cluster, model, flat) == 3.0, "nothing travels"


def test_bad_input_is_one_sentence() -> None:
    with pytest.raises(ConfigError, match=r"sharding 'chunk' is not known; choose one of document, sequence, adaptive"):
        shard(Batch((4,)), H100, LLAMA, COST, WlbShardingOptions(sharding="chunk"))  # pyright: ignore[reportArgumentType]
    with pytest.raises(InfeasibleError, match="the batch has 41 tokens; 4 ranks x 10 tokens hold 40"):
        make_planner("wlb_sharding", Cluster(4, 4), LLAMA, tokens_per_rank=10)([20, 21])
