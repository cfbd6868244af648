"""Normalisations of losses over rollouts, as one table of weights by token.

A step's loss is the sum over all ranks of weight times a token's own loss. Weights are made where all
rollouts of a step are known, so they are right whatever rank computes what: groups that lie on several
ranks, ranks without rollouts. They go to `SequenceBalancer.rollouts(weights=...)`, or beside the
labels of plain documents.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_balance.errors import ConfigError, DataError
from megatron_balance.ir.arrays import Bools, Floats, Ints


@dataclass(frozen=True, slots=True)
class _CountedTokens:
    """Tokens that count of each rollout of a step, `tokens` [n]; its group, `group` [n] from 0 on;
    the constant that one normalisation divides by.
    """

    tokens: Ints
    group: Ints
    constant: float | None = None


def _by_group(counted: _CountedTokens) -> Floats:
    totals = np.bincount(counted.group, counted.tokens)
    return 1 / np.maximum(totals[counted.group] * np.count_nonzero(totals), 1)


def _by_constant(counted: _CountedTokens) -> Floats:
    if counted.constant is None or not 0 < counted.constant < np.inf:
        raise ConfigError(
            f"normalisation constant: expected constant, more than 0, such as the most tokens of a response; got "
            f"{counted.constant}"
        )
    return np.full(len(counted.tokens), 1 / (counted.constant * max(1, len(counted.tokens))))


# What a token of each rollout counts [n].
NORMALISATIONS: dict[str, Callable[[_CountedTokens], Floats]] = {
    # DAPO (arXiv 2503.14476, Eq. 8), and a mean over tokens: all tokens of the step alike.
    "token": lambda counted: np.full(len(counted.tokens), 1 / max(1, int(counted.tokens.sum()))),
    # GRPO (arXiv 2402.03300, Eq. 3) and GSPO: every rollout counts alike, and in it every token.
    "sequence": lambda counted: 1 / (np.maximum(counted.tokens, 1) * max(1, len(counted.tokens))),
    # Every group that has tokens counts alike, and in it every token.
    "group": _by_group,
    # Dr. GRPO (arXiv 2503.20783): rollouts alike, each over a constant whatever its length.
    "constant": _by_constant,
}


def token_weights(
    counts: Sequence[Any],
    advantages: Sequence[Any],
    how: str,
    *,
    groups: Sequence[Hashable] | None = None,
    constant: float | None = None,
) -> list[Floats]:
    """The weight of each token of each rollout [tokens], for the step's whole loss.

    Args:
        counts: of each rollout of the step, on whatever rank, for each token whether it counts (those
            of the response do).
        advantages: of each rollout a number, or one a token.
        how: one of `NORMALISATIONS`.
        groups: of each rollout a label; None: each is alone.
        constant: tokens that `constant` divides by.

    Raises:
        ConfigError: no such normalisation; `constant` without one.
        DataError: other numbers of rollouts or tokens, or what is not finite.
    """
    if how not in NORMALISATIONS:
        raise ConfigError(f"normalisation {how!r}: expected one of {', '.join(NORMALISATIONS)}")
    labels = list(range(len(counts)) if groups is None else groups)
    if not len(counts) == len(advantages) == len(labels):
        raise DataError(
            f"expected an advantage and a group for each of {len(counts)} rollouts, got {len(advantages)} and "
            f"{len(labels)}"
        )
    masks = [np.asarray(each, dtype=bool) for each in counts]
    number = {label: at for at, label in enumerate(dict.fromkeys(labels))}
    group = np.array([number[label] for label in labels], dtype=np.int64)
    factors = NORMALISATIONS[how](_CountedTokens(np.array([mask.sum() for mask in masks], np.int64), group, constant))
    return [_weights(at, *each) for at, each in enumerate(zip(masks, advantages, factors.tolist(), strict=True))]


def _weights(at: int, mask: Bools, advantage: Any, factor: float) -> Floats:
    given = np.asarray(advantage, dtype=np.float64)
    if mask.ndim != 1 or given.shape not in ((), mask.shape) or not np.isfinite(given).all():
        raise DataError(
            f"rollout {at}: expected a finite advantage, or one for each of its tokens {list(mask.shape)}, got "
            f"{list(given.shape)}"
        )
    return np.where(mask, given * factor, 0.0)


def sequence_ratios(
    log_ratios: Sequence[Any], counts: Sequence[Any], advantages: Sequence[float], clip: tuple[float, float]
) -> Floats:
    """GSPO's clipped ratio of each rollout [n] (arXiv 2507.18071, Eq. 7): advantages times these give,
    under normalisation `sequence`, weights of log-probabilities with the gradient of its loss.

    The ratio is exp of the mean log ratio of the tokens that count; 0 where the loss is clipped, which
    has no gradient. `log_ratios`: of each rollout, new minus old log-probability of each token;
    `clip`: how far below and above 1 the ratio may be. DataError: other numbers of tokens.
    """
    found: list[float] = []
    for at, (log_ratio, mask, advantage) in enumerate(zip(log_ratios, counts, advantages, strict=True)):
        values, counted = np.asarray(log_ratio, dtype=np.float64), np.asarray(mask, dtype=bool)
        if values.shape != counted.shape:
            raise DataError(
                f"rollout {at}: expected a log ratio for each of {counted.shape} tokens, got {values.shape}"
            )
        ratio = float(np.exp(values[counted].mean())) if counted.any() else 1.0
        clipped = ratio > 1 + clip[1] if advantage > 0 else ratio < 1 - clip[0]
        found.append(0.0 if clipped else ratio)
    return np.array(found)
