"""Files that verbs write; `-` is standard output."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from megatron_balance.errors import ConfigError

STDOUT = Path("-")


def check(args: argparse.Namespace, option: str = "--out") -> bool:
    """Whether an option that names a file means standard output, which then holds nothing else.

    Raises:
        ConfigError: `--json` would write there too.
    """
    means = getattr(args, option.removeprefix("--").replace("-", "_")) == STDOUT
    if means and args.json:
        raise ConfigError(f"{option} - and --json both write to standard output; leave one out, or name a file")
    return means


def write(path: Path, text: str, option: str = "--out") -> None:
    """Write a text to a file, or to standard output.

    Raises:
        ConfigError: the file cannot be written.
    """
    if path == STDOUT:
        sys.stdout.write(text)
        return
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{option} {path}: cannot be written: {error.strerror}") from None
