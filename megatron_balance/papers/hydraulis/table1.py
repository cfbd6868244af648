"""Table 1: seconds of propagation (P), of the optimizer (O) and of weights and gradients between the
two (O-P), under one strategy and under several; Appendix B.2, from how many tokens on O-P hides.
"""

from __future__ import annotations

from statistics import fmean

from megatron_balance.analysis.change import base_sync_s
from megatron_balance.cost.analytic import AnalyticCost
from megatron_balance.cost.modules import num_parameters
from megatron_balance.papers.base import Effort, PaperTable, Published, Row, published
from megatron_balance.papers.hydraulis.cases import (
    B32,
    HETEROGENEOUS,
    HOMOGENEOUS,
    SOURCES,
    chosen,
    chosen_step,
    cluster_and_model,
    exchange_s,
    row,
    seconds,
)

PROPAGATION, EXCHANGE, STEP = published(6.78, 4.29), published(1.11, 1.71, 1.18), published(7.91, 6.02, 5.49)
"""Homogeneous; heterogeneous without, and with overlap, which propagate alike."""
FASTER, EXCHANGE_FASTER, STEP_FASTER = Published(1.58), published(0.69, 0.94), published(1.31, 1.44)
OPTIMIZER_S = Published(0.02)
HIDES = Published(1560)
COLUMNS = ("homogeneous", "heterogeneous without overlap", "heterogeneous with overlap")
TOKENS = "200K tokens a step; 100K, the default of section 8.1, take half as long"
STATIC = "not the paper's: one mix for every step"
BOTH = "not the paper's: the candidate that takes least of P and O-P together"
MISPRINT = "printed as 0.69x; the seconds printed beside it, 1.11 and 1.71, make 0.65x"
LINKS = "bytes over links and NICs alone"
PRINTED_FLOPS, PRINTED_BYTES_PER_S, PRINTED_TENSOR = 19.5e12, 200e9, 16
FORMULA = ("TP, F and B",)
RIGHT = "TP cancels, F is bf16's 312 TFLOP/s, B is 25 GB/s a GPU: eight ports of 200 Gb/s a node"


def rows(effort: Effort) -> list[Row]:
    """Means over the batches, by the authors' coefficients and by ours."""
    batches, found = B32.batches(effort.batches), list[Row]()
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
        found += [
            row(source, "P, homogeneous <16,1,1> x 4", PROPAGATION[0], homo_s, "s", TOKENS),
            row(source, "P, heterogeneous, chosen every step", PROPAGATION[1], hetero_s, "s", TOKENS),
            row(source, "P, <16,1,1> + <8,1,1> x 6", None, mixed_s, "s", STATIC),
            row(source, "P, homogeneous over heterogeneous", FASTER, homo_s / hetero_s, "x"),
        ]
        for at, column in enumerate(COLUMNS[1:], start=1):
            over, note = f"homogeneous over {column}", "; ".join((LINKS, MISPRINT)[: 3 - at])
            gains = homo_exchange_s / exchanges_s[at], steps_s[0] / steps_s[at]
            found += [
                row(source, f"O-P, {column}", EXCHANGE[at], exchanges_s[at], "s", LINKS),
                row(source, f"O-P, {over}", EXCHANGE_FASTER[at - 1], gains[0], "x", note),
                row(source, f"E2E, {over}", STEP_FASTER[at - 1], gains[1], "x", LINKS),
            ]
        found += [
            row(source, f"E2E, {name}", printed, step_s, "s", LINKS)
            for name, printed, step_s in zip(COLUMNS, STEP, steps_s, strict=True)
        ]
        found.append(row(source, "E2E, with overlap, chosen by both", None, counted_s + optimizer_s, "s", BOTH))
    hides = PRINTED_TENSOR * PRINTED_FLOPS / PRINTED_BYTES_PER_S
    right = cluster.flops_per_s / cluster.nic_bytes_per_s
    return [
        *found,
        Row("O", OPTIMIZER_S, optimizer_s, "s", "exact"),
        Row("O-P, homogeneous", EXCHANGE[0], homo_exchange_s, "s", "exact", note=LINKS),
        Row("B.2, tokens that hide a pull, as printed", HIDES, hides, "tokens", "exact", inputs=FORMULA),
        Row("B.2, tokens that hide a pull, by B.1's own W / TP", None, right, "tokens", "exact", note=RIGHT),
    ]


TABLE = PaperTable("seconds of a step's parts, 32B on 64 GPUs", rows, batches=20)
