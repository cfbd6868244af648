"""The capacity of a rank is the inverse of the memory model."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_balance.analysis.backward import USABLE, decide, microbatch_bytes, step_bytes
from megatron_balance.analysis.step_memory import most_tokens, stages_of
from megatron_balance.config import load_cluster, load_model
from megatron_balance.cost.analytic import AnalyticCost
from megatron_balance.ir.batch import Batch
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.model import Model
from megatron_balance.planning.choice import capacity, choose_planner

MODEL = Model(num_heads=8, num_kv_heads=2, head_dim=64, num_layers=4, hidden_size=512, ffn_size=1024, vocab_size=1000)
CLUSTER = Cluster(32, 8, memory_bytes=4e9)


@pytest.mark.parametrize("num_ranks", [1, 4, 32])
def test_a_ring_as_full_as_the_capacity_says_fills_what_is_usable(num_ranks: int) -> None:
    cluster = replace(CLUSTER, num_ranks=num_ranks, ranks_per_node=min(8, num_ranks))
    tokens = capacity(cluster, MODEL)
    plan = choose_planner("te_ring", {}).plan(
        Batch((tokens * num_ranks,)), cluster, MODEL, AnalyticCost(cluster, MODEL)
    )
    (stage,) = stages_of(MODEL, num_ranks)
    found = step_bytes([microbatch_bytes([plan], MODEL)], MODEL, stage)
    assert decide([found], "auto", cluster.memory_bytes).fits
    assert float(found.peak(0).max()) == pytest.approx(USABLE * cluster.memory_bytes, rel=2e-3)


def test_recomputation_makes_room_and_microbatches_in_flight_take_it() -> None:
    def room(num_microbatches: int = 1, **more: object) -> int:
        return most_tokens(MODEL, 32, 4e9, stages_of(MODEL, 32, **more), num_microbatches)  # pyright: ignore[reportArgumentType]

    assert room(recompute="full") > 2 * room()
    assert room(4, pipeline=2) < room(1, pipeline=2)
    assert room(4) == room()


def test_what_a_preset_holds_by_default_is_what_its_memory_model_says() -> None:
    """An H100 was said to hold 12,720 tokens of llama-7b, and 8,192 need more than it has."""
    assert capacity(load_cluster("h100").build(num_ranks=64), load_model("llama-7b")) < 8192
