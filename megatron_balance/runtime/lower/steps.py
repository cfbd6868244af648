"""Steps that a rank executes: everything looked up; built by `bind`, run by `executor`.

Buffers. Number 0 is what the caller passes in (q, k, v, and later the output and its gradient);
every received message of inputs is a buffer of its own. Outputs, output gradients and query
gradients have one tensor beside each query buffer, key gradients one beside each key buffer.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

import torch

from megatron_balance.analysis.wire import Carried
from megatron_balance.compile.order import Leg, Role
from megatron_balance.compile.ping_pong import Cuts
from megatron_balance.ir.arrays import Ints
from megatron_balance.ir.program import Kind

INPUTS = (Kind.Q, Kind.KV)
GRADS = (Kind.Q_GRAD, Kind.KV_GRAD)
Value = tuple[Kind, int]  # (kind, buffer) of inputs and of gradients


class RowRun(NamedTuple):
    """Consecutive rows and heads of a packed tensor <-> rows and heads of `buffer`."""

    # Packed rows [row, row + count).
    row: int
    count: int
    buffer: int
    # Of the buffer, from here to `stop`, or those that `index` lists.
    start: int
    stop: int
    index: Ints | None
    # Heads [head, head + num_heads) of the packed rows; of the buffer from `buffer_head` on.
    head: int
    num_heads: int
    buffer_head: int


class Packed(NamedTuple):
    """Rows taken from (or added to) buffers: [num_rows, num_heads, ...] in the order of `runs`."""

    runs: tuple[RowRun, ...]
    num_rows: int
    num_heads: int
    # Of each run, on the device.
    indices: tuple[torch.Tensor | None, ...] = ()
    # All rows are consecutive rows of one buffer with the wanted heads, so a view serves.
    direct: bool = False


class Operand(NamedTuple):
    """A kernel operand: heads from `head` on of all of `buffer`; -1: `packed` is gathered first."""

    buffer: int
    head: int
    num_heads: int
    packed: Packed


class Sums(NamedTuple):
    """Where packed rows of gradients go."""

    # Runs that are the first of their buffer and all of it, in order: kept as they come.
    kept: tuple[RowRun, ...] = ()
    # The others, which are added to what their buffers hold.
    added: Packed = Packed((), 0, 0)


class Launch(NamedTuple):
    op: int
    zone: str
    q: Operand
    k: Operand
    # As the kernel prepared them.
    entries: Any
    # Packed output rows -> query buffers.
    out: Packed
    # Of each run of `out`, whether its rows hold a partial already.
    merges: tuple[bool, ...]
    # Buffers that it reads.
    reads: frozenset[tuple[Kind, int]]
    # Kernel calls that it takes.
    calls: int


class GradLaunch(NamedTuple):
    """One backward launch; other attributes as in `Launch`."""

    op: int
    zone: str
    q: Operand
    k: Operand
    # The output's gradient, output and LSE.
    dout: Operand
    entries: Any
    # Packed rows -> gradient tensors.
    dq: Packed
    dk: Packed
    reads: frozenset[tuple[Kind, int]]
    calls: int
    # The same, told apart by how they are summed.
    dq_sums: Sums = Sums()
    dk_sums: Sums = Sums()


class PeerMessage(NamedTuple):
    """Rows of one kind and one head span between this rank and `peer`."""

    peer: int
    kind: Kind
    # Sent: from where. Received: where to, of all but inputs, which become buffer `buffer`.
    packed: Packed
    buffer: int = -1
    # As in `Launch`, of received outputs.
    merges: tuple[bool, ...] = ()
    # As in `compile.order.stream_name`.
    stream: str = ""
    # Of received gradients.
    sums: Sums = Sums()

    @property
    def carried(self) -> Carried:
        return self.kind, self.packed.num_rows, self.packed.num_heads


class Hop(NamedTuple):
    """A transfer of a piece, at one of its ends. `tag`: added to the exchange's; `crosses`: nodes."""

    peer: int
    leg: Leg
    tag: int
    stream: str
    crosses: bool


class Piece(NamedTuple):
    """Piece `index` of `count` of all that goes from rank to rank in an exchange, at one end."""

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
    """One piece that a proxy relays in one exchange."""

    # The exchange's place in the program.
    op: int
    exchange: int
    # Its first tag.
    tag: int
    # The messages of the parcel that the piece is of.
    carried: tuple[Carried, ...]
    # Which piece, and its hops.
    route: ProxyRoute


class ExchangeStep(NamedTuple):
    """One exchange of this rank. Messages with one peer stand together."""

    op: int
    # As in `ir.program.Exchange`.
    id: int
    zone: str
    # As in `ir.program.Exchange`.
    collective: str
    # As in `ir.program.Exchange`.
    group: tuple[int, ...]
    sends: tuple[PeerMessage, ...]
    receives: tuple[PeerMessage, ...]
    # Of its direct messages.
    tag: int
    # By peer, the pieces that all messages to it travel as.
    routed_sends: dict[int, tuple[Piece, ...]]
    # By peer, the pieces that all messages from it travel as.
    routed_receives: dict[int, tuple[Piece, ...]]
    # On other nodes.
    far: frozenset[int]
    # Of a collective; "": none.
    stream: str
    # Messages received, by number, that are taken together (`lower.messages`).
    arrivals: tuple[tuple[int, ...], ...] = ()

    def legs(self) -> Iterator[tuple[str, str, bool, int]]:
        """(stream, leg, whether it is sent, peer) of this rank's own transfers, point to point."""
        sides = ((True, self.sends, self.routed_sends), (False, self.receives, self.routed_receives))
        for sent, messages, routed in sides:
            yield from ((m.stream, "direct", sent, m.peer) for m in messages if m.peer not in routed)
            for piece in chain.from_iterable(routed.values()):
                yield piece.hop.stream, piece.hop.leg, sent, piece.hop.peer

    def places(self) -> list[tuple[str, str]]:
        """(stream, leg) of this rank's own sends and receives, each once, in order."""
        return [(self.stream, "direct")] if self.stream else sorted({leg[:2] for leg in self.legs()})


class IssueStep(NamedTuple):
    exchange: ExchangeStep


class FinishStep(NamedTuple):
    """Wait for the tensors of an exchange, and unpack them."""

    exchange: ExchangeStep


Step: TypeAlias = Launch | GradLaunch | IssueStep | FinishStep

# (name, count) pairs that one run of a phase adds to its `runtime.recorder.Counters`.
Work: TypeAlias = tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Phase:
    """The steps of the forward or the backward."""

    steps: tuple[Step, ...]
    # Where another call's segments may run between the steps.
    cuts: Cuts
    # Of each step, the (kind, buffer) pairs that no later step touches.
    last_uses: tuple[tuple[tuple[Kind, int], ...], ...]
    # Query buffers whose output must start empty.
    blank_outputs: tuple[int, ...] = ()
    # For the counters.
    work: Work = ()
    # Pieces that the rank relays for others, in groups that wait for nothing in one another.
    relay_tasks: tuple[tuple[RelayTask, ...], ...] = ()


def is_whole(run: RowRun, packed: Packed, size: tuple[int, int]) -> bool:
    """Whether a run of packed rows is a whole buffer of `size` (rows, heads), in order."""
    rows, heads = size
    whole_rows = run.index is None and (run.start, run.count) == (0, rows)
    return whole_rows and (run.head, run.buffer_head, run.num_heads, packed.num_heads) == (0, 0, heads, heads)


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


def grads_of(step: Step) -> set[Value]:
    """The gradients that a step adds to or sends."""
    match step:
        case IssueStep(exchange):
            return _grads(exchange.sends)
        case FinishStep(exchange):
            return _grads(exchange.receives)
        case GradLaunch():
            return {(Kind.Q_GRAD, run.buffer) for run in step.dq.runs} | {
                (Kind.KV_GRAD, run.buffer) for run in step.dk.runs
            }
        case Launch():
            return set()


def _grads(messages: Sequence[PeerMessage]) -> set[Value]:
    return {(m.kind, run.buffer) for m in messages if m.kind in GRADS for run in m.packed.runs}
