"""Documents that wait: over a whole run every one that is drawn is trained once, with its tokens."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from megatron_balance.errors import ConfigError, DataError
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.model import Model
from megatron_balance.ir.step import Layers
from megatron_balance.planning.step_planner import PlanSpec, StepPlanner
from megatron_balance.training.ledger import DataIdentity, Ledger
from megatron_balance.training.plans import PlannedStep, Samples, StepPlans
from megatron_balance.training.tokens import PoolLengths, Recalled, Sequences, by_nano_batch
from megatron_balance.workloads.documents import DocumentPiece, DocumentStream

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
    """Tokens [n, 1] of a piece of a document."""
    document, start, stop = piece
    return torch.from_numpy(TOKENS[STARTS[document] + start : STARTS[document] + stop])[:, None]


@dataclass
class Run:
    """A training run without a model: `replicas` read, and one process plays all of them.

    What a kill loses is all but `saved`, which a checkpoint has.
    """

    planner: str = "wlb_llm"
    replicas: int = 2
    num_microbatches: int = 4
    seed: int = 5
    steps: int = STEPS
    options: dict[str, object] = field(default_factory=lambda: {"thresholds": THRESHOLDS})
    done: int = 0
    consumed: int = 0
    saved: str = ""

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
        )
        self.plans = StepPlans(StepPlanner(spec), samples, lambda _: None)
        if self.saved:
            self.plans.restore(*Ledger.from_json(self.saved))

    def step(self, *, dies: bool = False) -> tuple[PlannedStep, list[torch.Tensor], list[DocumentPiece]]:
        """Train a step: its plan, the documents trained as tokens, and the pieces drawn. A step that
        `dies` counts for nothing."""
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
        planned = self.plans.plan(tuple(lengths))
        shared = PoolLengths(tuple(lengths), tuple(owners))
        again = [(held, at % self.replicas) for at, held in enumerate(planned.recalled)]
        trained: list[torch.Tensor] = []
        for rank in range(self.replicas):
            rows = tuple(
                (held.number, tokens_of(self.stream.sample(held.sample)[held.place]))
                for held, owner in again
                if owner == rank
            )
            recalled = Recalled(
                tuple((held.number, held.length) for held, _ in again), tuple(owner for _, owner in again), rows
            )
            mine, apart = by_nano_batch([each[rank] for each in by_rank], shared, planned.step.members, rank, recalled)
            assert apart.lengths == tuple(plan.lengths for plan in planned.plans)
            for each in mine:
                trained.extend(torch.split(each.rows[:, 0], list(each.lengths)))
        if not dies:
            self.done += 1
            self.consumed += self.num_microbatches * self.replicas
            self.saved = self.plans.saved()
        return planned, trained, [piece for sample in drawn for piece in sample]

    def killed(self, **changes: object) -> Run:
        """A new process that resumes from the last checkpoint, perhaps otherwise."""
        same = {
            name: getattr(self, name)
            for name in ("planner", "replicas", "num_microbatches", "seed", "steps", "options", "done", "consumed")
        }
        return Run(**{**same, "saved": self.saved, **changes})  # pyright: ignore[reportArgumentType]


def multiset(documents: list[torch.Tensor]) -> Counter[bytes]:
    return Counter(each.numpy().tobytes() for each in documents)


def test_over_200_steps_kills_other_ranks_and_another_planner_each_document_is_trained_once() -> None:
    run = Run()
    drawn: list[DocumentPiece] = []
    trained: list[torch.Tensor] = []
    waited = recalled = changed = 0
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
        fullest = max(plan.num_tokens for plan in planned.plans)
        assert fullest <= 1.5 * CONTEXT * run.replicas
    assert multiset(trained) == multiset([tokens_of(piece) for piece in drawn])
    assert len(set(drawn)) == len(drawn) or len(drawn) > len(DOCUMENTS), "no sample is drawn twice within an epoch"
    assert not run.plans.end_step().held, "flushed at the end"
    assert changed, "another planner took over while documents waited"
    assert waited >= 4
    assert recalled > 100


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


def test_a_carry_of_another_corpus_or_seed_is_refused() -> None:
    run = Run()
    while sum(each.length for each in run.plans.end_step().held) <= CONTEXT:
        run.step()
    with pytest.raises(
        ConfigError, match=r"waiting documents are of corpus [0-9a-f]{16}, and this run reads samples of"
    ):
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


def test_documents_wait_only_where_the_corpus_is_ours_and_is_read_in_its_order() -> None:
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
