"""Appendix E, Tables 6 and 7: splitting and merging of tensors, and the bandwidth that hides all
exchanges.
"""

from __future__ import annotations

from statistics import fmean

import numpy as np

from megatron_balance.analysis.statistics import plan_statistics
from megatron_balance.cost.base import Ints
from megatron_balance.ir.plan import MicrobatchPlan
from megatron_balance.papers.base import Effort, PaperTable, Published, Row, published
from megatron_balance.papers.distca.cases import TENSOR, DistcaCase
from megatron_balance.papers.distca.fig9 import TABLE_4
from megatron_balance.simulator.ping_pong import linear_s
from megatron_balance.workloads.distributions import K

TABLE_6 = {
    ("8B", 8): published(1.61, 0.54),
    ("8B", 16): published(0.57, 0.30),
    ("8B", 32): published(0.43, 0.28),
    ("34B", 16): published(0.69, 0.32),
    ("34B", 32): published(0.37, 0.18),
    ("34B", 64): published(0.28, 0.14),
}
TABLE_7 = {
    ("8B", 2, 8): (0.15, Published(41.3)),
    ("8B", 4, 16): (0.05, Published(40.3)),
    ("8B", 8, 32): (0.05, Published(39.7)),
    ("34B", 2, 8): (0.10, Published(33.8)),
    ("34B", 4, 16): (0.05, Published(33.3)),
    ("34B", 8, 32): (0.05, Published(32.7)),
}
SPLIT_NOTE = (
    "all queries, keys and values of a rank split and all its outputs merged, backward their gradients: each read and "
    "written once at the memory's rate"
)
PACK_NOTE = "not the paper's quantity: ours packs what travels alone, once on either side"
BANDWIDTH_NOTE = (
    "most bytes that a GPU receives for one nano-batch, over the least time of a GPU's modules outside attention on "
    "the other nano-batch, forward"
)
COVERED_NOTE = "not the paper's quantity: the other nano-batch's attention hides bytes, too, as in our schedule"


def received(plan: MicrobatchPlan, case: DistcaCase) -> tuple[Ints, Ints]:
    """Bytes that reach each rank in a layer's forward pass: queries, keys and values; outputs."""
    report = plan_statistics(plan, case.model)
    of_token = int(case.cost.query_bytes(1))
    queries, keys = (np.array(report[f"{what}_tokens_received_per_rank"], dtype=np.int64) for what in ("query", "kv"))
    outputs = np.array(report["partial_tokens_received_per_rank"], dtype=np.int64)
    return queries * of_token + keys * int(case.cost.kv_bytes(1)), outputs * of_token


def table6(effort: Effort) -> list[Row]:
    """Share of the time of all layers that splitting and merging take, tokens as in Table 4."""
    table_rows: list[Row] = []
    for (model, nodes), printed in effort.progress(list(TABLE_6.items()), "table6"):
        per_node = TABLE_4[model, 128][0] * 128 * K // 8
        case = DistcaCase(model, nodes, nodes * per_node, 128 * K)
        # A pass over all of a rank's tensors forward, and one over their gradients backward.
        of_all = (per_node * (case.cost.query_bytes(1) + case.cost.kv_bytes(1)), per_node * case.cost.query_bytes(1))
        shares: list[list[float]] = []
        for batch in case.batches("pretrain", effort.batches):
            seconds = sum(case.passes_s(batch))
            parts = [received(nano_batch, case) for nano_batch in case.ping_pong(batch)]
            # Out of the sender's tensors and into the receiver's.
            travels = [2 * sum(part[i].sum() for part in parts) / nodes for i in (0, 1)]
            layers = 2 * case.model.num_layers
            shares.append([100 * layers * case.cost.pack_s(each) / seconds for each in (*of_all, *travels)])
        for at, (what, note) in enumerate(
            (
                ("QKV", SPLIT_NOTE),
                ("O", SPLIT_NOTE),
                ("QKV, what travels", PACK_NOTE),
                ("O, what travels", PACK_NOTE),
            )
        ):
            known = printed[at] if at < len(printed) else None
            share = fmean(each[at] for each in shares)
            table_rows.append(Row(f"{model}, {nodes} nodes: {what}", known, share, "%", "simulated", note=note))
    return table_rows


def table7(effort: Effort) -> list[Row]:
    """Bytes per second and GPU that hide all exchanges, documents of up to 512K."""
    table_rows: list[Row] = []
    for (model, size, nodes), (tolerance, printed) in effort.progress(list(TABLE_7.items()), "table7"):
        case = DistcaCase(model, nodes, size * 512 * K, 512 * K)
        rates: list[tuple[float, float]] = []
        for batch in case.batches("pretrain", effort.batches):
            nano_batches = case.ping_pong(batch, tolerance)
            if len(nano_batches) == 2:
                both = [_rates(case, nano_batches[i], nano_batches[1 - i]) for i in (0, 1)]
                rates.append((max(each for each, _ in both), max(each for _, each in both)))
        name = f"{model}, {nodes} nodes, tolerance {tolerance:g}"
        outside, covered = (fmean(each) / 1e9 for each in zip(*rates, strict=True))
        table_rows.append(Row(name, printed, outside, "GB/s", "simulated", note=BANDWIDTH_NOTE))
        name = f"{name}, beside attention too"
        table_rows.append(Row(name, None, covered, "GB/s", "simulated", note=COVERED_NOTE))
    return table_rows


def _rates(case: DistcaCase, moving: MicrobatchPlan, computing: MicrobatchPlan) -> tuple[float, float]:
    """Bytes per second and GPU, beside the modules outside attention, and beside attention too."""
    inputs, outputs = received(moving, case)
    pairs = np.array(plan_statistics(computing, case.model)["attention_pairs_per_rank"], dtype=np.float64)
    outside = linear_s(computing, case.machine)[0]
    meanwhile = outside + np.array([case.cost.attention_s(n) for n in pairs.tolist()])
    most = float((inputs + outputs).max()) / TENSOR
    return most / float(outside.min()), most / float(meanwhile.min())


TABLE6 = PaperTable("splitting and merging of tensors, share of the time of all layers", table6, batches=3)
TABLE7 = PaperTable("bandwidth that hides all exchanges", table7, batches=5)
