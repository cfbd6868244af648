"""Cutting, packing and numbering documents: small cases written out by hand."""

import logging
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from megatron_balance.errors import ConfigError, DataError
from megatron_balance.planning.choice import Run
from megatron_balance.workloads import documents
from megatron_balance.workloads.idx import CorpusWriter, read_index


def array(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def test_best_fit_takes_the_fullest_sample_that_holds_a_piece_and_closes_it_where_too_many_are_open() -> None:
    # 5 and 3 make the first full one, 4 and 4 the next; 1 joins 6.
    packed = documents._pack_best_fit(array(5, 4, 3, 6, 4, 1, 7), 8)
    samples = [packed.order[a:b].tolist() for a, b in pairwise(packed.bounds.tolist())]
    assert samples == [[0, 2], [1, 4], [3, 5], [6]]
    lengths = array(*[6] * documents.WINDOW, 7, 2, 1)
    packed = documents._pack_best_fit(lengths, 8)
    first = packed.order[: packed.bounds[1]].tolist()
    assert first == [documents.WINDOW]  # 7 was the fullest when it came, so the 1 found only samples of 6
    assert packed.num_samples == documents.WINDOW + 1


def test_best_fit_is_the_default_leaves_less_empty_and_loses_nothing() -> None:
    rng = np.random.Generator(np.random.PCG64(5))
    lengths = rng.integers(1, 9000, 2000)
    next_fit, best_fit = (
        documents.DocumentStream(lengths, 8192, 3, filling=filling) for filling in ("next_fit", "best_fit")
    )
    empty = [1 - each.num_tokens / (8192 * each.num_samples(0)) for each in (next_fit, best_fit)]
    assert empty[0] > 0.1
    assert empty[1] < 0.05
    assert next_fit.fingerprint() != best_fit.fingerprint()
    pieces = [piece for index in range(best_fit.num_samples(0)) for piece in best_fit.sample(index)]
    assert sum(piece.stop - piece.start for piece in pieces) == best_fit.num_tokens
    assert len(set(pieces)) == len(pieces) == best_fit.num_pieces
    assert max(sum(best_fit.lengths_of(index)) for index in range(best_fit.num_samples(0))) <= 8192
    assert Run.model_fields["sample_filling"].default == "best_fit"
    assert documents.DocumentStream(lengths, 8192, 3).fingerprint() == best_fit.fingerprint()


def test_an_order_is_drawn_from_seed_and_epoch_and_from_nothing_else() -> None:
    assert sorted(documents.shuffled(50, 7, 3).tolist()) == list(range(50))
    orders = {tuple(documents.shuffled(50, seed, epoch).tolist()) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9
    # Recorded once: a run that resumes after an upgrade must go on with the same documents.
    assert documents.shuffled(10, 1234, 0).tolist() == [5, 6, 3, 9, 7, 4, 1, 2, 8, 0]


def test_samples_may_be_asked_for_in_any_order_of_chosen_documents_and_of_an_index_alone(tmp_path: Path) -> None:
    forward, backward = (documents.DocumentStream(array(5, 1, 12, 3, 8), 8, 3) for _ in range(2))
    expected = [forward.sample(index) for index in range(40)]
    assert [backward.sample(index) for index in reversed(range(40))] == expected[::-1]
    stream = documents.DocumentStream(array(5, 1, 12, 3, 8), 8, 3, documents=range(1, 3))
    assert {piece.document for index in range(10) for piece in stream.sample(index)} == {1, 2}
    assert (stream.num_tokens, stream.num_pieces) == (13, 3)
    with CorpusWriter(tmp_path / "c") as writer:
        for length in (5, 1, 12, 3, 8):
            writer.add_document(np.ones(length, dtype=np.int64))
    stream = documents.DocumentStream(documents.Corpus(read_index(str(tmp_path / "c"))), 8, 3)
    assert [stream.sample(index) for index in range(12)] == expected[:12]
    assert stream.fingerprint() == forward.fingerprint()


def test_the_fingerprint_sees_every_input() -> None:
    def fingerprint(*given: object, **more: object) -> str:
        return documents.DocumentStream(*given, **more).fingerprint()  # pyright: ignore[reportArgumentType]

    usual = array(5, 12)
    others = [(array(5, 13), 8, 3), (usual, 9, 3), (usual, 8, 4), (usual, 8, 3, "truncate")]
    ranged = fingerprint(usual, 8, 3, documents=range(1))
    assert len({fingerprint(usual, 8, 3), ranged, *(fingerprint(*each) for each in others)}) == 6


@pytest.mark.parametrize(
    ("arguments", "error", "sentence"),
    [
        ({"seq_length": 0}, ConfigError, "seq_length 0"),
        ({"seed": -1}, ConfigError, "seed -1"),
        ({"documents": range(1, 4)}, ConfigError, "documents range"),
        ({"documents": range(0)}, DataError, "documents 0 to 0 of the corpus hold no token"),
        ({"corpus": array(0, 0, 0)}, DataError, "hold no token"),
    ],
)
def test_what_cannot_be_is_refused(arguments: dict[str, object], error: type[Exception], sentence: str) -> None:
    usual: dict[str, object] = {"corpus": array(3, 4, 5), "seq_length": 8, "seed": 1}
    with pytest.raises(error, match=sentence):
        documents.DocumentStream(**(usual | arguments))  # pyright: ignore[reportArgumentType]
    with pytest.raises(IndexError, match="sample -1"):
        documents.DocumentStream(array(3), 8, 1).sample(-1)


# Blends: shares of samples by weight, spread evenly, by number alone


@pytest.mark.parametrize(
    ("weights", "period", "counts"),
    [
        ((3.0, 1.0), 8, (6, 2)),
        ((0.5, 0.3, 0.2), 10, (5, 3, 2)),
        ((1.0, 1.0, 1.0), 10, (4, 3, 3)),
        ((1.0, 1e-9), 10, (9, 1)),
        ((1.0, 1e-9, 1e-9), 10, (8, 1, 1)),
        ((7.0,), 5, (5,)),
    ],
)
def test_shares_are_in_proportion_and_none_is_left_out(
    weights: tuple[float, ...], period: int, counts: tuple[int, ...]
) -> None:
    assert documents.shares(weights, period) == counts
    for wrong in ((), (0.0, 1.0), (-1.0, 2.0), (float("nan"),), (float("inf"), 1.0)):
        with pytest.raises(ConfigError, match=r"weights of a blend .*: expected numbers above 0"):
            documents.shares(wrong)


def test_samples_are_spread_evenly_and_each_corpus_goes_on_over_periods() -> None:
    blend = documents.Blend((6, 3, 1))
    dealt = [blend.locate(index) for index in range(40)]
    assert Counter(corpus for corpus, _ in dealt) == {0: 24, 1: 12, 2: 4}
    for corpus in range(3):
        assert [at for of, at in dealt if of == corpus] == list(range(Counter(of for of, _ in dealt)[corpus]))
    assert all(2 <= sum(corpus == 0 for corpus, _ in dealt[at : at + 4]) <= 3 for at in range(37))
    with pytest.raises(IndexError):
        blend.locate(-1)


# Arrays that one process computes and all map


def test_of_several_that_ask_at_once_one_computes(tmp_path: Path) -> None:
    # Threads stand for processes: each opens the lock for itself.
    def slow() -> np.ndarray:
        with (tmp_path / "computed").open("a") as stream:
            stream.write("x")
        time.sleep(0.05)
        return np.arange(5)

    def ask(_: int) -> list[int]:
        return documents.OrderCache(tmp_path / "kept", "key").get("order", slow).tolist()

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(ask, range(4))) == [[0, 1, 2, 3, 4]] * 4
    assert (tmp_path / "computed").read_text() == "x"


def test_other_settings_have_other_files_or_none_in_a_folder_that_cannot_be_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = documents.OrderCache(tmp_path, "key")
    made = [cache.under("seed", seed).get("order", lambda seed=seed: np.array([seed])) for seed in (1, 2)]
    assert [array.tolist() for array in made] == [[1], [2]]
    assert isinstance(made[0], np.memmap)
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        assert documents.OrderCache(tmp_path / "file", "key").get("order", lambda: np.arange(2)).tolist() == [0, 1]
    assert "cannot be written (File exists), so every rank sorts" in caplog.text


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :]


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "cut": lambda data: data[:-8],
    "empty": lambda _: b"",
    "quote of the header": lambda data: flipped(data, data.index(b"'descr")),
    "shape": lambda data: data.replace(b"(5,)", b"(4,)"),
    "a document": lambda data: flipped(data, -12),
    "checksum": lambda data: flipped(data, -1),
    "grown": lambda data: data + b"0",
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_file_is_computed_again(
    damage: Callable[[bytes], bytes], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = documents.OrderCache(tmp_path, "key")
    cache.get("order", lambda: np.arange(5))
    (file,) = tmp_path.glob("*.npy")
    whole = file.read_bytes()
    assert damage(whole) != whole
    file.write_bytes(damage(whole))
    with caplog.at_level(logging.WARNING):
        assert cache.get("order", lambda: np.arange(5)).tolist() == [0, 1, 2, 3, 4]
    assert "it is computed again" in caplog.text
    assert documents.OrderCache(tmp_path, "key").get("order", lambda: np.zeros(1)).tolist() == [0, 1, 2, 3, 4]
