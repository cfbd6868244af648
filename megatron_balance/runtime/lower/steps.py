"""Steps that a rank executes: everything looked up; built by `bind`, run by `executor`.

Buffers. Number 0 is what the caller passes in (q, k, v, and later the output and its gradient);
every received message of inputs is a buffer of its own. Outputs, output gradients and query
gradients have one tensor beside each query buffer, key gradients one beside each key buffer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

import torch

from megatron_balance.analysis.wire import Carried
from megatron_balance.compile.order import Leg, Role
from megatron_balance.compile.ping_pong import Cuts
from megatron_balance.ir.program import Kind
from megatron_balance.runtime.lower.regions import RowRun


class Packed(NamedTuple):
    """Rows taken from (or added to) buffers: [num_rows, num_heads, ...] in the order of `runs`.

    `indices`: of each run, on the device. `direct`: all rows are consecutive rows of one buffer
    with the wanted heads, so a view serves.
    """

    runs: tuple[RowRun, ...]
    num_rows: int
    num_heads: int
    indices: tuple[torch.Tensor | None, ...] = ()
    direct: bool = False


class Operand(NamedTuple):
    """A kernel operand and where each entry's rows lie in it.

    `buffer` >= 0: the whole buffer, heads [head, head + num_heads); -1: `packed` is gathered first.
    """

    buffer: int
    head: int
    num_heads: int
    packed: Packed


class Sums(NamedTuple):
    """Where packed rows of gradients go.

    Attributes:
        kept: runs that are the first of their buffer and all of it, in order: kept as they come.
        added: the others, which are added to what their buffers hold.
    """

    kept: tuple[RowRun, ...] = ()
    added: Packed = Packed((), 0, 0)


class Launch(NamedTuple):
    """One forward launch.

    Attributes:
        op: place in the program.
        zone: name.
        q: queries.
        k: keys and values.
        entries: as the kernel prepared them.
        out: packed output rows -> query buffers.
        merges: of each run of `out`, whether its rows hold a partial already.
        reads: buffers that it reads.
        calls: kernel calls that it takes.
    """

    op: int
    zone: str
    q: Operand
    k: Operand
    entries: Any
    out: Packed
    merges: tuple[bool, ...]
    reads: frozenset[tuple[Kind, int]]
    calls: int


class GradLaunch(NamedTuple):
    """One backward launch; other attributes as in `Launch`.

    `dout`: the output's gradient, output and LSE; `dq`, `dk`: packed rows -> gradient tensors;
    `dq_sums`, `dk_sums`: the same, told apart by how they are summed.
    """

    op: int
    zone: str
    q: Operand
    k: Operand
    dout: Operand
    entries: Any
    dq: Packed
    dk: Packed
    reads: frozenset[tuple[Kind, int]]
    calls: int
    dq_sums: Sums = Sums()
    dk_sums: Sums = Sums()


class PeerMessage(NamedTuple):
    """Rows of one kind and one head span between this rank and `peer`.

    Sent: `packed` says from where. Received: inputs become buffer `buffer`, everything else goes
    to `packed`.
    `merges` as in `Launch`, for received outputs; `sums` for received gradients. `stream` as in
    `compile.order.streams`.
    """

    peer: int
    kind: Kind
    packed: Packed
    buffer: int = -1
    merges: tuple[bool, ...] = ()
    stream: str = ""
    sums: Sums = Sums()

    @property
    def carried(self) -> Carried:
        return self.kind, self.packed.num_rows, self.packed.num_heads


class Hop(NamedTuple):
    """One transfer of a piece, as the rank at one of its ends sees it: to or from `peer`.

    `tag` is added to the exchange's. `stream` as in `compile.order.streams`. `crosses`: the ends
    are on different nodes.
    """

    peer: int
    leg: Leg
    tag: int
    stream: str
    crosses: bool


class Piece(NamedTuple):
    """A piece of a routed parcel, at its source or at its target.

    A parcel is all that goes from one rank to another in one exchange; this is piece `index` of
    `count`.
    """

    index: int
    count: int
    hop: Hop


class ProxyRoute(NamedTuple):
    """The way of another pair's piece through this rank, which is its proxy in `role`."""

    role: Role
    src: int
    dst: int
    index: int
    count: int
    arrives: Hop
    leaves: Hop


class RelayTask(NamedTuple):
    """One piece that a proxy relays in one exchange.

    Attributes:
        op: the exchange's place in the program.
        exchange: its id.
        tag: its first tag.
        carried: the messages of the parcel that the piece is of.
        route: which piece, and its hops.
    """

    op: int
    exchange: int
    tag: int
    carried: tuple[Carried, ...]
    route: ProxyRoute


class ExchangeStep(NamedTuple):
    """One exchange of this rank. Messages with one peer stand together.

    Attributes:
        op: place in the program.
        id: as in `ir.program.Exchange`.
        zone: name.
        collective: as in `ir.program.Exchange`.
        group: as in `ir.program.Exchange`.
        sends: messages.
        receives: messages.
        tag: of its direct messages.
        routed_sends: by peer, the pieces that all messages to it travel as.
        routed_receives: by peer, the pieces that all messages from it travel as.
        far: peers on other nodes.
        stream: of a collective.
        arrivals: messages received, by number, that are taken together (`lower.arrivals`).
    """

    op: int
    id: int
    zone: str
    collective: str
    group: tuple[int, ...]
    sends: tuple[PeerMessage, ...]
    receives: tuple[PeerMessage, ...]
    tag: int
    routed_sends: dict[int, tuple[Piece, ...]]
    routed_receives: dict[int, tuple[Piece, ...]]
    far: frozenset[int]
    stream: str
    arrivals: tuple[tuple[int, ...], ...] = ()

    def places(self) -> list[tuple[str, str]]:
        """(stream, leg) of this rank's own sends and receives, each once, in order."""
        if self.stream:
            return [(self.stream, "direct")]
        places = {(m.stream, "direct") for m in self.sends if m.peer not in self.routed_sends}
        places |= {(m.stream, "direct") for m in self.receives if m.peer not in self.routed_receives}
        for routed in (self.routed_sends, self.routed_receives):
            places |= {(piece.hop.stream, piece.hop.leg) for pieces in routed.values() for piece in pieces}
        return sorted(places)


class IssueStep(NamedTuple):
    """Issue an exchange."""

    exchange: ExchangeStep


class FinishStep(NamedTuple):
    """Wait for the tensors of an exchange, and unpack them."""

    exchange: ExchangeStep


Step: TypeAlias = Launch | GradLaunch | IssueStep | FinishStep


PhaseName: TypeAlias = Literal["forward", "backward"]
BOTH_PHASES: tuple[PhaseName, ...] = ("forward", "backward")


@dataclass(frozen=True, slots=True)
class Work:
    """(name, count) pairs that one run of a phase adds to its `runtime.counters.Counters`."""

    counts: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Phase:
    """The steps of the forward or the backward.

    Attributes:
        steps: in order.
        cuts: where another call's segments may run between the steps.
        last_uses: of each step, the (kind, buffer) pairs that no later step touches.
        blank_outputs: query buffers whose output must start empty.
        work: for the counters.
        relay_tasks: pieces that the rank relays for others, in groups that wait for nothing in one
            another.
    """

    steps: tuple[Step, ...]
    cuts: Cuts
    last_uses: tuple[tuple[tuple[Kind, int], ...], ...]
    blank_outputs: tuple[int, ...] = ()
    work: Work = field(default_factory=Work)
    relay_tasks: tuple[tuple[RelayTask, ...], ...] = ()


def describe(step: Step) -> str:
    """One line for a log: what the step does and with whom."""
    match step:
        case IssueStep(exchange) | FinishStep(exchange):
            sends = ", ".join(f"{m.packed.num_rows} rows of {m.kind.name} to rank {m.peer}" for m in exchange.sends)
            receives = ", ".join(
                f"{m.packed.num_rows} rows of {m.kind.name} from rank {m.peer}" for m in exchange.receives
            )
            what = "start" if isinstance(step, IssueStep) else "end"
            exchanged = f"{sends or 'nothing out'}; {receives or 'nothing in'}"
            return f"{what} of exchange {exchange.id} ({exchange.collective}) of zone {exchange.zone!r}: {exchanged}"
        case Launch() | GradLaunch():
            return (
                f"{'attention' if isinstance(step, Launch) else 'attention gradient'} of zone {step.zone!r} in "
                f"{step.calls} kernel calls"
            )
