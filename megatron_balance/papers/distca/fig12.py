"""Figure 12: what the tolerance costs in time and saves in bytes (8B and 34B on 8 and 16 nodes,
Pretrain, documents of up to 128K).
"""

from __future__ import annotations

from statistics import fmean

from megatron_balance.analysis.statistics import plan_statistics
from megatron_balance.papers.base import Effort, PaperTable, Published, Row
from megatron_balance.papers.distca.cases import DistcaCase
from megatron_balance.workloads.distributions import K
from megatron_balance.workloads.lengths import Lengths

TOLERANCES = (0.0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3)
TOKENS = {"8B": 1024 * K, "34B": 512 * K}
SAVED = Published(0.20)
DRAWN = "drawn in the paper, not printed"
TIME_NOTE = (
    "ours is compute-bound at every tolerance: what is allowed to the busiest server is what a layer's "
    "attention takes longer"
)


def cases() -> list[DistcaCase]:
    """The four panels; the tokens are those of 8 nodes, twice as many on 16."""
    return [DistcaCase(model, nodes, TOKENS[model] * nodes // 8, 128 * K) for model in TOKENS for nodes in (8, 16)]


def measure(case: DistcaCase, batches: list[Lengths], tolerance: float) -> tuple[float, float]:
    """Seconds of the layers, and the mean bytes that a rank receives in a layer's forward pass."""
    seconds: list[float] = []
    received: list[float] = []
    for batch in batches:
        nano_batches = case.ping_pong(batch, tolerance)
        seconds.append(sum(case.passes_s(batch, tolerance)))
        received.append(
            sum(
                fmean(plan_statistics(nano_batch, case.model)["bytes_received_per_rank"]["total"])
                for nano_batch in nano_batches
            )
        )
    return fmean(seconds), fmean(received)


def rows(effort: Effort) -> list[Row]:
    """Bytes and time relative to tolerance 0, for every panel."""
    table_rows: list[Row] = []
    for case in effort.progress(cases(), "fig12"):
        batches = case.batches("pretrain", effort.batches)
        base_s, base_bytes = measure(case, batches, 0.0)
        name = f"{case.model_name}, {case.num_nodes} nodes"
        for tolerance in TOLERANCES[1:]:
            seconds, received = measure(case, batches, tolerance)
            saved = 1 - received / base_bytes
            label = f"{name}, tolerance {tolerance:g}"
            at_least = SAVED if tolerance == 0.15 else None
            note = "printed: 20 to 25 % in most cases" if tolerance == 0.15 else DRAWN
            table_rows.append(Row(f"{label}: bytes saved", at_least, saved, "of those at 0", "simulated", ">=", note))
            table_rows.append(
                Row(f"{label}: time", None, seconds / base_s, "of that at 0", "simulated", note=TIME_NOTE)
            )
    return table_rows


TABLE = PaperTable("bytes and time by tolerance", rows, batches=5)
