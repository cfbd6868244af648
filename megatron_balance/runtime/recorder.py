"""The attention calls of a traced step on this rank, as spans of `analysis.trace_format`.

A rank's calls note when they do what (`Traced`). On a device these are events of its streams; their
times are read when the step is over, so that nothing waits.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from megatron_balance.analysis.trace_format import ATTENTION, COMPUTE, LINEAR, PACK, PLACE, WAIT, TrackSpan
from megatron_balance.analysis.wire import padded, tensor_bytes
from megatron_balance.compile.order import Leg, Role
from megatron_balance.runtime.cuda import Streams
from megatron_balance.runtime.lower import steps
from megatron_balance.runtime.lower.memory import CallForm, piece_bytes

if TYPE_CHECKING:
    from megatron_balance.runtime.bind import Bound


Mark: TypeAlias = Any  # seconds by `time.perf_counter`, or an event of a device's stream (`runtime.recorder`)


class Traced(NamedTuple):
    """One thing done: launches (leg "run"), a leg of an exchange, its "finish" or "pack"."""

    stream: str
    # Of attention, or of an exchange.
    op: int
    leg: Leg | str
    role: Role
    # By `time.perf_counter`. Of the leg of an exchange: issuing it; of a relayed one: from the
    # first wait for it until it is sent on; of "finish": waiting for what the exchange brings. On a
    # device times are events, and those of a leg enclose what it takes on its stream.
    start_s: Mark
    stop_s: Mark


Trace: TypeAlias = list[Traced]  # of one phase, or of several, one after the other
_Key = tuple[int, str, str]  # (op, leg, stream)

# Received and sent by one leg of an exchange on a stream, by pool rank at the other end.
_LegBytes = tuple[Counter[int], Counter[int]]


class _Marked(NamedTuple):
    """A span whose times are still marks."""

    span: TrackSpan
    start: Mark
    stop: Mark


def _read(clock: Callable[[], Any]) -> tuple[float, Any]:
    """The time of `time.perf_counter` at which another clock was read, and what that said."""
    readings = [(time.perf_counter(), clock(), time.perf_counter()) for _ in range(5)]
    before, said, after = min(readings, key=lambda each: each[2] - each[0])  # the quickest
    return (before + after) / 2, said


class Recorder:
    """The calls of one step. Times count from when it was made."""

    def __init__(self, rank: int, streams: Streams | None = None) -> None:
        """`rank`: in the world; `streams`: of the device, where exchanges have some."""
        self.rank, self.streams = rank, streams
        self._timed: list[Streams] = []
        self.watch(streams)
        self._zero_s, self._zero = (time.perf_counter(), None) if streams is None else _read(streams.now)
        at, unix_s = _read(time.time)
        self.began_unix_s = unix_s + self._zero_s - at
        self._marked: list[_Marked] = []
        self._calls: defaultdict[tuple[str, int], int] = defaultdict(int)

    def watch(self, streams: Streams | None) -> None:
        """Have events of more streams of the device say their times."""
        if streams is not None and streams not in self._timed:
            streams.timed(True)
            self._timed.append(streams)

    def mark(self) -> Mark:
        """Now, on the compute stream."""
        return time.perf_counter() if self.streams is None else self.streams.now()

    def add(self, span: TrackSpan, start: Mark, stop: Mark) -> None:
        self._marked.append(_Marked(span, start, stop))

    def ended(self, bound: "Bound", phase: steps.Phase, trace: Trace, form: CallForm, *, forward: bool) -> None:
        """Add the call whose run of a phase is over, and noted `trace`."""
        name, number = "forward" if forward else "backward", bound.number
        call = self._calls[name, number]
        self._calls[name, number] += 1
        common = TrackSpan(self.rank, COMPUTE, "", 0.0, 0.0, name, number, call)
        ranks = bound.groups.ranks
        for marked in _of_call(phase, trace, form, common, on_device=self.streams is not None):
            span = marked.span
            sent, received = ({ranks[peer]: n for peer, n in way.items()} for way in (span.sent, span.received))
            self._marked.append(marked._replace(span=replace(span, sent=sent, received=received)))

    def spans(self) -> list[TrackSpan]:
        """All spans, and between calls of a pass the modules there. Once, when the device is done."""
        found = [replace(m.span, start_s=self._seconds(m.start), stop_s=self._seconds(m.stop)) for m in self._marked]
        for streams in self._timed:
            streams.timed(False)
        return [*found, *_between(found)]

    def _seconds(self, mark: Mark) -> float:
        if isinstance(mark, float):
            return mark - self._zero_s
        assert self.streams is not None
        return self.streams.seconds(self._zero, mark)


def _between(spans: Sequence[TrackSpan]) -> Iterator[TrackSpan]:
    own = sorted((s for s in spans if s.track == COMPUTE and s.call >= 0), key=lambda s: (s.start_s, s.stop_s))
    for before, after in zip(own, own[1:], strict=False):
        if before.phase == after.phase and before.call != after.call and after.start_s > before.stop_s:
            times = {"start_s": before.stop_s, "stop_s": after.start_s}
            yield replace(after, what=LINEAR, exchange=-1, zone="", **times)


# One call


def _of_call(
    phase: steps.Phase, trace: Trace, form: CallForm, common: TrackSpan, *, on_device: bool
) -> Iterator[_Marked]:
    """The spans of a call; a leg of an exchange on a stream is one, whatever it is made of."""
    # On a device the trace has what a leg took on its stream. Without one, it has when the host
    # issued it: it lasts until what the exchange brings is there.
    exchanges = {
        step.exchange.op: step.exchange for step in phase.steps if isinstance(step, steps.IssueStep | steps.FinishStep)
    }
    zones = {step.op: step.zone for step in phase.steps if isinstance(step, steps.Launch | steps.GradLaunch)}
    tasks = [task for group in phase.relay_tasks for task in group]
    relayed = {task.op: task.exchange for task in tasks}
    legs: dict[_Key, tuple[Mark, Mark]] = {}
    issued: dict[int, list[Traced]] = {}

    def of(op: int, track: str, what: str) -> TrackSpan:
        exchange = exchanges.get(op)
        number, zone = (exchange.id, exchange.zone) if exchange else (relayed.get(op, -1), zones.get(op, ""))
        return replace(common, track=track, what=what, exchange=number, zone=zone)

    for each in trace:
        if each.leg in _COMPUTED:
            what = PLACE if each.leg == "run" and each.op in exchanges else _COMPUTED[each.leg]
            yield _Marked(of(each.op, COMPUTE, what), each.start_s, each.stop_s)
            for leg in [] if each.leg != "finish" else issued.pop(each.op, []):
                _widen(legs, leg, each.stop_s)
        elif each.role == "own" and not on_device:
            issued.setdefault(each.op, []).append(each)
        else:
            _widen(legs, each, each.stop_s)
    for leg in (leg for left in issued.values() for leg in left):  # nothing comes back
        _widen(legs, leg, leg.stop_s)
    moved = _moved(list(exchanges.values()), tasks, form)
    for (op, leg, stream), (start, stop) in legs.items():
        received, sent = ({peer: n for peer, n in way.items() if n} for way in moved[op, leg, stream])
        yield _Marked(replace(of(op, stream, leg), sent=sent, received=received), start, stop)


# Spans of the compute track by the legs of a trace; a run of an exchange's op is the placing.
_COMPUTED = {"run": ATTENTION, "finish": WAIT, "pack": PACK}


def _widen(legs: dict[_Key, tuple[Mark, Mark]], each: Traced, stop: Mark) -> None:
    """Stretch a leg's span over a part of it. Marks of a device come in the order of its stream."""
    key = (each.op, str(each.leg), each.stream)
    start, end = legs.get(key, (each.start_s, stop))
    if isinstance(stop, float):
        start, end = min(start, each.start_s), max(end, stop)
    else:
        end = stop
    legs[key] = start, end


def _moved(
    exchanges: Sequence[steps.ExchangeStep], tasks: Sequence[steps.RelayTask], form: CallForm
) -> defaultdict[_Key, _LegBytes]:
    """The bytes of every leg of this rank's exchanges, and of what it relays."""
    moved: defaultdict[_Key, _LegBytes] = defaultdict(lambda: (Counter(), Counter()))
    for exchange in exchanges:
        for sends in (True, False):
            messages = exchange.sends if sends else exchange.receives
            routed = exchange.routed_sends if sends else exchange.routed_receives
            for message in messages:
                if message.peer not in routed:
                    key = (exchange.op, "direct", exchange.stream or message.stream)
                    sizes = tensor_bytes([message.carried], form.sizes)
                    moved[key][sends][message.peer] += sum(map(padded, sizes) if exchange.stream else sizes)
            for peer, pieces in routed.items():
                carried = tuple([m.carried for m in messages if m.peer == peer])
                for piece in pieces:
                    key = (exchange.op, piece.hop.leg, piece.hop.stream)
                    moved[key][sends][piece.hop.peer] += piece_bytes(carried, form, piece.index, piece.count)
    for task in tasks:
        route = task.route
        num_bytes = piece_bytes(task.carried, form, route.index, route.count)
        for hop, sends in ((route.arrives, False), (route.leaves, True)):
            moved[task.op, hop.leg, hop.stream][sends][hop.peer] += num_bytes
    return moved


# Counts of what a rank's attention calls really did, made where it is done.


@dataclass(slots=True)
class Counters:
    """Sums over the calls of one bound plan on this rank, of both phases unless said otherwise."""

    forward_calls: int = 0
    backward_calls: int = 0
    kernel_calls: int = 0
    # By zone name; "other": any other name.
    kernel_calls_inter_node: int = 0
    kernel_calls_intra_node: int = 0
    kernel_calls_local: int = 0
    kernel_calls_other: int = 0
    # By collective.
    exchanges_p2p: int = 0
    exchanges_all_to_all: int = 0
    exchanges_all_gather: int = 0
    exchanges_reduce_scatter: int = 0
    # Of the forward only, without those of the remap, which are counted apart.
    q_tokens_received: int = 0
    kv_tokens_received: int = 0
    partial_tokens_received: int = 0
    # Of all tensors that arrived for this rank.
    bytes_received_forward: int = 0
    bytes_received_backward: int = 0
    # Tokens of the remap, whose query, key and value come and whose output goes back.
    remap_tokens_received: int = 0
    # Peers to which an exchange went in pieces.
    routed_transfers: int = 0
    # Passed on for others as a proxy.
    relayed_bytes_forward: int = 0
    relayed_bytes_backward: int = 0
    # Between this rank and ranks of other nodes, relayed bytes included.
    inter_node_bytes_sent_forward: int = 0
    inter_node_bytes_sent_backward: int = 0
    inter_node_bytes_received_forward: int = 0
    inter_node_bytes_received_backward: int = 0
    # Visible (query, key) pairs times query heads, of all that was attended.
    attended_pairs: int = 0
    # Tasks that a pipeline stage without a microbatch of its own attended to for others.
    idle_tasks: int = 0

    def ran(self, work: steps.Work) -> None:
        """Add one finished run of a phase."""
        for name, count in work:
            setattr(self, name, getattr(self, name) + count)

    def carried(self, traffic: "PhaseTraffic", *, forward: bool) -> None:
        """Add what one run of a phase moved."""
        phase = "forward" if forward else "backward"
        for name in ("bytes_received", "relayed_bytes", "inter_node_bytes_sent", "inter_node_bytes_received"):
            count = getattr(traffic, name)
            if count:
                setattr(self, f"{name}_{phase}", getattr(self, f"{name}_{phase}") + count)


@dataclass(slots=True)
class PhaseTraffic:
    """Bytes of one run of a phase, as in `Counters`."""

    bytes_received: int = 0
    relayed_bytes: int = 0
    inter_node_bytes_sent: int = 0
    inter_node_bytes_received: int = 0
