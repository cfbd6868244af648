"""Plans for the steps of a training job, ahead of time where the coming lengths are known, on the spot
otherwise; and how ranks compare them.
"""

import dataclasses
import hashlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from types import MappingProxyType

import torch
import torch.distributed as dist

from megatron_balance.errors import BalanceError, ConfigError, DataError, InvalidProgramError, PlanMismatchError
from megatron_balance.ir.forest import Tree, unless_plain
from megatron_balance.ir.plan import MicrobatchPlan
from megatron_balance.ir.step import EMPTY, Carry, Lengths, StepPlan, Trees, by_number
from megatron_balance.planning.proofs import NONE, Proofs
from megatron_balance.planning.step_planner import PlanAhead, StepPlanner
from megatron_balance.runtime.groups import Groups
from megatron_balance.training.ledger import BEGINNING, DataIdentity, HeldDocument, Ledger
from megatron_balance.training.pool import least_and_most

log = logging.getLogger(__name__)
HORIZON = 2  # steps planned ahead
PLAIN = "plain"  # the name of samples that nobody knows, in `accepted_data`


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """One step's plan. `plan_s`: of planning, wherever it ran; `wait_s`: that the step waited."""

    step: StepPlan
    plan_s: float
    wait_s: float
    carry: Carry = EMPTY
    recalled: tuple[HeldDocument, ...] = ()  # documents of earlier steps that this one trains, by their number in it
    recalled_trees: tuple[Tree, ...] = ()  # of each of those; empty: all that waited are plain documents
    ledger: Ledger = BEGINNING
    planner: str = ""  # name of the planner that was asked; it may have asked others
    announced: bool = False  # whether ranks compared it with the lengths that they shared, in no collective of its own
    proofs: Proofs = NONE  # of plans made ahead on this rank, so far

    @property
    def plans(self) -> tuple[MicrobatchPlan, ...]:
        """Of every nano-batch, microbatch by microbatch."""
        return self.step.plans

    def own_plans_of(self, pipeline: int) -> tuple[range, ...]:
        """By microbatch of a pipeline, which of `plans` are its nano-batches'."""
        own = self.step.pipelines[pipeline]
        return self.step.plans_of[own.start : own.stop]

    @property
    def fingerprint(self) -> str:
        """Sixteen hex digits of every decision, what is carried included."""
        step = self.step.fingerprint()
        return step if self.carry.is_empty else hashlib.sha256((step + self.carry.to_json()).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Samples:
    """The training samples of a pool, dealt in order."""

    consumed: Callable[[], int]
    num_microbatches: Callable[[], int]
    # Samples of each microbatch.
    per_microbatch: int
    # Of the sequences of one sample, known without reading it; None: they are not ours, and nothing
    # is planned ahead or held back.
    lengths: Callable[[int], tuple[int, ...]] | None = None
    total: int = 0
    # Steps of the run, this one included.
    remaining: Callable[[], int] | None = None
    identity: Callable[[], DataIdentity] | None = None
    # As `lengths`, of their trees; None: all are plain documents, or nobody knows them before.
    trees: Callable[[int], tuple[Tree, ...]] | None = None

    def step(self, first: int, num_microbatches: int) -> Lengths | None:
        """Lengths of the step that begins at sample `first`; None: the samples end before it does."""
        size = self.per_microbatch
        if self.lengths is None or first + num_microbatches * size > self.total:
            return None
        starts = range(first, first + num_microbatches * size, size)
        return tuple(tuple(n for index in range(start, start + size) for n in self.lengths(index)) for start in starts)

    def step_trees(self, first: int, num_microbatches: int) -> Trees:
        """The trees of that step; empty: all are plain documents, or not known. ConfigError: one has a
        full segment.
        """
        if self.trees is None:
            return ()
        size = self.per_microbatch
        starts = range(first, first + num_microbatches * size, size)
        found = tuple(tuple(chain.from_iterable(map(self.trees, range(start, start + size)))) for start in starts)
        if any(segment.full for tree in chain.from_iterable(found) for segment in tree):
            raise ConfigError(
                "sample_trees: expected causal segments, got one that sees itself both ways, which position_ids do not "
                "say; train full segments in plain PyTorch (docs/trees.md)"
            )
        return found if any(map(unless_plain, found)) else ()

    def of_sequences(self, first: int, num_microbatches: int) -> tuple[int, ...]:
        """Of each sequence of a step that begins at sample `first`, its sample; empty: not known."""
        if self.lengths is None:
            return ()
        samples = range(first, first + num_microbatches * self.per_microbatch)
        return tuple(sample for sample in samples for _ in self.lengths(sample))


@dataclass(frozen=True, slots=True)
class Draw:
    """The samples that a step draws: `num_microbatches` whole microbatches."""

    num_microbatches: int
    # The first sample, read by its number; None: the data iterator has it next.
    first: int | None = None
    # Of the plan, if it is made already.
    fingerprint: str = ""


class StepPlans:
    """Plans of training steps, or of evaluation, on one rank: `draw`, then `plan`."""

    # On a rerun the same microbatches come again, and get the same plan.

    def __init__(
        self,
        planner: StepPlanner,
        samples: Samples,
        agree: Callable[[str], None],
        *,
        ahead: PlanAhead | None = None,
        evaluation: bool = False,
    ) -> None:
        """Plan by `planner`, by process `ahead` if there is one; `agree`: collective of who plans."""
        self._planner = planner
        self._samples = samples
        self._agree = agree
        self._ahead = ahead
        self._evaluation = evaluation
        self._expected: dict[tuple[int, int], tuple[Lengths, Trees]] = {}
        self._drawn: tuple[int, int, Draw, tuple[Lengths, Trees], PlannedStep] | None = None
        self._last: tuple[int, Lengths, Trees, PlannedStep] | None = None
        self._ledger = Ledger()
        self._warned = False

    def draw(self, num_microbatches: int) -> Draw:
        """The samples of the coming step of `num_microbatches`, planned here where their lengths
        are known. ConfigError: documents wait that the steps left cannot train.
        """
        consumed = self._samples.consumed()
        # A rerun of the step asks again, and draws the same.
        if self._drawn is not None and self._drawn[:2] == (consumed, num_microbatches):
            return self._drawn[2]
        self.end_step()
        self._drawn = None
        if self._evaluation:
            return Draw(num_microbatches)
        holds_back = self._planner.choice.planner.plan_step is not None or self._ledger.needs_corpus
        if self._samples.lengths is None or not holds_back:
            return self._draw_all(consumed, num_microbatches)
        first = consumed - self._ledger.behind
        # First all microbatches with documents held back as the planner likes; then less and less
        # of them, as many whole ones as leave room for what waits.
        for number, may_delay in [(num_microbatches, True), *((n, False) for n in range(num_microbatches, -1, -1))]:
            lengths = self._samples.step(first, number)
            if lengths is None:
                return Draw(num_microbatches)
            trees = self._samples.step_trees(first, number)
            empty = ((),) * (num_microbatches - number)
            lengths, trees = lengths + empty, trees + empty if trees else ()
            planned = self._planned(consumed, lengths, trees, may_delay=may_delay)
            if self._leaves_enough(planned.carry, lengths):
                behind = (num_microbatches - number) * self._samples.per_microbatch
                planned = self._accounted(planned, lengths, first, number, behind)
                draw = Draw(number, first if self._ledger.behind else None, planned.fingerprint)
                self._drawn = (consumed, num_microbatches, draw, (lengths, trees), planned)
                return draw
        raise ConfigError(
            f"{len(self._ledger.held)} documents wait, more than the steps that are left can train with "
            f"{num_microbatches} microbatches each; train more steps (--train-iters)"
        )

    def _draw_all(self, consumed: int, num_microbatches: int) -> Draw:
        lengths = None if self._warned else self._samples.step(consumed, num_microbatches)
        if lengths is None:
            return Draw(num_microbatches)
        with suppress(BalanceError):  # `plan` meets it again, when all ranks have come so far
            trees = self._samples.step_trees(consumed, num_microbatches)
            planned = self._accounted(self._planned(consumed, lengths, trees), lengths, consumed, num_microbatches, 0)
            draw = Draw(num_microbatches, fingerprint=planned.fingerprint)
            self._drawn = (consumed, num_microbatches, draw, (lengths, trees), planned)
            return draw
        return Draw(num_microbatches)

    def plan(
        self,
        lengths: Lengths,
        trees: Trees = (),
        *,
        may_delay: bool = True,
        announced: Mapping[int, str] = MappingProxyType({}),
    ) -> PlannedStep:
        """The plan of a step of microbatches of these lengths and trees, as read, equal on all ranks.
        `may_delay`: whether documents may be held back that would fit, where nothing was drawn,
        which says so itself. `announced`: by global rank, the `Draw.fingerprint` of each.

        InfeasibleError: a microbatch that the pool cannot hold. DataError: documents may wait, and
        others were read than the corpus has. PlanMismatchError: ranks planned differently.
        InvalidProgramError: the proof of an earlier plan failed.
        """
        consumed = self._samples.consumed()
        if self._drawn is not None and self._drawn[0] == consumed:
            # What was drawn less comes as empty microbatches, so that every rank runs their number.
            empty = ((),) * (self._drawn[1] - len(lengths))
            lengths, trees = lengths + empty, trees + empty if trees else ()
        if self._last is not None and self._last[:3] == (consumed, lengths, trees):
            return self._last[3]
        # Whether the iterator brought what was drawn: then the plan is made already, and announced.
        if self._drawn is not None and self._drawn[0] == consumed and self._drawn[3] == (lengths, trees):
            planned = self._drawn[4]
        else:
            self.end_step()
            planned = self._planned(consumed, lengths, trees, may_delay=may_delay)
            if self._drawn is not None and self._drawn[0] == consumed:
                self._check_read(consumed, planned)
            planned = self._accounted(planned, lengths, consumed, len(lengths), 0)
        planned = self._compared(planned, consumed, announced)
        if self._ahead is not None:
            planned = dataclasses.replace(planned, proofs=self._ahead.proofs)
        self._last = (consumed, lengths, trees, planned)
        return planned

    def _compared(self, planned: PlannedStep, consumed: int, announced: Mapping[int, str]) -> PlannedStep:
        """The plan, compared across ranks. Collective, unless all of them announced it."""
        try:
            if check_announced(announced) == planned.fingerprint:
                return dataclasses.replace(planned, announced=True)
            self._agree(planned.fingerprint)
        except PlanMismatchError as error:
            kind = "evaluation" if self._evaluation else "step"
            raise PlanMismatchError(f"{kind} at sample {consumed}, planner {planned.planner}: {error}") from None
        return planned

    def _check_read(self, consumed: int, planned: PlannedStep) -> None:
        # Documents of the corpus are known by where they stand in it, so others may not stand
        # there.
        self._warn_of_other_lengths(consumed)
        if self._ledger.needs_corpus or planned.carry.waiting:
            raise DataError(
                f"the data iterator brought other documents at sample {consumed} than the corpus has there; planner "
                f"{self._planner.choice.name} holds documents back, and goes on only in the order of samples"
            )

    def end_step(self) -> Ledger:
        """End the last step: its ledger is what the next one is planned with."""
        if self._last is not None:
            self._ledger = self._last[3].ledger
        return self._ledger

    def saved(self) -> str:
        """The text for a checkpoint behind the last step."""
        ledger = self.end_step()
        return ledger.to_json(self._here())

    def restore(self, ledger: Ledger, data: DataIdentity | None = None, accepted: str = "") -> None:
        """Go on with the ledger of a checkpoint, whose samples are `data` (None: unknown);
        ConfigError where this run cannot. `accepted`: the fingerprint of other samples, or "plain",
        after which to go on.
        """
        self._planner.choice.check_carry(ledger.carry)
        data, here, consumed = data or DataIdentity(), self._here(), self._samples.consumed()
        if here.facts and not data.fingerprint:
            if consumed > 0:
                log.warning(
                    "data: the checkpoint does not say what its %d samples were (it is a plain one, or of an earlier "
                    "version), so they were not compared with the script's",
                    consumed,
                )
        elif changes := data.changes(here, consumed):
            if ledger.needs_corpus:
                raise ConfigError(
                    f"the checkpoint's {len(ledger.held)} waiting documents are of corpus "
                    f"{data.fingerprint or 'unknown'}, and this run reads {here}: expected the same --data-path, "
                    "--split, --seq-length, --seed, and documents and sample_filling of the configuration; give those, "
                    "or start anew from the weights alone (--finetune)"
                )
            self._check_samples(data, changes, accepted)
        self._ledger, self._last, self._drawn = ledger, None, None

    def _here(self) -> DataIdentity:
        return DataIdentity() if self._samples.identity is None else self._samples.identity()

    def _check_samples(self, data: DataIdentity, changes: list[str], accepted: str) -> None:
        consumed, name = self._samples.consumed(), data.fingerprint or PLAIN
        if consumed == 0:
            return
        what = f"{consumed} {data}, and this run's are others: {'; '.join(changes)}"
        if accepted != name:
            ours = "" if data.facts else ", and documents and sample_filling of the configuration"
            raise ConfigError(
                f"the checkpoint has trained {what}. Going on at sample {consumed} would repeat some documents and "
                f"lose others. Give the same --data-path, --split, --seq-length, --seed{ours}; or start anew from the "
                f"weights (--finetune); or accept it in the configuration: accepted_data: {name}"
            )
        log.warning("data: the checkpoint has trained %s; accepted_data: %s accepts it", what, name)

    def coming(self) -> StepPlan | None:
        """The plan likely to come next, if it is made ahead and there already. Any thread may ask."""
        ahead, last = self._ahead, self._last
        if ahead is None or last is None:
            return None
        consumed, lengths = last[:2]
        return ahead.peek((consumed + len(lengths) * self._samples.per_microbatch, len(lengths)))

    def close(self) -> None:
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None

    def _leaves_enough(self, carry: Carry, lengths: Lengths) -> bool:
        """Whether the steps left can train what waits, and less waits of what another planner left."""
        before = self._ledger.carry
        if before.waiting and before.planner != self._planner.choice.name:
            # Numbers below those drawn in this step: the documents that waited before it.
            oldest = -sum(map(len, lengths))
            if sum(number < oldest for number, _ in carry.waiting) == len(before.waiting):
                return False
        # A step without new documents trains at least one that waits in each microbatch.
        remaining = self._samples.remaining
        return remaining is None or len(carry.waiting) <= max(0, remaining() - 1) * len(lengths)

    def _accounted(
        self, planned: PlannedStep, lengths: Lengths, first: int, num_microbatches: int, behind: int
    ) -> PlannedStep:
        if self._evaluation:
            return planned
        samples = self._samples.of_sequences(first, num_microbatches) if planned.carry.waiting else ()
        ledger = self._ledger.after(planned.step, lengths, planned.carry, samples, behind)
        known = {each.number: each for each in self._ledger.held}
        trained = chain.from_iterable(chain.from_iterable(planned.step.members))
        recalled = tuple(known[number] for number in sorted(number for number in trained if number < 0))
        trees = by_number((), (), self._ledger.carry)
        of_recalled = tuple(trees[each.number] for each in recalled) if trees else ()
        return dataclasses.replace(planned, recalled=recalled, recalled_trees=of_recalled, ledger=ledger)

    def _planned(self, consumed: int, lengths: Lengths, trees: Trees = (), *, may_delay: bool = True) -> PlannedStep:
        # Steps that draw less are the last ones, and not asked for ahead.
        # Nor are trees that nobody knows before they are read.
        unknown = bool(trees) and self._samples.trees is None
        if self._ahead is None or not may_delay or self._ledger.behind or unknown:
            return self._now(lengths, trees, may_delay=may_delay)
        return self._from_ahead(self._ahead, consumed, lengths, trees)

    def _now(self, lengths: Lengths, trees: Trees = (), *, may_delay: bool = True) -> PlannedStep:
        start = time.perf_counter()
        if self._evaluation:
            step, carry = self._planner.plan_evaluation(lengths, trees), EMPTY
        else:
            before = self._ledger.carry
            step, carry = self._planner.plan(lengths, before, trees=trees, may_delay=may_delay)
            if trees and self._samples.trees is None and (before.waiting or carry.waiting):
                raise ConfigError(
                    f"planner {self._planner.choice.name}: {len(before.waiting or carry.waiting)} sequences that wait "
                    "for a later step cannot be planned together with trees that nobody can read again (none wait with "
                    "thresholds: [])"
                )
        seconds = time.perf_counter() - start
        return PlannedStep(step, seconds, seconds, carry, planner=self._planner.choice.name)

    def _from_ahead(self, ahead: PlanAhead, consumed: int, lengths: Lengths, trees: Trees) -> PlannedStep:
        """The plan made ahead for these lengths, trees and this carry, else one made now. Asks for
        more.
        """
        given = lengths, trees
        key = (consumed, len(lengths))
        expected, ready = self._expected.pop(key, None), ahead.take(key)
        if ahead.proofs.wrong:
            raise InvalidProgramError(
                f"an earlier step was trained by a plan that does not hold, so what was trained may be wrong: "
                f"{ahead.proofs.wrong}. Go back to a checkpoint before it (steps.jsonl has its fingerprint), with "
                "another planner, and report it"
            )
        if ready is not None and ready.step is not None and expected == given and ready.before == self._ledger.carry:
            planned, intact = (
                PlannedStep(ready.step, ready.plan_s, ready.waited_s, ready.after, planner=self._planner.choice.name),
                True,
            )
        else:
            if ready is not None and ready.step is not None and expected != given:
                self._warn_of_other_lengths(consumed)
            planned = self._now(lengths, trees)
            intact = ready is not None and ready.step is not None and ready.after == planned.carry
        if not intact:  # what was asked for follows another carry, or nothing
            ahead.forget()
            self._expected.clear()
        # Not this step: the first one after a start or a resume is planned on the spot, not waited
        # for.
        size = self._samples.num_microbatches() * self._samples.per_microbatch
        carry = None if intact else planned.carry
        for first in range(consumed + size, consumed + (HORIZON + 1) * size, size):
            coming = None if (first, len(lengths)) in self._expected else self._samples.step(first, len(lengths))
            if coming is not None:
                its_trees = self._samples.step_trees(first, len(lengths))
                ahead.submit((first, len(lengths)), coming, carry, its_trees)
                self._expected[first, len(lengths)] = coming, its_trees
                carry = None
        return planned

    def _warn_of_other_lengths(self, consumed: int) -> None:
        if not self._warned:
            log.warning(
                "planning ahead expected other lengths than the data iterator brought at sample %d; planning on the "
                "spot. "
                "Is the order of samples not sequential?",
                consumed,
            )
            self._warned = True


def check_agreement(
    fingerprint: str,
    groups: Groups,
    device: torch.device | str = "cpu",
    tensor_parallel: dist.ProcessGroup | None = None,
) -> None:
    """Compare `fingerprint` (16 hex digits) across the pool and the tensor-parallel group. Collective.
    PlanMismatchError: on every rank, naming those of the pool that differ from most others.
    """
    reduced = [group for group in (groups.pool, tensor_parallel) if group is not None]
    if not reduced:
        return
    if dist.get_backend(reduced[0]) == "nccl":
        device = torch.device("cuda", torch.cuda.current_device())
    words = [int(fingerprint[i : i + 8], 16) for i in (0, 8)]  # 64 bits do not fit an int64
    # 32 bytes where all is well.
    if all(least == most for least, most in least_and_most(words, reduced, device)):
        return
    # All ranks come here: pools of one stage differ, or their tensor-parallel peers do.
    mine = torch.tensor(words, dtype=torch.int64, device=device)
    every = mine.clone()[None]
    if groups.pool is not None:
        every = torch.empty(groups.size, 2, dtype=torch.int64, device=device)
        dist.all_gather(list(every.unbind()), mine, group=groups.pool)
    raise _mismatch({groups.ranks[i]: f"{a:08x}{b:08x}" for i, (a, b) in enumerate(every.tolist())})


def check_announced(announced: Mapping[int, str]) -> str:
    """The fingerprint that all ranks announced; empty: none did. PlanMismatchError: they differ."""
    if len(set(announced.values())) > 1:
        raise _mismatch(announced)
    return next(iter(announced.values()), "")


def _mismatch(fingerprints: Mapping[int, str]) -> PlanMismatchError:
    common, count = Counter(fingerprints.values()).most_common(1)[0]
    others = ", ".join(f"rank {rank} has {f or 'none'}" for rank, f in fingerprints.items() if f != common)
    others = others or "their tensor-parallel peers have others"
    return PlanMismatchError(
        f"ranks planned differently: {count} of {len(fingerprints)} ranks have plan {common or 'none'}, but {others}. "
        "Check that all ranks run the same version of megatron_balance with the same configuration"
    )
