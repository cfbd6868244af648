"""Arrays that one process computes and all map."""

import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from megatron_balance.workloads.documents import OrderCache


def slow(folder: Path) -> np.ndarray:
    """Tell that it was computed, in a file."""
    with (folder / "computed").open("a") as stream:
        stream.write("x")
    time.sleep(0.05)
    return np.arange(5)


def ask(folder: Path) -> None:
    assert OrderCache(folder / "kept", "key").get("order", lambda: slow(folder)).tolist() == [0, 1, 2, 3, 4]


def test_of_several_that_ask_at_once_one_computes(tmp_path: Path) -> None:
    """Threads stand for processes: each opens the lock for itself."""
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(ask, [tmp_path] * 4))
    assert (tmp_path / "computed").read_text() == "x"


def test_other_settings_have_other_files(tmp_path: Path) -> None:
    cache = OrderCache(tmp_path, "key")
    made = [cache.under("seed", seed).get("order", lambda seed=seed: np.array([seed])) for seed in (1, 2)]
    assert [array.tolist() for array in made] == [[1], [2]]
    assert isinstance(made[0], np.memmap)


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :]


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "cut": lambda data: data[:-8],
    "empty": lambda _: b"",
    "quote of the header": lambda data: flipped(data, data.index(b"'descr")),
    "shape": lambda data: data.replace(b"(5,)", b"(4,)"),
    "a document": lambda data: flipped(data, -12),
    "checksum": lambda data: flipped(data, -1),
    "grown": lambda data: data + b"0",
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_file_is_computed_again(
    damage: Callable[[bytes], bytes], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = OrderCache(tmp_path, "key")
    cache.get("order", lambda: np.arange(5))
    (file,) = tmp_path.glob("*.npy")
    whole = file.read_bytes()
    assert damage(whole) != whole
    file.write_bytes(damage(whole))
    with caplog.at_level(logging.WARNING):
        assert cache.get("order", lambda: np.arange(5)).tolist() == [0, 1, 2, 3, 4]
    assert "it is computed again" in caplog.text
    assert OrderCache(tmp_path, "key").get("order", lambda: np.zeros(1)).tolist() == [0, 1, 2, 3, 4]


def test_a_folder_that_cannot_be_written_leaves_the_array_in_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        assert OrderCache(tmp_path / "file", "key").get("order", lambda: np.arange(2)).tolist() == [0, 1]
    assert "cannot be written (File exists), so every rank sorts" in caplog.text
