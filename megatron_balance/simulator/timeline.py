"""A timeline of every rank's streams as a Chrome trace, which chrome://tracing and ui.perfetto.dev
open.

One process a rank, one track a stream: the forward of one layer, then its backward, of one
microbatch. A span of an exchange says the bytes that the rank sends and receives in it, and with
whom; an arrow goes from the span that sends to the one that receives; a counter of each rank is the
bytes that it has under way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np

from megatron_balance.analysis.memory import Policy
from megatron_balance.compile.pipeline import compile_ranks
from megatron_balance.cost.base import Floats
from megatron_balance.errors import ConfigError
from megatron_balance.ir.plan import MicrobatchPlan
from megatron_balance.simulator.attention import events, linear_tokens
from megatron_balance.simulator.events import Occupied
from megatron_balance.simulator.machine import Machine
from megatron_balance.simulator.phase import Phase, phase_of, ring_names

MOST_RANKS = 128
"""The event engine traces: it keeps every op of every rank."""

_US = 1e6


def timeline(plan: MicrobatchPlan, machine: Machine, policy: Policy = "keep") -> dict[str, Any]:
    """The trace of one layer as a JSON document: on every rank its modules, then the attention
    call.

    Raises:
        ConfigError: more ranks than can be traced.
    """
    if machine.num_ranks > MOST_RANKS:
        raise ConfigError(
            f"a trace of {machine.num_ranks} ranks is too large to open; trace at most {MOST_RANKS}, with --ranks"
        )
    tokens, slow = linear_tokens(plan).tolist(), machine.slow()
    linear = tuple(
        np.array([machine.cost.layer_s(n, backward=backward) for n in tokens]) * slow for backward in (False, True)
    )
    call = events(plan, machine, policy, (linear[0], linear[1]), trace=True)
    second = float(call.forward.end_s.max())
    ranks = compile_ranks(plan, policy)
    moved: list[dict[str, Any]] = []
    spans: list[dict[str, Any]] = []
    for name, backward, offset_s, outcome in (
        ("forward", False, 0.0, call.forward),
        ("backward", True, second, call.backward),
    ):
        own = [_span(each, name, offset_s) for each in outcome.occupied]
        moved += _movements(own, phase_of(ranks, machine, backward=backward, rings=ring_names(plan)), len(moved))
        spans += [*_linear(linear[backward], name, offset_s), *own]
    numbered = _numbered([*spans, *moved])
    return {"traceEvents": [*_names(spans, machine), *numbered], "displayTimeUnit": "ms"}


def _movements(spans: list[dict[str, Any]], phase: Phase, first: int) -> list[dict[str, Any]]:
    """Arrows and counters of a phase; spans of exchanges are told their bytes and peers.

    `first`: number from which arrows are counted.
    """
    by_place = {(s["pid"], s["args"]["exchange"], s["name"].rsplit(" ", 1)[0], s["tid"]): s for s in spans}
    made: list[dict[str, Any]] = []
    under_way: dict[int, Counter[float]] = {}
    for (a, b), stream, num_bytes in _transfers(phase, by_place):
        for end, way, other in ((a, "sent", b), (b, "received", a)):
            args = end["args"]
            args[f"{way}_bytes"] = args.get(f"{way}_bytes", 0) + num_bytes
            args["peers"] = sorted({*args.get("peers", ()), other["pid"]})
            changes = under_way.setdefault(end["pid"], Counter())
            changes[end["ts"]] += num_bytes
            changes[end["ts"] + end["dur"]] -= num_bytes
        arrow = {"name": "transfer", "cat": a["cat"], "id": first + len(made)}
        arrived = (max(a["ts"], b["ts"]) + b["ts"] + b["dur"]) / 2  # in the receiver's span, sending has begun
        made += [
            {**arrow, "ph": "s", "ts": a["ts"], "pid": a["pid"], "tid": stream},
            {**arrow, "ph": "f", "bp": "e", "ts": arrived, "pid": b["pid"], "tid": stream},
        ]
    for rank, changes in sorted(under_way.items()):
        level = 0
        for ts, change in sorted(changes.items()):
            level += change
            made.append({"name": "bytes under way", "ph": "C", "ts": ts, "pid": rank, "args": {"bytes": level}})
    return made


def _transfers(
    phase: Phase, by_place: dict[tuple[int, int, str, str], dict[str, Any]]
) -> Iterator[tuple[tuple[dict[str, Any], dict[str, Any]], str, int]]:
    """(Span that sends, span that receives), stream and bytes of every hop.

    A collective is as many hops as pairs of ranks that it moves something between.
    """
    for flow in phase.flows:
        a, b = (by_place[rank, flow.exchange, flow.leg, flow.stream] for rank in (flow.a, flow.b))
        yield (a, b), flow.stream, flow.num_bytes
    for group in phase.collectives:
        for row, a in enumerate(group.ranks):
            for column, b in enumerate(group.ranks):
                num_bytes = int(group.num_bytes[row, column])
                if num_bytes and row != column:
                    ends = (by_place[rank, group.exchange, "direct", group.stream] for rank in (a, b))
                    yield (next(ends), next(ends)), group.stream, num_bytes


def _linear(seconds: Floats, phase: str, offset_s: float = 0.0) -> list[dict[str, Any]]:
    return [
        _span(Occupied(rank, "compute", "linear", -1, 0.0, s), phase, offset_s)
        for rank, s in enumerate(seconds.tolist())
    ]


def _span(each: Occupied, phase: str, offset_s: float) -> dict[str, Any]:
    label = "attention" if each.name == "run" else each.name
    return {
        "name": label if each.exchange < 0 else f"{label} {each.exchange}",
        "cat": phase,
        "ph": "X",
        "ts": (each.start_s + offset_s) * _US,
        "dur": (each.stop_s - each.start_s) * _US,
        "pid": each.rank,
        "tid": each.stream,
        "args": {"phase": phase, "exchange": each.exchange},
    }


def _tracks(spans: list[dict[str, Any]]) -> dict[tuple[int, str], int]:
    """A number for every stream of every rank, "compute" first."""
    tracks = sorted(
        {(span["pid"], span["tid"]) for span in spans if "tid" in span},
        key=lambda track: (track[0], track[1] != "compute", track[1]),
    )
    first: dict[int, int] = {}
    for at, (rank, _) in enumerate(tracks):
        first.setdefault(rank, at)
    return {track: at - first[track[0]] for at, track in enumerate(tracks)}


def _numbered(spans: list[dict[str, Any]]) -> list[dict[str, Any]]:
    tracks = _tracks(spans)
    return [{**span, "tid": tracks[span["pid"], span["tid"]]} if "tid" in span else span for span in spans]


def _names(spans: list[dict[str, Any]], machine: Machine) -> list[dict[str, Any]]:
    node = machine.cluster.node_size
    ranks = [
        {
            "name": "process_name",
            "ph": "M",
            "pid": rank,
            "tid": 0,
            "args": {"name": f"rank {rank}, node {rank // node}"},
        }
        for rank in range(machine.num_ranks)
    ]
    streams = [
        {"name": "thread_name", "ph": "M", "pid": rank, "tid": track, "args": {"name": stream}}
        for (rank, stream), track in _tracks(spans).items()
    ]
    return [*ranks, *streams]
