"""Recurrent layers on real gloo ranks against each sequence alone: values, gradients, bytes."""

import logging
import random

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from megatron_balance import Batch, Cluster, Model
from megatron_balance.analysis.recurrent import SummarySizes, bytes_moved
from megatron_balance.compile.recurrent import compile_recurrent, program_of
from megatron_balance.ir.columns import Rows
from megatron_balance.ir.forest import Segment, num_tokens
from megatron_balance.ir.recurrent import RecurrentProgram
from megatron_balance.recurrent_reference import Recurrence
from megatron_balance.reference import owned_rows
from tests.support import recurrent, strategies
from tests.support.pool import Pool
from tests.support.recurrent_jobs import (
    FAULTS,
    RecurrentRun,
    beside_attention,
    faulty_run,
    kept_bytes,
    narrow,
    on_streams,
    recurrent_run,
)

log = logging.getLogger(__name__)
TOLERANCE = {"float64": 1e-12, "float32": 2e-6}
HEADS, HALO = 3, 3
NUM_LAYOUTS = 40


def assert_equal_alone(pool: Pool, program: RecurrentProgram, seed: int, fault: str | None = None) -> None:
    rng = random.Random(seed)
    kind = rng.choice(recurrent.KINDS) if fault is None else "kda"
    dtype = rng.choice(list(TOLERANCE))
    x, taps, dout = recurrent.draw(kind, program.lengths, program.num_heads, program.halo, seed)
    job = (recurrent_run,) if fault is None else (faulty_run, fault)
    ranks: list[RecurrentRun] = pool.run(
        job[0], program.num_ranks, *job[1:], program, (kind, dtype, rng.random() < 0.3), x, taps, dout
    )
    alone = recurrent.by_path(program.trees, x, taps, dout) if program.trees else recurrent.alone(x, taps, dout)

    def assert_close(got: np.ndarray, wanted: np.ndarray, what: str) -> None:
        assert got.shape == wanted.shape, what
        largest = max(1.0, float(np.abs(wanted).max(initial=0.0)))
        assert np.abs(got - wanted).max(initial=0.0) < TOLERANCE[dtype] * largest, (what, seed, kind, dtype)

    for rank, ran in enumerate(ranks):
        assert_close(ran.out, owned_rows(program.owned[rank], alone.out), "output")
        for name, got in ran.grads.items():
            wanted = owned_rows(program.owned[rank], [gradient(name, grads, kind) for grads in alone.grads])
            assert_close(got if kind == "kda" or name != "decay" else got.sum(-1), wanted, name)
    assert alone.taps_grad is not None
    assert_close(np.sum([ran.taps_grad for ran in ranks], axis=0), alone.taps_grad, "taps")
    numbers = (9, 6) if kind != "mamba-2" else (1, 6)
    wide = np.dtype(dtype).itemsize
    sizes = SummarySizes(*numbers, channels=HEADS * 2, state_bytes=wide, row_bytes=wide)
    for rank, ran in enumerate(ranks):
        moved = np.concatenate([bytes_moved(ops, sizes) for ops in (program.forward, program.backward)])
        for number, received in ran.received.items():
            assert received == moved[(moved[:, 0] == number) & (moved[:, 2] == rank), 3].sum(), (number, rank, seed)
        assert set(moved[moved[:, 2] == rank, 0].tolist()) <= set(ran.received)


def gradient(name: str, grads: Recurrence, kind: str) -> np.ndarray:
    # What the layer's own inputs have: of one decay a head the sum, of beta both its roles.
    if name == "write" and kind != "mamba-2":
        return grads.write + grads.erase
    of = getattr(grads, name)
    return of.sum(-1) if name == "decay" and kind != "kda" else of


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_any_layout_equals_each_sequence_alone(pool: Pool, num_ranks: int) -> None:
    for seed in range(NUM_LAYOUTS):
        lengths, owned = recurrent.random_layout(random.Random(seed), num_ranks, 60)
        assert_equal_alone(pool, program_of(lengths, owned, HEADS, HALO), seed)


def test_any_layout_of_trees_equals_each_path_alone(pool: Pool) -> None:
    # Branches begin with the state at their parent's end, which gets the gradients of all of them.
    for seed in range(NUM_LAYOUTS // 2):
        trees, owned = recurrent.random_trees(random.Random(seed), 4)
        program = program_of([*map(num_tokens, trees)], owned, HEADS, HALO, trees)
        assert_equal_alone(pool, program, seed)


OTHERS = sorted({*strategies.ALL_PLANNERS}.difference(strategies.EVERY_PATTERN))


@pytest.mark.parametrize(
    "planner", [*strategies.EVERY_PATTERN, *(pytest.param(name, marks=pytest.mark.product) for name in OTHERS)]
)
@settings(max_examples=3, phases=(Phase.explicit, Phase.generate))
@given(case=strategies.cases((2, 4, 8), max_length=150, max_sequences=5, min_sequences=1), seed=st.integers(0, 99))
def test_any_plan_equals_each_sequence_alone(pool: Pool, planner: str, case: strategies.Case, seed: int) -> None:
    assert_equal_alone(pool, compile_recurrent(strategies.plan(planner, case), HEADS, HALO), seed)


def test_a_layer_keeps_its_inputs_the_states_before_its_pieces_and_the_maps_of_its_composers(pool: Pool) -> None:
    # M of both middle pieces: of one head on rank 0, of two on rank 1. Each in memory of its own.
    owned = [Rows.of(3, [(0, 0, 20), (0, 30, 40)]), Rows.of(3, [(0, 20, 30), (0, 40, 61)])]
    of_token = HEADS * (3 + 3 + 2 + 1 + 1)  # q, k, v, g, beta
    kept = pool.run(kept_bytes, 2, program_of((61,), owned, HEADS, HALO))
    assert kept == [8 * (rows * of_token + 2 * HEADS * 6 + 2 * heads * 9) for rows, heads in ((30, 1), (31, 2))]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_runtime_is_noticed(pool: Pool, fault: str) -> None:
    # Pieces of one sequence on both ranks, in turns, and some behind the first token. Of a tree three
    # branches.
    owned = [Rows.of(3, [(0, 0, 20), (0, 30, 40)]), Rows.of(3, [(0, 20, 30), (0, 40, 61)])]
    trees = ((Segment(25, -1), Segment(10, 0), Segment(9, 0), Segment(17, 0)),) if "branches" in fault else ()
    with pytest.raises(AssertionError, match=r"^\('.*'kda'"):
        assert_equal_alone(pool, program_of((61,), owned, HEADS, HALO, trees), 0, fault)


@pytest.mark.parametrize("planner", ["te_ring", "zeppelin", "distca"])
def test_attention_and_a_recurrence_side_by_side_are_each_as_alone(pool: Pool, planner: str) -> None:
    # Two ranks of four have no rows of a short batch.
    for lengths in ((90, 41, 7, 33), (2, 1)):
        case = strategies.Case(Batch(lengths), Cluster(4, 2), Model(4, 2, 8), None, 1, remapped=True)
        planned = strategies.plan(planner, case)
        assert max(pool.run(beside_attention, 4, planned, compile_recurrent(planned, HEADS, 0))) < 1e-12


def test_on_streams_every_rank_calls_one_all_to_all_a_round_also_beside_attention(pool: Pool) -> None:
    # Of eight ranks some have no rows, and some nothing to send.
    drawn = [random_program(seed, 8) for seed in range(6)]
    inputs = [recurrent.draw("kda", each.lengths, HEADS, HALO, seed) for seed, each in enumerate(drawn)]
    cases = [(program, ("kda", "float64", False), *x) for program, x in zip(drawn, inputs, strict=True)]
    case = strategies.Case(Batch((90, 41, 7, 33)), Cluster(8, 4), Model(4, 2, 8), None, 1, remapped=True)
    planned = strategies.plan("zeppelin", case)
    ranks = pool.run(on_streams, 8, cases, planned, compile_recurrent(planned, HEADS, 0))
    assert max(beside for _, beside in ranks) < 1e-12
    for at, each in enumerate(cases):
        plain: list[RecurrentRun] = pool.run(recurrent_run, 8, *each)
        for (ran, _), on_gloo in zip(ranks, plain, strict=True):
            assert np.abs(ran[at].out - on_gloo.out).max(initial=0.0) == 0
            assert all(np.abs(ran[at].grads[name] - x).max(initial=0.0) == 0 for name, x in on_gloo.grads.items())
            assert ran[at].received == on_gloo.received


def random_program(seed: int, num_ranks: int) -> RecurrentProgram:
    lengths, owned = recurrent.random_layout(random.Random(seed), num_ranks, 60)
    return program_of(lengths, owned, HEADS, HALO)


def test_states_in_bf16_are_half_the_bytes_and_off_by_under_a_hundredth(pool: Pool) -> None:
    # Eight pieces in turns.
    owned = [Rows.of(3, [(0, at, at + 32) for at in range(32 * rank, 256, 128)]) for rank in range(4)]
    for rank, (out, grad, times) in enumerate(pool.run(narrow, 4, program_of((256,), owned, HEADS, HALO))):
        log.info("rank %d, states in bf16: outputs off by %.1e, gradients by %.1e", rank, out, grad)
        assert 1e-4 < max(out, grad) < 1e-2
        assert times == 2
