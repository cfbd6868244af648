"""A rank's rows: what travels with a token, nano-batches, positions and padding."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from megatron_balance.training.tokens import (
    PoolLengths,
    Sequences,
    assemble,
    by_nano_batch,
    from_bits,
    interleave,
    to_bits,
)


def test_weights_of_any_size_survive_the_exchange() -> None:
    mask = torch.tensor([0.0, 1.0, 0.3, -2.5])
    rows = torch.stack([torch.zeros(4, dtype=torch.int64), to_bits(mask)], dim=1)
    assert from_bits(rows[:, 1]).tolist() == mask.tolist()


def test_documents_of_one_or_several_columns_become_rows() -> None:
    pairs = Sequences.of([torch.tensor([[1, 5], [2, 6]]), torch.tensor([[3, 7]])], num_columns=2)
    assert (pairs.rows.tolist(), pairs.lengths) == ([[1, 5], [2, 6], [3, 7]], (2, 1))
    assert (Sequences.of([]).rows.shape, Sequences.of([]).lengths) == ((0, 1), ())


def test_nano_batches_take_their_sequences_of_those_read_here() -> None:
    mine = [Sequences.of([torch.tensor([1, 2]), torch.tensor([3]), torch.tensor([4, 5])])]
    shared = PoolLengths(((9, 2, 1, 2),), (np.array([0, 1, 1, 1]),))
    read, apart = by_nano_batch(mine, shared, (((0, 2), (1, 3)),), rank=1)
    assert [each.rows.flatten().tolist() for each in read] == [[3], [1, 2, 4, 5]]
    assert [each.lengths for each in read] == [(1,), (2, 2)]
    assert apart.lengths == ((9, 1), (2, 2))
    assert [owners.tolist() for owners in apart.owners] == [[0, 1], [1, 1]]


def test_rows_are_padded_and_keep_their_positions() -> None:
    local = assemble(torch.tensor([[7], [8], [9]]), np.array([[4, 5, 7], [2, 0, 1]]), multiple=2)
    assert local.rows.flatten().tolist() == [7, 8, 9, 0]
    assert local.positions.tolist() == [5, 6, 0, 0]
    assert local.padding.tolist() == [False, False, False, True]
    nobody = assemble(torch.empty(0, 1, dtype=torch.int64), np.empty((0, 3), dtype=np.int64), multiple=2)
    assert nobody.padding.tolist() == [True, True], "a rank without tokens computes padding"


def test_every_tensor_parallel_rank_has_its_share_of_each_nano_batch() -> None:
    first, second = (
        assemble(torch.tensor(rows)[:, None], np.array([[0, 0, len(rows)]]), multiple=2)
        for rows in ([1, 2, 3, 4], [5, 6])
    )
    both = interleave([first, second], shares=2)
    assert both.rows.flatten().tolist() == [1, 2, 5, 3, 4, 6]
    assert both.positions.tolist() == [0, 1, 0, 2, 3, 1]
    assert both.nano_batches == (first, second)
    assert interleave([first], shares=2) is first
