"""Zones by closed forms: seconds of launches and exchanges, and the inputs that ranks receive.

Zones that place zigzag or exchange heads are alike on all their ranks, so one rank is priced; of a
zone in waves (`patterns.waves`), the rank with most heads of each group. All others are played as
the round engine plays them (`analysis.rounds`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from megatron_balance.analysis.machine import Machine
from megatron_balance.analysis.tables import LaunchPrices, Tables, ZoneTable, launches
from megatron_balance.analysis.wire import is_collective
from megatron_balance.ir.arrays import Floats, Ints
from megatron_balance.ir.columns import Pair
from megatron_balance.ir.model import Model
from megatron_balance.ir.plan import AnyPlanZone, MicrobatchPlan, SharedZone, Zone
from megatron_balance.ir.program import Kind
from megatron_balance.patterns import ONCE_PER_NODE
from megatron_balance.patterns.base import Context, HopByHop, pairs_of
from megatron_balance.patterns.head_exchange import HeadShares
from megatron_balance.patterns.head_ring import launches_by_kind, ring_launches, walks
from megatron_balance.patterns.waves import Need, Schedule, schedule
from megatron_balance.patterns.zigzag import Zigzag

_ONCE = tuple(ONCE_PER_NODE[name] for name in ("head_exchange", "chunk_exchange"))
_EXCHANGES = ("head_exchange", "chunk_exchange", *_ONCE)
# Patterns of zones whose ranks are alike, where each has as many heads and each node as many ranks
# of a group.
_EVEN = ("ring", "head_ring", *_EXCHANGES)

# Of one group that all are like, or of each.
_Amount: TypeAlias = Floats | float

# A kind, token-heads of it that come to a rank, and those that leave the owner of tokens.
_Sides: TypeAlias = tuple[Kind, _Amount, _Amount]


@dataclass(slots=True)
class Bulk:
    """An exchange of all ranks of each group: its seconds on the links, and bytes that a rank packs
    before it and places after it, of all groups or of each [groups]. `partners` [n, 2]: groups that
    wait for one another.
    """

    seconds: _Amount
    packed_bytes: _Amount = 0.0
    placed_bytes: _Amount = 0.0
    adds: bool = False
    partners: Ints | None = None


@dataclass(slots=True)
class WaveTimes:
    """Launches and keys of a zone in waves. `launches`: forward and backward seconds [groups, own +
    waves], the `own` launches of own work first; `keys`, `grads`: exchanges of a rank of each group
    [groups], by wave. `late`: inputs that only the second launch of own work needs, and their
    gradients.
    """

    launches: tuple[Floats, Floats]
    keys: list[Bulk]
    grads: list[Bulk]
    own: int = 1
    late: tuple[Bulk, Bulk] | None = None


@dataclass(slots=True)
class ZoneTimes:
    """One zone. `ranks` [G], also as an index `at`; `tokens`, [G] or of each rank; `num_groups`: that
    exchange heads; `first`: forward and backward seconds of its launch where it has one.

    Exchanges by what they carry: inputs, outputs and the gradients of both; `again`: all inputs as a
    replay brings them. `ring`, `hops`: launches by rank and round, and blocks that go round, as the
    round engine has them. `query_heads`, `kv_heads`: of a rank, token-heads received; `largest`: of
    keys in one exchange; `sent`: of outputs that come home.
    """

    ranks: Ints
    tokens: _Amount
    at: slice | Ints
    num_groups: int = 1
    inputs: Bulk | None = None
    outputs: Bulk | None = None
    input_grads: Bulk | None = None
    again: Bulk | None = None
    output_grads: Bulk | None = None
    ring: ZoneTable | None = None
    hops: HopByHop | None = None
    waves: WaveTimes | None = None
    first: tuple[_Amount, _Amount] = (0.0, 0.0)
    query_heads: _Amount = 0.0
    kv_heads: _Amount = 0.0
    largest: _Amount = 0.0
    sent: _Amount = 0.0

    def by_group(self, clock: Floats) -> Floats:
        """The latest of each group [num_groups] of the zone's ranks [G]."""
        return clock.reshape(self.num_groups, -1).max(axis=1)

    def by_rank(self, clock: Floats) -> Floats:
        """A group's time on all its ranks."""
        return np.repeat(clock, len(self.ranks) // self.num_groups)


def zone_times(plan: MicrobatchPlan, machine: Machine) -> tuple[Tables, list[ZoneTimes | ZoneTable]]:
    """The plan's zones, in issue order, and the tables of those that have no closed form. Raises
    InvalidProgramError: an unknown comm pattern.
    """
    prices, context, runs = LaunchPrices(), Context.of(plan), list(_together(plan.zones, machine))
    tables = Tables(plan, machine, [at for at, own in runs if not _is_alike(own[0], machine)])
    by_index = {table.index: table for table in tables.zones}
    zones: list[ZoneTimes | ZoneTable] = []
    numbers: list[tuple[ZoneTimes, Ints]] = []
    for index, own in runs:
        zone = own[0]
        if index in by_index:
            zones.append(by_index[index])
        elif isinstance(zone, SharedZone):
            zones.append(_zone_in_waves(zone, context, machine))
        else:
            each = [each for each in own if isinstance(each, Zone)]
            if len(own) > 1 and _group_size(each[0]) < len(each[0].ranks):
                made, which = _rings_apart(index, each, context, machine, prices)
            elif len(own) > 1:
                made, which = _groups_apart(each, context, machine, prices)
            else:
                made, which = _even_zone(index, each[0], context, machine, prices)
            zones.append(made)
            numbers.append((made, which))
    forward, backward = prices.seconds(machine)
    for made, which in numbers:
        if made.ring is not None:
            made.ring.forward_s, made.ring.backward_s = forward[which], backward[which]
        else:
            made.first = forward[which], backward[which]
    return tables, zones


def _is_alike(zone: AnyPlanZone, machine: Machine) -> bool:
    # Whether a zone has a closed form.
    if machine.model.forest is not None:
        return False
    if isinstance(zone, SharedZone):
        return machine.model.num_heads % zone.group_size == 0
    if not isinstance(zone, Zone) or zone.pattern not in _EVEN:
        return False
    size = _group_size(zone)
    if size == 1 or machine.model.num_heads % size:
        return size == 1
    on_nodes = np.bincount(machine.nics.node(np.array(zone.ranks[:size])))
    return len(set(on_nodes[on_nodes > 0].tolist())) == 1


def _group_size(zone: Zone) -> int:
    # Ranks that exchange heads.
    return len(zone.ranks) if zone.pattern in _EXCHANGES else zone.group_size if zone.pattern == "head_ring" else 1


def _together(zones: Sequence[AnyPlanZone], machine: Machine) -> Iterator[tuple[int, list[AnyPlanZone]]]:
    # Zones in order, with the number of the first: one, or several in a row that have no rank in
    # common and are groups alike, or rings of as many ranks inside nodes.
    run: list[AnyPlanZone] = []
    taken: set[int] = set()
    kind, first = None, 0
    for index, zone in enumerate(zones):
        own = _kind(zone, machine)
        ranks = zone.ranks if isinstance(zone, Zone) and own is not None else ()
        if run and (own is None or own != kind or not taken.isdisjoint(ranks)):
            yield first, run
            run, taken = [], set()
        if not run:
            kind, first = own, index
        run.append(zone)
        taken.update(ranks)
    if run:
        yield first, run


def _kind(zone: AnyPlanZone, machine: Machine) -> tuple[int, int, bool, bool, bool] | None:
    # Size, place in the node, collective or not, once per node or not, and zigzag or not, of a zone
    # of one group: in these, zones that lie alike are equal; None: not one group, not ranks in a
    # row, or ranks not alike. Rings inside nodes have no place, since they share no NIC.
    if not isinstance(zone, Zone) or not _is_alike(zone, machine):
        return None
    ranks, size = zone.ranks, len(zone.ranks)
    if _group_size(zone) == 1 < size:
        nodes = min(ranks) // machine.cluster.node_size, max(ranks) // machine.cluster.node_size
        return (size, 0, False, False, True) if nodes[0] == nodes[1] else None
    if _group_size(zone) != size or ranks[-1] - ranks[0] != size - 1:
        return None
    cluster = machine.cluster
    inside = ranks[0] // cluster.node_size == ranks[-1] // cluster.node_size
    place = 0 if inside else ranks[0] % cluster.node_size
    together = inside and is_collective(ranks, cluster.num_ranks, cluster.node_size)
    return size, place, together, zone.pattern in _ONCE, zone.pattern not in _EXCHANGES


def _whole(zone: Zone, seqs: Ints, context: Context, heads: tuple[int, int]) -> Ints:
    # Pairs of sequences whole on a rank, in the chunks that the zone's pattern makes of them.
    if zone.pattern not in _EXCHANGES:
        return ring_launches(Zigzag.of(context.lengths, seqs, 1, context.mask), heads).pairs
    spans = np.column_stack([seqs, np.zeros_like(seqs), context.lengths[seqs]])
    return pairs_of(spans, spans[:, 1:], [(0, heads[0], 0, heads[1])])


def _groups_apart(
    zones: Sequence[Zone], context: Context, machine: Machine, prices: LaunchPrices
) -> tuple[ZoneTimes, Ints]:
    # Zones of one group each that lie alike as one zone of several; each rank's launch.
    zones = sorted(zones, key=lambda zone: zone.ranks[0])
    size, count = len(zones[0].ranks), len(zones)
    ranks = np.array([zone.ranks for zone in zones]).ravel()
    seqs = np.array([seq for zone in zones for seq in zone.seqs], dtype=np.int64)
    of_group = np.zeros(len(context.lengths), dtype=np.int64)
    of_group[seqs] = np.repeat(np.arange(count), [len(zone.seqs) for zone in zones])
    num_tokens = by_rank(of_group[seqs], context.lengths[seqs], count)
    made = ZoneTimes(ranks, np.repeat(num_tokens / size, size), _index_of(ranks.tolist()), num_groups=count)
    heads = most_heads(machine.model, size)
    pairs = _whole(zones[0], seqs, context, heads)
    first = prices.add(pairs, of_group[pairs[:, Pair.SEQ]], np.zeros(count), np.zeros(count, dtype=bool))
    if size > 1:
        exchange_heads(made, zones[0].ranks, num_tokens, heads, machine, once=zones[0].pattern in _ONCE)
        made.query_heads, made.kv_heads, made.largest, made.sent = (
            np.repeat(each, size) for each in (made.query_heads, made.kv_heads, made.largest, made.sent)
        )
    return made, np.repeat(first + np.arange(count), size)


def _even_zone(
    index: int, zone: Zone, context: Context, machine: Machine, prices: LaunchPrices
) -> tuple[ZoneTimes, Ints]:
    # A zone whose ranks are alike, groups of `size` ranks that exchange heads and a ring over them;
    # and the number of each rank's launch, by round in a ring.
    own, num_ranks = context.lengths[list(zone.seqs)], len(zone.ranks)
    size = _group_size(zone)
    groups, ranks, model = num_ranks // size, np.array(zone.ranks), machine.model
    made = ZoneTimes(ranks, float(own.sum()) / num_ranks, _index_of(zone.ranks), num_groups=groups)
    num_tokens, heads = float(own.sum()) / groups, most_heads(model, size)
    if size > 1:
        exchange_heads(made, zone.ranks[:size], num_tokens, heads, machine, once=zone.pattern in _ONCE)
    if groups == 1:
        pairs = _whole(zone, np.array(zone.seqs, dtype=np.int64), context, heads)
        number = prices.add(pairs, np.zeros_like(pairs[:, Pair.SEQ]), np.zeros(1), np.zeros(1, dtype=bool))
        return made, np.full(num_ranks, number)
    made.kv_heads += (groups - 1) * num_tokens * heads[1]
    made.largest = max(made.largest, num_tokens * heads[1])
    placed = Zigzag.of(context.lengths, np.array(zone.seqs, dtype=np.int64), groups, context.mask)
    # [G, groups]; each place of a group has a ring of its own, of the part of the keys that its
    # heads are.
    part = heads[1] / model.num_kv_heads
    made.hops = HopByHop(*((np.repeat(walk, size, axis=0) * part).astype(np.float64) for walk in walks(placed)))
    of_kind = launches_by_kind(placed, heads)
    first = prices.add(of_kind.pairs, of_kind.launch, of_kind.merging, of_kind.merging > 0)
    which = np.repeat(first + of_kind.of_round, size, axis=0)
    made.ring = ZoneTable(index, ranks, which, None, *np.ones((2, num_ranks), dtype=bool))
    return made, which


def _rings_apart(
    index: int, zones: Sequence[Zone], context: Context, machine: Machine, prices: LaunchPrices
) -> tuple[ZoneTimes, Ints]:
    # Rings of as many ranks each as one zone, and each rank's launches: ranks of one place side by
    # side, as the rings through the places of groups lie.
    each = [_even_zone(index, zone, context, machine, prices) for zone in zones]
    size, hops = len(zones[0].ranks), [one.hops for one, _ in each if one.hops is not None]

    def beside(values: Sequence[Any]) -> Any:
        return np.stack(values, axis=1).reshape(size * len(zones), *values[0].shape[1:])

    ranks, which = beside([one.ranks for one, _ in each]), beside([launch for _, launch in each])
    tokens, keys, largest = (
        beside([np.full(size, getattr(one, name)) for one, _ in each]) for name in ("tokens", "kv_heads", "largest")
    )
    made = ZoneTimes(ranks, tokens, ranks, num_groups=size, kv_heads=keys, largest=largest)
    made.hops = HopByHop(beside([walk.forward for walk in hops]), beside([walk.backward for walk in hops]))
    made.ring = ZoneTable(index, ranks, which, None, *np.ones((2, len(ranks)), dtype=bool))
    return made, which


def _zone_in_waves(zone: SharedZone, context: Context, machine: Machine) -> ZoneTimes:
    # A zone whose groups of ranks exchange heads and attend in waves.
    #
    # Raises:
    # InvalidProgramError: groups of no rank, or no wave.
    made = schedule(zone, context.mask)
    size, groups = made.size, len(made.groups)
    ranks = (np.array(made.groups)[:, None] * size + np.arange(size)).ravel()
    runs = made.run_tokens().astype(np.float64)
    times = ZoneTimes(ranks, runs.ravel(), _index_of(ranks.tolist()), num_groups=groups)
    shares = HeadShares.of(*context.heads, size)
    heads = int(shares.queries.max()), int(shares.keys.max())
    times.waves = WaveTimes(_wave_launch_seconds(made, heads, machine), *_waves(made, heads[1], machine))
    if size > 1:
        _exchanges(times, times.waves, made, heads, machine)
    needs = made.needs
    come = [by_rank(own[:, Need.TO], own[:, Need.STOP] - own[:, Need.START], groups) for own in _by_wave(made)]
    others = (made.tokens.sum(axis=2) * (1 - 1 / size)).max(axis=0)
    largest = np.max([others, *come], axis=0) * heads[1]
    received = by_rank(needs[:, Need.TO], needs[:, Need.STOP] - needs[:, Need.START], groups) * heads[1]
    times.query_heads, times.kv_heads, times.sent = (
        np.broadcast_to(np.repeat(each, size) if isinstance(each, np.ndarray) else each, len(ranks))
        for each in (times.query_heads, times.kv_heads + received, times.sent)
    )
    times.largest = np.repeat(largest, size).astype(np.float64)
    return times


def _exchanges(times: ZoneTimes, waves: WaveTimes, made: Schedule, heads: tuple[int, int], machine: Machine) -> None:
    # The all-to-alls of groups of several ranks, inputs in one part or two.
    group = times.ranks[: made.size].tolist()
    by_part = made.tokens
    exchange_heads(times, group, by_part.sum(axis=(0, 2)).astype(np.float64), heads, machine)
    _pack_alike(times)
    if len(by_part) == 1:
        return
    by_part = by_part.max(axis=2).astype(np.float64) * made.size  # as if all held what the fullest does
    first, late = (ZoneTimes(times.ranks, 0.0, times.at) for _ in by_part)
    for each, num_tokens in zip((first, late), by_part, strict=True):
        exchange_heads(each, group, num_tokens, heads, machine, inputs_only=True)
        _pack_alike(each)
    assert late.inputs is not None
    assert late.input_grads is not None
    times.inputs, times.input_grads = first.inputs, first.input_grads
    waves.own, waves.late = 2, (late.inputs, late.input_grads)


def _pack_alike(times: ZoneTimes) -> None:
    # Let all groups pack and place as much as the fullest one.
    for bulk in (times.inputs, times.outputs, times.output_grads, times.input_grads):
        if bulk is not None:
            bulk.packed_bytes, bulk.placed_bytes = (float(np.max(n)) for n in (bulk.packed_bytes, bulk.placed_bytes))


def _by_wave(made: Schedule) -> list[Ints]:
    bounds = np.searchsorted(made.needs[:, Need.WAVE], np.arange(made.num_waves + 1))
    return [made.needs[a:b] for a, b in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)]


def _wave_launch_seconds(made: Schedule, heads: tuple[int, int], machine: Machine) -> tuple[Floats, Floats]:
    # Of each group, own work and each wave [groups, own + waves].
    own = len(made.parts)
    shape = len(made.groups), own + made.num_waves
    counts = [len(rows) for tasks in made.tasks for rows in tasks]
    rows = np.concatenate([rows for tasks in made.tasks for rows in tasks])
    merging = np.tile((np.arange(shape[1]) >= own).astype(np.float64), shape[0])
    pairs = np.zeros((len(rows), Pair.WIDTH), dtype=np.int64)
    pairs[:, Pair.QUERY_SPAN], pairs[:, Pair.K_SPAN] = rows[:, :3], rows[:, 3:]
    pairs[:, Pair.Q_HEAD_STOP], pairs[:, Pair.KV_HEAD_STOP] = heads
    launch = np.repeat(np.arange(len(counts)), counts)
    forward, backward = (
        launches(pairs, launch, merging, machine, backward=b).seconds.reshape(shape) for b in (False, True)
    )
    return forward, backward


def _waves(made: Schedule, kv_heads: int, machine: Machine) -> tuple[list[Bulk], list[Bulk]]:
    # Keys of each wave, and their gradients.
    nics, size = machine.nics, made.size
    first = np.array(made.groups, dtype=np.int64) * size
    node, nic = nics.node(first), nics.nic(first)
    sharing = min(size, machine.cluster.ranks_per_nic)
    there: list[Bulk] = []
    back: list[Bulk] = []
    for rows in _by_wave(made):
        src, dst = rows[:, Need.FROM], rows[:, Need.TO]
        token_heads = (rows[:, Need.STOP] - rows[:, Need.START]) * kv_heads
        across = (node[src] != node[dst]) | (size > machine.cluster.node_size)
        busy, totals = np.zeros((2, len(first))), np.zeros((2, len(first)))  # in token-heads, but for the links
        for way, end in enumerate((src, dst)):
            totals[way] = by_rank(end, token_heads, len(first))
            inside = by_rank(end, token_heads * ~across, len(first)) / machine.intra.bytes_per_s
            between = by_rank(nic[end], token_heads * across * sharing, int(nic.max(initial=0)) + 1)
            busy[way] = np.maximum(inside, between[nic] / machine.inter.bytes_per_s)
        alpha = machine.inter.alpha_s if across.any() else machine.intra.alpha_s
        longest = busy.max(axis=0)
        partners = np.column_stack(np.divmod(np.unique(src * len(first) + dst), len(first)))
        for kind, bulks, (out, into) in ((Kind.KV, there, totals), (Kind.KV_GRAD, back, totals[::-1])):
            each = machine.row_bytes[kind]
            seconds = np.where(totals.sum(axis=0) > 0, each * longest + alpha, 0.0)
            placed = each * into if kind == Kind.KV_GRAD else 0.0
            bulks.append(Bulk(seconds, each * out, placed, adds=True, partners=partners))
    return there, back


def by_rank(ranks: Ints, values: Ints | Floats, size: int) -> Floats:
    """Sums of values by rank, or by any other number below `size`."""
    return np.bincount(ranks, weights=values, minlength=size).astype(np.float64)


def _index_of(ranks: Sequence[int]) -> slice | Ints:
    # An index of ranks in arrays by rank: ranks in a row are a slice, which is faster.
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
    def of(cls, group: Sequence[int], machine: Machine) -> "_AllToAll":
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
        # Seconds until all ranks have what comes: `most` bytes for a rank; `far`: as if all of it
        # crossed, bytes for a rank and on average.
        inside = self.inside[0] + most * self.inside[1]
        if self.between is None:
            return inside
        return _larger(inside, self.between[0] + _larger(far[0], far[1] * self.sharing) * self.between[1])


def exchange_heads(  # noqa: PLR0913  what is exchanged and how are two flags beside it
    made: ZoneTimes,
    group: Sequence[int],
    num_tokens: Floats | float,
    heads: tuple[int, int],
    machine: Machine,
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
    here, sharing = _sharing(group, heads[1], machine) if once else (size, 1.0)
    passed_on = num_tokens * ((size - here) / size * heads[1] * (1 - 1 / sharing))

    def bulk(kinds: Sequence[_Sides], *, home: bool, placed: bool, adds: bool) -> Bulk:
        # `kinds`: with the token-heads that come to the ranks with heads, and those that leave the
        # owners of tokens, keys last; `home`: the other way.
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
        return Bulk(seconds, out, into if placed else 0.0, adds)

    query_side = (queries, away * (model.num_heads - heads[0]))
    key_side = (keys, away * (copies - heads[1]))
    made.inputs = bulk([(Kind.Q, *query_side), (Kind.KV, *key_side)], home=False, placed=False, adds=False)
    made.again = made.inputs
    made.input_grads = bulk([(Kind.Q_GRAD, *query_side), (Kind.KV_GRAD, *key_side)], home=True, placed=True, adds=True)
    if not inputs_only:
        made.outputs = bulk([(Kind.OUT, *query_side)], home=True, placed=True, adds=False)
        made.output_grads = bulk([(Kind.OUT_GRAD, *query_side)], home=False, placed=True, adds=False)


def _sharing(group: Sequence[int], kv_heads: int, machine: Machine) -> tuple[int, float]:
    # Ranks of a group on a node, and how many of them share a key-value head, of which a rank has
    # `kv_heads`.
    model, size, nodes = machine.model, len(group), np.bincount(machine.nics.node(np.array(group)))
    here = int(nodes.max())
    trading = min(size, model.num_heads) * here / size
    return here, max(1.0, trading * kv_heads / max(1.0, model.num_kv_heads * here / size))


def _larger(one: _Amount, other: _Amount) -> _Amount:
    return np.maximum(one, other) if isinstance(one, np.ndarray) else max(one, float(other))
