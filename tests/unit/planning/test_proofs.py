"""Proofs beside planning: which steps, how they end, and that they end."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import pytest

from megatron_balance import Cluster, Model
from megatron_balance.compile.proof.meaning import NotAloneError
from megatron_balance.errors import InvalidProgramError
from megatron_balance.ir import mask, strategy
from megatron_balance.ir.plan import MicrobatchPlan, Zone
from megatron_balance.ir.step import EMPTY, Layers, StepPlan
from megatron_balance.planners.base import JointStages
from megatron_balance.planning import proofs
from megatron_balance.planning.proofs import FIRST, Proofs, Prover, prove_step
from megatron_balance.planning.step_planner import PlanAhead, PlanSpec, StepPlanner

SPEC = PlanSpec("te_ring", Cluster(2, 2), Model(4, 2, 16), Layers(), {}, prove_every=1)
STEP = ((100, 90), (30,))

# A child is forked from the process of the tests, which other tests may have given threads.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")


@pytest.fixture(autouse=True)
def on_busy_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Proofs that the tests wait for take their turn as the tests do."""
    monkeypatch.setattr(proofs, "NICENESS", 0)


@pytest.fixture
def step() -> StepPlan:
    return StepPlanner(SPEC).plan(STEP)[0]


def damaged(step: StepPlan) -> StepPlan:
    """The step with a key and value head less in its last plan than its queries need."""
    (zone,) = step.plans[-1].zones
    assert isinstance(zone, Zone)
    return replace(step, plans=(*step.plans[:-1], replace(step.plans[-1], zones=(zone, zone))))


def test_the_first_steps_are_proved_and_then_every_so_many(step: StepPlan) -> None:
    prover, proved = Prover(4, lambda *_: None), list[int]()
    for _ in range(10):
        prover.offer(step)
        proved.append(prover.outcomes(wait=True).proved)
    assert proved == [1, 2, FIRST, FIRST, 4, 4, 4, 4, 5, 5]
    none = Prover(0)
    none.offer(step)
    assert none.outcomes(wait=True) == Proofs()
    # A step gives way to the proof that runs, and the next one takes its place.
    prover = Prover(100, lambda *_: time.sleep(60))
    begin = time.monotonic()
    for _ in range(FIRST + 2):
        prover.offer(step)
    assert time.monotonic() - begin < 10, "it waited"
    prover.close()
    assert prover.outcomes() == Proofs(left_out=1)
    prover = Prover(100, lambda *_: None)
    prover._offered, prover._due = FIRST + 1, True
    prover.offer(step)
    assert prover.outcomes(wait=True) == Proofs(proved=1)


def test_of_many_ranks_each_proves_its_own_part_and_of_few_the_first_proves_all(
    step: StepPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    def proved(rank: int | None) -> list[tuple[str, int | None]]:
        calls: list[tuple[str, int | None]] = []
        monkeypatch.setattr(proofs, "prove", lambda *_: calls.append(("all", None)))
        monkeypatch.setattr(proofs, "prove_rank", lambda _, own, __: calls.append(("part", own)))
        prove_step(step, rank)
        return calls

    plans = 2 * len(step.plans)
    assert proved(None) == proved(0) == [("all", None)] * plans
    assert proved(1) == []
    idle = Prover(1, rank=1)
    idle.offer(step)
    assert idle.outcomes(wait=True) == Proofs(), "it has nothing to prove"
    monkeypatch.setattr(proofs, "BY_RANK", 2)
    assert proved(1) == [("part", 1)] * plans
    assert proved(None) == [("all", None)] * plans
    joint = replace(step, strategy=strategy.Strategy.parse("tp1-pp1-cp2"), num_microbatches=(2,))
    assert proofs._due_to(joint, 1) == []


def test_a_part_that_cannot_be_proved_alone_is_proved_with_all(step: StepPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proofs, "BY_RANK", 2)
    prove_step(step, 1)
    with pytest.raises(InvalidProgramError, match="sequence 0 is in 2 zones"):
        prove_step(damaged(step), 1)
    monkeypatch.setattr(proofs, "prove_rank", Mock(side_effect=NotAloneError("all_gather")))
    whole: list[object] = []
    monkeypatch.setattr(proofs, "prove", lambda plan, _: whole.append(plan))
    prove_step(step, 1)
    assert whole == [plan for plan in step.plans for _ in range(2)]


def test_all_plans_are_proved_and_one_that_does_not_hold_is_named(step: StepPlan) -> None:
    prover = Prover(1)
    for each in (step, damaged(step), step):
        prover.offer(each)
        outcomes = prover.outcomes(wait=True)
    assert (outcomes.proved, outcomes.left_out) == (2, 0)
    assert outcomes.wrong.startswith(f"step plan {damaged(step).fingerprint()}: plan of te_ring: ")
    assert "is in 2 zones" in outcomes.wrong


def test_a_proof_that_needs_more_than_there_is_is_left_out(
    step: StepPlan, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def goes_on(*_: object) -> None:
        while time.process_time() < 120:
            pass

    fails = Mock(side_effect=KeyError("a fault of the proof"))
    monkeypatch.setattr(proofs, "LIMIT_BYTES", 1 << 28)  # less than 512 MiB, which are taken in far less than the limit
    for check, limit_s in ((lambda *_: np.ones(1 << 26), 60), (goes_on, 1), (fails, 60)):
        monkeypatch.setattr(proofs, "LIMIT_S", limit_s)
        prover = Prover(1, check)
        prover.offer(step)
        assert prover.outcomes(wait=True) == Proofs(left_out=1)
    assert "proof of a plan: KeyError('a fault of the proof')" in capfd.readouterr().err


def test_plans_of_ticks_and_of_both_masks_of_a_model_are_proved(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[MicrobatchPlan] = []
    monkeypatch.setattr(proofs, "prove", lambda plan, _policy: seen.append(plan))
    spec = replace(SPEC, name="distca", options={"block": 16}, pipeline=JointStages(Cluster(4, 2), 1))
    prove_step(StepPlanner(spec).plan(STEP)[0])
    ranks = [plan.num_ranks for plan in seen]
    assert (ranks.count(2), ranks.count(4)) == (2 * 2, 2 * (2 + 1) * 2)
    seen.clear()
    # The window shows 20 keys, so in the second microbatch of 30 tokens, too, the masks differ.
    spec = replace(SPEC, model=replace(SPEC.model, other_attention="window_20"))
    assert PlanSpec.from_json(spec.to_json()).model.masks == spec.model.masks
    step = StepPlanner(spec).plan(STEP)[0]
    prove_step(step, masks=spec.model.masks)
    assert [plan.mask.name for plan in seen] == ["causal", "causal", "window_20", "window_20"] * 2
    seen.clear()
    prove_step(step, masks=(*spec.model.masks[:1], mask.SlidingWindow(100)))
    assert [plan.mask.name for plan in seen] == ["causal", "causal"] * 2, "no sequence is longer than the window"


def test_the_planning_process_proves_what_it_plans_and_says_so() -> None:
    ahead = PlanAhead(SPEC)
    try:
        deadline, asked = time.monotonic() + 60, 0
        while not ahead.proofs.proved and time.monotonic() < deadline:
            ahead.submit(asked, STEP, EMPTY)
            assert ahead.take(asked) is not None
            asked += 1
            time.sleep(0.2)  # a proof gets what nobody else wants
    finally:
        ahead.close()
    assert ahead.proofs.proved
    assert (ahead.proofs.left_out, ahead.proofs.wrong) == (0, "")


def is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as stream:
            return stream.read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_proof_and_the_planning_process_end_with_the_process_that_began_them() -> None:
    # Though another process holds the pipes of the planning process.
    program = (
        "import os, signal, time\n"
        "from megatron_balance.planning.step_planner import PlanAhead\n"
        "from tests.unit.planning import test_proofs as t\n"
        "prover = t.Prover(1, lambda *_: time.sleep(60))\n"
        "prover.offer(t.StepPlanner(t.SPEC).plan(t.STEP)[0])\n"
        "ahead = PlanAhead(t.SPEC)\n"
        "ahead.submit(0, ((10,),))\n"
        "assert ahead.take(0) is not None\n"
        "worker = os.fork()  # as a data worker, it inherits the pipes\n"
        "if not worker:\n"
        "    time.sleep(60)\n"
        "    os._exit(0)\n"
        "print(prover._child[0], ahead._process._process.pid, worker, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    begun = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert begun.stdout is not None
    proof, planning, worker = map(int, begun.stdout.readline().split())
    try:
        assert begun.wait(30) == -signal.SIGKILL
        deadline = time.monotonic() + 30
        while is_running(proof) or is_running(planning):
            assert time.monotonic() < deadline, "one of them goes on"
            time.sleep(0.05)
        assert is_running(worker), "it held the pipes all along"
    finally:
        os.kill(worker, signal.SIGKILL)
        begun.stdout.close()
