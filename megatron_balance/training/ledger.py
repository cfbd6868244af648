"""The account of a run's documents: drawn, trained, and waiting to be trained.

A waiting document is kept by name, the sample and the place in it where it was drawn, and its
tokens are read again when its turn comes (docs/adr/0022). So the account is small plain data, it
goes into every checkpoint, and holds on any number of ranks.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

from megatron_balance.errors import MALFORMED, ConfigError
from megatron_balance.files import parse_json
from megatron_balance.ir.step import EMPTY, Carry, Lengths, StepPlan, held_back
from megatron_balance.training.data_identity import DataIdentity


class HeldDocument(NamedTuple):
    """A document that waits: its number as the next step sees it, and where it was drawn.

    `sample`, `place`: it is sequence `place` of that training sample. `length`: in tokens.
    """

    number: int
    sample: int
    place: int
    length: int


@dataclass(frozen=True, slots=True)
class Ledger:
    """Where a run stands between two steps.

    `carry`: of its planner. `held`: the documents of `carry.waiting`. `behind`: samples that were
    drawn less than Megatron has counted as consumed. `drawn`, `trained`: tokens since the run began;
    what they differ by waits.
    """

    carry: Carry = EMPTY
    held: tuple[HeldDocument, ...] = ()
    behind: int = 0
    drawn: int = 0
    trained: int = 0

    @property
    def needs_corpus(self) -> bool:
        """Whether going on reads samples by number, which mean nothing in another corpus."""
        return bool(self.held) or self.behind > 0

    def after(self, step: StepPlan, lengths: Lengths, carry: Carry, samples: Sequence[int], behind: int) -> Ledger:
        """The ledger behind a step.

        Args:
            step: its plan.
            lengths: as drawn, by microbatch.
            carry: what its planner carries on.
            samples: of each document drawn, the sample; empty: not known.
            behind: samples by which the step drew less than Megatron counts.

        Raises:
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
        firsts = {sample: number for number, sample in reversed(list(enumerate(samples)))}
        for number, length in waiting:
            at = number + len(drawn)
            if at < 0:
                held.append(known[at]._replace(number=number))
            else:
                held.append(HeldDocument(number, samples[at], at - firsts[samples[at]], length))
        trained = sum(plan.num_tokens for plan in step.plans)
        new = Ledger(carry, tuple(held), self.behind + behind, self.drawn + sum(drawn), self.trained + trained)
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
        """The ledger that `to_json` wrote, and what its samples are.

        Raises:
            ConfigError: the text is not a ledger.
        """
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
"""Of a run that has drawn nothing."""
