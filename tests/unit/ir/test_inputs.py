"""The inputs of a planner: batch, cluster, model."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_balance.errors import ConfigError
from megatron_balance.ir.batch import Batch
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.model import Model


@pytest.mark.parametrize(
    ("lengths", "complaint"),
    [
        ((4, 0), r"sequence 1 has 0 tokens; every sequence needs at least 1"),
        ((-3,), r"sequence 0 has -3 tokens"),
        ((2.0,), r"sequence 0 has length 2.0; a length is a whole number"),
        ((True,), r"sequence 0 has length True"),
    ],
)
def test_a_length_that_is_none_is_refused_and_named(lengths: tuple[int, ...], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        Batch(lengths)


def test_lengths_are_integers_of_any_library() -> None:
    wanted = Batch((3, 4))
    assert Batch(tuple(np.array([3, 4], dtype=np.int32))) == wanted
    assert [type(length) for length in Batch(tuple(np.array([3, 4]))).lengths] == [int, int]
    torch = pytest.importorskip("torch")
    assert Batch(tuple(torch.tensor([3, 4]))) == wanted
    with pytest.raises(ConfigError, match="a length is a whole number"):
        Batch(tuple(torch.tensor([3.0])))


def test_a_batch_knows_its_tokens_and_may_be_empty() -> None:
    assert Batch((3, 4)).num_tokens == 7
    assert Batch(()).num_tokens == 0


def test_ranks_are_numbered_node_by_node() -> None:
    cluster = Cluster(8, 4)
    assert (cluster.num_nodes, cluster.node_size) == (2, 4)
    assert [cluster.node(rank) for rank in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert list(cluster.ranks_of(1)) == [4, 5, 6, 7]


def test_a_cluster_smaller_than_a_node_is_one_node() -> None:
    cluster = Cluster(3, 8)
    assert (cluster.num_nodes, cluster.node_size) == (1, 3)
    assert list(cluster.ranks_of(0)) == [0, 1, 2]


@pytest.mark.parametrize(
    ("num_ranks", "ranks_per_node", "complaint"),
    [
        (6, 4, r"6 ranks are not divisible by 4 ranks per node"),
        (0, 1, r"at least one rank"),
        (4, 0, r"at least one rank"),
    ],
)
def test_a_cluster_that_cannot_be_is_refused(num_ranks: int, ranks_per_node: int, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        Cluster(num_ranks, ranks_per_node)


def test_kv_bytes_count_keys_and_values_of_the_key_value_heads() -> None:
    assert Model(num_heads=8, num_kv_heads=2, head_dim=16, bytes_per_element=2).kv_bytes_per_token == 2 * 2 * 16 * 2


def test_attention_takes_two_products_of_two_flops_per_pair_and_head_element() -> None:
    assert Model(num_heads=8, num_kv_heads=2, head_dim=16).attention_flops_per_pair == 2 * 2 * 8 * 16


def test_linear_flops_count_projections_and_a_gated_mlp() -> None:
    model = Model(num_heads=4, num_kv_heads=2, head_dim=8, hidden_size=32, ffn_size=64)
    q_and_o, k_and_v, mlp = 2 * 32 * 32, 2 * 32 * 16, 3 * 32 * 64
    assert model.linear_flops_per_token == 2 * (q_and_o + k_and_v + mlp)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "complaint"),
    [
        (6, 4, r"num_kv_heads 4 does not divide num_heads 6"),
        (0, 1, r"num_heads: expected a whole number of at least 1, got 0"),
    ],
)
def test_heads_that_do_not_divide_are_refused(heads: int, kv_heads: int, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        Model(num_heads=heads, num_kv_heads=kv_heads, head_dim=8)
