"""A timeline of every rank's streams as a Chrome trace, which chrome://tracing and ui.perfetto.dev
open.

One process a rank, one track a stream: the forward of one layer, then its backward, of one
microbatch.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from megatron_balance.analysis.memory import Policy
from megatron_balance.cost.base import Floats
from megatron_balance.errors import ConfigError
from megatron_balance.ir.plan import MicrobatchPlan
from megatron_balance.simulator.attention import events, linear_tokens
from megatron_balance.simulator.events import Occupied
from megatron_balance.simulator.machine import Machine

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
    spans = [*_linear(linear[0], "forward"), *(_span(each, "forward", 0.0) for each in call.forward.occupied)]
    spans += [
        *_linear(linear[1], "backward", second),
        *(_span(each, "backward", second) for each in call.backward.occupied),
    ]
    return {"traceEvents": [*_names(spans, machine), *_numbered(spans)], "displayTimeUnit": "ms"}


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
        {(span["pid"], span["tid"]) for span in spans}, key=lambda track: (track[0], track[1] != "compute", track[1])
    )
    first: dict[int, int] = {}
    for at, (rank, _) in enumerate(tracks):
        first.setdefault(rank, at)
    return {track: at - first[track[0]] for at, track in enumerate(tracks)}


def _numbered(spans: list[dict[str, Any]]) -> list[dict[str, Any]]:
    tracks = _tracks(spans)
    return [{**span, "tid": tracks[span["pid"], span["tid"]]} for span in spans]


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
