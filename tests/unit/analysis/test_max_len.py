"""MaxLen of a scheme: what the first and the last stage hold."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_balance.analysis.memory import LOGIT_BYTES, OPTIMIZER_BYTES, PARTIAL_BYTES, layer_activation_bytes
from megatron_balance.analysis.step_memory import MARGIN, max_len
from megatron_balance.config import load_model
from megatron_balance.cost.modules import head_module, num_parameters
from megatron_balance.ir.strategy import Scheme

MODEL = replace(load_model("llama2-32b"), num_heads=64, num_kv_heads=64, head_dim=104)
MEMORY, RANKS = 80e9, 64


def test_the_first_stage_holds_what_c1_counts() -> None:
    """PP microbatches of its layers, its weights and gradients, its share of all optimizer state."""
    table = head_module(MODEL).weights / 2
    stage = (num_parameters(MODEL) - 2 * table) / 4 / 8 + table / 8
    states = (2 + 4) * stage + OPTIMIZER_BYTES * num_parameters(MODEL) / RANKS
    one_layer = PARTIAL_BYTES * MODEL.num_heads * (MODEL.head_dim + 1)
    per_token = (MODEL.num_layers * layer_activation_bytes(MODEL) + one_layer) / 8
    expected = ((1 - MARGIN) * MEMORY - states) / per_token
    assert max_len(Scheme(8, 4), MODEL, MEMORY, RANKS) == pytest.approx(expected, abs=1)


def test_the_last_stage_has_the_logits() -> None:
    wordy = replace(MODEL, vocab_size=4_000_000)
    table = head_module(wordy).weights / 2
    stage = (num_parameters(wordy) - 2 * table) / 4 / 8 + table / 8
    states = (2 + 4) * stage + OPTIMIZER_BYTES * num_parameters(wordy) / RANKS
    per_token = (MODEL.num_layers / 4 * layer_activation_bytes(wordy) + LOGIT_BYTES * wordy.vocab_size) / 8
    expected = ((1 - MARGIN) * MEMORY - states) / per_token
    assert max_len(Scheme(8, 4), wordy, MEMORY, RANKS) == pytest.approx(expected, abs=1)


def test_more_of_anything_never_holds_less_and_a_model_too_large_holds_none() -> None:
    for more, fewer in ((Scheme(8, 4), Scheme(4, 4)), (Scheme(8, 4), Scheme(8, 2)), (Scheme(4, 4, 2), Scheme(4, 4))):
        assert max_len(more, MODEL, MEMORY, RANKS) > max_len(fewer, MODEL, MEMORY, RANKS)
    assert max_len(Scheme(8), MODEL, MEMORY, 1024) > max_len(Scheme(8), MODEL, MEMORY, RANKS)
    assert max_len(Scheme(), MODEL, MEMORY, RANKS) == 0
