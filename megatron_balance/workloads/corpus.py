"""Files to a Megatron corpus: one document per file, one token per byte, an end-of-document token
behind each.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_balance.errors import DataError
from megatron_balance.workloads.idx import CorpusWriter

END_OF_DOCUMENT = 256
VOCABULARY = 257
TOKEN_TYPE = "uint16"
# Installed packages differ from machine to machine; the standard library proper does not.
INSTALLED = ("site-packages", "dist-packages")


@dataclass(frozen=True, slots=True)
class BuildReport:
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
) -> BuildReport:
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
    documents = tokens = empty = too_large = beyond_limit = 0
    with CorpusWriter(prefix, TOKEN_TYPE, replace=replace) as writer:
        for path in files:
            if limit is not None and documents >= limit:
                beyond_limit += 1
                continue
            try:
                # The size first: a file that is skipped for its size need not fit in memory.
                if max_bytes is not None and path.stat().st_size > max_bytes:
                    too_large += 1
                    continue
                content = path.read_bytes()
            except OSError as error:
                raise DataError(
                    f"{path}: cannot be read ({error.strerror}); leave it out or mend its permissions"
                ) from error
            if not content:
                empty += 1
                continue
            writer.add_document(
                np.append(np.frombuffer(content, dtype=np.uint8).astype(TOKEN_TYPE), np.uint16(END_OF_DOCUMENT))
            )
            documents += 1
            tokens += len(content) + 1
        if not documents:
            raise DataError(
                f"{prefix}: no document left to write, {empty} files were empty and {too_large} larger than "
                f"--max-bytes {max_bytes}"
            )
    return BuildReport(documents, tokens, empty, too_large, beyond_limit)
