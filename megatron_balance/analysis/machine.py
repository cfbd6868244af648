"""The machine that a program runs on: links and NICs of its transfers, their rates, slow ranks."""

from dataclasses import dataclass, field, replace

import numpy as np

from megatron_balance.analysis.step_memory import StepMemory
from megatron_balance.analysis.wire import NicOf, Payload
from megatron_balance.cost.base import NO_HOST, Host, Link, MachineCost
from megatron_balance.cost.perturbed import changed
from megatron_balance.errors import ConfigError
from megatron_balance.ir.arrays import Bools, Floats, Ints
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.forest import Forest
from megatron_balance.ir.mask import Mask
from megatron_balance.ir.model import Model
from megatron_balance.ir.plan import MicrobatchPlan
from megatron_balance.patterns.base import pairs_of


@dataclass(frozen=True, slots=True)
class Machine:
    """A cluster that runs a model at the prices of `cost`, which need not be those of the planner.

    `slowdown`: by how much each rank computes slower than the others; empty: not at all. `host`: what
    hosts take to issue work, where that is simulated (`hosts_behind`); a cost model has the prices.
    `memory`: of the step around a plan; None: one stage of all layers. `by_heads`: recurrent layers
    exchange all tokens by heads in a plan's groups, as Megatron-core's own do, and hand on no states.
    `row_bytes`: of a token and head by kind, with its LSE.
    A transfer inside a node takes the sender's link out and the receiver's link in; one between nodes
    takes a NIC out and a NIC in. Every one of them is shared fairly.
    """

    cluster: Cluster
    model: Model
    cost: MachineCost
    slowdown: tuple[float, ...] = ()
    host: Host = NO_HOST
    memory: StepMemory | None = None
    by_heads: bool = False
    nics: NicOf = field(init=False)
    payload: Payload = field(init=False)
    row_bytes: tuple[int, ...] = field(init=False)
    intra: Link = field(init=False)
    inter: Link = field(init=False)

    def __post_init__(self) -> None:
        cluster = self.cluster
        if self.slowdown and len(self.slowdown) != cluster.num_ranks:
            raise ConfigError(
                f"slowdown names {len(self.slowdown)} ranks, {cluster.name} has {cluster.num_ranks}: give one factor "
                "a rank"
            )
        object.__setattr__(self, "nics", NicOf(cluster.num_ranks, cluster.node_size, cluster.ranks_per_nic))
        payload = Payload.of(self.model)
        object.__setattr__(self, "payload", payload)
        object.__setattr__(self, "row_bytes", tuple(payload.whole().tolist()))
        object.__setattr__(self, "intra", self.cost.link(inter_node=False))
        object.__setattr__(self, "inter", self.cost.link(inter_node=True))

    @property
    def num_ranks(self) -> int:
        return self.cluster.num_ranks

    def for_trees(self, mask: Mask) -> "Machine":
        """The machine at the prices of a plan's trees; of other masks, at those of its model."""
        forest = mask if isinstance(mask, Forest) else None
        if forest == self.model.forest:
            return self
        model = replace(self.model, forest=forest)
        return replace(self, model=model, cost=changed(self.cost, "trees", model=model))

    def check(self, plan: MicrobatchPlan) -> None:
        """Reject a plan for other ranks. Raises ConfigError: another number of ranks, or of ranks a
        node.
        """
        cluster = self.cluster
        if (plan.num_ranks, min(plan.ranks_per_node, plan.num_ranks)) != (cluster.num_ranks, cluster.node_size):
            raise ConfigError(
                f"a plan for {plan.num_ranks} ranks, {plan.ranks_per_node} a node, on {cluster.name} with "
                f"{cluster.num_ranks} ranks, {cluster.node_size} a node: plan for the cluster that is simulated"
            )

    def under(self, mask: Mask) -> "Machine":
        """The machine with a model all of whose layers have that mask, which is none of trees."""
        model = replace(self.model, attention=mask.name, other_attention="", other_layers=0)
        if model == self.model:
            return self
        return replace(self, model=model, cost=changed(self.cost, "layers of another mask", model=model))

    def whole(self, lengths: Ints) -> Ints:
        """`Pair` rows of whole sequences, all heads."""
        spans = np.column_stack([np.arange(len(lengths)), np.zeros_like(lengths), lengths])
        return pairs_of(spans, spans[:, 1:], [(0, self.model.num_heads, 0, self.model.num_kv_heads)])

    def pack_s(self, num_bytes: float) -> float:
        """Seconds to pack bytes; nothing takes none."""
        return self.cost.pack_s(num_bytes) if num_bytes > 0 else 0.0

    def slow(self) -> Floats:
        """Factors on the time of each rank's computations [num_ranks]."""
        return np.array(self.slowdown, dtype=np.float64) if self.slowdown else np.ones(self.num_ranks)

    # Resources: links out, links in, NICs out, NICs in

    @property
    def num_nics(self) -> int:
        return self.nics.num_nodes * self.nics.per_node

    def capacity(self) -> Floats:
        """Bytes per second of every resource."""
        rates = np.array([self.intra.bytes_per_s, self.inter.bytes_per_s], dtype=np.float64)
        return np.repeat(rates, [2 * self.num_ranks, 2 * self.num_nics])

    def utilisation(self, compute_s: Floats, bytes_moved: Floats, step_s: float) -> dict[str, float]:
        """Mean share of a step that ranks compute, and that links and NICs are full."""
        links, nics = np.split(bytes_moved / self.capacity(), [2 * self.num_ranks])
        shares = {"compute": compute_s, "link": links, "nic": nics}
        return {name: float(each.mean() / step_s) for name, each in shares.items()}

    def crosses(self, src: Ints, dst: Ints) -> Bools:
        """Mask [n] of the transfers that go from node to node."""
        return self.nics.node(src) != self.nics.node(dst)

    def resources(self, src: Ints, dst: Ints) -> Ints:
        """The two resources [n, 2] that each transfer takes."""
        across = self.crosses(src, dst)
        first = 2 * self.num_ranks
        return np.column_stack(
            [
                np.where(across, first + self.nics.nic(src), src),
                np.where(across, first + self.num_nics + self.nics.nic(dst), self.num_ranks + dst),
            ]
        )

    def alpha_s(self, src: Ints, dst: Ints) -> Floats:
        """Seconds that pass before the first byte of each transfer."""
        return np.where(self.crosses(src, dst), self.inter.alpha_s, self.intra.alpha_s)


def fair_rates(uses: Ints, capacity: Floats) -> Floats:
    """Max-min fair rates [n] of flows that use the resources `uses` [n, k]: nobody's can grow but
    at the cost of a slower one's.
    """
    rates, free, left = np.zeros(len(uses)), np.ones(len(uses), dtype=bool), capacity.copy()
    while free.any():
        count = np.bincount(uses[free].ravel(), minlength=len(left))
        share = np.divide(left, count, out=np.full(len(left), np.inf), where=count > 0)
        bound = share[uses].min(axis=1)
        level = bound[free].min()
        settled = free & (bound <= level * (1 + 1e-12))
        rates[settled] = level
        left = np.maximum(0.0, left - level * np.bincount(uses[settled].ravel(), minlength=len(left)))
        free &= ~settled
    return rates
