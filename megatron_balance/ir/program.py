"""The attention program: comm patterns write it; verify, reference, executor and simulator read it.

A value is addressed by its kind and its region: tokens [start, stop) of a sequence times heads
[head_start, head_stop). Query-side kinds (Q, OUT, OUT_GRAD, Q_GRAD) count query heads, key-side
kinds (KV, KV_GRAD) count key-value heads. Positions are absolute, so what a query may see follows
from them and the program's mask (`ir.mask`) and is never stored.

Rows of the ops (int64; column names in `ir.columns`):

| op | table | one row is |
|---|---|---|
| Exchange | Transfer | kind, seq, start, stop, head_start, head_stop, src, dst |
| Attend, AttendGrad | Pair | seq, q_start, q_stop, q heads, k_start, k_stop, kv heads |
| Merge | Value | kind, seq, start, stop, head_start, head_stop |

Meaning of an op:

* `Exchange`: transfers issued together; `src` and `dst` are ranks. OUT and the gradients are moved
  (the source gives them up); Q, KV and OUT_GRAD are copied. A gradient to which nobody has
  contributed yet is zero and may travel.
* `Attend`: for each query region one partial output, with its LSE, over all keys that the op lists
  for it.
* `AttendGrad`: for each query region one partial Q_GRAD, for each key region one partial KV_GRAD.
* `Merge`: the partials of a region that the rank holds become one: outputs by LSE, gradients by
  sum.

In a program with a remap (`RankProgram.remap_in`), what its exchanges take from an owner is moved,
too: Q and KV in a remap-in exchange and, in the backward, OUT_GRAD in the reversal of the last
forward exchange. So the attention in between may bring a rank what it had given up, like any other
value.

The same ops serve a whole program (`Program`) and one rank's projection of it (`RankProgram`),
whose Exchanges hold only the rows that the rank sends or receives. Exchange ids rise along every
projection, so matching sends and receives meet in one global order and cannot deadlock.
"""

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Literal, TypeAlias

from megatron_balance.ir.columns import Route, Rows
from megatron_balance.ir.mask import CAUSAL, Mask

# Whether received keys and values are held for the backward, or communicated again.
Policy: TypeAlias = Literal["keep", "replay"]
# A policy for all layers, or `auto`: by layer, as memory allows (`analysis.backward`).
Backward: TypeAlias = Literal["auto", "keep", "replay"]


class Kind(IntEnum):
    """Kind of the values of a region."""

    Q = 0
    KV = 1
    OUT = 2  # partial output with its LSE
    OUT_GRAD = 3  # gradient of the final output, with the final output and its LSE
    Q_GRAD = 4
    KV_GRAD = 5


KEY_SIDE = (Kind.KV, Kind.KV_GRAD)
MOVED = (Kind.OUT, Kind.Q_GRAD, Kind.KV_GRAD)  # a transfer takes these away from the source

NO_ROUTES = Rows(Route.WIDTH)

Collective: TypeAlias = Literal["p2p", "all_to_all", "all_gather", "reduce_scatter"]
COLLECTIVES: tuple[Collective, ...] = ("p2p", "all_to_all", "all_gather", "reduce_scatter")


@dataclass(frozen=True, slots=True)
class Exchange:
    """Transfers issued together: one batched communication call.

    `collective` other than "p2p": exactly the ranks of `group` take part, all of them, so that the
    executor may lower the op to a collective. With "all_gather" every rank sends the same rows to
    all the others; with "reduce_scatter" every rank is sent the same rows by all the others,
    gradients to be summed.

    `moves`: whether a collective carries kinds that are moved. A rank of its group that sends and
    receives nothing of its own in it could not tell by its rows, and yet has to issue the call in
    the same place as the others (`compile.order`).

    `routes`: `Route` rows. All that the op moves from src to dst is cut, as bytes, into as many
    near-equal pieces as there are rows of (src, dst). Piece i goes src -> send_proxy ->
    receive_proxy -> dst, where a hop from a rank to itself is no transfer (Zeppelin, section 3.3).
    What arrives does not depend on routes; only the links do. In a projection, `transfers` also
    lists what the rank passes on as a proxy, since it needs the sizes.
    """

    id: int
    transfers: Rows
    collective: Collective = "p2p"
    group: tuple[int, ...] = ()
    routes: Rows = NO_ROUTES
    moves: bool = False


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

    `owned`: `Fragment` rows whose q, k, v it is given and whose output it returns, in the order of
    its tokens. `num_exchanges`: forward exchanges of the whole program (backward ids derive from
    it). `replays`: by forward exchange id, the exchange that brings the same inputs again in a
    replayed backward, where that is not the forward exchange itself (a ring turns the other way).
    `queues`: (zone name, number of its forward ops), in order. `remap_in`: number of forward
    exchanges, the first ids, that bring inputs from the linear to the attention layout. What they
    bring is used throughout, so a replayed backward brings it again at its start.
    """

    rank: int
    owned: Rows
    forward: tuple[Op, ...]
    num_exchanges: int
    backward: tuple[Op, ...] = ()
    replays: tuple[tuple[int, Exchange], ...] = field(default=())
    queues: tuple[tuple[str, int], ...] = field(default=())
    remap_in: int = 0
    mask: Mask = CAUSAL


@dataclass(frozen=True, slots=True)
class Program:
    """All ranks' ops of one attention call in one global order.

    `owned[rank]`: that rank's linear layout, `Fragment` rows. A program knows nothing of
    microbatches: one that spans several of them (a pipeline tick) gives every sequence its own id
    (docs/adr/0004). `policy`: how the backward gets the inputs that the forward received ("keep" or
    "replay"); None: the program is forward only. `remap_in`: as in `RankProgram`.
    """

    lengths: tuple[int, ...]
    num_heads: int
    num_kv_heads: int
    owned: tuple[Rows, ...]
    forward: tuple[Op, ...]
    backward: tuple[Op, ...] = ()
    policy: str | None = None
    remap_in: int = 0
    mask: Mask = CAUSAL

    @property
    def num_ranks(self) -> int:
        return len(self.owned)


def is_remap_move(exchange_id: int, remap_in: int, *, forward: bool) -> bool:
    """Whether the exchange moves inputs or output gradients, as those of the remap do."""
    return exchange_id < remap_in or (not forward and 0 < remap_in == exchange_id - 1)
