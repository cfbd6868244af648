"""The choice of Megatron's configurations that are counted, and the command lines made of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tools.megatron_flags import command_line
from tools.reach import pretrains, words_of

ITERATIONS: dict[str, Any] = {"MODEL_ARGS": {"--train-iters": 100}}
SAMPLES: dict[str, Any] = {"MODEL_ARGS": {"--train-samples": 100}}


@pytest.mark.parametrize(
    ("name", "config", "counted"),
    [
        ("gpt3_mcore_te_tp4_pp1_dist_optimizer_overlap_grad_reduce", ITERATIONS, True),
        ("gpt3_mcore_te_tp1_pp2_rope_embeddings_interleaved_no_fusion", ITERATIONS, True),
        ("mixtral_8x7b_tp1pp4ep8vpp8_release", SAMPLES, True),
        ("gpt_grpo_basic_function", SAMPLES, False),
        ("gpt_dynamic_inference_tp1_pp1_583m", {"MODEL_ARGS": {}}, False),
        ("gpt_rl_tp1", ITERATIONS, False),
        ("without_steps", {"MODEL_ARGS": None}, False),
    ],
)
def test_a_configuration_is_counted_by_the_words_of_its_name_and_by_its_steps(
    name: str, config: dict[str, Any], counted: bool
) -> None:
    assert pretrains(Path(name) / "model_config.yaml", config) == counted


def test_a_value_with_blanks_is_one_word_where_the_flag_takes_one() -> None:
    given = {
        "--swiglu": True,
        "--bf16": False,
        "--spec": "module name",
        "--offload-modules": "[core_attn moe_act]",
        "--step-batch-size-schedule": "0:384 200B:768",
        "--seed": "${REPEAT}",
    }
    assert words_of({"MODEL_ARGS": given}, {"--step-batch-size-schedule"}) == [
        *("--swiglu", "--spec", "module", "name", "--offload-modules", "core_attn", "moe_act"),
        *("--step-batch-size-schedule", "0:384 200B:768", "--seed", "1"),
    ]


# Flags of Megatron as words of a command line


def test_a_flag_stands_alone_with_its_value_or_with_several() -> None:
    flags = {
        "swiglu": True,
        "lr": 1e-3,
        "save-interval": None,
        "balance-device": False,
        "data-path": ["1", "documents"],
    }
    assert command_line(flags) == ["--swiglu", "--lr", "0.001", "--data-path", "1", "documents"]


def test_later_tables_win_and_may_take_a_flag_out() -> None:
    assert command_line({"seed": 1, "swiglu": True}, {"seed": 2, "swiglu": False}) == ["--seed", "2"]
