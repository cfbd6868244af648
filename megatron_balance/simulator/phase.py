"""One phase (forward or backward) of all ranks' programs as tasks for the clocks, with their costs.

Steps and streams are those of `compile.order`, which the executor follows; bytes are those of
`analysis.wire`, which it packs.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TypeAlias

import numpy as np

from megatron_balance.analysis.machine import Machine
from megatron_balance.analysis.tables import ADDED, STORED, Taken, all_to_all, launches, ring_collective
from megatron_balance.analysis.wire import is_collective, piece_bounds
from megatron_balance.compile import order
from megatron_balance.compile.pipeline import CompiledRank
from megatron_balance.compile.transpose import places
from megatron_balance.cost.base import ADD, LAUNCHES_OF_RUN, Host
from megatron_balance.cost.kernel import tiles
from megatron_balance.ir.arrays import Bools, Floats, Ints, as_array, concat
from megatron_balance.ir.columns import Fragment, Message, Pair, Transfer
from megatron_balance.ir.plan import MicrobatchPlan, Zone
from megatron_balance.ir.program import MOVED, Attend, AttendGrad, Collective, Exchange, Kind, Merge, Op, RankProgram
from megatron_balance.patterns.sends import messages_of

# A leg of an exchange on a rank: (rank, exchange id, leg, stream).
Place: TypeAlias = tuple[int, int, order.Leg, str]


@dataclass(frozen=True, slots=True)
class Flow:
    """One hop of what an exchange moves from `src` to `dst`, or of a piece of it: from `a` to `b`."""

    exchange: int
    leg: order.Leg
    stream: str
    a: int
    b: int
    src: int
    dst: int
    num_bytes: int
    piece: int = 0

    @property
    def places(self) -> tuple[Place, Place]:
        return (self.a, self.exchange, self.leg, self.stream), (self.b, self.exchange, self.leg, self.stream)


@dataclass(frozen=True, slots=True)
class GroupExchange:
    """A collective of a group. `num_bytes` [G, G]: from the rank of a row to that of a column."""

    exchange: int
    collective: Collective
    ranks: tuple[int, ...]
    stream: str
    num_bytes: Floats

    def taken(self, machine: Machine) -> Taken:
        """Seconds and bytes of one call of NCCL."""
        if self.collective in ("all_gather", "reduce_scatter"):
            return ring_collective(np.array(self.ranks), float(self.num_bytes.max(initial=0)), machine)
        return all_to_all(np.array(self.ranks), self.num_bytes, machine)


@dataclass(slots=True)
class SimulatedPhase:
    """Steps, flows and collectives of a phase.

    By rank and step: `seconds` beside waiting; `exchanges`: its id (-1: a launch); `blocks_s`:
    seconds of one of the kernel's thread blocks, 0 where transfers need not wait for them; `zones`:
    its name, where anybody traces.
    """

    steps: list[tuple[order.Step, ...]]
    seconds: list[list[float]]
    exchanges: list[list[int]]
    blocks_s: list[list[float]]
    flows: list[Flow] = field(default_factory=list[Flow])
    collectives: list[GroupExchange] = field(default_factory=list[GroupExchange])
    zones: list[list[str]] = field(default_factory=list[list[str]])

    def zone(self, rank: int, at: int) -> str:
        """The zone of a rank's step."""
        return self.zones[rank][at] if self.zones else ""

    def zones_of_exchanges(self) -> dict[tuple[int, int], str]:
        """By rank and exchange, its zone: on a proxy that of its relaying."""
        return {
            (rank, exchange): zone
            for rank, (exchanges, zones) in enumerate(zip(self.exchanges, self.zones, strict=True))
            for exchange, zone in zip(exchanges, zones, strict=True)
        }


def phase_of(
    ranks: Sequence[CompiledRank], machine: Machine, *, backward: bool, sums: bool = True, rings: Collection[str] = ()
) -> SimulatedPhase:
    """The tasks of a phase of all ranks.

    `sums`: the transport sums what a reduce-scatter brings on its way (NCCL does, gloo does not);
    `rings`: names of zones whose keys walk round (`ring_names`).
    """
    programs, orders = [each.program for each in ranks], [each.backward if backward else each.forward for each in ranks]
    ops = [program.backward if backward else program.forward for program in programs]
    walked = [_walked(program, rings) if backward else {} for program in programs]
    run_s, blocks_s = _launch_seconds(ops, walked, machine, backward=backward)
    phase = SimulatedPhase([], [], [], [])
    exchanges = _Exchanges.of(ops, [program.rank for program in programs], machine)
    pack_s, unpack_s = exchanges.handling(machine, sums=sums)
    for rank, (program, ordered, own) in enumerate(zip(programs, orders, ops, strict=True)):
        steps = ordered.steps
        seconds = {order.RunLaunches: run_s[rank], order.Start: pack_s[rank], order.Finish: unpack_s[rank]}
        phase.steps.append(steps)
        phase.seconds.append([seconds[type(step)][step.op] for step in steps])
        phase.exchanges.append([op.id if isinstance(op := own[step.op], Exchange) else -1 for step in steps])
        zones = places(program, backward=backward).zones
        phase.zones.append([zones[step.op] for step in steps])
        of_rank = blocks_s[rank]
        phase.blocks_s.append(
            [of_rank.get(step.op, 0.0) if isinstance(step, order.RunLaunches) else 0.0 for step in steps]
        )
    phase.flows = exchanges.flows(machine)
    phase.collectives = exchanges.collectives(machine)
    return phase


def ring_names(plan: MicrobatchPlan) -> frozenset[str]:
    """Names of the plan's zones whose keys walk round, a hop a round."""
    walks = {zone.name for zone in plan.zones if isinstance(zone, Zone) and zone.pattern in ("ring", "head_ring")}
    return frozenset(walks - {zone.name for zone in plan.zones if zone.name not in walks})


def _walked(program: RankProgram, rings: Collection[str]) -> dict[int, bool]:
    # Of each backward launch, by op: whether a hop of a ring brought all of its keys.
    names = [name for name, count in program.queues for _ in range(count)] or [""] * len(program.forward)
    of_launch = [name for op, name in zip(program.forward, names, strict=True) if isinstance(op, Attend)][::-1]
    indices = [index for index, op in enumerate(program.backward) if isinstance(op, AttendGrad)]
    owned = as_array(program.owned)
    found: dict[int, bool] = {}
    for index, name in zip(indices, of_launch, strict=True):
        op = program.backward[index]
        assert isinstance(op, AttendGrad), "a launch"
        found[index] = name in rings and not _meet(as_array(op.pairs)[:, [Pair.SEQ, Pair.K_START, Pair.K_STOP]], owned)
    return found


def _meet(spans: Ints, owned: Ints) -> bool:
    # Whether spans [n, 3] (seq, start, stop) name tokens of owned fragments.
    seq, start, stop = (spans[:, at, None] for at in range(3))
    of = owned[:, Fragment.SEQ], owned[:, Fragment.START], owned[:, Fragment.STOP]
    return bool(((seq == of[0]) & (start < of[2]) & (of[1] < stop)).any())


def _launch_seconds(
    ops: Sequence[Sequence[Op]], walked: Sequence[dict[int, bool]], machine: Machine, *, backward: bool
) -> tuple[list[dict[int, float]], list[dict[int, float]]]:
    # By rank and op: seconds of a launch with its merging, and of one of its thread blocks.
    attends = [
        (rank, index, op)
        for rank, own in enumerate(ops)
        for index, op in enumerate(own)
        if isinstance(op, Attend | AttendGrad)
    ]
    pairs = concat([op.pairs for _, _, op in attends], Pair.WIDTH)
    launch = np.repeat(np.arange(len(attends)), [len(op.pairs) for _, _, op in attends])
    behind = (ops[rank][index + 1 : index + 2] for rank, index, _ in attends)
    merging = np.array([any(isinstance(op, Merge) for op in after) for after in behind], dtype=np.float64)
    came = np.array([walked[rank].get(index, False) for rank, index, _ in attends], dtype=bool)
    costs = launches(pairs, launch, merging, machine, backward=backward, walked=came)
    slow = machine.slow()
    seconds: list[dict[int, float]] = [{} for _ in ops]
    blocks_s: list[dict[int, float]] = [{} for _ in ops]
    for (rank, index, _), each in zip(attends, costs.seconds.tolist(), strict=True):
        seconds[rank][index] = each * float(slow[rank])
    contention = machine.cost.contention
    if contention.waits:
        blocks = np.bincount(
            launch,
            weights=(pairs[:, Pair.Q_HEAD_STOP] - pairs[:, Pair.Q_HEAD_START]) * tiles(pairs)[1],
            minlength=len(attends),
        )
        for (rank, index, _), kernel_s, count in zip(attends, costs.kernel.tolist(), blocks.tolist(), strict=True):
            blocks_s[rank][index] = contention.block_s(kernel_s * float(slow[rank]), count)
    return seconds, blocks_s


@dataclass(frozen=True, slots=True)
class _Exchanges:
    """All exchanges of a phase as one table, rank by rank, each rank's in order.

    `ops`: the exchanges; `ranks`, `places` [n]: whose each is, and which of its ops. `rows`: rows of
    `Transfer` of all; `at` [len(rows)]: of which exchange. `sent`, `brought` [len(rows)]: whether its
    rank is the source, or the target. `together` [n]: collective calls.
    """

    ops: list[Exchange]
    ranks: Ints
    places: list[int]
    rows: Ints
    at: Ints
    sent: Bools
    brought: Bools
    together: Bools

    @classmethod
    def of(cls, ops: Sequence[Sequence[Op]], numbers: Sequence[int], machine: Machine) -> "_Exchanges":
        # `numbers`: of the ranks whose `ops` they are.
        listed = [
            (rank, place, op)
            for rank, own in enumerate(ops)
            for place, op in enumerate(own)
            if isinstance(op, Exchange)
        ]
        exchanges = [op for _, _, op in listed]
        rows = concat([op.transfers for op in exchanges], Transfer.WIDTH)
        at = np.repeat(np.arange(len(listed)), [len(op.transfers) for op in exchanges])
        ranks = np.array([rank for rank, _, _ in listed], dtype=np.int64)
        number = np.array(numbers, dtype=np.int64)[ranks[at]]
        sent, brought = rows[:, Transfer.SRC] == number, rows[:, Transfer.DST] == number
        size, node = machine.num_ranks, machine.cluster.node_size
        together = np.array(
            [op.collective != "p2p" and is_collective(op.group, size, node) for op in exchanges], dtype=bool
        )
        return cls(exchanges, ranks, [place for _, place, _ in listed], rows, at, sent, brought, together)

    def handling(self, machine: Machine, *, sums: bool) -> tuple[list[dict[int, float]], list[dict[int, float]]]:
        # By rank and op: seconds of packing what an exchange sends, and of unpacking what it
        # brings.
        #
        # `sums`: as in `phase_of`.
        gathers, scatters = (
            np.array([op.collective == name for op in self.ops], dtype=bool)
            for name in ("all_gather", "reduce_scatter")
        )
        # To all ranks goes one block; of what NCCL sums on its way, one comes.
        own = np.flatnonzero(self.sent & self._is_first(self.sent, Transfer.DST, gathers))
        summed = scatters & self.together & sums
        brought = np.flatnonzero(self.brought & self._is_first(self.brought, Transfer.SRC, summed))
        own = own[~self._passed_on(own, brought)]
        values, more = machine.payload.tensors(messages_of(0, self.rows))
        num_bytes, kinds, count = (values + more).astype(np.float64), self.rows[:, Transfer.KIND], len(self.ops)

        def by_exchange(rows: Ints) -> list[float]:
            return np.bincount(self.at[rows], num_bytes[rows], count).tolist()

        sent = by_exchange(own)
        stored, added = (by_exchange(brought[np.isin(kinds[brought], of)]) for of in (STORED, ADDED))
        slow = machine.slow().tolist()
        pack_s, unpack_s = ([dict[int, float]() for _ in slow] for _ in range(2))
        each = zip(self.ranks.tolist(), self.places, sent, stored, added, strict=True)
        for rank, place, *sizes in each:
            packed, kept, summed_up = (machine.cost.pack_s(size) if size else 0.0 for size in sizes)
            pack_s[rank][place], unpack_s[rank][place] = slow[rank] * packed, slow[rank] * (kept + ADD * summed_up)
        return pack_s, unpack_s

    def _is_first(self, chosen: Bools, end: int, only: Bools) -> Bools:
        # Of exchanges that are among `only`, the `chosen` transfers with the other `end` of the
        # first one; all transfers of the others.
        found, first = np.unique(self.at[chosen], return_index=True)
        ends = np.full(len(self.ops), -1, dtype=np.int64)
        ends[found] = self.rows[chosen][first, end]
        return ~only[self.at] | (self.rows[:, end] == ends[self.at])

    def _passed_on(self, own: Ints, brought: Ints) -> Bools:
        # Whether a sent block of keys, or of their gradients, came in an earlier exchange.
        both = np.concatenate([own, brought])
        key = self.ranks[self.at[both]]  # one number for a rank, a kind, a sequence and where the block begins
        for column in (Transfer.KIND, Transfer.SEQ, Transfer.START):
            values = self.rows[both, column]
            key = key * (int(values.max(initial=0)) + 1) + values
        key = np.unique(key, return_inverse=True)[1].reshape(-1)
        came = np.full(len(both), len(self.ops))
        np.minimum.at(came, key[len(own) :], self.at[brought])
        return np.isin(self.rows[own, Transfer.KIND], (Kind.KV, Kind.KV_GRAD)) & (came[key[: len(own)]] < self.at[own])

    def flows(self, machine: Machine) -> list[Flow]:
        # All hops of what is sent from rank to rank, by source, then by exchange.
        ids = np.array([op.id for op in self.ops], dtype=np.int64)
        chosen = self.sent & ~self.together[self.at]
        rows, at = self.rows[chosen], self.at[chosen]
        messages = messages_of(0, rows)
        messages[:, Message.EXCHANGE] = at  # an exchange of one rank
        parcels = machine.payload.parcels(messages)
        moved = np.zeros((len(self.ops), machine.num_ranks), dtype=bool)
        moves = np.isin(rows[:, Transfer.KIND], MOVED)
        moved[at[moves], rows[moves, Transfer.DST]] = True
        classes = moved[parcels.exchange, parcels.dst]
        crosses = machine.crosses(parcels.src, parcels.dst)
        columns = (parcels.exchange, parcels.src, parcels.dst, parcels.direct, parcels.packed, classes, crosses)
        flows: list[Flow] = []
        routes: dict[int, dict[tuple[int, int], list[tuple[int, ...]]]] = {}
        each = zip(*(column.tolist() for column in columns), strict=True)
        for exchange, src, dst, direct, packed, moving, crossing in each:
            of: order.TrafficClass = "moved" if moving else "copied"
            if exchange not in routes:
                routes[exchange] = {}
                op = self.ops[int(exchange)]
                found: list[tuple[int, ...]] = list(op.routes)
                for row in found:
                    routes[exchange].setdefault((row[0], row[1]), []).append(row)
            by_proxies, number = routes[exchange].get((src, dst)), int(ids[exchange])
            if by_proxies is None:
                stream = order.stream_name("direct", crossing, of)
                flows.append(Flow(number, "direct", stream, src, dst, src, dst, direct))
                continue
            sizes = [stop - start for start, stop in piece_bounds(packed, len(by_proxies))]
            flows += [
                Flow(number, leg, order.stream_name(leg, True, of), a, b, src, dst, sizes[piece], piece)
                for _, _, piece, send_proxy, receive_proxy in by_proxies
                for leg, a, b in order.hops((src, send_proxy, receive_proxy, dst))
                if sizes[piece]
            ]
        return flows

    def collectives(self, machine: Machine) -> list[GroupExchange]:
        # The collective calls, in the order in which ranks come to them.
        groups = {self.ops[at].id: self.ops[at] for at in np.flatnonzero(self.together).tolist()}
        ids = np.array([op.id for op in self.ops], dtype=np.int64)[self.at]
        chosen = np.flatnonzero(self.sent & np.isin(ids, list(groups)))
        by_id = chosen[np.argsort(ids[chosen], kind="stable")]
        bounds = np.searchsorted(ids[by_id], [list(groups), [number + 1 for number in groups]])
        return [
            _collective(op, self.rows[by_id[begin:end]], machine)
            for op, begin, end in zip(groups.values(), *bounds.tolist(), strict=True)
        ]


def _collective(op: Exchange, rows: Ints, machine: Machine) -> GroupExchange:
    parcels = machine.payload.parcels(messages_of(op.id, rows))
    place = np.zeros(machine.num_ranks, dtype=np.int64)
    place[list(op.group)] = np.arange(len(op.group))
    num_bytes: Floats = np.zeros((len(op.group), len(op.group)))
    num_bytes[place[parcels.src], place[parcels.dst]] = parcels.padded
    stream = order.collective_stream(op.group, machine.cluster.node_size)
    return GroupExchange(op.id, op.collective, op.group, stream, num_bytes)


def issued_s(phase: SimulatedPhase, host: Host) -> list[list[float]]:
    """Seconds from when a host begins the phase until each step is issued, by rank and step.

    A start issues a group call for each of its legs on the rank, and packs before if there is
    anything to pack; an end unpacks.
    """
    places = {place for flow in phase.flows for place in flow.places}
    calls = Counter((rank, exchange) for rank, exchange, _, _ in places)
    messages = Counter((rank, flow.exchange) for flow in phase.flows for rank in (flow.a, flow.b))
    for group in phase.collectives:
        calls.update((rank, group.exchange) for rank in group.ranks)

    def step_s(rank: int, step: order.Step, exchange: int, seconds: float) -> float:
        match step:
            case order.RunLaunches():
                return host.issue_s(0, LAUNCHES_OF_RUN)
            case order.Start():
                return host.issue_s(calls[rank, exchange], seconds > 0, messages[rank, exchange])
            case order.Finish():
                return host.issue_s(0, seconds > 0)

    return [
        list(accumulate(step_s(rank, *each) for each in zip(*columns, strict=True)))
        for rank, columns in enumerate(zip(phase.steps, phase.exchanges, phase.seconds, strict=True))
    ]
