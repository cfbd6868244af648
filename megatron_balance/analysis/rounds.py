"""The round engine: the same calls as `simulator.attention`, zone by zone and round by round, all
ranks of a zone at once.

For plans of many ranks. When a rank begins or ends what follows the same rules (streams in order,
`compile.order`); what is simpler: the transfers of one exchange share links and NICs as if they all
began together, and zones on other ranks take from a NIC what they need of it on average while both
are at work (known from a run without them). Tests hold it against the event engine.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import assert_never

import numpy as np

from megatron_balance.analysis.clocks import COMBINE, COPIED, DISPATCH, INTER, MOVED, Clocks, Outcome, hosts_behind
from megatron_balance.analysis.machine import Machine
from megatron_balance.analysis.tables import Tables, ZoneTable
from megatron_balance.analysis.wire import Payload
from megatron_balance.cost.base import ADD, LAUNCHES_OF_RUN
from megatron_balance.ir.arrays import Bools, Floats, Ints, as_array
from megatron_balance.ir.columns import Message, Move
from megatron_balance.ir.plan import REMAP, MicrobatchPlan
from megatron_balance.ir.program import KEY_SIDE, Kind, Policy
from megatron_balance.patterns import pattern_of
from megatron_balance.patterns.base import Context, GroupTraffic, HeadsThenHops, HopByHop, PointToPoint, WaveTraffic
from megatron_balance.patterns.sends import table_of

_GRAD_OF = {Kind.Q: Kind.Q_GRAD, Kind.KV: Kind.KV_GRAD, Kind.OUT: Kind.OUT_GRAD}


def play(
    plan: MicrobatchPlan, machine: Machine, policy: Policy, enter_s: tuple[Floats, Floats]
) -> tuple[Outcome, Outcome]:
    """Forward and backward of one attention call; `enter_s` [num_ranks]: when ranks enter them."""
    tables = Tables(plan, machine)
    return _phase(tables, policy, enter_s[0], backward=False), _phase(tables, policy, enter_s[1], backward=True)


def _phase(tables: Tables, policy: Policy, enter_s: Floats, *, backward: bool) -> Outcome:
    ahead = RoundsPhase(tables, policy, enter_s, backward=backward)
    outcome, taken = ahead.run(), None
    if sum(use.crosses for use in ahead.uses) >= 2:
        taken = _taken(ahead.uses, tables.machine)
        outcome = RoundsPhase(tables, policy, enter_s, backward=backward, taken=taken).run()
    behind = hosts_behind(ahead.clocks.issued, outcome.end_s)
    if not behind.any():
        return outcome
    return RoundsPhase(tables, policy, enter_s, backward=backward, taken=taken, behind=behind).run()


@dataclass(slots=True)
class _Use:
    """When a zone is at work, and the bytes that it moves over each NIC, out and in [2, num_nics]."""

    begin_s: float
    end_s: float
    nic_bytes: Floats

    @property
    def crosses(self) -> bool:
        return bool(self.nic_bytes.any())


def _taken(uses: list[_Use], machine: Machine) -> list[Floats]:
    # By zone, the part of each NIC [2, num_nics] that it has beside the zones that are at work at
    # the same time.
    begin, end = np.array([use.begin_s for use in uses]), np.array([use.end_s for use in uses])
    rates = np.stack([use.nic_bytes / max(use.end_s - use.begin_s, 1e-12) for use in uses]) / machine.inter.bytes_per_s
    parts: list[Floats] = []
    for index, use in enumerate(uses):
        overlap = np.clip(np.minimum(end, use.end_s) - np.maximum(begin, use.begin_s), 0, None)
        overlap /= max(use.end_s - use.begin_s, 1e-12)
        overlap[index] = 0.0
        others = np.tensordot(overlap, rates, 1)
        fair = rates[index] / np.maximum(rates[index] + others, 1e-12)
        parts.append(np.maximum(1 - others, np.where(rates[index] > 0, fair, 1.0)).clip(0.05, 1.0))
    return parts


class RoundsPhase:
    """One phase, zone by zone. `taken`: the part of each NIC that each zone has beside the others;
    `behind`: as in `Clocks`.
    """

    def __init__(
        self,
        tables: Tables,
        policy: Policy,
        enter_s: Floats,
        *,
        backward: bool,
        taken: list[Floats] | None = None,
        behind: Floats | None = None,
    ) -> None:
        self.tables, self.taken = tables, taken
        self.clocks = Clocks(tables, policy, enter_s, backward=backward, behind=behind)
        self.uses: list[_Use] = []

    def run(self) -> Outcome:
        clocks = self.clocks
        if clocks.plan.moves and clocks.backward and clocks.policy == "replay":
            self._remap((Kind.Q, Kind.KV), remap_in=True)
        if clocks.plan.moves:
            kinds = (Kind.OUT_GRAD,) if clocks.backward else (Kind.Q, Kind.KV)
            self._remap(kinds, remap_in=True, hops=not clocks.backward)
        self._run_zones()
        if clocks.plan.moves:
            kinds = (Kind.Q_GRAD, Kind.KV_GRAD) if clocks.backward else (Kind.OUT,)
            self._remap(kinds, remap_in=False, hops=clocks.backward)
        end = np.maximum(
            np.maximum(clocks.done, clocks.late) + clocks.late_s,
            np.maximum(clocks.free.max(axis=(0, 1)), clocks.opened),
        )
        return Outcome(end, clocks.busy + clocks.late_s, clocks.bytes_moved)

    def _run_zones(self) -> None:
        for table in reversed(self.tables.zones) if self.clocks.backward else self.tables.zones:
            self._enter(table)

    def _enter(self, table: ZoneTable) -> None:
        # Run one zone, and note what it takes of the NICs.
        ranks = table.ranks
        if self.taken is not None:
            self.clocks.share = self.taken[len(self.uses)]
        self.clocks.nic_bytes = np.zeros((2, self.clocks.machine.num_nics))
        begin = float(self.clocks.done[ranks].min())
        match table.traffic:
            case None:
                self._compute(table)
            case GroupTraffic():
                self._collective(table, table.traffic)
            case PointToPoint():
                self._point_to_point(table, table.traffic)
            case HeadsThenHops():
                self._nested(table, table.traffic)
            case WaveTraffic():
                self._waves(table, table.traffic)
            case _:
                assert_never(table.traffic)
        self.uses.append(_Use(begin, float(self.clocks.done[ranks].max()), self.clocks.nic_bytes))

    def _compute(self, table: ZoneTable) -> None:
        # The one launch of each rank of a zone.
        self.clocks.open(table.ranks, table.waits)
        self._launch(table, 0)

    def _remap(self, kinds: tuple[Kind, ...], *, remap_in: bool, hops: bool = False) -> None:
        # One exchange of the remap; `hops`: with the first hops that owners make for holders.
        messages = self._moved(kinds, remap_in=remap_in)
        if hops:
            first = np.concatenate(self.tables.first_hops)
            messages = np.concatenate([messages, first if remap_in else turned(first)])
        self.clocks.share = np.ones_like(self.clocks.share)
        if not remap_in:
            self.clocks.settle(np.unique(messages[:, Message.SRC]))
        posted, arrived, placed = self.clocks.exchange(messages, REMAP, COPIED if remap_in else MOVED)
        if remap_in:
            self.clocks.ready = posted
            self.clocks.opened = np.maximum(self.clocks.opened, arrived + placed)
        else:
            self.clocks.late = np.maximum(self.clocks.late, arrived)
            self.clocks.late_s += placed

    def _moved(self, kinds: tuple[Kind, ...], *, remap_in: bool) -> Ints:
        # Messages of the moves.
        plan = self.clocks.plan
        holder, owner, tokens = as_array(plan.moves)[:, [Move.SRC, Move.DST, Move.TOKENS]].T
        src, dst = (owner, holder) if remap_in else (holder, owner)
        heads = [(0, plan.num_kv_heads if kind in KEY_SIDE else plan.num_heads) for kind in kinds]
        own = zip(kinds, heads, strict=True)
        return np.concatenate([table_of(0, src, dst, kind, *span, tokens) for kind, span in own])

    def _collective(self, table: ZoneTable, traffic: GroupTraffic) -> None:
        on = [traffic.passed_on] if len(traffic.passed_on) else []
        self._before(table, [traffic])
        if not self.clocks.backward or self.clocks.policy == "replay":
            self._pass_on(table, on)
        self._compute(table)
        for messages in on if self.clocks.backward else ():
            self._messages(table, turned(messages), MOVED)
            self.clocks.settle(table.ranks)  # gradients are added up before they go on
        self._behind(table, traffic)

    def _before(self, table: ZoneTable, traffic: Sequence[GroupTraffic]) -> None:
        # Exchange inputs inside a group, in the backward gradients of outputs and, in a replay, all
        # inputs again. `traffic`: the group's, and that of inputs that come later.
        payload, first = self.clocks.machine.payload, traffic[0]
        if self.clocks.backward:
            self._together(table, _bytes_of(first.outputs, payload, turned=True), COPIED, stored=True)
            if self.clocks.policy != "replay":
                return
        else:
            traffic = traffic[:1]
        num_bytes = np.sum([_bytes_of(each.inputs, payload) for each in traffic], axis=0)
        self._together(table, num_bytes, COPIED, ring=first.gathers)

    def _behind(self, table: ZoneTable, traffic: GroupTraffic) -> None:
        # Exchange outputs inside a group, in the backward gradients of inputs.
        payload, backward = self.clocks.machine.payload, self.clocks.backward
        num_bytes = _bytes_of(traffic.inputs if backward else traffic.outputs, payload, turned=backward)
        self._together(table, num_bytes, MOVED, ring=backward and traffic.gathers, stored=True, added=backward)
        if backward:  # what another zone copies passes no gradients (`compile.order`)
            self.clocks.ready[table.ranks] = self.clocks.done[table.ranks]

    def _nested(self, table: ZoneTable, traffic: HeadsThenHops) -> None:
        # Collectives inside groups, rings between them, collectives inside groups.
        size = len(table.ranks) // len(traffic.groups) if traffic.groups else 1
        inside = [(table.part(at * size, size), group) for at, group in enumerate(traffic.groups)]
        for part, group in inside:
            self._before(part, [group])
        if traffic.hops is None:
            self._compute(table)
        else:
            if inside:  # the rings pass on what the collectives brought
                self.clocks.ready[table.ranks] = self.clocks.done[table.ranks]
            RingClock(self.clocks, table, traffic.hops, size).run()
            if inside and self.clocks.backward:  # gradients are added up before they go on
                self.clocks.settle(table.ranks)
        for part, group in inside:
            self._behind(part, group)
        if len(inside) > 1 and not self.clocks.backward:
            # Inputs of the next zone pass the exchange just before them, not those of all groups.
            self.clocks.ready[table.ranks] = self.clocks.done[table.ranks]

    def _waves(self, table: ZoneTable, traffic: WaveTraffic) -> None:
        # Collectives inside groups, own work and waves between groups, collectives inside groups.
        size = len(table.ranks) // max(1, len(traffic.groups))
        inside, late = (
            [(table.part(at * size, size), group) for at, group in enumerate(groups)]
            for groups in (traffic.groups, traffic.late)
        )
        for at, (part, group) in enumerate(inside):
            self._before(part, [group, *(each for _, each in late[at : at + 1])])
        self.clocks.open(table.ranks, table.waits, sends=True)
        if self.clocks.backward:
            self._waves_back(table, traffic, late)
        else:
            self._waves_there(table, traffic, late)
        for part, group in inside:
            self._behind(part, group)

    def _waves_there(
        self, table: ZoneTable, traffic: WaveTraffic, late: Sequence[tuple[ZoneTable, GroupTraffic]]
    ) -> None:
        # Own work, of what came first while the rest comes, and waves.
        clocks, own = self.clocks, len(late[:1]) + 1
        if late:
            begun = clocks.done.copy()
            for part, group in late:
                self._before(part, [group])
            here, clocks.done = clocks.done, np.maximum(begun, clocks.ready)
            self._launch(table, 0)
            clocks.done = np.maximum(clocks.done, here)
        come = self._keys(table, traffic.waves)
        self._launch(table, own - 1)
        for wave, arrived in enumerate(come):
            clocks.done = np.maximum(clocks.done, arrived)
            self._launch(table, wave + own)

    def _waves_back(
        self, table: ZoneTable, traffic: WaveTraffic, late: Sequence[tuple[ZoneTable, GroupTraffic]]
    ) -> None:
        # Waves and own work in reverse; gradients of what came late leave before the last of it.
        clocks, own = self.clocks, len(late[:1]) + 1
        come = self._keys(table, traffic.waves[::-1])[::-1] if clocks.policy == "replay" else []
        for wave in reversed(range(len(traffic.waves))):
            if come:
                clocks.done = np.maximum(clocks.done, come[wave])
            self._launch(table, wave + own)
            self._messages(table, turned(traffic.waves[wave]), MOVED)
        self._launch(table, own - 1)
        if traffic.groups:
            clocks.settle(table.ranks)
        for part, group in late:
            self._behind(part, group)
        if late:
            self._launch(table, 0)

    def _keys(self, table: ZoneTable, waves: Sequence[Ints]) -> list[Floats]:
        # Send the keys of waves, one after the other; when each rank has them.
        clocks = self.clocks
        # Waves pass on what the collectives brought.
        clocks.ready[table.ranks] = np.maximum(clocks.ready, clocks.done)[table.ranks]
        come: list[Floats] = []
        for messages in waves:
            clocks.ready, arrived, _ = clocks.exchange(messages, table.index, COPIED)
            come.append(arrived)
        return come

    def _launch(self, table: ZoneTable, at: int) -> None:
        # Launch number `at` of each rank of a zone.
        seconds = (table.backward_s if self.clocks.backward else table.forward_s)[:, at]
        self.clocks.issue(table.ranks, 0, LAUNCHES_OF_RUN * (seconds > 0))
        self.clocks.done[table.ranks] += seconds
        self.clocks.busy[table.ranks] += seconds

    def _together(
        self,
        table: ZoneTable,
        num_bytes: Floats,
        traffic_class: int,
        *,
        ring: bool = False,
        stored: bool = False,
        added: bool = False,
    ) -> None:
        # One collective of all ranks of a zone; what is moved follows the launch, what is copied
        # comes before it.
        #
        # `ring`: an all-gather or, if what it brings is `added`, a reduce-scatter; else an
        # all-to-all.
        if not num_bytes.size:
            return
        ranks = table.ranks
        others = num_bytes.copy()
        np.fill_diagonal(others, 0.0)
        if not others.any():
            return
        sent = others.max(axis=1) if ring and not added else others.sum(axis=1)
        packed = self.clocks.pack_s(sent) * self.clocks.slow[ranks]
        self.clocks.issue(ranks, 0, packed > 0)
        self.clocks.done[ranks] += packed
        self.clocks.busy[ranks] += packed
        if traffic_class == COPIED:
            self.clocks.open(ranks, table.waits, sends=True)
        posted = self.clocks.done.copy() if traffic_class == MOVED else self.clocks.ready.copy()
        if traffic_class == COPIED:
            posted[ranks] += packed
            self.clocks.ready[ranks] = posted[ranks]
        arrived = self.clocks.all_together(table, posted, num_bytes if ring else others, traffic_class, ring=ring)
        received = others.sum(axis=0) if stored or added else np.zeros(len(ranks))
        if ring and added and self.clocks.is_together(table):
            received = others.max(axis=0)  # one block, summed on its way
        placed = self.clocks.pack_s(received) * (ADD if added else 1.0) * self.clocks.slow[ranks]
        self.clocks.issue(ranks, 0, placed > 0)
        if traffic_class == MOVED:
            self.clocks.late[ranks] = np.maximum(self.clocks.late[ranks], arrived)
            self.clocks.late_s[ranks] += placed
        else:
            self.clocks.done[ranks] = np.maximum(self.clocks.done[ranks], arrived) + placed
            self.clocks.busy[ranks] += placed

    def _point_to_point(self, table: ZoneTable, traffic: PointToPoint) -> None:
        there, back = stages(traffic.inputs), traffic.outputs
        if not self.clocks.backward:
            self._one_by_one(table, there)
            self._compute(table)
            self._messages(table, back, MOVED)
            return
        self.clocks.open(table.ranks, table.waits, sends=True)
        self._messages(table, turned(back), COPIED)
        if self.clocks.policy == "replay":
            self._one_by_one(table, there)
        self._compute(table)
        for at, stage in enumerate(reversed(there)):
            if at:  # what the exchange before brings is passed on
                self.clocks.settle(table.ranks)
            self._messages(table, turned(stage), MOVED)

    def _one_by_one(self, table: ZoneTable, stages: list[Ints]) -> None:
        # Exchanges of which each passes on what the one before brings.
        self._messages(table, stages[0], COPIED)
        self._pass_on(table, stages[1:])

    def _pass_on(self, table: ZoneTable, stages: Sequence[Ints]) -> None:
        # Exchanges of which each passes on what the one before it brought.
        for stage in stages:
            self.clocks.ready[table.ranks] = self.clocks.done[table.ranks]
            self._messages(table, stage, COPIED)

    def _messages(self, table: ZoneTable, messages: Ints, traffic_class: int) -> None:
        # One exchange of a zone whose messages go from rank to rank.
        posted, arrived, placed = self.clocks.exchange(messages, table.index, traffic_class)
        if traffic_class == MOVED:
            self.clocks.late = np.maximum(self.clocks.late, arrived)
            self.clocks.late_s += placed
        else:
            self.clocks.ready = posted
            self.clocks.done = np.maximum(self.clocks.done, arrived) + placed
            self.clocks.busy += placed


def _bytes_of(token_heads: Mapping[Kind, Floats], payload: Payload, *, turned: bool = False) -> Floats:
    # Bytes [G, G] from rank to rank of a collective, or, `turned`, of the gradients of what it
    # carries; an empty array: nothing travels.
    row_bytes = payload.whole()
    terms = [
        sizes.T * float(row_bytes[_GRAD_OF[kind]]) if turned else sizes * float(row_bytes[kind])
        for kind, sizes in token_heads.items()
    ]
    return np.sum(terms, axis=0) if terms else np.zeros((0, 0))


def stages(messages: Ints) -> list[Ints]:
    """Messages by exchange, in order; of none one exchange."""
    steps = np.unique(messages[:, Message.EXCHANGE])
    return [messages[messages[:, Message.EXCHANGE] == step] for step in steps] or [messages]


def turned(messages: Ints) -> Ints:
    """Messages of the gradients, which go the other way."""
    back = messages.copy()
    back[:, Message.SRC], back[:, Message.DST] = messages[:, Message.DST], messages[:, Message.SRC]
    grads = np.zeros(len(Kind), dtype=np.int64)
    for kind, grad in _GRAD_OF.items():
        grads[kind] = grad
    back[:, Message.KIND] = grads[messages[:, Message.KIND]]
    return back


def coupled(plan: MicrobatchPlan) -> Ints:
    """Groups of ranks that enter a layer together [num_ranks]: each rank's group by its first rank.

    Ranks are in one group if they exchange anything, directly or through others.
    """
    first = list(range(plan.num_ranks))

    def find(rank: int) -> int:
        while first[rank] != rank:
            first[rank] = first[first[rank]]
            rank = first[rank]
        return rank

    def join(a: int, b: int) -> None:
        a, b = find(a), find(b)
        first[max(a, b)] = min(a, b)

    context = Context.of(plan)
    for zone in plan.zones:
        for a, b in pattern_of(zone).coupled(zone, context):
            join(a, b)
    for holder, owner, _ in plan.moves:
        join(holder, owner)
    return np.array([find(rank) for rank in range(plan.num_ranks)], dtype=np.int64)


def in_step(seconds: Floats, group: Ints) -> Floats:
    """The largest of each group's seconds, on all its ranks (`coupled`)."""
    most = np.zeros(len(seconds))
    np.maximum.at(most, group, seconds)
    return most[group]


# A ring on the clocks of all its ranks at once, round by round.


@dataclass(slots=True)
class _Turn:
    """Transfers round the ring one way, by the group index that sends: seconds [rounds, G] of each
    hop (nan: none), and its link [G].

    `legs`: of routed hops (nan: not routed), seconds to the proxies, between nodes, and from the
    proxies, calls included. `inside`, `between`: how long each rank's transfers of a round keep it
    busy inside the node, and between nodes.
    """

    seconds: Floats
    step: int
    link: Ints
    legs: tuple[Floats, Floats, Floats] | None
    inside: Floats = field(init=False)
    between: Floats = field(init=False)

    def __post_init__(self) -> None:
        seconds, far = np.nan_to_num(self.seconds), self.link == INTER
        out, between = np.where(far, 0.0, seconds), np.where(far, seconds, 0.0)
        into = out
        if self.legs is not None:
            cut_up = ~np.isnan(self.legs[0])
            out, into = np.where(cut_up, self.legs[0], out), np.where(cut_up, self.legs[2], out)
            between = np.where(cut_up, self.legs[1], between)
        self.inside = np.maximum(out, np.roll(into, self.step, axis=1))
        self.between = np.maximum(between, np.roll(between, self.step, axis=1))


class RingClock:
    """One ring on the clocks (`patterns.head_ring`): per round a transfer to the next rank, which
    waits for the one before, and a launch.

    `lanes`: rings side by side, one through each place of groups of so many ranks
    (`patterns.head_ring`).
    """

    def __init__(self, clocks: Clocks, table: ZoneTable, hops: HopByHop, lanes: int = 1) -> None:
        self.clocks, self.table, self.hops, self.machine = clocks, table, hops, clocks.machine
        self.ranks, self.size, self.lanes = table.ranks, len(table.ranks), lanes
        self.rounds = self.size // lanes
        self.done, self.ready = clocks.done[self.ranks], clocks.ready[self.ranks]
        self.free = clocks.free[:, :, self.ranks]
        self.issued = clocks.issued[self.ranks]
        self.behind = None if clocks.behind is None else clocks.behind[self.ranks]
        self.slow = clocks.slow[self.ranks]
        self.busy = np.zeros(self.size)
        contention = self.machine.cost.contention
        self.drag = [contention.slowdown(intra=inside, inter=not inside) - 1.0 for inside in (True, False)]

    def run(self) -> None:
        if self.clocks.backward:
            self._backward()
        else:
            self._forward()
        clocks, ranks = self.clocks, self.ranks
        clocks.done[ranks], clocks.ready[ranks] = self.done, self.ready
        clocks.free[:, :, ranks] = self.free
        clocks.busy[ranks] += self.busy
        clocks.issued[ranks] = self.issued

    def _issue(self, num_calls: Ints | int, num_launches: Ints | Bools | int, num_messages: Ints | int = 0) -> None:
        # As `Clocks.issue`, for the ranks of the ring.
        host = self.machine.host
        if not host.is_modelled:
            return
        self.issued = (
            self.issued + host.call_s * num_calls + host.launch_s * num_launches + host.message_s * num_messages
        )
        if self.behind is not None:
            self.done = np.maximum(self.done, self.behind * self.issued)
            self.ready = np.maximum(self.ready, self.behind * self.issued)

    def _issue_round(self, turn: _Turn, at: int) -> None:
        # Issue a round's transfers: those of a rank that go by one link are one call; routed ones
        # are a piece for each NIC.
        if not self.machine.host.is_modelled:
            return
        calls, num_messages = np.zeros((2, self.size), dtype=np.int64), np.zeros(self.size, dtype=np.int64)
        sender = np.flatnonzero(~np.isnan(turn.seconds[at]))
        legs = np.zeros(self.size, dtype=np.int64) if turn.legs is None else 2 * ~np.isnan(turn.legs[0][at])
        for end in (sender, (sender + turn.step) % self.size):
            np.maximum.at(calls, (turn.link[sender], end), 1 + legs[sender])
            np.add.at(num_messages, end, np.where(legs[sender] > 0, self.machine.nics.per_node, 1))
        self._issue(calls.sum(axis=0), 0, num_messages)

    def _turn(self, tokens: Ints | Floats, kind: Kind, step: int) -> tuple[_Turn, Floats]:
        # Transfers of all rounds, and their bytes [rounds, G].
        #
        # `tokens` [rounds, G]: what each place sends to the one `step` further.
        clocks = self.clocks
        target = np.roll(self.ranks, -step)
        num_bytes = (tokens * float(clocks.row_bytes(kind))).astype(np.float64)
        cross = self.machine.crosses(self.ranks, target)
        alpha = self.machine.alpha_s(self.ranks, target)
        uses = self.machine.resources(self.ranks, target)
        rates = clocks.capacity.copy()
        rates[2 * self.machine.num_ranks :] *= clocks.share.ravel()
        routed = cross & clocks.routed(self.table.index, tokens)
        # Edges of one ring that share a NIC have it in turn or together: on average each its part.
        together = np.bincount(uses.ravel(), minlength=len(rates))[uses]
        direct = alpha + num_bytes * (together / rates[uses]).max(axis=1)
        seconds, legs = np.where(num_bytes > 0, direct, np.nan), None
        node_out, node_in = (self.machine.nics.node(end) for end in (self.ranks, target))
        if routed.any():
            per_node = self.machine.nics.per_node
            edges_out = np.bincount(node_out[cross], minlength=self.machine.nics.num_nodes)[node_out]
            edges_in = np.bincount(node_in[cross], minlength=self.machine.nics.num_nodes)[node_in]
            nic = rates[2 * self.machine.num_ranks :].reshape(2, -1, per_node).min(axis=2)
            passed_on = np.where(routed, num_bytes, np.nan) * (per_node - 1) / per_node / self.machine.intra.bytes_per_s
            between = num_bytes * np.maximum(edges_out / nic[0, node_out], edges_in / nic[1, node_in]) / per_node
            inside = self.machine.intra.alpha_s + clocks.call_s + passed_on
            legs = inside, alpha + clocks.call_s + between, inside.copy()
        for those, by_proxies in ((~routed, False), (routed, True)):
            sums = np.where(those, num_bytes, 0.0).sum(axis=0)
            clocks.count(self.ranks, target, sums, np.full(self.size, by_proxies))
        turn = _Turn(seconds, step, cross.astype(np.int64), legs)
        if legs is not None:
            self._relay(turn, legs, node_out, node_in)
        return turn, num_bytes

    def _relay(self, turn: _Turn, legs: tuple[Floats, Floats, Floats], node_out: Ints, node_in: Ints) -> None:
        # The ranks of both nodes pass on what is routed, and are kept busy by it too.
        dispatch, across, combine = (np.nan_to_num(leg) for leg in legs)
        # Of each round and node: the longest leg of a rank of it.
        inside, between = np.zeros((2, len(dispatch), self.machine.nics.num_nodes))
        for node, near in ((node_out, dispatch), (node_in, combine)):
            for most, leg in ((inside, near), (between, across)):
                np.maximum.at(most.T, node, leg.T)
        turn.inside = np.maximum(turn.inside, inside[:, node_out])
        turn.between = np.maximum(turn.between, between[:, node_out])

    def _carry(self, turn: _Turn, at: int, posted: Floats, traffic_class: int) -> Floats:
        # Run a round's transfers; when each rank has what it receives (-inf: nothing).
        seconds, free = turn.seconds[at], self.free[traffic_class]
        moving = ~np.isnan(seconds)
        place = np.arange(self.size)
        there = (place + turn.step) % self.size
        own = np.maximum(posted, free[turn.link, place])
        begin = np.maximum(own, np.maximum(posted[there], free[turn.link, there]))
        arrived = np.full(self.size, -np.inf)
        if turn.legs is not None:
            moving &= np.isnan(turn.legs[0][at])
            self._by_proxies(turn, at, posted, free, arrived)
        stop = np.where(moving, begin + self.clocks.call_s + seconds, -np.inf)
        for end in (place, there):
            free[turn.link, end] = np.maximum(free[turn.link, end], stop)
        arrived[there[moving]] = free[turn.link[moving], there[moving]]
        return arrived

    def _by_proxies(self, turn: _Turn, at: int, posted: Floats, free: Floats, arrived: Floats) -> None:
        # Set `arrived` by the routed hops of a round, leg by leg: one round's is under way beside
        # the next one of the round before.
        assert turn.legs is not None
        hop = np.flatnonzero(~np.isnan(turn.legs[0][at]) & ~np.isnan(turn.seconds[at]))
        there = (hop + turn.step) % self.size
        first = np.maximum(posted[hop], free[DISPATCH, hop]) + turn.legs[0][at, hop]
        begin = np.maximum(np.maximum(first, free[INTER, hop]), np.maximum(posted[there], free[INTER, there]))
        between = begin + turn.legs[1][at, hop]
        last = np.maximum(between, free[COMBINE, there]) + turn.legs[2][at, hop]
        free[DISPATCH, hop], free[COMBINE, there] = first, last
        free[INTER, hop], free[INTER, there] = between, between
        arrived[there] = last

    def _took(self, seconds: Floats, *beside: tuple[_Turn, Ints]) -> Floats:
        # Seconds [rounds, G] of launches, slowed by the transfers `beside` them: of each turn, the
        # row that goes beside each round [rounds], if there is one.
        took = seconds.copy()
        for inside, drag in zip((True, False), self.drag, strict=True):
            lasting = np.zeros_like(seconds)
            for turn, rows in beside:
                there = (rows >= 0) & (rows < len(turn.seconds))
                lasting[there] += (turn.inside if inside else turn.between)[rows[there]]
            took += drag * np.minimum(seconds, lasting)
        return took

    def _launch(self, took: Floats) -> None:
        self._issue(0, LAUNCHES_OF_RUN * (took > 0))
        self.done = self.done + took
        self.busy += took

    def _pack(self, num_bytes: Floats) -> None:
        seconds = self.clocks.pack_s(num_bytes) * self.slow
        self._issue(0, seconds > 0)
        self.done, self.ready = self.done + seconds, self.ready + seconds
        self.busy += seconds

    def _blocks(self, tokens: Ints | Floats, step: int) -> Ints | Floats:
        # Tokens [rounds, G] that each group index sends, of later and later neighbours' blocks.
        place, rounds = np.arange(self.size), np.arange(1, self.rounds)[:, None]
        return tokens[(place - step * (rounds - 1)) % self.size, rounds]

    def _forward(self) -> None:
        turn, num_bytes = self._turn(self._blocks(self.hops.forward, self.lanes), Kind.KV, self.lanes)
        took = self._took(self.table.forward_s.T, (turn, np.arange(self.rounds)))
        opened = self.clocks.opened[self.ranks]
        self._pack(num_bytes[0])
        self._issue_round(turn, 0)
        posted = self.ready
        arrived = self._carry(turn, 0, posted, COPIED)
        self.done = np.maximum(self.done, np.where(self.table.waits, opened, 0.0))
        self._launch(took[0])
        for at in range(1, self.rounds):
            self.done = np.maximum(self.done, arrived)
            if at == 1:
                self.done = np.maximum(self.done, np.where(self.table.waits_next, opened, 0.0))
            if at < self.rounds - 1:
                self._issue_round(turn, at)
                posted = self.done
                arrived = self._carry(turn, at, posted, COPIED)
            self._launch(took[at])
        self.ready = posted

    def _backward(self) -> None:
        # Rounds the other way: the gradients of a block walk its way back; `replay` brings the
        # blocks again, furthest first.
        rounds, replay, number = self.rounds, self.clocks.policy == "replay", np.arange(self.rounds)
        # Of the block whose gradients each group index sends back in a round.
        place, later = np.arange(self.size), number[1:, None]
        returning = self.hops.forward[(place - self.lanes * later) % self.size, later]
        back, num_bytes = self._turn(returning, Kind.KV_GRAD, -self.lanes)
        added_s = ADD * self.clocks.pack_s(np.roll(num_bytes, -self.lanes, axis=1)) * self.slow
        self.done = np.maximum(self.done, np.where(self.table.waits, self.clocks.opened[self.ranks], 0.0))
        arrived, returned = np.full((2, self.size), -np.inf)
        again: _Turn | None = None
        posted = self.ready
        if replay:
            again, copied = self._turn(self._blocks(self.hops.backward, -self.lanes), Kind.KV, -self.lanes)
            self._share_traffic_classes(again, copied, back, num_bytes)
            self.ready = np.maximum(self.ready, np.where(self.table.waits, self.clocks.opened[self.ranks], 0.0))
            self._pack(copied[0])
            self._issue_round(again, 0)
            posted = self.ready
            arrived = self._carry(again, 0, posted, COPIED)
        coming = [] if again is None else [(again, rounds - number)]
        took = self._took(self.table.backward_s.T, (back, number), *coming)
        owed = np.zeros(self.size)
        for at in range(rounds - 1, 0, -1):
            self.done = np.maximum(self.done, arrived)
            if again is not None and at > 1:
                self._issue_round(again, rounds - at)
                posted = self.done
                arrived = self._carry(again, rounds - at, posted, COPIED)
            self._launch(took[at])
            came = returned > -np.inf
            self._issue(0, came & (owed > 0))
            self.done = np.maximum(self.done, returned) + np.where(came, owed, 0.0)
            self.busy += np.where(came, owed, 0.0)
            self._issue_round(back, at - 1)
            returned, owed = self._carry(back, at - 1, self.done, MOVED), added_s[at - 1]
        self._launch(took[0])
        self.ready = posted
        self.clocks.late[self.ranks] = np.maximum(self.clocks.late[self.ranks], returned)
        self.clocks.late_s[self.ranks] += np.where(returned > -np.inf, owed, 0.0)

    def _share_traffic_classes(self, again: _Turn, copied: Floats, back: _Turn, moved: Floats) -> None:
        # Let keys and gradients that leave by one link at a time have half of it each.
        # The second block comes while the first gradients leave, and so on; the first comes alone,
        # the last gradients leave alone.
        beside = moved[:0:-1]
        both = np.minimum(copied[1:], beside)
        for turn, rows, own in ((again, slice(1, None), copied[1:]), (back, slice(None, 0, -1), beside)):
            factor = 1 + both / np.maximum(own, 1.0)
            for seconds in (turn.seconds, *(turn.legs or ())):
                seconds[rows] *= factor
