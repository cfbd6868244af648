"""A ring on the clocks of all its ranks at once, round by round (`analysis.rounds`)."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from megatron_balance.analysis.clocks import COMBINE, COPIED, DISPATCH, INTER, MOVED, Clocks
from megatron_balance.analysis.tables import ZoneTable
from megatron_balance.cost.base import ADD, LAUNCHES_OF_RUN, Floats, Ints
from megatron_balance.ir.arrays import Bools
from megatron_balance.ir.program import Kind
from megatron_balance.patterns.base import HopByHop


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
        """As `Clocks.issue`, for the ranks of the ring."""
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
        """Issue a round's transfers: those of a rank that go by one link are one call; routed ones
        are a piece for each NIC.
        """
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
        """Transfers of all rounds, and their bytes [rounds, G].

        `tokens` [rounds, G]: what each place sends to the one `step` further.
        """
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
        for part in (~routed, routed):
            clocks.count(
                self.ranks, target, np.where(part, num_bytes, 0.0).sum(axis=0), np.full(self.size, part is routed)
            )
        turn = _Turn(seconds, step, cross.astype(np.int64), legs)
        if legs is not None:
            self._relay(turn, legs, node_out, node_in)
        return turn, num_bytes

    def _relay(self, turn: _Turn, legs: tuple[Floats, Floats, Floats], node_out: Ints, node_in: Ints) -> None:
        """The ranks of both nodes pass on what is routed, and are kept busy by it too."""
        dispatch, across, combine = (np.nan_to_num(leg) for leg in legs)
        # Of each round and node: the longest leg of a rank of it.
        inside, between = np.zeros((2, len(dispatch), self.machine.nics.num_nodes))
        for node, near in ((node_out, dispatch), (node_in, combine)):
            for most, leg in ((inside, near), (between, across)):
                np.maximum.at(most.T, node, leg.T)
        turn.inside = np.maximum(turn.inside, inside[:, node_out])
        turn.between = np.maximum(turn.between, between[:, node_out])

    def _carry(self, turn: _Turn, at: int, posted: Floats, traffic_class: int) -> Floats:
        """Run a round's transfers; when each rank has what it receives (-inf: nothing)."""
        seconds, free = turn.seconds[at], self.free[traffic_class]
        moving = ~np.isnan(seconds)
        place = np.arange(self.size)
        there = (place + turn.step) % self.size
        begin = np.maximum(
            np.maximum(posted, free[turn.link, place]), np.maximum(posted[there], free[turn.link, there])
        )
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
        """Set `arrived` by the routed hops of a round, leg by leg: one round's is under way beside
        the next one of the round before.
        """
        assert turn.legs is not None
        hop = np.flatnonzero(~np.isnan(turn.legs[0][at]) & ~np.isnan(turn.seconds[at]))
        there = (hop + turn.step) % self.size
        first = np.maximum(posted[hop], free[DISPATCH, hop]) + turn.legs[0][at, hop]
        between = (
            np.maximum(np.maximum(first, free[INTER, hop]), np.maximum(posted[there], free[INTER, there]))
            + turn.legs[1][at, hop]
        )
        last = np.maximum(between, free[COMBINE, there]) + turn.legs[2][at, hop]
        free[DISPATCH, hop], free[COMBINE, there] = first, last
        free[INTER, hop], free[INTER, there] = between, between
        arrived[there] = last

    def _took(self, seconds: Floats, *beside: tuple[_Turn, Ints]) -> Floats:
        """Seconds [rounds, G] of launches, slowed by the transfers `beside` them: of each turn, the
        row that goes beside each round [rounds], if there is one.
        """
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
        """Tokens [rounds, G] that each group index sends, of later and later neighbours' blocks."""
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
        """Rounds the other way: the gradients of a block walk its way back; `replay` brings the
        blocks again, furthest first.
        """
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
        """Let keys and gradients that leave by one link at a time have half of it each."""
        # The second block comes while the first gradients leave, and so on; the first comes alone,
        # the last gradients leave alone.
        beside = moved[:0:-1]
        both = np.minimum(copied[1:], beside)
        for turn, rows, own in ((again, slice(1, None), copied[1:]), (back, slice(None, 0, -1), beside)):
            factor = 1 + both / np.maximum(own, 1.0)
            for seconds in (turn.seconds, *(turn.legs or ())):
                seconds[rows] *= factor
