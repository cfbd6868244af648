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

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from operator import index as whole
from typing import Any, TypeAlias, cast

from megatron_balance.errors import MALFORMED, ConfigError
from megatron_balance.ir.cluster import MOST_RANKS

STEP, COMPUTE = "step", "compute"
ATTENTION, LINEAR, PACK, WAIT, PLACE = "attention", "linear", "pack", "wait", "place"
PLAN, GRADIENT_SYNC, OPTIMIZER = "plan", "gradient sync", "optimizer"

_US = 1e6
_SAME_S = 1e-10
"""Ends this close to the next beginning are one point in time."""


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
        """The facts that both ends of a transfer have in common, beside their ranks."""
        return self.phase, self.microbatch, self.call, self.exchange, self.what, self.track


@dataclass(frozen=True, slots=True)
class Trace:
    """Spans of some ranks, the name of each of these, and facts that go into the file."""

    spans: Sequence[Span]
    names: Mapping[int, str]
    facts: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def document(self) -> dict[str, Any]:
        """The JSON document."""
        numbers, lanes = _lanes(self.spans)
        spans = [_event(span, number) for span, number in zip(self.spans, numbers, strict=True)]
        names = [_meta("process_name", rank, 0, name) for rank, name in sorted(self.names.items())]
        order = [
            {"name": "process_sort_index", "ph": "M", "pid": rank, "tid": 0, "args": {"sort_index": rank}}
            for rank in sorted(self.names)
        ]
        streams = [_meta("thread_name", rank, number, name) for rank, number, name in lanes]
        arrows = _arrows(self.spans, numbers)
        return {
            "traceEvents": [*names, *order, *streams, *spans, *arrows, *_counters(self.spans)],
            "displayTimeUnit": "ms",
            "otherData": dict(self.facts),
        }


def rank_name(rank: int, node: int) -> str:
    """The name of a rank's process in a trace."""
    return f"rank {rank}, node {node}"


def file_name(step: int, rank: int) -> str:
    """The name of the file of one rank's trace of a training step."""
    return f"step-{step}-rank-{rank}.json"


def step_of(name: str) -> int | None:
    """The step in a name that `file_name` made; None: it did not."""
    found = re.fullmatch(r"step-(\d+)-rank-\d+\.json", name)
    return int(found[1]) if found else None


def read(document: Any, source: str) -> Trace:
    """The trace in a document that `Trace.document` made; arrows and counters are made anew.

    Raises:
        ConfigError: it is none; `source` says whose.
    """
    try:
        events = cast("list[dict[str, Any]]", document["traceEvents"])
        names = {int(e["pid"]): str(e["args"]["name"]) for e in events if e["name"] == "process_name"}
        spans = [_span(e) for e in events if e["ph"] == "X"]
        facts = dict(document["otherData"])
        _check(spans, facts)
    except (AttributeError, *MALFORMED) as error:
        raise ConfigError(f"{source}: is not a trace of this package ({error!r})") from None
    return Trace(spans, names, facts)


def _check(spans: Sequence[Span], facts: Mapping[str, Any]) -> None:
    """Raise TypeError or ValueError where a time is none, or a rank's facts are not what it wrote."""
    hash(facts.get("node"))
    if whole(facts.get("world_size", 0)) > MOST_RANKS:
        raise ValueError(f"{facts['world_size']} ranks")
    times = [float(facts.get("began_unix_s", 0.0)), *(at for span in spans for at in (span.start_s, span.stop_s))]
    if not all(map(isfinite, times)):
        raise ValueError("a time that is not finite")


def joined(traces: Sequence[Trace]) -> Trace:
    """The traces of several ranks as one.

    Each counts from its own beginning. Ranks of a node (`node`, `began_unix_s` of the facts) have one
    clock, by which they are shifted; the first ranks of nodes to begin are taken to begin together.

    Raises:
        ConfigError: two of one rank.
    """
    names: dict[int, str] = {}
    for trace in traces:
        twice = sorted(names.keys() & trace.names.keys())
        if twice:
            raise ConfigError(f"rank {twice[0]} is in two of the traces; give each rank's file once")
        names |= trace.names
    first: dict[Any, float] = {}
    for facts in (trace.facts for trace in traces):
        began = float(facts.get("began_unix_s", 0.0))
        first[facts.get("node")] = min(began, first.get(facts.get("node"), began))
    spans: list[Span] = []
    for trace in traces:
        late_s = float(trace.facts.get("began_unix_s", 0.0)) - first[trace.facts.get("node")]
        spans += [replace(s, start_s=s.start_s + late_s, stop_s=s.stop_s + late_s) for s in trace.spans]
    facts = {key: value for key, value in traces[0].facts.items() if key not in _OF_ONE_RANK} if traces else {}
    return Trace(spans, names, {**facts, "skew_s": skew_s(spans)})


_OF_ONE_RANK = ("rank", "node", "began_unix_s")


def skew_s(spans: Sequence[Span]) -> float:
    """Seconds by which a receiving span ends before its sending one begins, at most; 0 where clocks of
    ranks agree.
    """
    return max([0.0, *(spans[a].start_s - spans[b].stop_s for a, b, _ in _transfers(spans))])


# Reading and writing events


def _span(event: Mapping[str, Any]) -> Span:
    args = event["args"]
    sent, received = ({int(rank): int(n) for rank, n in args.get(way, {}).items()} for way in ("sent", "received"))
    return Span(
        rank=int(event["pid"]),
        track=str(args["track"]),
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


def _event(span: Span, number: int) -> dict[str, Any]:
    args: dict[str, Any] = {
        "track": span.track,
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
        "tid": number,
        "args": args,
    }


def _meta(what: str, rank: int, track: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": rank, "tid": track, "args": {"name": name}}


def _lanes(spans: Sequence[Span]) -> tuple[list[int], list[tuple[int, int, str]]]:
    """The number of each span's lane, and (rank, number, name) of all lanes.

    The step is first, then what a rank computes, then its streams. Complete events of one thread lie
    apart or inside one another; spans of a track that overlap (gloo has several exchanges under way at
    once) are on lanes beside one another.
    """
    by_track: defaultdict[tuple[int, str], list[int]] = defaultdict(list)
    for index, span in enumerate(spans):
        by_track[span.rank, span.track].append(index)
    numbers = [0] * len(spans)
    lanes: list[tuple[int, int, str]] = []
    count: Counter[int] = Counter()
    for rank, track in sorted(by_track, key=lambda each: (each[0], each[1] != STEP, each[1] != COMPUTE, each[1])):
        ends: list[float] = []
        for index in sorted(by_track[rank, track], key=lambda index: (spans[index].start_s, spans[index].stop_s)):
            span = spans[index]
            lane = next((at for at, end in enumerate(ends) if end <= span.start_s + _SAME_S), len(ends))
            ends[lane : lane + 1] = [span.stop_s]
            numbers[index] = count[rank] + lane
        for lane in range(len(ends)):
            lanes.append((rank, count[rank] + lane, track if not lane else f"{track} ({lane + 1})"))
        count[rank] += len(ends)
    return numbers, lanes


_Transfer: TypeAlias = tuple[int, int, int]
"""The numbers of the span that sends and of the one that receives, and the bytes."""


def _transfers(spans: Sequence[Span]) -> list[_Transfer]:
    """Every transfer both of whose ends are here."""
    receiving = {(span.rank, span.moves): index for index, span in enumerate(spans) if span.received}
    found: list[_Transfer] = []
    for index, span in enumerate(spans):
        for peer, num_bytes in span.sent.items():
            other = receiving.get((peer, span.moves))
            if other is not None and span.rank in spans[other].received:
                found.append((index, other, num_bytes))
    return found


def _arrows(spans: Sequence[Span], numbers: Sequence[int]) -> list[dict[str, Any]]:
    """An arrow from the beginning of what sends into what receives, where sending has begun."""
    made: list[dict[str, Any]] = []
    for number, (sends, receives, _) in enumerate(_transfers(spans)):
        a, b = spans[sends], spans[receives]
        both_s = min(max(a.start_s, b.start_s), b.stop_s)
        arrow = {"name": "transfer", "cat": a.phase or STEP, "id": number}
        end = {"bp": "e", "ts": (both_s + b.stop_s) / 2 * _US, "pid": b.rank, "tid": numbers[receives]}
        made += [
            {**arrow, "ph": "s", "ts": a.start_s * _US, "pid": a.rank, "tid": numbers[sends]},
            {**arrow, "ph": "f", **end},
        ]
    return made


def _counters(spans: Iterable[Span]) -> list[dict[str, Any]]:
    """The bytes that each rank has under way, sent and received, whenever they change; what changes
    at once, but for rounding, is one change.
    """
    changes: defaultdict[int, list[tuple[float, int]]] = defaultdict(list)
    for span in spans:
        num_bytes = sum(span.sent.values()) + sum(span.received.values())
        if num_bytes:
            changes[span.rank] += [(span.start_s, num_bytes), (span.stop_s, -num_bytes)]
    made: list[dict[str, Any]] = []
    for rank, of in sorted(changes.items()):
        levels: list[tuple[float, int]] = []
        for at, change in sorted(of):
            before, level = levels[-1] if levels else (at, 0)
            if levels and at - before <= _SAME_S:
                levels[-1] = before, level + change
            else:
                levels.append((at, level + change))
        made += [
            {"name": "bytes under way", "ph": "C", "ts": at * _US, "pid": rank, "args": {"bytes": level}}
            for at, level in levels
        ]
    return made
