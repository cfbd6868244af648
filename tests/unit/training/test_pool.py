"""Pools: their ranks per node."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

from megatron_balance.errors import ConfigError
from megatron_balance.training.pool import node_size


@pytest.mark.parametrize(
    ("nodes", "size"), [(["a", "a", "b", "b"], 2), (["a"] * 4, 4), ([0, 1, 2], 1), (["a"], 1)]
)  # fmt: skip
def test_ranks_of_a_pool_on_a_node(nodes: list[Any], size: int) -> None:
    assert node_size(nodes, range(len(nodes))) == size


@pytest.mark.parametrize("nodes", [["a", "a", "b"], ["a", "b", "a", "b"]])
def test_uneven_or_interleaved_nodes_are_refused(nodes: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"set cluster\.ranks_per_node"):
        node_size(nodes, range(len(nodes)))
