"""Lift a planner that places microbatches to a planner of steps: whole or as nano-batches
(docs/adr/0013), stages each for itself or tick by tick (docs/adr/0014), with sequences that another
planner held back.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import chain
from math import ceil
from typing import TypeAlias

import numpy as np

from megatron_balance.analysis.estimate import best_first, estimate
from megatron_balance.analysis.machine import Machine
from megatron_balance.analysis.recurrent import Pieces
from megatron_balance.analysis.states import by_heads_s, states_cost
from megatron_balance.analysis.statistics import tokens_per_rank
from megatron_balance.analysis.wire import NicOf
from megatron_balance.compile.halo import under
from megatron_balance.compile.ping_pong import NUM_NANO_BATCHES
from megatron_balance.cost.base import CostModel, MachineCost, remap_s, token_bytes
from megatron_balance.cost.perturbed import on_cluster
from megatron_balance.errors import ConfigError, InfeasibleError, InvalidProgramError
from megatron_balance.ir.arrays import Ints, as_array, as_rows, sums
from megatron_balance.ir.batch import Batch
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.columns import Message, Move, Rows
from megatron_balance.ir.forest import Forest, Tree, over
from megatron_balance.ir.mask import CAUSAL, FOREST, Mask, SlidingWindow
from megatron_balance.ir.model import Model
from megatron_balance.ir.plan import REMAP, AnyPlanZone, MicrobatchPlan, Routing, Zone
from megatron_balance.ir.program import Kind
from megatron_balance.ir.step import EMPTY, Carry, Layers, Lengths, StepPlan, When, by_number, dealt, held_back
from megatron_balance.patterns import ONCE_PER_NODE, pattern_of
from megatron_balance.patterns.base import Context
from megatron_balance.patterns.head_ring import HeadRing
from megatron_balance.patterns.once_per_node import ON
from megatron_balance.planners.base import JointStages, Planner, StepContext, renumbered
from megatron_balance.planning.ticks import PlanOwned, plan_ticks, ticks
from megatron_balance.solvers import remap
from megatron_balance.solvers.packing import join_late, nano_batches

log = logging.getLogger(__name__)

# Of one microbatch: which of its sequences are in each nano-batch, ascending. One: it runs whole.
NanoBatches: TypeAlias = tuple[tuple[int, ...], ...]


def place_step(
    planner: Planner, lengths: Lengths, context: StepContext, carry: Carry, most_tokens: float
) -> tuple[StepPlan, Carry]:
    """`plan_step` of a planner that places one microbatch at a time.

    It carries nothing itself. Sequences that wait join the microbatches as dealt, of at most
    `most_tokens`: the longest first, each in the one with the fewest tokens. What finds no room waits
    on; training draws less then.

    Raises:
        InfeasibleError: also for one that waits and no microbatch can hold, or no step follows for.
    """
    if not carry.waiting:
        return _place(planner, lengths, context), EMPTY
    longest = max(length for _, length in carry.waiting)
    if longest > most_tokens:
        raise InfeasibleError(
            f"a sequence of {longest} tokens was held back, and a microbatch has at most {most_tokens:.0f}; raise "
            "tokens_per_rank, or use more ranks"
        )
    joined, _ = join_late(lengths, sorted(carry.waiting, key=lambda each: (-each[1], each[0])), most_tokens)
    numbers = [number for number, _ in chain.from_iterable(joined)]
    trees = by_number(lengths, context.trees, carry)
    context = replace(context, trees=tuple(map(trees.__getitem__, numbers)) if trees else ())
    inner = _place(planner, tuple(tuple(length for _, length in microbatch) for microbatch in joined), context)
    step = renumbered(inner, numbers)
    waiting = held_back(step, lengths, carry.waiting)
    if waiting and not context.may_carry:
        raise InfeasibleError(
            f"{len(waiting)} sequences that were held back do not fit {len(lengths)} microbatches of "
            f"{most_tokens:.0f} tokens, and no step follows that takes them; raise tokens_per_rank"
        )
    return step, Carry(waiting=waiting)


def nano_batches_of(
    microbatches: Sequence[Sequence[int]], *, ping_pong: bool, aligned: bool = False
) -> list[NanoBatches]:
    """The nano-batches of each microbatch; one sequence alone makes no second half. `aligned`: as many
    of all, since their sequences meet in one attention call.
    """
    halved = [ping_pong and len(lengths) >= NUM_NANO_BATCHES for lengths in microbatches]
    if aligned:
        halved = [any(halved)] * len(halved)
    return [
        nano_batches(lengths) if both else (tuple(range(len(lengths))),)
        for lengths, both in zip(microbatches, halved, strict=True)
    ]


def _place(planner: Planner, lengths: Lengths, context: StepContext) -> StepPlan:
    members = dealt(lengths)
    if planner.plan_batch is not None and context.own_microbatches:
        pooled = tuple(chain.from_iterable(lengths))
        own = planner.plan_batch(Batch(pooled), context.cluster, context.model, context.cost, context.options)
        if not context.ping_pong:
            context = _of_microbatches(context, len(own.plans))
            plans = tuple(_layered(plan, context) for plan in own.plans)
            return _with_ticks(planner, replace(own, plans=plans), context)
        members = tuple(nano_batch for (nano_batch,) in own.members)
        lengths = tuple(tuple(map(pooled.__getitem__, seqs)) for seqs in members)
    context = _of_microbatches(context, len(members))
    split, split_lengths = (tuple((whole,) for whole in each) for each in (members, lengths))
    if context.ping_pong:
        parts = nano_batches_of(lengths, ping_pong=True, aligned=context.joint is not None)
        split, split_lengths = (_parted(each, parts) for each in (members, lengths))
    trees = context.trees if FOREST in planner.masks else ()
    each = zip(*map(chain.from_iterable, (split_lengths, split)), strict=True)
    batches = (Batch(of, tuple(map(trees.__getitem__, seqs)) if trees else ()) for of, seqs in each)
    plans = tuple(_place_one(planner, batch, context) for batch in batches)
    return _with_ticks(planner, StepPlan(split, plans), context)


def _parted(microbatches: Lengths, parts: Sequence[NanoBatches]) -> tuple[Lengths, ...]:
    """Parts of each microbatch, one value a sequence, by nano-batch."""
    return tuple(
        tuple(tuple(map(each.__getitem__, part)) for part in of) for each, of in zip(microbatches, parts, strict=True)
    )


def _of_microbatches(context: StepContext, number: int) -> StepContext:
    return context if context.memory is None else replace(context, memory=context.memory.of_microbatches(number))


def _place_one(planner: Planner, batch: Batch, context: StepContext) -> MicrobatchPlan:
    """The plan of one microbatch or nano-batch, layers included."""
    if planner.plan_by_others is not None:
        return planner.plan_by_others(batch, replace(context, trees=batch.trees))
    assert planner.plan is not None
    if planner.plan_in is not None:
        plan = planner.plan_in(batch, context)
    else:
        plan = planner.plan(batch, context.cluster, context.model, context.cost, context.options)
    if plan.lengths != batch.lengths:
        raise InvalidProgramError(
            f"planner {plan.planner} was given {batch.num_tokens} tokens in {len(batch.lengths)} sequences, and its "
            f"plan has {plan.num_tokens} in {len(plan.lengths)}; expected the same sequences"
        )
    return _layered(plan, context)


def _layered(plan: MicrobatchPlan, context: StepContext) -> MicrobatchPlan:
    cluster, cost, layers = context.cluster, context.cost, context.layers
    plan = _under(plan, context.model)
    made = with_layers(plan, cluster, cost, layers)
    machine = Machine(cluster, context.model, cost, memory=context.memory, by_heads=context.by_heads)
    if made.moves and layers.remap_when == "pays" and _num_rounds(plan) <= _MOST_ROUNDS:
        stays = with_layers(plan, cluster, cost, replace(layers, remap=False))
        made = (made, stays)[best_first([estimate(each, machine) for each in (made, stays)])[0]]
    _check_states(made, machine, refuses=context.refuses_by_price)
    return made


# Seconds of a recurrent layer's states below which nobody minds them.
_STATES_S = 1e-3
_WARNED: set[str] = set()  # planners whose plans have longer ones, and training goes on


def _check_states(plan: MicrobatchPlan, machine: Machine, *, refuses: bool) -> None:
    """Refuse a plan, or warn of it, whose pieces are so many that handing states on takes longer than
    sending all tokens by heads, as others do. Raises InfeasibleError: says both.
    """
    own = machine.model.recurrent
    if own is None or machine.by_heads:
        return
    states = states_cost(plan, machine)
    assert states is not None
    states_s, ranks = float(states.seconds[0].max()), machine.num_ranks
    by_heads = by_heads_s(own, machine, plan.num_tokens / ranks, ranks)
    if states_s > by_heads + _STATES_S:
        said = (
            f"planner {plan.planner} cuts documents into {len(Pieces.of(plan).held):,} pieces, whose states take "
            f"{1e3 * states_s:.1f} ms in each of {own.layers} recurrent layers, forward; all tokens by heads would "
            f"take {1e3 * by_heads:.1f} ms. Use a planner that cuts few documents, such as distca, zeppelin or auto"
        )
        if refuses:
            raise InfeasibleError(said)
        if plan.planner not in _WARNED:
            _WARNED.add(plan.planner)
            log.warning("%s", said)


# Rounds of a plan's rings, one after the other, up to which it is estimated with a remap and without,
# some milliseconds; of more the linear part alone says whether a remap pays.
_MOST_ROUNDS = 256


def _num_rounds(plan: MicrobatchPlan) -> int:
    return sum(pattern_of(each).num_exchanges(each) for each in plan.zones if isinstance(pattern_of(each), HeadRing))


def of_trees(step: StepPlan, trees: Mapping[int, Tree], mask: Mask) -> StepPlan:
    """The step with the plans of sequences that are trees, by number, in layers that have `mask`;
    those of planners that know no trees are as `compile.halo` makes them.
    """
    plans: list[MicrobatchPlan] = []
    for seqs, plan in zip(chain.from_iterable(step.members), step.plans, strict=True):
        masked = over(mask, [trees[seq] for seq in seqs])
        placed = plan if plan.mask == masked or isinstance(plan.mask, Forest) else replace(plan, mask=CAUSAL)
        plans.append(under(placed, masked))
    return replace(step, plans=tuple(plans))


def _under(plan: MicrobatchPlan, model: Model) -> MicrobatchPlan:
    if isinstance(plan.mask, Forest):
        return under(plan, model.mask)
    if not isinstance(model.mask, SlidingWindow):
        return plan
    return under(replace(plan, mask=CAUSAL), model.mask)


def _with_ticks(planner: Planner, step: StepPlan, context: StepContext) -> StepPlan:
    if context.joint is None:
        return step
    num_stages = context.joint.cluster.num_ranks // context.cluster.num_ranks
    order = ticks(num_stages, len(step.members), context.joint.num_chunks, forward_only=context.forward_only)
    by_nano_batch, plan_owned = zip(*step.microbatches, strict=True), _joint_planner(planner, context, context.joint)
    return replace(step, ticks=tuple(plan_ticks(order, plans, plan_owned) for plans in by_nano_batch))


def _joint_planner(planner: Planner, context: StepContext, joint: JointStages) -> PlanOwned:
    """Plan the attention of a tick; no remap, since every rank keeps its own stage's tokens."""
    plan_owned = planner.plan_owned
    if plan_owned is None:
        raise ConfigError("this planner plans the attention of each pipeline stage for itself")
    layers, cost = replace(context.layers, remap=False), on_cluster(context.cost, joint.cluster)

    def plan(lengths: tuple[int, ...], owned: Rows) -> MicrobatchPlan:
        owned_plan = plan_owned(lengths, owned, joint.cluster, context.model, cost, context.options)
        return with_layers(_under(owned_plan, context.model), joint.cluster, cost, layers)

    return plan


# The two layers around any planner's decision: remapping and routing (Zeppelin, sections 3.4 and
# 3.3).
#
# `with_layers` adds to a plan where tokens live outside attention (`moves`) and which transfers
# between nodes go over all NICs (`routing`). Eq. (1) holds the direct transfer of n bytes against its
# three legs, n b_intra (x1 - 1) / x1 + n b_inter max(1 / x1, 1 / x2) + n b_intra (x2 - 1) / x2; each
# leg has its own latency, so short transfers go directly (`Routing.min_tokens`). Eq. (1) takes the
# other NICs to be idle, which holds for a ring; elsewhere, and for a remap, the load of each NIC
# decides.

# Tokens of a rank by which a head exchange is judged.
_EVEN = 1 << 16


def with_layers(plan: MicrobatchPlan, cluster: Cluster, cost: MachineCost, layers: Layers) -> MicrobatchPlan:
    """The planner's plan with its remap and its routing."""
    if layers.remap and plan.lengths:
        held = tokens_per_rank(plan)
        if layers.remap_when == "always" or _remap_saves_s(held, cluster, cost) > 0:
            plan = replace(plan, moves=_moves(held, cluster, cost, layers))
    if layers.once_per_node and cluster.num_nodes > 1 and cluster.node_size > 1:
        context = Context.of(plan)
        zones = tuple(_once_per_node(zone, context, cluster, cost) for zone in plan.zones)
        # The same one is estimated once.
        plan = plan if zones == plan.zones else replace(plan, zones=zones)
    routing = _routing(plan, cluster, cost, layers.routing)
    routing = None if routing is None else replace(routing, pieces=layers.pieces)
    return plan if routing == plan.routing else replace(plan, routing=routing)


def _once_per_node(zone: AnyPlanZone, context: Context, cluster: Cluster, cost: MachineCost) -> AnyPlanZone:
    """The zone, or one that sends rows once to a node, if that pays at the busiest NIC."""
    if zone.pattern not in ONCE_PER_NODE or not pattern_of(zone).crosses_nodes(zone, context):
        return zone
    row_bytes = cost.query_bytes(1), cost.kv_bytes(1)
    if isinstance(zone, Zone):
        heads, nodes = (context.num_heads, context.num_kv_heads), (context.num_ranks, context.ranks_per_node)
        num_tokens = int(context.lengths[list(zone.seqs)].sum())
        rates = _rates(zone.pattern, zone.ranks, heads, nodes, cluster.ranks_per_nic, row_bytes)
        before, after, passed_on = (num_tokens * rate for rate in rates)
    else:
        before, after, passed_on = _loads_once(zone, context, cluster.ranks_per_nic, row_bytes)
    if not passed_on:
        return zone
    on_s = cost.call_s + cost.intra_node_s(passed_on)
    pays = cost.inter_node_s(before) > cost.inter_node_s(after) + on_s
    return replace(zone, pattern=ONCE_PER_NODE[zone.pattern]) if pays else zone


def _loads_once(
    zone: AnyPlanZone, context: Context, ranks_per_nic: int, row_bytes: tuple[float, float]
) -> tuple[float, float, float]:
    """Bytes of an exchange over the busiest NIC, direct and once per node; passed on by a rank."""
    once = replace(zone, pattern=ONCE_PER_NODE[zone.pattern])
    nics, ranks = NicOf(context.num_ranks, context.ranks_per_node, ranks_per_nic), np.arange(context.num_ranks)
    before, after = (
        max((float(nics.sums(ranks, load).max()) for load in _zone_loads(each, context, row_bytes)), default=0.0)
        for each in (zone, once)
    )
    rows = pattern_of(once).sends(once, context).messages()
    rows = rows[rows[:, Message.EXCHANGE] == ON]
    passed_on = sums(rows[:, Message.SRC], _num_bytes(rows, context, row_bytes), context.num_ranks)
    return before, after, float(passed_on.max())


@lru_cache(maxsize=256)
def _rates(
    pattern: str,
    ranks: tuple[int, ...],
    heads: tuple[int, int],
    nodes: tuple[int, int],
    ranks_per_nic: int,
    row_bytes: tuple[float, float],
) -> tuple[float, ...]:
    """As `_loads_once`, for each token of a head exchange, in which tokens lie evenly on the ranks."""
    num_tokens = _EVEN * len(ranks)
    context = Context(np.array([num_tokens]), *heads, *nodes)
    loads = _loads_once(Zone("", pattern, ranks, (0,)), context, ranks_per_nic, row_bytes)
    return tuple(load / num_tokens for load in loads)


def _moves(held: Ints, cluster: Cluster, cost: CostModel, layers: Layers) -> Rows:
    num_bytes, nics = token_bytes(cost), 1 / cluster.ranks_per_nic
    token_s = {"intra_s": cost.intra_node_s(num_bytes, 0), "inter_s": cost.inter_node_s(num_bytes, 0, nics)}
    return as_rows(remap.solve(held, cluster.node_size, **token_s, align=layers.align, solver=layers.solver))


def _remap_saves_s(tokens: Sequence[float] | Ints, cluster: Cluster, cost: CostModel) -> float:
    """Seconds of a layer's forward that evening out `tokens` a rank saves, net."""
    largest, mean = float(max(tokens)), sum(tokens) / len(tokens)
    return cost.linear_s(largest) - cost.linear_s(mean) - remap_s(tokens, cluster, cost)


def _routing(plan: MicrobatchPlan, cluster: Cluster, cost: CostModel, when: When) -> Routing | None:
    num_nics = ceil(cluster.node_size / cluster.ranks_per_nic)
    if when == "never" or num_nics == 1 or cluster.num_nodes == 1:
        return None
    context = Context.of(plan)
    zones = [index for index, zone in enumerate(plan.zones) if pattern_of(zone).crosses_nodes(zone, context)]
    zones += [REMAP] if plan.moves and (zones or _moves_across(plan, cluster).size) else []
    min_tokens = 1
    if when == "pays":
        kv_tokens = _fewest_routed_tokens(cost, num_nics)
        if kv_tokens is None:
            return None
        min_tokens = kv_tokens
        zones = [index for index in zones if _pays(plan, index, cluster, cost, num_nics)]
    return Routing(cluster.ranks_per_nic, tuple(sorted(zones)), min_tokens) if zones else None


def _fewest_routed_tokens(cost: CostModel, num_nics: int) -> int | None:
    """Tokens of keys from which a lone transfer is faster routed (Eq. 1); None: never."""
    num_bytes = cost.kv_bytes(1)
    extra_s = cost.routed_s(0, 1, num_nics) - cost.inter_node_s(0)
    saved_s = cost.inter_node_s(num_bytes) - cost.routed_s(num_bytes, 1, num_nics) + extra_s
    return max(1, ceil(extra_s / saved_s)) if saved_s > 0 else None


def _moves_across(plan: MicrobatchPlan, cluster: Cluster) -> Ints:
    moves = as_array(plan.moves)
    return moves[moves[:, Move.SRC] // cluster.node_size != moves[:, Move.DST] // cluster.node_size]


def _pays(plan: MicrobatchPlan, index: int, cluster: Cluster, cost: CostModel, num_nics: int) -> bool:
    if index == REMAP:
        if not _moves_across(plan, cluster).size:
            # An owner makes the first hop of a ring, which `_fewest_routed_tokens` prices.
            return True
        loads = _remap_loads(plan, cluster, cost)
    else:
        zone = plan.zones[index]
        routing = pattern_of(zone).routing
        if routing != "by_load":
            return routing == "pays"
        loads = _zone_loads(zone, Context.of(plan), (cost.query_bytes(1), cost.kv_bytes(1)))
    return any(_spread_pays(load, cluster, cost, num_nics) for load in loads)


def _remap_loads(plan: MicrobatchPlan, cluster: Cluster, cost: CostModel) -> list[Ints]:
    """Bytes that each rank sends to other nodes, and that it receives from them [R]."""
    moves = _moves_across(plan, cluster)
    num_bytes = np.rint(moves[:, Move.TOKENS] * token_bytes(cost)).astype(np.int64)
    return [np.bincount(moves[:, end], num_bytes, plan.num_ranks).astype(np.int64) for end in (Move.SRC, Move.DST)]


def _zone_loads(zone: AnyPlanZone, context: Context, row_bytes: tuple[float, float]) -> list[Ints]:
    """As `_remap_loads`, of each exchange; `row_bytes`: of a token's query, and key and value."""
    loads: list[Ints] = []
    for messages in pattern_of(zone).messages(zone, context, across=True):
        rows = messages.each_pair()
        rows = rows[context.crosses(rows[:, Message.SRC], rows[:, Message.DST])]
        num_bytes = _num_bytes(rows, context, row_bytes)
        for step in np.unique(rows[:, Message.EXCHANGE]):
            own = rows[:, Message.EXCHANGE] == step
            for ends in (rows[own, Message.SRC], rows[own, Message.DST]):
                loads.append(sums(ends, num_bytes[own], context.num_ranks))
    return loads


def _num_bytes(rows: Ints, context: Context, row_bytes: tuple[float, float]) -> Ints:
    # Of each message, for the share of heads that it carries.
    is_kv = rows[:, Message.KIND] == Kind.KV
    heads = rows[:, Message.HEAD_STOP] - rows[:, Message.HEAD_START]
    share = heads / np.where(is_kv, context.num_kv_heads, context.num_heads)
    return np.rint(np.where(is_kv, row_bytes[1], row_bytes[0]) * share * rows[:, Message.TOKENS]).astype(np.int64)


def _spread_pays(load: Ints, cluster: Cluster, cost: CostModel, num_nics: int) -> bool:
    """Whether the busiest NIC gains more from sharing its bytes than that costs."""
    # [nodes, ranks]; padded so that a last NIC with fewer ranks has a column too.
    by_node = load.reshape(-1, cluster.node_size)
    padded = np.zeros((len(by_node), num_nics * cluster.ranks_per_nic), dtype=np.int64)
    padded[:, : cluster.node_size] = by_node
    nics = padded.reshape(len(by_node), num_nics, -1).sum(axis=2)
    even = nics.mean(axis=1)
    passed_on = by_node.max(axis=1) * (num_nics - 1) / num_nics
    direct_s, even_s = (cost.inter_node_s(float(n.max())) for n in (nics, even))
    return direct_s > even_s + 2 * cost.intra_node_s(float(passed_on.max()))
