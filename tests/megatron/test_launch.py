"""The launcher: an unmodified script of the shape of Megatron's own, under every patch."""

import argparse
import json
import re
import shutil
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core import mpu
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig

from megatron_balance.errors import ConfigError, DataError
from megatron_balance.megatron import library
from megatron_balance.megatron.data import PADDING, Reader, _positions_of
from megatron_balance.megatron.gpt import check_model
from tests.megatron.conftest import (
    EXPERTS,
    SEQ_LENGTH,
    Run,
    Train,
    assert_same_training,
    one_process,
    refusal,
    train_with,
    validation_losses,
)
from tests.support.loop_runs import LENGTHS, SKIPPED_TO
from tests.support.megatron_run import Job, Result, Trainer
from tests.support.pipeline_runs import worst_gradient
from tools.megatron_flags import LOCAL_LAYERS

SUPPORT = Path(__file__).resolve().parents[1] / "support"
SCRIPT = str(SUPPORT / "stand_in_pretrain_gpt.py")
STEPS = {"train-iters": 3}
TWO_NODES = {"cluster": {"ranks_per_node": 2}}
ONE_RANK_NODES = {"cluster": {"ranks_per_node": 1}}
PARALLEL = {"context-parallel-size": 2, "tensor-model-parallel-size": 2, "sequence-parallel": True}
# What --balance-device cpu would set; the script alone does not know it.
ON_CPU: dict[str, Any] = {**LOCAL_LAYERS, "distributed-backend": "gloo", "balance-device": False}


def printed_losses(result: Result, rank: int) -> list[float]:
    return [float(value) for value in re.findall(r"iteration +\d+/.*lm loss: (\S+)", result.log(rank))]


def as_printed(run: Run) -> Any:
    # Megatron does not reset its sums after the first step: its second line is a mean of both.
    losses = run.column("loss")
    return pytest.approx([losses[0], (losses[0] + losses[1]) / 2, *losses[2:]], rel=1e-5)


def test_an_unmodified_script_trains_on_whole_documents(train: Train) -> None:
    # The patches of the expert router, of the experts' splits and of the norm do their work under
    # the launcher too.
    flags = {**STEPS, **EXPERTS, **PARALLEL, "expert-model-parallel-size": 2, "expert-tensor-parallel-size": 1}
    launched = train(4, "zeppelin", flags, config=ONE_RANK_NODES, entry="launch", before=(SCRIPT,))
    ours = train(4, "zeppelin", flags, config=ONE_RANK_NODES)
    for name in ("loss", "grad_norm", "fingerprint"):
        assert launched.column(name) == ours.column(name)
    log = launched.result.log(0)
    assert "train_valid_test_datasets_provider of the script is replaced" in log
    assert "the forward step is megatron_balance's" in log
    assert "the script builds its own data sets" not in log
    for target in (
        *("arguments:add_megatron_arguments", "megatron.training:pretrain", "build_train_valid_test_data_iterators"),
        *("get_forward_backward_func", "initialize_model_parallel", "training_log", "compile_helpers"),
    ):
        assert re.search(f"patched \\S*{re.escape(target)}: ", log), target


def test_megatrons_own_data_trains_as_in_megatron_alone(train: Train) -> None:
    # The script on one rank without us, attention and loss Megatron's own, against four ranks with
    # a plan.
    data = {"data-path": None, "mock-data": True, "reset-position-ids": True, "reset-attention-mask": True}
    alone = train(1, "te_ring", {**STEPS, **ON_CPU, **data}, entry="plain", before=(SCRIPT,))
    flags = {**STEPS, **data, "context-parallel-size": 2}
    launched = train(4, "zeppelin", flags, config={**TWO_NODES, "plan_ahead": True}, entry="launch", before=(SCRIPT,))
    assert printed_losses(alone.result, 0) == as_printed(launched)
    assert all(n > 2 for n in launched.column("num_sequences")), "2 samples a step"
    assert "train_valid_test_datasets_provider of the script is kept" in launched.result.log(0)


def test_hidden_dropout_is_megatrons_own(train: Train) -> None:
    # One rank drops what Megatron alone drops. On several, each draws for the rows that it holds,
    # so that losses depend on the plan; evaluation drops nothing.
    data = {"data-path": None, "mock-data": True, "hidden-dropout": 0.3, "train-iters": 2}
    evaluated = {"eval-iters": 1, "eval-interval": 1, "lr": 0.0, "min-lr": 0.0, "split": "90,10,0"}
    flags = {**data, **evaluated}
    alone = train(1, "te_ring", {**flags, **ON_CPU}, entry="plain", before=(SCRIPT,))
    one, pooled = (
        train(ranks, "te_ring", flags, config={"data": "script"}, entry="launch", before=(SCRIPT,)) for ranks in (1, 2)
    )
    losses = one.column("loss")
    assert printed_losses(alone.result, 0) == as_printed(one)
    assert pooled.column("loss") != pytest.approx(losses, rel=1e-4), "drawn for other rows"
    expected = validation_losses(alone.result.log(0))
    assert len(expected) > 1
    assert validation_losses(pooled.result.log(1)) == pytest.approx(expected, rel=1e-5)
    assert losses != pytest.approx(expected[:2], rel=1e-4), "training does drop"


def test_a_script_resumes_through_the_launcher_in_the_data_that_it_trained(
    train: Train, tmp_path: Path, corpus: str
) -> None:
    # In its own data set, which may have moved: on other ranks too, of which some read nothing.
    moved, saved = tmp_path / "moved", tmp_path / "saved"
    for end in (".idx", ".bin"):
        shutil.copy(f"{corpus}{end}", f"{moved}{end}")
    flags = {**STEPS, "reset-position-ids": True, "reset-attention-mask": True, "ckpt-format": "torch_dist"}
    own: dict[str, Any] = {"config": {"data": "script"}, "entry": "launch", "before": (SCRIPT,)}
    whole = train(2, "te_ring", {**flags, "save": saved, "save-interval": 2}, **own)
    (saved / "latest_checkpointed_iteration.txt").write_text("2")
    flags["load"] = saved
    sharded = {"tensor-model-parallel-size": 2, "sequence-parallel": True, "context-parallel-size": 1}

    names: list[str] = []

    def refused(result: Result) -> None:
        assert result.codes == (2, 2)
        assert "of the script" in result.log(1)
        found = re.search(r"--seed was 11 and is 12\..*sample 4 would repeat.*accepted_data: (\w+)", result.log(1))
        assert found
        names.append(found[1])

    train(2, "te_ring", {**flags, **sharded, "seed": 12}, **own, expect=refused)
    config = {"data": "script", "accepted_data": names[0]}
    train(1, "te_ring", {**flags, "seed": 12}, **{**own, "config": config})
    resumed = train(2, "zeppelin", {**flags, **sharded, "data-path": moved}, **own)
    assert resumed.column("step") == [3]
    assert resumed.column("loss") == pytest.approx(whole.column("loss")[2:], rel=1e-5)


def test_the_launcher_needs_a_script_and_passes_our_refusals_on(train: Train) -> None:
    train(1, entry="launch", before=("nowhere.py",), expect=refusal("no such training script", codes=(2,)))
    refused = refusal("error: --iterations-to-skip", codes=(2,))
    train(1, "te_ring", {"iterations-to-skip": 3}, entry="launch", before=(SCRIPT,), expect=refused)


# Rows of FP8 linear layers under the launcher: every layer of every rank gets the multiple that its
# recipe needs, and the loss stays.

FP8_SCRIPT = str(SUPPORT / "stand_in_fp8_pretrain.py")
FP8_STEPS = {"train-iters": 2, **PARALLEL}


def fp8(train: Train, flags: dict[str, Any], **more: Any) -> Run:
    config = {"cluster": {"ranks_per_node": 4}}
    return train(4, "zeppelin", {**FP8_STEPS, **flags}, config=config, entry="launch", before=(FP8_SCRIPT,), **more)


def test_every_layer_gets_the_rows_that_its_recipe_needs_also_where_sequence_parallelism_cuts_them(
    train: Train,
) -> None:
    aligned = fp8(train, {"stand-in-recipe": "blockwise"})
    assert "> layers refuse rows that are no multiple of 128" in aligned.result.log(0)
    assert_same_training(aligned, train(4, "zeppelin", FP8_STEPS, config={"cluster": {"ranks_per_node": 4}}))


def test_without_alignment_a_layer_refuses(train: Train) -> None:
    # The stand-in is worth something: a run that does not know of FP8 fails at its first layer.
    def refused(result: Result) -> None:
        failed = result.failed
        assert failed is not None
        assert "no multiple of 16" in result.log(failed), result.tail(failed)

    fp8(train, {"stand-in-unaligned": True}, expect=refused)


# Transformer Engine's attention under the launcher, in a script that builds its model itself;
# Transformer Engine is a stand-in.

TE_SCRIPT = str(SUPPORT / "stand_in_te_pretrain.py")
# Megatron's wrapper knows no grouped queries at the stand-in's version.
FLAGS = {"train-iters": 3, "group-query-attention": False, "num-query-groups": None, "optimizer": "adam"}


# The layer spec of Transformer Engine keeps its layers and gets our attention.
SPEC = """
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron_balance.megatron.core_attention import BalancedCoreAttention
from megatron_balance.megatron.gpt import balanced_spec
given = get_gpt_layer_with_transformer_engine_spec()
ours = balanced_spec(given)
theirs, attention = given.submodules.self_attention.submodules, ours.submodules.self_attention.submodules
assert attention.core_attention is BalancedCoreAttention, attention.core_attention
assert theirs.core_attention.__name__ == "TEDotProductAttention", "the script's own spec was changed"
assert attention.linear_qkv.__name__ == "TELayerNormColumnParallelLinear", attention.linear_qkv
assert attention.linear_proj.__name__ == "TERowParallelLinear", attention.linear_proj
"""


def test_a_model_of_transformer_engines_attention_runs_the_plan_and_megatrons_gives_way_to_ours(
    train: Train, corpus: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    trainer = Trainer(path=[str(SUPPORT / "stand_in_te")])
    ours = {"config": ONE_RANK_NODES, "entry": "launch", "before": (TE_SCRIPT,)}
    try:
        train_te = train_with(trainer, corpus, tmp_path_factory)
        planned = train_te(2, "zeppelin", FLAGS, **ours)
        megatrons = train_te(2, "zeppelin", {**FLAGS, "no-te-attention": True, "context-parallel-size": 1}, **ours)
        path = tmp_path_factory.mktemp("spec") / "spec.py"
        path.write_text(SPEC)
        built = trainer.run(Job("plain", 1, (str(path),), str(path.parent)))
    finally:
        trainer.close()
    assert "patched megatron.core.extensions.transformer_engine:TEDotProductAttention.forward" in planned.result.log(0)
    assert megatrons.steps[0]["counters"]["forward_calls"][0] > 0
    reference = train(2, "zeppelin", FLAGS, config=ONE_RANK_NODES)
    for run in (planned, megatrons):
        assert_same_training(run, reference)
    assert built.codes == (0,), built.tail(0)


def test_an_attention_that_knows_no_plan_is_refused() -> None:
    class Foreign(torch.nn.Module):
        """An attention of the script's own."""

    layer = torch.nn.Module()
    layer.core_attention = Foreign()
    with pytest.raises(ConfigError, match="core_attention is Foreign, which knows nothing of plans"):
        check_model(torch.nn.ModuleList([layer]), te_patched=False)


# Packed samples of a script's own data set, planned by their sub-sequences: Megatron's numbers.

PACKED_SCRIPT = str(SUPPORT / "stand_in_packed_pretrain.py")
# Tokens of the conversations of each line: one is cut at --seq-length, some are mostly padding.
PACKED = ((300, 140, 40), (200, 7, 100, 60), (600,), (30,), (9, 480), (50, 50, 50, 50))


def batch_of(cu_seqlens: list[list[int]], counts: list[list[int]], **more: torch.Tensor) -> dict[str, torch.Tensor]:
    loss_mask = torch.tensor(counts, dtype=torch.float32)
    at = torch.arange(loss_mask.shape[1]).expand(loss_mask.shape)
    found = {"tokens": at, "labels": at, "loss_mask": loss_mask, "position_ids": at}
    return {**found, "cu_seqlens": torch.tensor(cu_seqlens, dtype=torch.int32), **more}


def test_sequences_open_where_cu_seqlens_says_and_tokens_behind_the_last_that_counts_are_not_read() -> None:
    # Repeated ends fill a row; a sub-sequence without tokens opens nothing.
    ends = [[0, 2, 2, 5, 6, 6, 6], [0, 6, 6, 6, 6, 6, 6]]
    batch = batch_of(ends, [[1] * 6] * 2)
    opened = [[0, 1, 0, 1, 2, 0], [0, 1, 2, 3, 4, 5]]
    assert Reader().columns(batch)["position_ids"].tolist() == opened
    padded = torch.tensor([[0, 3, 6], [0, 6, 6]])
    both = Reader().columns({**batch, "cu_seqlens_padded": padded})
    assert both["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2], [0, 1, 2, 3, 4, 5]], "Megatron attends by the padded"
    # Behind the last that counts one token of each sub-sequence is read, and all where experts count.
    batch = batch_of([[0, 4, 6, 8]], [[0, 1, 0, 0, 0, 0, 0, 1]])
    assert Reader().columns(batch)["position_ids"].tolist() == [[0, 1, PADDING, PADDING, 0, PADDING, 0, 1]]
    whole = Reader(leave_out_tails=False).columns(batch)
    assert whole["position_ids"].tolist() == [[0, 1, 2, 3, 0, 1, 0, 1]]


@pytest.mark.parametrize("of_one_row", [False, True])
def test_packed_samples_of_bridge_name_cu_seqlens_by_queries(of_one_row: bool) -> None:
    # Its `position_ids` are 0 behind the last sequence, as if each token there were one.
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
    # NeMo and Bridge fill rows with -1, and say where; without it, -1 says it.
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
        *[([[0, -1, 6]], None), ([[0, 6, -1]], [3]), ([[-1, -1]], [0]), ([[0, -2, 6]], None), ([[0, 5]], None)],
        *((ends, None) for ends in ([[1, 6]], [[0, 4, 2, 6]], [[0, 7]], [[6]], [0, 7], [6], [[0, 6], [0, 6]])),
    ],
)
def test_cu_seqlens_that_do_not_rise_to_the_end_of_the_sample_are_refused(
    ends: list[Any], argmin: list[int] | None
) -> None:
    with pytest.raises(DataError, match=r"cu_seqlens of shape .* rising from 0 to 6, and filled with 6 or -1"):
        _positions_of(torch.tensor(ends), torch.Size((1, 6)), None if argmin is None else torch.tensor(argmin))


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
    # Losses, of evaluation too, and every gradient, where attention does not cross a sub-sequence.
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
    alone = train(1, "te_ring", {**flags, **ON_CPU}, entry="plain", before=(PACKED_SCRIPT, str(theirs)))
    config = {**TWO_NODES, "data": "script", "self_check": True}
    run = train(4, "zeppelin", planned, config=config, entry="launch", before=(PACKED_SCRIPT, str(ours)))
    assert printed_losses(alone.result, 0) == as_printed(run)
    assert worst_gradient(ours, theirs, step=1) < 1e-5
    assert ("--sequence-packing-scheduler was left out" in run.result.log(0)) == (kind == "varlen")
    if kind == "sft":
        assert max(run.column("num_tokens")) < 2 * SEQ_LENGTH, "padding is not computed"
        wanted = validation_losses(alone.result.log(0))
        assert len(wanted) > 1
        assert validation_losses(run.result.log(3)) == pytest.approx(wanted, rel=1e-5)


# A loop that never calls Megatron's `pretrain`: the losses of the same loop without plans.


def trained(
    trainer: Trainer, folder: Path, num_ranks: int, yaml: str = "", library: str = "bridge"
) -> tuple[list[list[float]], str]:
    # Loss, gradient norm and evaluated loss of every step, and rank 0's log.
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
    steps, log = trained(trainer, tmp_path_factory.mktemp("plain") / "run", 1)
    assert len(steps) == 3
    assert "own forward steps 48" in log
    return steps


def test_a_loop_of_its_own_trains_as_without_plans(trainer: Trainer, plain: list[list[float]], tmp_path: Path) -> None:
    # With a self-check before it, a step that runs again, and a record of each.
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
    # `steps`: their numbers in the log; one loop resumes, and skips some.
    yaml = "planner: {name: zeppelin, slack: 2.0}\nplan_ahead: false\n"
    ours, _ = trained(trainer, tmp_path / "ours", 2, yaml, name)
    for got, wanted in zip(ours, plain, strict=True):
        assert got == pytest.approx(wanted, rel=1e-5)
    assert [each["step"] for each in records(tmp_path / "ours")] == steps


def test_a_planner_of_microbatches_is_refused(trainer: Trainer, tmp_path: Path) -> None:
    _, log = trained(trainer, tmp_path / "run", 1, "# refused\nplanner: {name: wlb_llm}\n")
    assert "planner wlb_llm: a loop of its own needs a planner that keeps the microbatches it is given" in log


# with the allgather dispatcher, Megatron's default
BUILT = {
    "num_moe_experts": 4,
    "cuda_graph_impl": "local",
    "attention_dropout": 0.1,
    **dict.fromkeys(("tp_comm_overlap", "delay_wgrad_compute", "use_inference_optimized_layers"), True),
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
        ({name: each.repeat(1, 2) for name, each in BATCH.items()}, False, "2 samples of 16 tok.* at most 2 .* of 8"),
        ({name: each[:1] for name, each in BATCH.items()}, True, "1 samples, and seq_aux_loss is a mean over 2"),
        ({**BATCH, "cu_seqlens": torch.tensor([[0, 8], [0, 8]])}, True, "seq_aux_loss takes the packed samples"),
        ({name: each[:1] for name, each in BATCH.items()}, False, None),
        (BATCH, True, None),
    ],
)
def test_a_batch_is_what_the_loop_said(batch: Any, by_sample: bool, told: str | None) -> None:
    args = argparse.Namespace(micro_batch_size=2, seq_length=8)
    with nullcontext() if told is None else pytest.raises(DataError, match=told):
        library._check_batch(batch, args, by_sample=by_sample)


def test_groups_are_those_of_parallel_state() -> None:
    with one_process():
        library._check_groups(None)
        library._check_groups(SimpleNamespace(dp_cp=mpu.get_data_parallel_group(with_context_parallel=True)))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(library.dist, "get_process_group_ranks", lambda group: [group] if group == "other" else [0])
            with pytest.raises(ConfigError, match=r"pg_collection.pp has ranks \['other'\], and .* \[0\]: plans take"):
                library._check_groups(SimpleNamespace(pp="other"))
