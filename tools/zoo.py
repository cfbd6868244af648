"""Run every architecture of the installed Transformers, tiny, balanced on two ranks, against eager.

    python -m tools.zoo                                    # all of them, with a table
    python -m tools.zoo llama gemma --json                 # those whose names hold one of the words
    python -m tools.zoo --write docs/measurements/transformers-models.md
                                                           # also the page, and the list that the guard
                                                           # goes by: configs/transformers.json
    python -m tools.zoo --results rows.jsonl               # go on after an interruption

Each configuration is the default one of its class, shrunk by its keys; beside it stand variants that
change attention, and every switch of a class flipped that may. The right values are those of the
same weights with `attn_implementation="eager"`, each document alone in one process: the logits of
every token, in fp32. Everything runs, also what the guard (`model_config.check`) would refuse, so
that a model that came to work is found. Printed is what a user gets:

equal    the guard lets it pass, and logits are those of eager attention
refused  by the guard, or with an error in the first step; the reason is why, or what came out
WRONG    it passes, runs, and its logits are others
untried  it cannot be built from its defaults, or its logits do not depend on attention
"""

import argparse
import faulthandler
import json
import math
import multiprocessing
import os
import re
import sys
import tempfile
import textwrap
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, cast

RANKS = 2
STATUSES = ("untried", "refused", "WRONG", "equal")
LIST = Path(__file__).resolve().parents[1] / "configs" / "transformers.json"
MOST = 2e-5  # eager logits of gated delta rules are 1.2e-5 from those of fp64 themselves
"""Largest difference of logits over the largest logit that is still equal."""
VOCABULARY = 128
LENGTHS = ((44, 7), (23, 2, 1, 30))
"""Of the documents that each rank gives."""
LEAST = 1e-3
"""Change of the last logits, by another token within the window, that shows that attention matters."""
MIXERS = re.compile(
    r"Mamba|SSM|DeltaNet|Conv1d|ShortConv|Conv$|Recurrent|Lightning|LinearAtt|KDA|Kimi.*Delta|RgLru|Mixer|Rwkv|LSTM"
)
"""Names of modules that mix tokens beside attention, or choose keys for it."""
LAYERS = 4
WINDOW = 8

SIZES: tuple[tuple[str, int], ...] = (
    (r"hidden_size|d_model|n_embd|dim|emb_dim|embedding_dim|word_embed_proj_dim|dim_model|lru_width", 64),
    (r"attention_hidden_size|embedding_size|input_embedding_size|output_embedding_size|hidden_dim", 64),
    (r"(swa_)?num_attention_heads|n_heads?|num_heads|(encoder|decoder)_attention_heads|attention_heads", 4),
    (r"(global_|swa_)?head_dim|kv_channels|d_head|d_kv|attention_head_size|dim_head|attention_head_dim", 16),
    (r"(decoder_|encoder_|num_)?(hidden_)?layers|n_layers?|num_(de|en)coder_layers", LAYERS),
    (r".*(intermediate|ffn|feed_forward|ffn_hidden)_(size|dim)|dff|d_inner|dim_ff|n_inner|intermediate_size_mlp", 64),
    (r".*vocab_size(_per_layer_input)?", VOCABULARY),
    (r"max_position_embeddings|n_positions|n_ctx|max_seq_len|context_length|max_(target|source)_positions", 256),
    (r"num_experts|n_routed_experts|num_local_experts|moe_num_experts|zero_expert_num", 4),
    (r"num_experts_per_tok(en)?|moe_topk|moe_k|experts_per_token|top_k_experts", 2),
    (r"(num_)?n_group|n_group|num_expert_group|topk_group", 1),
    (r"first_k_dense_replace|num_dense_layers|moe_layer_start_index", 1),
    (r"kv_lora_rank|o_lora_rank", 16),
    (r"q_lora_rank", 24),
    (r"qk_nope_head_dim|v_head_dim", 16),
    (r"qk_rope_head_dim|rotary_dim", 8),
    (r"qk_head_dim", 24),
    (r"sliding_window(_size)?|local_attention|window_size|attention_window_size|attention_chunk_size", WINDOW),
    (r"linear_num_key_heads|linear_num_heads", 2),
    (r"linear_num_value_heads|mamba_n_heads|mamba_num_heads|n_mamba_heads", 4),
    (r"linear_(key_|value_)?head_dim|index_head_dim|mamba_(d_)?head(_dim)?", 16),
    (r"index_n_heads", 2),
    (r"index_topk|index_topk_blocks", 4),
    (r"(mamba_)?(d_state|ssm_state_size|state_size)", 8),
    (r"hidden_size_per_layer_input|laurel_rank|ple_embed_dim", 16),
    (r"num_mel_bins|image_size|patch_size", 8),
    (r"depth", 2),
)
"""Names of sizes, as expressions, and what they shrink to where they are larger."""
TWEAKS: dict[str, dict[str, Any]] = {
    **{key: {"head_dim": 16} for key in ("hunyuan_v1_dense", "hunyuan_v1_moe", "ministral")},
    **{key: {"layer_types": ["conv", "full_attention"] * 2} for key in ("lfm2", "lfm2_moe")},
    "nemotron": {"num_key_value_heads": 2},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1, "topk_group": 1},
    "deepseek_v2": {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "dbrx": {"attn_config": {"kv_n_heads": 1, "rope_theta": 1e4, "clip_qkv": 8.0}},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "nemotron_h": {"n_groups": 1},
    "granitemoehybrid": {"mamba_d_head": 32, "layer_types": ["mamba", "attention"] * 2},
    "bamba": {"mamba_d_head": 32, "attn_layer_indices": [1, 3]},
    "qwen2_vl": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}},
    "falcon_h1": {"mamba_d_head": 32, "mamba_d_ssm": 128},
    "mamba2": {"num_heads": 8},
    "gemma4_assistant": {"hidden_size_per_layer_input": 0},
    "glm5_next": {"index_topk": 16},
}
"""Keys that must fit one another, by type."""
OTHER_MECHANISMS = re.compile(
    r"mix tokens|layer_types: conv|indexer|soft-capped|inside chunks|position_bias|not causal|union of masks"
    r"|see an encoder"
)
"""In reasons: what a decoder has beside causal or windowed attention."""
NOT_PLAIN = {
    **dict.fromkeys(("bloom", "mpt"), "ALiBi"),
    **dict.fromkeys(("big_bird", "megatron-bert", "rembert", "roformer", "xlm", "xlnet"), "sees both ways"),
    "cpmant": "position bias",
    "deepseek_v4": "compressed keys",
    "doge": "a mask made of values",
    "git": "a prefix of images",
    **dict.fromkeys(("mllama", "trocr"), "cross attention"),
    **dict.fromkeys(("falcon_mamba", "mamba", "rwkv"), "no attention"),
}
"""Refused types with another mechanism that their reason does not say."""
KV_HEADS = re.compile(r"(swa_)?num_(key_value|kv)_heads|num_query_groups")


@dataclass(frozen=True)
class Case:
    """A configuration: a model type, the head that it is built with, and keys that are not default."""

    type: str
    head: str = "causal"
    keys: dict[str, Any] = field(default_factory=dict[str, Any], hash=False)

    @property
    def name(self) -> str:
        """For people, and for selection."""
        said = [self.type] + ([] if self.head == "causal" else [self.head])
        return " ".join(said + [f"{key}={_short(value)}" for key, value in self.keys.items()])


@dataclass(frozen=True)
class Found:
    """The outcome of a case. `status`: equal, refused or WRONG without the guard, or untried.

    `levels`: of the configuration and of its text's: type, names of sizes, and keys that may matter.
    """

    name: str
    status: str
    reason: str = ""
    difference: float | None = None
    levels: list[tuple[str, list[str], dict[str, Any]]] = field(default_factory=list[Any])
    seconds: float = 0.0


class _Everything(tuple[str, ...]):
    """Names that hold every name: what a run goes on with whose guard shall not stop it."""

    __slots__ = ()

    def __contains__(self, name: object) -> bool:
        return True


def _short(value: Any) -> str:
    return str(value.get("rope_type", value)) if isinstance(value, dict) else str(value)


# Configurations


def tiny(case: Case) -> Any:
    """The default configuration of a type, shrunk, with the keys of a case."""
    from transformers import CONFIG_MAPPING

    cls = CONFIG_MAPPING[case.type]
    keys = shrunk(cls().to_dict())
    text = keys["text_config"] if isinstance(keys.get("text_config"), dict) else keys
    text |= {name: value for name, value in TWEAKS.get(case.type, {}).items() if name in text} | deepcopy(case.keys)
    return cls.from_dict(keys)


def shrunk(keys: dict[str, Any]) -> dict[str, Any]:
    """Keys of a configuration with small sizes, nested ones too."""
    if keys.get("qk_rope_head_dim") and keys.get("head_dim") == keys["qk_rope_head_dim"]:
        keys = {**keys, "head_dim": 8}
    heads = next((keys[name] for name in ("num_attention_heads", "n_head", "n_heads") if name in keys), None)
    depth = next((keys[name] for name in ("num_hidden_layers", "n_layer", "n_layers", "num_layers") if name in keys), 0)
    chosen = _layers(keys, depth)
    small = {name: _small(name, value, heads, depth, chosen) for name, value in keys.items()}
    if keys.get("per_layer_config"):
        wider = {name: 2 * small[name] for name in ("head_dim",) if name in small}
        of_layer = {int(at): shrunk(own) | wider for at, own in keys["per_layer_config"].items() if "head_dim" in own}
        small["per_layer_config"] = {new: of_layer[at] for new, at in enumerate(chosen) if at in of_layer}
    return small


def _small(name: str, value: Any, heads: int | None, depth: int, chosen: Sequence[int]) -> Any:
    if isinstance(value, dict):
        return shrunk(value) if all(isinstance(key, str) for key in value) else value
    if isinstance(value, list | tuple) and depth and len(value) == depth:
        return [_small("", value[at], heads, depth, chosen) for at in chosen]
    if name == "mrope_section":
        whole = sum(value) // 8  # half the rotary width of heads of 16 in place of 128
        return [whole // 4, (whole - whole // 4) // 2, whole - whole // 4 - (whole - whole // 4) // 2]
    if "drop" in name and isinstance(value, float):
        return 0.0
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    if KV_HEADS.fullmatch(name):
        return 4 if value == heads else min(value, 2)
    if re.fullmatch(r".*_(token_id|token_index|index)", name):
        return value if value < VOCABULARY - 28 else 3
    return next((min(value, size) for pattern, size in SIZES if re.fullmatch(pattern, name)), value)


def _layers(keys: dict[str, Any], depth: int) -> list[int]:
    """Layers to keep: the first of each kind, and further ones from the beginning."""
    kinds: dict[Any, int] = {}
    for name in ("layer_types", "layers_block_type", "attention_layers"):
        for at, kind in enumerate(keys.get(name) or ()):
            kinds.setdefault(str(kind), at)
    kept = {at for at in kinds.values() if at < depth}
    for at in range(depth):
        if len(kept) < LAYERS:
            kept.add(at)
    return sorted(kept)


ROPES: dict[str, dict[str, Any]] = {
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0, "original_max_position_embeddings": 16},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 16},
    "llama3": {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16},
    "longrope": {
        "short_factor": [1.0] * 8,
        "long_factor": [1.5 + at / 4 for at in range(8)],
        "factor": 4.0,
        "original_max_position_embeddings": 32,
    },
}
"""Ways to stretch rotary positions, and what each needs; documents pass the original length."""

VARIANTS: tuple[tuple[str, dict[str, Any]], ...] = (
    *(
        ("llama", {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, **keys}, "max_position_embeddings": 16})
        for kind, keys in ROPES.items()
    ),
    (
        "phi3",
        {
            "rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, **ROPES["longrope"]},
            "original_max_position_embeddings": 32,
        },
    ),
    *((each, {"per_layer_config": {}}) for each in ("gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text")),
    ("gemma4_text", {"per_layer_config": {3: {"head_dim": 32, "num_key_value_heads": 1}}, "attention_k_eq_v": True}),
    ("lfm2", {"layer_types": ["full_attention"] * LAYERS}),
    ("mistral", {"sliding_window": None}),
    ("mixtral", {"sliding_window": WINDOW}),
    ("phi3", {"sliding_window": WINDOW}),
    ("starcoder2", {"sliding_window": WINDOW}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2, "layer_types": None}),
    ("qwen3", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2, "layer_types": None}),
    ("qwen3_moe", {"use_sliding_window": True, "sliding_window": WINDOW}),
    ("gemma2", {"attn_logit_softcapping": None}),
    *((each, {"use_bidirectional_attention": True}) for each in ("gemma", "gemma3_text")),
    ("falcon", {"alibi": True}),
    ("falcon", {"new_decoder_architecture": True}),
    ("falcon", {"multi_query": False}),
    ("gpt_bigcode", {"multi_query": False}),
    ("deepseek_v3", {"q_lora_rank": None}),
    ("olmo", {"clip_qkv": 0.5}),
    ("opt", {"do_layer_norm_before": False}),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
    ("gpt2", {"reorder_and_upcast_attn": True}),
    ("gpt2", {"add_cross_attention": True}),
    ("gpt_neox", {"use_parallel_residual": False}),
    ("bert", {"is_decoder": True}),
    ("roberta", {"is_decoder": True}),
    ("electra", {"is_decoder": True}),
    ("bart", {"is_decoder": True, "is_encoder_decoder": False}),
)
"""Keys that change attention, beside the defaults of their types."""


def cases(words: Sequence[str] = ()) -> list[Case]:
    """Configurations whose name holds one of the words; none given: all."""
    from transformers.models.auto import modeling_auto as auto

    causal = dict(auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    images = dict(auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
    masked = dict(auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES)
    every = [Case(each) for each in causal]
    every += [Case(each, "image-text") for each in images if each not in causal]
    every += [Case(each, "encoder") for each in masked]
    every += [Case(each, "causal", keys) for each, keys in VARIANTS]
    exact = [each for each in every if each.name in words]
    return exact or [each for each in every if not words or any(word in each.name for word in words)]


def switches(case: Case) -> list[Case]:
    """A case with a key turned over, each in turn: switches that may matter, windows that are off."""
    from megatron_balance.model_config import UNLIKE, is_neutral

    keys = tiny(case).to_dict()
    turned: dict[str, Any] = {
        key: not got for key, got in keys.items() if isinstance(got, bool) and not is_neutral(key)
    }
    if "sliding_window" in keys and keys["sliding_window"] is None:
        turned["sliding_window"] = WINDOW
    return [Case(case.type, case.head, {key: got}) for key, got in turned.items() if key not in UNLIKE]


# One case, on a rank


def run_case(case: Case, rank: int, join: Callable[[], None] = lambda: None) -> Found:
    """Compare the logits of a case, balanced over ranks and alone.

    `join`: the other ranks, once it is clear that the model can be built.
    """
    import torch

    from megatron_balance import errors
    from megatron_balance.model_config import levels

    torch.set_num_threads(1)
    torch.manual_seed(0)
    read: list[Any] = []
    try:
        config = tiny(case)
        read = [_level(keys) for keys in levels(config)]
        eager = build(case, config, "eager")
        set_weights(eager)
        documents = [_tokens(length, 10 * rank + n) for n, length in enumerate(LENGTHS[rank] if rank < RANKS else ())]
        right = [alone(eager, each) for each in documents]
        if documents:
            changed = documents[0].clone()
            changed[len(changed) - WINDOW + 2] = 5
            if _apart([alone(eager, changed)[-1:]], [right[0][-1:]]) < LEAST:
                return Found(case.name, "untried", "its logits do not depend on attention", levels=read)
    except Exception as error:
        return Found(case.name, "untried", _said(error), levels=read)
    join()
    calls: list[bool] = []
    try:
        got = balanced(case, config, eager, documents, calls)
    except errors.BalanceError as error:
        past = "expected attention under" in str(error) or "computes with its attention mask" in str(error)
        return Found(case.name, "refused", _why(eager, calls) if past else _said(error), levels=read)
    except Exception as error:
        said = f"{_why(eager, calls)} (ends in {type(error).__name__}: {_said(error)})"
        return Found(case.name, "refused", said, levels=read)
    apart = _apart(got, right)
    if apart <= MOST and calls:
        return Found(case.name, "equal", _why(eager, calls) if any(calls) else "", apart, read)
    return Found(case.name, "WRONG", _why(eager, calls), apart, read)


def _level(keys: Mapping[str, Any]) -> tuple[str, list[str], dict[str, Any]]:
    """Type, names of sizes, and the keys that may matter and are set, or are switches."""
    from megatron_balance.model_config import UNLIKE, UNSET, by_layer, is_neutral, sizes

    matter = {key: got for key, got in keys.items() if not is_neutral(key) and key not in UNLIKE}
    matter = {key: got for key, got in matter.items() if isinstance(got, bool) or got not in UNSET}
    matter = {key: by_layer(got) for key, got in matter.items()}
    return str(keys.get("model_type")), sizes(keys), {k: 0 if isinstance(v, dict) else v for k, v in matter.items()}


def _apart(got: Sequence[Any], right: Sequence[Any]) -> float:
    """The largest difference over the largest right value."""
    if not right:
        return 0.0
    largest = max(float(each.abs().max()) for each in right)
    apart = max(float((a - b).abs().max()) for a, b in zip(got, right, strict=True)) / largest
    return apart if math.isfinite(apart) else math.inf


def _why(model: Any, calls: Sequence[bool]) -> str:
    """Say what is known of a model whose logits are others, or are equal by more than attention."""
    names = {type(module).__name__ for module in model.modules()}
    mixers = sorted(name for name in names if MIXERS.search(name))
    if any("Indexer" in name for name in names):
        return "attends to the keys that an indexer chooses"
    if mixers:
        return f"has layers that mix tokens beside attention: {', '.join(mixers[:3])}"
    if not calls:
        return "attends by itself, not through Transformers' AttentionInterface"
    return "attends or counts positions otherwise than plans have it"


def _tokens(length: int, seed: int) -> Any:
    import torch

    return torch.randint(10, VOCABULARY - 8, (length,), generator=torch.Generator().manual_seed(seed))


def build(case: Case, config: Any, attention: str) -> Any:
    """The model of a case, in fp32, without dropout."""
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        AutoModelForMaskedLM,
        AutoModelForSeq2SeqLM,
    )

    kinds = {
        "causal": AutoModelForCausalLM,
        "image-text": AutoModelForImageTextToText,
        "encoder": AutoModelForMaskedLM,
        "encoder-decoder": AutoModelForSeq2SeqLM,
    }
    return kinds[case.head].from_config(deepcopy(config), attn_implementation=attention).float().eval()


def set_weights(model: Any) -> None:
    """Weights of a size at which every layer, head and gate makes a difference."""
    import torch

    drawn = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            if not weight.is_floating_point():
                continue
            noise = torch.randn(weight.shape, generator=drawn)
            if weight.ndim > 1:
                weight.copy_(noise / weight.shape[-1] ** 0.5)
            else:
                weight.add_(0.1 * noise)


def alone(model: Any, tokens: Any) -> Any:
    import torch

    with torch.no_grad():
        return model(input_ids=tokens[None], use_cache=False).logits[0]


def balanced(case: Case, config: Any, eager: Any, documents: list[Any], calls: list[bool]) -> list[Any]:
    """Logits of this rank's documents, from all ranks; layers that attend add to `calls`, whether
    recurrent ones beside them run under the plan.
    """
    import torch
    from transformers import AttentionInterface

    from megatron_balance.torch import SequenceBalancer, Settings, hf, mixers

    def counted(*given: Any, **keywords: Any) -> Any:
        calls.append(hasattr(given[0], mixers.CALLS))
        return hf.attend(*given, **keywords)

    model = build(case, config, hf.register())
    AttentionInterface.register(hf.NAME, counted)
    model.load_state_dict(eager.state_dict())
    settings = Settings(mask="full" if case.head == "encoder" else None)
    with SequenceBalancer.for_model(config, "te_ring", settings=settings, accept=_Everything()) as balancer:
        batch = balancer(documents)
        with torch.no_grad():
            logits = model(**hf.inputs(batch)).logits[0]
        return batch.gather(logits)


def _said(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]


# Running all


def run(chosen: Sequence[Case], limit_s: float) -> Iterator[Found]:
    """Run each case in processes of its own, which may crash or hang, and give its outcome."""
    import torch  # noqa: F401  once, before forks
    import transformers.modeling_layers
    import transformers.models.auto.modeling_auto  # noqa: F401

    import megatron_balance.torch.hf  # noqa: F401

    for case in chosen:
        started = time.monotonic()
        found = _on_ranks(case, limit_s)
        yield replace(found, seconds=round(time.monotonic() - started, 2))


def _on_ranks(case: Case, limit_s: float) -> Found:
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="zoo-") as folder:
        pipes, processes = [], []
        for rank in range(RANKS):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_child, args=(case, rank, f"{folder}/store", theirs), daemon=True)
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        answers: dict[int, Found] = {}
        deadline = time.monotonic() + limit_s
        while len(answers) < RANKS and time.monotonic() < deadline:
            open_pipes = [pipe for rank, pipe in enumerate(pipes) if rank not in answers]
            for pipe in cast("list[Any]", wait(open_pipes, timeout=max(0.0, deadline - time.monotonic()))):
                rank = pipes.index(pipe)
                try:
                    answers[rank] = pipe.recv()
                except EOFError:
                    answers[rank] = Found(case.name, "refused", "a rank died")
                if answers[rank].status in ("refused", "untried"):
                    deadline = min(deadline, time.monotonic() + 2.0)  # the other one may wait for it
        for process in processes:
            process.kill()
        for process in processes:
            process.join()
    if len(answers) < RANKS and not any(each.status in ("untried", "refused") for each in answers.values()):
        return Found(case.name, "refused", f"a rank gave no answer in {limit_s:g} s")
    worst = min(answers.values(), key=lambda each: STATUSES.index(each.status))
    apart = [each.difference for each in answers.values() if each.difference is not None]
    return replace(worst, difference=max(apart, default=None))


def _child(case: Case, rank: int, store: str, pipe: Any) -> None:
    faulthandler.disable()
    sink = open(os.devnull, "w")  # noqa: SIM115  for the life of the process
    os.dup2(sink.fileno(), 1)
    os.dup2(sink.fileno(), 2)
    warnings.simplefilter("ignore")

    def join() -> None:
        import torch.distributed as dist

        own, limit = f"file://{store}", timedelta(seconds=60)
        dist.init_process_group("gloo", init_method=own, rank=rank, world_size=RANKS, timeout=limit)

    pipe.send(run_case(case, rank, join))
    os._exit(0)


# The list of what is known, and the page


def known_of(rows: Sequence[Found], before: Mapping[str, Any], version: str) -> dict[str, Any]:
    """The list that the guard goes by, from rows of all cases; neutral keys are those of before."""
    types: dict[str, dict[str, Any]] = {}
    refused: dict[str, str] = {}
    # these run causally, too, where they are told that they are decoders
    encoders = {row.name.split()[0] for row in rows if row.status == "equal" and row.name.endswith(" encoder")}
    for row in rows:
        # with a reason: where the recurrent layers are handed on, which who asks has to know
        passes = row.status == "equal" and not row.reason
        for family, named, keys in row.levels:
            if not passes:
                continue
            own = types.setdefault(family, {"mask": "full", "sizes": named, "keys": {}})
            if "encoder" not in row.name.split() and "is_decoder" not in row.name and family not in encoders:
                own["mask"] = None
            for key, got in keys.items():
                _add(own["keys"], key, got)
    for row in rows:
        family, _, turned = row.name.partition(" ")
        key = turned.partition("=")[0]
        if row.status == "WRONG" and family in types and " " not in turned and "=False" not in turned and key:
            types[family].setdefault("wrong", {})[key] = reason_of(row)
        for family, _, _ in row.levels:
            if family not in types:
                refused.setdefault(family, reason_of(row))
        if not row.levels:
            refused.setdefault(row.name.split()[0], reason_of(row))
    ropes = {kind for kind in ROPES if all(r.status == "equal" for r in rows if f"rope_parameters={kind}" in r.name)}
    causal_first = sorted(types, key=lambda family: (types[family]["mask"] is not None, family))
    return {
        "transformers": version,
        "neutral": before["neutral"],
        "speaks": before["speaks"],
        "values": {**before["values"], "rope_type": sorted({"default", "mrope", "proportional"} | ropes)},
        "types": {family: types[family] for family in causal_first},
        "refused": dict(sorted((family, why) for family, why in refused.items() if family not in types)),
        "untried": sorted(_every_type() - types.keys() - refused.keys()),
    }


def _every_type() -> set[str]:
    """All model types of the installed Transformers, those of parts of models too."""
    import transformers

    models = Path(transformers.__file__).parent / "models"
    named = re.compile(r'^    model_type(?:: str)? = "([^"]+)"', re.MULTILINE)
    return {name for path in models.glob("*/configuration_*.py") for name in named.findall(path.read_text("utf-8"))}


def _add(keys: dict[str, Any], key: str, got: Any) -> None:
    """Add a value to those that a key was tried with; numbers may be any."""
    each = got if isinstance(got, list | tuple) else [got]
    if all(type(one) in (bool, str) for one in each) or isinstance(got, list | tuple):
        keys[key] = sorted({*keys.get(key, ()), *each}, key=str)
    else:
        keys[key] = None


def reason_of(row: Found) -> str:
    """Why a row is refused, in a few words."""
    asked = re.search(r"asks for (.*?); balanced attention", row.reason)
    if asked:
        return f"asks for {asked[1]}"
    if row.status == "untried":
        return "not tried: it cannot be built from its defaults" if "depend" not in row.reason else row.reason
    if unsaid := re.search(r"does not say (.*?)(?: \(|;)", row.reason):
        return f"its configuration does not say {unsaid[1]} under a known name"
    if "the plan gives this rank" in row.reason:
        return "has heads, or widths of heads, other than its configuration's num_attention_heads and head_dim say"
    first = row.reason.split(". ")[0].partition("; use a model")[0]
    return textwrap.shorten(first, 160, placeholder=" ...")


def text_of(known: Mapping[str, Any]) -> str:
    """A line for each type."""
    lines = [f' "transformers": {json.dumps(known["transformers"])}']
    lines.append(' "neutral": [\n' + ",\n".join(f"  {json.dumps(each)}" for each in known["neutral"]) + "\n ]")
    lines += [f' "{part}": {json.dumps(known[part])}' for part in ("speaks", "values", "untried")]
    for part in ("types", "refused"):
        of_part = [f"  {json.dumps(name)}: {json.dumps(each)}" for name, each in known[part].items()]
        lines.append(f' "{part}": {{\n' + ",\n".join(of_part) + "\n }")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def judged(rows: Sequence[Found], chosen: Sequence[Case], known: Mapping[str, Any]) -> list[Found]:
    """Rows as a user gets them: what the guard refuses is refused."""
    from unittest.mock import patch

    from megatron_balance.model_config import unproved

    found: list[Found] = []
    with patch("megatron_balance.model_config.proved", lambda: known):
        for row, case in zip(rows, chosen, strict=True):
            why = {} if row.status == "untried" else unproved(tiny(case), hybrid=True)
            said = "; ".join(f"{name}: {each}" for name, each in why.items())
            found.append(replace(row, status="refused", reason=said) if why else row)
    return found


def plain_decoders(rows: Sequence[Found], chosen: Sequence[Case], known: Mapping[str, Any]) -> tuple[list[str], int]:
    """The refused ones of the decoders that attend causally or in windows, and do nothing else; and
    how many these are, at their defaults.
    """
    plain = [
        row
        for row, case in zip(rows, chosen, strict=True)
        if case.head == "causal" and not case.keys and row.status != "untried"
        if not OTHER_MECHANISMS.search(row.reason) and case.type not in NOT_PLAIN
        if known["types"].get(case.type, {}).get("mask") is None and not tiny(case).is_encoder_decoder
    ]
    return [row.name for row in plain if row.status != "equal"], len(plain)


def share_of(refused: Sequence[str], number: int) -> str:
    """Say how many of so many plain decoders are refused."""
    return f"{len(refused)} of {number} plain decoders are refused ({100 * len(refused) / max(1, number):.1f} %)"


def page_of(rows: Sequence[Found], plain: tuple[list[str], int], version: str) -> str:
    counted = {status: sum(each.status == status for each in rows) for status in STATUSES[::-1]}
    lines = [
        "# Which models of Transformers work",
        "",
        "For somebody who wants to know whether a model trains balanced, or why it is refused.",
        "",
        "```",
        "python -m tools.zoo --write docs/measurements/transformers-models.md",
        "```",
        "",
        f"runs every architecture of Transformers {version} that has a head for language and can be built",
        "tiny from its defaults (4 layers, 4 heads, windows of 8 tokens) on 2 ranks, in fp32, under",
        "`te_ring`, on documents of 1 to 44 tokens. Logits of all tokens are compared with the same weights",
        'under `attn_implementation="eager"`, each document alone in one process; the difference is the',
        f"largest one over the largest logit, and equal means at most {MOST:g} (eager logits of gated delta",
        "rules are 1.2e-5 from those of fp64 themselves). Beside the defaults stand",
        "variants of keys that change attention, and switches turned over.",
        "",
        ", ".join(f"{number} {status}" for status, number in counted.items()) + "; the largest difference of",
        f"those that are equal is {max([0.0, *(row.difference or 0.0 for row in rows if row.status == 'equal')]):.1e}.",
        "",
        f"{share_of(*plain)}: {', '.join(f'`{name}`' for name in plain[0])}.",
        "Plain is a model for causal language, of one stack, that attends causally or in windows, and has",
        "no other mechanism (cap, bias, chunk, indexer, mixer of tokens).",
        "",
        "The same run writes `configs/transformers.json`, the list of types, keys and values that",
        "`model_config.check` goes by ([torch.md](../torch.md#which-models)).",
        "",
    ]
    for status in STATUSES[::-1]:
        by_reason: dict[str, list[str]] = {}
        for row in rows:
            if row.status == status:
                by_reason.setdefault(why_of(row), []).append(f"`{row.name}`")
        if by_reason:
            lines += [f"## {status[0].upper() + status[1:]}", "", "| why | configurations |", "|---|---|"]
            lines += [*(f"| {why} | {', '.join(names)} |" for why, names in by_reason.items()), ""]
    return "\n".join(lines)


def why_of(row: Found) -> str:
    """Say why a configuration has its status, in words that many share: without names of layers."""
    if row.status == "equal":
        return "logits are equal"
    if row.status == "untried":
        return reason_of(row)
    first = reason_of(row).removeprefix(f"{row.name.split()[0]}: ").partition("; ")[0][:200]
    apart = f"; off by {row.difference:.1g}" if row.difference is not None and row.difference > MOST else ""
    return (re.sub(r"(beside attention): .*", r"\1", first) + apart).replace("|", "/").replace("\n", " ")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the chosen cases; 0 if none is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="take configurations whose names hold one of them")
    parser.add_argument("--json", action="store_true", help="rows as one JSON list")
    parser.add_argument("--limit", type=float, default=60.0, metavar="S", help="seconds a configuration may take")
    parser.add_argument("--results", type=Path, help="a line of JSON for each row; rows that have one are not run")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="write the page and the guard's list, of all cases")
    options = parser.parse_args(argv)
    if options.write and options.words:
        parser.error("--write takes all configurations")
    import transformers

    from megatron_balance import model_config

    transformers.logging.set_verbosity_error()
    chosen = cases(options.words)
    found = {each.name: each for each in _read(options.results)}
    _run_left(chosen, found, options)
    equal = [each for each in chosen if not each.keys and each.head == "causal" and found[each.name].status == "equal"]
    more = [turned for each in equal for turned in switches(each) if turned not in chosen]
    _run_left(more, found, options)
    chosen += more
    rows = [found[each.name] for each in chosen]
    known = model_config.proved()
    if options.write:
        known = known_of(rows, known, transformers.__version__)
        LIST.write_text(text_of(known), encoding="utf-8")
        known = json.loads(LIST.read_text(encoding="utf-8"))
    rows = judged(rows, chosen, known)
    plain = plain_decoders(rows, chosen, known)
    if options.write:
        options.write.write_text(page_of(rows, plain, transformers.__version__), encoding="utf-8")
    if options.json:
        print(json.dumps([asdict(each) for each in rows], indent=1))
    else:
        for row in rows:
            apart = "" if row.difference is None else f"{row.difference:.1e}"
            print(f"{row.status:8} {apart:8} {row.name}  {row.reason}")
    counted = {status: sum(each.status == status for each in rows) for status in STATUSES}
    print(", ".join(f"{number} {status}" for status, number in counted.items()), file=sys.stderr)
    print(share_of(*plain), file=sys.stderr)
    return 1 if counted["WRONG"] else 0


def _run_left(chosen: Sequence[Case], found: dict[str, Found], options: argparse.Namespace) -> None:
    from tqdm import tqdm

    left = [each for each in chosen if each.name not in found]
    for row in tqdm(run(left, options.limit), total=len(left), unit="model"):
        found[row.name] = row
        if options.results:
            with options.results.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(row)) + "\n")


def _read(results: Path | None) -> list[Found]:
    if results is None or not results.exists():
        return []
    return [Found(**json.loads(line)) for line in results.read_text(encoding="utf-8").splitlines()]


if __name__ == "__main__":
    sys.exit(main())
