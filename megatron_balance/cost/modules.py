"""The cost of a token outside attention: FLOPs of matrix products and bytes of the element-wise
parts between them.

A transformer layer as Megatron-core builds it for LLaMA: norm, one projection to q, k and v (with
multi-latent attention: down to latents, norms, and up), rotary embedding, attention, output
projection, residual, norm, MLP (gated: SwiGLU), residual. `elements` count what is read and written
between the products, each part a fused kernel of its own.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from megatron_balance.errors import ConfigError
from megatron_balance.ir.arrays import Floats
from megatron_balance.ir.batch import Batch
from megatron_balance.ir.model import Model, RecurrentLayers

# A product's backward is two of the same size: the gradient of the input and that of the weights.
BACKWARD_PRODUCTS = 2.0

# Logits and their gradient are kept in fp32 (Megatron-core's fused cross entropy).
LOGIT_BYTES = 4


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

    def times(self, share: float) -> "Module":
        """The module in a share of the layers, as of all."""
        numbers = self.flops, self.weights, self.elements, self.backward_elements, self.elsewhere
        return Module(self.name, *(share * number for number in numbers))

    @property
    def read(self) -> float:
        """Elements of the weights that a rank has."""
        return self.weights - self.elsewhere


def layer_modules(model: Model) -> tuple[Module, ...]:
    """The modules of one layer, without attention, in order; of a hybrid model, the mean layer's."""
    modules = _layer_modules(model)
    if (own := model.recurrent) is None:
        return modules
    attention, recurrent, mlp = model.layer_shares
    shares = {"norms": (attention + recurrent + mlp) / 2, "qkv": attention, "out": attention}
    mean = tuple(module.times(shares.get(module.name, mlp)) for module in modules)
    return (*mean, _recurrent_module(own, model.hidden_size).times(recurrent))


def _recurrent_module(own: RecurrentLayers, hidden: int) -> Module:
    # Projections, the convolution (its channels are read and written), the recurrence, the gated norm
    # behind it (two values in, one out).
    weights, inner, scan = own.weights(hidden), own.heads * own.value_dim, scan_module(own)
    return Module(
        "recurrent",
        2.0 * weights + scan.flops,
        weights,
        2 * own.channels + 3 * inner + scan.elements,
        3 * own.channels + 5 * inner + scan.backward_elements,
    )


def scan_module(own: RecurrentLayers) -> Module:
    """The recurrence of a layer alone, as its kernels are cut.

    Gated delta rule: w and u of chunks (k, v in), the states before chunks (k, w, u in, changes of v
    out), outputs (q, k, changes, states in). Mamba-2: states of chunks (x, B in), those before chunks
    (in, out), outputs (x, B, C, states in). The backward touches everything twice.
    """
    keys, values = own.key_dim, own.value_dim
    state = keys * values / own.chunk
    if own.kind == "mamba2":
        touched = own.heads * (3 * values + 4 * state) + 3 * own.key_heads * keys
    else:
        touched = own.state_heads * ((9 if own.kind == "kda" else 6) * keys + 6 * values + 2 * state)
    return Module("scan", own.scan_flops, 0.0, touched, 2 * touched)


def summary_module(own: RecurrentLayers) -> Module:
    """M and U of a piece that has both, a token of it: beside the recurrence, in the forward; V in the
    backward, alike.
    """
    keys, values, chunk = own.key_dim, own.value_dim, own.chunk
    if own.kind == "mamba2":
        flops, touched = own.heads * 2.0 * keys * values, own.heads * values + own.key_heads * keys
    else:
        flops = own.state_heads * (2.0 * chunk * (2 * keys + values) + 4.0 * keys * (keys + values))
        touched = own.state_heads * (4 * keys + 3 * values)
    return Module("summary", flops, 0.0, touched, touched)


def _layer_modules(model: Model) -> tuple[Module, ...]:
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
    """Embedding, logits and loss of a token, multi-token prediction and its joining included."""
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
    # Dense layers do without the experts that a token does not visit, and without the router.
    unvisited = model.num_experts - max(1, model.experts_per_token)
    spared = _expert(model) * unvisited + model.hidden_size * model.num_experts
    return layers - model.dense_layers * spared + head_module(model).weights


def expert_parameters(model: Model) -> float:
    """Parameters of all experts; 0: there are none."""
    if not model.num_experts:
        return 0.0
    of_experts = round(model.layer_shares[2] * model.num_layers) - model.dense_layers
    return _expert(model) * float(model.num_experts) * of_experts


def _expert(model: Model) -> int:
    return (3 if model.gated_ffn else 2) * model.hidden_size * model.ffn_size


def model_flops(model: Model, batches: Iterable[Batch]) -> float:
    """FLOPs of a forward and a backward pass over batches, nothing computed twice: the model's
    products, and attention over the pairs that the mask shows.

    MFU is this over what GPUs could compute in the time (Chowdhery et al., 2022, Appendix B).
    """
    batches = list(batches)
    tokens = sum(batch.num_tokens for batch in batches)
    pairs = sum(share * sum(batch.num_pairs(mask) for batch in batches) for mask, share in model.mask_shares)
    # Launches make keys and values of latents that travel: products of the model all the same.
    of_layer = layer_flops(model) + (model.attending * model.latent_flops if model.latent_travels else 0.0)
    products = model.num_layers * of_layer + head_module(model).flops
    attention = model.num_layers * model.attention_flops_per_pair
    return (1 + BACKWARD_PRODUCTS) * (tokens * products + pairs * attention)


def layer_flops(model: Model) -> float:
    return sum(module.flops for module in layer_modules(model))


# Uneven routing of tokens to experts: how many more visits the busiest rank gets than an even
# share.
#
# Ranks that share a layer's experts wait until all have computed, so the layer takes as long as the
# busiest of them. Uneven are experts that all documents like (`shares`), and documents that like
# other experts than the rest (`spread`): ranks with few documents then have other loads than the mean
# of the batch.

# The module of a layer (`cost.modules`) that experts are.
_EXPERT_MODULE = "mlp"


@dataclass(frozen=True, slots=True)
class ExpertLoad:
    """Routing of tokens to a layer's experts.

    `shares`: of all visits, by expert, summing to 1; empty: the same of each. `spread`: standard
    deviation of an even expert's share between documents, over its mean, as drawn: where a token
    visits several experts, large shares are cut afterwards. `seed`: of the documents' shares.
    """

    shares: tuple[float, ...] = ()
    spread: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if any(not 0 <= share < inf for share in self.shares) or (self.shares and abs(sum(self.shares) - 1) > 1e-9):
            raise ConfigError(f"shares of experts {self.shares}: must be 0 or more and sum to 1")
        if not 0 <= self.spread < inf:
            raise ConfigError(f"spread of experts' shares {self.spread:g}: must be 0 or more")

    @staticmethod
    def counted(counts: Sequence[float], spread: float = 0.0) -> "ExpertLoad":
        """The load of tokens counted by expert. ConfigError: negative counts, or none above 0."""
        total = float(sum(counts))
        if not 0 < total < inf or any(count < 0 for count in counts):
            raise ConfigError(f"tokens counted of experts {list(counts)}: must be 0 or more, and one of them more")
        return ExpertLoad(tuple(count / total for count in counts), spread)

    def of_documents(self, count: int, model: Model) -> Floats:
        """Shares of the visits of each of `count` documents [count, num_experts], drawn from a
        Dirichlet distribution around the mean of all. A token visits `experts_per_token` different
        ones, so no share is more than one over that; what a draw has above goes to the other
        experts. Raises ConfigError: shares of another number of experts, or larger than they can
        be; a spread that no documents have.
        """
        num_experts, most = model.num_experts, 1 / model.experts_per_token
        if self.shares and len(self.shares) != num_experts:
            raise ConfigError(f"shares of {len(self.shares)} experts; the model has {num_experts}")
        mean = np.array(self.shares or (1 / num_experts,) * num_experts)
        if mean.max() > most + 1e-9:
            raise ConfigError(
                f"an expert's share of {mean.max():.3g}: a token visits {model.experts_per_token} experts, so none has "
                f"more than {most:.3g}"
            )
        if not self.spread:
            return np.tile(mean, (count, 1))
        # Dirichlet(c x mean) spreads an even share by sqrt((E - 1) / (c + 1)); at the limit shares
        # are 0 or `most`.
        limit = np.sqrt(num_experts * most - 1)
        if self.spread > limit * (1 - 1e-9):
            raise ConfigError(
                f"spread of experts' shares {self.spread:g}: with {model.experts_per_token} of {num_experts} experts a "
                f"token it is below {limit:.3g}"
            )
        concentration = (num_experts - 1) / self.spread**2 - 1
        random = np.random.default_rng(self.seed)
        drawn = random.gamma(concentration * mean, size=(count, num_experts))
        none = drawn.sum(axis=1) == 0  # near the limit all of a document's draws may be below the least number
        drawn[none] = random.multinomial(1, mean, size=int(none.sum()))
        return _capped(drawn / drawn.sum(axis=1, keepdims=True), most)

    def busiest(self, tokens: Floats, model: Model, ranks: int) -> Floats:
        """Load of the busiest rank of each group, in tokens [groups]: its visits over the experts that
        a token visits. With even routing it is the group's tokens over `ranks`.

        `tokens` [groups, documents]: of each document on a group; `ranks`: of a group, rank r holds
        experts r * E / ranks onwards.
        """
        visits = tokens @ self.of_documents(tokens.shape[1], model)
        return visits.reshape(len(tokens), ranks, -1).sum(axis=2).max(axis=1)


def _capped(shares: Floats, most: float) -> Floats:
    # Rows whose largest shares are `most`, the rest in the proportions they had.
    full = np.zeros(shares.shape, dtype=bool)
    while (over := ~full & (shares > most + 1e-12)).any():
        full |= over
        rest = np.where(full, 0.0, shares)
        left = 1 - most * full.sum(axis=1, keepdims=True)
        total = rest.sum(axis=1, keepdims=True)
        shares = np.where(full, most, rest * np.divide(left, total, out=np.zeros_like(total), where=total > 0))
    return shares


def expert_part(model: Model) -> float:
    """Share of a layer's products outside attention that experts, shared ones too, have."""
    flops = {module.name: module.flops for module in layer_modules(model)}
    return flops[_EXPERT_MODULE] / sum(flops.values())
