"""The document data set on Megatron's own reader, builder, samplers and splits."""

import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from megatron.core.datasets.blended_megatron_dataset_config import (
    convert_split_vector_to_split_matrix,
    parse_and_normalize_split,
)
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
from megatron.core.datasets.utils import Split
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.training import global_vars
from megatron.training.datasets.data_samplers import MegatronPretrainingSampler

from megatron_balance.analysis.shards import Base, Parameter, ParameterTable, Shard
from megatron_balance.errors import ConfigError, DataError
from megatron_balance.ir.strategy import Scheme
from megatron_balance.megatron import data, session
from megatron_balance.training.tokens import from_bits
from megatron_balance.workloads.documents import Corpus, CutPolicy, DocumentStream, split_documents
from megatron_balance.workloads.idx import CODES, CorpusWriter, bin_path, idx_path, read_index
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
    usual: dict[str, object] = {
        "data_path": [prefix],
        "data_args_path": None,
        "train_data_path": None,
        "valid_data_path": None,
        "test_data_path": None,
        "per_split_data_args_path": None,
        "split": "100,0,0",
        "seed": 7,
        "dataloader_type": "single",
        "eval_iters": 0,
        "padded_vocab_size": 2000,
        "mmap_bin_files": True,
        "seq_length": SEQ_LENGTH,
    }
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


def test_unpacking_a_collated_batch_gives_its_sequences_in_order(prefix: str) -> None:
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


def test_a_batch_of_another_data_set_is_refused() -> None:
    batch = {name: torch.ones(2, 4, dtype=torch.int64) for name in ("tokens", "labels", "loss_mask", "position_ids")}
    with pytest.raises(DataError, match="does not open with position 0"):
        data.unpack(batch)


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

    for name in ("cut", "shuffled", "pack_best_fit"):
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
