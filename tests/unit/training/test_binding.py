"""Plans bound ahead of their step: the same as bound on the spot, errors where the plan is used."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from threading import Event, current_thread, main_thread
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from megatron_balance.compile.pipeline import Projector
from megatron_balance.errors import ConfigError, DataError, InvalidProgramError
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.forest import Segment, Tree, document, over, unless_plain
from megatron_balance.ir.mask import CAUSAL, SlidingWindow
from megatron_balance.ir.model import Model
from megatron_balance.ir.step import Layers
from megatron_balance.planning.step_planner import PlanSpec, StepPlanner
from megatron_balance.runtime import bind as binding
from megatron_balance.runtime.bind import AttentionShape, BindOptions
from megatron_balance.runtime.groups import Groups
from megatron_balance.runtime.lower.lowering import Lowering
from megatron_balance.runtime.lower.steps import describe
from megatron_balance.training.binding import BindAhead, Binder, bind_layers, policies_of
from megatron_balance.training.ledger import DataIdentity, Ledger
from megatron_balance.training.plans import PlannedStep, Samples, StepPlans
from megatron_balance.training.tokens import PoolLengths, Recalled, Sequences, by_nano_batch
from megatron_balance.workloads.documents import DocumentPiece, DocumentStream
from tests.support import by_hand

CPU = torch.device("cpu")
PLAN = by_hand.pool("ring", (40, 24), 2, ranks_per_node=2, heads=(2, 2))
OTHER = by_hand.pool("ring", (40, 25), 2, ranks_per_node=2, heads=(2, 2))


@pytest.fixture
def ahead():
    made = BindAhead()
    yield made
    made.close()


def binder(ahead: BindAhead | None, num_heads: int = 2) -> Binder:
    shape = AttentionShape(num_heads, num_heads, 4)
    return Binder(BindOptions(shape, Groups(1, 2, (0, 1), None), CPU, torch.float32), ahead)


def test_a_plan_prepared_in_the_thread_is_the_one_bound_on_the_spot(ahead, monkeypatch):
    threads = []
    compiled = binding.compile_policies

    def noted(*args, **kwargs):
        threads.append(current_thread())
        return compiled(*args, **kwargs)

    monkeypatch.setattr(binding, "compile_policies", noted)
    one = binder(ahead)
    one.expect(PLAN, ("keep",))
    ahead.submit(lambda: None)
    ahead._prepared[next(iter(ahead._prepared))].result()
    bound, fresh = one.bind(PLAN, ("keep",))[0], binder(None).bind(PLAN, ("keep",))[0]
    assert [thread is main_thread() for thread in threads] == [False, True]
    assert bound.owned.tolist() == fresh.owned.tolist()
    kinds, again = ([type(step) for step in each.phases["forward"].steps] for each in (bound, fresh))
    assert kinds == again
    one.bind(PLAN, ("keep",))[0]  # taken once: the next is bound on the spot
    assert threads[-1] is main_thread()


def test_an_error_of_the_thread_is_raised_where_the_plan_is_used(ahead):
    wrong = binder(ahead, num_heads=3)
    wrong.expect(PLAN, ("keep",))
    ahead._prepared[next(iter(ahead._prepared))].exception()
    with pytest.raises(ConfigError, match="the plan is for 2 query and 2 key-value heads") as raised:
        wrong.bind(PLAN, ("keep",))[0]
    told = f"raised in the thread that binds ahead, of plan {PLAN.fingerprint()}, nano-batch 0"
    assert raised.value.__notes__ == [told]


def test_plans_of_a_step_that_did_not_come_are_dropped(ahead):
    one = binder(ahead)
    one.expect(PLAN, ("keep",))
    one.expect(OTHER, ("keep",))
    ahead.forget_all_but([one.key(OTHER, ("keep",), 0, ("forward", "backward"))])
    assert {key[0] for key in ahead._prepared} == {OTHER.fingerprint()}


def test_a_plan_whose_job_failed_or_whose_turn_has_not_come_is_bound_on_the_spot(ahead, caplog):
    ahead.submit(lambda: 1 // 0)
    one = binder(ahead)
    one.expect(PLAN, ("keep",))
    ahead._prepared[next(iter(ahead._prepared))].result()
    assert "could not be bound ahead" in caplog.text
    assert one.bind(PLAN, ("keep",))[0].num_tokens == 32
    gate = Event()
    ahead.submit(lambda: gate.wait(10) and None)
    one.expect(PLAN, ("keep",))
    assert one.bind(PLAN, ("keep",))[0].num_tokens == 32
    gate.set()


def test_a_plan_is_bound_by_the_policies_that_the_decision_needs(ahead):
    some, all_, none = (SimpleNamespace(keeping=n, kept_share=n / 2) for n in (1, 2, 0))
    found: Any = (some, all_, none, None)
    assert [policies_of(each) for each in found] == [("keep", "replay"), ("keep",), ("replay",), ("replay",)]
    for decision in found:
        bounds = bind_layers(binder(ahead), PLAN, decision)
        assert [bound.policy for bound in bounds.bounds] == list(policies_of(decision))


def test_a_plan_of_both_policies_is_looked_up_once_where_they_agree(monkeypatch):
    # The forward is projected, looked up and gets its tables once; all tables go over together.
    counts = Counter[str]()

    def counted(owner, name):
        held = getattr(owner, name)

        def call(*args, **kwargs):
            counts[name] += 1
            return held(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    counted(Projector, "attention")
    counted(Lowering, "look_up_forward")
    counted(Lowering, "backward")
    counted(binding, "ship")
    bounds = bind_layers(binder(None), PLAN, cast("Any", SimpleNamespace(keeping=1, kept_share=0.5)))
    assert counts == {"attention": 1, "look_up_forward": 1, "backward": 2, "ship": 1}
    kept, replayed = bounds.of_layer(1, CAUSAL), bounds.of_layer(2, CAUSAL)
    alone = binder(None).bind(PLAN, ("replay",))[0]
    one, other, third = (each.phases["forward"] for each in (kept, replayed, alone))
    assert one.steps is other.steps
    assert not any(one.last_uses)
    assert third.last_uses == other.last_uses != one.last_uses
    lines, others = ([describe(step) for step in each.phases["backward"].steps] for each in (alone, replayed))
    assert lines == others
    assert (alone.query_rows, alone.key_rows) == (replayed.query_rows, replayed.key_rows)


def test_new_pairs_are_connected_and_tables_copied_in_the_training_thread(ahead, monkeypatch):
    threads: list[object] = []
    for name in ("connect", "ship"):
        monkeypatch.setattr(binding, name, lambda *_: threads.append(current_thread()))
    one = binder(ahead)
    one.expect(PLAN, ("keep",))
    next(iter(ahead._prepared.values())).result()
    assert not threads
    one.bind(PLAN, ("keep",))[0]
    assert threads == [main_thread()] * 2


def test_layers_of_another_mask_run_another_program_of_the_same_rows():
    window, wide = SlidingWindow(8), SlidingWindow(40)
    two = replace(binder(None), masks=(CAUSAL, window))
    bound = bind_layers(two, PLAN, None)
    causal, windowed = bound.of_layer(1, CAUSAL), bound.of_layer(1, window)
    assert (causal.plan.mask, windowed.plan.mask) == (CAUSAL, window)
    assert causal.owned.tolist() == windowed.owned.tolist()
    assert bound.bounds == (causal, windowed)
    with pytest.raises(InvalidProgramError, match="window_40, and the plan was bound for causal and window_8"):
        bound.of_layer(1, wide)
    # No sequence is longer than the window: one program serves all layers.
    same = bind_layers(replace(two, masks=(CAUSAL, wide)), PLAN, None)
    assert same.of_layer(1, wide) is same.of_layer(1, CAUSAL)
    assert len(same.bounds) == 1


# Documents that wait: over a whole run every one that is drawn is trained once, with its tokens.

CONTEXT = 512
STEPS = 200
THRESHOLDS = (150, 300)

GENERATOR = np.random.default_rng(3)
DOCUMENTS = np.minimum(CONTEXT, (30 * (1 - GENERATOR.random(4000)) ** (-1 / 1.05)).astype(np.int64))
TOKENS = GENERATOR.integers(0, 1 << 40, size=int(DOCUMENTS.sum()))  # each token tells where it is from
STARTS = np.cumsum(DOCUMENTS) - DOCUMENTS


def stream(seed: int = 5) -> DocumentStream:
    # Samples with room: full ones leave fewer steps in which documents wait.
    return DocumentStream(DOCUMENTS, CONTEXT, seed, filling="next_fit")


def tokens_of(piece: DocumentPiece) -> torch.Tensor:
    document, start, stop = piece
    return torch.from_numpy(TOKENS[STARTS[document] + start : STARTS[document] + stop])[:, None]


def tree_of_piece(piece: DocumentPiece) -> Tree:
    # Every third document is plain; others branch by their number.
    document_, start, stop = piece
    length, at = stop - start, 1 + document_ % max(1, (stop - start) // 2)
    if document_ % 3 == 0 or length < 4 or length - at < 2:
        return document(length)
    return Segment(at, -1), Segment(1, 0), Segment(length - at - 1, 0)


@dataclass
class Run:
    # A training run without a model: `replicas` read, and one process plays all of them.
    #
    # What a kill loses is all but `saved`, which a checkpoint has.
    planner: str = "wlb_llm"
    replicas: int = 2
    num_microbatches: int = 4
    seed: int = 5
    steps: int = STEPS
    options: dict[str, object] = field(default_factory=lambda: {"thresholds": THRESHOLDS})
    done: int = 0
    consumed: int = 0
    saved: str = ""
    # Whether documents are trees.
    trees: bool = False

    def __post_init__(self) -> None:
        self.stream = stream(self.seed)
        options = {"tokens_per_rank": int(1.5 * CONTEXT), **self.options}
        spec = PlanSpec(self.planner, Cluster(self.replicas, self.replicas), Model(4, 2, 16), Layers(), options)
        samples = Samples(
            lambda: self.consumed,
            lambda: self.num_microbatches,
            self.replicas,
            self.stream.lengths_of,
            1 << 30,
            remaining=lambda: self.steps - self.done,
            identity=lambda: DataIdentity(self.stream.fingerprint()),
            trees=(lambda n: tuple(map(tree_of_piece, self.stream.sample(n)))) if self.trees else None,
        )
        self.plans = StepPlans(StepPlanner(spec), samples, lambda _: None)
        if self.saved:
            self.plans.restore(*Ledger.from_json(self.saved))

    def step(self, *, dies: bool = False) -> tuple[PlannedStep, list[torch.Tensor], list[DocumentPiece]]:
        # Train a step: its plan, the documents trained as tokens, and the pieces drawn. A step that
        # `dies` counts for nothing.
        draw = self.plans.draw(self.num_microbatches)
        first = self.consumed if draw.first is None else draw.first
        count = draw.num_microbatches * self.replicas
        drawn = [self.stream.sample(n) for n in range(first, first + count)]
        by_rank: list[list[Sequences]] = []
        lengths: list[tuple[int, ...]] = []
        owners: list[np.ndarray] = []
        for m in range(draw.num_microbatches):
            own = drawn[m * self.replicas : (m + 1) * self.replicas]
            by_rank.append([Sequences.of([tokens_of(piece) for piece in sample]) for sample in own])
            lengths.append(tuple(stop - start for sample in own for _, start, stop in sample))
            owners.append(np.repeat(np.arange(self.replicas), [len(sample) for sample in own]))
        of_samples = [drawn[m * self.replicas : (m + 1) * self.replicas] for m in range(draw.num_microbatches)]
        trees = tuple(tuple(tree_of_piece(piece) for sample in own for piece in sample) for own in of_samples)
        trees = trees if self.trees and any(map(unless_plain, trees)) else ()
        planned = self.plans.plan(tuple(lengths), trees)
        shared = PoolLengths(tuple(lengths), tuple(owners), trees=trees)
        again = [(held, at % self.replicas) for at, held in enumerate(planned.recalled)]
        trained: list[torch.Tensor] = []
        for rank in range(self.replicas):
            rows = tuple(
                (held.number, tokens_of(self.stream.sample(held.sample)[held.place]))
                for held, owner in again
                if owner == rank
            )
            recalled = Recalled(
                tuple((held.number, held.length) for held, _ in again),
                tuple(owner for _, owner in again),
                rows,
                planned.recalled_trees,
            )
            mine, apart = by_nano_batch([each[rank] for each in by_rank], shared, planned.step.members, rank, recalled)
            assert apart.lengths == tuple(plan.lengths for plan in planned.plans)
            masks = [over(CAUSAL, each) for each in apart.trees or [()] * len(planned.plans)]
            assert masks == [plan.mask for plan in planned.plans]
            for each in mine:
                trained.extend(torch.split(each.rows[:, 0], list(each.lengths)))
        if not dies:
            self.done += 1
            self.consumed += self.num_microbatches * self.replicas
            self.saved = self.plans.saved()
        return planned, trained, [piece for sample in drawn for piece in sample]

    def killed(self, **changes: object) -> Run:
        # A new process that resumes from the last checkpoint, perhaps otherwise.
        return replace(self, **changes)  # pyright: ignore[reportArgumentType]


def multiset(documents: list[torch.Tensor]) -> Counter[bytes]:
    return Counter(each.numpy().tobytes() for each in documents)


@pytest.mark.parametrize("trees", [False, True])
def test_over_200_steps_kills_other_ranks_and_another_planner_each_document_is_trained_once(trees: bool) -> None:
    run = Run(trees=trees)
    drawn: list[DocumentPiece] = []
    trained: list[torch.Tensor] = []
    waited = recalled = recalled_trees = changed = 0
    while run.done < STEPS:
        if run.done in (40, 90):  # killed inside a step, and resumed
            assert run.plans.end_step().held, "documents wait over the kill"
            run.step(dies=True)
            run = run.killed()
        if run.done == 120 and run.replicas == 2:
            run = run.killed(replicas=4, num_microbatches=2)
            assert run.plans.end_step().held
        if run.done >= 140 and run.planner == "wlb_llm" and run.plans.end_step().held and not changed:
            changed = run.done
            run = run.killed(planner="te_ring", options={"tokens_per_rank": CONTEXT})
        if run.planner == "te_ring" and run.done == changed + 10:
            assert not run.plans.end_step().held, "another planner trains what waited"
            run = run.killed(planner="wlb_llm", options={"thresholds": THRESHOLDS})
        planned, now, new = run.step()
        trained += now
        drawn += new
        ledger = planned.ledger
        assert ledger.drawn == sum(stop - start for _, start, stop in drawn)
        assert ledger.trained == sum(map(len, trained))
        assert ledger.drawn == ledger.trained + ledger.carry.waiting_tokens
        waited = max(waited, len(ledger.held))
        recalled += len(planned.recalled)
        recalled_trees += len(unless_plain(planned.recalled_trees))
        fullest = max(plan.num_tokens for plan in planned.plans)
        assert fullest <= 1.5 * CONTEXT * run.replicas
    assert multiset(trained) == multiset([tokens_of(piece) for piece in drawn])
    assert len(set(drawn)) == len(drawn) or len(drawn) > len(DOCUMENTS), "no sample is drawn twice within an epoch"
    assert not run.plans.end_step().held, "flushed at the end"
    assert changed, "another planner took over while documents waited"
    assert waited >= 4
    assert recalled > 100
    assert (recalled_trees > 20) == trees


def test_the_last_steps_draw_less_and_nothing_waits_behind_them() -> None:
    run = Run(steps=12, options={"thresholds": THRESHOLDS, "tokens_per_rank": CONTEXT})
    counts: list[int] = []
    for _ in range(12):
        counts.append(run.plans.draw(4).num_microbatches)
        run.step()
    assert counts[:6] == [4] * 6
    assert min(counts[-3:]) < 4
    ledger = run.plans.end_step()
    assert (ledger.held, ledger.drawn) == ((), ledger.trained)
    assert ledger.behind > 0, "some of what Megatron counts was not drawn"
    longer = run.killed(steps=14)
    draw = longer.plans.draw(4)
    assert draw.first == run.consumed - ledger.behind, "a longer run goes on where drawing ended"


def test_documents_wait_only_where_the_corpus_is_ours_and_is_read_in_its_order_and_seed() -> None:
    run = Run()
    while sum(each.length for each in run.plans.end_step().held) <= CONTEXT:
        run.step()
    with pytest.raises(ConfigError, match=r"waiting documents are of corpus [0-9a-f]{16}, and this run reads sam"):
        run.killed(seed=6)
    small = {"thresholds": THRESHOLDS, "tokens_per_rank": CONTEXT // 2}
    late = run.killed(steps=run.done + 1, num_microbatches=1, options=small)
    with pytest.raises(ConfigError, match="more than the steps that are left can train"):
        late.plans.draw(1)
    damaged = run.saved.replace(f'"drawn": {run.plans.end_step().drawn}', '"drawn": 1')
    with pytest.raises(ConfigError, match="the account of a run's documents does not add up: 1 tokens drawn"):
        Ledger.from_json(damaged)
    with pytest.raises(ConfigError, match="not the account of a run's documents: OverflowError"):
        Ledger.from_json(run.saved.replace('"held": [[', '"held": [[1e999, ', 1))
    run = Run()
    run.plans.draw(4)
    other = tuple((CONTEXT,) * 2 for _ in range(4))
    with pytest.raises(DataError, match="brought other documents at sample 0 than the corpus has there"):
        run.plans.plan((*other[:3], (CONTEXT, 200)))
    spec = PlanSpec("wlb_llm", Cluster(2, 2), Model(4, 2, 16), Layers(), {"thresholds": THRESHOLDS})
    script = StepPlans(StepPlanner(spec), Samples(lambda: 0, lambda: 4, 2), lambda _: None)
    assert script.draw(4).num_microbatches == 4
    with pytest.raises(ConfigError, match="this run's samples are the script's own; give --data-path"):
        script.plan(((400,), (20,), (30,), (10,)))
