"""Training parity: any planner, any number of ranks, the losses and gradient norms of one rank that holds everything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_balance.planners import PLANNERS
from tests.megatron.conftest import MODEL, Run, Train, assert_same_training, started

pytestmark = pytest.mark.megatron

STEPS = 20
RANKS_PER_NODE = {8: 4, 4: 2, 2: 1}


def two_nodes(num_ranks: int) -> dict[str, Any]:
    return {"cluster": {"ranks_per_node": RANKS_PER_NODE[num_ranks]}}


@pytest.fixture(scope="module")
def one_rank(train: Train) -> Run:
    run = train(1)
    assert run.column("step") == list(range(1, STEPS + 1))
    losses = run.column("loss")
    assert losses[-1] < 0.98 * losses[0], "a model that learns nothing would prove nothing"
    return run


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
@pytest.mark.parametrize("planner", PLANNERS)
def test_a_planner_trains_like_one_rank(train: Train, one_rank: Run, planner: str, num_ranks: int) -> None:
    # Without slack the longer documents of these batches must leave their node, so all three of zeppelin's queues run.
    run = train(num_ranks, {"name": "zeppelin", "slack": 1.0} if planner == "zeppelin" else planner, config=two_nodes(num_ranks))
    assert_same_training(run, one_rank)
    assert run.column("planner") == [planner] * STEPS
    assert run.column("num_tokens") == one_rank.column("num_tokens")
    assert_everything_ran(run, planner, num_ranks)


# By planner: the exchanges it is made of (forward and backward), and whether queries travel.
EXCHANGES = {
    "te_ring": ("exchanges_p2p",),
    "llama_all_gather": ("exchanges_all_gather", "exchanges_all_to_all"),
    "ulysses": ("exchanges_all_to_all",),
    "zeppelin": ("exchanges_p2p",),
}


def assert_everything_ran(run: Run, planner: str, num_ranks: int) -> None:
    """Counted where it happened, on every rank: attention of every layer, the planner's kinds of exchange, zeppelin's three queues."""
    each_rank = {name: np.sum([step["counters"][name] for step in run.steps], axis=0) for name in run.steps[0]["counters"]}
    calls = MODEL["num-layers"] * sum(run.column("num_microbatches"))
    assert each_rank["forward_calls"].tolist() == each_rank["backward_calls"].tolist() == [calls] * num_ranks
    ran = {name for name, counts in each_rank.items() if name.startswith("exchanges_") and counts.sum() > 0}
    assert ran == set(EXCHANGES.get(planner, ran))
    assert (each_rank["kv_tokens_received"] > 0).all()
    assert (each_rank["bytes_received_backward"] > 0).all()
    assert (each_rank["q_tokens_received"].sum() > 0) == (planner == "ulysses")
    if planner == "zeppelin":
        queues = ["inter_node", "intra_node", "local"] if num_ranks > 2 else ["inter_node", "local"]  # a node of one rank has no ring
        for queue in queues:
            assert each_rank[f"kernel_calls_{queue}"].sum() > 0, f"queue {queue} never ran"
            assert any(step["zones"].get(queue, 0) for step in run.steps)
        assert (each_rank["kernel_calls_inter_node"] > 0).all(), "a ring over nodes takes every rank"
        assert all(step["kv_tokens_received_inter_node"] <= step["kv_tokens_received"] for step in run.steps)


VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "replayed backward": ({}, {"backward": "replay"}),
    "full recomputation": ({"recompute-granularity": "full", "recompute-method": "uniform", "recompute-num-layers": 1}, {}),
    "recomputed core attention": ({"recompute-granularity": "selective"}, {}),
    "two samples a microbatch": ({"micro-batch-size": 2}, {}),
    "distributed optimizer, overlapped": (
        {"use-distributed-optimizer": True, "overlap-grad-reduce": True, "overlap-param-gather": True, "context-parallel-size": 2},
        {},
    ),
}


@pytest.mark.parametrize(("flags", "config"), VARIANTS.values(), ids=VARIANTS)
def test_a_way_to_train_changes_no_number(train: Train, one_rank: Run, flags: dict[str, Any], config: dict[str, Any]) -> None:
    run = train(4, "zeppelin", {**flags, "train-iters": 5}, config={**two_nodes(4), **config})
    assert_same_training(run, Run(one_rank.result, one_rank.steps[:5]))
    twice = "recompute-granularity" in flags
    assert run.steps[0]["counters"]["forward_calls"] == [n * (1 + twice) for n in run.steps[0]["counters"]["backward_calls"]]


@pytest.mark.parametrize("positions", ["learned_absolute", "none"])
def test_other_position_embeddings_train_like_one_rank(train: Train, tmp_path: Path, positions: str) -> None:
    flags = started(train, tmp_path, {"position-embedding-type": positions, "train-iters": 5})
    assert_same_training(train(4, "zeppelin", flags, config=two_nodes(4)), train(1, "te_ring", flags))


@pytest.mark.parametrize("context", [1, 2])
def test_data_parallel_replicas_form_one_pool(train: Train, one_rank: Run, context: int) -> None:
    run = train(2 * context, "zeppelin", {"context-parallel-size": context}, config=two_nodes(2 * context))
    assert_same_training(run, one_rank)


@pytest.mark.parametrize(("planner", "sequence_parallel"), [*((planner, True) for planner in PLANNERS), ("zeppelin", False)])
def test_tensor_parallel_ranks_train_like_one_rank(
    train: Train, one_rank: Run, tmp_path: Path, planner: str, sequence_parallel: bool
) -> None:
    load = started(train, tmp_path, {})
    reference = train(1, "te_ring", load)
    assert reference.column("loss")[0] != one_rank.column("loss")[0], "the checkpoint was not loaded"
    parallel = {"tensor-model-parallel-size": 2, "context-parallel-size": 2, "sequence-parallel": sequence_parallel}
    assert_same_training(train(4, planner, {**load, **parallel}, config=two_nodes(2)), reference)
