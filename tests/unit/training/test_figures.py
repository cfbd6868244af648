"""Imbalance of a step, before and after planning."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("torch")

from megatron_balance.training.figures import imbalance_after, imbalance_before
from megatron_balance.training.pool import Pool
from megatron_balance.training.tokens import PoolLengths


def test_imbalance_before_is_that_of_replicas_over_the_step() -> None:
    pool = Pool(SimpleNamespace(rank=0, size=4), 4, (0, 0, 1, 1), (0, 2))  # pyright: ignore[reportArgumentType]
    shared = PoolLengths(((3, 1), (2,)), (np.array([0, 2]), np.array([2])))
    assert imbalance_before(shared, pool) == {"tokens": 1.0, "attention": pytest.approx(6 / 5)}


def test_imbalance_after_counts_every_microbatch_by_its_slowest_rank() -> None:
    assert imbalance_after(np.array([[1.0, 3.0], [3.0, 1.0]])) == 1.5
    assert imbalance_after(np.zeros((1, 2))) == 1.0


def test_imbalance_of_pipelines_counts_each_by_its_own_microbatches_and_they_meet_once_a_step() -> None:
    assert imbalance_after(np.array([[2.0, 2.0]]), np.array([[1.0, 1.0], [1.0, 1.0]])) == 1.0
    assert imbalance_after(np.array([[3.0, 1.0]]), np.array([[1.0, 3.0], [3.0, 1.0]])) == 2.0


def test_imbalance_of_unlike_pipelines_shares_a_ranks_load_among_its_gpus() -> None:
    """Twice the load on a rank of two GPUs is no imbalance."""
    wide, narrow = np.array([[8.0]]), np.array([[4.0]])
    assert imbalance_after(wide, narrow, gpus=(2, 1)) == 1
    assert imbalance_after(wide, narrow) == pytest.approx(8 / 6)
