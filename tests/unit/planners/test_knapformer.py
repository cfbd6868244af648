"""knapformer: topologies, the knapsack, and the search for a topology."""

from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from megatron_balance import Batch, Cluster, Model, make_planner, verify
from megatron_balance.analysis.machine import Machine
from megatron_balance.analysis.statistics import plan_statistics
from megatron_balance.config import load_cluster, load_model
from megatron_balance.cost.analytic import AnalyticCost
from megatron_balance.cost.fits import gamma_of, sequence_work
from megatron_balance.errors import ConfigError, InfeasibleError
from megatron_balance.ir.plan import MicrobatchPlan, Zone
from megatron_balance.planners import knapformer
from megatron_balance.planning.choice import planning_cost
from megatron_balance.simulator.setup import Setup
from megatron_balance.simulator.step import simulate_step
from megatron_balance.workloads import distributions

MODEL = Model(8, 8, 16, attention="full")
FLUX = load_model("flux-12b")
H100 = load_cluster("h100").build(num_ranks=32, ranks_per_node=8)
EXPERTS = replace(load_model("moe-8x550m"), expert_split=8)
CAUSAL = [60000, 30000, 20000, 9000, 8000, 7000, 5000, 4000, 3000, 2000, 1000, 900]


def plan_of(lengths: list[int], cluster: Cluster, **options: Any) -> MicrobatchPlan:
    return make_planner("knapformer", cluster, MODEL, **options)(lengths)


def groups_of(planned: MicrobatchPlan) -> dict[tuple[int, ...], tuple[int, ...]]:
    return {zone.ranks: zone.seqs for zone in planned.zones if isinstance(zone, Zone)}


# Topologies
def test_topologies_and_the_knapsack_by_hand() -> None:
    # A topology is groups on neighbouring ranks of allowed sizes.
    topology = knapformer.parse("g1n2+g2n1+g4n1")
    assert topology.groups() == [(0,), (1,), (2, 3), (4, 5, 6, 7)]
    assert str(topology) == "g1n2+g2n1+g4n1"
    assert (topology.num_ranks, topology.repeated(16).sizes) == (8, (1, 1, 2, 4) * 2)
    # Sizes divide the heads and lie in a node or are whole nodes.
    assert knapformer._allowed_sizes(H100, 24) == [1, 2, 4, 8, 24]
    assert knapformer._allowed_sizes(Cluster(6, 3), 12) == [1, 3, 6]
    # The knapsack
    # The knapsack by hand.
    # Sequences go in descending work to the least occupied group with room.
    # Capacities: 10 a rank. 20 fits the pair alone; 7 and 6 the single ranks; 4 fits none of them
    # and no pair, and the least occupied takes it: 6 of 10.
    assert knapformer.assign(np.array([6.0, 20.0, 4.0, 7.0, 3.0]), [1] * 5, [1, 1, 2], None).tolist() == [1, 2, 1, 0, 0]
    # A sequence that no group has room for goes to the least occupied.
    assert knapformer.assign(np.array([90.0, 5.0, 5.0]), [1] * 3, [1, 1], None).tolist() == [0, 1, 1]
    # Groups may be empty and sequences fewer than groups.
    assert groups_of(plan_of([9], Cluster(4, 4), topology="g1n4")) == {(0,): (0,)}
    assert plan_of([], Cluster(4, 4), topology="g1n4").zones == ()
    # Memory comes before work and is an error where no group has it.
    # By work each group would take one long and one short one: 13 tokens.
    assert knapformer.assign(np.array([4.0, 4.0, 1.0, 1.0]), [10, 6, 3, 1], [1, 1], 10).tolist() == [0, 1, 1, 1]
    with pytest.raises(InfeasibleError, match=r"sequence 0 has 30 tokens; .* of 1 ranks x 20 tokens, has room for 20"):
        plan_of([30, 1], Cluster(2, 2), topology="g1n2", tokens_per_rank=20)


@given(terms=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 5)), min_size=1, max_size=6))
def test_a_topology_prints_what_it_parses_to(terms: list[tuple[int, int]]) -> None:
    sizes = tuple(size for size, count in terms for _ in range(count))
    assert knapformer.parse("+".join(f"g{size}n{count}" for size, count in terms)) == knapformer.Topology(sizes)
    assert knapformer.parse(str(knapformer.Topology(sizes))) == knapformer.Topology(sizes)


@pytest.mark.parametrize("text", ["", "g1", "g0n1", "g1n0", "g01n1", "g1n1+", "g1n1 + g2n1", "G1n1", "g1n1,g2n1", "8"])
def test_what_is_no_topology_is_refused_with_the_wrong_term(text: str) -> None:
    with pytest.raises(ConfigError, match=r"expected terms gGnN joined by '\+'.*such as g1n2\+g2n1\+g4n1; got"):
        knapformer.parse(text)


def test_what_cannot_be_is_refused() -> None:
    # A unit that does not divide the ranks and groups that do not divide the heads are refused.
    with pytest.raises(ConfigError, match="a unit of 3 ranks does not divide the 4 ranks of the pool"):
        plan_of([5], Cluster(4, 4), topology="g3n1")
    with pytest.raises(ConfigError, match=r"a group of 3 ranks cannot share 8 heads equally; use groups of 1, 2, 4, 8"):
        plan_of([5], Cluster(6, 6), topology="g3n2")
    uneven, ring = (plan_of([50, 40], Cluster(6, 6), topology="g3n2", heads=heads) for heads in ("uneven", "ring"))
    assert {zone.pattern for zone in uneven.zones} == {"chunk_exchange"}
    assert {zone.pattern for zone in ring.zones} == {"ring"}
    for planned in (uneven, ring):
        verify(planned)
    # A planner that cuts the causal triangle refuses full attention.
    with pytest.raises(
        ConfigError, match=r"planner distca plans causal and window attention only, .* full attention .* te_ring"
    ):
        make_planner("distca", Cluster(4, 4), MODEL)([10, 20])
    with pytest.raises(ConfigError, match="attention 'half' is not a known mask; known: causal, full, window_KEYS"):
        replace(MODEL, attention="half")


@given(
    work=st.lists(st.integers(1, 9) | st.integers(1, 10**6), max_size=40),
    sizes=st.lists(st.sampled_from([1, 2, 4, 8]), min_size=1, max_size=8),
)
@example(work=[500] + [10] * 90, sizes=[1, 1, 4, 4])  # some have room again after the first
# So many groups are filled in runs.
@example(work=[seq**3 for seq in range(1, 120)], sizes=[1] * 32)
@example(work=[500] * 40 + [300] * 8 + [*range(1, 90)], sizes=[1, 2] * 32)
@example(work=[50] * 2 + [10] * 60, sizes=[1, 2] * 32)
def test_the_knapsack_is_the_printed_first_pass(work: list[int], sizes: list[int]) -> None:
    mean, loads = Fraction(sum(work), sum(sizes)), [Fraction(0)] * len(sizes)
    expected = [0] * len(work)
    for seq in sorted(range(len(work)), key=lambda seq: (-work[seq], seq)):
        room = [g for g, size in enumerate(sizes) if loads[g] + work[seq] <= size * mean * Fraction(1 + 1e-9)]
        group = min(room or range(len(sizes)), key=lambda g: (loads[g] / (sizes[g] * mean), g))
        expected[seq] = group
        loads[group] += work[seq]
    assert knapformer.assign(np.array(work, dtype=np.float64), [1] * len(work), sizes, None).tolist() == expected


# Chunks
@given(lengths=st.lists(st.integers(1, 60), min_size=1, max_size=6), size=st.sampled_from([1, 2, 4, 8]))
def test_every_rank_of_a_group_has_a_contiguous_even_chunk_of_each_sequence(lengths: list[int], size: int) -> None:
    planned = plan_of(lengths, Cluster(8, 8), topology=f"g{size}n{8 // size}")
    held = plan_statistics(planned, MODEL)["tokens_per_rank"]
    for ranks, seqs in groups_of(planned).items():
        tokens = [held[rank] for rank in ranks]
        assert sum(tokens) == sum(lengths[seq] for seq in seqs)
        assert max(tokens) - min(tokens) <= 1


# Work
def test_work_is_equation_2_for_flux_and_half_the_pairs_for_a_causal_model() -> None:
    lengths = np.array([100.0, 5000.0])
    of_blocks = [24.0 * n * 3072**2 + 0.49 * 4.0 * n**2 * 3072 for n in lengths.tolist()]
    assert sequence_work(lengths, FLUX, 0.49).tolist() == of_blocks
    causal = replace(FLUX, attention="causal")
    halved = sequence_work(lengths, causal, 1.0) - sequence_work(lengths, causal, 0.0)
    assert halved.tolist() == [4.0 * 3072 * n * (n + 1) / 2 for n in lengths.tolist()]
    # Gamma of a cost model is the ratio of its rates.
    slow, fast = (
        gamma_of(AnalyticCost(replace(H100, attention_kernel=None, attention_efficiency=share), FLUX), FLUX)
        for share in (0.3, 0.6)
    )
    assert slow == pytest.approx(2 * fast, rel=0.01)


# The search
def seconds(topology: str, lengths: list[int]) -> float:
    cost = AnalyticCost(H100, FLUX)
    planned = knapformer.plan(Batch(tuple(lengths)), H100, FLUX, cost, knapformer.KnapFormerOptions(topology=topology))
    return simulate_step([planned], Machine(H100, FLUX, cost), Setup(recompute="full")).step_s


def drawn(codes: str, seed: int) -> list[int]:
    (batch,) = distributions.draw_by_gpu(codes, 1, seed)
    return [length for samples in batch for length in samples]


# Not the paper's: images of 512 x 512 pixels on 31 GPUs and a clip of five seconds on one, a quarter
# of the work. Fixed before the search for topologies was written, to judge it by.
IMAGES_AND_A_LONG_CLIP = "g1b1i1024f85s1,g31b28i512f1s0"
WORKLOADS = (distributions.LOW_RESOLUTION, distributions.MIXED_RESOLUTION, distributions.IMAGES_AND_VIDEOS)


@pytest.mark.parametrize("codes", [*WORKLOADS, IMAGES_AND_A_LONG_CLIP])
def test_auto_is_as_fast_as_any_of_the_papers_topologies_and_faster_on_the_workload_fixed_before(codes: str) -> None:
    # It takes the cheapest by price, which is the simulator's to a thousandth.
    most = 0.95 if codes == IMAGES_AND_A_LONG_CLIP else 1.001
    for seed in range(2):
        lengths = drawn(codes, seed)
        best = min(seconds(topology, lengths) for topology in ("g1n32", "g2n16", "g4n8", "g8n4"))
        assert seconds("auto", lengths) <= most * best


def test_auto_keeps_within_memory_and_takes_all_ranks_where_nothing_else_does() -> None:
    cluster, cost = Cluster(4, 4), AnalyticCost(Cluster(4, 4), MODEL)
    lengths = (100, 10, 10, 8)
    search = knapformer._TopologySearch(
        lengths, sequence_work(np.array(lengths, dtype=float), MODEL, 1.0), cluster, MODEL, cost, 40
    )
    found = search.best(100)
    held = np.bincount(found.group_of, weights=lengths, minlength=len(found.topology.sizes))
    assert (held <= 40 * np.array(found.topology.sizes)).all()
    tight = plan_of([100, 10, 10, 8], cluster, tokens_per_rank=32)
    assert groups_of(tight) == {(0, 1, 2, 3): (0, 1, 2, 3)}


@pytest.mark.parametrize("topology", ["g12n2+g1n8", "g4n8"])
def test_experts_wait_for_the_rank_with_the_most_tokens(topology: str) -> None:
    # Each rank's exchange was priced by its own tokens, which are not those of the slowest rank
    # where topologies are mixed, and in the backward as twice the forward's.
    cluster = load_cluster("a800").build(num_ranks=32, ranks_per_node=4)
    cost = planning_cost(cluster, EXPERTS, None)
    planned = knapformer.plan(
        Batch(tuple(CAUSAL)), cluster, EXPERTS, cost, knapformer.KnapFormerOptions(topology=topology)
    )
    machine = Machine(cluster, EXPERTS, AnalyticCost(cluster, EXPERTS))
    step = simulate_step([planned], machine, Setup("keep", experts=8, engine="rounds"))
    groups = knapformer.parse(topology).repeated(32)
    work = sequence_work(np.array(CAUSAL), EXPERTS, gamma_of(cost, EXPERTS))
    group_of = knapformer.assign(work, CAUSAL, groups.sizes, None)
    price_s = knapformer._TopologyPrices(CAUSAL, cluster, EXPERTS, cost).seconds(groups, group_of)
    assert price_s == pytest.approx(sum(step.layer_s), rel=0.015)
