"""Files that verbs write; `-` is standard output."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from megatron_balance.errors import ConfigError

STDOUT = Path("-")


def check(args: argparse.Namespace) -> bool:
    """Whether `--out` means standard output, which then holds nothing else.

    Raises:
        ConfigError: `--json` would write there too.
    """
    if args.out == STDOUT and args.json:
        raise ConfigError("--out - and --json both write to standard output; leave one out, or name a file")
    return args.out == STDOUT


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
