"""Figure 3 and section 2.3: where the cost of attention goes, by length of sequence.

Two nodes of 8 A800, 64k tokens.

The figure draws shares for six data sets and prints one number: redundant attention and
communication reach 60 % for sequences below 1k in StackExchange, whose lengths are not printed.
`commoncrawl` (620 tokens a document on average) stands in for it. The model is not named; 3B is
taken, which the paper traces on the same two nodes (section 5.4.1). Forward and backward are added.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_balance.ir.mask import CAUSAL
from megatron_balance.lab.papers.base import Effort, Ours, table
from megatron_balance.lab.papers.zeppelin.systems import DATASETS, TE, ZeppelinCase
from megatron_balance.planners.packing import redundant_pairs
from megatron_balance.simulator.attention import attention_call
from megatron_balance.workloads.distributions import K
from megatron_balance.workloads.lengths import Lengths

RANGES = {"< 1k": (0, K), "1k - 4k": (K, 4 * K), "4k - 16k": (4 * K, 16 * K), "16k - 64k": (16 * K, 64 * K)}
STAND_IN = "commoncrawl"
SHOWN = {**DATASETS, STAND_IN: "CommonCrawl"}


@dataclass(frozen=True, slots=True)
class CostShares:
    """Shares of the cost of attention: needed, redundant (across sequences), and waiting for other
    ranks.
    """

    needed: float = 0.0
    redundant: float = 0.0
    waiting: float = 0.0

    def __add__(self, other: CostShares) -> CostShares:
        return CostShares(self.needed + other.needed, self.redundant + other.redundant, self.waiting + other.waiting)

    def over(self, total: float) -> CostShares:
        """Every part divided by `total`."""
        return CostShares(self.needed / total, self.redundant / total, self.waiting / total)


def ours(effort: Effort) -> Ours:
    """Shares that packing wastes, and that even splitting waits, by data set and range of lengths."""
    case = ZeppelinCase("llama-3b", "a800", 16)
    packed: dict[str, dict[str, CostShares]] = {}
    split: dict[str, dict[str, CostShares]] = {}
    for dataset in effort.progress(list(SHOWN), "fig3"):
        batches = case.batches(dataset, effort.batches)
        packed[dataset] = _by_range(batches, [packing_shares(case, lengths) for lengths in batches])
        split[dataset] = _by_range(batches, [even_shares(case, lengths) for lengths in batches])
    worst = packed[STAND_IN]["< 1k"]
    yield "a) packing, < 1k, many short sequences: in vain or waiting", worst.redundant + worst.waiting
    for dataset, label in SHOWN.items():
        for name, share in packed[dataset].items():
            yield f"a) packing, {label} {name}: in vain", share.redundant
            yield f"a) packing, {label} {name}: waiting", share.waiting
    for dataset, label in SHOWN.items():
        for name, share in split[dataset].items():
            yield f"b) even CP, {label} {name}: waiting", share.waiting


def packing_shares(case: ZeppelinCase, lengths: Sequence[int]) -> list[CostShares]:
    """Each sequence's part where all are one causal sequence over all ranks: attention by pairs,
    waiting by tokens.
    """
    computing, waiting = _call_s(case, (sum(lengths),))
    needed = np.array([CAUSAL.num_pairs(n) for n in lengths], dtype=np.float64)
    redundant = np.array(redundant_pairs(lengths), dtype=np.float64)
    pair_s = computing / float((needed + redundant).sum())
    token_s = waiting / sum(lengths)
    return [
        CostShares(n * pair_s, r * pair_s, t * token_s)
        for n, r, t in zip(needed.tolist(), redundant.tolist(), lengths, strict=True)
    ]


def even_shares(case: ZeppelinCase, lengths: Sequence[int]) -> list[CostShares]:
    """Each sequence's part where every one is split evenly over all ranks."""
    computing, waiting = _call_s(case, lengths)
    size = 2 * case.cluster.num_ranks
    weights = [case.cost.attention_s(CAUSAL.num_pairs(n), max(1.0, n / size)) for n in lengths]
    token_s = waiting / sum(lengths)
    return [
        CostShares(computing * weight / sum(weights), 0.0, n * token_s)
        for n, weight in zip(lengths, weights, strict=True)
    ]


def _call_s(case: ZeppelinCase, lengths: Sequence[int]) -> tuple[float, float]:
    """Seconds of an attention call, forward and backward, that ranks compute (their mean), and the
    rest.
    """
    call = attention_call(TE.plans(case, lengths)[0], case.machine)
    computing = sum(float(outcome.compute_s.mean()) for outcome in call)
    return computing, sum(float(outcome.end_s.max()) for outcome in call) - computing


def _by_range(batches: Sequence[Lengths], shares: Sequence[Sequence[CostShares]]) -> dict[str, CostShares]:
    """Summed over the sequences of each range, as shares of all."""
    each = [
        (length, share)
        for lengths, own in zip(batches, shares, strict=True)
        for length, share in zip(lengths, own, strict=True)
    ]
    total = sum(share.needed + share.redundant + share.waiting for _, share in each)
    return {
        name: sum((share for length, share in each if low < length <= high), CostShares()).over(total)
        for name, (low, high) in RANGES.items()
    }


TABLE = table("zeppelin", "fig3", ours)
