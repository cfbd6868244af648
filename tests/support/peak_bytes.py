"""Bytes of the tensors that are alive at once, as torch makes and drops them."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakBytes(TorchDispatchMode):
    # `peak`: most bytes at once of what was made inside.
    def __init__(self) -> None:
        super().__init__()
        self._now = self.peak = 0
        self._known = weakref.WeakSet[torch.UntypedStorage]()

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        given = [each.untyped_storage() for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        found = func(*args, **(kwargs or {}))
        for each in tree_leaves(found):
            if not isinstance(each, Tensor) or any(each.untyped_storage() is one for one in given):
                continue
            memory = each.untyped_storage()
            if memory not in self._known:
                self._known.add(memory)
                self._now += memory.nbytes()
                weakref.finalize(memory, self._free, memory.nbytes())
        self.peak = max(self.peak, self._now)
        return found

    def _free(self, num_bytes: int) -> None:
        self._now -= num_bytes
