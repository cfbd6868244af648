"""One format for the traces of simulated and of real steps: Chrome's trace event format, which
chrome://tracing and ui.perfetto.dev open.

One process a rank, one track a stream. The names of spans, which PyTorch's profiler and Nsight get
too (`runtime.phase_run`):

| track | spans |
|---|---|
| step | plan, forward M, backward M (of microbatch M), gradient sync, optimizer |
| compute | linear (modules outside attention), attention, pack N, wait N, place N (of exchange N) |
| a stream | direct N, or the legs dispatch N, across N, combine N; inside one, arriving N |

A span says its phase, microbatch, call (of attention, counted in its microbatch and phase) and zone;
one of an exchange also with which ranks it moves how many bytes. From that come arrows from the span
that sends to the one that receives, and a counter of each rank: the bytes that it has under way.

What Perfetto's trace processor asks of a file, and the format does not say:

- It counts whole nanoseconds. Times are written as such, so that its rounding moves none into another.
- It takes a track numbered 0 for one that is numbered as its process. No track has the number of
  another, or of a rank.
- It draws an arrow from the span that begins first, whatever its ends say. Where a rank receives
  before all that send to it have begun, the arrows lead to a span inside: arriving, which begins when
  they have.
- It gives an end of an arrow to the span of the track that began last.
"""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import inf, isfinite
from operator import index as whole
from typing import Any, TypeAlias, cast

from megatron_balance.errors import MALFORMED, ConfigError
from megatron_balance.ir.cluster import MOST_RANKS

STEP, COMPUTE, ARRIVING = "step", "compute", "arriving"
ATTENTION, LINEAR, PACK, WAIT, PLACE = "attention", "linear", "pack", "wait", "place"
PLAN, GRADIENT_SYNC, OPTIMIZER = "plan", "gradient sync", "optimizer"

_US, _NS = 1e6, 1e9
# The reach of a clock that counts nanoseconds in 64 bits.
_LONGEST_S = 9e9


def named(what: str, exchange: int) -> str:
    """The name of a span: `what`, with the number of its exchange, if it is of one (-1: of none)."""
    return what if exchange < 0 else f"{what} {exchange}"


@dataclass(frozen=True, slots=True)
class TrackSpan:
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

    def later(self, seconds: float) -> "TrackSpan":
        return replace(self, start_s=self.start_s + seconds, stop_s=self.stop_s + seconds) if seconds else self

    @property
    def moves(self) -> tuple[str, int, int, int, str, str]:
        """The facts that both ends of a transfer have in common, beside their ranks."""
        return self.phase, self.microbatch, self.call, self.exchange, self.what, self.track


@dataclass(frozen=True, slots=True)
class Trace:
    """Spans of some ranks, the name of each of these, and facts that go into the file."""

    spans: Sequence[TrackSpan]
    names: Mapping[int, str]
    facts: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def document(self) -> dict[str, Any]:
        """The JSON document. `arrows_left_out` of its facts: transfers whose receiving span ends
        before the sending one begins, as it seems where clocks disagree.
        """
        placed, tracks = _placed(self.spans, self.names)
        transfers = _transfers(self.spans)
        forward = [each for each in transfers if placed[each[0]].start < placed[each[1]].stop]
        arriving = _arriving(placed, forward)
        spans = [_event(span, at) for span, at in zip(self.spans, placed, strict=True)]
        apart: dict[str, Any] = {"what": ARRIVING, "sent": {}, "received": {}}
        inner = [_event(replace(self.spans[index], **apart), at) for index, at in arriving.items()]
        first: dict[int, int] = {}
        for rank, number, _ in tracks:
            first.setdefault(rank, number)
        ranks = [(rank, first.get(rank, 0), name) for rank, name in sorted(self.names.items())]
        names = [_meta("process_name", *each) for each in ranks]
        order = [
            {"name": "process_sort_index", "ph": "M", "pid": rank, "tid": number, "args": {"sort_index": rank}}
            for rank, number, _ in ranks
        ]
        streams = [_meta("thread_name", *each) for each in tracks]
        arrows = _arrows(self.spans, forward, placed, arriving)
        left_out = len(transfers) - len(forward)
        return {
            "traceEvents": [*names, *order, *streams, *spans, *inner, *arrows, *_counters(self.spans, placed, first)],
            "displayTimeUnit": "ms",
            "otherData": {**self.facts, **({"arrows_left_out": left_out} if left_out else {})},
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
    """The trace in a document that `Trace.document` made; spans inside others, arrows and counters
    are made anew. Raises ConfigError: it is none; `source` says whose.
    """
    try:
        events = cast("list[dict[str, Any]]", document["traceEvents"])
        names = {int(e["pid"]): str(e["args"]["name"]) for e in events if e["name"] == "process_name"}
        spans = [_span(e) for e in events if e["ph"] == "X" and e["args"]["what"] != ARRIVING]
        facts = dict(document["otherData"])
        _check(spans, names, facts)
    except (AttributeError, *MALFORMED) as error:
        raise ConfigError(f"{source}: is not a trace of this package ({error!r})") from None
    return Trace(spans, names, facts)


def _check(spans: Sequence[TrackSpan], names: Mapping[int, str], facts: Mapping[str, Any]) -> None:
    # Raise TypeError or ValueError where a time is none, or a rank's facts are not what it wrote.
    nameless = {span.rank for span in spans} - names.keys()
    if nameless:
        raise ValueError(f"rank {min(nameless)} without a name")
    hash(facts.get("node"))
    json.dumps(facts, allow_nan=False)
    if whole(facts.get("world_size", 0)) > MOST_RANKS:
        raise ValueError(f"{facts['world_size']} ranks")
    times = [float(facts.get("began_unix_s", 0.0)), *(at for span in spans for at in (span.start_s, span.stop_s))]
    if not all(isfinite(at) and abs(at) < _LONGEST_S for at in times):
        raise ValueError("a time that no clock shows")


def joined(traces: Sequence[Trace]) -> Trace:
    """The traces of several ranks as one.

    Each counts from its own beginning. Ranks of a node (`node`, `began_unix_s` of the facts) have one
    clock, by which they are shifted; the first ranks of nodes to begin are taken to begin together.
    Where that lets a transfer between nodes end before it begins, their clocks are moved (`moved_s` of
    the facts: by how much at most). Raises ConfigError: two of one rank.
    """
    nodes: dict[int, Any] = {}
    names: dict[int, str] = {}
    for trace in traces:
        twice = sorted(names.keys() & trace.names.keys())
        if twice:
            raise ConfigError(f"rank {twice[0]} is in two of the traces; give each rank's file once")
        names |= trace.names
        nodes |= dict.fromkeys(trace.names, trace.facts.get("node"))
    first: dict[Any, float] = {}
    for facts in (trace.facts for trace in traces):
        began = float(facts.get("began_unix_s", 0.0))
        first[facts.get("node")] = min(began, first.get(facts.get("node"), began))
    spans: list[TrackSpan] = []
    for trace in traces:
        late_s = float(trace.facts.get("began_unix_s", 0.0)) - first[trace.facts.get("node")]
        spans += [span.later(late_s) for span in trace.spans]
    facts = {key: value for key, value in traces[0].facts.items() if key not in _OF_ONE_RANK} if traces else {}
    moved = _clocks_moved(spans, nodes)
    spans = [span.later(moved[nodes[span.rank]]) for span in spans]
    # By how much a receiving span ends before its sending one begins, at most; 0 where clocks agree.
    skew_s = max([0.0, *(spans[a].start_s - spans[b].stop_s for a, b, _ in _transfers(spans))])
    return Trace(spans, names, {**facts, "skew_s": skew_s, "moved_s": max(moved.values(), default=0.0)})


# The least that a transfer between nodes takes.
_FASTEST_S = 1e-6


def _clocks_moved(spans: Sequence[TrackSpan], nodes: Mapping[int, Any]) -> dict[Any, float]:
    # How much later each node's clock is to show, for no transfer between nodes to end before it
    # begins; 0 for all where they cannot be moved so. `nodes`: of each rank.
    moved = dict.fromkeys(nodes.values(), 0.0)
    room: dict[tuple[Any, Any], float] = {}
    for sends, receives, _ in _transfers(spans):
        a, b = spans[sends], spans[receives]
        ends = nodes[a.rank], nodes[b.rank]
        if ends[0] != ends[1]:
            room[ends] = min(room.get(ends, inf), b.stop_s - a.start_s - _FASTEST_S)
    for _ in moved:
        late = [ends for ends, least in room.items() if moved[ends[0]] > moved[ends[1]] + least]
        if not late:
            earliest = min(moved.values())
            return {node: at - earliest for node, at in moved.items()}
        for a, b in late:
            moved[a] = min(moved[a], moved[b] + room[a, b])
    return dict.fromkeys(moved, 0.0)


_OF_ONE_RANK = ("rank", "node", "began_unix_s")


# Reading and writing events

# Of each fact that an event has of its span, the type.
_FACTS = {"track": str, "what": str, "phase": str, "microbatch": int, "call": int, "exchange": int, "zone": str}


def _span(event: Mapping[str, Any]) -> TrackSpan:
    args = event["args"]
    sent, received = ({int(rank): int(n) for rank, n in args.get(way, {}).items()} for way in ("sent", "received"))
    start, duration = float(event["ts"]), float(event["dur"])
    facts: dict[str, Any] = {name: kind(args[name]) for name, kind in _FACTS.items()}
    facts |= {"start_s": start / _US, "stop_s": (start + duration) / _US}
    return TrackSpan(rank=int(event["pid"]), sent=sent, received=received, **facts)


@dataclass(frozen=True, slots=True)
class _At:
    """Where an event is drawn. `start`, `stop`: whole nanoseconds, `stop` after `start`."""

    track: int
    start: int
    stop: int


def _event(span: TrackSpan, at: _At) -> dict[str, Any]:
    args: dict[str, Any] = {name: getattr(span, name) for name in _FACTS}
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
        "ts": at.start / 1000,
        "dur": (at.stop - at.start) / 1000,
        "pid": span.rank,
        "tid": at.track,
        "args": args,
    }


def _meta(what: str, rank: int, track: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": rank, "tid": track, "args": {"name": name}}


def _ns(seconds: float) -> int:
    return max(0, round(seconds * _NS))


def _placed(spans: Sequence[TrackSpan], names: Iterable[int]) -> tuple[list[_At], list[tuple[int, int, str]]]:
    # Where each span is drawn, and (rank, number, name) of all tracks.
    #
    # The step is first, then what a rank computes, then its streams. Complete events of one thread
    # lie apart or inside one another; spans of a track that overlap (gloo has several exchanges
    # under way at once) are on tracks beside one another. Those that rounding lets overlap are
    # moved apart.
    by_track: defaultdict[tuple[int, str], list[int]] = defaultdict(list)
    for index, span in enumerate(spans):
        by_track[span.rank, span.track].append(index)
    times = [(_ns(span.start_s), _ns(span.stop_s)) for span in spans]
    placed = [_At(0, 0, 0)] * len(spans)
    tracks: list[tuple[int, int, str]] = []
    number = 1 + max([0, *names, *(rank for rank, _ in by_track)])
    for rank, track in sorted(by_track, key=lambda each: (each[0], each[1] != STEP, each[1] != COMPUTE, each[1])):
        ends: list[int] = []
        for index in sorted(by_track[rank, track], key=times.__getitem__):
            start, stop = times[index]
            lane = next((at for at, end in enumerate(ends) if end <= start + 1), len(ends))
            start = max(start, *ends[lane : lane + 1], 0)
            stop = max(stop, start + 1)
            ends[lane : lane + 1] = [stop]
            placed[index] = _At(number + lane, start, stop)
        tracks += [(rank, number + lane, f"{track} ({lane + 1})" if lane else track) for lane in range(len(ends))]
        number += len(ends)
    return placed, tracks


# The numbers of the span that sends and of the one that receives, and the bytes.
_Transfer: TypeAlias = tuple[int, int, int]


def _transfers(spans: Sequence[TrackSpan]) -> list[_Transfer]:
    # Every transfer both of whose ends are here.
    receiving = {(span.rank, span.moves): index for index, span in enumerate(spans) if span.received}
    found: list[_Transfer] = []
    for index, span in enumerate(spans):
        for peer, num_bytes in span.sent.items():
            other = receiving.get((peer, span.moves))
            if other is not None and span.rank in spans[other].received:
                found.append((index, other, num_bytes))
    return found


def _arriving(placed: Sequence[_At], transfers: Iterable[_Transfer]) -> dict[int, _At]:
    # From when on all that send to a span have begun, where that is later than its own beginning.
    last: dict[int, int] = {}
    for sends, receives, _ in transfers:
        last[receives] = max(last.get(receives, 0), placed[sends].start)
    return {index: replace(placed[index], start=start) for index, start in last.items() if start > placed[index].start}


def _arrows(
    spans: Sequence[TrackSpan], transfers: Iterable[_Transfer], placed: Sequence[_At], arriving: Mapping[int, _At]
) -> list[dict[str, Any]]:
    # An arrow for every transfer between the beginnings of two spans, ends behind starts.
    starts: list[dict[str, Any]] = []
    ends: list[dict[str, Any]] = []
    for number, (sends, receives, _) in enumerate(transfers):
        a, b = placed[sends], arriving.get(receives, placed[receives])
        arrow = {"name": "transfer", "cat": spans[sends].phase or STEP, "id": number}
        starts.append({**arrow, "ph": "s", "ts": a.start / 1000, "pid": spans[sends].rank, "tid": a.track})
        end = {"bp": "e", "ts": b.start / 1000, "pid": spans[receives].rank, "tid": b.track}
        ends.append({**arrow, "ph": "f", **end})
    return [*starts, *ends]


def _counters(spans: Sequence[TrackSpan], placed: Sequence[_At], first: Mapping[int, int]) -> list[dict[str, Any]]:
    # The bytes that each rank has under way; `first`: a track of each rank.
    changes: defaultdict[int, Counter[int]] = defaultdict(Counter)
    for span, at in zip(spans, placed, strict=True):
        num_bytes = sum(span.sent.values()) + sum(span.received.values())
        if num_bytes:
            changes[span.rank][at.start] += num_bytes
            changes[span.rank][at.stop] -= num_bytes
    made: list[dict[str, Any]] = []
    for rank, of in sorted(changes.items()):
        levels = accumulate(of[at] for at in sorted(of))
        own = {"name": "bytes under way", "ph": "C", "pid": rank, "tid": first[rank]}
        made += [
            {**own, "ts": at / 1000, "args": {"bytes": level}} for at, level in zip(sorted(of), levels, strict=True)
        ]
    return made
