"""zeppelin on trees: even parts in few runs, as halos or in waves of the keys that a group sees."""

from random import Random
from typing import Any

import numpy as np
import pytest

from megatron_balance import Cluster, Model
from megatron_balance.analysis.estimate import estimate
from megatron_balance.analysis.machine import Machine
from megatron_balance.analysis.statistics import plan_statistics
from megatron_balance.compile.proof.runs import prove
from megatron_balance.compile.transpose import POLICIES
from megatron_balance.config import load_cluster, load_model
from megatron_balance.cost.analytic import AnalyticCost
from megatron_balance.ir.arrays import as_array
from megatron_balance.ir.batch import Batch
from megatron_balance.ir.cluster import Cluster as ClusterOf
from megatron_balance.ir.columns import Placed
from megatron_balance.ir.forest import Forest, Tree, checked, num_tokens
from megatron_balance.ir.mask import CAUSAL
from megatron_balance.ir.plan import MicrobatchPlan, SharedZone
from megatron_balance.planners import zeppelin
from megatron_balance.planners.zeppelin import trees as of_trees
from megatron_balance.simulator.attention import attention_call, linear_s
from megatron_balance.workloads.trees import draw_trees
from tests.support import forests

LLAMA = load_model("llama3-8b")


def h100(num_ranks: int) -> ClusterOf:
    return load_cluster("h100").build(num_ranks=num_ranks, ranks_per_node=min(num_ranks, 8))


def planned(trees: tuple[Tree, ...], cluster: Cluster, model: Model = LLAMA, **options: Any) -> MicrobatchPlan:
    batch = Batch(tuple(map(num_tokens, trees)), trees)
    return zeppelin.plan(batch, cluster, model, AnalyticCost(cluster, model), zeppelin.ZeppelinOptions(**options))


def seen_pairs(rows: Any, forest: Forest) -> Any:
    """Of each rank, counted token by token."""
    counts = [forests.visible(tree, forest.window).sum(axis=1) for tree in forest.trees]
    found = np.zeros(int(rows[:, Placed.RANK].max()) + 1)
    for rank, seq, start, stop in rows.tolist():
        found[rank] += counts[seq][start:stop].sum()
    return found


@pytest.mark.parametrize(("num_ranks", "node"), [(1, 1), (6, 3), (8, 4), (12, 4)])
def test_every_token_is_dealt_once_and_tokens_and_pairs_are_even(num_ranks: int, node: int) -> None:
    for seed in range(6):
        forest = forests.some_forest(Random(seed), trees=6, longest=300, window=(0, 200)[seed % 2])
        rows = of_trees.dealt(forest, Cluster(num_ranks, node))
        dealt = [np.zeros(length, dtype=int) for length in forest.lengths]
        for _, seq, start, stop in rows.tolist():
            assert start < stop
            dealt[seq][start:stop] += 1
        assert all((each == 1).all() for each in dealt)
        tokens = np.bincount(rows[:, Placed.RANK], rows[:, Placed.STOP] - rows[:, Placed.START])
        assert len(tokens) == num_ranks
        assert tokens.max() - tokens.min() <= np.ceil(np.log2(num_ranks))
        pairs, heaviest = seen_pairs(rows, forest), max(forest.lengths)
        assert pairs.max() <= 1.02 * pairs.mean() + heaviest, "but for a query"


def test_fewer_tokens_than_ranks_leave_some_without() -> None:
    forest = Forest(checked([[(1, -1, False), (2, 0, True)]]))
    rows = of_trees.dealt(forest, Cluster(8, 4))
    assert sorted(map(tuple, rows[:, Placed.SEQ :].tolist())) == [(0, 0, 1), (0, 1, 2), (0, 2, 3)]


def test_waves_of_any_groups_attend_along_paths() -> None:
    rng = Random(6)
    for _ in range(40):
        forest, case = forests.drawn(rng, most=rng.choice([8, 20]))
        if forest.window:
            continue
        size = rng.choice(zeppelin._group_sizes(case.cluster))
        plan = planned(forest.trees, case.cluster, case.model, group_size=size, num_waves=rng.randint(1, 3))
        assert isinstance(plan.zones[0], SharedZone)
        assert plan.mask == forest
        plan = forests.with_layers(rng, plan)
        assert forests.worst_of(prove(plan, rng.choice(POLICIES)), forest) < 1e-12


@pytest.mark.parametrize("waves", [1, 2, 4])
def test_a_group_is_sent_the_keys_that_it_sees_once(waves: int) -> None:
    (trees,) = draw_trees("rollouts:prompt=500,responses=6,shortest=50,longest=200", 6_000, 1, 1)
    plan = planned(trees, h100(16), group_size=4, num_waves=waves)
    (zone,) = plan.zones
    assert isinstance(zone, SharedZone)
    rows, seen, sent = as_array(zone.fragments), 0, plan_statistics(plan, LLAMA)["kv_tokens_received_per_rank"]
    for group in range(4):
        own = rows[rows[:, Placed.RANK] // 4 == group]
        for seq, tree in enumerate(trees):
            shown, here = forests.visible(tree), np.zeros(num_tokens(tree), dtype=bool)
            for _, _, start, stop in own[own[:, Placed.SEQ] == seq].tolist():
                here[start:stop] = True
            seen += int((shown[here].any(axis=0) & ~here).sum())
    # A rank of a group also has the others' tokens, a slice of the heads of each.
    assert sum(sent) == 4 * seen + 3 * sum(map(num_tokens, trees))


CASES = {
    "rollouts:prompt=2k,responses=16,shortest=200,longest=2000": (100_000, 8, "dispatch"),
    "rollouts:prompt=16k,responses=8,shortest=200,longest=2000": (350_000, 32, "waves"),
    "rollouts:prompt=64k,responses=16,shortest=4000,longest=32000": (300_000, 32, "waves"),
}


@pytest.mark.parametrize("name", CASES)
def test_the_pattern_is_the_fastest_by_an_estimate_that_the_simulator_agrees_with(name: str) -> None:
    tokens, num_ranks, pattern = CASES[name]
    (trees,) = draw_trees(name, tokens, 1, 0)
    cluster = h100(num_ranks)
    machine = Machine(cluster, LLAMA, AnalyticCost(cluster, LLAMA))
    plan = planned(trees, cluster)
    assert plan.zones[0].pattern == pattern
    report = plan_statistics(plan, LLAMA)
    assert report["imbalance"]["attention"] <= 1.04
    assert report["imbalance"]["tokens"] <= 1.001
    others = [planned(trees, cluster, group_size=size, num_waves=waves) for size in (2, 8) for waves in (1, 2)]
    assert estimate(plan, machine).layer_s <= min(estimate(other, machine).layer_s for other in others)
    priced = machine.for_trees(plan.mask)
    for each in (plan, others[-1]):
        (simulated, _) = attention_call(each, priced, "keep", linear_s(each, priced), "rounds")
        assert estimate(each, machine).forward_s == pytest.approx(float(simulated.end_s.max()), rel=0.02)


def test_a_batch_of_documents_is_planned_as_before() -> None:
    trees = checked([[(5_000, -1, False)], [(900, -1, False)]])
    cluster = h100(8)
    plain = zeppelin.plan(Batch((5_000, 900)), cluster, LLAMA, AnalyticCost(cluster, LLAMA), zeppelin.ZeppelinOptions())
    assert planned(trees, cluster) == plain
    assert plain.mask == CAUSAL
