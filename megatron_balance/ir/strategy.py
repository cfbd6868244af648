"""Strategies: pipelines of unlike degrees, side by side on the ranks of a job (Hydraulis, arXiv
2412.07894, section 3).

A scheme <TP, PP, CP> is one pipeline's degrees. A strategy lays schemes on neighbouring ranks in the
order in which it names them, written `tp4-pp1-cp1+2*tp1-pp2-cp1`. Ranks may be left over.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import groupby

from megatron_balance.errors import ConfigError

_PART = re.compile(r"(?:([1-9]\d{0,5})\*)?tp([1-9]\d{0,5})-pp([1-9]\d{0,5})-cp([1-9]\d{0,5})")


@dataclass(frozen=True, slots=True, order=True)
class Scheme:
    """Degrees of tensor, pipeline and context parallelism of one pipeline of the model."""

    tensor: int = 1
    pipeline: int = 1
    context: int = 1

    @property
    def num_ranks(self) -> int:
        return self.tensor * self.pipeline * self.context

    def __str__(self) -> str:
        return f"tp{self.tensor}-pp{self.pipeline}-cp{self.context}"


@dataclass(frozen=True, slots=True)
class Strategy:
    """The scheme of each pipeline, on neighbouring ranks from rank 0 on."""

    schemes: tuple[Scheme, ...]

    def __post_init__(self) -> None:
        if not self.schemes:
            raise ConfigError("a strategy needs at least one pipeline, such as tp1-pp1-cp1")

    @property
    def num_ranks(self) -> int:
        return sum(scheme.num_ranks for scheme in self.schemes)

    def __str__(self) -> str:
        runs = [(scheme, len(list(run))) for scheme, run in groupby(self.schemes)]
        return "+".join(str(scheme) if count == 1 else f"{count}*{scheme}" for scheme, count in runs)

    @classmethod
    def parse(cls, text: str) -> Strategy:
        """The strategy that `str` wrote.

        Raises:
            ConfigError: the text is none.
        """
        schemes: list[Scheme] = []
        for part in text.replace(" ", "").split("+"):
            found = _PART.fullmatch(part)
            if found is None:
                raise ConfigError(
                    f"not a strategy: {text!r:.80}: expected pipelines such as tp4-pp1-cp1+2*tp1-pp2-cp1, got "
                    f"{part!r:.40}"
                )
            count, *degrees = found.groups()
            schemes += [Scheme(*map(int, degrees))] * int(count or 1)
        return cls(tuple(schemes))
