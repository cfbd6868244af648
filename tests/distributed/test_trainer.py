"""Trainers of Transformers and TRL: four balanced ranks log what one rank alone does."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megatron_balance.errors import ConfigError, DataError
from megatron_balance.torch.samples import _PaddedSamples
from megatron_balance.torch.trainer import _Flat, _row
from tests.support import trainer_jobs
from tests.support.pool import Pool
from tests.support.trainer_jobs import Case

RANKS = 4
REENTRANT = (("gradient_checkpointing", True), ("gradient_checkpointing_kwargs", {"use_reentrant": True}))
CASES = {
    "sft, evaluated": Case(evaluated=11),
    "trainer, with metrics": Case("trainer", evaluated=11, metrics=True),
    "trainer, its loss in chunks": Case("trainer", evaluated=11, losses=True),
    "accumulated, the last batch uneven": Case(steps=None, documents=43, args=(("gradient_accumulation_steps", 3),)),
    "packed": Case(args=(("packing", True), ("packing_strategy", "bfd"))),
    "checkpointing": Case(args=(("gradient_checkpointing", True),)),
    "reentrant checkpointing, by the mixin": Case(args=REENTRANT, mixed=True),
    "DPO": Case("dpo", steps=2, documents=16, evaluated=8),
    "GRPO with LoRA": Case("grpo", steps=2, documents=8, lora=True, args=(("beta", 0.1), ("temperature", 0.7))),
    "rewards": Case("reward", steps=2, documents=16, evaluated=8),
    "LoRA of a stream under FSDP2": Case(lora=True, stream=True, sharded=True, documents=45, steps=8),
}
LONG = {
    "fifty steps": Case(steps=50, documents=400, evaluated=23, args=(("eval_steps", 25),)),
    "twenty steps of DPO, checkpointing": Case("dpo", 20, 160, args=REENTRANT[:1]),
    "DPO with LoRA, accumulated": Case("dpo", steps=2, lora=True, args=(("gradient_accumulation_steps", 2),)),
    "DPO under FSDP2": Case("dpo", steps=2, sharded=True),
    "twenty steps of GRPO": Case("grpo", 20, 160, lora=True, args=(("beta", 0.1), ("num_iterations", 2))),
    "KTO": Case("kto", steps=4),
    "RLOO": Case("rloo", steps=4, lora=True),
}


@pytest.fixture(scope="module")
def alone() -> Iterator[Pool]:
    ranks = Pool(timeout_s=300.0, num_ranks=1)
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def world() -> Iterator[Pool]:
    ranks = Pool(timeout_s=300.0, num_ranks=RANKS)
    yield ranks
    ranks.close()


Logged = list[dict[str, float]]


def assert_alike(got: Logged, expected: Logged, name: str, within: float = 1.0) -> None:
    assert [each.keys() for each in got] == [each.keys() for each in expected], name
    for each, other in zip(got, expected, strict=True):
        # rewards are differences of sums of a hundred log-probabilities, and so rounded as these
        assert each == pytest.approx(other, rel=1e-5 * within, abs=2e-6 * within), name


def test_all_that_is_logged_is_that_of_one_rank_alone(alone: Pool, world: Pool) -> None:
    (expected,) = alone.run(trainer_jobs.all_trained, 1, CASES)
    for of_rank in world.run(trainer_jobs.all_trained, RANKS, CASES):
        for name, got in of_rank.items():
            assert_alike(got, expected[name], name)
            assert len(got) > 2


@pytest.mark.product
def test_further_and_longer_runs_are_those_of_one_rank_alone(alone: Pool, world: Pool) -> None:
    (expected,) = alone.run(trainer_jobs.all_trained, 1, LONG)
    for of_rank in world.run(trainer_jobs.all_trained, RANKS, LONG):
        for name, got in of_rank.items():
            # AdamW divides rounding by itself, step after step
            assert_alike(got, expected[name], name, 5.0)


def test_packed_documents_do_not_see_one_another(alone: Pool, world: Pool) -> None:
    for packed in ("bfd", "padding-free", "no"):
        assert world.run(trainer_jobs.changed, RANKS, packed) == [[1.0, 0.0]] * RANKS, packed
    # a row that attends as one document would be seen
    assert alone.run(trainer_jobs.changed, 1, "as one") == [[1.0, 1.0]]


@pytest.mark.product
def test_nor_do_they_on_two_ranks() -> None:
    ranks = Pool(timeout_s=300.0, num_ranks=2)
    for packed in ("bfd", "padding-free", "no"):
        assert ranks.run(trainer_jobs.changed, 2, packed) == [[1.0, 0.0]] * 2, packed
    ranks.close()


def test_a_run_goes_on_with_another_number_of_ranks(alone: Pool, world: Pool, tmp_path: Path) -> None:
    (expected,) = alone.run(trainer_jobs.trained, 1, Case(steps=5))
    world.run(trainer_jobs.resumed, RANKS, 2, str(tmp_path))
    (told,) = alone.run(trainer_jobs.resumed, 1, 5, str(tmp_path), 4)
    assert "expected steps of 8 documents" in told
    assert "got steps of 4" in told
    (got,) = alone.run(trainer_jobs.resumed, 1, 5, str(tmp_path))
    # TRL counts tokens from where it begins; the last entry is the mean over the steps of one run
    last = [{name: each[name] for name in each if name != "num_tokens"} for each in expected[2:-1]]
    assert_alike([{name: each[name] for name in each if name != "num_tokens"} for each in got[2:-1]], last, "resumed")


def test_an_accepted_model_that_leaks_is_refused(world: Pool) -> None:
    for told in world.run(trainer_jobs.accepted, RANKS, True):
        for each in told:
            assert "first in model.layers.1.mlp (Invented)" in each or "first in layers.1.mlp (Invented)" in each
    assert world.run(trainer_jobs.accepted, RANKS, False) == [["", ""]] * RANKS


def test_a_model_called_once_more_on_one_rank_is_said() -> None:
    ranks = Pool(timeout_s=120.0, num_ranks=2)
    for told in ranks.run(trainer_jobs.uneven, 2):
        assert "waits in the trainer's model call" in told or "rank 0 in the trainer's model call" in told, told
        assert "or made one call more than they" in told
    ranks.close()


def test_what_would_be_another_run_is_refused(world: Pool) -> None:
    for of_rank in world.run(trainer_jobs.refused, RANKS):
        for name, told in of_rank.items():
            assert name in told


def test_the_example_trains(world: Pool) -> None:
    script = Path(__file__).parents[2] / "scripts" / "examples" / "trl_sft.py"
    assert "torchrun --standalone --nproc-per-node 4 scripts/examples/trl_sft.py" in script.read_text()
    printed, *_ = world.run(trainer_jobs.example, RANKS, str(script))
    assert printed.count("'mean_token_accuracy'") == 2


def test_a_collators_padding_is_no_part_of_a_document() -> None:
    rows = [{"input_ids": [5, 6, 7]}, {"input_ids": [8]}]
    ids = torch.tensor([[5, 6, 7], [0, 0, 8]])
    mask = torch.tensor([[1, 1, 1], [0, 0, 1]])
    made = _Flat(lambda _: {"input_ids": ids, "labels": ids, "attention_mask": mask})([*rows, None])
    assert {name: value.tolist() for name, value in made.items()} == {
        "input_ids": [[5, 6, 7, 8]],
        "labels": [[5, 6, 7, 8]],
        "shift_labels": [[6, 7, -100, -100]],
        "position_ids": [[0, 1, 2, 0]],
    }
    assert made.keys() == _row([]).keys() == _Flat(dict)([None]).keys()
    with pytest.raises(DataError, match="which of 6 tokens are padding"):
        _Flat(lambda _: {"input_ids": ids, "labels": ids})(rows)
    with pytest.raises(DataError, match="pixels"):
        _Flat(lambda _: {"input_ids": ids, "labels": ids, "pixels": ids})(rows)
    late = {"input_ids": ids[:1], "labels": ids[:1], "position_ids": ids[:1]}
    with pytest.raises(DataError, match="begin at 0 in every document"):
        _Flat(lambda _: late)(rows[:1])


def test_samples_lose_their_padding_and_get_it_back() -> None:
    ids = torch.tensor([[5, 6, 7, 0], [0, 0, 8, 9], [0, 0, 0, 0]])
    given = {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": ids.masked_fill(ids < 7, -100)}
    given["labels"][1, 2] = -100
    samples = _PaddedSamples.read(given)
    assert [(tokens.tolist(), labels.tolist()) for tokens, labels in samples.documents()] == [
        ([5, 6, 7], [-100, 7, -100]),
        ([8, 9], [9, -100]),
    ]
    assert samples.padded(torch.arange(1, 6)).tolist() == [[1, 2, 3, 0], [0, 0, 4, 5], [0, 0, 0, 0]]
    with pytest.raises(DataError, match="with gaps"):
        _PaddedSamples.read(given | {"attention_mask": torch.tensor([[1, 0, 1, 0], [0, 0, 1, 1], [0, 0, 0, 0]])})
    for at in ((0, 3), (1, 2)):  # of padding, of a first token behind padding
        labels = given["labels"].clone()
        labels[at] = 8
        with pytest.raises(DataError, match="labels of tokens that stand behind others"):
            _PaddedSamples.read(given | {"labels": labels})
    with pytest.raises(ConfigError, match="got pixel_values"):
        _PaddedSamples.read(given | {"pixel_values": ids})
