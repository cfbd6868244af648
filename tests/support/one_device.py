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
    device, init = cache(theirs.create_default_device), theirs.__init__

    def on_one_device(self: Any, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        options = theirs._Options()
        options._devices, options._timeout = [device()], timeout
        init(self, store, rank, size, options)

    # not a class of ours in its place: Megatron's later timeouts are for groups of this class alone
    theirs.__init__ = on_one_device
