"""Around the parity of steps: resume after a kill, evaluation, logs; and mistakes do not hang."""

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing.serialization import load_common_state_dict
from megatron.core.rerun_state_machine import RerunMode, RerunStateMachine

from megatron_balance import cli
from megatron_balance.ir.step import EMPTY, Carry
from megatron_balance.megatron import forward_backward, session
from megatron_balance.training.ledger import DataIdentity, HeldDocument, Ledger
from tests.megatron.conftest import (
    SEQ_LENGTH,
    Run,
    Train,
    assert_same_training,
    one_line,
    refusal,
    validation_losses,
    write_corpus,
)
from tests.support import trace_reader
from tests.support.megatron_run import Result

TWO_NODES = {"cluster": {"ranks_per_node": 2}}
SIGKILL = -9
RESUME_TO_DISAMBIGUATE = 16  # Megatron's exit code for a result that was rejected and reproduced


def test_a_killed_run_resumes_with_the_losses_it_would_have_had(train: Train, tmp_path: Path) -> None:
    steps, saved, killed = 5, 2, 3
    planner = {"name": "zeppelin", "slack": 1.0}
    config = {**TWO_NODES, "routing": {"when": "always", "pieces": 2}, "remap": True}
    whole = train(4, planner, {"train-iters": steps}, config=config)
    assert min(sum(whole.column("remapped_tokens")), sum(whole.column("routed_transfers"))) > 0
    saving: dict[str, Any] = {"train-iters": steps, "ckpt-format": "torch_dist"}
    saving |= {"save": tmp_path, "load": tmp_path, "save-interval": saved}

    def ended_by_kill(result: Result) -> None:
        assert set(result.codes) == {SIGKILL}, result.tail(result.failed or 0)

    first = train(4, planner, saving, config=config, kill_after=killed, expect=ended_by_kill)
    assert killed <= len(first.steps) < steps
    for name in ("loss", "grad_norm", "num_tokens", "fingerprint"):
        assert first.column(name) == whole.column(name)[: len(first.steps)], f"{name} before the kill"
    elsewhere = train(2, "distca", {**saving, "save": None}, config=TWO_NODES)
    # 2 layers of 2 microbatches, each as two nano-batches
    assert elsewhere.steps[0]["counters"]["forward_calls"] == [8, 8]
    resumed = train(4, planner, saving, config=config)
    for run in (elsewhere, resumed):
        assert run.column("step") == list(range(saved + 1, steps + 1))
    for name in ("loss", "grad_norm", "num_tokens", "fingerprint"):
        assert resumed.column(name) == whole.column(name)[saved:], f"{name} after the resume"
    assert elsewhere.column("loss") == pytest.approx(resumed.column("loss"), rel=1e-5)
    assert_an_account_was_saved_and_another_corpus_is_refused(tmp_path / f"iter_{steps:07}", train, saving)


def assert_an_account_was_saved_and_another_corpus_is_refused(
    checkpoint: Path, train: Train, saving: dict[str, Any]
) -> None:
    # No document waits, and that went through the resumes on 4 and on 2 ranks; here one of another
    # corpus is put in.
    #
    # Megatron prefers a `common.pt` to what the checkpoint says of the same.
    common = load_common_state_dict(checkpoint)
    ledger, _ = session._saved_ledger(common["args"])
    assert ledger.carry == EMPTY
    assert ledger.drawn == ledger.trained > 0
    waiting = Ledger(Carry.of("wlb_llm", {"remained": []}, ((-1, 7),)), (HeldDocument(-1, 0, 0, 7),), drawn=7)
    session._save_ledger(waiting.to_json(DataIdentity("0123456789abcdef")), common["args"])
    torch.save(common, checkpoint / "common.pt")

    saving = {**saving, "train-iters": saving["train-iters"] + 1, "override-opt_param-scheduler": True}
    refused = refusal("waiting documents are of corpus 0123456789abcdef")
    train(2, "te_ring", {**saving, "save": None}, expect=refused, deadline_s=60)


def test_steps_are_logged_and_traced_and_evaluation_is_planned(train: Train, tmp_path: Path) -> None:
    # of the three evaluations Megatron asks two's samples with --start-eval-at-iter
    flags = {"train-iters": 4, "split": "80,20,0", "eval-interval": 2, "eval-iters": 2, "start-eval-at-iter": 2}
    config = {**TWO_NODES, "trace_steps": [3]}
    one, four = (train(n, "zeppelin", {**flags, "context-parallel-size": min(n, 2)}, config=config) for n in (1, 4))
    losses = validation_losses(four.result.log(3))
    assert len(losses) == 3  # twice while training, once at its end
    assert losses == pytest.approx(validation_losses(one.result.log(0)), rel=1e-5)
    assert_same_training(four, one)
    assert_steps_are_logged_and_a_report_reads_them(four, tmp_path / "report.html")
    assert_the_trace_of_step_3_is_whole(four, tmp_path / "joined.json")


def assert_steps_are_logged_and_a_report_reads_them(run: Run, out: Path) -> None:
    expected = {
        *("step", "loss", "grad_norm", "planner", "num_sequences", "num_tokens", "imbalance_before", "imbalance_after"),
        *("remapped_tokens", "routed_transfers", "bytes_sent_per_nic", "bytes_received_per_nic"),
        *("kv_tokens_received", "kernel_calls", "plan_ms", "plan_wait_ms", "step_ms", "predicted_ms", "fingerprint"),
    }
    for step in run.steps:
        assert expected <= set(step)
        assert set(step["imbalance_before"]) == set(step["imbalance_after"]) == {"tokens", "attention"}
        assert step["imbalance_after"]["tokens"] >= 1
    assert (run.result.logs / "log" / "config.yaml").read_text().count("zeppelin") == 1
    assert run.result.log(0).count("zeppelin, ") == 4, "one line a step, on rank 0"
    assert "zeppelin, " not in run.result.log(1)
    planners = [word for name in ("te_ring", "megatron") for word in ("--planner", name)]
    assert cli.main(["report", "--run", str(run.result.logs / "log"), "--out", str(out), *planners]) == 0
    assert "The batches are those of 4 of the 4 steps" in out.read_text()


def assert_the_trace_of_step_3_is_whole(run: Run, out: Path) -> None:
    # Of 4 ranks on two nodes: two microbatches of two layers, with what the log counted of them.
    folder = run.result.logs / "log"
    assert sorted(path.name for path in (folder / "traces").iterdir()) == [f"step-3-rank-{r}.json" for r in range(4)]
    assert cli.main(["trace", str(folder), "--out", str(out)]) == 0
    found = trace_reader.read(out.read_text())
    trace_reader.check(out, found, out.parent)
    assert found.processes == {rank: f"rank {rank}, node {rank // 2}" for rank in range(4)}
    names = {e["name"] for e in found.spans if found.track(e) == "step"}
    assert names >= {"plan", "forward 0", "backward 0", "gradient sync", "optimizer"}
    counted = run.steps[2]["counters"]
    assert found.arrows
    for rank in range(4):
        own = [e for e in found.spans if e["pid"] == rank]
        brought = {
            phase: sum(e["args"].get("received_bytes", 0) for e in own if e["cat"] == phase)
            for phase in ("forward", "backward")
        }
        assert brought == {phase: counted[f"bytes_received_{phase}"][rank] for phase in brought}
        launches = sum(e["name"] == "attention" for e in own)
        assert 0 < launches <= counted["kernel_calls"][rank]
        calls = {(e["args"]["microbatch"], e["cat"], e["args"]["call"]) for e in own if e["name"] == "attention"}
        assert calls <= {(at, phase, call) for at in (0, 1) for phase in ("forward", "backward") for call in (0, 1)}
        assert {e["cat"] for e in own if e["name"] == "linear"} == {"forward", "backward"}


def test_a_step_that_megatron_runs_again_gives_the_same_loss(train: Train, tmp_path: Path) -> None:
    # Megatron rejects a loss (here by injection), replays the step from the same raw microbatches
    # and compares: equal to the last bit.
    def replayed(result: Result) -> None:
        assert set(result.codes) == {RESUME_TO_DISAMBIGUATE}, result.tail(result.failed or 0)
        assert "Need to rerun step to check reproducibility" in result.log(0)
        assert "Saving a checkpoint and exiting now" in result.log(0)

    flags = {"error-injection-rate": 3, "error-injection-type": "correct_result"}
    saving = {"save": tmp_path, "save-interval": 1000, "ckpt-format": "torch_dist"}
    train(2, "zeppelin", {**flags, **saving}, config=TWO_NODES, expect=replayed)


def test_a_frozen_rank_ends_the_job_after_megatrons_timeout(train: Train) -> None:
    # The others wait for it in a group of ours, whose timeout is Megatron's too.
    def ended(result: Result) -> None:
        assert result.codes[0] > 0, f"rank 0 waited for the frozen one; its log ends:\n{result.tail(0)}"
        assert result.codes[1] == SIGKILL, "it was frozen to the end"
        assert re.search("[Tt]imed out|[Tt]imeout", result.log(0))
        assert "rank 1 of 2 does not answer: ended, or frozen" in result.log(0)

    flags = {"train-iters": 5000, "distributed-timeout-seconds-after-init": 2}
    train(2, "te_ring", flags, kill_after=3, freeze=1, expect=ended, deadline_s=90, grace_s=1.0)


def test_a_refused_flag_or_an_unknown_key_ends_every_rank_with_one_sentence(train: Train) -> None:
    given = {"sft": True, "dataloader-type": "cyclic", "fim-data": True, "data-path": "/nowhere/a", "eval-iters": 1}
    refused = refusal(
        *("--sft reads conversations", "--dataloader-type cyclic", "--fim-data rearranges"),
        *("/nowhere/a.bin: No such file", "wlb_llm makes microbatches of its own, and --sft averages evaluation"),
    )
    run = train(2, "wlb_llm", given, expect=refused, deadline_s=60)
    assert "building GPT model" not in run.result.log(0)
    train(2, {"name": "te_ring", "token_per_rank": 12}, expect=refusal("did you mean 'tokens_per_rank'"), deadline_s=60)


def test_a_rank_that_cannot_read_its_samples_leaves_none_waiting(train: Train, tmp_path: Path) -> None:
    def refused(result: Result) -> None:
        assert result.codes == (2, 2), result.tail(result.failed or 0)
        assert result.seconds < 30
        assert any("vocabulary" in one_line(result, rank) for rank in (0, 1))

    corpus = write_corpus(tmp_path / "foreign", [SEQ_LENGTH] * 7)
    path = tmp_path / "foreign.bin"
    tokens = bytearray(path.read_bytes())
    tokens[-2 * 30 : -2 * 29] = b"\xff\x7f"  # one id that no embedding has, in the last document
    path.write_bytes(tokens)
    flags = {"data-path": corpus, "context-parallel-size": 1, "train-iters": 7}
    train(2, "te_ring", flags, expect=refused, deadline_s=60)


# Documents that wait, in Megatron's loop: their tokens come back after a resume, also on another
# number of ranks, and nothing is left at the end.

STEPS, SAVED = 6, 3
DELAY = {"name": "wlb_llm", "thresholds": [250]}
FOUR = {"global-batch-size": 4}


def adds_up(run: Run, before: int = 0) -> None:
    # Check the tokens of every step: those that waited and those drawn are trained or wait.
    for step in run.steps:
        assert before + step["drawn_tokens"] == step["trained_tokens"] + step["waiting_tokens"], step["step"]
        assert step["trained_tokens"] == step["num_tokens"]
        assert step["run_tokens"]["drawn"] == step["run_tokens"]["trained"] + step["waiting_tokens"]
        before = step["waiting_tokens"]


def test_documents_wait_over_a_resume_and_other_ranks_and_none_is_left(train: Train, tmp_path: Path) -> None:
    flags: dict[str, Any] = {**FOUR, "train-iters": STEPS, "ckpt-format": "torch_dist"}
    whole = train(2, DELAY, {**flags, "save": tmp_path, "save-interval": SAVED})
    adds_up(whole)
    waiting = whole.column("waiting_tokens")
    assert waiting[SAVED - 1] > 0, "documents wait in the checkpoint"
    assert waiting[-1] == 0, "flushed at the end"
    assert whole.steps[-1]["run_tokens"]["trained"] == sum(whole.column("drawn_tokens"))
    (tmp_path / "latest_checkpointed_iteration.txt").write_text(str(SAVED))
    resumed = train(2, DELAY, {**flags, "load": tmp_path}, config={"plan_ahead": True})
    elsewhere = train(1, DELAY, {**flags, "load": tmp_path})
    for run in (resumed, elsewhere):
        assert run.column("step") == list(range(SAVED + 1, STEPS + 1))
        adds_up(run, before=waiting[SAVED - 1])
        assert run.steps[-1]["waiting_tokens"] == 0
    for name in ("loss", "grad_norm", "fingerprint", "waiting_tokens"):
        assert resumed.column(name) == whole.column(name)[SAVED:], name
    assert elsewhere.column("waiting_tokens") == resumed.column("waiting_tokens")
    assert elsewhere.column("loss") == pytest.approx(resumed.column("loss"), rel=1e-5)


# Before training, a tiny batch has the same loss with a plan and without (GPT-OSS, and experts in
# stages, in test_families.py), or nothing is trained.


def test_its_losses_are_none_of_those_that_spikes_are_judged_by(monkeypatch: pytest.MonkeyPatch) -> None:
    machine: Any = RerunStateMachine(mode=RerunMode.VALIDATE_RESULTS)
    monkeypatch.setattr(forward_backward, "get_rerun_state_machine", lambda: machine)
    leaps: Any = partial(machine.is_unexpectedly_large, threshold=10.0, context="loss")
    leaps(torch.tensor(4.0))
    with forward_backward._nothing_counted([]):  # pyright: ignore[reportPrivateUsage]
        assert machine.get_mode() == RerunMode.DISABLED
        leaps(torch.tensor(90.0))
    assert machine.get_mode() == RerunMode.VALIDATE_RESULTS
    assert (machine.large_value_counts, machine.max_values) == ({"loss": 1}, {"loss": 4.0})


def test_a_wrong_attention_ends_the_job_before_it_trains(train: Train) -> None:
    def told(result: Result) -> None:
        assert result.codes == (2, 2)
        log = result.log(0)
        assert re.search(
            r"error: self-check before step 1: a tiny batch has loss \S+ with the plan of te_ring and \S+ without", log
        )
        assert "expected at most 1e-05. Nothing was trained." in log
        assert not re.search(r"iteration +1/", log)

    config: dict[str, Any] = {"self_check": True}
    run: Run = train(2, "te_ring", {"train-iters": 1}, config=config, expect=told, fault=("attention", "wrong", 1, 1))
    assert not run.steps


# Layers that keep beside layers that replay: the losses and gradients of keep.

KEPT_STEPS, LAYERS = 2, 3
FLAGS = {"train-iters": KEPT_STEPS, "lr-decay-iters": KEPT_STEPS, "num-layers": LAYERS}


def trained(train: Train, planner: str, backward: str, memory_bytes: float | None = None, **flags: Any) -> Run:
    cluster = {} if memory_bytes is None else {"memory_bytes": memory_bytes}
    config = {"backward": backward, "cluster": {"ranks_per_node": 2, **cluster}}
    return train(2, planner, {**FLAGS, **flags}, config=config)


@pytest.mark.parametrize("planner", [pytest.param("te_ring", marks=pytest.mark.product), "distca"])
def test_a_mix_by_layer_trains_as_keep_does(train: Train, planner: str) -> None:
    keep = trained(train, planner, "keep")
    told = keep.steps[0]["backward"]
    assert told["keeping_layers"] == told["layers"] == LAYERS
    between = (told["keep_bytes"] + told["replay_bytes"]) / 2
    mixed = trained(train, planner, "auto", between / 0.9)
    keeping = mixed.steps[0]["backward"]["keeping_layers"]
    assert 0 < keeping < LAYERS
    assert f"backward: keep in {keeping} of {LAYERS} layers, replay in {LAYERS - keeping}" in mixed.result.log(0)
    assert mixed.steps[0]["backward"]["peak_bytes"] <= between
    assert_same_training(mixed, keep)


def test_a_step_that_fits_in_no_way_ends_before_it_begins(train: Train) -> None:
    config = {"cluster": {"ranks_per_node": 2, "memory_bytes": 1e6}}
    refused = refusal("error: this step does not fit: rank", "set 'backward: replay'")
    train(2, "te_ring", FLAGS, config=config, expect=refused)
