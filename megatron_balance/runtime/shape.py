"""Shape of a rank's attention tensors."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Heads of the tensors that this rank's attention sees.

    Under tensor parallelism: of this rank's share. `value_dim`: width of values and outputs, where it
    is not that of queries and keys, `head_dim`. `latent`: where the latent of multi-latent attention
    travels in place of keys and values, its rank and the width of the rotary key beside it; then
    `num_kv_heads` is 1.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int | None = None
    latent: tuple[int, int] | None = None

    @property
    def latent_dim(self) -> int | None:
        """Width of what travels in place of keys and values; None: they do."""
        return None if self.latent is None else sum(self.latent)

    @property
    def value_width(self) -> int:
        """Width of a head's values and outputs."""
        return self.head_dim if self.value_dim is None else self.value_dim

    @property
    def widths(self) -> tuple[int, int]:
        """Of a head's queries and keys, and of its values and outputs."""
        return self.head_dim, self.value_width
