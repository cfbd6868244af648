"""The command line: a file per verb, with `HELP`, `add_options(parser)`, `run(args) -> exit code`.

Results go to stdout, progress and messages to stderr. A user's mistake is one line `error: ...` and
exit code 2; what turns out not to hold (a plan that does not verify) is exit code 1; a fault of ours
is a traceback and exit code 70. Torch is never imported here.
"""

import argparse
import errno
import os
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn, TextIO, cast

from megatron_balance import __version__
from megatron_balance.errors import BalanceError, suggest

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
# Exit code of an error that nobody foresaw: never the one of a plan that does not hold.
FAULT = os.EX_SOFTWARE
# Modules of this package, in the order of `--help`.
VERBS = (
    *("plan", "verify", "simulate", "compare", "tune", "strategies"),
    *("report", "reproduce", "profile", "trace", "corpus", "doctor"),
)


class _Parser(argparse.ArgumentParser):
    """An ArgumentParser whose mistakes are one line, also where its help cannot be written."""

    def _print_message(self, message: str, file: object = None) -> None:
        print(message, end="", file=cast("TextIO", file or sys.stderr), flush=True)

    def error(self, message: str) -> NoReturn:
        raise _UsageError(f"{message}. See '{self.prog} --help'")


class _UsageError(Exception):
    """Options that argparse does not take."""


def build_parser() -> _Parser:
    about = "Plan, prove and inspect balanced distributed attention."
    parser = _Parser(prog="megatron-balance", description=about, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"megatron-balance {__version__}")
    subparsers = parser.add_subparsers(dest="verb", required=True, metavar="VERB", parser_class=_Parser)
    for name in VERBS:
        verb = import_module(f"{__name__}.{name}")
        # An abbreviation of an option is a typing mistake that happens to work.
        sub = subparsers.add_parser(name, help=verb.HELP, description=verb.__doc__, allow_abbrev=False)
        verb.add_options(sub)
        sub.set_defaults(run=verb.run, parser=sub)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    try:
        return _main(argv)
    except MemoryError as error:
        print(f"error: not enough memory: {' '.join(str(error).split()) or 'ask for less'}", file=sys.stderr)
        return 2
    except Exception:
        traceback.print_exc()
        return FAULT


def _main(argv: Sequence[str] | None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = build_parser()
    try:
        if not arguments:
            parser.print_help()
            return 0
        args, unknown = parser.parse_known_args(arguments)
        # argparse does not see a positional that may be left out where it stands behind options:
        # `reproduce zeppelin --json table2`.
        if "table" in args and args.table is None and len(unknown) == 1 and not unknown[0].startswith("-"):
            args.table = unknown.pop()
        if unknown:
            raise _UsageError(_unknown_option(unknown, args.verb, args.parser))
        if argv is None and getattr(args, "json", False):
            # Libraries write to file descriptor 1, too: HiGHS prints a line now and then.
            sys.stdout = os.fdopen(os.dup(1), "w")
            os.dup2(2, 1)
        code: int = args.run(args)
        sys.stdout.flush()
        return code
    except (_UsageError, BalanceError) as error:
        # One line, whatever the message held: scripts read it.
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # The reader (head, less) has gone; it wants no more and no traceback. Python flushes stdout
        # once more on its way out.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        print(f"error: standard output cannot be written: {error.strerror}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return 130


def _unknown_option(unknown: list[str], verb: str, parser: argparse.ArgumentParser) -> str:
    word = next((w for w in unknown if w.startswith("-")), unknown[0]).split("=")[0]
    options = parser._option_string_actions  # pyright: ignore[reportPrivateUsage]  argparse has no public list of them
    hint = suggest(word, options) or f"see 'megatron-balance {verb} --help'"
    return f"{verb}: unknown {'option' if word.startswith('-') else 'argument'} {word!r}; {hint}"
