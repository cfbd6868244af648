"""Files to a Megatron corpus: one document per file, one token per byte, an end-of-document token
behind each.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from megatron_balance.errors import ConfigError, DataError
from megatron_balance.files import UnreadableError, open_lines, parse_json
from megatron_balance.workloads.idx import CorpusWriter

END_OF_DOCUMENT = 256
VOCABULARY = 257
TOKEN_TYPE = "uint16"
# Installed packages differ from machine to machine; the standard library proper does not.
INSTALLED = ("site-packages", "dist-packages")


T = TypeVar("T")
Skipped = Literal["empty", "too_large"]


@dataclass(frozen=True, slots=True)
class _BuildReport:
    """Counts of `build`: documents and tokens written, files left out."""

    num_documents: int
    num_tokens: int
    empty: int
    too_large: int
    beyond_limit: int


def find_files(paths: Iterable[Path], suffix: str = "", leave_out: tuple[str, ...] = ()) -> list[Path]:
    """Files named, and files below the folders named whose name ends with `suffix`, each once, in a
    fixed order.

    In folders, hidden files and folders and those named in `leave_out` are passed over, and links
    to folders are not followed.

    Raises:
        DataError: a path that does not exist, or is a device or a pipe, which may have no end; or a
            folder that cannot be read.
    """
    files: dict[Path, None] = {}
    for path in paths:
        if path.is_dir():
            files.update(dict.fromkeys(_below(path, suffix, leave_out)))
        elif path.is_file():
            files[path] = None
        else:
            raise DataError(f"{path}: {'neither a file nor a folder' if path.exists() else 'no such file or folder'}")
    first_of: dict[Path, Path] = {}
    for path in files:
        first_of.setdefault(path.resolve(), path)
    return list(first_of.values())


def _below(folder: Path, suffix: str, leave_out: tuple[str, ...]) -> Iterator[Path]:
    def stop(error: OSError) -> None:
        raise DataError(f"{error.filename}: cannot be read ({error.strerror})") from error

    for here, folders, files in os.walk(folder, onerror=stop):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in leave_out)
        yield from (Path(here, name) for name in sorted(files) if name.endswith(suffix) and not name.startswith("."))


def standard_library() -> Path:
    """Folder of the Python standard library's sources: real documents that are on every machine."""
    return Path(sysconfig.get_path("stdlib"))


def build(
    prefix: str,
    files: Iterable[Path],
    max_bytes: int | None = None,
    limit: int | None = None,
    *,
    replace: bool = True,
) -> _BuildReport:
    """Write the corpus at `prefix`, one document per file.

    Args:
        prefix: the corpus is `PREFIX.bin` and `PREFIX.idx`; both appear when all is written.
        files: in the order of the documents.
        max_bytes: files larger than this are skipped and counted; None: any size.
        limit: most documents; files beyond it are counted, not read; None: no limit.
        replace: another corpus of this name, which is refused otherwise.

    Raises:
        DataError: a file that cannot be read, nothing left to write, or no place to write to.
    """

    def read(path: Path) -> NDArray[np.uint16] | Skipped:
        try:
            # The size first: a file that is skipped for its size need not fit in memory.
            if max_bytes is not None and path.stat().st_size > max_bytes:
                return "too_large"
            content = path.read_bytes()
        except OSError as error:
            raise DataError(
                f"{path}: cannot be read ({error.strerror}); leave it out or mend its permissions"
            ) from error
        return (
            np.append(np.frombuffer(content, np.uint8).astype(TOKEN_TYPE), np.uint16(END_OF_DOCUMENT))
            if content
            else "empty"
        )

    nothing = f"{{empty}} files were empty and {{too_large}} larger than --max-bytes {max_bytes}"
    return _write(prefix, CorpusWriter(prefix, TOKEN_TYPE, replace=replace), files, read, limit, nothing)


def _write(
    prefix: str,
    corpus: CorpusWriter,
    sources: Iterable[T],
    read: Callable[[T], NDArray[np.integer] | Skipped],
    limit: int | None,
    nothing: str,
) -> _BuildReport:
    """Write a document of each source; `nothing`: why none is left, with counts to fill in."""
    counts = dict.fromkeys(_BuildReport.__slots__, 0)
    with corpus as writer:
        for source in sources:
            if limit is not None and counts["num_documents"] >= limit:
                counts["beyond_limit"] += 1
                continue
            tokens = read(source)
            if isinstance(tokens, str):
                counts[tokens] += 1
                continue
            writer.add_document(tokens)
            counts["num_documents"] += 1
            counts["num_tokens"] += len(tokens)
        if not counts["num_documents"]:
            raise DataError(f"{prefix}: no document left to write, {nothing.format(**counts)}")
    return _BuildReport(**counts)


ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[SEP]")
"""Tokens that end a document, in the order in which they are looked for."""


class TextTokenizer:
    """A `tokenizer.json`: ids of a document's tokens, and of the token that ends it."""

    def __init__(self, path: Path) -> None:
        """Read it, or a folder's. Raises ConfigError where it is none, or has none of `ENDS`."""
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise ConfigError("--tokenizer needs the package tokenizers: pip install tokenizers") from None
        file = path / "tokenizer.json" if path.is_dir() else path
        if not file.is_file():
            raise ConfigError(f"--tokenizer {file}: no such file; expected a tokenizer.json, or its folder")
        try:
            self._tokenizer = cast(Any, Tokenizer).from_file(str(file))
        except Exception as error:  # the package raises nothing narrower
            raise ConfigError(f"--tokenizer {file}: not a tokenizer.json ({error})") from None
        found = (self._tokenizer.token_to_id(word) for word in ENDS)
        end = next((number for number in found if number is not None), None)
        if end is None:
            raise ConfigError(f"--tokenizer {file}: no token ends a document; looked for {', '.join(ENDS)}")
        self.end: int = end
        self.token_type = "uint16" if self._tokenizer.get_vocab_size() <= 1 << 16 else "int32"

    def __call__(self, text: str) -> NDArray[np.int64]:
        """Token ids of a document, the one that ends it last."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return np.array([*ids, self.end], np.int64)


def build_jsonl(
    prefix: str,
    files: Sequence[Path],
    key: str,
    tokenizer: TextTokenizer,
    limit: int | None = None,
    *,
    replace: bool = True,
) -> _BuildReport:
    """Write the corpus at `prefix`, a document for each line of the files: the text under `key`.

    As `build`. Empty texts are left out and counted.
    """
    writer = CorpusWriter(prefix, tokenizer.token_type, replace=replace)
    texts = (text for path in files for text in _texts(path, key))
    nothing = "{empty} lines were empty texts"
    return _write(prefix, writer, texts, lambda text: tokenizer(text) if text else "empty", limit, nothing)


def _texts(path: Path, key: str) -> Iterator[str]:
    try:
        with open_lines(path) as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                try:
                    entry: object = parse_json(line)
                except UnreadableError as error:
                    raise DataError(f"{path}: line {number}: {error}") from None
                text = cast("dict[str, object]", entry).get(key) if isinstance(entry, dict) else None
                if not isinstance(text, str):
                    raise DataError(f"{path}: line {number}: no text under {key!r}; expected {{{key!r}: '...'}}")
                yield text
    except UnreadableError as error:
        raise DataError(f"{path}: {error}") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error
