"""Pipeline parallelism: any planner's plans, every stage its own pool, Megatron's schedules."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_balance.errors import DataError
from megatron_balance.megatron import planning
from megatron_balance.runtime.groups import Groups, single
from megatron_balance.training import tokens
from megatron_balance.training.pool import Pool, TensorParallel
from megatron_balance.training.tokens import Sequences
from tests.megatron.conftest import Run, Train, assert_same_training, loaded_run
from tests.megatron.test_planning import job

pytest.importorskip("torch")
pytest.importorskip("megatron.training")


pytestmark = pytest.mark.megatron

LAYERS, MICROBATCHES, STEPS = 4, 4, 2
DEEP: dict[str, Any] = {
    "num-layers": LAYERS,
    "global-batch-size": 2 * MICROBATCHES,
    "train-iters": STEPS,
    # The first and the last stage share a weight.
    "untie-embeddings-and-output-weights": False,
}
EVALUATION = {"split": "80,20,0", "eval-interval": 2, "eval-iters": 1}
TWO_STAGES = {"pipeline-model-parallel-size": 2, "context-parallel-size": 1}
ONE_RANK_NODES = {"cluster": {"ranks_per_node": 1}, "remap": True, "routing": "always"}


@pytest.fixture(scope="module")
def loaded(train: Train, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Run]:
    # What initialises a layer depends on its stage.
    return loaded_run(train, tmp_path_factory.mktemp("checkpoint"), DEEP)


# One of each comm pattern, and the one whose nano-batches run interleaved: stages know nothing else
# of a plan.
@pytest.mark.parametrize(
    "planner",
    [
        *(pytest.param(name, marks=pytest.mark.product) for name in ("te_ring", "llama_all_gather", "ulysses")),
        "zeppelin",
        "distca",
    ],
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
