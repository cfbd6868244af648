"""Keep or replay by layer: the prediction, the decision and its sentence."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_balance.analysis.backward import (
    USABLE,
    MicrobatchBytes,
    ReceivedBytes,
    Recomputed,
    Stage,
    StepBytes,
    check_fits,
    decide,
    held_layers,
    microbatch_bytes,
    step_bytes,
)
from megatron_balance.analysis.memory import Sharding, layer_activation_bytes
from megatron_balance.config import load_model
from megatron_balance.errors import InfeasibleError
from megatron_balance.ir.model import Model
from tests.support import by_hand

LLAMA = load_model("llama-7b")
MODEL = Model(8, 8, 64, num_layers=4, hidden_size=512, ffn_size=1024, vocab_size=1)
GB = 1e9


def microbatch(tokens: int = 1000, kept: int = 1_000_000, replayed: int = 100_000, ranks: int = 2) -> MicrobatchBytes:
    return MicrobatchBytes(
        np.full(ranks, tokens), ReceivedBytes(np.full(ranks, kept), np.full(ranks, replayed), np.zeros(ranks, int))
    )


def of(other: float, kept: list[float], replayed: float = 0.0, layers: int = 4) -> StepBytes:
    each = np.zeros(len(kept))
    return StepBytes(other, each, each, np.array(kept), np.full(len(kept), replayed), layers)


def test_a_ring_of_64_ranks_keeps_the_keys_of_all_others():
    plan = by_hand.pool("ring", [64 * 4096], 64, ranks_per_node=8, heads=(32, 32))
    found = step_bytes([microbatch_bytes([plan], LLAMA)], LLAMA, Stage(32, Sharding(optimizer=64)))
    assert found.layers * found.kept.max() == 63 * 4096 * LLAMA.kv_bytes_per_token * 32
    assert round(found.layers * found.kept.max() / GB) == 135


def test_a_head_exchange_keeps_its_heads_only():
    plan = by_hand.pool("head_exchange", [32 * 8192], 32, ranks_per_node=8, heads=(32, 32))
    found = step_bytes([microbatch_bytes([plan], LLAMA)], LLAMA, Stage(32, Sharding(optimizer=32)))
    # A rank attends with one of 32 heads to all tokens: queries, keys and values of 31 of 32 tokens.
    assert found.kept.max() == 31 * 8192 * 3 * 128 * 2
    assert found.layers * found.kept.max() < 10 * GB


@pytest.mark.parametrize(
    ("recompute", "numbers", "most"),
    [
        (Recomputed(), (5, 4, 3, 2, 1), 5),
        (Recomputed("core_attention"), (1, 1, 1, 1, 1), 1),
        (Recomputed("uniform", 1), (1, 1, 1, 1, 1), 1),
        (Recomputed("uniform", 2), (2, 1, 2, 1, 1), 2),
        (Recomputed("block", 2), (1, 1, 4, 3, 2), 4),
    ],
)
def test_layers_are_numbered_by_what_keeping_costs(recompute, numbers, most):
    assert held_layers(recompute, 5)[:2] == (numbers, most)


def test_auto_keeps_in_as_many_layers_as_fit():
    step = of(10.0, [2.0, 1.0], replayed=1.0)
    for memory, keeping in ((18.0, 4), (17.9, 3), (17.0, 3), (16.9, 2), (13.0, 1), (12.9, 0), (1.0, 0)):
        decision = decide([step], "auto", memory / USABLE)
        assert decision.keeping == keeping, memory
    assert decide([step], "auto", None).keeping == 4
    assert decide([step], "keep", 1.0).keeping == 4
    assert decide([step], "replay", 100.0).keeping == 0


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=4),
    st.integers(0, 3),
    st.integers(1, 6),
    st.integers(1, 60),
)
def test_a_mix_fits_and_one_layer_more_would_not(ranks, replayed, layers, memory):
    other, kept = (np.array(column, dtype=float) for column in zip(*ranks, strict=True))
    step = StepBytes(1.0, other, np.zeros(len(ranks)), kept, np.minimum(replayed, kept), layers)
    keeping = decide([step], "auto", memory / USABLE).keeping
    fits = [float(step.peak(k).max()) <= memory + 1e-9 for k in range(layers + 1)]
    assert fits[keeping] or not any(fits)
    assert not any(fits[keeping + 1 :])


def test_stages_decide_together_by_the_fullest():
    first, last = of(10.0, [2.0]), replace(of(10.0, [1.0]), stage=1)
    assert decide([first, last], "auto", 14.0 / USABLE).keeping == 2
    assert decide([last], "auto", 14.0 / USABLE).keeping == 4


def test_pipeline_stages_hold_what_their_microbatches_in_flight_received():
    batches = [microbatch(kept=kept) for kept in (1, 5, 7, 2, 1)]
    kept = [step_bytes(batches, MODEL, Stage(2, Sharding(pipeline=2, stage=stage))).kept.max() for stage in (0, 1)]
    assert kept == [12, 7]
    # Interleaved: warm-up of 2 x 1 + 1 x 2 passes and one more, of chunks of one layer.
    interleaved = Stage(2, Sharding(pipeline=2, stage=0), chunks=2)
    assert interleaved.passes(5) == 5
    assert step_bytes(batches, MODEL, interleaved).kept.max() == pytest.approx(14 / 3 * 5)


def test_what_is_computed_again_is_held_for_one_run_at_a_time():
    full = step_bytes([microbatch()], MODEL, Stage(4, recompute=Recomputed("uniform", 2)))
    plain = step_bytes([microbatch()], MODEL, Stage(4))
    assert (full.layers, plain.layers) == (2, 4)
    assert plain.activations.max() == 4 * 1000 * layer_activation_bytes(MODEL)
    assert full.activations.max() == 2 * 1000 * layer_activation_bytes(MODEL, "full")
    assert full.working.max() == 2 * 1000 * layer_activation_bytes(MODEL)


def test_the_sentence_says_the_decision_the_peak_and_the_alternatives():
    mixed = decide([of(10 * GB, [2 * GB, 3 * GB], replayed=1 * GB)], "auto", 20 * GB)
    assert mixed.sentence() == (
        "backward: keep in 2 of 4 layers, replay in 2; predicted peak 17.0 of 20.0 GB on rank 1 "
        "(all keep: 22.0 GB, all replay: 11.0 GB)"
    )
    told = decide([replace(of(10 * GB, [3 * GB]), stage=1)], "keep", 20 * GB)
    assert told.sentence().startswith(
        "backward: keep as configured; predicted peak 22.0 of 20.0 GB on rank 0 of stage 1, which does not fit"
    )


def test_a_step_that_fits_in_no_way_is_an_error_that_says_what_would_fit():
    batch, stage = microbatch(tokens=100_000), Stage(4, Sharding(optimizer=2))
    needs = float(step_bytes([batch], MODEL, stage).peak(0).max())
    decision = decide([step_bytes([batch], MODEL, stage)], "auto", 0.9 * needs)
    with pytest.raises(InfeasibleError) as failed:
        check_fits(decision, [batch], MODEL, [stage])
    told = str(failed.value)
    (fewer,) = re.findall(r"at most ([\d,]+) tokens", told)  # a change that is said to fit does
    batch_of_fewer = microbatch(tokens=int(fewer.replace(",", "")))
    assert decide([step_bytes([batch_of_fewer], MODEL, stage)], "auto", 0.9 * needs).fits
    assert "full activation recomputation" in told
    assert "tokens on a rank, in place of 100,000" in told
    assert "set 'backward: replay'" in told
    check_fits(decide([step_bytes([batch], MODEL, stage)], "replay", 0.9 * needs), [batch], MODEL, [stage])
    check_fits(decide([step_bytes([batch], MODEL, stage)], "auto", 1.2 * needs), [batch], MODEL, [stage])
