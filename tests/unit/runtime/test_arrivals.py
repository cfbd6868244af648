"""Messages that arrive together are taken together, unless they touch the same rows and heads."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from megatron_balance.ir.program import Kind
from megatron_balance.runtime.lower.memory import taken_together
from megatron_balance.runtime.lower.messages import arrivals
from megatron_balance.runtime.lower.steps import ExchangeStep, Packed, PeerMessage, RowRun


def message(peer: int, kind: Kind, rows: tuple[int, int], heads: tuple[int, int], buffer: int = 0) -> PeerMessage:
    start, stop = rows
    run = RowRun(0, stop - start, buffer, start, stop, None, 0, heads[1] - heads[0], heads[0])
    return PeerMessage(peer, kind, Packed((run,), run.count, run.num_heads, (None,)))


def test_heads_of_other_peers_are_taken_together() -> None:
    """Gradients of queries with those of keys, which go elsewhere."""
    received = [
        message(peer, kind, (0, 10), (2 * peer, 2 * peer + 2))
        for peer in (1, 2, 3)
        for kind in (Kind.Q_GRAD, Kind.KV_GRAD)
    ]
    assert arrivals(received) == ((0, 1, 2, 3, 4, 5),)


def test_an_exchange_that_sums_on_the_way_brings_one_peers_messages() -> None:
    received = tuple(message(peer, Kind.KV_GRAD, (0, 10), (0, 2)) for peer in (1, 2, 3))
    exchange = ExchangeStep(
        *(0, 0, "", "reduce_scatter", (0, 1, 2, 3), (), received, 0, {}, {}, frozenset(), ""),
        arrivals=arrivals(received),
    )
    assert exchange.arrivals == ((0,), (1,), (2,))
    assert taken_together(exchange, 1) == [(0,)]


def test_what_meets_an_earlier_message_comes_behind_it_and_behind_what_that_came_behind() -> None:
    """A key-value head that several ranks used: its gradients are added in order."""
    rows = [(0, 10), (5, 15), (12, 20), (30, 40)]
    received = [message(peer, Kind.KV_GRAD, each, (0, 2)) for peer, each in enumerate(rows)]
    assert arrivals(received) == ((0, 3), (1,), (2,))


def test_received_inputs_become_buffers_of_their_own_and_meet_nothing() -> None:
    received = [PeerMessage(peer, kind, Packed((), 8, 2), peer) for peer in (1, 2) for kind in (Kind.Q, Kind.KV)]
    assert arrivals(received) == ((0, 2), (1, 3))
