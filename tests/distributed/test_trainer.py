"""Trainers of Transformers and TRL: four balanced ranks log what one rank alone does."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megatron_balance import cli
from megatron_balance.errors import ConfigError, DataError
from megatron_balance.torch.samples import _PaddedSamples
from megatron_balance.torch.trainer import _Flat, _row
from tests.support import trainer_jobs
from tests.support.pool import Pool, RankError
from tests.support.trainer_jobs import Case

log = logging.getLogger(__name__)
RANKS = 4
REENTRANT = (("gradient_checkpointing", True), ("gradient_checkpointing_kwargs", {"use_reentrant": True}))
STOPPING = (("metric_for_best_model", "eval_loss"), ("learning_rate", 0.03), ("eval_steps", 1))
STOPPING += (("load_best_model_at_end", False),)
SEEN = (("include_num_input_tokens_seen", "non_padding"),)
PADDED = (("include_num_input_tokens_seen", "all"), ("pad_to_multiple_of", 512))
CASES = {
    "sft, evaluated": Case(evaluated=11),
    "trainer, with metrics": Case("trainer", evaluated=11, metrics=True),
    "trainer, its loss in chunks": Case("trainer", evaluated=11, losses=True, args=SEEN),
    "accumulated, the last batch uneven": Case(steps=None, documents=43, args=(("gradient_accumulation_steps", 3),)),
    "packed": Case(args=(("packing", True), ("packing_strategy", "bfd"), ("max_length", 256))),
    "checkpointing": Case(args=(("gradient_checkpointing", True),)),
    "reentrant checkpointing, by the mixin": Case(args=REENTRANT, mixed=True),
    "DPO, the last batch uneven": Case("dpo", steps=None, documents=19, evaluated=11),
    "GRPO with LoRA": Case("grpo", steps=2, documents=8, lora=True, args=(("beta", 0.1), ("temperature", 0.7))),
    "DPO of a stream, the last batch uneven": Case("dpo", documents=11, stream=True, args=SEEN),
    "rewards, two in the last batch": Case("reward", steps=None, documents=18, evaluated=11, args=PADDED),
    "experts": Case(evaluated=11, experts=True, args=(("loss_type", "dft"), ("router_aux_loss_coef", 0.1))),
    "trainer, experts": Case("trainer", experts=True, args=(("gradient_accumulation_steps", 2),)),
    "stopped early": Case(steps=12, evaluated=11, patience=1, args=STOPPING),
    "LoRA of a stream under FSDP2": Case(lora=True, stream=True, sharded=True, documents=45, steps=8),
}
LONG = {
    "fifty steps": Case(steps=50, documents=400, evaluated=23, args=(("eval_steps", 25),)),
    "twenty steps of DPO, checkpointing": Case("dpo", 20, 160, args=REENTRANT[:1]),
    "DPO with LoRA, accumulated": Case("dpo", steps=2, lora=True, args=(("gradient_accumulation_steps", 2),)),
    "DPO under FSDP2": Case("dpo", steps=2, sharded=True),
    "twenty steps of GRPO": Case("grpo", 20, 160, lora=True, args=(("beta", 0.1), ("num_iterations", 2))),
    "KTO": Case("kto", steps=4),
    "KTO, the last batch uneven": Case("kto", steps=None, documents=22),
    "DPO under FSDP2, accumulated, the last batch uneven": Case(
        "dpo", None, 23, evaluated=11, sharded=True, args=(("gradient_accumulation_steps", 2),)
    ),
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


def clipping(updates: int) -> Case:
    # Rollouts of 3 to 300 tokens, groups on two ranks, a reference; steps that clip ratios.
    args = (("beta", 0.05), ("num_iterations", 2), ("learning_rate", 2.0), ("epsilon", 0.1), ("optim", "sgd"))
    more = (("max_grad_norm", 1e9),)
    return Case("grpo", updates, 8 * updates, args=args + more, max_tokens=900, fixed=True)


@pytest.mark.parametrize("updates", [4, pytest.param(20, marks=pytest.mark.product)])
def test_grpo_by_plans_of_its_driver_is_that_of_one_rank_alone(alone: Pool, world: Pool, updates: int) -> None:
    case = clipping(updates)
    ((logs, gradients, *_),) = alone.run(trainer_jobs.updated, 1, case)
    assert len(gradients) == updates
    clipped = (
        [each["clip_ratio/low_mean"] for each in logs[1:-1:2]],
        [each["clip_ratio/high_mean"] for each in logs[1:-1:2]],
    )
    assert min(map(max, clipped)) > 0, "of advantages of both signs"
    for got, own, plans, bound in world.run(trainer_jobs.updated, RANKS, case):
        assert_alike(got, logs, "grpo")
        for mine, theirs in zip(own, gradients, strict=True):
            worst = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(mine, theirs, strict=True))
            assert worst < 1e-5
        # two updates of the same samples by one plan, and what drew them and the reference by another
        assert (plans, bound) == (updates, updates)


def test_a_run_is_reported(world: Pool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logs, *_ = world.run(trainer_jobs.recorded, RANKS, str(tmp_path))
    out = ["--out", str(tmp_path / "page.html"), "--json"]
    assert cli.main(["report", "--steps", str(tmp_path), *out]) == 0
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    assert (run["num_steps"], run["num_ranks"], run["planners"]) == (8, RANKS, {"zeppelin": 8})
    tokens = [json.loads(line)["num_tokens"] for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert sum(tokens) == next(each["num_tokens"] for each in reversed(logs) if "num_tokens" in each)
    assert cli.main(["report", "--run", str(tmp_path), "--planner", "te_ring", *out]) == 0
    assert {row["planner"] for row in json.loads(capsys.readouterr().out)["rows"]} == {"te_ring", "zeppelin"}


def test_packed_documents_do_not_see_one_another(world: Pool) -> None:
    for packed in ("bfd", "padding-free", "no"):
        assert world.run(trainer_jobs.changed, RANKS, packed) == [[1.0, 0.0]] * RANKS, packed


def test_under_context_parallelism_of_accelerate_they_do(world: Pool) -> None:
    for packed, guard in (("bfd", "documents would attend across their boundaries"), ("padding-free", "")):
        for told, shares, apart in world.run(trainer_jobs.changed_under_theirs, RANKS, packed):
            assert guard in told, packed
            assert bool(guard) == bool(told), "TRL refuses packing alone"
            assert shares == [1.0, 1.0], packed
            assert apart < 1e-5, "one causal row over both"


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


@pytest.mark.parametrize("marks", [(1, 4), pytest.param((1, 25, 50), marks=pytest.mark.product)], ids=str)
def test_gradients_from_the_weights_of_one_rank_are_its_own(alone: Pool, world: Pool, marks: tuple[int, ...]) -> None:
    case = Case(steps=marks[-1], documents=8 * marks[-1])
    (noted,) = alone.run(trainer_jobs.gradients, 1, case, marks)
    for worst in world.run(trainer_jobs.gradients, RANKS, case, marks, noted):
        log.info("gradients by step: %s", worst)
        assert worst.keys() == set(marks)
        assert max(worst.values()) < 1e-5


@pytest.mark.product
def test_a_run_whose_rank_was_killed_goes_on_with_fewer(alone: Pool, tmp_path: Path) -> None:
    (expected,) = alone.run(trainer_jobs.trained, 1, Case(steps=5))
    ranks = Pool(timeout_s=120.0, num_ranks=RANKS)
    with pytest.raises(RankError):
        ranks.run(trainer_jobs.resumed, RANKS, 5, str(tmp_path), 0, 3)
    ranks.close()
    (got,) = alone.run(trainer_jobs.resumed, 1, 5, str(tmp_path))
    last = [{name: each[name] for name in each if name != "num_tokens"} for each in expected[2:-1]]
    assert_alike([{name: each[name] for name in each if name != "num_tokens"} for each in got[2:-1]], last, "resumed")


@pytest.mark.product
def test_in_bf16_under_fsdp2_losses_are_near_those_of_fp32(alone: Pool, world: Pool) -> None:
    (expected,) = alone.run(trainer_jobs.trained, 1, Case(steps=20, documents=160))
    for got in world.run(
        trainer_jobs.trained, RANKS, Case(steps=20, documents=160, sharded=True, args=(("bf16", True),))
    ):
        apart = [abs(each["loss"] / other["loss"] - 1) for each, other in zip(got[:-1], expected[:-1], strict=True)]
        log.info("bf16 under FSDP2: losses apart by %.1e at most", max(apart))
        assert 0 < max(apart) < 1e-2


def test_an_accepted_model_that_leaks_is_refused(world: Pool) -> None:
    for told in world.run(trainer_jobs.accepted, RANKS, True):
        assert len(told) == 3
        for each in told:
            assert "first in model.layers.1.mlp (Invented)" in each or "first in layers.1.mlp (Invented)" in each
    assert world.run(trainer_jobs.accepted, RANKS, False) == [["", "", ""]] * RANKS


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
    printed, *_ = world.run(trainer_jobs.example, RANKS, str(script), "--steps", "2")
    assert printed.count("'mean_token_accuracy'") == 2


def test_a_loop_of_accelerate_trains_as_one_rank(alone: Pool, world: Pool) -> None:
    script = str(Path(__file__).parents[2] / "scripts" / "examples" / "accelerate_loop.py")
    printed, *_ = world.run(trainer_jobs.example, RANKS, script, "--epochs", "2")
    (expected,) = alone.run(trainer_jobs.documents_alone, 1, script, 2, 8)
    assert len(expected) == 6
    assert [float(line.split()[1]) for line in printed.splitlines()] == pytest.approx(expected, rel=1e-5)


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
