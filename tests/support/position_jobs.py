"""Transformers' models whose positions are no mere look-up: balanced, and each document alone."""

import copy
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from megatron_balance import Model
from megatron_balance.errors import BalanceError
from megatron_balance.model_config import unproved
from megatron_balance.torch import SequenceBalancer, Settings, hf
from tests.support.pool import World, said
from tests.support.torch_jobs import compiling

VOCABULARY, WIDTH, HEADS, KV_HEADS, HEAD_DIM = 64, 32, 4, 2, 8
# Tokens of a document up to which its table is the original one.
ORIGINAL = 16
# RoBERTa's padding token.
PADDING = 1

_SIZES = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_attention_heads": HEADS, "num_hidden_layers": 2}
_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
_DECODER: dict[str, Any] = {**_SIZES, **_TOKENS, "intermediate_size": 2 * WIDTH, "num_key_value_heads": KV_HEADS}
_LONG = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": ORIGINAL}
_LONG |= {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.5, 2.5, 3.5, 4.5]}
_SCALES = {"short_mscale": 1.1, "long_mscale": 1.4}
_NTK = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
_TYPES = {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}, "full_attention": _NTK}
_BY_TYPE: dict[str, Any] = {"sliding_window": 64, "layer_types": [*_TYPES], "rope_parameters": _TYPES}
_ENCODER: dict[str, Any] = {**_SIZES, "intermediate_size": 2 * WIDTH, "max_position_embeddings": 64}
_ENCODER |= {"pad_token_id": PADDING, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_LLAMA_4: dict[str, Any] = {"head_dim": HEAD_DIM, "intermediate_size_mlp": WIDTH, "no_rope_layers": [0, 1]}
_LLAMA_4 |= {"layer_types": ["full_attention"] * 2, "floor_scale": 4, "attn_scale": 0.5, "num_local_experts": 2}
_OPT = {**_SIZES, "word_embed_proj_dim": WIDTH, "ffn_dim": WIDTH, "max_position_embeddings": 64, "dropout": 0.0}
_BART = {"vocab_size": VOCABULARY, "d_model": WIDTH, "decoder_ffn_dim": WIDTH}
_BART |= {"decoder_layers": 2, "decoder_attention_heads": HEADS}


def decoder(most: int, **others: Any) -> dict[str, Any]:
    return {**_DECODER, "max_position_embeddings": most, **others}


CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "phi3, longrope": ("Phi3", decoder(64, original_max_position_embeddings=ORIGINAL, rope_parameters=_LONG)),
    "phimoe, scales by length": ("Phimoe", decoder(64, num_local_experts=2, rope_parameters=_LONG | _SCALES)),
    "llama, dynamic": ("Llama", decoder(ORIGINAL, rope_parameters=_NTK)),
    "olmo3, by type of layers": ("Olmo3", decoder(ORIGINAL, **_BY_TYPE)),
    "llama4, temperature": ("Llama4Text", decoder(64, **_LLAMA_4)),
    "opt": ("OPT", _OPT),
    "roberta": ("Roberta", _ENCODER),
    "esm": ("Esm", {**_ENCODER, "mask_token_id": 2, "position_embedding_type": "absolute"}),
    "esm, token dropout": ("Esm", {**_ENCODER, "mask_token_id": 2, "token_dropout": True}),
    "bart": ("Bart", _BART),
}


@dataclass(frozen=True)
class Case:
    # A model under a planner. `lengths`: of the documents of all ranks.
    model: str
    lengths: tuple[int, ...] = (40, 7, ORIGINAL, ORIGINAL + 1, 25)
    planner: str = "te_ring"
    # In the form that is not reentrant, or "reentrant".
    checkpointed: bool | str = False
    compiled: bool = False
    sharded: bool = False
    # The attention, of a model that was made with another.
    set_later: bool = False
    # The attention, put past Transformers' own ways.
    untreated: bool = False

    @property
    def is_encoder(self) -> bool:
        return self.model.startswith(("roberta", "esm"))


def make(case: Case) -> Any:
    # The model, with eager attention.
    import transformers

    name, given = CONFIGS[case.model]
    config = getattr(transformers, f"{name}Config")(**given)
    torch.manual_seed(0)
    auto = transformers.AutoModelForMaskedLM if case.is_encoder else transformers.AutoModelForCausalLM
    model: Any = auto.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for weights in model.parameters():
            if weights.ndim > 1:
                weights.normal_(0, 0.2)
    return model


def documents(case: Case) -> list[tuple[Tensor, Tensor]]:
    # Tokens, among them the padding token, and labels.
    g = torch.Generator().manual_seed(3)
    tokens = [torch.randint(0, VOCABULARY, (n,), generator=g) for n in case.lengths]
    for each in tokens:
        each[2::5] = PADDING
    return [(each, torch.randint(0, VOCABULARY, (len(each),), generator=g)) for each in tokens]


@cache
def alone(case: Case) -> tuple[list[Tensor], dict[str, Tensor]]:
    # Logits of each document, alone in a model that has seen no other, and gradients of the sum of
    # losses; `case`: a model and lengths.
    logits: list[Tensor] = []
    gradients: dict[str, Tensor] = {}
    fresh = make(case)
    for tokens, labels in documents(case):
        model = copy.deepcopy(fresh)
        found = model(input_ids=tokens[None]).logits[0]
        F.cross_entropy(found, labels, reduction="sum").backward()
        logits.append(found.detach())
        for name, weights in model.named_parameters():
            if weights.grad is not None:
                gradients[name] = gradients.get(name, torch.zeros(())) + weights.grad
    return logits, gradients


def differences(world: World, cases: Sequence[Case]) -> list[tuple[float, float] | str]:
    # Of each case, the largest difference of logits, and of gradients over a parameter's largest
    # one; or the error. The same on all ranks.
    found: list[tuple[float, float] | str] = []
    for case in cases:
        with compiling() if case.compiled else nullcontext():
            try:
                found.append(_compared(world, case))
            except BalanceError as error:
                found.append(f"{type(error).__name__}: {error}")
    return found


def balancer_of(case: Case) -> SequenceBalancer:
    mask = "full" if case.is_encoder else None
    kv_heads = HEADS if case.is_encoder or case.model.startswith(("opt", "bart")) else KV_HEADS
    model = Model(HEADS, kv_heads, HEAD_DIM, num_layers=2, hidden_size=WIDTH, ffn_size=2 * WIDTH)
    return SequenceBalancer(
        case.planner,
        model,
        settings=Settings(ranks_per_node=min(2, dist.get_world_size()), mask=mask, shift_labels=False),
        accept=unproved(make(case).config),  # positions are tried of types, too, that the guard refuses
    )


def balanced(case: Case) -> Any:
    # The model as a user of balanced attention makes it.
    import transformers

    before = make(case)
    if case.untreated:
        before.config._attn_implementation_internal = hf.register()
        return before
    if case.set_later:
        before.set_attn_implementation(hf.register())
        return before
    auto = transformers.AutoModelForMaskedLM if case.is_encoder else transformers.AutoModelForCausalLM
    model: Any = auto.from_config(copy.deepcopy(before.config), attn_implementation=hf.register()).eval()
    model.load_state_dict(before.state_dict())
    if case.checkpointed:
        model.train()
        model.gradient_checkpointing_enable({"use_reentrant": case.checkpointed == "reentrant"})
    if case.compiled:
        model.compile(backend="eager", dynamic=True)
    if case.sharded:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in model.base_model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def _compared(world: World, case: Case) -> tuple[float, float]:
    with balancer_of(case) as balancer:
        batch = balancer(documents(case)[world.rank :: world.size])
        model = balanced(case)
        logits = model(**hf.inputs(batch)).logits[0]
        F.cross_entropy(logits, batch.labels, reduction="sum").backward()
        found = batch.gather(logits.detach())
    right, gradients = alone(Case(case.model, case.lengths))
    largest = max([0.0, *(difference(a, b) for a, b in zip(found, right[world.rank :: world.size], strict=True))])
    worst = torch.tensor([largest, 0.0])
    named = {name: weights.grad for name, weights in model.named_parameters() if weights.grad is not None}
    for name, expected in gradients.items():
        grad = named.get(name, torch.zeros_like(expected))
        if isinstance(grad, DTensor):
            grad = grad.full_tensor() * world.size
        else:
            dist.all_reduce(grad)
        worst[1] = max(worst[1].item(), difference(grad, expected) / max(expected.abs().max().item(), 0.1))
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return worst[0].item(), worst[1].item()


def difference(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())


def stay_as_they_were(world: World, model: str) -> list[float]:
    # Largest differences, after two balanced batches, of what the model computes without a batch: a
    # long document and a short one behind it, against a model that never saw a batch.
    case = Case(model)
    with balancer_of(case) as balancer:
        used = balanced(case)
        for lengths in ((40, 33), (5, 9)):
            given = documents(Case(model, lengths))[world.rank :: world.size]
            used(**hf.inputs(balancer.evaluate(given)))
    used = copy.deepcopy(used)
    used.set_attn_implementation("eager")
    fresh = make(case)
    given = [tokens[None] for tokens, _ in documents(Case(model, (30, 12)))]
    return [difference(used(input_ids=each).logits, fresh(input_ids=each).logits) for each in given]


def on_one_batch(world: World, model: str) -> list[str]:
    # Errors of two models on one batch, the second untreated; "": none.
    case = Case(model)
    with balancer_of(case) as balancer:
        batch = balancer.evaluate(documents(case)[world.rank :: world.size])
        models = [balanced(case), balanced(Case(model, untreated=True))]
        return [said(each, **hf.inputs(batch)) for each in models]
