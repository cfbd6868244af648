"""All pipeline stages attending together: the losses of one rank, and idle stages that work."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_balance.errors import ConfigError
from megatron_balance.megatron.planning import recompute_of
from megatron_balance.megatron.stages import _attention_passes, phases
from megatron_balance.megatron.ways import attends_jointly
from tests.megatron.conftest import (
    SEQ_LENGTH,
    Run,
    Train,
    assert_same_training,
    at_once,
    loaded_run,
    validation_losses,
    write_corpus,
)
from tests.megatron.test_arguments import parse
from tests.megatron.test_pipeline import EVALUATION, TWO_STAGES

LAYERS, BATCH = 4, 8
# Blocks so small that these documents are cut, and a balance so strict that they must be.
DISTCA = {"name": "distca", "block": 16, "tolerance": 0.02}
OVERLAPPED = {"use-distributed-optimizer": True, "overlap-grad-reduce": True, "overlap-param-gather": True}
RECOMPUTED = {"recompute-granularity": "full", "recompute-method": "uniform", "recompute-num-layers": 1}


@pytest.fixture(scope="module")
def loaded(train: Train, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Run]:
    flags = {"num-layers": LAYERS, "global-batch-size": BATCH, "train-iters": 3}
    return loaded_run(train, tmp_path_factory.mktemp("checkpoint"), flags)


INTERLEAVED = {"num-virtual-stages-per-pipeline-rank": 2, "train-iters": 2, **OVERLAPPED}
SHARED = {"tensor-model-parallel-size": 2, "sequence-parallel": True, "train-iters": 1, **RECOMPUTED}
LAYOUTS = [
    pytest.param(8, 2, {"train-iters": 3}, id="PP2 x DP4", marks=pytest.mark.product),
    pytest.param(8, 4, {"train-iters": 2}, id="PP4 x DP2", marks=pytest.mark.product),
    pytest.param(4, 2, INTERLEAVED, id="PP2 x DP2, interleaved"),
    # Half batches of experts in stages, in test_ping_pong.py, stand for it.
    pytest.param(4, 2, SHARED, id="PP2 x TP2", marks=pytest.mark.product),
]


@pytest.mark.parametrize(("ranks", "stages", "flags"), LAYOUTS)
def test_stages_that_attend_together_train_like_one_rank(
    train: Train, loaded: tuple[dict[str, Any], Run], ranks: int, stages: int, flags: dict[str, Any]
) -> None:
    # Planned ahead, one nano-batch of all microbatches at a time.
    start, one = loaded
    parallel = {"pipeline-model-parallel-size": stages, "context-parallel-size": 1, **flags}
    pool = ranks // flags.get("tensor-model-parallel-size", 1)
    run = train(
        ranks, DISTCA, {**start, **parallel}, config={"cluster": {"ranks_per_node": pool // 2}, "plan_ahead": True}
    )
    steps = flags["train-iters"]
    assert_same_training(run, Run(one.result, one.steps[:steps]))
    assert run.column("step") == list(range(1, steps + 1))
    assert run.column("num_tokens") == one.column("num_tokens")[:steps]
    assert run.column("num_sequences") == one.column("num_sequences")[:steps]
    assert run.column("plan_wait_ms")[0] == run.column("plan_ms")[0], "the first step is planned on the spot"
    assert "planning on the spot" not in run.result.log(0)
    chunks = flags.get("num-virtual-stages-per-pipeline-rank", 1)
    replicas = pool // stages
    again = RECOMPUTED.keys() <= flags.keys()
    num_ticks = 2 * (BATCH // replicas * chunks + stages - 1)
    layers = LAYERS // (stages * chunks)
    assert_ticks_ran(run, num_ticks, 2 * layers, 1 + again)
    if not again:
        assert_counted_once(run, chunks * layers)


def test_stages_that_attend_together_in_one_stream(train: Train, loaded: tuple[dict[str, Any], Run]) -> None:
    # Without nano-batches, and with core attention alone computed again, which they do not do.
    start, one = loaded
    flags = {**TWO_STAGES, "recompute-granularity": "selective", "train-iters": 1}
    run = train(4, DISTCA, {**start, **flags}, config={"cluster": {"ranks_per_node": 2}, "ping_pong": False})
    assert_same_training(run, Run(one.result, one.steps[:1]))
    assert_ticks_ran(run, 2 * (BATCH // 2 + 1), LAYERS // 2, 2)


def assert_ticks_ran(run: Run, num_ticks: int, layers: int, forwards: int) -> None:
    # Every rank attends in every layer (of each nano-batch) of every tick, also for others while
    # its own stage has nothing to do.
    for step in run.steps:
        counted = step["counters"]
        assert step["num_ticks"] == num_ticks
        calls = num_ticks // 2 * layers
        assert counted["backward_calls"] == [calls] * len(counted["backward_calls"])
        assert counted["forward_calls"] == [forwards * calls] * len(counted["forward_calls"])
    assert all(
        sum(step["counters"]["idle_tasks"][rank] for step in run.steps) > 0
        for rank in range(len(counted["idle_tasks"]))
    )


def assert_counted_once(run: Run, layers: int) -> None:
    # The plans' tokens received and across nodes in one layer, of both nano-batches, are those that
    # the ranks counted in so many.
    for step in run.steps:
        counted = step["counters"]
        assert step["kv_tokens_received"] * len(counted["kv_tokens_received"]) * layers == pytest.approx(
            sum(counted["kv_tokens_received"])
        )
        for way in ("sent", "received"):
            planned = sum(map(sum, step[f"bytes_{way}_per_nic"]))
            assert planned * layers == pytest.approx(sum(counted[f"inter_node_bytes_{way}_forward"])) != 0
        assert 1 <= step["imbalance_after"]["attention"] < 1.3  # short documents: seconds are evened out, not pairs
        assert step["imbalance_after"]["tokens"] < 1.01


# Documents of which some fill a sample, so that on one rank a stage a microbatch has one document
# and no second nano-batch.
ODD = (SEQ_LENGTH, 301, 210, SEQ_LENGTH, SEQ_LENGTH, 509, 1)


def test_microbatches_of_one_document_and_a_resumed_run(
    train: Train, loaded: tuple[dict[str, Any], Run], tmp_path: Path
) -> None:
    flags = {**loaded[0], **EVALUATION, "global-batch-size": 4, "train-iters": 4}
    flags["data-path"] = write_corpus(tmp_path / "odd", ODD * 8)
    one = train(1, "te_ring", at_once(flags))
    saved = tmp_path / "saved"
    whole = train(2, DISTCA, {**flags, **TWO_STAGES, "save": saved, "save-interval": 2})
    assert_same_training(whole, one)
    sequences, microbatches = whole.column("num_sequences"), whole.column("num_microbatches")
    alone = [n == m for n, m in zip(sequences, microbatches, strict=True)]
    assert alone == [False, True, False, False], "one document in every microbatch"
    assert all(n < 2 * m for n, m in zip(sequences, microbatches, strict=True)), "one document in some microbatch"
    for step, whole_step in zip(whole.steps, alone, strict=True):
        assert_ticks_ran(Run(whole.result, (step,)), 2 * (4 + 1), (1 if whole_step else 2) * LAYERS // 2, 1)
    losses = validation_losses(whole.result.log(1))
    assert len(losses) == 3
    assert losses == pytest.approx(validation_losses(one.result.log(0)), rel=1e-5)

    (saved / "latest_checkpointed_iteration.txt").write_text("2")
    as_it_was = {"load": saved, "finetune": False, "no-load-optim": False, "no-load-rng": False}
    resumed = train(2, DISTCA, {**flags, **TWO_STAGES, **as_it_was})
    assert resumed.column("step") == [3, 4]
    for name in ("loss", "grad_norm", "fingerprint"):
        assert resumed.column(name) == whole.column(name)[2:]
    assert validation_losses(resumed.result.log(1)) == losses[1:]


REFUSED = {
    "--pipeline-model-parallel-layout": ("--decoder-first-pipeline-num-layers", "3"),
    "--num-layers": ("--num-layers", "3"),
    "--window-attn-skip-freq": ("--window-size", "128,0", "--window-attn-skip-freq", "2"),
    "hybrid models": ("--experimental-attention-variant", "gated_delta_net"),
    "--defer-embedding-wgrad-compute": ("--defer-embedding-wgrad-compute",),
}


@pytest.mark.parametrize(("sentence", "words"), REFUSED.items(), ids=REFUSED)
def test_flags_that_keep_stages_apart_are_refused(sentence: str, words: tuple[str, ...]) -> None:
    args = parse("--num-layers", "4", "--pipeline-model-parallel-size", "2", *words)
    args.virtual_pipeline_model_parallel_size = None
    planner = SimpleNamespace(name="distca", planner=SimpleNamespace(joint=True))
    chosen: Any = SimpleNamespace(planner=planner, pipeline=None)
    with pytest.raises(ConfigError, match=f"cannot attend together: .*{sentence}.*pipeline: stages"):
        attends_jointly(args, chosen)


FULL = {"recompute_granularity": "full"}


@pytest.mark.parametrize(
    ("options", "calls"),
    [
        ({}, "b3"),
        ({"recompute_granularity": "selective", "recompute_modules": ["layernorm"]}, "b3"),
        ({"recompute_granularity": "selective"}, "f1 b1 f1 b1 f1 b1"),
        ({**FULL, "recompute_method": "uniform", "recompute_num_layers": 2}, "f1 b1 f2 b2"),
        ({**FULL, "recompute_method": "block", "recompute_num_layers": 2}, "b1 f1 b1 f1 b1"),
        ({**FULL, "recompute_method": "block", "recompute_num_layers": 9}, "f1 b1 f1 b1 f1 b1"),
    ],
)
def test_an_idle_stage_makes_the_calls_of_a_recomputed_backward(options: dict[str, Any], calls: str) -> None:
    # Passes through layers, f: forward, b: backward; each nano-batch attends once in each layer,
    # forward and evaluating too.
    recompute = recompute_of(
        SimpleNamespace(**{"recompute_granularity": None, "recompute_modules": ["core_attn"], **options})
    )
    for num_nano_batches in (1, 2):
        passes = _attention_passes(recompute, 3, num_nano_batches, backward=True)
        assert " ".join(f"{'fb'[each.backward]}{attended(each.segments, num_nano_batches)}" for each in passes) == calls
        assert {name[0] for name in phases(recompute, 3, backward=True)} == {call[0] for call in calls.split()}
        for training in (True, False):
            forward = _attention_passes(recompute, 3, num_nano_batches, backward=False, training=training)
            assert sum(attended(each.segments, num_nano_batches) for each in forward) == 3
        assert len(forward) == 1, "nothing is computed again in an evaluation"


def attended(segments: Sequence[Any], num_nano_batches: int) -> int:
    counts = {
        sum(segment.nano_batch == nano_batch and segment.part == "attend" for segment in segments)
        for nano_batch in range(num_nano_batches)
    }
    assert len(counts) == 1
    return counts.pop()
