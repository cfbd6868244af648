"""Lengths of documents on disk: a Megatron corpus, JSONL, lines and CSV of lengths (these three also
as .gz and .zst), and Hugging Face data sets (Parquet, Arrow).

A path may end in `#COLUMN`. Without it the first of these columns that is there counts: a number of
tokens, a list of token ids, or text. Text is not tokenised here: its tokens are estimated from its
bytes.
"""

from __future__ import annotations

import csv
import json
import logging
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from itertools import chain
from math import ceil
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from megatron_balance.errors import ConfigError, DataError
from megatron_balance.files import UnreadableError, open_lines, parse_json, uncompressed
from megatron_balance.workloads.idx import read_index

log = logging.getLogger(__name__)
Lengths = NDArray[np.int64]
COLUMNS = ("length", "num_tokens", "token_count", "n_tokens", "input_ids", "tokens", "text", "content", "code")
"""Columns looked for, in this order."""

BYTES_PER_TOKEN = 4.0
"""Of text: the usual figure for byte-pair encodings on English (OpenAI's documentation: a token is
about four characters).
"""

ARROW = (".arrow", ".parquet")
LONGEST_LINE = 2**26
"""Characters, of what is read as lines: some ten million tokens; few compressed bytes may say more."""

PEEK = 2**16
"""Characters of a JSONL file that are read before a whole line is."""


def is_path(name: str) -> bool:
    """Whether a data set's name is meant as a path."""
    base = name.rpartition("#")[0] or name
    endings = (".idx", ".bin", ".jsonl", ".json", ".csv", ".txt", *ARROW)
    return "/" in base or uncompressed(Path(base)).name.endswith(endings) or Path(base).exists()


def document_lengths(name: str) -> Lengths:
    """[documents] lengths in tokens, in the file's order; empty documents are left out.

    Raises:
        ConfigError: no such path, no column to count, or pyarrow is missing for Parquet and Arrow.
        DataError: a damaged file, or one without a document.
    """
    base, _, column = name.partition("#")
    path = Path(base)
    if base.endswith((".idx", ".bin")):
        lengths = read_index(base).document_lengths
    elif path.is_dir() or base.endswith(ARROW):
        lengths = _of_arrow(path, column)
    elif path.is_file():
        lengths = (_of_csv if uncompressed(path).suffix == ".csv" else _of_jsonl)(path, column)
    elif path.with_name(path.name + ".idx").is_file():
        lengths = read_index(base).document_lengths
    else:
        raise ConfigError(
            f"--dataset {name}: no such file or folder; a corpus (.idx), JSONL, CSV, or a folder or file of .parquet "
            "or .arrow"
        )
    lengths = lengths[lengths > 0]
    if not len(lengths):
        raise DataError(f"{base}: holds no document with tokens")
    return lengths


def _of_csv(path: Path, column: str) -> Lengths:
    """Rows below a header that names their columns."""
    rows = csv.reader(_lines(path))
    lengths: list[int] = []
    count: Callable[[Any], int] | None = None
    try:
        header = [word.strip() for word in next(rows, list[str]())]
        if len(header) < 2 and all(type(whole(word)) is int for word in header):  # lines of one length each, or none
            return _of_jsonl(path, column)
        column = _choose(header, column, str(path))
        for number, row in enumerate(rows, 2):
            if len(row) != len(header):
                raise DataError(f"{path}:{number}: {len(row)} columns, the first line has {len(header)}")
            value = whole(row[header.index(column)].strip())
            count = count or _counter(value, column, str(path))
            lengths.append(_checked(count, value, f"{path}:{number}: {column}"))
    except csv.Error as error:
        raise DataError(f"{path}:{rows.line_num}: not CSV: {error}") from error
    return np.array(lengths, dtype=np.int64)


def whole(word: str) -> int | str:
    """The number that a word of at most 18 digits is; any other word as it is."""
    return int(word) if word.isascii() and word.isdigit() and len(word) < 19 else word


def _of_jsonl(path: Path, column: str) -> Lengths:
    """One object, number or list of numbers a line."""
    lengths: list[int] = []
    count: Callable[[Any], int] | None = None
    for number, line in enumerate(_lines(path), 1):
        try:
            value: object = parse_json(line)
        except UnreadableError as error:
            raise DataError(f"{path}:{number}: {error}") from error
        if isinstance(value, list):  # a JSON file of lengths, as --lengths-file takes them
            lengths += [
                _checked(int, length, f"{path}:{number}: length {place}")
                for place, length in enumerate(cast("list[object]", value))
            ]
            continue
        row = cast("dict[str, Any]", value if isinstance(value, dict) else {"length": value})
        if count is None:
            column = _choose(list(row), column, str(path))
            count = _counter(row.get(column), column, str(path))
        if column not in row:
            raise DataError(f"{path}:{number}: no key {column!r}, which the first line has")
        lengths.append(_checked(count, row[column], f"{path}:{number}: {column}"))
    return np.array(lengths, dtype=np.int64)


def _lines(path: Path) -> Iterator[str]:
    try:
        with open_lines(path) as stream:
            first = stream.readline(PEEK)
            if "\0" in first:
                raise DataError(f"{path}: not text, so not JSONL (has a NUL byte)")
            if not first.endswith("\n"):
                first += stream.readline(LONGEST_LINE)
            for line in chain([first], iter(lambda: stream.readline(LONGEST_LINE), "")):
                if len(line) >= LONGEST_LINE:
                    raise DataError(f"{path}: a line of more than {LONGEST_LINE} characters; expected a document each")
                if line.strip():
                    yield line
    except OSError as error:
        raise ConfigError(f"--dataset {path}: {error.strerror}") from error
    except UnreadableError as error:
        raise DataError(f"{path}: {error}") from None


def _choose(columns: list[str], wanted: str, where: str) -> str:
    if wanted:
        if wanted not in columns:
            raise ConfigError(f"{where}: no column {wanted!r}; columns: {', '.join(columns)}")
        return wanted
    for name in COLUMNS:
        if name in columns:
            return name
    raise ConfigError(f"{where}: no column to count tokens by; columns: {', '.join(columns)}. Name one: PATH#COLUMN")


def _counter(example: object, column: str, where: str) -> Callable[[Any], int]:
    """Number of tokens that a value of the column stands for."""
    match example:
        case str():
            _warn_of_text(where, column)
            return _text_tokens
        case int() if not isinstance(example, bool):
            return int
        case list():
            return len
        case _:
            raise ConfigError(
                f"{where}: column {column!r} holds {type(example).__name__}; expected whole numbers, token ids or text"
            )


def _text_tokens(text: str) -> int:
    return ceil(len(text.encode("utf-8")) / BYTES_PER_TOKEN)


def _checked(count: Callable[[Any], int], value: object, where: str) -> int:
    kind = {int: int, len: list, _text_tokens: str}[count]
    if type(value) is not kind or (kind is int and cast(int, value) < 0):
        raise DataError(
            f"{where}: expected {'a whole number of tokens' if kind is int else kind.__name__}, got "
            f"{json.dumps(value)[:60]}"
        )
    return count(value)


def _of_arrow(path: Path, column: str) -> Lengths:
    """Parquet and Arrow files, those of a folder in the order of their names."""
    files = sorted(file for file in path.rglob("*") if file.suffix in ARROW) if path.is_dir() else [path]
    if not files:
        raise ConfigError(f"--dataset {path}: the folder holds no .parquet or .arrow file")
    if not path.exists():
        raise ConfigError(f"--dataset {path}: no such file")
    parts: list[Lengths] = []
    for file in files:
        for batch in _record_batches(file, column):
            parts.append(batch)
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)


def _record_batches(file: Path, column: str) -> Iterator[Lengths]:
    pa = _pyarrow("pyarrow", file)
    try:
        if file.suffix == ".parquet":
            opened = _pyarrow("pyarrow.parquet", file).ParquetFile(file)
            chosen = _choose(list(opened.schema_arrow.names), column, str(file))
            batches = opened.iter_batches(columns=[chosen])
        else:
            batches, chosen = _arrow_batches(pa, file, column)
        for batch in batches:
            yield _of_array(pa, batch.column(chosen), chosen, file)
    except pa.ArrowInvalid as error:
        raise DataError(f"{file}: not a {file.suffix} file that pyarrow reads ({error})") from error


def _pyarrow(module: str, file: Path) -> Any:
    try:
        return import_module(module)
    except ImportError:
        raise ConfigError(f"--dataset {file}: reading Parquet and Arrow needs pyarrow: pip install pyarrow") from None


def _arrow_batches(pa: Any, file: Path, column: str) -> tuple[Iterable[Any], str]:
    """Record batches of an Arrow file, a stream (as `datasets` writes) or with a footer."""
    ipc, source = _pyarrow("pyarrow.ipc", file), pa.memory_map(str(file))
    try:
        reader = ipc.open_stream(source)
        batches: Iterable[Any] = reader
    except pa.ArrowInvalid:
        reader = ipc.open_file(source)
        batches = (reader.get_batch(i) for i in range(reader.num_record_batches))
    return batches, _choose(list(reader.schema.names), column, str(file))


def _of_array(pa: Any, array: Any, column: str, file: Path) -> Lengths:
    compute, kind = _pyarrow("pyarrow.compute", file), array.type
    if pa.types.is_integer(kind):
        counted = array
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind):
        counted = compute.list_value_length(array)
    elif pa.types.is_string(kind) or pa.types.is_large_string(kind):
        _warn_of_text(str(file), column)
        counted = compute.ceil(
            compute.divide(compute.cast(compute.binary_length(array), pa.float64()), BYTES_PER_TOKEN)
        )
    else:
        raise ConfigError(f"{file}: column {column!r} holds {kind}; expected whole numbers, token ids or text")
    return np.asarray(counted.fill_null(0).to_numpy(zero_copy_only=False)).astype(np.int64)


def _warn_of_text(where: str, column: str) -> None:
    log.warning("%s: %s is text; its tokens are estimated at %g bytes each", where, column, BYTES_PER_TOKEN)
