"""Whether a batch fits the ranks it is to be spread over."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_balance.errors import InfeasibleError


def check_each(lengths: Sequence[int], num_ranks: int, tokens_per_rank: int | None) -> None:
    """Check that `num_ranks` ranks of `tokens_per_rank` tokens (None: no limit) hold each sequence
    alone.

    Raises:
        InfeasibleError: a sequence is larger than the pool; says what would hold it.
    """
    if tokens_per_rank is None or not lengths:
        return
    pool_tokens = num_ranks * tokens_per_rank
    seq = max(range(len(lengths)), key=lambda s: (lengths[s], -s))
    if lengths[seq] > pool_tokens:
        raise InfeasibleError(
            f"sequence {seq} has {lengths[seq]} tokens and needs {-(-lengths[seq] // tokens_per_rank)} ranks of "
            f"{tokens_per_rank} tokens; "
            f"{num_ranks} are available ({num_ranks} ranks x {tokens_per_rank} tokens hold {pool_tokens}). Use more "
            "ranks, raise "
            f"--tokens-per-rank (tokens_per_rank) to at least {-(-lengths[seq] // num_ranks)}, or cut the sequence"
        )


def check_pool(lengths: Sequence[int], num_ranks: int, tokens_per_rank: int | None) -> None:
    """Check that `num_ranks` ranks of `tokens_per_rank` tokens (None: no limit) hold the batch.

    Raises:
        InfeasibleError: a sequence or the whole batch is larger than the pool; says what would hold
            it.
    """
    check_each(lengths, num_ranks, tokens_per_rank)
    if tokens_per_rank is None or (total := sum(lengths)) <= num_ranks * tokens_per_rank:
        return
    raise InfeasibleError(
        f"the batch has {total} tokens; {num_ranks} ranks x {tokens_per_rank} tokens hold "
        f"{num_ranks * tokens_per_rank}. "
        f"Use at least {-(-total // tokens_per_rank)} ranks, "
        f"raise --tokens-per-rank (tokens_per_rank) to at least {-(-total // num_ranks)}, or plan a smaller batch"
    )


def with_rounding(tokens_per_rank: int, num_seqs: int) -> int:
    """The most tokens that a plan may put on a rank of a capacity: two more of each sequence, since
    even shares end at whole tokens, or 1 % more, since uneven ones end at tiles of a kernel.
    """
    return tokens_per_rank + max(2 * num_seqs, tokens_per_rank // 100)
