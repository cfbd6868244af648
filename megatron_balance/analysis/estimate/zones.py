"""Seconds of a zone's launches and exchanges by closed forms, and the inputs that it receives.

Zones that place zigzag or exchange heads are alike on all their ranks, so one rank is priced. For
others the pattern says launches and traffic (`CommPattern.rounds`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from megatron_balance.analysis.estimate.times import (
    Bulk,
    RingHop,
    WaveTimes,
    ZoneTimes,
    by_rank,
    exchange_heads,
    exchange_of,
    index_of,
    most_heads,
    routed_from,
)
from megatron_balance.analysis.launches import launches
from megatron_balance.analysis.machine import Machine, pairs_of
from megatron_balance.analysis.wire import is_collective
from megatron_balance.cost.base import Floats, Ints
from megatron_balance.ir.columns import Message, Pair
from megatron_balance.ir.mask import FULL
from megatron_balance.ir.plan import AnyPlanZone, MicrobatchPlan, SharedZone, TaskTable, Zone
from megatron_balance.ir.program import Kind
from megatron_balance.patterns import ONCE_PER_NODE, pattern_of
from megatron_balance.patterns.base import Context, GroupTraffic, Launches, PointToPoint
from megatron_balance.patterns.head_exchange import head_counts, head_slices
from megatron_balance.patterns.waves import Need, Schedule, schedule

_ONCE = tuple(ONCE_PER_NODE[name] for name in ("head_exchange", "chunk_exchange"))
_EXCHANGES = ("head_exchange", "chunk_exchange", *_ONCE)
_EVEN = ("ring", "head_ring", *_EXCHANGES)
"""Patterns of zones whose ranks are alike."""


class _LaunchPrices:
    """Launches to be priced, all at once."""

    def __init__(self) -> None:
        self.pairs: list[Ints] = []
        self.launch: list[Ints] = []
        self.later: list[bool] = []

    def add(self, pairs: Ints, launch: Ints, count: int, *, later: bool = False) -> int:
        """`count` launches; the number of the first. `later`: a hop brings their keys."""
        first = len(self.later)
        self.pairs.append(pairs)
        self.launch.append(launch + first)
        self.later += [later] * count
        return first

    def seconds(self, machine: Machine) -> tuple[list[float], list[float]]:
        """Of each launch, forward and backward."""
        pairs, launch, later = np.concatenate(self.pairs), np.concatenate(self.launch), np.array(self.later)
        forward, backward = (
            launches(pairs, launch, later.astype(np.float64), machine, backward=b, walked=later).seconds.tolist()
            for b in (False, True)
        )
        return forward, backward


def zone_times(plan: MicrobatchPlan, machine: Machine) -> list[ZoneTimes] | None:
    """The plan's zones, in issue order; None: the traffic of one has no closed form.

    Raises:
        InvalidProgramError: an unknown comm pattern.
    """
    prices = _LaunchPrices()
    zones: list[ZoneTimes] = []
    numbers: list[tuple[int, int]] = []
    lengths = np.array(plan.lengths, dtype=np.int64)
    for index, own in _together(plan.zones, machine):
        zone = own[0]
        if len(own) > 1:
            made, first, other = _groups_apart(
                [each for each in own if isinstance(each, Zone)], lengths, machine, prices
            )
        elif isinstance(zone, Zone) and (zone.pattern in _EVEN or len(zone.ranks) == 1):
            made, first, other = _even_zone(zone, lengths, machine, prices)
            if zone.pattern == "ring":
                _route(made, machine, routed_from(plan, index))
        elif isinstance(zone, SharedZone):
            made, first, other = _zone_in_waves(zone, Context.of(plan), machine), -1, -1
        else:
            found, first, other = _uneven_zone(zone, Context.of(plan), machine, routed_from(plan, index)), -1, -1
            if found is None:
                return None
            made = found
        zones.append(made)
        numbers.append((first, other))
    if prices.later:
        forward, backward = prices.seconds(machine)
        for made, (first, other) in zip(zones, numbers, strict=True):
            if first >= 0 and made.apart:
                numbers_of, size = slice(first, first + made.rounds), len(made.ranks) // made.rounds
                made.first = np.repeat(forward[numbers_of], size), np.repeat(backward[numbers_of], size)
            elif first >= 0:
                made.first, made.other = (forward[first], backward[first]), (forward[other], backward[other])
    return zones


def _together(zones: Sequence[AnyPlanZone], machine: Machine) -> Iterator[tuple[int, list[AnyPlanZone]]]:
    """Zones in order, with the number of the first: one, or several in a row that have no rank in
    common and are groups alike.
    """
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


def _kind(zone: AnyPlanZone, machine: Machine) -> tuple[int, int, bool, bool] | None:
    """Size, place in the node, collective or not, and once per node or not, of a zone of one group: in
    these, zones that lie alike are equal; None: not one group, or not ranks in a row.
    """
    if not isinstance(zone, Zone):
        return None
    ranks, size = zone.ranks, len(zone.ranks)
    alone = size == 1 or zone.pattern in _EXCHANGES or (zone.pattern == "head_ring" and zone.group_size == size)
    if not alone or ranks[-1] - ranks[0] != size - 1:
        return None
    cluster = machine.cluster
    inside = ranks[0] // cluster.node_size == ranks[-1] // cluster.node_size
    place = 0 if inside else ranks[0] % cluster.node_size
    together = inside and is_collective(ranks, cluster.num_ranks, cluster.node_size)
    return size, place, together, zone.pattern in _ONCE


def _groups_apart(
    zones: Sequence[Zone], lengths: Ints, machine: Machine, prices: _LaunchPrices
) -> tuple[ZoneTimes, int, int]:
    """Zones of one group each that lie alike and have no rank in common, as one zone of several
    groups.
    """
    zones = sorted(zones, key=lambda zone: zone.ranks[0])
    size, count = len(zones[0].ranks), len(zones)
    ranks = np.array([zone.ranks for zone in zones]).ravel()
    of_group = np.repeat(np.arange(count), [len(zone.seqs) for zone in zones])
    own = lengths[[seq for zone in zones for seq in zone.seqs]]
    num_tokens = by_rank(of_group, own, count)
    made = ZoneTimes(ranks, np.repeat(num_tokens / size, size), index_of(ranks.tolist()), rounds=count, apart=True)
    heads = most_heads(machine.model, size)
    zero = np.zeros_like(own)
    first = prices.add(pairs_of((zero, own), (zero, own), heads), of_group, count)
    if size > 1:
        exchange_heads(made, zones[0].ranks, num_tokens, heads, machine, once=zones[0].pattern in _ONCE)
        made.query_heads, made.kv_heads, made.largest, made.sent = (
            np.repeat(each, size) for each in (made.query_heads, made.kv_heads, made.largest, made.sent)
        )
    return made, first, first


def _even_zone(zone: Zone, lengths: Ints, machine: Machine, prices: _LaunchPrices) -> tuple[ZoneTimes, int, int]:
    """A zone whose ranks are alike: groups of `size` ranks that exchange heads, a ring over them."""
    own, num_ranks = lengths[list(zone.seqs)], len(zone.ranks)
    size = num_ranks if zone.pattern in _EXCHANGES else zone.group_size if zone.pattern == "head_ring" else 1
    groups = num_ranks // size
    made = ZoneTimes(np.array(zone.ranks), float(own.sum()) / num_ranks, index_of(zone.ranks), rounds=groups)
    num_tokens = float(own.sum()) / groups
    model, row_bytes = machine.model, machine.row_bytes
    heads = most_heads(model, size)
    first, other = _ring_launches(own, groups, heads, machine, prices)
    if size > 1:
        exchange_heads(made, zone.ranks[:size], num_tokens, heads, machine, once=zone.pattern in _ONCE)
    if groups > 1:
        block = num_tokens * heads[1]
        crosses = machine.nics.node(np.array(zone.ranks))
        between = bool((crosses != crosses[0]).any())
        lanes = min(size, machine.cluster.ranks_per_nic) if between else 1
        # Turning back, the late chunks of a causal ring go half the way on average.
        again = 1.0 if model.mask == FULL else 0.75
        made.hop, made.hop_again, made.back = (
            _hop(block * num_bytes, machine, lanes, between=between)
            for num_bytes in (row_bytes[Kind.KV], again * row_bytes[Kind.KV], row_bytes[Kind.KV_GRAD])
        )
        made.kv_heads += (groups - 1) * block
        made.largest = max(made.largest, block)
    return made, first, other


def _ring_launches(
    lengths: Ints, groups: int, heads: tuple[int, int], machine: Machine, prices: _LaunchPrices
) -> tuple[int, int]:
    """The launch of a rank's own keys, and one of another group's; zigzag."""
    zero = np.zeros_like(lengths)

    def add(pairs: Ints, *, later: bool = False) -> int:
        return prices.add(pairs, np.zeros(len(pairs), dtype=np.int64), 1, later=later)

    if groups == 1:
        number = add(pairs_of((zero, lengths), (zero, lengths), heads))
        return number, number
    chunk = np.maximum(1, lengths // (2 * groups))
    last = np.maximum(chunk, lengths - chunk)
    early, late = (zero, chunk), (last, lengths)
    if machine.model.mask == FULL:
        own = others = [pairs_of(queries, keys, heads) for queries in (early, late) for keys in (early, late)]
    else:
        own = [pairs_of(queries, keys, heads) for queries, keys in ((early, early), (late, early), (late, late))]
        # Another group's block: its early chunk for both of ours, or both of its for our late one.
        others = [pairs_of(queries, early, heads) for queries in ((chunk, 2 * chunk), late)]
    return add(np.concatenate(own)), add(np.concatenate(others), later=True)


def _hop(num_bytes: float, machine: Machine, lanes: int, *, between: bool) -> RingHop:
    link = machine.inter if between else machine.intra
    busy = link.alpha_s + num_bytes * (lanes if between else 1) / link.bytes_per_s
    seconds = machine.cost.call_s + busy
    return RingHop(seconds, seconds, 0.0 if between else busy, busy if between else 0.0, num_bytes)


def _route(made: ZoneTimes, machine: Machine, min_tokens: float) -> None:
    """A ring between nodes whose transfers go over all NICs of both nodes."""
    per_node = machine.nics.per_node
    block = float(np.mean(made.tokens))
    if per_node == 1 or block < min_tokens:
        return
    call_s = machine.cost.call_s
    for hop in (made.hop, made.hop_again, made.back):
        if hop is None or not hop.between_s:
            continue
        inside = machine.intra.alpha_s + hop.num_bytes * (per_node - 1) / per_node / machine.intra.bytes_per_s
        across = machine.inter.alpha_s + hop.num_bytes / per_node / machine.inter.bytes_per_s
        hop.there_s, hop.next_s = 2 * inside + across + 3 * call_s, max(inside, across) + call_s
        hop.inside_s, hop.between_s = inside, across


def _uneven_zone(zone: Zone | TaskTable, context: Context, machine: Machine, min_tokens: float) -> ZoneTimes | None:
    """A zone of one launch a rank, as its pattern says it; `min_tokens`: of routed messages."""
    pattern = pattern_of(zone)
    found = pattern.rounds(zone, context)
    held = pattern.tokens([zone], context)[found.ranks].astype(np.float64)
    forward, backward = _launch_seconds(found.launches, machine)
    made = ZoneTimes(found.ranks, held, index_of(found.ranks.tolist()), first=(forward, backward))
    match found.traffic:
        case GroupTraffic(inputs, _, True):
            _gather(made, inputs[Kind.KV].max(initial=0.0), machine)
        case PointToPoint(inputs, outputs):
            _dispatch(made, (inputs, outputs), machine, min_tokens)
        case None:
            pass
        case _:
            return None
    return made


def _launch_seconds(zone: Launches, machine: Machine) -> tuple[Floats, Floats]:
    """Of each rank, all its launches."""
    forward, backward = (
        launches(zone.pairs, zone.launch, zone.merging, machine, backward=b).seconds[zone.of_round].sum(axis=1)
        for b in (False, True)
    )
    return forward, backward


def _gather(made: ZoneTimes, block: float, machine: Machine) -> None:
    """One all-gather of blocks of so many token-heads, and a reduce-scatter of their gradients."""
    size = len(made.ranks)
    nodes = np.bincount(machine.nics.node(made.ranks))
    nics = min(machine.nics.per_node, -(-int(nodes[nodes > 0].min()) // machine.cluster.ranks_per_nic))
    crosses = (nodes > 0).sum() > 1
    alpha = max(machine.intra.alpha_s, machine.inter.alpha_s) if crosses else machine.intra.alpha_s
    rate = machine.intra.bytes_per_s
    rate = min(rate, nics * machine.inter.bytes_per_s) if crosses else rate

    def bulk(kind: Kind, *, back: bool) -> Bulk:
        num_bytes = block * machine.row_bytes[kind]
        seconds = (size - 1) * (alpha + num_bytes / rate)
        return Bulk(seconds, num_bytes * (size - 1 if back else 1), num_bytes if back else 0.0, adds=back)

    made.inputs, made.input_grads = bulk(Kind.KV, back=False), bulk(Kind.KV_GRAD, back=True)
    made.again = made.inputs
    made.kv_heads = made.largest = (size - 1) * block


def _dispatch(made: ZoneTimes, messages: tuple[Ints, Ints], machine: Machine, min_tokens: float) -> None:
    """Messages to the launches and from them; those between nodes of at least `min_tokens` are
    routed.
    """
    there, back = messages
    num_ranks = machine.cluster.num_ranks
    grads = {Kind.Q: Kind.Q_GRAD, Kind.KV: Kind.KV_GRAD, Kind.OUT: Kind.OUT_GRAD}

    def bulk(rows: Ints, *, turned: bool = False, placed: bool = True, adds: bool = False) -> Bulk | None:
        if not len(rows):
            return None
        rows = rows.copy()
        if turned:
            rows[:, [Message.SRC, Message.DST]] = rows[:, [Message.DST, Message.SRC]]
            rows[:, Message.KIND] = np.array([grads.get(kind, kind) for kind in Kind])[rows[:, Message.KIND]]
        steps = np.unique(rows[:, Message.EXCHANGE])
        found: Bulk | None = None
        for step in steps if turned else steps[::-1]:  # the last one first
            own = exchange_of(rows[rows[:, Message.EXCHANGE] == step], machine, min_tokens)
            out, into = (np.asarray(each)[made.ranks] for each in (own.packed_bytes, own.placed_bytes))
            found = Bulk(0.0, out, into if placed else 0.0, adds, transfers=own.transfers, then=found)
        return found

    made.again = made.inputs = bulk(there, placed=False)
    made.outputs, made.output_grads = bulk(back), bulk(back, turned=True)
    made.input_grads = bulk(there, turned=True, adds=True)

    def token_heads(rows: Ints, kind: Kind) -> Floats:
        """Received by each rank of the zone."""
        rows = rows[rows[:, Message.KIND] == kind]
        heads = rows[:, Message.HEAD_STOP] - rows[:, Message.HEAD_START]
        return by_rank(rows[:, Message.DST], heads * rows[:, Message.TOKENS], num_ranks)[made.ranks]

    made.query_heads, made.kv_heads = token_heads(there, Kind.Q), token_heads(there, Kind.KV)
    made.largest, made.sent = made.kv_heads, token_heads(back, Kind.OUT)


def _zone_in_waves(zone: SharedZone, context: Context, machine: Machine) -> ZoneTimes:
    """A zone whose groups of ranks exchange heads and attend in waves.

    Raises:
        InvalidProgramError: groups of no rank, or no wave.
    """
    made = schedule(zone, context.mask)
    size, groups = made.size, len(made.groups)
    ranks = (np.array(made.groups)[:, None] * size + np.arange(size)).ravel()
    runs = made.run_tokens().astype(np.float64)
    times = ZoneTimes(ranks, runs.ravel(), index_of(ranks.tolist()), rounds=groups)
    queries, keys = head_counts(head_slices(context.num_heads, context.num_kv_heads, size))
    heads = int(queries.max()), int(keys.max())
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
    """The all-to-alls of groups of several ranks, inputs in one part or two."""
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
    """Let all groups pack and place as much as the fullest one."""
    for bulk in (times.inputs, times.outputs, times.output_grads, times.input_grads):
        if bulk is not None:
            bulk.packed_bytes, bulk.placed_bytes = (float(np.max(n)) for n in (bulk.packed_bytes, bulk.placed_bytes))


def _by_wave(made: Schedule) -> list[Ints]:
    bounds = np.searchsorted(made.needs[:, Need.WAVE], np.arange(made.num_waves + 1))
    return [made.needs[a:b] for a, b in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)]


def _wave_launch_seconds(made: Schedule, heads: tuple[int, int], machine: Machine) -> tuple[Floats, Floats]:
    """Of each group, own work and each wave [groups, own + waves]."""
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
    """Keys of each wave, and their gradients."""
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
