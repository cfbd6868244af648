"""Facts of a model from the configurations that other libraries keep: Transformers' `config.json`,
torchtitan's, GPT-2's, Megatron's flags.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_balance.errors import ConfigError
from megatron_balance.ir.mask import SlidingWindow
from megatron_balance.ir.model import Model

NAMES: dict[str, tuple[str, ...]] = {
    "num_heads": ("num_attention_heads", "n_heads", "num_heads", "n_head"),
    "num_kv_heads": ("num_key_value_heads", "n_kv_heads", "num_kv_heads", "num_query_groups"),
    "head_dim": ("head_dim", "kv_channels"),
    "num_layers": ("num_hidden_layers", "n_layers", "num_layers", "n_layer"),
    "hidden_size": ("hidden_size", "dim", "d_model", "n_embd"),
    "ffn_size": ("intermediate_size", "ffn_size", "n_inner", "ffn_hidden_size"),
    "vocab_size": ("vocab_size", "padded_vocab_size"),
    "num_experts": ("num_local_experts", "n_routed_experts", "num_experts"),
    "experts_per_token": ("num_experts_per_tok", "experts_per_token", "moe_router_topk"),
}
"""Of each fact, its names in configurations, Transformers' first."""

EXPERT_SIZES = ("moe_intermediate_size", "moe_ffn_hidden_size")
"""Names of an expert's width, where it is not that of a dense layer."""

GATED = ("silu", "swish", "swiglu", "geglu")
"""Activations of MLPs that have a gate, in the families of models that use them."""

GATED_FAMILIES = ("gemma",)
"""Beginnings of the names of families whose MLPs have a gate, whatever their activation is called."""

TIED_FAMILIES = ("gemma", "gpt2")
"""Beginnings of those whose output matrix is the embedding, which their configurations leave out."""

WINDOWED = ("mistral", "mixtral", "phi3")
"""Families whose window, where they have one, is in all layers, though they do not list them."""

EVERY_NTH_SEES_ALL = {"gemma2": 2, "gemma3": 6, "gemma3_text": 6, "gpt_oss": 2, "cohere2": 4}
"""Families with a window in all but every n-th layer, unless `sliding_window_pattern` or a list of
their layers says otherwise."""

KINDS = ("full_attention", "sliding_attention")
"""Layers of `layer_types` that can be planned for."""

UNLIKE: dict[str, str] = {
    "attention_chunk_size": "layers that attend inside chunks of that length, as Llama 4's; no planner knows them",
    "index_topk": "sparse attention to the keys that an indexer takes, as DeepSeek-V3.2's; no planner knows it",
    **dict.fromkeys(
        ("attn_layer_period", "full_attention_interval", "hybrid_override_pattern", "layers_block_type", "ssm_cfg"),
        "layers without attention (state space or linear), whose state crosses ranks; no planner knows them",
    ),
}
"""Keys that make attention cost something else than `Model` says, and why."""


def facts(config: object) -> dict[str, Any]:
    """Fields of `ir.model.Model` that a configuration says; the usual ones where it leaves them out.

    `config`: an object with attributes, or a mapping.

    Raises:
        ConfigError: heads, or the hidden size, are not said.
    """
    found = _named(config)
    if "hidden_size" not in found and {"head_dim", "num_heads"} <= found.keys():
        found["hidden_size"] = found["head_dim"] * found["num_heads"]
    missing = [name for name in ("num_heads", "hidden_size") if name not in found]
    if missing:
        names = " and ".join(f"{name} ({', '.join(NAMES[name])})" for name in missing)
        raise ConfigError(
            f"{_title(config)} does not say {names}; give a configuration that does, or "
            "megatron_balance.Model(num_heads=..., num_kv_heads=..., head_dim=...)"
        )
    if found["num_heads"] < 1:
        raise ConfigError(f"{_title(config)}: num_heads must be at least 1, got {found['num_heads']}")
    found |= _latents(config, found["num_heads"])
    if value(config, "multi_query") is True and not value(config, "new_decoder_architecture"):
        found["num_kv_heads"] = 1  # Falcon, GPTBigCode
    found.setdefault("num_kv_heads", found["num_heads"])
    found.setdefault("head_dim", found["hidden_size"] // found["num_heads"])
    found.setdefault("ffn_size", 4 * found["hidden_size"])
    if found.get("num_experts"):
        found |= _experts(config, found["ffn_size"], found.get("num_layers", 1))
    activation = str(value(config, "hidden_act") or value(config, "hidden_activation") or "")
    family = str(value(config, "model_type") or "")
    return {
        **found,
        **({} if (window := window_of(config)) is None else {"attention": SlidingWindow(window).name}),
        "gated_ffn": activation in GATED or family.startswith(GATED_FAMILIES),
        "name": family or ("custom" if isinstance(config, Mapping) else _title(config)),
    }


def pretrained(config: object) -> dict[str, Any]:
    """`facts` of a model as it is pretrained by Megatron: with the layers that predict further tokens,
    windows that some of the layers have, and an output matrix that may be the embedding.

    Raises:
        ConfigError: as `facts` does.
    """
    found = facts(config)
    tied = value(config, "tie_word_embeddings")
    if tied is None:
        tied = found["name"].startswith(TIED_FAMILIES)
    layers = found.get("num_layers", Model.num_layers)
    return {
        **found,
        **_windows(config, layers),
        **({"num_layers": layers + more, "mtp_layers": more} if (more := _further(config)) else {}),
        **({"tied_embeddings": True} if tied else {}),
    }


def _further(config: object) -> int:
    """Layers that predict further tokens."""
    return _first(config, ("num_nextn_predict_layers", "mtp_num_layers")) or 0


def _windows(config: object, num_layers: int) -> dict[str, Any]:
    """Fields of windows that some layers have, and others not."""
    if window_of(config) is not None or not _uses_window(config):
        return {}
    windowed = _windowed_layers(config, num_layers)
    if not windowed:
        return {}
    return {"other_attention": SlidingWindow(value(config, "sliding_window")).name, "other_layers": windowed}


def _windowed_layers(config: object, num_layers: int) -> int:
    """Layers with a window.

    Raises:
        ConfigError: the configuration does not say which.
    """
    kinds = value(config, "layer_types")
    if kinds is not None:
        return sum(kind == "sliding_attention" for kind in kinds)
    family = str(value(config, "model_type"))
    every = _first(config, ("sliding_window_pattern", "_sliding_window_pattern")) or EVERY_NTH_SEES_ALL.get(family)
    if every:
        return num_layers - num_layers // every
    first = _first(config, ("max_window_layers",))
    if first is not None:
        return max(0, num_layers - first)
    raise ConfigError(
        f"{_title(config)}: sliding_window {value(config, 'sliding_window')}: in which layers? Give layer_types, or "
        "sliding_window null, which plans for all keys and more than the model computes"
    )


def _experts(config: object, dense: int, num_layers: int) -> dict[str, int]:
    """Widths of experts and of the MLP beside them; layers that have no experts."""
    each = _first(config, EXPERT_SIZES) or dense
    shared = _first(config, ("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"))
    if shared is None:
        shared = each * (_first(config, ("n_shared_experts",)) or 0)
    some: dict[str, int] = {"dense_layers": _first(config, ("first_k_dense_replace",)) or 0}
    listed, every = value(config, "mlp_only_layers"), _first(config, ("decoder_sparse_step",)) or 1
    if every > 1 or listed:
        some["dense_layers"] = sum((at + 1) % every != 0 or at in (listed or ()) for at in range(num_layers))
    said = {"shared_ffn_size": shared, **some}
    return {"ffn_size": each, **{name: number for name, number in said.items() if number}}


def _latents(config: object, num_heads: int) -> dict[str, int]:
    """Fields of multi-latent attention, if a configuration has it.

    Raises:
        ConfigError: one of its widths is not said.
    """
    if not _first(config, ("kv_lora_rank",)):
        return {}
    names = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    said = {name: _first(config, (name,)) for name in names}
    missing = [name for name, number in said.items() if number is None]
    if missing:
        raise ConfigError(f"{_title(config)}: kv_lora_rank says multi-latent attention; give {', '.join(missing)} too")
    rank, plain, rotary, values = (number or 0 for number in said.values())
    return {
        "num_kv_heads": num_heads,
        "head_dim": plain + rotary,
        "value_dim": values,
        "latent_rank": rank,
        "latent_rope": rotary,
        "query_rank": _first(config, ("q_lora_rank",)) or 0,
    }


def check_attention(config: object) -> None:
    """Refuse a model whose attention costs something else than `ir.model.Model` says.

    Raises:
        ConfigError: names the key, and why.
    """
    for key, why in UNLIKE.items():
        if value(config, key):
            raise ConfigError(f"{_title(config)}: {key}: {why}")
    unknown = sorted({str(kind) for kind in value(config, "layer_types") or ()} - set(KINDS))
    if unknown:
        raise ConfigError(f"{_title(config)}: layer_types {', '.join(unknown)}: known are {' and '.join(KINDS)}")


def window_of(config: object) -> int | None:
    """Keys of the sliding window that all layers have; None: not all have one."""
    kinds = value(config, "layer_types")
    alike = value(config, "model_type") in WINDOWED if kinds is None else set(kinds) == {"sliding_attention"}
    return value(config, "sliding_window") if alike and _uses_window(config) else None


def _uses_window(config: object) -> bool:
    """Whether any layer has a sliding window, which may be there and not be used (Qwen2)."""
    kinds = value(config, "layer_types")
    if kinds is not None and "sliding_attention" not in kinds:
        return False
    return bool(value(config, "sliding_window")) and value(config, "use_sliding_window") is not False


def value(config: object, name: str) -> Any:
    """Get what a configuration says under a name; None: nothing."""
    return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)  # pyright: ignore[reportUnknownMemberType,reportUnknownVariableType]


def _named(config: object) -> dict[str, Any]:
    found = {fact: _first(config, names) for fact, names in NAMES.items()}
    return {fact: number for fact, number in found.items() if number is not None}


def _first(config: object, names: tuple[str, ...]) -> int | None:
    values = (value(config, name) for name in names)
    return next((each for each in values if type(each) is int), None)


def _title(config: object) -> str:
    return "the configuration" if isinstance(config, Mapping) else type(config).__name__
