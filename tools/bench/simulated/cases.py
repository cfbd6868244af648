"""Cases that are measured and simulated: planners on batches, at rates of the NICs, over numbers of
NICs.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from megatron_balance.analysis.memory import Policy
from megatron_balance.compile.pipeline import expand
from megatron_balance.cost.analytic import AnalyticCost
from megatron_balance.cost.table import CostTable
from megatron_balance.ir.batch import Batch
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.model import Model
from megatron_balance.ir.plan import MicrobatchPlan
from megatron_balance.planners import PLANNERS
from megatron_balance.planning.layers import Layers
from megatron_balance.workloads.lengths import Lengths
from tools.bench.emulated.ablation import RINGS, Variant
from tools.bench.emulated.point import (
    GOODPUT,
    INTRA_TO_NIC,
    NUM_NODES,
    NUM_RANKS,
    PAPER_TOKENS,
    RANKS_PER_NODE,
    draw_batches,
)
from tools.emulated_cluster import Topology

MODEL = Model(
    num_heads=8,
    num_kv_heads=2,
    head_dim=16,
    num_layers=1,
    hidden_size=128,
    ffn_size=768,
    name="bench",
    bytes_per_element=4,
)
"""A head for each rank, so that heads can be exchanged, and few of keys: what moves costs CPU time
too, and should not be most of it.
"""

VARIANTS = (
    Variant("te_ring", "te_ring", Layers()),
    Variant("te_ring + routing", "te_ring", Layers(routing="always")),
    Variant("llama_all_gather", "llama_all_gather", Layers()),
    Variant("llama_all_gather + routing", "llama_all_gather", Layers(routing="always")),
    Variant("ulysses", "ulysses", Layers()),
    Variant("packing", "packing", Layers()),
    Variant("hybrid_dp", "hybrid_dp", Layers()),
    Variant("hybrid_dp + routing", "hybrid_dp", Layers(routing="always")),
    Variant("flexsp", "flexsp", Layers()),
    Variant("megatron_dynamic", "megatron_dynamic", Layers()),
    Variant("zeppelin rings", "zeppelin", Layers(), options=RINGS),
    Variant("zeppelin rings + routing", "zeppelin", Layers(routing="pays"), options=RINGS),
    Variant("zeppelin rings + remap always", "zeppelin", Layers(routing="pays", remap=True), options=RINGS),
    Variant("zeppelin rings of groups", "zeppelin", PLANNERS["zeppelin"].layers, options={"rule": "groups"}),
    Variant("zeppelin", "zeppelin", PLANNERS["zeppelin"].layers),
    Variant("auto", "auto", PLANNERS["auto"].layers),
)


@dataclass(frozen=True, slots=True)
class Key:
    """Names of a case. `others`: planners that made the very same plan."""

    nics: int
    mbit: float
    policy: Policy
    dataset: str
    batch: int
    planner: str
    others: tuple[str, ...]

    @property
    def group(self) -> tuple[int, float, str, str, int]:
        """Equal in cases that differ only by the planner."""
        return self.nics, self.mbit, self.policy, self.dataset, self.batch


@dataclass(frozen=True, slots=True)
class Case(Key):
    """One plan on links of one speed."""

    plan: MicrobatchPlan


@dataclass(frozen=True, slots=True)
class Grid:
    """All combinations of these. `batches`: of each data set; `tokens` of a batch; `planners`:
    names in `VARIANTS`.
    """

    mbit: tuple[float, ...]
    policies: tuple[Policy, ...]
    datasets: tuple[str, ...]
    batches: int
    tokens: int
    seed: int
    planners: tuple[str, ...]


class Rates(NamedTuple):
    """Bytes per second that a rank can send to its node, and to the other one while its neighbours
    do as much.
    """

    intra: float
    inter: float


def rates_of(nics: int, mbit: float) -> Rates:
    nic_bytes_per_s = mbit * 1e6 / 8 * GOODPUT
    return Rates(INTRA_TO_NIC * nic_bytes_per_s, nic_bytes_per_s * nics / RANKS_PER_NODE)


def cluster_of(nics: int, mbit: float, flops_per_s: float) -> Cluster:
    """The emulated cluster as planners are told of it: its links without headers, and how fast
    attention is on a rank.
    """
    nic_bytes_per_s = mbit * 1e6 / 8 * GOODPUT
    return Cluster(
        num_ranks=NUM_RANKS,
        ranks_per_node=RANKS_PER_NODE,
        name=f"emulated, {mbit:g} Mbit/s",
        intra_bytes_per_s=INTRA_TO_NIC * nic_bytes_per_s,
        nic_bytes_per_s=nic_bytes_per_s,
        ranks_per_nic=RANKS_PER_NODE // nics,
        flops_per_s=flops_per_s,
        attention_efficiency=1.0,
        linear_efficiency=1.0,
        memory_bytes=2e9,
        memory_bytes_per_s=11e9,
        num_sms=0,
        intra_alpha_s=1e-3,
        inter_alpha_s=1e-3,
    )


def flops_per_s(table: CostTable, share: float) -> float:
    """Of the attention kernel on long sequences, at a share of a core: what planners are told."""
    attention = table.attention
    pairs = attention.q_tokens[-1] * attention.k_tokens[-1]
    return share * MODEL.attention_flops_per_pair * pairs / attention.full_s[-1][-1]


def topology_of(nics: int, mbit: float) -> Topology:
    nic_bits_per_s = round(1e6 * mbit)
    return Topology(NUM_NODES, RANKS_PER_NODE, nics, nic_bits_per_s, round(INTRA_TO_NIC * nic_bits_per_s))


def cases_of(grid: Grid, nics: int, flops_per_s: float) -> list[Case]:
    """The cases of a topology, rate by rate; of planners with the same plan the first one's."""
    found: list[Case] = []
    for mbit in grid.mbit:
        cluster = cluster_of(nics, mbit, flops_per_s)
        for policy, (dataset, batch, lengths) in product(grid.policies, _batches(grid)):
            plans = _plans(lengths, cluster, grid.planners)
            found += [
                Case(nics, mbit, policy, dataset, batch, names[0], tuple(names[1:]), plan) for names, plan in plans
            ]
    return found


def _batches(grid: Grid) -> Iterator[tuple[str, int, Lengths]]:
    for dataset in grid.datasets:
        for at, lengths in enumerate(draw_batches(dataset, grid.batches, grid.seed, PAPER_TOKENS // grid.tokens)):
            yield dataset, at, lengths


def _plans(lengths: Lengths, cluster: Cluster, names: Sequence[str]) -> list[tuple[list[str], MicrobatchPlan]]:
    """Plans that differ, each with the planners that made it."""
    found: dict[str, tuple[list[str], MicrobatchPlan]] = {}
    cost = AnalyticCost(cluster, MODEL)
    for variant in VARIANTS:
        if variant.name in names:
            plan = variant.choice().plan(Batch(lengths), cluster, MODEL, cost)
            found.setdefault(repr(expand(plan, "keep").forward), ([], plan))[0].append(variant.name)
    return list(found.values())
