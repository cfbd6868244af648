"""The emulated cluster's tests skip with the reason where namespaces are not permitted."""

import multiprocessing
import os
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from megatron_balance.errors import BalanceError
from tools.emulated_cluster import Result, Target, Topology, check, run

Job = Callable[..., Any]
Emulate = Callable[..., Result]


@pytest.fixture(scope="session")
def permitted() -> None:
    if (reason := check()) is not None:
        pytest.skip(f"no emulated cluster here: {reason}")


@pytest.fixture
def emulate(permitted: None, tmp_path: Path) -> Emulate:
    # `emulate(topology, job, *args, **options)`: `run` of `job(rank, controller, *args)` from a
    # process with torch and no threads.
    def call(topology: Topology, job: Job, *args: Any, **options: Any) -> Result:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed", "tests.emulated.jobs"])
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_run, args=(theirs, topology, job, args, tmp_path / "logs", options))
        process.start()
        theirs.close()
        answer = ours.recv()
        process.join()
        if isinstance(answer, Exception):
            raise answer
        return answer

    return call


def _run(
    pipe: Connection, topology: Topology, job: Job, args: tuple[Any, ...], logs: Path, options: dict[str, Any]
) -> None:
    target: Target = lambda rank, controller: job(rank, controller, *args)  # noqa: E731  the ranks are forks, so it need not be pickled
    with suppress(PermissionError):
        # so that what else runs on the cores disturbs the measured rates less; root may
        os.nice(-10)
    try:
        pipe.send(run(topology, target, logs, **options))
    except (BalanceError, RuntimeError) as error:
        pipe.send(error)
