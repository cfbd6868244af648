"""Weights by token against losses computed directly, whatever rank has which rollout."""

from typing import Any

import numpy as np
import pytest

from megatron_balance.errors import BalanceError
from megatron_balance.workloads.normalisations import NORMALISATIONS, sequence_ratios, token_weights
from megatron_balance.workloads.rollouts import as_trees

PROMPTS = ([5, 6, 7, 8], [5, 6, 9])
LENGTHS = (3, 7, 1, 4, 9)
GROUPS = ("a", "b", "a", "b", "b")
ADVANTAGES = (1.5, -0.5, -2.0, 0.25, 1.0)
CONSTANT = 12


def rollouts() -> tuple[list[list[int]], list[list[bool]], list[np.ndarray]]:
    # Tokens of prompt and response, whether each counts, and its loss, by all tokens before it.
    draw = np.random.default_rng(0)
    tokens, counts, losses = [], [], []
    for length, group in zip(LENGTHS, GROUPS, strict=True):
        prompt = PROMPTS[group == "b"]
        response = [10, *draw.integers(11, 14, length - 1).tolist()]
        tokens.append([*prompt, *response])
        counts.append([False] * len(prompt) + [True] * length)
        losses.append(np.array([hash(tuple(tokens[-1][: at + 1])) % 1000 / 100 for at in range(len(tokens[-1]))]))
    return tokens, counts, losses


def direct(how: str, counts: list[list[bool]], losses: list[np.ndarray]) -> float:
    # The published formula in words of loops.
    own = [[a * loss for loss, counted in zip(each, mask, strict=True) if counted]
           for a, each, mask in zip(ADVANTAGES, losses, counts, strict=True)]  # fmt: skip
    if how == "token":
        return sum(map(sum, own)) / sum(map(len, own))
    if how == "sequence":
        return sum(sum(each) / len(each) for each in own) / len(own)
    if how == "constant":
        return sum(sum(each) / CONSTANT for each in own) / len(own)
    of_groups = [[loss for each, label in zip(own, GROUPS, strict=True) if label == group for loss in each]
                 for group in "ab"]  # fmt: skip
    return sum(sum(each) / len(each) for each in of_groups) / 2


@pytest.mark.parametrize("how", NORMALISATIONS)
def test_the_weighted_sum_is_the_normalised_loss_on_any_ranks_as_documents_and_as_trees(how: str) -> None:
    tokens, counts, losses = rollouts()
    weights = token_weights(counts, ADVANTAGES, how, groups=GROUPS, constant=CONSTANT)
    expected = direct(how, counts, losses)
    # Group b lies on two ranks, and one rank has nothing.
    shares = [[sum(float(weights[at] @ losses[at]) for at in rank) for rank in ((0, 1, 2), (), (3, 4))]]
    assert sum(map(sum, shares)) == pytest.approx(expected, abs=1e-12)
    # What rollouts share is one row, which weighs as much as all of them there.
    total = 0.0
    for rank in ((0, 1, 2), (), (3, 4)):
        made = as_trees([tokens[at] for at in rank])
        rows = made.weights([weights[at] for at in rank])
        of_rows = np.zeros(len(rows))
        for at, path in zip(rank, made.paths, strict=True):
            on_path = np.concatenate([np.arange(*run) for run in path])
            of_rows[on_path[:-1]] = losses[at][1:]
        total += float(rows @ of_rows)
    assert total == pytest.approx(expected, abs=1e-12)
    assert len({round(direct(each, counts, losses), 9) for each in NORMALISATIONS}) == len(NORMALISATIONS)


def test_gspos_ratios_give_the_gradient_of_its_clipped_loss() -> None:
    _, counts, _ = rollouts()
    draw, (low, high) = np.random.default_rng(1), (0.2, 0.3)
    log_ratios = [draw.normal(0, 0.1, len(each)) + shift for each, shift in
                  zip(counts, (0.5, -0.5, 0.4, -0.4, 0.05), strict=True)]  # fmt: skip

    def loss(moved: list[np.ndarray]) -> float:
        total = 0.0
        for values, mask, advantage in zip(moved, counts, ADVANTAGES, strict=True):
            ratio = np.exp(values[mask].mean())
            total -= min(ratio * advantage, float(np.clip(ratio, 1 - low, 1 + high)) * advantage)
        return total / len(counts)

    ratios = sequence_ratios(log_ratios, counts, ADVANTAGES, (low, high))
    # Of the first and the second the clip binds; the next two are as far off on the other side.
    assert (ratios == 0).tolist() == [True, True, False, False, False]
    weights = token_weights(counts, (np.array(ADVANTAGES) * ratios).tolist(), "sequence")
    for at, mask in enumerate(counts):
        for token in range(len(mask)):
            moved = [each.copy() for each in log_ratios]
            moved[at][token] += 1e-6
            assert (loss(moved) - loss(log_ratios)) / 1e-6 == pytest.approx(-weights[at][token], abs=1e-5)


def test_rollouts_without_tokens_that_count_weigh_nothing_and_advantages_may_be_by_token() -> None:
    counts = [[False, True, True], [False, False]]
    for how in NORMALISATIONS:
        weights = token_weights(counts, [[9.0, 2.0, 4.0], 3.0], how, constant=2)
        assert weights[1].tolist() == [0.0, 0.0]
        assert weights[0][2] == 2 * weights[0][1] > 0
        assert token_weights([], [], how, constant=2) == []
    assert token_weights(counts, [1.0, 1.0], "group", groups=["a", "b"])[0].sum() == 1  # one group has tokens


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (([[True]], [1.0], "tokens"), "expected one of token, sequence, group, constant"),
        (([[True]], [1.0], "constant"), "expected constant, more than 0"),
        (([[True]], [1.0, 2.0], "token"), "each of 1 rollouts, got 2 and 1"),
        (([[True]], [[1.0, 2.0]], "token"), r"rollout 0: expected a finite advantage.*\[2\]"),
        (([[True]], [float("nan")], "token"), "rollout 0: expected a finite advantage"),
    ],
)
def test_what_cannot_be_weighed_is_refused(given: Any, message: str) -> None:
    with pytest.raises(BalanceError, match=message):
        token_weights(*given)
    with pytest.raises(BalanceError, match="rollout 0: expected a log ratio"):
        sequence_ratios([[0.1, 0.2]], [[True]], [1.0], (0.2, 0.2))
