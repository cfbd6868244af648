"""Two nano-batches through layers of attention on real gloo ranks: interleaved, the bits of one
after the other; nothing is mixed up.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from megatron_balance.compile import ping_pong
from megatron_balance.compile.ping_pong import Segment
from megatron_balance.compile.transpose import Policy
from megatron_balance.ir.batch import Batch
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.model import Model
from megatron_balance.ir.plan import REMAP, MicrobatchPlan, Routing
from tests.support import nano_batches
from tests.support.nano_batches import NanoBatches
from tests.support.pool import Pool
from tests.support.strategies import Case, bare_plan, random_moves

pytestmark = pytest.mark.dist

LAYERS = 2
CASES = tuple(
    Case(Batch(lengths), Cluster(8, 4), Model(4, 2, 8), None, seed=seed)
    for lengths, seed in (((200, 90, 33), 5), ((250, 70), 6))
)
PLANNERS = ["random_task_table", "llama_all_gather", "ulysses", "zeppelin"]
"""One of each comm pattern; tests/unit/compile/test_ping_pong.py plays all planners' steps against
each other.
"""


def nano_batches_of(planner: str, *, layered: bool) -> tuple[MicrobatchPlan, ...]:
    """A plan for each nano-batch; `layered`: remapped, and routed wherever that can be."""
    plans = [bare_plan(planner, case) for case in CASES]
    if layered:
        plans = [replace(p, moves=random_moves(p, seed)) for seed, p in enumerate(plans)]
        plans = [replace(p, routing=Routing(1, (REMAP, *range(len(p.zones))), pieces=2)) for p in plans]
    return tuple(plans)


def assert_same_bits(ours: list[NanoBatches], theirs: list[NanoBatches]) -> None:
    for rank, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        for nano_batch in (0, 1):
            assert np.array_equal(one.out[nano_batch], other.out[nano_batch]), (rank, nano_batch)
            for got, wanted in zip(one.grads[nano_batch], other.grads[nano_batch], strict=True):
                assert np.array_equal(got, wanted), (rank, nano_batch)
        assert one.counters == other.counters


@pytest.mark.parametrize(
    ("planner", "layered", "policy"),
    [
        *((planner, False, "keep") for planner in PLANNERS),
        *((planner, True, "replay") for planner in ("llama_all_gather", "zeppelin")),
        *(pytest.param(name, True, "replay", marks=pytest.mark.product) for name in ("random_task_table", "ulysses")),
    ],
)
def test_interleaved_nano_batches_give_the_bits_of_nano_batches_one_by_one(
    pool: Pool, planner: str, layered: bool, policy: Policy
) -> None:
    plans = nano_batches_of(planner, layered=layered)
    segments = ping_pong.forward(LAYERS)
    alone = pool.run(nano_batches.layers, 8, plans, None, policy)
    assert_same_bits(pool.run(nano_batches.layers, 8, plans, segments, policy), alone)
    for result in alone:
        assert [counted["forward_calls"] for counted in result.counters] == [LAYERS, LAYERS]


@pytest.mark.parametrize(
    ("planner", "layered", "policy"),
    [
        pytest.param("random_task_table", False, "keep", marks=pytest.mark.product),
        ("random_task_table", True, "replay"),
        ("zeppelin", True, "keep"),
    ],
)
def test_streams_joined_by_events_alone_carry_two_nano_batches(
    pool: Pool, planner: str, layered: bool, policy: Policy
) -> None:
    """Order as NCCL needs it: both nano-batches on the same communicators, whose messages match by
    their order.
    """
    plans = nano_batches_of(planner, layered=layered)
    ours, theirs = (
        pool.run(nano_batches.layers, 8, plans, ping_pong.forward(LAYERS), policy, streams) for streams in (True, False)
    )
    assert_same_bits(ours, theirs)


@pytest.mark.parametrize(
    "segments", [ping_pong.forward(LAYERS), ping_pong.one_by_one(LAYERS)], ids=["interleaved", "one by one"]
)
def test_segments_run_in_the_order_that_the_simulator_prices(pool: Pool, segments: tuple[Segment, ...]) -> None:
    """Also in the backward, which autograd orders: a rank issues an exchange of one nano-batch
    under the computation of the other.
    """
    plans = nano_batches_of("random_task_table", layered=False)
    for ran in pool.run(nano_batches.layers, 8, plans, segments, "replay"):
        expected = [
            (segment.nano_batch, phase, segment.part)
            for phase, of_phase in (("forward", segments), ("backward", ping_pong.backward(segments)))
            for segment in of_phase
            if segment.part != "linear"
        ]
        assert ran.order == expected
