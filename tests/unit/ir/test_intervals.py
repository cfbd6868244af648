"""Arithmetic on token intervals, against sets of tokens."""

from __future__ import annotations

import numpy as np

from megatron_balance.ir.arrays import held_twice, key, key_position, key_seq, overlap_bounds, overlaps, union
from megatron_balance.ir.columns import Fragment


def draw(seed: int, count: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    start = rng.integers(0, 20, count)
    return np.column_stack([rng.integers(0, 3, count), start, start + rng.integers(0, 6, count)])


def tokens(row: np.ndarray) -> set[tuple[int, int]]:
    seq, start, stop = row.tolist()
    return {(seq, at) for at in range(start, stop)}


def test_a_key_is_taken_apart_again() -> None:
    seq, position = np.array([0, 3, 70_000]), np.array([5, 0, 1 << 39])
    assert key_seq(key(seq, position)).tolist() == seq.tolist()
    assert key_position(key(seq, position)).tolist() == position.tolist()


def test_overlaps_are_all_pairs_that_share_a_token() -> None:
    for seed in range(30):
        wanted, held = draw(seed, seed % 7), draw(seed + 100, seed % 11)
        held = held[held[:, Fragment.START] < held[:, Fragment.STOP]]
        row, found = overlaps(wanted, held)
        expected = [
            (i, j) for i, one in enumerate(wanted) for j, other in enumerate(held) if tokens(one) & tokens(other)
        ]
        assert sorted(zip(row.tolist(), found.tolist(), strict=True)) == expected
        assert (np.diff(row) >= 0).all()


def test_of_disjoint_intervals_the_bounds_hold_those_that_overlap_and_no_others() -> None:
    for seed in range(30):
        wanted, held = draw(seed, 5), union(draw(seed + 100, 6))
        for one, first, last in zip(wanted, *overlap_bounds(wanted, held), strict=True):
            expected = [j for j, other in enumerate(held) if tokens(one) & tokens(other)]
            assert list(range(first, last)) == expected


def test_a_union_is_disjoint_and_a_token_held_twice_is_found() -> None:
    for seed in range(30):
        rows = draw(seed, seed % 9)
        held = [token for row in rows for token in tokens(row)]
        for joined, expected in ((union(rows), set(held)), (held_twice(rows), {t for t in held if held.count(t) > 1})):
            assert [t for row in joined for t in sorted(tokens(row))] == sorted(expected)  # in order, none twice
            assert not any(
                a[0] == b[0] and a[2] == b[1] for a, b in zip(joined, joined[1:], strict=False)
            )  # touching ones are one
