"""Rendezvous of hosts in group calls, as NCCL has it: a model without threads."""

# NCCL connects a (communicator, source, target) pair at its first send or receive. The host of each
# end stands in the group call until the other end is in a group call with that pair, too (NCCL
# 2.29.7: `ncclP2PPreconnect` in enqueue.cc or group.cc, `ncclTransportP2pSetup` in transport.cc;
# NVIDIA/nccl#783). It first hears of all its new pairs and then tells their other ends, so ranks
# leave together: all that are reached over new pairs must be there. A collective connects its
# communicator's ranks at its first use of each kind.

from collections import deque
from collections.abc import Iterable, Sequence
from functools import partial
from typing import NamedTuple, TypeAlias

from megatron_balance.analysis.wire import is_collective
from megatron_balance.compile.ping_pong import NanoSegment, backward, one_by_one
from megatron_balance.compile.pipeline import CompiledRank
from megatron_balance.compile.proof.runs import IssuedCall, interleaved
from megatron_balance.ir.plan import MicrobatchPlan

# (from, to).
Pair: TypeAlias = tuple[int, int]


class GroupCall(NamedTuple):
    # A group call of one rank: on which communicator, and the (from, to) of its transfers.
    #
    # `group`: the ranks of a collective, which has no pairs. `name`: for messages.
    communicator: str
    pairs: frozenset[Pair] = frozenset()
    group: tuple[int, ...] = ()
    name: str = ""

    def links(self) -> set[tuple[str, Pair]]:
        # Links that are connected at first use.
        pairs = self.pairs or {(a, b) for a in self.group for b in self.group if a != b}
        return {(self.communicator, pair) for pair in pairs}


class Meeting:
    # Ranks in group calls. `connected`: (communicator, pair) that were used before.
    def __init__(self, connected: Iterable[tuple[str, Pair]] = ()) -> None:
        self.connected = set(connected)
        self.waiting: dict[int, set[tuple[str, Pair]]] = {}  # by rank: what is new in its call

    def enter(self, rank: int, call: GroupCall) -> list[int]:
        # Ranks whose hosts leave their calls now that `rank` is in this one.
        new = {(c, p) for c, p in call.links() if rank in p} - self.connected
        if not new:
            return [rank]
        self.waiting[rank] = new
        return self._leave(rank)

    def _leave(self, entered: int) -> list[int]:
        # Only ranks that are reached from the one that entered can leave.
        together, reached = {entered}, deque([entered])
        while reached:
            rank = reached.popleft()
            for link in self.waiting[rank]:
                other = link[1][0] if link[1][1] == rank else link[1][1]
                if link not in self.waiting.get(other, ()):
                    return []
                if other not in together:
                    together.add(other)
                    reached.append(other)
        for rank in together:
            self.connected |= self.waiting.pop(rank)
        return sorted(together)


def hanging(calls: Sequence[Sequence[GroupCall]], meeting: Meeting | None = None) -> dict[int, GroupCall]:
    # Ranks whose hosts stand for ever, and the call in which each does; `calls`: by rank, in order
    # of issue.
    meeting = meeting or Meeting()
    at, running = [0] * len(calls), deque(range(len(calls)))
    while running:
        rank = running.popleft()
        own = calls[rank]
        while at[rank] < len(own):
            left = meeting.enter(rank, own[at[rank]])
            for other in left:
                at[other] += 1
            running.extend(other for other in left if other != rank)
            if rank not in left:
                break
    return {rank: own[at[rank]] for rank, own in enumerate(calls) if at[rank] < len(own)}


def group_calls(batches: Iterable[IssuedCall]) -> list[GroupCall]:
    # Group calls of one rank. Each stream has a communicator of its own.
    named = ((f"{b.call.stream} {b.group}" if b.group else b.call.stream, b) for b in batches)
    return [GroupCall(communicator, b.pairs, b.group, str(b.call)) for communicator, b in named]


def batches_of(
    plans: Sequence[MicrobatchPlan], compiled: Sequence[Sequence[CompiledRank]], segments: Sequence[NanoSegment]
) -> tuple[list[list[IssuedCall]], list[list[IssuedCall]]]:
    # Batches of every rank in the forward and in the backward of plans that run in `segments`.
    per_node = plans[0].ranks_per_node
    own = partial(is_collective, num_ranks=plans[0].num_ranks, ranks_per_node=per_node)
    forward = interleaved(compiled, segments, per_node, backward=False, own_group=own)
    return forward, interleaved(compiled, backward(segments), per_node, backward=True, own_group=own)


def calls_of(plans: Sequence[MicrobatchPlan], compiled: Sequence[Sequence[CompiledRank]]) -> list[list[GroupCall]]:
    # Group calls of every rank in the forward and then the backward of plans, one layer of each.
    phases = batches_of(plans, compiled, one_by_one(1, len(plans)))
    return [group_calls([*ahead, *back]) for ahead, back in zip(*phases, strict=True)]
