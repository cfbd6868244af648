"""The cost of a token outside attention: FLOPs of matrix products and bytes of the element-wise
parts between them.

A transformer layer as Megatron-core builds it for LLaMA: norm, one projection to q, k and v (with
multi-latent attention: down to latents, norms, and up), rotary embedding, attention, output
projection, residual, norm, MLP (gated: SwiGLU), residual. `elements` count what is read and written
between the products, each part a fused kernel of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from megatron_balance.ir.model import Model

BACKWARD_PRODUCTS = 2.0
"""A product's backward is two of the same size: the gradient of the input and that of the weights.
"""

LOGIT_BYTES = 4
"""Logits and their gradient are kept in fp32 (Megatron-core's fused cross entropy)."""


@dataclass(frozen=True, slots=True)
class Module:
    """One module of a layer, for one token on all ranks of its tensor-parallel group.

    `flops`: of its forward products; `weights`: elements of them, `elsewhere` those of other ranks,
    which share out experts; `elements`, `backward_elements`: read and written besides.
    """

    name: str
    flops: float
    weights: float
    elements: float
    backward_elements: float
    elsewhere: float = 0.0

    @property
    def read(self) -> float:
        """Elements of the weights that a rank has."""
        return self.weights - self.elsewhere


def layer_modules(model: Model) -> tuple[Module, ...]:
    """The modules of one layer, without attention, in order."""
    hidden, width, kv_width = model.hidden_size, model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    out_width = model.num_heads * model.value_width
    visits = max(1, model.experts_per_token)
    products = 3 if model.gated_ffn else 2
    inner = products - 1  # values that enter the activation: gate and up, or one
    out, ffn = out_width * hidden, products * hidden * model.ffn_size
    visited = model.visited_ffn_size
    made_of_latents = model.latent_flops if model.latent_travels else 0.0  # with weights of this rank
    rope = 2 * (width + kv_width)  # q and k, read and written
    latents = model.query_rank + model.latent_rank  # each with a norm
    modules = (
        # A norm reads and writes; its backward reads input and gradient and writes the input's. A
        # residual reads two and writes one.
        Module("norms", 0.0, 2 * hidden, 2 * (2 + 3) * hidden, 2 * (3 + 3) * hidden),
        Module(
            "qkv",
            model.projected_flops,
            (model.projected_flops + made_of_latents) / 2,
            rope + 2 * latents,
            rope + 3 * latents,
        ),
        Module("out", 2.0 * out, out, 0, 0),
        Module(
            "mlp",
            2.0 * products * hidden * visited,
            ffn * max(1, model.num_experts) + products * hidden * model.shared_ffn_size,
            (inner + 1) * visited,
            (2 * inner + 1) * visited,
            ffn * model.num_experts * (1 - 1 / model.expert_split),
        ),
    )
    if not model.num_experts:
        return modules
    router = hidden * model.num_experts
    # Tokens are copied to their experts and their results added up again.
    moved = 4.0 * hidden * visits
    return (*modules, Module("router", 2.0 * router, router, moved, moved))


def head_module(model: Model) -> Module:
    """Embedding, logits and loss of one token, those of multi-token prediction and its joining
    matrix included.
    """
    hidden, times = model.hidden_size, 1 + model.mtp_layers
    table, joined = hidden * model.vocab_size, model.mtp_layers * 2 * hidden * hidden
    logits = model.vocab_size * LOGIT_BYTES / model.bytes_per_element
    # Logits are written, read for the loss, and overwritten by their gradient; the embedding reads
    # and writes a row.
    return Module(
        "head",
        2.0 * (times * table + joined),
        num_tables(model) * table + joined,
        times * (3 * logits + 2 * hidden),
        times * (logits + 2 * hidden),
    )


def num_tables(model: Model) -> int:
    """The embedding, and the output matrix unless it is the same."""
    return 1 if model.tied_embeddings else 2


def num_parameters(model: Model) -> float:
    layers = model.num_layers * sum(module.weights for module in layer_modules(model))
    return layers - model.dense_layers * _spared(model) + head_module(model).weights


def expert_parameters(model: Model) -> float:
    """Parameters of all experts; 0: there are none."""
    if not model.num_experts:
        return 0.0
    return _expert(model) * float(model.num_experts) * (model.num_layers - model.dense_layers)


def _spared(model: Model) -> float:
    """Weights of experts that a token does not visit, and of the router."""
    unvisited = model.num_experts - max(1, model.experts_per_token)
    return _expert(model) * unvisited + model.hidden_size * model.num_experts


def _expert(model: Model) -> int:
    return (3 if model.gated_ffn else 2) * model.hidden_size * model.ffn_size


def model_flops(model: Model, lengths: Iterable[int]) -> float:
    """FLOPs of a forward and a backward pass over sequences of these lengths, nothing computed
    twice: the model's products, and attention over the pairs that the mask shows.

    MFU is this over what GPUs could compute in the time (Chowdhery et al., 2022, Appendix B).
    """
    lengths = list(lengths)
    tokens = sum(lengths)
    pairs = sum(share * sum(int(mask.num_pairs(length)) for length in lengths) for mask, share in model.mask_shares)
    products = model.num_layers * layer_flops(model) + head_module(model).flops
    attention = model.num_layers * model.attention_flops_per_pair
    return (1 + BACKWARD_PRODUCTS) * (tokens * products + pairs * attention)


def layer_flops(model: Model) -> float:
    return sum(module.flops for module in layer_modules(model))
