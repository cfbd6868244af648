"""Masks: the run of keys of each query, and everything that follows from it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from megatron_balance.errors import ConfigError
from megatron_balance.ir.arrays import Rectangles, num_pairs, sees, trim_pairs
from megatron_balance.ir.columns import Pair
from megatron_balance.ir.mask import CAUSAL, FULL, Mask, SlidingWindow, kind_of, mask_named
from megatron_balance.ir.plan import MicrobatchPlan, Zone, from_json, to_json
from tests.support.masks import visible

MASKS = (CAUSAL, FULL, SlidingWindow(3))
LENGTH = 9


@pytest.mark.parametrize("mask", MASKS, ids=lambda mask: mask.name)
def test_queries_is_the_inverse_of_keys(mask: Mask) -> None:
    shown = visible(mask)(LENGTH)
    seq, keys = np.zeros(LENGTH, dtype=np.int64), np.arange(LENGTH)
    first, stop = mask.queries(seq, keys)
    queries = np.arange(LENGTH)[:, None]
    assert (((queries >= first) & (queries < stop)) == shown).all()
    assert [mask.queries(0, key) for key in range(LENGTH)] == list(zip(first.tolist(), stop.tolist(), strict=True))


@pytest.mark.parametrize("mask", MASKS, ids=lambda mask: mask.name)
def test_pairs_are_counted(mask: Mask) -> None:
    assert [mask.num_pairs(length) for length in range(LENGTH)] == [
        int(visible(mask)(length).sum()) for length in range(LENGTH)
    ]


@pytest.mark.parametrize("mask", MASKS, ids=lambda mask: mask.name)
def test_pairs_of_rectangles_are_counted(mask: Mask) -> None:
    shown = visible(mask)(LENGTH)
    spans = [(a, b) for a in range(LENGTH) for b in range(a, LENGTH + 1)]
    rows = np.array([(*q, *k) for q in spans for k in spans])
    counted = [int(shown[a:b, c:d].sum()) for a, b, c, d in rows.tolist()]
    assert num_pairs(Rectangles(*rows.T), mask).tolist() == counted


@pytest.mark.parametrize("mask", MASKS, ids=lambda mask: mask.name)
def test_a_rectangle_is_trimmed_to_what_the_mask_shows_of_it(mask: Mask) -> None:
    shown = visible(mask)(LENGTH)
    spans = [(a, b) for a in range(LENGTH) for b in range(a + 1, LENGTH + 1)]
    rows = np.array([(0, q0, q1, 0, 1, k0, k1, 0, 1) for q0, q1 in spans for k0, k1 in spans])
    for row, got, seen in zip(rows.tolist(), trim_pairs(rows, mask).tolist(), sees(rows, mask).tolist(), strict=True):
        (q0, q1), (k0, k1) = row[Pair.Q_SPAN], row[Pair.K_SPAN]
        block = shown[q0:q1, k0:k1]
        queries, keys = np.flatnonzero(block.any(axis=1)) + q0, np.flatnonzero(block.any(axis=0)) + k0
        assert seen == bool(len(queries))
        if seen:
            assert (got[Pair.Q_SPAN], got[Pair.K_SPAN]) == ([queries[0], queries[-1] + 1], [keys[0], keys[-1] + 1])
        else:
            assert got[Pair.Q_START] >= got[Pair.Q_STOP]
            assert got[Pair.K_START] >= got[Pair.K_STOP]


def test_masks_are_found_by_name() -> None:
    assert [mask_named(mask.name) for mask in MASKS] == list(MASKS)
    assert [kind_of(mask) for mask in MASKS] == ["causal", "full", "window"]
    with pytest.raises(ConfigError, match="unknown mask 'half'; known: causal, full, window_KEYS"):
        mask_named("half")
    for name in ("window", "window_0", "window_-3", "window_07"):
        with pytest.raises(ConfigError, match=f"unknown mask '{name}'"):
            mask_named(name)
    with pytest.raises(ConfigError, match="at least 1 key, got 0"):
        SlidingWindow(0)


def test_a_plan_names_a_mask_that_is_not_causal() -> None:
    zone = Zone("pool", "ring", (0,), (0,))
    plan = MicrobatchPlan("test", (4,), 1, 1, 1, 1, (zone,))
    assert '"mask"' not in to_json(plan)
    others = [replace(plan, mask=mask) for mask in (FULL, SlidingWindow(3), SlidingWindow(30))]
    assert [from_json(to_json(each)) for each in others] == others
    assert len({each.fingerprint() for each in (plan, *others)}) == 4
