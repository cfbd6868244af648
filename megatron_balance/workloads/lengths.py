"""Lengths to plan for: the distributions of the papers, files, corpora; and histograms of them.

`arxiv`, `github` and `prolong64k` are Table 2 of the Zeppelin paper (section 5): the share of documents per bin of length, k = 1024.
The table gives shares only. We draw uniformly inside a bin, begin the first bin ("< 1k") at 129 tokens, and normalise
each row: GitHub's printed shares sum to 0.945, the others to 1.
`lognormal` has a median of 1,500 tokens and sigma 1.3: many short documents and a few that fill the context.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
from numpy.typing import NDArray

from megatron_balance.errors import ConfigError
from megatron_balance.workloads.documents import CutPolicy, open_stream

Lengths = tuple[int, ...]
"""Lengths in tokens of the sequences of one batch."""

# Bin i holds lengths BIN_EDGES[i] + 1 to BIN_EDGES[i + 1].
BIN_EDGES = (128, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072, 262144)
SHARES: dict[str, tuple[float, ...]] = {
    "arxiv": (0.032, 0.03, 0.08, 0.219, 0.338, 0.224, 0.077, 0.0, 0.0),
    "github": (0.0, 0.34, 0.095, 0.104, 0.107, 0.102, 0.088, 0.064, 0.045),
    "prolong64k": (0.231, 0.042, 0.021, 0.012, 0.013, 0.008, 0.673, 0.0, 0.0),
}
LOGNORMAL_MEDIAN = 1500.0
LOGNORMAL_SIGMA = 1.3
DATASETS = (*SHARES, "lognormal")


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar of a histogram: documents of `low` to `high` tokens, both included."""

    low: int
    high: int
    documents: int
    tokens: int


def draw(name: str, tokens: int, batches: int, seed: int | Sequence[int]) -> list[Lengths]:
    """Batches of document lengths, each drawn until it holds `tokens` tokens; the last document of a batch is cut to fit.

    Args:
        name: one of `DATASETS`.
        tokens: tokens of a batch, at least 1.
        batches: how many batches.
        seed: of the generator; the batches of one call are drawn one after another from it.

    Raises:
        ConfigError: an unknown name, or a number that cannot be.
    """
    if name not in DATASETS:
        raise ConfigError(f"--dataset {name!r} is not known; choose one of {', '.join(DATASETS)}, or give --lengths-file")
    if tokens < 1 or batches < 1:
        raise ConfigError(f"--tokens {tokens} --batches {batches}: both must be at least 1")
    if min([seed] if isinstance(seed, int) else seed) < 0:
        raise ConfigError(f"--seed {seed}: must be at least 0")
    generator = np.random.default_rng(seed)
    return [_fill(name, tokens, generator) for _ in range(batches)]


def _fill(name: str, tokens: int, generator: np.random.Generator) -> Lengths:
    lengths: list[int] = []
    left = tokens
    while left:
        lengths.append(min(_document(name, generator), left))
        left -= lengths[-1]
    return tuple(lengths)


def _document(name: str, generator: np.random.Generator) -> int:
    """Length of one document."""
    if name == "lognormal":
        return max(1, round(generator.lognormal(np.log(LOGNORMAL_MEDIAN), LOGNORMAL_SIGMA)))
    shares = np.array(SHARES[name])
    chosen = int(generator.choice(len(shares), p=shares / shares.sum()))
    return int(generator.integers(BIN_EDGES[chosen] + 1, BIN_EDGES[chosen + 1], endpoint=True))


def read_lengths(path: Path) -> list[Lengths]:
    """Batches of lengths from a JSON file: `[lengths...]` is one batch, `[[lengths...], ...]` several.

    Raises:
        ConfigError: no such file, not JSON, or something in it that is not a length; names the batch and the place.
    """
    try:
        content: object = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}; --lengths-file takes a JSON file of lengths in tokens") from error
    except ValueError as error:  # JSON and UTF-8 errors alike
        raise ConfigError(f"{path}: not JSON ({error}); expected [4096, 512, ...] or [[4096, 512], [1024], ...]") from error
    if isinstance(content, list) and content and isinstance(content[0], list):
        return [_batch(entry, f"{path}: batch {number}") for number, entry in enumerate(cast(list[object], content))]
    return [_batch(cast(object, content), f"{path}")]


def _batch(entries: object, where: str) -> Lengths:
    """One batch, every entry checked."""
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"{where}: holds {_describe(cast(object, entries))}; expected [4096, 512, ...] or [[4096, 512], [1024], ...]")
    lengths: list[int] = []
    for place, length in enumerate(cast(list[object], entries)):
        # bool is an int to Python, and `true` is no length.
        if type(length) is not int or length < 1:
            raise ConfigError(f"{where}: length {place} is {_describe(length)}; a length is a whole number of tokens, at least 1")
        lengths.append(length)
    return tuple(lengths)


def _describe(value: object) -> str:
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "a list" if value else "an empty list"
    return json.dumps(value)


def corpus_lengths(prefix: str, seq_length: int, samples: int, batches: int, seed: int, policy: CutPolicy = "split") -> list[Lengths]:
    """Batches as training on a Megatron corpus meets them: the first `batches` batches of `samples` samples each.

    Raises:
        DataError: the corpus is damaged or empty.
    """
    stream = open_stream(prefix, seq_length, seed, policy)
    return [stream.lengths_between(batch * samples, (batch + 1) * samples) for batch in range(batches)]


def histogram(lengths: NDArray[np.int64]) -> list[Bar]:
    """Bars that double in width, from the shortest document to the longest; bars between them that hold nothing are kept."""
    lengths = lengths[lengths > 0]
    if not len(lengths):
        return []
    exponents = np.frexp(lengths.astype(np.float64))[1] - 1  # 2^e <= length < 2^(e + 1), exact below 2^53
    first, last = int(exponents.min()), int(exponents.max())
    documents = np.bincount(exponents - first)
    tokens = np.bincount(exponents - first, weights=lengths).astype(np.int64)
    return [
        Bar(1 << exponent, (2 << exponent) - 1, int(documents[exponent - first]), int(tokens[exponent - first]))
        for exponent in range(first, last + 1)
    ]


def quantiles(lengths: NDArray[np.int64]) -> dict[str, int]:
    """Minimum, deciles of interest, maximum and mean of the lengths, in tokens (rounded down to a length that occurs; the mean rounded)."""
    at = {"min": 0.0, "p10": 0.1, "median": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
    values = np.quantile(lengths, list(at.values()), method="lower")
    return {**{name: int(value) for name, value in zip(at, values, strict=True)}, "mean": round(float(lengths.mean()))}
