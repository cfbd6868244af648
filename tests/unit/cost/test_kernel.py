"""Tiles of the attention kernel, counted by closed forms, against counting them one by one."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_balance.cost.analytic import AnalyticCost
from megatron_balance.cost.kernel import padded_head_dim, padding_elements, tiles
from megatron_balance.ir.arrays import Rectangles, num_pairs
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.columns import Pair
from megatron_balance.ir.mask import CAUSAL, SlidingWindow
from megatron_balance.ir.model import Model


def counted(pair: list[int]) -> tuple[int, int, int, int]:
    """Tiles, thread blocks, tiles of the longest one, visible pairs; the slow way."""
    _, q_start, q_stop, _, _, k_start, k_stop, _, _ = pair
    blocks: list[int] = []
    for first in range(q_start, q_stop, 128):
        last = min(first + 128, q_stop) - 1
        blocks.append(-(-max(0, min(last + 1, k_stop) - k_start) // 128))
    visible = sum(max(0, min(q + 1, k_stop) - k_start) for q in range(q_start, q_stop))
    return sum(blocks), len(blocks), max(blocks), visible


def test_tiles_are_those_that_one_by_one_counting_finds() -> None:
    generator = np.random.default_rng(7)
    rows: list[list[int]] = []
    for _ in range(400):
        q, k = sorted(generator.integers(0, 700, 2).tolist()), sorted(generator.integers(0, 700, 2).tolist())
        rows.append([0, q[0], q[1] + 1, 0, 4, k[0], k[1] + 1, 0, 1])
    pairs = np.array(rows)
    columns = (Pair.Q_START, Pair.Q_STOP, Pair.K_START, Pair.K_STOP)
    visible = num_pairs(Rectangles(*(pairs[:, column] for column in columns)), CAUSAL)
    found = np.stack([*tiles(pairs), visible], axis=1)
    assert found.tolist() == [list(counted(row)) for row in rows]


@pytest.mark.parametrize("size", [1, 5, 128, 129, 300])
def test_tiles_that_a_window_hides_whole_are_left_out(size: int) -> None:
    """Of the queries of a rank and the keys that its halo has (`compile.halo`)."""
    generator = np.random.default_rng(size)
    rows: list[list[int]] = []
    wanted: list[list[int]] = []
    for _ in range(200):
        start, stop = sorted(generator.integers(0, 900, 2).tolist())
        stop, first = stop + 1, max(0, start - size + 1)
        rows.append([0, start, stop, 0, 4, first, stop, 0, 1])
        blocks = [
            -(-(min(q + 128, stop) - first) // 128) - (max(q - size + 1, first) - first) // 128
            for q in range(start, stop, 128)
        ]
        wanted.append([sum(blocks), len(blocks), max(blocks)])
    found = np.stack(tiles(np.array(rows), SlidingWindow(size)), axis=1)
    assert found[:, :2].tolist() == [row[:2] for row in wanted]
    assert (found[:, 2] >= [row[2] for row in wanted]).all()
    assert (found[:, 2] <= [row[2] + 1 for row in wanted]).all()


def test_head_dims_are_padded_to_the_next_kernel() -> None:
    assert [padded_head_dim(dim) for dim in (16, 64, 100, 128, 129)] == [32, 64, 128, 128, 160]


def test_padding_a_head_dim_copies_every_operand_and_result_once() -> None:
    """Two queries over three keys, named twice, one of two key heads; heads of 100 become 104."""
    pair = (0, 5, 7, 0, 2, 4, 7, 0, 1)
    pairs = np.array([pair, pair])
    launch = np.zeros(2, dtype=np.int64)
    rows = 2 * 2 + 3 * 1
    assert padding_elements(pairs, launch, 1, (100, 100), backward=False).tolist() == [2 * (100 + 104) * rows]
    assert padding_elements(pairs, launch, 1, (100, 100), backward=True).tolist() == [4 * (100 + 104) * rows]
    assert padding_elements(pairs, launch, 1, (104, 104), backward=True).tolist() == [0]
    assert padding_elements(pairs, launch, 1, (192, 128), backward=False).tolist() == [(192 + 128) * rows], "v and out"
    cluster, model = Cluster(1, 1, memory_bytes_per_s=1e9), Model(2, 1, 100)
    costs = [AnalyticCost(cluster, model, pads=pads).attend_s(pairs, launch, 1)[0] for pads in (True, False)]
    assert costs[0] - costs[1] == pytest.approx(2 * 204 * rows * 2 / 1e9)
