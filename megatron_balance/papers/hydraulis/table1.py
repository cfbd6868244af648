"""Table 1: seconds of propagation (P), of the optimizer (O) and of weights and gradients between the
two (O-P), under one strategy and under several; Appendix B.2, from how many tokens on O-P hides.
"""

from __future__ import annotations

from statistics import fmean

from megatron_balance.analysis.change import base_sync_s
from megatron_balance.cost.analytic import AnalyticCost
from megatron_balance.cost.modules import num_parameters
from megatron_balance.papers.base import Effort, PaperTable, Row
from megatron_balance.papers.hydraulis.cases import (
    B32,
    HETEROGENEOUS,
    HOMOGENEOUS,
    SOURCES,
    chosen,
    cluster_and_model,
    counted_s,
    exchange_s,
    seconds,
)

HOMO_S, HETERO_S, OPTIMIZER_S = 6.78, 4.29, 0.02
OVERLAP_S, NO_OVERLAP_S, HOMO_EXCHANGE_S = 1.18, 1.71, 1.11
HOMO_STEP_S, NO_OVERLAP_STEP_S, OVERLAP_STEP_S = 7.91, 6.02, 5.49
TOKENS = "200K tokens a step; 100K, the default of section 8.1, take half as long"
STATIC = "not the paper's: one mix for every step"
MISPRINT = "printed as 0.69x beside its own two numbers"
LINKS = "bytes over links and NICs alone"
PRINTED_FLOPS, PRINTED_BYTES_PER_S, PRINTED_TENSOR = 19.5e12, 200e9, 16
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
        found += [
            Row(f"P, homogeneous <16,1,1> x 4, {source}", HOMO_S, homo_s, "s", "exact", note=TOKENS),
            Row(f"P, heterogeneous, chosen every step, {source}", HETERO_S, hetero_s, "s", "exact", note=TOKENS),
            Row(f"P, <16,1,1> + <8,1,1> x 6, {source}", None, mixed_s, "s", "exact", note=STATIC),
            Row(f"P, homogeneous over heterogeneous, {source}", 1.58, homo_s / hetero_s, "x", "exact"),
            Row(f"O-P, heterogeneous without overlap, {source}", NO_OVERLAP_S, without_s, "s", "exact", note=LINKS),
            Row(f"O-P, heterogeneous with overlap, {source}", OVERLAP_S, overlapped_s, "s", "exact", note=LINKS),
        ]
        for name, published, step_s in (
            ("homogeneous", HOMO_STEP_S, homo_s + homo_exchange_s),
            ("heterogeneous without overlap", NO_OVERLAP_STEP_S, hetero_s + without_s),
            ("heterogeneous with overlap", OVERLAP_STEP_S, hetero_s + overlapped_s),
            ("with overlap, chosen by both", None, fmean(counted_s(source, B32, batch) for batch in batches)),
        ):
            found.append(Row(f"E2E, {name}, {source}", published, step_s + optimizer_s, "s", "exact"))
    return [*found, *_either()]


def _either() -> list[Row]:
    """Rows that need no coefficients."""
    cluster, model = cluster_and_model(B32.size)
    gathered_s, scattered_s = base_sync_s(HOMOGENEOUS, model, cluster)
    optimizer_s = AnalyticCost(cluster, model).optimizer_s(num_parameters(model) / B32.num_ranks)
    printed = PRINTED_TENSOR * PRINTED_FLOPS / PRINTED_BYTES_PER_S
    return [
        Row("O", OPTIMIZER_S, optimizer_s, "s", "exact"),
        Row("O-P, homogeneous", HOMO_EXCHANGE_S, gathered_s + scattered_s, "s", "exact", note=LINKS),
        Row(
            "O-P, homogeneous over heterogeneous without overlap",
            0.69,
            HOMO_EXCHANGE_S / NO_OVERLAP_S,
            "x",
            "exact",
            note=MISPRINT,
        ),
        Row("O-P, homogeneous over heterogeneous with overlap", 0.94, HOMO_EXCHANGE_S / OVERLAP_S, "x", "exact"),
        Row("B.2, tokens that hide a pull, as printed", 1560, printed, "tokens", "exact"),
        Row(
            "B.2, tokens that hide a pull, by B.1's own W / TP",
            None,
            cluster.flops_per_s / cluster.nic_bytes_per_s,
            "tokens",
            "exact",
            note=RIGHT,
        ),
    ]


TABLE = PaperTable("seconds of a step's parts, 32B on 64 GPUs", rows, batches=20)
