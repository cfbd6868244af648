"""Shards that the link gives to owners, beside the ranges of Megatron's distributed optimizer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("megatron.training")

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megatron_balance.analysis.shards import Base, Parameter, ParameterTable, Shard
from megatron_balance.ir.strategy import Scheme
from tests.support.links import buffers_of, cut

pytestmark = pytest.mark.megatron


def test_owned_shards_are_megatrons_ranges_of_the_flat_buffer() -> None:
    """Two TP ranks, three shards: ranges that begin and end inside rows, columns and gated blocks."""
    scheme, replicas = Scheme(2), 3
    listed = (
        Parameter("norm", 7, 1, 0),
        Parameter("qkv", 10, 7, 0, 0),
        Parameter("fc1", 20, 7, 0, 0, blocks=2),
        Parameter("fc2", 7, 10, 0, 1),
    )
    buffers = buffers_of(listed, 1, scheme, replicas, per_bucket=3)
    owned = Base(scheme, replicas, buffers).owned(ParameterTable.of(listed, 1))
    (buffer,) = buffers
    places = {
        listed[number]: (start, start + cut(listed[number], scheme.tensor, 0).size, None)
        for number, start in zip(buffer.parameters.tolist(), buffer.starts.tolist(), strict=True)
    }
    buckets = [
        SimpleNamespace(offset=int(low), grad_data=torch.empty(int(high - low)))
        for low, high in zip(buffer.buckets[:-1], buffer.buckets[1:], strict=True)
    ]
    for tp in range(scheme.tensor):
        for shard in range(replicas):
            group = SimpleNamespace(rank=lambda shard=shard: shard, size=lambda: replicas)
            theirs: Any = SimpleNamespace(
                data_parallel_group=group, num_optimizer_shards=replicas, buckets=buckets, param_index_map=places
            )
            mine = owned[owned[:, Shard.RANK] == tp + scheme.tensor * shard]
            seen = 0
            for bucket in range(len(buckets)):
                ranges = DistributedOptimizer._build_model_gbuf_range(theirs, bucket)["param_map"]
                for parameter, where in ranges.items():
                    flat = cut(parameter, scheme.tensor, tp).reshape(-1)
                    rows = mine[mine[:, Shard.PARAMETER] == listed.index(parameter)]
                    whole = np.arange(parameter.rows * parameter.columns).reshape(parameter.rows, parameter.columns)
                    got = [whole[a:b, c:d].reshape(-1) for a, b, c, d in rows[:, Shard.RECTANGLE]]
                    assert np.array_equal(np.concatenate(got), flat[where["param"].start : where["param"].end])
                    seen += len(rows)
            assert seen == len(mine)
