"""How many layers of a training step keep: by what the ranks agreed on, never by one rank's own
reading.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any, cast

import pytest
import torch.distributed as dist

from megatron_balance.analysis.backward import USABLE, Stage, microbatch_bytes, step_bytes
from megatron_balance.analysis.memory import Sharding
from megatron_balance.analysis.step_memory import StepMemory
from megatron_balance.errors import InfeasibleError
from megatron_balance.ir.model import Model
from megatron_balance.ir.program import Backward
from megatron_balance.ir.step import StepPlan
from megatron_balance.ir.strategy import Strategy
from megatron_balance.runtime.groups import Groups, single
from megatron_balance.training.keeping import FIRST_AGREEMENT, AgreedMemory, Keeping
from megatron_balance.training.plans import PlannedStep
from tests.support import by_hand

MODEL = Model(2, 2, 64, num_layers=4, hidden_size=64, ffn_size=64, vocab_size=1)
STAGE = Stage(4, Sharding())
STATE = 1e6


def step(tokens: int) -> PlannedStep:
    plan = by_hand.pool("ring", [tokens], 4, heads=(2, 2))
    return PlannedStep(StepPlan.whole((plan,)), 0.0, 0.0)


def predicted(tokens: int, keeping: int) -> float:
    stage = Stage(4, Sharding(), state_bytes=STATE)
    return float(step_bytes([microbatch_bytes(step(tokens).plans, MODEL)], MODEL, stage).peak(keeping).max())


def keeping(
    memory: float | None, asked: Backward = "auto", counted: float | None = None, groups: Groups | None = None
) -> Keeping:
    agreed = AgreedMemory(memory, (STATE,))
    layers = StepMemory(MODEL, (STAGE,), asked)
    return Keeping(agreed, layers, groups or single(), lambda: counted, agreement_every=100)


def test_the_least_memory_and_the_most_state_of_a_stage_are_agreed_on():
    ranks = [(0, 80.0, 5.0), (0, 79.0, 6.0), (1, 81.0, 2.0)]
    assert AgreedMemory.of(ranks) == AgreedMemory(79.0, (6.0, 2.0))
    assert AgreedMemory.of([(0, None, 5.0)]).memory_bytes is None


def test_ranks_with_other_readings_decide_alike():
    """A count of a rank's own device does not enter before the ranks agree."""
    memory = predicted(4000, 2) / USABLE
    decisions = [keeping(memory, counted=counted).decide(step(4000)) for counted in (None, 1.0, 1e15)]
    assert {decision.keeping for decision in decisions} == {2}


def test_shorter_batches_keep_in_more_layers_and_each_change_is_told_once(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("megatron_balance"), "propagate", True)
    caplog.set_level(logging.INFO, "megatron_balance")
    job = keeping(predicted(4000, 2) / USABLE)
    assert [job.decide(step(tokens)).keeping for tokens in (4000, 3999, 400, 4000)] == [2, 2, 4, 2]
    told = [record.message.split(";")[0] for record in caplog.records]
    assert told == ["backward: keep in 2 of 4 layers, replay in 2", "backward: keep", *told[:1]]


def test_a_step_that_runs_again_is_decided_once():
    job = keeping(predicted(4000, 2) / USABLE)
    assert job.decide(step(4000)) is job.decide(step(4000))


def test_what_devices_counted_beyond_the_prediction_leaves_less_for_keeping():
    memory = predicted(4000, 2) / USABLE
    job = keeping(memory, counted=1.2 * predicted(4000, 2))
    found = [job.decide(step(4000 - i)).keeping for i in range(FIRST_AGREEMENT)]
    assert found[:-1] == [2] * (FIRST_AGREEMENT - 1)
    assert found[-1] < 2


def test_the_most_that_any_device_counted_is_agreed_on(monkeypatch):
    """A rank whose own count is as predicted decides as the one whose count is not."""
    memory, excess = predicted(4000, 2) / USABLE, 0.2 * predicted(4000, 2)

    def reduced(most, op, group):
        assert (op, group) == (dist.ReduceOp.MAX, "pool")
        most.clamp_(min=excess)  # another rank's

    monkeypatch.setattr(dist, "get_backend", lambda _: "gloo")
    monkeypatch.setattr(dist, "all_reduce", reduced)
    job = keeping(memory, counted=predicted(4000, 2), groups=replace(single(), pool=cast("Any", "pool")))
    found = [job.decide(step(4000 - i)).keeping for i in range(FIRST_AGREEMENT)]
    assert found[:-1] == [2] * (FIRST_AGREEMENT - 1)
    assert found[-1] < 2


def test_keep_and_replay_are_taken_at_their_word():
    assert keeping(1.0, "keep").decide(step(4000)).keeping == 4
    assert keeping(1e15, "replay").decide(step(4000)).keeping == 0
    assert keeping(None).decide(step(4000)).keeping == 4


def test_a_step_that_fits_in_no_way_is_refused():
    with pytest.raises(InfeasibleError, match=r"this step does not fit: rank \d needs .* What would fit"):
        keeping(predicted(4000, 0) * 0.95).decide(step(4000))


def test_layers_of_a_strategy_are_its_pipelines_own():
    """Two pipelines, one of two stages; the most state of any rank counts on each."""
    strategy = Strategy.parse("tp1-pp1-cp4+tp1-pp2-cp4")
    plan = by_hand.pool("ring", [4000], 4, heads=(2, 2))
    planned = PlannedStep(StepPlan((((0,),), ((1,),)), (plan, plan), (), strategy, (1, 1)), 0.0, 0.0)
    halves = tuple(Stage(2, Sharding(pipeline=2, stage=at)) for at in (0, 1))
    own = (StepMemory(MODEL, (STAGE,)), StepMemory(MODEL, halves))
    agreed = AgreedMemory(None, (STATE, 2 * STATE))
    job = Keeping(
        *(agreed, StepMemory(MODEL, halves, "keep"), single(), lambda: None),
        agreement_every=100,
        of_strategy=lambda given: own if given == strategy else (),
    )
    decision = job.decide(planned)
    assert decision.layers == 4, "of the pipeline without stages"
    assert decision.peak_bytes == pytest.approx(predicted(4000, 4) + STATE)
    assert job.decide(step(4000)).layers == 2, "another strategy is decided for itself"
