"""The corpora that Megatron's command line names: prefixes, weights and splits, and opening them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from megatron.core.datasets.utils import Split

from megatron_balance.errors import BalanceError, ConfigError
from megatron_balance.megatron import flags
from megatron_balance.workloads.documents import Corpus, of_corpus, shares, split_documents
from megatron_balance.workloads.idx import check_bin, check_index, map_index, prefix_of

CORPUS_OPTIONS = (
    "data_path",
    "data_args_path",
    "train_data_path",
    "valid_data_path",
    "test_data_path",
    "per_split_data_args_path",
)
"""Megatron's ways of naming corpora."""


class DataArguments(Protocol):
    """The arguments of Megatron that are read here."""

    data_path: Sequence[str] | None
    data_args_path: str | None
    split: str | None
    seq_length: int
    seed: int
    dataloader_type: str
    eval_iters: int


@dataclass(frozen=True, slots=True)
class SplitSource:
    """Where the documents of one split are: corpora with weights, and which part of each.

    `flag`: what decides that part; `weights`: None: by the samples of an epoch.
    """

    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None
    split: tuple[float, float, float]
    part: int
    flag: str


WHOLE = (1.0, 0.0, 0.0)


def sources(args: DataArguments) -> tuple[SplitSource, SplitSource, SplitSource]:
    """The corpora of training, validation and test, as Megatron reads them from the command line.

    Raises:
        ConfigError: a file of paths that cannot be read, or weights for some corpora only.
    """
    from megatron.training.utils import get_blend_and_blend_per_split

    try:
        blend, per_split = get_blend_and_blend_per_split(args)
    except OSError as error:
        raise ConfigError(f"{error.filename}: cannot be read ({error.strerror}); it is a file of data paths") from error
    except (AssertionError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            "the data paths: expected PREFIX, PREFIX PREFIX ..., or WEIGHT PREFIX WEIGHT PREFIX ... (in "
            '--per-split-data-args-path, JSON with "train", "valid" and "test" of these)'
        ) from error
    if per_split is not None:
        flags = ("--train-data-path", "--valid-data-path", "--test-data-path")
        train, valid, test = (
            SplitSource(*_prefixes(given), WHOLE, 0, flag) for flag, given in zip(flags, per_split, strict=True)
        )
    else:
        prefixes, weights = _prefixes(blend)
        train, valid, test = (
            SplitSource(prefixes, weights, parse_split(args.split), part, f"--split {args.split}") for part in range(3)
        )
    return train, valid, test


def _prefixes(
    blend: tuple[Sequence[str], Sequence[float] | None] | None,
) -> tuple[tuple[str, ...], tuple[float, ...] | None]:
    prefixes, weights = blend or ((), None)
    return tuple(map(prefix_of, prefixes)), None if weights is None else tuple(weights)


CACHED_FROM = 100_000
"""Pieces from which on their order is kept on disk. Fewer are sorted in a tenth of a second."""


def open_corpus(prefix: str, args: DataArguments) -> Corpus:
    """A corpus, and the cache of its orders where it is large.

    The index is checked whole once; where its cache says so, not again.

    Raises:
        DataError: the corpus is damaged or empty.
    """
    index = map_index(prefix)
    if index.num_documents + index.num_tokens // args.seq_length < CACHED_FROM:
        check_index(index)
        return Corpus(index)

    def check() -> np.ndarray:
        check_index(index)
        return np.ones(1, dtype=np.int8)

    check_bin(index)
    cache = of_corpus(index, getattr(args, "data_cache_path", None))
    cache.under("checked").get("checked", check)
    return Corpus(index, cache)


def data_reasons(args: DataArguments) -> list[str]:
    """The reasons why whole documents cannot be read under these arguments; empty: they can."""
    reasons = flags.reasons(args, "documents")
    if not any(getattr(args, name, None) for name in CORPUS_OPTIONS) and not reasons:
        reasons.append(
            "--data-path: missing; name a corpus, PREFIX of `megatron-balance corpus build PREFIX` or of "
            "preprocess_data.py"
        )
    return reasons


def corpus_reasons(args: DataArguments) -> list[str]:
    """The reasons why the corpora that the command line names cannot be read; empty: they can.

    What is seen here costs no more than opening the files, whatever their size: an index that is
    damaged inside is found when its documents are numbered.
    """
    reasons: list[str] = []
    try:
        named = sources(args)
    except BalanceError as error:
        return [str(error)]
    wanted = (not getattr(args, "skip_train", False), bool(args.eval_iters), False)
    num_documents: dict[str, int] = {}
    for source in named:
        for prefix in dict.fromkeys(source.prefixes):
            if prefix not in num_documents:
                num_documents[prefix] = 0
                try:
                    index = map_index(prefix)
                    check_bin(index)
                    num_documents[prefix] = index.num_documents
                except BalanceError as error:
                    reasons.append(str(error))
    for weights in dict.fromkeys(source.weights for source in named if source.weights is not None):
        try:
            shares(weights)
        except BalanceError as error:
            reasons.append(str(error))
    if reasons:
        return reasons
    for source, asked, name in zip(named, wanted, ("train", "valid", "test"), strict=True):
        parts = [split_documents(num_documents[prefix], source.split)[source.part] for prefix in source.prefixes]
        if asked and not any(parts):
            reasons.append(no_documents(source, name))
    return reasons


def no_documents(source: SplitSource, name: str) -> str:
    """The sentence about a split that is asked for and holds no document."""
    less = " or set --eval-iters 0" if name == "valid" else ""
    return (
        f"{source.flag}: leaves no documents of {' '.join(source.prefixes) or 'any corpus'} for the {name} set; give "
        f"it a larger share{less}"
    )


def parse_split(split: str | None) -> tuple[float, float, float]:
    """Weights of train, validation and test from --split ("969, 30, 1"), as Megatron reads it."""
    weights = [float(number) for number in re.findall(r"[.0-9]+", split or "")]
    if not 1 <= len(weights) <= len(Split) or sum(weights) <= 0:
        raise ConfigError(
            f"--split {split}: expected up to three weights for train, validation and test, for example 969,30,1"
        )
    train, valid, test = (*weights, 0.0, 0.0)[:3]
    return train, valid, test
