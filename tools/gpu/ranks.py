"""Ranks of a part over several, forked from a process that has imported torch and never used CUDA."""

import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from tools.gpu import sharing
from tools.gpu.rows import Context, Device

PATIENCE_S = 60.0
"""Of a rank's collectives: longer than any of them takes where ranks share a GPU by time slices."""
DUMP_S = 0.5
GRACE_S = 5.0
"""For the others to end by themselves once a rank has failed."""


@dataclass(frozen=True)
class Place:
    """A rank's place. `gpu`: its device's number; `store`: file where all meet."""

    rank: int
    size: int
    device: Device
    gpu: int
    store: str


@dataclass(frozen=True)
class Ended:
    """How ranks ended: results and exit codes by rank (None: it hung), and the end of a log that says
    why.
    """

    found: list[Any] = field(default_factory=list[Any])
    codes: list[int | None] = field(default_factory=list[int | None])
    said: str = ""

    @property
    def hung(self) -> int:
        return self.codes.count(None)

    @property
    def well(self) -> bool:
        return not any(code is None or code for code in self.codes)

    def results(self) -> list[Any]:
        """By rank. RuntimeError: one failed or hung."""
        if not self.well:
            raise RuntimeError(f"ranks ended with {self.codes} (None: it hung): {self.said}")
        return self.found


def run_ranks(
    target: Callable[..., Any],
    size: int,
    given: Sequence[Any],
    context: Context,
    *,
    seconds: float,
    environment: dict[str, str] | None = None,
) -> Ended:
    """Run `target(place, *given)` as each of `size` ranks. After `seconds`, or soon after one failed,
    those that are left say where they stand and are killed. `environment`: None: of the way of
    sharing that is known to work.
    """
    if environment is None:
        environment = sharing.environment(sharing.chosen(context), context.state, context.ranks_per_gpu)
    # Its server imports torch once, and never touches the device.
    forks = multiprocessing.get_context("forkserver")
    forks.set_forkserver_preload(["torch", "torch.distributed", "megatron_balance.runtime.bind", target.__module__])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        places = [
            Place(rank, size, context.device, rank // context.ranks_per_gpu, str(folder / "store"))
            for rank in range(size)
        ]
        processes = [forks.Process(target=_enter, args=(target, place, given, folder, environment)) for place in places]
        for process in processes:
            process.start()
        codes = _ended(processes, time.monotonic() + seconds)
        logs = [(folder / f"log{rank}").read_text(errors="replace") for rank in range(size)]
        failed = next((rank for rank, code in enumerate(codes) if code), codes.index(None) if None in codes else None)
        files = [folder / f"result{rank}" for rank in range(size)]
        found = [pickle.loads(file.read_bytes()) if file.exists() else None for file in files]
        if failed is not None:
            sys.stderr.write(f"rank {failed} of {size}:\n{logs[failed][-3000:]}\n")
        return Ended(found, codes, "" if failed is None else " | ".join(logs[failed].strip().splitlines()[-3:])[-600:])


def _ended(processes: Sequence[Any], until: float) -> list[int | None]:
    """Exit codes; None: it had to be killed."""
    while time.monotonic() < until and any(process.exitcode is None for process in processes):
        if any(process.exitcode for process in processes):
            until = min(until, time.monotonic() + GRACE_S)
        time.sleep(0.02)
    codes = [process.exitcode for process in processes]
    hung = [process for process in processes if process.exitcode is None]
    for process in hung:
        os.kill(process.pid, signal.SIGUSR1)
    if hung:
        time.sleep(DUMP_S)
    for process in hung:
        process.kill()
        process.join()
    return codes


def _enter(
    target: Callable[..., Any], place: Place, given: Sequence[Any], folder: Path, environment: dict[str, str]
) -> None:
    log = os.open(folder / f"log{place.rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    os.environ.update({**environment, "LOCAL_RANK": str(place.gpu)})
    found = target(place, *given)
    (folder / f"part{place.rank}").write_bytes(pickle.dumps(found))
    (folder / f"part{place.rank}").rename(folder / f"result{place.rank}")


def join(place: Place) -> None:
    """Make the world of all ranks; its collectives give up after `PATIENCE_S`."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if place.device == "cuda":
        torch.cuda.set_device(place.gpu)
    dist.init_process_group(
        "nccl" if place.device == "cuda" else "gloo",
        init_method=f"file://{place.store}",
        rank=place.rank,
        world_size=place.size,
        timeout=timedelta(seconds=PATIENCE_S),
    )


def leave() -> None:
    """End with all others, so that no store goes before its clients."""
    import torch.distributed as dist

    dist.barrier()
    dist.destroy_process_group()


def groups(place: Place, ranks_per_node: int) -> Any:
    """The pool of all ranks, with threads for streams where there is no GPU."""
    from megatron_balance.runtime.groups import make_groups
    from tests.support.stream_threads import with_streams

    made = make_groups([range(place.size)], ranks_per_node)
    return made if place.device == "cuda" else with_streams(made, ranks_per_node)


def settle(device: Device) -> None:
    """Wait for the device."""
    import torch

    if device == "cuda":
        torch.cuda.current_stream().synchronize()
