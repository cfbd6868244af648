"""Appendix E, Tables 6 and 7: splitting and merging of tensors, and the bandwidth that hides all
exchanges.
"""

from __future__ import annotations

from statistics import fmean

import numpy as np

from megatron_balance.analysis.statistics import plan_statistics
from megatron_balance.cost.base import Ints
from megatron_balance.ir.plan import MicrobatchPlan
from megatron_balance.lab.papers.base import Effort, Ours, table
from megatron_balance.lab.papers.distca.cases import TENSOR, DistcaCase
from megatron_balance.lab.papers.distca.speedups import TABLE_4
from megatron_balance.simulator.attention import linear_s
from megatron_balance.workloads.distributions import K

TABLE_6 = (("8B", 8), ("8B", 16), ("8B", 32), ("34B", 16), ("34B", 32), ("34B", 64))
"""Model and nodes."""
TABLE_7 = (
    *(("8B", 2, 8, 0.15), ("8B", 4, 16, 0.05), ("8B", 8, 32, 0.05)),
    *(("34B", 2, 8, 0.10), ("34B", 4, 16, 0.05), ("34B", 8, 32, 0.05)),
)
"""Model, batch size, nodes, tolerance."""


def received(plan: MicrobatchPlan, case: DistcaCase) -> tuple[Ints, Ints]:
    """Bytes that reach each rank in a layer's forward pass: queries, keys and values; outputs."""
    report = plan_statistics(plan, case.model)
    of_token = int(case.cost.query_bytes(1))
    queries, keys = (np.array(report[f"{what}_tokens_received_per_rank"], dtype=np.int64) for what in ("query", "kv"))
    outputs = np.array(report["partial_tokens_received_per_rank"], dtype=np.int64)
    return queries * of_token + keys * int(case.cost.kv_bytes(1)), outputs * of_token


def table6(effort: Effort) -> Ours:
    """Share of the time of all layers that splitting and merging take, tokens as in Table 4."""
    for model, nodes in effort.progress(list(TABLE_6), "table6"):
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
        for what, each in zip(
            ("QKV", "O", "QKV, what travels", "O, what travels"), zip(*shares, strict=True), strict=True
        ):
            yield f"{model}, {nodes} nodes: {what}", fmean(each)


def table7(effort: Effort) -> Ours:
    """Bytes per second and GPU that hide all exchanges, documents of up to 512K."""
    for model, size, nodes, tolerance in effort.progress(list(TABLE_7), "table7"):
        case = DistcaCase(model, nodes, size * 512 * K, 512 * K)
        rates: list[tuple[float, float]] = []
        for batch in case.batches("pretrain", effort.batches):
            nano_batches = case.ping_pong(batch, tolerance)
            if len(nano_batches) == 2:
                both = [_rates(case, nano_batches[i], nano_batches[1 - i]) for i in (0, 1)]
                rates.append((max(each for each, _ in both), max(each for _, each in both)))
        name = f"{model}, {nodes} nodes, tolerance {tolerance:g}"
        outside, covered = (fmean(each) / 1e9 for each in zip(*rates, strict=True))
        yield name, outside
        yield f"{name}, beside attention too", covered


def _rates(case: DistcaCase, moving: MicrobatchPlan, computing: MicrobatchPlan) -> tuple[float, float]:
    """Bytes per second and GPU, beside the modules outside attention, and beside attention too."""
    inputs, outputs = received(moving, case)
    pairs = np.array(plan_statistics(computing, case.model)["attention_pairs_per_rank"], dtype=np.float64)
    outside = linear_s(computing, case.machine)[0]
    meanwhile = outside + np.array([case.cost.attention_s(n) for n in pairs.tolist()])
    most = float((inputs + outputs).max()) / TENSOR
    return most / float(outside.min()), most / float(meanwhile.min())


TABLE6, TABLE7 = table("distca", "table6", table6), table("distca", "table7", table7)
