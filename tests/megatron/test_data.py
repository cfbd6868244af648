"""The document data set on Megatron's own classes, and the identity of a script's own data set."""

import argparse
import pickle
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from megatron.core import parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.blended_megatron_dataset_config import (
    convert_split_vector_to_split_matrix,
    parse_and_normalize_split,
)
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
from megatron.core.datasets.utils import Split
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.training import global_vars
from megatron.training.datasets.data_samplers import MegatronPretrainingSampler
from megatron.training.datasets.sft_dataset import SFTDataset

from megatron_balance.analysis.shards import Base, Parameter, ParameterTable, Shard
from megatron_balance.errors import ConfigError, DataError
from megatron_balance.ir.strategy import Scheme
from megatron_balance.megatron import data, script_data, session
from megatron_balance.training.ledger import DataIdentity
from megatron_balance.training.tokens import from_bits
from megatron_balance.workloads.documents import Corpus, CutPolicy, DocumentStream, split_documents
from megatron_balance.workloads.idx import CODES, CorpusWriter, bin_path, idx_path, read_index
from tests.megatron.conftest import one_process
from tests.support.links import buffers_of, cut

EOD = 999
LENGTHS = (5, 1, 20, 3, 8, 17, 2, 11, 40, 6, 9, 1)
SEQ_LENGTH = 16


def documents() -> list[np.ndarray]:
    # Token ids that say where they stand: document and position; the last one is the
    # end-of-document token.
    return [np.array([100 * i + p for p in range(length - 1)] + [EOD]) for i, length in enumerate(LENGTHS)]


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    with CorpusWriter(tmp_path / "corpus", "int32") as writer:
        for tokens in documents():
            writer.add_document(tokens)
    return str(tmp_path / "corpus")


def dataset(
    prefix: str, policy: CutPolicy = "split", num_samples: int | None = None, **options: object
) -> data.DocumentDataset:
    index = read_index(prefix)
    stream = DocumentStream(Corpus(index), SEQ_LENGTH, 7, policy)
    made = data.DocumentDataset(index, stream, num_samples or 0, **options)  # pyright: ignore[reportArgumentType]
    if num_samples is None:  # an epoch
        made.num_samples = made.stream.num_samples(0)
    return made


def arguments(prefix: str, **changed: object) -> Any:
    paths = dict.fromkeys((*(f"{kind}_data_path" for kind in ("train", "valid", "test")), "per_split_data_args_path"))
    usual: dict[str, object] = {**paths, "data_path": [prefix], "data_args_path": None, "split": "100,0,0", "seed": 7}
    usual |= {"dataloader_type": "single", "eval_iters": 0, "padded_vocab_size": 2000, "mmap_bin_files": True}
    usual["seq_length"] = SEQ_LENGTH
    return SimpleNamespace(**(usual | changed))


def built(args: Any, *num_samples: int) -> Any:
    # Data sets of the splits, of as many samples; of those left out none are asked.
    return data.build_datasets(args, (*num_samples, 0, 0)[:3], "split")


@pytest.mark.parametrize("dtype", CODES)
def test_the_writer_makes_the_bytes_of_megatrons_builder(tmp_path: Path, dtype: str) -> None:
    generator = np.random.default_rng(1)
    corpus = [generator.integers(0, 100, size=length) for length in (1, 7, 3, 1000, 2)]
    builder = IndexedDatasetBuilder(f"{tmp_path}/theirs.bin", dtype=getattr(np, dtype))
    with CorpusWriter(tmp_path / "ours", dtype) as writer:
        for tokens in corpus:
            builder.add_item(torch.from_numpy(tokens))
            builder.end_document()
            writer.add_document(tokens)
    builder.finalize(f"{tmp_path}/theirs.idx")
    for suffix in ("bin", "idx"):
        assert (tmp_path / f"ours.{suffix}").read_bytes() == (tmp_path / f"theirs.{suffix}").read_bytes()


def test_a_corpus_of_megatrons_builder_is_read(tmp_path: Path) -> None:
    builder = IndexedDatasetBuilder(f"{tmp_path}/c.bin", dtype=np.uint16)
    builder.add_document(torch.arange(9), [4, 5])  # one document of two sequences
    builder.add_item(torch.arange(3))
    builder.end_document()
    builder.finalize(f"{tmp_path}/c.idx")
    assert read_index(f"{tmp_path}/c").document_lengths.tolist() == [9, 3]
    samples = dataset(f"{tmp_path}/c")
    assert all_labels(samples) == [1, 1, 2, 2, *range(3, 9)]


def all_labels(samples: data.DocumentDataset) -> list[int]:
    each = (samples[index] for index in range(len(samples)))
    return sorted(label for sample in each for label in sample["labels"][sample["loss_mask"] == 1].tolist())


@pytest.mark.parametrize("policy", ["split", "truncate"])
def test_a_sample_is_its_pieces_with_the_next_token_of_the_document_as_label(prefix: str, policy: CutPolicy) -> None:
    samples = dataset(prefix, policy)
    corpus = documents()
    cuts = 0
    for index in range(len(samples)):
        sample = samples[index]
        tokens, labels, loss_mask, positions = (
            sample[key].tolist() for key in ("tokens", "labels", "loss_mask", "position_ids")
        )
        assert [len(column) for column in (tokens, labels, loss_mask, positions)] == [SEQ_LENGTH] * 4
        at = 0
        for piece in samples.stream.sample(index):
            document = corpus[piece.document].tolist()
            for position in range(piece.start, piece.stop):
                assert (tokens[at], positions[at]) == (document[position], position - piece.start)
                if position + 1 < len(document):
                    assert (labels[at], loss_mask[at]) == (document[position + 1], 1.0)
                else:
                    assert loss_mask[at] == 0.0
                at += 1
            cuts += piece.stop < len(document)
        assert positions[at:] == [data.PADDING] * (SEQ_LENGTH - at)
        assert not any(loss_mask[at:])
    # 20, 17 and 40 tokens at a context of 16: split cuts 40 twice. All of these last tokens have
    # kept their labels above.
    assert cuts == {"split": 4, "truncate": 3}[policy]


def test_an_epoch_trains_every_label_of_the_corpus_once_however_it_is_read(prefix: str) -> None:
    # Lengths are known without reading tokens; loader workers get the same.
    samples, read = dataset(prefix), dataset(prefix, mmap=False)
    assert all_labels(samples) == sorted(token for document in documents() for token in document[1:].tolist())
    copy = pickle.loads(pickle.dumps(samples))
    for index in range(12):
        assert all(copy[index][name].equal(column) for name, column in samples[index].items())
        assert read[index]["tokens"].equal(samples[index]["tokens"])
        batch = {name: column[None] for name, column in samples[index].items()}
        assert samples.sample_lengths(index) == data.unpack(batch).lengths


def batches(
    samples: data.DocumentDataset, rank: int, num_ranks: int, consumed: int, micro_batch_size: int
) -> Iterator[dict[str, torch.Tensor]]:
    # The batches that Megatron's sampler and torch's default collate hand a data-parallel rank.
    sampler = MegatronPretrainingSampler(len(samples), consumed, micro_batch_size, rank, num_ranks)
    return iter(torch.utils.data.DataLoader(samples, batch_sampler=sampler))


def test_ranks_together_read_every_token_once_and_go_on_after_a_resume(prefix: str) -> None:
    per_epoch = len(dataset(prefix))
    two_epochs = dataset(prefix).stream.first_sample(2)
    corpus = sorted(token for document in documents() for token in document.tolist())
    read: dict[int, list[int]] = {}
    # Killed after 4 samples on 2 ranks, resumed on 4 ranks; the length is a multiple of both global
    # batches.
    total = -(-two_epochs // 4) * 4
    for ranks, first, stop in ((2, 0, 4), (4, 4, total)):
        for rank in range(ranks):
            step = batches(dataset(prefix, num_samples=stop), rank, ranks, first, 1)
            for number, batch in enumerate(step):
                read[first + number * ranks + rank] = data.unpack(batch).rows[:, data.TOKEN].tolist()
    assert sorted(read) == list(range(total))
    for start, end in ((0, per_epoch), (per_epoch, two_epochs)):
        assert sorted(token for index in range(start, end) for token in read[index]) == corpus


def test_unpacking_a_collated_batch_gives_its_sequences_in_order_and_refuses_other_batches(prefix: str) -> None:
    samples = dataset(prefix, num_samples=30)
    batch = next(batches(samples, 1, 2, 6, 3))
    held = data.unpack(batch)
    expected = [piece for index in (9, 10, 11) for piece in samples.stream.sample(index)]
    assert held.lengths == tuple(piece.stop - piece.start for piece in expected)
    corpus = documents()
    tokens = [token for piece in expected for token in corpus[piece.document][piece.start : piece.stop].tolist()]
    assert held.rows[:, data.TOKEN].tolist() == tokens
    real = batch["position_ids"] != data.PADDING
    assert held.rows[:, data.LABEL].equal(batch["labels"][real])
    assert from_bits(held.rows[:, data.LOSS_MASK]).equal(batch["loss_mask"][real])
    batch = {name: torch.ones(2, 4, dtype=torch.int64) for name in ("tokens", "labels", "loss_mask", "position_ids")}
    with pytest.raises(DataError, match="does not open with position 0"):
        data.unpack(batch)
    # Two branches behind three tokens: one sequence of it would show each to the other.
    tree = {name: column[:1, :7] for name, column in batch.items()}
    tree["position_ids"] = torch.tensor([[0, 1, 2, 3, 4, 3, 4]])
    with pytest.raises(DataError, match="give --balance-trees for trees of rollouts"):
        data.unpack(tree)


@pytest.mark.parametrize("split", ["969, 30, 1", "100,0,0", "99,1,0", "1,1,1", "0.5,0.3,0.2", "90,10", "7"])
@pytest.mark.parametrize("num_documents", [1, 12, 1249, 100_000])
def test_documents_are_split_as_megatron_splits_them(split: str, num_documents: int) -> None:
    theirs = convert_split_vector_to_split_matrix(parse_and_normalize_split(split))
    expected = [
        range(round(part[0] * num_documents), round(part[1] * num_documents)) if part else range(0) for part in theirs
    ]
    ours = split_documents(num_documents, data._parse_split(split))
    assert [list(part) for part in ours] == [list(part) for part in expected]


def test_the_provider_makes_three_sets_of_different_documents(prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # On every rank; without documents or without evaluation there is none.
    monkeypatch.setattr(global_vars, "_GLOBAL_ARGS", arguments(prefix, split="60,25,15", eval_iters=2))
    provider: Any = data.document_datasets_provider
    sets = provider((100, 20, 10))
    assert [(part.split, len(part)) for part in sets] == [
        *((Split.train, 100), (Split.valid, data.ENDLESS), (Split.test, 10))
    ]
    drawn = [{piece.document for index in range(30) for piece in part.stream.sample(index)} for part in sets]
    assert drawn == [set(range(7)), set(range(7, 10)), set(range(10, 12))]
    other: Any = data.make_provider("truncate")
    assert provider.is_distributed is other.is_distributed is True
    monkeypatch.setattr(global_vars, "_GLOBAL_ARGS", arguments(prefix))
    train, valid, test = other((8, 0, 0), vp_stage=0)
    assert train.stream.policy == "truncate"
    assert (valid, test) == (None, None)
    sets = built(arguments(prefix, split="50,50,0", eval_iters=1), 8, 4, 4)
    assert [part is None for part in sets] == [False, False, True]


def test_validation_is_endless_and_the_same_however_training_went(prefix: str) -> None:
    args = arguments(prefix, split="50,50,0", eval_iters=1)
    few, more = (built(args, 8, wanted)[1] for wanted in (2, 8))
    assert few[7]["tokens"].equal(more[7]["tokens"])
    assert len(few) == len(more) > 8
    assert built(args, 8)[1] is None
    train, again = built(args, 8, 8, 0)[0], built(args, 800, 8)[1]
    for index in range(8):
        train[index]
        assert more[index]["tokens"].equal(again[index]["tokens"])


@pytest.mark.parametrize(
    ("changed", "error", "sentence"),
    [
        ({"data_path": None}, ConfigError, "--data-path: missing; name a corpus"),
        ({"data_path": ["0", "a", "1", "b"]}, DataError, "a.bin: No such file"),
        ({"data_path": None, "per_split_data_args_path": "paths.json"}, ConfigError, "data paths: expected PREFIX, "),
        ({"data_path": None, "data_args_path": "/nowhere/paths"}, ConfigError, "/nowhere/paths: cannot be read"),
        ({"data_path": None, "train_data_path": ["/nowhere/a"]}, DataError, "/nowhere/a.bin: No such file"),
        ({"fim_data": True}, ConfigError, "--fim-data rearranges documents.*set 'data: script'"),
        ({"sft": True, "use_varlen_dataset": True}, ConfigError, "--sft reads conv.*; --use-varlen-dataset reads"),
        ({"fim_data": True, "dataloader_type": "cyclic"}, ConfigError, "--dataloader-type cyc.*; --fim-data.*script"),
        ({"dataloader_type": "cyclic"}, ConfigError, "--dataloader-type cyclic: .* use single"),
        ({"phase_transition_iterations": [5]}, ConfigError, "--phase-transition-iterations"),
        ({"split": "0,0,0"}, ConfigError, "--split 0,0,0: expected up to three weights"),
        ({"split": "1,2,3,4"}, ConfigError, "--split 1,2,3,4: expected up to three weights"),
        ({"split": "0,1,0"}, ConfigError, "leaves no documents of .* for the train set"),
        ({"split": "1,0,0"}, ConfigError, "for the valid set; give it a larger share or set --eval-iters 0"),
        ({"data_path": ["/nowhere/corpus"]}, DataError, "/nowhere/corpus.bin: No such file"),
    ],
)
def test_arguments_that_cannot_work_are_refused(
    prefix: str, changed: dict[str, object], error: Any, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("paths.json").write_text('{"train": []}')
    with pytest.raises(error, match=sentence):
        built(arguments(prefix, **({"split": "50,50,0"} | changed)), 8, 4, 0)


@pytest.mark.parametrize(
    ("changed", "sentences"),
    [
        ({"data_path": ["/nowhere/a", "/nowhere/b"]}, ("/nowhere/a.bin: No such file", "/nowhere/b.bin: No such file")),
        ({"split": "0,0,0"}, ("--split 0,0,0: expected up to three weights",)),
        ({"split": "0,0,1"}, ("for the train set", "for the valid set; give it a larger share or set --eval-iters 0")),
        ({"split": "1,0,0", "eval_iters": 0}, ()),
        ({"data_path": ["0", "PREFIX", "-1", "PREFIX"]}, ("weights of a blend [0.0, -1.0]: expected numbers above 0",)),
        ({"data_path": ["SHORT"]}, ("short.bin: truncated",)),
    ],
)
def test_what_is_wrong_with_corpora_is_known_without_reading_them(
    prefix: str, changed: dict[str, object], sentences: tuple[str, ...], tmp_path: Path
) -> None:
    if "data_path" in changed:
        short = tmp_path / "short"
        shutil.copy(f"{prefix}.idx", f"{short}.idx")
        Path(f"{short}.bin").write_bytes(b"\0\0")
        named = {"PREFIX": prefix, "SHORT": str(short)}
        changed = {"data_path": [named.get(word, word) for word in cast("list[str]", changed["data_path"])]}
    found = data.corpus_reasons(arguments(prefix, **({"split": "50,50,0", "eval_iters": 1} | changed)))
    assert len(found) == len(sentences)
    for reason, sentence in zip(found, sentences, strict=True):
        assert sentence in reason


def test_corpora_of_the_same_lengths_have_fingerprints_of_their_own(tmp_path: Path) -> None:
    # The weight of a blend of one corpus changes nothing.
    found: list[str] = []
    for name, first in (("one", 1), ("same", 1), ("other", 2)):
        with CorpusWriter(tmp_path / name, "uint16") as writer:
            for _ in range(9):
                writer.add_document(np.arange(first, first + 8))
        alone = arguments(str(tmp_path / name), split="1,0,0")
        weighted = arguments("", data_path=["1.0", str(tmp_path / name)], split="1,0,0")
        found += [built(each, 8)[0].fingerprint for each in (alone, weighted)]
    assert [found.index(each) for each in found] == [0, 0, 0, 0, 4, 4]


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [(lambda data: data[:-4], r"corpus\.bin: truncated"), (lambda data: data + bytes(4), r"corpus\.bin: too long")],
    ids=["truncated", "too long"],
)
def test_a_damaged_corpus_is_found_before_the_first_step(prefix: str, damage: Any, sentence: str) -> None:
    bin_path(prefix).write_bytes(damage(bin_path(prefix).read_bytes()))
    IndexedDataset(prefix)  # Megatron opens it without a word
    with pytest.raises(DataError, match=sentence):
        built(arguments(prefix), 8)
    idx_path(prefix).write_bytes(b"not an index at all" * 10)
    with pytest.raises(DataError, match=r"corpus\.idx: not a Megatron index"):
        built(arguments(prefix), 8)


def test_token_ids_that_the_model_cannot_embed_are_named(prefix: str) -> None:
    train = built(arguments(prefix, padded_vocab_size=500), 50)[0]
    with pytest.raises(DataError, match=r"token ids from \d+ to 999, the model's vocabulary has 500; use the token"):
        list(map(train.__getitem__, range(len(train))))


@pytest.fixture
def other(tmp_path: Path) -> str:
    with CorpusWriter(tmp_path / "other", "int32") as writer:
        for length in range(1, 31):
            writer.add_document(np.full(length, 1500))
    return str(tmp_path / "other")


def is_other(sample: dict[str, torch.Tensor]) -> bool:
    return bool((sample["tokens"] == 1500).any())


def test_a_blend_deals_samples_of_its_corpora_by_weight(prefix: str, other: str) -> None:
    args = arguments(prefix, data_path=["3", prefix, "1", other], split="80,20,0", eval_iters=1)
    train, valid, _ = built(args, 80, 16, 0)
    for samples in (train, valid):
        of_other = [is_other(samples[index]) for index in range(16)]
        assert [sum(of_other[at : at + 4]) for at in range(0, 16, 4)] == [1, 1, 1, 1]
    alone = built(arguments(prefix, split="80,20,0", eval_iters=1), 80, 16)[0]
    mine = [train[index]["tokens"].tolist() for index in range(80) if not is_other(train[index])]
    assert mine == [alone[index]["tokens"].tolist() for index in range(60)]
    assert train.sample_lengths(5) == data.unpack({name: column[None] for name, column in train[5].items()}).lengths
    args.data_path = ["4", prefix, "1", other]
    heavier = built(args, 80, 16)[0]
    assert len({train.fingerprint, alone.fingerprint, heavier.fingerprint}) == 3


def test_every_way_of_naming_corpora_reads_them(prefix: str, other: str, tmp_path: Path) -> None:
    (tmp_path / "paths").write_text(f"0.5 {prefix} 0.5 {other}\n")
    (tmp_path / "splits").write_text(f'{{"train": "{prefix}", "valid": ["{other}"], "test": "{other}"}}')
    blend = built(arguments(prefix, data_path=None, data_args_path=str(tmp_path / "paths")), 8)
    assert [is_other(blend[0][index]) for index in range(4)] == [False, True, False, True]
    by_flags = {"train_data_path": [prefix], "valid_data_path": ["1.0", other]}
    for given in (by_flags, {"per_split_data_args_path": str(tmp_path / "splits")}):
        args = arguments(prefix, data_path=None, split=None, eval_iters=1, **given)
        train, valid, _ = built(args, 20, 8, 0)
        assert train.fingerprint == built(arguments(prefix), 8)[0].fingerprint
        assert not any(is_other(train[index]) for index in range(20))
        assert all(is_other(valid[index]) for index in range(8))


def test_a_large_corpus_is_sorted_once_and_read_as_a_small_one(
    prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = built(arguments(prefix), 60)[0]
    monkeypatch.setattr(data, "CACHED_FROM", 1)
    args = arguments(prefix, data_cache_path=str(tmp_path / "kept"))
    first = built(args, 60)[0]
    samples = [first[index]["tokens"].tolist() for index in range(60)]
    assert samples == [usual[index]["tokens"].tolist() for index in range(60)]
    assert first.fingerprint == usual.fingerprint

    def sorts(*_: object) -> None:
        raise AssertionError("the order is kept")

    for name in ("cut", "shuffled", "_pack_best_fit"):
        monkeypatch.setattr(f"megatron_balance.workloads.documents.{name}", sorts)
    monkeypatch.setattr("megatron_balance.workloads.idx.CorpusIndex.check", sorts)
    again = built(args, 60)[0]
    assert [again[index]["tokens"].tolist() for index in range(60)] == samples
    assert again.fingerprint == usual.fingerprint
    text = pickle.dumps(again)
    assert pickle.loads(text)[5]["tokens"].tolist() == samples[5]
    assert len(text) < 4000, "maps are opened again, not copied"


# Shards that the link gives to owners, beside the ranges of Megatron's distributed optimizer.


def test_owned_shards_are_megatrons_ranges_of_the_flat_buffer() -> None:
    # Two TP ranks, three shards: ranges that begin and end inside rows, columns and gated blocks.
    scheme, replicas = Scheme(2), 3
    listed = (
        Parameter("norm", 7, 1, 0),
        Parameter("qkv", 10, 7, 0, 0),
        Parameter("fc1", 20, 7, 0, 0, blocks=2),
        Parameter("fc2", 7, 10, 0, 1),
    )
    buffers = buffers_of(listed, 1, scheme, replicas, per_bucket=3)
    owned = Base(scheme, replicas, buffers).owned(ParameterTable.of(listed, 1))
    (buffer,) = buffers
    places = {
        listed[number]: (start, start + cut(listed[number], scheme.tensor, 0).size, None)
        for number, start in zip(buffer.parameters.tolist(), buffer.starts.tolist(), strict=True)
    }
    buckets = [
        SimpleNamespace(offset=int(low), grad_data=torch.empty(int(high - low)))
        for low, high in zip(buffer.buckets[:-1], buffer.buckets[1:], strict=True)
    ]
    for tp in range(scheme.tensor):
        for shard in range(replicas):
            group = SimpleNamespace(rank=lambda shard=shard: shard, size=lambda: replicas)
            theirs: Any = SimpleNamespace(
                data_parallel_group=group, num_optimizer_shards=replicas, buckets=buckets, param_index_map=places
            )
            mine = owned[owned[:, Shard.RANK] == tp + scheme.tensor * shard]
            seen = 0
            for bucket in range(len(buckets)):
                ranges = DistributedOptimizer._build_model_gbuf_range(theirs, bucket)["param_map"]
                for parameter, where in ranges.items():
                    flat = cut(parameter, scheme.tensor, tp).reshape(-1)
                    rows = mine[mine[:, Shard.PARAMETER] == listed.index(parameter)]
                    whole = np.arange(parameter.rows * parameter.columns).reshape(parameter.rows, parameter.columns)
                    got = [whole[a:b, c:d].reshape(-1) for a, b, c, d in rows[:, Shard.RECTANGLE]]
                    assert np.array_equal(np.concatenate(got), flat[where["param"].start : where["param"].end])
                    seen += len(rows)
            assert seen == len(mine)


# The writers that Megatron hands the step log.


def test_scalars_go_to_megatrons_own_writers_where_there_are_any(monkeypatch: pytest.MonkeyPatch) -> None:
    scalars: list[Any] = []
    tensorboard = SimpleNamespace(add_scalar=lambda *given: scalars.append(given))
    wandb = SimpleNamespace(log=lambda values, step: scalars.append((*values.items(), step)))
    monkeypatch.setattr(session, "get_tensorboard_writer", lambda: tensorboard)
    monkeypatch.setattr(session, "get_wandb_writer", lambda: wandb)
    writers = session._scalar_writers(interval=2)
    assert writers(7) == [], "not a step at which Megatron writes"
    for write in writers(8):
        write("balance/num_tokens", 90, 8)
    assert scalars == [("balance/num_tokens", 90, 8), (("balance/num_tokens", 90), 8)]
    monkeypatch.setattr(session, "get_wandb_writer", lambda: None)
    assert len(writers(8)) == 1


# Identity of a script's own data set: of Megatron's own classes, and of others.

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


def megatrons(*blend: Any, kind: Any = GPTDataset, samples: int = SAMPLES, **settings: Any) -> Any:
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


CORPUS = [40, 7, 90, 33, 64, 12, 51, 20] * 6


@pytest.fixture
def corpora(tmp_path: Path) -> tuple[str, str]:
    return write(tmp_path / "a", CORPUS), write(tmp_path / "b", CORPUS[::-1], 2)


def blended(corpora: tuple[str, str], **settings: Any) -> Any:
    return megatrons(0.7, corpora[0], 0.3, corpora[1], **settings)


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
    "weights": (lambda both: megatrons(0.6, both[0], 0.4, both[1]), r"blend was 0\.7, 0\.3 and is 0\.6, 0\.4"),
    "no weights": (lambda both: megatrons(*both), r"blend was 0\.7, 0\.3 and is 0\.\d+, 0\.\d+"),
    "seed": (lambda both: blended(both, random_seed=2), "--seed was 1 and is 2"),
    "context": (lambda both: blended(both, sequence_length=32), "--seq-length was 64 and is 32"),
    "split": (lambda both: blended(both, split="90,10,0"), r"corpus 1 was 48 sequences, 38 from 0 .* is 48 .*43"),
    "one corpus": (lambda both: megatrons(both[0]), r"corpus 2 was 48 sequences.* and is nothing"),
    "order of corpora": (lambda both: megatrons(0.7, both[1], 0.3, both[0]), r"corpus 1 was .*/a\) and is .*/b\)"),
    "tokens": (other_tokens, r"corpus 2 was 48 sequences"),
    "length": (lambda both: blended((both[0], write(Path(both[1]), CORPUS[1:]))), r"and is 47 sequences"),
    "mock": (lambda _: megatrons(kind=MockGPTDataset), "data set was GPTDataset and is MockGPTDataset"),
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
        return identity(megatrons(tmp_path / name, kind=Lines, context_parallel_size=ranks))

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
    with one_process():
        assert script_data.agreed(dataset, ARGS) == DataIdentity()
        assert told in caplog.text
        own = Own([(0,)])
        assert script_data.agreed(own, ARGS) == identity(own)


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
