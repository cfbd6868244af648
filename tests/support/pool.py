"""Gloo ranks on this machine, forked once and used by many tests."""

# A job is a module-level function `job(world, *args)`; `Pool.run(job, n, *args)` runs it on ranks 0
# .. n - 1 of a world of n and returns their results by rank. Ranks are forked from a server that
# has imported `rank_imports` and started no thread, whatever this process has done before. A job
# that fails shows the failing rank's traceback; one that hangs, the stacks of all ranks; after
# either, the next job gets new ranks.

from __future__ import annotations

import faulthandler
import importlib
import multiprocessing
import os
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_balance.errors import BalanceError

if TYPE_CHECKING:
    from megatron_balance.runtime.groups import Groups

NUM_RANKS = 8
WORLDS = (1, 2, 3, 4, 8)
# Worlds that are two nodes, so that collectives run in some groups and point-to-point transfers in
# all others.
RANKS_PER_NODE = {4: 2, 8: 4}
IMPORTS = "tests.support.rank_imports"
_GRACE_S = 3.0  # what the other ranks get once one has failed


# A job failed, died or hung on some rank.
class RankError(AssertionError): ...


def said(call: Callable[..., object], *given: Any, otherwise: str = "", **named: Any) -> str:
    # The error that a call raises on this rank, or `otherwise`.
    try:
        call(*given, **named)
    except (BalanceError, RuntimeError) as error:
        return str(error)
    return otherwise


@dataclass(frozen=True)
class World:
    # The world of a job: its rank, the number of ranks, and the process groups of exactly these
    # (`groups.pool` and its nodes).
    rank: int
    size: int
    groups: Groups


class Pool:
    # Waiting ranks, the world of torch.distributed. `timeout_s`: what one job may take.
    def __init__(self, timeout_s: float = 60.0, num_ranks: int = NUM_RANKS) -> None:
        self.timeout_s = timeout_s
        self.num_ranks = num_ranks
        self.folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self.processes: list[Any] = []
        self.pipes: list[Connection] = []
        self.starts = 0

    def run(self, job: Callable[..., Any], num_ranks: int, *args: Any) -> list[Any]:
        # Results of `job(world, *args)` on ranks 0 .. num_ranks - 1, by rank.
        #
        # Raises RankError: with the traceback of the rank that failed first, or all stacks if none
        # did in time.
        if num_ranks not in WORLDS or num_ranks > self.num_ranks:
            raise ValueError(f"worlds of {WORLDS} ranks up to {self.num_ranks} are prepared, got {num_ranks}")
        if not self.processes:
            self._start()
        for pipe in self.pipes[:num_ranks]:
            pipe.send((job, num_ranks, args))
        return self._replies(num_ranks)

    def close(self) -> None:
        # End the ranks; `run` would start new ones.
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        for pipe in self.pipes:
            pipe.close()
        self.processes, self.pipes = [], []

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([IMPORTS])
        self.starts += 1
        for rank in range(self.num_ranks):
            ours, theirs = context.Pipe()
            store = Path(self.folder.name) / f"store{self.starts}"
            given = (rank, self.num_ranks), theirs, store, self._stacks(rank)
            process = context.Process(target=_serve, args=given, daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self.pipes.append(ours)
        self._replies(self.num_ranks)

    def _stacks(self, rank: int) -> Path:
        return Path(self.folder.name) / f"stacks{rank}"

    def _replies(self, num_ranks: int) -> list[Any]:
        results: list[Any] = [None] * num_ranks
        failures: list[str] = []
        waiting = {self.pipes[rank]: rank for rank in range(num_ranks)}
        deadline = time.monotonic() + self.timeout_s
        while waiting and time.monotonic() < deadline:
            for pipe in wait(list(waiting), timeout=max(0.0, deadline - time.monotonic())):
                assert isinstance(pipe, Connection)
                rank = waiting.pop(pipe)
                try:
                    good, result = pipe.recv()
                except EOFError:
                    good, result = False, "the process died"
                results[rank] = result
                if not good:
                    failures.append(f"rank {rank} of {num_ranks} failed:\n{result}")
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
        if failures or waiting:
            if waiting:
                failures.append(self._hung(sorted(waiting.values())))
            self.close()
            raise RankError("\n".join(failures))
        return results

    def _hung(self, ranks: list[int]) -> str:
        for rank in ranks:
            if self.processes[rank].is_alive():
                # faulthandler writes the stacks, see `_serve`
                os.kill(self.processes[rank].pid, signal.SIGUSR1)
        time.sleep(0.5)
        files = {rank: self._stacks(rank) for rank in ranks if self._stacks(rank).exists()}
        stacks = "\n".join(f"rank {rank}:\n{file.read_text()}" for rank, file in files.items())
        return f"ranks {ranks} did not answer in time; their stacks:\n{stacks}"


def _serve(place: tuple[int, int], pipe: Connection, store: Path, stacks: Path) -> None:
    # A rank (`place`: number, of how many): join its worlds, run jobs until the pipe closes.
    threading.Thread(target=_die_with_parent, daemon=True).start()
    with stacks.open("w") as file:
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
        worlds = _join(*place, pipe, store)
        while True:
            try:
                job, size, args = pipe.recv()
            except (EOFError, OSError):
                return
            _run(pipe, job, place[1], worlds.get(size), *args)


def _die_with_parent() -> None:
    # No rank outlives the tests, not even inside a collective.
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _join(rank: int, num_ranks: int, pipe: Connection, store: Path) -> dict[int, World]:
    importlib.import_module(IMPORTS)  # if this process started its server for something else
    import torch
    import torch.distributed as dist

    from megatron_balance.runtime.groups import make_groups

    torch.set_num_threads(1)
    place: Any = {"init_method": f"file://{store}", "rank": rank, "world_size": num_ranks}
    dist.init_process_group("gloo", **place, timeout=timedelta(seconds=120))
    worlds: dict[int, World] = {}
    for size in (each for each in WORLDS if each <= num_ranks):
        pools = [range(size), range(size, num_ranks)] if size < num_ranks else [range(size)]
        groups = make_groups(pools, RANKS_PER_NODE.get(size, 0))
        if rank < size:
            worlds[size] = World(rank, size, groups)
    pipe.send((True, None))
    return worlds


def _run(pipe: Connection, job: Callable[..., Any], num_ranks: int, world: World | None, *args: Any) -> None:
    # Send the result of a job, or its traceback.
    #
    # torch numbers groups as a process makes them, so those that some ranks make are in the way of
    # the next that all make: the job after it would hang.
    import torch.distributed as dist

    numbered = dist.distributed_c10d._world  # pyright: ignore[reportPrivateUsage]
    before = numbered.group_count
    try:
        result = job(world, *args)
        if numbered.group_count != before and world is not None and world.size < num_ranks:
            where = f"{world.size} of {num_ranks} ranks"
            raise RuntimeError(f"{job.__name__} made process groups on {where}; make them on all")
        pipe.send((True, result))
    except Exception:
        pipe.send((False, traceback.format_exc()))
