"""The executor with Triton's mover, by the interpreter; and the memory that calls share."""

from dataclasses import replace
from typing import Any

import pytest

from megatron_balance import Batch, Cluster, MicrobatchPlan, Model
from megatron_balance.ir.plan import Routing
from tests.distributed.test_executor import PARTS, TOLERANCE, assert_equals_reference
from tests.support import by_hand, dense, jobs, routed
from tests.support.jobs import Run
from tests.support.pool import Pool
from tests.support.strategies import random_task_table

pytest.importorskip("triton")

NODES: dict[str, Any] = {"ranks_per_node": 2, "heads": (4, 2)}
RINGS = (by_hand.ring(range(4), 0), by_hand.ring((2, 3), 1))
ROUTED = by_hand.plan((96, 40), 4, *RINGS, routing=Routing(2, (0,)), **NODES)
ZONES = (by_hand.head_exchange(range(4), 0), by_hand.all_gather((2, 3), 1), by_hand.ring((0, 1), 2))
COLLECTIVE = by_hand.plan((96, 40, 33), 4, *ZONES, **NODES)
# For the interpreter, which takes its time over every block of 8 rows: still fragments of more than
# one block, and of parts of one.
HEADS = (by_hand.zone("zone", "head_ring", range(4), (0, 1)), by_hand.head_exchange(range(4), 2, 3))
INTERPRETED = {
    "routed": replace(ROUTED, lengths=(72, 20)),
    "collective": replace(COLLECTIVE, lengths=(20, 18, 5)),
    "head ring": by_hand.plan((30, 21, 12, 5), 4, *HEADS, ranks_per_node=2, heads=(4, 4)),
    "tiled": random_task_table(Batch((72, 20)), Cluster(4, 4), Model(4, 2, 8), seed=3),
}
TILED = random_task_table(Batch((120, 31)), Cluster(4, 4), Model(4, 2, 8), seed=3)


@pytest.mark.parametrize("planned", INTERPRETED.values(), ids=INTERPRETED)
def test_tritons_mover_in_every_kind_of_exchange(pool: Pool, planned: MicrobatchPlan) -> None:
    replayed = planned is INTERPRETED["routed"]
    single = Run("replay" if replayed else "keep", "float32", mover="triton", strided=replayed)
    runs = [single, Run("keep", "bfloat16", mover="triton"), Run("keep", "float64")]
    per_rank = pool.run(jobs.attend, planned.num_ranks, planned, 8, runs)
    for index, run in enumerate(runs):
        if run.dtype in TOLERANCE:
            assert_equals_reference(planned, 8, run, [results[index] for results in per_rank])
    for name in PARTS:
        ours, theirs = ([getattr(results[i], name) for results in per_rank] for i in (1, 2))
        assert 0 < dense.worst(ours, theirs) < 2e-2, name


# Per layer in bf16: out and LSE; the gradients of q, and of k and v.
RESULTS = {"aten.empty.memory_format": 5}


def test_the_second_step_allocates_nothing_but_its_results(pool: Pool) -> None:
    # Operators that make memory in a step, but for the attention kernel's: one for each result.
    for (seen,) in pool.run(routed.steps, 4, (replace(ROUTED, lengths=(24, 12)),), 1, "keep", "triton", "bfloat16"):
        first, second, third = seen.steps
        assert second.allocations == third.allocations
        assert all(count <= RESULTS.get(name, 0) for name, count in second.allocations.items()), second.allocations
        assert len({(step.num_slabs, step.held_bytes) for step in (first, second, third)}) == 1
        assert second.used_after <= 256  # the one buffer that was asked for last


@pytest.mark.parametrize("policy", ["keep", "replay"])
def test_memory_is_what_the_plan_said_it_would_be(pool: Pool, policy: str) -> None:
    # One call at a time takes no more than its demand, and what it takes is no small part of that.
    for planned in (ROUTED, COLLECTIVE, TILED):
        for (seen,) in pool.run(routed.steps, planned.num_ranks, (planned,), 1, policy, "plain", "bfloat16"):
            most = max(step.peak_bytes for step in seen.steps)
            rounding = 256 * 64  # every buffer begins at a multiple of 256 bytes
            assert most <= seen.call_bytes + rounding
            assert most == 0 or seen.call_bytes <= 4 * most + rounding


def test_plans_of_other_shapes_share_the_slabs(pool: Pool) -> None:
    # Six plans in turn: from the second time round not one slab more.
    batches = [Batch((90 + 7 * i, 31 + 3 * i)) for i in range(6)]
    plans = tuple(random_task_table(each, Cluster(4, 4), Model(4, 2, 16), at) for at, each in enumerate(batches))
    for per_plan in pool.run(routed.steps, 4, plans, 1, "keep", "plain", "bfloat16"):
        slabs = [seen.steps[i].num_slabs for i in range(3) for seen in per_plan]
        assert slabs[6:] == [slabs[5]] * 12
        assert slabs[5] <= 2


def test_what_autograd_saved_is_never_overwritten(pool: Pool) -> None:
    for planned in (ROUTED, COLLECTIVE):
        assert pool.run(routed.keep_a_gradient, 4, planned) == [True] * 4
