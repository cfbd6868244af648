"""Figure 5: where attention on one GPU takes as long as moving the keys and values, which bounds
the three zones.

The figure draws three curves and prints no boundary, nor which model it is. Ours are closed forms
of the cost model.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import cast

from megatron_balance.cost.base import Link
from megatron_balance.cost.kernel import TILE_TOKENS
from megatron_balance.ir.mask import CAUSAL
from megatron_balance.lab.papers.base import Effort, Ours, table
from megatron_balance.lab.papers.zeppelin.systems import DATASETS, ZeppelinCase
from megatron_balance.workloads.distributions import DISTRIBUTIONS, Bins

MODELS = {"3B": "llama-3b", "7B": "llama-7b"}
ZONES = ("local", "intra-node", "inter-node")


def boundary(case: ZeppelinCase, link: Link) -> int:
    """The shortest sequence, in whole kernel tiles, whose causal attention takes at least as long
    as its keys and values on `link`.
    """
    length = TILE_TOKENS
    while case.cost.attention_s(CAUSAL.num_pairs(length), length) < link.time_s(case.cost.kv_bytes(length)):
        length += TILE_TOKENS
    return length


def ours(_: Effort) -> Ours:
    """The boundaries, and how the tokens of each data set fall into the zones."""
    cases = {label: ZeppelinCase(model, "a800", 16) for label, model in MODELS.items()}
    for label, case in cases.items():
        intra, inter = (case.cost.link(inter_node=inter) for inter in (False, True))
        doubled = Link(intra.alpha_s, 2 * intra.bytes_per_s)
        yield f"{label}: local / intra-node, NVLink at 400 GB/s", boundary(case, doubled)
        yield f"{label}: local / intra-node, at 200 GB/s", boundary(case, intra)
        yield f"{label}: intra-node / inter-node, a NIC at 200 Gb/s", boundary(case, inter)
    case = cases["7B"]
    limits = [boundary(case, case.cost.link(inter_node=inter)) for inter in (False, True)]
    for dataset, label in DATASETS.items():
        shares = token_shares(cast("Bins", DISTRIBUTIONS[dataset]), limits)
        yield from ((f"{label}: in the {zone} zone of 7B", each) for zone, each in zip(ZONES, shares, strict=True))


def token_shares(bins: Bins, limits: Sequence[int]) -> list[float]:
    """The expected share of a distribution's tokens in sequences up to each limit, and above the
    last one.
    """
    edges = [float(bins.edges[0]), *(float(limit) for limit in limits), float(bins.edges[-1])]
    tokens = [_tokens(low, high, bins) for low, high in pairwise(edges)]
    return [each / sum(tokens) for each in tokens]


def _tokens(low: float, high: float, bins: Bins) -> float:
    """Tokens a document, in documents of `low` to `high` tokens, in proportion; lengths are even
    inside a bin.
    """
    total = 0.0
    for (start, stop), share in zip(pairwise(bins.edges), bins.shares, strict=True):
        first, last = max(low, start), min(high, stop)
        if first < last:
            total += share * (last**2 - first**2) / 2 / (stop - start)
    return total


TABLE = table("zeppelin", "fig5", ours)
