"""Bytes of a rank, worked by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_balance import Model
from megatron_balance.analysis.memory import (
    Holding,
    Sharding,
    layer_activation_bytes,
    rank_memory,
)
from megatron_balance.cost.modules import head_module, layer_flops, num_parameters

MODEL = Model(num_heads=8, num_kv_heads=2, head_dim=64, num_layers=4, hidden_size=512, ffn_size=1024, vocab_size=1000)
LAYER = 512 * (2 * 512 + 2 * 128) + 3 * 512 * 1024
TABLES = 2 * 1000 * 512
NORMS = 2 * 512
KEPT = 2 * (4 * 512 + 2 * 512 + 2 * 128 + 3 * 1024)


def test_parameters_are_layers_norms_and_two_tables() -> None:
    assert num_parameters(MODEL) == 4 * (LAYER + NORMS) + TABLES
    assert layer_flops(MODEL) == 2 * LAYER


def test_every_expert_is_stored_and_those_visited_are_computed() -> None:
    moe = replace(MODEL, num_experts=8, experts_per_token=2)
    assert num_parameters(moe) - num_parameters(MODEL) == 4 * (7 * 3 * 512 * 1024 + 512 * 8)
    assert layer_flops(moe) - layer_flops(MODEL) == 2 * (3 * 512 * 1024 + 512 * 8)


def test_shared_experts_are_visited_and_dense_layers_have_none_of_the_others() -> None:
    moe = replace(MODEL, num_experts=8, experts_per_token=2)
    shared = replace(moe, shared_ffn_size=256)
    beside = 3 * 512 * 256
    assert num_parameters(shared) - num_parameters(moe) == 4 * beside
    assert layer_flops(shared) - layer_flops(moe) == 2 * beside
    assert layer_activation_bytes(shared) - layer_activation_bytes(moe) == 2 * 3 * 256
    visits = 3 * 1024 + 512  # inner values of the second expert, and two copies of the token
    assert layer_activation_bytes(moe) - layer_activation_bytes(MODEL) == 2 * (visits + 512)
    dense = replace(moe, dense_layers=1)
    assert num_parameters(moe) - num_parameters(dense) == 6 * 3 * 512 * 1024 + 512 * 8


def test_ranks_with_the_same_experts_share_out_their_optimizer() -> None:
    """Of 8 ranks two have each expert where 4 share them out, so each holds half of its optimizer."""
    moe = replace(MODEL, num_experts=8, experts_per_token=2)
    experts = 4 * 8 * 3 * 512 * 1024
    memory = rank_memory(moe, 0, 0, Sharding(optimizer=8, experts=4))
    others = num_parameters(moe) - experts
    assert memory.weights == 2 * (others + experts / 4)
    assert memory.optimizer == 12 * (others / 8 + experts / 4 / 2)


def test_further_tokens_have_logits_of_their_own_and_a_matrix_that_joins() -> None:
    further = replace(MODEL, num_layers=5, mtp_layers=1)
    assert num_parameters(further) == 5 * (LAYER + NORMS) + TABLES + 2 * 512 * 512
    assert rank_memory(further, 100, 0).activations == 100 * (5 * KEPT + 2 * 8 * 1000)
    assert head_module(further).flops == 2 * (2 * 1000 * 512 + 2 * 512 * 512)


def test_tied_tables_are_one_on_one_stage_and_two_on_several() -> None:
    tied = replace(MODEL, tied_embeddings=True)
    assert num_parameters(MODEL) - num_parameters(tied) == 1000 * 512
    ends = [rank_memory(tied, 0, 0, Sharding(pipeline=2, stage=at)).weights for at in (0, 1)]
    assert ends == [2 * (2 * (LAYER + NORMS) + 1000 * 512)] * 2


def test_activations_of_a_token() -> None:
    assert layer_activation_bytes(MODEL) == KEPT
    assert layer_activation_bytes(MODEL, "full") == 2 * 512


def test_a_rank_of_one_stage_holds_all_layers() -> None:
    memory = rank_memory(MODEL, 100, 30)
    parameters = num_parameters(MODEL)
    assert (memory.weights, memory.gradients, memory.optimizer) == (2 * parameters, 4 * parameters, 12 * parameters)
    assert memory.activations == 100 * (4 * KEPT + 8 * 1000)
    assert memory.received == 4 * 30 * 2 * 2 * 64 * 2
    assert memory.total == 18 * parameters + memory.activations + memory.received


def test_replay_holds_two_rounds_of_one_layer() -> None:
    assert rank_memory(MODEL, 100, 30, holding=Holding("replay")).received == 2 * 30 * 2 * 2 * 64 * 2


def test_recomputation_keeps_inputs_and_works_on_one_layer() -> None:
    partial = 4 * 8 * 65
    memory = rank_memory(MODEL, 100, 30, holding=Holding(recompute="full"))
    assert memory.activations == 100 * (4 * 2 * 512 + max(KEPT + partial, 8000))
    assert memory.received == 30 * 2 * 2 * 64 * 2


def test_the_distributed_optimizer_gives_6_and_12_over_d_bytes_a_parameter() -> None:
    memory = rank_memory(MODEL, 0, 0, Sharding(optimizer=4))
    assert memory.total == pytest.approx((6 + 12 / 4) * num_parameters(MODEL))


def test_tensor_parallelism_divides_everything() -> None:
    whole, nano_batch = rank_memory(MODEL, 100, 30), rank_memory(MODEL, 100, 30, Sharding(tensor=2))
    assert nano_batch.total == pytest.approx(whole.total / 2)


def test_the_first_stage_holds_most_microbatches_and_the_last_the_logits() -> None:
    first, last = (
        rank_memory(MODEL, 100, 0, Sharding(pipeline=2, stage=s), Holding(num_microbatches=8)) for s in (0, 1)
    )
    partial = 4 * 8 * 65
    assert first.activations == 100 * (2 * 2 * KEPT + partial)
    assert last.activations == 100 * (2 * KEPT + 8000)
    assert first.weights == last.weights == 2 * (2 * (LAYER + NORMS) + TABLES / 2)


def test_experts_are_shared_out() -> None:
    moe = replace(MODEL, num_experts=8, experts_per_token=2)
    whole, shared = (rank_memory(moe, 0, 0, Sharding(experts=e)).weights for e in (1, 8))
    assert whole - shared == pytest.approx(2 * 4 * 7 * 3 * 512 * 1024)
