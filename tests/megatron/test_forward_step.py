"""The loss that Megatron's checks see."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("megatron.training")

import torch

from megatron_balance.megatron import forward_step

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
