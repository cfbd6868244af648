"""Figure 11: latency with hidden exchanges, with exchanges of one byte ("Signal"), and on a single
stream (Pretrain).
"""

from __future__ import annotations

from statistics import fmean

from megatron_balance.papers.base import Effort, PaperTable, Published, Row, published
from megatron_balance.papers.distca.cases import ROUNDS, TOLERANCE
from megatron_balance.papers.distca.fig12 import cases
from megatron_balance.simulator.ping_pong import PingPongMode

SIGNAL = PingPongMode(engine="rounds", signal=True)
SINGLE = PingPongMode(engine="rounds", interleaved=False)
NEARLY_SAME = Published(1.0)
LEAST, MOST = published(0.10, 0.17)
SIGNAL_NOTE = "printed: nearly the same but for 8B on 8 nodes"
SINGLE_NOTE = "printed: 10 to 17 % longer"


def rows(effort: Effort) -> list[Row]:
    """Both ablations over DistCA as it is, for each panel."""
    table_rows: list[Row] = []
    for case in effort.progress(cases(), "fig11"):
        batches = case.batches("pretrain", effort.batches)
        whole, signal, single = (
            fmean(sum(case.passes_s(batch, TOLERANCE, way)) for batch in batches) for way in (ROUNDS, SIGNAL, SINGLE)
        )
        name = f"{case.model_name}, {case.num_nodes} nodes"
        table_rows.append(
            Row(f"{name}: DistCA over Signal", NEARLY_SAME, whole / signal, "x", "simulated", note=SIGNAL_NOTE)
        )
        table_rows.append(
            Row(
                f"{name}: lost on a single stream, at least",
                LEAST,
                single / whole - 1,
                "of the time",
                "simulated",
                ">=",
                SINGLE_NOTE,
            )
        )
        table_rows.append(
            Row(
                f"{name}: lost on a single stream, at most",
                MOST,
                single / whole - 1,
                "of the time",
                "simulated",
                "<=",
                SINGLE_NOTE,
            )
        )
    return table_rows


TABLE = PaperTable("what overlap hides", rows, batches=5)
