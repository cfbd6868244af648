"""Documents that a planner holds back, kept on the rank that gave them until their step comes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megatron_balance.training.ledger import HeldDocument
from megatron_balance.training.sequences import NOTHING, PoolLengths, Recalled, Sequences

Place = tuple[int, int]
"""Where a document was dealt: number of the microbatch in the run, and number in it."""


@dataclass(frozen=True, slots=True, eq=False)
class Dealing:
    """The documents of a step, as all ranks gave them.

    `first`: number of its first microbatch in the run. `mine`: by microbatch, this rank's.
    `numbers`: by microbatch, of this rank's documents, the number among all that it ever gave.
    """

    first: int
    mine: list[Sequences]
    numbers: list[tuple[int, ...]]
    shared: PoolLengths

    def own(self, rank: int) -> list[tuple[Place, int]]:
        """Of this rank's documents, the place and the number."""
        made: list[tuple[Place, int]] = []
        for m, (owners, numbers) in enumerate(zip(self.shared.owners, self.numbers, strict=True)):
            places = [(self.first + m, at) for at, owner in enumerate(owners.tolist()) if owner == rank]
            made += zip(places, numbers, strict=True)
        return made


@dataclass(frozen=True, slots=True, eq=False)
class WaitingDocument:
    """A document that waits. `owner`: the pool rank that has it; there `number` and `rows` [n, C]."""

    owner: int
    number: int = -1
    rows: Tensor | None = None


class Waiting:
    """The documents that wait, on one rank."""

    def __init__(self, rank: int, state: Sequence[Sequence[Any]] = ()) -> None:
        """The documents of `state`, as `state()` gave it; default none.

        Raises:
            ValueError, TypeError: that is no state.
        """
        self._rank = rank
        self._kept: dict[Place, WaitingDocument] = {
            (sample, place): WaitingDocument(owner, number, rows) for sample, place, owner, number, rows in state
        }

    def __len__(self) -> int:
        return len(self._kept)

    def recall(self, wanted: Sequence[HeldDocument]) -> Recalled:
        """The documents that a step trains."""
        if not wanted:
            return NOTHING
        kept = [self._kept[each.sample, each.place] for each in wanted]
        return Recalled(
            tuple((each.number, each.length) for each in wanted),
            tuple(each.owner for each in kept),
            tuple((held.number, each.rows) for held, each in zip(wanted, kept, strict=True) if each.rows is not None),
        )

    def number(self, held: HeldDocument) -> int:
        """The number of a document of this rank."""
        return self._kept[held.sample, held.place].number

    def keep(self, held: Sequence[HeldDocument], dealing: Dealing) -> None:
        """Keep exactly the documents `held` behind a step that dealt `dealing`."""
        before, self._kept = self._kept, {}
        own = dict(dealing.own(self._rank))
        for each in held:
            place = (each.sample, each.place)
            if place in before:
                self._kept[place] = before[place]
                continue
            m = each.sample - dealing.first
            owner = int(dealing.shared.owners[m][each.place])
            kept = WaitingDocument(owner)
            if owner == self._rank:
                number = own[place]
                at = dealing.numbers[m].index(number)
                rows = dealing.mine[m].rows.split(dealing.mine[m].lengths)[at]
                kept = WaitingDocument(owner, number, rows.clone())
            self._kept[place] = kept

    def state(self) -> list[tuple[int, int, int, int, Tensor | None]]:
        """Plain data for a checkpoint."""
        return [(*place, kept.owner, kept.number, kept.rows) for place, kept in self._kept.items()]
