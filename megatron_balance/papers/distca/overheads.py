"""Appendix E, Tables 6 and 7: packing of tensors, and the bandwidth that hides all exchanges."""

from __future__ import annotations

from statistics import fmean

import numpy as np

from megatron_balance.analysis.statistics import plan_statistics
from megatron_balance.cost.base import Ints
from megatron_balance.ir.plan import MicrobatchPlan
from megatron_balance.papers.base import Effort, PaperTable, Row
from megatron_balance.papers.distca.cases import TENSOR, Case
from megatron_balance.papers.distca.fig9 import TABLE_4
from megatron_balance.simulator.ping_pong import linear_s
from megatron_balance.workloads.distributions import K

TABLE_6 = {("8B", 8): (1.61, 0.54), ("8B", 16): (0.57, 0.30), ("8B", 32): (0.43, 0.28)} | {
    ("34B", 16): (0.69, 0.32),
    ("34B", 32): (0.37, 0.18),
    ("34B", 64): (0.28, 0.14),
}
TABLE_7 = {("8B", 2, 8): (0.15, 41.3), ("8B", 4, 16): (0.05, 40.3), ("8B", 8, 32): (0.05, 39.7)} | {
    ("34B", 2, 8): (0.10, 33.8),
    ("34B", 4, 16): (0.05, 33.3),
    ("34B", 8, 32): (0.05, 32.7),
}
PACK_NOTE = "ours packs what travels, once on either side, read and written at the memory's rate"
BANDWIDTH_NOTE = (
    "most bytes that a GPU receives for one nano-batch, over the least time that a GPU computes on "
    "the other nano-batch meanwhile, forward"
)


def received(plan: MicrobatchPlan, case: Case) -> tuple[Ints, Ints]:
    """Bytes that reach each rank in a layer's forward pass: queries, keys and values; outputs."""
    report = plan_statistics(plan, case.model)
    of_token = int(case.cost.query_bytes(1))
    queries, keys = (np.array(report[f"{what}_tokens_received_per_rank"], dtype=np.int64) for what in ("query", "kv"))
    outputs = np.array(report["partial_tokens_received_per_rank"], dtype=np.int64)
    return queries * of_token + keys * int(case.cost.kv_bytes(1)), outputs * of_token


def table6(effort: Effort) -> list[Row]:
    """Share of the time that packing and unpacking take, tokens as in Table 4."""
    table_rows: list[Row] = []
    for (model, nodes), (qkv, out) in effort.progress(list(TABLE_6.items()), "table6"):
        per_node = TABLE_4[model, 128][0] * 128 * K // 8
        case = Case(model, nodes, nodes * per_node, 128 * K)
        shares: list[tuple[float, float]] = []
        for batch in case.batches("pretrain", effort.batches):
            seconds = sum(case.passes_s(batch))
            parts = [received(nano_batch, case) for nano_batch in case.ping_pong(batch)]
            # Out of the sender's tensors and into the receiver's; backward the gradients of all of
            # it travel the other way.
            each = [
                4 * case.model.num_layers * case.cost.pack_s(sum(part[i].sum() for part in parts) / nodes)
                for i in (0, 1)
            ]
            shares.append((100 * each[0] / seconds, 100 * each[1] / seconds))
        name = f"{model}, {nodes} nodes"
        table_rows.append(Row(f"{name}: QKV", qkv, fmean(a for a, _ in shares), "%", "simulated", note=PACK_NOTE))
        table_rows.append(Row(f"{name}: O", out, fmean(b for _, b in shares), "%", "simulated", note=PACK_NOTE))
    return table_rows


def table7(effort: Effort) -> list[Row]:
    """Bytes per second and GPU that hide all exchanges, documents of up to 512K."""
    table_rows: list[Row] = []
    for (model, size, nodes), (tolerance, published) in effort.progress(list(TABLE_7.items()), "table7"):
        case = Case(model, nodes, size * 512 * K, 512 * K)
        rates: list[float] = []
        for batch in case.batches("pretrain", effort.batches):
            nano_batches = case.ping_pong(batch, tolerance)
            if len(nano_batches) == 2:
                rates.append(max(_rate(case, nano_batches[i], nano_batches[1 - i]) for i in (0, 1)))
        name = f"{model}, {nodes} nodes, tolerance {tolerance:g}"
        table_rows.append(Row(name, published, fmean(rates) / 1e9, "GB/s", "simulated", note=BANDWIDTH_NOTE))
    return table_rows


def _rate(case: Case, moving: MicrobatchPlan, computing: MicrobatchPlan) -> float:
    """Bytes per second and GPU."""
    inputs, outputs = received(moving, case)
    pairs = np.array(plan_statistics(computing, case.model)["attention_pairs_per_rank"], dtype=np.float64)
    meanwhile = linear_s(computing, case.machine)[0] + np.array([case.cost.attention_s(n) for n in pairs.tolist()])
    return float((inputs + outputs).max() / meanwhile.min() / TENSOR)


TABLE6 = PaperTable("packing and unpacking, share of the time", table6, batches=3)
TABLE7 = PaperTable("bandwidth that hides all exchanges", table7, batches=5)
