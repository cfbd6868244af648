r"""Megatron's indexed corpus: `PREFIX.bin` holds token ids, `PREFIX.idx` says where each document
lies.

Layout of `.idx` (megatron-core 0.19.2, megatron/core/datasets/indexed_dataset.py), little-endian:

    9 bytes  MMIDIDX\0\0            8 bytes  version, 1            1 byte   code of the token type
    8 bytes  number of sequences   8 bytes  number of boundaries (documents + 1)
    int32 [sequences] lengths in tokens    int64 [sequences] byte offsets in .bin
    int64 [boundaries] document boundaries
    int8 [sequences] modes, only in a multimodal corpus

Megatron notices a truncated `.bin` only when it reads the missing part, in step 900 or so, and
never notices one that is too long. `read_index` compares every size with what the index says before
anything is trained. A Megatron "sequence" is a part of a document; everywhere else in this package
a sequence is a document (or a piece cut from one).
"""

import contextlib
import filecmp
import os
import struct
import sysconfig
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Literal, Self, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from megatron_balance.errors import ConfigError, DataError
from megatron_balance.files import UnreadableError, open_lines, parse_json
from megatron_balance.ir.arrays import Ints

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
# Codes 6 and 7 are float64 and float32 in Megatron's table: a file of those holds no token ids.
TOKEN_TYPES: dict[int, str] = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
CODES: dict[str, int] = {name: code for code, name in TOKEN_TYPES.items()}
# Token ids are scanned in parts of this many, so that describing a corpus needs little memory.
SCAN_TOKENS = 1 << 24
SOME_TOKENS = 256


@dataclass(frozen=True, slots=True, eq=False)
class CorpusIndex:
    """A `.idx` mapped into memory: what no one looks at takes none, and processes share the rest."""

    prefix: str
    dtype: np.dtype[np.integer]
    lengths: NDArray[np.int32]
    """[sequences] of Megatron, in tokens."""
    pointers: Ints
    """[sequences] byte offsets in the `.bin`."""
    first_sequence: Ints
    """[documents + 1]: document i is the sequences first_sequence[i] to first_sequence[i + 1], by
    which Megatron's IndexedDataset is asked for tokens.
    """

    @classmethod
    def mapped(cls, prefix: str | os.PathLike[str]) -> "CorpusIndex":
        """Open the corpus at `prefix`; what the index says of documents is not checked.

        Raises:
            DataError: a file is missing, not Megatron's, of another size than its header says, or
                empty.
        """
        prefix = prefix_of(prefix)
        path = idx_path(prefix)
        _size(bin_path(prefix), prefix)
        idx_bytes = _size(path, prefix)
        try:
            with path.open("rb") as stream:
                num_sequences, num_boundaries, dtype = _read_header(stream, path, idx_bytes)
            if num_sequences == 0 or num_boundaries < 2:
                raise DataError(
                    f"{path}: the corpus is empty, it has {num_sequences} sequences in {max(num_boundaries - 1, 0)} "
                    "documents"
                )
            body = np.memmap(path, dtype=np.uint8, mode="r", offset=HEADER.size)
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error.strerror})") from error
        lengths = np.frombuffer(body, dtype="<i4", count=num_sequences)
        pointers = np.frombuffer(body, dtype="<i8", count=num_sequences, offset=4 * num_sequences)
        boundaries = np.frombuffer(body, dtype="<i8", count=num_boundaries, offset=12 * num_sequences)
        return cls(prefix, dtype, lengths, pointers, boundaries)

    def __reduce__(self) -> "tuple[Callable[[str], CorpusIndex], tuple[str]]":
        return CorpusIndex.mapped, (self.prefix,)  # a mapped array would be pickled as a copy

    def check(self) -> None:
        """Check that documents follow one another without gap or overlap, and the `.bin`. Reads the
        whole index. DataError if not.
        """
        lengths, pointers, boundaries = self.lengths, self.pointers, self.first_sequence
        expected = np.zeros(len(lengths), dtype=np.int64)
        np.cumsum(lengths[:-1], dtype=np.int64, out=expected[1:])
        expected *= self.dtype.itemsize
        wrong = ""
        if (lengths < 0).any():
            at = int(np.argmax(lengths < 0))
            wrong = f"sequence {at} has length {lengths[at]}"
        elif (pointers != expected).any():
            at = int(np.argmax(pointers != expected))
            wrong = f"sequence {at} begins at byte {pointers[at]}, but the lengths before it put it at {expected[at]}"
        elif boundaries[0] != 0 or boundaries[-1] != len(lengths) or (np.diff(boundaries) < 0).any():
            wrong = (
                f"document boundaries go from {boundaries[0]} to {boundaries[-1]}, expected them to rise from 0 to "
                f"{len(lengths)}, the number of sequences"
            )
        if wrong:
            raise DataError(f"{idx_path(self.prefix)}: {wrong}; the file is damaged, build it again")
        self.check_bin()

    def check_bin(self) -> None:
        """Check that the `.bin` holds the tokens of the index; DataError if not, or none."""
        bin_bytes, num_tokens = _size(bin_path(self.prefix), self.prefix), self.num_tokens
        if num_tokens == 0:
            raise DataError(f"{idx_path(self.prefix)}: the corpus is empty, none of its documents has a token")
        expected = num_tokens * self.dtype.itemsize
        if bin_bytes != expected:
            how = "truncated" if bin_bytes < expected else "too long"
            raise DataError(
                f"{bin_path(self.prefix)}: {how}, it has {bin_bytes} bytes, but {idx_path(self.prefix).name} "
                f"describes {num_tokens} tokens of {self.dtype}, {expected} bytes; the two files do not belong "
                "together, copy or build them again"
            )

    @property
    def num_documents(self) -> int:
        return len(self.first_sequence) - 1

    @property
    def num_tokens(self) -> int:
        return self.first_token_of(self.num_documents)

    @property
    def first_token(self) -> Ints:
        """[documents + 1]: first token of each document in the `.bin`, from the whole index."""
        ends = np.append(self.pointers, self._end_bytes) // self.dtype.itemsize
        return ends[self.first_sequence]

    @property
    def document_lengths(self) -> Ints:
        """[documents] lengths in tokens, zeros included. Computed from the whole index."""
        return np.diff(self.first_token)

    def first_token_of(self, document: int) -> int:
        """Where a document begins in the `.bin`, in tokens; of `num_documents`: where it ends."""
        sequence = int(self.first_sequence[document])
        at = int(self.pointers[sequence]) if sequence < len(self.pointers) else self._end_bytes
        return at // self.dtype.itemsize

    def tokens_of(self, documents: range) -> int:
        return self.first_token_of(documents.stop) - self.first_token_of(documents.start) if documents else 0

    @property
    def _end_bytes(self) -> int:
        return int(self.pointers[-1]) + int(self.lengths[-1]) * self.dtype.itemsize

    def some_tokens(self) -> NDArray[np.integer]:
        """Tokens from places spread over the `.bin`, to tell corpora of equal lengths apart."""
        places = np.unique(np.linspace(0, max(0, self.num_tokens - 1), SOME_TOKENS).astype(np.int64))
        return np.memmap(bin_path(self.prefix), dtype=self.dtype, mode="r")[places]

    def largest_token(self) -> int:
        """Largest token id of the corpus; reads the whole `.bin`."""
        tokens = np.memmap(bin_path(self.prefix), dtype=self.dtype, mode="r")
        return max(int(tokens[at : at + SCAN_TOKENS].max()) for at in range(0, len(tokens), SCAN_TOKENS))


def prefix_of(path: str | os.PathLike[str]) -> str:
    """The prefix of a corpus, also when the user named one of its two files."""
    text = os.fspath(path)
    return text[:-4] if text.endswith((".idx", ".bin")) else text


def idx_path(prefix: str) -> Path:
    return Path(f"{prefix}.idx")


def bin_path(prefix: str) -> Path:
    return Path(f"{prefix}.bin")


def read_index(prefix: str | os.PathLike[str]) -> CorpusIndex:
    """Open the corpus at `prefix`, checked whole; errors as of `mapped` and `check`."""
    index = CorpusIndex.mapped(prefix)
    index.check()
    return index


def _size(path: Path, prefix: str) -> int:
    """Bytes of `path`, which must be a file."""
    files = f"a corpus is the two files {prefix}.bin and {prefix}.idx"
    try:
        status = path.stat()
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}; {files}") from error
    if not path.is_file():
        raise DataError(f"{path}: not a file; {files}")
    return status.st_size


def _read_header(stream: BinaryIO, path: Path, idx_bytes: int) -> tuple[int, int, np.dtype[np.integer]]:
    """Numbers of sequences and document boundaries, and token type; checks the size against them."""
    head = stream.read(HEADER.size)
    if head[: len(MAGIC)] != MAGIC[: len(head)]:
        raise DataError(f"{path}: not a Megatron index, it begins with {head[: len(MAGIC)]!r}, expected {MAGIC!r}")
    if len(head) < HEADER.size:
        raise DataError(
            f"{path}: truncated, it has {idx_bytes} bytes and the header alone takes {HEADER.size}; build the corpus "
            "again"
        )
    _, version, code, num_sequences, num_boundaries = HEADER.unpack(head)
    if version != VERSION:
        raise DataError(f"{path}: index version {version}, this package reads version {VERSION}")
    if code not in TOKEN_TYPES:
        known = ", ".join(f"{key} ({name})" for key, name in TOKEN_TYPES.items())
        raise DataError(f"{path}: token type code {code} is not a type of token ids; known are {known}")
    expected = HEADER.size + 12 * num_sequences + 8 * num_boundaries
    if idx_bytes != expected:
        how = f"the file is {'truncated' if idx_bytes < expected else 'too long'}, copy or build it again"
        if idx_bytes == expected + num_sequences:
            how = f"the {num_sequences} bytes more look like a multimodal corpus, which is not supported"
        raise DataError(
            f"{path}: {idx_bytes} bytes, but {num_sequences} sequences and {num_boundaries} document boundaries take "
            f"{expected}; {how}"
        )
    return num_sequences, num_boundaries, np.dtype(TOKEN_TYPES[code])


class CorpusWriter:
    """Writes `PREFIX.bin` and `PREFIX.idx`, byte for byte as Megatron's IndexedDatasetBuilder
    would.

    A context manager: the two files appear under their names when the block ends without an error,
    and not before. A corpus that is there already with the same bytes is left alone, so building
    twice is harmless to a run that reads it. Another one is replaced, or refused.
    """

    def __init__(self, prefix: str | os.PathLike[str], dtype: str = "uint16", *, replace: bool = True) -> None:
        if dtype not in CODES:
            raise DataError(f"token type {dtype!r} is not one Megatron knows; use one of {', '.join(CODES)}")
        self._prefix = prefix_of(prefix)
        self._dtype = np.dtype(dtype)
        self._replace = replace
        self._lengths: list[int] = []
        self._folder = Path(self._prefix).parent

    def __enter__(self) -> Self:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            # Beside the target and not in /tmp: a rename is atomic only within one file system.
            descriptor, name = tempfile.mkstemp(dir=self._folder, prefix=f".{Path(self._prefix).name}.", suffix=".bin")
        except OSError as error:
            raise DataError(f"{self._prefix}.bin: cannot be written ({error.strerror})") from error
        self._new_bin = Path(name)
        self._new_idx = self._new_bin.with_suffix(".idx")
        self._stream = os.fdopen(descriptor, "wb")
        return self

    def add_document(self, token_ids: NDArray[np.integer]) -> None:
        """Append one document: ids [T], the end-of-document token included.

        Raises:
            DataError: no tokens, an id that the token type cannot hold, or a disk that is full.
        """
        document = len(self._lengths)
        if token_ids.ndim != 1 or not 0 < len(token_ids) < 1 << 31:
            raise DataError(
                f"document {document} has shape {token_ids.shape}; a document is 1 to 2^31 - 1 token ids in one "
                "dimension"
            )
        low, high, limits = int(token_ids.min()), int(token_ids.max()), np.iinfo(self._dtype.name)
        if low < limits.min or high > limits.max:
            raise DataError(
                f"document {document} has token ids from {low} to {high}; {self._dtype} holds {limits.min} to "
                f"{limits.max}, choose a wider type"
            )
        try:
            self._stream.write(token_ids.astype(self._dtype).tobytes())
        except OSError as failed:
            raise self._unwritten(failed) from failed
        self._lengths.append(len(token_ids))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._stream.flush()
            os.fsync(self._stream.fileno())
            self._stream.close()
            if kind is None:
                self._commit()
        except OSError as failed:
            raise self._unwritten(failed) from failed
        finally:
            with contextlib.suppress(OSError):  # it flushes what is left, and fails as that did
                self._stream.close()
            for path in (self._new_bin, self._new_idx):
                path.unlink(missing_ok=True)

    def _unwritten(self, failed: OSError) -> DataError:
        return DataError(f"{self._prefix}.bin: cannot be written ({failed.strerror})")

    def _commit(self) -> None:
        """Write the index and give both files their names."""
        if not self._lengths:
            raise DataError(f"{self._prefix}: no documents were added, an empty corpus cannot be trained on")
        lengths = np.array(self._lengths, dtype=np.int64)
        pointers = (np.cumsum(lengths) - lengths) * self._dtype.itemsize
        count = len(lengths)
        with self._new_idx.open("wb") as stream:
            stream.write(HEADER.pack(MAGIC, VERSION, CODES[self._dtype.name], count, count + 1))
            for column in (lengths.astype("<i4"), pointers.astype("<i8"), np.arange(count + 1, dtype="<i8")):
                stream.write(column.tobytes())
            stream.flush()
            os.fsync(stream.fileno())
        targets = ((self._new_bin, bin_path(self._prefix)), (self._new_idx, idx_path(self._prefix)))
        if all(old.is_file() and filecmp.cmp(new, old, shallow=False) for new, old in targets):
            return
        if not self._replace and idx_path(self._prefix).exists():
            raise DataError(f"{self._prefix}.idx: another corpus is there already; take another PREFIX, or --force")
        # The index goes first and comes back last: whoever opens the corpus in between finds it
        # missing, not mixed.
        with contextlib.suppress(FileNotFoundError):
            idx_path(self._prefix).unlink()
        for new, old in targets:
            # mkstemp makes files that only their owner may read; a corpus is shared like any other
            # file.
            new.chmod(0o666 & ~_umask())
            new.replace(old)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


# Files to a Megatron corpus: one document per file, one token per byte, an end-of-document token
# behind each.

END_OF_DOCUMENT = 256
VOCABULARY = 257
TOKEN_TYPE = "uint16"
# Sources of Python's standard library: real documents that are on every machine. Installed packages
# differ from machine to machine.
STANDARD_LIBRARY = Path(sysconfig.get_path("stdlib"))
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


def build(
    prefix: str, files: Iterable[Path], max_bytes: int | None = None, limit: int | None = None, *, replace: bool = True
) -> _BuildReport:
    """Write the corpus at `prefix`, one document per file.

    `max_bytes`: files larger than this are skipped and counted. `limit`: most documents; files beyond
    it are counted, not read. `replace`: another corpus of this name, which is refused otherwise.

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
            mend = "leave it out or mend its permissions"
            raise DataError(f"{path}: cannot be read ({error.strerror}); {mend}") from error
        tokens = np.append(np.frombuffer(content, np.uint8).astype(TOKEN_TYPE), np.uint16(END_OF_DOCUMENT))
        return tokens if content else "empty"

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


# Tokens that end a document, in the order in which they are looked for.
ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[SEP]")


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

    def __call__(self, text: str) -> Ints:
        return np.array([*self._tokenizer.encode(text, add_special_tokens=False).ids, self.end], np.int64)


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
