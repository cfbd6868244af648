"""Published A800 coefficients: units, MaxLen, refusals."""

from __future__ import annotations

import pytest

from megatron_balance.cost.published import PUBLISHED
from megatron_balance.errors import ConfigError
from megatron_balance.ir.strategy import Scheme


def test_coefficients_are_in_seconds() -> None:
    found = PUBLISHED["32b"].coefficients(Scheme(16))
    assert (found.a, found.b, found.c) == pytest.approx((1.37779723e-9, 1.02435387e-4, 0.14574761115393085))


def test_max_tokens_is_the_room_left_over_what_a_token_takes() -> None:
    hidden, vocabulary, ranks = 6656, 30592, 64
    state = 60 * hidden**2 * 201 * (0.75 / ranks + 0.25 / 16) + hidden * vocabulary * 32 * (0.75 / ranks + 0.25 / 16)
    room = (81252 - 5000 - 10 * 1024) * 2**20 - state
    assert PUBLISHED["32b"].max_tokens(Scheme(16), ranks) == int(room / (60 * hidden / 16 * 50))


def test_the_32b_schemes_hold_what_the_paper_gives_them() -> None:
    # Table 3 and Fig. 15a: sequences of 16K to 32K run under TP 16, those of 4K to 16K under TP 8.
    model = PUBLISHED["32b"]
    assert model.max_tokens(Scheme(16), 64) >= 32768 > model.max_tokens(Scheme(8), 64) >= 16384
    assert all(model.max_tokens(scheme, 1024) >= model.max_tokens(scheme, 64) for scheme in model.schemes())


@pytest.mark.parametrize("scheme", [Scheme(32), Scheme(3), Scheme(8, 1, 2)], ids=str)
def test_a_scheme_without_constants_is_refused(scheme: Scheme) -> None:
    with pytest.raises(ConfigError, match="13b: no published coefficients for"):
        PUBLISHED["13b"].coefficients(scheme)
    with pytest.raises(ConfigError, match="13b: no published memory constants for"):
        PUBLISHED["13b"].max_tokens(scheme, 64)
