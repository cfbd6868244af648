"""Identity of training samples: a checkpoint carries it, and a run that goes on compares it.

Samples of ours have one fingerprint. Those of a script's own data set have facts by name, so that a
refusal says which of them changed, and digests of some samples by number. The digests notice what no
fact says: another order, or other tokens in a corpus of the same size.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_balance.errors import ConfigError

UNKNOWN = "samples of an unknown data set (of a plain checkpoint, or of a loop's own)"


@dataclass(frozen=True, slots=True)
class DataIdentity:
    """Of a run's training samples.

    `fingerprint`: 16 hex digits, their name in `accepted_data`; empty: nobody knows them. `facts`:
    what they are made of, by name. `places`: by name of a fact, the path where it was read, which is
    told and not compared. `samples`: a digest of the tokens of some samples, by number.
    """

    fingerprint: str = ""
    facts: Mapping[str, str] = field(default_factory=dict[str, str])
    places: Mapping[str, str] = field(default_factory=dict[str, str])
    samples: Mapping[int, str] = field(default_factory=dict[int, str])

    @classmethod
    def of_script(cls, facts: Mapping[str, str], places: Mapping[str, str], samples: Mapping[int, str]) -> DataIdentity:
        """The identity of a script's own data set."""
        text = json.dumps([sorted(facts.items()), sorted(samples.items())], allow_nan=False)
        return cls(hashlib.sha256(text.encode()).hexdigest()[:16], facts, places, samples)

    def changes(self, here: DataIdentity, trained: int) -> list[str]:
        """A phrase for everything that is other in the samples `here` than in those of a checkpoint,
        which has trained the first `trained` of them; empty: they are the same.
        """
        if not (self.facts and here.facts):
            return [] if self.fingerprint == here.fingerprint else [str(here)]
        names = dict.fromkeys((*self.facts, *here.facts))
        found = [
            f"{name} was {self._told(name)} and is {here._told(name)}"
            for name in names
            if self.facts.get(name) != here.facts.get(name)
        ]
        both = sorted(number for number in self.samples.keys() & here.samples.keys() if number < trained)
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
        """The identity that `to_body` wrote.

        Raises:
            ConfigError: the body is none.
        """
        try:
            facts, places = ({str(name): str(value) for name, value in body[of].items()} for of in ("facts", "places"))
            samples = {int(number): str(digest) for number, digest in body["samples"].items()}
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise ConfigError(f"not what a data set is: {type(error).__name__}: {error}; got {body!r:.80}") from None
        return cls(fingerprint, facts, places, samples)
