"""Models read from configurations of other libraries."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("torch", reason="the extra 'torch' brings it")

from megatron_balance import Model
from megatron_balance.errors import ConfigError
from megatron_balance.model_config import unproved
from megatron_balance.torch import model_of
from megatron_balance.torch.settings import check_layer


def test_a_configuration_of_transformers_is_read() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=96, intermediate_size=200, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=2
    )
    model = model_of(config)
    assert (model.num_heads, model.num_kv_heads, model.head_dim, model.num_layers) == (6, 2, 16, 3)
    assert (model.hidden_size, model.ffn_size, model.gated_ffn, model.name) == (96, 200, True, "llama")
    gpt2 = model_of(transformers.GPT2Config(n_embd=64, n_head=4, n_layer=2))
    assert (gpt2.num_heads, gpt2.num_kv_heads, gpt2.head_dim, gpt2.num_layers, gpt2.ffn_size) == (4, 4, 16, 2, 256)


def test_names_of_torchtitan_and_mappings_are_read() -> None:
    titan = SimpleNamespace(dim=128, n_heads=8, n_kv_heads=None, n_layers=4, vocab_size=100)
    assert model_of(titan).head_dim == 16
    assert model_of({"num_heads": 8, "num_kv_heads": 2, "head_dim": 16}).hidden_size == 128
    model = Model(4, 2, 8)
    assert model_of(model) is model


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        (
            {"hidden_size": 64},
            r"the configuration does not say num_heads \(num_attention_heads, n_heads, num_heads, n_head\); give",
        ),
        ({"n_heads": 4}, r"does not say hidden_size \(hidden_size, dim"),
        ({"num_heads": 4, "num_kv_heads": 3, "head_dim": 8}, "num_kv_heads 3 does not divide num_heads 4"),
    ],
)
def test_what_is_missing_is_named(config: dict[str, int], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        model_of(config)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("BambaConfig", "bamba: has layers that mix tokens"),
        ("BloomConfig", "bloom: attends by itself"),
        ("GraniteMoeHybridConfig", "granitemoehybrid: has layers that mix tokens"),
        ("JambaConfig", "jamba: has layers that mix tokens"),
        ("KimiLinearConfig", "kimi_linear: "),
        ("Llama4TextConfig", "llama4_text: "),
        ("Llama4Config", "llama4: "),
        ("MiniMaxConfig", "minimax: has layers that mix tokens"),
        ("OlmoHybridConfig", "olmo_hybrid: has layers that mix tokens"),
        ("Qwen3NextConfig", "qwen3_next: has layers that mix tokens"),
        ("Qwen3_5Config", "qwen3_5: "),
        ("RecurrentGemmaConfig", "recurrent_gemma: has layers that mix tokens"),
        ("T5Config", "is_encoder_decoder: "),
        ("Zamba2Config", "zamba2: "),
    ],
)
def test_a_model_that_is_not_known_to_attend_as_planned_is_refused_by_name(name: str, reason: str) -> None:
    config = getattr(pytest.importorskip("transformers"), name)()
    with pytest.raises(ConfigError, match=reason):
        model_of(config)
    model_of(config, accept=list(unproved(config)))


def test_heads_by_layer_are_known_and_other_settings_by_layer_are_not(caplog: pytest.LogCaptureFixture) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.Gemma4TextConfig()
    assert model_of(config).head_dim == 256
    assert "gemma4_text: some layers may have other heads than 8 of 256, with 4 for keys; plans" in caplog.text
    windows = transformers.Gemma4TextConfig(per_layer_config={3: {"head_dim": 32, "sliding_window": 4}})
    with pytest.raises(ConfigError, match=r"per_layer_config: set to .*; known is head_dim, num_key_value_heads"):
        model_of(windows)


def test_layers_are_looked_at_where_the_balancer_saw_no_configuration() -> None:
    transformers = pytest.importorskip("transformers")
    layer = SimpleNamespace(config=transformers.Qwen3NextConfig())
    with pytest.raises(ConfigError, match="qwen3_next: has layers that mix tokens"):
        check_layer(layer, ())  # pyright: ignore[reportArgumentType]
    check_layer(layer, ["qwen3_next"])  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="qwen3_next: has layers that mix tokens"):
        check_layer(layer, ())  # pyright: ignore[reportArgumentType]  another balancer, which did not accept it
    check_layer(SimpleNamespace(config=transformers.LlamaConfig()), ())  # pyright: ignore[reportArgumentType]
