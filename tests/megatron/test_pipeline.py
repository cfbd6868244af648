"""Pipeline parallelism: any planner's plans, every stage its own pool, Megatron's schedules."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_balance.errors import ConfigError, DataError
from megatron_balance.megatron import planning
from megatron_balance.megatron.forward_backward import _check_number
from megatron_balance.megatron.stages import Crossings, PlannedTransfers, StageShapes, given_group
from megatron_balance.runtime.groups import Groups, single
from megatron_balance.simulator import pipeline
from megatron_balance.training import tokens
from megatron_balance.training.pool import Pool, TensorParallel
from megatron_balance.training.tokens import Sequences
from tests.megatron.conftest import Run, Train, assert_same_training, loaded_run, validation_losses, write_corpus
from tests.megatron.test_planning import job
from tests.support import pipeline_runs

EVALUATION = {"split": "80,20,0", "eval-interval": 2, "eval-iters": 1}
TWO_STAGES = {"pipeline-model-parallel-size": 2, "context-parallel-size": 1}
ONE_RANK_NODES = {"cluster": {"ranks_per_node": 1}, "remap": True, "routing": "always"}


def test_stages_that_read_different_samples_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    def gather(into: list[torch.Tensor], row: torch.Tensor, **_kwargs: Any) -> None:
        for stage, each in enumerate(into):
            each.copy_(row)
            each[-1] += stage  # the other stage read a longer document

    monkeypatch.setattr(tokens.dist, "all_reduce", lambda *_args, **_kwargs: None)
    monkeypatch.setattr(tokens.dist, "all_gather", gather)
    pool = Pool(single(), 1, (0,), (0,), stage=0, num_stages=2, joint_groups=Groups(0, 2, (4, 5), None))
    mine = [Sequences.of([torch.zeros(3)])]
    with pytest.raises(DataError, match=r"ranks \[4\].*last pipeline stage read different samples"):
        tokens.share_lengths(mine, None, 1, pool, TensorParallel(), torch.device("cpu"))


def test_all_stages_compare_their_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[Groups] = []
    monkeypatch.setattr(planning, "check_agreement", lambda _fingerprint, groups, **_: compared.append(groups))
    work = job(None)
    work.pool = Pool(single(), 1, (0,), (0,), stage=1, num_stages=2, joint_groups=Groups(1, 2, (4, 5), None))
    planning.step_plans(work, ahead=False).plan(((30, 20),))
    assert [groups.size for groups in compared] == [2]


# Microbatches of different lengths through Megatron's pipelines: shapes come from the plan.

LAYERS, BATCH, STEPS = 8, 8, 1
# Documents of samples that hold from 200 to 512 tokens.
UNEVEN = (500, 300, 400, 90, 130, 33, 450, 60, 200, 512, 7, 410, 280, 1)


@pytest.fixture(scope="module")
def loaded(train: Train, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Run]:
    folder = tmp_path_factory.mktemp("uneven")
    deep: dict[str, Any] = {**EVALUATION, "data-path": write_corpus(folder / "documents", UNEVEN * 9)}
    deep |= {"num-layers": LAYERS, "global-batch-size": BATCH, "train-iters": STEPS, "eval-interval": STEPS}
    deep["untie-embeddings-and-output-weights"] = False  # the first and the last stage share a weight
    return loaded_run(train, folder / "checkpoint", deep)


# One of each comm pattern, and the one whose nano-batches run interleaved: stages know nothing else
# of a plan. Zeppelin trains in stages below.
@pytest.mark.parametrize(
    "planner",
    [*(pytest.param(name, marks=pytest.mark.product) for name in ("te_ring", "llama_all_gather", "ulysses")), "distca"],
)
def test_a_planner_trains_on_two_stages_like_one_rank(
    train: Train, loaded: tuple[dict[str, Any], Run], planner: str
) -> None:
    flags, one = loaded
    run = train(4, planner, {**flags, **TWO_STAGES}, config={**ONE_RANK_NODES, "pipeline": "stages"})
    assert_same_training(run, one)
    nano_batches = 2 if planner == "distca" else 1  # its nano-batches run interleaved
    calls = [LAYERS // 2 * microbatches * nano_batches for microbatches in run.column("num_microbatches")]
    for step, expected in zip(run.steps, calls, strict=True):
        assert step["counters"]["forward_calls"] == step["counters"]["backward_calls"] == [expected] * 4, (
            "two stages of two ranks"
        )
    assert run.column("num_tokens") == one.column("num_tokens")


INTERLEAVED = {"num-virtual-stages-per-pipeline-rank": 2}
OVERLAPPED: dict[str, Any] = {"use-distributed-optimizer": True, "overlap-grad-reduce": True}
OVERLAPPED |= {"overlap-p2p-communication-warmup-flush": True, "microbatch-group-size-per-virtual-pipeline-stage": 4}
RECOMPUTED = {"recompute-granularity": "full", "recompute-method": "uniform", "recompute-num-layers": 1}
ZEPPELIN = {"name": "zeppelin"}
# Room for every document, so that none waits for another step, which one rank would not do.
REPACKED = {"name": "wlb_llm", "slack": 4.0, "within": "zeppelin"}
SHARED = {"tensor-model-parallel-size": 2, "sequence-parallel": True, **RECOMPUTED}
BATCHED = {**INTERLEAVED, "no-overlap-p2p-communication": True}
WAYS = [
    pytest.param(2, REPACKED, {"context-parallel-size": 2}, id="PP2 x CP2", marks=pytest.mark.product),
    pytest.param(2, ZEPPELIN, {**INTERLEAVED, **OVERLAPPED}, id="PP2 x DP2, interleaved, overlapped"),
    pytest.param(2, REPACKED, SHARED, id="PP2 x TP2, recomputed"),
    pytest.param(4, ZEPPELIN, {}, id="PP4", marks=pytest.mark.product),
    pytest.param(4, REPACKED, BATCHED, id="PP4, interleaved, batched"),
]


@pytest.mark.parametrize(("stages", "planner", "flags"), WAYS)
def test_microbatches_of_different_lengths_train_and_evaluate_like_one_rank(
    train: Train, loaded: tuple[dict[str, Any], Run], stages: int, planner: dict[str, Any], flags: dict[str, Any]
) -> None:
    start, one = loaded
    parallel = {"pipeline-model-parallel-size": stages, "context-parallel-size": 1, **flags}
    config = {"plan_ahead": stages == 4, "backward": "replay" if stages == 2 else "keep"}
    run = train(4, planner, {**start, **parallel}, config=config, entry="counted")
    assert_same_training(run, one)
    losses = validation_losses(run.result.log(3))  # only the last stage knows them
    assert losses == pytest.approx(validation_losses(one.result.log(0)), rel=1e-5)
    assert len(losses) == 2

    chunks = flags.get("num-virtual-stages-per-pipeline-rank", 1)
    counts = [pipeline_runs.read(run.result.log(rank)) for rank in range(4)]
    assert [(each.shape_exchanges, each.synchronisations) for each in counts] == [(0, 0)] * 4
    per_step = {m * chunks for m in run.column("num_microbatches")}
    assert len(per_step) == 1
    # A forward pass of each microbatch in training and in two evaluations; a backward pass in
    # training.
    first = counts[0]
    sent = per_step.pop()
    assert len(first.forward) == sent * (STEPS + 2)
    assert len(counts[3].backward) == sent * STEPS
    assert len(set(first.forward)) > sent // 2, "microbatches of different lengths"


@pytest.mark.parametrize(("stages", "chunks", "group", "microbatches"), [(2, 1, 2, 3), (2, 2, 3, 5), (4, 3, 4, 8)])
def test_what_a_stage_sends_is_what_its_neighbour_expects(
    stages: int, chunks: int, group: int, microbatches: int
) -> None:
    of = [Crossings.of_schedule(microbatches, stage, stages, chunks, group) for stage in range(stages)]
    for stage in range(stages):
        assert of[stage].with_next == of[(stage + 1) % stages].with_previous
    assert len(of[0].with_next) == microbatches * chunks
    assert len(of[0].with_previous) == microbatches * (chunks - 1)


def test_crossings_follow_the_passes_that_the_simulator_runs() -> None:
    passes = [each for each in pipeline.order(4, 1, 8, 2) if not each.backward]
    ours = Crossings.of_passes([(each.microbatch, each.chunk) for each in passes], 0, 4, 2)
    assert ours == Crossings.of_schedule(8, 0, 4, 2, 4)


def test_rows_are_padded_nano_batch_by_nano_batch_and_shared_by_tensor_parallel_ranks() -> None:
    config = SimpleNamespace(tensor_model_parallel_size=2, sequence_parallel=True, hidden_size=32)
    shapes = StageShapes.of_step([[5, 3], [0, 8], [0]], 4, config)
    assert [shapes[m] for m in range(3)] == [(6, 1, 32), (6, 1, 32), (2, 1, 32)]
    config.sequence_parallel = False
    assert StageShapes.of_step([[5, 3]], 4, config).rows == (12,)


def test_other_rows_another_number_of_microbatches_and_a_communicator_of_another_kind_are_refused() -> None:
    transfers = object.__new__(PlannedTransfers)
    shapes, crossings = StageShapes((6, 4), 32), Crossings(with_previous=(0, 1), with_next=(0, 1))
    transfers.expect(shapes, crossings)
    assert transfers._communicate_shapes(torch.empty(6, 1, 32), None, True, False) == ((6, 1, 32), ())
    with pytest.raises(ConfigError, match=r"microbatch 1 leaves this pipeline stage as \[5, 1, 32\].*\[4, 1, 32\]"):
        transfers._communicate_shapes(torch.empty(5, 1, 32), None, True, False)
    _check_number(4, 4)
    with pytest.raises(ConfigError, match=r"made 3 microbatches of a step in which every rank runs 4"):
        _check_number(3, 4)
    assert given_group(None) is None
    with pytest.raises(ConfigError, match=r"p2p_communicator of type SimpleNamespace.*leave it out"):
        given_group(SimpleNamespace(pp_group=None))
