"""The attention program: schedules write it; verify, reference, executor and simulator read it.

A value is addressed by its kind and its region: tokens [start, stop) of a sequence times heads [head_start, head_stop).
Query-side kinds (Q, OUT, OUT_GRAD, Q_GRAD) count query heads, key-side kinds (KV, KV_GRAD) count key-value heads.
Positions are absolute, so what a query may see is derived and never stored.

Rows of the four ops (all int64, see `ir.rows`):

| op | one row is |
|---|---|
| Exchange | kind, seq, start, stop, head_start, head_stop, src, dst |
| Attend, AttendGrad | seq, q_start, q_stop, q_head_start, q_head_stop, k_start, k_stop, kv_head_start, kv_head_stop |
| Merge | kind, seq, start, stop, head_start, head_stop |

What an op means:

* `Exchange`: transfers issued together; `src` and `dst` are ranks. OUT and the gradients move (the source gives them up),
  Q, KV and OUT_GRAD are copied. A gradient to which nobody has contributed yet is zero and may travel.
* `Attend`: for each query region one partial output, with its LSE, over all keys the op lists for it.
* `AttendGrad`: for each query region one partial Q_GRAD, for each key region one partial KV_GRAD.
* `Merge`: the partials that the rank holds of a region become one: outputs by LSE, gradients by sum.

Where a program has a remap (`RankProgram.remap_in`), what its exchanges take from an owner moves too: Q and KV in a remap-in exchange
and, in the backward, OUT_GRAD in the reversal of the last forward exchange. So the attention in between may bring a rank what it
had given up, as it does any other value.

The same classes serve a whole program (`Program`) and one rank's projection of it (`RankProgram`), whose Exchanges hold
only the rows that the rank sends or receives. Exchange ids rise along every projection, so matching sends and receives
meet in one global order and cannot deadlock.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Literal, TypeAlias

from megatron_balance.ir.rows import Rows

Policy: TypeAlias = Literal["keep", "replay"]
"""Whether received keys and values are held for the backward, or communicated again."""


class Kind(IntEnum):
    """What a region of values is."""

    Q = 0
    KV = 1
    OUT = 2  # partial output with its LSE
    OUT_GRAD = 3  # gradient of the final output, with the final output and its LSE
    Q_GRAD = 4
    KV_GRAD = 5


KEY_SIDE = (Kind.KV, Kind.KV_GRAD)
MOVED = (Kind.OUT, Kind.Q_GRAD, Kind.KV_GRAD)  # a transfer takes these away from the source

TRANSFER_WIDTH = 8
PAIR_WIDTH = 9
MERGE_WIDTH = 6
FRAGMENT_WIDTH = 3  # seq, start, stop
ROUTE_WIDTH = 5  # src, dst, piece, send_proxy, receive_proxy
NO_ROUTES = Rows(ROUTE_WIDTH)

Collective: TypeAlias = Literal["p2p", "all_to_all", "all_gather", "reduce_scatter"]
COLLECTIVES: tuple[Collective, ...] = ("p2p", "all_to_all", "all_gather", "reduce_scatter")


@dataclass(frozen=True, slots=True)
class Exchange:
    """Transfers issued together: one batched communication call.

    `collective` other than "p2p" says that exactly the ranks of `group` take part, each of them, so that the executor may
    lower the op to a collective; "all_gather" adds that every rank sends the same rows to all the others, "reduce_scatter" that every
    rank is sent the same rows by all the others, gradients to be summed.

    `routes`: rows (src, dst, piece, send_proxy, receive_proxy). All that the op moves from src to dst is cut, as bytes, into as
    many near-equal pieces as there are rows of (src, dst); piece i goes src -> send_proxy -> receive_proxy -> dst, where a hop from
    a rank to itself is no transfer (Zeppelin, section 3.3). What arrives is the same; only the links differ. In a projection,
    `transfers` also lists what the rank passes on as a proxy, since it needs the sizes.
    """

    id: int
    transfers: Rows
    collective: Collective = "p2p"
    group: tuple[int, ...] = ()
    routes: Rows = NO_ROUTES


@dataclass(frozen=True, slots=True)
class Attend:
    """One variable-length kernel launch on `rank`."""

    rank: int
    pairs: Rows


@dataclass(frozen=True, slots=True)
class AttendGrad:
    """The backward launch of the same pairs."""

    rank: int
    pairs: Rows


@dataclass(frozen=True, slots=True)
class Merge:
    """Combine the partials that `rank` holds of each region."""

    rank: int
    values: Rows


Op: TypeAlias = Exchange | Attend | AttendGrad | Merge


@dataclass(frozen=True, slots=True)
class RankProgram:
    """One rank's projection: all it does in one attention call, in order.

    `owned`: (seq, start, stop) of the fragments whose q, k, v it is given and whose output it returns, in row order.
    `num_exchanges`: forward exchanges of the whole program (backward ids derive from it).
    `replays`: by forward exchange id, the exchange that brings the same inputs again in a replayed backward, where that
    is not the forward exchange itself (a ring turns the other way).
    `queues`: (zone name, number of its forward ops), in order.
    `remap_in`: how many forward exchanges, the first ids, bring inputs from the linear to the attention layout. What they bring is
    used throughout, so a replayed backward brings it again at its start.
    """

    rank: int
    owned: Rows
    forward: tuple[Op, ...]
    num_exchanges: int
    backward: tuple[Op, ...] = ()
    replays: tuple[tuple[int, Exchange], ...] = field(default=())
    queues: tuple[tuple[str, int], ...] = field(default=())
    remap_in: int = 0


@dataclass(frozen=True, slots=True)
class Program:
    """All ranks' ops of one attention call in one global order.

    `owners[rank]` is that rank's linear layout, rows of (seq, start, stop). A program knows nothing of microbatches: one
    that spans several of them (a pipeline tick) gives every sequence its own id (docs/adr/0004). `policy`: how the backward
    gets the inputs that the forward received ("keep" or "replay"); None: the program is forward only. `remap_in`: as in `RankProgram`.
    """

    lengths: tuple[int, ...]
    num_heads: int
    num_kv_heads: int
    owned: tuple[Rows, ...]
    forward: tuple[Op, ...]
    backward: tuple[Op, ...] = ()
    policy: str | None = None
    remap_in: int = 0

    @property
    def num_ranks(self) -> int:
        return len(self.owned)


def is_remap_move(exchange_id: int, remap_in: int, *, forward: bool) -> bool:
    """Whether the inputs or output gradients of this exchange move: it is the remap's, on its way into the attention layout."""
    return exchange_id < remap_in or (not forward and 0 < remap_in == exchange_id - 1)
