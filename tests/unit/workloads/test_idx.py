"""A damaged, foreign or empty corpus is found at opening, in one sentence that names the file."""

import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megatron_balance.errors import DataError
from megatron_balance.workloads.idx import CorpusWriter, bin_path, idx_path, read_index

DOCUMENTS = [[1, 2, 3, 256], [256], [7, 8, 256], [9, 9, 9, 9, 9, 256]]
NUM_TOKENS = 14


def write(prefix: Path, documents: list[list[int]] = DOCUMENTS, dtype: str = "uint16") -> str:
    with CorpusWriter(prefix, dtype) as writer:
        for tokens in documents:
            writer.add_document(np.array(tokens))
    return str(prefix)


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    return write(tmp_path / "corpus")


def test_what_was_written_is_read(corpus: str) -> None:
    index = read_index(corpus)
    assert index.document_lengths.tolist() == [4, 1, 3, 6]
    assert index.first_token.tolist() == [0, 4, 5, 8, 14]
    assert index.first_sequence.tolist() == [0, 1, 2, 3, 4]
    assert (index.num_documents, index.num_tokens, str(index.dtype), index.largest_token()) == (4, 14, "uint16", 256)
    assert np.fromfile(bin_path(corpus), dtype=np.uint16).tolist() == [
        token for document in DOCUMENTS for token in document
    ]


@pytest.mark.parametrize("dtype", ["uint16", "int32", "int64"])
def test_every_token_type_is_read_back(tmp_path: Path, dtype: str) -> None:
    index = read_index(write(tmp_path / dtype, dtype=dtype))
    assert (str(index.dtype), index.num_tokens) == (dtype, NUM_TOKENS)


def test_a_document_of_several_sequences_is_one_document(tmp_path: Path) -> None:
    lengths = np.array([3, 2, 4], "<i4")
    pointers = np.array([0, 6, 10], "<i8")
    boundaries = np.array([0, 2, 2, 3], "<i8")  # the second document is empty
    idx_path(f"{tmp_path}/c").write_bytes(
        struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, 3, 4)
        + lengths.tobytes()
        + pointers.tobytes()
        + boundaries.tobytes()
    )
    bin_path(f"{tmp_path}/c").write_bytes(bytes(18))
    index = read_index(f"{tmp_path}/c")
    assert index.document_lengths.tolist() == [5, 0, 4]
    assert index.first_sequence.tolist() == [0, 2, 2, 3]


def patch_bytes(path: Path, at: int, new: bytes) -> None:
    data = bytearray(path.read_bytes())
    data[at : at + len(new)] = new
    path.write_bytes(bytes(data))


# .idx of DOCUMENTS: header 34, lengths at 34 (4 x 4), pointers at 50 (4 x 8), boundaries at 82 (5 x
# 8), 122 bytes in all.
DAMAGE: dict[str, tuple[Callable[[Path, Path], object], str]] = {
    "no bin": (lambda _, data: data.unlink(), r"corpus\.bin: No such file.*a corpus is the two files"),
    "no idx": (lambda index, _: index.unlink(), r"corpus\.idx: No such file"),
    "idx is a folder": (lambda index, _: (index.unlink(), index.mkdir()), r"corpus\.idx: not a file"),
    "idx cut in its header": (
        lambda index, _: index.write_bytes(index.read_bytes()[:20]),
        r"idx: truncated, it has 20 bytes",
    ),
    "idx empty": (lambda index, _: index.write_bytes(b""), r"idx: truncated, it has 0 bytes"),
    "idx cut in its body": (
        lambda index, _: index.write_bytes(index.read_bytes()[:100]),
        r"100 bytes, but 4 sequences.*take 122;.*truncated",
    ),
    "idx cut by one byte": (
        lambda index, _: index.write_bytes(index.read_bytes()[:-1]),
        r"121 bytes,.*take 122;.*truncated",
    ),
    "idx too long": (lambda index, _: index.write_bytes(index.read_bytes() + b"x"), r"123 bytes,.*take 122;.*too long"),
    "multimodal": (
        lambda index, _: index.write_bytes(index.read_bytes() + bytes(4)),
        r"multimodal corpus, which is not supported",
    ),
    "foreign": (lambda index, _: index.write_bytes(b"x" * 5000), r"not a Megatron index, it begins with b'xxxxxxxxx'"),
    "foreign and short": (lambda index, _: index.write_bytes(b"PK"), r"not a Megatron index, it begins with b'PK'"),
    "other version": (
        lambda index, _: patch_bytes(index, 9, struct.pack("<Q", 2)),
        r"index version 2, this package reads version 1",
    ),
    "token type float": (
        lambda index, _: patch_bytes(index, 17, b"\x06"),
        r"code 6 is not a type of token ids; known are 1 \(uint8\)",
    ),
    "absurd count": (lambda index, _: patch_bytes(index, 18, struct.pack("<Q", 2**60)), r"truncated"),
    "negative length": (lambda index, _: patch_bytes(index, 38, struct.pack("<i", -1)), r"sequence 1 has length -1"),
    "overlapping pointers": (
        lambda index, _: patch_bytes(index, 58, struct.pack("<q", 6)),
        r"sequence 1 begins at byte 6, .* put it at 8",
    ),
    "falling boundaries": (
        lambda index, _: patch_bytes(index, 90, struct.pack("<q", 3)),
        r"document boundaries go from 0 to 4",
    ),
    "boundaries end early": (
        lambda index, _: patch_bytes(index, 114, struct.pack("<q", 3)),
        r"boundaries go from 0 to 3, expected .* 0 to 4",
    ),
    "bin cut": (
        lambda _, data: data.write_bytes(data.read_bytes()[:-2]),
        r"bin: truncated, it has 26 bytes.* 14 tokens of uint16, 28 bytes",
    ),
    "bin cut inside a token": (
        lambda _, data: data.write_bytes(data.read_bytes()[:-1]),
        r"bin: truncated, it has 27 bytes",
    ),
    "bin empty": (lambda _, data: data.write_bytes(b""), r"bin: truncated, it has 0 bytes"),
    "bin too long": (lambda _, data: data.write_bytes(data.read_bytes() + b"zz"), r"bin: too long, it has 30 bytes"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_found_at_opening(corpus: str, damage: str) -> None:
    do, sentence = DAMAGE[damage]
    do(idx_path(corpus), bin_path(corpus))
    with pytest.raises(DataError, match=sentence) as caught:
        read_index(corpus)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("sequences", "boundaries"), [(0, [0]), (0, []), (2, [0, 2])])
def test_a_corpus_without_tokens_is_refused(tmp_path: Path, sequences: int, boundaries: list[int]) -> None:
    head = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, sequences, len(boundaries))
    idx_path(f"{tmp_path}/c").write_bytes(head + bytes(12 * sequences) + np.array(boundaries, "<i8").tobytes())
    bin_path(f"{tmp_path}/c").write_bytes(b"")
    with pytest.raises(DataError, match=r"c\.idx: the corpus is empty"):
        read_index(f"{tmp_path}/c")


def test_the_index_of_another_corpus_is_refused(tmp_path: Path, corpus: str) -> None:
    other = write(tmp_path / "other", [[1, 256]])
    idx_path(other).replace(idx_path(corpus))
    with pytest.raises(DataError, match="do not belong together"):
        read_index(corpus)


def test_the_two_file_names_are_taken_for_the_prefix(corpus: str) -> None:
    assert read_index(f"{corpus}.idx").prefix == read_index(f"{corpus}.bin").prefix == corpus


def test_an_error_inside_the_block_leaves_no_file(tmp_path: Path) -> None:
    def broken() -> None:
        with CorpusWriter(tmp_path / "c") as writer:
            writer.add_document(np.array([1, 2]))
            raise RuntimeError("tokenizer failed")

    with pytest.raises(RuntimeError):
        broken()
    assert list(tmp_path.iterdir()) == []


def test_an_error_while_rebuilding_leaves_the_old_corpus(tmp_path: Path, corpus: str) -> None:
    before = bin_path(corpus).read_bytes(), idx_path(corpus).read_bytes()
    with pytest.raises(DataError, match=r"document 1 has token ids from 3 to 70000; uint16 holds 0 to 65535"):
        write(Path(corpus), [[1], [3, 70000]])
    assert (bin_path(corpus).read_bytes(), idx_path(corpus).read_bytes()) == before
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("tokens", [np.array([], dtype=np.int64), np.ones((2, 2), dtype=np.int64)])
def test_a_document_that_is_none_is_refused(tmp_path: Path, tokens: np.ndarray) -> None:
    with pytest.raises(DataError, match="document 0 has shape"), CorpusWriter(tmp_path / "c") as writer:
        writer.add_document(tokens)


def test_a_corpus_of_no_documents_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no documents were added"), CorpusWriter(tmp_path / "c"):
        pass
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_token_type_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="'float32' is not one Megatron knows; use one of uint8"):
        CorpusWriter(tmp_path / "c", "float32")


def test_building_twice_touches_nothing(tmp_path: Path, corpus: str) -> None:
    before = [(path.name, path.stat().st_ino) for path in sorted(tmp_path.iterdir())]
    write(Path(corpus))
    assert [(path.name, path.stat().st_ino) for path in sorted(tmp_path.iterdir())] == before


def test_a_rebuilt_corpus_replaces_the_old_one(corpus: str) -> None:
    write(Path(corpus), [[5, 256]])
    assert read_index(corpus).document_lengths.tolist() == [2]


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"file/c\.bin: cannot be written"), CorpusWriter(tmp_path / "file" / "c"):
        pass
