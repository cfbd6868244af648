"""Proposal of strategies: the closed form beside Eq. 4 as printed, whole neighbours, the ranking."""

import itertools
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from megatron_balance import Cluster, Model
from megatron_balance.analysis.statistics import tokens_per_rank
from megatron_balance.compile.pipeline import Projector, expand, layout
from megatron_balance.compile.proof.meaning import verify
from megatron_balance.config import load_scheme_table
from megatron_balance.cost.analytic import AnalyticCost
from megatron_balance.errors import ConfigError, InfeasibleError
from megatron_balance.ir.arrays import as_array
from megatron_balance.ir.plan import REMAP, MicrobatchPlan, TaskTable, Zone
from megatron_balance.ir.strategy import Scheme, Strategy
from megatron_balance.planners.pipelines import deal
from megatron_balance.planning.layers import Layers, _fewest_routed_tokens, _remap_saves_s, with_layers
from megatron_balance.planning.strategies import (
    TableCosts,
    _Classes,
    _classes_of,
    continuous,
    costs_of,
    estimates,
    propose,
    rank,
    roundings,
)
from megatron_balance.solvers.dispatch import PipelineCost
from tests.support import by_hand

COSTS = TableCosts(load_scheme_table("a800-7b"))
NUM_RANKS, TOKENS, LONGEST = 8, 20_000, 6144
STEP, LENGTH_STEP = 10, 128  # of a GPU, and in tokens, as in footnote 5


def drawn(seed: int, count: int) -> list[list[int]]:
    generator = np.random.default_rng(seed)
    return [np.clip(generator.lognormal(6, 1.3, 30), 1, LONGEST).astype(int).tolist() for _ in range(count)]


SAMPLE = [length for batch in drawn(1, 40) for length in batch] + [LONGEST]


def equation_4(pipelines: dict[Scheme, PipelineCost], lengths: np.ndarray, scale: float) -> tuple[float, dict]:
    """t[N][L] and S[N][L] of Eq. 4 in steps of 0.1 and 128; t[0][0] is 0, which it does not print."""
    units = NUM_RANKS * STEP
    edges = np.arange(0, lengths.max() + LENGTH_STEP, LENGTH_STEP)
    at = np.searchsorted(edges, lengths)
    last = len(edges) - 1
    t = np.full((last + 1, units + 1), np.inf)
    t[0] = 0.0
    chosen: dict[tuple[int, int], tuple] = {}
    work = {}
    for scheme, cost in pipelines.items():
        each = (cost.a * lengths + cost.b) * lengths + cost.c
        work[scheme] = scale * np.concatenate([[0.0], np.bincount(at, each, last + 1)[1:].cumsum()])
    for upper in range(1, last + 1):
        for scheme, cost in pipelines.items():
            if cost.max_tokens < edges[upper]:
                continue
            for tenths in range(1, units // scheme.num_ranks + 1):
                gpus = tenths * scheme.num_ranks
                seconds = (work[scheme][upper] - work[scheme][:upper]) * STEP / tenths
                options = np.maximum(t[:upper, : units + 1 - gpus], seconds[:, None])
                lower = options.argmin(axis=0)
                value = options[lower, np.arange(options.shape[1])]
                for n in np.flatnonzero(value < t[upper, gpus:] - 1e-15).tolist():
                    t[upper, gpus + n] = value[n]
                    chosen[upper, gpus + n] = (scheme, tenths, int(lower[n]), int(n))
        for n in range(1, units + 1):
            if t[upper, n - 1] < t[upper, n]:
                t[upper, n], chosen[upper, n] = t[upper, n - 1], chosen[upper, n - 1]
    counts: dict[Scheme, float] = {}
    upper, n = last, units
    while upper:
        scheme, tenths, upper, n = chosen[upper, n]
        counts[scheme] = counts.get(scheme, 0.0) + tenths / STEP
    return float(t[last, units]), counts


def test_the_closed_form_is_the_limit_of_equation_4() -> None:
    # Without c and filling, which one of them counts otherwise and the other not at all.
    schemes = (Scheme(1, 2), Scheme(2, 2), Scheme(4, 1), Scheme(8, 1))
    known = {each: replace(COSTS.pipeline(each, NUM_RANKS), c=0.0) for each in schemes}
    lengths = np.array([*SAMPLE[::3], LONGEST], dtype=np.float64)
    scale = TOKENS / lengths.sum()
    printed_s, _ = equation_4(known, lengths, scale)

    class Bare:
        def schemes(self, num_ranks: int) -> tuple[Scheme, ...]:
            return tuple(each for each in schemes if each.num_ranks <= num_ranks)

        def pipeline(self, scheme: Scheme, num_ranks: int) -> PipelineCost:
            assert num_ranks == NUM_RANKS
            return known[scheme]

    classes = _classes_of(lengths.astype(int).tolist(), TOKENS, Bare(), NUM_RANKS)  # pyright: ignore[reportArgumentType]  stands in for a table
    classes = replace(classes, fill_s=np.where(np.isfinite(classes.fill_s), 0.0, np.inf))
    closed_s, _ = continuous(classes, NUM_RANKS)
    assert closed_s <= printed_s * (1 + 1e-4)
    assert closed_s > 0.9 * printed_s


@cache
def proposed() -> dict[int, tuple[Strategy, ...]]:
    return propose(SAMPLE, TOKENS, COSTS, NUM_RANKS)


def test_the_best_proposed_is_not_slower_than_equation_4s_best() -> None:
    # Both rounded to all neighbours and ranked by dispatch and packing.
    schemes = COSTS.schemes(NUM_RANKS)
    known = {each: COSTS.pipeline(each, NUM_RANKS) for each in schemes}
    lengths = np.array(SAMPLE, dtype=np.float64)
    _, counts = equation_4(known, lengths, TOKENS / lengths.sum())
    real, gpus = np.array([(counts.get(each, 0.0), each.num_ranks) for each in schemes], dtype=np.float64).T
    neighbours = roundings(real, gpus, NUM_RANKS)
    oracle = [Strategy(tuple(s for s, n in zip(schemes, each, strict=True) for _ in range(n))) for each in neighbours]
    oracle = [each for each in oracle if max(known[s].max_tokens for s in each.pipelines) >= LONGEST]
    assert oracle
    batches = drawn(7, 6)

    def mean_s(strategy: Strategy) -> float:
        pipelines = costs_of(strategy, COSTS, NUM_RANKS)
        return float(np.mean([max(deal(batch, pipelines)[1]) for batch in batches]))

    assert min(map(mean_s, proposed()[LONGEST])) <= min(map(mean_s, oracle)) * (1 + 1e-9)


def test_filling_makes_long_pipelines_dearer_and_estimates_round_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    # Filling makes long pipelines dearer.
    # One interval, two schemes of equal work; the one with stages waits a second for them to fill.
    schemes, gpus = (Scheme(2), Scheme(1, 2)), np.array([2.0, 2.0])
    classes = _Classes(schemes, np.array([[4.0], [3.0]]), np.array([[0.0], [1.0]]), gpus)
    seconds, count = continuous(classes, 8)
    assert seconds == pytest.approx(1.0, rel=1e-4)  # 4 s of work on 4 pipelines; the other needs 3 / 4 + 1
    assert count.tolist() == [pytest.approx(4, rel=1e-4), 0]
    assert estimates(classes, [(4, 0), (0, 4)]) == pytest.approx([1.0, 1.75])
    # Estimates are the same where exponentials round otherwise.
    # As on processors with other vector instructions, where all ranks must plan alike.
    work_s = np.random.default_rng(1).uniform(1.0, 4.0, (2, 40))
    classes = _Classes((Scheme(2), Scheme(1, 2)), work_s, np.zeros((2, 40)), np.array([2.0, 2.0]))
    before, exact = estimates(classes, [(4, 0), (2, 2), (1, 3)]).tolist(), np.exp
    monkeypatch.setattr(np, "exp", lambda x: np.nextafter(exact(x), np.inf))
    assert estimates(classes, [(4, 0), (2, 2), (1, 3)]).tolist() == before
    # Roundings use what is left and never more.
    gpus = np.array([4.0, 2.0, 1.0])
    found = roundings(np.array([1.3, 1.2, 0.0]), gpus, 9)
    assert {(1, 2, 0), (2, 0, 0), (0, 4, 0)} <= found
    assert all(7 <= np.dot(each, gpus) <= 9 for each in found)


def test_a_proposal_holds_its_longest_and_fits_the_gpus() -> None:
    found = proposed()
    assert max(found) == LONGEST
    for longest, strategies in found.items():
        for strategy in strategies:
            assert strategy.num_ranks <= NUM_RANKS
            assert max(cost.max_tokens for cost in costs_of(strategy, COSTS, NUM_RANKS)) >= longest
    assert found == propose(SAMPLE, TOKENS, COSTS, NUM_RANKS)
    ranked = rank(found, drawn(3, 4), COSTS, NUM_RANKS)
    assert sum(each.best_share for each in ranked) == pytest.approx(1)
    assert ranked[0].held_batches == 4
    assert [each.max_tokens for each in ranked] == sorted((each.max_tokens for each in ranked), reverse=True)
    with pytest.raises(InfeasibleError, match=r"a sequence of 900000 tokens fits no pipeline of 8 GPUs: tp.* holds "):
        propose([10, 900_000], TOKENS, COSTS, NUM_RANKS)
    with pytest.raises(ConfigError, match="takes 16 ranks, and there are 8"):
        costs_of(Strategy.parse("2*tp8-pp1-cp1"), COSTS, NUM_RANKS)


# The remapping and the routing layer as they are laid around a planner's decision.

MODEL = Model(2, 2, 64, hidden_size=128, ffn_size=256)
TWO_NODES = Cluster(8, 4, intra_bytes_per_s=400e9, nic_bytes_per_s=25e9)


def plan(lengths: tuple[int, ...], *zones: Zone | TaskTable) -> MicrobatchPlan:
    return by_hand.plan(lengths, 8, *zones, ranks_per_node=4, heads=(2, 2))


def laid(bare: MicrobatchPlan, layers: Layers, cluster: Cluster = TWO_NODES) -> MicrobatchPlan:
    return with_layers(bare, cluster, AnalyticCost(cluster, MODEL), layers)


LONG = plan((64_000,), by_hand.ring(range(8), 0))
UNEVEN = plan((4000, 900, 100), by_hand.local(0, 0), by_hand.local(1, 1), by_hand.local(5, 2))


def counts(remapped: MicrobatchPlan) -> list[int]:
    layouts = (layout(remapped, rank) for rank in range(remapped.num_ranks))
    return [int((rows[:, 2] - rows[:, 1]).sum()) for rows in layouts]


def test_a_remap_gives_every_rank_as_many_tokens_to_one_where_it_saves_more_than_it_costs() -> None:
    # A remap gives every rank as many tokens to one.
    assert laid(UNEVEN, Layers()) == UNEVEN
    remapped = laid(UNEVEN, Layers(remap=True))
    assert counts(remapped) == [625] * 8
    assert tokens_per_rank(remapped).tolist() == [4000, 900, 0, 0, 0, 100, 0, 0]
    assert Projector(remapped).attention_layout(0).tolist() == [[0, 0, 2000], [0, 2000, 4000]]
    verify(expand(remapped, "keep"))
    # Tokens stay in their node as far as they can.
    moves = as_array(remapped.moves)
    across = moves[moves[:, 0] // 4 != moves[:, 1] // 4]
    assert int(moves[:, 2].sum()) == (4000 - 625) + (900 - 625)
    assert int(across[:, 2].sum()) == 4 * 625 - 100  # what the second node lacks
    assert not laid(LONG, Layers(remap=True)).moves, "it is even"
    # Counts are aligned for tensor-parallel ranks.
    for align in (2, 4, 8):
        found = counts(laid(replace(UNEVEN, lengths=(4003, 900, 101)), Layers(remap=True, align=align)))
        assert sum(found) == 5004
        assert max(found) - min(found) <= align
        assert sum(count % align != 0 for count in found) <= 1
    with pytest.raises(ConfigError, match="align 0: must be at least 1"):
        Layers(align=0)
    # A remap is made where it saves more than it costs.
    pays, model = Layers(remap=True, remap_when="pays"), Model(32, 32, 128)
    fast, slow = (AnalyticCost(replace(TWO_NODES, nic_bytes_per_s=rate), model) for rate in (50e9, 1e8))
    assert with_layers(UNEVEN, fast.cluster, fast, pays).moves
    assert not with_layers(UNEVEN, slow.cluster, slow, pays).moves
    saved = slow.linear_s(4000) - slow.linear_s(625)
    per_token = slow.kv_bytes(1) + 2 * slow.query_bytes(1)
    moved = slow.intra_node_s(3375 * per_token, 2) + slow.inter_node_s((4900 - 2500) * per_token, 2, 4)
    assert _remap_saves_s(tokens_per_rank(UNEVEN), slow.cluster, slow) == pytest.approx(saved - moved)


def test_a_long_ring_between_nodes_is_routed_where_it_pays() -> None:
    # A long ring between nodes is routed where it pays.
    for layers in (Layers("always"), Layers("pays")):
        routing = laid(LONG, layers).routing
        assert routing is not None
        assert (routing.zones, routing.ranks_per_nic) == ((0,), 1)
    for bare, cluster in (
        (LONG, replace(TWO_NODES, ranks_per_nic=4)),  # one NIC
        (replace(LONG, ranks_per_node=8), replace(TWO_NODES, ranks_per_node=8)),  # one node
        (UNEVEN, TWO_NODES),  # nothing crosses
    ):
        assert laid(bare, Layers("always"), cluster).routing is None
    slow = replace(TWO_NODES, intra_bytes_per_s=2 * TWO_NODES.nic_bytes_per_s)
    assert laid(LONG, Layers("pays"), slow).routing is None, "links inside a node are hardly faster"
    assert laid(LONG, Layers("always"), slow).routing is not None
    # The fewest routed tokens are where the two sides of equation 1 meet.
    for num_nics, speedup in itertools.product((2, 4, 8), (2.5, 8.0, 16.0)):
        cost = AnalyticCost(replace(TWO_NODES, intra_bytes_per_s=speedup * 25e9), MODEL)
        fewest = _fewest_routed_tokens(cost, num_nics)
        assert fewest is not None
        sizes = [cost.kv_bytes(tokens) for tokens in (fewest, fewest - 1)]
        enough, fewer = (cost.inter_node_s(size) >= cost.routed_s(size, 1, num_nics) for size in sizes)
        assert enough
        assert fewest == 1 or not fewer


def test_collectives_are_routed_only_by_order_a_remap_and_a_tiling_by_the_load_of_nics() -> None:
    # Collectives are routed only by order and a remap where one nic would carry it.
    gather = plan((64_000,), by_hand.all_gather(range(8), 0))
    assert laid(gather, Layers("pays")).routing is None
    routed = laid(gather, Layers("always"))
    assert routed.routing is not None
    verify(expand(routed, "replay"))
    remapped = laid(plan((64_000,), by_hand.local(0, 0)), Layers("pays", remap=True))
    assert remapped.routing is not None
    assert remapped.routing.zones == (REMAP,)
    verify(expand(remapped, "keep"))
    # A tiling is routed by the load of its nics.
    tasks = [(0, 0, 0, 32_000, 0, 16_000), (4, 0, 16_000, 32_000, 16_000, 32_000)]
    routed = laid(plan((32_000,), by_hand.task_table([(0, 0, 0, 32_000)], tasks)), Layers("pays"))
    assert routed.routing is not None
    assert routed.routing.zones == (0,)
    fragments = [(rank, rank, 0, 8_000) for rank in range(4)]
    even = by_hand.task_table(fragments, [(rank + 4, rank, 0, 8_000, 0, 8_000) for rank in range(4)])
    assert laid(plan((8_000,) * 4, even), Layers("pays")).routing is None


@pytest.mark.parametrize(("num_tokens", "pattern"), [(40_000, "dispatch_once"), (120_000, "dispatch")])
def test_the_load_of_a_nic_is_that_of_its_busiest_exchange(num_tokens: int, pattern: str) -> None:
    # Rank 0 sends its keys to four ranks of the other node, attends `num_tokens` of theirs, and sends
    # these back in the next exchange. Keys once to the node save nothing where what arrives at rank 0
    # takes longer than all that it sends in one exchange, if not than what it sends in both.
    keys, far = 40_000, range(4, 8)
    lengths = (keys + 4, *[num_tokens // 4] * 4)
    owned = [(0, 0, 0, keys), *((rank, 0, keys + at, keys + at + 1) for at, rank in enumerate(far))]
    owned += [(rank, 1 + at, 0, num_tokens // 4) for at, rank in enumerate(far)]
    tasks = [(0, 0, 0, keys, 0, keys)]
    tasks += [(rank, 0, keys + at, keys + at + 1, 0, keys + at + 1) for at, rank in enumerate(far)]
    tasks += [(0, 1 + at, 0, num_tokens // 4, 0, num_tokens // 4) for at in range(4)]
    bare = plan(lengths, by_hand.task_table(owned, tasks))
    once = laid(bare, Layers(once_per_node=True))
    verify(expand(once, "keep"))
    assert [zone.pattern for zone in once.zones] == [pattern]
