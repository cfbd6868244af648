"""Documents of JSONL to a Megatron corpus, by a tokenizer of the package `tokenizers`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from megatron_balance.errors import ConfigError, DataError
from megatron_balance.files import UnreadableError, open_lines, parse_json
from megatron_balance.workloads.corpus import BuildReport
from megatron_balance.workloads.idx import CorpusWriter

ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[SEP]")
"""Tokens that end a document, in the order in which they are looked for."""


class TextTokenizer:
    """A `tokenizer.json`: ids of a document's tokens, and of the token that ends it."""

    def __init__(self, path: Path) -> None:
        """Read it.

        Raises:
            ConfigError: no such file, none of `tokenizers`, or none of `ENDS` among its tokens.
        """
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
) -> BuildReport:
    """Write the corpus at `prefix`, a document for each line of the files: the text under `key`.

    `limit`: most documents; `replace`: another corpus of this name, which is refused otherwise. Empty
    texts are left out and counted.

    Raises:
        DataError: a file that cannot be read, a line without such a text, no document at all.
    """
    documents = tokens = empty = beyond = 0
    with CorpusWriter(prefix, tokenizer.token_type, replace=replace) as writer:
        for text in (each for path in files for each in _texts(path, key)):
            if limit is not None and documents >= limit:
                beyond += 1
            elif not text:
                empty += 1
            else:
                ids = tokenizer(text)
                writer.add_document(ids)
                documents += 1
                tokens += len(ids)
        if not documents:
            raise DataError(f"{prefix}: no document left to write, {empty} lines were empty texts")
    return BuildReport(documents, tokens, empty, 0, beyond)


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
