"""Our options on the command line of an unmodified training script."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable

from megatron_balance.megatron.flags import add_balance_arguments
from megatron_balance.patches import Patch

Provider = Callable[[argparse.ArgumentParser], argparse.ArgumentParser]


def add_ours(add_megatron_arguments: Provider) -> Provider:
    """`add_megatron_arguments` with our group at the end."""

    @functools.wraps(add_megatron_arguments)
    def both(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        return add_balance_arguments(add_megatron_arguments(parser))

    return both


PATCHES = (
    Patch(
        target="megatron.training.arguments:add_megatron_arguments",
        wrap=add_ours,
        role="wrapped",
        parameters=("parser",),
        why=(
            "--balance-* must be known to the parser; extra_args_provider belongs to the script, which we do not change"
        ),
    ),
)
