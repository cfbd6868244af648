"""Bytes of a rank: parameters, gradients, optimizer, activations, and the keys and values received
from others.

Mixed precision as in Megatron-core: bf16 weights, fp32 gradients, fp32 master weights and two
moments of Adam; the distributed optimizer shares out the last three (its document gives 6 + 12 / d
bytes a parameter on d ranks, 18 without).
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from megatron_balance.cost.analytic import PARTIAL_BYTES
from megatron_balance.cost.modules import expert_parameters, head_module, num_parameters, num_tables
from megatron_balance.cost.parallel import GRADIENT_BYTES, WEIGHT_BYTES
from megatron_balance.ir.model import Model
from megatron_balance.ir.program import Policy

OPTIMIZER_BYTES = 12

# fp32 logits and their gradient, of a token and a vocabulary entry.
LOGIT_BYTES = 8

Recompute = Literal["none", "full"]


def layer_activation_bytes(model: Model, recompute: Recompute = "none") -> float:
    """Bytes that one token keeps in one layer for backward.

    In elements: the inputs of both norms and of both blocks (4 hidden), query and attention output
    (H (D + V)), key and value (G (D + V)), latents before and behind their norms, and the MLP's inner
    values (3 ffn when gated, else 2; once per expert a token visits). Each expert's input is a copy of
    the token. A recurrent layer keeps the convolution's inputs and outputs, gates and outputs; of a
    hybrid model the mean layer is counted. `full` recomputation keeps the layer's input.
    """
    if recompute == "full":
        return float(model.bytes_per_element * model.hidden_size)
    attended = (model.num_heads + model.num_kv_heads) * (model.head_dim + model.value_width)
    attended += 2 * (model.query_rank + model.latent_rank)
    inner = (3 if model.gated_ffn else 2) * model.visited_ffn_size
    copies = model.experts_per_token * model.hidden_size if model.num_experts else 0
    if (own := model.recurrent) is not None:
        attention, recurrent, mlp = model.layer_shares
        of_recurrent = 2 * own.channels + own.gates + own.heads * own.value_dim
        blocks = 2 * model.hidden_size * (attention + recurrent + mlp)
        kept = blocks + attention * attended + recurrent * of_recurrent + mlp * (inner + copies)
        return float(model.bytes_per_element * kept)
    return float(model.bytes_per_element * (4 * model.hidden_size + attended + inner + copies))


@dataclass(frozen=True, slots=True)
class Sharding:
    """Degrees by which the model's state and layers are spread, as one rank sees them.

    `optimizer`: ranks that share out the optimizer's state (1: none); `tensor` and `pipeline` as
    usual; `stage`: this rank's pipeline stage; `experts`: ranks that share out the experts of a
    layer, so that `experts` times fewer hold the same ones and share out their optimizer's state; a
    fraction where tensor-parallel ranks, which a model's own sizes are of, split experts less.
    """

    tensor: int = 1
    pipeline: int = 1
    stage: int = 0
    optimizer: int = 1
    experts: float = 1

    @property
    def optimizer_of_experts(self) -> float:
        """Ranks that share out the optimizer's state of the same experts."""
        return max(1.0, self.optimizer / self.experts)


@dataclass(frozen=True, slots=True)
class _Memory:
    """Peak bytes of one rank, by what holds them."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    received: float

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.activations + self.received


@dataclass(frozen=True, slots=True)
class Holding:
    """Held for the backward: keys and values received, by `policy`; activations, by `recompute`."""

    policy: Policy = "keep"
    recompute: Recompute = "none"
    num_microbatches: int = 1


def rank_memory(
    model: Model,
    num_tokens: float,
    received_tokens: float,
    sharding: Sharding = Sharding(),
    holding: Holding = Holding(),
) -> _Memory:
    """Peak bytes of a rank that holds `num_tokens` of each microbatch and receives keys and values
    of `received_tokens`.

    Policy `keep` holds the received keys and values of every layer until its backward; with full
    recomputation, of one layer. Policy `replay` holds those of one round of one layer twice (one in
    use, one arriving), so `received_tokens` is then the most that one round brings. The fp32
    partial outputs are of one layer at a time.
    """
    others, experts = parameters_of_rank(model, sharding)
    parameters = others + experts
    # Microbatches whose activations a stage holds at once under 1F1B (Narayanan et al., 2021, 2.2.1).
    in_flight = min(sharding.pipeline - sharding.stage, holding.num_microbatches)
    layers = model.num_layers / sharding.pipeline * in_flight
    one_layer = PARTIAL_BYTES * model.num_heads * (model.value_width + 1)
    if holding.recompute == "full":
        one_layer += layer_activation_bytes(model)
    if sharding.stage == sharding.pipeline - 1:
        # Logits are there when no layer is at work; those of multi-token prediction at once.
        one_layer = max(one_layer, logit_bytes(model))
    per_token = layers * layer_activation_bytes(model, holding.recompute) + one_layer
    keeping = layers * model.attending
    held = 2.0 if holding.policy == "replay" else 1.0 if holding.recompute == "full" else keeping
    return _Memory(
        weights=WEIGHT_BYTES * parameters,
        gradients=GRADIENT_BYTES * parameters,
        optimizer=OPTIMIZER_BYTES * (others / sharding.optimizer + experts / sharding.optimizer_of_experts),
        activations=per_token * num_tokens / sharding.tensor,
        received=held * received_tokens * model.kv_bytes_per_token / sharding.tensor,
    )


def logit_bytes(model: Model) -> float:
    """Bytes of a token's logits and their gradient, on a rank of the last stage."""
    return LOGIT_BYTES * model.vocab_size * (1.0 + model.mtp_layers)


class Parameters(NamedTuple):
    """Parameters of a rank: those that all ranks of its stage have, and those of its experts."""

    others: float
    experts: float


def parameters_of_rank(model: Model, sharding: Sharding) -> Parameters:
    """Number of the parameters that a rank holds."""
    head, experts = head_module(model).weights, expert_parameters(model)
    layers = num_parameters(model) - head - experts
    table = float(model.hidden_size * model.vocab_size)
    first, last = sharding.stage == 0, sharding.stage == sharding.pipeline - 1
    # Embedding on the first stage, output matrix on the last; on one stage both, unless they are one.
    ends = table * (num_tables(model) if first and last else first + last)
    if last:
        ends += head - num_tables(model) * table
    spread = sharding.pipeline * sharding.tensor
    return Parameters(layers / spread + ends / sharding.tensor, experts / spread / sharding.experts)
