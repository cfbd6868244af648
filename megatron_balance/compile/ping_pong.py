"""Two nano-batches interleaved, so that the exchanges of one run beside the computation of the other (DistCA, section 4.1, Fig. 7).

A phase of an attention call is cut in three, by the order of its steps (`compile.order`): *start* issues what sends its inputs out,
*attend* is everything up to the last launch and the start of what brings results back to the owner, *end* waits for that. Between the parts of one
half lie those of the other, and *linear*: what a layer does behind attention and, as one step, what the next layer does before it.

    A: end, linear, start   B: end, linear, start   A: attend   B: attend   A: end, linear, start   ...

The inputs of A travel beside the linear step of B, those of B beside the attention of A, the outputs of A beside the attention of B,
and those of B beside the linear step of A. The backward does the same in reverse: the reversal of *end* starts the call, that of *start*
ends it. Executor and simulator take these turns; nothing else decides the order.

What two ranks tell each other must come in one order on both (`compile.order`): a nano-batch's start is issued before the other nano-batch's attend
on every rank, so only exchanges that every rank can start at once may be part of it. `compile.prefetchable` knows them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeAlias

from megatron_balance.compile.order import Finish, Start, Step
from megatron_balance.ir.program import Exchange, Op

NUM_NANO_BATCHES = 2

SegmentKind: TypeAlias = Literal["linear", "start", "attend", "end"]

_REVERSED: dict[SegmentKind, SegmentKind] = {"linear": "linear", "start": "end", "attend": "attend", "end": "start"}


class Segment(NamedTuple):
    """One part of one nano-batch. A linear step belongs to the layer that it leads to: that of layer 0 has nothing before it, that of
    number `num_layers` leads nowhere.
    """

    nano_batch: int
    layer: int
    part: SegmentKind


class Cuts(NamedTuple):
    """Where the steps of a phase are cut: steps [0, attend) are its start, [attend, end) its attend, [end, ...) its end."""

    attend: int
    end: int


def parts(ops: Sequence[Op], steps: Sequence[Step], prefetchable: frozenset[int]) -> tuple[tuple[Step, ...], Cuts]:
    """A rank's steps with what may start early in front, and where they are cut. `prefetchable`: ids of the exchanges that may be part of the
    start. Where something else starts at once too, it changes places with them: they are of different lanes, or in the order of their ids.
    """
    leading = 0
    while leading < len(steps) and isinstance(steps[leading], Start):
        leading += 1
    ahead = [step for step in steps[:leading] if _id(ops[step.op]) in prefetchable]
    others = [step for step in steps[:leading] if _id(ops[step.op]) not in prefetchable]
    end = len(steps)
    while end > leading and isinstance(steps[end - 1], Finish):
        end -= 1
    return (*ahead, *others, *steps[leading:]), Cuts(len(ahead), end)


def _id(op: Op) -> int:
    return op.id if isinstance(op, Exchange) else -1


def forward(num_layers: int, num_nano_batches: int = NUM_NANO_BATCHES) -> tuple[Segment, ...]:
    """The turns of a forward pass through `num_layers` layers, nano-batches interleaved."""
    segments: list[Segment] = []
    for layer in range(num_layers):
        for nano_batch in range(num_nano_batches):
            segments += _between(nano_batch, layer)
        segments += [Segment(nano_batch, layer, "attend") for nano_batch in range(num_nano_batches)]
    for nano_batch in range(num_nano_batches):
        segments += _between(nano_batch, num_layers)[: 2 if num_layers else 1]
    return tuple(segments)


def one_by_one(num_layers: int, num_nano_batches: int = NUM_NANO_BATCHES) -> tuple[Segment, ...]:
    """The same parts without interleaving: every exchange is waited for where it is issued (the ablation of DistCA's Fig. 11)."""
    segments: list[Segment] = []
    for layer in range(num_layers):
        for nano_batch in range(num_nano_batches):
            segments += [Segment(nano_batch, layer, part) for part in ("linear", "start", "attend", "end")]
    return (*segments, *(Segment(nano_batch, num_layers, "linear") for nano_batch in range(num_nano_batches)))


def backward(segments: Sequence[Segment]) -> tuple[Segment, ...]:
    """The turns of the backward pass, in which parts have the names of what they do: the reversal of an end is a start."""
    return tuple(Segment(segment.nano_batch, segment.layer, _REVERSED[segment.part]) for segment in reversed(segments))


def _between(nano_batch: int, layer: int) -> list[Segment]:
    """From the end of one layer's attention to the start of the next one's."""
    ended = [Segment(nano_batch, layer - 1, "end")] if layer else []
    return [*ended, Segment(nano_batch, layer, "linear"), Segment(nano_batch, layer, "start")]
