"""A timeline that fits on a page: one layer, some ranks, what computes and what is transferred."""

from __future__ import annotations

from megatron_balance.analysis import trace_format
from megatron_balance.analysis.memory import Policy
from megatron_balance.analysis.trace_format import ATTENTION, COMPUTE, LINEAR, WAIT
from megatron_balance.ir.plan import MicrobatchPlan
from megatron_balance.lab.report.cases import Figures
from megatron_balance.simulator.machine import Machine
from megatron_balance.simulator.timeline import layer_trace

SHOWN = 8
"""Ranks of a timeline."""

ACTIVITIES = (
    "outside attention",
    "attention",
    "packing and adding up",
    "transfers inside the node",
    "transfers between nodes",
)

_FINEST = 1 / 3000
"""Spans of one activity closer than this share of the whole are drawn as one."""

Span = tuple[float, float]


def of_plan(plan: MicrobatchPlan, machine: Machine, policy: Policy) -> Figures:
    """Spans in milliseconds of the ranks that are busiest, least busy, and some in between;
    forward, then backward.

    Raises:
        ConfigError: more ranks than can be traced.
    """
    spans: dict[tuple[int, str], list[Span]] = {}
    busy = [0.0] * machine.num_ranks
    forward_ms = total_ms = 0.0
    for span in layer_trace(plan, machine, policy).spans:
        begin, end = 1e3 * span.start_s, 1e3 * span.stop_s
        total_ms = max(total_ms, end)
        if span.phase == "forward":
            forward_ms = max(forward_ms, end)
        if span.what == WAIT:
            continue
        activity = _activity(span)
        spans.setdefault((span.rank, activity), []).append((begin, end))
        if activity in ACTIVITIES[:3]:
            busy[span.rank] += end - begin
    ranks = _chosen(busy)
    lanes = [
        {"rank": rank, "activity": activity, "spans_ms": _merged(spans[rank, activity], total_ms * _FINEST)}
        for rank in ranks
        for activity in ACTIVITIES
        if (rank, activity) in spans
    ]
    return {
        "kind": "simulated",
        "planner": plan.planner,
        "forward_ms": forward_ms,
        "total_ms": total_ms,
        "ranks": ranks,
        "computing_share": {
            "mean": sum(busy) / len(busy) / total_ms,
            "most": max(busy) / total_ms,
            "least": min(busy) / total_ms,
            "most_rank": busy.index(max(busy)),
            "least_rank": busy.index(min(busy)),
        },
        "lanes": lanes,
    }


def _activity(span: trace_format.TrackSpan) -> str:
    """Transfers by the link they take; the legs of a routed one that stay in the node are inside
    it.
    """
    if span.track == COMPUTE:
        kinds = {LINEAR: ACTIVITIES[0], ATTENTION: ACTIVITIES[1]}
        return kinds.get(span.what, ACTIVITIES[2])
    return ACTIVITIES[4] if span.track.startswith("inter_node") else ACTIVITIES[3]


def _chosen(busy: list[float]) -> list[int]:
    """Some ranks, the busiest and the least busy among them."""
    order = sorted(range(len(busy)), key=lambda rank: (-busy[rank], rank))
    if len(order) <= SHOWN:
        return sorted(order)
    return sorted({order[round(at * (len(order) - 1) / (SHOWN - 1))] for at in range(SHOWN)})


def _merged(spans: list[Span], gap: float) -> list[list[float]]:
    """Spans in order, those that overlap or nearly touch as one."""
    merged: list[list[float]] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1] + gap:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([begin, end])
    return [[round(begin, 6), round(end, 6)] for begin, end in merged]
