"""Everything this package raises on purpose: a user's mistake, a limit, or a plan that does not
hold together.
"""

from collections.abc import Iterable


class BalanceError(Exception):
    """Base of all our errors. The command line prints them without a traceback, with exit code 2."""


class ConfigError(BalanceError):
    """An option, key, file or flags that cannot work; the message names it and what would be right."""


class InfeasibleError(BalanceError):
    """The batch does not fit; the message states the binding limit, what is needed and there."""


class InvalidProgramError(BalanceError):
    """A program that does not compute causal attention and its gradient exactly once; names the op."""


class PlanMismatchError(BalanceError):
    """Ranks that planned alone disagree; names the ranks."""


class RankFailedError(BalanceError, RuntimeError):
    """Another rank failed, or ended, and what this one waits for cannot come; names it, and why."""


class SelfCheckError(BalanceError):
    """The loss with a plan is not that without."""


class PatchError(BalanceError):
    """The source of something we patch is not the source we reviewed; names the target."""


class DataError(BalanceError):
    """A corpus that is truncated, too long, foreign or empty; found at opening."""


# Raised by taking parsed text apart where it has another form, or numbers that nothing holds.
MALFORMED: tuple[type[Exception], ...] = (LookupError, TypeError, ValueError, OverflowError)


def suggest(word: str, known: Iterable[str]) -> str:
    """`did you mean 'x'?` for the known word that comes closest; empty if none does."""
    from difflib import get_close_matches

    close = get_close_matches(word, list(known), n=1)
    return f"did you mean {close[0]!r}?" if close else ""
