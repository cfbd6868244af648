"""Seconds and bytes of a zone of a plan, and the closed forms that several kinds of zones share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np

from megatron_balance.analysis.step_memory import StepMemory
from megatron_balance.analysis.wire import NicOf, Payload, is_collective
from megatron_balance.cost.base import Floats, Ints, Link, MachineCost
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.columns import Pair
from megatron_balance.ir.model import Model
from megatron_balance.ir.program import Kind

_Amount: TypeAlias = Floats | float
"""Of one group that all are like, or of each."""

_Sides: TypeAlias = tuple[Kind, _Amount, _Amount]
"""A kind, token-heads of it that come to a rank, and those that leave the owner of tokens."""


@dataclass(frozen=True, slots=True)
class PricedMachine:
    """A cluster at the prices of `cost`. `row_bytes`: of a token and head by kind, with its LSE;
    `memory`: of the step around the plan; None: one stage of all layers.
    """

    cluster: Cluster
    model: Model
    cost: MachineCost
    row_bytes: tuple[int, ...]
    intra: Link
    inter: Link
    nics: NicOf
    memory: StepMemory | None = None

    @classmethod
    def of(cls, cluster: Cluster, model: Model, cost: MachineCost, memory: StepMemory | None = None) -> PricedMachine:
        """The machine of these ranks; `memory`: as there."""
        row_bytes = tuple(Payload.of(model).whole().tolist())
        nics = NicOf(cluster.num_ranks, cluster.node_size, cluster.ranks_per_nic)
        links = cost.link(inter_node=False), cost.link(inter_node=True)
        return cls(cluster, model, cost, row_bytes, *links, nics, memory)

    def whole(self, lengths: Ints) -> Ints:
        """`Pair` rows of whole sequences, all heads."""
        zero = np.zeros_like(lengths)
        return pairs_of((zero, lengths), (zero, lengths), (self.model.num_heads, self.model.num_kv_heads))

    def pack_s(self, num_bytes: float) -> float:
        """Seconds to pack bytes; nothing takes none."""
        return self.cost.pack_s(num_bytes) if num_bytes > 0 else 0.0


@dataclass(slots=True)
class Bulk:
    """An exchange of all ranks of a zone or of a group: seconds on the links [G] or of all, bytes
    that are packed before it and placed after it, of all ranks or of those of each group [groups].
    `together`: seconds are of each group's collective [groups].
    """

    seconds: Floats | float
    packed_bytes: Floats | float = 0.0
    placed_bytes: Floats | float = 0.0
    adds: bool = False
    together: bool = False


@dataclass(slots=True)
class WaveTimes:
    """Launches and keys of a zone in waves. `launches`: forward and backward seconds [groups, own +
    waves], the `own` launches of own work first; `keys`, `grads`: exchanges of a rank of each group
    [groups], by wave; `partners`: by wave, the pairs of groups [n, 2] that exchange anything. `late`:
    inputs that only the second launch of own work needs, and their gradients.
    """

    launches: tuple[Floats, Floats]
    keys: list[Bulk]
    grads: list[Bulk]
    partners: list[Ints]
    own: int = 1
    late: tuple[Bulk, Bulk] | None = None


@dataclass(slots=True)
class RingHop:
    """A ring's transfer from rank to rank: seconds until it is there, and seconds until the next one
    can follow it; `inside`, `between`: seconds that it keeps a rank's link and NIC busy.
    """

    there_s: float
    next_s: float
    inside_s: float
    between_s: float
    num_bytes: float


@dataclass(slots=True)
class ZoneTimes:
    """One zone. `ranks` [G], also as an index `at`; `tokens`, [G] or of each rank; `first`, `other`:
    forward and backward seconds of the launch of the first round and of each further one. `apart`:
    `rounds` groups that have nothing to do with each other, zones of the plan.

    Exchanges by what they carry: inputs, outputs and the gradients of both; `again`: all inputs as a
    replay brings them; `hop`: of keys, `back`: of their gradients. `query_heads`, `kv_heads`: of a
    rank, token-heads received; `largest`: of keys in one exchange; `sent`: of outputs that come home.
    """

    ranks: Ints
    tokens: Floats | float
    at: slice | Ints
    rounds: int = 1
    apart: bool = False
    inputs: Bulk | None = None
    outputs: Bulk | None = None
    input_grads: Bulk | None = None
    again: Bulk | None = None
    output_grads: Bulk | None = None
    hop: RingHop | None = None
    back: RingHop | None = None
    waves: WaveTimes | None = None
    first: tuple[Floats | float, Floats | float] = (0.0, 0.0)
    other: tuple[float, float] = (0.0, 0.0)
    query_heads: Floats | float = 0.0
    kv_heads: Floats | float = 0.0
    largest: Floats | float = 0.0
    sent: Floats | float = 0.0

    def by_group(self, clock: Floats) -> Floats:
        """The latest of each group [rounds] of the zone's ranks [G]."""
        return clock.reshape(self.rounds, -1).max(axis=1)

    def by_rank(self, clock: Floats) -> Floats:
        """A group's time on all its ranks."""
        return np.repeat(clock, len(self.ranks) // self.rounds)


def pairs_of(queries: tuple[Ints, Ints], keys: tuple[Ints, Ints], heads: tuple[int, int]) -> Ints:
    """`Pair` rows: spans of queries and keys [n], of sequences 0 .. n - 1."""
    rows = np.zeros((len(queries[0]), Pair.WIDTH), dtype=np.int64)
    rows[:, Pair.SEQ] = np.arange(len(rows))
    rows[:, Pair.Q_START], rows[:, Pair.Q_STOP] = queries
    rows[:, Pair.K_START], rows[:, Pair.K_STOP] = keys
    rows[:, Pair.Q_HEAD_STOP], rows[:, Pair.KV_HEAD_STOP] = heads
    return rows


def by_rank(ranks: Ints, values: Ints | Floats, size: int) -> Floats:
    """Sums of values by rank, or by any other number below `size`."""
    return np.bincount(ranks, weights=values, minlength=size).astype(np.float64)


def index_of(ranks: Sequence[int]) -> slice | Ints:
    """An index of ranks in arrays by rank: ranks in a row are a slice, which is faster."""
    first, last = ranks[0], ranks[-1]
    in_a_row = list(ranks) == list(range(first, last + 1))
    return slice(first, last + 1) if in_a_row else np.array(ranks)


def most_heads(model: Model, size: int) -> tuple[int, int]:
    """Query and key-value heads of the rank of a group that has most."""
    queries = -(-model.num_heads // size)
    ratio = model.num_heads // model.num_kv_heads
    return queries, min(model.num_kv_heads, -(-queries // ratio))


class _AllToAll(NamedTuple):
    """The all-to-all of a group in closed form. `inside`, `between`: fixed seconds and seconds a byte
    of the busiest rank on the links of a node and of a NIC, which `sharing` ranks share; None: all
    ranks are on one node.
    """

    inside: tuple[float, float]
    between: tuple[float, float] | None
    sharing: int

    @classmethod
    def of(cls, group: Sequence[int], machine: PricedMachine) -> _AllToAll:
        size, cluster = len(group), machine.cluster
        node = cluster.node_size
        one_node = group[0] // node == group[-1] // node and group[-1] - group[0] == size - 1
        here = size if one_node else int(np.bincount(machine.nics.node(np.array(group))).max())
        together = is_collective(tuple(group), cluster.num_ranks, node)
        inside = (here - 1 if together else 1) * machine.intra.alpha_s
        inside_byte_s = (here - 1) / (size - 1) / machine.intra.bytes_per_s
        if here == size:
            return cls((inside, inside_byte_s), None, 1)
        between = (size - here if together else 1) * machine.inter.alpha_s
        between_byte_s = (size - here) / (size - 1) / machine.inter.bytes_per_s
        return cls((inside, inside_byte_s), (between, between_byte_s), min(here, cluster.ranks_per_nic))

    def seconds(self, most: _Amount, far: tuple[_Amount, _Amount]) -> _Amount:
        """Seconds until all ranks have what comes: `most` bytes for a rank; `far`: as if all of it
        crossed, bytes for a rank and on average.
        """
        inside = self.inside[0] + most * self.inside[1]
        if self.between is None:
            return inside
        return _larger(inside, self.between[0] + _larger(far[0], far[1] * self.sharing) * self.between[1])


def exchange_heads(  # noqa: PLR0913  what is exchanged and how are two flags beside it
    made: ZoneTimes,
    group: Sequence[int],
    num_tokens: Floats | float,
    heads: tuple[int, int],
    machine: PricedMachine,
    *,
    inputs_only: bool = False,
    once: bool = False,
) -> None:
    """The all-to-alls of a group before and after its launches; `num_tokens`: of one group, which all
    are like, or of each [groups]. `inputs_only`: without outputs and their gradients; `once`: what
    several ranks of a node share crosses once and is passed on inside (`patterns.once_per_node`).
    """
    model, size, row_bytes, way = machine.model, len(group), machine.row_bytes, _AllToAll.of(group, machine)
    others = num_tokens * (size - 1) / size
    trading = min(size, model.num_heads)
    copies = trading * heads[1]  # key-value heads that all ranks of the group receive
    queries, keys = others * heads[0], others * heads[1]
    made.query_heads, made.kv_heads, made.largest = queries, keys, keys
    made.sent = num_tokens / size * (model.num_heads - heads[0])
    away = num_tokens / size
    together = isinstance(num_tokens, np.ndarray)
    here, sharing = _sharing(group, heads[1], machine) if once else (size, 1.0)
    passed_on = num_tokens * ((size - here) / size * heads[1] * (1 - 1 / sharing))

    def bulk(kinds: Sequence[_Sides], *, home: bool, placed: bool, adds: bool) -> Bulk:
        """`kinds`: with the token-heads that come to the ranks with heads, and those that leave the
        owners of tokens, keys last; `home`: the other way.
        """
        into = sum(row_bytes[kind] * to for kind, to, _ in kinds)
        out = sum(row_bytes[kind] * leaves for kind, _, leaves in kinds)
        most = _larger(into, out)
        if sharing > 1 and len(kinds) > 1:
            kind, to, leaves = kinds[-1]
            spared = row_bytes[kind] * (1 - 1 / sharing)
            far_out = out - spared * leaves
            on_s = passed_on * row_bytes[kind] / machine.intra.bytes_per_s
            on_s = on_s + machine.cost.call_s + machine.intra.alpha_s
            seconds = on_s + way.seconds(most, (_larger(into - spared * to, far_out), far_out))
        else:
            seconds = way.seconds(most, (most, out))
        if home:
            into, out = out, into
        return Bulk(seconds, out, into if placed else 0.0, adds, together=together)

    query_side = (queries, away * (model.num_heads - heads[0]))
    key_side = (keys, away * (copies - heads[1]))
    made.inputs = bulk([(Kind.Q, *query_side), (Kind.KV, *key_side)], home=False, placed=False, adds=False)
    made.again = made.inputs
    made.input_grads = bulk([(Kind.Q_GRAD, *query_side), (Kind.KV_GRAD, *key_side)], home=True, placed=True, adds=True)
    if not inputs_only:
        made.outputs = bulk([(Kind.OUT, *query_side)], home=True, placed=True, adds=False)
        made.output_grads = bulk([(Kind.OUT_GRAD, *query_side)], home=False, placed=True, adds=False)


def _sharing(group: Sequence[int], kv_heads: int, machine: PricedMachine) -> tuple[int, float]:
    """Ranks of a group on a node, and how many of them share a key-value head, of which a rank has
    `kv_heads`.
    """
    model, size, nodes = machine.model, len(group), np.bincount(machine.nics.node(np.array(group)))
    here = int(nodes.max())
    trading = min(size, model.num_heads) * here / size
    return here, max(1.0, trading * kv_heads / max(1.0, model.num_kv_heads * here / size))


def _larger(one: _Amount, other: _Amount) -> _Amount:
    return np.maximum(one, other) if isinstance(one, np.ndarray) else max(one, float(other))
