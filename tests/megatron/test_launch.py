"""The launcher: an unmodified script of the shape of Megatron's own, under every patch."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.megatron.conftest import EXPERTS, Train, refusal
from tests.megatron.test_training import validation_losses
from tests.support.megatron_run import Result
from tools.megatron_flags import LOCAL_LAYERS

pytestmark = pytest.mark.megatron

SCRIPT = str(Path(__file__).resolve().parents[1] / "support" / "stand_in_pretrain_gpt.py")
STEPS = {"train-iters": 3}
TWO_NODES = {"cluster": {"ranks_per_node": 2}}
# What --balance-device cpu would set; the script alone does not know it.
ON_CPU: dict[str, Any] = {
    **LOCAL_LAYERS,
    "distributed-backend": "gloo",
    "balance-device": False,
}


def printed_losses(result: Result, rank: int) -> list[float]:
    return [float(value) for value in re.findall(r"iteration +\d+/.*lm loss: (\S+)", result.log(rank))]


def test_an_unmodified_script_trains_on_whole_documents(train: Train) -> None:
    launched = train(4, "zeppelin", STEPS, config=TWO_NODES, entry="launch", before=(SCRIPT,))
    ours = train(4, "zeppelin", STEPS, config=TWO_NODES)
    for name in ("loss", "grad_norm", "fingerprint"):
        assert launched.column(name) == ours.column(name)
    log = launched.result.log(0)
    assert "train_valid_test_datasets_provider of the script is replaced" in log
    assert "the forward step is megatron_balance's" in log
    assert "the script builds its own data sets" not in log
    for target in (
        "arguments:add_megatron_arguments",
        "megatron.training:pretrain",
        "build_train_valid_test_data_iterators",
        "get_forward_backward_func",
        "initialize_model_parallel",
        "training_log",
        "compile_helpers",
    ):
        assert re.search(f"patched \\S*{re.escape(target)}: ", log), target
    assert "get_tokens_per_expert_and_token_count" not in log, "a dense model has no experts"


def test_an_unmodified_script_trains_experts_on_tensor_parallel_ranks(train: Train) -> None:
    """The patches of the expert router, of the experts' splits and of the norm do their work under
    the launcher too.
    """
    parallel = {"tensor-model-parallel-size": 2, "sequence-parallel": True, "context-parallel-size": 2}
    flags = {**STEPS, **EXPERTS, **parallel, "expert-model-parallel-size": 2, "expert-tensor-parallel-size": 1}
    launched = train(4, "zeppelin", flags, config={"cluster": {"ranks_per_node": 1}}, entry="launch", before=(SCRIPT,))
    ours = train(4, "zeppelin", flags, config={"cluster": {"ranks_per_node": 1}})
    for name in ("loss", "grad_norm", "fingerprint"):
        assert launched.column(name) == ours.column(name)


@pytest.mark.parametrize("separate", [True, False])
def test_megatrons_own_data_trains_as_in_megatron_alone(train: Train, separate: bool) -> None:
    """The script on one rank without us, attention and loss Megatron's own, against four ranks with
    a plan.
    """
    data = {"data-path": None, "mock-data": True, "reset-position-ids": separate, "reset-attention-mask": separate}
    alone = train(1, "te_ring", {**STEPS, **ON_CPU, **data}, entry="plain", before=(SCRIPT,))
    flags = {**STEPS, **data, "context-parallel-size": 2}
    launched = train(4, "zeppelin", flags, config={**TWO_NODES, "plan_ahead": True}, entry="launch", before=(SCRIPT,))
    expected = printed_losses(alone.result, 0)
    losses = launched.column("loss")
    # Megatron does not reset its sums after the first step: its second line is the mean of the
    # first two.
    assert expected == pytest.approx([losses[0], (losses[0] + losses[1]) / 2, *losses[2:]], rel=1e-5)
    assert all((n > 2) == separate for n in launched.column("num_sequences")), "2 samples a step"
    assert "train_valid_test_datasets_provider of the script is kept" in launched.result.log(0)


def test_hidden_dropout_is_megatrons_own(train: Train) -> None:
    """One rank drops what Megatron alone drops. On several, each draws for the rows that it holds, so
    that losses depend on the plan; evaluation drops nothing.
    """
    data = {"data-path": None, "mock-data": True, "hidden-dropout": 0.3, "train-iters": 2}
    evaluated = {"eval-iters": 1, "eval-interval": 1, "lr": 0.0, "min-lr": 0.0, "split": "90,10,0"}
    flags = {**data, **evaluated}
    alone = train(1, "te_ring", {**flags, **ON_CPU}, entry="plain", before=(SCRIPT,))
    one, pooled = (
        train(ranks, "te_ring", flags, config={"data": "script"}, entry="launch", before=(SCRIPT,)) for ranks in (1, 2)
    )
    losses = one.column("loss")
    assert printed_losses(alone.result, 0) == pytest.approx([losses[0], sum(losses) / 2], rel=1e-5)
    assert pooled.column("loss") != pytest.approx(losses, rel=1e-4), "drawn for other rows"
    expected = validation_losses(alone.result.log(0))
    assert len(expected) > 1
    assert validation_losses(pooled.result.log(1)) == pytest.approx(expected, rel=1e-5)
    assert losses != pytest.approx(expected[:2], rel=1e-4), "training does drop"


def test_a_script_resumes_through_the_launcher_in_the_data_that_it_trained(
    train: Train, tmp_path: Path, corpus: str
) -> None:
    """In its own data set, which may have moved: on other ranks too, of which some read nothing."""
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


def test_the_launcher_needs_a_script(train: Train) -> None:
    train(1, entry="launch", before=("nowhere.py",), expect=refusal("no such training script", codes=(2,)))


def test_the_launcher_passes_our_refusals_on(train: Train) -> None:
    refused = refusal("error: --iterations-to-skip", codes=(2,))
    train(1, "te_ring", {"iterations-to-skip": 3}, entry="launch", before=(SCRIPT,), expect=refused)
