"""Trees: what is one, what they are in JSON and text, positions along their paths."""

from random import Random

import numpy as np
import pytest

from megatron_balance import Batch
from megatron_balance.errors import ConfigError, InvalidProgramError
from megatron_balance.ir import arrays
from megatron_balance.ir.arrays import Rectangles, split
from megatron_balance.ir.forest import Forest, Segment, checked, document, num_pairs, over, path_positions, tree_of
from megatron_balance.ir.mask import CAUSAL, FOREST, FULL, SlidingWindow, kind_of
from megatron_balance.ir.plan import MicrobatchPlan, Zone, from_json, to_json
from megatron_balance.ir.program import Program
from megatron_balance.ir.text import parse, text
from tests.support.forests import dense, some_forest, some_tree, visible

ROLLOUTS = (Segment(3, -1), Segment(2, 0), Segment(4, 0, full=True))
LENGTHS = (9, 5)
FORESTS = (Forest((ROLLOUTS, document(5))), Forest((ROLLOUTS, document(5)), window=3))


@pytest.mark.parametrize(
    ("tree", "complaint"),
    [
        ([], "sequence 0: no segments"),
        ([(3, 0, False)], r"segment 0: parent 0; depth first it is -1, since it is the root"),
        ([(3, -1, False), (2, -1, False)], "segment 1: a second root"),
        ([(3, -1, False), (2, 0, False), (2, 0, False), (2, 1, False)], r"segment 3: parent 1; .* one of \[0, 2\]"),
        ([(3, -1, False), (0, 0, False)], "segment 1: 0 tokens; a segment has at least 1"),
        ([(3, -1, 0)], "two ints and a bool"),
        ([(3, -1)], "two ints and a bool"),
        ([(3.0, -1, False)], "two ints and a bool"),
    ],
)
def test_what_is_no_tree_is_refused_by_segment(tree, complaint):
    with pytest.raises(ConfigError, match=complaint):
        checked([tree])


def test_a_batch_has_a_tree_of_the_length_of_each_sequence():
    assert Batch(LENGTHS, FORESTS[0].trees).num_tokens == 14
    bare = ((3, -1, False), (2, 0, False), (4, 0, True))
    assert Batch((9,), (bare,)).trees == (ROLLOUTS,)  # pyright: ignore[reportArgumentType]
    assert Batch((9,), (bare,)).trees[0][2].full  # pyright: ignore[reportArgumentType]
    for lengths in ((9, 4), (9,), (5, 9)):
        with pytest.raises(ConfigError, match="has the length of its tree"):
            Batch(lengths, FORESTS[0].trees)


def test_rollouts_one_by_one_are_paths_whose_full_segments_stay():
    tree = (Segment(3, -1), Segment(2, 0, full=True), Segment(1, 1), Segment(2, 2), Segment(4, 0))
    paths = ((Segment(3, -1), Segment(2, 0, full=True), Segment(3, 1)), document(7))
    assert Batch((12,), (tree,)).flattened() == Batch((8, 7), paths)
    assert Batch((7, 9), (document(7), ROLLOUTS)).flattened().trees[0] == document(7)
    assert Batch((5,), ((Segment(3, -1), Segment(2, 0)),)).flattened() == Batch((5,))
    assert Batch((5,)).flattened() == Batch((5,))


def test_the_mask_of_a_batch_is_a_forest_only_where_one_of_its_trees_branches():
    assert over(CAUSAL, ()) == over(CAUSAL, (document(3), document(4))) == CAUSAL
    assert over(SlidingWindow(3), (document(3),)) == SlidingWindow(3)
    assert over(CAUSAL, FORESTS[0].trees) == FORESTS[0]
    assert over(SlidingWindow(3), FORESTS[1].trees) == FORESTS[1]
    assert over(CAUSAL, ((Segment(3, -1, full=True),),)).name == "forest"
    with pytest.raises(ConfigError, match="siblings"):
        over(FULL, FORESTS[0].trees)


def plan(mask):
    return MicrobatchPlan("by hand", LENGTHS, 2, 2, 4, 2, (Zone("all", "all_gather", (0, 1), (0, 1)),), mask=mask)


@pytest.mark.parametrize("mask", FORESTS, ids=lambda mask: mask.name)
def test_plans_and_programs_have_their_trees_beside_the_name_of_the_mask(mask):
    assert kind_of(mask) == FOREST
    written = to_json(plan(mask))
    assert f'"mask":"{mask.name}","trees":[[[3,-1,false],[2,0,false],[4,0,true]],[[5,-1,false]]]' in written
    assert from_json(written) == plan(mask)
    program = Program(LENGTHS, 4, 2, (), (), mask=mask)
    assert f"mask {mask.name}\ntree s0 3 2<0 4f<0\ntree s1 5\n" in text(program)
    assert parse(text(program)) == program


def test_plans_without_trees_are_written_as_before():
    assert "trees" not in to_json(plan(CAUSAL)) + to_json(plan(SlidingWindow(3)))
    assert plan(CAUSAL).fingerprint() == "f4c6efeb9b7b3f90"


def test_other_trees_are_another_plan():
    others = [
        Forest(((Segment(3, -1), Segment(2, 0), Segment(4, 1, full=True)), document(5))),
        Forest(((Segment(3, -1), Segment(2, 0), Segment(4, 0)), document(5))),
        Forest(((Segment(2, -1), Segment(3, 0), Segment(4, 0, full=True)), document(5))),
        FORESTS[1],
        CAUSAL,
    ]
    prints = [plan(mask).fingerprint() for mask in (FORESTS[0], *others)]
    assert len(set(prints)) == len(prints)


def test_damaged_trees_are_refused_where_they_are_read():
    written = to_json(plan(FORESTS[0]))
    for old, new, complaint in (
        ('"forest"', '"full"', "trees under mask 'full'"),
        ('"forest"', '"forest_window_0"', "forest_window_KEYS"),
        ("[2,0,false]", "[2,5,false]", "parent 5"),
        ("[[5,-1,false]]", "7", "TypeError"),
        (',"trees"', ',"tree"', "unknown mask 'forest'"),
    ):
        with pytest.raises(ConfigError, match=complaint):
            from_json(written.replace(old, new))
    lines = text(Program(LENGTHS, 4, 2, (), (), mask=FORESTS[0]))
    for old, new, complaint in (
        ("s1 5", "s2 5", "line 3: expected 'tree s1"),
        ("2<0", "2>0", "line 2"),
        ("2<0", "2<7", "line 1"),
    ):
        with pytest.raises(InvalidProgramError, match=complaint):
            parse(lines.replace(old, new))


def test_positions_along_paths_say_the_tree():
    assert path_positions(ROLLOUTS) == [0, 1, 2, 3, 4, 3, 4, 5, 6]
    assert tree_of([0, 1, 2, 3, 4, 3, 4, 5, 6]) == (Segment(3, -1), Segment(2, 0), Segment(4, 0))
    assert tree_of([0, 1, 2]) == document(3)
    random = Random(0)
    for _ in range(200):
        tree = tuple(segment._replace(full=False) for segment in some_tree(random))
        positions = path_positions(tree)
        found = tree_of(positions)
        assert path_positions(found) == positions
        # Segments without siblings may be one with those above.
        np.testing.assert_array_equal(visible(found), visible(tree))


@pytest.mark.parametrize(
    ("positions", "complaint"),
    [
        ([1, 2], "position 1 of token 0"),
        ([0, 1, 3], "position 3 of token 2"),
        ([0, 1, 0], "position 0 of token 2"),
        ([0, 1, 2, 1, 3], "position 3 of token 4"),
        ([0, -1], "position -1 of token 1"),
    ],
)
def test_positions_of_no_tree_are_refused(positions, complaint):
    with pytest.raises(ConfigError, match=complaint):
        tree_of(positions)


@pytest.mark.parametrize("window", [0, 1, 3, 20])
def test_a_forest_shows_what_its_paths_have(window):
    # Hulls of what a query sees and of who sees a key, tokens on a path, pairs; cells of any
    # rectangle hold what is visible of it, once, and nothing else.
    random = Random(window)
    for _ in range(30):
        forest = some_forest(random, window=window)
        of = forest.segments
        for seq, shown in enumerate(dense(forest)):
            tokens = np.arange(len(shown))
            seqs = np.full_like(tokens, seq)
            assert num_pairs(forest.trees[seq], window) == shown.sum()
            first, stop = forest.keys(seqs, tokens)
            assert first.tolist() == shown.argmax(axis=1).tolist()
            assert stop.tolist() == (len(shown) - shown[:, ::-1].argmax(axis=1)).tolist()
            first, stop = forest.queries(seqs, tokens)
            whole = visible(forest.trees[seq])
            assert first.tolist() == whole.argmax(axis=0).tolist()
            assert stop.tolist() == (len(whole) - whole[::-1].argmax(axis=0)).tolist()
            places = np.array(path_positions(forest.trees[seq]))
            above = places[:, None] // 2
            assert (places[of.on_path(seqs, tokens, above[:, 0])] == above[:, 0]).all()
            assert whole[tokens, of.on_path(seqs, tokens, above[:, 0])].all()
            corners = np.sort([[random.randint(0, len(shown)) for _ in range(4)] for _ in range(8)], axis=1)
            for a, b, c, d in (*corners.tolist(), [0, len(shown)] * 2):
                for q_start, q_stop, k_start, k_stop in ((a, b, c, d), (c, d, a, b), (a, c, b, d)):
                    assert_split(forest, seq, (q_start, q_stop, k_start, k_stop), shown)


def assert_split(forest, seq, rectangle, shown):
    counted = np.zeros(shown.shape, dtype=int)
    rectangles = Rectangles(*np.array([rectangle]).T)
    row, cells = split(np.array([seq]), rectangles, forest)
    assert not row.any()
    causal, reach = forest.band(np.full(len(row), seq), cells.q_start, cells.k_start)
    reach = np.broadcast_to(reach, row.shape)
    for q_start, q_stop, k_start, k_stop, behind, most in zip(*cells, causal, reach, strict=True):
        q, k = np.ogrid[q_start:q_stop, k_start:k_stop]
        pairs = (q < k + most) & (~behind | (k <= q))
        assert pairs.any(axis=0).all()
        assert pairs.any(axis=1).all()
        counted[q_start:q_stop, k_start:k_stop] += pairs
    wanted = np.zeros(shown.shape, dtype=int)
    inside = slice(*rectangle[:2]), slice(*rectangle[2:])
    wanted[inside] = shown[inside]
    np.testing.assert_array_equal(counted, wanted)
    assert arrays.num_pairs(np.array([seq]), rectangles, forest).tolist() == [wanted.sum()]


def test_position_ids_of_several_trees_are_their_forest() -> None:
    forest = Forest(((Segment(2, -1), Segment(1, 0), Segment(3, 0)), document(1), document(4)))
    ids = [position for tree in forest.trees for position in path_positions(tree)]
    assert ids == [0, 1, 2, 2, 3, 4, 0, 0, 1, 2, 3]
    assert Forest.from_position_ids(ids) == forest
    assert Forest.from_position_ids([]) == Forest(())
    for wrong in ([1, 2], [0, 2]):
        with pytest.raises(ConfigError, match="a tree begins with position 0"):
            Forest.from_position_ids(wrong)
