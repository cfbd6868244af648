"""Length distributions, files of lengths, histograms."""

import json
from pathlib import Path

import numpy as np
import pytest

from megatron_balance.errors import ConfigError
from megatron_balance.workloads.documents import open_stream
from megatron_balance.workloads.idx import CorpusWriter
from megatron_balance.workloads.lengths import BIN_EDGES, DATASETS, SHARES, Bar, corpus_lengths, draw, histogram, quantiles, read_lengths


@pytest.mark.parametrize("name", DATASETS)
def test_every_batch_is_full_and_deterministic(name: str) -> None:
    batches = draw(name, 65536, 5, seed=3)
    assert len(batches) == 5
    assert [sum(batch) for batch in batches] == [65536] * 5
    assert min(min(batch) for batch in batches) >= 1
    assert draw(name, 65536, 5, seed=3) == batches
    assert draw(name, 65536, 5, seed=4) != batches


def test_fewer_batches_are_the_first_of_more() -> None:
    assert draw("github", 131072, 2, seed=3) == draw("github", 131072, 5, seed=3)[:2]


def test_the_draws_are_those_that_published_planners_were_measured_on() -> None:
    # First batches of arxiv at 64k tokens in the comparison of published planners, seed [20261120, data set, context].
    assert draw("arxiv", 65536, 3, seed=(20261120, 0, 0)) == [
        (23962, 18839, 14322, 8413),
        (49872, 1433, 14231),
        (11220, 28776, 19836, 5386, 318),
    ]


@pytest.mark.parametrize("name", SHARES)
def test_shares_of_the_bins_are_those_of_the_table(name: str) -> None:
    # Documents that were cut to fill a batch are left out: a batch far larger than any document has one.
    documents = [length for batch in draw(name, 1 << 24, 8, seed=5) for length in batch[:-1]]
    found = np.histogram(documents, bins=[edge + 1 for edge in BIN_EDGES])[0] / len(documents)
    expected = np.array(SHARES[name]) / sum(SHARES[name])
    assert np.abs(found - expected).max() < 0.02
    assert found.sum() == pytest.approx(1)


def test_the_lognormal_has_its_median() -> None:
    documents = [length for batch in draw("lognormal", 1 << 22, 4, seed=5) for length in batch[:-1]]
    assert np.median(documents) == pytest.approx(1500, rel=0.1)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("wikipedia", 100, 1), "--dataset 'wikipedia' is not known; choose one of arxiv, github, prolong64k, lognormal"),
        (("arxiv", 0, 1), "--tokens 0 --batches 1: both must be at least 1"),
        (("arxiv", 10, 0), "--tokens 10 --batches 0"),
    ],
)
def test_draws_that_cannot_be_are_refused(arguments: tuple[str, int, int], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        draw(*arguments, seed=1)


def test_a_negative_seed_is_refused() -> None:
    with pytest.raises(ConfigError, match="--seed -1: must be at least 0"):
        draw("arxiv", 100, 1, seed=-1)


@pytest.mark.parametrize(
    ("content", "batches"),
    [("[4096, 512]", [(4096, 512)]), ("[[4096, 512], [1]]", [(4096, 512), (1,)]), ("[7]", [(7,)]), ("[[7]]", [(7,)])],
)
def test_lengths_are_read_from_a_file(tmp_path: Path, content: str, batches: list[tuple[int, ...]]) -> None:
    path = tmp_path / "lengths.json"
    path.write_text(content)
    assert read_lengths(path) == batches


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("", "not JSON"),
        ("[1,", "not JSON"),
        ("\xff", "not JSON"),
        ("{}", "holds an object; expected"),
        ("[]", "holds an empty list; expected"),
        ("12", "holds 12; expected"),
        ("null", "holds null; expected"),
        ("[[1], []]", "batch 1: holds an empty list"),
        ("[[1], 2]", "batch 1: holds 2; expected"),
        ("[2, [1]]", "length 1 is a list; a length is a whole number"),
        ("[4, 0]", "length 1 is 0; a length is a whole number of tokens, at least 1"),
        ("[[4], [3, -2]]", "batch 1: length 1 is -2"),
        ("[4.0]", "length 0 is 4.0"),
        ("[true]", "length 0 is true"),
        ('["4"]', 'length 0 is "4"'),
        ("[NaN]", "length 0 is NaN"),
    ],
)
def test_bad_files_of_lengths_are_refused(tmp_path: Path, content: str, sentence: str) -> None:
    path = tmp_path / "lengths.json"
    path.write_text(content, encoding="latin-1")
    with pytest.raises(ConfigError, match=r"lengths\.json: ") as caught:
        read_lengths(path)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_of_lengths_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.json: No such file"):
        read_lengths(tmp_path / "none.json")


def test_lengths_of_a_corpus_are_those_that_training_meets(tmp_path: Path) -> None:
    with CorpusWriter(tmp_path / "c") as writer:
        for length in (5, 1, 12, 3, 8):
            writer.add_document(np.ones(length, dtype=np.int64))
    stream = open_stream(str(tmp_path / "c"), 8, 3)
    assert corpus_lengths(str(tmp_path / "c"), 8, 2, 3, seed=3) == [
        stream.lengths_between(0, 2),
        stream.lengths_between(2, 4),
        stream.lengths_between(4, 6),
    ]


def test_bars_double_in_width_and_keep_empty_ones() -> None:
    assert histogram(np.array([1, 2, 3, 0, 9, 15])) == [Bar(1, 1, 1, 1), Bar(2, 3, 2, 5), Bar(4, 7, 0, 0), Bar(8, 15, 2, 24)]
    assert histogram(np.array([0])) == []


def test_quantiles_are_lengths_that_occur() -> None:
    found = quantiles(np.array([10, 1, 4, 7]))
    assert found == {"min": 1, "p10": 1, "median": 4, "p90": 7, "p99": 7, "max": 10, "mean": 6}
    assert json.dumps(found)
