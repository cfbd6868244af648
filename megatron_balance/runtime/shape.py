"""Shape of a rank's attention tensors."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Heads of the tensors that this rank's attention sees.

    Under tensor parallelism: of this rank's share.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
