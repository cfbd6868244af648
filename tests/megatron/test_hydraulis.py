"""Planner hydraulis in training: every replica a pipeline with microbatches of its own."""

import argparse
import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from megatron_balance.errors import ConfigError
from megatron_balance.megatron import flags
from megatron_balance.megatron.ways import runs_pipelines
from tests.megatron.conftest import Run, Train, assert_same_training, loaded_run, write_corpus
from tests.megatron.test_changes import CONFIG, LENGTHS, LONG
from tests.support.pipeline_runs import gradients, worst_gradient

STEPS = 3
FLAGS: dict[str, Any] = {**LONG, "num-layers": 2, "global-batch-size": 8, "train-iters": STEPS}


@pytest.fixture(scope="module")
def loaded(train: Train, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Run]:
    # Documents whose seconds are far from even: a replica of a long one has fewer tokens.
    lengths = list(itertools.islice(itertools.cycle(LENGTHS), 200))
    uneven = write_corpus(tmp_path_factory.mktemp("uneven") / "documents", lengths)
    return loaded_run(train, tmp_path_factory.mktemp("checkpoint"), {**FLAGS, "data-path": uneven}, entry="gaps")


def test_pipelines_of_two_stages_train_like_one_rank_with_unequal_microbatches_and_an_empty_pipeline(
    train: Train, loaded: tuple[dict[str, Any], Run]
) -> None:
    flags, one = loaded
    parallel = {"pipeline-model-parallel-size": 2, "context-parallel-size": 1}
    run = train(4, "hydraulis", {**flags, **parallel}, config=CONFIG, entry="gaps")
    assert_same_training(run, one)
    numbers = run.column("pipelines")
    assert any(len(set(each)) > 1 for each in numbers), f"pipelines run as many microbatches as each other: {numbers}"
    assert run.column("num_sequences")[1] == 1, "the second step has one sequence, and two pipelines"
    assert numbers[1] == [1, 1]
    for step in run.steps:  # every rank attends for its pipeline alone; the ranks of a stage are neighbours
        calls = [step["pipelines"][pipeline] for pipeline in (0, 1, 0, 1)]
        assert step["counters"]["forward_calls"] == step["counters"]["backward_calls"] == calls
    for step in range(1, STEPS + 1):
        assert {len(each) for each in gradients(run.result.logs, step).values()} == {2}, "on one stage of each replica"
        assert worst_gradient(run.result.logs, one.result.logs, step) < 1e-5, f"at step {step}"


def test_context_parallel_replicas_resume_and_train_like_one_rank(
    train: Train, loaded: tuple[dict[str, Any], Run], tmp_path: Path
) -> None:
    flags, one = loaded
    parallel = {"context-parallel-size": 2, "save": tmp_path, "save-interval": 2}
    planner = {"name": "hydraulis", "within": "zeppelin"}
    first = train(4, planner, {**flags, **parallel, "exit-interval": 2}, config=CONFIG, entry="gaps")
    going_on = {"load": tmp_path, "finetune": False, "no-load-optim": False, "no-load-rng": False}
    second = train(4, planner, {**flags, **parallel, **going_on, "save": None}, config=CONFIG, entry="gaps")
    whole = Run(second.result, (*first.steps, *second.steps))
    assert len(first.steps) == 2
    assert_same_training(whole, one)
    assert any(len(set(each)) > 1 for each in whole.column("pipelines"))
    calls = [2 * number for number in whole.steps[0]["pipelines"] for _ in range(2)]
    assert whole.steps[0]["counters"]["forward_calls"] == calls
    assert sum(sum(step["counters"]["kv_tokens_received"]) for step in whole.steps) > 0


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"virtual_pipeline_model_parallel_size": 2}, "interleaved model chunks .* any number of its own"),
    ({"num_experts": 8, "expert_model_parallel_size": 4}, "shares experts between replicas"),
    ({"num_experts": 8, "moe_router_load_balancing_type": "global_aux_loss"}, "global_aux_loss counts over all"),
    ({"num_experts": 8, "moe_router_load_balancing_type": "sinkhorn"}, "sinkhorn balances over all replicas"),
    ({"mtp_num_layers": 1}, "--mtp-num-layers weights its loss by counts over all replicas"),
]
GIVEN: dict[str, Any] = {"tensor_model_parallel_size": 1, "context_parallel_size": 2, "num_experts": None}
GIVEN |= {"virtual_pipeline_model_parallel_size": None, "moe_router_load_balancing_type": "aux_loss"}
GIVEN |= {"expert_model_parallel_size": 1, "expert_tensor_parallel_size": None}


@pytest.mark.parametrize(("given", "message"), REFUSED)
def test_what_replicas_would_have_to_share_in_a_microbatch_is_refused(given: dict[str, Any], message: str) -> None:
    def runs(**given: Any) -> bool:
        planner = SimpleNamespace(name="hydraulis", planner=SimpleNamespace(pipelines=True))
        return runs_pipelines(argparse.Namespace(**{**GIVEN, **given}), cast("Any", SimpleNamespace(planner=planner)))

    assert runs()
    assert runs(num_experts=8, expert_model_parallel_size=2)
    with pytest.raises(ConfigError, match=f"planner hydraulis: .*{message}"):
        runs(**given)


def test_every_refusal_is_tested() -> None:
    tried = [argparse.Namespace(**{**GIVEN, **given}) for given, _ in REFUSED]
    every = [rule for rule in flags.record().refused if "pipelines" in rule.ways]
    assert not [rule.sentence for rule in every if not any(rule.holds(args) for args in tried)]
