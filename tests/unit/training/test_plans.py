"""Steps of a training job: what they carry, through reruns, checkpoints and plans made ahead."""

import logging
from collections.abc import Hashable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, cast

import pytest
import torch.distributed as dist

from megatron_balance.analysis.backward import USABLE, Stage, microbatch_bytes, step_bytes
from megatron_balance.analysis.memory import Sharding
from megatron_balance.analysis.step_memory import StepMemory
from megatron_balance.errors import ConfigError, InfeasibleError, InvalidProgramError, PlanMismatchError
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.forest import Forest, Segment, document
from megatron_balance.ir.model import Model
from megatron_balance.ir.program import Backward
from megatron_balance.ir.step import EMPTY, Carry, Layers, Lengths, StepPlan, Trees
from megatron_balance.ir.strategy import Strategy
from megatron_balance.planners import PLANNERS
from megatron_balance.planners.base import Planner, StepContext
from megatron_balance.planning.proofs import Proofs
from megatron_balance.planning.step_planner import PlanSpec, StepPlanner, _Ready
from megatron_balance.runtime.groups import Groups, single
from megatron_balance.training.keeping import FIRST_AGREEMENT, AgreedMemory, Keeping
from megatron_balance.training.ledger import DataIdentity, HeldDocument, Ledger
from megatron_balance.training.plans import PlannedStep, Samples, StepPlans
from tests.support import by_hand

SAMPLES = tuple((10 + n, 5) for n in range(12))


@dataclass(frozen=True, slots=True)
class CountingOptions:
    tokens_per_rank: int | None = None


def counting(lengths: Lengths, context: StepContext, carry: Carry, /) -> tuple[StepPlan, Carry]:
    step, _ = context.planner("te_ring", {})(lengths, context, EMPTY)
    seen = [] if carry.is_empty else carry.value()
    return step, Carry.of("counting", [*seen, lengths[0][0]]) if context.may_carry else EMPTY


@pytest.fixture(autouse=True)
def planner(monkeypatch: pytest.MonkeyPatch) -> StepPlanner:
    monkeypatch.setitem(PLANNERS, "counting", Planner(None, CountingOptions, plan_step=counting))
    return StepPlanner(PlanSpec("counting", Cluster(2, 2), Model(4, 2, 16), Layers(), {}))


class Ahead:
    # The planning process, in this one.
    def __init__(self, planner: StepPlanner) -> None:
        self.planner, self.carry = planner, EMPTY
        self.answers: dict[Hashable, _Ready] = {}
        self.asked: list[Hashable] = []
        self.proofs = Proofs()

    def submit(
        self, key: Hashable, lengths: Sequence[Sequence[int]], carry: Carry | None = None, trees: Trees = ()
    ) -> None:
        before = self.carry if carry is None else carry
        step, self.carry = self.planner.plan(lengths, before, trees=trees)
        self.answers[key] = _Ready(step, before, self.carry, 1.0, 0.0)
        self.asked.append(key)

    def take(self, key: Hashable) -> _Ready | None:
        return self.answers.pop(key, None)

    def peek(self, key: Hashable) -> StepPlan | None:
        return self.answers[key].step if key in self.answers else None

    def forget(self) -> None:
        self.answers.clear()

    def close(self) -> None:
        pass


class Job:
    # One microbatch of one sample a step.
    def __init__(self, planner: StepPlanner, *, ahead: bool = False, evaluation: bool = False) -> None:
        self.consumed = 0
        self.compared: list[str] = []
        self.ahead = Ahead(planner) if ahead else None
        samples = Samples(lambda: self.consumed, lambda: 1, 1, SAMPLES.__getitem__, len(SAMPLES))
        self.plans = StepPlans(
            planner,
            samples,
            self.compared.append,
            ahead=self.ahead,  # pyright: ignore[reportArgumentType]
            evaluation=evaluation,
        )

    def step(self, sample: int | None = None, others: str | None = None) -> Carry:
        # Plan and end a step; `sample`: read in place of the one that comes; `others`: what rank 1
        # announces, in place of the same.
        own = self.plans.draw(1).fingerprint
        lengths = (SAMPLES[self.consumed if sample is None else sample],)
        self.plans.plan(lengths, announced={0: own, 1: own if others is None else others})
        self.consumed += 1
        return self.plans.end_step().carry


def carried(*samples: int) -> Carry:
    return Carry.of("counting", [SAMPLES[n][0] for n in samples])


@pytest.mark.parametrize("ahead", [False, True])
def test_every_step_is_planned_with_what_the_one_before_carried(planner: StepPlanner, ahead: bool) -> None:
    job = Job(planner, ahead=ahead)
    assert job.plans.coming() is None, "nothing is asked for before the first step"
    assert [job.step() for _ in range(4)] == [carried(*range(n)) for n in (1, 2, 3, 4)]
    coming = job.plans.coming()
    assert (coming is None) == (not ahead)
    if job.ahead is not None:
        assert job.ahead.asked == [(n, 1) for n in (1, 2, 3, 4, 5)], "each step once"
        assert job.plans.plan((SAMPLES[4],)).step is coming


def test_every_step_is_compared_and_a_difference_names_step_and_planner(planner: StepPlanner) -> None:
    job = Job(planner, evaluation=True)
    for _ in range(6):
        job.step()
    assert len(job.compared) == 6, "what is evaluated is not known before"
    assert job.step() == EMPTY, "and carries nothing"

    def disagree(_fingerprint: str) -> None:
        raise PlanMismatchError("ranks planned differently: rank 1 has another")

    plans = StepPlans(planner, Samples(lambda: 40, lambda: 1, 1), disagree)
    with pytest.raises(PlanMismatchError, match="step at sample 40, planner counting: ranks planned differently"):
        plans.plan(((30, 5),))


@pytest.mark.parametrize("name", ["counting", "te_ring"])
@pytest.mark.parametrize("ahead", [False, True])
def test_a_plan_made_before_its_samples_are_read_is_compared_with_their_lengths(name: str, ahead: bool) -> None:
    job = Job(StepPlanner(PlanSpec(name, Cluster(2, 2), Model(4, 2, 16), Layers(), {})), ahead=ahead)
    for _ in range(3):
        job.step()
    assert not job.compared, "in no collective of its own"
    with pytest.raises(PlanMismatchError, match=f"step at sample 3, planner {name}: .* but rank 1 has none"):
        job.step(others="")
    with pytest.raises(PlanMismatchError, match=f"step at sample 3, planner {name}: .* but rank 1 has 0123"):
        job.step(others="0123456789abcdef")
    job.step(sample=9)
    job.step(sample=9)
    assert len(job.compared) == 2, "plans of other samples than were expected"
    if name == "te_ring":
        assert not job.plans.draw(1).fingerprint, "no more plans of samples that do not come"


def test_what_is_carried_is_compared_and_a_plan_refused_before_reading_is_refused_once_all_have_read(
    planner: StepPlanner,
) -> None:
    resumed = Job(planner)
    resumed.plans.restore(Ledger(carried(7)))
    assert resumed.plans.draw(1).fingerprint != Job(planner).plans.draw(1).fingerprint
    spec = PlanSpec("zeppelin", Cluster(2, 2), Model(4, 2, 16), Layers(), {"tokens_per_rank": 4})
    job = Job(StepPlanner(spec))
    assert not job.plans.draw(1).fingerprint
    with pytest.raises(InfeasibleError, match="tokens"):
        job.step()


def test_a_plan_whose_proof_failed_ends_the_run_at_the_next_step(planner: StepPlanner) -> None:
    job = Job(planner, ahead=True)
    assert job.ahead is not None
    job.step()
    job.ahead.proofs = Proofs(proved=2)
    job.plans.draw(1)
    assert job.plans.plan((SAMPLES[1],)).proofs.proved == 2
    job.consumed += 1
    job.ahead.proofs = Proofs(2, 0, "step plan 0123: rank 1 lacks keys")
    with pytest.raises(InvalidProgramError, match=r"may be wrong: step plan 0123: rank 1 lacks keys\. Go back to a"):
        job.step()


def test_a_step_that_runs_again_carries_once_and_a_checkpoint_inside_it_has_what_it_began_with(
    planner: StepPlanner,
) -> None:
    job = Job(planner)
    saved = job.step()
    first = job.plans.plan((SAMPLES[1],))
    assert job.plans.plan((SAMPLES[1],)) is first
    assert saved == carried(0), "nobody ended the step yet"
    resumed = Job(planner)
    resumed.consumed = 1
    resumed.plans.restore(Ledger(saved))
    assert resumed.plans.plan((SAMPLES[1],)).step == first.step
    assert resumed.step() == job.step() == carried(0, 1)


OURS = DataIdentity("0123")
SCRIPTS = DataIdentity.of_script({"--seed": "1", "corpus 1": "9 bytes ab"}, {"corpus 1": "here"}, {0: "aa", 4: "bb"})


def resumed(planner: StepPlanner, consumed: int, here: DataIdentity | None) -> StepPlans:
    samples = Samples(lambda: consumed, lambda: 1, 1, identity=None if here is None else lambda: here)
    return StepPlans(planner, samples, lambda _: None)


def test_other_samples_than_the_checkpoints_are_refused_until_they_are_accepted_by_name(planner: StepPlanner) -> None:
    for known in (OURS, SCRIPTS):
        _, saved = Ledger.from_json(resumed(planner, 3, known).saved())
        assert saved == known, "it is saved whether or not documents wait"
    text = Ledger().to_json(SCRIPTS)
    for right, damaged in (('"4":', '"four":'), ('"samples":', '"some":'), ('{"--seed"', '["')):
        with pytest.raises(ConfigError, match="not "):
            Ledger.from_json(text.replace(right, damaged))
    unknown, other, ledger = DataIdentity(), DataIdentity("4567"), Ledger()
    for data, here in ((OURS, OURS), (SCRIPTS, SCRIPTS), (unknown, None)):
        resumed(planner, 3, here).restore(ledger, data)
    for data, here in ((OURS, other), (unknown, other), (SCRIPTS, OURS)):
        resumed(planner, 0, here).restore(ledger, data)
    refused = ((OURS, other, "0123"), (OURS, None, "0123"), (unknown, other, "plain"), (OURS, SCRIPTS, "0123"))
    for data, here, name in (*refused, (SCRIPTS, None, SCRIPTS.fingerprint), (SCRIPTS, OURS, SCRIPTS.fingerprint)):
        with pytest.raises(ConfigError, match=f"Going on at sample 3 would repeat.*accepted_data: {name}"):
            resumed(planner, 3, here).restore(ledger, data)
        with pytest.raises(ConfigError, match="accepted_data"):
            resumed(planner, 3, here).restore(ledger, data, accepted="another")
        resumed(planner, 3, here).restore(ledger, data, accepted=name)


@pytest.mark.parametrize(
    ("facts", "samples", "told"),
    [
        ({"--seed": "2"}, {0: "cc"}, r"--seed was 1 and is 2\. Going on"),
        ({"corpus 1": "8 bytes cd"}, {}, r"corpus 1 was 9 bytes ab \(here\) and is 8 bytes cd \(there\)"),
        ({"blend": "0.5, 0.5"}, {}, "blend was nothing and is 0.5, 0.5"),
        ({}, {0: "cc"}, r"sample 0 has other tokens \(1 of 1 that were compared.*--train-iters"),
        ({}, {4: "cc"}, None),
    ],
    ids=["seed", "corpus", "another fact", "order", "order behind what was trained"],
)
def test_a_refusal_says_what_of_a_scripts_data_changed(
    planner: StepPlanner, facts: dict[str, str], samples: dict[int, str], told: str | None
) -> None:
    # Where it lies is told, and decides nothing; nor does a sample that nobody trained.
    here = DataIdentity.of_script({**SCRIPTS.facts, **facts}, {"corpus 1": "there"}, {**SCRIPTS.samples, **samples})
    with nullcontext() if told is None else pytest.raises(ConfigError, match=told):
        resumed(planner, 3, here).restore(Ledger(), SCRIPTS)


def test_a_checkpoint_that_does_not_know_its_data_goes_on_in_a_scripts_and_says_so(
    planner: StepPlanner, caplog: pytest.LogCaptureFixture
) -> None:
    # Whoever takes a plan into a run that plain Megatron began; nothing was trained at sample 0.
    for consumed, told in ((0, 0), (3, 1)):
        resumed(planner, consumed, SCRIPTS).restore(Ledger(), DataIdentity())
        assert caplog.text.count("they were not compared with the script's") == told


def test_a_step_of_other_lengths_mends_the_chain_of_plans_made_ahead(planner: StepPlanner) -> None:
    job = Job(planner, ahead=True)
    assert job.ahead is not None
    job.step()
    job.step(sample=9)
    assert job.step() == carried(0, 9, 2), "planned on the spot, or ahead with the carry of what was read"
    assert job.step() == carried(0, 9, 2, 3)
    assert job.ahead.asked.count((2, 1)) == 2, "what followed the wrong carry was asked for again"


def test_what_another_planner_held_back_is_not_restored_where_nobody_can_train_it(planner: StepPlanner) -> None:
    carry = Carry.of("delays", [], ((-1, 5),))
    with pytest.raises(ConfigError, match="planner counting cannot train the 1 sequences that planner delays held"):
        Job(planner).plans.restore(Ledger(carry, (HeldDocument(-1, 0, 1, 5),), drawn=5))


# How many layers of a training step keep: by what the ranks agreed on, never by one rank's own
# reading.

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


def test_ranks_decide_alike_by_the_least_memory_and_the_most_state_and_take_keep_and_replay_at_their_word():
    ranks = [(0, 80.0, 5.0), (0, 79.0, 6.0), (1, 81.0, 2.0)]
    assert AgreedMemory.of(ranks) == AgreedMemory(79.0, (6.0, 2.0))
    assert AgreedMemory.of([(0, None, 5.0)]).memory_bytes is None
    memory = predicted(4000, 2) / USABLE
    decisions = [keeping(memory, counted=counted).decide(step(4000)) for counted in (None, 1.0, 1e15)]
    assert {decision.keeping for decision in decisions} == {2}, "a rank's own count does not enter before that"
    assert keeping(1.0, "keep").decide(step(4000)).keeping == 4
    assert keeping(1e15, "replay").decide(step(4000)).keeping == 0
    assert keeping(None).decide(step(4000)).keeping == 4
    with pytest.raises(InfeasibleError, match=r"this step does not fit: rank \d needs .* What would fit"):
        keeping(predicted(4000, 0) * 0.95).decide(step(4000))


def test_shorter_batches_keep_in_more_layers_and_each_change_is_told_once(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("megatron_balance"), "propagate", True)
    caplog.set_level(logging.INFO, "megatron_balance")
    job = keeping(predicted(4000, 2) / USABLE)
    assert [job.decide(step(tokens)).keeping for tokens in (4000, 3999, 400, 4000)] == [2, 2, 4, 2]
    assert job.decide(step(4000)) is job.decide(step(4000)), "a step that runs again is decided once"
    told = [record.message.split(";")[0] for record in caplog.records]
    assert told == ["backward: keep in 2 of 4 layers, replay in 2", "backward: keep", *told[:1]]


@pytest.mark.parametrize("own", [True, False])
def test_what_devices_counted_beyond_the_prediction_leaves_less_for_keeping(own, monkeypatch):
    memory, excess = predicted(4000, 2) / USABLE, 0.2 * predicted(4000, 2)

    def reduced(most, op, group):
        assert (op, group) == (dist.ReduceOp.MAX, "pool")
        most.clamp_(min=excess)  # another rank's

    monkeypatch.setattr(dist, "get_backend", lambda _: "gloo")
    monkeypatch.setattr(dist, "all_reduce", reduced)
    groups = None if own else replace(single(), pool=cast("Any", "pool"))
    job = keeping(memory, counted=predicted(4000, 2) + excess * own, groups=groups)
    found = [job.decide(step(4000 - i)).keeping for i in range(FIRST_AGREEMENT)]
    assert found[:-1] == [2] * (FIRST_AGREEMENT - 1)
    assert found[-1] < 2


def test_layers_of_a_strategy_are_its_pipelines_own():
    # Two pipelines, one of two stages; the most state of any rank counts on each.
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
    assert len(decision.numbers) == 4, "of the pipeline without stages"
    assert decision.peak_bytes == pytest.approx(predicted(4000, 4) + STATE)
    assert len(job.decide(step(4000)).numbers) == 2, "another strategy is decided for itself"


@pytest.mark.parametrize("evaluation", [False, True])
def test_equal_lengths_of_other_trees_are_planned_anew(planner: StepPlanner, evaluation: bool) -> None:
    job = Job(planner, evaluation=evaluation)
    lengths = (SAMPLES[0],)
    flat = job.plans.plan(lengths)
    shapes = [((Segment(6, -1), Segment(1, 0), Segment(3, above)), document(5)) for above in (0, 1)]
    for trees in shapes:
        planned = job.plans.plan(lengths, (trees,))
        assert job.plans.plan(lengths, (trees,)) is planned, "on a rerun the same plan"
        (plan,) = planned.plans
        assert plan.mask == Forest(trees)
    assert len({*job.compared}) == 3, "ranks compare other fingerprints"
    assert job.plans.plan(lengths).plans == flat.plans


def test_full_segments_that_a_data_set_announces_are_refused() -> None:
    def told(full: bool) -> Samples:
        tree = (Segment(4, -1, full), Segment(3, 0))
        return Samples(lambda: 0, lambda: 1, 1, lambda _: (7,), 1, trees=lambda _: (tree,))

    assert told(False).step_trees(0, 1) == (((Segment(4, -1), Segment(3, 0)),),)
    with pytest.raises(ConfigError, match="sample_trees: expected causal segments"):
        told(True).step_trees(0, 1)
