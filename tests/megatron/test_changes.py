"""Planner hydraulis with candidates: one `pretrain` that changes strategies and trains as one rank."""

import argparse
import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from megatron_balance.analysis.shards import Base, Buffer, Parameter, ParameterTable
from megatron_balance.errors import ConfigError
from megatron_balance.ir.strategy import Scheme, Strategy
from megatron_balance.megatron import flags
from megatron_balance.megatron.roles import Roles, _check_shards, base_layout
from megatron_balance.megatron.ways import _check_strategies
from tests.megatron.conftest import Run, Train, assert_same_training, loaded_run, validation_losses, write_corpus
from tests.megatron.test_parity import SLOW
from tests.support.megatron_run import Result, Trainer
from tests.support.pipeline_runs import worst_gradient
from tests.support.role_runs import STRATEGIES, trained

# Steps with a long document need context or tensor parallelism, the others do not.
LENGTHS = (1000, *(60, 90, 40, 70, 110, 30) * 6)
SAMPLES = 2
HALF = 3
STEPS = 2 * HALF
LONG = {"seq-length": 1024, "max-position-embeddings": 1024}
# No multiprocessors: else a short kernel takes as long as its longest block on one of many.
CONFIG = {"cluster": {"ranks_per_node": 8, "num_sms": 0, **SLOW}}

KILLED = 2
FLAGS: dict[str, Any] = {**LONG, "num-layers": 2, "global-batch-size": SAMPLES, "train-iters": STEPS}
FLAGS |= {"untie-embeddings-and-output-weights": False}
# The second leaves a rank over.
FIRST = ("tp1-pp1-cp4", "tp2-pp1-cp1+tp1-pp1-cp1")
LAYOUT = "tp1-pp2-cp2"
# The first one is the base layout of that run; the second holds no long document.
THEN = (LAYOUT, "4*tp1-pp1-cp1")
# In place of `started`'s.
GOING_ON = {"finetune": False, "no-load-optim": False, "no-load-rng": False}
OWNED: dict[str, Any] = {"context-parallel-size": 1, "use-distributed-optimizer": True}


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> str:
    lengths = list(itertools.islice(itertools.cycle(LENGTHS), 200))
    return write_corpus(tmp_path_factory.mktemp("mixed") / "documents", lengths)


def test_a_run_that_changes_strategies_trains_like_one_rank_and_resumes_on_another_layout(
    train: Train, mixed: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    # Tied embeddings. It goes on, optimizer included, on another base layout with other candidates.
    # Every parameter's gradient before weights differ by rounding.
    folder = tmp_path_factory.mktemp("checkpoint")
    flags, one = loaded_run(train, folder, {**FLAGS, "data-path": mixed}, entry="gradients")
    ours = tmp_path_factory.mktemp("ours")
    saved = {"save": ours, "save-interval": HALF, "exit-interval": HALF, "dist-ckpt-optim-fully-reshardable": True}
    planner = {"name": "hydraulis", "tokens_per_rank": 256, "within": "zeppelin"}
    base = {"tensor-model-parallel-size": 2, "sequence-parallel": True, **saved}
    run = train(4, {**planner, "strategies": list(FIRST)}, {**flags, **OWNED, **base}, config=CONFIG, entry="gradients")
    assert worst_gradient(run.result.logs, one.result.logs, 1) < 1e-5
    assert set(run.column("strategy")) == set(FIRST)
    layout = {"pipeline-model-parallel-size": 2, "context-parallel-size": 2, **GOING_ON, "load": ours}
    layout["dist-ckpt-optim-fully-reshardable"] = True
    other = train(
        4, {**planner, "tokens_per_rank": 512, "strategies": list(THEN)}, {**flags, **OWNED, **layout}, config=CONFIG
    )
    assert len(run.steps) == HALF
    assert_same_training(Run(other.result, (*run.steps, *other.steps)), one)
    assert set(other.column("strategy")) == set(THEN)
    for step in (*run.steps, *other.steps):
        if step["strategy"] == LAYOUT:
            assert step["change"] == {}, "the base layout runs on Megatron's own model, and moves nothing more"
        else:
            assert min(step["change"][f"{way}_{of}"] for way in ("pull", "push") for of in ("bytes", "s")) > 0


def test_in_bf16_the_own_models_weights_give_their_memory_back_until_it_trains_or_is_evaluated(
    train: Train, mixed: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    # Beside one rank in bf16, within its rounding. The traps of `role_traps` see the memory.
    buckets = {"overlap-grad-reduce": True, "ddp-bucket-size": 20_000}
    bf16 = {"bf16": True, "split": "80,20,0", "eval-interval": HALF, "eval-iters": 1, "train-iters": HALF}
    flags, one = loaded_run(train, tmp_path_factory.mktemp("checkpoint"), {**FLAGS, "data-path": mixed, **bf16})
    own = "2*tp2-pp1-cp1"
    planner = {"name": "hydraulis", "tokens_per_rank": 256, "strategies": ["tp1-pp1-cp4", own], "overlap": False}
    base = {"tensor-model-parallel-size": 2, "sequence-parallel": True, **buckets}
    run = train(4, planner, {**flags, **OWNED, **base}, config=CONFIG, entry="gradients")
    assert_same_training(run, one, 1e-2)
    assert set(run.column("strategy")) == {"tp1-pp1-cp4", own}
    losses = validation_losses(run.result.log(3))
    assert len(losses) == 2
    assert losses == pytest.approx(validation_losses(one.result.log(0)), rel=1e-2)
    assert "GIVEN BACK" in run.result.log(0)


@pytest.mark.parametrize(("place", "call"), [pytest.param("pull", 2, marks=pytest.mark.product), ("push", 3)])
def test_a_rank_killed_in_a_pull_or_a_push_ends_the_job_and_is_named(
    train: Train, mixed: str, place: str, call: int
) -> None:
    def ended(result: Result) -> None:
        assert f"injected: kill at {place}" in result.log(KILLED)
        others = [rank for rank in range(4) if rank != KILLED]
        assert all(result.codes[rank] not in (0, -9) for rank in others), f"codes {result.codes}"
        assert any(f"rank {KILLED} of 4 does not answer" in result.log(rank) for rank in others)

    planner = {"name": "hydraulis", "tokens_per_rank": 256, "strategies": list(FIRST)}
    flags = {**FLAGS, **OWNED, "data-path": mixed, "tensor-model-parallel-size": 2, "sequence-parallel": True}
    fault = (place, "kill", KILLED, call)
    train(4, planner, flags, config=CONFIG, expect=ended, fault=fault, grace_s=30.0)


def test_a_gradient_that_is_no_number_ends_the_job_as_megatrons_own_check_does(train: Train, mixed: str) -> None:
    def ended(result: Result) -> None:
        assert 0 not in result.codes
        assert any("found NaN in local grad norm" in result.log(rank) for rank in range(4))

    planner = {"name": "hydraulis", "tokens_per_rank": 1024, "strategies": [FIRST[0]]}
    flags = {**FLAGS, **OWNED, "data-path": mixed, "tensor-model-parallel-size": 2, "sequence-parallel": True}
    train(4, planner, {**flags, "rerun-mode": "disabled"}, config=CONFIG, expect=ended, fault=("gradient", "nan", 1, 1))


ON_THE_HOST = ("optimizer_cpu_offload", "offload_optimizer_states", "chunked_optimizer_state_offload")
UNEQUAL_STAGES = (
    *("pipeline_model_parallel_layout", "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"),
    *("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
)
READERS = ("check_weight_hash_across_dp_replicas_interval", "save_params_interval", "log_params_norm")
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"softmax_type": "learnable"}, "--softmax-type learnable: Megatron does not say of sinks"),
    ({"use_distributed_optimizer": False}, "--use-distributed-optimizer is missing"),
    ({"overlap_param_gather": True}, "--overlap-param-gather works on the command line's layout alone"),
    ({"num_experts": 8}, "experts are not cut by strategies"),
    ({"hybrid_layer_pattern": "M*"}, "weights that the exchange between strategies does not know"),
    ({"experimental_attention_variant": "gated_delta_net"}, "weights that the exchange between strategies"),
    ({"multi_latent_attention": True}, "--multi-latent-attention: its down-projections"),
    ({"mtp_num_layers": 1}, "no place in a strategy's stages"),
    ({"fp8": "hybrid"}, "--fp8-format: weights of roles are not quantised"),
    ({"hidden_dropout": 0.1}, "--hidden-dropout must be 0"),
    ({"use_precision_aware_optimizer": True}, "keeps no fp32 weights"),
    *(({name: True}, "on the host") for name in ON_THE_HOST),
    *(({name: 1}, "stages of roles have equal numbers of layers") for name in UNEQUAL_STAGES),
    ({"num_distributed_optimizer_instances": 2}, "each weight has one owner"),
    ({"use_tp_pp_dp_mapping": True}, "Megatron's own order of ranks"),
    *(({name: 1}, "read weights of a model that is brought up to date only") for name in READERS),
    *(({f"save_{of}_interval": 1}, "a model that need not have run") for of in ("wgrads", "dgrads", "activations")),
    ({"optimizer": "muon"}, "--optimizer must be adam or sgd"),
    ({"world_size": 2}, "tp3-pp1-cp1: takes 3 ranks, and there are 2"),
    ({"num_attention_heads": 8}, "TP 3 does not divide 8, attention heads"),
    ({"num_query_groups": 4}, r"TP 3 does not divide 4, query groups \(--num-query-groups\)"),
    ({"ffn_hidden_size": 64}, "TP 3 does not divide 64, the FFN's size"),
    ({"vocab_size": 100}, "padded vocabulary, 128; pad it with --make-vocab-size-divisible-by 48"),
    ({"num_layers": 3}, "tp1-pp2-cp1: PP 2 does not divide the 3 layers"),
    ({"num_layers": 3, "num_experts": 8}, "--num-experts.*; tp1-pp2-cp1: PP 2 does not divide"),
]
GIVEN: dict[str, Any] = {"use_distributed_optimizer": True, "hidden_dropout": 0.0, "group_query_attention": True}
GIVEN |= {"num_layers": 4, "num_attention_heads": 12, "num_query_groups": 6, "ffn_hidden_size": 96}
GIVEN |= {"world_size": 4, "tensor_model_parallel_size": 2, "vocab_size": 90, "make_vocab_size_divisible_by": 16}


@pytest.mark.parametrize(("given", "message"), REFUSED)
def test_what_strategies_cannot_change_under_is_refused_all_at_once(given: dict[str, Any], message: str) -> None:
    named = tuple(map(Strategy.parse, ("tp3-pp1-cp1", "tp1-pp2-cp1")))
    _check_strategies(Arguments(GIVEN), named)
    with pytest.raises(ConfigError, match=message):
        _check_strategies(Arguments({**GIVEN, **given}), named)
    padded = {"vocab_size": 100, "make_vocab_size_divisible_by": 48}  # that a refusal names
    _check_strategies(Arguments({**GIVEN, **padded}), named[:1])


def test_every_refusal_is_tested() -> None:
    tried = [Arguments({**GIVEN, **given}) for given, _ in REFUSED]
    every = [rule for rule in flags.record().refused if "strategies" in rule.ways]
    assert not [rule.sentence for rule in every if not any(rule.holds(args) for args in tried)]


class Arguments(argparse.Namespace):
    def __init__(self, given: dict[str, Any]) -> None:
        super().__init__(**given)

    def __getattr__(self, name: str) -> Any:
        return None


# Roles on real Megatron models: weights pulled into models of other schemes, gradients pushed back
# to the owners of the base layout, beside one rank with the whole model.


def test_strategies_in_turn_have_one_ranks_gradients(trainer: Trainer, tmp_path: Path) -> None:
    # TP 3 beside TP 1 on a base of TP 2; twice the same strategy has the same bits. The weights are
    # NaN before each pull; inside a role `parallel_state` is not asked, and no message goes over
    # the world's group. Every owner has the sum of all roles' gradients. Memory is that of the
    # largest role, which has the whole model here.
    base = {"tensor-model-parallel-size": 2, "sequence-parallel": True}
    for rank, mine in enumerate(trained(trainer, tmp_path, 4, STRATEGIES, base)):
        for step in mine:
            assert step["errors"], f"rank {rank} owns nothing"
            for name, error in step["errors"].items():
                assert error < 1e-5, f"{name} on rank {rank} under {step['strategy']}"
            assert step["memory"] == [step["whole"]] * 2
            assert step["predicted"] == pytest.approx(8 * step["whole"], rel=0.02)
            assert step["same_bits"], f"rank {rank} has other bits the second time under {step['strategy']}"
            assert step["same_at_once"], f"rank {rank} has other bits without overlap under {step['strategy']}"


def test_a_strategy_without_a_role_and_a_megatron_whose_shards_are_not_the_links_are_refused() -> None:
    made = SimpleNamespace(_roles={Strategy.parse("tp2-pp1-cp1"): None})
    with pytest.raises(ConfigError, match="tp1-pp1-cp1: no role was made for it, but for tp2-pp1-cp1"):
        Roles.__getitem__(cast("Any", made), Strategy((Scheme(),)))
    parameters = ParameterTable.of((Parameter("a", 4, 2, 0),), 1)
    base = Base(Scheme(), 2, (Buffer(0, np.array([0]), np.array([0]), np.array([0, 8])),))
    mine = base.owned(parameters)[:1]
    _check_shards(mine, {0: torch.zeros(4)}, parameters)
    for weights in ({}, {0: torch.zeros(5)}, {0: torch.zeros(4, dtype=torch.bfloat16)}):
        with pytest.raises(ConfigError, match=r"elements of a in .*, expected 4 in torch\.float32"):
            _check_shards(mine, weights, parameters)
    with pytest.raises(ConfigError, match="made 2 model chunks on this rank, expected one"):
        base_layout([None, None], None, Scheme())
