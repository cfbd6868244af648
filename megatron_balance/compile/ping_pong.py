"""Two nano-batches interleaved, so that the exchanges of one run beside the computation of the
other (DistCA, section 4.1, Fig. 7).
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeAlias

from megatron_balance.compile.order import Finish, Start, Step
from megatron_balance.ir.program import Exchange, Op

NUM_NANO_BATCHES = 2

_SegmentKind: TypeAlias = Literal["linear", "start", "attend", "end"]

_REVERSED: dict[_SegmentKind, _SegmentKind] = {"linear": "linear", "start": "end", "attend": "attend", "end": "start"}


# A phase of an attention call has three segments, cut from the order of its steps
# (`compile.order`). *start* issues the exchanges that send its inputs out. *attend* is everything
# up to the last launch and the start of the exchange that brings results back to their owners.
# *end* waits for that. A fourth one, *linear*, is the work of a layer behind attention and, as one
# step, that of the next layer before it. Between the segments of one nano-batch lie those of the
# other:
#
#     A: end, linear, start   B: end, linear, start   A: attend   B: attend   A: end, linear, ...
#
# The inputs of A travel beside the linear step of B, those of B beside the attention of A, the
# outputs of A beside the attention of B, and those of B beside the linear step of A. The backward
# does this in reverse: the reversal of *end* starts the call, that of *start* ends it. Executor and
# simulator follow this order of segments; nothing else decides it.
#
# Ranks must issue what they exchange in one order (`compile.order`). The start of one
# nano-batch is issued before the attend of the other on every rank, so only exchanges that every
# rank can start at once may be part of it: those that come first in `compile.order`.
class NanoSegment(NamedTuple):
    """One segment of one nano-batch.

    A linear step belongs to the layer that it leads to: that of layer 0 has nothing before it, that
    of number `num_layers` leads nowhere.
    """

    nano_batch: int
    layer: int
    part: _SegmentKind


class Cuts(NamedTuple):
    """Bounds of segments: steps [0, attend) are the start, [attend, end) attend, the rest the end."""

    attend: int
    end: int


def cut_segments(ops: Sequence[Op], steps: Sequence[Step], first: frozenset[int]) -> Cuts:
    """Where the segments of a rank's steps end; `first`: as in `compile.order`."""
    # Only exchanges that come first on every rank may be part of the start.
    ahead = 0
    ids = [op.id if isinstance(op, Exchange) else -1 for op in ops]
    while ahead < len(steps) and isinstance(steps[ahead], Start) and ids[steps[ahead].op] in first:
        ahead += 1
    end = len(steps)
    while end > ahead and isinstance(steps[end - 1], Finish):
        end -= 1
    return Cuts(ahead, end)


def forward(num_layers: int, num_nano_batches: int = NUM_NANO_BATCHES) -> tuple[NanoSegment, ...]:
    """Segments of a forward pass through `num_layers` layers, in order, nano-batches interleaved."""
    ordered: list[NanoSegment] = []
    for layer in range(num_layers):
        for nano_batch in range(num_nano_batches):
            ordered += _between(nano_batch, layer)
        ordered += [NanoSegment(nano_batch, layer, "attend") for nano_batch in range(num_nano_batches)]
    for nano_batch in range(num_nano_batches):
        ordered += _between(nano_batch, num_layers)[: 2 if num_layers else 1]
    return tuple(ordered)


def one_by_one(num_layers: int, num_nano_batches: int = NUM_NANO_BATCHES) -> tuple[NanoSegment, ...]:
    """Segments of a forward without interleaving: each exchange is waited for (DistCA, Fig. 11)."""
    ordered: list[NanoSegment] = []
    for layer in range(num_layers):
        for nano_batch in range(num_nano_batches):
            ordered += [NanoSegment(nano_batch, layer, part) for part in ("linear", "start", "attend", "end")]
    return (*ordered, *(NanoSegment(nano_batch, num_layers, "linear") for nano_batch in range(num_nano_batches)))


def backward(forward_segments: Sequence[NanoSegment]) -> tuple[NanoSegment, ...]:
    """Segments of the backward pass, named by what they do: the reversal of an end is a start."""
    return tuple(
        NanoSegment(segment.nano_batch, segment.layer, _REVERSED[segment.part])
        for segment in reversed(forward_segments)
    )


def _between(nano_batch: int, layer: int) -> list[NanoSegment]:
    # Segments from the end of one layer's attention to the start of the next one's.
    ended = [NanoSegment(nano_batch, layer - 1, "end")] if layer else []
    return [*ended, NanoSegment(nano_batch, layer, "linear"), NanoSegment(nano_batch, layer, "start")]
