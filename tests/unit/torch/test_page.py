"""The code of docs/torch.md runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the extra 'torch' brings it")

import torch
from torch import Tensor, nn

from megatron_balance import Model
from megatron_balance.torch import BalancedBatch, SequenceBalancer, balanced_attention

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "torch.md").read_text(encoding="utf-8")
BLOCKS = {
    title.strip(): code
    for section in PAGE.split("\n## ")[1:]
    for title, _, rest in [section.partition("\n")]
    for code in re.findall(r"```python\n(.*?)```", rest, re.DOTALL)[:1]
}
HEADS, DIM, VOCABULARY = 2, 8, 16
CONFIG = Model(HEADS, HEADS, DIM)


class Tiny(nn.Module):
    """One attention layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, HEADS * DIM), nn.Linear(HEADS * DIM, VOCABULARY)
        self.qkv = nn.Linear(HEADS * DIM, 3 * HEADS * DIM)

    def forward(self, tokens: Tensor, position_ids: Tensor, balanced: BalancedBatch) -> Tensor:
        assert len(position_ids) == len(tokens)
        q, k, v = self.qkv(self.embedding(tokens)).view(-1, 3 * HEADS, DIM).chunk(3, dim=1)
        return self.head(balanced_attention(q, k, v, balanced).flatten(1))


def names() -> dict[str, Any]:
    torch.manual_seed(0)
    model = Tiny()
    loader = [[torch.arange(n) % VOCABULARY for n in (7, 1, 12)]] * 8
    return {
        "config": CONFIG,
        "mesh": {"dp_cp": None},
        "loader": loader,
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), 0.5),
    }


def test_the_training_loop_is_under_20_lines_and_trains() -> None:
    code = BLOCKS["A training loop"]
    assert code.count("\n") < 20
    space = names()
    losses: list[float] = []
    exec(code.replace("optimizer.step()", "losses.append(loss.item()); optimizer.step()"), space | {"losses": losses})
    assert len(losses) == 8
    assert losses[-1] < losses[0]


def test_several_microbatches_and_further_tensors() -> None:
    space = names()
    space["balancer"] = SequenceBalancer.for_model(CONFIG)
    space["F"] = nn.functional
    call = "model(batch.tokens, batch.position_ids, batch)"
    exec(BLOCKS["Several microbatches, plans made ahead"].replace("model(...)", call), space)
    tokens, weights = torch.arange(4), torch.rand(4)
    given = (tokens, tokens, weights, torch.rand(4, 3))
    space |= {"tokens": tokens, "labels": tokens, "weights": weights, "features": given[3]}
    space["balancer"] = SequenceBalancer.for_model(CONFIG)
    exec(BLOCKS["More tensors per token"].replace(", ...]", "]"), space)
    assert torch.equal(space["weights"], weights)
    batch = space["batch"]
    space["logits"] = space["model"](batch.tokens, batch.position_ids, batch)
    exec(BLOCKS["Results back to their documents"], space)
    assert [len(each) for each in space["log_probs"]] == [4]
