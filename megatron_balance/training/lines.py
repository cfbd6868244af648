"""A file of lines that a training run appends to, and that never ends it."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

log = logging.getLogger(__name__)


class LineFile:
    """Lines appended to a file. One that cannot be written, as where the disk is full, is left out,
    with one warning until writing works again.

    A line that an earlier process was killed in stays as it is, and the next one begins behind it.
    """

    def __init__(self, path: Path) -> None:
        """Open the file, made if it is not there.

        Raises:
            OSError: it cannot be opened for writing.
        """
        self._path = path
        self._file = path.open("ab", buffering=0)
        self._torn = _is_torn(path)
        self._left_out = 0

    def move_from(self, first: Callable[[bytes], bool], aside: Path) -> int:
        """Move the first line for which `first` holds, and all behind it, to the end of file `aside`.

        Returns the number of lines moved. A file that cannot be read or cut stays whole.
        """
        if not self._path.is_file():  # a pipe or a device
            return 0
        try:
            with self._path.open("rb") as stream:
                kept = 0
                for line in stream:
                    if first(line):
                        break
                    kept += len(line)
                else:
                    return 0
                moved = [line, *stream]
            with aside.open("ab") as into:
                into.writelines(moved)
            os.truncate(self._path, kept)
        except OSError as error:
            log.warning("%s: steps that run again stay in it twice (%s)", self._path, error.strerror)
            return 0
        self._torn = False
        return len(moved)

    def add(self, line: str) -> None:
        """Write a line, given without its end."""
        data = (("\n" if self._torn else "") + line + "\n").encode()
        try:
            written = self._file.write(data)
        except OSError as error:
            self._failed(error.strerror or str(error))
            return
        if written != len(data):
            self._torn = written > 0 or self._torn
            self._failed("no space for all of a line")
            return
        if self._left_out:
            log.warning("%s: written again; %d lines before this one are missing", self._path, self._left_out)
        self._torn, self._left_out = False, 0

    def close(self) -> None:
        """Close the file; it takes no more lines."""
        try:
            self._file.close()
        except OSError as error:
            log.warning("%s: not closed in order (%s)", self._path, error.strerror)

    def _failed(self, why: str) -> None:
        if not self._left_out:
            log.warning("%s: a line could not be written (%s); training goes on without it", self._path, why)
        self._left_out += 1


def _is_torn(path: Path) -> bool:
    """Whether a file ends in the middle of a line."""
    try:
        with path.open("rb") as stream:
            if not stream.seek(0, os.SEEK_END):
                return False
            stream.seek(-1, os.SEEK_END)
            return stream.read(1) != b"\n"
    except OSError:  # not one that can be read, such as a pipe
        return False
