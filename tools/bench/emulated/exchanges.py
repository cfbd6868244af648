"""When what exchanges carried was sent, awaited and there, rank by rank; and what ranks waited that
was no one's lateness.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from megatron_balance.runtime.bind import Bound
from megatron_balance.runtime.lower.steps import FinishStep, IssueStep, Phase
from megatron_balance.runtime.recorder import Mark, Traced


class Exchanged(NamedTuple):
    """One exchange of a rank. `nano_batch`, `phase`, `call` (one a layer) and `exchange` say which;
    `sources`: ranks that send to this one.

    Seconds on the clock that all ranks of a machine share: `sent_s`, when the rank had issued it;
    `began_s`, when it began to wait for it, and `came_s`, when it had what it brings.
    """

    nano_batch: int
    phase: str
    call: int
    exchange: int
    sources: tuple[int, ...]
    sent_s: float
    began_s: float
    came_s: float


def exchanges_of(bound: Bound, nano_batch: int) -> Iterator[Exchanged]:
    """All that a traced plan's calls exchanged. Its forwards came before its backwards, as a step
    without recomputation has it.
    """
    events = iter([event for event in bound.trace or [] if event.role == "own"])
    for name, phase, calls in (
        ("forward", bound.forward, bound.counters.forward_calls),
        ("backward", bound.backward, bound.counters.backward_calls),
    ):
        for call in range(calls):
            yield from _of_call(phase, events, (nano_batch, name, call))


def _of_call(phase: Phase, events: Iterator[Traced], which: tuple[int, str, int]) -> Iterator[Exchanged]:
    sent: dict[int, Mark] = {}
    for step in phase.steps:
        match step:
            case IssueStep(exchange):
                for _ in exchange.places():
                    sent[exchange.id] = next(events).stop_s
            case FinishStep(exchange):
                event: Traced = next(events)
                sources = tuple(sorted({message.peer for message in exchange.receives}))
                sent_s: float = sent.get(exchange.id, event.start_s)
                yield Exchanged(*which, exchange.id, sources, sent_s, event.start_s, event.stop_s)
            case _:
                next(events)


def exposed_s(ranks: Sequence[Sequence[Exchanged]]) -> float:
    """Of a step, seconds that a rank waited for exchanges whose senders had all issued them, mean
    over ranks: a sender that comes late is not the exchange's time.
    """
    sent = {(rank, *one[:4]): one.sent_s for rank, own in enumerate(ranks) for one in own}
    waited = 0.0
    for own in ranks:
        for one in own:
            if one.sources:
                leaves = max(sent[source, *one[:4]] for source in one.sources)
                waited += max(0.0, one.came_s - max(leaves, one.began_s))
    return waited / len(ranks)
