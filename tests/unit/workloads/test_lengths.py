"""Length distributions, files of lengths, histograms."""

import gzip
import json
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest

from megatron_balance.errors import ConfigError, DataError
from megatron_balance.workloads import distributions
from megatron_balance.workloads.lengths import DATASETS, document_lengths, draw, histogram, quantiles, read_lengths


@pytest.mark.parametrize("name", DATASETS)
def test_every_batch_is_full_and_deterministic(name: str) -> None:
    batches = draw(name, 65536, 5, seed=3)
    assert len(batches) == 5
    assert [sum(batch) for batch in batches] == [65536] * 5
    assert min(min(batch) for batch in batches) >= 1
    assert draw(name, 65536, 5, seed=3) == batches
    assert draw(name, 65536, 5, seed=4) != batches


def test_the_draws_are_those_that_published_planners_were_measured_on() -> None:
    # First batches of arxiv at 64k tokens in the comparison of published planners, seed [20261120,
    # data set, context].
    first = [(23962, 18839, 14322, 8413), (49872, 1433, 14231), (11220, 28776, 19836, 5386, 318)]
    assert draw("arxiv", 65536, 3, seed=(20261120, 0, 0)) == first
    assert draw("arxiv", 65536, 2, seed=(20261120, 0, 0)) == first[:2], "fewer batches are the first of more"


def documents_of(name: str, tokens: int = 1 << 24, batches: int = 4) -> np.ndarray:
    # Documents that were cut to fill a batch are left out: a batch far larger than any document has
    # one.
    return np.array([length for batch in draw(name, tokens, batches, seed=5) for length in batch[:-1]])


@pytest.mark.parametrize("name", ["arxiv", "github", "prolong64k", "wlb", "pretrain", "chatqa2"])
def test_shares_of_the_bins_are_those_of_the_table(name: str) -> None:
    tokens = 1 << (26 if name == "chatqa2" else 24)  # whose documents are long
    bins, documents = distributions.DISTRIBUTIONS[name], documents_of(name, tokens, batches=8)
    assert isinstance(bins, distributions.Bins)
    found = np.histogram(documents, bins=[edge + 1 for edge in bins.edges])[0] / len(documents)
    expected = np.array(bins.shares) / sum(bins.shares)
    assert np.abs(found - expected).max() < 0.02
    assert found.sum() == pytest.approx(1)


@pytest.mark.parametrize(("name", "mean"), [("commoncrawl", 620), ("github-code", 2800)])
def test_lognormals_have_the_mean_that_their_cards_give(name: str, mean: float) -> None:
    distribution = distributions.DISTRIBUTIONS[name]
    assert isinstance(distribution, distributions.LogNormal)
    assert distribution.mean == pytest.approx(mean)
    assert documents_of(name).mean() == pytest.approx(mean, rel=0.05)
    assert np.median(documents_of("lognormal", 1 << 22)) == pytest.approx(1500, rel=0.1)


def test_wlb_wlb_skew_and_pretrain_are_as_skewed_as_their_papers_say() -> None:
    # WLB-LLM, section 2.2: most are short, the longest fill the window, and those below half of it
    # hold over 75 % of the tokens.
    lengths = documents_of("wlb-skew", 1 << 25)
    assert np.median(lengths) == pytest.approx(300 * 2 ** (1 / 1.05), rel=0.03)
    assert lengths.max() == 128 * 1024
    assert 0.75 < lengths[lengths < 64 * 1024].sum() / lengths.sum() < 0.85
    # Section 2.2: documents below half the context window hold over 75 % of the tokens; the longest
    # fill it.
    documents = documents_of("wlb")
    assert documents[documents < 65536].sum() / documents.sum() > 0.75
    assert 120_000 < documents.max() <= 131072
    assert np.median(documents) < 4096
    # Half of the short ones and four copies of the long: 0.53 % x 4 against 99.47 % / 2.
    share = (documents_of("pretrain") > 65536).mean()
    assert share == pytest.approx(0.0053 * 4 / (0.0053 * 4 + 0.9947 / 2), rel=0.2)


def test_commoncrawls_longest_pages_are_hydraulis_and_prolongs_shares_of_tokens_the_recipes() -> None:
    # Appendix A.1: 15K to 32K over 30 iterations, pages cut at 32K.
    longest = [max(batch) for batch in draw("commoncrawl", 1_600_000, 30, seed=1)]
    assert 15_000 < np.median(longest) < 32_000
    documents = documents_of("prolong")
    shares = {length: (documents == length).sum() * length / documents.sum() for length in (65536, 524288)}
    assert shares == pytest.approx({65536: 0.4, 524288: 0.2}, abs=0.12)


def test_documents_of_a_file_come_once_each_in_an_order_of_the_seed(tmp_path: Path) -> None:
    path = tmp_path / "lengths.jsonl"
    path.write_text("\n".join(str(length) for length in range(1, 11)))
    first, second = draw(str(path), 55, 2, seed=3)
    assert sorted(first) == sorted(second) == list(range(1, 11))
    assert first != second
    assert draw(str(path), 55, 2, seed=3) == [first, second]
    assert draw(str(path), 55, 1, seed=4) != [first]
    assert [sum(batch) for batch in draw(str(path), 7, 20, seed=3)] == [7] * 20


@pytest.mark.parametrize(
    ("arguments", "seed", "sentence"),
    [
        (("wikipedia", 100, 1), 1, "--dataset 'wikipedia' is not known; choose one of arxiv, github, prolong64k"),
        (("arxiv", None, 1), 1, "--dataset arxiv needs --tokens N"),
        (("g1b1i256f1s0", 100, 1), 1, "--tokens 100: the data codes of --dataset g1b1i256f1s0 say how many tokens a b"),
        (("arxiv", 0, 1), 1, "--tokens 0 --batches 1: both must be at least 1"),
        (("arxiv", 10, 0), 1, "--tokens 10 --batches 0"),
        (("arxiv", 100, 1), -1, "--seed -1: must be at least 0"),
    ],
)
def test_draws_that_cannot_be_are_refused(arguments: tuple[str, int | None, int], seed: int, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        draw(*arguments, seed=seed)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("", "not JSON"),
        ("[1,", "not JSON"),
        ("\xff", "not UTF-8 text"),
        ("{}", "holds an object; expected"),
        ("[]", "holds an empty list; expected"),
        ("null", "no column of lengths; it has null"),
        ("4096 5x2\n7", "no column of lengths; it has 4096 5x2"),
        (",\n,,", "no lengths in any of its lines"),
        ("4096\n-1", 'length 1 is "-1"'),
        ("4096\n1.3k", 'length 1 is "1.3k"'),
        ("a,length\n1,2\n3", "line 3 has 1 columns, the first line has 2"),
        ("a,length\n1,long", 'length 0 is "long"'),
        ("a,length\n", "holds an empty list; expected"),
        ("length\n" + "9" * 5000, 'length 0 is "999'),
        ('a,length\n"' + "x" * 140_000, "not CSV: field larger than field limit"),
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
    with pytest.raises(ConfigError, match=r"none\.json: No such file"):
        read_lengths(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("name", "text", "batches"),
    [
        ("lengths.json", "[4096, 512]", [(4096, 512)]),
        ("batches.json", "[[4096, 512], [1]]", [(4096, 512), (1,)]),
        ("one.json", "[7]", [(7,)]),
        ("one batch.json", "[[7]]", [(7,)]),
        ("one a line.txt", "4096\n512\n\n1\n", [(4096, 512, 1)]),
        ("one.txt", "12", [(12,)]),
        ("short.txt", "128k\n1M 1.5k\n77\n", [(131072,), (1 << 20, 1536), (77,)]),
        ("short.csv", "id,length\na,128k\n", [(131072,)]),
        ("a batch a line.txt", "4096, 512\n1 2 3\n", [(4096, 512), (1, 2, 3)]),
        ("lengths.csv", "id,length\na,7\nb,9\n", [(7, 9)]),
        ("batches.tsv", "batch\tnum_tokens\n0\t7\n1\t9\n0\t8\n", [(7, 8), (9,)]),
    ],
)
def test_lengths_come_from_lines_and_tables_compressed_or_not(
    tmp_path: Path, name: str, text: str, batches: list[tuple[int, ...]]
) -> None:
    (tmp_path / name).write_text(text)
    (tmp_path / f"{name}.gz").write_bytes(gzip.compress(text.encode()))
    assert read_lengths(tmp_path / name) == read_lengths(tmp_path / f"{name}.gz") == batches


def test_compressed_files_are_read_by_whatever_module_there_is_and_refused_if_they_are_something_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = gzip.compress(b"[" + b"4096, " * 999 + b"1]")
    for name, content, sentence in [
        ("cut.gz", whole[:-20], "not what its name says it is compressed as"),
        ("plain.gz", b"[1]", "not what its name says it is compressed as"),
        ("lengths.zst", b"", "needs Python 3.14 or the package zstandard"),
    ]:
        monkeypatch.setattr("megatron_balance.files.ZSTD", ("no_such_module",))
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ConfigError, match=sentence):
            read_lengths(tmp_path / name)
        with pytest.raises((ConfigError, DataError), match=sentence):
            document_lengths(str(tmp_path / name))
    # `gzip` stands in: all of these modules have the same `open`.
    monkeypatch.setattr("megatron_balance.files.ZSTD", ("no_such_module", "gzip"))
    (tmp_path / "lengths.zst").write_bytes(gzip.compress(b"4096\n7"))
    assert read_lengths(tmp_path / "lengths.zst") == [(4096, 7)]


def test_documents_of_a_table_are_drawn_and_lines_without_an_end_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = tmp_path / "documents.csv.gz"
    table.write_bytes(gzip.compress(b"name,num_tokens\na,7\nb,0\nc,9\n"))
    assert document_lengths(str(table)).tolist() == [7, 9]
    lines = tmp_path / "documents.csv"
    lines.write_text("7\n9\n")
    assert document_lengths(str(lines)).tolist() == [7, 9]
    table.write_bytes(gzip.compress(b"name,num_tokens\na,7\nb\n"))
    with pytest.raises(DataError, match="gz:3: 1 columns, the first line has 2"):
        document_lengths(str(table))
    for text, sentence in [
        ("", "holds no document with tokens"),
        ("name,length\na,1\nb,\u00b2", r"csv:3: length: expected a whole number of tokens, got"),
        ('name,length\na,"' + "x" * 140_000, "not CSV: field larger than field limit"),
    ]:
        lines.write_text(text)
        with pytest.raises(DataError, match=sentence):
            document_lengths(str(lines))
    monkeypatch.setattr("megatron_balance.workloads.lengths.LONGEST_LINE", 2**17)
    path = tmp_path / "blanks.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"length": 4}' + b" " * 2**20 + b"\n"))
    with pytest.raises(DataError, match="a line of more than 131072 characters"):
        document_lengths(str(path))


def test_bars_double_in_width_and_keep_empty_ones_and_quantiles_are_lengths_that_occur() -> None:
    bars = [(1, 1, 1, 1), (2, 3, 2, 5), (4, 7, 0, 0), (8, 15, 2, 24)]
    found = histogram(np.array([1, 2, 3, 0, 9, 15]))
    assert found == [dict(zip(("low", "high", "documents", "tokens"), bar, strict=True)) for bar in bars]
    assert histogram(np.array([0])) == []
    found = quantiles(np.array([10, 1, 4, 7]))
    assert found == {"min": 1, "p10": 1, "median": 4, "p90": 7, "p99": 7, "max": 10, "mean": 6}
    assert json.dumps(found)


# KnapFormer's data codes: lengths and imbalance as its paper gives them.


@pytest.mark.parametrize(
    ("code", "visual", "total"),
    [  # Figure 3: visual tokens of a sample, tokens of a GPU with 196 of text each
        ("g8b4i256f1s0", 256, 1808),
        ("g2b5i512f1s0", 1024, 6100),
        ("g2b5i1024f1s0", 4096, 21460),
        ("g4b1i2048f1s0", 16384, 16580),
        ("g1b10i256f4s0", 1024, 12200),
        ("g3b1i512f4s0", 4096, 4292),
        ("g8b2i256f85s1", 6400, 13192),
    ],
)
def test_tokens_of_a_gpu_are_those_of_figure_3(code: str, visual: int, total: int) -> None:
    (parsed,) = distributions.parse_codes(code)
    assert parsed.visual_tokens == visual
    drawn = [sum(gpu) for batch in distributions.draw_by_gpu(code, 400, seed=2) for gpu in batch]
    assert fmean(drawn) == pytest.approx(total, rel=0.01)


def test_samples_of_a_gpu_share_their_aspect_and_have_text_of_their_own() -> None:
    for batch in distributions.draw_by_gpu("g4b6i1024f1s0", 20, seed=2):
        assert len(batch) == 4
        for gpu in batch:
            assert len(gpu) == 6
            assert max(gpu) - min(gpu) <= 392
            assert round(0.96 * 4096) <= min(gpu)
            assert max(gpu) <= round(1.04 * 4096) + 392


def test_streams_take_their_gpus_in_order_and_say_themselves_how_much_a_batch_holds() -> None:
    assert distributions.parse_codes("g2b3i256f1s0,g1b1i512f85s1") == (
        distributions._DataCode(2, 3, 256, 1, False),
        distributions._DataCode(1, 1, 512, 85, True),
    )
    (batch,) = distributions.draw_by_gpu("g2b3i256f1s0,g1b1i512f85s1", 1, seed=0)
    assert [len(gpu) for gpu in batch] == [3, 3, 1]
    batches = draw("g2b3i256f1s0,g1b1i512f1s0", None, 2, seed=3)
    assert [len(batch) for batch in batches] == [7, 7]
    again, others = (draw("g2b3i256f1s0,g1b1i512f1s0", None, 2, seed=seed) for seed in (3, 4))
    assert again == batches != others


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("g8b4i256", "expected g{GPUs}b{samples}i{pixels}f{frames}s{0|1}, such as g8b4i256f1s0"),
        ("g8b4i256f1s2", "expected g{GPUs}"),
        ("g0b4i256f1s0", "at least 1"),
        ("g1b4i250f1s0", "a multiple of 16"),
        ("g1b4i256f84s1", "a multiple of 17"),
        ("g1b4i256f1s0,", "data code ''"),
    ],
)
def test_codes_that_cannot_be_are_refused(text: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        distributions.parse_codes(text)
    assert sentence in str(caught.value)
    assert not distributions.is_data_code("github")
    assert distributions.is_data_code("g8b4i256")
