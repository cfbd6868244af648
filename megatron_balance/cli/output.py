"""The output of verbs: JSON, tables, files, progress; a file `-` is standard output."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar, cast

from megatron_balance.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

T = TypeVar("T")
STDOUT = Path("-")


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout and nothing else there")


def check(args: argparse.Namespace, option: str = "--out") -> bool:
    """Whether an option that names a file means standard output, which then holds nothing else."""
    means = getattr(args, option.removeprefix("--").replace("-", "_")) == STDOUT
    if means and args.json:
        raise ConfigError(f"{option} - and --json both write to standard output; leave one out, or name a file")
    return means


def write(path: Path, text: str, option: str = "--out") -> None:
    if path == STDOUT:
        sys.stdout.write(text)
        return
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{option} {path}: cannot be written: {error.strerror}") from None


def check_folder(args: argparse.Namespace) -> None:
    """Reject an `--out` in a folder that is not there."""
    if args.out and not args.out.parent.is_dir():
        raise ConfigError(f"--out {args.out}: no folder {args.out.parent}")


def progress(items: Sequence[T], what: str) -> Iterable[T]:
    """`items`, with a progress bar on stderr where there are several and someone looks."""
    if len(items) < 2:
        return items
    from tqdm import tqdm

    return cast("Iterable[T]", tqdm(items, desc=what, file=sys.stderr, disable=None, leave=False))


def console(width: int = 158) -> Console:
    """Standard output; `width` of a pipe or a file, which has none of its own."""
    from rich.console import Console

    # No markup: [train] is an extra, not a colour.
    found = Console(highlight=False, markup=False)
    if not found.is_terminal:
        found.width = width
    return found


def table(
    title: str | None, columns: Iterable[str], left: Collection[str], overflow: Literal["fold", "ellipsis"] = "ellipsis"
) -> Table:
    """A table without rows, whose columns are set on the right but for those in `left`."""
    from rich.table import Table

    made = Table(title=title, title_justify="left")
    for column in columns:
        made.add_column(column, justify="left" if column in left else "right", overflow=overflow)
    return made
