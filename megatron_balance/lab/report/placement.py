"""Place of each sequence of a plan: on one rank, on ranks of one node, or across nodes."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_balance.ir.arrays import as_array
from megatron_balance.ir.columns import Move
from megatron_balance.ir.plan import MicrobatchPlan
from megatron_balance.lab.report import words
from megatron_balance.lab.report.cases import Figures
from megatron_balance.patterns import pattern_of
from megatron_balance.patterns.base import Context

KINDS = ("across nodes", "inside one node", "one rank")

LISTED = 40
"""The longest sequences are listed one by one."""


def of_plan(plan: MicrobatchPlan) -> Figures:
    """By kind of place: how many sequences and tokens; and the longest sequences with their ranks."""
    rows = [
        (seq, plan.lengths[seq], _kind(ranks, plan.ranks_per_node), zone, ranks) for zone, seq, ranks in _places(plan)
    ]
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
        {
            "seq": seq,
            "length": length,
            "where": kind,
            "zone": zone,
            "num_ranks": len(ranks),
            "rank_runs": words.runs(ranks),
        }
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
        "remapped_tokens": int(as_array(plan.moves)[:, Move.TOKENS].sum()),
        "routed": plan.routing is not None,
    }


def _kind(ranks: list[int], ranks_per_node: int) -> str:
    if len(ranks) == 1:
        return KINDS[2]
    return KINDS[1] if ranks[0] // ranks_per_node == ranks[-1] // ranks_per_node else KINDS[0]


def _places(plan: MicrobatchPlan) -> Iterator[tuple[str, int, list[int]]]:
    """(zone, sequence, ranks that hold or attend some of it, in order)."""
    context = Context.of(plan)
    for zone in plan.zones:
        for seq, ranks in pattern_of(zone).sequences(zone, context):
            yield zone.name, seq, ranks
