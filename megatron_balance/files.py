"""Read text and JSON that somebody gave: bounded, and with one sentence where it is not what it
should be.

A device, an endless pipe, a nest of a million brackets or a number of five thousand digits costs no
more than the file that was expected.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

MOST_BYTES = 256 * 2**20
"""Of a file that is read as a whole: plans of a thousand ranks take a tenth of it."""
PART_BYTES = 2**20
INT64 = 2**63

_LONG_NUMBER = re.compile(r"\d{19}")


class UnreadableError(ValueError):
    """A file that is not text, or too long, or not JSON; says which."""


def read_text(path: Path, most_bytes: int = MOST_BYTES) -> str:
    """The text of a file or pipe.

    Raises:
        OSError: it cannot be read.
        UnreadableError: it is not UTF-8, holds a NUL byte, or has more than `most_bytes` bytes.
    """
    decoder, parts, num_bytes = codecs.getincrementaldecoder("utf-8")(), list[str](), 0
    with path.open("rb") as stream:
        while part := stream.read(PART_BYTES):
            if b"\0" in part:
                raise UnreadableError("not text: has a NUL byte")
            num_bytes += len(part)
            if num_bytes > most_bytes:
                raise UnreadableError(f"longer than {most_bytes} bytes, which no such file needs")
            parts.append(_decoded(decoder, part))
    parts.append(_decoded(decoder, b"", final=True))
    return "".join(parts)


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
