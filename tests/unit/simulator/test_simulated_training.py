"""Steps as training runs them: which way, what is planned, and what a step in ticks takes with all
that is around it.
"""

from __future__ import annotations

import pytest

from megatron_balance.analysis.machine import Machine
from megatron_balance.cost.analytic import AnalyticCost
from megatron_balance.errors import ConfigError
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.model import Model
from megatron_balance.ir.step import StepPlan
from megatron_balance.planners.base import JointStages, StepContext
from megatron_balance.planning.choice import PingPong, Stages, StepMode, choose_planner, step_mode
from megatron_balance.planning.ticks import ticks
from megatron_balance.simulator.setup import Setup, parts_of
from megatron_balance.simulator.step import simulate_step
from megatron_balance.simulator.ticks import most_held, simulate_joint, simulate_planned
from tests.unit.simulator.test_simulated_ticks import planned, whole

MODEL = Model(
    num_heads=8, num_kv_heads=8, head_dim=128, num_layers=8, hidden_size=1024, ffn_size=4096, vocab_size=32000
)
DISTCA, RING = (choose_planner(name, {"tokens_per_rank": 8192}) for name in ("distca", "te_ring"))


def machine(num_ranks: int) -> Machine:
    cluster = Cluster(num_ranks=num_ranks, ranks_per_node=4)
    return Machine(cluster, MODEL, AnalyticCost(cluster, MODEL))


def step_of(lengths: list[tuple[int, ...]], mode: StepMode, setup: Setup) -> StepPlan:
    stage, pool = machine(4), machine(4 * setup.pipeline)
    joint = JointStages(pool.cluster) if mode.joint else None
    return DISTCA.plan_step(
        tuple(lengths), StepContext(stage.cluster, MODEL, stage.cost, joint=joint, ping_pong=mode.ping_pong)
    )[0]


@pytest.mark.parametrize(
    ("choice", "num_stages", "ping_pong", "stages", "mode"),
    [
        (DISTCA, 1, "auto", None, StepMode(ping_pong=True)),
        (DISTCA, 1, False, "joint", StepMode()),
        (DISTCA, 2, "auto", None, StepMode(ping_pong=True, pipeline="joint")),
        (DISTCA, 2, False, "stages", StepMode(pipeline="stages")),
        (RING, 1, "auto", None, StepMode()),
        (RING, 2, True, None, StepMode(ping_pong=True, pipeline="stages")),
    ],
)
def test_plans_run_as_the_keys_of_a_configuration_say(
    choice: object, num_stages: int, ping_pong: PingPong, stages: Stages, mode: StepMode
) -> None:
    assert step_mode(choice, num_stages, ping_pong, stages) == mode  # pyright: ignore[reportArgumentType]


def test_what_training_refuses_is_refused() -> None:
    with pytest.raises(ConfigError, match="planner te_ring plans each stage for itself"):
        step_mode(RING, 2, "auto", "joint")


def test_nano_batches_hold_the_microbatch_and_one_sequence_stays_whole() -> None:
    ping_pong, alone = step_of([(4000, 3000, 900, 100), (5000,)], StepMode(ping_pong=True), Setup()).microbatches
    assert [sum(plan.lengths) for plan in parts_of(ping_pong)] == [4000, 4000]
    assert [plan.lengths for plan in parts_of(alone)] == [(5000,)]


def test_in_ticks_every_microbatch_has_as_many_nano_batches_as_the_others() -> None:
    run = step_of([(4000, 3000, 900, 100), (5000,)], StepMode(ping_pong=True, pipeline="joint"), Setup(pipeline=2))
    assert [len(parts_of(each)) for each in run.microbatches] == [2, 2]
    assert [each.tick for each in run.ticks[0]] == [each.tick for each in run.ticks[1]] == list(ticks(2, 2))
    assert all(each.plan.num_ranks == 8 for nano_batch in run.ticks for each in nano_batch)
    assert sum(plan.num_tokens for plan in run.plans) == 13_000
    assert all(cell is not None for cell in run.fullest_tick().tick.cells)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_one_stage_in_ticks_is_the_step_without_them(recompute: str) -> None:
    plans, one = [whole(4096, 2048), whole(1024, 8192)], Cluster(num_ranks=2, ranks_per_node=2)
    work = Machine(one, MODEL, AnalyticCost(one, MODEL))
    setup = Setup("replay", recompute)  # pyright: ignore[reportArgumentType]
    found, usual = simulate_joint((planned(plans, 1),), plans, work, work, setup), simulate_step(plans, work, setup)
    # ranks that exchange nothing drift apart in a step, not in a tick
    assert found.step_s == pytest.approx(usual.step_s, rel=0.02)
    assert sum(found.phases_s.values()) == pytest.approx(found.step_s)
    assert found.peak_bytes == pytest.approx(usual.peak_bytes)
    assert found.utilisation["compute"] == pytest.approx(usual.utilisation["compute"], rel=0.03)


@pytest.mark.parametrize(("stages", "chunks"), [(4, 1), (4, 2)])
def test_a_stage_holds_what_the_ticks_leave_it_with(stages: int, chunks: int) -> None:
    order = planned([whole(64, 64)] * 8, stages, chunks)
    for stage in range(stages):
        later = stages - 1 - stage
        assert most_held(order, stage) == (2 * later + 1 if chunks == 1 else chunks * stages + stages - 1 - 2 * stage)


def test_a_step_in_ticks_has_every_figure_and_nano_batches_hide_its_exchanges() -> None:
    lengths = [(3000, 2500, 900, 100), (4500, 2000, 1000)]
    setup = Setup(pipeline=2, engine="events")
    stage, pool = machine(4), machine(8)
    whole_s, nano_batches_s = (
        simulate_planned(step_of(lengths, StepMode(ping_pong, "joint"), setup), stage, pool, setup)
        for ping_pong in (False, True)
    )
    for step in (whole_s, nano_batches_s):
        assert step.num_tokens == sum(map(sum, lengths))
        assert sum(step.phases_s.values()) == pytest.approx(step.step_s)
        assert step.phases_s["waiting"] > 0
        assert step.phases_s["head"] > 0 or step.phases_s["forward_linear"] > 0
        assert len(step.peak_bytes) == 8
        assert step.peak_bytes[:4].max() > step.peak_bytes[4:].min()
        assert all(0 < share <= 1 for name, share in step.utilisation.items() if name != "nic")
    assert nano_batches_s.step_s != whole_s.step_s
