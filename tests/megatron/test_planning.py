"""Steps planned ahead and on the spot, and the small sums around them; no training, no process
group."""

from __future__ import annotations

import argparse
import dataclasses
import logging
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("megatron.training")

from megatron.core import num_microbatches_calculator

from megatron_balance.compile.layouts import layouts
from megatron_balance.cost.analytic import AnalyticCost
from megatron_balance.errors import ConfigError, InfeasibleError
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.model import Model
from megatron_balance.ir.strategy import Scheme, Strategy
from megatron_balance.megatron import planning
from megatron_balance.megatron.session import of_pool
from megatron_balance.planning.choice import choose_layers, choose_planner
from megatron_balance.planning.place import nano_batches_of
from megatron_balance.planning.step_planner import PlanSpec, StepPlanner
from megatron_balance.runtime.groups import single
from megatron_balance.training.figures import tick_figures
from megatron_balance.training.ledger import DataIdentity
from megatron_balance.training.pool import Pool

pytestmark = pytest.mark.megatron

SAMPLES = ((30, 20), (40,), (10, 10, 10), (50,), (25, 25), (5,), (60,), (33, 1))


class Data:
    """Sample lengths; `lies` about them if told to."""

    fingerprint = "0123456789abcdef"

    def __init__(self, lies: bool = False) -> None:
        self.lies = lies

    def __len__(self) -> int:
        return len(SAMPLES)

    def sample_lengths(self, index: int) -> tuple[int, ...]:
        return (7,) if self.lies else SAMPLES[index]


def job(data: Data | None, planner: str = "zeppelin", **args: Any) -> Any:
    config = SimpleNamespace(planner=choose_planner(planner, {}), plan_costs=None, prove_every=1, backward="auto")
    usual = {
        "rank": 0,
        "seq_length": 64,
        "micro_batch_size": 2,
        "context_parallel_size": 1,
        "consumed_train_samples": 0,
        "tensor_model_parallel_size": 1,
        "sequence_parallel": False,
        "pipeline_model_parallel_size": 1,
        "data_parallel_size": 64,
        "num_layers": 32,
        "mtp_num_layers": None,
        "virtual_pipeline_model_parallel_size": None,
        "use_distributed_optimizer": True,
        "grad_reduce_in_bf16": False,
        "expert_model_parallel_size": 1,
        "expert_tensor_parallel_size": None,
        "recompute_granularity": None,
    }
    return SimpleNamespace(
        config=config,
        row_multiple=1,
        joint=False,
        ping_pong=False,
        candidates=(),
        layout=Strategy((Scheme(),)),
        args=argparse.Namespace(**{**usual, **args}),
        train_data=data,
        data_identity=DataIdentity,
        pool=Pool(single(), 1, (0,), (0,)),
        cluster=lambda: Cluster(num_ranks=1, ranks_per_node=1),
        model=lambda _=1: Model(8, 8, 16),
    )


def joint_job(data: Data | None) -> Any:
    """Two stages of one rank, nano-batches interleaved."""
    work = job(data, "distca", micro_batch_size=1, seq_length=600, virtual_pipeline_model_parallel_size=None)
    work.joint = work.ping_pong = True
    work.config.planner = choose_planner("distca", {"block": 8})
    work.joint_cluster = lambda: Cluster(num_ranks=2, ranks_per_node=1)
    return work


@pytest.fixture(autouse=True)
def one_microbatch() -> Any:
    num_microbatches_calculator.init_num_microbatches_calculator(0, None, 2, 2, 1, False)
    yield
    num_microbatches_calculator.destroy_num_microbatches_calculator()


def step(first: int) -> tuple[tuple[int, ...], ...]:
    """Lengths that the pool reads in one step of one microbatch of two samples."""
    return ((*SAMPLES[first], *SAMPLES[first + 1]),)


def test_a_plan_made_ahead_is_taken_and_is_the_one_made_on_the_spot(caplog: pytest.LogCaptureFixture) -> None:
    here = planning.step_plans(job(None), ahead=True)
    work = job(Data())
    planner = planning.step_plans(work, ahead=True)
    try:
        for first in (0, 2, 4, 6):
            work.args.consumed_train_samples = first
            assert planner.plan(step(first)).plans == here.plan(step(first)).plans
    finally:
        planner.close()
    assert not caplog.records


@pytest.mark.parametrize(("stage", "every"), [(0, 7), (1, 0)])
def test_ranks_of_the_first_stage_prove_plans(monkeypatch: pytest.MonkeyPatch, stage: int, every: int) -> None:
    work = job(Data())
    work.config.prove_every = 7
    work.pool = dataclasses.replace(work.pool, stage=stage, num_stages=2)
    started: list[tuple[int, int | None]] = []
    monkeypatch.setattr(planning, "PlanAhead", lambda spec: started.append((spec.prove_every, spec.prove_as)))
    planning.step_plans(work, ahead=True)
    assert started == [(every, 0)]


def test_halves_of_stages_that_attend_together_are_planned_apart_in_the_same_ticks(
    caplog: pytest.LogCaptureFixture,
) -> None:
    num_microbatches_calculator.destroy_num_microbatches_calculator()
    num_microbatches_calculator.init_num_microbatches_calculator(0, None, 2, 1, 1, False)
    jobs = [joint_job(data) for data in (None, Data())]
    here, ahead = (planning.step_plans(job, ahead=True) for job in jobs)
    try:
        for first in (0, 2, 4, 6):
            jobs[0].args.consumed_train_samples = jobs[1].args.consumed_train_samples = first
            lengths = SAMPLES[first : first + 2]
            planned = ahead.plan(lengths)
            assert (planned.wait_s == planned.plan_s) == (first == 0), "all but the first step are planned ahead"
            assert (planned.plans, planned.step.ticks) == (here.plan(lengths).plans, here.plan(lengths).step.ticks)
            pooled = [n for microbatch in lengths for n in microbatch]
            parts = [tuple(pooled[i] for i in part) for own in planned.step.members for part in own]
            assert [plan.lengths for plan in planned.plans] == parts
            assert [len(own) for own in planned.step.members] == [2, 2], (
                "of a microbatch of one document the second half is empty"
            )
            order, other = ([one.tick for one in ticks] for ticks in planned.step.ticks)
            assert order == other
            for nano_batch, ticks in enumerate(planned.step.ticks):
                assert ticks[0].plan.lengths == planned.plans[nano_batch].lengths
    finally:
        ahead.close()
    assert "planning on the spot" not in caplog.text
    assert nano_batches_of(((5,), (6,)), ping_pong=True, aligned=True) == [((0,),), ((0,),)], "nobody has a second half"


def test_figures_of_ticks_count_each_half_once() -> None:
    work = joint_job(None)
    planned = planning.step_plans(work, ahead=False).plan(((300, 200, 40), (170,), (90, 90)))
    cost = AnalyticCost(work.joint_cluster(), work.model())
    both, first, second = (
        tick_figures(nano_batches, work.model(), cost, 1)
        for nano_batches in (planned.step.ticks, planned.step.ticks[:1], planned.step.ticks[1:])
    )
    assert both["num_ticks"] == first["num_ticks"] == 2 * (3 + 1)
    assert first["kv_tokens_received"] > second["kv_tokens_received"] > 0
    for name in ("kv_tokens_received", "kv_tokens_received_inter_node", "predicted_ms"):
        assert both[name] == pytest.approx(first[name] + second[name])
    for name in ("bytes_sent_per_nic", "bytes_received_per_nic"):
        assert np.array(both[name]) == pytest.approx(np.add(first[name], second[name]))
    assert len(both["attention"]) == 2 * both["num_ticks"]


def test_lengths_that_were_not_expected_are_planned_on_the_spot_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    work = job(Data(lies=True))
    planner = planning.step_plans(work, ahead=True)
    try:
        with caplog.at_level(logging.WARNING):
            for first in (0, 2, 4):
                work.args.consumed_train_samples = first
                assert planner.plan(step(first)).plans[0].lengths == step(first)[0]
    finally:
        planner.close()
    assert [record.message.split(" at sample")[0] for record in caplog.records] == [
        "planning ahead expected other lengths than the data iterator brought"
    ]


def test_the_capacity_of_a_rank_is_its_share_of_full_samples() -> None:
    assert planning.tokens_per_rank(64, 2, 4) == 32
    with pytest.raises(ConfigError, match="not divisible"):
        planning.tokens_per_rank(63, 1, 2)
    planner = planning.step_plans(job(None, seq_length=16), ahead=False)
    assert planner.plan(((24, 24),)).plans[0].num_tokens == 48  # zeppelin's slack of 1.5 over 16 x 2 tokens
    with pytest.raises(InfeasibleError, match="49 tokens"):
        planner.plan(((24, 25),))


@pytest.mark.parametrize(("pool_ranks", "held"), [(3, 512), (1, 171)])
def test_ranks_that_hold_tokens_have_room_for_those_of_ranks_that_only_serve(pool_ranks: int, held: int) -> None:
    work = job(None)
    work.config.planner = choose_planner("distca", {"servers": "pool", "pool_ranks": pool_ranks})
    work.cluster = lambda: Cluster(num_ranks=4, ranks_per_node=2)
    planner, holders = planning.step_plans(work, ahead=False), 4 - pool_ranks
    assert planner.plan(((512,),)).plans[0].num_tokens == 4 * 128  # two samples of 64 tokens for each of four ranks
    with pytest.raises(InfeasibleError, match=f"{holders} ranks x {held} tokens"):
        planner.plan(((held * holders + 1,),))


def test_under_sequence_parallelism_ranks_hold_multiples_of_its_size() -> None:
    work = job(None, seq_length=512)
    work.config.planner = choose_planner("zeppelin", {}, layers=choose_layers("zeppelin", remapping=True))
    work.cluster = lambda: Cluster(num_ranks=4, ranks_per_node=2)
    work.row_multiple = 2
    (plan,) = planning.step_plans(work, ahead=False).plan(((300, 140, 20, 7),)).plans
    rows = layouts(plan)
    counts = np.bincount(rows[:, 0], rows[:, 3] - rows[:, 2], 4)
    assert sorted(counts % 2) == [0, 0, 0, 1]  # 467 tokens: one rank has the odd one
    assert counts.max() - counts.min() <= 2


def test_a_pool_shares_its_nics_with_tensor_parallel_peers() -> None:
    gpus = Cluster(num_ranks=16, ranks_per_node=8, ranks_per_nic=4, nic_bytes_per_s=40e9)
    seen = {size: of_pool(gpus, size) for size in (1, 2, 4, 8)}
    assert {size: cluster.ranks_per_nic for size, cluster in seen.items()} == {1: 4, 2: 2, 4: 1, 8: 1}
    assert {size: cluster.nic_bytes_per_s for size, cluster in seen.items()} == {1: 40e9, 2: 20e9, 4: 10e9, 8: 10e9}


def test_evaluation_has_room_for_its_own_microbatches() -> None:
    """16 samples of 64 tokens on one rank, where training has 2."""
    sizes = {"micro_batch_size": 2, "eval_micro_batch_size": 16}
    assert planning.plan_spec(job(None, "te_ring", **sizes), joint=False).options["tokens_per_rank"] == 2 * 64
    assert (
        planning.plan_spec(job(None, "te_ring", **sizes), joint=False, evaluation=True).options["tokens_per_rank"]
        == 16 * 64
    )
    work = job(None, "te_ring", **sizes)
    work.config.planner = choose_planner("zeppelin", {"tokens_per_rank": 100})
    assert planning.plan_spec(work, joint=False, evaluation=True).options["tokens_per_rank"] == 800
    planning.step_plans(work, ahead=False, evaluation=True).plan(((64,) * 12,))


def changing(seq_length: int) -> Any:
    """A job of four GPUs whose layout is TP 2 x DP 2."""
    made = job(None, "hydraulis", seq_length=seq_length, tensor_model_parallel_size=2, sequence_parallel=True)
    made.layout = Strategy.parse("2*tp2-pp1-cp1")
    made.candidates = tuple(map(Strategy.parse, ("tp2-pp1-cp1+tp1-pp2-cp1", "tp1-pp1-cp4")))
    made.cluster = lambda: Cluster(num_ranks=2, ranks_per_node=2)
    made.gpus = lambda: Cluster(num_ranks=4, ranks_per_node=4)
    made.model = lambda tensor=2: Model(8, 8, 16).share(tensor)
    return made


def test_candidates_are_planned_for_gpus_and_evaluation_for_the_layout() -> None:
    """Microbatches of a pipeline are planned with one tensor-parallel rank's heads."""
    trained, evaluated = (planning.plan_spec(changing(64), joint=False, evaluation=each) for each in (False, True))
    assert (trained.cluster.num_ranks, trained.model.num_heads, trained.layers.align) == (4, 8, 2)
    assert trained.options["tokens_per_rank"] * 2 == evaluated.options["tokens_per_rank"] == 128
    known = StepPlanner(trained).candidates()
    assert [[inside.model.num_heads for inside in each.inside] for each in known] == [[4, 8], [8]]
    assert (evaluated.strategy, evaluated.options["strategies"]) == ("2*tp2-pp1-cp1", ())
    small = changing(64)
    small.config.planner = choose_planner("hydraulis", {"tokens_per_rank": 16})
    assert planning.plan_spec(small, joint=False).options["tokens_per_rank"] == 16
    held = planning.plan_spec(small, joint=False, evaluation=True).options["tokens_per_rank"]
    assert held == 128, "the layout is evaluated on whole samples"


def test_candidates_none_of_which_holds_a_sample_are_refused() -> None:
    spec = planning.plan_spec(changing(64), joint=False)
    planning.check_holds(spec, 256)
    with pytest.raises(
        ConfigError, match=r"no candidate holds --seq-length 257: tp1-pp1-cp4, .* holds 256 tokens; raise"
    ):
        planning.check_holds(spec, 257)


@pytest.mark.parametrize(("joint", "asked"), [(False, "keep"), (True, "replay")])
def test_planners_are_told_the_memory_of_the_layout(joint: bool, asked: str) -> None:
    """Of 64 ranks in 4 stages, 16 share out the optimizer's state. Joint stages replay."""
    work = job(None, pipeline_model_parallel_size=4, data_parallel_size=16)
    work.config.backward, work.joint = "keep", joint
    work.pool = dataclasses.replace(work.pool, num_stages=4)
    memory = planning.plan_spec(work, joint=False).memory
    assert memory is not None
    assert memory.asked == asked
    assert [(each.num_layers, each.sharding.optimizer) for each in memory.stages] == [(8, 16)] * 4
    assert PlanSpec.from_json(planning.plan_spec(work, joint=False).to_json()).memory == memory
