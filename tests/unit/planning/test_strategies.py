"""Proposal of strategies: the closed form beside Eq. 4 as printed, whole neighbours, the ranking."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from megatron_balance.config import load_scheme_table
from megatron_balance.errors import ConfigError, InfeasibleError
from megatron_balance.ir.strategy import Scheme, Strategy
from megatron_balance.planners.pipelines import deal
from megatron_balance.planning.strategies import (
    Classes,
    TableCosts,
    classes_of,
    continuous,
    costs_of,
    estimates,
    propose,
    rank,
    roundings,
)
from megatron_balance.solvers.dispatch import PipelineCost

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
    """Without c and filling, which one of them counts otherwise and the other not at all."""
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

    classes = classes_of(lengths.astype(int).tolist(), TOKENS, Bare(), NUM_RANKS)  # pyright: ignore[reportArgumentType]  stands in for a table
    classes = replace(classes, fill_s=np.where(np.isfinite(classes.fill_s), 0.0, np.inf))
    closed_s, _ = continuous(classes, NUM_RANKS)
    assert closed_s <= printed_s * (1 + 1e-4)
    assert closed_s > 0.9 * printed_s


@cache
def proposed() -> dict[int, tuple[Strategy, ...]]:
    return propose(SAMPLE, TOKENS, COSTS, NUM_RANKS)


def test_the_best_proposed_is_not_slower_than_equation_4s_best() -> None:
    """Both rounded to all neighbours and ranked by dispatch and packing."""
    known = {each: COSTS.pipeline(each, NUM_RANKS) for each in COSTS.schemes(NUM_RANKS)}
    lengths = np.array(SAMPLE, dtype=np.float64)
    _, counts = equation_4(known, lengths, TOKENS / lengths.sum())
    schemes = tuple(known)
    real = np.array([counts.get(each, 0.0) for each in schemes])
    gpus = np.array([float(each.num_ranks) for each in schemes])
    neighbours = roundings(real, gpus, NUM_RANKS)
    oracle = [Strategy(tuple(s for s, n in zip(schemes, each, strict=True) for _ in range(n))) for each in neighbours]
    oracle = [each for each in oracle if max(known[s].max_tokens for s in each.pipelines) >= LONGEST]
    assert oracle
    ours = proposed()[LONGEST]
    batches = drawn(7, 6)

    def mean_s(strategy: Strategy) -> float:
        pipelines = costs_of(strategy, COSTS, NUM_RANKS)
        return float(np.mean([max(deal(batch, pipelines)[1]) for batch in batches]))

    assert min(map(mean_s, ours)) <= min(map(mean_s, oracle)) * (1 + 1e-9)


def test_filling_makes_long_pipelines_dearer() -> None:
    """One interval, two schemes of equal work; the one with stages waits a second for them to fill."""
    classes = Classes(
        (Scheme(2), Scheme(1, 2)), np.array([[4.0], [3.0]]), np.array([[0.0], [1.0]]), np.array([2.0, 2.0])
    )
    seconds, count = continuous(classes, 8)
    assert seconds == pytest.approx(1.0, rel=1e-4)  # 4 s of work on 4 pipelines; the other needs 3 / 4 + 1
    assert count.tolist() == [pytest.approx(4, rel=1e-4), 0]
    assert estimates(classes, [(4, 0), (0, 4)]) == pytest.approx([1.0, 1.75])


def test_roundings_use_what_is_left_and_never_more() -> None:
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
    batches = drawn(3, 4)
    ranked = rank(found, batches, COSTS, NUM_RANKS)
    assert sum(each.best_share for each in ranked) == pytest.approx(1)
    assert ranked[0].held_batches == len(batches)
    assert [each.max_tokens for each in ranked] == sorted((each.max_tokens for each in ranked), reverse=True)


def test_a_sequence_that_nothing_holds_is_refused() -> None:
    with pytest.raises(InfeasibleError, match=r"a sequence of 900000 tokens fits no pipeline of 8 GPUs: tp.* holds "):
        propose([10, 900_000], TOKENS, COSTS, NUM_RANKS)
    with pytest.raises(ConfigError, match="takes 16 ranks, and there are 8"):
        costs_of(Strategy.parse("2*tp8-pp1-cp1"), COSTS, NUM_RANKS)
