"""Least squares without negative coefficients."""

from __future__ import annotations

import pytest

from megatron_balance.cost.fits import (
    Quadratic,
    fit_link,
    fit_quadratic,
    least_squares,
)
from megatron_balance.errors import ConfigError


def test_a_quadratic_is_found_again() -> None:
    truth = Quadratic(2e-9, 3e-6, 4e-3)
    lengths = [128, 512, 2048, 8192, 32768]
    fitted = fit_quadratic(lengths, [truth.time_s(length) for length in lengths])
    assert (fitted.a, fitted.b, fitted.c) == pytest.approx((truth.a, truth.b, truth.c), rel=1e-6)


def test_columns_that_say_the_same_are_fitted_by_one_of_them() -> None:
    assert least_squares([[2.0, 4.0], [3.0, 6.0]], [4.0, 6.0], what="twice") == (2.0, 0.0)


def test_no_coefficient_is_negative_whatever_the_noise() -> None:
    fitted = fit_quadratic([1, 2, 3, 4], [1.0, 3.9, 9.2, 15.8])
    assert fitted.a > 0
    assert min(fitted.b, fitted.c) >= 0
    assert fitted.time_s(3) == pytest.approx(9, rel=0.05)


def test_a_links_alpha_and_rate_are_found_again() -> None:
    sizes = [1e3, 1e5, 1e7]
    link = fit_link(sizes, [2e-5 + size / 25e9 for size in sizes])
    assert (link.alpha_s, link.bytes_per_s) == pytest.approx((2e-5, 25e9))


def test_a_rate_is_found_even_where_noise_hides_it() -> None:
    link = fit_link([1e3, 2e3], [2e-3, 1.9e-3])
    assert link.alpha_s >= 0
    assert 0 < link.bytes_per_s < float("inf")


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: fit_quadratic([1, 1, 2], [1, 1, 2]), "at least 3 different lengths"),
        (lambda: fit_link([5, 5], [1, 1]), "at least 2 different message sizes"),
        (lambda: fit_link([1, 2], [0, 1]), "must be positive seconds"),
    ],
)
def test_too_little_to_fit_is_refused(call, sentence) -> None:
    with pytest.raises(ConfigError, match=sentence):
        call()
