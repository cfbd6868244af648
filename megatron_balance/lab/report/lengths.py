"""Histogram of sequence lengths, tokens and attention work over powers of two."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_balance.ir.batch import Batch
from megatron_balance.ir.mask import Mask
from megatron_balance.lab.report.cases import Figures

SMALLEST = 256
"""Shorter sequences share a bin."""


def of_batches(batches: Sequence[Batch], mask: Mask) -> Figures:
    """Counts, tokens and (query, key) pairs that `mask` lets through, by length; exact."""
    lengths = np.array([length for batch in batches for length in batch.lengths], dtype=np.int64)
    each = [batch.num_tokens for batch in batches]
    return {
        "kind": "exact",
        "num_batches": len(batches),
        "num_sequences": len(lengths),
        "num_tokens": int(lengths.sum()),
        "tokens_per_batch": {"mean": float(np.mean(each)), "min": min(each), "max": max(each)},
        "shortest": int(lengths.min()),
        "median": float(np.median(lengths)),
        "mean": float(lengths.mean()),
        "longest": int(lengths.max()),
        "bins": _bins(lengths, mask),
    }


def _bins(lengths: np.ndarray, mask: Mask) -> list[Figures]:
    doublings = max(0, int(np.ceil(np.log2((lengths.max() + 1) / SMALLEST))))
    edges = [0, *(SMALLEST << at for at in range(doublings + 1))]
    place = np.searchsorted(edges, lengths, side="right") - 1
    pairs = mask.num_pairs(lengths)
    bins: list[Figures] = []
    for at, (low, high) in enumerate(zip(edges, edges[1:], strict=False)):
        inside = place == at
        bins.append(
            {
                "from": low,
                "below": high,
                "sequences": int(inside.sum()),
                "tokens": int(lengths[inside].sum()),
                "attention_pairs": int(pairs[inside].sum()),
            }
        )
    first = next(at for at, each in enumerate(bins) if each["sequences"])
    return bins[first:]
