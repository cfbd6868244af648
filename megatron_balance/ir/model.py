"""The model a plan is made for: only what changes attention, tokens and bytes."""

from dataclasses import dataclass, fields, replace
from typing import Any, Literal, TypeAlias, cast, get_args

from megatron_balance.errors import ConfigError
from megatron_balance.ir.batch import at_least
from megatron_balance.ir.forest import Forest
from megatron_balance.ir.mask import KNOWN, Mask, mask_named

# The type that gradients of queries, keys and values travel in between ranks: fp32 (fp64 for fp64),
# or bf16, as in Transformer Engine's ring, where each rank adds its own and rounds.
GradientWire: TypeAlias = Literal["fp32", "bf16"]

RecurrentName: TypeAlias = Literal["gated_delta", "kda", "mamba2", "convolution"]


@dataclass(frozen=True, slots=True)
class RecurrentLayers:
    """Layers of a hybrid model that hand a state on along a document (`ir.recurrent`).

    `kind`: gated delta rule, Kimi Delta Attention, Mamba-2, or a short convolution alone. `layers`:
    number of them, `attention_layers`: of those that attend, which may be the same, `mlp_layers`: of
    those that have an MLP or experts; each of the model's `num_layers`. Each of `heads` has a state of
    `key_dim` x `value_dim` (Mamba-2: numbers of B, width of a head; a convolution: one head of its
    channels, `key_dim` 0). `key_heads`: of keys (Mamba-2: groups of B). `conv_width`: tokens that the
    short convolution reads; `chunk`: tokens that a kernel takes at once.
    """

    kind: RecurrentName
    layers: int
    attention_layers: int
    mlp_layers: int
    heads: int
    value_dim: int
    key_heads: int = 0
    key_dim: int = 0
    conv_width: int = 4
    chunk: int = 64

    def __post_init__(self) -> None:
        if self.kind not in get_args(RecurrentName):
            raise ConfigError(f"recurrent: kind {self.kind!r}: expected one of {', '.join(get_args(RecurrentName))}")
        least = {"mlp_layers": 0} | dict.fromkeys(("key_heads", "key_dim"), int(self.kind != "convolution"))
        for field in fields(self)[1:]:
            number = at_least(least.get(field.name, 1), f"recurrent: {field.name}", getattr(self, field.name))
            object.__setattr__(self, field.name, number)
        if self.kind == "convolution" and (self.heads, self.key_heads, self.key_dim) != (1, 0, 0):
            raise ConfigError("recurrent: a convolution has heads 1 of its channels, key_heads 0 and key_dim 0")

    @property
    def state_heads(self) -> int:
        """Heads that have a state; 0: a convolution alone."""
        return self.heads if self.key_dim else 0

    @property
    def channels(self) -> int:
        """Channels of the short convolution: queries, keys and values (Mamba-2: x, B and C)."""
        return self.heads * self.value_dim + 2 * self.key_heads * self.key_dim

    def share(self, tensor: int) -> "RecurrentLayers":
        """The part of one of `tensor` tensor-parallel ranks: of the heads, or of the channels."""
        if not self.key_dim:
            return replace(self, value_dim=max(1, self.value_dim // tensor))
        return replace(self, heads=max(1, self.heads // tensor), key_heads=max(1, self.key_heads // tensor))

    @property
    def map_size(self) -> int:
        """Numbers of M of a head, of S' = M S + U."""
        return 1 if self.kind == "mamba2" else self.key_dim**2

    @property
    def gates(self) -> int:
        """Values of a token that go round the convolution: what gates the output, decays and betas."""
        match self.kind:
            case "convolution":
                return 2 * self.value_dim
            case "kda":  # through `low_rank`
                return self.heads
            case _:
                return self.heads * (self.value_dim + (2 if self.kind == "gated_delta" else 1))

    def weights(self, hidden_size: int) -> int:
        """Parameters of a layer's projections and convolution."""
        inner = self.heads * self.value_dim
        low_rank = self.value_dim * (2 * hidden_size + self.heads * self.key_dim + inner) if self.kind == "kda" else 0
        return hidden_size * (self.channels + self.gates + inner) + low_rank + self.conv_width * self.channels

    @property
    def scan_flops(self) -> float:
        """Forward FLOPs of a token in the recurrence, chunk by chunk: of the gated delta rule k k', w
        and u of a chunk, q k' times values, and three products with the state; of Mamba-2 C B' once
        a group, times x, and two products with the state.
        """
        keys, values, chunk = self.key_dim, self.value_dim, self.chunk
        if self.kind == "mamba2":
            return self.heads * (2.0 * chunk * values + 4.0 * keys * values) + self.key_heads * 2.0 * chunk * keys
        return self.state_heads * (2.0 * chunk * (3 * keys + 2 * values) + 6.0 * keys * values)


@dataclass(frozen=True, slots=True)
class Model:
    """A transformer. `num_kv_heads` divides `num_heads`; `bytes_per_element`: of activations."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_layers: int = 32
    hidden_size: int = 4096
    ffn_size: int = 11008
    gated_ffn: bool = True
    name: str = "custom"
    bytes_per_element: int = 2
    num_experts: int = 0
    experts_per_token: int = 0
    vocab_size: int = 32000
    gradient_wire: GradientWire = "fp32"
    tokens_per_rank: int | None = None
    """Tokens a rank is given per microbatch in the published evaluation, if one is known."""
    attention: str = "causal"
    """Name of the mask of every sequence (`ir.mask.mask_named`): "causal", or "full" as in diffusion
    transformers, whose text and image tokens of one sample are one sequence, or "window_4096" where
    a query sees the 4,096 keys up to its own."""
    value_dim: int | None = None
    """Width of a head's values and outputs, where it is not that of queries and keys, `head_dim`
    (multi-latent attention)."""
    latent_rank: int = 0
    """Rank of the latent that keys and values are made of (multi-latent attention); 0: they are
    projected from the hidden state."""
    latent_rope: int = 0
    """Then also: the width of the rotary key that all heads share."""
    query_rank: int = 0
    """Rank of the latent that queries are made of; 0: they are projected from the hidden state."""
    latent_travels: bool = False
    """Whether the latent travels in place of keys and values. Then all heads share it (`num_kv_heads`
    1), and ranks make keys and values of what they received."""
    latent_split: int = 1
    """Tensor-parallel ranks over which the rows that are projected down to latents are split."""
    other_attention: str = ""
    """Name of the mask of some of the layers, if not all have the same: plans are made for
    `attention`, priced by it, and run under this one there (`compile.halo`)."""
    other_layers: int = 0
    """Number of these layers."""
    shared_ffn_size: int = 0
    """Width of the MLP that every token visits beside its experts (shared experts); 0: none."""
    dense_layers: int = 0
    """Layers of a model with experts that have an MLP in their place. It counts as the experts and
    the shared MLP that a token visits elsewhere, which computes as much in DeepSeek-V3."""
    expert_split: float = 1
    """Ranks that share out the experts of a layer (expert parallelism); a fraction where
    tensor-parallel ranks, of whose part `ffn_size` may be, split experts less than other weights."""
    mtp_layers: int = 0
    """Layers of `num_layers` that predict further tokens (multi-token prediction): each makes its
    input of two hidden states, and logits of its own."""
    tied_embeddings: bool = False
    """Whether the output matrix is the embedding: one stage then holds one of them."""

    recurrent: RecurrentLayers | None = None
    """Recurrent layers; None: every layer attends and has an MLP or experts."""
    forest: Forest | None = None
    """The mask in place of `attention`, of a microbatch of trees that is priced; no configuration has
    one."""

    def __post_init__(self) -> None:
        given: object = self.recurrent
        if isinstance(given, dict):  # of JSON
            object.__setattr__(self, "recurrent", RecurrentLayers(**cast("dict[str, Any]", given)))
        for what in ("num_heads", "num_kv_heads", "head_dim", "num_layers", "hidden_size", "ffn_size"):
            object.__setattr__(self, what, at_least(1, f"model {self.name}: {what}", getattr(self, what)))
        self._check_layers()
        if self.value_dim is not None:
            object.__setattr__(self, "value_dim", at_least(1, f"model {self.name}: value_dim", self.value_dim))
        for name in filter(None, (self.attention, self.other_attention)):
            try:
                mask_named(name)
            except ConfigError:
                raise ConfigError(
                    f"model {self.name}: attention {name!r} is not a known mask; known: {KNOWN}"
                ) from None
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"model {self.name}: num_kv_heads {self.num_kv_heads} does not divide num_heads {self.num_heads}"
            )

    def _check_layers(self) -> None:
        for what in ("other_layers", "dense_layers", "mtp_layers", "shared_ffn_size"):
            object.__setattr__(self, what, at_least(0, f"model {self.name}: {what}", getattr(self, what)))
        for what in ("other_layers", "dense_layers", "mtp_layers"):
            if getattr(self, what) > self.num_layers:
                raise ConfigError(f"model {self.name}: {what} {getattr(self, what)} of {self.num_layers} layers")
        if self.other_layers and not self.other_attention:
            raise ConfigError(f"model {self.name}: other_layers {self.other_layers} goes with other_attention")
        if self.recurrent is not None:
            if self.other_layers > (most := self.recurrent.attention_layers):
                raise ConfigError(f"model {self.name}: other_layers {self.other_layers} of {most} that attend")
            for what in ("layers", "attention_layers", "mlp_layers"):
                if (count := getattr(self.recurrent, what)) > self.num_layers:
                    raise ConfigError(f"model {self.name}: recurrent: {what} {count} of {self.num_layers} layers")
        if self.num_experts and not 1 <= self.experts_per_token <= self.num_experts:
            raise ConfigError(
                f"model {self.name}: experts_per_token {self.experts_per_token} of {self.num_experts} experts"
            )
        for what in ("shared_ffn_size", "dense_layers"):
            if getattr(self, what) and not self.num_experts:
                raise ConfigError(f"model {self.name}: {what} {getattr(self, what)} goes with num_experts")

    def share(self, tensor: int) -> "Model":
        """The model as one of `tensor` tensor-parallel ranks has it: its part of heads and MLP."""
        return replace(
            self,
            num_heads=self.num_heads // tensor,
            num_kv_heads=max(1, self.num_kv_heads // tensor),
            ffn_size=max(1, self.ffn_size // tensor),
            shared_ffn_size=self.shared_ffn_size // tensor,
            recurrent=self.recurrent and self.recurrent.share(tensor),
            latent_split=self.latent_split * tensor,
        )

    @property
    def layer_shares(self) -> tuple[float, float, float]:
        """Shares of the layers that attend, that are recurrent, and that have an MLP or experts."""
        if (own := self.recurrent) is None:
            return 1.0, 0.0, 1.0
        attention, recurrent, mlp = own.attention_layers, own.layers, own.mlp_layers
        return attention / self.num_layers, recurrent / self.num_layers, mlp / self.num_layers

    @property
    def attending(self) -> float:
        """Share of the layers that attend. Planners weigh attention by it: a layer of theirs is one
        that attends, with its part of all others.
        """
        return self.layer_shares[0]

    @property
    def mask(self) -> Mask:
        """The mask of every sequence."""
        return self.forest or mask_named(self.attention)

    @property
    def masks(self) -> tuple[Mask, ...]:
        """Masks of its layers, the one that plans are made for first."""
        return (self.mask, mask_named(self.other_attention)) if self.other_attention else (self.mask,)

    @property
    def mask_shares(self) -> tuple[tuple[Mask, float], ...]:
        """Masks that layers have, each with its share of the layers; `attending` in all."""
        other = self.other_layers / self.num_layers
        found = ((self.mask, self.attending - other), (self.masks[-1], other))
        return tuple((mask, share) for mask, share in found if share)

    @property
    def visited_ffn_size(self) -> int:
        """Width of all MLPs that a token visits in a layer: its experts and the shared one."""
        return self.ffn_size * max(1, self.experts_per_token) + self.shared_ffn_size

    @property
    def value_width(self) -> int:
        """Width of a head's values and outputs."""
        return self.head_dim if self.value_dim is None else self.value_dim

    @property
    def kernel_dim(self) -> int:
        """Width of a head in the attention kernel, which pads the narrower of keys and values."""
        return max(self.head_dim, self.value_width)

    @property
    def latent_dim(self) -> int | None:
        """Width of what travels in place of keys and values; None: they do."""
        return self.latent_rank + self.latent_rope if self.latent_travels else None

    @property
    def latent_flops(self) -> float:
        """FLOPs of making a token's keys and values, all heads, of its latent; 0: there is none."""
        return 2.0 * self.latent_rank * self.num_heads * (self.head_dim - self.latent_rope + self.value_width)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of the keys and values of one token, one layer, as they travel."""
        if self.latent_dim is not None:
            return self.latent_dim * self.bytes_per_element
        return self.num_kv_heads * (self.head_dim + self.value_width) * self.bytes_per_element

    @property
    def projected_flops(self) -> float:
        """Forward FLOPs of making one token's queries, keys and values."""
        # Where the latent travels, launches make keys and values of it (`latent_flops`).
        both = self.head_dim + self.value_width
        if not self.latent_rank:
            return 2.0 * self.hidden_size * (self.num_heads * self.head_dim + self.num_kv_heads * both)
        down = self.hidden_size * (self.query_rank + self.latent_rank + self.latent_rope) / self.latent_split
        queries = (self.query_rank or self.hidden_size) * self.num_heads * self.head_dim
        return 2.0 * (down + queries) + (0.0 if self.latent_travels else self.latent_flops)

    @property
    def linear_flops_per_token(self) -> float:
        """Forward FLOPs of one token in one layer's projections and MLP (2 per multiply-add); in a
        hybrid model also in its part of the layers that do not attend.
        """
        out = self.hidden_size * self.num_heads * self.value_width
        mlp = (3 if self.gated_ffn else 2) * self.hidden_size * self.visited_ffn_size
        if (own := self.recurrent) is None:
            return self.projected_flops + 2.0 * (out + mlp)
        recurrent = own.layers * (2.0 * own.weights(self.hidden_size) + own.scan_flops)
        return self.projected_flops + 2.0 * out + (recurrent + own.mlp_layers * 2.0 * mlp) / own.attention_layers

    @property
    def attention_flops_per_pair(self) -> float:
        """Forward FLOPs of a (query, key) pair in a layer, all heads: scores and weighted values."""
        return 2.0 * self.num_heads * (self.head_dim + self.value_width)
