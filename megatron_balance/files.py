"""Read text and JSON that somebody gave, compressed or not: bounded, and with one sentence where it
is not what it should be. Write JSON that any reader takes.
"""

import codecs
import gzip
import json
import math
import re
import zlib
from collections.abc import Callable, Generator
from contextlib import contextmanager
from importlib import import_module
from io import BufferedReader, RawIOBase, TextIOWrapper
from pathlib import Path
from typing import IO, Any, TextIO, cast

# A device, an endless pipe, a nest of a million brackets or a number of five thousand digits costs
# no more than the file that was expected.

# Of a file that is read as a whole: plans of a thousand ranks take a tenth of it.
MOST_BYTES = 256 * 2**20
PART_BYTES = 2**20
INT64 = 2**63

_LONG_NUMBER = re.compile(r"\d{19}")

# Modules that read Zstandard: Python's own from 3.14 on, and a package for all before.
ZSTD = ("compression.zstd", "zstandard")


class UnreadableError(ValueError):
    """A file that is not text, not JSON, too long, or compressed by what is not here; says which."""


def _open_bytes(path: Path) -> IO[bytes]:
    """The bytes of a file; of a name that ends in .gz or .zst those that were compressed. Raises
    OSError: it cannot be read; UnreadableError: nothing here reads Zstandard.
    """
    if path.suffix == ".gz":
        return cast("IO[bytes]", gzip.open(path, "rb"))
    if path.suffix != ".zst":
        return path.open("rb")
    for name in ZSTD:
        try:
            module = import_module(name)
        except ModuleNotFoundError:
            continue
        # The package's own `open` ends at the first frame, and in the middle of one without a word.
        return BufferedReader(_Frames(path, module)) if name == "zstandard" else module.open(path, "rb")
    raise UnreadableError(
        "compressed by Zstandard, which needs Python 3.14 or the package zstandard (pip install zstandard); or "
        "decompress it"
    )


class _Frames(RawIOBase):
    """The bytes of a .zst file by the package zstandard: of all its frames, each to its end."""

    # Bytes that are decompressed at once: they become 32 MB at most.
    MOST_COMPRESSED = 1024

    def __init__(self, path: Path, zstandard: Any) -> None:
        self._new_frame = zstandard.ZstdDecompressor(max_window_size=2**31).decompressobj
        self._file = path.open("rb")
        self._frame: Any = None
        self._waiting = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        while not self._waiting:
            left = b"" if self._frame is None or not self._frame.eof else self._frame.unused_data
            given = left or self._file.read(self.MOST_COMPRESSED)
            if not given:
                if self._frame is not None and not self._frame.eof:
                    raise EOFError("it ends before its last frame does")
                return 0
            if self._frame is None or self._frame.eof:
                self._frame = self._new_frame()
            self._waiting = self._frame.decompress(given)
        size = min(len(buffer), len(self._waiting))
        buffer[:size], self._waiting = self._waiting[:size], self._waiting[size:]
        return size

    def close(self) -> None:
        self._file.close()
        super().close()


@contextmanager
def open_lines(path: Path) -> Generator[TextIO]:
    """A file of text to read line by line, decompressed where its name says that it is compressed.
    Raises OSError: it cannot be read; UnreadableError: nothing here reads Zstandard; inside the
    block, also of text that is not UTF-8, and of a file that is not what it was compressed as.
    """
    with _open_bytes(path) as stream:
        try:
            yield TextIOWrapper(stream, encoding="utf-8")
        except UnicodeDecodeError as error:
            raise UnreadableError(f"not UTF-8 text ({error.reason} at byte {error.start})") from error
        except Exception as error:
            if not _is_damage(error):
                raise
            raise UnreadableError(f"not what its name says it is compressed as: {error}") from error


def _is_damage(error: Exception) -> bool:
    # Whether an error is of compressed bytes that are none: each module has its own.
    return isinstance(error, EOFError | zlib.error | gzip.BadGzipFile) or type(error).__name__ == "ZstdError"


def read_text(path: Path, most_bytes: int = MOST_BYTES) -> str:
    """The text of a file or pipe, decompressed where its name says that it is compressed. Raises
    OSError: it cannot be read; UnreadableError: it is not UTF-8, holds a NUL byte, has more than
    `most_bytes` bytes, or is not what it was compressed as.
    """
    decoder, parts, num_bytes = codecs.getincrementaldecoder("utf-8")(), list[str](), 0
    with _open_bytes(path) as stream:
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
    except Exception as error:
        if not _is_damage(error):
            raise
        raise UnreadableError(f"not what its name says it is compressed as: {error}") from None


def _decoded(decoder: codecs.IncrementalDecoder, part: bytes, *, final: bool = False) -> str:
    try:
        return decoder.decode(part, final)
    except UnicodeDecodeError as error:
        raise UnreadableError(f"not UTF-8 text ({error.reason})") from None


def parse_json(text: str, pairs: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """The value of a JSON text. `pairs`: makes objects, as `json.loads` takes it. Raises
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


def json_text(value: Any, indent: int | None = None) -> str:
    """The JSON text of a value, with null for numbers that JSON does not have (NaN and infinities)."""
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in cast("dict[Any, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in cast("list[Any]", value)]
    return value


def read_json(path: Path, pairs: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """The value of a JSON file; as `read_text` and `parse_json`."""
    return parse_json(read_text(path), pairs)


def _int64(digits: str) -> int:
    if len(digits) > 20 or not -INT64 <= int(digits) < INT64:
        raise UnreadableError(f"a whole number beyond 64 bits: {digits[:20]}...")
    return int(digits)
