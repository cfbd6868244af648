"""Lengths to plan for: the distributions of the papers, data codes, corpora and other files; and
histograms of them.
"""

import csv
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from decimal import Decimal
from importlib import import_module
from itertools import chain, count
from math import ceil
from pathlib import Path
from typing import Any, cast

import numpy as np

from megatron_balance.errors import ConfigError, DataError
from megatron_balance.files import UnreadableError, open_lines, parse_json, read_text
from megatron_balance.ir.arrays import Ints
from megatron_balance.workloads import distributions
from megatron_balance.workloads.distributions import DISTRIBUTIONS
from megatron_balance.workloads.documents import shuffled
from megatron_balance.workloads.idx import read_index

# Lengths of documents on disk: a Megatron corpus, JSONL, lines and CSV of lengths (these three also
# as .gz and .zst), and Hugging Face data sets (Parquet, Arrow).
#
# A path may end in `#COLUMN`. Without it the first of these columns that is there counts: a number of
# tokens, a list of token ids, or text. Text is not tokenised here: its tokens are estimated from its
# bytes.

# Lengths in tokens of the sequences of one batch.
Lengths = tuple[int, ...]
# Of one drawing: more is a typing mistake, which would take hours and the machine's memory.
MOST_TOKENS, MOST_BATCHES = 10**11, 10**6
# Names of the distributions (`workloads.distributions` has their sources); data codes and paths are
# taken too.
DATASETS = tuple(DISTRIBUTIONS)


def draw(name: str, tokens: int | None, batches: int, seed: int | Sequence[int]) -> list[Lengths]:
    """Batches of document lengths of `tokens` tokens each; the last document of one is cut to fit.

    `name`: one of `DATASETS`, data codes (KnapFormer), or a path, whose documents come in an order
    drawn from the seed, again and again. `tokens`: None: data codes say themselves how many.

    Raises:
        ConfigError: an unknown name, or a number that cannot be.
        DataError: a damaged file.
    """
    if batches < 1 or (tokens is not None and tokens < 1):
        raise ConfigError(f"--tokens {tokens} --batches {batches}: both must be at least 1")
    if batches > MOST_BATCHES or (tokens or 0) * batches > MOST_TOKENS:
        raise ConfigError(
            f"--tokens {tokens} --batches {batches}: expected at most {MOST_TOKENS} tokens in all, in {MOST_BATCHES} "
            "batches at most"
        )
    seeds = [seed] if isinstance(seed, int) else list(seed)
    if min(seeds) < 0:
        raise ConfigError(f"--seed {seed}: must be at least 0")
    if distributions.is_data_code(name):
        if tokens is not None:
            raise ConfigError(
                f"--tokens {tokens}: the data codes of --dataset {name} say how many tokens a batch has; leave "
                "--tokens out"
            )
        return [tuple(chain.from_iterable(batch)) for batch in distributions.draw_by_gpu(name, batches, seeds)]
    if name not in DISTRIBUTIONS and not is_path(name):
        raise ConfigError(
            f"--dataset {name!r} is not known; choose one of {', '.join(DATASETS)}, data codes such as g8b4i256f1s0, "
            f"a path to a corpus (.idx), JSONL, Parquet or Arrow, or give --lengths-file"
        )
    if tokens is None:
        raise ConfigError(f"--dataset {name} needs --tokens N, the tokens of a batch")
    if name not in DISTRIBUTIONS:
        documents = _endless(document_lengths(name), seeds)
    else:
        distribution, generator = DISTRIBUTIONS[name], np.random.default_rng(seed)
        documents = iter(lambda: distribution.document(generator), None)
    return [_fill(documents, tokens) for _ in range(batches)]


def _endless(lengths: Ints, seeds: list[int]) -> Iterator[int]:
    """The lengths in an order drawn from the seed, then in another one, without end."""
    for epoch in count():
        yield from lengths[shuffled(len(lengths), *seeds, epoch)].tolist()


def _fill(documents: Iterator[int], tokens: int) -> Lengths:
    lengths: list[int] = []
    left = tokens
    while left:
        lengths.append(min(next(documents), left))
        left -= lengths[-1]
    return tuple(lengths)


def read_lengths(path: Path) -> list[Lengths]:
    """Batches of lengths from a file, which may be compressed (.gz, .zst).

    JSON: `[lengths...]` is one batch, `[[lengths...], ...]` several. Lines of one length each are one
    batch; of several, a batch each. CSV with a header: the first of `datasets.COLUMNS` that is a
    number; a column `batch` says which rows belong together. Raises ConfigError with batch and place.
    """
    try:
        text = read_text(path)
        content: object = parse_json(text) if _is_json(text) else _of_lines(text)
    except OSError as error:
        raise ConfigError(
            f"{path}: {error.strerror or error}; --lengths-file takes a file of lengths in tokens: JSON, CSV or lines"
        ) from error
    except UnreadableError as error:
        raise ConfigError(f"{path}: {error}; expected [4096, 512, ...] or [[4096, 512], [1024], ...]") from error
    if isinstance(content, list) and content and isinstance(content[0], list):
        return [_batch(entry, f"{path}: batch {number}") for number, entry in enumerate(cast(list[object], content))]
    return [_batch(cast(object, content), f"{path}")]


def tokens_of(word: str) -> int | None:
    """A number of tokens: 4096, 128k (of 1,024), 1m (of 1,024 k); None: it is none."""
    digits = word.strip().lower()
    unit = {"k": 2**10, "m": 2**20}.get(digits[-1:], 1)
    try:
        number = Decimal(digits[:-1]) * unit if unit > 1 else Decimal(int(digits))
    except (ValueError, ArithmeticError):
        return None
    return int(number) if number.is_finite() and number == int(number) and abs(number) < 2**63 else None


def _length_of(word: str) -> object:
    """A length in a file; a word that is none stays."""
    plain = _whole(word)
    number = tokens_of(word) if plain == word and word[-1:] in _UNITS and word[:1].isdigit() else None
    return plain if number is None else number


_UNITS = ("k", "K", "m", "M")


def _is_json(text: str) -> bool:
    """Whether a text is meant as JSON: what begins with a digit or a name is lines."""
    return not text.strip() or text.lstrip()[0] in '[{"-'


def _of_lines(text: str) -> list[object]:
    """Lengths of lines, or of CSV with a header, as JSON has them; words that are no numbers stay."""
    try:
        rows = [row for row in csv.reader(text.replace("\t", ",").splitlines()) if any(word.strip() for word in row)]
    except csv.Error as error:
        raise UnreadableError(f"not CSV: {error}") from None
    if not rows:
        raise UnreadableError("no lengths in any of its lines")
    header = [word.strip() for word in rows[0]]
    batches = [[_length_of(word) for word in " ".join(row).split()] for row in rows]
    if not all(isinstance(entry, int) for entry in batches[0]):
        return _of_columns(header, rows[1:])
    if all(len(batch) == 1 for batch in batches):
        return [batch[0] for batch in batches]
    return cast("list[object]", batches)


def _of_columns(header: list[str], rows: list[list[str]]) -> list[object]:
    column = next((name for name in COLUMNS if name in header), None)
    if column is None:
        raise UnreadableError(f"no column of lengths; it has {', '.join(header)}, and {COLUMNS[0]} is looked for")
    at, grouped = header.index(column), header.index("batch") if "batch" in header else None
    batches: dict[str, list[object]] = {}
    for number, row in enumerate(rows, start=2):
        if len(row) != len(header):
            raise UnreadableError(f"line {number} has {len(row)} columns, the first line has {len(header)}")
        batches.setdefault("" if grouped is None else row[grouped], []).append(_length_of(row[at].strip()))
    found = list(batches.values())
    return cast("list[object]", found) if grouped is not None else found[0] if found else []


def _batch(entries: object, where: str) -> Lengths:
    """One batch, every entry checked."""
    if not isinstance(entries, list) or not entries:
        raise ConfigError(
            f"{where}: holds {_describe(cast(object, entries))}; expected [4096, 512, ...] or [[4096, 512], [1024], "
            "...]"
        )
    lengths: list[int] = []
    for place, length in enumerate(cast(list[object], entries)):
        # bool is an int to Python, and `true` is no length.
        if type(length) is not int or length < 1:
            raise ConfigError(
                f"{where}: length {place} is {_describe(length)}; a length is a whole number of tokens, at least 1"
            )
        lengths.append(length)
    return tuple(lengths)


def _describe(value: object) -> str:
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "a list" if value else "an empty list"
    return json.dumps(value)


def histogram(lengths: Ints) -> list[dict[str, int]]:
    """Bars that double in width: `low` to `high` tokens, both included; empty ones are kept."""
    lengths = lengths[lengths > 0]
    if not len(lengths):
        return []
    exponents = np.frexp(lengths.astype(np.float64))[1] - 1  # 2^e <= length < 2^(e + 1), exact below 2^53
    first, last = int(exponents.min()), int(exponents.max())
    documents = np.bincount(exponents - first)
    tokens = np.bincount(exponents - first, weights=lengths).astype(np.int64)
    counts = zip(range(first, last + 1), documents.tolist(), tokens.tolist(), strict=True)
    return [{"low": 1 << e, "high": (2 << e) - 1, "documents": number, "tokens": held} for e, number, held in counts]


def quantiles(lengths: Ints) -> dict[str, int]:
    """Minimum, some deciles, maximum (lengths that occur) and rounded mean, in tokens."""
    at = {"min": 0.0, "p10": 0.1, "median": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
    values = np.quantile(lengths, list(at.values()), method="lower")
    return {**{name: int(value) for name, value in zip(at, values, strict=True)}, "mean": round(float(lengths.mean()))}


log = logging.getLogger(__name__)
# Columns looked for, in this order.
COLUMNS = ("length", "num_tokens", "token_count", "n_tokens", "input_ids", "tokens", "text", "content", "code")
# Of text: the usual figure for byte-pair encodings on English (OpenAI's documentation: a token is
# about four characters).
BYTES_PER_TOKEN = 4.0
ARROW = (".arrow", ".parquet")
# Characters, of what is read as lines: some ten million tokens; few compressed bytes may say more.
LONGEST_LINE = 2**26
# Characters of a JSONL file that are read before a whole line is.
PEEK = 2**16


def is_path(name: str) -> bool:
    """Whether a data set's name is meant as a path."""
    base = name.rpartition("#")[0] or name
    endings = (".idx", ".bin", ".jsonl", ".json", ".csv", ".txt", *ARROW)
    return "/" in base or _uncompressed(Path(base)).name.endswith(endings) or Path(base).exists()


def _uncompressed(path: Path) -> Path:
    return path.with_suffix("") if path.suffix in (".gz", ".zst") else path


def document_lengths(name: str) -> Ints:
    """[documents] lengths in tokens, in the file's order; empty documents are left out.

    Raises:
        ConfigError: no such path, no column to count, or pyarrow is missing for Parquet and Arrow.
        DataError: a damaged file, or one without a document.
    """
    base, _, column = name.partition("#")
    path = Path(base)
    if base.endswith((".idx", ".bin")):
        lengths = read_index(base).document_lengths
    elif path.is_dir() or base.endswith(ARROW):
        lengths = _of_arrow(path, column)
    elif path.is_file():
        lengths = (_of_csv if _uncompressed(path).suffix == ".csv" else _of_jsonl)(path, column)
    elif path.with_name(path.name + ".idx").is_file():
        lengths = read_index(base).document_lengths
    else:
        raise ConfigError(
            f"--dataset {name}: no such file or folder; a corpus (.idx), JSONL, CSV, or a folder or file of .parquet "
            "or .arrow"
        )
    lengths = lengths[lengths > 0]
    if not len(lengths):
        raise DataError(f"{base}: holds no document with tokens")
    return lengths


def _of_csv(path: Path, column: str) -> Ints:
    """Rows below a header that names their columns."""
    rows = csv.reader(_lines(path))
    lengths: list[int] = []
    count: Callable[[Any], int] | None = None
    try:
        header = [word.strip() for word in next(rows, list[str]())]
        if len(header) < 2 and all(type(_whole(word)) is int for word in header):  # lines of one length each, or none
            return _of_jsonl(path, column)
        column = _choose(header, column, str(path))
        for number, row in enumerate(rows, 2):
            if len(row) != len(header):
                raise DataError(f"{path}:{number}: {len(row)} columns, the first line has {len(header)}")
            value = _whole(row[header.index(column)].strip())
            count = count or _counter(value, column, str(path))
            lengths.append(_checked(count, value, f"{path}:{number}: {column}"))
    except csv.Error as error:
        raise DataError(f"{path}:{rows.line_num}: not CSV: {error}") from error
    return np.array(lengths, dtype=np.int64)


def _whole(word: str) -> int | str:
    """The number that a word of at most 18 digits is; any other word as it is."""
    return int(word) if word.isascii() and word.isdigit() and len(word) < 19 else word


def _of_jsonl(path: Path, column: str) -> Ints:
    """One object, number or list of numbers a line."""
    lengths: list[int] = []
    count: Callable[[Any], int] | None = None
    for number, line in enumerate(_lines(path), 1):
        try:
            value: object = parse_json(line)
        except UnreadableError as error:
            raise DataError(f"{path}:{number}: {error}") from error
        if isinstance(value, list):  # a JSON file of lengths, as --lengths-file takes them
            lengths += [
                _checked(int, length, f"{path}:{number}: length {place}")
                for place, length in enumerate(cast("list[object]", value))
            ]
            continue
        row = cast("dict[str, Any]", value if isinstance(value, dict) else {"length": value})
        if count is None:
            column = _choose(list(row), column, str(path))
            count = _counter(row.get(column), column, str(path))
        if column not in row:
            raise DataError(f"{path}:{number}: no key {column!r}, which the first line has")
        lengths.append(_checked(count, row[column], f"{path}:{number}: {column}"))
    return np.array(lengths, dtype=np.int64)


def _lines(path: Path) -> Iterator[str]:
    try:
        with open_lines(path) as stream:
            first = stream.readline(PEEK)
            if "\0" in first:
                raise DataError(f"{path}: not text, so not JSONL (has a NUL byte)")
            if not first.endswith("\n"):
                first += stream.readline(LONGEST_LINE)
            for line in chain([first], iter(lambda: stream.readline(LONGEST_LINE), "")):
                if len(line) >= LONGEST_LINE:
                    raise DataError(f"{path}: a line of more than {LONGEST_LINE} characters; expected a document each")
                if line.strip():
                    yield line
    except OSError as error:
        raise ConfigError(f"--dataset {path}: {error.strerror}") from error
    except UnreadableError as error:
        raise DataError(f"{path}: {error}") from None


def _choose(columns: list[str], wanted: str, where: str) -> str:
    if wanted:
        if wanted not in columns:
            raise ConfigError(f"{where}: no column {wanted!r}; columns: {', '.join(columns)}")
        return wanted
    for name in COLUMNS:
        if name in columns:
            return name
    raise ConfigError(f"{where}: no column to count tokens by; columns: {', '.join(columns)}. Name one: PATH#COLUMN")


def _counter(example: object, column: str, where: str) -> Callable[[Any], int]:
    """Number of tokens that a value of the column stands for."""
    match example:
        case str():
            _warn_of_text(where, column)
            return _text_tokens
        case int() if not isinstance(example, bool):
            return int
        case list():
            return len
        case _:
            raise ConfigError(
                f"{where}: column {column!r} holds {type(example).__name__}; expected whole numbers, token ids or text"
            )


def _text_tokens(text: str) -> int:
    return ceil(len(text.encode("utf-8")) / BYTES_PER_TOKEN)


def _checked(count: Callable[[Any], int], value: object, where: str) -> int:
    kind = {int: int, len: list, _text_tokens: str}[count]
    if type(value) is not kind or (kind is int and cast(int, value) < 0):
        raise DataError(
            f"{where}: expected {'a whole number of tokens' if kind is int else kind.__name__}, got "
            f"{json.dumps(value)[:60]}"
        )
    return count(value)


def _of_arrow(path: Path, column: str) -> Ints:
    """Parquet and Arrow files, those of a folder in the order of their names."""
    files = sorted(file for file in path.rglob("*") if file.suffix in ARROW) if path.is_dir() else [path]
    if not files:
        raise ConfigError(f"--dataset {path}: the folder holds no .parquet or .arrow file")
    if not path.exists():
        raise ConfigError(f"--dataset {path}: no such file")
    parts = [batch for file in files for batch in _record_batches(file, column)]
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)


def _record_batches(file: Path, column: str) -> Iterator[Ints]:
    pa = _pyarrow("pyarrow", file)
    try:
        if file.suffix == ".parquet":
            opened = _pyarrow("pyarrow.parquet", file).ParquetFile(file)
            chosen = _choose(list(opened.schema_arrow.names), column, str(file))
            batches = opened.iter_batches(columns=[chosen])
        else:
            batches, chosen = _arrow_batches(pa, file, column)
        for batch in batches:
            yield _of_array(pa, batch.column(chosen), chosen, file)
    except pa.ArrowInvalid as error:
        raise DataError(f"{file}: not a {file.suffix} file that pyarrow reads ({error})") from error


def _pyarrow(module: str, file: Path) -> Any:
    try:
        return import_module(module)
    except ImportError:
        raise ConfigError(f"--dataset {file}: reading Parquet and Arrow needs pyarrow: pip install pyarrow") from None


def _arrow_batches(pa: Any, file: Path, column: str) -> tuple[Iterable[Any], str]:
    """Record batches of an Arrow file, a stream (as `datasets` writes) or with a footer."""
    ipc, source = _pyarrow("pyarrow.ipc", file), pa.memory_map(str(file))
    try:
        reader = ipc.open_stream(source)
        batches: Iterable[Any] = reader
    except pa.ArrowInvalid:
        reader = ipc.open_file(source)
        batches = (reader.get_batch(i) for i in range(reader.num_record_batches))
    return batches, _choose(list(reader.schema.names), column, str(file))


def _of_array(pa: Any, array: Any, column: str, file: Path) -> Ints:
    compute, kind = _pyarrow("pyarrow.compute", file), array.type
    if pa.types.is_integer(kind):
        counted = array
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind):
        counted = compute.list_value_length(array)
    elif pa.types.is_string(kind) or pa.types.is_large_string(kind):
        _warn_of_text(str(file), column)
        num_bytes = compute.cast(compute.binary_length(array), pa.float64())
        counted = compute.ceil(compute.divide(num_bytes, BYTES_PER_TOKEN))
    else:
        raise ConfigError(f"{file}: column {column!r} holds {kind}; expected whole numbers, token ids or text")
    return np.asarray(counted.fill_null(0).to_numpy(zero_copy_only=False)).astype(np.int64)


def _warn_of_text(where: str, column: str) -> None:
    log.warning("%s: %s is text; its tokens are estimated at %g bytes each", where, column, BYTES_PER_TOKEN)
