"""Protocol of attention kernels.

An entry is a run of query rows and a run of key rows: full, causal at the bottom right, or a window.
LSE is natural-log, in fp32 (fp64 for fp64 inputs).

Shape legend: T rows of an operand, N packed query rows of all entries in order, M packed key rows,
H query heads, G key-value heads, D width of queries and keys, V of values and outputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

Window: TypeAlias = tuple[int, int]
"""Keys that a query sees before and behind its own, where the last query's own key is the last one:
FlashAttention's `window_size`."""


@dataclass(frozen=True, slots=True)
class Entries:
    """Rows of the entries of one launch.

    [start, stop) in the query operand, the key operand and (backward) dout's rows. `windows`: of
    each entry, in place of `causal`; empty: none has one. Every query sees some key.
    """

    q: tuple[tuple[int, int], ...]
    k: tuple[tuple[int, int], ...]
    causal: tuple[bool, ...]
    dout: tuple[tuple[int, int], ...] = ()
    windows: tuple[Window, ...] = ()

    @property
    def num_q(self) -> int:
        return sum(b - a for a, b in self.q)


class Kernel(Protocol):
    """One launch over many entries.

    `prepare` runs once per microbatch; its result goes to every `forward` and `backward`.
    """

    name: str

    def launches(self, entries: Entries) -> int:
        """Kernel calls that the entries take."""
        ...

    def prepare(self, entries: Entries, device: torch.device) -> Any:
        """Index tensors, cu_seqlens or whatever the kernel needs of the entries on `device`."""
        ...

    def forward(self, entries: Any, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Q [T, H, D], k [T, G, D] and v [T, G, V] -> packed out [N, H, V] and LSE [N, H]."""
        ...

    def backward(
        self, entries: Any, dout: tuple[Tensor, Tensor, Tensor], q: Tensor, k: Tensor, v: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Packed dq [N, H, D], dk [M, G, D] and dv [M, G, V].

        `dout`: gradient, final output [T, H, V] and LSE [T, H] in dout's rows.
        """
        ...


def merge_partials(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Merge two partials of the same queries: out [..., D] in the first one's type, LSE [...]."""
    lse = torch.logaddexp(one[1], other[1])
    weights = (torch.exp(part.sub(lse)).unsqueeze(-1) for part in (one[1], other[1]))
    return one[0].mul(next(weights)).add(other[0].mul(next(weights))).to(one[0].dtype), lse
