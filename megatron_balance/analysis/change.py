"""A change to a strategy as planner and simulator price it: the seconds of a pull and a push on the
links, layer by layer, and what of them the pipelines' own work does not cover.

Source: Hydraulis, arXiv 2412.07894, sections 5.2 and 5.3, Appendix B.

- What we implement: bytes by the link (`analysis.link`), of every rank and NIC; exchanges one after
  the other, weights from each stage's first layer on, gradients from its last one on, each begun
  when the slowest pipeline has left its layers (`analysis.link`).
- Where we differ: B.2 compares one matrix product with the whole of its weights, for the receiver
  alone. Here every link counts, and the time that is left over.
- What we leave out: fixed seconds of messages, and what exchanges take from kernels beside them.

The matrices of a layer are taken together as one that TP cuts, shared out over all owners evenly.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice

import numpy as np

from megatron_balance.analysis import link
from megatron_balance.analysis.memory import GRADIENT_BYTES, Sharding, rank_memory
from megatron_balance.analysis.shards import Base, Buffer, Parameter, ParameterTable, Shard
from megatron_balance.cost.modules import head_module, layer_modules
from megatron_balance.cost.parallel import all_gather_s, group_of, joined_nodes
from megatron_balance.ir.arrays import Floats, Ints
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.model import Model
from megatron_balance.ir.strategy import Scheme, Strategy


@dataclass(frozen=True, slots=True)
class Layouts:
    """The layout that owns weights, and the strategies that a run changes between."""

    base: Strategy
    candidates: tuple[Strategy, ...]
    overlap: bool = True
    """Whether layers are pulled and pushed beside the work of others."""


@dataclass(frozen=True, slots=True)
class PipelineWork:
    """Work of one pipeline meanwhile, in seconds.

    `own_s`: from its first forward to its last backward, nothing waited for; `forward_s`: of a layer
    in the first microbatch; `backward_s`: of a layer in the last one.
    """

    stages: int
    own_s: float
    forward_s: float
    backward_s: float


@dataclass(frozen=True, slots=True)
class Change:
    """Pull and push of one strategy, by links alone.

    `pull_s`, `push_s` [slots]: of each exchange (`analysis.link`), the layers' evenly.
    `whole_s`: of all at once. `traffic`: bytes of all ranks.
    """

    num_layers: int
    pull_s: Floats
    push_s: Floats
    whole_s: tuple[float, float]
    traffic: link.WeightTraffic

    def uncovered_s(self, pipelines: Sequence[PipelineWork], *, overlap: bool) -> tuple[float, float]:
        """Seconds that a pull and a push add to a step of these pipelines.

        Without `overlap` each is one exchange, before all work and behind it.
        """
        if not overlap:
            return self.whole_s
        arrived, left = np.cumsum(self.pull_s), np.cumsum(self.push_s)
        ends: list[float] = []
        ready = np.full(len(left), -np.inf)  # when all have left the layers of an exchange
        for work in pipelines:
            count = self.num_layers // work.stages
            layers = np.arange(count)
            slots = link.layer_slot(layers, count, self.num_slots)
            last = float(arrived[-1]) - self.num_layers * work.forward_s
            waited = max(float(arrived[0]), float((arrived[slots] - layers * work.forward_s).max()), last)
            ends.append(work.own_s + waited)
            np.maximum.at(ready, slots, ends[-1] - layers * work.backward_s)
            ready[-1] = max(ready[-1], ends[-1] - self.num_layers * work.backward_s)
        slowest = ready[0] = max(ends)
        pushed = float((ready + left).max())
        return slowest - max(work.own_s for work in pipelines), pushed - slowest

    @property
    def num_slots(self) -> int:
        """Exchanges of layers, each way."""
        return len(self.pull_s) - 2

    def least_s(self, *, overlap: bool) -> float:
        """Seconds that `uncovered_s` adds at least, whatever the pipelines do."""
        return float(self.pull_s[0] + self.push_s[0]) if overlap else sum(self.whole_s)


def base_for(candidates: Sequence[Strategy], num_ranks: int) -> Strategy:
    """The base layout where nobody says one: the first candidate of one scheme on all ranks, else the
    largest TP of any that divides them, and replicas.
    """
    for each in candidates:
        if each.num_ranks == num_ranks and len(set(each.pipelines)) == 1:
            return each
    degrees = {scheme.tensor for strategy in candidates for scheme in strategy.pipelines}
    tensor = max((degree for degree in degrees if num_ranks % degree == 0), default=1)
    return Strategy((Scheme(tensor),) * (num_ranks // tensor))


def base_sync_s(base: Strategy, model: Model, cluster: Cluster) -> tuple[float, float]:
    """Seconds of the base layout's own all-gather and reduce-scatter, nothing hidden."""
    scheme = base.pipelines[0]
    joined = joined_nodes(cluster, scheme.tensor)
    ranks = scheme.context * len(base.pipelines)
    here = max(1, joined.node_size // scheme.tensor)
    while ranks % here:
        here -= 1
    group = group_of(cluster, ranks, here, busy_nics=True)
    each = max(_parameters(scheme, stage, model) for stage in (0, scheme.pipeline - 1)) / ranks
    return all_gather_s(each * model.bytes_per_element, group), all_gather_s(each * GRADIENT_BYTES, group)


def beside_bytes(layouts: Layouts, strategy: Strategy, model: Model, num_ranks: int) -> Floats:
    """Bytes [num_ranks] that roles take beside the weights and gradients of `strategy` itself."""
    roles = role_bytes(layouts, model, num_ranks)
    return roles if strategy == layouts.base else roles - held_bytes(strategy, model, num_ranks)


@lru_cache(maxsize=64)  # asked for each candidate, in every step
def role_bytes(layouts: Layouts, model: Model, num_ranks: int) -> Floats:
    """Bytes of weights and fp32 gradients that all roles of each rank share [num_ranks]: those of the
    largest. The base layout is none.
    """
    found = np.zeros(num_ranks)
    for strategy in layouts.candidates:
        if strategy != layouts.base:
            found = np.maximum(found, held_bytes(strategy, model, num_ranks))
    return found


@lru_cache(maxsize=512)
def held_bytes(strategy: Strategy, model: Model, num_ranks: int) -> Floats:
    """Bytes of weights and fp32 gradients of each rank under one strategy [num_ranks]."""
    found = np.zeros(num_ranks)
    for rank, seat in enumerate(islice(strategy.seats(), num_ranks)):
        elements = _parameters(seat.scheme, seat.stage, model)
        found[rank] = elements * (model.bytes_per_element + GRADIENT_BYTES)
    return found


def _parameters(scheme: Scheme, stage: int, model: Model) -> float:
    # Parameters of a rank of a stage.
    held = rank_memory(model, 0, 0, Sharding(tensor=scheme.tensor, pipeline=scheme.pipeline, stage=stage))
    return held.gradients / GRADIENT_BYTES


def change(base: Strategy, strategy: Strategy, model: Model, cluster: Cluster) -> Change:
    """The change to `strategy` from weights that `base` owns, on GPUs of `cluster`."""
    ranks = cluster.num_ranks, cluster.node_size, cluster.ranks_per_nic
    return _change(base, strategy, model, ranks, (cluster.intra_bytes_per_s, cluster.nic_bytes_per_s))


# A cluster has no hash: `ranks` and `rates` are what a change depends on.
@lru_cache(maxsize=512)
def _change(
    base: Strategy, strategy: Strategy, model: Model, ranks: tuple[int, int, int], rates: tuple[float, float]
) -> Change:
    cluster = Cluster(*ranks[:2], ranks_per_nic=ranks[2], intra_bytes_per_s=rates[0], nic_bytes_per_s=rates[1])
    num_layers, num_ranks = model.num_layers, cluster.num_ranks
    layer_elements = round(sum(module.weights for module in layer_modules(model)))
    table_elements = round(head_module(model).weights / 2)
    alike = _alike(base, strategy, num_layers)
    scheme = base.pipelines[0]
    shards = scheme.tensor * scheme.context * len(base.pipelines)

    def rounded(count: int) -> int:
        return -(-count // shards) * shards

    listed = [
        Parameter("first", rounded(table_elements), 1, "first", 0),
        *(Parameter(f"layer {layer}", rounded(layer_elements), 1, layer, 0) for layer in alike),
        Parameter("last", rounded(table_elements), 1, "last", 0),
    ]
    parameters = ParameterTable.of(listed, num_layers)
    layout = _base(scheme, len(base.pipelines), parameters)
    owned = layout.owned(parameters)
    twins = link.Twins.of(strategy, num_ranks, cluster.node_size)
    tables: dict[bool, list[Ints]] = {False: [], True: []}
    for number, count in enumerate((1, *alike.values(), 1)):
        of = owned[owned[:, Shard.PARAMETER] == number]
        found = link.link_of(layout, of, strategy, parameters, number)
        for handed_on, links in ((False, (found,)), (True, link.through_nodes(found, parameters, twins, None))):
            ways = [
                sum(link.volume(each, width, num_ranks, cluster.node_size) for each in pieces)
                for pieces, width in (
                    ([each.pull for each in links], model.bytes_per_element),
                    ([each.push for each in links], GRADIENT_BYTES),
                )
            ]
            tables[handed_on].append(count * np.stack(ways))
    direct, handed = (
        _timed(tables[handed_on], strategy, num_layers, cluster, handed_on=handed_on) for handed_on in (False, True)
    )
    return handed if sum(handed.whole_s) < sum(direct.whole_s) else direct


def _timed(tables: Sequence[Ints], strategy: Strategy, num_layers: int, cluster: Cluster, *, handed_on: bool) -> Change:
    # The change whose embedding, kinds of layers, and last parts move these bytes.
    slots, table = link.num_slots(strategy, num_layers), np.sum(tables, axis=0)
    counts = (1, slots, 1)
    parts = tables[0], np.sum(tables[1:-1], axis=0), tables[-1]
    pull_s, push_s = (
        np.repeat(
            [
                link.links_s(part[way], cluster, handed_on=handed_on) / count
                for part, count in zip(parts, counts, strict=True)
            ],
            counts,
        )
        for way in (0, 1)
    )
    whole = link.links_s(table[0], cluster, handed_on=handed_on), link.links_s(table[1], cluster, handed_on=handed_on)
    return Change(num_layers, pull_s, push_s, whole, link.WeightTraffic(table, handed_on))


def _alike(base: Strategy, strategy: Strategy, num_layers: int) -> dict[int, int]:
    # The first of each kind of layers that lie on the same stages of both, and how many there are.
    degrees = sorted({scheme.pipeline for scheme in (*base.pipelines, *strategy.pipelines)})
    kinds = [tuple(((layer + 1) * stages - 1) // num_layers for stages in degrees) for layer in range(num_layers)]
    return {kinds.index(kind): count for kind, count in Counter(kinds).items()}


def _base(scheme: Scheme, replicas: int, parameters: ParameterTable) -> Base:
    # A base layout with a bucket for each parameter, so that all ranks of a stage own parts of it.
    numbers, stages, _ = parameters.stages(np.arange(len(parameters)), scheme.pipeline)
    sizes = parameters.shape.prod(axis=1) // scheme.tensor
    buffers: list[Buffer] = []
    for stage in range(scheme.pipeline):
        mine: Ints = numbers[stages == stage]
        borders = np.concatenate([[0], np.cumsum(sizes[mine])])
        buffers.append(Buffer(stage, mine, borders[:-1], borders))
    return Base(scheme, replicas, tuple(buffers))
