"""Seconds and memory of a layer of a plan by closed forms, in about a millisecond: what planners are
compared by where simulating would take too long.

It is the round engine (`analysis.rounds`) with two short cuts: of zones whose ranks are alike one
launch of each kind is priced, on one rank, and exchanges inside groups are closed forms. Left out:
zones that share a NIC, ranks of a group that drift apart. A test holds it against the simulator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from megatron_balance.analysis.backward import Decision, Loads, with_states
from megatron_balance.analysis.clocks import COPIED, MOVED, TOGETHER
from megatron_balance.analysis.estimate.zones import (
    Bulk,
    WaveTimes,
    ZoneTimes,
    by_rank,
    exchange_heads,
    most_heads,
    zone_times,
)
from megatron_balance.analysis.machine import Machine
from megatron_balance.analysis.rounds import RingClock, RoundsPhase, coupled, in_step
from megatron_balance.analysis.states import mean_layer_s, states_cost
from megatron_balance.analysis.step_memory import StepMemory
from megatron_balance.analysis.tables import Tables, ZoneTable
from megatron_balance.compile.halo import ZONE
from megatron_balance.cost.base import ADD, MachineCost
from megatron_balance.ir.arrays import Floats, as_array, run_bounds, split_rows
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.columns import Move, Pair
from megatron_balance.ir.forest import Forest, Tree, over
from megatron_balance.ir.mask import FULL, SlidingWindow
from megatron_balance.ir.model import Model
from megatron_balance.ir.plan import MicrobatchPlan, TaskTable
from megatron_balance.ir.program import Kind, Policy
from megatron_balance.patterns import pattern_of
from megatron_balance.patterns.base import Context, Load

_Zones: TypeAlias = Sequence[ZoneTimes | ZoneTable]

# Share of a rank's memory by which plans that do not fit may need more than another and count as no
# worse: a prediction is no nearer.
ALIKE = 0.02

# Numbers of tokens for which modules outside attention are priced: reading the weights of many
# experts takes as long for few tokens as for more.
_KNOTS = 9


@dataclass(frozen=True, slots=True)
class Estimate:
    """Of one layer, modules outside attention included: seconds forward and backward of the rank whose
    sum of both is largest.

    `backward`: how many layers keep what they received, and whether a rank's memory holds the step,
    by prediction.
    """

    forward_s: float
    backward_s: float
    backward: Decision

    @property
    def layer_s(self) -> float:
        return self.forward_s + self.backward_s


def best_first(estimates: Sequence[Estimate]) -> list[int]:
    """Numbers of the estimates in order: those that fit, by time; where none does, those that need
    about as much memory as the one that needs least (`ALIKE`), by time; then the others, by memory.
    """
    least = min((each.backward.peak_bytes for each in estimates), default=0.0)

    def order(number: int) -> tuple[int, float]:
        found, decision = estimates[number], estimates[number].backward
        if decision.fits:
            return 0, found.layer_s
        alike = decision.peak_bytes <= least + ALIKE * (decision.memory_bytes or 0.0)
        return (1, found.layer_s) if alike else (2, decision.peak_bytes)

    return sorted(range(len(estimates)), key=order)


# The last few plans that were estimated, by identity: a planner that compares plans, what lays
# layers around them and whoever compares planners ask for the same ones. Of the last one also the
# zones, if all have closed forms: a plan with a remap and one without differ in moves alone.
_RECENT: list[tuple[MicrobatchPlan, Machine, Estimate, _Zones | None]] = []


def estimate(plan: MicrobatchPlan, machine: Machine) -> Estimate:
    """The seconds of a layer, and the memory of a step whose microbatches are all like this one, on
    a machine without slow ranks and whose hosts keep up. Raises InvalidProgramError: an unknown
    comm pattern.
    """
    assert not machine.slowdown, "an estimate takes ranks as alike; simulate a machine with slow ones"
    zones: _Zones | None = None
    for known, on, found, of in tuple(_RECENT):  # a copy: threads plan ahead
        if on.cost is machine.cost and (on.cluster, on.model) == (machine.cluster, machine.model):
            if known is plan and on.memory == machine.memory:
                return found
            moved = replace(plan, moves=known.moves, routing=known.routing, note=known.note)
            if of is not None and known.lengths is plan.lengths and known == moved:
                zones = of
    priced = machine.for_trees(plan.mask)
    tables, zones = (Tables(plan, priced, ()), zones) if zones is not None else zone_times(plan, priced)
    found = _estimate(plan, priced, tables, zones)
    recent = ((*each[:3], None) for each in _RECENT[:3])
    _RECENT[:] = [(plan, machine, found, None if tables.zones else zones), *recent]
    return found


def _estimate(plan: MicrobatchPlan, machine: Machine, tables: Tables, zones: _Zones) -> Estimate:
    loads = _loads(plan, zones)
    memory = machine.memory or StepMemory.one_stage(machine.model, machine.cluster.num_ranks)
    microbatch = with_states(loads.bytes((plan.num_heads, plan.num_kv_heads), machine.row_bytes), plan, machine.model)
    decision = memory.decide(microbatch, machine.cluster.memory_bytes)
    keeping = decision.kept_share

    group, states = coupled(plan), states_cost(plan, machine)

    def seconds(policy: Policy, *, backward: bool) -> Floats:
        entered = _linear_s(np.asarray(loads.own, dtype=np.float64), machine.cost, backward=backward)
        attended = in_step(_EstimatedPhase((tables, zones), policy, entered, backward=backward).run().end_s, group)
        return mean_layer_s(
            machine.model.attending * attended, entered, states, group, machine.model, backward=backward
        )

    shares: list[tuple[Policy, float]] = [("keep", keeping), ("replay", 1 - keeping)]
    forward_s = seconds("keep", backward=False)
    backward_s = np.sum([share * seconds(policy, backward=True) for policy, share in shares if share], axis=0)
    slowest = int((forward_s + backward_s).argmax())
    return Estimate(float(forward_s[slowest]), float(backward_s[slowest]), decision)


def _linear_s(tokens: Floats, cost: MachineCost, *, backward: bool) -> Floats:
    # Seconds of each rank's modules outside attention, taken as linear between `_KNOTS` numbers of
    # tokens; of the experts' exchange, which waits for the most tokens, as many on every rank.
    knots = np.unique(np.linspace(tokens.min(), tokens.max(), _KNOTS))
    own = [cost.layer_s(n, backward=backward) - cost.experts_s(n) for n in knots.tolist()]
    return np.interp(tokens, knots, own) + cost.experts_s(float(knots[-1]))


def _loads(plan: MicrobatchPlan, zones: _Zones) -> Loads:
    # Return what ranks hold and receive, as in `microbatch_bytes`, from one rank of each zone whose
    # ranks are alike.
    context, load, moves = Context.of(plan), Load(plan.num_ranks), as_array(plan.moves)
    queries, keys, sent, held, largest = np.zeros((5, plan.num_ranks))
    for zone in zones:
        if isinstance(zone, ZoneTimes):
            queries[zone.at] += zone.query_heads
            keys[zone.at] += zone.kv_heads
            sent[zone.at] += zone.sent
            held[zone.at] += zone.tokens
            largest[zone.at] = np.maximum(largest[zone.at], zone.largest)
            continue
        of_plan = plan.zones[zone.index]
        pattern = pattern_of(of_plan)
        held += pattern.tokens([of_plan], context)
        if pattern.num_exchanges(of_plan):
            pattern.receive(load, of_plan, context)
            largest[zone.ranks] = np.maximum(largest[zone.ranks], pattern.largest_exchange(of_plan, context))
    given, taken = (by_rank(moves[:, end], moves[:, Move.TOKENS], plan.num_ranks) for end in (Move.SRC, Move.DST))
    queries, keys, sent = (
        own + load.token_heads[kind] for own, kind in ((queries, Kind.Q), (keys, Kind.KV), (sent, Kind.OUT))
    )
    return Loads(held - given + taken, queries, keys, sent, largest, given, taken)


# One phase of a layer with zones in closed form beside those of the round engine.


class _EstimatedPhase(RoundsPhase):
    """A phase in which zones whose ranks are alike (`ZoneTimes`) move the clocks by formula; others
    are played rank by rank. Of its outcome `end_s` alone holds: bytes and busy seconds are not kept.

    Clocks are those of `analysis.clocks.Clocks`, by rank. `zones`: as `zone_times` gives them.
    """

    # In a zone by formula the ranks of a group are in step: `by_group` takes the latest of each group
    # [num_groups], `by_rank` gives it back to the group's ranks.

    def __init__(
        self,
        zones: tuple[Tables, _Zones],
        policy: Policy,
        enter_s: Floats,
        *,
        backward: bool,
    ) -> None:
        super().__init__(zones[0], policy, enter_s, backward=backward)
        self._in_order, self.clocks.counts = zones[1], False

    def _run_zones(self) -> None:
        for zone in reversed(self._in_order) if self.clocks.backward else self._in_order:
            if isinstance(zone, ZoneTimes):
                self._alike(zone)
            else:
                self._enter(zone)

    def _alike(self, zone: ZoneTimes) -> None:
        # Exchanges inside groups, launches and what goes between groups, exchanges inside groups.
        clocks, backward = self.clocks, self.clocks.backward
        self._bulk(zone, zone.output_grads if backward else zone.inputs, COPIED)
        if backward and clocks.policy == "replay":
            self._bulk(zone, zone.again, COPIED)
        if zone.waves is not None:
            (self._waves_backward if backward else self._waves_forward)(zone, zone.waves)
        elif zone.ring is not None and zone.hops is not None:
            if zone.inputs is not None:  # the rings pass on what the exchanges brought
                clocks.ready[zone.at] = clocks.done[zone.at]
            RingClock(clocks, zone.ring, zone.hops, len(zone.ranks) // zone.num_groups).run()
            if backward and zone.input_grads is not None:
                clocks.settle(zone.ranks)
        else:
            clocks.done[zone.at] = np.maximum(clocks.done[zone.at], clocks.opened[zone.at]) + zone.first[backward]
        self._bulk(zone, zone.input_grads if backward else zone.outputs, MOVED)

    def _bulk(self, zone: ZoneTimes, bulk: Bulk | None, traffic_class: int) -> None:
        # The collective of every group at once; it begins when the last rank of the group has
        # posted it.
        if bulk is None:
            return
        clocks, ranks = self.clocks, zone.at
        # Of all ranks, or of each.
        packed, placed = (
            zone.by_rank(each) if isinstance(each, np.ndarray) else each
            for each in (self._packs_s(bulk.packed_bytes), self._packs_s(bulk.placed_bytes))
        )
        done = posted = clocks.done[ranks] + packed
        # What is copied is waited for before a launch, and posted when the start before it was reached
        # (`ready`). What is moved leaves when its launch is done, and nobody waits for it until the
        # end of the phase (`late`, `late_s`).
        if traffic_class == COPIED:
            done = np.maximum(done, clocks.opened[ranks])
            clocks.ready[ranks] = posted = np.maximum(clocks.ready[ranks] + packed, clocks.opened[ranks])
        begin = zone.by_group(np.maximum(posted, clocks.free[:, TOGETHER, ranks].max(axis=0)))
        arrived = zone.by_rank(begin + clocks.call_s + bulk.seconds)
        clocks.free[traffic_class, TOGETHER, ranks] = arrived
        placed = placed * (ADD if bulk.adds else 1.0)
        if traffic_class == COPIED:
            clocks.done[ranks] = np.maximum(done, arrived) + placed
        else:
            clocks.done[ranks] = done
            clocks.late[ranks] = np.maximum(clocks.late[ranks], arrived)
            clocks.late_s[ranks] += placed
            if clocks.backward or zone.num_groups > 1:  # as `RoundsPhase`
                clocks.ready[ranks] = done

    def _packs_s(self, num_bytes: Floats | float) -> Floats | float:
        # Seconds of packing, of all groups or of each [groups].
        pack_s = self.clocks.machine.pack_s
        if isinstance(num_bytes, np.ndarray):
            return np.array([pack_s(each) for each in num_bytes.tolist()])
        return pack_s(num_bytes)

    def _waves_forward(self, zone: ZoneTimes, waves: WaveTimes) -> None:
        # Own work and waves of other groups' keys, forward.
        # [groups, own launches and waves]. With late inputs there are two own launches: 0 runs while
        # they travel, own - 1 needs them; else one.
        launches, own = waves.launches[0], waves.own
        if waves.late is not None:
            begun = self.clocks.done[zone.at].copy()
            self._bulk(zone, waves.late[0], COPIED)
            done = np.maximum(begun, self.clocks.ready[zone.at]) + zone.by_rank(launches[:, 0])
            self.clocks.done[zone.at] = np.maximum(done, self.clocks.done[zone.at])
        done, come = self._keys_of(zone, waves, backward=False)
        done += launches[:, own - 1]
        for wave, arrived in enumerate(come):
            done = np.maximum(done, arrived) + launches[:, wave + own]
        self.clocks.done[zone.at] = zone.by_rank(done)

    def _waves_backward(self, zone: ZoneTimes, waves: WaveTimes) -> None:
        # Waves in reverse, each one's gradients sent home behind its launch, and own work.
        ranks = zone.at
        done, come = zone.by_group(self.clocks.done[ranks]), list[Floats]()
        if self.clocks.policy == "replay":
            done, come = self._keys_of(zone, waves, backward=True)
        free, owed = zone.by_group(self.clocks.free[MOVED, TOGETHER, ranks]), np.zeros(zone.num_groups)
        late = zone.by_group(self.clocks.late[ranks])
        for wave in reversed(range(len(waves.grads))):
            if come:
                done = np.maximum(done, come[wave])
            bulk = waves.grads[wave]
            done = done + waves.launches[1][:, wave + waves.own] + self._packs_s(bulk.packed_bytes)
            arrived = self._meet(done, free, bulk)
            free = np.where(arrived > 0, arrived, free)
            late, owed = np.maximum(late, arrived), owed + ADD * self._packs_s(bulk.placed_bytes)
        done = done + waves.launches[1][:, waves.own - 1]
        # What the waves brought is summed before the group sends it on; the gradients of late inputs
        # leave before the last launch, as in `RoundsPhase`.
        if zone.input_grads is not None:
            done, owed = np.maximum(done, late) + owed, np.zeros_like(owed)
        self.clocks.free[MOVED, TOGETHER, ranks], self.clocks.late[ranks] = zone.by_rank(free), zone.by_rank(late)
        self.clocks.done[ranks] = zone.by_rank(done)
        self.clocks.late_s[ranks] += zone.by_rank(owed)
        if waves.late is not None:
            self._bulk(zone, waves.late[1], MOVED)
            self.clocks.done[ranks] += zone.by_rank(waves.launches[1][:, 0])

    def _keys_of(self, zone: ZoneTimes, waves: WaveTimes, *, backward: bool) -> tuple[Floats, list[Floats]]:
        # When each group can begin its work, and when it has the keys of each wave.
        ranks = zone.at
        self.clocks.done[ranks] = np.maximum(self.clocks.done[ranks], self.clocks.opened[ranks])
        done = zone.by_group(self.clocks.done[ranks])
        posted = np.maximum(zone.by_group(self.clocks.ready[ranks]), done)  # waves pass on what the collectives brought
        free = zone.by_group(self.clocks.free[COPIED, TOGETHER, ranks])
        come = [np.zeros(zone.num_groups)] * len(waves.keys)
        for wave in reversed(range(len(come))) if backward else range(len(come)):
            packed = self._packs_s(waves.keys[wave].packed_bytes)
            done, posted = done + packed, posted + packed
            come[wave] = self._meet(posted, free, waves.keys[wave])
            free = np.where(come[wave] > 0, come[wave], free)
        self.clocks.ready[ranks], self.clocks.free[COPIED, TOGETHER, ranks] = zone.by_rank(posted), zone.by_rank(free)
        return done, come

    def _meet(self, posted: Floats, free: Floats, bulk: Bulk) -> Floats:
        # When each group has what a wave brings; a transfer begins when both ends are at it.
        #
        # 0: a group has no part in the wave.
        assert bulk.partners is not None
        own = np.maximum(posted, free)
        begin = own.copy()  # of each group and those that it exchanges with, the latest
        for one, other in ((0, 1), (1, 0)):
            np.maximum.at(begin, bulk.partners[:, one], own[bulk.partners[:, other]])
        return np.where(bulk.seconds > 0, begin + self.clocks.call_s + bulk.seconds, 0.0)


# Seconds of a layer below which a system's plans cannot come: whether it need be asked at all.

# Tokens beside whose seconds fixed costs are nothing.
_MANY = 1e12

# Beyond so many nodes no plan of whole sequences was found within 7 % of the bound where exchanges
# make that a tenth more than even computation (24 batches on 512 and 1,024 ranks: 1.074 or more).
_FEW_NODES, _FILLED, _TRADES = 32, 1.07, 1.1

# Of the bisection for a bound.
_STEPS = 12


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bounds of a batch, forward and backward together, of a layer that attends with its part of
    the others (`Model.attending`; states are left out). `attention_s`: of the whole batch on one
    rank, forward and backward; `linear_s`: of a rank's even share of the tokens, both. Of trees only
    `even` and `of_halo` hold.
    """

    lengths: Sequence[int]
    machine: Machine
    attention_s: tuple[float, float]
    linear_s: float

    @classmethod
    def of(
        cls,
        lengths: Sequence[int],
        cluster: Cluster,
        model: Model,
        cost: MachineCost,
        memory: StepMemory | None = None,
        trees: tuple[Tree, ...] = (),
    ) -> Bounds:
        """The bounds of a batch of these lengths and trees; `memory`: of its machine."""
        machine, shown = Machine(cluster, model, cost, memory=memory), over(model.mask, trees)
        pairs, priced = machine.whole(np.array(lengths, dtype=np.int64)), cost
        if isinstance(shown, Forest):
            pairs, priced = split_rows(pairs, Pair.SEQ, Pair.SPANS, shown), machine.for_trees(shown).cost
        launch = np.zeros(len(pairs), dtype=np.int64)
        forward, backward = (float(priced.attend_s(pairs, launch, 1, backward=b)[0]) for b in (False, True))
        tokens = sum(lengths) / cluster.num_ranks
        linear_s = sum(cost.layer_s(tokens, backward=b) for b in (False, True)) / model.attending
        return cls(lengths, machine, (forward, backward), linear_s)

    @property
    def _halos(self) -> bool:
        # Whether plans move no more than the keys in a window before a rank's tokens
        # (`compile.halo`): bounds by what a comm pattern moves, and by a rank's heads, do not hold
        # then.
        mask = self.machine.model.mask
        return isinstance(mask, SlidingWindow) and max(self.lengths, default=0) > mask.size

    def _pairs_s(self, num_pairs: float) -> tuple[float, float]:
        # Least seconds of pairs, forward and backward, in runs as long as can be.
        forward = self.machine.cost.attention_s(num_pairs)
        return forward, forward * self.attention_s[1] / max(self.attention_s[0], 1e-12)

    def even(self) -> float:
        """Of any plan: all computation even, nothing moves (as `simulator.step.bound_s`)."""
        return sum(self.attention_s) / self.machine.cluster.num_ranks + self.linear_s

    def of_halo(self, plan: MicrobatchPlan) -> float:
        """Of this plan of trees: where its ranks are brought the keys that they see, and then attend
        (`compile.halo`), of the rank for which that takes longest; else `even`.
        """
        machine, (zone, *others) = self.machine, plan.zones
        if others or not isinstance(zone, TaskTable) or zone.name != ZONE:
            return self.even()
        if not isinstance(plan.mask, Forest) or plan.mask.window:
            return self.even()
        cost, ranks, context = machine.cost, machine.num_ranks, Context.of(plan)
        rank, seq, start, stop = as_array(zone.fragments).T
        order = np.lexsort((start, seq, rank))
        rank, seq, start, stop = rank[order], seq[order], start[order], stop[order]
        # Keys on the path to a run of tokens, without those that its rank may hold, of each tree.
        of, held = plan.mask.segments, np.cumsum(stop - start) - (stop - start)
        first = run_bounds((rank[1:] != rank[:-1]) | (seq[1:] != seq[:-1]), len(rank))[:-1]
        keys = start - of.shift[of.at(seq, start)] - held
        keys += np.repeat(held[first], np.diff(np.append(first, len(rank))))
        brought = by_rank(rank[first], np.maximum.reduceat(keys, first), ranks) * machine.model.num_kv_heads
        row_bytes = machine.row_bytes[Kind.KV] + machine.row_bytes[Kind.KV_GRAD]
        seconds = brought * row_bytes / max(machine.intra.bytes_per_s, machine.inter.bytes_per_s)
        pairs = pattern_of(zone).attended([zone], context)
        seconds += [sum(self._pairs_s(each)) for each in pairs.tolist()]
        moves, own = as_array(plan.moves), by_rank(rank, stop - start, ranks).astype(np.float64)
        for end, sign in ((Move.SRC, -1), (Move.DST, 1)):
            own += sign * by_rank(moves[:, end], moves[:, Move.TOKENS], ranks)
        seconds += sum(_linear_s(own, cost, backward=each) for each in (False, True)) / machine.model.attending
        return max(self.even(), float(seconds.max()))

    def rings(self) -> float:
        """Of plans of rings: a rank of the longest sequence's ring attends to its part of it and
        receives the keys of all the others, on however many ranks it is.
        """
        machine, longest = self.machine, max(self.lengths, default=0)
        cluster, kv_heads = machine.cluster, machine.model.num_kv_heads
        if self._halos:
            return self.even()
        parts = self._pairs_s(machine.model.mask.num_pairs(longest))
        ranks = np.arange(1, cluster.num_ranks + 1)
        crossing = max(1 / machine.intra.bytes_per_s, 1 / (machine.nics.per_node * machine.inter.bytes_per_s))
        byte_s = np.where(ranks > cluster.node_size, crossing, 1 / machine.intra.bytes_per_s)
        token_s = (ranks - 1) / ranks * longest * kv_heads * byte_s
        seconds = sum(
            np.maximum(part / ranks, token_s * machine.row_bytes[kind])
            for part, kind in zip(parts, (Kind.KV, Kind.KV_GRAD), strict=True)
        )
        return max(self.even(), float(np.min(seconds)) + self.linear_s)

    def pool_ring(self) -> float:
        """Of plans of one ring over all ranks: all keys pass all ranks, and each round launches,
        merges and adds up gradients of half the queries or more.
        """
        machine, num_ranks = self.machine, self.machine.cluster.num_ranks
        cost, rounds = machine.cost, num_ranks - 1
        shared = max(self.lengths, default=0) >= 2 * num_ranks  # shorter ones are on fewer ranks
        if self._halos:
            return self._zigzag_halos()
        if not shared or not rounds:
            return self.even()
        tokens = sum(n for n in self.lengths if n >= 2 * num_ranks) / num_ranks
        block, queries = tokens * machine.model.num_kv_heads, tokens / 2 * machine.model.num_heads
        around = cost.merge_s(tokens / 2), ADD * cost.pack_s(queries * machine.row_bytes[Kind.Q_GRAD])
        link, spread = (machine.inter, machine.nics.per_node) if machine.cluster.num_nodes > 1 else (machine.intra, 1)
        seconds = self.linear_s
        for attention_s, each_s, kind in zip(self.attention_s, around, (Kind.KV, Kind.KV_GRAD), strict=True):
            moved_s = rounds * (link.alpha_s + block * machine.row_bytes[kind] / (spread * link.bytes_per_s))
            seconds += max(attention_s / num_ranks + cost.launch_s(rounds) + rounds * each_s, moved_s)
        return max(self.even(), seconds)

    def even_tokens(self) -> float:
        """Of ranks with even tokens in a row: the end of the longest sequence sees most keys."""
        longest, mask = max(self.lengths, default=0), self.machine.model.mask
        # At least so much of its end lies on one rank.
        last = min(longest, sum(self.lengths) // (2 * self.machine.cluster.num_ranks))
        pairs = last * longest if mask == FULL else mask.num_pairs(longest) - mask.num_pairs(longest - last)
        return max(self.even(), sum(self._pairs_s(pairs)) + self.linear_s)

    def pool_gather(self) -> float:
        """Of plans in which all ranks gather all keys and values that several ranks hold, before they
        attend. Packed to one sequence, those of documents that lie in a chunk stay where they are, and
        those in the middle two, which are one rank's.
        """
        chunk = sum(self.lengths) / (2 * self.machine.cluster.num_ranks) + 1
        return self.even() if self._halos else self._gather(sum(n for n in self.lengths if n > chunk) - 2 * chunk)

    def pool_zigzag_gather(self) -> float:
        """As `pool_gather`, of plans that cut each sequence zigzag."""
        num_ranks = self.machine.cluster.num_ranks
        cut = sum(n for n in self.lengths if n >= 2 * num_ranks)  # shorter ones are on fewer ranks
        return self._zigzag_halos() if self._halos else self._gather(cut)

    def _gather(self, tokens: float) -> float:
        machine = self.machine
        cluster, row_bytes = machine.cluster, machine.row_bytes
        rate = machine.intra.bytes_per_s
        rate = min(rate, machine.nics.per_node * machine.inter.bytes_per_s) if cluster.num_nodes > 1 else rate
        token_bytes = machine.model.num_kv_heads * (row_bytes[Kind.KV] + row_bytes[Kind.KV_GRAD])
        return self.even() + max(0.0, tokens) * (1 - 1 / cluster.num_ranks) * token_bytes / rate

    def _zigzag_halos(self) -> float:
        # Under a window, of plans that cut each sequence zigzag over all ranks: before it attends,
        # a rank in the middle of both halves receives the keys before its two chunks.
        machine, ranks = self.machine, self.machine.cluster.num_ranks
        mask, place = machine.model.mask, ranks // 2
        assert isinstance(mask, SlidingWindow)
        cut = [n for n in self.lengths if n >= 2 * ranks]
        between = 2 * (ranks - 1 - place)  # chunks from its first to its second
        keys = sum(min(mask.size - 1, n * each // (2 * ranks)) for n in cut for each in (place, between))
        row_bytes = machine.row_bytes[Kind.KV] + machine.row_bytes[Kind.KV_GRAD]
        moved = keys * machine.model.num_kv_heads * row_bytes
        rate = max(machine.intra.bytes_per_s, machine.inter.bytes_per_s)
        return max(self.even(), self.even() * sum(cut) / max(1, sum(self.lengths)) + moved / rate)

    def pool_heads(self) -> float:
        """Of heads exchanged by all: the rank with most heads attends to all sequences."""
        model, num_ranks = self.machine.model, self.machine.cluster.num_ranks
        share = 1 / num_ranks if self._halos else most_heads(model, num_ranks)[0] / model.num_heads
        return max(self.even(), share * sum(self.attention_s) + self.linear_s)

    def whole_on_groups(self) -> float:
        """Of plans that have each sequence whole on one group that exchanges heads: of a size that
        divides the heads and is part of a node or some nodes, or all ranks. The least time in which
        every sequence could be attended to alone, and all computation and exchanges were even; on
        many nodes, where groups exchange much, `_FILLED` times that, which is measured, not proved.
        """
        machine, own = self.machine, np.array(self.lengths, dtype=np.float64)
        model, cluster, cost = machine.model, machine.cluster, machine.cost
        if not len(own) or self._halos:
            return self.even()
        node, most = cluster.node_size, min(cluster.num_ranks, model.num_heads)
        fitting = [size for size in range(1, most + 1) if node % size == 0 or size % node == 0]
        sizes = [*dict.fromkeys([*(size for size in fitting if model.num_heads % size == 0), cluster.num_ranks])]
        pairs, launch = machine.whole(np.array(self.lengths, dtype=np.int64)), np.arange(len(own))
        attention = sum(cost.attend_s(pairs, launch, len(own), backward=b) for b in (False, True))
        token_s = sum(cost.layer_s(_MANY, backward=b) for b in (False, True)) / (_MANY * model.attending)
        heads = np.array([most_heads(model, size)[0] / model.num_heads for size in sizes])[:, None]
        exchange = np.array([self._exchange_s(size) for size in sizes])[:, None]
        alone = attention * heads + own * (token_s / np.array(sizes)[:, None] + exchange)
        shared = exchange * np.array(sizes)[:, None] * own / cluster.num_ranks

        def even(limit: float) -> float:
            # Seconds of even ranks, each sequence on the cheapest group within a limit.
            return self.even() + float(np.where(alone <= limit, shared, np.inf).min(axis=0).sum())

        low = max(self.even(), float(alone.min(axis=0).max()))
        high = even(low)
        for _ in range(_STEPS if high > low else 0):
            middle = (low + high) / 2
            low, high = (low, middle) if even(middle) <= middle else (middle, high)
        many = cluster.num_nodes > _FEW_NODES and low > _TRADES * self.even()
        return _FILLED * low if many else low

    def _exchange_s(self, size: int) -> float:
        # Seconds a token of a group of `size` ranks in its exchanges of heads, latency left out.
        if size == 1:
            return 0.0
        machine, made = self.machine, ZoneTimes(np.arange(size), 0.0, slice(0, size))
        # What ranks of a node share may cross once, where that is chosen.
        once = machine.intra.bytes_per_s * machine.cluster.ranks_per_nic > machine.inter.bytes_per_s
        exchange_heads(made, range(size), _MANY, most_heads(machine.model, size), machine, once=once)
        seconds = 0.0
        for bulk in (made.inputs, made.outputs, made.output_grads, made.input_grads):
            assert bulk is not None
            packed, placed = (machine.pack_s(float(n)) for n in (bulk.packed_bytes, bulk.placed_bytes))
            seconds += float(bulk.seconds) + packed + placed * (ADD if bulk.adds else 1.0)
        return seconds / _MANY
