"""Rollouts as trees: rows, labels, weights, what each row sees; TRL packs the same ones."""

import runpy
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from itertools import pairwise, permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_balance.errors import DataError
from megatron_balance.ir.arrays import Bools
from megatron_balance.ir.forest import Tree
from megatron_balance.workloads.rollouts import IGNORED, Rollouts, as_trees, joined
from tests.support import forests


def drawn(seed: int) -> list[list[int]]:
    """Lists of few words, which part early and often; some are equal, or the beginning of others."""
    rng = np.random.default_rng(seed)
    words = int(rng.integers(2, 5))
    made = [rng.integers(0, words, int(rng.integers(1, 16))).tolist() for _ in range(int(rng.integers(1, 12)))]
    made += [made[0].copy(), made[0][: max(1, len(made[0]) // 2)], [*made[-1], 0, 1]]
    return [made[at] for at in rng.permutation(len(made))]


def visible(trees: Sequence[Tree]) -> Bools:
    """Whether row [T] sees row [T] of all trees."""
    parts = [forests.visible(tree) for tree in trees]
    starts = np.cumsum([0, *map(len, parts)])
    shown = np.zeros((starts[-1], starts[-1]), dtype=bool)
    for start, part in zip(starts, parts, strict=False):
        shown[start : start + len(part), start : start + len(part)] = part
    return shown


def rows_of(made: Rollouts) -> list[np.ndarray]:
    return np.split(made.rows, np.cumsum(made.lengths)[:-1])


@pytest.mark.parametrize("first", range(0, 250, 50))
def test_every_token_of_every_rollout_has_its_row_label_position_and_view(first: int) -> None:
    for seed in range(first, first + 50):
        rollouts = drawn(seed)
        made = as_trees(rollouts)
        shown = visible(made.trees)
        assert not any(segment.full for tree in made.trees for segment in tree)
        assert made.lengths == tuple(map(len, rollouts))
        for rollout, rows in zip(rollouts, rows_of(made), strict=True):
            assert made.tokens[rows].tolist() == rollout
            assert made.labels[rows].tolist() == [*rollout[1:], IGNORED]
            assert made.position_ids[rows].tolist() == list(range(len(rollout)))
            for at, row in enumerate(rows):
                assert np.flatnonzero(shown[row]).tolist() == sorted(rows[: at + 1])
        assert set(made.rows) == set(range(len(made.tokens))), "every row is of a rollout"
        alone = sum(n * (n + 1) // 2 for n in map(len, rollouts))
        assert made.sharing == (sum(map(len, rollouts)), len(made.tokens), alone, shown.sum())


def test_trees_are_taken_apart_and_joined_in_any_order() -> None:
    for seed in range(60):
        made = as_trees(drawn(seed))
        apart = made.by_tree()[::-1]
        order = [at for own, _ in apart for at in own]
        assert sorted(order) == list(range(len(made.paths)))
        again = joined([Rollouts.of_state(*each.state()) for _, each in apart])
        assert again.trees == made.trees[::-1]
        for at, other in zip(order, rows_of(again), strict=True):
            assert made.tokens[rows_of(made)[at]].tolist() == again.tokens[other].tolist()
            assert made.labels[rows_of(made)[at]].tolist() == again.labels[other].tolist()


@cache
def tree_row() -> Any:
    """TRL's class, from its file: its package loads trainers."""
    if (trl := find_spec("trl")) is None or trl.origin is None:
        pytest.skip("needs TRL, of the extra 'hf'")
    return runpy.run_path(str(Path(trl.origin).parent / "experimental" / "async_grpo" / "packing.py"))["TreeRow"]


def packed(rollouts: Sequence[Sequence[int]], trained: Sequence[np.ndarray]) -> tuple[dict[str, Any], list[list[int]]]:
    """Return what TRL packs, and of each of its segments the rows of its path."""
    row = tree_row()()
    for ids, mask in zip(map(np.array, rollouts), trained, strict=True):
        sample = {"input_ids": ids, "completion_mask": mask, "old_log_probs": np.zeros(len(ids))}
        row.add({**sample, "advantage": 1.0, "group_id": 0})
    made = {name: each.tolist() for name, each in row.pack().items()}
    ends = pairwise(made["tree_cu_seqlens_k"])
    return made, [made["tree_kv_index"][start:stop] for start, stop in ends]


@pytest.mark.parametrize("first", range(0, 200, 50))
def test_trl_packs_the_same_rows_labels_loss_terms_and_mask(first: int) -> None:
    for seed in range(first, first + 50):
        rollouts = drawn(seed)
        rng = np.random.default_rng(seed)
        trained = [rng.integers(0, 2, len(rollout)) for rollout in rollouts]
        made, (theirs, paths) = as_trees(rollouts), packed(rollouts, trained)
        assert len(theirs["input_ids"]) == len(made.tokens)
        above = {
            tuple(path[:-length]) for path, length in zip(paths, np.diff(theirs["tree_cu_seqlens_q"]), strict=True)
        }
        leaves = {tuple(theirs["input_ids"][at] for at in path): path for path in paths if tuple(path) not in above}
        ours = np.full(len(made.tokens), -1)  # by their place, our row
        for rollout, rows in zip(rollouts, rows_of(made), strict=True):
            places = leaves[tuple(rollout)]
            assert set(ours[places]) <= {-1, *rows}
            ours[places] = rows
        assert sorted(ours) == list(range(len(made.tokens))), "the same tokens are shared"
        assert made.tokens[ours].tolist() == theirs["input_ids"]
        assert made.position_ids[ours].tolist() == theirs["position_ids"]
        # How many loss terms a row has: their list of them, and our weights of what is trained.
        terms = np.bincount(ours[theirs["token_index"]], minlength=len(ours))
        assert made.weights(trained).tolist() == terms.tolist()
        assert np.where(terms > 0, made.labels, IGNORED)[ours].tolist() == theirs["shift_labels"]
        # A varlen call, causal from the lower right corner.
        shown = np.zeros((len(ours), len(ours)), dtype=bool)
        for path, (start, stop) in zip(paths, pairwise(theirs["tree_cu_seqlens_q"]), strict=True):
            for query in range(start, stop):
                shown[query, path[: len(path) - (stop - 1 - query)]] = True
        assert (visible(made.trees)[np.ix_(ours, ours)] == shown).all()


@pytest.mark.parametrize("seed", range(20))
def test_a_weight_is_the_sum_over_the_rollouts_that_pass_a_row(seed: int) -> None:
    rollouts, rng = drawn(seed), np.random.default_rng(seed)
    made = as_trees(rollouts)
    weights = [rng.standard_normal(len(rollout)) for rollout in rollouts]
    nll = rng.random((len(made.tokens), 5))  # of each row and next token
    loss = 0.0
    for rollout, rows, each in zip(rollouts, rows_of(made), weights, strict=True):
        loss += sum(each[p] * nll[rows[p - 1], rollout[p]] for p in range(1, len(rollout)))
    kept = made.labels != IGNORED
    total = made.weights(weights)
    assert (total[kept] * nll[kept, made.labels[kept]]).sum() == pytest.approx(loss, abs=1e-12)
    assert not total[~kept].any()


def test_trees_do_not_depend_on_the_order_and_the_heaviest_child_is_first() -> None:
    rollouts = [[1, 2, 3], [1, 2, 4, 5, 6], [1, 2, 4, 7], [9, 9]]
    for given in permutations(rollouts):
        made = as_trees(given)
        assert made.trees == (
            ((1, -1, False), (1, 0, False), (3, 1, False), (2, 1, False), (2, 0, False)),
            ((2, -1, False),),
        )
        assert made.tokens.tolist() == [1, 2, 4, 5, 6, 4, 7, 2, 3, 9, 9]
    assert as_trees([[5], [5], [5]]).trees == (((1, -1, False),),)
    assert as_trees([]).sharing == (0, 0, 0, 0)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ([[1], []], r"rollout 1: expected token ids \[n\], at least one, none below 0; got \[0\]"),
        ([[1.5]], "rollout 0: expected token ids"),
        ([[3, IGNORED]], "none below 0"),
        ([3], r"got \[\] of int64"),
        ([np.ones((2, 2), dtype=np.int64)], "without padding"),
    ],
)
def test_what_is_no_rollout_is_refused(given: Any, told: str) -> None:
    with pytest.raises(DataError, match=told):
        as_trees(given)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ([[1.0]], "weights for each of 2 rollouts, got 1"),
        ([[1.0, 1.0], [1.0]], r"weights of rollout 1: expected 2 finite numbers, one for each token, got \[1\]"),
        ([[1.0, 1.0], [0.0, float("nan")]], "weights of rollout 1: expected 2 finite numbers, .* got others"),
    ],
)
def test_weights_that_do_not_fit_are_refused(given: Any, told: str) -> None:
    with pytest.raises(DataError, match=told):
        as_trees([[1, 2], [1, 3]]).weights(given)
