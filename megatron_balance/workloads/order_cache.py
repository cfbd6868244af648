"""Arrays of a corpus on disk: computed by one process of a node, mapped by all of them.

Sorting 20 million documents takes over a minute and more than a gigabyte, and every rank needs the
same order. The first process that asks for an array computes and writes it, under a lock; the
others wait for it, and every one maps the file. A later run finds it there. A file whose checksum
is another is computed again. The files may be deleted at any time while no run reads them.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import tempfile
import zlib
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from megatron_balance.workloads.idx import CorpusIndex, bin_path, idx_path

log = logging.getLogger(__name__)

Array: TypeAlias = NDArray[Any]
VERSION = 2
"""Of what the files hold."""
CHECKSUM_BYTES = 4
"""At a file's end: CRC-32 of all before it."""


@dataclass(frozen=True, slots=True)
class OrderCache:
    """The files of one order: `folder`/`key`.NAME.npy."""

    folder: Path
    key: str

    def under(self, *settings: object) -> OrderCache:
        """The files of that order which these settings decide, beside the corpus."""
        return OrderCache(self.folder, hashlib.sha256(f"{self.key} {settings!r}".encode()).hexdigest()[:16])

    def get(self, name: str, make: Callable[[], Array]) -> Array:
        """An array, mapped; computed by `make` and written first, where it is not there.

        Where the folder cannot be written, the log says so, and the array stays in this process.
        """
        found = self._load(name)
        if found is not None:
            return found
        made: Array | None = None
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with self._locked():
                found = self._load(name)  # another process may have been first
                if found is None:
                    made = make()
                    self._write(name, made)
                    found = self._load(name)
        except OSError as error:
            log.warning(
                "%s: cannot be written (%s), so every rank sorts the documents for itself; name a folder by "
                "--data-cache-path",
                self.folder,
                error.strerror,
            )
        if found is not None:
            return found
        return make() if made is None else made

    def _path(self, name: str) -> Path:
        return self.folder / f"{self.key}.{name}.npy"

    def _load(self, name: str) -> Array | None:
        path = self._path(name)
        try:
            data = np.memmap(path, np.uint8, mode="r")
            if zlib.crc32(data[:-CHECKSUM_BYTES]) != int.from_bytes(data[-CHECKSUM_BYTES:].tobytes(), "little"):
                raise ValueError("it is damaged: its checksum is another")
            return np.load(path, mmap_mode="r", allow_pickle=False)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, EOFError) as error:
            log.warning("%s: cannot be read (%s); it is computed again", path, error)
            return None

    def _write(self, name: str, array: Array) -> None:
        """Write a file that appears under its name when it is whole."""
        descriptor, temporary = tempfile.mkstemp(dir=self.folder, prefix=f".{self.key}.", suffix=".npy")
        try:
            with os.fdopen(descriptor, "wb") as stream:
                np.save(stream, array, allow_pickle=False)
                stream.flush()
                checksum = zlib.crc32(np.memmap(temporary, np.uint8, mode="r"))
                stream.write(checksum.to_bytes(CHECKSUM_BYTES, "little"))
            Path(temporary).chmod(0o644)
            Path(temporary).replace(self._path(name))
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise

    @contextlib.contextmanager
    def _locked(self) -> Generator[None]:
        """Hold the lock of this order; the system frees that of a process that died."""
        with (self.folder / f"{self.key}.lock").open("a") as stream:
            # A file system without locks: processes may compute a thing twice, and write the same.
            with contextlib.suppress(OSError):
                fcntl.flock(stream, fcntl.LOCK_EX)
            yield


@dataclass(frozen=True, slots=True)
class Corpus:
    """A corpus, and where the orders of its documents are kept; None: in memory."""

    index: CorpusIndex
    cache: OrderCache | None = None


def of_corpus(index: CorpusIndex, folder: str | os.PathLike[str] | None) -> OrderCache:
    """The cache of a corpus, in `folder` or beside it.

    Other files, or a newer index, have another one.
    """
    index_status, tokens_status = idx_path(index.prefix).stat(), bin_path(index.prefix).stat()
    name = Path(index.prefix).name
    what = (VERSION, name, index_status.st_size, index_status.st_mtime_ns, tokens_status.st_size)
    return OrderCache(Path(folder or Path(index.prefix).parent / "cache" / "balance"), repr(what))
