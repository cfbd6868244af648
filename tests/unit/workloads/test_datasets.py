"""Lengths of documents from files: corpora, JSONL, Parquet and Arrow."""

from __future__ import annotations

import importlib
import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_balance.errors import ConfigError, DataError
from megatron_balance.workloads import lengths
from megatron_balance.workloads.idx import CorpusWriter
from megatron_balance.workloads.lengths import document_lengths, is_path


def lines(path: Path, *rows: Any) -> str:
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n", encoding="utf-8")
    return str(path)


def test_a_corpus_is_read_by_its_prefix_or_its_index(tmp_path: Path) -> None:
    with CorpusWriter(tmp_path / "c") as writer:
        for length in (5, 12, 3):
            writer.add_document(np.ones(length, dtype=np.int64))
    assert document_lengths(str(tmp_path / "c.idx")).tolist() == [5, 12, 3]
    assert document_lengths(str(tmp_path / "c")).tolist() == [5, 12, 3]


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
def test_jsonl_counts_tokens_by_the_column_it_has(tmp_path: Path, rows: list[Any], expected: list[int]) -> None:
    assert document_lengths(lines(tmp_path / "d.jsonl", *rows)).tolist() == expected


def test_text_is_estimated_by_its_bytes_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = lines(tmp_path / "d.jsonl", {"id": 1, "text": "abcdefgh"}, {"id": 2, "text": "äöü"}, {"id": 3, "text": ""})
    with caplog.at_level(logging.WARNING):
        assert document_lengths(path).tolist() == [2, 2]
    assert len(caplog.records) == 1
    assert "text is text; its tokens are estimated at 4 bytes each" in caplog.text


def test_a_column_can_be_named(tmp_path: Path) -> None:
    path = lines(tmp_path / "d.jsonl", {"length": 3, "mine": 30})
    assert document_lengths(f"{path}#mine").tolist() == [30]


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


def test_a_file_that_is_no_text_or_not_there_is_named(tmp_path: Path) -> None:
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


def test_paths_are_told_from_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("here").mkdir()
    found = [is_path(name) for name in ("a/b", "c.idx", "d.jsonl#text", "e.parquet", "here", "arxiv", "nowhere")]
    assert found == [True, True, True, True, True, False, False]


def test_without_pyarrow_the_command_that_mends_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError(name)

    (tmp_path / "d.parquet").write_bytes(b"PAR1")
    monkeypatch.setattr(lengths, "import_module", missing)
    with pytest.raises(ConfigError, match="reading Parquet and Arrow needs pyarrow: pip install pyarrow"):
        document_lengths(str(tmp_path / "d.parquet"))


def test_arrow_and_parquet_count_by_number_list_or_text(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pa = pytest.importorskip("pyarrow")
    parquet, ipc = importlib.import_module("pyarrow.parquet"), importlib.import_module("pyarrow.ipc")
    ids, texts = (
        pa.table({"id": [1, 2, 3], "input_ids": [[1, 2], [], [3]]}),
        pa.table({"text": ["abcdefgh", "x", None]}),
    )
    folder = tmp_path / "set" / "train"
    folder.mkdir(parents=True)
    parquet.write_table(pa.table({"length": pa.array([5, None, 7], pa.int32())}), tmp_path / "n.parquet")
    with (
        pa.OSFile(str(folder / "data-0.arrow"), "wb") as sink,
        ipc.new_stream(sink, ids.schema) as writer,
    ):  # as `datasets` saves
        writer.write_table(ids)
    with pa.OSFile(str(folder / "data-1.arrow"), "wb") as sink, ipc.new_file(sink, ids.schema) as writer:
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
