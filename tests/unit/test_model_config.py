"""Models by the names of other libraries: Transformers' config.json, Megatron's flags."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_balance.config import load_model
from megatron_balance.errors import ConfigError
from megatron_balance.ir.mask import SlidingWindow
from megatron_balance.ir.model import Model

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 96,
    "intermediate_size": 200,
    "num_attention_heads": 6,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "rope_theta": 5e5,
}
EXPECTED = Model(6, 2, 16, num_layers=3, hidden_size=96, ffn_size=200, gated_ffn=True, name="llama", vocab_size=1000)


def written(folder: Path, keys: Any) -> str:
    path = folder / "config.json"
    path.write_text(keys if isinstance(keys, str) else json.dumps(keys))
    return str(path)


def test_a_config_json_and_its_folder_are_a_model(tmp_path: Path) -> None:
    assert load_model(written(tmp_path, LLAMA)) == load_model(str(tmp_path)) == EXPECTED
    several = {"model_type": "gemma3", "vision_config": {}, "text_config": LLAMA}
    assert load_model(written(tmp_path, several)) == EXPECTED


def test_a_config_may_be_a_base(tmp_path: Path) -> None:
    written(tmp_path, LLAMA)
    (tmp_path / "deeper.yaml").write_text("{base: ./config.json, num_layers: 9, name: deeper}")
    model = load_model(str(tmp_path / "deeper.yaml"))
    assert (model.num_layers, model.num_kv_heads, model.name) == (9, 2, "deeper")


def test_experts_have_their_own_width(tmp_path: Path) -> None:
    experts = {**LLAMA, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 50}
    model = load_model(written(tmp_path, experts))
    assert (model.num_experts, model.experts_per_token, model.ffn_size) == (8, 2, 50)
    mixtral = {**LLAMA, "num_local_experts": 8, "num_experts_per_tok": 2}
    assert load_model(written(tmp_path, mixtral)).ffn_size == 200


def test_latents_of_deepseek_are_read(tmp_path: Path) -> None:
    widths = {"kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 5}
    model = load_model(written(tmp_path, {**LLAMA, **widths, "q_lora_rank": 12}))
    assert (model.num_kv_heads, model.head_dim, model.value_dim) == (6, 6, 5)
    assert (model.latent_rank, model.latent_rope, model.query_rank, model.latent_travels) == (8, 2, 12, False)
    assert load_model(written(tmp_path, {**LLAMA, **widths, "q_lora_rank": None})).query_rank == 0


def test_a_window_that_is_not_used_is_none(tmp_path: Path) -> None:
    assert load_model(written(tmp_path, {**LLAMA, "sliding_window": 64, "use_sliding_window": False})) == EXPECTED
    assert load_model(written(tmp_path, {**LLAMA, "sliding_window": None})) == EXPECTED
    full = {**LLAMA, "sliding_window": 64, "layer_types": ["full_attention"] * 2}
    assert load_model(written(tmp_path, full)) == EXPECTED


def test_a_window_in_all_layers_is_the_models_mask(tmp_path: Path) -> None:
    for keys in ({"model_type": "mistral"}, {"layer_types": ["sliding_attention"] * 2}):
        assert load_model(written(tmp_path, {**LLAMA, "sliding_window": 64, **keys})).mask == SlidingWindow(64)


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({**LLAMA, "sliding_window": 4096}, "sliding_window 4096: a sliding window in some layers"),
        (
            {**LLAMA, "sliding_window": 4096, "layer_types": ["sliding_attention", "full_attention"]},
            "sliding_window 4096: a sliding window in some layers",
        ),
        (
            {**LLAMA, "kv_lora_rank": 512, "v_head_dim": 8},
            "kv_lora_rank says multi-latent attention; give qk_nope_head_dim, qk_rope_head_dim too",
        ),
        ({"hidden_size": 96}, r"does not say num_heads \(num_attention_heads"),
        ({**LLAMA, "num_attention_heads": 0}, "num_heads must be at least 1, got 0"),
        ({**LLAMA, "num_key_value_heads": 4}, "num_kv_heads 4 does not divide num_heads 6"),
        ([1], "expected an object of keys"),
        ("{", "not JSON"),
    ],
)
def test_what_cannot_be_planned_for_is_a_sentence(tmp_path: Path, keys: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        load_model(written(tmp_path, keys))


def test_a_config_that_is_not_there_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.json: No such file or directory; a model is"):
        load_model(str(tmp_path / "none.json"))


def test_a_yaml_may_have_the_names_of_megatrons_flags(tmp_path: Path) -> None:
    path = tmp_path / "model.yaml"
    path.write_text("{num_attention_heads: 6, num_query_groups: 2, kv_channels: 32, ffn_hidden_size: 64}")
    model = load_model(str(path))
    assert (model.num_heads, model.num_kv_heads, model.head_dim, model.ffn_size) == (6, 2, 32, 64)
    path.write_text("{num_attention_heads: 6, hidden_size: 96}")
    assert (load_model(str(path)).num_kv_heads, load_model(str(path)).head_dim) == (6, 16)
    path.write_text("{num_attention_heads: 6, num_heads: 6}")
    with pytest.raises(ConfigError, match="num_heads is given twice"):
        load_model(str(path))
