"""Packed samples of a script's own data set, planned by their sub-sequences: Megatron's numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_balance.errors import DataError
from megatron_balance.megatron.data import PADDING, Reader, positions_of
from tests.megatron.conftest import SEQ_LENGTH, Train
from tests.megatron.test_launch import ON_CPU, STEPS, TWO_NODES, printed_losses
from tests.megatron.test_training import validation_losses
from tests.support.pipeline_runs import worst_gradient

pytestmark = pytest.mark.megatron

SCRIPT = str(Path(__file__).resolve().parents[1] / "support" / "stand_in_packed_pretrain.py")
PACKED = ((300, 140, 40), (200, 7, 100, 60), (600,), (30,), (9, 480), (50, 50, 50, 50))
"""Tokens of the conversations of each line: one is cut at --seq-length, some are mostly padding."""


def batch_of(cu_seqlens: list[list[int]], counts: list[list[int]], **more: torch.Tensor) -> dict[str, torch.Tensor]:
    """A collated batch whose tokens `counts` says."""
    loss_mask = torch.tensor(counts, dtype=torch.float32)
    at = torch.arange(loss_mask.shape[1]).expand(loss_mask.shape)
    found = {"tokens": at, "labels": at, "loss_mask": loss_mask, "position_ids": at}
    return {**found, "cu_seqlens": torch.tensor(cu_seqlens, dtype=torch.int32), **more}


def test_sequences_open_where_cu_seqlens_says() -> None:
    """Repeated ends fill a row; a sub-sequence without tokens opens nothing."""
    ends = [[0, 2, 2, 5, 6, 6, 6], [0, 6, 6, 6, 6, 6, 6]]
    batch = batch_of(ends, [[1] * 6] * 2)
    opened = [[0, 1, 0, 1, 2, 0], [0, 1, 2, 3, 4, 5]]
    assert Reader().columns(batch)["position_ids"].tolist() == opened
    padded = torch.tensor([[0, 3, 6], [0, 6, 6]])
    both = Reader().columns({**batch, "cu_seqlens_padded": padded})
    assert both["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2], [0, 1, 2, 3, 4, 5]], "Megatron attends by the padded"


def test_tokens_behind_the_last_that_counts_are_not_read() -> None:
    """But for one of each sub-sequence, and none where experts count them too."""
    batch = batch_of([[0, 4, 6, 8]], [[0, 1, 0, 0, 0, 0, 0, 1]])
    assert Reader().columns(batch)["position_ids"].tolist() == [[0, 1, PADDING, PADDING, 0, PADDING, 0, 1]]
    whole = Reader(leave_out_tails=False).columns(batch)
    assert whole["position_ids"].tolist() == [[0, 1, 2, 3, 0, 1, 0, 1]]


@pytest.mark.parametrize("of_one_row", [False, True])
def test_packed_samples_of_bridge_name_cu_seqlens_by_queries(of_one_row: bool) -> None:
    """Its `position_ids` are 0 behind the last sequence, as if each token there were one."""
    batch = batch_of([[0, 3, 8]], [[1, 1, 1, 1, 0, 0, 0, 0]])
    ends = batch.pop("cu_seqlens")
    padded = torch.tensor([[0, 4, 8]], dtype=torch.int32)
    named = {"cu_seqlens_q": ends, "cu_seqlens_q_padded": padded, "cu_seqlens_kv": ends}
    found = Reader().columns({**batch, **{name: each[0] if of_one_row else each for name, each in named.items()}})
    assert found["position_ids"].tolist() == [[0, 1, 2, 3, 0, PADDING, PADDING, PADDING]]
    found = Reader().columns({**batch, "cu_seqlens_q": ends[0] if of_one_row else ends})
    assert found["position_ids"].tolist() == [[0, 1, 2, 0, PADDING, PADDING, PADDING, PADDING]]


@pytest.mark.parametrize("behind", [-1, 6, 3])
@pytest.mark.parametrize("name", ["cu_seqlens", "cu_seqlens_padded", "cu_seqlens_q"])
def test_entries_behind_argmin_are_not_read(name: str, behind: int) -> None:
    """NeMo and Bridge fill rows with -1, and say where; without it, -1 says it."""
    batch = batch_of([], [[1] * 6] * 2)
    del batch["cu_seqlens"]
    ends = {name: torch.tensor([[0, 2, 6, behind, behind], [0, 1, 4, 6, behind]], dtype=torch.int32)}
    opened = [[0, 1, 0, 1, 2, 3], [0, 0, 1, 2, 0, 1]]
    for counts in (torch.tensor([[3], [4]]), torch.tensor([3, 4])):
        assert Reader().columns({**batch, **ends, f"{name}_argmin": counts})["position_ids"].tolist() == opened
    if behind != 3:
        assert Reader().columns({**batch, **ends})["position_ids"].tolist() == opened


@pytest.mark.parametrize(
    ("ends", "argmin"),
    [
        *[([[0, 4, -1]], None), ([[0, 4, -1]], [2]), ([[0, 6, 6]], [1]), ([[0, 6, -1]], [4]), ([[0, 6, -1]], [2, 2])],
        *[([[0, -1, 6]], None), ([[0, 6, -1]], [3]), ([[-1, -1]], [0]), ([[0, -2, 6]], None)],
    ],
)
def test_a_filled_row_that_does_not_end_with_the_sample_is_refused(
    ends: list[list[int]], argmin: list[int] | None
) -> None:
    with pytest.raises(DataError, match=r"cu_seqlens of shape .* rising from 0 to 6, and filled with 6 or -1"):
        positions_of(torch.tensor(ends), torch.Size((1, 6)), None if argmin is None else torch.tensor(argmin))


@pytest.mark.parametrize("ends", [[[0, 5]], [[1, 6]], [[0, 4, 2, 6]], [[0, 7]], [[6]], [0, 7], [6], [[0, 6], [0, 6]]])
def test_cu_seqlens_that_are_not_the_samples_are_refused(ends: list[Any]) -> None:
    with pytest.raises(DataError, match=r"cu_seqlens of shape .* rising from 0 to 6"):
        positions_of(torch.tensor(ends), torch.Size((1, 6)))


def test_learned_positions_must_open_where_cu_seqlens_does() -> None:
    batch = batch_of([[0, 2, 4]], [[1] * 4])
    with pytest.raises(DataError, match="open sub-sequences at different tokens"):
        Reader(learned=True).columns(batch)
    agreeing = {**batch, "position_ids": torch.tensor([[0, 1, 0, 1]])}
    assert Reader(learned=True).columns(agreeing)["position_ids"].tolist() == [[0, 1, 0, 1]]


def test_samples_of_unequal_lengths_are_a_sequence_each_without_their_padding() -> None:
    def sample(length: int, padded: int) -> dict[str, torch.Tensor]:
        at = torch.arange(padded) + length
        columns = dict.fromkeys(("tokens", "labels", "position_ids"), at) | {"loss_mask": torch.ones(padded)}
        return {**columns, "original_seq_len": torch.tensor([length]), "padded_seq_len": torch.tensor([padded])}

    read = Reader().columns([sample(3, 4), sample(1, 4)])
    assert read["position_ids"].tolist() == [[0, 1, 2], [0, PADDING, PADDING]]
    assert read["tokens"].tolist() == [[3, 4, 5], [1, 0, 0]]
    short = {name: each for name, each in sample(4, 4).items() if name != "original_seq_len"}
    assert Reader().columns([short])["position_ids"].tolist() == [[0, 1, 2, 3]]
    with pytest.raises(DataError, match="no empty one"):
        Reader().columns([sample(0, 4)])


def write_conversations(path: Path, lines: tuple[tuple[int, ...], ...]) -> str:
    generator = np.random.default_rng(3)

    def turn(role: str, length: int) -> dict[str, str]:
        return {"role": role, "content": "".join(chr(32 + each) for each in generator.integers(0, 90, length))}

    def conversation(length: int) -> list[dict[str, str]]:
        asked = length // 3
        return [turn("system", 2), turn("user", asked), turn("assistant", length - asked - 2)]

    packed = [[each for length in line for each in conversation(length)] for line in lines]
    path.write_text("".join(f"{json.dumps({'messages': messages})}\n" for messages in packed))
    return str(path)


EVALUATED: dict[str, Any] = {"eval-iters": 1, "eval-interval": 2, "train-iters": 3}
DATA: dict[str, dict[str, Any]] = {
    "sft": {"sft": True, "split": "50,50,0", **EVALUATED},
    "varlen": {"use-varlen-dataset": True},
    "masking": {"dataloader-inter-document-masking": True},
    "fim": {"fim-data": True, "fim-rate": 0.9},
}


@pytest.mark.parametrize("kind", DATA)
def test_packed_samples_train_as_in_megatron_alone(train: Train, tmp_path: Path, kind: str) -> None:
    """Losses, of evaluation too, and every gradient, where attention does not cross a sub-sequence."""
    flags = {**STEPS, **DATA[kind]}
    if kind in ("sft", "varlen"):
        lines = PACKED * 4 if kind == "sft" else tuple((length,) for line in PACKED for length in line) * 2
        flags["data-path"] = write_conversations(tmp_path / "conversations.jsonl", lines)
    # Samples of Megatron's corpora depend on what a replica read before: FIM draws at random, and the
    # padding of the first sample is masked in all. So those have one replica on both sides.
    planned = {**flags, "context-parallel-size": 2 if "data-path" in flags else 4}
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    theirs.mkdir()
    ours.mkdir()
    alone = train(1, "te_ring", {**flags, **ON_CPU}, entry="plain", before=(SCRIPT, str(theirs)))
    config = {**TWO_NODES, "data": "script", "self_check": True}
    run = train(4, "zeppelin", planned, config=config, entry="launch", before=(SCRIPT, str(ours)))
    losses = run.column("loss")
    # Megatron does not reset its sums after the first step.
    expected = [losses[0], (losses[0] + losses[1]) / 2, *losses[2:]]
    assert printed_losses(alone.result, 0) == pytest.approx(expected, rel=1e-5)
    assert worst_gradient(ours, theirs, step=1) < 1e-5
    assert ("--sequence-packing-scheduler was left out" in run.result.log(0)) == (kind == "varlen")
    if kind == "sft":
        assert max(run.column("num_tokens")) < 2 * SEQ_LENGTH, "padding is not computed"
        wanted = validation_losses(alone.result.log(0))
        assert len(wanted) > 1
        assert validation_losses(run.result.log(3)) == pytest.approx(wanted, rel=1e-5)
