"""Trees from files, and drawn ones."""

import json
from pathlib import Path

import numpy as np
import pytest

from megatron_balance.errors import ConfigError
from megatron_balance.ir.forest import Segment, checked, document, num_tokens
from megatron_balance.workloads.trees import SHAPES, draw_trees, read_trees


def written(folder: Path, content: object) -> Path:
    path = folder / "trees.json"
    path.write_text(json.dumps(content))
    return path


def test_trees_are_read_as_segments_as_lengths_and_as_rollouts(tmp_path: Path) -> None:
    tree = [[8, -1, "full"], [3, 0], [4, 0, "causal"]]
    content = [[tree, 100], {"rollouts": [[1, 2, 3, 4], [1, 2, 3, 5, 6]]}]
    shapes, rollouts = read_trees(written(tmp_path, content))
    assert shapes == ((Segment(8, -1, full=True), Segment(3, 0), Segment(4, 0)), document(100))
    # They share 1 and 2; the 3 is there for each of them, since another token follows it.
    assert rollouts == ((Segment(2, -1), Segment(3, 0), Segment(2, 0)),)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"rollouts": [[1]]}, "expected batches of trees"),
        ([[]], "batch 0: expected batches of trees"),
        ([[5], [[[5, -1, "both"]]]], r"batch 1: segment \[5, -1, 'both'\]; expected batches"),
        ([[[5, -1]]], "batch 0: segment 5; expected batches"),
        ([[[[5, -1], [2, -1]]]], "batch 0: tree of sequence 0, segment 1: a second root"),
        ([[[[5, -1], [0, 0]]]], "segment 1: 0 tokens; a segment has at least 1"),
        ([[[[5.5, -1]]]], r"expected \(length, parent, full\)"),
        ([[0]], "batch 0: tree of sequence 0, segment 0: 0 tokens"),
        ([{"rollouts": [[]]}], "batch 0: rollout 0: expected token ids"),
        ([{"rollout": [[1]]}], "batch 0: expected batches of trees"),
    ],
)
def test_what_is_no_tree_is_named(tmp_path: Path, content: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_trees(written(tmp_path, content))


def test_drawn_trees_have_their_shape_and_stay_within_their_tokens() -> None:
    for name in SHAPES:
        batches = draw_trees(name, 500_000, 3, 1)
        assert batches == draw_trees(name, 500_000, 3, 1) != draw_trees(name, 500_000, 3, 2)
        for batch in batches:
            assert checked(batch) == batch
            assert 350_000 < sum(map(num_tokens, batch)) <= 500_000
    (tree,) = draw_trees("rollouts:prompt=16k,responses=64", 1, 1, 0)[0]
    assert (tree[0], len(tree)) == (Segment(16 * 1024 - 1, -1), 65)
    responses = [each.length - 1 for each in tree[1:]]
    assert all(each.parent == 0 for each in tree[1:])
    assert responses == sorted(responses, reverse=True)
    assert 200 <= min(responses) < max(responses) <= 8192
    # Three times in two: 8 trajectories, of about 550 tokens a turn.
    (tree,) = draw_trees("agents", 1, 1, 0)[0]
    parents = [each.parent for each in tree]
    assert sorted(map(parents.count, range(len(tree)))) == [0] * 8 + [2] * 7
    turns = [num_tokens(tree) for (tree,) in draw_trees("agents:branches=2,turns=40,system=2", 1, 50, 0)]
    # Two branches from turn 0, each of which parts again at turn 10: 10 turns twice, 30 four times.
    expected = (2 * 10 + 4 * 30) * (150 * np.exp(0.7**2 / 2) + 400 * np.exp(0.9**2 / 2))
    assert np.mean(turns) == pytest.approx(expected, rel=0.05)


def test_drawn_full_segments_have_their_shape() -> None:
    clips, prefixes, images = (
        [tree for batch in draw_trees(name, 300_000, 5, 1) for tree in batch]
        for name in ("video", "prefixes", "images")
    )
    for tree in (*clips, *images):
        assert [each.parent for each in tree] == [*range(-1, len(tree) - 1)]
    assert {each[::2] for tree in clips for each in tree} == {(1560, True)}
    assert {len(tree) for tree in draw_trees("video:shortest=8,longest=9", 300_000, 1, 1)[0]} == {8, 9}
    for prefix, answer in prefixes:
        assert (prefix.full, answer.full, answer.parent) == (True, False, 0)
        assert 1000 <= prefix.length <= 32000
        assert 200 < answer.length <= 4000
    assert {each.length for tree in images for each in tree[1::2]} == {256, 1024, 4096}
    assert {each.full for tree in images for each in tree[::2]} == {False}
    assert 50 < min(each.length for tree in images for each in tree[::2]) <= 60
    assert {len(tree) for tree in images} >= {4, 24}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("rollouts:responses", "'responses': expected rollouts:FIELD=NUMBER"),
        ("rollouts:turns=3", "of prompt, responses, shortest, longest, each at least 2"),
        ("agents:turns=0", "each at least 2"),
        ("rollouts:longest=100", "expected shortest at most longest, got 200 and 100"),
        ("video:shortest=50", "expected shortest at most longest, got 50 and 48"),
    ],
)
def test_shapes_that_cannot_be_are_named(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        draw_trees(name, 1, 1, 0)
