"""Calls that all ranks begin at one moment, timed until the last of them is done."""

import time
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

LEAD_S = 0.05

Value = TypeVar("Value")


def from_common_start(call: Callable[[], Value]) -> tuple[Value, float]:
    """Result of a call, and seconds from the common start until the last rank has done it, the same
    on all ranks.
    """
    dist.barrier()
    # all ranks share this machine's clock
    start = torch.tensor([time.monotonic() + LEAD_S], dtype=torch.float64)
    dist.broadcast(start, 0)
    time.sleep(max(0.0, float(start) - time.monotonic()))
    value = call()
    end = torch.tensor([time.monotonic()], dtype=torch.float64)
    dist.all_reduce(end, dist.ReduceOp.MAX)
    return value, float(end - start)
