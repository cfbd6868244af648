"""Where a plan puts each sequence: on one rank, on ranks of one node, or across nodes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from megatron_balance.ir.arrays import as_array
from megatron_balance.ir.plan import MicrobatchPlan, TaskTable, Zone
from megatron_balance.patterns import zigzag
from megatron_balance.report import words
from megatron_balance.report.cases import Figures

KINDS = ("across nodes", "inside one node", "one rank")

LISTED = 40
"""The longest sequences are listed one by one."""


def of_plan(plan: MicrobatchPlan) -> Figures:
    """By kind of place: how many sequences and tokens; and the longest sequences with their ranks."""
    rows = [(seq, plan.lengths[seq], _kind(ranks, plan.ranks_per_node), zone, ranks) for zone, seq, ranks in _places(plan)]
    rows.sort(key=lambda row: (-row[1], row[0]))
    kinds: list[Figures] = []
    for kind in KINDS:
        held = [row for row in rows if row[2] == kind]
        kinds.append(
            {
                "where": kind,
                "sequences": len(held),
                "tokens": sum(row[1] for row in held),
                "shortest": min((row[1] for row in held), default=0),
                "longest": max((row[1] for row in held), default=0),
                "fewest_ranks": min((len(row[4]) for row in held), default=0),
                "most_ranks": max((len(row[4]) for row in held), default=0),
            }
        )
    longest = [
        {"seq": seq, "length": length, "where": kind, "zone": zone, "num_ranks": len(ranks), "rank_runs": words.runs(ranks)}
        for seq, length, kind, zone, ranks in rows[:LISTED]
    ]
    return {
        "kind": "exact",
        "planner": plan.planner,
        "num_sequences": len(plan.lengths),
        "num_ranks": plan.num_ranks,
        "ranks_per_node": min(plan.ranks_per_node, plan.num_ranks),
        "kinds": kinds,
        "longest": longest,
        "remapped_tokens": int(as_array(plan.moves)[:, 2].sum()),
        "routed": plan.routing is not None,
    }


def _kind(ranks: list[int], ranks_per_node: int) -> str:
    if len(ranks) == 1:
        return KINDS[2]
    return KINDS[1] if ranks[0] // ranks_per_node == ranks[-1] // ranks_per_node else KINDS[0]


def _places(plan: MicrobatchPlan) -> Iterator[tuple[str, int, list[int]]]:
    """(zone, sequence, ranks that hold or attend some of it, in order)."""
    lengths = np.array(plan.lengths, dtype=np.int64)
    for zone in plan.zones:
        if isinstance(zone, TaskTable):
            yield from _of_task_table(zone)
        else:
            yield from _of_zone(zone, lengths)


def _of_task_table(zone: TaskTable) -> Iterator[tuple[str, int, list[int]]]:
    pairs = np.concatenate([as_array(zone.fragments)[:, :2], as_array(zone.tasks)[:, :2]])
    ranks: dict[int, list[int]] = {}
    for rank, seq in np.unique(pairs, axis=0).tolist():
        ranks.setdefault(seq, []).append(rank)
    for seq, found in ranks.items():
        yield zone.name, seq, found


def _of_zone(zone: Zone, lengths: np.ndarray) -> Iterator[tuple[str, int, list[int]]]:
    everyone = sorted(zone.ranks)
    if len(everyone) == 1 or zone.pattern == "head_exchange":  # every rank attends with some of the heads
        for seq in zone.seqs:
            yield zone.name, seq, everyone
        return
    cut = zigzag.zigzag(lengths, np.array(zone.seqs, dtype=np.int64), len(zone.ranks))
    for seq, first, parts in zip(zone.seqs, cut.first, cut.parts, strict=True):
        held = [zone.ranks[(int(first) + at) % cut.size] for at in range(int(parts))]
        yield zone.name, seq, sorted(held)
