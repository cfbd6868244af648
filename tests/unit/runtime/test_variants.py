"""One process of a node compiles first, by threads, however it ends."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from threading import Barrier

import pytest

from megatron_balance.runtime.lower.memory import AttentionShape

PROCESS = """
from megatron_balance.runtime.movers.triton.variants import first_of_node

ours.send("asks")
with first_of_node(cache, wait_s):
    ours.send("in")
    ours.recv()
"""


@pytest.mark.parametrize("end", ["leaves", "is killed", "stands still"])
def test_the_others_wait_for_the_first_and_go_on_together_however_it_ends(tmp_path: Path, end: str) -> None:
    # Forked from one process that has imported Triton, which takes seconds.
    forks = get_context("forkserver")
    forks.set_forkserver_preload(["__main__", "megatron_balance.runtime.movers.triton.variants"])
    wait_s = 1.0 if end == "stands still" else 60.0
    started: list[tuple[BaseProcess, Connection]] = []

    def came(ours: Connection, within_s: float, said: str = "in") -> bool:
        return ours.poll(within_s) and ours.recv() == said

    def start() -> tuple[BaseProcess, Connection]:
        ours, theirs = forks.Pipe()
        process = forks.Process(
            target=exec, args=(PROCESS, {"ours": theirs, "cache": tmp_path / "cache", "wait_s": wait_s})
        )
        process.start()
        started.append((process, ours))
        assert came(ours, 60.0, "asks")
        return started[-1]

    try:
        first, ours = start()
        assert first.pid is not None
        assert came(ours, 30.0)
        others = [start()[1], start()[1]]
        if end == "stands still":
            os.kill(first.pid, signal.SIGSTOP)
        else:
            assert not any(came(other, 0.5) for other in others)
            if end == "leaves":
                ours.send("leave")
                first.join(30.0)
            else:
                first.kill()
        assert all(came(other, 30.0) for other in others)  # neither has left
    finally:
        for process, _ in started:
            process.kill()
            process.join()


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
