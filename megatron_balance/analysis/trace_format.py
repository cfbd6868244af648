"""One format for the traces of simulated and of real steps: Chrome's trace event format, which
chrome://tracing and ui.perfetto.dev open.

One process a rank, one track a stream. The names of spans, which PyTorch's profiler and Nsight get
too (`runtime.ranges`):

| track | spans |
|---|---|
| step | plan, forward M, backward M (of microbatch M), gradient sync, optimizer |
| compute | linear (modules outside attention), attention, pack N, wait N, place N (of exchange N) |
| a stream | direct N, or the legs dispatch N, across N, combine N |

A span says its phase, microbatch, call (of attention, counted in its microbatch and phase) and zone;
one of an exchange also with which ranks it moves how many bytes. From that come arrows from the span
that sends to the one that receives, and a counter of each rank: the bytes that it has under way.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from megatron_balance.errors import ConfigError

STEP, COMPUTE = "step", "compute"
ATTENTION, LINEAR, PACK, WAIT, PLACE = "attention", "linear", "pack", "wait", "place"
PLAN, GRADIENT_SYNC, OPTIMIZER = "plan", "gradient sync", "optimizer"

_US = 1e6


def named(what: str, exchange: int) -> str:
    """The name of a span: `what`, with the number of its exchange, if it is of one (-1: of none)."""
    return what if exchange < 0 else f"{what} {exchange}"


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of time on a track of a rank.

    `phase`: forward, backward, or empty. `microbatch`, `call`, `exchange`: -1: of none. `sent`,
    `received`: bytes by the rank at the other end.
    """

    rank: int
    track: str
    what: str
    start_s: float
    stop_s: float
    phase: str = ""
    microbatch: int = -1
    call: int = -1
    exchange: int = -1
    zone: str = ""
    sent: Mapping[int, int] = field(default_factory=dict[int, int])
    received: Mapping[int, int] = field(default_factory=dict[int, int])

    @property
    def name(self) -> str:
        """As it is shown."""
        return named(self.what, self.exchange)

    @property
    def moves(self) -> tuple[str, int, int, int, str, str]:
        """What both ends of a transfer have in common, beside their ranks."""
        return self.phase, self.microbatch, self.call, self.exchange, self.what, self.track


@dataclass(frozen=True, slots=True)
class Trace:
    """Spans of some ranks, the name of each of these, and facts that go into the file."""

    spans: Sequence[Span]
    names: Mapping[int, str]
    facts: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def document(self) -> dict[str, Any]:
        """The JSON document."""
        tracks = _tracks(self.spans)
        spans = [_event(span, tracks) for span in self.spans]
        names = [_meta("process_name", rank, 0, name) for rank, name in sorted(self.names.items())]
        order = [
            {"name": "process_sort_index", "ph": "M", "pid": rank, "tid": 0, "args": {"sort_index": rank}}
            for rank in sorted(self.names)
        ]
        streams = [_meta("thread_name", rank, number, track) for (rank, track), number in tracks.items()]
        arrows = _arrows(self.spans, tracks)
        return {
            "traceEvents": [*names, *order, *streams, *spans, *arrows, *_counters(self.spans)],
            "displayTimeUnit": "ms",
            "otherData": dict(self.facts),
        }


def rank_name(rank: int, node: int) -> str:
    """The name of a rank's process in a trace."""
    return f"rank {rank}, node {node}"


def read(document: Any, source: str) -> Trace:
    """The trace in a document that `Trace.document` made; arrows and counters are made anew.

    Raises:
        ConfigError: it is none; `source` says whose.
    """
    try:
        events = cast("list[dict[str, Any]]", document["traceEvents"])
        tracks = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
        names = {int(e["pid"]): str(e["args"]["name"]) for e in events if e["name"] == "process_name"}
        spans = [_span(e, tracks[e["pid"], e["tid"]]) for e in events if e["ph"] == "X"]
        return Trace(spans, names, dict(document["otherData"]))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{source}: is not a trace of this package ({error!r})") from None


def joined(traces: Sequence[Trace]) -> Trace:
    """The traces of several ranks as one.

    Raises:
        ConfigError: two of one rank.
    """
    names: dict[int, str] = {}
    for trace in traces:
        twice = sorted(names.keys() & trace.names.keys())
        if twice:
            raise ConfigError(f"rank {twice[0]} is in two of the traces; give each rank's file once")
        names |= trace.names
    spans = [span for trace in traces for span in trace.spans]
    facts: dict[str, Any] = {**(traces[0].facts if traces else {}), "skew_s": skew_s(spans)}
    facts.pop("rank", None)
    return Trace(spans, names, facts)


def skew_s(spans: Iterable[Span]) -> float:
    """Seconds by which a receiving span ends before its sending one begins, at most; 0 where clocks of
    ranks agree.
    """
    return max([0.0, *(a.start_s - b.stop_s for a, b, _ in _transfers(spans))])


# Reading and writing events


def _span(event: Mapping[str, Any], track: str) -> Span:
    args = event["args"]
    sent, received = ({int(rank): int(n) for rank, n in args.get(way, {}).items()} for way in ("sent", "received"))
    return Span(
        rank=int(event["pid"]),
        track=track,
        what=str(args["what"]),
        start_s=float(event["ts"]) / _US,
        stop_s=(float(event["ts"]) + float(event["dur"])) / _US,
        phase=str(args["phase"]),
        microbatch=int(args["microbatch"]),
        call=int(args["call"]),
        exchange=int(args["exchange"]),
        zone=str(args["zone"]),
        sent=sent,
        received=received,
    )


def _event(span: Span, tracks: Mapping[tuple[int, str], int]) -> dict[str, Any]:
    args: dict[str, Any] = {
        "what": span.what,
        "phase": span.phase,
        "microbatch": span.microbatch,
        "call": span.call,
        "exchange": span.exchange,
        "zone": span.zone,
    }
    if span.sent or span.received:
        args |= {
            "peers": sorted({*span.sent, *span.received}),
            "sent_bytes": sum(span.sent.values()),
            "received_bytes": sum(span.received.values()),
            "sent": {str(rank): n for rank, n in span.sent.items()},
            "received": {str(rank): n for rank, n in span.received.items()},
        }
    return {
        "name": span.name,
        "cat": span.phase or STEP,
        "ph": "X",
        "ts": span.start_s * _US,
        "dur": max(0.0, span.stop_s - span.start_s) * _US,
        "pid": span.rank,
        "tid": tracks[span.rank, span.track],
        "args": args,
    }


def _meta(what: str, rank: int, track: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": rank, "tid": track, "args": {"name": name}}


def _tracks(spans: Iterable[Span]) -> dict[tuple[int, str], int]:
    """A number for every track of every rank: the step, then what it computes, then streams."""
    of_rank: defaultdict[int, set[str]] = defaultdict(set)
    for span in spans:
        of_rank[span.rank].add(span.track)
    return {
        (rank, track): at
        for rank, tracks in sorted(of_rank.items())
        for at, track in enumerate(sorted(tracks, key=lambda track: (track != STEP, track != COMPUTE, track)))
    }


def _transfers(spans: Iterable[Span]) -> list[tuple[Span, Span, int]]:
    """Span that sends, span that receives, and the bytes, of every transfer both of whose ends are
    here.
    """
    spans = list(spans)
    receiving = {(span.rank, span.moves): span for span in spans if span.received}
    found: list[tuple[Span, Span, int]] = []
    for span in spans:
        for peer, num_bytes in span.sent.items():
            other = receiving.get((peer, span.moves))
            if other is not None and span.rank in other.received:
                found.append((span, other, num_bytes))
    return found


def _arrows(spans: Sequence[Span], tracks: Mapping[tuple[int, str], int]) -> list[dict[str, Any]]:
    """An arrow from the beginning of what sends into what receives, where sending has begun."""
    made: list[dict[str, Any]] = []
    for number, (a, b, _) in enumerate(_transfers(spans)):
        both_s = min(max(a.start_s, b.start_s), b.stop_s)
        arrow = {"name": "transfer", "cat": a.phase or STEP, "id": number}
        made += [
            {**arrow, "ph": "s", "ts": a.start_s * _US, "pid": a.rank, "tid": tracks[a.rank, a.track]},
            {
                **arrow,
                "ph": "f",
                "bp": "e",
                "ts": (both_s + b.stop_s) / 2 * _US,
                "pid": b.rank,
                "tid": tracks[b.rank, b.track],
            },
        ]
    return made


def _counters(spans: Iterable[Span]) -> list[dict[str, Any]]:
    """The bytes that each rank has under way, sent and received, whenever they change."""
    changes: defaultdict[int, Counter[float]] = defaultdict(Counter)
    for span in spans:
        num_bytes = sum(span.sent.values()) + sum(span.received.values())
        if num_bytes:
            changes[span.rank][span.start_s] += num_bytes
            changes[span.rank][span.stop_s] -= num_bytes
    made: list[dict[str, Any]] = []
    for rank, of in sorted(changes.items()):
        level = 0
        for at, change in sorted(of.items()):
            level += change
            made.append({"name": "bytes under way", "ph": "C", "ts": at * _US, "pid": rank, "args": {"bytes": level}})
    return made
