"""The plan of one training step, and what a planner carries from one step to the next."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, chain, pairwise
from typing import Any, Literal, NamedTuple, TypeAlias, cast

from megatron_balance.errors import MALFORMED, ConfigError
from megatron_balance.files import parse_json
from megatron_balance.ir import plan as plans
from megatron_balance.ir.forest import Tree, checked, document, num_tokens
from megatron_balance.ir.plan import MicrobatchPlan
from megatron_balance.ir.strategy import Strategy

# Nesting: StepPlan (one optimizer step) > pipeline > MicrobatchPlan > the program of one attention
# call, which is never stored but projected per rank from the zones (`compile.pipeline`). Most steps
# have one pipeline, whose stages spread every microbatch over the whole pool; a step under a
# strategy has several side by side, each with a number of microbatches of its own (docs/adr/0023).
#
# Sequences of a step are numbered as the data loader deals them, microbatch by microbatch, from 0.
# A sequence that a planner held back in an earlier step has a negative number: -1 is the last one
# that was dealt before this step, -2 the one before that. So a number says which sequence is meant
# on any number of ranks, and a carry lists what waits by number (docs/adr/0022).

FORMAT = "megatron-balance step 2"

# By microbatch, the lengths in tokens of its sequences.
Lengths: TypeAlias = tuple[tuple[int, ...], ...]

# By microbatch, the trees of its sequences (`ir.forest`); empty: all of the step are plain documents.
Trees: TypeAlias = tuple[tuple[Tree, ...], ...]

# By microbatch and nano-batch, the numbers of its sequences; the i-th is sequence i of its plan.
Members: TypeAlias = tuple[tuple[tuple[int, ...], ...], ...]

# Sequences that are held back: number and length in tokens, in the order in which they were dealt.
Waiting: TypeAlias = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Carry:
    """A planner's memory from one step to the next: plain JSON data, saved with a checkpoint.

    `planner`: whose `state` it is; empty: nobody's. `state`: canonical JSON text. `waiting`: every
    sequence that is held back, numbered as the next step sees it, so below 0; another planner goes
    on from it alone. `trees`: of each of these its tree; none: all are plain documents. Nothing may
    depend on the number of ranks, since a run may go on with another number.
    """

    planner: str = ""
    state: str = "null"
    waiting: Waiting = ()
    trees: tuple[Tree, ...] = ()

    @classmethod
    def of(cls, planner: str, state: Any, waiting: Waiting = ()) -> Carry:
        """The carry of a planner, of plain JSON data (lists, dicts, numbers, text)."""
        return cls(planner, json.dumps(state, sort_keys=True, separators=(",", ":"), allow_nan=False), waiting)

    @property
    def is_empty(self) -> bool:
        return not self.planner and not self.waiting

    @property
    def waiting_tokens(self) -> int:
        """Tokens of the sequences that are held back."""
        return sum(length for _, length in self.waiting)

    def value(self) -> Any:
        """The data that `of` was given; tuples come back as lists."""
        return json.loads(self.state)

    def unowned(self) -> Carry:
        """The carry without the planner's state: the sequences that wait, for any planner."""
        return Carry(waiting=self.waiting, trees=self.trees)

    def to_json(self) -> str:
        """One line of JSON."""
        waiting = json.dumps(self.waiting, separators=(",", ":"))
        trees = f',"trees":{json.dumps(self.trees, separators=(",", ":"))}' if self.trees else ""
        return f'{{"planner":{json.dumps(self.planner)},"state":{self.state},"waiting":{waiting}{trees}}}'

    @classmethod
    def from_json(cls, text: str) -> Carry:
        """The carry that `to_json` wrote; ConfigError where the text is none."""
        try:
            return cls.from_body(parse_json(text))
        except ValueError as error:
            raise ConfigError(f"not a planner's carry: {type(error).__name__}: {error}; got {text!r:.80}") from None

    @classmethod
    def from_body(cls, body: Any) -> Carry:
        try:
            waiting = tuple((int(number), int(length)) for number, length in body["waiting"])
            made = replace(cls.of(str(body["planner"]), body["state"], waiting), trees=checked(body.get("trees", ())))
        except MALFORMED as error:
            raise ConfigError(f"not a planner's carry: {type(error).__name__}: {error}; got {body!r:.80}") from None
        numbers = [number for number, _ in waiting]
        if any(number >= 0 for number in numbers) or numbers != sorted(set(numbers)):
            raise ConfigError(
                f"not a planner's carry: expected waiting sequences by number, ascending and below 0; got {numbers}"
            )
        if made.trees and [*map(num_tokens, made.trees)] != [length for _, length in waiting]:
            raise ConfigError(
                f"not a planner's carry: expected a tree for each of {len(waiting)} waiting sequences, of its length; "
                f"got trees of {[*map(num_tokens, made.trees)][:8]} tokens (the first 8)"
            )
        return made if made.planner else made.unowned()


EMPTY = Carry()


# Ticks of a pipeline in which all stages attend together (DistCA, section 4.1). A tick is one forward
# or one backward pass of every stage that has work in it. Its plan has the ranks of all stages, stage
# by stage, and the sequences of all microbatches that are in the tick side by side, stage by stage;
# layer after layer, one attention call serves them all.


class Cell(NamedTuple):
    """The work of a stage in a tick: a microbatch through one of the stage's model chunks."""

    microbatch: int
    chunk: int = 0


@dataclass(frozen=True, slots=True)
class Tick:
    """One phase of all stages. `cells[s]`: what stage s runs; None: it only attends for others."""

    backward: bool
    cells: tuple[Cell | None, ...]

    @property
    def microbatches(self) -> tuple[int | None, ...]:
        """By stage. Ticks with the same have the same attention."""
        return tuple(None if cell is None else cell.microbatch for cell in self.cells)

    def first_sequence(self, stage: int, num_sequences: Sequence[int]) -> int:
        """The id, in the tick's plan, of sequence 0 of `stage`'s microbatch; the others follow."""
        return sum(num_sequences[m] for m in self.microbatches[:stage] if m is not None)


@dataclass(frozen=True, slots=True)
class TickPlan:
    """A tick and the plan of its attention, whose ranks are stage * (ranks of a stage) + rank."""

    tick: Tick
    plan: MicrobatchPlan


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The microbatches of one step: who is in them, how each attends, and in which ticks.

    `plans`: of every nano-batch (of a microbatch that runs whole: one), microbatch by microbatch.
    `ticks`: by nano-batch, where all pipeline stages attend together. Then `plans` say where
    tokens are owned, and the ticks how they attend.
    """

    members: Members
    plans: tuple[MicrobatchPlan, ...]
    ticks: tuple[tuple[TickPlan, ...], ...] = ()
    strategy: Strategy | None = None
    """Pipelines side by side, each over ranks of its own. None: one pipeline over the whole pool."""
    num_microbatches: tuple[int, ...] = ()
    """By pipeline of the strategy, how many microbatches are its own, one at least: they stand
    pipeline by pipeline. Each plan is over the context-parallel ranks of its pipeline."""
    forward: StepPlan | None = None
    """Of passes of the same samples without a backward, where their microbatches are others. None:
    such passes run these."""

    def __post_init__(self) -> None:
        sizes = [len(seqs) for microbatch in self.members for seqs in microbatch]
        if sizes != [len(plan.lengths) for plan in self.plans]:
            raise ValueError(
                f"expected one plan for each nano-batch, of as many sequences; got {sizes} sequences and plans of "
                f"{[len(plan.lengths) for plan in self.plans]}"
            )
        self._check_pipelines()

    def _check_pipelines(self) -> None:
        schemes = () if self.strategy is None else self.strategy.pipelines
        if len(schemes) != len(self.num_microbatches) or any(number < 1 for number in self.num_microbatches):
            raise ValueError(
                f"expected a number of microbatches, at least 1, of each of {len(schemes)} pipelines; got "
                f"{list(self.num_microbatches)}"
            )
        if not schemes:
            return
        if self.ticks or sum(self.num_microbatches) != len(self.members):
            raise ValueError(
                f"expected {sum(self.num_microbatches)} microbatches without ticks, pipeline by pipeline; got "
                f"{len(self.members)} and {sum(map(len, self.ticks))} ticks"
            )
        for scheme, microbatches in zip(schemes, self.pipelines, strict=True):
            found = {self.plans[at].num_ranks for m in microbatches for at in self.plans_of[m]}
            if found - {scheme.context}:
                raise ValueError(f"expected plans over the {scheme.context} ranks of {scheme}; got {sorted(found)}")

    @classmethod
    def side_by_side(cls, strategy: Strategy, steps: Sequence[StepPlan]) -> StepPlan:
        """A step of pipelines, `steps` by pipeline."""
        # A pipeline without sequences has one microbatch without any.
        members = tuple(chain.from_iterable(step.members for step in steps))
        plans = tuple(chain.from_iterable(step.plans for step in steps))
        return cls(members, plans, (), strategy, tuple(len(step.members) for step in steps))

    @classmethod
    def whole(cls, plans: Sequence[MicrobatchPlan], members: Sequence[Sequence[int]] | None = None) -> StepPlan:
        """A step of microbatches that run whole; without `members` their sequences are as dealt."""
        if members is None:
            members = dealt([plan.lengths for plan in plans])
        return cls(tuple((tuple(seqs),) for seqs in members), tuple(plans))

    @property
    def plans_of(self) -> tuple[range, ...]:
        """By microbatch, which of `plans` are its nano-batches'."""
        ends = [0, *accumulate(len(microbatch) for microbatch in self.members)]
        return tuple(range(begin, end) for begin, end in pairwise(ends))

    @property
    def pipelines(self) -> tuple[range, ...]:
        """By pipeline, which microbatches are its own."""
        ends = [0, *accumulate(self.num_microbatches or (len(self.members),))]
        return tuple(range(begin, end) for begin, end in pairwise(ends))

    @property
    def pipeline_of(self) -> tuple[int, ...]:
        """By plan, its pipeline."""
        plans_of = self.plans_of
        return tuple(p for p, microbatches in enumerate(self.pipelines) for m in microbatches for _ in plans_of[m])

    def of_pipeline(self, pipeline: int) -> StepPlan:
        """The step as one pipeline runs it: its own microbatches alone."""
        if self.strategy is None:
            return self
        own, plans_of = self.pipelines[pipeline], self.plans_of
        plans = tuple(self.plans[at] for m in own for at in plans_of[m])
        return StepPlan(self.members[own.start : own.stop], plans)

    @property
    def microbatches(self) -> tuple[tuple[MicrobatchPlan, ...], ...]:
        """By microbatch, the plans of its nano-batches."""
        return tuple(tuple(self.plans[i] for i in of) for of in self.plans_of)

    @property
    def attention(self) -> tuple[MicrobatchPlan, ...]:
        """The plans of all that attends: ticks, or nano-batches where there are none."""
        return tuple(each.plan for nano_batch in self.ticks for each in nano_batch) or self.plans

    def fullest_tick(self) -> TickPlan:
        """The first tick in which the most stages have a pass of their own."""
        return max(self.ticks[0], key=lambda each: sum(cell is not None for cell in each.tick.cells))

    def is_dealt(self) -> bool:
        """Whether every microbatch has the sequences that it was dealt, but those held back."""
        in_order = [sorted(chain.from_iterable(microbatch)) for microbatch in self.members]
        return list(chain.from_iterable(in_order)) == list(range(sum(map(len, in_order))))

    def fingerprint(self) -> str:
        """Sixteen hex digits that differ when any decision differs; equal on every host."""
        # Members that are as dealt follow from the plans' lengths.
        parts = [_digest(each.fingerprint() for each in self.plans)]
        parts += [_digest(f"{each.tick} {each.plan.fingerprint()}" for each in ticks) for ticks in self.ticks]
        parts += [] if self.is_dealt() else [repr(self.members)]
        parts += [] if self.strategy is None else [f"{self.strategy} {self.num_microbatches} {self.members}"]
        parts += [] if self.forward is None else [f"forward {self.forward.fingerprint()}"]
        return parts[0] if len(parts) == 1 else _digest(parts)


def held_back(step: StepPlan, lengths: Lengths, waiting: Waiting) -> Waiting:
    """The sequences that wait behind a step, numbered as the next step sees them: those of
    `lengths` (as dealt, by microbatch) and `waiting` (before the step) that it does not train.
    Raises ValueError: it trains a sequence twice, one that is not there, or one by another length.
    """
    # Nearly always: all of them, whole and as dealt.
    whole = tuple((seqs,) for seqs in dealt(lengths))
    if not waiting and step.members == whole and tuple(plan.lengths for plan in step.plans) == lengths:
        return ()
    given = list(chain.from_iterable(lengths))
    trained = list(chain.from_iterable(chain.from_iterable(step.members)))
    of_plans = list(chain.from_iterable(plan.lengths for plan in step.plans))
    ready = dict(waiting) | dict(enumerate(given))
    for seq, length in zip(trained, of_plans, strict=True):
        if ready.pop(seq, None) != length:
            raise ValueError(
                f"expected each sequence at most once and whole; got s{seq} of {length} tokens, which was trained "
                "already in this step, or neither dealt in it nor waiting, or has another length"
            )
    return tuple(sorted((seq - len(given), length) for seq, length in ready.items()))


def by_number(lengths: Lengths, trees: Sequence[Tree], carry: Carry) -> dict[int, Tree]:
    """By number, the tree of each sequence of a step, as dealt, and of those that wait; empty: all
    are plain documents. `trees`: of those dealt, or none.
    """
    if not (trees or carry.trees):
        return {}
    waiting = carry.trees or tuple(document(length) for _, length in carry.waiting)
    new = trees or tuple(map(document, chain.from_iterable(lengths)))
    return dict(zip((number for number, _ in carry.waiting), waiting, strict=True)) | dict(enumerate(new))


def dealt(lengths: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """By microbatch, the numbers of its sequences as dealt."""
    return _numbered(tuple(map(len, lengths)))


# A step asks several times; equal tuples are the same one, which makes them quick to compare.
@lru_cache(maxsize=4)
def _numbered(counts: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    ends = [0, *accumulate(counts)]
    return tuple(tuple(range(begin, end)) for begin, end in pairwise(ends))


def to_json(step: StepPlan) -> str:
    """The step as one line of JSON with a fixed key order."""
    # Ticks of the same microbatches share a plan.
    ticks: list[str] = []
    for nano_batch in step.ticks:
        # By identity: hashing a large plan for each tick takes longer than all the rest.
        known: dict[int, tuple[int, MicrobatchPlan]] = {}
        rows = [
            [each.tick.backward, each.tick.cells, known.setdefault(id(each.plan), (len(known), each.plan))[0]]
            for each in nano_batch
        ]
        texts = ",".join(plans.to_json(plan) for _, plan in known.values())
        ticks.append(f'{{"plans":[{texts}],"ticks":{json.dumps(rows, separators=(",", ":"))}}}')
    members = json.dumps(step.members, separators=(",", ":"))
    of = ",".join(map(plans.to_json, step.plans))
    strategy = json.dumps(None if step.strategy is None else str(step.strategy))
    numbers = json.dumps(step.num_microbatches, separators=(",", ":"))
    forward = "" if step.forward is None else f',"forward":{to_json(step.forward)}'
    return (
        f'{{"format":{json.dumps(FORMAT)},"strategy":{strategy},"num_microbatches":{numbers},"members":{members},'
        f'"plans":[{of}],"ticks":[{",".join(ticks)}]{forward}}}'
    )


def from_json(source: str) -> StepPlan:
    """The step that `to_json` wrote; ConfigError where it is none, or of another format."""
    try:
        loaded: Any = parse_json(source)
    except ValueError as error:
        raise ConfigError(f"not the plan of a step: {error}") from None
    return from_body(loaded)


def from_body(loaded: Any) -> StepPlan:
    """The step of parsed JSON; as `from_json`."""
    body = cast(dict[str, Any], loaded) if isinstance(loaded, dict) else {}
    given = body.get("format")
    if given != FORMAT:
        raise ConfigError(f"not the plan of a step of this version: format is {given!r}, expected {FORMAT!r}")
    try:
        members = tuple(tuple(tuple(int(seq) for seq in seqs) for seqs in microbatch) for microbatch in body["members"])
        return StepPlan(
            members,
            tuple(map(plans.from_body, body["plans"])),
            tuple(map(_ticks_from_body, body["ticks"])),
            None if body["strategy"] is None else Strategy.parse(str(body["strategy"])),
            tuple(map(int, body["num_microbatches"])),
            None if body.get("forward") is None else from_body(body["forward"]),
        )
    except MALFORMED as error:
        raise ConfigError(f"damaged plan of a step: {type(error).__name__}: {error}") from None


def _ticks_from_body(body: dict[str, Any]) -> tuple[TickPlan, ...]:
    known = list(map(plans.from_body, body["plans"]))
    rows: list[tuple[bool, list[tuple[int, int] | None], int]] = body["ticks"]
    return tuple(
        TickPlan(Tick(backward, tuple(None if cell is None else Cell(*cell) for cell in cells)), known[at])
        for backward, cells, at in rows
    )


def _digest(parts: Iterator[str] | Sequence[str]) -> str:
    return hashlib.sha256("".join(parts).encode()).hexdigest()[:16]


# The two layers around any planner's decision, remapping and routing, as settings (Zeppelin,
# sections 3.4 and 3.3).
#
# `planning.layers` decides by these settings what a plan gets; `solvers.remap` solves the remap.

When: TypeAlias = Literal["always", "pays", "never"]

RemapWhen: TypeAlias = Literal["always", "pays"]

MilpSolver: TypeAlias = Literal["gurobi", "highs"]

Solver: TypeAlias = Literal["exact", MilpSolver]


@dataclass(frozen=True, slots=True)
class Layers:
    """Remapping and routing around a planner.

    `routing`: when transfers between nodes go over all NICs, with `pieces` of each on one NIC.
    `remap`: balance tokens outside attention, `remap_when` always or where that saves time;
    `solver` as in `solvers.remap.solve`. `align`: token counts outside attention are multiples of
    this (the tensor-parallel size). `once_per_node`: task tables and
    head exchanges send rows that several ranks of a node need once, where that pays
    (`patterns.once_per_node`).
    """

    routing: When = "never"
    remap: bool = False
    remap_when: RemapWhen = "always"
    solver: Solver = "exact"
    align: int = 1
    pieces: int = 1
    once_per_node: bool = False

    def __post_init__(self) -> None:
        if self.pieces < 1:
            raise ConfigError(f"routing: pieces {self.pieces}: a transfer has at least 1 piece on each NIC")
        if self.align < 1:
            raise ConfigError(f"remap: align {self.align}: must be at least 1 token")
