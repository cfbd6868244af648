"""The account of documents, the planner's carry included, in Megatron's checkpoints: one text among
the checkpoint's own arguments.

Megatron saves its arguments in every format of checkpoint, and reads them back on any number of
ranks. A step that is saved before it is over (a rerun that ends the job) is saved with the account
that it began with, since it is dealt again on resuming.
"""

from __future__ import annotations

import argparse

from megatron_balance.training.data_identity import DataIdentity
from megatron_balance.training.ledger import Ledger

ARGUMENT = "balance_carry"


def save(text: str, args: argparse.Namespace) -> None:
    """Put a ledger's text where the next checkpoint takes it from."""
    setattr(args, ARGUMENT, text)


def saved(args: argparse.Namespace) -> tuple[Ledger, DataIdentity]:
    """The ledger that a checkpoint with these arguments was saved with, and what its samples are; an
    empty one and an unknown one if it knows of none.

    Raises:
        ConfigError: the checkpoint's text is not a ledger.
    """
    text: str | None = getattr(args, ARGUMENT, None)
    return (Ledger(), DataIdentity()) if text is None else Ledger.from_json(text)
