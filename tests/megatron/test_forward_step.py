"""The loss and the tokens that Megatron's own checks and counts see."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("megatron.training")

import numpy as np
import torch
from megatron.training import training

from megatron_balance.megatron import forward_backward, forward_step
from megatron_balance.training.tokens import PoolLengths

pytestmark = pytest.mark.megatron


def test_checks_see_the_loss_of_a_token_however_many_a_rank_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, float]] = []

    class State:
        def is_unexpectedly_large(self, *_: Any, **__: Any) -> bool:
            raise AssertionError("the rule is Megatron's, handed on")

        def validate_result(self, *, result: torch.Tensor, message: str, **_: Any) -> None:
            seen.append((message, float(result)))

    args = SimpleNamespace(check_for_nan_in_loss_and_grad=True, check_for_spiky_loss=True)
    monkeypatch.setattr(forward_step.session, "current", lambda: SimpleNamespace(args=args))
    monkeypatch.setattr(forward_step, "get_rerun_state_machine", State)
    for tokens in (1, 100, 0):
        mask, losses = torch.ones(tokens), torch.full((tokens,), 3.0)
        loss, counted, report = forward_step.checked_loss(mask, losses)
        assert (float(loss), int(counted)) == (3.0 * tokens, tokens)
        assert report["lm loss"].tolist() == [3.0 * tokens, tokens]
    assert [value for message, value in seen if message == "Spiky loss"] == [3.0, 3.0, 0.0]
    assert len(seen) == 9


def test_megatrons_throughput_counts_the_real_tokens_of_a_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the squares of its sequences; of no padding, and of no other replica's."""
    for name, fresh in (("_seqlen_stats_in_iteration", None), ("_seqlen_stats_active", False)):
        monkeypatch.setattr(training, name, fresh)
    owners = (np.array([0, 0, 2]), np.array([2, 2]), np.array([0]))
    own = forward_backward._own_sequences(PoolLengths(((30, 20, 40), (9, 9), (7,)), owners), 0)
    forward_backward._count_flops(own)
    counted: Any = training._seqlen_stats_in_iteration
    assert counted.tolist() == [57, 30**2 + 20**2 + 7**2]
    assert training._seqlen_stats_active
