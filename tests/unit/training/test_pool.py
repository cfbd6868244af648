"""Pools: their ranks per node, and the ranks of a strategy that tokens go to."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

from megatron_balance.errors import ConfigError
from megatron_balance.ir.strategy import Strategy
from megatron_balance.runtime.groups import Groups
from megatron_balance.training.pool import StrategyRanks, node_size


@pytest.mark.parametrize(
    ("nodes", "size"), [(["a", "a", "b", "b"], 2), (["a"] * 4, 4), ([0, 1, 2], 1), (["a"], 1)]
)  # fmt: skip
def test_ranks_of_a_pool_on_a_node(nodes: list[Any], size: int) -> None:
    assert node_size(nodes, range(len(nodes))) == size


@pytest.mark.parametrize("nodes", [["a", "a", "b"], ["a", "b", "a", "b"]])
def test_uneven_or_interleaved_nodes_are_refused(nodes: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"set cluster\.ranks_per_node"):
        node_size(nodes, range(len(nodes)))


@pytest.mark.parametrize(
    ("rank", "row", "has_tokens"),
    [(0, (0, 2), True), (3, (1, 3), True), (4, (4,), True), (5, (5,), False), (7, (0, 2), False)],
)
def test_tokens_go_to_the_ends_of_a_strategys_pipelines(rank: int, row: tuple[int, ...], has_tokens: bool) -> None:
    """Rank 7 is left over, and rank 5 is a stage between others."""
    strategy = Strategy.parse("tp2-pp1-cp2+tp1-pp3-cp1")
    ranks = StrategyRanks(Groups(rank, 8, tuple(range(8)), None), strategy, (0, 4))
    assert ranks.has_tokens == has_tokens
    assert ranks.ranks_of(0 if rank < 4 or rank == 7 else 1) == row
    assert ranks.holders_of(0) == ((0, 2),)
    assert ranks.holders_of(1) == ((4,), (6,))
