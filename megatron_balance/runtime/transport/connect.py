"""Connect ranks before the step in which they first exchange anything (NCCL).

NCCL connects two ranks of a communicator at their first send or receive, each direction for itself,
and the host stands in the group call until the other end is in its own (NCCL 2.29.7,
`ncclTransportP2pSetup`; NVIDIA/nccl#783). A warm-up all-reduce connects rings, not pairs. Plans
bring new pairs for many steps. So what a plan needs and no plan before it needed is connected when
it is bound, by one group call for each communicator with one byte for each new pair: communicators
in one order on all ranks, before anything of the step is issued. All ranks know the plan, so the
ends of a pair agree without a word that it is new.

All ranks of the pool bind the same plans, for the same phases, in one order, from the thread that
issues their steps.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

from megatron_balance.runtime.cuda import StreamMessage
from megatron_balance.runtime.groups import Groups, StreamPair
from megatron_balance.runtime.lower.steps import ExchangeStep, IssueStep, Phase
from megatron_balance.runtime.transport.comm import is_collective


def connect(phases: Iterable[Phase], groups: Groups) -> int:
    """Connect what the phases need and no earlier call connected; the number of new links.

    It waits for the other ends, not for the device. Does nothing on gloo, which has no streams.
    """
    if groups.streams is None:
        return 0
    new = {link for phase in phases for link in links(phase, groups)} - groups.connected
    by_stream: defaultdict[str, list[StreamPair]] = defaultdict(list)
    for link in sorted(new):
        by_stream[link.stream].append(link)
    for name, together in by_stream.items():  # sorted, so in one order everywhere
        stream = groups.streams.of(name)
        stream.batch(
            [
                StreamMessage(src, dst, 0, src == groups.rank, dst if src == groups.rank else src, stream.empty(1))
                for _, src, dst in together
            ]
        )
    groups.connected.update(new)
    return len(new)


def links(phase: Phase, groups: Groups) -> Iterator[StreamPair]:
    """Links of this rank point to point in a phase, with repeats."""
    rank = groups.rank
    for step in phase.steps:
        if isinstance(step, IssueStep) and not is_collective(step.exchange, groups):
            yield from _own(step.exchange, rank)
    for together in phase.relay_tasks:
        for relay_task in together:
            arrives, leaves = relay_task.route.arrives, relay_task.route.leaves
            yield StreamPair(arrives.stream, arrives.peer, rank)
            yield StreamPair(leaves.stream, rank, leaves.peer)


def _own(exchange: ExchangeStep, rank: int) -> Iterator[StreamPair]:
    for message in exchange.sends:
        if message.peer not in exchange.routed_sends:
            yield StreamPair(message.stream, rank, message.peer)
    for message in exchange.receives:
        if message.peer not in exchange.routed_receives:
            yield StreamPair(message.stream, message.peer, rank)
    for pieces in exchange.routed_sends.values():
        for piece in pieces:
            yield StreamPair(piece.hop.stream, rank, piece.hop.peer)
    for pieces in exchange.routed_receives.values():
        for piece in pieces:
            yield StreamPair(piece.hop.stream, piece.hop.peer, rank)
