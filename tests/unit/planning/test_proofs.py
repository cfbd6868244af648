"""Proofs beside planning: which steps, how they end, and that they end."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest

from megatron_balance.compile.proof.meaning import NotAloneError
from megatron_balance.errors import InvalidProgramError
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.mask import SlidingWindow
from megatron_balance.ir.model import Model
from megatron_balance.ir.plan import Zone
from megatron_balance.ir.step import EMPTY, Layers, StepPlan
from megatron_balance.ir.strategy import Strategy
from megatron_balance.planners.base import JointStages
from megatron_balance.planning import proofs
from megatron_balance.planning.proofs import FIRST, Proofs, Prover, prove_step
from megatron_balance.planning.step_planner import PlanAhead, PlanSpec, StepPlanner
from tests.support.processes import ended

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


def test_a_step_gives_way_to_the_proof_that_runs_and_the_next_one_takes_its_place(step: StepPlan) -> None:
    prover = Prover(100, lambda *_: time.sleep(60))
    begin = time.monotonic()
    prover.offer(step)
    for _ in range(FIRST + 1):
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
    joint = replace(step, strategy=Strategy.parse("tp1-pp1-cp2"), num_microbatches=(2,))
    assert proofs._due_to(joint, 1) == []


def test_a_part_that_cannot_be_proved_alone_is_proved_with_all(step: StepPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise NotAloneError("all_gather")

    monkeypatch.setattr(proofs, "BY_RANK", 2)
    prove_step(step, 1)
    with pytest.raises(InvalidProgramError, match="sequence 0 is in 2 zones"):
        prove_step(damaged(step), 1)
    monkeypatch.setattr(proofs, "prove_rank", never)
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
    def grows(*_: object) -> None:
        np.ones(1 << 26)  # 512 MiB, in far less than the limit of time

    def fails(*_: object) -> None:
        raise KeyError("a fault of the proof")

    def goes_on(*_: object) -> None:
        end = time.process_time() + 20
        while time.process_time() < end:
            pass

    monkeypatch.setattr(proofs, "LIMIT_BYTES", 1 << 28)
    for check, limit_s in ((grows, 60), (goes_on, 1), (fails, 60)):
        monkeypatch.setattr(proofs, "LIMIT_S", limit_s)
        prover = Prover(1, check)
        prover.offer(step)
        assert prover.outcomes(wait=True) == Proofs(left_out=1)
    assert "proof of a plan: KeyError('a fault of the proof')" in capfd.readouterr().err


def test_plans_of_ticks_are_proved_too(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    monkeypatch.setattr(proofs, "prove", lambda plan, _policy: seen.append(plan.num_ranks))
    spec = replace(SPEC, name="distca", options={"block": 16}, pipeline=JointStages(Cluster(4, 2), 1))
    prove_step(StepPlanner(spec).plan(STEP)[0])
    assert seen.count(2) == 2 * 2
    assert seen.count(4) == 2 * (2 + 1) * 2


def test_plans_of_both_masks_of_a_model_are_proved(monkeypatch: pytest.MonkeyPatch) -> None:
    """The window shows 20 keys, so in the second microbatch of 30 tokens, too, the masks differ."""
    seen: list[str] = []
    monkeypatch.setattr(proofs, "prove", lambda plan, _policy: seen.append(plan.mask.name))
    spec = replace(SPEC, model=replace(SPEC.model, other_attention="window_20"))
    assert PlanSpec.from_json(spec.to_json()).model.masks == spec.model.masks
    step = StepPlanner(spec).plan(STEP)[0]
    prove_step(step, masks=spec.model.masks)
    assert seen == ["causal", "causal", "window_20", "window_20"] * 2
    seen.clear()
    prove_step(step, masks=(*spec.model.masks[:1], SlidingWindow(100)))
    assert seen == ["causal", "causal"] * 2, "no sequence is longer than the window"


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
    with pytest.raises(InvalidProgramError):
        prove_step(damaged(StepPlanner(SPEC).plan(STEP)[0]))


def test_a_proof_ends_with_the_process_that_began_it() -> None:
    code = (
        "import os, signal, time\n"
        "from tests.unit.planning import test_proofs as t\n"
        "prover = t.Prover(1, lambda *_: time.sleep(60))\n"
        "prover.offer(t.StepPlanner(t.SPEC).plan(t.STEP)[0])\n"
        "print(prover._child[0], flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    ran = ended([sys.executable, "-c", code])
    assert ran.returncode == -signal.SIGKILL, ran.stderr
    deadline = time.monotonic() + 20
    while is_running(int(ran.stdout)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not is_running(int(ran.stdout))


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat", encoding="ascii") as stream:
        return stream.read().rpartition(")")[2].split()[0] != "Z"


def test_the_planning_process_ends_with_a_killed_parent_though_another_process_holds_its_pipes() -> None:
    program = (
        "import os, signal, time\n"
        "from megatron_balance.planning.step_planner import PlanAhead\n"
        "from tests.unit.planning.test_proofs import SPEC\n"
        "ahead = PlanAhead(SPEC)\n"
        "ahead.submit(0, ((10,),))\n"
        "assert ahead.take(0) is not None\n"
        "worker = os.fork()  # as a data worker, it inherits the pipes\n"
        "if not worker:\n"
        "    time.sleep(60)\n"
        "    os._exit(0)\n"
        "print(ahead._process._process.pid, worker, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    begun = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert begun.stdout is not None
    planning, worker = map(int, begun.stdout.readline().split())
    try:
        assert begun.wait(30) == -signal.SIGKILL
        deadline = time.monotonic() + 30
        while is_running(planning):
            assert time.monotonic() < deadline, "the planning process goes on"
            time.sleep(0.05)
        assert is_running(worker), "it held the pipes all along"
    finally:
        os.kill(worker, signal.SIGKILL)
        begun.stdout.close()
