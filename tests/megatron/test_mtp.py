"""Multi-token prediction: what lies ahead of a token, on whatever rank the plan put it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.multi_token_prediction import roll_tensor

from megatron_balance.megatron.core_attention import Ahead, BalancedSeqParams, CountedMask
from megatron_balance.megatron.data import LABEL, LOSS_MASK, PADDING, POSITION, TOKEN, column, unpack
from megatron_balance.patches.layers import looked_up
from megatron_balance.training.tokens import from_bits
from tests.megatron.conftest import Run, Train, assert_same_training, loaded_run
from tests.megatron.test_parity import two_nodes
from tests.megatron.test_ping_pong_experts import logged
from tests.support.pipeline_runs import worst_gradient

pytest.importorskip("megatron.training")


pytestmark = pytest.mark.megatron

DEPTHS = 2
FLAGS: dict[str, Any] = {"mtp-num-layers": DEPTHS, "mtp-loss-scaling-factor": 0.5, "train-iters": 2}


def test_rows_say_what_lies_ahead_as_megatron_rolls_packed_sequences() -> None:
    """Two samples, with sequences of one token among them."""
    positions = torch.tensor([[0, 1, 2, 0, 0, 1], [0, 0, 1, 2, 3, PADDING]])
    held = positions != PADDING
    generator = torch.Generator().manual_seed(1)
    tokens, labels = (torch.randint(1, 90, positions.shape, generator=generator) for _ in range(2))
    mask = torch.rand(positions.shape, generator=generator)
    rows = unpack({"tokens": tokens, "labels": labels, "loss_mask": mask, "position_ids": positions}, DEPTHS).rows
    starts = torch.nonzero(positions[held] == 0).flatten()
    packed = PackedSeqParams(cu_seqlens_q=torch.cat([starts, held.sum()[None]]))
    wanted = {TOKEN: tokens[held][None], LABEL: labels[held][None], LOSS_MASK: mask[held][None]}
    wanted[POSITION] = positions[held][None]
    for depth in range(1, DEPTHS + 1):
        rolled: Any = roll_tensor
        wanted = {which: rolled(values, packed_seq_params=packed)[0] for which, values in wanted.items()}
        for which, values in wanted.items():
            found = rows[:, column(depth, which)]
            assert torch.equal(from_bits(found) if which == LOSS_MASK else found, values[0]), (depth, which)


def test_several_tensors_are_rolled_at_once_and_masks_say_their_count() -> None:
    """As Megatron's branch dev asks, which sums the masks itself."""
    count = torch.tensor(2.5)
    own, next_ = (torch.tensor([[at, at + 1, at + 2]]) for at in (10, 20))
    masks = torch.full((1, 3), 2.5 / 3), CountedMask.of(torch.tensor([[1.0, 0.5, 0.0]]), count)
    ahead = Ahead((own, next_), (own + 1, next_ + 1), (own + 2, next_ + 2), masks, count)
    params = BalancedSeqParams(ahead=ahead)
    calls: list[Any] = []
    roll = looked_up(lambda *args, **kwargs: calls.append((args, kwargs)))
    rolled = roll([ahead.tokens[0], ahead.labels[0], masks[0]], packed_seq_params=params, fill_values=[0, 0, 0])
    assert [each is of[1] for each, of in zip(rolled, (ahead.tokens, ahead.labels, masks), strict=True)] == [True] * 3
    assert rolled[2].sum() == count
    product = rolled[2] * torch.ones(1, 3)
    assert type(product) is torch.Tensor
    assert product.sum() == 1.5
    assert not calls
    roll(own, packed_seq_params=PackedSeqParams(), return_sum=False)
    assert calls[0][1] == {"return_sum": False}


def test_further_tokens_are_predicted_as_on_one_rank(train: Train, tmp_path_factory: pytest.TempPathFactory) -> None:
    flags, one = loaded_run(train, tmp_path_factory.mktemp("checkpoint"), FLAGS, entry="gaps")
    run = train(
        4, "zeppelin", {**flags, "context-parallel-size": 2}, config={**two_nodes(4), "remap": True}, entry="gaps"
    )
    assert_same_training(run, one)
    assert worst_gradient(run.result.logs, one.result.logs, step=1) < 1e-5
    for depth in range(1, DEPTHS + 1):
        name = f"mtp_{depth} loss"
        assert len(logged(one.result, name)) == 2
        assert logged(run.result, name) == pytest.approx(logged(one.result, name), rel=1e-5)
    stages = {"pipeline-model-parallel-size": 2, "tensor-model-parallel-size": 2, "sequence-parallel": True}
    alone = {"context-parallel-size": 1, "micro-batch-size": 2, "train-iters": 1}
    run = train(4, "te_ring", {**flags, **stages, **alone})
    assert_same_training(run, Run(one.result, one.steps[:1]))
