"""knapformer: a knapsack of sequences to groups of ranks, even chunks and exchanged heads in a
group.

Paper: KnapFormer: An Online Load Balancer for Efficient Diffusion Transformers Training, sections
3.1 to 3.4. What we implement: topologies `gGnN+...` (3.2, `topology`); work of a sequence by the
gamma-corrected model (3.1, `cost.fits`); the greedy first pass (3.3, `knapsack`); Ulysses inside a
group (3.4, comm pattern `chunk_exchange`); `topology: auto`, which the paper leaves as future work.

What we leave out: replicas that keep their sequences. Where we differ and why: where no group has
room the least occupied one takes a sequence (open in the paper); groups may be empty. The model's
own FLOPs stand for 24 d^2 and 4 d, and a causal model has half the pairs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heapreplace
from itertools import accumulate, groupby
from typing import Literal

import numpy as np

from megatron_balance.cost.base import CostModel
from megatron_balance.cost.fits import gamma_of, sequence_work
from megatron_balance.cost.kernel import law_of
from megatron_balance.cost.parallel import GRADIENT_BYTES
from megatron_balance.errors import ConfigError, InfeasibleError
from megatron_balance.ir.arrays import Floats, Ints
from megatron_balance.ir.batch import Batch
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.model import Model
from megatron_balance.ir.plan import MicrobatchPlan, Zone
from megatron_balance.planners.base import Count, NotNegative, Slack
from megatron_balance.solvers.groups import INTER_NODE, INTRA_NODE, LOCAL, check_pool, plan_of

AUTO, NODE = "auto", "node"
# In issue order.
ZONES = (INTER_NODE, INTRA_NODE, LOCAL)


@dataclass(frozen=True, slots=True)
class KnapFormerOptions:
    tokens_per_rank: Count | None = None
    """Capacity of a rank in tokens; unlimited if not given."""
    slack: Slack = 2.0
    """In a training job without `tokens_per_rank`: room of a rank over the mean tokens per rank, at
    least 1."""
    topology: str = AUTO
    """Groups of ranks, `gGnN` terms joined by `+`; `auto`: those of the least predicted time for
    each batch; `node`: each node a group."""
    heads: Literal["equal", "uneven", "ring"] = "equal"
    """Groups whose ranks the heads do not divide among equally: an error, heads as equal as can be,
    or keys and values go round them. `auto` takes none of these."""
    gamma: NotNegative | None = None
    """Correction of attention's FLOPs in a sequence's work; None: the cost model's. The paper has
    0.49 and 0.385 for FLUX on H100."""
    tries: Count = 200
    """`auto`: topologies that are tried at most."""


def plan(batch: Batch, cluster: Cluster, model: Model, cost: CostModel, options: KnapFormerOptions) -> MicrobatchPlan:
    lengths = batch.lengths
    check_pool(lengths, cluster.num_ranks, options.tokens_per_rank)
    gamma = gamma_of(cost, model) if options.gamma is None else options.gamma
    # Of integers, which is twice as fast.
    tokens = np.fromiter(lengths, dtype=np.int64, count=len(lengths))
    work = sequence_work(tokens.astype(np.float64), model, gamma)
    if options.topology == AUTO:
        found = _TopologySearch(lengths, work, cluster, model, cost, options.tokens_per_rank).best(options.tries)
        return _planned(lengths, found.topology, found.group_of, (cluster, model), "uneven")
    topology = _topology_of(options, cluster)
    if options.heads == "equal":
        _check_heads(topology.sizes, model.num_heads)
    group_of = assign(work, lengths, topology.sizes, options.tokens_per_rank)
    return _planned(lengths, topology, group_of, (cluster, model), options.heads)


def idle(options: KnapFormerOptions, cluster: Cluster) -> str | None:
    """Why there is no knapsack to fill: a topology of one group."""
    if options.topology == AUTO or len(_topology_of(options, cluster).sizes) > 1:
        return None
    return (
        f"planner knapformer: topology {options.topology} is one group of all {cluster.num_ranks} ranks, so a step "
        "runs as ulysses places it; name smaller groups, or 'topology: auto'"
    )


def _topology_of(options: KnapFormerOptions, cluster: Cluster) -> Topology:
    given = Topology((cluster.node_size,)) if options.topology == NODE else parse(options.topology)
    return given.repeated(cluster.num_ranks)


def _planned(
    lengths: Sequence[int], topology: Topology, group_of: Ints, on: tuple[Cluster, Model], heads: str
) -> MicrobatchPlan:
    cluster, model = on
    sizes = np.array(topology.sizes)
    counts = np.bincount(group_of, minlength=len(sizes))
    # Small types are sorted by radix.
    small = group_of.astype(np.min_scalar_type(len(sizes)))
    seqs: list[int] = small.argsort(kind="stable").tolist()
    # Of the ranks of a group.
    stop = sizes.cumsum()
    node = (stop - sizes) // cluster.node_size
    # Index into `ZONES`: local, inside a node, across nodes.
    level = np.where(sizes == 1, 2, np.where(node == (stop - 1) // cluster.node_size, 1, 0))
    # Issue order: by level, the widest first, then by rank; empty groups have no zone.
    order = np.lexsort((stop, -sizes, level))
    order = order[counts[order] > 0]
    # Runs of each group in `seqs`, which is sorted by group.
    first = counts.cumsum() - counts
    columns: list[list[int]] = [column[order].tolist() for column in (level, stop - sizes, stop, first, first + counts)]
    levels, starts, ends, firsts, lasts = columns
    zones = tuple(
        Zone(
            ZONES[at],
            "ring" if heads == "ring" and model.num_heads % (end - start) else "chunk_exchange",
            tuple(range(start, end)),
            tuple(seqs[begin:done]),
        )
        for at, start, end, begin, done in zip(levels, starts, ends, firsts, lasts, strict=True)
    )
    return plan_of("knapformer", lengths, on, zones)


# Into which groups the ranks are divided: as KnapFormer writes it (section 3.2), the price of it,
# and the search for the cheapest (its future work, section 5).

_TERM = re.compile(r"g([1-9]\d*)n([1-9]\d*)")


@dataclass(frozen=True, slots=True)
class Topology:
    """Sizes of the groups of one unit, in the order of their ranks; a unit repeats over the pool."""

    sizes: tuple[int, ...]

    @property
    def num_ranks(self) -> int:
        return sum(self.sizes)

    def __str__(self) -> str:
        return "+".join(f"g{size}n{len(list(alike))}" for size, alike in groupby(self.sizes))

    def repeated(self, num_ranks: int) -> Topology:
        """The topology of a pool: the unit as often as it fits; ConfigError where it does not."""
        if num_ranks % self.num_ranks:
            raise ConfigError(
                f"topology {self}: a unit of {self.num_ranks} ranks does not divide the {num_ranks} ranks of the "
                f"pool. Change it so that its ranks (the sum of G x N over its terms gGnN) divide {num_ranks}"
            )
        return Topology(self.sizes * (num_ranks // self.num_ranks))

    def groups(self) -> list[tuple[int, ...]]:
        return [tuple(range(stop - size, stop)) for size, stop in zip(self.sizes, accumulate(self.sizes), strict=True)]


def parse(text: str) -> Topology:
    """The topology of a text such as `g1n2+g2n1+g4n1`; ConfigError says which term is wrong."""
    sizes: list[int] = []
    for term in text.split("+"):
        match = _TERM.fullmatch(term)
        if match is None:
            raise ConfigError(
                f"topology {text!r}: expected terms gGnN joined by '+', each N groups of G ranks (both 1 or more, no "
                f"spaces), such as g1n2+g2n1+g4n1; got {term!r}"
            )
        size, count = (int(number) for number in match.groups())
        sizes += [size] * count
    return Topology(tuple(sizes))


def _check_heads(sizes: Sequence[int], num_heads: int) -> None:
    """Reject groups whose ranks cannot be given equally many heads; ConfigError says what would do."""
    wrong = sorted({size for size in sizes if num_heads % size})
    if wrong:
        right = [size for size in range(1, num_heads + 1) if num_heads % size == 0]
        raise ConfigError(
            f"a group of {wrong[0]} ranks cannot share {num_heads} heads equally; use groups of "
            f"{', '.join(map(str, right))} ranks, or choose a fallback: option heads: uneven (some ranks attend with "
            "a head more) or heads: ring (keys and values go round such groups)"
        )


# Forward and backward over the forward alone.
LINEAR, ATTENTION, EXPERTS = 3.0, 1 + law_of(None).backward_factor, 2.0
# Seconds of packing and unpacking over those of moving inside a node: read and written twice, at
# a memory rate that is some seven times the link's.
PACKING = 0.4


# The first pass of KnapFormer's balancer (section 3.3): in descending order of work each sequence
# goes to the least occupied group among those with room, occupancy being work over capacity, and
# capacity the group's ranks times the mean work of a rank. Where no group has room the least occupied
# takes it.

_ROUNDING = 1 + 1e-9
# A run pays if it assigns so many sequences, and is tried with as many groups of each size; the
# first runs need not pay.
_PAYS, _FREE_RUNS = 32, 8


class _TopologyPrices:
    """Predicted seconds of a layer, forward and backward, of a batch's sequences under any
    topology. Ranks of a group are alike; attention, linear modules and the two all-to-alls come one
    after another.
    """

    def __init__(self, lengths: Sequence[int], cluster: Cluster, model: Model, cost: CostModel) -> None:
        self.cluster, self.model, self.cost = cluster, model, cost
        self.tokens = np.array(lengths, dtype=np.float64)
        known = {n: cost.attention_s(model.mask.num_pairs(n), n) for n in set(lengths)}
        self.attention_s = np.array([known[n] for n in lengths], dtype=np.float64)
        self.expert_s = (cost.experts_s(2.0) - cost.experts_s(1.0)) / model.attending
        self.token_s = cost.linear_s(1.0) - self.expert_s
        self.token_bytes = cost.kv_bytes(1.0) + 2 * cost.query_bytes(1.0)
        self._exchanges: dict[tuple[int, int], float] = {}

    def seconds(self, topology: Topology, group_of: Ints) -> float:
        return float(self.each(topology, group_of).max(initial=0.0))

    def each(self, topology: Topology, group_of: Ints) -> Floats:
        sizes = np.array(topology.sizes, dtype=np.float64)
        tokens = np.bincount(group_of, weights=self.tokens, minlength=len(sizes)) / sizes
        attention = np.bincount(group_of, weights=self.attention_s, minlength=len(sizes)) / sizes
        # The busiest rank's heads over the mean: 1 where the heads divide, [M].
        heads = np.ceil(self.model.num_heads / sizes) / (self.model.num_heads / sizes)
        stops = np.cumsum(topology.sizes)
        # On the first rank's node.
        room = self.cluster.node_size - (stops - topology.sizes) % self.cluster.node_size
        here = np.minimum(room, topology.sizes).tolist()
        groups = list(zip(topology.sizes, here, strict=True))
        for each in set(groups) - self._exchanges.keys():
            self._exchanges[each] = self._exchange_s(*each)
        exchange = np.array([self._exchanges[each] for each in groups])
        own = LINEAR * self.token_s * tokens + ATTENTION * attention * heads + exchange * tokens
        return own + EXPERTS * self.expert_s * tokens.max()

    def _exchange_s(self, size: int, inside: int) -> float:
        """Seconds of a group's all-to-alls, both ways and both passes, for each token that a rank
        holds; `inside`: ranks on the first one's node.
        """
        if size == 1:
            return 0.0
        # Gradients travel in fp32.
        both_ways = self.token_bytes * (1 + GRADIENT_BYTES / self.model.bytes_per_element)
        packing_s = PACKING * self.cost.intra_node_s(both_ways * (size - 1) / size, 0)
        inside_s = self.cost.intra_node_s(both_ways * (inside - 1) / size, 0)
        if inside == size:
            return packing_s + inside_s
        nics = 1 / self.cluster.ranks_per_nic
        return packing_s + max(inside_s, self.cost.inter_node_s(both_ways * (size - inside) / size, 0, nics))


@dataclass(frozen=True, slots=True)
class _Found:
    """A topology of the whole pool, the group of each sequence, and seconds of a layer."""

    topology: Topology
    group_of: Ints
    seconds: float


class _TopologySearch:
    """Topologies of one size first; from the best of them groups are split and merged."""

    def __init__(
        self,
        lengths: Sequence[int],
        work: Floats,
        cluster: Cluster,
        model: Model,
        cost: CostModel,
        tokens_per_rank: int | None,
    ) -> None:
        self.lengths, self.work, self.cluster, self.tokens_per_rank = lengths, work, cluster, tokens_per_rank
        self.sizes = _allowed_sizes(cluster, model.num_heads)
        self._prices = _TopologyPrices(lengths, cluster, model, cost)
        self._tried: set[tuple[int, ...]] = set()

    def best(self, tries: int) -> _Found:
        """The best of at most `tries`; one group of all where memory rules out the others."""
        num_ranks = self.cluster.num_ranks
        uniform = [self._found((size,) * (num_ranks // size)) for size in self.sizes if num_ranks % size == 0]
        known = [found for found in uniform if found is not None]
        if not known:
            everyone, topology = np.zeros(len(self.lengths), dtype=np.int64), Topology((num_ranks,))
            return _Found(topology, everyone, self._prices.seconds(topology, everyone))
        best = min(known, key=_rank)
        while len(self._tried) < tries:
            near = map(self._found, self._neighbours(best.topology.sizes, tries))
            better = min([best, *(found for found in near if found is not None)], key=_rank)
            if better is best:
                return best
            best = better
        return best

    def _neighbours(self, sizes: tuple[int, ...], tries: int) -> Iterator[tuple[int, ...]]:
        """Some or all groups of one size split into smaller ones, or merged to larger ones."""
        counts = {size: sizes.count(size) for size in self.sizes}
        for size, other in ((a, b) for a in self.sizes for b in self.sizes if a != b):
            large, small = max(size, other), min(size, other)
            if large % small:
                continue
            ratio = large // small
            # Groups of `size` that are changed at a time.
            unit = 1 if size == large else ratio
            most = counts[size] // unit
            for times in sorted({1, most // 4, most // 2, most}):
                if not 0 < times <= most or len(self._tried) >= tries:
                    continue
                changed = dict(counts)
                changed[size] -= times * unit
                changed[other] += times * (ratio if size == large else 1)
                yield tuple(each for each in reversed(self.sizes) for _ in range(changed[each]))

    def _found(self, sizes: tuple[int, ...]) -> _Found | None:
        """The topology of these groups, filled; None: it was tried before, or memory rules it out."""
        if sizes in self._tried:
            return None
        self._tried.add(sizes)
        try:
            group_of = assign(self.work, self.lengths, sizes, self.tokens_per_rank)
        except InfeasibleError:
            return None
        topology = Topology(sizes)
        return _Found(topology, group_of, self._prices.seconds(topology, group_of))


def _rank(found: _Found) -> tuple[float, int]:
    return found.seconds, -len(found.topology.sizes)


def _allowed_sizes(cluster: Cluster, num_heads: int) -> list[int]:
    """Sizes of groups, ascending, that divide the heads and lie in a node or are whole nodes."""
    node = cluster.node_size
    return [
        size
        for size in range(1, min(cluster.num_ranks, num_heads) + 1)
        if num_heads % size == 0 and (node % size == 0 or size % node == 0)
    ]


def assign(work: Floats, lengths: Sequence[int], sizes: Sequence[int], tokens_per_rank: int | None) -> Ints:
    """The group of each sequence, [S], by their work [S], above 0, and lengths in tokens [S]. `sizes`:
    ranks of each group, [M]; a group may stay empty.

    Raises:
        InfeasibleError: no group has memory left for a sequence.
    """
    if not len(work):
        return np.zeros(0, dtype=np.int64)
    chosen = _by_work(work, sizes)
    if tokens_per_rank is None:
        return chosen
    held = np.bincount(chosen, weights=lengths, minlength=len(sizes))
    if (held <= np.array(sizes) * tokens_per_rank).all():
        return chosen
    return _within_memory(work, lengths, sizes, tokens_per_rank)


def _by_work(work: Floats, sizes: Sequence[int]) -> Ints:
    # A key is work in its high bits and a number in its low ones, so equal work goes by number;
    # the batch's work takes at most 61 - bits bits, and sums stay inside int64.
    bits = max(len(work), len(sizes)).bit_length()
    total = float(work.sum())
    whole = (work * 2.0 ** (61 - bits - np.ceil(np.log2(total)))).astype(np.int64)
    order = np.sort(((int(whole.max()) - whole) << bits) | np.arange(len(work)))
    order &= (1 << bits) - 1
    kinds = {size: kind for kind, size in enumerate(dict.fromkeys(sizes))}
    kind_of = np.array([kinds[size] for size in sizes])
    # What each sequence in turn adds to the key of a group of each kind, [S, kinds].
    added = (whole[order][:, None] // np.array([*kinds])) << bits
    number = (1 << bits) - 1
    limit = int(int(whole.sum()) / sum(sizes) * _ROUNDING) << bits | number
    taken, keys = _in_runs(added, kind_of, limit, number)
    taken.append(_one_by_one(added[sum(map(len, taken)) :], keys, kind_of.tolist(), limit, number))
    chosen = np.empty(len(work), dtype=np.int64)
    chosen[order] = np.concatenate(taken) & number
    return chosen


def _in_runs(added: Ints, kind_of: Ints, limit: int, number: int) -> tuple[list[Ints], Ints]:
    """Assign sequences many at a time, as long as that pays: the keys of their groups before each run,
    and those of all groups behind the last one, ascending.
    """
    keys, taken, done, num_kinds = np.arange(len(kind_of)), list[Ints](), 0, added.shape[1]
    if len(keys) < _PAYS * num_kinds:
        return taken, keys
    while done < len(added) and done >= _PAYS * (len(taken) - _FREE_RUNS):
        # A run gives one sequence each to the least occupied groups that have room for the first of
        # them, and so for the later ones, which are smaller; to the least occupied if none has.
        ahead, kind, shut = added[done : done + len(keys)], kind_of[:0], keys[:0]
        if num_kinds > 1:
            kind = kind_of[keys & number]
            room = keys + ahead[0, kind] <= limit
            # It ends before a sequence for which another group, the least of its kind, has room.
            others, first = np.unique(kind[~room], return_index=True)
            again = (keys[~room][first] + ahead[:, others] <= limit).any(axis=1)
            ahead = ahead[: again.argmax()] if again.any() else ahead
            if room.any():
                keys, kind, shut = keys[room], kind[room], keys[~room]
        count = min(len(keys), len(ahead))
        filled = keys[:count] + (ahead[np.arange(count), kind[:count]] if num_kinds > 1 else ahead[:count, 0])
        # And before a group that is more occupied than one which the run has filled.
        (ends,) = (np.minimum.accumulate(filled)[:-1] < keys[1:count]).nonzero()
        stop = int(ends[0]) + 1 if len(ends) else count
        taken.append(keys[:stop])
        keys = np.sort(np.concatenate([filled[:stop], keys[stop:], shut]))
        done += stop
    return taken, keys


def _one_by_one(added: Ints, keys: Ints, kind_of: Sequence[int], limit: int, number: int) -> Ints:
    # The least occupied group of each kind has the most room of it; ascending keys are a heap.
    heaps, ascending = [list[int]() for _ in range(added.shape[1])], list[int](keys.tolist())
    for key in ascending:
        heaps[kind_of[key & number]].append(key)
    taken, least = list[int](), [heap[0] for heap in heaps]
    if len(heaps) == 1:
        # It has the most room of all.
        taken, added = [heapreplace(heaps[0], heaps[0][0] + more) for (more,) in added.tolist()], added[:0]
    for more in added.tolist():
        key = min(least)
        kind = kind_of[key & number]
        if key + more[kind] > limit:
            key = min([each for each, own in zip(least, more, strict=True) if each + own <= limit], default=key)
            kind = kind_of[key & number]
        taken.append(key)
        heapreplace(heaps[kind], key + more[kind])
        least[kind] = heaps[kind][0]
    return np.array(taken, dtype=np.int64)


def _within_memory(work: Floats, lengths: Sequence[int], sizes: Sequence[int], tokens_per_rank: int) -> Ints:
    mean = float(work.sum()) / sum(sizes)
    loads, left = [0.0] * len(sizes), [size * tokens_per_rank for size in sizes]
    chosen = np.zeros(len(work), dtype=np.int64)
    order: list[int] = (-work).argsort(kind="stable").tolist()
    for seq in order:
        own, length = float(work[seq]), lengths[seq]
        held = [group for group, room in enumerate(left) if length <= room]
        if not held:
            most = max(range(len(sizes)), key=lambda group: left[group])
            raise InfeasibleError(
                f"sequence {seq} has {length} tokens; the group with the most memory left, of {sizes[most]} ranks x "
                f"{tokens_per_rank} tokens, has room for {left[most]}. Use larger groups (topology), raise "
                "--tokens-per-rank (tokens_per_rank), or plan a smaller batch"
            )
        roomy = [group for group in held if loads[group] + own <= sizes[group] * mean * _ROUNDING]
        group = min(roomy or held, key=lambda each: (loads[each] / sizes[each], each))
        chosen[seq] = group
        loads[group] += own
        left[group] -= length
    return chosen
