"""Roles on real Megatron models: weights pulled into models of other schemes, gradients pushed back
to the owners of the base layout, beside one rank with the whole model.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from megatron_balance.analysis.shards import Base, Buffer, Parameter, ParameterTable
from megatron_balance.errors import ConfigError
from megatron_balance.ir.strategy import Scheme, Strategy
from megatron_balance.megatron.roles import Roles, base_layout, check_shards
from tests.support.megatron_run import Trainer
from tests.support.role_runs import STRATEGIES, trained

pytestmark = pytest.mark.megatron


def test_strategies_in_turn_have_one_ranks_gradients(trainer: Trainer, tmp_path: Path) -> None:
    """TP 3 beside TP 1 on a base of TP 2; twice the same strategy has the same bits. The weights
    are NaN before each pull; inside a role `parallel_state` is not asked, and no message goes over
    the world's group.
    """
    base = {"tensor-model-parallel-size": 2, "sequence-parallel": True}
    assert_one_ranks_gradients(trained(trainer, tmp_path, 4, STRATEGIES, base))


def assert_one_ranks_gradients(steps: list[list[dict[str, Any]]]) -> None:
    """Every owner has the sum of all roles' gradients. Memory is that of the largest role, which has
    the whole model here.
    """
    for rank, mine in enumerate(steps):
        for step in mine:
            assert step["errors"], f"rank {rank} owns nothing"
            for name, error in step["errors"].items():
                assert error < 1e-5, f"{name} on rank {rank} under {step['strategy']}"
            assert step["memory"] == [step["whole"]] * 2
            assert step["predicted"] == pytest.approx(8 * step["whole"], rel=0.02)
            assert step["same_bits"], f"rank {rank} has other bits the second time under {step['strategy']}"
            assert step["same_at_once"], f"rank {rank} has other bits without overlap under {step['strategy']}"


def test_a_strategy_without_a_role_is_refused() -> None:
    made = SimpleNamespace(_roles={Strategy.parse("tp2-pp1-cp1"): None})
    with pytest.raises(ConfigError, match="tp1-pp1-cp1: no role was made for it, but for tp2-pp1-cp1"):
        Roles.__getitem__(cast("Any", made), Strategy((Scheme(),)))


def test_a_megatron_whose_shards_are_not_the_links_is_refused() -> None:
    parameters = ParameterTable.of((Parameter("a", 4, 2, 0),), 1)
    base = Base(Scheme(), 2, (Buffer(0, np.array([0]), np.array([0]), np.array([0, 8])),))
    mine = base.owned(parameters)[:1]
    check_shards(mine, {0: torch.zeros(4)}, parameters)
    for weights in ({}, {0: torch.zeros(5)}, {0: torch.zeros(4, dtype=torch.bfloat16)}):
        with pytest.raises(ConfigError, match=r"elements of a in .*, expected 4 in torch\.float32"):
            check_shards(mine, weights, parameters)
    with pytest.raises(ConfigError, match="made 2 model chunks on this rank, expected one"):
        base_layout([None, None], None, Scheme())
