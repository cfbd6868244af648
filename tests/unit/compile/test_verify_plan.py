"""The structure of plans: what cannot be is refused before a program is made of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_balance.compile.proof.structure import verify_plan
from megatron_balance.errors import InvalidProgramError
from megatron_balance.ir.columns import Rows
from megatron_balance.ir.plan import MicrobatchPlan, Routing, SharedZone, TaskTable, Zone

RING = MicrobatchPlan("by hand", (40, 9), 4, 2, 4, 2, (Zone("pool", "ring", (0, 1, 2, 3), (0, 1)),))
FRAGMENTS = ((0, 0, 0, 20), (1, 0, 20, 40))
TASKS = ((0, 0, 0, 20, 0, 20), (1, 0, 20, 40, 0, 20), (0, 0, 20, 40, 20, 40))


def table(
    tasks: tuple[tuple[int, ...], ...] = TASKS, fragments: tuple[tuple[int, ...], ...] = FRAGMENTS
) -> MicrobatchPlan:
    zone = TaskTable("attention", Rows.of(4, fragments), Rows.of(6, tasks))
    return replace(RING, lengths=(40,), zones=(zone,))


def test_the_plans_that_are_broken_below_hold_together() -> None:
    verify_plan(RING)
    verify_plan(table())


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (replace(RING, num_ranks=0), "0 ranks, 2 a node"),
        (replace(RING, ranks_per_node=3), "4 ranks in nodes of 3"),
        (replace(RING, num_kv_heads=3), "4 heads over 3"),
        (replace(RING, lengths=(40, 0)), "sequence 1 has length 0"),
        (replace(RING, zones=(replace(RING.zones[0], pattern="rink"),)), "no comm pattern 'rink'"),
        (replace(RING, zones=(Zone("pool", "ring", (0, 1, 2, 3), (0,)),)), "sequence 1 is in 0 zones"),
        (replace(RING, zones=RING.zones * 2), "sequence 0 is in 2 zones"),
        (replace(RING, zones=(Zone("pool", "ring", (0, 1, 2, 3), (0, 1, 7)),)), "there is no sequence 7"),
        (replace(RING, zones=(Zone("pool", "ring", (0, 1, 2, 4), (0, 1)),)), "ranks 0 to 4, there are 4"),
        (replace(RING, zones=(Zone("pool", "ring", (0, 1, 1), (0, 1)),)), "no ranks, or one twice"),
        (replace(RING, zones=(Zone("pool", "head_ring", (0, 1, 2, 3), (0, 1), 3),)), "groups of 3 in 4 ranks"),
        (replace(RING, moves=Rows.of(3, [(0, 4, 1)])), "a rank that is not there"),
        (replace(RING, moves=Rows.of(3, [(1, 1, 1)])), "from a rank to itself"),
        (replace(RING, moves=Rows.of(3, [(0, 1, 50)])), "50 tokens of 49"),
        (replace(RING, routing=Routing(0, (0,))), "at least 1 each"),
        (replace(RING, routing=Routing(1, (1,))), "routing of zone 1, there are 1"),
        (table(fragments=((0, 0, 0, 20), (1, 0, 21, 40))), r"tokens \[21:40\) of sequence 0"),
        (table(fragments=((0, 0, 0, 20), (1, 0, 19, 40))), r"tokens \[19:40\) of sequence 0"),
        (table(fragments=((0, 0, 0, 20), (1, 0, 20, 39))), r"tokens \[20:39\) of sequence 0"),
        (table(fragments=((0, 0, 0, 20), (9, 0, 20, 40))), "on a rank that is not there"),
        (table(fragments=()), "tasks without fragments"),
        (table((*TASKS, (1, 0, 40, 40, 0, 40))), "no queries or no keys"),
        (table((*TASKS, (1, 0, 40, 41, 0, 40))), "no queries or no keys there"),
        (table((*TASKS, (1, 1, 0, 9, 0, 9))), "a task of a sequence that it does not hold"),
        (
            table((TASKS[0], (1, 0, 20, 40, 0, 19), TASKS[2])),
            r"queries \[20:40\) of sequence 0 have keys \[\(0, 19\), \(20",
        ),
        (table(TASKS[:2]), r"queries \[20:40\) of sequence 0 have keys"),
        (table((*TASKS, TASKS[0])), r"queries \[0:20\) of sequence 0 have keys"),
        (table((*TASKS[1:], (4, 0, 0, 20, 0, 20))), "a task on a rank that is not there"),
        (
            replace(RING, lengths=(40,), zones=(SharedZone("w", Rows.of(4, [(0, 0, 0, 39)]), 2, 1),)),
            r"tokens \[0:39\) of sequence 0",
        ),
    ],
)
def test_what_cannot_be_is_named(broken: MicrobatchPlan, message: str) -> None:
    with pytest.raises(InvalidProgramError, match=f"plan of by hand: .*{message}"):
        verify_plan(broken)
