"""Gradients that a ring's backward adds up, in all three places that price it: each of a block that
a hop brought is added once, as the runtime does (`tests/unit/runtime/test_sums.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest

from megatron_balance.analysis.estimate.zones import ZoneTimes, zone_times
from megatron_balance.analysis.tables import Tables
from megatron_balance.compile.pipeline import compile_ranks
from megatron_balance.cost.base import ADD
from megatron_balance.ir.plan import MicrobatchPlan, Zone
from megatron_balance.ir.program import Kind
from megatron_balance.simulator.phase import phase_of, ring_names
from tests.support import by_hand
from tests.support.flat_cost import FlatCost, flat_machine

TOKENS, RANKS, HEADS = 64, 4, 2


@dataclass(frozen=True)
class Bytes(FlatCost):
    """Seconds are bytes that are moved in memory; everything else takes no time."""

    launch: float = 0.0

    def pack_s(self, num_bytes: float) -> float:
        return num_bytes


def machine():
    made = flat_machine(RANKS, RANKS)
    return replace(made, cost=Bytes(made.model))


def plans() -> list[MicrobatchPlan]:
    lengths = (TOKENS * RANKS,)
    return [
        by_hand.pool("ring", lengths, RANKS, heads=(HEADS, HEADS)),
        by_hand.plan(lengths, RANKS, by_hand.zone("zone", "head_ring", range(RANKS), (0,), 2), heads=(HEADS, HEADS)),
    ]


@pytest.mark.parametrize("plan", plans(), ids=["ring", "head ring"])
def test_what_a_hop_brought_is_not_added_around_the_launch(plan: MicrobatchPlan) -> None:
    on = machine()
    row = on.payload.row_bytes
    zone = plan.zones[0]
    assert isinstance(zone, Zone)
    size = zone.group_size or 1
    queries, keys = TOKENS * HEADS * row[Kind.Q_GRAD], TOKENS * HEADS * row[Kind.KV_GRAD]
    seconds = Tables(plan, on).zones[0].backward_s
    # Own keys are added to the caller's; of a block of a hop only the queries' gradients are.
    assert seconds[:, 0] == pytest.approx(ADD * (queries + keys))
    rounds = RANKS // size
    # The causal mask shows a later block to the late half of the queries only.
    assert set(np.round(seconds[:, 1:].ravel() / (ADD * queries), 6)) <= {0.5, 1.0}, rounds
    phase = phase_of(compile_ranks(plan, "keep"), on, backward=True, rings=ring_names(plan))
    for rank in range(RANKS):
        launches = [s for s, x in zip(phase.seconds[rank], phase.exchanges[rank], strict=True) if x < 0]
        assert sorted(launches) == pytest.approx(sorted(seconds[rank].tolist()))


def test_the_estimate_adds_as_the_simulator_does() -> None:
    on, plan = machine(), plans()[0]
    _, (made,) = zone_times(plan, on)
    assert isinstance(made, ZoneTimes)
    assert made.ring is not None
    assert made.ring.backward_s == pytest.approx(Tables(plan, on).zones[0].backward_s)
