"""Steps planned ahead and on the spot, and the small sums around them; no training."""

import argparse
import dataclasses
import logging
import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core import num_microbatches_calculator
from megatron.training import training

from megatron_balance import Batch, make_planner
from megatron_balance.analysis.backward import Recomputed
from megatron_balance.compile.remap import layouts
from megatron_balance.cost.analytic import AnalyticCost
from megatron_balance.errors import ConfigError, InfeasibleError
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.model import Model, RecurrentLayers
from megatron_balance.ir.step import Layers
from megatron_balance.ir.strategy import Scheme, Strategy
from megatron_balance.megatron import forward_backward, forward_step, planning, session
from megatron_balance.megatron.planning import planned_model, stages_of
from megatron_balance.megatron.session import of_pool
from megatron_balance.planners import megatron
from megatron_balance.planners.megatron import MegatronDynamicOptions, plan_with
from megatron_balance.planning.choice import Run, choose_layers, choose_planner, planning_cost
from megatron_balance.planning.layers import nano_batches_of
from megatron_balance.planning.step_planner import PlanSpec, StepPlanner
from megatron_balance.runtime.bind import AttentionShape
from megatron_balance.runtime.groups import single
from megatron_balance.training.figures import _tick_figures
from megatron_balance.training.ledger import DataIdentity
from megatron_balance.training.pool import Pool
from megatron_balance.training.tokens import PoolLengths

SAMPLES = ((30, 20), (40,), (10, 10, 10), (50,), (25, 25), (5,), (60,), (33, 1))


class Data:
    # Sample lengths; `lies` about them if told to.
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
        "rank": 0, "seq_length": 64, "micro_batch_size": 2, "consumed_train_samples": 0, "data_parallel_size": 64,
        "num_layers": 32, "mtp_num_layers": None, "context_parallel_size": 1, "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1, "virtual_pipeline_model_parallel_size": None, "sequence_parallel": False,
        "expert_model_parallel_size": 1, "expert_tensor_parallel_size": None, "recompute_granularity": None,
        "use_distributed_optimizer": True, "grad_reduce_in_bf16": False, "balance_trees": None,
    }  # fmt: skip
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
    return ((*SAMPLES[first], *SAMPLES[first + 1]),)


@pytest.mark.parametrize("lies", [False, True])
def test_a_plan_made_ahead_is_the_one_made_on_the_spot_as_are_those_of_lengths_that_were_not_expected(
    lies: bool, caplog: pytest.LogCaptureFixture
) -> None:
    here = planning.step_plans(job(None), ahead=True)
    work = job(Data(lies))
    planner = planning.step_plans(work, ahead=True)
    try:
        with caplog.at_level(logging.WARNING):
            for first in (0, 2, 4, 6):
                work.args.consumed_train_samples = first
                assert planner.plan(step(first)).plans == here.plan(step(first)).plans
    finally:
        planner.close()
    told = "planning ahead expected other lengths than the data iterator brought"
    assert [record.message.split(" at sample")[0] for record in caplog.records] == [told] * lies, "said once"


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
        _tick_figures(nano_batches, work.model(), cost, 1)
        for nano_batches in (planned.step.ticks, planned.step.ticks[:1], planned.step.ticks[1:])
    )
    assert both["num_ticks"] == first["num_ticks"] == 2 * (3 + 1)
    assert first["kv_tokens_received"] > second["kv_tokens_received"] > 0
    for name in ("kv_tokens_received", "kv_tokens_received_inter_node", "predicted_ms"):
        assert both[name] == pytest.approx(first[name] + second[name])
    for name in ("bytes_sent_per_nic", "bytes_received_per_nic"):
        assert np.array(both[name]) == pytest.approx(np.add(first[name], second[name]))
    assert len(both["attention"]) == 2 * both["num_ticks"]


def test_the_capacity_of_a_rank_is_its_share_of_full_samples_of_its_own_microbatches_in_evaluation() -> None:
    assert planning.tokens_per_rank(64, 2, 4) == 32
    with pytest.raises(ConfigError, match="not divisible"):
        planning.tokens_per_rank(63, 1, 2)
    planner = planning.step_plans(job(None, seq_length=16), ahead=False)
    assert planner.plan(((24, 24),)).plans[0].num_tokens == 48  # zeppelin's slack of 1.5 over 16 x 2 tokens
    with pytest.raises(InfeasibleError, match="49 tokens"):
        planner.plan(((24, 25),))
    # 16 samples of 64 tokens on one rank, where training has 2.
    sizes = {"micro_batch_size": 2, "eval_micro_batch_size": 16}
    specs = [planning.plan_spec(job(None, "te_ring", **sizes), joint=False, evaluation=each) for each in (False, True)]
    assert [spec.options["tokens_per_rank"] for spec in specs] == [2 * 64, 16 * 64]
    work = job(None, "te_ring", **sizes)
    work.config.planner = choose_planner("zeppelin", {"tokens_per_rank": 100})
    assert planning.plan_spec(work, joint=False, evaluation=True).options["tokens_per_rank"] == 800
    planning.step_plans(work, ahead=False, evaluation=True).plan(((64,) * 12,))


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


def changing(seq_length: int) -> Any:
    # A job of four GPUs whose layout is TP 2 x DP 2.
    made = job(None, "hydraulis", seq_length=seq_length, tensor_model_parallel_size=2, sequence_parallel=True)
    made.layout = Strategy.parse("2*tp2-pp1-cp1")
    made.candidates = tuple(map(Strategy.parse, ("tp2-pp1-cp1+tp1-pp2-cp1", "tp1-pp1-cp4")))
    made.cluster = lambda: Cluster(num_ranks=2, ranks_per_node=2)
    made.gpus = lambda: Cluster(num_ranks=4, ranks_per_node=4)
    made.model = lambda tensor=2: Model(8, 8, 16).share(tensor)
    return made


def test_candidates_are_planned_for_gpus_evaluation_for_the_layout_and_none_that_holds_a_sample_refused() -> None:
    # Microbatches of a pipeline are planned with one tensor-parallel rank's heads.
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
    spec = planning.plan_spec(changing(64), joint=False)
    planning.check_holds(spec, 256)
    with pytest.raises(ConfigError, match=r"holds --seq-length 257: tp1-pp1-cp4, .* holds 256 tokens; raise"):
        planning.check_holds(spec, 257)


@pytest.mark.parametrize(("joint", "asked"), [(False, "keep"), (True, "replay")])
def test_planners_are_told_the_memory_of_the_layout(joint: bool, asked: str) -> None:
    # Of 64 ranks in 4 stages, 16 share out the optimizer's state. Joint stages replay.
    work = job(None, pipeline_model_parallel_size=4, data_parallel_size=16)
    work.config.backward, work.joint = "keep", joint
    work.pool = dataclasses.replace(work.pool, num_stages=4)
    memory = planning.plan_spec(work, joint=False).memory
    assert memory is not None
    assert memory.asked == asked
    assert [(each.num_layers, each.sharding.optimizer) for each in memory.stages] == [(8, 16)] * 4
    assert PlanSpec.from_json(planning.plan_spec(work, joint=False).to_json()).memory == memory


# The loss and the tokens that Megatron's own checks and counts see.


def test_checks_see_the_loss_of_a_token_however_many_a_rank_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, float]] = []

    class State:
        def is_unexpectedly_large(self, *_: Any, **__: Any) -> bool:
            raise AssertionError("the rule is Megatron's, handed on")

        def validate_result(self, *, result: torch.Tensor, message: str, **_: Any) -> None:
            seen.append((message, float(result)))

    args = SimpleNamespace(check_for_nan_in_loss_and_grad=True, check_for_spiky_loss=True)
    monkeypatch.setattr(forward_step.session, "current", lambda: SimpleNamespace(args=args))
    monkeypatch.setattr(forward_step, "get_rerun_state_machine", State)
    for tokens in (1, 100, 0):
        mask, losses = torch.ones(tokens), torch.full((tokens,), 3.0)
        loss, counted, report = forward_step.checked_loss(mask, losses)
        assert (float(loss), int(counted)) == (3.0 * tokens, tokens)
        assert report["lm loss"].tolist() == [3.0 * tokens, tokens]
    assert [value for message, value in seen if message == "Spiky loss"] == [3.0, 3.0, 0.0]
    assert len(seen) == 9


def test_megatrons_throughput_counts_the_real_tokens_of_a_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    # And the squares of its sequences; of no padding, and of no other replica's.
    for name, fresh in (("_seqlen_stats_in_iteration", None), ("_seqlen_stats_active", False)):
        monkeypatch.setattr(training, name, fresh)
    owners = (np.array([0, 0, 2]), np.array([2, 2]), np.array([0]))
    own = forward_backward._own_sequences(PoolLengths(((30, 20, 40), (9, 9), (7,)), owners), 0)
    forward_backward._count_flops(own)
    counted: Any = training._seqlen_stats_in_iteration
    assert counted.tolist() == [57, 30**2 + 20**2 + 7**2]
    assert training._seqlen_stats_active


# The model that plans and predictions see, with layers of every kind, by Megatron's arguments.


def seen(tensor: int = 1, **more: Any) -> Model:
    args = argparse.Namespace(
        **{
            "num_layers": 4, "hidden_size": 64, "ffn_hidden_size": 256, "num_experts": 8, "moe_ffn_hidden_size": 32,
            "expert_model_parallel_size": 1, "expert_tensor_parallel_size": None,
            "moe_router_topk": 2, "moe_layer_freq": 1, "moe_shared_expert_intermediate_size": None, "swiglu": True,
            "window_size": None, "window_attn_skip_freq": None, "params_dtype": torch.bfloat16,
            "padded_vocab_size": 96, "multi_latent_attention": False, "mtp_num_layers": None,
            "untie_embeddings_and_output_weights": True,
        } | more
    )  # fmt: skip
    return planned_model(args, Run(source="balance.yaml"), AttentionShape(4, 4, 16, None, None), tensor)


def test_layers_of_every_kind_are_those_of_the_arguments() -> None:
    model = seen(moe_shared_expert_intermediate_size=64, moe_layer_freq=[0, 1, 1, 1])
    assert (model.ffn_size, model.shared_ffn_size, model.dense_layers) == (32, 64, 1)
    assert seen(moe_layer_freq=2).dense_layers == 2
    assert seen(2, moe_shared_expert_intermediate_size=64).shared_ffn_size == 32
    assert seen(2, expert_model_parallel_size=4, expert_tensor_parallel_size=1).expert_split == 2
    assert seen(num_experts=None, moe_layer_freq=[0, 1, 1, 1]).dense_layers == 0
    model = seen(mtp_num_layers=1, untie_embeddings_and_output_weights=False)
    assert (model.num_layers, model.mtp_layers, model.tied_embeddings) == (5, 1, True)
    assert not seen().tied_embeddings
    model = seen(window_size=(63, 0), window_attn_skip_freq=4)
    assert (model.attention, model.other_attention, model.other_layers) == ("causal", "window_64", 3)
    assert seen(window_size=(63, 0)).other_layers == 0


def test_recurrent_layers_are_those_of_the_pattern_or_of_the_frequency_of_attention() -> None:
    mamba = {"mamba_num_heads": None, "mamba_head_dim": 16, "mamba_num_groups": 2, "mamba_state_dim": 32}
    delta: dict[str, Any] = {"linear_num_value_heads": 8, "linear_value_head_dim": 16, "linear_num_key_heads": 4}
    delta |= {"linear_key_head_dim": 12, "linear_conv_kernel_dim": 4}
    found = seen(2, **mamba, hybrid_layer_pattern="M-|M*/M*", num_layers=4, mtp_num_layers=1)
    assert found.recurrent == RecurrentLayers("mamba2", 3, 2, 1, 4, 16, key_heads=1, key_dim=32, chunk=128)
    assert found.dense_layers == 1
    variant = {**delta, "experimental_attention_variant": "gated_delta_net"}
    of_gpt = RecurrentLayers("gated_delta", 3, 1, 4, 8, 16, key_heads=4, key_dim=12)
    for freq in (4, [1, 1, 1, 0]):
        assert seen(**variant, linear_attention_freq=freq).recurrent == of_gpt
    # A further token's layer is as the last one, which attends.
    further = seen(**variant, linear_attention_freq=4, mtp_num_layers=1).recurrent
    assert further == dataclasses.replace(of_gpt, attention_layers=2, mlp_layers=5)
    assert seen(**mamba, **delta, hybrid_layer_pattern="GG*M").recurrent == RecurrentLayers(
        "gated_delta", 3, 1, 0, 8, 16, key_heads=4, key_dim=12
    )
    assert seen(hybrid_layer_pattern="*-*-").recurrent is None


def job_args(**more: Any) -> argparse.Namespace:
    return argparse.Namespace(
        **{
            "num_layers": 8, "mtp_num_layers": None, "virtual_pipeline_model_parallel_size": None,
            "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "context_parallel_size": 2,
            "data_parallel_size": 4,
            "use_distributed_optimizer": True, "grad_reduce_in_bf16": False, "recompute_granularity": None,
        } | more
    )  # fmt: skip


def test_layers_and_state_are_of_the_stages_and_of_a_ranks_own_experts() -> None:
    # 2 tensor-parallel ranks, 2 stages of 2 layers, 8 ranks beside them; each has 2 experts of 8,
    # whole. The sum on paper.
    model = seen(2, expert_model_parallel_size=4, expert_tensor_parallel_size=1)
    stages = stages_of(job_args(num_layers=4), model, 2, 2)
    attention = 64 * 3 * 4 * 16 + 4 * 16 * 64  # `seen` gives a rank four heads
    others = 2 * (attention + 2 * 64 + 64 * 8) + 64 * 96 / 2
    experts = 2 * 2 * (3 * 64 * 32)
    first = 6 * (others + experts) + 12 * (others / 8 + experts / 4)
    assert stages[0].state_bytes == pytest.approx(first)
    args = job_args(num_layers=4, use_distributed_optimizer=False, grad_reduce_in_bf16=True)
    whole = stages_of(args, model, 2, 2)
    assert whole[0].state_bytes == pytest.approx(16 * (others + experts))
    both = stages_of(args, seen(2, expert_tensor_parallel_size=1), 2, 2)  # each tensor-parallel rank has all
    assert both[0].state_bytes == pytest.approx(16 * (others + 4 * experts))
    apart = stages_of(job_args(num_layers=4), seen(2, expert_model_parallel_size=4), 2, 2)
    assert apart[0].sharding.experts == 4
    assert apart[0].state_bytes == pytest.approx(6 * (others + experts / 2) + 12 * (others / 8 + experts / 2 / 2))
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    assert stages_of(job_args(**full), seen(), 1, 1)[0].recompute == Recomputed("uniform")
    args, model = job_args(mtp_num_layers=1), seen()  # the last stage holds those of further tokens
    assert [stage.num_layers for stage in stages_of(args, model, 1, 4)] == [2, 2, 2, 3]
    args.mtp_num_layers = None
    assert [stage.num_layers for stage in stages_of(args, model, 1, 1)] == [8]


# Our rules `hybrid` against the scheduler of the installed megatron-core, group by group.


SPEC = PlanSpec(
    *("megatron_dynamic", Cluster(8, 4), Model(8, 2, 16), Layers()),
    {"tokens_per_rank": 200, "rules": "hybrid", "slack": 1.5},
)
LENGTHS = (300, 140, 40, 20, 7, 1, 90, 90, 65)


def test_hybrid_alone_makes_the_groups_that_megatron_makes() -> None:
    scheduler = planning._own_scheduler()
    assert scheduler is not None
    rng = random.Random(3)
    for _ in range(300):  # a long tail; every sequence fits the ranks together
        num_ranks, tokens = 2 ** rng.randrange(6), rng.choice([64, 1000, 4096])
        lengths = [
            max(1, min(num_ranks * tokens, int(rng.lognormvariate(5, 1.5) * tokens / 150)))
            for _ in range(rng.randint(1, 60))
        ]
        assert megatron.RULES["hybrid"](lengths, tokens, num_ranks) == scheduler(lengths, tokens, num_ranks)
    for other in ({"options": {**SPEC.options, "rules": "dynamic"}}, {"name": "te_ring", "options": {}}):
        assert planning._by_own_scheduler(dataclasses.replace(SPEC, **other).choice()) is None, "not Megatron's"
    ours = make_planner("megatron_dynamic", SPEC.cluster, SPEC.model, rules="hybrid")(LENGTHS)
    assert plan_with(scheduler, Batch(LENGTHS), SPEC.cluster, SPEC.model, MegatronDynamicOptions()) == ours


def test_a_scheduler_that_fails_is_left_alone_and_said_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> list[object]:
        raise AssertionError("no group")

    monkeypatch.setattr(planning, "_schedule", broken)
    with caplog.at_level(logging.WARNING):
        assert planning._own_scheduler() is None
    assert "has no scheduler of context-parallel groups that works (AssertionError: no group); use our" in caplog.text


@pytest.mark.parametrize("fails", [False, True])
def test_training_plans_by_megatrons_own_code_and_by_our_rules_where_that_fails(
    fails: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[tuple[int, ...]] = []
    schedule = planning._schedule

    def noted(lengths: Sequence[int], tokens: int, num_ranks: int) -> list[Any]:
        asked.append(tuple(lengths))
        if fails and asked[-1] == LENGTHS:
            raise IndexError("list index out of range")
        return schedule(lengths, tokens, num_ranks)

    monkeypatch.setattr(planning, "_schedule", noted)
    with caplog.at_level(logging.INFO):
        choice = planning._by_own_scheduler(SPEC.choice())
        assert choice is not None
        given = Batch(LENGTHS), SPEC.cluster, SPEC.model, planning_cost(SPEC.cluster, SPEC.model, None)
        assert "context-parallel groups by BalancedCPScheduler of megatron-core" in caplog.text
        asked.clear()
        ours = make_planner("megatron_dynamic", SPEC.cluster, SPEC.model, SPEC.layers, **SPEC.options)(LENGTHS)
        assert choice.plan(*given) == choice.plan(*given) == ours
    assert LENGTHS in asked
    told = "Megatron's scheduler fails for 9 sequences on 8 ranks of 200 tokens (IndexError: list index"
    assert caplog.text.count(told) == fails


def test_kernels_are_built_before_the_first_plan_is_bound(monkeypatch):
    built = []
    monkeypatch.setattr(session, "build_variants", lambda *given: built.append(given))
    monkeypatch.setattr(session, "job_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(planning, "masks_of", lambda _: ())
    steps = SimpleNamespace(tracer=SimpleNamespace(recorder=None))
    facts = {"dtype": torch.bfloat16, "shape": AttentionShape(4, 2, 64), "kernel": "auto", "bind_ahead": None}
    config = SimpleNamespace(gradient_wire="bf16")
    job: Any = SimpleNamespace(config=config, steps=steps, args=None, **facts)
    session.Session.binder(job, single())
    assert built == [(torch.device("cpu"), torch.bfloat16, facts["shape"], "bf16")]
