"""Blends: shares of samples by weight, spread evenly, by number alone."""

from collections import Counter

import pytest

from megatron_balance.errors import ConfigError
from megatron_balance.workloads.documents import Blend, shares


@pytest.mark.parametrize(
    ("weights", "period", "counts"),
    [
        ((3.0, 1.0), 8, (6, 2)),
        ((0.5, 0.3, 0.2), 10, (5, 3, 2)),
        ((1.0, 1.0, 1.0), 10, (4, 3, 3)),
        ((1.0, 1e-9), 10, (9, 1)),
        ((1.0, 1e-9, 1e-9), 10, (8, 1, 1)),
        ((7.0,), 5, (5,)),
    ],
)
def test_shares_are_in_proportion_and_none_is_left_out(
    weights: tuple[float, ...], period: int, counts: tuple[int, ...]
) -> None:
    assert shares(weights, period) == counts


@pytest.mark.parametrize("weights", [(), (0.0, 1.0), (-1.0, 2.0), (float("nan"),), (float("inf"), 1.0)])
def test_weights_that_are_none_are_refused(weights: tuple[float, ...]) -> None:
    with pytest.raises(ConfigError, match=r"weights of a blend .*: expected numbers above 0"):
        shares(weights)


def test_samples_are_spread_evenly_and_each_corpus_goes_on_over_periods() -> None:
    blend = Blend((6, 3, 1))
    dealt = [blend.locate(index) for index in range(40)]
    assert Counter(corpus for corpus, _ in dealt) == {0: 24, 1: 12, 2: 4}
    for corpus in range(3):
        assert [at for of, at in dealt if of == corpus] == list(range(Counter(of for of, _ in dealt)[corpus]))
    assert all(2 <= sum(corpus == 0 for corpus, _ in dealt[at : at + 4]) <= 3 for at in range(37))
    with pytest.raises(IndexError):
        blend.locate(-1)
