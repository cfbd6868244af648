"""Costs from data sheets and microbenchmarks: tiles of the attention kernel, FLOPs over rates,
alpha-beta links.

Constants stand here with their source, in `kernel`, `base` and in configs/cluster; docs/costs.md
has the whole list. None is fitted to a result that the simulator is compared with.
"""

from dataclasses import dataclass, field
from math import ceil, inf

import numpy as np

from megatron_balance.cost import kernel
from megatron_balance.cost.base import Contention, Host, Link, MachineCost
from megatron_balance.cost.kernel import TILE_TOKENS, KernelLaw, KeyBlocks
from megatron_balance.cost.modules import BACKWARD_PRODUCTS, Module, head_module, layer_modules
from megatron_balance.cost.parallel import CollectiveGroup, all_gather_s, experts_s
from megatron_balance.ir.arrays import Floats, Ints
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.columns import Pair
from megatron_balance.ir.model import Model

# A kernel launch with what surrounds it: index arithmetic and the launch of the merge of its
# partial result.
#
# CUDA's own launch of an empty kernel takes 2 to 5 us in microbenchmarks; two of them.
LAUNCH_S = 10e-6

# A communication call: NCCL's tuning model, base latency of ring, Simple (2.14, graph/tuning.cc).
CALL_S = 8.4e-6

# Adam's update of a parameter: fp32 gradient, weight and two moments read, the last three written,
# and the bf16 weight.
OPTIMIZER_BYTES = 30

# Partial outputs and their LSE are accumulated in fp32.
PARTIAL_BYTES = 4


@dataclass(frozen=True, slots=True)
class AnalyticCost(MachineCost):
    """Costs of `model` on `cluster`.

    With tensor parallelism a rank of `cluster` is a whole group (`cost.parallel.wide_ranks`) of
    `tensor_parallel` GPUs, which split heads and channels evenly; their own communication is part
    of `layer_s`. `buckets`: whether backwards are launched by key length, as ours are.
    """

    cluster: Cluster
    model: Model
    tensor_parallel: int = 1
    pads: bool = True
    exchanges: bool = False
    buckets: bool = True
    _pair_s: float = field(init=False, repr=False, compare=False)
    """Seconds of a pair, all heads: planners ask for thousands of sequences."""
    _token_s: float = field(init=False, repr=False, compare=False)
    """Seconds of a token in the modules outside attention."""
    _modules: tuple[Module, ...] = field(init=False, repr=False, compare=False)
    """Those of a layer outside attention."""

    def __post_init__(self) -> None:
        cluster, model = self.cluster, self.model
        flops = 4.0 * model.num_heads * kernel.padded_head_dim(model.kernel_dim)
        object.__setattr__(self, "_pair_s", flops / (cluster.flops_per_s * cluster.attention_share))
        object.__setattr__(self, "_modules", layer_modules(model))
        modules_s = sum(self._module_s(module, 1.0, 0.0, backward=False) for module in self._modules)
        parallel_s = self.tensor_parallel_s(1.0) - self.tensor_parallel_s(0.0)
        experts_s = self.experts_s(2.0) - self.experts_s(1.0)
        object.__setattr__(self, "_token_s", modules_s + parallel_s + experts_s)

    def attention_s(self, num_pairs: float, run_tokens: float = inf) -> float:
        """Seconds for (query, key) pairs, all heads, in runs of `run_tokens`.

        A run's last tile is padded, and each run of keys costs its queries a thread block. The
        halves of tiles that the mask wastes are left out: 64 pairs for each query wherever it is,
        so no placement changes them; `attend_s` counts them.
        """
        factor = 1.0
        if run_tokens != inf:
            padded = ceil(run_tokens / TILE_TOKENS) * TILE_TOKENS
            # run + 1: a causal square of l tokens has l (l + 1) / 2 pairs; without it the padded
            # work would fall as l grows.
            square = run_tokens * (run_tokens + (self.model.attention != "full"))
            factor = padded**2 / square * (1 + self._law.block_tiles * TILE_TOKENS / padded)
        return factor * num_pairs * self._pair_s

    def launch_s(self, num_launches: float) -> float:
        return num_launches * LAUNCH_S

    def linear_s(self, num_tokens: float) -> float:
        return num_tokens * self._token_s / self.model.attending

    def kv_bytes(self, num_tokens: float) -> float:
        return num_tokens * self.model.kv_bytes_per_token

    def query_bytes(self, num_tokens: float) -> float:
        """The mean, where widths differ."""
        width = (self.model.head_dim + self.model.value_width) / 2
        return num_tokens * self.model.num_heads * width * self.model.bytes_per_element

    def attend_s(self, pairs: Ints, launch: Ints, num_launches: int, *, backward: bool = False) -> Floats:
        """The work over all SMs, or the longest thread block on one of them, the longer of both."""
        if not len(pairs):
            return np.zeros(num_launches)
        mask, law = self.model.mask, self._law
        around_s: Floats | float = 0.0
        if backward and law.key_blocks is not None:
            work, widest, empty = kernel.backward_work(
                pairs, launch, num_launches, mask, law.key_blocks, buckets=self.buckets
            )
            empty_s, around_s = law.key_blocks.empty_s, self._around_s(pairs, launch, num_launches, law.key_blocks)
        else:
            work, widest, empty = kernel.forward_work(pairs, launch, num_launches, mask, law)
            empty_s = law.forward_empty_s
        seconds = np.maximum(work * self._tile_s, widest * self.block_s(1.0) if self.cluster.num_sms else 0.0)
        seconds = seconds * (law.backward_factor if backward else 1.0) + around_s
        seconds += empty * empty_s / max(1, self.cluster.num_sms)
        if self.pads:
            widths, num_bytes = (self.model.head_dim, self.model.value_width), self.model.bytes_per_element
            elements = kernel.padding_elements(pairs, launch, num_launches, widths, backward=backward, mask=mask)
            seconds += elements * num_bytes / self.cluster.memory_bytes_per_s
        if self.model.latent_travels:
            seconds += self._latent_s(kernel.distinct_rows(pairs[:, Pair.KEY], launch, num_launches), backward=backward)
        return np.where(work > 0, LAUNCH_S + seconds, 0.0)

    def _around_s(self, pairs: Ints, launch: Ints, num_launches: int, law: KeyBlocks) -> Floats:
        # Seconds of what the backward reads and writes before and after its kernel.
        num_bytes = law.query_bytes * kernel.distinct_rows(pairs[:, Pair.QUERY], launch, num_launches)
        if self.model.num_heads != self.model.num_kv_heads:
            keys = kernel.distinct_rows(pairs[:, list(Pair.KEY)], launch, num_launches)
            of_keys, of_heads, of_entries = law.key_bytes
            num_bytes = num_bytes + (of_keys + of_heads * self.model.num_heads / self.model.num_kv_heads) * keys
            kv_heads = pairs[:, Pair.KV_HEAD_STOP] - pairs[:, Pair.KV_HEAD_START]
            num_bytes += of_entries * TILE_TOKENS * np.bincount(launch, kv_heads, num_launches)
        return num_bytes * self.model.head_dim / self.cluster.memory_bytes_per_s

    def _latent_s(self, num_keys: Floats, *, backward: bool) -> Floats:
        # Seconds of making keys and values of a launch's latents; backward also of their gradients'
        # products.
        flops_per_s = self.cluster.flops_per_s * self.cluster.linear_efficiency
        return (1.0 + BACKWARD_PRODUCTS * backward) * num_keys * self.model.latent_flops / flops_per_s

    @property
    def _law(self) -> KernelLaw:
        return kernel.law_of(self.cluster.attention_kernel)

    @property
    def _tile_s(self) -> float:
        # Scores and weighted values of one tile.
        flops = 4.0 * TILE_TOKENS**2 * kernel.padded_head_dim(self.model.kernel_dim)
        return flops / (self.cluster.flops_per_s * self.cluster.attention_share)

    def block_s(self, num_tiles: float) -> float:
        """Seconds that a thread block spends on `num_tiles` tiles of keys, forward, on its SM."""
        return num_tiles * self._tile_s * max(1, self.cluster.num_sms)

    def merge_s(self, num_tokens: float) -> float:
        """Two partials are read and one is written, each with its LSE."""
        elements = 3.0 * num_tokens * self.model.num_heads * (self.model.value_width + 1)
        return elements * PARTIAL_BYTES / self.cluster.memory_bytes_per_s

    def pack_s(self, num_bytes: float) -> float:
        """Read and written."""
        return 2.0 * num_bytes / self.cluster.memory_bytes_per_s

    def layer_s(self, num_tokens: float, *, backward: bool = False) -> float:
        """Matrix products take their FLOPs, or reading their weights when tokens are few."""
        modules_s = sum(self._module_s(module, num_tokens, module.read, backward=backward) for module in self._modules)
        return modules_s + self.tensor_parallel_s(num_tokens) + self.experts_s(num_tokens)

    def head_s(self, num_tokens: float, *, backward: bool = False) -> float:
        return self._module_s(head_module(self.model), num_tokens, 0.0, backward=backward)

    def scan_s(self, flops: float, elements: float) -> float:
        cluster, num_bytes = self.cluster, elements * self.model.bytes_per_element
        return flops / (cluster.flops_per_s * cluster.linear_efficiency) + num_bytes / cluster.memory_bytes_per_s

    def _module_s(self, module: Module, num_tokens: float, weights: float, *, backward: bool) -> float:
        cluster, model = self.cluster, self.model
        products = BACKWARD_PRODUCTS if backward else 1.0
        product_s = products * num_tokens * module.flops / (cluster.flops_per_s * cluster.linear_efficiency)
        weights_s = products * weights * model.bytes_per_element / cluster.memory_bytes_per_s
        elements = module.backward_elements if backward else module.elements
        return max(product_s, weights_s) + num_tokens * elements * model.bytes_per_element / cluster.memory_bytes_per_s

    def tensor_parallel_s(self, num_tokens: float) -> float:
        """Seconds of a layer's tensor-parallel communication in one direction: with sequence
        parallelism, two all-gathers and two reduce-scatters of the hidden states (Megatron-LM,
        arXiv 2205.05198, section 4.2.2), half of them for an MLP.
        """
        ranks = self.tensor_parallel
        if ranks == 1:
            return 0.0
        num_bytes = num_tokens * self.model.hidden_size * self.model.bytes_per_element / ranks
        link = Link(self.cluster.intra_alpha_s, self.cluster.intra_bytes_per_s / ranks)
        each_s = CALL_S + all_gather_s(num_bytes, CollectiveGroup(ranks, ranks, link, link))
        return 2 * sum(self.model.layer_shares) * each_s

    def experts_s(self, num_tokens: float) -> float:
        if not self.exchanges:
            return 0.0
        return experts_s(self.model, num_tokens, self.cluster, max(1, round(self.model.expert_split)))

    def optimizer_s(self, num_parameters: float) -> float:
        """Adam is memory-bound."""
        return num_parameters * OPTIMIZER_BYTES / self.cluster.memory_bytes_per_s

    def link(self, *, inter_node: bool) -> Link:
        if inter_node:
            return Link(self.cluster.inter_alpha_s, self.cluster.nic_bytes_per_s)
        return Link(self.cluster.intra_alpha_s, self.cluster.intra_bytes_per_s)

    @property
    def call_s(self) -> float:
        return CALL_S

    @property
    def host(self) -> Host:
        cluster = self.cluster
        return Host(cluster.host_call_s, cluster.host_launch_s, cluster.host_message_s)

    @property
    def contention(self) -> Contention:
        cluster, gpus = self.cluster, self.tensor_parallel
        link_bytes_per_s = cluster.intra_bytes_per_s / gpus
        return Contention.of_links(cluster.num_sms // gpus, link_bytes_per_s, waits=cluster.transfers_wait)
