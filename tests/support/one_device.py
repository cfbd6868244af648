"""All gloo groups of a process on one device."""

# A device has a thread that wakes a hundred times a second, whether anything comes or not, and
# torch makes a device for each group: a rank with seven groups would take half a percent of a
# core while it waits, and eight ranks beside the tests of other files 3 %.

from datetime import timedelta
from functools import cache
from typing import Any

import torch.distributed as dist


def install() -> None:
    # For groups that are made from now on, here and in forks; each process has a device of its own.
    theirs: Any = dist.ProcessGroupGloo
    device = cache(theirs.create_default_device)

    class OfOneDevice(theirs):
        def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
            options = theirs._Options()
            options._devices, options._timeout = [device()], timeout
            super().__init__(store, rank, size, options)

    dist.distributed_c10d.ProcessGroupGloo = OfOneDevice  # pyright: ignore[reportAttributeAccessIssue]
