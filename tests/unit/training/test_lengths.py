"""The error of a rank that could not read, told with what caused it."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch

from megatron_balance.errors import DataError
from megatron_balance.runtime.groups import single
from megatron_balance.training.pool import Pool, TensorParallel
from megatron_balance.training.tokens import share_lengths


def test_an_error_of_a_data_set_is_told_with_all_its_causes() -> None:
    def fails() -> None:
        try:
            raise KeyError("shard 7")
        except KeyError as error:
            raise OSError("no such\nobject") from error

    try:
        fails()
    except OSError as error:
        failure = error
    with pytest.raises(DataError) as told:
        share_lengths([], failure, 1, Pool(single(), 1, (0,), (0,)), TensorParallel(), torch.device("cpu"))
    message = str(told.value)
    assert message.startswith("rank 0 could not read its microbatches: OSError: no such object (")
    assert "caused by KeyError: 'shard 7' (" in message
    assert message.count("test_lengths.py:") == 2
    assert told.value.__cause__ is failure
