"""A loop that never calls Megatron's `pretrain`: the losses of the same loop without plans."""

from __future__ import annotations

import argparse
import json
import re
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("megatron.training")

import torch
from megatron.core import mpu
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig

from megatron_balance.errors import ConfigError, DataError
from megatron_balance.megatron import library
from tests.megatron.test_mla import one_process
from tests.support.loop_runs import LENGTHS, SKIPPED_TO
from tests.support.megatron_run import Job, Trainer

pytestmark = pytest.mark.megatron


def trained(
    trainer: Trainer, folder: Path, num_ranks: int, yaml: str = "", library: str = "bridge"
) -> tuple[list[list[float]], str]:
    """Loss, gradient norm and evaluated loss of every step, and rank 0's log."""
    folder.mkdir()
    (folder / "balance.yaml").write_text(yaml)
    with_plans = (str(folder / "balance.yaml"), str(folder / "log")) if yaml else ()
    result = trainer.run(Job("loop", num_ranks, (library, *with_plans), str(folder)))
    log = result.log(0)
    steps = [json.loads(line[5:]) for line in log.splitlines() if line.startswith("step ")]
    assert yaml.count("refused") or result.failed is None, result.tail(result.failed or 0)
    return steps, log


def records(folder: Path) -> list[dict[str, Any]]:
    return list(map(json.loads, (folder / "log" / "steps.jsonl").read_text().splitlines()))


@pytest.fixture(scope="module")
def plain(trainer: Trainer, tmp_path_factory: pytest.TempPathFactory) -> list[list[float]]:
    """The loop without plans, on one rank."""
    steps, log = trained(trainer, tmp_path_factory.mktemp("plain") / "run", 1)
    assert len(steps) == 3
    assert "own forward steps 48" in log
    return steps


def test_a_loop_of_its_own_trains_as_without_plans(trainer: Trainer, plain: list[list[float]], tmp_path: Path) -> None:
    """With a self-check before it, a step that runs again, and a record of each."""
    yaml = "planner: {name: zeppelin, slack: 2.0}\nself_check: true\nplan_ahead: false\nsample_filling: next_fit\n"
    ours, log = trained(trainer, tmp_path / "ours", 2, yaml)
    for got, wanted in zip(ours, plain, strict=True):
        assert got == pytest.approx(wanted, rel=1e-5)
    assert "self-check before step 1" in log
    assert "those that the loop hands over are not called" in log
    assert "balance.yaml: sample_filling: not looked at, since the loop reads its own samples" in log
    assert "own forward steps 0" in log
    leapt = re.findall(r"at iteration #(\d+) .*message='Spiky loss'", log)
    assert leapt == ["2"], "sums leap in every step, the loss of a token in one"
    assert log.count("Need to rerun step") == 1
    logged = records(tmp_path / "ours")
    assert [each["step"] for each in logged] == [1, 2, 3]
    assert [each["loss"] for each in logged] == pytest.approx([step[0] for step in plain], rel=1e-5)
    assert [each["grad_norm"] for each in logged] == pytest.approx([step[1] for step in plain], rel=1e-5)
    assert [each["num_tokens"] for each in logged] == [sum(LENGTHS)] * 3
    read = [json.loads(line[5:]) for line in log.splitlines() if line.startswith("read ")]
    assert read == [[[length] for length in LENGTHS[::2]]] * 3, "of rank 0's replica, without padding"


@pytest.mark.parametrize(("name", "steps"), [("nemo", [5, SKIPPED_TO, SKIPPED_TO + 1]), ("verl", [1, 2, 3])])
def test_calls_of_other_libraries_train_alike(
    trainer: Trainer, plain: list[list[float]], tmp_path: Path, name: str, steps: list[int]
) -> None:
    """`steps`: their numbers in the log; one loop resumes, and skips some."""
    yaml = "planner: {name: zeppelin, slack: 2.0}\nplan_ahead: false\n"
    ours, _ = trained(trainer, tmp_path / "ours", 2, yaml, name)
    for got, wanted in zip(ours, plain, strict=True):
        assert got == pytest.approx(wanted, rel=1e-5)
    assert [each["step"] for each in records(tmp_path / "ours")] == steps


def test_a_planner_of_microbatches_is_refused(trainer: Trainer, tmp_path: Path) -> None:
    _, log = trained(trainer, tmp_path / "run", 1, "# refused\nplanner: {name: wlb_llm}\n")
    assert "planner wlb_llm: a loop of its own needs a planner that keeps the microbatches it is given" in log


BUILT = {
    "num_moe_experts": 4,  # with the allgather dispatcher, Megatron's default
    "cuda_graph_impl": "local",
    "tp_comm_overlap": True,
    "delay_wgrad_compute": True,
    "attention_dropout": 0.1,
    "use_inference_optimized_layers": True,
}


def test_what_a_built_model_cannot_change_is_refused_all_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    told: dict[str, Any] = {"config": tmp_path / "balance.yaml", "seq_length": 64, "micro_batch_size": 1}
    told["config"].write_text("planner: {name: zeppelin}\n")
    with one_process():
        config = TransformerConfig(
            num_layers=1, hidden_size=32, num_attention_heads=4, calculate_per_token_loss=True, attention_dropout=0.0,
            use_cpu_initialization=True, gradient_accumulation_fusion=False,
        )  # fmt: skip
        model: Any = GPTModel(config, get_gpt_layer_local_spec(), 96, 64, position_embedding_type="rope")
        for name, value in BUILT.items():
            setattr(config, name, value)
        model.ddp_config = SimpleNamespace(use_megatron_fsdp=True)
        with pytest.raises(ConfigError) as refused:
            library.balance(model, print, **told)
        other: Any = torch.nn.Linear(2, 2)
        other.config = config
        with pytest.raises(ConfigError, match=r"the model is of class Linear, and the forward step is that of .* GPT"):
            library.balance(other, print, **told)
    sentences = str(refused.value).split("; ")
    for word in ("moe_token_dispatcher_type allgather", "cuda_graph_impl local", "tp_comm_overlap", "delay_wgrad"):
        assert sum(each.startswith(word) for each in sentences) == 1, word
    assert any("--attention-dropout must be 0" in each for each in sentences)
    assert any("--use-megatron-fsdp" in each for each in sentences)
    assert any(each.startswith("the model's config: use_inference_optimized_layers: set") for each in sentences)


BATCH = {name: torch.zeros(2, 8, dtype=torch.int64) for name in ("tokens", "labels", "loss_mask", "position_ids")}


@pytest.mark.parametrize(
    ("batch", "by_sample", "told"),
    [
        ((BATCH, 0, 0), False, "the iterator gave a tuple; expected a mapping .* let batch_of make one of it"),
        ({"input_ids": BATCH["tokens"]}, False, "a batch of input_ids has no tokens, labels, loss_mask, position_ids"),
        ({name: each.repeat(2, 1) for name, each in BATCH.items()}, False, "4 samples of 8 tokens, .* at most 2"),
        (
            {name: each.repeat(1, 2) for name, each in BATCH.items()},
            False,
            "2 samples of 16 tokens, .* at most 2 .* of 8",
        ),
        ({name: each[:1] for name, each in BATCH.items()}, True, "1 samples, and seq_aux_loss is a mean over 2"),
        ({**BATCH, "cu_seqlens": torch.tensor([[0, 8], [0, 8]])}, True, "seq_aux_loss takes the packed samples"),
        ({name: each[:1] for name, each in BATCH.items()}, False, None),
        (BATCH, True, None),
    ],
)
def test_a_batch_is_what_the_loop_said(batch: Any, by_sample: bool, told: str | None) -> None:
    args = argparse.Namespace(micro_batch_size=2, seq_length=8)
    with nullcontext() if told is None else pytest.raises(DataError, match=told):
        library.check_batch(batch, args, by_sample=by_sample)


def test_groups_are_those_of_parallel_state() -> None:
    with one_process():
        library.check_groups(None)
        library.check_groups(SimpleNamespace(dp_cp=mpu.get_data_parallel_group(with_context_parallel=True)))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(library.dist, "get_process_group_ranks", lambda group: [group] if group == "other" else [0])
            with pytest.raises(ConfigError, match=r"pg_collection.pp has ranks \['other'\], and .* \[0\]: plans take"):
                library.check_groups(SimpleNamespace(pp="other"))
