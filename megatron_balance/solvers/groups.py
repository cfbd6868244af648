"""Groups of ranks: which sizes there are and where they lie, what they hold, replicas among them,
and the plan in which sequences share them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any, TypeAlias

from megatron_balance.errors import ConfigError, InfeasibleError
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.model import Model
from megatron_balance.ir.plan import AnyPlanZone, MicrobatchPlan, Zone
from megatron_balance.ir.step import StepPlan
from megatron_balance.solvers.packing import first_fit_evenly, longest_first, members


def sizes(num_ranks: int) -> tuple[int, ...]:
    """Powers of two below `num_ranks`, and all ranks together."""
    return (*(1 << i for i in range((num_ranks - 1).bit_length())), num_ranks)


def needed(length: int, tokens: float, allowed: Sequence[int]) -> int:
    """The smallest allowed size (ascending) whose ranks hold the sequence; else the largest."""
    return next((size for size in allowed if length <= size * tokens), allowed[-1])


def rank_tokens(length: int, size: int) -> int:
    """Tokens of a sequence that a rank holds at most: two of 2p near-equal chunks on p ranks."""
    parts = max(1, min(size, length // 2))
    return length if parts == 1 else min(length, 2 * -(-length // (2 * parts)))


def blocks(size: int, num_ranks: int, node_size: int) -> list[range]:
    """Disjoint runs of `size` neighbouring ranks, inside nodes if a node holds one."""
    if size > node_size:
        return [range(first, first + size) for first in range(0, num_ranks - size + 1, size)]
    starts = range(0, node_size - size + 1, size)
    return [range(node + first, node + first + size) for node in range(0, num_ranks, node_size) for first in starts]


def arrange(wanted: Sequence[int], num_ranks: int, node_size: int) -> list[tuple[int, ...]]:
    """Disjoint ranks for groups of the `wanted` sizes: larger ones choose first, each the fullest
    node that has room; a group that no node holds takes the emptiest nodes.
    """
    free = [list(range(first, min(first + node_size, num_ranks))) for first in range(0, num_ranks, node_size)]
    chosen: list[tuple[int, ...]] = [()] * len(wanted)
    for i in longest_first(wanted):
        roomy = [node for node in free if len(node) >= wanted[i]]
        order = [min(roomy, key=len)] if roomy else sorted(free, key=lambda node: (-len(node), node))
        taken: list[int] = []
        for node in order:
            count = min(len(node), wanted[i] - len(taken))
            taken += node[:count]
            del node[:count]
        chosen[i] = tuple(sorted(taken))
    return chosen


# The ranks that share each sequence: ascending, so that a ring crosses each node's border once.
Placement: TypeAlias = Sequence[tuple[int, ...]]
INTER_NODE, INTRA_NODE, LOCAL = "inter_node", "intra_node", "local"


@dataclass(frozen=True, slots=True)
class Frame:
    planner: str
    cluster: Cluster
    model: Model
    pattern: str = "ring"

    def microbatch(self, lengths: Sequence[int], placement: Placement) -> MicrobatchPlan:
        return plan_of(self.planner, lengths, (self.cluster, self.model), zones(placement, self.cluster, self.pattern))

    def batch(self, lengths: Sequence[int], placement: Placement, microbatch_of: Sequence[int]) -> StepPlan:
        """The step of microbatches 0, 1, ..., each whole; `microbatch_of`: by sequence."""
        ids = members(microbatch_of, max(microbatch_of, default=-1) + 1)
        plans = (self.microbatch([lengths[seq] for seq in seqs], [placement[seq] for seq in seqs]) for seqs in ids)
        return StepPlan.whole(tuple(plans), ids)


def by_sequence(
    groups: Iterable[tuple[int, tuple[int, ...], Sequence[int]]], num_seqs: int
) -> tuple[list[tuple[int, ...]], list[int]]:
    """The ranks and the microbatch of each sequence. `groups`: microbatch, ranks, sequences."""
    placement: list[tuple[int, ...]] = [()] * num_seqs
    microbatch_of = [0] * num_seqs
    for microbatch, ranks, seqs in groups:
        for seq in seqs:
            placement[seq], microbatch_of[seq] = ranks, microbatch
    return placement, microbatch_of


def _members(placement: Placement) -> dict[tuple[int, ...], list[int]]:
    """The sequences, ascending, that share a set of ranks."""
    # By identity first: hashing a thousand ranks for each of a thousand sequences would take longer
    # than all the rest.
    alike: dict[int, tuple[tuple[int, ...], list[int]]] = {}
    for seq, ranks in enumerate(placement):
        alike.setdefault(id(ranks), (ranks, []))[1].append(seq)
    groups: dict[tuple[int, ...], list[int]] = {}
    for ranks, seqs in alike.values():
        groups.setdefault(ranks, []).extend(seqs)
    return {ranks: sorted(seqs) for ranks, seqs in groups.items()}


def zones(placement: Placement, cluster: Cluster, pattern: str = "ring") -> tuple[Zone, ...]:
    """Zones in issue order: inter-node, intra-node, local; the widest first, then by ranks."""
    groups = _members(placement)

    def spread(ranks: tuple[int, ...]) -> int:
        return 2 if len(ranks) == 1 else int(cluster.node(ranks[0]) == cluster.node(ranks[-1]))

    ordered = sorted(groups, key=lambda ranks: (spread(ranks), -len(ranks), ranks))
    names = (INTER_NODE, INTRA_NODE, LOCAL)
    return tuple(Zone(names[spread(ranks)], pattern, ranks, tuple(groups[ranks])) for ranks in ordered)


def check_each(lengths: Sequence[int], num_ranks: int, tokens_per_rank: int | None) -> None:
    """Check that ranks of `tokens_per_rank` tokens (None: no limit) hold each sequence alone.

    Raises:
        InfeasibleError: one that they do not.
    """
    if tokens_per_rank is None or not lengths:
        return
    pool_tokens = num_ranks * tokens_per_rank
    if (longest := max(lengths)) > pool_tokens:
        seq = lengths.index(longest)
        raise InfeasibleError(
            f"sequence {seq} has {lengths[seq]} tokens and needs {-(-lengths[seq] // tokens_per_rank)} ranks of "
            f"{tokens_per_rank} tokens; {num_ranks} are available ({num_ranks} ranks x {tokens_per_rank} tokens hold "
            f"{pool_tokens}). Use more ranks, raise --tokens-per-rank (tokens_per_rank) to at least "
            f"{-(-lengths[seq] // num_ranks)}, or cut the sequence"
        )


def check_pool(lengths: Sequence[int], num_ranks: int, tokens_per_rank: int | None) -> None:
    """Check that ranks of `tokens_per_rank` tokens (None: no limit) hold each sequence and the
    batch.

    Raises:
        InfeasibleError: says what would hold it.
    """
    check_each(lengths, num_ranks, tokens_per_rank)
    if tokens_per_rank is None or (total := sum(lengths)) <= num_ranks * tokens_per_rank:
        return
    raise InfeasibleError(
        f"the batch has {total} tokens; {num_ranks} ranks x {tokens_per_rank} tokens hold "
        f"{num_ranks * tokens_per_rank}. Use at least {-(-total // tokens_per_rank)} ranks, raise --tokens-per-rank "
        f"(tokens_per_rank) to at least {-(-total // num_ranks)}, or plan a smaller batch"
    )


def with_rounding(tokens_per_rank: int, num_seqs: int) -> int:
    """The most tokens that a plan may put on a rank of a capacity."""
    return tokens_per_rank + max(2 * num_seqs, tokens_per_rank // 100)


def context_sizes(cluster: Cluster) -> tuple[int, ...]:
    """Numbers of context-parallel ranks that make even replicas: part of a node, or whole nodes."""
    size, ranks = cluster.node_size, range(1, cluster.num_ranks + 1)
    return tuple(each for each in ranks if not cluster.num_ranks % each and not (size % each and each % size))


def check_context(context: int, cluster: Cluster) -> None:
    """Reject replicas that the ranks do not make; ConfigError lists those that they make."""
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
    """Sequences of each microbatch: the fewest of one sample a replica that hold them all."""
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
    """The fewest ranks of a replica that hold the longest sequence; else all ranks."""
    longest = max((length for lengths in microbatches for length in lengths), default=0)
    return next(
        (size for size in context_sizes(cluster) if tokens_per_rank and longest <= size * tokens_per_rank),
        cluster.num_ranks,
    )


def capacity_of(options: Any, num_tokens: int, num_ranks: int) -> int:
    """Tokens that a rank may hold: `tokens_per_rank` of the options, or `slack` times the mean."""
    return options.tokens_per_rank or max(1, ceil(options.slack * num_tokens / num_ranks))


def plan_of(
    planner: str, lengths: Sequence[int], on: tuple[Cluster, Model], zones: tuple[AnyPlanZone, ...]
) -> MicrobatchPlan:
    cluster, model = on
    size, heads = (cluster.num_ranks, cluster.node_size), (model.num_heads, model.num_kv_heads)
    return MicrobatchPlan(planner, tuple(lengths), *size, *heads, zones, mask=model.mask)
