"""Files to a corpus, and the verb `corpus`."""

import gzip
import os
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_balance.errors import DataError
from megatron_balance.workloads.idx import INSTALLED, bin_path, build, find_files, idx_path, standard_library
from tests.support.cli import CommandLine


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Seven files: three documents, an empty one, a long one, another suffix, a hidden one."""
    texts = {
        "b.py": "bb",
        "a.py": "a",
        "sub/c.py": "ccc",
        "sub/empty.py": "",
        "sub/long.py": "l" * 100,
        "read.me": "no",
        ".hidden.py": "no",
    }
    for name, text in texts.items():
        path = tmp_path / "in" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "in"


def test_documents_are_bytes_and_an_end_of_document_token(folder: Path, tmp_path: Path) -> None:
    report = build(str(tmp_path / "c"), find_files([folder], ".py"), max_bytes=10)
    assert (report.num_documents, report.num_tokens) == (3, 9)
    assert (report.empty, report.too_large, report.beyond_limit) == (1, 1, 0)
    tokens = np.fromfile(bin_path(f"{tmp_path}/c"), dtype=np.uint16).tolist()
    assert tokens == [*b"a", 256, *b"bb", 256, *b"ccc", 256]


def test_files_come_in_a_fixed_order_each_once(folder: Path) -> None:
    found = find_files([folder / "sub" / "c.py", folder, folder / "b.py"], ".py")
    assert [path.name for path in found] == ["c.py", "a.py", "b.py", "empty.py", "long.py"]


def test_a_file_that_is_named_is_taken_whatever_its_suffix(folder: Path) -> None:
    assert [path.name for path in find_files([folder / "read.me", folder / ".hidden.py"], ".py")] == [
        "read.me",
        ".hidden.py",
    ]


def test_the_limit_counts_documents_and_not_skipped_files(folder: Path, tmp_path: Path) -> None:
    report = build(str(tmp_path / "c"), find_files([folder], ".py"), max_bytes=10, limit=2)
    assert (report.num_documents, report.empty, report.too_large, report.beyond_limit) == (2, 0, 0, 3)


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="none: no such file or folder"):
        find_files([tmp_path / "none"])


def test_a_device_without_an_end_is_no_document() -> None:
    with pytest.raises(DataError, match="/dev/zero: neither a file nor a folder"):
        find_files([Path("/dev/zero")])


def test_a_file_that_cannot_be_read_is_named_and_leaves_no_corpus(folder: Path, tmp_path: Path) -> None:
    (folder / "gone.py").symlink_to(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"gone\.py: cannot be read \(No such file"):
        build(str(tmp_path / "c"), find_files([folder], ".py"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in"]


def test_only_empty_files_make_no_corpus(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match="no document left to write, 1 files were empty and 0 larger than --max-bytes None"
    ):
        build(str(tmp_path / "c"), [folder / "sub" / "empty.py"])


def test_the_standard_library_is_found_without_installed_packages() -> None:
    files = find_files([standard_library()], ".py", leave_out=INSTALLED)
    assert standard_library() / "argparse.py" in files
    assert not any("site-packages" in path.parts for path in files)


def test_build_prints_one_json_document(folder: Path, tmp_path: Path, run: CommandLine) -> None:
    report = run.json("corpus build --suffix .py --max-bytes 10 --json", tmp_path / "c", folder)
    assert (report["num_documents"], report["num_tokens"]) == (3, 9)
    assert (report["token_type"], report["end_of_document"]) == ("uint16", 256)
    assert report["skipped"] == {"empty": 1, "too_large": 1, "beyond_limit": 0}
    assert report["lengths"] == {"min": 2, "p10": 2, "median": 3, "p90": 3, "p99": 3, "max": 4, "mean": 3}
    assert report["histogram"] == [
        {"low": 2, "high": 3, "documents": 2, "tokens": 5},
        {"low": 4, "high": 7, "documents": 1, "tokens": 4},
    ]


def test_describe_says_of_a_corpus_what_build_said(folder: Path, tmp_path: Path, run: CommandLine) -> None:
    built = run.json("corpus build --json", tmp_path / "c", folder)
    described = run.json("corpus describe --json", tmp_path / "c.idx")
    assert described == {key: value for key, value in built.items() if key not in ("skipped", "end_of_document")}


def test_the_histogram_is_readable_without_json(folder: Path, tmp_path: Path, run: CommandLine) -> None:
    lines = run.printed("corpus build --suffix .py", tmp_path / "c", folder).splitlines()
    assert lines[0] == f"{tmp_path}/c.bin/.idx: 4 documents, 110 tokens of uint16 (largest id 256)"
    assert lines[1] == "skipped: 1 empty files, 0 too large, 0 beyond --limit"
    assert lines[4].split() == ["2-3", "2", "4.5%", "#" * 40]
    assert lines[-1].split() == ["64-127", "1", "91.8%", "#" * 20]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--max-bytes 0", "--max-bytes 0: must be at least 1"),
        ("--limit -1", "--limit -1: must be at least 1"),
        ("--suffix .rs", "no files ending in '.rs' in "),
        ("--max-byte 3", "unknown option '--max-byte'"),
    ],
)
def test_what_cannot_be_built_is_refused(
    folder: Path, tmp_path: Path, run: CommandLine, words: str, sentence: str
) -> None:
    assert sentence in run.error(f"corpus build {words}", tmp_path / "c", folder)


def test_building_from_nothing_says_what_to_name(tmp_path: Path, run: CommandLine) -> None:
    assert "name files or folders after PREFIX, or give --stdlib" in run.error("corpus build", tmp_path / "c")


def test_describing_a_damaged_corpus_is_an_error(folder: Path, tmp_path: Path, run: CommandLine) -> None:
    build(str(tmp_path / "c"), find_files([folder]))
    with idx_path(f"{tmp_path}/c").open("ab") as stream:
        stream.write(b"junk")
    assert "too long" in run.error("corpus describe", tmp_path / "c")
    said = run.error("corpus describe --json", tmp_path / "none")
    assert said.startswith(f"{tmp_path}/none.bin: No such file or directory; a corpus is the two files")


def test_the_corpus_is_as_readable_as_any_other_file(folder: Path, tmp_path: Path) -> None:
    build(str(tmp_path / "c"), find_files([folder]))
    usual = os.stat(folder / "a.py").st_mode & 0o777
    assert [path.stat().st_mode & 0o777 for path in (bin_path(f"{tmp_path}/c"), idx_path(f"{tmp_path}/c"))] == [
        usual,
        usual,
    ]


def save_tokenizer(folder: Path) -> None:
    """A `tokenizer.json` of two words."""
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
    """`gzip` stands in for the modules of Zstandard, which have the same `open`."""
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
