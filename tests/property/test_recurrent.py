"""Recurrent layers under any layout: proved, read back from text, equal to each sequence alone; and
whatever is changed in a program is refused."""

import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_balance.compile.pipeline import layout
from megatron_balance.compile.proof.recurrent import verify_recurrent
from megatron_balance.compile.recurrent import compile_recurrent, program_of
from megatron_balance.errors import ConfigError, InvalidProgramError
from megatron_balance.ir.arrays import as_rows
from megatron_balance.ir.batch import Batch
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.forest import Forest, Segment, num_tokens
from megatron_balance.ir.model import Model
from megatron_balance.ir.recurrent import RecurrentProgram
from megatron_balance.ir.text import parse_recurrent, text
from megatron_balance.planners import PLANNERS
from tests.support import forests, recurrent
from tests.support.strategies import ALL_PLANNERS, Case, cases, examples, plan

NUM_LAYOUTS = 500
NUM_MUTATED = 150


def drawn(seed: int, most: int = 30) -> RecurrentProgram:
    rng = random.Random(seed)
    lengths, owned = recurrent.random_layout(rng, rng.choice([2, 4, 8, 64]), most)
    return program_of(lengths, owned, rng.choice([0, 1, 2, 5]), rng.choice([0, 1, 3]))


def assert_right(program: RecurrentProgram, seed: int) -> None:
    # Proved as it stands; read back; equal to each sequence alone.
    verify_recurrent(program)
    assert parse_recurrent(text(program)) == program
    assert recurrent.off(program, seed, recurrent.KINDS[seed % len(recurrent.KINDS)]) < 1e-12


@pytest.mark.parametrize("part", range(5))
def test_any_layout_is_proved_read_back_and_equal_to_each_sequence_alone(part: int) -> None:
    for seed in range(part, NUM_LAYOUTS, 5):
        assert_right(drawn(seed), seed)


def of_trees(seed: int) -> RecurrentProgram:
    rng = random.Random(seed)
    trees, owned = recurrent.random_trees(rng, rng.choice([1, 2, 4, 8]))
    return program_of([*map(num_tokens, trees)], owned, rng.choice([0, 1, 2, 5]), rng.choice([0, 1, 3]), trees)


def test_any_layout_of_trees_is_proved_read_back_and_equal_to_each_path_alone() -> None:
    for seed in range(NUM_LAYOUTS // 5):
        assert_right(of_trees(seed), seed)


@pytest.mark.parametrize("planner", [*ALL_PLANNERS, *forests.GATHERS])
def test_any_plan_of_trees_is_proved_and_equal_to_each_path_alone(planner: str) -> None:
    for seed in range(3):
        forest, case = forests.drawn(random.Random(seed))
        causal = Forest(
            tuple(tuple(each._replace(full=False) for each in tree) for tree in forest.trees), forest.window
        )
        case = replace(case, batch=Batch(causal.lengths, causal.trees))
        planned = forests.with_layers(random.Random(seed), forests.planned(planner, causal, case))
        program = compile_recurrent(planned, 2, 3)
        assert program.trees == causal.trees
        assert_right(program, seed)


def test_full_segments_are_refused_since_no_recurrence_shows_later_tokens() -> None:
    trees = ((Segment(3, -1, full=True), Segment(2, 0)),)
    with pytest.raises(ConfigError, match="expected causal segments for recurrent layers, got full ones"):
        program_of((5,), [as_rows(np.array([[0, 0, 5]]))], 1, 3, trees)


@pytest.mark.parametrize("planner", ALL_PLANNERS)
@examples(6)
@given(case=cases((2, 4, 8), max_length=60, max_sequences=5), heads=st.integers(1, 5), halo=st.integers(0, 3))
def test_any_plan_with_or_without_a_remap_is_proved_and_equal_to_each_sequence_alone(
    planner: str, case: Case, heads: int, halo: int
) -> None:
    planned = plan(planner, case)
    program = compile_recurrent(planned, heads, halo)
    assert [rows.data for rows in program.owned] == [as_rows(layout(planned, r)).data for r in range(planned.num_ranks)]
    assert_right(program, case.seed)


@pytest.mark.parametrize("planner", PLANNERS)
def test_plans_of_64_ranks_are_proved(planner: str) -> None:
    # Long sequences over many ranks, short ones, one token; with everything remapped at random.
    batch, cluster, model = Batch((1500, 700, 300, 40, 9, 1)), Cluster(64, 8), Model(8, 2, 16)
    case = Case(batch, cluster, model, None, 0, remapped=True)
    program = compile_recurrent(plan(planner, case), 5, 3)
    verify_recurrent(program)
    assert len(program.forward) > 3


@pytest.mark.parametrize("trees", [False, True])
def test_whatever_is_changed_is_refused_or_computes_the_same(trees: bool) -> None:
    refused, same = Counter[str](), Counter[str]()
    for seed in range(NUM_MUTATED):
        program, rng = of_trees(seed) if trees else drawn(seed, 12), random.Random(seed)
        for _ in range(8 if program.forward else 0):
            what, mutant = recurrent.changed(program, rng)
            try:
                verify_recurrent(mutant)
            except InvalidProgramError:
                refused[what] += 1
            else:
                same[what] += 1
                assert recurrent.off(mutant, seed, "kda") < 1e-12, (what, text(mutant))
    # An op may stand before one that it has nothing to do with, a row before one of another sequence.
    assert set(same) <= {"order", "one op earlier"}, same
    assert refused.pop("order") > 4
    assert min(refused.values()) > 20, refused
