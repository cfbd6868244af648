"""Two half batches through layers of attention on real gloo ranks: in turns, the bits of one after the other; nothing is mixed up."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from megatron_balance.core.batch import Batch
from megatron_balance.core.cluster import Cluster
from megatron_balance.core.model import Model
from megatron_balance.core.plan import REMAP, MicrobatchPlan, Routing
from megatron_balance.passes import interleave
from megatron_balance.passes.interleave import Turn
from megatron_balance.passes.transpose import POLICIES
from tests.support import half_batches
from tests.support.half_batches import Halves
from tests.support.pool import Pool
from tests.support.strategies import Case, bare_plan, random_moves

pytestmark = pytest.mark.dist

LAYERS = 2
CASES = tuple(
    Case(Batch(lengths), Cluster(8, 4), Model(4, 2, 8), None, seed=seed) for lengths, seed in (((200, 90, 33), 5), ((250, 70), 6))
)
PLANNERS = ["random_tiling", "llama_all_gather", "ulysses", "zeppelin"]
"""One of each movement; tests/unit/test_interleave.py plays all planners' steps against each other."""


def halves_of(planner: str, *, layered: bool) -> tuple[MicrobatchPlan, ...]:
    """A plan for each half; `layered`: remapped, and routed wherever that can be."""
    plans = [bare_plan(planner, case) for case in CASES]
    if layered:
        plans = [replace(p, moves=random_moves(p, seed)) for seed, p in enumerate(plans)]
        plans = [replace(p, routing=Routing(1, (REMAP, *range(len(p.zones))), pieces=2)) for p in plans]
    return tuple(plans)


def assert_same_bits(ours: list[Halves], theirs: list[Halves]) -> None:
    for rank, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        for half in (0, 1):
            assert np.array_equal(one.out[half], other.out[half]), (rank, half)
            for got, wanted in zip(one.grads[half], other.grads[half], strict=True):
                assert np.array_equal(got, wanted), (rank, half)
        assert one.counters == other.counters


@pytest.mark.parametrize("layered", [False, True], ids=["plain", "remapped and routed"])
@pytest.mark.parametrize("planner", PLANNERS)
def test_halves_in_turns_give_the_bits_of_halves_one_by_one(pool: Pool, planner: str, layered: bool) -> None:
    plans = halves_of(planner, layered=layered)
    turns = interleave.forward(LAYERS)
    for policy in POLICIES:
        alone = pool.run(half_batches.layers, 8, plans, None, policy)
        assert_same_bits(pool.run(half_batches.layers, 8, plans, turns, policy), alone)
        for halves in alone:
            assert [counted["forward_calls"] for counted in halves.counters] == [LAYERS, LAYERS]


@pytest.mark.parametrize(("planner", "layered"), [("random_tiling", False), ("random_tiling", True), ("zeppelin", True)])
def test_streams_joined_by_events_alone_carry_two_halves(pool: Pool, planner: str, layered: bool) -> None:
    """What NCCL will carry: both halves on the same communicators, whose messages match by their order."""
    plans = halves_of(planner, layered=layered)
    for policy in POLICIES:
        ours, theirs = (pool.run(half_batches.layers, 8, plans, interleave.forward(LAYERS), policy, streams) for streams in (True, False))
        assert_same_bits(ours, theirs)


@pytest.mark.parametrize("turns", [interleave.forward(LAYERS), interleave.one_by_one(LAYERS)], ids=["in turns", "one by one"])
def test_parts_run_in_the_order_that_the_simulator_prices(pool: Pool, turns: tuple[Turn, ...]) -> None:
    """Also in the backward, which autograd orders: a rank issues an exchange of one half under the computation of the other."""
    plans = halves_of("random_tiling", layered=False)
    for halves in pool.run(half_batches.layers, 8, plans, turns, "replay"):
        expected = [
            (turn.half, phase, turn.part)
            for phase, of_phase in (("forward", turns), ("backward", interleave.backward(turns)))
            for turn in of_phase
            if turn.part != "linear"
        ]
        assert halves.order == expected
