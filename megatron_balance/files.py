"""Read text and JSON that somebody gave, compressed or not: bounded, and with one sentence where it
is not what it should be.

A device, an endless pipe, a nest of a million brackets or a number of five thousand digits costs no
more than the file that was expected.
"""

from __future__ import annotations

import codecs
import gzip
import json
import re
import zlib
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import IO, Any, cast

MOST_BYTES = 256 * 2**20
"""Of a file that is read as a whole: plans of a thousand ranks take a tenth of it."""
PART_BYTES = 2**20
INT64 = 2**63

_LONG_NUMBER = re.compile(r"\d{19}")


ZSTD = ("compression.zstd", "zstandard")
"""Modules that read Zstandard: Python's own from 3.14 on, and a package for all before."""


class UnreadableError(ValueError):
    """A file that is not text, or too long, or not JSON, or compressed by what is not here; says
    which.
    """


def open_bytes(path: Path) -> IO[bytes]:
    """The bytes of a file; of a name that ends in .gz or .zst those that were compressed.

    Raises:
        OSError: it cannot be read.
        UnreadableError: nothing here reads Zstandard.
    """
    if path.suffix == ".gz":
        return cast("IO[bytes]", gzip.open(path, "rb"))
    if path.suffix != ".zst":
        return path.open("rb")
    for name in ZSTD:
        try:
            return import_module(name).open(path, "rb")
        except ModuleNotFoundError:
            continue
    raise UnreadableError("compressed by Zstandard, which needs Python 3.14 or the package zstandard; or decompress it")


def uncompressed(path: Path) -> Path:
    """The path without the ending that says how it is compressed."""
    return path.with_suffix("") if path.suffix in (".gz", ".zst") else path


def read_text(path: Path, most_bytes: int = MOST_BYTES) -> str:
    """The text of a file or pipe, decompressed where its name says that it is compressed.

    Raises:
        OSError: it cannot be read.
        UnreadableError: it is not UTF-8, holds a NUL byte, has more than `most_bytes` bytes, or is not
            what it was compressed as.
    """
    decoder, parts, num_bytes = codecs.getincrementaldecoder("utf-8")(), list[str](), 0
    with open_bytes(path) as stream:
        while part := _part(stream):
            if b"\0" in part:
                raise UnreadableError("not text: has a NUL byte")
            num_bytes += len(part)
            if num_bytes > most_bytes:
                raise UnreadableError(f"longer than {most_bytes} bytes, which no such file needs")
            parts.append(_decoded(decoder, part))
    parts.append(_decoded(decoder, b"", final=True))
    return "".join(parts)


def _part(stream: IO[bytes]) -> bytes:
    try:
        return stream.read(PART_BYTES)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UnreadableError(f"not what its name says it is compressed as: {error}") from None


def _decoded(decoder: codecs.IncrementalDecoder, part: bytes, *, final: bool = False) -> str:
    try:
        return decoder.decode(part, final)
    except UnicodeDecodeError as error:
        raise UnreadableError(f"not UTF-8 text ({error.reason})") from None


def parse_json(text: str, pairs: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """The value of a JSON text. `pairs`: makes objects, as `json.loads` takes it.

    Raises:
        UnreadableError: it is not JSON, nests too deeply, or has a whole number beyond 64 bits.
    """
    try:
        whole = _int64 if _LONG_NUMBER.search(text) else None
        return json.loads(text, object_pairs_hook=pairs, parse_int=whole)
    except RecursionError:
        raise UnreadableError("not JSON that can be read: brackets nest too deeply") from None
    except UnreadableError:
        raise
    except ValueError as error:
        raise UnreadableError(f"not JSON: {error}") from None


def read_json(path: Path, pairs: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """The value of a JSON file; as `read_text` and `parse_json`."""
    return parse_json(read_text(path), pairs)


def _int64(digits: str) -> int:
    if len(digits) > 20 or not -INT64 <= int(digits) < INT64:
        raise UnreadableError(f"a whole number beyond 64 bits: {digits[:20]}...")
    return int(digits)
