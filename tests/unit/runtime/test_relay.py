"""A proxy's thread on a transport that only writes down: order, look-ahead, what it counts, and
what it says when a piece is lost.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from megatron_balance.compile.ping_pong import Cuts  # noqa: E402
from megatron_balance.ir.program import Kind  # noqa: E402
from megatron_balance.runtime import transport  # noqa: E402
from megatron_balance.runtime.groups import Groups  # noqa: E402
from megatron_balance.runtime.lower.memory import AttentionShape, CallForm  # noqa: E402
from megatron_balance.runtime.lower.steps import Hop, Phase, ProxyRoute, RelayTask  # noqa: E402
from megatron_balance.runtime.recorder import PhaseTraffic, Trace  # noqa: E402
from megatron_balance.runtime.transport import Gloo  # noqa: E402

FORM = CallForm.of(AttentionShape(1, 1, 4), torch.float32, "fp32")
ARRIVES, LEAVES = Hop(0, "dispatch", 6, "dispatch", False), Hop(5, "across", 8, "inter_node", True)


def relay_task(exchange: int, rows: int = 4) -> RelayTask:
    """Rank 1 relays the first half of what rank 0 sends to rank 4: `rows` keys of one head."""
    route = ProxyRoute("send_proxy", 0, 4, 0, 2, ARRIVES, LEAVES)
    return RelayTask(exchange, exchange, 100 * exchange, ((Kind.KV, rows, 1),), route)


def relaying(relay_tasks: list[RelayTask], trace: Trace | None = None) -> Gloo:
    """A phase of rank 1 that only relays."""
    phase = Phase((), Cuts(0, 0), (), relay_tasks=(tuple(relay_tasks),))
    return Gloo(phase, FORM, Groups(1, 8, tuple(range(8)), None), trace)


class Wire:
    """Stands in for gloo. `lost`: the tag of a message that never comes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, lost: int | None = None) -> None:
        self.log: list[tuple[Any, ...]] = []
        self.lost = lost
        for name in ("receive", "send"):
            monkeypatch.setattr(transport, name, lambda x, peer, tag, _, name=name: self.begin(name, x, peer, tag))
        monkeypatch.setattr(transport, "break_off", lambda _: self.log.append(("break off",)))

    def begin(self, name: str, x: Any, peer: int, tag: int) -> Wire:
        self.log.append((name, peer, tag, x.nbytes))
        wire = Wire.__new__(Wire)
        wire.log, wire.lost = self.log, tag if tag == self.lost else None
        return wire

    def wait(self, timeout: timedelta) -> None:
        assert timeout > timedelta(0)
        if self.lost is not None:
            raise RuntimeError("Connection closed by peer")


def test_pieces_are_passed_on_in_order_with_receives_posted_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    wire = Wire(monkeypatch)
    trace: Trace = []
    passing = relaying([relay_task(exchange) for exchange in range(40)], trace)
    passing.end()
    assert [entry for entry in wire.log if entry[0] == "send"] == [("send", 5, 100 * i + 8, 64) for i in range(40)]
    assert [entry for entry in wire.log if entry[0] == "receive"] == [
        ("receive", 0, 100 * i + 6, 64) for i in range(40)
    ]
    ahead = [entry[0] for entry in wire.log].index("send")
    assert 1 < ahead < 40
    assert passing.traffic == PhaseTraffic(relayed_bytes=40 * 64, inter_node_bytes_sent=40 * 64)
    assert [(e.stream, e.op, e.leg, e.role) for e in trace[:2]] == [
        ("dispatch", 0, "dispatch", "send_proxy"),
        ("inter_node", 0, "across", "send_proxy"),
    ]


def test_a_piece_without_bytes_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    wire = Wire(monkeypatch)
    # 16 bytes: one piece of the two.
    tiny = RelayTask(0, 0, 0, ((Kind.Q, 1, 1),), ProxyRoute("send_proxy", 0, 4, 0, 2, ARRIVES, LEAVES))
    whole = tiny._replace(route=tiny.route._replace(index=1))
    relaying([tiny, whole]).end()
    assert wire.log == [("receive", 0, 6, 16), ("send", 5, 8, 16)]


def test_a_lost_piece_is_named_and_everything_else_broken_off(monkeypatch: pytest.MonkeyPatch) -> None:
    wire = Wire(monkeypatch, lost=306)
    passing = relaying([relay_task(exchange) for exchange in range(6)])
    expected = (
        r"exchange 3, piece 0 of 2 from rank 0 to rank 4, as send proxy, rank 0 -> rank 1 -> rank 5: "
        r"it did not arrive: Connection closed by peer"
    )
    with pytest.raises(RuntimeError, match=expected):
        passing.end()
    assert wire.log[-1] == ("break off",)
    assert ("send", 5, 308, 64) not in wire.log
    with pytest.raises(RuntimeError, match="exchange 3"):
        passing.fail()
