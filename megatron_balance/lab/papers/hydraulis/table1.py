"""Table 1: seconds of propagation (P), of the optimizer (O) and of weights and gradients between the
two (O-P), under one strategy and under several; Appendix B.2, from how many tokens on O-P hides.
"""

from __future__ import annotations

from statistics import fmean

from megatron_balance.analysis.change import base_sync_s
from megatron_balance.cost.analytic import AnalyticCost
from megatron_balance.cost.modules import num_parameters
from megatron_balance.lab.papers.base import Effort, Ours, table
from megatron_balance.lab.papers.hydraulis.cases import (
    B32,
    HETEROGENEOUS,
    HOMOGENEOUS,
    SOURCES,
    chosen,
    chosen_step,
    cluster_and_model,
    exchange_s,
    seconds,
)

COLUMNS = ("homogeneous", "heterogeneous without overlap", "heterogeneous with overlap")
PRINTED_FLOPS, PRINTED_BYTES_PER_S, PRINTED_TENSOR = 19.5e12, 200e9, 16


def ours(effort: Effort) -> Ours:
    """Means over the batches, by the authors' coefficients and by ours."""
    batches = B32.batches(effort.batches)
    cluster, model = cluster_and_model(B32.size)
    homo_exchange_s = sum(base_sync_s(HOMOGENEOUS, model, cluster))
    optimizer_s = AnalyticCost(cluster, model).optimizer_s(num_parameters(model) / B32.num_ranks)
    for source in effort.progress(SOURCES, "table1"):
        homo_s = fmean(max(seconds(source, B32, HOMOGENEOUS, batch)) for batch in batches)
        mixed_s = fmean(max(seconds(source, B32, HETEROGENEOUS, batch)) for batch in batches)
        hetero_s = fmean(chosen(source, B32, batch)[1] for batch in batches)
        without_s, overlapped_s = map(fmean, zip(*(exchange_s(source, B32, batch) for batch in batches), strict=True))
        counted_s = fmean(chosen_step(source, B32, batch, HOMOGENEOUS)[2] for batch in batches)
        exchanges_s = (homo_exchange_s, without_s, overlapped_s)
        steps_s = [
            own_s + each + optimizer_s for own_s, each in zip((homo_s, hetero_s, hetero_s), exchanges_s, strict=True)
        ]
        yield f"P, homogeneous <16,1,1> x 4, {source}", homo_s
        yield f"P, heterogeneous, chosen every step, {source}", hetero_s
        yield f"P, <16,1,1> + <8,1,1> x 6, {source}", mixed_s
        yield f"P, homogeneous over heterogeneous, {source}", homo_s / hetero_s
        for at, column in enumerate(COLUMNS[1:], start=1):
            yield f"O-P, {column}, {source}", exchanges_s[at]
            yield f"O-P, homogeneous over {column}, {source}", homo_exchange_s / exchanges_s[at]
            yield f"E2E, homogeneous over {column}, {source}", steps_s[0] / steps_s[at]
        yield from ((f"E2E, {name}, {source}", step_s) for name, step_s in zip(COLUMNS, steps_s, strict=True))
        yield f"E2E, with overlap, chosen by both, {source}", counted_s + optimizer_s
    yield "O", optimizer_s
    yield "O-P, homogeneous", homo_exchange_s
    yield "B.2, tokens that hide a pull, as printed", PRINTED_TENSOR * PRINTED_FLOPS / PRINTED_BYTES_PER_S
    yield "B.2, tokens that hide a pull, by B.1's own W / TP", cluster.flops_per_s / cluster.nic_bytes_per_s


TABLE = table("hydraulis", "table1", ours)
