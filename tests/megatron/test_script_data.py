"""Identity of a script's own data set: of Megatron's own classes, and of others."""

import argparse
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.training.datasets.sft_dataset import SFTDataset
from torch._C._distributed_c10d import HashStore

from megatron_balance.megatron import script_data
from megatron_balance.training.ledger import DataIdentity
from megatron_balance.workloads.idx import CorpusWriter, bin_path

SAMPLES = 12  # that a run of the usual length asks for
ARGS = argparse.Namespace(
    seq_length=64, seed=1, dataloader_type="single", micro_batch_size=1, data_path=None, mock_data=False
)


class Numbers:
    # A tokenizer of numbers, with characters for conversations.
    vocab_size, eod, pad = 100, 99, 98
    unique_identifiers: dict[str, str] = {}  # noqa: RUF012  as Megatron's has it

    def tokenize_conversation(self, conversation: list[dict[str, str]], *_: Any, **__: Any) -> tuple[Any, Any]:
        tokens = np.array([ord(each) - 32 for turn in conversation for each in turn["content"]])
        return tokens, tokens


class Lines(SFTDataset):
    # Megatron's own, but for who reads the file.
    @staticmethod
    def build_low_level_dataset(dataset_path: str, config: Any) -> Any:  # noqa: ARG004
        lines = Path(dataset_path).read_text().splitlines()
        return [[{"role": "system", "content": part} for part in (line[:7], line[7:])] for line in lines]


def write(prefix: Path, lengths: list[int], seed: int = 1) -> str:
    generator = np.random.default_rng(seed)
    with CorpusWriter(prefix, "uint16") as writer:
        for length in lengths:
            writer.add_document(generator.integers(0, 90, length).astype(np.uint16))
    return str(prefix)


def build(*blend: Any, kind: Any = GPTDataset, samples: int = SAMPLES, **settings: Any) -> Any:
    # The training set of Megatron's builder. `blend`: prefixes, or weights and prefixes.
    weights = [each for each in blend if isinstance(each, float)] or None
    prefixes = [str(each) for each in blend if not isinstance(each, float)]
    usual = {"random_seed": 1, "sequence_length": 64, "split": "80,20,0", "tokenizer": Numbers()}
    resets = dict.fromkeys(("reset_position_ids", "reset_attention_mask", "eod_mask_loss"), False)
    blended = {"blend": (prefixes, weights) if prefixes else None}
    config = GPTDatasetConfig(**{**usual, **resets, "create_attention_mask": False, **blended, **settings})
    return BlendedMegatronDatasetBuilder(kind, [samples, 0, 0], lambda: True, config).build()[0]


def identity(dataset: Any, **args: Any) -> DataIdentity:
    return script_data._identify(dataset, argparse.Namespace(**{**vars(ARGS), **args}))


LENGTHS = [40, 7, 90, 33, 64, 12, 51, 20] * 6


@pytest.fixture
def corpora(tmp_path: Path) -> tuple[str, str]:
    return write(tmp_path / "a", LENGTHS), write(tmp_path / "b", LENGTHS[::-1], 2)


def blended(corpora: tuple[str, str], **settings: Any) -> Any:
    return build(0.7, corpora[0], 0.3, corpora[1], **settings)


def test_the_same_data_elsewhere_on_other_ranks_and_for_a_longer_run_are_the_same(
    corpora: tuple[str, str], tmp_path: Path
) -> None:
    one = identity(blended(corpora))
    assert sorted(one.samples) == [0, 1, 2, 4, 8]
    assert len(set(one.samples.values())) == 5
    moved = tmp_path / "moved"
    moved.mkdir()
    for prefix in corpora:
        for end in (".idx", ".bin"):
            shutil.copy(prefix + end, moved)
    elsewhere = identity(blended((str(moved / "a"), str(moved / "b"))))
    assert elsewhere.places != one.places
    assert (elsewhere.fingerprint, one.changes(elsewhere, SAMPLES)) == (one.fingerprint, [])
    # A run that asks for more samples asks for those that it had first: one epoch has them all.
    assert one.changes(identity(blended(corpora, samples=SAMPLES + 2)), SAMPLES) == []


def other_tokens(corpora: tuple[str, str]) -> Any:
    tokens = np.fromfile(bin_path(corpora[1]), np.uint16)
    bin_path(corpora[1]).write_bytes(((tokens + 1) % 90).astype(np.uint16).tobytes())
    return blended(corpora)


# By name: another data set, and what is told of it.
OTHERS: dict[str, tuple[Callable[[tuple[str, str]], Any], str]] = {
    "weights": (lambda both: build(0.6, both[0], 0.4, both[1]), r"blend was 0\.7, 0\.3 and is 0\.6, 0\.4"),
    "no weights": (lambda both: build(*both), r"blend was 0\.7, 0\.3 and is 0\.\d+, 0\.\d+"),
    "seed": (lambda both: blended(both, random_seed=2), "--seed was 1 and is 2"),
    "context": (lambda both: blended(both, sequence_length=32), "--seq-length was 64 and is 32"),
    "split": (lambda both: blended(both, split="90,10,0"), r"corpus 1 was 48 sequences, 38 from 0 .* is 48 .*43"),
    "one corpus": (lambda both: build(both[0]), r"corpus 2 was 48 sequences.* and is nothing"),
    "order of corpora": (lambda both: build(0.7, both[1], 0.3, both[0]), r"corpus 1 was .*/a\) and is .*/b\)"),
    "tokens": (other_tokens, r"corpus 2 was 48 sequences"),
    "length": (lambda both: blended((both[0], write(Path(both[1]), LENGTHS[1:]))), r"and is 47 sequences"),
    "mock": (lambda _: build(kind=MockGPTDataset), "data set was GPTDataset and is MockGPTDataset"),
    "epochs": (lambda both: blended(both, samples=9 * SAMPLES), r"sample \d has other tokens"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_data_are_told_by_name(corpora: tuple[str, str], name: str) -> None:
    before = identity(blended(corpora))
    other, told = OTHERS[name]
    changes = "; ".join(before.changes(identity(other(corpora)), SAMPLES))
    assert changes
    assert re.search(told, changes), changes


def test_conversations_are_told_by_their_file_whatever_its_padding(tmp_path: Path) -> None:
    # `--sft` pads a conversation to a multiple of twice the context-parallel ranks.
    lines = ["".join(chr(33 + (at * number) % 60) for at in range(9 + number)) for number in range(20)]

    def told(name: str, text: list[str], ranks: int = 1) -> DataIdentity:
        (tmp_path / name).write_text("\n".join(text))
        return identity(build(tmp_path / name, kind=Lines, context_parallel_size=ranks))

    one = told("one.jsonl", lines)
    assert one.changes(told("moved.jsonl", lines, ranks=4), SAMPLES) == []
    assert len(one.samples) == 5
    assert one.changes(told("other.jsonl", [*lines[1:], lines[0]]), SAMPLES)


def test_what_a_data_set_gives_next_is_as_if_nobody_had_asked(corpora: tuple[str, str]) -> None:
    # A GPTDataset keeps the mask of whatever sample is read first; a loader draws a seed.
    dataset = blended(corpora)
    before = torch.get_rng_state()
    identity(dataset)
    assert torch.get_rng_state().equal(before)
    assert not any(part.masks_and_position_ids_are_cached for part in dataset.datasets)


class Own:
    def __init__(self, samples: list[Any], broken: int = -1, *, draws: bool = False) -> None:
        self.samples, self.broken, self.draws = samples, broken, draws
        self.generator = np.random.default_rng(0)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        if index == self.broken:
            raise OSError("lost")
        drawn = self.generator.integers(0, 90, 4)
        return {"tokens": drawn} if self.draws else self.samples[index]


def test_of_another_data_set_its_samples_are_known(caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"tokens": torch.tensor([row, 1])} for row in range(5)]
    one = identity(Own(rows))
    assert one.facts["data set"] == "Own"
    assert one.changes(identity(Own(rows[:4])), 4) == []
    assert "sample 0 has other tokens (3 of 3" in one.changes(identity(Own(rows[1:])), 3)[0]
    assert identity(Own([(1, 2), (3, 4)])).samples != identity(Own([(1, 2), (3, 5)])).samples
    long = torch.arange(5000)
    changed = long.clone()
    changed[2500] = 0
    assert identity(Own([{"input_ids": long}])).samples != identity(Own([{"input_ids": changed}])).samples
    old = DataIdentity.of_script(one.facts, {}, {0: "0" * 8})
    assert old.changes(DataIdentity.of_script(one.facts, {}, {0: "0" * 12}), 1) == [], "two kinds of digest"
    assert not caplog.records
    for dataset, args, reason in (
        (Own(rows, draws=True), {}, "it gives other tokens each time"),
        (Own(rows, broken=2), {}, "cannot be read: OSError"),
        (iter(rows), {"dataloader_type": "external"}, "it is no list of samples"),
        (Own(rows), {"fim_data": True}, "--fim-data draws at random"),
    ):
        caplog.clear()
        found = identity(dataset, **args)
        assert found.fingerprint
        assert not found.samples
        assert reason in caplog.text


class Broken(Own):
    @property
    def datasets(self) -> Any:
        raise RuntimeError("not open")


@pytest.mark.parametrize(
    ("dataset", "told"),
    [(None, "no rank has a training set"), (Broken([(0,)]), "does not say what it is (RuntimeError: not open)")],
    ids=["none", "broken"],
)
def test_samples_that_nobody_can_tell_are_unknown_on_all_ranks(
    dataset: Any, told: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(script_data, "job_device", lambda: torch.device("cpu"))
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        assert script_data.agreed(dataset, ARGS) == DataIdentity()
        assert told in caplog.text
        own = Own([(0,)])
        assert script_data.agreed(own, ARGS) == identity(own)
    finally:
        dist.destroy_process_group()


def test_what_the_command_line_names_is_told_where_a_data_set_does_not(tmp_path: Path) -> None:
    first, second = tmp_path / "first.txt", tmp_path / "second.txt"
    first.write_text("0.5 a 0.5 b")
    second.write_text("0.5 a 0.5 b")
    rows = [(0,)]
    one = identity(Own(rows), data_args_path=str(first))
    assert one.changes(identity(Own(rows), data_args_path=str(second)), 1) == []
    second.write_text("0.4 a 0.6 b")
    (change,) = one.changes(identity(Own(rows), data_args_path=str(second)), 1)
    assert change.startswith("--data-args-path was 11 bytes")


def test_a_random_order_is_one_of_so_many_samples_and_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    # Megatron's sampler shuffles each replica's part for itself.
    def order(replicas: int, **args: Any) -> str:
        monkeypatch.setattr(parallel_state, "get_data_parallel_world_size", lambda: replicas)
        return identity(Own([(0,)] * 8), dataloader_type="cyclic", **args).facts["order"]

    assert order(2) == "cyclic, 8 samples, in 2 parts of 1 each"
    assert order(2) != order(4)
    assert order(2, data_sharding=False) == order(4, data_sharding=False)
