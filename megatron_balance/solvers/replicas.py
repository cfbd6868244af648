"""Data-parallel replicas of so many context-parallel ranks: which there can be, and the packed samples
that they train on.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_balance.errors import ConfigError, InfeasibleError
from megatron_balance.ir.cluster import Cluster
from megatron_balance.solvers.capacity import check_each
from megatron_balance.solvers.packing import first_fit_evenly


def context_sizes(cluster: Cluster) -> tuple[int, ...]:
    """Numbers of context-parallel ranks that make even replicas, ascending: part of a node, or whole
    nodes.
    """
    size, ranks = cluster.node_size, range(1, cluster.num_ranks + 1)
    return tuple(each for each in ranks if not cluster.num_ranks % each and not (size % each and each % size))


def check_context(context: int, cluster: Cluster) -> None:
    """Reject replicas that the ranks do not make.

    Raises:
        ConfigError: lists those that they make.
    """
    if context not in context_sizes(cluster):
        raise ConfigError(
            f"context_parallel {context}: {cluster.num_ranks} ranks on nodes of {cluster.node_size} make replicas of "
            f"{', '.join(map(str, context_sizes(cluster)))} ranks; use one of these"
        )


def samples_of(
    lengths: Sequence[int], context: int, cluster: Cluster, tokens_per_rank: int | None
) -> list[tuple[int, ...]]:
    """Sequences of a microbatch's sample of each replica, ascending.

    Raises:
        InfeasibleError: they do not pack into one sample a replica.
        ConfigError: as `check_context`.
    """
    check_context(context, cluster)
    if context == cluster.num_ranks:
        return [tuple(range(len(lengths)))]
    check_each(lengths, context, tokens_per_rank)
    most = None if tokens_per_rank is None else context * tokens_per_rank
    samples = first_fit_evenly(lengths, cluster.num_ranks // context, most)
    if samples is None:
        raise InfeasibleError(
            f"the microbatch's {sum(lengths)} tokens in {len(lengths)} sequences do not pack into "
            f"{cluster.num_ranks // context} samples of {most} tokens ({context} context-parallel ranks of "
            f"{tokens_per_rank}); raise --tokens-per-rank (tokens_per_rank) or context_parallel, or plan a smaller "
            "microbatch"
        )
    return [tuple(sorted(each)) for each in samples]


def microbatches_of(
    lengths: Sequence[int], context: int, cluster: Cluster, tokens_per_rank: int | None
) -> list[tuple[int, ...]]:
    """Sequences of each microbatch, ascending: the fewest of one sample a replica that hold them all,
    full samples first.

    Raises:
        InfeasibleError: a sequence that no sample holds.
        ConfigError: as `check_context`.
    """
    check_context(context, cluster)
    check_each(lengths, context, tokens_per_rank)
    replicas = cluster.num_ranks // context
    most = None if tokens_per_rank is None else context * tokens_per_rank
    count = 1 if most is None else max(1, -(-sum(lengths) // (replicas * most)))
    while (samples := first_fit_evenly(lengths, count * replicas, most)) is None:
        count += 1
    parts = [samples[at * replicas : (at + 1) * replicas] for at in range(count)]
    return [tuple(sorted(seq for sample in part for seq in sample)) for part in parts]


def least_context(microbatches: Sequence[Sequence[int]], cluster: Cluster, tokens_per_rank: int | None) -> int:
    """The fewest context-parallel ranks of a replica that hold the longest sequence; all ranks, where
    nothing limits them.
    """
    longest = max((length for lengths in microbatches for length in lengths), default=0)
    return next(
        (size for size in context_sizes(cluster) if tokens_per_rank and longest <= size * tokens_per_rank),
        cluster.num_ranks,
    )
