"""What a rank's attention tensors look like."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Heads of the tensors that this rank's attention sees (under tensor parallelism: this rank's share)."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
