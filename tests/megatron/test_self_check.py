"""Before training, a tiny batch has the same loss with a plan and without, or nothing is trained."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest

pytest.importorskip("megatron.training")

import torch
from megatron.core.rerun_state_machine import RerunMode, RerunStateMachine

from megatron_balance.megatron import forward_backward
from tests.megatron.conftest import EXPERTS, Run, Train, assert_same_training
from tests.megatron.test_mla import FLAGS as MLA
from tests.megatron.test_parity import two_nodes
from tests.support.megatron_run import Result

pytestmark = pytest.mark.megatron

CHECKED = {**two_nodes(2), "self_check": True}


def differences(result: Result) -> list[float]:
    """Those that rank 0 logged."""
    return [
        float(each) for each in re.findall(r"self-check before step 1: .* relative difference of (\S+)", result.log(0))
    ]


def test_a_job_whose_plan_is_right_trains_as_without_the_check(train: Train) -> None:
    flags = {"train-iters": 2}
    checked, plain = (train(2, "zeppelin", flags, config=each) for each in (CHECKED, two_nodes(2)))
    (difference,) = differences(checked.result)
    assert difference < 1e-6
    assert_same_training(checked, plain, tolerance=0)


def test_stages_experts_and_further_tokens_are_checked(train: Train) -> None:
    """Sequence parallelism, samples, what lies ahead, and values of another width."""
    stages = {"pipeline-model-parallel-size": 2, "tensor-model-parallel-size": 2, "sequence-parallel": True}
    routed = {"moe-router-load-balancing-type": "seq_aux_loss", "mtp-num-layers": 1, "train-iters": 1}
    flags = {**EXPERTS, **MLA, **routed, **stages, "context-parallel-size": 1}
    (difference,) = differences(train(4, "te_ring", flags, config={"self_check": True}).result)
    assert difference < 1e-6


def test_its_losses_are_none_of_those_that_spikes_are_judged_by(monkeypatch: pytest.MonkeyPatch) -> None:
    machine: Any = RerunStateMachine(mode=RerunMode.VALIDATE_RESULTS)
    monkeypatch.setattr(forward_backward, "get_rerun_state_machine", lambda: machine)
    leaps: Any = partial(machine.is_unexpectedly_large, threshold=10.0, context="loss")
    leaps(torch.tensor(4.0))
    with forward_backward._nothing_counted([]):  # pyright: ignore[reportPrivateUsage]
        assert machine.get_mode() == RerunMode.DISABLED
        leaps(torch.tensor(90.0))
    assert machine.get_mode() == RerunMode.VALIDATE_RESULTS
    assert (machine.large_value_counts, machine.max_values) == ({"loss": 1}, {"loss": 4.0})


def test_a_wrong_attention_ends_the_job_before_it_trains(train: Train) -> None:
    def told(result: Result) -> None:
        assert result.codes == (2, 2)
        log = result.log(0)
        assert re.search(
            r"error: self-check before step 1: a tiny batch has loss \S+ with the plan of te_ring and \S+ without", log
        )
        assert "expected at most 1e-05. Nothing was trained." in log
        assert not re.search(r"iteration +1/", log)

    config: dict[str, Any] = {"self_check": True}
    run: Run = train(2, "te_ring", {"train-iters": 1}, config=config, expect=told, fault=("attention", "wrong", 1, 1))
    assert not run.steps
