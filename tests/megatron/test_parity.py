"""Any planner, any number of ranks: losses and gradient norms of one rank that holds everything."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_balance.planners import PLANNERS
from tests.megatron.conftest import EXPERTS, MODEL, SEQ_LENGTH, Run, Train, assert_same_training, loaded_run
from tests.support.pipeline_runs import worst_gradient

STEPS = 20
# Planners that together use every comm pattern.
ONE_OF_EACH = ("te_ring", "llama_all_gather", "ulysses", "distca", "zeppelin")
RANKS_PER_NODE = {8: 4, 4: 2, 2: 1}

# Ranks so slow that arithmetic is what a placement is judged by, as it is for real models; with
# those of a GPU latency would be.
SLOW = {"flops_per_s": 1e9, "attention_efficiency": 1.0, "intra_alpha_s": 1e-6, "inter_alpha_s": 1e-5}
SLOW |= {"intra_bytes_per_s": 1e8, "nic_bytes_per_s": 5e6}


def two_nodes(num_ranks: int) -> dict[str, Any]:
    return {"cluster": {"ranks_per_node": RANKS_PER_NODE[num_ranks], **SLOW}}


@pytest.fixture(scope="module")
def one_rank(train: Train) -> Run:
    run = train(1)
    assert run.column("step") == list(range(1, STEPS + 1))
    losses = run.column("loss")
    assert losses[-1] < 0.98 * losses[0], "a model that learns nothing would prove nothing"
    return run


def options_of(planner: str) -> dict[str, Any]:
    # Without slack the longer documents of these batches must leave their node, so all three of
    # zeppelin's queues run, under the rule that has them.
    given = {
        "zeppelin": {"slack": 1.0, "rule": "groups", "group_size": 1},
        "knapformer": {"topology": "g2n1+g1n2", "slack": 4.0},
    }
    return {"name": planner, **given.get(planner, {})}


PRODUCT = pytest.mark.product
# Every planner without layers (other planners: in plain PyTorch, tests/distributed/test_torch.py, by
# the same patterns); with routing, remap or both the planner that has both by default.
LAYERED = [
    *(pytest.param(name, "never", False, marks=() if name in ONE_OF_EACH[1:4] else PRODUCT) for name in PLANNERS),
    pytest.param("te_ring", "always", True, marks=PRODUCT),
    pytest.param("zeppelin", "always", True),
    pytest.param("zeppelin", "always", False, marks=PRODUCT),
    pytest.param("zeppelin", "never", True, marks=PRODUCT),
]


@pytest.mark.parametrize(("planner", "routing", "remap"), LAYERED)
def test_a_planner_trains_like_one_rank(train: Train, one_rank: Run, planner: str, routing: str, remap: bool) -> None:
    steps = 8 if planner == "zeppelin" else 2  # in which zeppelin has all its queues
    flags = {"train-iters": steps}
    run = train(4, options_of(planner), flags, config={**two_nodes(4), "routing": routing, "remap": remap})
    assert_same_training(run, Run(one_rank.result, one_rank.steps[:steps]))
    assert run.column("planner") == [planner] * steps
    assert run.column("num_tokens") == one_rank.column("num_tokens")[:steps]
    assert_everything_ran(run, planner, 4)
    assert_layers_ran(run, planner, routing=routing, remap=remap)


@pytest.mark.parametrize(
    ("planner", "num_ranks"),
    [
        *(pytest.param(name, 8, marks=() if name == "zeppelin" else (pytest.mark.product,)) for name in ONE_OF_EACH),
        pytest.param("te_ring", 2, marks=PRODUCT),
        ("zeppelin", 2),
    ],
)
def test_any_number_of_ranks_trains_like_one(train: Train, one_rank: Run, planner: str, num_ranks: int) -> None:
    steps = 4 if planner == "zeppelin" else 2  # with all three queues
    config = {**two_nodes(num_ranks), "routing": "always", "remap": True}
    options = options_of(planner)
    if (planner, num_ranks) == ("zeppelin", 2):
        options["slack"] = 1.25  # without it neither of two ranks holds a document alone
    run = train(num_ranks, options, {"train-iters": steps}, config=config)
    assert_same_training(run, Run(one_rank.result, one_rank.steps[:steps]))
    assert_everything_ran(run, planner, num_ranks)
    routing = "always" if num_ranks > 2 else "never"  # a node of one rank has one NIC
    assert_layers_ran(run, planner, routing=routing, remap=True)


@pytest.mark.parametrize(
    ("num_ranks", "group_size"), [pytest.param(4, None, marks=PRODUCT), (4, 2), pytest.param(8, 4, marks=PRODUCT)]
)
def test_waves_train_like_one_rank(train: Train, one_rank: Run, num_ranks: int, group_size: int | None) -> None:
    # Uneven shares, heads exchanged in groups and keys in waves; remapped too.
    steps = 4
    planner = {"name": "zeppelin", "slack": 2.0, "group_size": group_size, "num_waves": 2}
    planner = {key: value for key, value in planner.items() if value is not None}
    config = {**two_nodes(num_ranks), "remap": True}
    run = train(num_ranks, planner, {"train-iters": steps}, config=config)
    assert_same_training(run, Run(one_rank.result, one_rank.steps[:steps]))
    counted = each_rank(run)
    assert counted["kv_tokens_received"].sum() > 0
    if group_size:
        assert counted["exchanges_all_to_all"].sum() > 0


# By planner that does not go by rings: the exchanges it is made of (forward and backward) where
# nothing is routed.
COLLECTIVES = {
    "llama_all_gather": {"exchanges_all_gather", "exchanges_reduce_scatter"},
    "wlb_sharding": {"exchanges_all_gather", "exchanges_reduce_scatter"},
    "wlb_llm": {"exchanges_all_gather", "exchanges_reduce_scatter"},  # what is inside its microbatches
    "ulysses": {"exchanges_all_to_all"},
    "usp": {"exchanges_all_to_all", "exchanges_p2p"},
    "flexsp": {"exchanges_all_to_all"},
    "knapformer": {"exchanges_all_to_all"},
    "auto": {"exchanges_all_to_all", "exchanges_p2p"},  # rings of groups, in these batches
}
PING_PONG = "distca"  # runs microbatches as two nano-batches, those of one document as they are
TRADE_HEADS = ("ulysses", "usp", "flexsp", "knapformer", "auto")
# These cut tokens evenly, so there is nothing to remap; everybody else leaves some rank a token
# more.
EVEN = ("ulysses", "packing", "distca", "wlb_sharding")


def each_rank(run: Run) -> dict[str, np.ndarray]:
    # Counters [R], summed over the steps.
    return {name: np.sum([step["counters"][name] for step in run.steps], axis=0) for name in run.steps[0]["counters"]}


def assert_everything_ran(run: Run, planner: str, num_ranks: int) -> None:
    counted = each_rank(run)
    calls = MODEL["num-layers"] * sum(run.column("num_microbatches"))
    (made,) = set(counted["forward_calls"].tolist())
    assert counted["forward_calls"].tolist() == counted["backward_calls"].tolist() == [made] * num_ranks
    assert calls < made <= 2 * calls if planner == PING_PONG else made == calls
    assert counted["kv_tokens_received"].sum() > 0
    assert counted["bytes_received_backward"].sum() > 0
    if planner == "zeppelin":
        # a node of one rank has no ring
        queues = ["inter_node", "intra_node", "local"] if num_ranks > 2 else ["inter_node", "local"]
        for queue in queues:
            assert counted[f"kernel_calls_{queue}"].sum() > 0, f"queue {queue} never ran"
            assert any(step["zones"].get(queue, 0) for step in run.steps)
        assert (counted["kernel_calls_inter_node"] > 0).all(), "a ring over nodes takes every rank"
        assert all(step["kv_tokens_received_inter_node"] <= step["kv_tokens_received"] for step in run.steps)


def assert_layers_ran(run: Run, planner: str, *, routing: str, remap: bool) -> None:
    # Ranks remapped and routed as the plans say, and did some of both.
    counted, layers, ranks = each_rank(run), MODEL["num-layers"], len(each_rank(run)["q_tokens_received"])
    remapped, routed = sum(run.column("remapped_tokens")), sum(run.column("routed_transfers"))
    assert counted["remap_tokens_received"].sum() == layers * remapped
    assert counted["routed_transfers"].sum() == 2 * layers * routed  # forward and backward
    assert (remapped > 0) == (remap and planner not in EVEN)
    assert (routed > 0) == (routing == "always")
    assert (counted["relayed_bytes_forward"].sum() > 0) == (counted["relayed_bytes_backward"].sum() > 0) == (routed > 0)
    assert (counted["q_tokens_received"].sum() > 0) == (planner in TRADE_HEADS or planner == PING_PONG)
    if remap:
        for step in run.steps:  # counts of a microbatch, or of its nano-batches, differ by one token at most
            plans = step["num_microbatches"] * (1 + (planner == PING_PONG))
            assert step["imbalance_after"]["tokens"] <= 1 + ranks * plans / step["num_tokens"]
    ran = {name for name, counts in counted.items() if name.startswith("exchanges_") and counts.sum() > 0}
    unrouted = COLLECTIVES.get(planner, {"exchanges_p2p"}) | ({"exchanges_p2p"} if remapped else set())
    assert ran == unrouted if routing == "never" else "exchanges_p2p" in ran


SHARDED = {"use-distributed-optimizer": True, "overlap-grad-reduce": True, "overlap-param-gather": True}
# Flags that say how plain Megatron moves keys, and are switched off.
HOW_PLAIN_MEGATRON_MOVES = {"hierarchical-context-parallel-sizes": [2, 2], "cp-comm-type": "a2a+p2p"}
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "replayed backward, optimizer shared out": ({**SHARDED, "context-parallel-size": 2}, {"backward": "replay"}),
    "recomputed core attention, two samples a microbatch": (
        {"recompute-granularity": "selective", "micro-batch-size": 2, **HOW_PLAIN_MEGATRON_MOVES},
        {},
    ),
}


@pytest.mark.parametrize(("flags", "config"), VARIANTS.values(), ids=VARIANTS)
def test_a_way_to_train_changes_no_number(
    train: Train, one_rank: Run, flags: dict[str, Any], config: dict[str, Any]
) -> None:
    layers = {"routing": "always", "remap": True}
    run = train(4, options_of("zeppelin"), {**flags, "train-iters": 3}, config={**two_nodes(4), **layers, **config})
    assert_same_training(run, Run(one_rank.result, one_rank.steps[:3]))
    assert sum(run.column("remapped_tokens")) > 0
    assert sum(run.column("routed_transfers")) > 0
    twice = "recompute-granularity" in flags
    counted = run.steps[0]["counters"]
    assert counted["forward_calls"] == [n * (1 + twice) for n in counted["backward_calls"]]


def test_a_batch_that_grows_trains_like_one_rank(train: Train) -> None:
    # `--step-batch-size-schedule`, as Megatron's release configurations have it; plans made ahead.
    grown = {"global-batch-size": None, "step-batch-size-schedule": "0:2 2K:4"}  # at 2,000 tokens
    by_samples = {"train-iters": None, "train-samples": 12, "lr-decay-iters": None, "lr-decay-samples": 12}
    flags = {**grown, **by_samples}
    one = train(1, "te_ring", flags, entry="gradients")
    run = train(2, options_of("zeppelin"), flags, config={**two_nodes(2), "plan_ahead": True}, entry="gradients")
    assert run.column("num_microbatches") == [2, 2, 4, 4]
    assert run.column("announced") == [True] * 4, "plans made ahead are compared with the lengths"
    assert "planning on the spot" not in run.result.log(0)
    assert_same_training(run, one)
    assert sum(each_rank(run)["kv_tokens_received"]) > 0
    assert worst_gradient(run.result.logs, one.result.logs, step=3) < 1e-5


@PRODUCT  # replicas of a shared-out optimizer, above, stand for them
@pytest.mark.parametrize("context", [1, 2])
def test_data_parallel_replicas_form_one_pool(train: Train, one_rank: Run, context: int) -> None:
    flags = {"context-parallel-size": context, "train-iters": 3}
    run = train(2 * context, "zeppelin", flags, config=two_nodes(2 * context))
    assert_same_training(run, Run(one_rank.result, one_rank.steps[:3]))


@pytest.mark.parametrize(
    "model",
    [
        pytest.param({**EXPERTS, "moe-aux-loss-coeff": 0.2, "position-embedding-type": "learned_absolute"}),
        pytest.param({"position-embedding-type": "none"}, marks=PRODUCT),
    ],
    ids=["experts, learned positions", "no positions"],
)
def test_three_servers_without_tokens_train_like_one_rank(train: Train, tmp_path: Path, model: dict[str, Any]) -> None:
    # Four replicas; one rank holds what they all read, more than one rank's share of full samples,
    # and all attend.
    flags, one = loaded_run(train, tmp_path, {**model, "global-batch-size": 4, "train-iters": 2})
    distca = {"name": "distca", "servers": "pool", "pool_ranks": 3, "block": 16}
    run = train(4, distca, {**flags, "context-parallel-size": 1}, config=two_nodes(4))
    assert_same_training(run, one)
    assert all(step["num_tokens"] > SEQ_LENGTH for step in run.steps)
    assert {step["imbalance_after"]["tokens"] for step in run.steps} == {4.0}
    assert max(step["imbalance_after"]["attention"] for step in run.steps) < 1.3
    assert sorted(each_rank(run)["q_tokens_received"] > 0) == [False, True, True, True]


@pytest.fixture(scope="module")
def loaded(train: Train, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Run]:
    return loaded_run(train, tmp_path_factory.mktemp("checkpoint"), {"train-iters": 3}, whole=True)


@PRODUCT  # Nemotron-4, Mixtral (test_families.py) and distca's nano-batches (test_ping_pong.py) stand for them
@pytest.mark.parametrize(
    ("planner", "sequence_parallel"), [*((name, True) for name in ONE_OF_EACH), ("zeppelin", False)]
)
def test_tensor_parallel_ranks_train_like_one_rank(
    train: Train, one_rank: Run, loaded: tuple[dict[str, Any], Run], planner: str, sequence_parallel: bool
) -> None:
    flags, reference = loaded
    assert reference.column("loss")[0] != one_rank.column("loss")[0], "the checkpoint was not loaded"
    parallel = {"tensor-model-parallel-size": 2, "context-parallel-size": 2, "sequence-parallel": sequence_parallel}
    run = train(4, planner, {**flags, **parallel}, config={**two_nodes(2), "remap": True})
    assert_same_training(run, reference)
    # Under sequence parallelism counts are multiples of the tensor-parallel size, which even counts
    # need not be.
    assert (sum(run.column("remapped_tokens")) > 0) == (sequence_parallel or planner not in EVEN)
