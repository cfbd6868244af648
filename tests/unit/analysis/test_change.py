"""Pull and push of a change, on links."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_balance.analysis.change import (
    Change,
    Layouts,
    PipelineWork,
    base_for,
    base_sync_s,
    change,
    held_bytes,
    role_bytes,
)
from megatron_balance.analysis.link import WeightTraffic, layer_slot
from megatron_balance.config import load_cluster, load_model
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.model import Model
from megatron_balance.ir.strategy import Strategy

MODEL = Model(num_heads=8, num_kv_heads=8, head_dim=16, num_layers=4, hidden_size=128, ffn_size=256, vocab_size=512)
CLUSTER = Cluster(num_ranks=8, ranks_per_node=4, intra_bytes_per_s=1e9, nic_bytes_per_s=1e8)
BASE = Strategy.parse("4*tp2-pp1-cp1")


def test_the_base_as_a_strategy_moves_what_all_gather_and_reduce_scatter_do() -> None:
    """32B on 64 A800s, <16,1,1> x 4: a quarter of a sixteenth from each of three others."""
    cluster, model = load_cluster("a800-ib").build(), load_model("llama2-32b")
    model = replace(model, num_heads=64, num_kv_heads=64, head_dim=104)
    base = Strategy.parse("4*tp16-pp1-cp1")
    assert change(base, base, model, cluster).whole_s == pytest.approx(base_sync_s(base, model, cluster), rel=1e-3)


def test_bytes_are_those_of_weights_that_ranks_lack() -> None:
    """Each of four TP 2 ranks of two pipelines pulls its half but for the quarter that it owns."""
    strategy = Strategy.parse("2*tp2-pp1-cp1")
    found = change(BASE, strategy, MODEL, CLUSTER).traffic.described(CLUSTER)
    per_rank = held_bytes(strategy, MODEL, 8)[0] / 6
    assert found["pull_bytes"] == pytest.approx(4 * 2 * per_rank * 3 / 4, rel=0.01)
    assert found["push_bytes"] == 2 * found["pull_bytes"]


@given(
    st.lists(st.tuples(st.sampled_from([1, 2, 4]), st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=3),
    st.lists(st.integers(0, 9), min_size=6, max_size=6),
    st.lists(st.integers(0, 9), min_size=6, max_size=6),
)
def test_what_is_uncovered_is_what_a_clock_says(
    given_works: list[tuple[int, int, int]], pull: list[int], push: list[int]
) -> None:
    """One microbatch a pipeline, four layers, at most four slots of them."""
    slots = max(4 // stages for stages, _, _ in given_works)
    pull_s, push_s = (np.array([*each[: slots + 1], each[5]], dtype=float) for each in (pull, push))
    moved = Change(4, pull_s, push_s, (0.0, 0.0), WeightTraffic(np.zeros((2, 1, 2, 2), dtype=np.int64)))
    works = [PipelineWork(stages, 4.0 * (f + b), f, b) for stages, f, b in given_works]
    arrived, ends = np.cumsum(pull_s), list[float]()
    ready = np.zeros(slots + 2)
    for work in works:
        count, now = 4 // work.stages, float(arrived[0])
        slot_of = [int(layer_slot(np.array(layer % count), count, slots)) for layer in range(4)]
        for layer in range(4):
            now = max(now, float(arrived[slot_of[layer]])) + work.forward_s
        now = max(now, float(arrived[-1]))
        ready[-1] = max(ready[-1], now)
        for layer in reversed(range(4)):
            now += work.backward_s
            ready[slot_of[layer]] = max(ready[slot_of[layer]], now)
        ready[0] = max(ready[0], now)
        ends.append(now)
    done = 0.0
    for slot in reversed(range(slots + 2)):
        done = max(done, float(ready[slot])) + push_s[slot]
    first, second = moved.uncovered_s(works, overlap=True)
    assert first == pytest.approx(max(ends) - max(work.own_s for work in works))
    assert second == pytest.approx(done - max(ends))
    assert first + second >= moved.least_s(overlap=True) - 1e-9


def test_without_overlap_all_of_it_is_uncovered() -> None:
    moved = change(BASE, Strategy.parse("8*tp1-pp1-cp1"), MODEL, CLUSTER)
    works = [PipelineWork(1, 1.0, 0.05, 0.1)] * 8
    assert moved.uncovered_s(works, overlap=False) == moved.whole_s
    assert moved.least_s(overlap=False) == sum(moved.whole_s)
    assert sum(moved.uncovered_s(works, overlap=True)) < sum(moved.whole_s)
    assert moved.pull_s.sum() == pytest.approx(moved.whole_s[0], rel=0.01)


def test_roles_share_the_memory_of_the_largest() -> None:
    """The base layout is no role."""
    strategies = tuple(map(Strategy.parse, ("tp1-pp1-cp1+tp2-pp1-cp1", "tp4-pp1-cp1", "4*tp2-pp1-cp1")))
    found = role_bytes(Layouts(BASE, strategies), MODEL, 8)
    whole = held_bytes(Strategy.parse("tp1-pp1-cp1"), MODEL, 8)[0]
    assert found == pytest.approx(np.array([1, 1 / 2, 1 / 2, 1 / 4, 0, 0, 0, 0]) * whole)


def test_the_base_where_nobody_says_one() -> None:
    mixed, even = Strategy.parse("tp4-pp1-cp1+tp2-pp2-cp1"), Strategy.parse("2*tp1-pp2-cp2")
    assert base_for([mixed, even], 8) == even
    assert base_for([mixed], 8) == Strategy.parse("2*tp4-pp1-cp1")
    assert base_for([Strategy.parse("tp3-pp1-cp1+tp2-pp1-cp1")], 8) == Strategy.parse("4*tp2-pp1-cp1")


# Bytes of pulls and pushes, and the seconds that links take for them


def test_seconds_are_those_of_the_fullest_link_or_nic():
    """Four ranks on two nodes, a NIC for two; [way, rank, inside or between nodes, direction]."""
    table = np.zeros((2, 4, 2, 2), dtype=np.int64)
    table[0, :, 0] = [[100, 40], [40, 100], [0, 0], [0, 0]]
    table[0, :, 1] = [[30, 0], [30, 0], [0, 20], [0, 40]]
    table[1, 3, 0] = [0, 500]
    cluster = Cluster(4, 2, intra_bytes_per_s=100.0, nic_bytes_per_s=10.0, ranks_per_nic=2)
    assert WeightTraffic(table).described(cluster) == {
        "pull_bytes": 200,
        "pull_bytes_inter_node": 60,
        "predicted_pull_s": 6.0,
        "push_bytes": 0,
        "push_bytes_inter_node": 0,
        "predicted_push_s": 5.0,
    }
    handed_on = WeightTraffic(table, handed_on=True).described(cluster)
    assert (handed_on["predicted_pull_s"], handed_on["predicted_push_s"]) == (6.0 + 1.0, 0.0 + 5.0)
