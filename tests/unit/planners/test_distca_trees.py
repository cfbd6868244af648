"""distca on trees: each query once over the keys that its tree shows, evenly, shared keys once."""

from collections.abc import Sequence
from random import Random
from typing import Any

import numpy as np
import pytest

from megatron_balance import Cluster, Model, verify
from megatron_balance.analysis.statistics import plan_statistics
from megatron_balance.compile.proof.structure import verify_plan
from megatron_balance.cost.analytic import AnalyticCost
from megatron_balance.ir.arrays import Ints
from megatron_balance.ir.batch import Batch
from megatron_balance.ir.forest import Forest, Tree, checked, document, num_pairs, num_tokens
from megatron_balance.ir.plan import MicrobatchPlan
from megatron_balance.planners import distca
from megatron_balance.planners.distca import DistcaOptions, linear_owned
from megatron_balance.planners.distca import trees as of_trees
from megatron_balance.planners.distca.servers import Edges, Plain, Seconds, Servers, TaskSizes
from megatron_balance.workloads.trees import draw_trees
from tests.support.forests import some_forest

MODEL = Model(num_heads=32, num_kv_heads=8, head_dim=128)


def planned(trees: tuple[Tree, ...], num_ranks: int, **options: Any) -> MicrobatchPlan:
    cluster = Cluster(num_ranks, min(num_ranks, 8))
    batch = Batch(tuple(map(num_tokens, trees)), trees)
    return distca.plan(batch, cluster, MODEL, AnalyticCost(cluster, MODEL), DistcaOptions(**options))


@pytest.mark.parametrize("shards", ["plain", "head_tail"])
def test_drawn_forests_are_attended_once_and_nothing_hidden_is(shards: str) -> None:
    for seed in range(40):
        random = Random(seed)
        forest = some_forest(random, trees=5, longest=random.choice([12, 300]))
        plan = planned(forest.trees, random.choice([1, 2, 5, 8, 16]), block=random.choice([1, 16, 128]), shards=shards)
        plain = all(tree == document(tree[0].length) for tree in forest.trees)
        assert plain or plan.mask == forest
        verify_plan(plan)
        verify(plan, "keep")


@pytest.mark.parametrize("name", ["rollouts:responses=8", "rollouts:prompt=16k,responses=32", "agents"])
def test_attention_of_drawn_trees_is_even_as_that_of_sequences(name: str) -> None:
    (trees,) = draw_trees(name, 400_000, 1, 3)
    report = plan_statistics(planned(trees, 16), MODEL)
    assert sum(report["attention_pairs_per_rank"]) == sum(map(num_pairs, trees))
    assert max(report["tokens_per_rank"]) - min(report["tokens_per_rank"]) <= 1
    assert report["imbalance"]["attention"] <= 1.04


def test_full_segments_are_dealt_as_runs_of_their_area() -> None:
    # Every query of a prefix sees all of it, so none of its parts is heavier; a server has 18 blocks.
    trees = checked([[(16_384, -1, True), (2_000, 0, False)]])
    assert plan_statistics(planned(trees, 8), MODEL)["imbalance"]["attention"] <= 1.06


def test_keys_that_siblings_share_come_once(monkeypatch: pytest.MonkeyPatch) -> None:
    (trees,) = draw_trees("rollouts:prompt=8k,responses=24,longest=2k", 300_000, 1, 0)

    def received() -> int:
        return sum(plan_statistics(planned(trees, 16), MODEL)["kv_tokens_received_per_rank"])

    shared = received()
    monkeypatch.setattr(Servers, "_reach_others", lambda *_: None)
    monkeypatch.setattr(of_trees.Paths, "num_common", lambda *_: 0)
    monkeypatch.setattr(of_trees.Paths, "above", lambda *_: ())
    monkeypatch.setattr(of_trees.Paths, "relatives", lambda *_: (range(0), 0))
    assert shared < 0.97 * received()


def test_a_server_has_what_siblings_share_as_long_as_one_of_them_is_there() -> None:
    # A prompt of 256 tokens and two responses of 128, all on rank 0, whose responses go to rank 1.
    forest = Forest(checked([[(256, -1, False), (128, 0, False), (128, 0, False)]]))
    cost = AnalyticCost(Cluster(2, 2), MODEL)
    made: list[Servers] = []

    def schedule(rows: Ints, lengths: Sequence[int], paths: of_trees.Paths) -> Ints:
        edges = Edges.of(rows, 128, Seconds.of(cost, max(lengths)))
        made.append(Servers(edges, Plain(edges, TaskSizes(1.0, 1.0)), 2, paths=paths))
        return np.insert(np.insert(rows, 4, 0, axis=1), 5, rows[:, 3], axis=1)

    of_trees.schedule_trees(linear_owned(forest.lengths, [0]), forest, schedule)
    (servers,) = made
    _, one, other = servers.pieces[0]
    servers.move(one, one[1], one[2], 0, 1)
    assert servers.reach[1] == {0: 256, 1: 384, 2: 256}
    assert servers.freed(1, one) == 384
    servers.move(other, other[1], other[2], 0, 1)
    assert servers.reach[1] == {0: 256, 1: 384, 2: 384}
    assert servers.freed(1, one) == 128


def test_paths_say_which_first_keys_runs_share() -> None:
    # 600 full tokens are two runs; below them 5, and below these 7 and 9.
    forest = Forest(checked([document(11), [(600, -1, True), (5, 0, False), (7, 1, False), (9, 1, False)]]))
    seen: list[of_trees.Paths] = []

    def schedule(rows: Any, lengths: Any, paths: of_trees.Paths) -> Any:
        seen.append(paths)
        assert [*lengths] == [11, 856, 644, 605, 612, 614]
        spans = [[0, 0, 11], [1, 344, 856], [2, 556, 644], [3, 600, 605], [4, 605, 612], [5, 605, 614]]
        assert rows[:, 1:].tolist() == spans
        return np.insert(np.insert(rows, 4, 0, axis=1), 5, rows[:, 3], axis=1)

    tasks = of_trees.schedule_trees(linear_owned(forest.lengths, [0]), forest, schedule)
    assert tasks.tolist() == [[0, 0, 0, 11, 0, 11], [0, 1, 0, 621, 0, 621]]
    (paths,) = seen
    common = [[paths.num_common(one, other) for other in range(6)] for one in range(6)]
    assert common[0] == [11, 0, 0, 0, 0, 0]
    assert common[1] == common[2] == [0, 600, 600, 600, 600, 600]
    assert common[4] == [0, 600, 600, 605, 612, 605]
    assert [*paths.above(5)] == [4, 2, 1]
    assert [*map(list, paths.below)] == [[0], [1, 2, 3, 4, 5], [3, 4, 5], [4], [5]]
