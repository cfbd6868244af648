"""The account of a run's documents, drawn, trained and waiting, and what its samples are: both go into
every checkpoint, and hold on any number of ranks.

A waiting document is kept by the sample and the place in it where it was drawn, and its tokens are
read again when its turn comes (docs/adr/0022).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

from megatron_balance.errors import MALFORMED, ConfigError
from megatron_balance.files import parse_json
from megatron_balance.ir.step import EMPTY, Carry, Lengths, StepPlan, held_back


class HeldDocument(NamedTuple):
    """A document that waits: its number in the next step; sequence `place` of sample `sample`."""

    number: int
    sample: int
    place: int
    length: int


@dataclass(frozen=True, slots=True)
class Ledger:
    """Where a run stands between two steps."""

    carry: Carry = EMPTY
    # The documents of `carry.waiting`.
    held: tuple[HeldDocument, ...] = ()
    # Samples that were drawn less than Megatron has counted as consumed.
    behind: int = 0
    # Tokens since the run began.
    drawn: int = 0
    trained: int = 0

    @property
    def needs_corpus(self) -> bool:
        """Whether going on reads samples by number, which mean nothing in another corpus."""
        return bool(self.held) or self.behind > 0

    def after(self, step: StepPlan, lengths: Lengths, carry: Carry, samples: Sequence[int], behind: int) -> Ledger:
        """The ledger behind a step. `lengths`: as drawn, by microbatch; `samples`: of each document
        drawn; empty: not known. `behind`: samples that the step drew less than Megatron counts.
        ConfigError: documents wait that nobody can read again.
        """
        drawn = list(chain.from_iterable(lengths))
        waiting = held_back(step, lengths, self.carry.waiting)
        assert waiting == carry.waiting, "the planner's carry lists other sequences than its step leaves"
        if waiting and len(samples) != len(drawn):
            raise ConfigError(
                "documents that wait are read again from whole documents of --data-path, and this run's samples are "
                "the script's own; give --data-path, or leave out what makes documents wait (thresholds: [], a larger "
                "tokens_per_rank)"
            )
        known = {each.number: each for each in self.held}
        held: list[HeldDocument] = []
        # The first sequence's number of each sample, of those drawn.
        firsts = {sample: number for number, sample in reversed(list(enumerate(samples)))}
        for number, length in waiting:
            at = number + len(drawn)
            # Numbers below 0 were drawn in earlier steps.
            if at < 0:
                held.append(known[at]._replace(number=number))
            else:
                held.append(HeldDocument(number, samples[at], at - firsts[samples[at]], length))
        trained = sum(plan.num_tokens for plan in step.plans)
        new = Ledger(carry, tuple(held), self.behind + behind, self.drawn + sum(drawn), self.trained + trained)
        # What was drawn is trained or waits.
        assert new.drawn == new.trained + carry.waiting_tokens, new
        return new

    def to_json(self, data: DataIdentity | None = None) -> str:
        """One line of JSON. `data`: what the samples are; None: nobody knows."""
        known = data or DataIdentity()
        body = {name: getattr(self, name) for name in ("held", "behind", "drawn", "trained")}
        told = {"data": known.to_body()} if known.facts else {}
        return json.dumps(
            {"carry": json.loads(self.carry.to_json()), "corpus": known.fingerprint, **told, **body}, allow_nan=False
        )

    @classmethod
    def from_json(cls, text: str) -> tuple[Ledger, DataIdentity]:
        """The ledger that `to_json` wrote, and what its samples are; ConfigError: the text is none."""
        try:
            body: Any = parse_json(text)
            held = tuple(HeldDocument(*map(int, each)) for each in body["held"])
            made = cls(Carry.from_body(body["carry"]), held, *(int(body[n]) for n in ("behind", "drawn", "trained")))
            corpus = str(body["corpus"])
            data = DataIdentity.from_body(corpus, body["data"]) if "data" in body else DataIdentity(corpus)
        except MALFORMED as error:
            raise ConfigError(
                f"not the account of a run's documents: {type(error).__name__}: {error}; got {text!r:.80}"
            ) from None
        counted = made.trained + made.carry.waiting_tokens
        if made.drawn != counted or made.carry.waiting != tuple((each.number, each.length) for each in held):
            raise ConfigError(
                f"the account of a run's documents does not add up: {made.drawn} tokens drawn, {counted} trained or "
                "waiting; the checkpoint is damaged"
            )
        return made, data


BEGINNING = Ledger()
UNKNOWN = "samples of an unknown data set (of a plain checkpoint, or of a loop's own)"


@dataclass(frozen=True, slots=True)
class DataIdentity:
    """Identity of a run's samples: a checkpoint carries it, and a run that goes on compares it."""

    # 16 hex digits, their name in `accepted_data`; empty: nobody knows them.
    fingerprint: str = ""
    # Of a script's own data set what it is made of, by name.
    facts: Mapping[str, str] = field(default_factory=dict[str, str])
    # By name of a fact, the path where it was read, which is told and not compared.
    places: Mapping[str, str] = field(default_factory=dict[str, str])
    # Digests of the tokens of some samples, by number: they notice another order, or other tokens
    # in a corpus of the same size.
    samples: Mapping[int, str] = field(default_factory=dict[int, str])

    @classmethod
    def of_script(cls, facts: Mapping[str, str], places: Mapping[str, str], samples: Mapping[int, str]) -> DataIdentity:
        text = json.dumps([sorted(facts.items()), sorted(samples.items())], allow_nan=False)
        return cls(hashlib.sha256(text.encode()).hexdigest()[:16], facts, places, samples)

    def changes(self, here: DataIdentity, trained: int) -> list[str]:
        """Phrases for what is other in samples `here` than in a checkpoint's first `trained` ones."""
        # Facts of a script are compared one by one; samples of ours by their fingerprint alone.
        if not (self.facts and here.facts):
            return [] if self.fingerprint == here.fingerprint else [str(here)]
        names = dict.fromkeys((*self.facts, *here.facts))
        found = [
            f"{name} was {self._told(name)} and is {here._told(name)}"
            for name in names
            if self.facts.get(name) != here.facts.get(name)
        ]
        # Samples that the checkpoint has not trained may be others: another --train-iters orders
        # them anew.
        both = sorted(number for number in self.samples.keys() & here.samples.keys() if number < trained)
        # Only digests of one kind: samples without tokens have longer ones than they had.
        both = [number for number in both if len(self.samples[number]) == len(here.samples[number])]
        other = [number for number in both if self.samples[number] != here.samples[number]]
        if other and not found:
            found.append(
                f"sample {other[0]} has other tokens ({len(other)} of {len(both)} that were compared; Megatron's order "
                "also depends on how many samples it is asked for, so give the same --train-iters or --train-samples)"
            )
        return found

    def _told(self, name: str) -> str:
        value = self.facts.get(name, "nothing")
        return f"{value} ({self.places[name]})" if name in self.places else value

    def __str__(self) -> str:
        if not self.fingerprint:
            return UNKNOWN
        return f"samples of {'the script' if self.facts else 'whole documents'}, {self.fingerprint}"

    def to_body(self) -> dict[str, Any]:
        """Plain data for JSON; the fingerprint is not in it."""
        samples = {str(number): digest for number, digest in self.samples.items()}
        return {"facts": dict(self.facts), "places": dict(self.places), "samples": samples}

    @classmethod
    def from_body(cls, fingerprint: str, body: Any) -> DataIdentity:
        """The identity that `to_body` wrote; ConfigError: the body is none."""
        try:
            facts, places = ({str(name): str(value) for name, value in body[of].items()} for of in ("facts", "places"))
            samples = {int(number): str(digest) for number, digest in body["samples"].items()}
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise ConfigError(f"not what a data set is: {type(error).__name__}: {error}; got {body!r:.80}") from None
        return cls(fingerprint, facts, places, samples)
