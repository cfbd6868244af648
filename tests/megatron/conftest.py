"""Real Megatron-core on CPU: a small GPT, documents for all zones, a server that forks ranks."""

import itertools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

pytest.importorskip("torch")
pytest.importorskip("megatron.training")

import torch.distributed as dist
from megatron.core import mpu
from torch._C._distributed_c10d import HashStore

from megatron_balance.workloads.idx import CorpusWriter
from tests.support.megatron_run import Entry, Job, Result, Trainer
from tools.megatron_flags import GPT, LOOP, command_line

SEQ_LENGTH = 512
VOCABULARY = 96
# With 2 nodes a rank holds SEQ_LENGTH / R tokens and a node SEQ_LENGTH / 2: the first does not fit
# a node, the second not a rank.
DOCUMENT_LENGTHS = (300, 140, 40, 20, 7, 1)
NUM_DOCUMENTS = 240

MODEL: dict[str, Any] = {**GPT, "num-layers": 2, "hidden-size": 32, "ffn-hidden-size": 64, "num-attention-heads": 8}
MODEL |= {"group-query-attention": True, "num-query-groups": 4}
MODEL |= {"seq-length": SEQ_LENGTH, "max-position-embeddings": SEQ_LENGTH}
# Added to MODEL: every layer a mixture of experts, with both losses of its router.
EXPERTS: dict[str, Any] = {"num-experts": 8, "ffn-hidden-size": 32, "moe-router-topk": 2}
EXPERTS |= {"moe-token-dispatcher-type": "alltoall", "moe-router-load-balancing-type": "aux_loss"}
EXPERTS |= {"moe-aux-loss-coeff": 0.01, "moe-z-loss-coeff": 0.001}
RUN: dict[str, Any] = {**LOOP, "global-batch-size": 2, "train-iters": 20, "lr": 0.001, "lr-decay-iters": 20}
RUN |= {"split": "100,0,0", "seed": 11, "balance-device": "cpu", "vocab-size": VOCABULARY}


@dataclass(frozen=True)
class Run:
    result: Result
    steps: tuple[dict[str, Any], ...]

    def column(self, name: str) -> list[Any]:
        return [step[name] for step in self.steps]


def write_corpus(prefix: Path, lengths: Sequence[int]) -> str:
    # Documents of the given lengths whose tokens can be learned a little: a slow walk round the
    # vocabulary.
    generator = np.random.default_rng(5)
    with CorpusWriter(prefix, "uint16") as writer:
        for length in lengths:
            walk = generator.integers(0, VOCABULARY) + np.cumsum(generator.integers(0, 3, size=length))
            writer.add_document((walk % VOCABULARY).astype(np.uint16))
    return str(prefix)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    lengths = list(itertools.islice(itertools.cycle(DOCUMENT_LENGTHS), NUM_DOCUMENTS))
    return write_corpus(tmp_path_factory.mktemp("corpus") / "documents", lengths)


@pytest.fixture(scope="session")
def trainer() -> Iterator[Trainer]:
    trainer = Trainer()
    yield trainer
    trainer.close()


Train = Callable[..., Run]


@pytest.fixture(scope="session")
def train(trainer: Trainer, corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Train:
    return train_with(trainer, corpus, tmp_path_factory)


def train_with(trainer: Trainer, corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Train:
    # A run that must succeed: `train(num_ranks, planner, {"flag": value}, config={...})`; with
    # `expect`, one that must do as that says.
    def run(
        num_ranks: int,
        planner: str | dict[str, Any] = "te_ring",
        flags: dict[str, Any] | None = None,
        *,
        config: dict[str, Any] | None = None,
        entry: Entry = "pretrain_gpt",
        before: Sequence[str] = (),
        expect: Callable[[Result], None] | None = None,
        **job: Any,
    ) -> Run:
        folder = tmp_path_factory.mktemp("run")
        chosen = {"name": planner} if isinstance(planner, str) else planner
        roomy = {"sample_filling": "next_fit"}  # in full samples planners move little, and nothing waits
        keys = {"planner": chosen, "plan_ahead": False, **roomy, **(config or {})}
        (folder / "balance.yaml").write_text(yaml.safe_dump(keys))
        ours = {} if entry == "plain" else {"balance-config": folder / "balance.yaml", "balance-log": folder / "log"}
        parallel = {"context-parallel-size": num_ranks, "data-path": corpus}
        if "kill_after" in job:
            job["kill_after"] = (str(folder / "log" / "steps.jsonl"), job["kill_after"])
        argv = (*before, *command_line(MODEL, RUN, parallel, ours, flags or {}))
        result = trainer.run(Job(entry, num_ranks, argv, str(folder), **job))
        if expect is not None:
            expect(result)
        else:
            failed = result.failed
            assert failed is None, (
                f"ranks ended with {result.codes}, first rank {failed}; its log ends:\n{result.tail(failed or 0)}"
            )
        steps = folder / "log" / "steps.jsonl"
        return Run(result, tuple(map(json.loads, steps.read_text().splitlines())) if steps.exists() else ())

    return run


def at_once(flags: dict[str, Any]) -> dict[str, Any]:
    # Flags under which one rank takes a step's samples as one microbatch, which is faster and
    # changes no number; but where further tokens are predicted, whose losses are weighted by
    # microbatch.
    return {**flags, "micro-batch-size": flags.get("global-batch-size", RUN["global-batch-size"])}


def started(train: Train, folder: Path, flags: dict[str, Any]) -> dict[str, Any]:
    # Flags under which any run starts from the weights of one rank's checkpoint.
    #
    # What is initialised outside Megatron's own generators (tensor-parallel slices, experts'
    # routers, learned positions) depends on the number of ranks, so parity needs both sides to
    # start from the same weights.
    checkpoint = {**flags, "ckpt-format": "torch_dist"}
    train(1, "te_ring", {**at_once(checkpoint), "save": folder, "save-interval": 1000, "train-iters": 1})
    return {**checkpoint, "load": folder, "finetune": True, "no-load-optim": True, "no-load-rng": True}


def loaded_run(
    train: Train, folder: Path, flags: dict[str, Any], *, whole: bool = False, entry: Entry = "pretrain_gpt"
) -> tuple[dict[str, Any], Run]:
    # Flags to start from one rank's weights (`started`), and one rank's run from there. `whole`:
    # with the microbatches of the flags, not `at_once`.
    given = started(train, folder, flags)
    return given, train(1, "te_ring", given if whole else at_once(given), entry=entry)


def one_line(result: Result, rank: int = 0) -> str:
    lines = [line for line in result.log(rank).splitlines() if line.startswith("error")]
    assert len(lines) == 1, result.tail(rank)
    assert "Traceback" not in result.log(rank)
    return lines[0]


def refusal(*sentences: str, codes: tuple[int, ...] = (2, 2)) -> Callable[[Result], None]:
    # For `expect`: all ranks end with exit code 2 and one line, which has all of `sentences`.
    def refused(result: Result) -> None:
        assert result.codes == codes, result.tail(result.failed or 0)
        for sentence in sentences:
            assert sentence in one_line(result)

    return refused


def assert_same_training(run: Run, reference: Run, tolerance: float = 1e-5) -> None:
    # Check that two runs have equal steps, losses and gradient norms, relative to `tolerance`.
    assert run.column("step") == reference.column("step")
    assert run.steps, "no step was logged"
    for name in ("loss", "grad_norm"):
        for step, got, wanted in zip(run.column("step"), run.column(name), reference.column(name), strict=True):
            assert got == pytest.approx(wanted, rel=tolerance), f"{name} of step {step}"


@contextmanager
def one_process() -> Iterator[None]:
    # Megatron's groups of one rank, in this process.
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        mpu.initialize_model_parallel()
        yield
    finally:
        mpu.destroy_model_parallel()
        dist.destroy_process_group()


def validation_losses(log: str) -> list[float]:
    return [float(value) for value in re.findall(r"validation loss at iteration [^|]*\| lm loss value: (\S+)", log)]
