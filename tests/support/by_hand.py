"""Plans put together by hand, for tests of what runs, proves, prices or shows a plan."""

from collections.abc import Iterable, Sequence
from typing import Any

from megatron_balance.ir.columns import Move, Rows
from megatron_balance.ir.plan import AnyPlanZone, MicrobatchPlan, Routing, TaskTable, Zone

# Columns of a task table: (rank, seq, start, stop) and (rank, seq, q_start, q_stop, k_start,
# k_stop).
FRAGMENT_ROW, TASK_ROW = 4, 6


def plan(
    lengths: Sequence[int],
    ranks: int,
    *zones: AnyPlanZone,
    ranks_per_node: int | None = None,
    heads: tuple[int, int] = (2, 1),
    moves: Iterable[Sequence[int]] = (),
    routing: Routing | None = None,
    name: str = "by_hand",
) -> MicrobatchPlan:
    #
    # Args: lengths: tokens of each sequence. ranks: number of ranks. zones: in order.
    # ranks_per_node: not given: all ranks are on one node. heads: of queries, and of keys and
    # values. moves: (holder, owner, tokens) of the remap. routing: of what goes between nodes.
    # name: of the planner.
    per_node = ranks if ranks_per_node is None else ranks_per_node
    moved = Rows.of(Move.WIDTH, list(moves))
    return MicrobatchPlan(name, tuple(lengths), ranks, per_node, *heads, zones, moved, routing)


def pool(pattern: str, lengths: Sequence[int], ranks: int, **given: Any) -> MicrobatchPlan:
    # A plan in which all ranks share all sequences in one zone, "pool". `given`: as in `plan`.
    return plan(lengths, ranks, zone("pool", pattern, range(ranks), range(len(lengths))), **given)


def ring(ranks: Sequence[int], *seqs: int, name: str = "ring") -> Zone:
    # A ring over `ranks` that shares these sequences.
    return Zone(name, "ring", tuple(ranks), seqs)


def all_gather(ranks: Sequence[int], *seqs: int, name: str = "all_gather") -> Zone:
    # A zone of `ranks` that gathers keys and values of these sequences.
    return Zone(name, "all_gather", tuple(ranks), seqs)


def head_exchange(ranks: Sequence[int], *seqs: int, name: str = "head_exchange") -> Zone:
    # A zone of `ranks` that splits these sequences by heads.
    return Zone(name, "head_exchange", tuple(ranks), seqs)


def zone(name: str, pattern: str, ranks: Sequence[int], seqs: Sequence[int], group_size: int = 0) -> Zone:
    # A zone with any comm pattern; a head ring is in the smallest groups of several ranks unless
    # `group_size` says otherwise.
    if pattern == "head_ring" and not group_size:
        group_size = next((size for size in range(2, len(ranks) + 1) if len(ranks) % size == 0), 1)
    return Zone(name, pattern, tuple(ranks), tuple(seqs), group_size)


def local(rank: int, *seqs: int) -> Zone:
    # These sequences whole on one rank: a ring of one.
    return Zone("local", "ring", (rank,), seqs)


def each_local(count: int) -> tuple[Zone, ...]:
    # Sequence n whole on rank n, for every n below `count`.
    return tuple(local(at, at) for at in range(count))


def task_table(fragments: Iterable[tuple[int, ...]], tasks: Iterable[tuple[int, ...]] = ()) -> TaskTable:
    #
    # Args: fragments: (rank, seq, start, stop) of what each rank owns. tasks: (rank, seq, q_start,
    # q_stop, k_start, k_stop) of what each rank attends.
    return TaskTable("task_table", Rows.of(FRAGMENT_ROW, list(fragments)), Rows.of(TASK_ROW, list(tasks)))
