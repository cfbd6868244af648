"""Run one function on several gloo ranks of this machine: torch is imported once, then the ranks
are forked.
"""

from __future__ import annotations

import os
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist


def run(num_ranks: int, job: Callable[[int], None]) -> None:
    """Call `job(rank)` on every rank inside a gloo world; rank 0 prints. Raises SystemExit if a
    rank fails.
    """
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        children = [_fork(rank, num_ranks, Path(folder) / "store", job) for rank in range(num_ranks)]
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
    if any(codes):
        raise SystemExit(f"error: ranks ended with {codes}")


def _fork(rank: int, num_ranks: int, store: Path, job: Callable[[int], None]) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks)
        job(rank)
        dist.barrier()
        code = 0
    except BaseException:  # a forked rank must not return into its parent's code
        traceback.print_exc()
    finally:
        os._exit(code)
