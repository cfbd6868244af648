"""The planner's carry in Megatron's checkpoints: one text among the checkpoint's own arguments.

Megatron saves its arguments in every format of checkpoint, and reads them back on any number of
ranks. A step that is saved before it is over (a rerun that ends the job) is saved with the carry
that it began with, since it is dealt again on resuming.
"""

from __future__ import annotations

import argparse

from megatron_balance.ir.step import EMPTY, Carry

ARGUMENT = "balance_carry"


def save(carry: Carry, args: argparse.Namespace) -> None:
    """Put the carry where the next checkpoint takes it from."""
    setattr(args, ARGUMENT, carry.to_json())


def saved(args: argparse.Namespace) -> Carry:
    """The carry that a checkpoint with these arguments was saved with; empty if it knows of none.

    Raises:
        ConfigError: the checkpoint's text is not a carry.
    """
    text: str | None = getattr(args, ARGUMENT, None)
    return EMPTY if text is None else Carry.from_json(text)
