"""A machine of round numbers: every launch takes as long, handling nothing at all."""

from dataclasses import dataclass
from math import inf

import numpy as np

from megatron_balance.analysis.machine import Machine
from megatron_balance.cost.base import NO_HOST, Contention, Floats, Host, Ints, Link, MachineCost
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.model import Model

INTRA, INTER, NONE = Link(0.001, 1e6), Link(0.002, 1e5), Contention(0, 0, 0)


@dataclass(frozen=True)
class FlatCost(MachineCost):
    # `launch`: seconds of a launch, forward; twice that backward. `pair`: of each causal pair.
    model: Model
    launch: float = 1.0
    pair: float = 0.0
    intra: Link = INTRA
    inter: Link = INTER
    call_s: float = 0.0005
    contention: Contention = NONE
    host: Host = NO_HOST
    # Seconds of a token outside attention, forward; twice that backward.
    layer: float = 0.0

    def attend_s(self, pairs: Ints, launch: Ints, num_launches: int, *, backward: bool = False) -> Floats:
        num_q, num_k = pairs[:, 2] - pairs[:, 1], pairs[:, 6] - pairs[:, 5]
        heads = (pairs[:, 4] - pairs[:, 3]) / self.model.num_heads
        seen = np.bincount(launch, minlength=num_launches) > 0
        work = np.bincount(launch, weights=heads * num_q * num_k * self.pair, minlength=num_launches)
        return (1 + backward) * (seen * self.launch + work)

    def merge_s(self, num_tokens: float) -> float:
        del num_tokens
        return 0.0

    def pack_s(self, num_bytes: float) -> float:
        del num_bytes
        return 0.0

    def layer_s(self, num_tokens: float, *, backward: bool = False) -> float:
        return (1 + backward) * self.layer * num_tokens

    def scan_s(self, flops: float, elements: float) -> float:
        del flops, elements
        return 0.0

    def head_s(self, num_tokens: float, *, backward: bool = False) -> float:
        del num_tokens, backward
        return 0.0

    def optimizer_s(self, num_parameters: float) -> float:
        del num_parameters
        return 0.0

    def link(self, *, inter_node: bool) -> Link:
        return self.inter if inter_node else self.intra

    # What only planners ask for

    def attention_s(self, num_pairs: float, run_tokens: float = inf) -> float:
        del run_tokens
        return self.pair * num_pairs

    def launch_s(self, num_launches: float) -> float:
        return self.launch * num_launches

    def linear_s(self, num_tokens: float) -> float:
        return self.layer * num_tokens

    def experts_s(self, num_tokens: float) -> float:
        del num_tokens
        return 0.0

    def kv_bytes(self, num_tokens: float) -> float:
        return num_tokens * self.model.kv_bytes_per_token

    def query_bytes(self, num_tokens: float) -> float:
        return num_tokens * self.model.num_heads * self.model.head_dim * self.model.bytes_per_element


# A key-value token has 128 bytes.
MODEL = Model(num_heads=2, num_kv_heads=2, head_dim=16, num_layers=4, hidden_size=32, ffn_size=64)


def flat_machine(num_ranks: int, ranks_per_node: int, ranks_per_nic: int = 1, **cost: object) -> Machine:
    # A machine of `FlatCost(**cost)`.
    cluster = Cluster(num_ranks, ranks_per_node, ranks_per_nic=ranks_per_nic)
    return Machine(cluster, MODEL, FlatCost(MODEL, **cost))  # pyright: ignore[reportArgumentType]  the fields' types are the caller's to keep
