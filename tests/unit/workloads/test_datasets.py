"""Lengths of documents from files: corpora, JSONL, Parquet and Arrow."""

import gzip
import importlib
import json
import logging
import os
import resource
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_balance.errors import ConfigError, DataError
from megatron_balance.workloads import idx, lengths
from megatron_balance.workloads.lengths import document_lengths, is_path
from tests.support.cli import CommandLine


def lines(path: Path, *rows: Any) -> str:
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n", encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([{"length": 3}, {"length": 4}], [3, 4]),
        ([{"text": "x", "num_tokens": 7}, {"text": "y", "num_tokens": 9}], [7, 9]),
        ([{"input_ids": [1, 2, 3]}, {"input_ids": []}, {"input_ids": [4]}], [3, 1]),
        ([5, 6, 0, 7], [5, 6, 7]),
        ([[4, 8], [2]], [4, 8, 2]),
    ],
)
def test_jsonl_counts_tokens_by_the_column_it_has_or_that_is_named(
    tmp_path: Path, rows: list[Any], expected: list[int]
) -> None:
    assert document_lengths(lines(tmp_path / "d.jsonl", *rows)).tolist() == expected
    path = lines(tmp_path / "d.jsonl", {"length": 3, "mine": 30})
    assert document_lengths(f"{path}#mine").tolist() == [30]


def test_text_is_estimated_by_its_bytes_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = lines(tmp_path / "d.jsonl", {"id": 1, "text": "abcdefgh"}, {"id": 2, "text": "äöü"}, {"id": 3, "text": ""})
    with caplog.at_level(logging.WARNING):
        assert document_lengths(path).tolist() == [2, 2]
    assert len(caplog.records) == 1
    assert "text is text; its tokens are estimated at 4 bytes each" in caplog.text


@pytest.mark.parametrize(
    ("text", "error", "sentence"),
    [
        ('{"a": 1}\n', ConfigError, "no column to count tokens by; columns: a. Name one: PATH#COLUMN"),
        ('{"length": 1}\nx\n', DataError, ":2: not JSON"),
        ('{"length": 1}\n{"text": "x"}\n', DataError, ":2: no key 'length', which the first line has"),
        ('{"length": 1}\n{"length": -1}\n', DataError, ":2: length: expected a whole number of tokens, got -1"),
        ('{"length": 1}\n{"length": true}\n', DataError, ":2: length: expected a whole number of tokens, got true"),
        ('{"length": 1.5}\n', ConfigError, "column 'length' holds float; expected whole numbers, token ids or text"),
        ('{"text": "x"}\n{"text": 3}\n', DataError, ":2: text: expected str, got 3"),
        ("[1, true]\n", DataError, ":1: length 1: expected a whole number of tokens, got true"),
        ("", DataError, "holds no document with tokens"),
        ('{"length": 0}\n', DataError, "holds no document with tokens"),
    ],
)
def test_bad_jsonl_is_refused_by_line(tmp_path: Path, text: str, error: type[Exception], sentence: str) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text(text)
    with pytest.raises(error) as caught:
        document_lengths(str(path))
    assert sentence in str(caught.value)
    assert "d.jsonl" in str(caught.value)


def test_a_file_that_is_no_text_or_not_there_or_needs_pyarrow_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "d.jsonl"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match="not UTF-8 text"):
        document_lengths(str(path))
    with pytest.raises(ConfigError, match="no such file or folder; a corpus"):
        document_lengths(str(tmp_path / "none.jsonl"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"the folder holds no \.parquet or \.arrow file"):
        document_lengths(str(tmp_path / "empty"))
    with pytest.raises(ConfigError, match="no column 'b'; columns: a"):
        document_lengths(f"{lines(path, {'a': 1})}#b")

    def missing(name: str) -> Any:
        raise ImportError(name)

    (tmp_path / "d.parquet").write_bytes(b"PAR1")
    monkeypatch.setattr(lengths, "import_module", missing)
    with pytest.raises(ConfigError, match="reading Parquet and Arrow needs pyarrow: pip install pyarrow"):
        document_lengths(str(tmp_path / "d.parquet"))


def test_paths_are_told_from_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("here").mkdir()
    found = [is_path(name) for name in ("a/b", "c.idx", "d.jsonl#text", "e.parquet", "here", "arxiv", "nowhere")]
    assert found == [True, True, True, True, True, False, False]


def test_arrow_and_parquet_count_by_number_list_or_text(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pa = pytest.importorskip("pyarrow")
    parquet, ipc = importlib.import_module("pyarrow.parquet"), importlib.import_module("pyarrow.ipc")
    ids = pa.table({"id": [1, 2, 3], "input_ids": [[1, 2], [], [3]]})
    texts = pa.table({"text": ["abcdefgh", "x", None]})
    folder = tmp_path / "set" / "train"
    folder.mkdir(parents=True)
    parquet.write_table(pa.table({"length": pa.array([5, None, 7], pa.int32())}), tmp_path / "n.parquet")
    for number, new in enumerate((ipc.new_stream, ipc.new_file)):  # the first is as `datasets` saves
        with pa.OSFile(str(folder / f"data-{number}.arrow"), "wb") as sink, new(sink, ids.schema) as writer:
            writer.write_table(ids)
    parquet.write_table(texts, tmp_path / "t.parquet")
    assert document_lengths(str(tmp_path / "n.parquet")).tolist() == [5, 7]
    assert document_lengths(str(tmp_path / "set")).tolist() == [2, 1, 2, 1]
    assert document_lengths(str(tmp_path / "t.parquet")).tolist() == [2, 1]
    assert "estimated at 4 bytes each" in caplog.text
    with pytest.raises(ConfigError, match="no column 'x'; columns: length"):
        document_lengths(f"{tmp_path / 'n.parquet'}#x")
    (tmp_path / "bad.parquet").write_bytes(b"nothing like it")
    with pytest.raises(DataError, match=r"not a \.parquet file that pyarrow reads"):
        document_lengths(str(tmp_path / "bad.parquet"))


# Files to a corpus, and the verb `corpus`.


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    # Seven files: three documents, an empty one, a long one, another suffix, a hidden one.
    texts = {"b.py": "bb", "a.py": "a", "sub/c.py": "ccc", "sub/empty.py": "", "read.me": "no", ".hidden.py": "no"}
    texts["sub/long.py"] = "l" * 100
    for name, text in texts.items():
        path = tmp_path / "in" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "in"


def test_documents_are_bytes_and_an_end_of_document_token_in_files_as_readable_as_any(
    folder: Path, tmp_path: Path
) -> None:
    report = idx.build(str(tmp_path / "c"), idx.find_files([folder], ".py"), max_bytes=10)
    assert (report.num_documents, report.num_tokens) == (3, 9)
    assert (report.empty, report.too_large, report.beyond_limit) == (1, 1, 0)
    tokens = np.fromfile(idx.bin_path(f"{tmp_path}/c"), dtype=np.uint16).tolist()
    assert tokens == [*b"a", 256, *b"bb", 256, *b"ccc", 256]
    usual = os.stat(folder / "a.py").st_mode & 0o777
    for path in (idx.bin_path(f"{tmp_path}/c"), idx.idx_path(f"{tmp_path}/c")):
        assert path.stat().st_mode & 0o777 == usual
    # The limit counts documents, and not files that were skipped.
    report = idx.build(str(tmp_path / "l"), idx.find_files([folder], ".py"), max_bytes=10, limit=2)
    assert (report.num_documents, report.empty, report.too_large, report.beyond_limit) == (2, 0, 0, 3)


def test_files_come_in_a_fixed_order_each_once(folder: Path) -> None:
    # One that is named is taken whatever its suffix; of the standard library no installed package.
    found = idx.find_files([folder / "sub" / "c.py", folder, folder / "b.py"], ".py")
    assert [path.name for path in found] == ["c.py", "a.py", "b.py", "empty.py", "long.py"]
    named = [folder / "read.me", folder / ".hidden.py"]
    assert idx.find_files(named, ".py") == named
    files = idx.find_files([idx.STANDARD_LIBRARY], ".py", leave_out=idx.INSTALLED)
    assert idx.STANDARD_LIBRARY / "argparse.py" in files
    assert not any("site-packages" in path.parts for path in files)


def test_what_is_no_document_or_cannot_be_read_is_named_and_leaves_no_corpus(folder: Path, tmp_path: Path) -> None:
    for path, sentence in (
        (tmp_path / "none", "none: no such file or folder"),
        (Path("/dev/zero"), "/dev/zero: neither a file nor a folder"),  # a device without an end
    ):
        with pytest.raises(DataError, match=sentence):
            idx.find_files([path])
    with pytest.raises(DataError, match="no document left to write, 1 files were empty and 0 larger than --max-bytes"):
        idx.build(str(tmp_path / "c"), [folder / "sub" / "empty.py"])
    (folder / "gone.py").symlink_to(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"gone\.py: cannot be read \(No such file"):
        idx.build(str(tmp_path / "c"), idx.find_files([folder], ".py"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in"]


def test_build_prints_one_json_document_and_describe_the_same_or_what_is_readable(
    folder: Path, tmp_path: Path, run: CommandLine
) -> None:
    report = run.json("corpus build --suffix .py --max-bytes 10 --json", tmp_path / "c", folder)
    assert (report["num_documents"], report["num_tokens"]) == (3, 9)
    assert (report["token_type"], report.pop("end_of_document")) == ("uint16", 256)
    assert report.pop("skipped") == {"empty": 1, "too_large": 1, "beyond_limit": 0}
    assert report["lengths"] == {"min": 2, "p10": 2, "median": 3, "p90": 3, "p99": 3, "max": 4, "mean": 3}
    assert report["histogram"] == [
        {"low": 2, "high": 3, "documents": 2, "tokens": 5},
        {"low": 4, "high": 7, "documents": 1, "tokens": 4},
    ]
    assert run.json("corpus describe --json", tmp_path / "c.idx") == report
    lines = run.printed("corpus build --suffix .py", tmp_path / "all", folder).splitlines()
    assert lines[0] == f"{tmp_path}/all.bin/.idx: 4 documents, 110 tokens of uint16 (largest id 256)"
    assert lines[1] == "skipped: 1 empty files, 0 too large, 0 beyond --limit"
    assert lines[4].split() == ["2-3", "2", "4.5%", "#" * 40]
    assert lines[-1].split() == ["64-127", "1", "91.8%", "#" * 20]


def test_what_cannot_be_built_or_described_is_refused(folder: Path, tmp_path: Path, run: CommandLine) -> None:
    for words, sentence in (
        ("--max-bytes 0", "--max-bytes 0: must be at least 1"),
        ("--limit -1", "--limit -1: must be at least 1"),
        ("--suffix .rs", "no files ending in '.rs' in "),
        ("--key body", "--key goes with --tokenizer FILE, which is not given"),
        ("--max-byte 3", "unknown option '--max-byte'"),
    ):
        assert sentence in run.error(f"corpus build {words}", tmp_path / "c", folder)
    assert "name files or folders after PREFIX, or give --stdlib" in run.error("corpus build", tmp_path / "c")
    idx.build(str(tmp_path / "c"), idx.find_files([folder]))
    with idx.idx_path(f"{tmp_path}/c").open("ab") as stream:
        stream.write(b"junk")
    assert "too long" in run.error("corpus describe", tmp_path / "c")
    said = run.error("corpus describe --json", tmp_path / "none")
    assert said.startswith(f"{tmp_path}/none.bin: No such file or directory; a corpus is the two files")


def save_tokenizer(folder: Path) -> None:
    tokenizers: Any = pytest.importorskip("tokenizers")
    words = tokenizers.models.WordLevel({"a": 3, "b": 4, "[UNK]": 5, "</s>": 2}, unk_token="[UNK]")
    tokenizer = tokenizers.Tokenizer(words)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))


def test_jsonl_is_written_in_the_tokens_of_a_tokenizer(tmp_path: Path, run: CommandLine) -> None:
    save_tokenizer(tmp_path)
    (tmp_path / "lines.jsonl").write_text('{"text": "a b a"}\n\n{"text": ""}\n{"text": "b c"}\n{"text": "a"}\n')
    prefix, line = tmp_path / "corpus", [tmp_path / "lines.jsonl", "--tokenizer", tmp_path]
    told = run.json("corpus build", prefix, *line, "--limit", "2", "--json")
    assert (told["end_of_document"], told["skipped"]) == (2, {"empty": 1, "beyond_limit": 1})
    assert np.fromfile(f"{prefix}.bin", "uint16").tolist() == [3, 4, 3, 2, 4, 5, 2]
    assert "corpus.idx: another corpus is there already" in run.error("corpus build", prefix, *line)
    run.printed("corpus build --force", prefix, *line)
    assert np.fromfile(f"{prefix}.bin", "uint16").tolist() == [3, 4, 3, 2, 4, 5, 2, 3, 2]
    assert "line 1: no text under 'body'" in run.error("corpus build --force --key body", prefix, *line)
    assert "not a tokenizer.json" in run.error("corpus build", f"{prefix}2", *line[:2], line[0])


def test_compressed_jsonl_is_read_as_it_is(tmp_path: Path, run: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    # `gzip` stands in for the modules of Zstandard, which have the same `open`.
    save_tokenizer(tmp_path)
    whole = gzip.compress(b'{"text": "a b a"}\n{"text": "b"}\n')
    monkeypatch.setattr("megatron_balance.files.ZSTD", ("gzip",))
    for name in ("lines.jsonl.gz", "lines.jsonl.zst"):
        (tmp_path / name).write_bytes(whole)
        given = ("corpus build --json --tokenizer", tmp_path, tmp_path / name, tmp_path / name)
        run.json(*given)
        assert np.fromfile(tmp_path / f"{name}.bin", "uint16").tolist() == [3, 4, 3, 2, 4, 2]
        (tmp_path / name).write_bytes(whole[:-9])
        assert f"{name}: not what its name says it is compressed as" in run.error(*given)
    monkeypatch.setattr("megatron_balance.files.ZSTD", ())
    needs = "needs Python 3.14 or the package zstandard (pip install zstandard); or decompress"
    assert needs in run.error(*given)


def test_a_disk_that_fills_up_is_said_of_the_corpus_and_leaves_nothing(
    folder: Path, tmp_path: Path, run: CommandLine
) -> None:
    (folder / "large.txt").write_bytes(b"x" * 200_000)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        code, _, said = run("corpus build", tmp_path / "out/c", folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert code == 2
    assert f"error: {tmp_path}/out/c.bin: cannot be written (File too large)" in said
    assert not list((tmp_path / "out").iterdir())


# A damaged, foreign or empty corpus is found at opening, in one sentence that names the file.

DOCUMENTS = [[1, 2, 3, 256], [256], [7, 8, 256], [9, 9, 9, 9, 9, 256]]


def write(prefix: Path, documents: list[list[int]] = DOCUMENTS, dtype: str = "uint16") -> str:
    with idx.CorpusWriter(prefix, dtype) as writer:
        for tokens in documents:
            writer.add_document(np.array(tokens))
    return str(prefix)


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    return write(tmp_path / "corpus")


def test_what_was_written_is_read(corpus: str) -> None:
    index = idx.read_index(corpus)
    assert index.document_lengths.tolist() == [4, 1, 3, 6]
    assert index.first_token.tolist() == [0, 4, 5, 8, 14]
    assert index.first_sequence.tolist() == [0, 1, 2, 3, 4]
    assert (index.num_documents, index.num_tokens, str(index.dtype), index.largest_token()) == (4, 14, "uint16", 256)
    assert np.fromfile(idx.bin_path(corpus), dtype=np.uint16).tolist() == [each for one in DOCUMENTS for each in one]
    assert idx.read_index(f"{corpus}.idx").prefix == idx.read_index(f"{corpus}.bin").prefix == corpus
    for path in (corpus, f"{corpus}.idx"):
        assert document_lengths(path).tolist() == [4, 1, 3, 6]


def test_a_document_of_several_sequences_is_one_document(tmp_path: Path) -> None:
    lengths = np.array([3, 2, 4], "<i4")
    pointers = np.array([0, 6, 10], "<i8")
    boundaries = np.array([0, 2, 2, 3], "<i8")  # the second document is empty
    head = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, 3, 4)
    idx.idx_path(f"{tmp_path}/c").write_bytes(b"".join([head, *(a.tobytes() for a in (lengths, pointers, boundaries))]))
    idx.bin_path(f"{tmp_path}/c").write_bytes(bytes(18))
    index = idx.read_index(f"{tmp_path}/c")
    assert index.document_lengths.tolist() == [5, 0, 4]
    assert index.first_sequence.tolist() == [0, 2, 2, 3]


def put(at: int, form: str, value: int) -> Callable[[bytes], bytes]:
    new = struct.pack(form, value)
    return lambda data: data[:at] + new + data[at + len(new) :]


# .idx of DOCUMENTS: header 34, lengths at 34 (4 x 4), pointers at 50 (4 x 8), boundaries at 82 (5 x
# 8), 122 bytes in all. By case: the file, what becomes of its bytes, the sentence.
DAMAGE: dict[str, tuple[str, Callable[[bytes], bytes | None], str]] = {
    "no bin": ("bin", lambda _: None, r"corpus\.bin: No such file.*a corpus is the two files"),
    "no idx": ("idx", lambda _: None, r"corpus\.idx: No such file"),
    "idx cut in its header": ("idx", lambda data: data[:20], r"idx: truncated, it has 20 bytes"),
    "idx empty": ("idx", lambda _: b"", r"idx: truncated, it has 0 bytes"),
    "idx cut in its body": ("idx", lambda data: data[:100], r"100 bytes, but 4 sequences.*take 122;.*truncated"),
    "idx cut by one byte": ("idx", lambda data: data[:-1], r"121 bytes,.*take 122;.*truncated"),
    "idx too long": ("idx", lambda data: data + b"x", r"123 bytes,.*take 122;.*too long"),
    "multimodal": ("idx", lambda data: data + bytes(4), r"multimodal corpus, which is not supported"),
    "foreign": ("idx", lambda _: b"x" * 5000, r"not a Megatron index, it begins with b'xxxxxxxxx'"),
    "foreign and short": ("idx", lambda _: b"PK", r"not a Megatron index, it begins with b'PK'"),
    "other version": ("idx", put(9, "<Q", 2), r"index version 2, this package reads version 1"),
    "token type float": ("idx", put(17, "B", 6), r"code 6 is not a type of token ids; known are 1 \(uint8\)"),
    "absurd count": ("idx", put(18, "<Q", 2**60), r"truncated"),
    "negative length": ("idx", put(38, "<i", -1), r"sequence 1 has length -1"),
    "overlapping pointers": ("idx", put(58, "<q", 6), r"sequence 1 begins at byte 6, .* put it at 8"),
    "falling boundaries": ("idx", put(90, "<q", 3), r"document boundaries go from 0 to 4"),
    "boundaries end early": ("idx", put(114, "<q", 3), r"boundaries go from 0 to 3, expected .* 0 to 4"),
    "bin cut": ("bin", lambda data: data[:-2], r"bin: truncated, it has 26 bytes.* 14 tokens of uint16, 28 bytes"),
    "bin cut inside a token": ("bin", lambda data: data[:-1], r"bin: truncated, it has 27 bytes"),
    "bin empty": ("bin", lambda _: b"", r"bin: truncated, it has 0 bytes"),
    "bin too long": ("bin", lambda data: data + b"zz", r"bin: too long, it has 30 bytes"),
}


@pytest.mark.parametrize(("of", "damaged", "sentence"), DAMAGE.values(), ids=DAMAGE)
def test_damage_is_found_at_opening(
    corpus: str, of: str, damaged: Callable[[bytes], bytes | None], sentence: str
) -> None:
    path = Path(f"{corpus}.{of}")
    content = damaged(path.read_bytes())
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(DataError, match=sentence) as caught:
        idx.read_index(corpus)
    assert "\n" not in str(caught.value)


def test_a_folder_the_index_of_another_corpus_and_a_corpus_without_tokens_are_refused(
    tmp_path: Path, corpus: str
) -> None:
    idx.idx_path(corpus).unlink()
    idx.idx_path(corpus).mkdir()
    with pytest.raises(DataError, match=r"corpus\.idx: not a file"):
        idx.read_index(corpus)
    idx.idx_path(corpus).rmdir()
    other = write(tmp_path / "other", [[1, 256]])
    idx.idx_path(other).replace(idx.idx_path(corpus))
    with pytest.raises(DataError, match="do not belong together"):
        idx.read_index(corpus)
    idx.bin_path(f"{tmp_path}/c").write_bytes(b"")
    without_tokens: list[tuple[int, list[int]]] = [(0, [0]), (0, []), (2, [0, 2])]
    for sequences, boundaries in without_tokens:
        head = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, sequences, len(boundaries))
        idx.idx_path(f"{tmp_path}/c").write_bytes(head + bytes(12 * sequences) + np.array(boundaries, "<i8").tobytes())
        with pytest.raises(DataError, match=r"c\.idx: the corpus is empty"):
            idx.read_index(f"{tmp_path}/c")


def test_an_error_inside_the_block_leaves_no_file_and_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    def broken() -> None:
        with idx.CorpusWriter(tmp_path / "c") as writer:
            writer.add_document(np.array([1, 2]))
            raise RuntimeError("tokenizer failed")

    with pytest.raises(RuntimeError):
        broken()
    with pytest.raises(DataError, match="no documents were added"), idx.CorpusWriter(tmp_path / "c"):
        pass
    for tokens in (np.array([], dtype=np.int64), np.ones((2, 2), dtype=np.int64)):
        with pytest.raises(DataError, match="document 0 has shape"), idx.CorpusWriter(tmp_path / "c") as writer:
            writer.add_document(tokens)
    with pytest.raises(DataError, match="'float32' is not one Megatron knows; use one of uint8"):
        idx.CorpusWriter(tmp_path / "c", "float32")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"file/c\.bin: cannot be written"), idx.CorpusWriter(tmp_path / "file" / "c"):
        pass


def test_a_rebuilt_corpus_replaces_the_old_one_but_an_error_or_the_same_touches_nothing(
    tmp_path: Path, corpus: str
) -> None:
    before = idx.bin_path(corpus).read_bytes(), idx.idx_path(corpus).read_bytes()
    with pytest.raises(DataError, match=r"document 1 has token ids from 3 to 70000; uint16 holds 0 to 65535"):
        write(Path(corpus), [[1], [3, 70000]])
    assert (idx.bin_path(corpus).read_bytes(), idx.idx_path(corpus).read_bytes()) == before
    assert len(list(tmp_path.iterdir())) == 2
    inodes = [(path.name, path.stat().st_ino) for path in sorted(tmp_path.iterdir())]
    write(Path(corpus))
    assert [(path.name, path.stat().st_ino) for path in sorted(tmp_path.iterdir())] == inodes
    write(Path(corpus), [[5, 256]])
    assert idx.read_index(corpus).document_lengths.tolist() == [2]
