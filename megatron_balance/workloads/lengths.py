"""Lengths to plan for: the distributions of the papers, data codes, corpora and other files; and
histograms of them.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Sequence
from decimal import Decimal
from itertools import count
from pathlib import Path
from typing import cast

import numpy as np
from numpy.typing import NDArray

from megatron_balance.errors import ConfigError
from megatron_balance.files import UnreadableError, parse_json, read_text
from megatron_balance.workloads import datasets, distributions
from megatron_balance.workloads.distributions import DISTRIBUTIONS
from megatron_balance.workloads.documents import shuffled

Lengths = tuple[int, ...]
"""Lengths in tokens of the sequences of one batch."""

MOST_TOKENS, MOST_BATCHES = 10**11, 10**6
"""Of one drawing: more is a typing mistake, which would take hours and the machine's memory."""
DATASETS = tuple(DISTRIBUTIONS)
"""Names of the distributions (`workloads.distributions` has their sources); data codes and paths
are taken too.
"""


def draw(name: str, tokens: int | None, batches: int, seed: int | Sequence[int]) -> list[Lengths]:
    """Batches of document lengths of `tokens` tokens each; the last document of one is cut to fit.

    Args:
        name: one of `DATASETS`, data codes (KnapFormer), or a path, whose documents come in an order
            drawn from the seed, again and again.
        tokens: of a batch; None: data codes say themselves how much it holds.
        batches: how many, one after another from the same generator.
        seed: of the generator.

    Raises:
        ConfigError: an unknown name, or a number that cannot be.
        DataError: a damaged file.
    """
    if batches < 1 or (tokens is not None and tokens < 1):
        raise ConfigError(f"--tokens {tokens} --batches {batches}: both must be at least 1")
    if batches > MOST_BATCHES or (tokens or 0) * batches > MOST_TOKENS:
        raise ConfigError(
            f"--tokens {tokens} --batches {batches}: expected at most {MOST_TOKENS} tokens in all, in {MOST_BATCHES} "
            "batches at most"
        )
    seeds = [seed] if isinstance(seed, int) else list(seed)
    if min(seeds) < 0:
        raise ConfigError(f"--seed {seed}: must be at least 0")
    if distributions.is_data_code(name):
        if tokens is not None:
            raise ConfigError(
                f"--tokens {tokens}: the data codes of --dataset {name} say how many tokens a batch has; leave "
                "--tokens out"
            )
        return [
            tuple(length for gpu in batch for length in gpu)
            for batch in distributions.draw_by_gpu(name, batches, seeds)
        ]
    if name not in DISTRIBUTIONS and not datasets.is_path(name):
        raise ConfigError(
            f"--dataset {name!r} is not known; choose one of {', '.join(DATASETS)}, data codes such as g8b4i256f1s0, "
            f"a path to a corpus (.idx), JSONL, Parquet or Arrow, or give --lengths-file"
        )
    if tokens is None:
        raise ConfigError(f"--dataset {name} needs --tokens N, the tokens of a batch")
    if name not in DISTRIBUTIONS:
        documents = _endless(datasets.document_lengths(name), seeds)
    else:
        distribution, generator = DISTRIBUTIONS[name], np.random.default_rng(seed)
        documents = iter(lambda: distribution.document(generator), None)
    return [_fill(documents, tokens) for _ in range(batches)]


def _endless(lengths: NDArray[np.int64], seeds: list[int]) -> Iterator[int]:
    """The lengths in an order drawn from the seed, then in another one, without end."""
    for epoch in count():
        yield from lengths[shuffled(len(lengths), *seeds, epoch)].tolist()


def _fill(documents: Iterator[int], tokens: int) -> Lengths:
    lengths: list[int] = []
    left = tokens
    while left:
        lengths.append(min(next(documents), left))
        left -= lengths[-1]
    return tuple(lengths)


def read_lengths(path: Path) -> list[Lengths]:
    """Batches of lengths from a file, which may be compressed (.gz, .zst).

    JSON: `[lengths...]` is one batch, `[[lengths...], ...]` several. Lines of one length each are one
    batch; of several, a batch each. CSV with a header: the first of `datasets.COLUMNS` that is a
    number; a column `batch` says which rows belong together. Raises ConfigError with batch and place.
    """
    try:
        text = read_text(path)
        content: object = parse_json(text) if _is_json(text) else _of_lines(text)
    except OSError as error:
        raise ConfigError(
            f"{path}: {error.strerror or error}; --lengths-file takes a file of lengths in tokens: JSON, CSV or lines"
        ) from error
    except UnreadableError as error:
        raise ConfigError(f"{path}: {error}; expected [4096, 512, ...] or [[4096, 512], [1024], ...]") from error
    if isinstance(content, list) and content and isinstance(content[0], list):
        return [_batch(entry, f"{path}: batch {number}") for number, entry in enumerate(cast(list[object], content))]
    return [_batch(cast(object, content), f"{path}")]


def tokens_of(word: str) -> int | None:
    """A number of tokens: 4096, 128k (of 1,024), 1m (of 1,024 k); None: it is none."""
    digits = word.strip().lower()
    unit = {"k": 2**10, "m": 2**20}.get(digits[-1:], 1)
    try:
        number = Decimal(digits[:-1]) * unit if unit > 1 else Decimal(int(digits))
    except (ValueError, ArithmeticError):
        return None
    return int(number) if number.is_finite() and number == int(number) and abs(number) < 2**63 else None


def _length_of(word: str) -> object:
    """A length in a file; a word that is none stays."""
    plain = datasets.whole(word)
    number = tokens_of(word) if plain == word and word[-1:] in _UNITS and word[:1].isdigit() else None
    return plain if number is None else number


_UNITS = ("k", "K", "m", "M")


def _is_json(text: str) -> bool:
    """Whether a text is meant as JSON: what begins with a digit or a name is lines."""
    return not text.strip() or text.lstrip()[0] in '[{"-'


def _of_lines(text: str) -> list[object]:
    """Lengths of lines, or of CSV with a header, as JSON has them; words that are no numbers stay."""
    try:
        rows = [row for row in csv.reader(text.replace("\t", ",").splitlines()) if any(word.strip() for word in row)]
    except csv.Error as error:
        raise UnreadableError(f"not CSV: {error}") from None
    if not rows:
        raise UnreadableError("no lengths in any of its lines")
    header = [word.strip() for word in rows[0]]
    batches = [[_length_of(word) for word in " ".join(row).split()] for row in rows]
    if not all(isinstance(entry, int) for entry in batches[0]):
        return _of_columns(header, rows[1:])
    if all(len(batch) == 1 for batch in batches):
        return [batch[0] for batch in batches]
    return cast("list[object]", batches)


def _of_columns(header: list[str], rows: list[list[str]]) -> list[object]:
    column = next((name for name in datasets.COLUMNS if name in header), None)
    if column is None:
        raise UnreadableError(
            f"no column of lengths; it has {', '.join(header)}, and {datasets.COLUMNS[0]} is looked for"
        )
    at, grouped = header.index(column), header.index("batch") if "batch" in header else None
    batches: dict[str, list[object]] = {}
    for number, row in enumerate(rows, start=2):
        if len(row) != len(header):
            raise UnreadableError(f"line {number} has {len(row)} columns, the first line has {len(header)}")
        batches.setdefault("" if grouped is None else row[grouped], []).append(_length_of(row[at].strip()))
    found = list(batches.values())
    return cast("list[object]", found) if grouped is not None else found[0] if found else []


def _batch(entries: object, where: str) -> Lengths:
    """One batch, every entry checked."""
    if not isinstance(entries, list) or not entries:
        raise ConfigError(
            f"{where}: holds {_describe(cast(object, entries))}; expected [4096, 512, ...] or [[4096, 512], [1024], "
            "...]"
        )
    lengths: list[int] = []
    for place, length in enumerate(cast(list[object], entries)):
        # bool is an int to Python, and `true` is no length.
        if type(length) is not int or length < 1:
            raise ConfigError(
                f"{where}: length {place} is {_describe(length)}; a length is a whole number of tokens, at least 1"
            )
        lengths.append(length)
    return tuple(lengths)


def _describe(value: object) -> str:
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "a list" if value else "an empty list"
    return json.dumps(value)


def histogram(lengths: NDArray[np.int64]) -> list[dict[str, int]]:
    """Bars that double in width: `low` to `high` tokens, both included; empty ones are kept."""
    lengths = lengths[lengths > 0]
    if not len(lengths):
        return []
    exponents = np.frexp(lengths.astype(np.float64))[1] - 1  # 2^e <= length < 2^(e + 1), exact below 2^53
    first, last = int(exponents.min()), int(exponents.max())
    documents = np.bincount(exponents - first)
    tokens = np.bincount(exponents - first, weights=lengths).astype(np.int64)
    return [
        {
            "low": 1 << exponent,
            "high": (2 << exponent) - 1,
            "documents": int(documents[exponent - first]),
            "tokens": int(tokens[exponent - first]),
        }
        for exponent in range(first, last + 1)
    ]


def quantiles(lengths: NDArray[np.int64]) -> dict[str, int]:
    """Minimum, some deciles, maximum (lengths that occur) and rounded mean, in tokens."""
    at = {"min": 0.0, "p10": 0.1, "median": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
    values = np.quantile(lengths, list(at.values()), method="lower")
    return {**{name: int(value) for name, value in zip(at, values, strict=True)}, "mean": round(float(lengths.mean()))}
