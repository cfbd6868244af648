"""What a rank executes: a list of steps with everything looked up, built by `bind`, run by `executor`.

Buffers. Number 0 is what the caller remaps (q, k, v, and later the output and its gradient); every received message of
inputs is a buffer of its own. Outputs, output gradients and query gradients have one tensor beside each query buffer, key
gradients one beside each key buffer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

import torch

from megatron_balance.compile.order import Leg, Role
from megatron_balance.compile.ping_pong import Cuts
from megatron_balance.ir.program import Kind
from megatron_balance.runtime.lower.parcels import Carried
from megatron_balance.runtime.lower.regions import Run


class Packed(NamedTuple):
    """Rows taken from (or added to) buffers: [num_rows, num_heads, ...] in the order of `runs`.

    `indices`: of each run, on the device. `direct`: all rows are consecutive rows of one buffer with the wanted heads, so a view
    serves.
    """

    runs: tuple[Run, ...]
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


class Launch(NamedTuple):
    """One forward kernel call. `entries`: what the kernel prepared; `calls`: how many launches it takes; `op`: its place in the program.

    `out`: packed output rows -> query buffers; `merges[i]`: run i adds to what is there.
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
    """One backward kernel call. `dout`: the output's gradient, output and LSE; `dq`, `dk`: packed rows -> gradient tensors."""

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


class Message(NamedTuple):
    """Rows of one kind and one head span between this rank and `peer`.

    Sent: `packed` says from where. Received: inputs become buffer `buffer`, everything else goes to `packed`.
    `merges` as in `Launch`, for received outputs. `stream` as in `compile.order.streams`.
    """

    peer: int
    kind: Kind
    packed: Packed
    buffer: int = -1
    merges: tuple[bool, ...] = ()
    stream: str = ""

    @property
    def carried(self) -> Carried:
        return self.kind, self.packed.num_rows, self.packed.num_heads


class Hop(NamedTuple):
    """One transfer of a piece, as the rank at one of its ends sees it: to or from `peer`. `stream` as in `compile.order.streams`.

    `tag` is added to the exchange's. `crosses`: the ends are on different nodes.
    """

    peer: int
    leg: Leg
    tag: int
    stream: str
    crosses: bool


class Piece(NamedTuple):
    """Piece `index` of `count` of all that goes from one rank to another in a routed exchange, at its source or at its target."""

    index: int
    count: int
    hop: Hop


class ProxyRoute(NamedTuple):
    """A piece of others, as the proxy `role` sees it."""

    role: Role
    src: int
    dst: int
    index: int
    count: int
    arrives: Hop
    leaves: Hop


class RelayTask(NamedTuple):
    """What a proxy compile on in one exchange: one piece of `carried`, all that goes from one rank to another.

    `op`: the exchange's place in the program; `tag`: its first.
    """

    op: int
    exchange: int
    tag: int
    carried: tuple[Carried, ...]
    way: ProxyRoute


class ExchangeStep(NamedTuple):
    """One exchange of this rank. `collective` and `group` as in `ir.program.Exchange`; `op`: its place in the program.

    Messages with one peer stand together. `routed_sends`, `routed_receives`: by peer, the pieces that all messages with it travel as.
    `far`: peers on other nodes. `tag`: of its direct messages. `stream`: of a collective.
    """

    op: int
    id: int
    zone: str
    collective: str
    group: tuple[int, ...]
    sends: tuple[Message, ...]
    receives: tuple[Message, ...]
    tag: int
    routed_sends: dict[int, tuple[Piece, ...]]
    routed_receives: dict[int, tuple[Piece, ...]]
    far: frozenset[int]
    stream: str

    def places(self) -> list[tuple[str, str]]:
        """(stream, leg) of all that this rank sends and receives for itself in it, each once, in order."""
        if self.stream:
            return [(self.stream, "direct")]
        found = {(m.stream, "direct") for m in self.sends if m.peer not in self.routed_sends}
        found |= {(m.stream, "direct") for m in self.receives if m.peer not in self.routed_receives}
        for routed in (self.routed_sends, self.routed_receives):
            found |= {(piece.hop.stream, piece.hop.leg) for pieces in routed.values() for piece in pieces}
        return sorted(found)


class Start(NamedTuple):
    exchange_step: ExchangeStep


class Finish(NamedTuple):
    exchange_step: ExchangeStep


Step: TypeAlias = Launch | GradLaunch | Start | Finish


PhaseName: TypeAlias = Literal["forward", "backward"]
BOTH_PHASES: tuple[PhaseName, ...] = ("forward", "backward")


@dataclass(frozen=True, slots=True)
class Work:
    """What one run of a phase adds to the counters (`runtime.counters`), known before it runs: (name, by how much)."""

    counts: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Phase:
    """The steps of the forward or the backward. `frees[i]`: (kind, buffer) pairs that no step after i touches.

    `cuts`: where another call's parts may run between the steps. `relay_tasks`: what the rank compile on for others, in groups that wait for
    nothing in one another.
    """

    steps: tuple[Step, ...]
    cuts: Cuts
    last_uses: tuple[tuple[tuple[Kind, int], ...], ...]
    blank_outputs: tuple[int, ...] = ()  # query buffers whose output must start empty
    work: Work = field(default_factory=Work)
    relay_tasks: tuple[tuple[RelayTask, ...], ...] = ()


def describe(step: Step) -> str:
    """One line for a log: what the step does and with whom."""
    match step:
        case Start(exchange_step) | Finish(exchange_step):
            sends = ", ".join(f"{m.packed.num_rows} rows of {m.kind.name} to rank {m.peer}" for m in exchange_step.sends)
            receives = ", ".join(f"{m.packed.num_rows} rows of {m.kind.name} from rank {m.peer}" for m in exchange_step.receives)
            what = "start" if isinstance(step, Start) else "end"
            return f"{what} of exchange {exchange_step.id} ({exchange_step.collective}) of zone {exchange_step.zone!r}: {sends or 'nothing out'}; {receives or 'nothing in'}"
        case Launch() | GradLaunch():
            return f"{'attention' if isinstance(step, Launch) else 'attention gradient'} of zone {step.zone!r} in {step.calls} kernel calls"
