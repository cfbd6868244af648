"""Facts of a model from the configurations that other libraries keep: Transformers' `config.json`,
torchtitan's, GPT-2's, Megatron's flags.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_balance.errors import ConfigError
from megatron_balance.ir.mask import SlidingWindow

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

WINDOWED = ("mistral", "mixtral", "phi3")
"""Families whose window, where they have one, is in all layers, though they do not list them."""

UNLIKE: dict[str, str] = {
    "sliding_window": "a sliding window in some layers; null plans for all keys, which is more than it computes",
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
    found.setdefault("num_kv_heads", found["num_heads"])
    found.setdefault("head_dim", found["hidden_size"] // found["num_heads"])
    found.setdefault("ffn_size", 4 * found["hidden_size"])
    if found.get("num_experts"):
        found["ffn_size"] = _first(config, EXPERT_SIZES) or found["ffn_size"]
    activation = str(value(config, "hidden_act") or "")
    return {
        **found,
        **({} if (window := window_of(config)) is None else {"attention": SlidingWindow(window).name}),
        "gated_ffn": activation in GATED,
        "name": str(value(config, "model_type") or ("custom" if isinstance(config, Mapping) else _title(config))),
    }


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
        given = value(config, key)
        if given and not (key == "sliding_window" and (window_of(config) or not _uses_window(config))):
            raise ConfigError(f"{_title(config)}: {key} {given}: {why}")


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
