"""zeppelin: short sequences local, medium ones in a ring inside a node, long ones in a ring across
nodes.

Paper: Zeppelin: Balancing Variable-length Workloads in Data Parallel Large Model Training (arXiv
2509.21841), section 3.1, Algorithm 1 (inter-node partitioning) and Algorithm 2 (intra-node
partitioning).

What we implement: the hierarchical sequence partitioner. Zones `inter_node`, `intra_node` and
`local`, in that issue order (the three queues of section 3.2); sequences on the same ranks share
one ring; zigzag inside a ring. `rule: paper` is the printed algorithm: thresholds s1 and s0 start
at a node's and a rank's capacity and fall until everything shorter fits. `rule: cost` asks for each
sequence what the paper asks for a threshold: does a wider zone pay. `rule: waves`, the default,
leaves the paper's rings: sequences lie in uneven shares on groups of ranks that exchange heads, and
all of them are attended in one schedule (`planners.zeppelin.waves`, `patterns.waves`).

What we leave out: the routing layer (section 3.3) and the remapping layer (section 3.4), which work
on any plan and are not this planner's business; it only prices what they do (`price`).

Trouble with the printed algorithm, measured on 180 batches (tools/bench/planners.py): with a
capacity equal to the average (no slack) hardly anything fits below a threshold, and every sequence
ends up inter-node, as with te_ring. With slack, nodes are balanced by tokens only and quadratic
work is split inside a node only, so that attention max/mean came to 1.2 (capacity 1.1 times the
average) to 1.9 (2 times; 2.7 in the worst of nine data sets), and worse the more slack there is.

What it leaves open, and what `rule: paper` does: s_avg (the scan does not show over what it sums)
is the batch's tokens over the nodes; where fewer empty nodes are left than ceil(|s| / s_avg), the
least loaded ones follow; a split sequence that does not fit there goes over all nodes (of Algorithm
2: over all ranks of the node), and if that does not fit, all split sequences do. Sequences of
exactly the threshold count as above it, or the loop would not end.

Where we differ and why (`rule: cost`): a target time, found by bisection, replaces the two
thresholds, because a threshold on length cannot see that a rank with little to hold may have much
to compute. The price of a placement is the longest time of a rank in its zones, each the longer of
its attention and its transfers. With `remapped`, attention's balance needs no balance of tokens,
and the price counts what the remap moves instead: little is better, but even is not required.
Without, it counts the longest linear time (`weight_tokens`). Where moving takes more than half of
what even tokens save, the best placement without a remap is looked for as well, and the one of the
lower time is taken; whether there is a remap at all is then up to the layer, by the same estimate.
What moves adds a little even where it is hidden (`weight_communication`). With `routed` a ring
between nodes takes what the routing layer needs for it (Eq. 1): all NICs of a node, but the way to
the proxies and back too; without, one NIC.

Capacity: a rank of a ring over G ranks is counted as holding 2 ceil(|s| / 2G) tokens of a sequence,
the most that zigzag gives it, and `rule: cost` keeps the sum within the capacity. Where nothing
else fits, all sequences go over all ranks: that is legal whenever the batch fits the pool, but
near-equal chunks are not equal, and a rank may then hold up to two tokens a sequence more than the
average. `rule: paper` counts ceil(|s| / G) and may pass the capacity by as much.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Literal, NamedTuple

from megatron_balance.analysis.estimate import Bounds, best_first
from megatron_balance.analysis.estimate import estimate as plan_estimate
from megatron_balance.analysis.estimate.times import PricedMachine
from megatron_balance.analysis.statistics import tokens_per_rank
from megatron_balance.analysis.step_memory import StepMemory
from megatron_balance.cost.base import CostModel, MachineCost
from megatron_balance.cost.parallel import wide_ranks
from megatron_balance.cost.wide import WideCost
from megatron_balance.errors import ConfigError
from megatron_balance.ir.batch import Batch
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.model import Model
from megatron_balance.ir.plan import AnyPlanZone, MicrobatchPlan
from megatron_balance.planners.base import StepContext
from megatron_balance.planners.zeppelin import costed, printed, room, waves, wide
from megatron_balance.planners.zeppelin.estimate import WAVES, rings_s
from megatron_balance.planners.zeppelin.price import Prices, Pricing
from megatron_balance.solvers.capacity import check_pool
from megatron_balance.solvers.placed import Placement, zones

_SHOWS = 1.08
"""Layer over even computation from which on rings of groups are made beside waves."""
_SURELY = 1.01
"""By how much waves must be faster than rings of groups by closed forms of their placements, and than
`_SHOWS`, to be taken without estimates of whole plans.
"""
_MOST_NODES = 32
_WORTH_IT = 0.5
"""Share of what even tokens save that a remap may take before the search without one is made too.
"""


@dataclass(frozen=True, slots=True)
class ZeppelinOptions:
    """Options of zeppelin."""

    tokens_per_rank: int | None = None
    """Capacity of a rank in tokens, the paper's L; `slack` decides if not given."""
    rule: Literal["waves", "cost", "groups", "paper"] = "waves"
    """`waves` cuts sequences in uneven shares over groups of ranks that exchange heads, and attends to
    all of them in one schedule; `cost` balances predicted time over rings; `groups` does so over
    rings of groups; `paper` is Algorithms 1 and 2 as printed.
    """
    group_size: int | None = None
    """Ranks of a group; not given: rule `waves` takes the cheapest size, `groups` as many of a node
    as divide the heads.
    """
    num_waves: int | None = None
    """Rule `waves`: parts in which the keys of other groups come; not given: the cheapest number."""
    slack: float = 1.5
    """Without `tokens_per_rank`: capacity of a rank over the batch's mean tokens per rank, at least
    1.
    """
    remapped: bool = True
    """Rule `cost`: a remap makes tokens even outside attention, and what it moves is priced; false:
    tokens stay where they attend.
    """
    weight_tokens: float | None = None
    """Rule `cost`: weight of the longest linear time beside the longest attention time; not given:
    0 if `remapped`, else 1.
    """
    weight_communication: float = 0.05
    """Rule `cost`: what share of the time it counts to move as much as all sequences over all ranks
    would, even if it is hidden.
    """
    routed: bool = True
    """Rule `cost`: price a ring between nodes as using all NICs of a node, as routed transfers do;
    false: one NIC.
    """


def parts_heads(options: ZeppelinOptions) -> bool:
    """Whether these options ask for groups of several ranks, which exchange heads; what is not asked
    for, a model whose latents travel goes without.
    """
    return options.rule == "groups" or (options.rule == "waves" and (options.group_size or 1) > 1)


def plan(batch: Batch, cluster: Cluster, model: Model, cost: MachineCost, options: ZeppelinOptions) -> MicrobatchPlan:
    """Each sequence in the smallest zone that pays for it, in a step of one stage of all layers.

    Raises:
        InfeasibleError: a sequence or the batch is larger than what the ranks hold.
        ConfigError: a slack below 1 or a negative weight.
    """
    return plan_in(batch, StepContext(cluster, model, cost, options=options))


def plan_in(batch: Batch, context: StepContext) -> MicrobatchPlan:
    """As `plan`, in a step of that memory."""
    cluster, model, cost, options = context.cluster, context.model, context.cost, context.options
    _check(options)
    check_pool(batch.lengths, cluster.num_ranks, options.tokens_per_rank)
    capacity = options.tokens_per_rank or ceil(options.slack * batch.num_tokens / cluster.num_ranks)
    size, heads = (cluster.num_ranks, cluster.node_size), (model.num_heads, model.num_kv_heads)
    nothing = MicrobatchPlan("zeppelin", batch.lengths, *size, *heads, (), mask=model.mask)
    if not batch.lengths:
        return nothing
    if options.rule == "waves" and model.latent_travels:
        options = replace(options, group_size=options.group_size or 1)  # a latent is of all heads
    if options.rule == "waves" and model.attention == "causal":
        rings = _Rings(batch.lengths, cluster, model, cost, capacity, options, context.memory, {})
        placed = _in_waves(nothing, rings)
        if placed is not None:
            return _or_rings(placed.plan, placed.chosen, rings)
    return replace(nothing, zones=_zones(batch.lengths, cluster, model, cost, capacity, options))


def _in_waves(nothing: MicrobatchPlan, rings: _Rings) -> room.PlannedInWaves | None:
    """`nothing` with the cheapest shares; None: none keeps to the capacity."""
    lengths, cluster, model, cost, capacity, options, memory, _ = rings

    def search(replays: bool) -> room.PlannedInWaves | None:
        asked = waves.WaveLimits(capacity, options.group_size, options.num_waves, cost.call_s, replays)
        placed = waves.place(lengths, cluster, model, cost, asked, rings.over)
        return None if placed is None else room.PlannedInWaves(replace(nothing, zones=(placed[0],)), placed[1])

    replays, machine = (
        room.replays(sum(lengths), cluster, model, memory),
        PricedMachine.of(cluster, model, cost, memory),
    )
    found = search(replays)
    if found is None or replays or room.surely_keeps(found, machine):
        return found
    return room.with_room(found, lambda: search(True), WAVES if options.num_waves is None else (), machine)


class _Rings(NamedTuple):
    """Rings of groups of a batch. `made`: those so far, by ranks of a group."""

    lengths: Sequence[int]
    cluster: Cluster
    model: Model
    cost: MachineCost
    capacity: int
    options: ZeppelinOptions
    memory: StepMemory | None
    made: dict[int, Placement]

    def over(self, size: int) -> Placement | None:
        """The rings over groups of `size` ranks; None: these do not tile a node and its NICs."""
        if not wide.tiles(self.cluster, size):
            return None
        if size not in self.made:
            priced = self.model, self.cost
            self.made[size] = _on_groups(self.lengths, self.cluster, priced, self.capacity, self.options, size)
        return self.made[size]


def _or_rings(found: MicrobatchPlan, chosen: waves.Chosen, rings: _Rings) -> MicrobatchPlan:
    """`found`, or rings of groups where the estimate of whole plans has these ahead. They are asked
    for where `found` takes `_SHOWS` of even computation or more, over at most `_MOST_NODES`; closed
    forms of the placements say where whole plans need no estimate.
    """
    lengths, cluster, model, cost, capacity, options, memory, _ = rings
    asked = options.group_size is not None or options.num_waves is not None
    size, costs = wide.group_size(cluster, model, None), chosen.costs
    if asked or cluster.num_nodes > _MOST_NODES or cluster.node_size % size:
        return found

    def surely_ahead(seconds: float) -> bool:
        return _SURELY * seconds <= rings_s(rings.made[size], lengths, costs.of_size(size))

    most_s = _SURELY * chosen.estimate.seconds
    whole = costs if costs.size == size else costs.of_size(size)  # the placement's may leave heads idle
    hidden = most_s < _SHOWS * whole.even_s(sum(lengths), sum(whole.works_s(lengths)))
    if hidden or (size in rings.made and surely_ahead(chosen.estimate.seconds)):
        return found
    bounds = Bounds.of(lengths, cluster, model, cost, memory)
    own = plan_estimate(found, bounds.machine)
    placement = None if own is None or own.layer_s < _SHOWS * bounds.even() else rings.over(size)
    if own is None or placement is None or surely_ahead(own.layer_s):
        return found
    apart = replace(found, zones=wide.group_zones(placement, wide_ranks(cluster, size), size))
    other = plan_estimate(apart, bounds.machine)
    if other is None or not best_first([own, other])[0]:
        return found
    return apart if tokens_per_rank(apart).max() <= capacity else found


def _zones(
    lengths: Sequence[int], cluster: Cluster, model: Model, cost: CostModel, capacity: int, options: ZeppelinOptions
) -> tuple[AnyPlanZone, ...]:
    if options.rule == "paper":
        return zones(printed.place(lengths, cluster, capacity), cluster)
    if options.rule in ("cost", "waves"):
        return zones(_cheapest(lengths, cluster, (model, cost), capacity, options), cluster)
    size = wide.group_size(cluster, model, options.group_size)
    placement = _on_groups(lengths, cluster, (model, cost), capacity, options, size)
    return wide.group_zones(placement, wide_ranks(cluster, size), size)


def _on_groups(
    lengths: Sequence[int],
    cluster: Cluster,
    priced: tuple[Model, CostModel],
    capacity: int,
    options: ZeppelinOptions,
    size: int,
) -> Placement:
    """As `_cheapest`, over groups of `size` ranks, each taken as one wide rank."""
    model, cost = priced
    own = model, WideCost(cost, cluster, model, size)
    return _cheapest(lengths, wide_ranks(cluster, size), own, capacity * size, options)


def _cheapest(
    lengths: Sequence[int],
    cluster: Cluster,
    priced: tuple[Model, CostModel],
    capacity: int,
    options: ZeppelinOptions,
) -> Placement:
    """The best placement with a remap or, where that hardly pays, without one."""
    own, (model, cost) = pricing(options), priced
    prices = Prices(lengths, cluster, cost, own, model.mask)
    search = costed.CostedSearch(prices)
    chosen = costed.place(search, capacity, own)
    if not options.remapped or options.weight_tokens is not None:
        return chosen.placement
    even_s = cost.linear_s(sum(lengths) / cluster.num_ranks)
    expected = chosen.prediction
    if expected.remap_s <= _WORTH_IT * (cost.linear_s(max(expected.tokens)) - even_s):
        return chosen.placement

    def time_s(placed: costed.Placed) -> float:
        """Seconds of a layer, forward: tokens are evened out where that pays."""
        predicted = placed.prediction
        return predicted.attention_s + min(predicted.remap_s + even_s, cost.linear_s(max(predicted.tokens)))

    plain = costed.place(search, capacity, pricing(replace(options, remapped=False)))
    return min((chosen, plain), key=time_s).placement


def pricing(options: ZeppelinOptions) -> Pricing:
    """The options that weigh prices."""
    weight_tokens = options.weight_tokens if options.weight_tokens is not None else float(not options.remapped)
    return Pricing(weight_tokens, options.weight_communication, options.routed, options.remapped)


def _check(options: ZeppelinOptions) -> None:
    if options.slack < 1:
        raise ConfigError(
            f"zeppelin: slack {options.slack}: a capacity below the average holds no batch; use at least 1"
        )
    for name in ("group_size", "num_waves"):
        wanted = getattr(options, name)
        if wanted is not None and wanted < 1:
            raise ConfigError(f"zeppelin: {name} {wanted}: must be at least 1")
    for name in ("weight_tokens", "weight_communication"):
        if (getattr(options, name) or 0) < 0:
            raise ConfigError(f"zeppelin: {name} {getattr(options, name)}: must be at least 0")
