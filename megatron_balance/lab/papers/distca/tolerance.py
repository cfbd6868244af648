"""Figure 11: latency with hidden exchanges, with exchanges of one byte ("Signal"), and on a single
stream; Figure 12: what the tolerance costs in time and saves in bytes. 8B and 34B on 8 and 16 nodes,
Pretrain, documents of up to 128K.
"""

from __future__ import annotations

from statistics import fmean

from megatron_balance.analysis.statistics import plan_statistics
from megatron_balance.lab.papers.base import Effort, Ours, table
from megatron_balance.lab.papers.distca.cases import ROUNDS, TOLERANCE, DistcaCase
from megatron_balance.simulator.ping_pong import PingPongMode
from megatron_balance.workloads.distributions import K
from megatron_balance.workloads.lengths import Lengths

TOLERANCES = (0.0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3)
TOKENS = {"8B": 1024 * K, "34B": 512 * K}
SIGNAL = PingPongMode(engine="rounds", signal=True)
SINGLE = PingPongMode(engine="rounds", interleaved=False)


def cases() -> list[DistcaCase]:
    """The four panels; the tokens are those of 8 nodes, twice as many on 16."""
    return [DistcaCase(model, nodes, TOKENS[model] * nodes // 8, 128 * K) for model in TOKENS for nodes in (8, 16)]


def fig11(effort: Effort) -> Ours:
    """Both ablations over DistCA as it is, for each panel."""
    for case in effort.progress(cases(), "fig11"):
        batches = case.batches("pretrain", effort.batches)
        whole, signal, single = (
            fmean(sum(case.passes_s(batch, TOLERANCE, way)) for batch in batches) for way in (ROUNDS, SIGNAL, SINGLE)
        )
        name = f"{case.model_name}, {case.num_nodes} nodes"
        yield f"{name}: DistCA over Signal", whole / signal
        yield f"{name}: lost on a single stream, at least", single / whole - 1
        yield f"{name}: lost on a single stream, at most", single / whole - 1


def measure(case: DistcaCase, batches: list[Lengths], tolerance: float) -> tuple[float, float]:
    """Seconds of the layers, and the mean bytes that a rank receives in a layer's forward pass."""
    seconds: list[float] = []
    received: list[float] = []
    for batch in batches:
        statistics = (plan_statistics(nano_batch, case.model) for nano_batch in case.ping_pong(batch, tolerance))
        seconds.append(sum(case.passes_s(batch, tolerance)))
        received.append(sum(fmean(each["bytes_received_per_rank"]["total"]) for each in statistics))
    return fmean(seconds), fmean(received)


def fig12(effort: Effort) -> Ours:
    """Bytes and time relative to tolerance 0, for every panel."""
    for case in effort.progress(cases(), "fig12"):
        batches = case.batches("pretrain", effort.batches)
        base_s, base_bytes = measure(case, batches, 0.0)
        for tolerance in TOLERANCES[1:]:
            seconds, received = measure(case, batches, tolerance)
            label = f"{case.model_name}, {case.num_nodes} nodes, tolerance {tolerance:g}"
            yield f"{label}: bytes saved", 1 - received / base_bytes
            yield f"{label}: time", seconds / base_s


FIG11, FIG12 = table("distca", "fig11", fig11), table("distca", "fig12", fig12)
