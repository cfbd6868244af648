"""The writers that Megatron hands the step log."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("megatron.training")

from megatron_balance.megatron import session

pytestmark = pytest.mark.megatron


class Writer:
    def __init__(self) -> None:
        self.scalars: list[tuple[str, float, int]] = []

    def add_scalar(self, name: str, value: float, step: int) -> None:
        """TensorBoard's call."""
        self.scalars.append((name, value, step))

    def log(self, values: dict[str, float], step: int) -> None:
        """W&B's call for the same."""
        for name, value in values.items():
            self.add_scalar(name, value, step)


def test_scalars_go_to_megatrons_own_writers_where_there_are_any(monkeypatch: pytest.MonkeyPatch) -> None:
    tensorboard, wandb = Writer(), Writer()
    monkeypatch.setattr(session, "get_tensorboard_writer", lambda: tensorboard)
    monkeypatch.setattr(session, "get_wandb_writer", lambda: wandb)
    writers = session.scalar_writers(interval=2)
    assert writers(7) == [], "not a step at which Megatron writes"
    for write in writers(8):
        write("balance/num_tokens", 90, 8)
    assert tensorboard.scalars == wandb.scalars == [("balance/num_tokens", 90, 8)]
    monkeypatch.setattr(session, "get_wandb_writer", lambda: None)
    assert len(writers(8)) == 1
