"""Ticks on the clocks: closed forms where microbatches are alike, and what attending together saves
where they are not.
"""

from __future__ import annotations

import numpy as np
import pytest

from megatron_balance.analysis.machine import Machine
from megatron_balance.cost import parallel
from megatron_balance.cost.analytic import AnalyticCost
from megatron_balance.errors import ConfigError
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.columns import Rows
from megatron_balance.ir.model import Model
from megatron_balance.ir.plan import MicrobatchPlan, TaskTable
from megatron_balance.ir.step import TickPlan
from megatron_balance.planners import distca
from megatron_balance.planning.ticks import plan_ticks, ticks
from megatron_balance.simulator.attention import attention_call, linear_s
from megatron_balance.simulator.step import Setup, simulate_step
from megatron_balance.simulator.ticks import simulate_ticks
from tests.support import by_hand

MODEL = Model(num_heads=8, num_kv_heads=8, head_dim=128, num_layers=8, hidden_size=1024, ffn_size=4096)


def machine(num_ranks: int) -> Machine:
    cluster = Cluster(num_ranks=num_ranks, ranks_per_node=num_ranks)
    return Machine(cluster, MODEL, AnalyticCost(cluster, MODEL))


def owned_rows(lengths: tuple[int, ...], owned: Rows, num_ranks: int) -> MicrobatchPlan:
    """Every rank attends to its own queries."""
    tasks = [(rank, seq, start, stop, 0, stop) for rank, seq, start, stop in owned]
    return by_hand.plan(lengths, num_ranks, by_hand.task_table(owned, tasks), heads=(8, 8))


def whole(*lengths: int) -> MicrobatchPlan:
    """A sequence a rank."""
    return owned_rows(lengths, Rows.of(4, [(rank, rank, 0, n) for rank, n in enumerate(lengths)]), len(lengths))


def planned(plans: list[MicrobatchPlan], stages: int, chunks: int = 1) -> tuple[TickPlan, ...]:
    num_ranks = stages * plans[0].num_ranks
    return plan_ticks(
        ticks(stages, len(plans), chunks), plans, lambda lengths, owned: owned_rows(lengths, owned, num_ranks)
    )


@pytest.mark.parametrize(("stages", "chunks"), [(2, 1), (4, 1), (2, 2)])
def test_microbatches_that_are_alike_take_as_long_as_their_ticks(stages: int, chunks: int) -> None:
    microbatches, tokens = 4, 4096
    plans = [whole(tokens, tokens)] * microbatches
    work = machine(2 * stages)
    found = simulate_ticks(planned(plans, stages, chunks), work, Setup(pipeline=stages, interleave=chunks))
    one = whole(tokens, tokens)
    alone = machine(2)
    layer = sum(float(outcome.end_s[0]) for outcome in attention_call(one, alone, "replay", linear_s(one, alone)))
    head = sum(alone.cost.head_s(tokens, backward=backward) for backward in (False, True))
    count = microbatches * chunks + stages - 1
    # Only the last rank computes losses, one after the other with nothing to overlap them; results
    # wait for no one else.
    transfer = parallel.stage_transfer_s(MODEL, tokens, work.intra)
    least = count * MODEL.num_layers / (stages * chunks) * layer
    most = least + microbatches * head + 2 * count * transfer
    assert least + head < found.step_s <= most * (1 + 1e-9)
    assert len(found.end_s) == 2 * count
    assert (np.diff(found.end_s) >= 0).all()


def test_one_stage_takes_what_a_step_takes() -> None:
    plans = [whole(4096, 2048), whole(1024, 8192)]
    step = simulate_step(plans, machine(2), Setup(policy="replay"))
    around = step.phases_s["gradient_sync"] + step.phases_s["optimizer"]
    assert simulate_ticks(planned(plans, 1), machine(2)).step_s == pytest.approx(step.step_s - around)
    full = simulate_step(plans, machine(2), Setup(policy="replay", recompute="full"))
    assert simulate_ticks(planned(plans, 1), machine(2), Setup(recompute="full")).step_s == pytest.approx(
        full.step_s - around
    )


def test_stages_that_attend_together_are_sooner_done_with_uneven_microbatches() -> None:
    plans = [
        distca.plan(distca.Batch(n), machine(2).cluster, MODEL, machine(2).cost, distca.DistcaOptions()) for n in UNEVEN
    ]
    work = machine(4)

    def plan_owned(lengths: tuple[int, ...], owned: Rows) -> MicrobatchPlan:
        return distca.plan_owned(lengths, owned, work.cluster, MODEL, work.cost, distca.DistcaOptions())

    order = ticks(2, len(plans))
    together = simulate_ticks(plan_ticks(order, plans, plan_owned), work)
    apart = simulate_ticks(plan_ticks(order, plans, lambda lengths, owned: owned_rows(lengths, owned, 4)), work)
    assert together.step_s < 0.9 * apart.step_s
    assert together.compute_s.mean() / together.step_s > apart.compute_s.mean() / apart.step_s
    first = plan_ticks(order, plans, plan_owned)[0].plan.zones[0]
    assert isinstance(first, TaskTable)
    assert {2, 3} & {task[0] for task in first.tasks}, "the idle stage attends in the first tick"


UNEVEN = ((32768,), (1024,) * 32, (24576, 8192), (2048,) * 16)


def test_two_nano_batches_hide_what_they_exchange() -> None:
    order, work = ticks(2, 2), machine(4)

    def of_nano_batch(lengths: tuple[int, ...]) -> tuple[TickPlan, ...]:
        plans = [
            distca.plan(distca.Batch(lengths), machine(2).cluster, MODEL, machine(2).cost, distca.DistcaOptions())
        ] * 2
        return plan_ticks(
            order,
            plans,
            lambda n, owned: distca.plan_owned(
                n, owned, work.cluster, MODEL, work.cost, distca.DistcaOptions(tolerance=0.02)
            ),
        )

    first, second = of_nano_batch((12288, 4096)), of_nano_batch((8192, 8192))
    interleaved = simulate_ticks(first, work, Setup(), second)
    one_by_one = simulate_ticks(first, work, Setup(interleaved=False), second)
    assert interleaved.step_s < one_by_one.step_s
    with pytest.raises(ConfigError, match="in the same ticks"):
        simulate_ticks(first, work, Setup(), second[1:])


def test_what_cannot_be_is_said() -> None:
    with pytest.raises(ConfigError, match="at least one tick"):
        simulate_ticks((), machine(2))
    with pytest.raises(ConfigError, match=r"8 layers .* cannot be cut into 3 chunks"):
        simulate_ticks(planned([whole(64)] * 3, 3), machine(3))
    with pytest.raises(ConfigError, match="2 pipeline stages, the setup has 4"):
        simulate_ticks(planned([whole(64)], 2), machine(2), Setup(pipeline=4))
