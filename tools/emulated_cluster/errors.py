"""Errors of an emulated cluster."""

from megatron_balance.errors import BalanceError


class ClusterError(BalanceError):
    """The cluster cannot be built, found or shaped; the message says what refused and what would be
    right.
    """


class RankError(BalanceError):
    """A rank failed, died or did not end in time, and the job with it; names the rank and shows its
    last lines.
    """

    def __init__(self, message: str, rank: int = -1) -> None:
        """`rank`: the one that failed first, or the first of those still running at the deadline."""
        super().__init__(message)
        self.rank = rank
