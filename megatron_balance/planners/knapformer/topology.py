"""Topologies: into which groups the ranks are divided, as KnapFormer writes it (section 3.2).

`g1n2+g2n1+g4n1`: two groups of one rank, one of two and one of four, on neighbouring ranks in this
order. A unit smaller than the pool repeats until all ranks are in a group.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

from megatron_balance.errors import ConfigError

_TERM = re.compile(r"g([1-9]\d*)n([1-9]\d*)")


@dataclass(frozen=True, slots=True)
class Topology:
    """Sizes of the groups of one unit, in the order of their ranks."""

    sizes: tuple[int, ...]

    @property
    def num_ranks(self) -> int:
        """Ranks of a unit."""
        return sum(self.sizes)

    def __str__(self) -> str:
        return "+".join(f"g{size}n{len(list(alike))}" for size, alike in groupby(self.sizes))

    def repeated(self, num_ranks: int) -> Topology:
        """The topology of a pool of `num_ranks`: the unit as often as it fits.

        Raises:
            ConfigError: the unit does not fit a whole number of times.
        """
        if num_ranks % self.num_ranks:
            raise ConfigError(
                f"topology {self}: a unit of {self.num_ranks} ranks does not divide the {num_ranks} ranks of the "
                f"pool. Change it so that its ranks (the sum of G x N over its terms gGnN) divide {num_ranks}"
            )
        return Topology(self.sizes * (num_ranks // self.num_ranks))

    def groups(self) -> list[tuple[int, ...]]:
        """The ranks of each group."""
        return [tuple(range(stop - size, stop)) for size, stop in zip(self.sizes, accumulate(self.sizes), strict=True)]


def parse(text: str) -> Topology:
    """The topology of a text such as `g1n2+g2n1+g4n1`.

    Raises:
        ConfigError: it is not one; says which term is wrong.
    """
    sizes: list[int] = []
    for term in text.split("+"):
        match = _TERM.fullmatch(term)
        if match is None:
            raise ConfigError(
                f"topology {text!r}: expected terms gGnN joined by '+', each N groups of G ranks (both 1 or more, no "
                f"spaces), such as g1n2+g2n1+g4n1; got {term!r}"
            )
        size, count = (int(number) for number in match.groups())
        sizes += [size] * count
    return Topology(tuple(sizes))


def check_heads(sizes: Sequence[int], num_heads: int) -> None:
    """Reject groups whose ranks cannot be given equally many heads.

    Raises:
        ConfigError: there is one; says what would do.
    """
    wrong = sorted({size for size in sizes if num_heads % size})
    if wrong:
        right = [size for size in range(1, num_heads + 1) if num_heads % size == 0]
        raise ConfigError(
            f"a group of {wrong[0]} ranks cannot share {num_heads} heads equally; use groups of "
            f"{', '.join(map(str, right))} ranks, or choose a fallback: option heads: uneven (some ranks attend with "
            "a head more) or heads: ring (keys and values go round such groups)"
        )
