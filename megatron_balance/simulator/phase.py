"""One phase (forward or backward) of all ranks' programs as tasks for the clocks, with their costs.

Steps and streams are those of `compile.order`, which the executor follows; bytes are those of
`analysis.wire`, which it packs.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from megatron_balance.analysis.wire import Parcels, is_collective, piece_bounds
from megatron_balance.compile.order import (
    Finish,
    Leg,
    RunLaunches,
    Start,
    Step,
    collective_stream,
    hops,
    stream_name,
    traffic_class,
)
from megatron_balance.compile.pipeline import CompiledRank
from megatron_balance.compile.zones import places
from megatron_balance.cost.base import Floats, Ints
from megatron_balance.cost.kernel import tiles
from megatron_balance.ir.arrays import as_array, concat
from megatron_balance.ir.columns import Fragment, Message, Pair, Transfer
from megatron_balance.ir.plan import MicrobatchPlan, Zone
from megatron_balance.ir.program import Attend, AttendGrad, Collective, Exchange, Kind, Merge, Op, RankProgram
from megatron_balance.patterns.rows import messages_of
from megatron_balance.simulator import collective
from megatron_balance.simulator.collective import Taken
from megatron_balance.simulator.machine import Machine
from megatron_balance.simulator.work import launches, unpack_s

Place: TypeAlias = tuple[int, int, Leg, str]
"""A leg of an exchange on a rank: (rank, exchange id, leg, stream)."""


@dataclass(frozen=True, slots=True)
class Flow:
    """One hop of what an exchange moves from `src` to `dst`, or of one piece of it: from rank `a`
    to rank `b`.
    """

    exchange: int
    leg: Leg
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
    """A collective of a group's ranks. `num_bytes` [G, G]: from the rank of a row to that of a
    column.
    """

    exchange: int
    collective: Collective
    ranks: tuple[int, ...]
    stream: str
    num_bytes: Floats

    def taken(self, machine: Machine) -> Taken:
        """Seconds and bytes of one call of NCCL."""
        if self.collective in ("all_gather", "reduce_scatter"):
            return collective.ring(np.array(self.ranks), float(self.num_bytes.max(initial=0)), machine)
        return collective.exchange(np.array(self.ranks), self.num_bytes, machine)


@dataclass(slots=True)
class SimulatedPhase:
    """Steps, flows and collectives of a phase.

    By rank and step: `seconds` beside waiting; `exchanges`: its id (-1: a launch); `blocks_s`:
    seconds of one of the kernel's thread blocks, 0 where transfers need not wait for them; `zones`:
    its name, where anybody traces.
    """

    steps: list[tuple[Step, ...]]
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
    ranks: Sequence[CompiledRank],
    machine: Machine,
    *,
    backward: bool,
    sums: bool = True,
    rings: Collection[str] = (),
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
    groups: dict[int, Exchange] = {}
    sent: dict[int, list[Ints]] = {}
    for program, ordered, own, launch_s, block_s in zip(programs, orders, ops, run_s, blocks_s, strict=True):
        steps = ordered.steps
        pack, unpack = _handling(own, program.rank, machine, sums=sums)
        seconds = {RunLaunches: launch_s, Start: pack, Finish: unpack}
        phase.steps.append(steps)
        phase.seconds.append([seconds[type(step)][step.op] for step in steps])
        phase.exchanges.append([_id_of(own[step.op]) for step in steps])
        zones = places(program, backward=backward).zones
        phase.zones.append([zones[step.op] for step in steps])
        phase.blocks_s.append([block_s.get(step.op, 0.0) if isinstance(step, RunLaunches) else 0.0 for step in steps])
        for op in own:
            if not isinstance(op, Exchange):
                continue
            if op.collective != "p2p" and is_collective(op.group, machine.num_ranks, machine.cluster.node_size):
                groups[op.id] = op
                rows = as_array(op.transfers)
                sent.setdefault(op.id, []).append(rows[rows[:, Transfer.SRC] == program.rank])
            else:
                phase.flows += _flows(op, program.rank, machine)
    for at, op in groups.items():
        phase.collectives.append(_collective(op, np.concatenate(sent[at]), machine))
    return phase


def _id_of(op: Op) -> int:
    return op.id if isinstance(op, Exchange) else -1


def ring_names(plan: MicrobatchPlan) -> frozenset[str]:
    """Names of the plan's zones whose keys walk round, a hop a round."""
    walks = {zone.name for zone in plan.zones if isinstance(zone, Zone) and zone.pattern in ("ring", "head_ring")}
    return frozenset(walks - {zone.name for zone in plan.zones if zone.name not in walks})


def _walked(program: RankProgram, rings: Collection[str]) -> dict[int, bool]:
    """Of each backward launch, by op: whether a hop of a ring brought all of its keys."""
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
    """Whether spans [n, 3] (seq, start, stop) name tokens of owned fragments."""
    seq, start, stop = (spans[:, at, None] for at in range(3))
    of = owned[:, Fragment.SEQ], owned[:, Fragment.START], owned[:, Fragment.STOP]
    return bool(((seq == of[0]) & (start < of[2]) & (of[1] < stop)).any())


def _launch_seconds(
    ops: Sequence[Sequence[Op]], walked: Sequence[dict[int, bool]], machine: Machine, *, backward: bool
) -> tuple[list[dict[int, float]], list[dict[int, float]]]:
    """By rank and op: seconds of a launch with the merging that belongs to it; seconds of one of
    its thread blocks.
    """
    attends = [
        (rank, index, op)
        for rank, own in enumerate(ops)
        for index, op in enumerate(own)
        if isinstance(op, Attend | AttendGrad)
    ]
    pairs = concat([op.pairs for _, _, op in attends], Pair.WIDTH)
    launch = np.repeat(np.arange(len(attends)), [len(op.pairs) for _, _, op in attends])
    merging = np.array([_merges_after(ops[rank], index) for rank, index, _ in attends], dtype=np.float64)
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


def _merges_after(ops: Sequence[Op], index: int) -> bool:
    return index + 1 < len(ops) and isinstance(ops[index + 1], Merge)


def _handling(
    ops: Sequence[Op], rank: int, machine: Machine, *, sums: bool
) -> tuple[dict[int, float], dict[int, float]]:
    """By op: seconds of packing what an exchange sends, and of unpacking what it brings."""
    slow = float(machine.slow()[rank])
    pack: dict[int, float] = {}
    unpack: dict[int, float] = {}
    arrived: set[tuple[int, int, int]] = set()
    for index, op in enumerate(ops):
        if not isinstance(op, Exchange):
            continue
        rows = as_array(op.transfers)
        own, brought = rows[rows[:, Transfer.SRC] == rank], rows[rows[:, Transfer.DST] == rank]
        if op.collective == "all_gather" and len(own):
            own = own[own[:, Transfer.DST] == own[0, Transfer.DST]]  # one block for all
        if (
            sums
            and op.collective == "reduce_scatter"
            and len(brought)
            and is_collective(op.group, machine.num_ranks, machine.cluster.node_size)
        ):
            # one block, the sum
            brought = brought[brought[:, Transfer.SRC] == brought[0, Transfer.SRC]]
        passed_on = [
            kind in (Kind.KV, Kind.KV_GRAD) and (kind, seq, at) in arrived for kind, seq, at in own[:, :3].tolist()
        ]
        num_bytes = float(_values(own[~np.array(passed_on, dtype=bool)], machine)[0].sum())
        pack[index] = slow * machine.cost.pack_s(num_bytes) if num_bytes else 0.0
        unpack[index] = slow * unpack_s(*_values(brought, machine), machine)
        arrived.update((kind, seq, at) for kind, seq, at in brought[:, :3].tolist())
    return pack, unpack


def _values(rows: Ints, machine: Machine) -> tuple[Ints, Ints]:
    """Bytes of each transfer with its LSE, and its kind."""
    messages = messages_of(0, rows)
    values, more = machine.payload.tensors(messages)
    return values + more, messages[:, Message.KIND]


def _flows(op: Exchange, rank: int, machine: Machine) -> list[Flow]:
    """All hops of what `rank` sends in an exchange."""
    rows = as_array(op.transfers)
    rows = rows[rows[:, Transfer.SRC] == rank]
    parcels = machine.payload.parcels(messages_of(op.id, rows))
    kinds: dict[int, list[int]] = {}
    for kind, dst in rows[:, [Transfer.KIND, Transfer.DST]].tolist():
        kinds.setdefault(dst, []).append(kind)
    routes: dict[int, list[tuple[int, ...]]] = {}
    for row in op.routes:
        if row[0] == rank:
            routes.setdefault(row[1], []).append(row)
    return [flow for parcel in _parcels(parcels) for flow in _hops_of(op.id, parcel, routes, kinds, machine)]


def _parcels(parcels: Parcels) -> list[tuple[int, int, int, int]]:
    """(src, dst, bytes as they are, bytes packed)."""
    return list(
        zip(*(column.tolist() for column in (parcels.src, parcels.dst, parcels.direct, parcels.packed)), strict=True)
    )


def _hops_of(
    exchange: int,
    parcel: tuple[int, int, int, int],
    routes: dict[int, list[tuple[int, ...]]],
    kinds: dict[int, list[int]],
    machine: Machine,
) -> list[Flow]:
    src, dst, direct, packed = parcel
    of = traffic_class(kinds[dst])
    if dst not in routes:
        crosses = bool(machine.crosses(np.array(src), np.array(dst)))
        return [Flow(exchange, "direct", stream_name("direct", crosses, of), src, dst, src, dst, direct)]
    sizes = [stop - start for start, stop in piece_bounds(packed, len(routes[dst]))]
    return [
        Flow(exchange, leg, stream_name(leg, True, of), a, b, src, dst, sizes[piece], piece)
        for _, _, piece, send_proxy, receive_proxy in routes[dst]
        for leg, a, b in hops((src, send_proxy, receive_proxy, dst))
        if sizes[piece]
    ]


def _collective(op: Exchange, rows: Ints, machine: Machine) -> GroupExchange:
    parcels = machine.payload.parcels(messages_of(op.id, rows))
    place = np.zeros(machine.num_ranks, dtype=np.int64)
    place[list(op.group)] = np.arange(len(op.group))
    num_bytes: Floats = np.zeros((len(op.group), len(op.group)))
    num_bytes[place[parcels.src], place[parcels.dst]] = parcels.padded
    return GroupExchange(
        op.id, op.collective, op.group, collective_stream(op.group, machine.cluster.node_size), num_bytes
    )
