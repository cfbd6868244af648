"""wlb_sharding: every sequence over all ranks, cut on its own or packed with the others, whichever
attention does sooner.

Paper: WLB-LLM: Workload-Balanced 4D Parallelism for Large Language Model Training (Wang et al.,
OSDI 2025, arXiv 2503.17924), sections 5 and 8. What we implement: `document`, each sequence in 2G
chunks, chunk i and 2G - 1 - i on rank i, tokens left over dealt round robin (5.1); `sequence`, all
packed to one and cut like that (3.1); `adaptive`, the one predicted sooner (5.3); `mixed`, those of
some length or longer on their own, the rest packed (8). Keys and values are gathered by all ranks
before one launch a zone.

What we leave out: packing and delay, which is `wlb_llm`.

Where we differ and why: tokens left over lengthen a rank's chunks (`patterns.zigzag`). Kernel
time counts forward and backward. A sequence on one rank does not travel, where the paper gathers
all; so the choice weighs what is gathered, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from megatron_balance.cost.base import CostModel, Floats
from megatron_balance.errors import ConfigError
from megatron_balance.ir.batch import Batch
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.columns import Message
from megatron_balance.ir.model import Model
from megatron_balance.ir.plan import MicrobatchPlan, Zone
from megatron_balance.patterns import pattern_of
from megatron_balance.patterns.base import Context
from megatron_balance.solvers.groups import check_pool, plan_of
from megatron_balance.solvers.packing import longest_first

# Gradients of keys and values are priced in fp32, the default of `gradient_wire`.
GRADIENT_BYTES = 4

SHARDINGS = ("document", "sequence", "adaptive", "mixed")


@dataclass(frozen=True, slots=True)
class WlbShardingOptions:
    tokens_per_rank: int | None = None
    """Capacity of a rank in tokens; unlimited if not given."""
    sharding: Literal["document", "sequence", "adaptive", "mixed"] = "adaptive"
    """The unit that is cut: each sequence, all packed to one, the better by predicted time, or a
    mixture."""


def plan(batch: Batch, cluster: Cluster, model: Model, cost: CostModel, options: WlbShardingOptions) -> MicrobatchPlan:
    """One zone over all ranks, or two where some sequences are cut alone and others packed."""
    if options.sharding not in SHARDINGS:
        raise ConfigError(
            f"wlb_sharding: sharding {options.sharding!r} is not known; choose one of {', '.join(SHARDINGS)}"
        )
    check_pool(batch.lengths, cluster.num_ranks, options.tokens_per_rank)
    tried = candidates(batch.lengths, cluster.num_ranks, options.sharding)
    zones = tried[0]
    if len(tried) > 1:
        context = Context(
            np.array(batch.lengths),
            model.num_heads,
            model.num_kv_heads,
            cluster.num_ranks,
            cluster.node_size,
            mask=model.mask,
        )
        zones = min(tried, key=lambda zones: predicted_s(zones, context, cluster, model, cost))
    return plan_of("wlb_sharding", batch.lengths, (cluster, model), zones)


def candidates(lengths: Sequence[int], num_ranks: int, sharding: str) -> list[tuple[Zone, ...]]:
    """The zones that a sharding chooses among; of equally good ones the first counts. With `mixed`
    the longest documents are cut on their own: none, one, two, three, four, six and so on while
    these have a token for each of two chunks a rank, or all.
    """
    num_seqs = len(lengths)
    if not num_seqs:
        return [()]
    order = longest_first(lengths)
    match sharding:
        case "document":
            counts = [num_seqs]
        case "sequence":
            counts = [0]
        case "adaptive":
            counts = [0, num_seqs]
        case _:
            long_enough = sum(length >= 2 * num_ranks for length in lengths)
            counts = [*_counts(long_enough), num_seqs]
    return [_zones(lengths, num_ranks, order[:count]) for count in dict.fromkeys(counts)]


def _counts(most: int) -> list[int]:
    """0, 1, 2, 3, 4, 6, 8, 12, ...: two numbers a doubling, up to `most`."""
    powers = [1 << exponent for exponent in range(most.bit_length())]
    return sorted({0, *(count for power in powers for count in (power, power + power // 2) if count <= most)})


def _zones(lengths: Sequence[int], num_ranks: int, alone: Sequence[int]) -> tuple[Zone, ...]:
    """The zone of the sequences `alone`, each cut on its own, and that of the others, packed."""
    own = set(alone)
    packed = tuple(seq for seq in range(len(lengths)) if seq not in own)
    # Even chunks give the tokens that are left over to the first ranks; the second zone's begin behind
    # them.
    first = sum(lengths[seq] for seq in own) % num_ranks
    ranks = tuple(range(num_ranks))
    zones: list[Zone] = []
    if own:
        zones.append(Zone("document", "gather_documents", ranks, tuple(sorted(own))))
    if packed:
        zones.append(Zone("sequence", "gather_sequence", ranks[first:] + ranks[:first], packed))
    return tuple(zones)


def predicted_s(zones: Sequence[Zone], context: Context, cluster: Cluster, model: Model, cost: CostModel) -> float:
    """Seconds of attention, forward and backward: kernels of the slowest rank, and each zone's gather
    and reduce-scatter, which nothing hides, with one latency and blocks as wide as the widest.
    """
    # Bytes of both, over those of the gather.
    both = 1 + GRADIENT_BYTES / model.bytes_per_element
    moved_s = sum(
        _ring_s(both * cost.kv_bytes(_widest(zone, context)), len(zone.ranks), cluster, cost) for zone in zones
    )
    return float(kernel_s(zones, context, cost).max()) + moved_s


def _widest(zone: Zone, context: Context) -> int:
    return max(
        (int(each.rows[:, Message.TOKENS].max()) for each in pattern_of(zone).messages(zone, context)), default=0
    )


def _ring_s(num_bytes: float, num_ranks: int, cluster: Cluster, cost: CostModel) -> float:
    if not num_bytes:
        return 0.0
    steps = num_ranks - 1
    within_s = cost.intra_node_s(steps * num_bytes, steps)
    if cluster.num_nodes == 1:
        return within_s
    nics = cluster.node_size / cluster.ranks_per_nic
    return max(within_s, cost.inter_node_s(steps * num_bytes, steps, nics))


def kernel_s(zones: Sequence[Zone], context: Context, cost: CostModel) -> Floats:
    """Seconds of each rank's attention kernels, forward and backward: float64 [num_ranks]."""
    seconds = np.zeros(context.num_ranks)
    for zone in zones:
        launches = pattern_of(zone).rounds(zone, context).launches
        for backward in (False, True):
            each = cost.attend_s(launches.pairs, launches.launch, len(launches.merging), backward=backward)
            seconds[np.array(zone.ranks)] += each[launches.of_round].sum(axis=1)
    return seconds
