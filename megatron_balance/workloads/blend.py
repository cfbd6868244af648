"""Blends: the corpus that gives sample number i, and the sample's number there, computed from the
weights and i alone.

Samples are dealt in periods. A period holds each corpus's share in whole samples, spread evenly, and
every period is the same; so a run that resumes at any sample needs no count of what went before.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from megatron_balance.errors import ConfigError

PERIOD = 1 << 16
"""Samples in which shares are exact, to one sample."""


def shares(weights: Sequence[float], period: int = PERIOD) -> tuple[int, ...]:
    """Samples of each corpus in a period, in proportion to weights (largest remainder), at least one.

    Raises:
        ConfigError: a weight that is not positive and finite, or more corpora than samples.
    """
    wrong = [weight for weight in weights if not (math.isfinite(weight) and weight > 0)]
    if wrong or not weights:
        raise ConfigError(
            f"weights of a blend {list(weights)}: expected numbers above 0; leave a corpus of no weight out"
        )
    if len(weights) > period:
        raise ConfigError(f"a blend of {len(weights)} corpora: at most {period} are read")
    total = math.fsum(weights)
    # Every corpus has its one sample; the others are dealt in proportion to what is still missing.
    wanted = np.maximum(np.array([period * weight / total for weight in weights]) - 1, 0)
    if wanted.any():
        wanted *= (period - len(weights)) / wanted.sum()
    counts = np.floor(wanted).astype(np.int64)
    left = period - len(weights) - int(counts.sum())
    counts[np.argsort(counts - wanted, kind="stable")[:left]] += 1
    return tuple((counts + 1).tolist())


class Blend:
    """The endless sequence of (corpus, sample) of a blend."""

    def __init__(self, counts: Sequence[int]) -> None:
        """Spread `counts` samples of each corpus over a period of sum(counts).

        The k-th of n samples stands at (k + 1/2) / n of the period; of two at one place the earlier
        corpus's comes first.
        """
        counted = np.array(counts, dtype=np.int64)
        corpora = np.repeat(np.arange(len(counts)), counted)
        place = np.arange(len(corpora)) - (np.cumsum(counted) - counted)[corpora]
        order = np.argsort((place + 0.5) / counted[corpora], kind="stable")
        self.counts: NDArray[np.int64] = counted
        self._corpus, self._place = corpora[order], place[order]

    def locate(self, index: int) -> tuple[int, int]:
        """Corpus of sample `index`, and the number of the sample there."""
        if index < 0:
            raise IndexError(f"sample {index}: samples are numbered from 0")
        period, at = divmod(index, len(self._corpus))
        corpus = int(self._corpus[at])
        return corpus, period * int(self.counts[corpus]) + int(self._place[at])
