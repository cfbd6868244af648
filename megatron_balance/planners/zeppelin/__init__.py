"""zeppelin: short sequences local, medium ones inside a node, long ones across nodes.

Paper: Zeppelin: Balancing Variable-length Workloads in Data Parallel Large Model Training (arXiv
2509.21841), section 3.1, Algorithms 1 and 2. What we implement: the partitioner as printed (`rule:
paper`): zones `inter_node`, `intra_node` and `local`, in that issue order, each a zigzag
ring. The two other rules are not in the paper:

- `rule: waves`, the default: sequences lie in uneven shares on groups of ranks (`shares`) and are all
  attended in one schedule (`patterns.waves`). A group exchanges heads, so it attends like one wide
  rank. Narrower groups than a node are tried where keys hide, wider ones where they do not (`price`).
- `rule: groups`: rings of such groups (`patterns.head_ring`). Longest first, each sequence is shared
  evenly by the fewest neighbouring groups that stay below a target time with it, or none is cut; the
  cheapest of a few targets. `group_size: 1` makes the paper's zones.

Trees are dealt by their tokens and pairs (`trees`), under the default rule: to ranks that are brought
the keys on the paths of theirs, or to groups in waves; whichever the estimate has ahead. Other
rules place them by length.

Under a window the default gives each rank one run of tokens: work is then as even as tokens, and
the fewest keys lie on another rank than their queries (`compile.halo`).

What we leave out: routing (3.3) and remapping (3.4), which work on any plan. Trouble with the
printed algorithm, measured: without slack hardly anything fits below a threshold and every sequence
ends up inter-node; with slack, quadratic work is split inside a node only (attention max/mean 1.2
to 1.9).

What it leaves open, and what `rule: paper` does: s_avg is the batch's tokens over the nodes; where
fewer empty nodes are left than ceil(|s| / s_avg), the least loaded ones follow; a split sequence
that does not fit there goes over all nodes (of Algorithm 2: all ranks of the node), and if that
does not fit, all do.

Capacity: a plan may pass it by what `groups.with_rounding` allows.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from heapq import heapify, heapreplace
from itertools import chain
from math import ceil, inf
from typing import Literal, NamedTuple

import numpy as np

from megatron_balance.analysis.backward import Decision, Loads, MicrobatchBytes
from megatron_balance.analysis.estimate import best_first
from megatron_balance.analysis.estimate import estimate as plan_estimate
from megatron_balance.analysis.machine import Machine
from megatron_balance.analysis.statistics import tokens_per_rank
from megatron_balance.analysis.step_memory import StepMemory
from megatron_balance.compile.halo import under
from megatron_balance.cost.base import MachineCost
from megatron_balance.cost.parallel import wide_ranks
from megatron_balance.errors import ConfigError
from megatron_balance.ir.arrays import Ints, as_rows, union
from megatron_balance.ir.batch import Batch
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.columns import Placed
from megatron_balance.ir.forest import Forest, over
from megatron_balance.ir.mask import CAUSAL, SlidingWindow
from megatron_balance.ir.model import Model
from megatron_balance.ir.plan import AnyPlanZone, MicrobatchPlan, SharedZone, Zone
from megatron_balance.patterns import ONCE_PER_NODE
from megatron_balance.planners.base import Count, Slack, StepContext
from megatron_balance.planners.zeppelin import shares, trees
from megatron_balance.planners.zeppelin.price import WAVES, GroupCosts, PlacementPrice, cheapest, rings_s, with_lead
from megatron_balance.planners.zeppelin.shares import Shares, Trimmed
from megatron_balance.solvers import groups
from megatron_balance.solvers.groups import INTER_NODE, INTRA_NODE, LOCAL, Placement
from megatron_balance.solvers.packing import longest_first

# Targets of rings of groups, over the mean seconds of a group; rings over all groups are tried, too.
_TARGETS = (1.02, 1.06, 1.1, 1.15, 1.2, 1.3, 1.6)
# Price over the cheapest up to which the next rings are estimated, too; of more than `_MANY`
# groups none.
_CLOSE = 1.05
# Layer over even computation from which on rings of groups are asked for beside waves.
_SHOWS = 1.08
# By how much waves must be ahead of rings by closed forms, and of `_SHOWS`, to need no whole
# estimates; the second where backwards pay for pieces of queries, which closed forms know less well.
_SURELY, _SURELY_OF_PIECES = 1.01, 1.05
# Groups from which on no placement begins as rings have it, and fewer starts and targets of rings are
# tried.
_MANY = 32
# Of more than `_MANY`, rings are asked for where the longest sequence is the work of so many groups:
# of fewer hardly one is cut, and a ring of more passes keys on in too many rounds. And where there
# are so few sequences to a group: many short ones even out any shares, and take long to place again.
_FILLED_OF_MANY = 2.0, 6.0
_FEW_OF_MANY = 16
# Sequences up to which groups of whole ones are swapped; of more the longest first are even enough.
_WHOLE = 64
# Smaller shares of a sequence are left out; the second where cuts are to be fewer.
_LEAST_SHARE = 0.03
_LEAST_OF_FEW = 0.1


class _Starts(NamedTuple):
    """Ways to begin: always tried, and, after rings, where more than `showing` of a layer is over what
    is even and hidden.
    """

    always: tuple[float | None, ...]
    fewer_cuts: tuple[float, ...]
    showing: float


_STARTS = _Starts((0.0, None), (0.15, 0.3, 0.5, 0.8), 0.03)
_OF_MANY = _Starts((0.0,), (0.3, 0.8), 0.09)
# Of many groups no other way to begin is tried where the first is this far above what is to be beaten
# (of 51 searches among so many narrower groups, on 64 to 512 ranks, none came below at all).
_HOPELESS = 1.1
# Share of a layer's seconds up to which that is not so; then narrower groups may pay.
_HIDDEN = 0.03
# Narrower groups are tried where one of them holds this much of the longest sequence.
_FITTING = 0.5
# Share from which on wider groups may.
_EXPOSED = 0.1
# By how much another size must be cheaper to go on in its direction.
_BETTER = 0.995
# Waves in which trees are tried at most: a group is sent little, what it sees alone.
_MOST_OF_TREES = 2


@dataclass(frozen=True, slots=True)
class ZeppelinOptions:
    tokens_per_rank: Count | None = None
    """Capacity of a rank in tokens, the paper's L; `slack` decides if not given."""
    rule: Literal["waves", "groups", "paper"] = "waves"
    """`waves`: uneven shares over groups that exchange heads, in one schedule; `groups`: rings of
    such groups; `paper`: Algorithms 1 and 2 as printed."""
    group_size: Count | None = None
    """Ranks of a group; None: rule `waves` takes the cheapest size, `groups` as many of a node as
    divide the heads."""
    num_waves: Count | None = None
    """Rule `waves`: parts in which the keys of other groups come; not given: the cheapest number."""
    slack: Slack = 1.5
    """Without `tokens_per_rank`: capacity over the batch's mean tokens per rank, at least 1."""


def parts_heads(options: ZeppelinOptions) -> bool:
    """Whether these options ask for groups of several ranks, which exchange heads."""
    return options.rule == "groups" or (options.rule == "waves" and (options.group_size or 1) > 1)


def plan(batch: Batch, cluster: Cluster, model: Model, cost: MachineCost, options: ZeppelinOptions) -> MicrobatchPlan:
    """Each sequence in the smallest zone that pays for it, in a step of one stage of all layers."""
    return plan_in(batch, StepContext(cluster, model, cost, options=options))


def plan_in(batch: Batch, context: StepContext) -> MicrobatchPlan:
    """As `plan`, in a step of that memory."""
    lengths, cluster, model, options = batch.lengths, context.cluster, context.model, context.options
    capacity = groups.capacity_of(options, batch.num_tokens, cluster.num_ranks)
    _check(options, cluster)
    groups.check_pool(lengths, cluster.num_ranks, options.tokens_per_rank)
    if options.rule == "waves" and model.latent_travels:
        # A latent is of all heads.
        options = replace(options, group_size=options.group_size or 1)
    if isinstance(model.mask, SlidingWindow) and max(lengths, default=0) <= model.mask.size:
        # The window hides nothing.
        model = replace(model, attention="causal")
    mask = over(model.mask, batch.trees)
    context = replace(context, model=model, options=options)
    search = Search(lengths, context, groups.with_rounding(capacity, len(lengths)))
    if not lengths:
        return search.plan(())
    if isinstance(mask, Forest) and options.rule == "waves":
        return search.of_trees(mask)
    if options.rule == "paper":
        return search.plan(groups.zones(paper_placement(lengths, cluster, capacity), cluster))
    if isinstance(model.mask, SlidingWindow):
        return search.plan((shares.one_run_each(lengths, cluster),))
    return search.in_rings() if options.rule == "groups" else search.in_waves()


def _check(options: ZeppelinOptions, cluster: Cluster) -> None:
    sizes = _ring_sizes(cluster) if options.rule == "groups" else _group_sizes(cluster)
    if options.group_size not in (None, *sizes):
        raise ConfigError(
            f"zeppelin: group_size {options.group_size} does not tile {cluster.num_ranks} ranks in nodes of "
            f"{cluster.node_size}; use one of {', '.join(map(str, sizes))}"
        )


def _ring_sizes(cluster: Cluster) -> list[int]:
    """Sizes of groups that tile a node and share NICs evenly, ascending."""
    node, shared = cluster.node_size, cluster.ranks_per_nic
    return [size for size in range(1, node + 1) if node % size == 0 and (size % shared == 0 or shared % size == 0)]


def _group_sizes(cluster: Cluster) -> list[int]:
    """Sizes of groups that tile the cluster: those of rings, a node, and nodes in powers of two."""
    sizes = _ring_sizes(cluster)
    if sizes[-1] < cluster.node_size:
        sizes.append(cluster.node_size)
    while 2 * sizes[-1] <= cluster.num_ranks:
        sizes.append(2 * sizes[-1])
    return [size for size in sizes if cluster.num_ranks % size == 0]


class _Chosen(NamedTuple):
    """A placement over groups and its price; `of[seq]`: the share of each group."""

    of: list[dict[int, float]]
    price: PlacementPrice
    costs: GroupCosts


class _InWaves(NamedTuple):
    plan: MicrobatchPlan
    chosen: _Chosen


@dataclass(frozen=True, slots=True)
class Search:
    """The search for the plan of one microbatch. `capacity`: of a rank, rounding included; `known`:
    the groups of rings, by their size and whether layers replay.
    """

    lengths: tuple[int, ...]
    context: StepContext
    capacity: int
    known: dict[tuple[int, bool], Sequence[Placement]] = field(
        default_factory=dict[tuple[int, bool], Sequence[Placement]]
    )

    def plan(self, zones: tuple[AnyPlanZone, ...]) -> MicrobatchPlan:
        return groups.plan_of("zeppelin", self.lengths, (self.context.cluster, self.context.model), zones)

    @property
    def machine(self) -> Machine:
        return Machine(self.context.cluster, self.context.model, self.context.cost, memory=self.context.memory)

    def _costs(self, size: int, *, replays: bool = False) -> GroupCosts:
        return GroupCosts(self.context.cost, self.context.cluster, self.context.model, size, replays)

    def _fits(self, plan: MicrobatchPlan) -> bool:
        return bool(tokens_per_rank(plan).max() <= self.capacity)

    # Rings of groups

    def in_rings(self) -> MicrobatchPlan:
        """The best plan of rings of groups: of the cheapest ones by estimate."""
        wanted = self.context.options.group_size
        costs = self._costs(wanted if wanted in _ring_sizes(self.context.cluster) else self._ring_size())
        plans = [self._rings(placement, costs.size) for placement in self._aligned(costs)]
        return self._best_of(plans) or self._rings(_on_all_groups(self.lengths, costs), costs.size)

    def _best_of(self, plans: Sequence[MicrobatchPlan]) -> MicrobatchPlan | None:
        """The first, in order of their estimates, that keeps to the capacity."""
        order = [0]
        if len(plans) > 1:
            order = best_first([plan_estimate(each, self.machine) for each in plans])
        return next((plans[at] for at in order if self._fits(plans[at])), None)

    def _ring_size(self) -> int:
        cluster, heads = self.context.cluster, self.context.model.num_heads
        return max(size for size in _ring_sizes(cluster) if heads % size == 0)

    def _aligned(self, costs: GroupCosts) -> Sequence[Placement]:
        """The groups that share each sequence evenly: the cheapest, and the next where it is close."""
        key = costs.size, costs.replays
        if key in self.known:
            return self.known[key]
        seconds = costs.layers_s(self.lengths)
        mean_s, capacity = sum(seconds) / costs.num_groups, self.capacity * costs.size
        targets, close = (_TARGETS, _CLOSE) if costs.num_groups <= _MANY else (_TARGETS[1::2], 1.0)
        found = [_on_all_groups(self.lengths, costs)]
        found += [shares.aligned(seconds, self.lengths, costs.num_groups, part * mean_s, capacity) for part in targets]
        if len(seconds) <= _WHOLE and costs.num_groups <= _MANY:
            placement = shares.whole(seconds, costs.num_groups)
            held = np.bincount(np.array(placement)[:, 0], self.lengths)
            found += [placement] if held.max() <= capacity else []
        found = [placement for at, placement in enumerate(found) if placement not in found[:at]]
        priced = sorted((rings_s(placement, self.lengths, costs), at) for at, placement in enumerate(found))
        self.known[key] = found = [found[at] for s, at in priced[:2] if s <= close * priced[0][0]]
        return found

    def _rings(self, placement: Placement, size: int) -> MicrobatchPlan:
        names = {LOCAL: INTRA_NODE if size > 1 else LOCAL}
        rings: list[Zone] = []
        # Zones over groups as wide ranks; each stands for `size` ranks in a row.
        for zone in groups.zones(placement, wide_ranks(self.context.cluster, size)):
            ranks = tuple(rank for group in zone.ranks for rank in range(group * size, (group + 1) * size))
            rings.append(Zone(names.get(zone.name, zone.name), "head_ring", ranks, zone.seqs, size))
        return self.plan(tuple(rings))

    def _or_rings(self, plan: MicrobatchPlan, found: _Chosen) -> MicrobatchPlan:
        """`plan`, or rings of groups where the estimate of whole plans has these ahead."""
        options, lengths = self.context.options, self.lengths
        if options.group_size is not None or options.num_waves is not None:
            return plan
        # The placement's may leave heads idle.
        costs = found.costs.of_size(self._ring_size())
        works_s = costs.works_s(lengths)
        even_s = costs.even_s(sum(lengths), sum(works_s))
        # What pieces cost recurrent layers is left to whole estimates; rings have fewer.
        surely = inf if costs.states_s else _SURELY_OF_PIECES if costs.piece_s else _SURELY
        if costs.num_groups > _MANY and not costs.states_s:
            least, most = _FILLED_OF_MANY
            filled = max(works_s) * costs.num_groups / sum(works_s)
            if len(lengths) > _FEW_OF_MANY * costs.num_groups or not least <= filled <= most:
                return plan
            # A whole estimate takes longer than all else.
            surely = 1.0
        if surely * found.price.seconds < _SHOWS * even_s:
            return plan
        known = self._aligned(costs)
        if surely * found.price.seconds <= rings_s(known[0], lengths, costs):
            return plan
        return self._best_of([plan, *(self._rings(placement, costs.size) for placement in known)]) or plan

    # Waves

    def in_waves(self) -> MicrobatchPlan:
        """The best plan in waves; or rings, where these are ahead or no waves keep to the capacity."""
        found = self.placed(replays=self.most_would_replay())
        if found is None:
            return self.in_rings()
        if not found.chosen.costs.replays and not _surely_keeps(found, self.machine):
            found = self.with_room(found)
        return self._or_rings(*found)

    def placed(self, *, replays: bool) -> _InWaves | None:
        """The cheapest placement and its plan; None: none keeps to the capacity."""
        cluster, wanted = self.context.cluster, self.context.options.group_size
        sizes = _group_sizes(cluster) if wanted is None else [wanted]
        costs = self._costs(sizes[0], replays=replays)
        if cluster.num_nodes > 1:
            return self._placed(costs, sizes)
        # Inside a node a dear size may lie between cheap ones; sizes are few, and told by whole plans.
        found = [each for size in sizes if (each := self._placed(costs, [size])) is not None]
        if len(found) < 2:
            return found[0] if found else None
        return found[best_first([plan_estimate(each.plan, self.machine) for each in found])[0]]

    def _placed(self, costs: GroupCosts, sizes: Sequence[int]) -> _InWaves | None:
        found = self._choose(costs, sizes)
        if found is None:
            return None
        of, price, costs = found
        # Runs of two parts may be a token longer.
        for lead in dict.fromkeys((price.lead, 0)):
            zone = shares.shared_zone(of, self.lengths, self.context.cluster, costs.size, (price.num_waves, lead))
            if self._fits(plan := self.plan((zone,))):
                return _InWaves(plan, found)
        return None

    def _choose(self, costs: GroupCosts, sizes: Sequence[int]) -> _Chosen | None:
        """The cheapest placement within the capacity, over groups of the cheapest of these sizes."""
        lengths, cluster = self.lengths, self.context.cluster
        at = max((at for at, size in enumerate(sizes) if size <= cluster.node_size), default=0)
        costs = costs.of_size(sizes[at])
        found = self._cheapest(costs)
        step = _direction(found.price) if found else 0
        while found and step and 0 <= at + step < len(sizes):
            at += step
            if step < 0 and max(lengths) * _FITTING * cluster.num_ranks > sum(lengths) * sizes[at]:
                break
            costs, below_s = costs.of_size(sizes[at]), _BETTER * found.price.seconds
            bound_s = costs.bound_s(sum(lengths), sum(costs.works_s(lengths)))
            other = None if bound_s >= below_s else self._cheapest(costs, below_s)
            if other is None or other.price.seconds >= below_s:
                break
            found = other
        if found is None or found.costs.size == 1:
            return found
        return found._replace(price=with_lead(found.price, lengths, found.of, found.costs, self._numbers))

    @property
    def _numbers(self) -> Sequence[int]:
        wanted = self.context.options.num_waves
        return WAVES if wanted is None else (wanted,)

    def _cheapest(self, costs: GroupCosts, beaten_s: float = inf) -> _Chosen | None:
        """As `_choose`, over groups of one size, without a lead. `beaten_s`: to be below it."""
        work, found = costs.works_s(self.lengths), None
        starts = _OF_MANY if costs.num_groups > _MANY else _STARTS
        for placed in self._tried(work, costs, starts):
            below_s = found.price.seconds if found else inf
            best = cheapest(placed, costs, self._numbers, capacity=self.capacity * costs.size, below_s=below_s)
            if best is not None:
                at, price = best
                found = _Chosen(placed.of(at), price, costs)
            if costs.num_groups == 1 or (found and found.price.exposed_s < starts.showing * found.price.seconds):
                break
            if starts is _OF_MANY and found and found.price.seconds > _HOPELESS * beaten_s:
                break
        return found

    def _tried(self, work: Sequence[float], costs: GroupCosts, starts: _Starts) -> Iterator[Trimmed]:
        """Placements: always tried, from rings, of fewer cuts."""
        lengths, num_groups = self.lengths, costs.num_groups

        def begun(every: Sequence[float | None], least: float) -> Trimmed:
            ways = _distinct(every, work, num_groups) if num_groups > 1 else every[:1]
            placements = (shares.placements(work, lengths, num_groups, above) for above in ways)
            return Trimmed.without(list(chain.from_iterable(placements)), least)

        yield begun(starts.always, _LEAST_SHARE)
        if num_groups <= _MANY and not costs.replays:
            rings = [dict.fromkeys(groups, 1 / len(groups)) for groups in self._aligned(costs)[0]]
            placed = Shares.begin(work, lengths, num_groups, rings)
            yield Trimmed.without([placed.copy(kept=True), *shares.more_even(placed)], _LEAST_OF_FEW)
        yield begun(starts.fewer_cuts, _LEAST_OF_FEW)

    # Trees

    def of_trees(self, mask: Forest) -> MicrobatchPlan:
        """The best plan of trees in even parts: on ranks that are brought the keys of their paths, or,
        without a window, on groups in waves.
        """
        context, options, cluster = self.context, self.context.options, self.context.cluster
        rows = trees.dealt(mask, cluster)

        def shared(size: int, waves: int) -> MicrobatchPlan:
            of_group = rows.copy()
            of_group[:, Placed.RANK] //= size
            placed = as_rows(shares.on_ranks(union(of_group), cluster.num_ranks, size))
            name = INTER_NODE if cluster.num_nodes > 1 else INTRA_NODE
            return replace(self.plan((SharedZone(name, placed, size, waves),)), mask=mask)

        plans: list[MicrobatchPlan] = []
        if mask.window or (options.group_size in (None, 1) and options.num_waves is None):
            plans.append(under(replace(shared(1, 1), mask=CAUSAL), mask))
            (zone,) = plans[0].zones
            if context.layers.once_per_node and cluster.num_nodes > 1:
                plans.append(replace(plans[0], zones=(replace(zone, pattern=ONCE_PER_NODE[zone.pattern]),)))
        sizes = [size for size in _group_sizes(cluster) if 1 < size <= cluster.node_size]
        for size in () if mask.window else sizes if options.group_size is None else (options.group_size,):
            plans += [shared(size, waves) for waves in self._numbers if waves <= _MOST_OF_TREES or options.num_waves]
        return self._best_of(plans) or plans[0]

    # Memory of the step. The search is told before there is a placement whether layers replay, since
    # the cheapest number of waves depends on it. Fewer waves bring more at once, so a placement may
    # leave most layers no room that had some before it. Then the placement in more waves, and the
    # search's other answer, are compared with it.

    def most_would_replay(self) -> bool:
        """Whether most layers would receive keys again if tokens were even and all heads exchanged."""
        model, machine = self.context.model, self.machine
        tokens = np.full(1, -(-sum(self.lengths) // machine.cluster.num_ranks), dtype=np.int64)
        inputs = tokens * (model.num_heads + 2 * model.num_kv_heads) * model.head_dim * model.bytes_per_element
        microbatch = MicrobatchBytes(tokens, inputs, *np.zeros((2, 1), dtype=np.int64))
        return _mostly_replays(_decide(microbatch, machine))

    def with_room(self, found: _InWaves) -> _InWaves:
        """`found`; or where most of its layers replay, the best of it, itself in more waves, and
        what is found for such layers.
        """
        own = plan_estimate(found.plan, self.machine)
        if not _mostly_replays(own.backward):
            return found
        known = [(found, own)]
        (zone,) = found.plan.zones
        assert isinstance(zone, SharedZone)
        for number in WAVES if self.context.options.num_waves is None else ():
            if number > zone.waves:
                plan = replace(found.plan, zones=(replace(zone, waves=number),))
                priced = plan_estimate(plan, self.machine)
                if not _mostly_replays(priced.backward):
                    known.append((found._replace(plan=plan), priced))
                    break
        other = self.placed(replays=True)
        if other is not None:
            known.append((other, plan_estimate(other.plan, self.machine)))
        return known[best_first([priced for _, priced in known])[0]][0]


def _on_all_groups(lengths: Sequence[int], costs: GroupCosts) -> Placement:
    return [tuple(range(costs.num_groups))] * len(lengths)


def _direction(price: PlacementPrice) -> int:
    """Where a cheaper size of groups may be: wider groups exchange more heads and fewer keys."""
    if price.exposed_s < _HIDDEN * price.seconds:
        return -1
    return int(price.exposed_s > _EXPOSED * price.seconds)


def _distinct(starts: Sequence[float | None], work: Sequence[float], num_groups: int) -> list[float | None]:
    ways = {above: None if above is None else tuple(shares.num_parts(work, num_groups, above)) for above in starts}
    first = {way: above for above, way in reversed(ways.items())}
    return [above for above in starts if first[ways[above]] == above]


def _surely_keeps(found: _InWaves, machine: Machine) -> bool:
    """Whether most layers keep even if a rank receives all keys of its group's sequences."""
    return not _mostly_replays(_decide(most_bytes(found, machine), machine))


def most_bytes(found: _InWaves, machine: Machine) -> MicrobatchBytes:
    """The most that a rank may own and receive, as of one rank."""
    plan, (of, _, costs) = found
    size = costs.size
    heads = plan.num_heads, plan.num_kv_heads
    shared = [0] * (plan.num_ranks // size)
    for length, own in zip(plan.lengths, of, strict=True):
        for group in own if len(own) > 1 else ():
            shared[group] += length
    own = tokens_per_rank(plan).max(keepdims=True)
    of_group, none = own * size * (size > 1), np.zeros_like(own)
    queries, keys = (
        each * ceil(part / size) for each, part in zip((of_group, of_group + max(shared)), heads, strict=True)
    )
    loads = Loads(own, queries, keys, own * plan.num_heads * (size > 1), keys, none, none)
    return loads.bytes(heads, machine.row_bytes)


def _decide(microbatch: MicrobatchBytes, machine: Machine) -> Decision:
    memory = machine.memory or StepMemory.one_stage(machine.model, machine.cluster.num_ranks)
    return memory.decide(microbatch, machine.cluster.memory_bytes)


def _mostly_replays(decision: Decision) -> bool:
    return decision.kept_share < 0.5


# Rule `paper`: Algorithms 1 and 2 as printed.


def paper_placement(lengths: Sequence[int], cluster: Cluster, capacity: int) -> Placement:
    """The ranks of each sequence: Algorithm 1 over nodes, then 2 on each node (section 3.1)."""
    order = longest_first(lengths)
    node_of, nodes_of = _inter_node(lengths, order, cluster, capacity)
    placement: list[tuple[int, ...]] = [()] * len(lengths)
    held = np.zeros(cluster.num_nodes)
    # Their ranks, and the nodes as an index.
    by_nodes: dict[tuple[int, ...], tuple[tuple[int, ...], Ints]] = {}
    for seq, nodes in nodes_of.items():
        if nodes not in by_nodes:
            by_nodes[nodes] = tuple(chain.from_iterable(cluster.ranks_of(node) for node in nodes)), np.array(nodes)
        placement[seq], index = by_nodes[nodes]
        held[index] += lengths[seq] / len(nodes)
    own: list[list[int]] = [[] for _ in range(cluster.num_nodes)]
    for seq, node in node_of.items():
        own[node].append(seq)
    for node in range(cluster.num_nodes):
        base = -(-int(held[node]) // cluster.node_size)
        first = cluster.ranks_of(node).start
        for seq, devices in _intra_node(lengths, own[node], cluster.node_size, capacity, base).items():
            placement[seq] = tuple(first + device for device in devices)
    return placement


def _inter_node(
    lengths: Sequence[int], order: Sequence[int], cluster: Cluster, capacity: int
) -> tuple[dict[int, int], dict[int, tuple[int, ...]]]:
    """Algorithm 1: the node of each shorter sequence, and the nodes of each longer one."""
    num_nodes, node_capacity = cluster.num_nodes, cluster.node_size * capacity
    # On one node nothing is between nodes.
    threshold = node_capacity if num_nodes > 1 else node_capacity + 1
    zone = _InterNodeZone(lengths, num_nodes, node_capacity)
    count, left = 0, sum(lengths)
    # The sequence, in order, that finds no node as long as all before it go to the least loaded
    # node each.
    stuck = -1
    while True:
        while count < len(order) and lengths[order[count]] >= threshold:
            if not zone.put(order[count]):
                stuck = -1
            left -= lengths[order[count]]
            count += 1
        if count > stuck and sum(zone.loads) + left <= num_nodes * node_capacity:
            short = order[count:]
            chosen = _least_loaded([lengths[seq] for seq in short], zone.loads, node_capacity)
            if len(chosen) == len(short):
                return dict(zip(short, chosen, strict=True)), zone.nodes
            stuck = count + len(chosen)
        if count == len(order):
            # Only rounding passes the capacity.
            return {}, zone.nodes
        threshold = lengths[order[count]]


class _InterNodeZone:
    """Lines 6-10: each sequence evenly over ceil(|s| / s_avg) empty nodes, s_avg = total / N."""

    def __init__(self, lengths: Sequence[int], num_nodes: int, node_capacity: int) -> None:
        self.lengths, self.node_capacity, self.total = lengths, node_capacity, sum(lengths)
        self.nodes: dict[int, tuple[int, ...]] = {}
        self.loads = [0] * num_nodes
        self.held = 0
        self.everywhere = False

    def put(self, seq: int) -> bool:
        """Place a sequence; whether it went to the least loaded node alone."""
        num_nodes, loads = len(self.loads), self.loads
        self.held += self.lengths[seq]
        # ceil(|s| / s_avg) with s_avg = total / N, in whole numbers.
        wanted = -(-self.lengths[seq] * num_nodes // self.total)
        if not self.everywhere:
            # Ties: the lower node.
            nodes = [loads.index(min(loads))] if wanted == 1 else sorted(range(num_nodes), key=loads.__getitem__)
            if self._fits(seq, nodes[:wanted]):
                return wanted == 1
            if self._fits(seq, range(num_nodes)):
                return False
            self.everywhere = True
            self.nodes = dict.fromkeys(self.nodes, tuple(range(num_nodes)))
        self.nodes[seq] = tuple(range(num_nodes))
        self.loads = [min(self.node_capacity, -(-self.held // num_nodes))] * num_nodes
        return False

    def _fits(self, seq: int, nodes: Sequence[int]) -> bool:
        part = -(-self.lengths[seq] // len(nodes))
        if any(self.loads[node] + part > self.node_capacity for node in nodes):
            return False
        self.nodes[seq] = tuple(sorted(nodes))
        for node in nodes:
            self.loads[node] += part
        return True


def _intra_node(
    lengths: Sequence[int], order: Sequence[int], num_devices: int, capacity: int, base: int
) -> dict[int, list[int]]:
    """Algorithm 2: devices of each sequence of a node. `base`: tokens of others on each."""
    threshold = capacity
    while True:
        devices_of, loads = _fragments(
            [seq for seq in order if lengths[seq] >= threshold], lengths, num_devices, capacity, base
        )
        local = [seq for seq in order if lengths[seq] < threshold]
        if sum(loads) + sum(lengths[seq] for seq in local) <= num_devices * capacity:
            chosen = _least_loaded([lengths[seq] for seq in local], loads, capacity)
            if len(chosen) == len(local):
                return devices_of | {seq: [device] for seq, device in zip(local, chosen, strict=True)}
        if not local:
            return devices_of
        threshold = lengths[local[0]]


def _fragments(
    order: Sequence[int], lengths: Sequence[int], num_devices: int, capacity: int, base: int
) -> tuple[dict[int, list[int]], list[int]]:
    """Lines 7-12: each sequence into ceil(|s|^2 / c_avg) fragments, dealt round-robin."""
    squares = sum(lengths[seq] ** 2 for seq in order)
    everywhere = list(range(num_devices))
    devices_of: dict[int, list[int]] = {}
    loads = [base] * num_devices
    turn = 0
    for seq in order:
        # ceil(|s|^2 / c_avg) with c_avg the mean square of a device.
        wanted = -(-(lengths[seq] ** 2) * num_devices // squares)
        devices = [(turn + i) % num_devices for i in range(wanted)]
        if any(loads[device] + -(-lengths[seq] // wanted) > capacity for device in devices):
            devices = everywhere
        part = -(-lengths[seq] // len(devices))
        if any(loads[device] + part > capacity for device in devices):
            return dict.fromkeys(order, everywhere), [
                min(capacity, base + -(-sum(lengths[seq] for seq in order) // num_devices))
            ] * num_devices
        devices_of[seq] = sorted(devices)
        for device in devices:
            loads[device] += part
        turn += len(devices)
    return devices_of, loads


def _least_loaded(lengths: Sequence[int], loads: Sequence[int], capacity: int) -> list[int]:
    """The least loaded node or device of each sequence (ties: the lower), up to one without."""
    heap = [(load, index) for index, load in enumerate(loads)]
    heapify(heap)
    chosen: list[int] = []
    for length in lengths:
        load, index = heap[0]
        if load + length > capacity:
            break
        heapreplace(heap, (load + length, index))
        chosen.append(index)
    return chosen
