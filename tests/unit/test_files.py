"""Files that are not what they should be: one sentence each, and little is read of them."""

from __future__ import annotations

import ast
import gzip
import os
import random
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_balance.cli.verify import read as read_plans
from megatron_balance.config import load_cluster
from megatron_balance.cost.table import load_table
from megatron_balance.errors import BalanceError, ConfigError
from megatron_balance.files import UnreadableError, json_text, open_lines, parse_json, read_text
from megatron_balance.lab.report.run import read as read_steps
from megatron_balance.strict_yaml import read_yaml
from megatron_balance.workloads.lengths import _of_jsonl, read_lengths

ALIASES = "a: &a [x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join(8 * [f'*{before}'])}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)


def message(read: Callable[[Path], Any], path: Path) -> str:
    with pytest.raises(BalanceError) as error:
        read(path)
    said = str(error.value)
    assert "\n" not in said
    assert len(said) < 400
    return said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (ALIASES, "its aliases stand for more than 100000 keys and values"),
        ("a: &a [*a]\n", "an alias stands for itself"),
        ("[" * 100_000, "it nests too deeply"),
        ("a: " + "{a: " * 150 + "}" * 150, "it nests too deeply"),
        ("num_ranks: " + "9" * 5000, "a number of 5000 characters"),
        ("\0", "has a NUL byte"),
        ("a: \x0f", "unacceptable character #x000f: special characters are not allowed in"),
        ("a" * 200_000, "longer than 131072 bytes"),
    ],
)
def test_yaml_is_bounded(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "some.yaml"
    path.write_text(text)
    assert said in message(read_yaml, path)


def test_aliases_within_bounds_are_read(tmp_path: Path) -> None:
    path = tmp_path / "some.yaml"
    path.write_text("a: &a [1, {b: 2}]\nc: [*a, *a]\n")
    assert read_yaml(path) == {"a": [1, {"b": 2}], "c": 2 * [[1, {"b": 2}]]}


READERS: list[Callable[[Path], Any]] = [read_lengths, load_table, read_plans, lambda path: _of_jsonl(path, "")]


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"[" * 1_000_000, "brackets nest too deeply"),
        (b"[" + b"9" * 5000 + b"]", "a whole number beyond 64 bits: 9999"),
        (b"[9223372036854775808]", "a whole number beyond 64 bits: 9223372036854775808"),
        (b"\0" * 5000, "has a NUL byte"),
        (b"[4096, \xff]", "not UTF-8 text"),
        (b"[4096,", "not JSON"),
    ],
)
def test_json_is_bounded(tmp_path: Path, read: Callable[[Path], Any], content: bytes, said: str) -> None:
    path = tmp_path / "some.json"
    path.write_bytes(content)
    assert said in message(read, path)


@pytest.mark.skipif(not os.path.exists("/dev/zero"), reason="needs /dev/zero")
@pytest.mark.parametrize("read", [*READERS, read_yaml, load_cluster, read_steps])
def test_an_endless_device_ends_at_once(tmp_path: Path, read: Callable[[Any], Any]) -> None:
    path = tmp_path / "zero.yaml"
    path.symlink_to("/dev/zero")
    said = message(lambda path: read(str(path)) if read is load_cluster else read(path), path)
    assert "NUL byte" in said or "not a file" in said


def test_whole_numbers_of_64_bits_are_read_and_text_is_bounded(tmp_path: Path) -> None:
    assert parse_json("[9223372036854775807, -9223372036854775808, 1.2345678901234567890123]")[:2] == [
        2**63 - 1,
        -(2**63),
    ]
    path = tmp_path / "text"
    path.write_text("grün" * 1000, encoding="utf-8")
    assert read_text(path) == "grün" * 1000
    with pytest.raises(UnreadableError, match="longer than 4999 bytes"):
        read_text(path, 4999)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ("base: ./some.yaml", "is based on itself"),
        ("base: h200\nnic_bytes_per_s: 0.0", "nic_bytes_per_s: expected more than 0, got 0.0"),
        ("base: h200\nflops_per_s: -1.0", "flops_per_s: expected more than 0"),
        ("base: h200\nranks_per_nic: 0", "expected ranks_per_nic of at least 1"),
        ("base: h200\nintra_alpha_s: -1.0", "intra_alpha_s: expected seconds of at least 0"),
    ],
)
def test_a_cluster_that_cannot_be_is_refused(tmp_path: Path, keys: str, said: str) -> None:
    path = tmp_path / "some.yaml"
    path.write_text(keys)
    assert said in message(lambda path: load_cluster(str(path)).build(), path)


def test_two_clusters_may_not_be_based_on_each_other(tmp_path: Path) -> None:
    for name, base in (("one", "two"), ("two", "one")):
        (tmp_path / f"{name}.yaml").write_text(f"base: ./{base}.yaml\n")
    with pytest.raises(ConfigError, match=r"is based on itself \(one.yaml -> two.yaml -> one.yaml\)"):
        load_cluster(str(tmp_path / "one.yaml"))


class Frames:
    """Stands in for the package zstandard: zlib's objects answer the same calls."""

    def __init__(self, max_window_size: int) -> None:
        assert max_window_size == 2**31, "files of zstd --long"

    def decompressobj(self) -> Any:
        return zlib.decompressobj(wbits=31)


def test_a_zst_file_is_read_to_the_end_of_its_last_frame(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package's own `open` ends at the first frame, and in the middle of one without a word."""
    monkeypatch.setitem(sys.modules, "zstandard", SimpleNamespace(ZstdDecompressor=Frames))
    monkeypatch.setattr("megatron_balance.files.ZSTD", ("zstandard",))
    parts = [random.Random(0).randbytes(3000).hex(), "a", "b" * 200_000]
    frames, file = [gzip.compress(part.encode()) for part in parts], tmp_path / "lines.zst"
    file.write_bytes(b"".join(frames))
    assert read_text(file) == "".join(parts)
    with open_lines(file) as lines:
        assert next(iter(lines)) == "".join(parts)
    file.write_bytes(b"".join(frames)[:-20])
    for read in (read_text, lambda path: list(lines_of(path))):
        with pytest.raises(UnreadableError, match="it ends before its last frame does"):
            read(file)
    file.write_bytes(b"")
    assert read_text(file) == ""


def lines_of(path: Path) -> Iterator[str]:
    with open_lines(path) as lines:
        yield from lines


def test_written_json_has_null_for_what_is_no_number() -> None:
    rows = {"a": [1.5, float("nan"), (float("inf"), {"b": -float("inf")})], 2: "NaN"}
    assert json_text(rows) == '{"a": [1.5, null, [null, {"b": null}]], "2": "NaN"}'
    assert json_text([1], indent=1) == "[\n 1\n]"


PACKAGE = Path(__file__).resolve().parents[2] / "megatron_balance"
INSIDE = {"files.py", "planning/step_planner.py", "ir/step.py"}
"""The writer itself; what goes to our own planning process, or has whole numbers and names alone."""


def test_no_json_is_written_that_other_readers_refuse() -> None:
    """Python writes NaN and Infinity, which JSON does not have, unless told not to."""
    lax: list[str] = []
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if "json.dump" in text else ():
            if not isinstance(node, ast.Call) or ast.unparse(node.func) not in ("json.dump", "json.dumps"):
                continue
            if "allow_nan" not in {each.arg for each in node.keywords}:
                lax.append(f"{path.relative_to(PACKAGE).as_posix()}: {ast.unparse(node)}")
    quoted = ("lab/report/run.py", "workloads/lengths.py", "workloads/lengths.py", "cost/table.py")  # in messages
    assert [each for each in lax if each.partition(":")[0] not in {*INSIDE, *quoted}] == []
