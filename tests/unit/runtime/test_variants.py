"""One process of a node compiles first, by threads, however it ends."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from select import select
from threading import Barrier
from typing import IO

import pytest

from megatron_balance.runtime.lower.memory import AttentionShape

PROCESS = """
import sys
from pathlib import Path
from megatron_balance.runtime.movers.triton.variants import first_of_node

print("asks", flush=True)
with first_of_node(Path(sys.argv[1]) / "cache", float(sys.argv[2])):
    print("in", flush=True)
    sys.stdin.readline()
"""


def came(process: subprocess.Popen[bytes], within_s: float, said: bytes = b"in\n") -> bool:
    out: IO[bytes] | None = process.stdout
    assert out is not None
    return bool(select([out], [], [], within_s)[0]) and out.readline() == said


@pytest.mark.parametrize("end", ["leaves", "is killed", "stands still"])
def test_the_others_wait_for_the_first_and_go_on_together_however_it_ends(tmp_path: Path, end: str) -> None:
    wait_s = 1.0 if end == "stands still" else 60.0
    started: list[subprocess.Popen[bytes]] = []

    def start() -> subprocess.Popen[bytes]:
        asked = [sys.executable, "-c", PROCESS, str(tmp_path), str(wait_s)]
        started.append(subprocess.Popen(asked, bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        assert came(started[-1], 60.0, b"asks\n")
        return started[-1]

    try:
        first = start()
        assert came(first, 30.0)
        others = [start(), start()]
        if end == "stands still":
            first.send_signal(signal.SIGSTOP)
        else:
            assert not any(came(other, 0.5) for other in others)
            if end == "leaves":
                first.communicate(b"\n", timeout=30.0)
            else:
                first.kill()
        assert all(came(other, 30.0) for other in others)  # neither has left
    finally:
        for process in started:
            process.kill()
            process.communicate()


def test_a_folder_that_cannot_be_written_keeps_nobody_waiting(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from megatron_balance.runtime.movers.triton.variants import first_of_node

    (tmp_path / "file").touch()
    with first_of_node(tmp_path / "file"):
        pass
    assert "every process compiles for itself" in caplog.text


def test_kernels_are_compiled_several_at_once_under_the_nodes_lock_and_progress_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import torch

    from megatron_balance.runtime.movers.triton import variants

    seen: list[str] = []

    @contextmanager
    def first(_: Path) -> Iterator[None]:
        seen.append("locked")
        yield
        seen.append("let go")

    together = Barrier(3)

    def compiles(**_: object) -> None:
        seen.append("compiled")
        together.wait(20.0)  # for two others

    monkeypatch.setattr(variants, "first_of_node", first)
    monkeypatch.setattr(variants, "variants", lambda *_: [])
    monkeypatch.setattr(variants.os, "sched_getaffinity", lambda _: range(3))
    monkeypatch.setattr(variants, "_TOLD_EVERY_S", -1.0)
    six = [variants.Variant(str(at), variants.copy_rows, compiles) for at in range(6)]
    compile_all = variants.compile_all
    monkeypatch.setattr(variants, "compile_all", lambda _, device: compile_all(six, device))
    with caplog.at_level("INFO"):
        variants.build(torch.device("cpu"), torch.float32, AttentionShape(2, 2, 64), "fp32")
    assert seen == ["locked", *["compiled"] * 6, "let go"]
    assert [line.split(" after")[0] for line in caplog.messages] == [
        f"Triton: {number} of 6 kernels compiled" for number in range(1, 7)
    ]
