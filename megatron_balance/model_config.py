"""Facts of a model from the configurations that other libraries keep: Transformers' `config.json`,
torchtitan's, GPT-2's, Megatron's flags.
"""

import logging
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, cast

from megatron_balance.errors import ConfigError
from megatron_balance.files import read_json
from megatron_balance.ir.mask import SlidingWindow
from megatron_balance.ir.model import Model, RecurrentLayers, RecurrentName

log = logging.getLogger(__name__)

# Of each fact, its names in configurations, Transformers' first.
NAMES: dict[str, tuple[str, ...]] = {
    "num_heads": ("num_attention_heads", "n_heads", "num_heads", "n_head"),
    "num_kv_heads": ("num_key_value_heads", "n_kv_heads", "num_kv_heads", "num_query_groups"),
    "head_dim": ("head_dim", "kv_channels"),
    "num_layers": ("num_hidden_layers", "n_layers", "num_layers", "n_layer"),
    "hidden_size": ("hidden_size", "dim", "d_model", "n_embd"),
    "ffn_size": ("intermediate_size", "ffn_size", "n_inner", "ffn_hidden_size"),
    "vocab_size": ("vocab_size", "padded_vocab_size"),
    "num_experts": ("num_local_experts", "n_routed_experts", "num_experts"),
    "experts_per_token": (
        *("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_router_topk"),
        *("moe_topk", "moe_k", "top_k_experts"),
    ),
}

# Names of an expert's width, where it is not that of a dense layer.
EXPERT_SIZES = ("moe_intermediate_size", "moe_ffn_hidden_size")

# Activations of MLPs that have a gate, in the families of models that use them.
GATED = ("silu", "swish", "swiglu", "geglu")

# Beginnings of the names of families whose MLPs have a gate, whatever their activation is called.
GATED_FAMILIES = ("gemma", "lfm2")

# Beginnings of those whose output matrix is the embedding, which their configurations leave out.
TIED_FAMILIES = ("gemma", "gpt2")

# Families whose window, where they have one, is in all layers, though they do not list them.
WINDOWED = ("mistral", "mixtral", "phi3")

# Families with a window in all but every n-th layer, unless `sliding_window_pattern` or a list of
# their layers says otherwise.
EVERY_NTH_SEES_ALL = {"gemma2": 2, "gemma3": 6, "gemma3_text": 6, "gpt_oss": 2, "cohere2": 4}

# Beginnings of families some of whose layers have other heads, or heads of other widths, than their
# configuration says of all.
OWN_HEADS = ("gemma4", "jetmoe", "laguna", "mimo_v2_flash")

# Facts whose names tell architectures apart.
SIZES = ("num_heads", "hidden_size", "num_layers")

WITHOUT_ATTENTION = "layers without attention (state space or linear), whose state crosses ranks; no planner knows them"

# Keys that make attention cost something else than `Model` says, and why.
UNLIKE: dict[str, str] = {
    "attention_chunk_size": "layers that attend inside chunks of that length, as Llama 4's; no planner knows them",
    "fixed_attn_block_size": "layers that attend inside chunks of that length, as Llama 4's; no planner knows them",
    "index_topk": "sparse attention to the keys that an indexer takes, as DeepSeek-V3.2's; no planner knows it",
    "is_encoder_decoder": "queries of a decoder that see an encoder's keys; no planner knows them",
    "add_cross_attention": "queries of a decoder that see an encoder's keys; no planner knows them",
    **dict.fromkeys(
        [
            "attn_layer_period",
            "full_attention_interval",
            "hybrid_override_pattern",
            "layers_block_type",
            "ssm_cfg",
            "state_size",
            "ssm_state_size",
            "mamba_d_state",
            "linear_attn_config",
            "lru_width",
        ],
        WITHOUT_ATTENTION,
    ),
}

# Families with recurrent layers that are read, by the kind of these (`ir.model.RecurrentLayers`).
HYBRIDS = {
    **dict.fromkeys(
        ["qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "olmo_hybrid"], "gated_delta"
    ),
    "kimi_linear": "kda",
    **dict.fromkeys(["nemotron_h", "granitemoehybrid", "bamba", "falcon_h1"], "mamba2"),
    "lfm2": "convolution",
}

# What their layers have, by the words and letters of their lists: a attends, r is recurrent, m an MLP
# or experts, whichever the model has; d an MLP where others have experts.
_HYBRID_LAYERS = {
    **dict.fromkeys(["full_attention", "attention"], "am"),
    **dict.fromkeys(["linear_attention", "mamba", "conv"], "rm"),
    "hybrid": "arm",
    # of Nemotron-H, where each layer is one of them alone
    **dict(zip("*ME-", "armd", strict=True)),
    "moe": "m",
    "mlp": "d",
}

# Keys under which a model of several modalities has the configuration of its text.
INNER = ("text_config", "thinker_config", "language_config", "llm_config")

# No type.
NONE: Mapping[str, Any] = {"mask": None, "sizes": [], "keys": {}}

# Values that switch nothing on.
UNSET: tuple[object, ...] = (None, False, 0, "", [], (), {})


@cache
def proved() -> Mapping[str, Any]:
    """The types, keys and values of Transformers that `tools.zoo` has compared with eager attention.

    `neutral`: expressions of keys that change nothing of who attends to whom, unless `speaks`, words
    of masks and mixers, is in their names. `values`: of keys that are read, or that say the mask, the
    words that were proved. `types`: those that came out equal: `mask`, if it is not
    causal; `sizes`, their names; `keys`, the others that they were run with, each with the values of
    switches, words and lists' entries that were tried, or null for a number, which may be any;
    `wrong`, keys that were set and came out otherwise. Of settings by layer the names count.
    `refused`: those that did not, and why. `untried`: Transformers' other types.
    """
    return read_json(Path(__file__).parent / "configs" / "transformers.json")


def facts(config: object, accept: Collection[str] = (), *, hybrid: bool = False) -> dict[str, Any]:
    """Fields of `ir.model.Model` that a configuration says; the usual ones where it leaves them
    out.

    `config`: an object with attributes, or a mapping; of several modalities its text's counts;
    `hybrid`: as of `check`. Raises ConfigError: heads, or the hidden size, are not said; as `check`.
    """
    check(config, accept, hybrid=hybrid)
    config = levels(config)[-1]
    found: dict[str, Any] = {
        fact: number for fact, names in NAMES.items() if (number := _first(config, names)) is not None
    }
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
    if (shared := value(config, "multi_query")) is True and not value(config, "new_decoder_architecture"):
        found["num_kv_heads"] = 1  # Falcon, GPTBigCode
    elif shared is False and value(config, "model_type") == "gpt_bigcode":
        found["num_kv_heads"] = found["num_heads"]  # whatever else its configuration says
    found.setdefault("num_kv_heads", found["num_heads"])
    found.setdefault("head_dim", found["hidden_size"] // found["num_heads"])
    found.setdefault("ffn_size", 4 * found["hidden_size"])
    if found.get("num_experts") == 1:  # as Hunyuan says that a model has none
        del found["num_experts"]
        found.pop("experts_per_token", None)
    if found.get("num_experts"):
        found |= _experts(config, found["ffn_size"], found.get("num_layers", 1))
    if (mask := _nearest(config)["mask"]) and not value(config, "is_decoder"):
        found["attention"] = mask
    activation = str(value(config, "hidden_act") or value(config, "hidden_activation") or "")
    family = str(value(config, "model_type") or "")
    if family.startswith(OWN_HEADS):
        log.warning(
            "model type %s: some layers may have other heads than %d of %d, with %d for keys; plans and estimates "
            "count on these in all layers",
            *(family, found["num_heads"], found["head_dim"], found["num_kv_heads"]),
        )
    found |= _recurrent(config, found) if hybrid else {}
    return {
        **found,
        **({} if (window := _window_of(config)) is None else {"attention": SlidingWindow(window).name}),
        "gated_ffn": activation in GATED or family.startswith(GATED_FAMILIES),
        "name": family or "custom",
    }


def pretrained(config: object, accept: Collection[str] = ()) -> dict[str, Any]:
    """`facts` of a model as it is pretrained by Megatron: with the layers that predict further
    tokens, windows that some of the layers have, and an output matrix that may be the embedding.
    Raises ConfigError: as `facts` does.
    """
    found, config = facts(config, accept, hybrid=True), levels(config)[-1]
    tied = value(config, "tie_word_embeddings")
    if tied is None:
        tied = found["name"].startswith(TIED_FAMILIES)
    layers = found.get("num_layers", Model.num_layers)
    more = _first(config, ("num_nextn_predict_layers", "mtp_num_layers"))
    if more and (own := found.get("recurrent")):
        further = {each: getattr(own, each) + more for each in ("attention_layers", "mlp_layers")}
        found["recurrent"] = replace(own, **further)
    return {
        **found,
        **_windows(config, layers),
        **({"num_layers": layers + more, "mtp_layers": more} if more else {}),
        **({"tied_embeddings": True} if tied else {}),
    }


def _windows(config: object, num_layers: int) -> dict[str, Any]:
    if _window_of(config) is not None or not _uses_window(config):
        return {}
    windowed = _windowed_layers(config, num_layers)
    if not windowed:
        return {}
    return {"other_attention": SlidingWindow(value(config, "sliding_window")).name, "other_layers": windowed}


def _windowed_layers(config: object, num_layers: int) -> int:
    """Layers with a window; ConfigError where the configuration does not say which."""
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
    # Widths of experts and of the MLP beside them; layers that have no experts.
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
    """Fields of multi-latent attention, if there is any; ConfigError where a width is not said."""
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


def _recurrent(config: object, found: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a hybrid model's layers (`HYBRIDS`); none: all layers attend. `found`: the others.

    Raises ConfigError: it is not said which layers attend, or none does.
    """
    family = str(value(config, "model_type"))
    words = _layer_words(config, family, found.get("num_layers", 0)) if family in HYBRIDS else ()
    if unknown := sorted(set(words) - _HYBRID_LAYERS.keys()):
        raise ConfigError(f"{_title(config)}: layers {', '.join(unknown)}: known are {', '.join(_HYBRID_LAYERS)}")
    kinds = "".join(_HYBRID_LAYERS[word] for word in words)
    if family == "nemotron_h":
        kinds = kinds.replace("am", "a").replace("rm", "r")
    if "r" not in kinds:
        return {}
    if "a" not in kinds:
        raise ConfigError(f"{_title(config)}: none of its {len(words)} layers attends, and plans are of attention")
    counts = {"layers": kinds.count("r"), "attention_layers": kinds.count("a")}
    counts["mlp_layers"] = kinds.count("m") + kinds.count("d")
    more = {"num_layers": len(words)}
    if family == "nemotron_h":  # whose configurations may name experts that no layer has
        if "m" not in kinds:
            more |= dict.fromkeys(("num_experts", "experts_per_token", "shared_ffn_size"), 0)
            more["ffn_size"] = _first(config, NAMES["ffn_size"]) or found["ffn_size"]
        elif "d" in kinds:
            more["dense_layers"] = kinds.count("d")
    if family == "granitemoehybrid" and (shared := _first(config, ("shared_intermediate_size",))):
        more["shared_ffn_size" if found.get("num_experts") else "ffn_size"] = shared
    if family == "kimi_linear":
        dense = [kind == "dense" for kind in value(config, "mlp_layer_types") or ()]
        more["dense_layers"] = sum(dense) or found.get("dense_layers", 0)
        more["shared_ffn_size"] = found["ffn_size"] * (_first(config, ("num_shared_experts", "n_shared_experts")) or 0)
    if family == "lfm2":
        more["ffn_size"] = _ffn_of_lfm2(config, found["ffn_size"])
    made = RecurrentLayers(kind=cast("RecurrentName", HYBRIDS[family]), **counts, **_states(config, found))
    return {**more, "recurrent": made}


def _layer_words(config: object, family: str, num_layers: int) -> Sequence[str]:
    # What each layer is, in the words of `_HYBRID_LAYERS`.
    for key in ("layer_types", "layers_block_type", "hybrid_override_pattern"):
        if listed := value(config, key):
            return list(listed)
    attending: Collection[int] | None = None
    if every := _first(config, ("full_attention_interval",)):
        attending = range(every - 1, num_layers, every)
    elif listed := value(config, "linear_attn_config"):
        attending = [number - 1 for number in listed["full_attn_layers"]]
    elif family in ("bamba", "lfm2"):
        attending = value(config, {"bamba": "attn_layer_indices", "lfm2": "full_attn_idxs"}[family])
    elif family == "falcon_h1":
        return ["hybrid"] * num_layers
    if attending is None:
        raise ConfigError(f"{_title(config)} does not say which layers attend; give layer_types")
    return ["attention" if at in attending else "mamba" for at in range(num_layers)]


def _states(config: object, found: Mapping[str, Any]) -> dict[str, int]:
    # Sizes of the states of recurrent layers.
    of_kimi = value(config, "linear_attn_config") or {}

    def first(*names: str, default: int | None = None) -> int:
        number = _first(config, names)
        number = default if number is None else number
        if number is None:
            raise ConfigError(f"{_title(config)} does not say {' or '.join(names)}, of its recurrent layers")
        return number

    heads, hidden = found["num_heads"], found["hidden_size"]
    match HYBRIDS[str(value(config, "model_type"))]:
        case "convolution":
            return {"heads": 1, "value_dim": hidden, "conv_width": first("conv_L_cache", default=3)}
        case "kda":
            both = first("linear_num_heads", default=of_kimi.get("num_heads"))
            width = first("linear_head_dim", default=of_kimi.get("head_dim"))
            conv = first("linear_conv_kernel_dim", default=of_kimi.get("short_conv_kernel_size"))
            return {"heads": both, "key_heads": both, "key_dim": width, "value_dim": width, "conv_width": conv}
        case "gated_delta":
            key_heads = first("linear_num_key_heads", default=heads)
            key_dim = first("linear_key_head_dim", default=3 * hidden // (4 * key_heads))
            return {
                "heads": first("linear_num_value_heads", default=heads),
                "key_heads": key_heads,
                "key_dim": key_dim,
                "value_dim": first("linear_value_head_dim", default=2 * key_dim),
                "conv_width": first("linear_conv_kernel_dim", default=4),
            }
        case _:
            count = first("mamba_num_heads", "mamba_n_heads")
            width = first("mamba_d_ssm", default=first("mamba_expand", "expand", default=2) * hidden)
            return {
                "heads": count,
                "key_heads": first("n_groups", "mamba_n_groups", default=1),
                "key_dim": first("ssm_state_size", "mamba_d_state"),
                "value_dim": first("mamba_head_dim", "mamba_d_head", default=width // count),
                "conv_width": first("conv_kernel", "mamba_d_conv", default=4),
                "chunk": first("chunk_size", "mamba_chunk_size", default=256),
            }


def _ffn_of_lfm2(config: object, said: int) -> int:
    # The width that its MLPs have by the sizes its configuration says.
    said = _first(config, ("block_ff_dim",)) or said
    if value(config, "block_auto_adjust_ff_dim") is False:
        return said
    multiple = _first(config, ("block_multiple_of",)) or 256
    said = int((value(config, "block_ffn_dim_multiplier") or 1) * int(2 * said / 3))
    return -(-said // multiple) * multiple


def check(config: object, accept: Collection[str] = (), *, hybrid: bool = False) -> None:
    """Refuse a model that nobody has proved to attend as plans have it.

    `config`: as for `facts`; `accept`: model types and keys to go on with, by the names that the
    refusal says; the log repeats them; `hybrid`: whether who asks knows the recurrent layers of
    `HYBRIDS`. Raises ConfigError: names all types and keys, and why.
    """
    if isinstance(accept, str):
        raise ConfigError(f"accept: expected a list of names such as [{accept!r}], got {accept!r}")
    said = refusal(_title(config), unproved(config, hybrid=hybrid), accept, "accept={}, on the command line --accept,")
    if said is not None:
        raise ConfigError(said)


def refusal(title: str, found: Mapping[str, str], accept: Collection[str], how: str) -> str | None:
    """Why a model is refused of which nobody knows whether plans compute it; None: all was
    accepted, and the log repeats it.

    Every way into the product that takes a model asks here. `title`: of what holds the names; `found`:
    names that are not known, and why each matters; `accept`: names to go on with; `how`: to accept,
    with braces where the list of names goes.
    """
    refused = {name: why for name, why in found.items() if name not in accept}
    if refused:
        reasons = "; ".join(f"{name}: {why}" for name, why in refused.items())
        return f"{title}: {reasons}. Losses may be wrong; {how.format(list(refused))} goes on nonetheless"
    if found:
        reasons = "; ".join(f"{name}: {why}" for name, why in found.items())
        log.warning("%s: accepted, though losses and plans may be wrong: %s", title, reasons)
    return None


def unproved(config: object, *, hybrid: bool = False) -> dict[str, str]:
    """Model types and keys, at all levels, that are not known to attend as plans have it, and why.

    `hybrid`: as of `check`.
    """
    found: dict[str, str] = {}
    for keys in levels(config):
        known = hybrid and keys.get("model_type") in HYBRIDS
        found |= _unproved_of_hybrid(keys) if known else _unproved(keys)
    return found


def levels(config: object) -> list[Mapping[str, Any]]:
    """The keys of a configuration, and those of its text's configuration, if it has one inside."""
    if isinstance(config, Mapping):
        keys = cast("Mapping[str, Any]", config)
    elif callable(to_dict := getattr(config, "to_dict", None)):
        keys = cast("Mapping[str, Any]", to_dict())  # Transformers' own, as its config.json has them
    else:
        keys = {name: getattr(config, name, None) for name in dir(config) if not name.startswith("_")}
        keys = {name: each for name, each in keys.items() if not callable(each)}
    inner = next((keys[name] for name in INNER if isinstance(keys.get(name), Mapping)), None)
    around = {name: each for name, each in keys.items() if name not in INNER}
    return [keys] if inner is None else [around, *levels(inner)]


def _unproved(keys: Mapping[str, Any]) -> dict[str, str]:
    known, family = proved(), str(keys.get("model_type") or "")
    if family in known["refused"]:
        return {family: known["refused"][family]}
    found = {key: why for key, why in UNLIKE.items() if keys.get(key)}
    if family in known["untried"]:
        return found | {family: "a type of Transformers that was not compared with eager attention"}
    for key, allowed in known["values"].items():
        # False says something: `is_causal: false` is another mask
        said = () if (one := keys.get(key)) is None or one == "" else _listed(one)
        got = set(map(str, said)) | (_ropes(keys) if key == "rope_type" else set())
        if unknown := sorted(got - set(allowed)):
            found[key] = f"{', '.join(unknown)}: known are {', '.join(allowed)}"
    found |= _uneven_heads(keys)
    if (like := _nearest(keys)) is NONE:
        named = ", ".join(sizes(keys))
        return found | {family: f"an unknown model type, whose sizes are named like no known one's ({named})"}
    wrong = {key: why for key, why in like.get("wrong", {}).items() if _is_set(key, keys.get(key))}
    if family not in known["types"]:  # a fork may have the key of a type of other attention
        wrong |= {
            key: f"set to {str(got)[:60]}, which says who attends to whom, in a model type that is not known"
            for key, got in keys.items()
            if _speaks(key) and _is_set(key, got)
        }
    return wrong | _beyond(keys, like) | found


def _uneven_heads(keys: Mapping[str, Any]) -> dict[str, str]:
    return {
        key: f"set to {str(got)[:60]}, where one whole number for all layers is read"
        for key in chain.from_iterable(NAMES[fact] for fact in ("num_heads", "num_kv_heads", "head_dim"))
        if (got := keys.get(key)) is not None and type(got) is not int
    }


def _unproved_of_hybrid(keys: Mapping[str, Any]) -> dict[str, str]:
    # Beside its recurrent layers, which `facts` reads.
    said = {key: why for key, why in UNLIKE.items() if why != WITHOUT_ATTENTION and keys.get(key)}
    speaking = {
        key: f"set to {str(got)[:60]}, which says who attends to whom, beside recurrent layers"
        for key, got in keys.items()
        if _speaks(key) and _is_set(key, got) and key not in ("full_attention_interval", "full_attn_idxs")
    }
    return speaking | said | _uneven_heads(keys)


def _nearest(keys: Mapping[str, Any]) -> Mapping[str, Any]:
    # The type of a configuration; of an unknown one, as a fork has it, the known one of the same
    # names for its sizes that has most of its keys.
    types, family, named = proved()["types"], keys.get("model_type"), sizes(keys)
    if family in types:
        return types[family]
    alike = [each for each in types.values() if not family or named == each["sizes"]]
    return min(alike, key=lambda each: len(_beyond(keys, each)), default=NONE)


def _beyond(keys: Mapping[str, Any], of_type: Mapping[str, Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    for key, got in keys.items():
        tried = of_type["keys"].get(key, ())
        if got is None or tried is None or is_neutral(key):
            continue
        if any(one not in tried for one in _listed(got)) if tried else _is_set(key, got):
            known = f"; known is {', '.join(map(str, tried))}" if tried else ", and no known model of this shape has it"
            found[key] = f"set to {str(got)[:60]}{known}"
    return found


def _listed(got: object) -> Sequence[object]:
    # Entries of a list; of settings by layer their names.
    got = by_layer(got)
    return cast("Sequence[object]", got) if isinstance(got, list | tuple) else (got,)


def by_layer(got: object) -> object:
    """Get the names of settings that some layers have for themselves; any other value as it is."""
    if not isinstance(got, Mapping):
        return got
    each = list(cast("Mapping[object, object]", got).values())
    if not all(isinstance(own, Mapping) for own in each):
        return got
    return sorted({str(name) for own in each for name in cast("Mapping[object, object]", own)})


def is_neutral(key: str) -> bool:
    """Whether a key changes nothing of who attends to whom, or is read."""
    return key in proved()["values"] or (not _speaks(key) and _neutral().fullmatch(key) is not None)


def _is_set(key: str, got: object) -> bool:
    # not causal is a mask, too
    return got not in UNSET or (got in (False,) and "causal" in key)


def _speaks(key: str) -> bool:
    return key not in proved()["values"] and re.fullmatch(proved()["speaks"], key) is not None


@cache
def _neutral() -> re.Pattern[str]:
    return re.compile("|".join(proved()["neutral"]))


def sizes(keys: Mapping[str, Any]) -> list[str]:
    """The names under which a configuration has its sizes."""
    return [next((name for name in NAMES[fact] if keys.get(name) is not None), "none") for fact in SIZES]


def _ropes(keys: Mapping[str, Any]) -> set[str]:
    found: set[str] = set()
    for name in ("rope_parameters", "rope_scaling"):
        given = keys.get(name)
        if isinstance(given, str | list):
            found.add(str(given))
        if isinstance(given, Mapping):
            every = [given, *(each for each in given.values() if isinstance(each, Mapping))]
            found |= {str(each.get("rope_type") or each.get("type") or "default") for each in every}
    return found


def num_layers(config: object) -> int | None:
    """Layers of its text that a configuration says; None: it does not say."""
    return _first(levels(config)[-1], NAMES["num_layers"])


def _window_of(config: object) -> int | None:
    """Keys of the sliding window that all layers have; None: not all have one."""
    kinds = value(config, "layer_types")
    alike = value(config, "model_type") in WINDOWED if kinds is None else set(kinds) == {"sliding_attention"}
    return value(config, "sliding_window") if alike and _uses_window(config) else None


def _uses_window(config: object) -> bool:
    # Whether any layer has a sliding window, which may be there and not be used (Qwen2).
    kinds = value(config, "layer_types")
    if kinds is not None and "sliding_attention" not in kinds:
        return False
    return bool(value(config, "sliding_window")) and value(config, "use_sliding_window") is not False


def value(config: object, name: str) -> Any:
    """Get what a configuration says under a name; None: nothing."""
    return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)  # pyright: ignore[reportUnknownMemberType,reportUnknownVariableType]


def _first(config: object, names: tuple[str, ...]) -> int | None:
    values = (value(config, name) for name in names)
    return next((each for each in values if type(each) is int), None)


def _title(config: object) -> str:
    return f"model type {family}" if (family := value(config, "model_type")) else "the configuration"
