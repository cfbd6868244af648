"""Models by the names of other libraries: Transformers' config.json, Megatron's flags."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_balance import Model, cli, model_config
from megatron_balance.config import load_model
from megatron_balance.cost.modules import num_parameters
from megatron_balance.errors import ConfigError
from megatron_balance.ir.mask import SlidingWindow
from megatron_balance.ir.model import RecurrentLayers
from tests.support.deepseek import DEEPSEEK_V3

LLAMA: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu"}
LLAMA |= {"num_attention_heads": 6, "num_key_value_heads": 2, "num_hidden_layers": 3, "rope_theta": 500000.0}
LLAMA |= {"hidden_size": 96, "intermediate_size": 200, "vocab_size": 1000}
EXPECTED = Model(6, 2, 16, num_layers=3, hidden_size=96, ffn_size=200, gated_ffn=True, name="llama", vocab_size=1000)


def written(folder: Path, keys: Any) -> str:
    path = folder / "config.json"
    path.write_text(keys if isinstance(keys, str) else json.dumps(keys))
    return str(path)


def test_a_config_json_and_its_folder_are_a_model_and_may_be_a_base(tmp_path: Path) -> None:
    assert load_model(written(tmp_path, LLAMA)) == load_model(str(tmp_path)) == EXPECTED
    (tmp_path / "deeper.yaml").write_text("{base: ./config.json, num_layers: 9, name: deeper}")
    model = load_model(str(tmp_path / "deeper.yaml"))
    assert (model.num_layers, model.num_kv_heads, model.name) == (9, 2, "deeper")
    several = {"model_type": "gemma3", "vision_config": {}, "text_config": LLAMA}
    assert load_model(written(tmp_path, several)) == EXPECTED
    # Experts have their own width.
    experts = {**LLAMA, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 50}
    model = load_model(written(tmp_path, experts))
    assert (model.num_experts, model.experts_per_token, model.ffn_size) == (8, 2, 50)
    longcat = load_model(written(tmp_path, {**LLAMA, "n_routed_experts": 8, "moe_topk": 3}))
    assert (longcat.num_experts, longcat.experts_per_token) == (8, 3)
    assert load_model(written(tmp_path, {**LLAMA, "num_experts": 1, "moe_topk": 1})).num_experts == 0  # Hunyuan
    mixtral = {**LLAMA, "num_local_experts": 8, "num_experts_per_tok": 2}
    assert load_model(written(tmp_path, mixtral)).ffn_size == 200
    with pytest.raises(ConfigError, match=r"none\.json: No such file or directory; a model is"):
        load_model(str(tmp_path / "none.json"))


def test_latents_of_deepseek_and_one_head_of_keys_are_read(tmp_path: Path) -> None:
    # Latents of deepseek are read.
    widths = {"kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 5}
    model = load_model(written(tmp_path, {**LLAMA, **widths, "q_lora_rank": 12}))
    assert (model.num_kv_heads, model.head_dim, model.value_dim) == (6, 6, 5)
    assert (model.latent_rank, model.latent_rope, model.query_rank, model.latent_travels) == (8, 2, 12, False)
    assert load_model(written(tmp_path, {**LLAMA, **widths, "q_lora_rank": None})).query_rank == 0
    # One head of keys is falcons multi query.
    falcon = {"model_type": "falcon", "hidden_size": 96, "num_attention_heads": 6, "num_kv_heads": 6}
    assert load_model(written(tmp_path, {**falcon, "multi_query": True}), ["falcon"]).num_kv_heads == 1
    bigcode = {"model_type": "gpt_bigcode", "n_head": 6, "n_embd": 96, "num_key_value_heads": 1, "multi_query": False}
    assert load_model(written(tmp_path, bigcode)).num_kv_heads == 6
    newer = {**falcon, "multi_query": True, "new_decoder_architecture": True}
    assert load_model(written(tmp_path, newer), ["falcon"]).num_kv_heads == 6


def test_a_window_in_all_layers_is_the_models_mask_and_in_some_they_are_counted(tmp_path: Path) -> None:
    # A window in all layers is the models mask and one that is not used is none.
    window = {**LLAMA, "sliding_window": 64}
    for keys in ({"use_sliding_window": False}, {"sliding_window": None}, {"layer_types": ["full_attention"] * 2}):
        assert load_model(written(tmp_path, {**window, **keys})) == EXPECTED
    for keys in ({"model_type": "mistral"}, {"layer_types": ["sliding_attention"] * 2}):
        assert load_model(written(tmp_path, {**window, **keys})).mask == SlidingWindow(64)

    # Windows in some layers are counted.
    def other(keys: Any) -> tuple[str, str, int]:
        model = load_model(written(tmp_path, keys))
        return model.attention, model.other_attention, model.other_layers

    assert other(GPT_OSS) == ("causal", "window_128", 12)
    assert other({**GPT_OSS, "layer_types": None}) == ("causal", "window_128", 12)
    assert other(GEMMA) == ("causal", "window_1024", 40)
    assert other({**GEMMA, "sliding_window_pattern": 4}) == ("causal", "window_1024", 36)
    qwen = {**LLAMA, "use_sliding_window": True, "sliding_window": 64, "max_window_layers": 2}
    assert other(qwen) == ("causal", "window_64", 1)


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"sliding_window": 4096}, "sliding_window 4096: in which layers"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "layer_types: linear_attention: known are"),
        ({"rope_scaling": {"type": "spiral"}}, "rope_type: spiral: known are default"),
        ({"per_layer_config": {"1": {"head_dim": 32}}}, "set to .*, and no known model of this shape has it"),
        ({"memory_slots": 4}, "memory_slots: set to 4, and no known model of this shape has it"),
        ({"model_type": "myllama", "memory_slots": 4}, "model type myllama: memory_slots: set to 4"),
        ({"model_type": "mybloom", "n_head": 6, "num_attention_heads": None}, "mybloom: an unknown model type"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "is_encoder_decoder: queries of a decoder that see"),
        ({"model_type": "bloom"}, "bloom: attends by itself"),
        ({"attention_chunk_size": 8192}, "attention_chunk_size: layers that attend inside chunks"),
        ({"attn_layer_period": 8}, "attn_layer_period: layers without attention"),
        ({"index_topk": 2048}, "index_topk: sparse attention"),
        ({"is_causal": False}, "is_causal: False: known are True"),
        ({"causal_attention": False}, "causal_attention: set to False, and no known model"),
        ({"model_type": "mine", "use_causal_mask": 0}, "use_causal_mask: set to 0"),
        ({"adapter_cross_attention": True}, "adapter_cross_attention: set to True"),
        ({"image_attention_mode": "full"}, "image_attention_mode: set to full"),
        ({"num_key_value_heads": [2, 2, 1]}, r"num_key_value_heads: set to \[2, 2, 1\], where one whole number"),
        ({"num_key_value_heads": 2.0}, "num_key_value_heads: set to 2.0, where one whole number"),
        ({"head_dim": [16, 16, 32]}, r"head_dim: set to \[16, 16, 32\], where one whole number"),
        ({"rope_type": "spiral"}, "rope_type: spiral: known are default"),
        ({"rope_scaling": "spiral"}, "rope_type: spiral: known are default"),
        ({"model_type": "dia_encoder"}, "dia_encoder: a type of Transformers that was not compared"),
        ({"attn_mask_type": "prefix"}, "attn_mask_type: prefix: known are block_causal, causal"),
        ({"full_attn_mod": 2}, "full_attn_mod: set to 2"),
        ({"use_image_bidirectional": True}, "use_image_bidirectional: set to True"),
        ({"use_retention_norm": True}, "use_retention_norm: set to True"),
        ({"model_type": "mine", "local_attention": 64}, "local_attention: set to 64, which says who attends"),
        ({"kv_lora_rank": 512, "v_head_dim": 8}, "multi-latent attention; give qk_nope_head_dim, qk_rope_head_dim too"),
        ({"num_attention_heads": 0}, "num_heads must be at least 1, got 0"),
        ({"num_key_value_heads": 4}, "num_kv_heads 4 does not divide num_heads 6"),
    ],
)
def test_what_cannot_be_planned_for_is_a_sentence(tmp_path: Path, keys: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        load_model(written(tmp_path, LLAMA | keys))


STATES = {"hidden_size": 64, "num_heads": 8, "head_dim": 16}


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"model_type": "gemma3", "memory_slots": 4, "text_config": LLAMA}, "memory_slots: set to 4"),
        ({"model_type": "mamba2", **STATES}, "mamba2: has layers that mix"),
        ({"model_type": "mine", **STATES, "state_size": 8}, "state_size: layers without attention"),
        ({"text_config": {**LLAMA, "model_type": "qwen3_next"}}, "qwen3_next does not say which layers attend"),
        ({**LLAMA, "model_type": "jamba"}, "jamba: JambaMambaMixer of JambaModel is Mamba-1"),
        ({"hidden_size": 96}, r"does not say num_heads \(num_attention_heads"),
        ([1], "expected an object of keys"),
        ("{", "not JSON"),
    ],
)
def test_what_is_no_configuration_of_attention_alone_is_a_sentence(tmp_path: Path, keys: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        load_model(written(tmp_path, keys))


def sized(model_type: str, hidden: int, ffn: int, heads: tuple[int, int], layers: int, vocabulary: int) -> Any:
    sizes = {"hidden_size": hidden, "intermediate_size": ffn, "num_hidden_layers": layers, "vocab_size": vocabulary}
    return sizes | {"model_type": model_type, "num_attention_heads": heads[0], "num_key_value_heads": heads[1]}


GEMMA = sized("gemma3_text", 3840, 15360, (16, 8), 48, 262208)
GEMMA |= {"hidden_activation": "gelu_pytorch_tanh", "head_dim": 256, "sliding_window": 1024}
GPT_OSS = sized("gpt_oss", 2880, 2880, (64, 8), 24, 201088)
GPT_OSS |= {"hidden_act": "silu", "head_dim": 64, "sliding_window": 128, "tie_word_embeddings": False}
GPT_OSS |= {"num_experts_per_tok": 4, "num_local_experts": 32}
GPT_OSS |= {"layer_types": ["sliding_attention", "full_attention"] * 12}
LLAMA_3_2_1B = sized("llama", 2048, 8192, (32, 8), 16, 128256)
LLAMA_3_2_1B |= {"hidden_act": "silu", "head_dim": 64, "tie_word_embeddings": True}
QWEN_MOE = sized("qwen2_moe", 2048, 5632, (16, 16), 24, 151936) | {"hidden_act": "silu", "num_experts": 60}
QWEN_MOE |= {"num_experts_per_tok": 4, "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632}


def test_models_have_the_parameters_that_their_makers_say(tmp_path: Path) -> None:
    billions = [(DEEPSEEK_V3, 671.0), (GEMMA, 11.77), (GPT_OSS, 20.9), (LLAMA_3_2_1B, 1.236), (QWEN_MOE, 14.3)]
    for keys, count in billions:
        assert num_parameters(load_model(written(tmp_path, keys))) / 1e9 == pytest.approx(count, rel=3e-3)
    # Layers that predict further tokens are layers.
    model = load_model(written(tmp_path, {**DEEPSEEK_V3, "num_nextn_predict_layers": 1}))
    assert (model.num_layers, model.mtp_layers, model.dense_layers) == (62, 1, 3)


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


def test_a_fork_that_adds_no_key_passes_and_an_encoder_attends_to_whole_documents(tmp_path: Path) -> None:
    # A fork that adds no key passes.
    fork = {**LLAMA, "model_type": "myllama", "sliding_window": None, "rope_scaling": {"rope_type": "yarn"}}
    assert load_model(written(tmp_path, fork)) == replace(EXPECTED, name="myllama")
    assert load_model(written(tmp_path, {**LLAMA, "memory_slots": 0, "bos_token_id": 7, "mlp_bias": True})) == EXPECTED
    # An encoder attends to whole documents.
    bert = {**LLAMA, "model_type": "bert", "type_vocab_size": 2, "position_embedding_type": "absolute"}
    assert load_model(written(tmp_path, bert)).attention == "full"
    assert load_model(written(tmp_path, {**bert, "model_type": "mybert"})).attention == "full"
    assert load_model(written(tmp_path, {**bert, "is_decoder": True})).attention == "causal"


def test_what_is_accepted_by_name_is_planned_for_and_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, {**LLAMA, "memory_slots": 4, "index_topk": 8})
    with pytest.raises(ConfigError, match=r"index_topk: .*accept=\['index_topk'\], on the command line --accept"):
        load_model(path, ["memory_slots"])
    assert load_model(path, ["memory_slots", "index_topk"]) == EXPECTED
    assert "accepted, though losses and plans may be wrong: memory_slots: set to 4" in caplog.text
    assert "index_topk: sparse attention" in caplog.text
    (tmp_path / "mine.yaml").write_text("{base: ./config.json, accept: [memory_slots, index_topk]}")
    assert load_model(str(tmp_path / "mine.yaml")) == EXPECTED
    (tmp_path / "mine.yaml").write_text("{base: ./config.json, accept: index_topk}")
    with pytest.raises(ConfigError, match="accept: expected a list of names, got 'index_topk'"):
        load_model(str(tmp_path / "mine.yaml"))
    asked = ["plan", "--planner", "te_ring", "--ranks", "2", "--lengths", "90,7", "--model", path]
    assert cli.main(asked) == 2
    assert "memory_slots: set to 4" in capsys.readouterr().err
    assert cli.main([*asked, "--accept", "memory_slots", "--accept", "index_topk"]) == 0


# Every family with recurrent layers, by the name of its configuration in Transformers.
MAMBA = {"mamba_n_heads": 8, "mamba_d_state": 6, "mamba_n_groups": 2, "mamba_d_conv": 3}
GDN = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 6, "linear_value_head_dim": 10}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
EVERY_THIRD = ["linear_attention", "linear_attention", "full_attention"] * 2
HYBRID: dict[str, dict[str, Any]] = {
    "Qwen3Next": {**GDN, **EXPERTS, "layer_types": EVERY_THIRD},
    "Qwen3_5Text": {**GDN, "layer_types": EVERY_THIRD},
    "Qwen3_5MoeText": {**GDN, **EXPERTS, "layer_types": EVERY_THIRD},
    "OlmoHybrid": {"layer_types": EVERY_THIRD},
    "KimiLinear": {**EXPERTS, "layer_types": EVERY_THIRD, "linear_num_heads": 2, "linear_head_dim": 14},
    "NemotronH": {
        **EXPERTS,
        "hybrid_override_pattern": "M-M*EM",
        "mamba_num_heads": 4,
        "mamba_head_dim": 6,
        "n_groups": 2,
        "ssm_state_size": 10,
    },
    "GraniteMoeHybrid": {**MAMBA, "layer_types": EVERY_THIRD, "shared_intermediate_size": 20},
    "Bamba": {**MAMBA, "attn_layer_indices": [1, 4]},
    "FalconH1": {**MAMBA, "mamba_d_ssm": 48},
    "Lfm2": {"layer_types": ["conv", "conv", "full_attention"] * 2, "block_multiple_of": 8},
}
SMALL = {"num_hidden_layers": 6, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
SMALL |= {"head_dim": 8, "intermediate_size": 24, "vocab_size": 50, "pad_token_id": 0}


@pytest.mark.parametrize("family", HYBRID)
def test_recurrent_layers_are_those_that_transformers_builds(family: str) -> None:
    transformers: Any = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch", reason="the extra 'torch' brings it")
    config: Any = getattr(transformers, f"{family}Config")(**SMALL | HYBRID[family])
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    convolutions = [module for module in model.modules() if isinstance(module, torch.nn.Conv1d)]
    facts = model_config.facts(config, hybrid=True)
    found = Model(**facts).recurrent
    assert found is not None
    assert (found.layers, found.channels) == (len(convolutions), convolutions[0].in_channels)
    assert found.conv_width == convolutions[0].kernel_size[0]
    # Of a mixer, without norms, biases, decays and skips.
    (mixer,) = (each for each in model.modules() if convolutions[0] in each.children())
    assert found.weights(32) == sum(w.numel() for n, w in mixer.named_parameters() if w.ndim > 1 and "A_log" not in n)
    keys = {"NemotronH": ".k_proj.weight", "KimiLinear": ".kv_b_proj.weight"}.get(family, ".self_attn.k_proj.weight")
    assert found.attention_layers == sum(name.endswith(keys) for name, _ in model.named_parameters())
    # Whoever does not say that it knows recurrent layers is refused.
    with pytest.raises(ConfigError, match=r"has layers that mix tokens beside attention|layer_types: conv"):
        model_config.facts(config)


# Sizes of published `config.json`s, by the sources that the presets name.
PUBLISHED: dict[str, dict[str, Any]] = {
    "qwen3.5-35b-a3b": {
        "model_type": "qwen3_5_moe",
        "text_config": {
            "model_type": "qwen3_5_moe_text",
            "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 10,
            "num_hidden_layers": 40,
            "hidden_size": 2048,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "vocab_size": 248320,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "linear_conv_kernel_dim": 4,
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 512,
            "hidden_act": "silu",
            "shared_expert_intermediate_size": 512,
        },
    },
    "nemotron-h-8b": {
        "model_type": "nemotron_h",
        "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
        "num_hidden_layers": 52,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 21504,
        "vocab_size": 131072,
        "mlp_hidden_act": "relu2",
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "n_groups": 8,
        "ssm_state_size": 128,
        "conv_kernel": 4,
        "chunk_size": 128,
    },
    "kimi-linear-48b-a3b": {
        "model_type": "kimi_linear",
        "linear_attn_config": {
            "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
            "kda_layers": [n for n in range(1, 27) if n % 4],
            "head_dim": 128,
            "num_heads": 32,
            "short_conv_kernel_size": 4,
        },
        "num_hidden_layers": 27,
        "hidden_size": 2304,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": 72,
        "intermediate_size": 9216,
        "vocab_size": 163840,
        "hidden_act": "silu",
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "first_k_dense_replace": 1,
        "num_experts": 256,
        "num_experts_per_token": 8,
        "moe_intermediate_size": 1024,
        "num_shared_experts": 1,
    },
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_presets_of_hybrid_models_have_the_published_sizes(name: str, tmp_path: Path) -> None:
    assert replace(load_model(written(tmp_path, PUBLISHED[name])), name=name) == load_model(name)


def test_presets_of_hybrid_models_have_their_parameters_and_say_what_is_missing(tmp_path: Path) -> None:
    for name, billions in (("qwen3.5-35b-a3b", 34.7), ("nemotron-h-8b", 8.1), ("kimi-linear-48b-a3b", 49.1)):
        assert num_parameters(load_model(name)) / 1e9 == pytest.approx(billions, rel=0.01)
    path = tmp_path / "model.yaml"
    for given, sentence in (
        ("{kind: kda, layers: 3}", "recurrent: attention_layers: missing"),
        ("4", "recurrent: expected keys such as kind and layers, got 4"),
        ("{kind: kda, layer: 3}", "recurrent.layer: unknown key, did you mean 'layers'"),
    ):
        path.write_text(f"{{base: llama-3b, recurrent: {given}}}")
        with pytest.raises(ConfigError, match=sentence):
            load_model(str(path))


def test_what_is_not_said_of_recurrent_layers_is_a_sentence() -> None:
    base = {**LLAMA, "model_type": "bamba", "num_hidden_layers": 4, "mamba_n_heads": 4, "mamba_d_state": 8}
    for keys, sentence in (
        ({}, "does not say which layers attend; give layer_types"),
        ({"attn_layer_indices": [1], "mamba_d_state": None}, "does not say ssm_state_size or mamba_d_state"),
        ({"layer_types": ["mamba"] * 4}, "none of its 4 layers attends"),
        ({"layer_types": ["mamba", "rwkv"]}, "layers rwkv: known are"),
        ({"attn_layer_indices": [1], "index_topk": 8}, "index_topk: sparse attention"),
        ({"attn_layer_indices": [1], "chunked_attention": 8}, "chunked_attention: set to 8, which says who attends"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            model_config.facts(base | keys, hybrid=True)
    kimi = {"num_experts": 8, "num_experts_per_token": 2, "moe_intermediate_size": 16, "num_shared_experts": 1}
    kimi |= {
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 4,
        "qk_rope_head_dim": 2,
        "v_head_dim": 5,
        "model_type": "kimi_linear",
    }
    kimi |= {"model_type": "kimi_linear"}
    listed = {"full_attn_layers": [3], "kda_layers": [1, 2], "head_dim": 8, "num_heads": 4, "short_conv_kernel_size": 4}
    read = model_config.facts({**LLAMA, **kimi, "linear_attn_config": listed, "first_k_dense_replace": 1}, hybrid=True)
    assert (read["shared_ffn_size"], read["dense_layers"]) == (16, 1)
    assert (read["recurrent"].attention_layers, read["recurrent"].layers, read["recurrent"].key_dim) == (1, 2, 8)


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"kind": "rwkv"}, "kind 'rwkv': expected one of gated_delta, kda, mamba2, convolution"),
        ({"layers": 0}, "recurrent: layers: expected a whole number of at least 1, got 0"),
        ({"attention_layers": 9}, "model custom: recurrent: attention_layers 9 of 8 layers"),
        ({"key_dim": 0}, "recurrent: key_dim: expected a whole number of at least 1"),
        ({"kind": "convolution"}, "a convolution has heads 1 of its channels, key_heads 0"),
    ],
)
def test_recurrent_layers_that_cannot_be_are_a_sentence(keys: dict[str, Any], sentence: str) -> None:
    right: dict[str, Any] = {"kind": "kda", "layers": 6, "attention_layers": 2, "mlp_layers": 8, "heads": 4}
    right |= {"value_dim": 8, "key_heads": 4, "key_dim": 8}
    with pytest.raises(ConfigError, match=sentence):
        Model(4, 4, 8, num_layers=8, recurrent=RecurrentLayers(**right | keys))
