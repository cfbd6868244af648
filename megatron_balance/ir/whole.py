"""Whole numbers as callers give them: Python's, NumPy's or torch's."""

from __future__ import annotations

import operator
from typing import Any

from megatron_balance.errors import ConfigError


def whole(value: Any) -> int | None:
    """`value` as Python's own integer; None if it is no whole number, as `True` and 2.0."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def at_least(least: int, what: str, value: Any) -> int:
    """`value` as Python's own integer.

    Raises:
        ConfigError: it is none, or below `least`; `what` is its name.
    """
    number = whole(value)
    if number is None or number < least:
        raise ConfigError(f"{what}: expected a whole number of at least {least}, got {value!r}")
    return number
