"""The machine a plan is made for: ranks, nodes, links. Plain data."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from megatron_balance.errors import ConfigError

# Kernels that have rates of their own: FlashAttention-2, 3 and 4, and cuDNN through Transformer
# Engine, by their names in `runtime.kernels`.
AttentionKernel: TypeAlias = Literal["flash_attn", "flash_attn_3", "flash_attn_4", "te_fused"]

# Kernels of the runtime that are another one's code: torch's own is FlashAttention-2.
_SAME_KERNEL = {"torch_varlen": "flash_attn"}

# Programs have 20 bits for the number of a rank.
MOST_RANKS = 1 << 20
# Keys that are above 0, shares among them at most 1; and seconds, from 0 on.
_RATES = (
    "intra_bytes_per_s",
    "nic_bytes_per_s",
    "all_to_all_efficiency",
    "flops_per_s",
    "attention_efficiency",
    "memory_bytes",
    "linear_efficiency",
    "memory_bytes_per_s",
)
_SECONDS = ("intra_alpha_s", "inter_alpha_s", "host_call_s", "host_launch_s", "host_message_s")


@dataclass(frozen=True, slots=True)
class Cluster:
    """Ranks numbered node by node, and what their links and kernels sustain.

    `intra_bytes_per_s` is one rank's link inside the node, one direction; `nic_bytes_per_s` one
    NIC, one direction, of which collective all-to-alls between nodes reach `all_to_all_efficiency`;
    `ranks_per_nic` ranks share a NIC. The alphas are the fixed seconds of a message. `flops_per_s`
    is the peak of a rank in dense bf16 matrix products, `attention_rates` the share of it that each
    forward attention kernel reaches over long sequences without a mask, heads of 128,
    `attention_kernel` the one that runs; without one, `attention_efficiency` is the share.
    `linear_efficiency` is the share that a large matrix product reaches. `memory_bytes_per_s` is
    the rank's memory, read or written. `num_sms`: processors of a rank that communication takes
    some of; 0: it takes none. `transfers_wait`: a transfer waits for processors that an attention
    kernel under way holds (`cost.base.Contention`). `host_call_s`, `host_launch_s`,
    `host_message_s`: what a rank's host takes to issue a group call of communication, a kernel, and
    each message of a group call (`cost.base.Host`); 0: it is not modelled.
    """

    num_ranks: int
    ranks_per_node: int
    name: str = "custom"
    intra_bytes_per_s: float = 400e9
    nic_bytes_per_s: float = 50e9
    all_to_all_efficiency: float = 1.0
    ranks_per_nic: int = 1
    flops_per_s: float = 989e12
    attention_efficiency: float = 0.5
    attention_rates: Mapping[AttentionKernel, float] = field(default_factory=dict[AttentionKernel, float])
    attention_kernel: AttentionKernel | None = None
    memory_bytes: float = 141e9
    linear_efficiency: float = 0.8
    memory_bytes_per_s: float = 4.8e12
    num_sms: int = 132
    transfers_wait: bool = False
    intra_alpha_s: float = 3.4e-6
    inter_alpha_s: float = 9.6e-6
    host_call_s: float = 0.0
    host_launch_s: float = 0.0
    host_message_s: float = 0.0

    def __post_init__(self) -> None:
        if self.num_ranks < 1 or self.ranks_per_node < 1:
            raise ConfigError(
                f"a cluster needs at least one rank and one rank per node, got {self.num_ranks} ranks, "
                f"{self.ranks_per_node} per node"
            )
        if self.num_ranks > MOST_RANKS:
            raise ConfigError(f"a cluster of {self.num_ranks} ranks: expected at most {MOST_RANKS}")
        if self.num_ranks % self.ranks_per_node and self.num_ranks > self.ranks_per_node:
            raise ConfigError(
                f"{self.num_ranks} ranks are not divisible by {self.ranks_per_node} ranks per node; "
                f"use a multiple of {self.ranks_per_node} ranks or another --ranks-per-node"
            )
        for kernel, rate in self.attention_rates.items():
            if not 0 < rate <= 1:
                raise ConfigError(
                    f"cluster {self.name}: attention_rates.{kernel}: expected a share of the peak, above 0 and at most "
                    f"1, got {rate}"
                )
        if self.attention_kernel is not None and self.attention_kernel not in self.attention_rates:
            raise ConfigError(
                f"cluster {self.name}: attention_kernel: {self.attention_kernel} has no rate; add one to "
                f"attention_rates, or take one of {', '.join(self.attention_rates) or 'those that have one'}"
            )
        for key in _RATES:
            if not getattr(self, key) > 0:
                raise ConfigError(f"cluster {self.name}: {key}: expected more than 0, got {getattr(self, key)}")
            if key.endswith("_efficiency") and getattr(self, key) > 1:
                raise ConfigError(f"cluster {self.name}: {key}: expected at most 1, got {getattr(self, key)}")
        if self.ranks_per_nic < 1 or self.num_sms < 0:
            raise ConfigError(
                f"cluster {self.name}: expected ranks_per_nic of at least 1 and num_sms of at least 0, got "
                f"{self.ranks_per_nic} and {self.num_sms}"
            )
        for key in _SECONDS:
            if not 0 <= getattr(self, key) < float("inf"):
                raise ConfigError(
                    f"cluster {self.name}: {key}: expected seconds of at least 0, got {getattr(self, key)}"
                )

    @property
    def attention_share(self) -> float:
        """Share of the peak that the attention kernel reaches."""
        kernel = self.attention_kernel
        return self.attention_efficiency if kernel is None else self.attention_rates[kernel]

    def with_kernel(self, name: str) -> "Cluster":
        """This machine with the runtime's kernel `name`; unchanged where that has no rate here."""
        priced = _SAME_KERNEL.get(name, name)
        known = next((kernel for kernel in self.attention_rates if kernel == priced), None)
        return self if known is None else replace(self, attention_kernel=known)

    @property
    def node_size(self) -> int:
        """Ranks on a node (a cluster smaller than a node is one node)."""
        return min(self.ranks_per_node, self.num_ranks)

    @property
    def num_nodes(self) -> int:
        return self.num_ranks // self.node_size

    def node(self, rank: int) -> int:
        return rank // self.node_size

    def ranks_of(self, node: int) -> range:
        return range(node * self.node_size, (node + 1) * self.node_size)
