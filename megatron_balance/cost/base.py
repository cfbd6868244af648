"""Protocols of cost models: the questions of a planner, and those of the simulator.

A planner asks for one layer's forward pass in round terms, or for kernel launches (`CostModel`).
The simulator also asks for each transfer and module, forward and backward (`MachineCost`).
`analytic.AnalyticCost` and `measured.MeasuredCost` implement both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, inf
from typing import Protocol

from megatron_balance.ir.arrays import Floats, Ints
from megatron_balance.ir.cluster import Cluster

# Seconds of adding to what is held over those of packing: two values are read and one is written,
# where packing reads one and writes one.
ADD = 1.5

# An attention kernel, and what merges its outputs or adds up its gradients.
LAUNCHES_OF_RUN = 2


@dataclass(frozen=True, slots=True)
class Link:
    """One direction of a rank's link in its node, or of one NIC."""

    alpha_s: float
    bytes_per_s: float

    def time_s(self, num_bytes: float, num_messages: float = 1, share: float = 1.0) -> float:
        """Seconds for bytes in messages one after another, at a `share` of the rate."""
        return num_messages * self.alpha_s + num_bytes / (share * self.bytes_per_s)


@dataclass(frozen=True, slots=True)
class Host:
    """Seconds that a rank's host takes to issue what its device runs.

    `call_s`: a group call, a batch of sends and receives or a collective; `message_s`: each message
    of it; `launch_s`: a kernel, or an operator of the framework that launches one. All 0: the host is
    not modelled.
    """

    call_s: float = 0.0
    launch_s: float = 0.0
    message_s: float = 0.0

    @property
    def is_modelled(self) -> bool:
        return bool(self.call_s or self.launch_s or self.message_s)

    def issue_s(self, num_calls: float, num_launches: float, num_messages: float = 0) -> float:
        """Seconds to issue group calls of `num_messages` in all, and launches."""
        return num_calls * self.call_s + num_launches * self.launch_s + num_messages * self.message_s


NO_HOST = Host()


class CostModel(Protocol):
    """Predicted seconds of one layer's forward pass, and of attention launches.

    A planner gets one as an argument and reads no clock.
    """

    __slots__ = ()

    def attention_s(self, num_pairs: float, run_tokens: float = inf) -> float:
        """Seconds for (query, key) pairs, all heads, in runs of `run_tokens`."""
        ...

    def attend_s(self, pairs: Ints, launch: Ints, num_launches: int, *, backward: bool = False) -> Floats:
        """Seconds of each attention launch [num_launches], its fixed cost included; 0 for one
        without pairs.

        `pairs` [n, 9]: rows of `ir.program.Attend` in any order; `launch` [n]: the launch of each
        row.
        """
        ...

    def launch_s(self, num_launches: float) -> float:
        """Seconds of fixed cost of `num_launches` attention launches and their merges."""
        ...

    def linear_s(self, num_tokens: float) -> float:
        """Seconds of tokens in modules outside attention: projections, MLP, norms; linear. Layers
        without attention count with those that attend (`Model.attending`).
        """
        ...

    def experts_s(self, num_tokens: float) -> float:
        """Seconds of a layer's exchange of tokens between experts in one direction, which `layer_s`
        has in it; 0: it has none. All ranks wait for the one with the most tokens.
        """
        ...

    def intra_node_s(self, num_bytes: float, num_messages: float = 1) -> float:
        """Seconds to receive bytes from a rank of the same node."""
        ...

    def inter_node_s(self, num_bytes: float, num_messages: float = 1, num_nics: float = 1) -> float:
        """Seconds to receive bytes from another node over `num_nics` NICs (half: a shared one)."""
        ...

    def routed_s(self, num_bytes: float, num_messages: float = 1, num_nics: float = 1) -> float:
        """Seconds to receive bytes of messages that are cut over `num_nics` NICs of both nodes."""
        ...

    def kv_bytes(self, num_tokens: float) -> float:
        """Bytes of the keys and values of tokens."""
        ...

    def query_bytes(self, num_tokens: float) -> float:
        """Bytes of the queries of tokens, or of their outputs, which are as many."""
        ...


class MachineCost(CostModel, Protocol):
    """Predicted seconds of everything a rank does in a step, one layer at a time."""

    __slots__ = ()

    def intra_node_s(self, num_bytes: float, num_messages: float = 1) -> float:
        return self.link(inter_node=False).time_s(num_bytes, num_messages)

    def inter_node_s(self, num_bytes: float, num_messages: float = 1, num_nics: float = 1) -> float:
        return self.link(inter_node=True).time_s(num_bytes, num_messages, num_nics)

    def routed_s(self, num_bytes: float, num_messages: float = 1, num_nics: float = 1) -> float:
        # Eq. 1 of Zeppelin: dispatch to the send proxies, transfer between the nodes, combine from the
        # receive proxies, one after the other; source and target are proxies and keep their pieces.
        passed_on = num_bytes * (num_nics - 1) / num_nics
        return 2 * self.intra_node_s(passed_on, num_messages) + self.inter_node_s(num_bytes, num_messages, num_nics)

    def merge_s(self, num_tokens: float) -> float:
        """Seconds to merge the partial outputs of tokens, all heads, into those that are held."""
        ...

    def pack_s(self, num_bytes: float) -> float:
        """Seconds to gather bytes into a message, or to scatter them from one."""
        ...

    def layer_s(self, num_tokens: float, *, backward: bool = False) -> float:
        """Seconds of one layer's modules outside attention, tensor-parallel communication included."""
        ...

    def scan_s(self, flops: float, elements: float) -> float:
        """Seconds of kernels of recurrent layers: FLOPs, and elements read and written."""
        ...

    def head_s(self, num_tokens: float, *, backward: bool = False) -> float:
        """Seconds of embedding, logits and loss, which the first and last pipeline stages have."""
        ...

    def optimizer_s(self, num_parameters: float) -> float:
        """Seconds of the optimizer's update of the parameters that this rank keeps the state of."""
        ...

    def link(self, *, inter_node: bool) -> Link:
        """A rank's link inside the node, or one NIC; each direction on its own."""
        ...

    @property
    def call_s(self) -> float:
        """Seconds of fixed cost of a communication call, beside the alphas of its messages."""
        ...

    @property
    def host(self) -> Host:
        """The host's prices; `analysis.machine.Machine.host` says whether they are simulated."""
        ...

    @property
    def contention(self) -> Contention:
        """The SMs that communication kernels take from the others."""
        ...


def remap_s(tokens: Sequence[float] | Ints, cluster: Cluster, cost: CostModel) -> float:
    """Seconds to bring tokens from even to `tokens` a rank before attention, and their outputs back
    after it (Zeppelin, section 3.4).

    An estimate of what the best moves take, without solving for them: the longest time of a rank's
    link, and of a node's NICs for what the node as a whole has above or below its share, one after
    the other; nothing of it hides behind attention.
    """
    size = cluster.node_size
    mean = sum(tokens) / len(tokens)
    most = max(max(tokens) - mean, mean - min(tokens))
    if most < 1:
        return 0.0
    nodes = [sum(tokens[first : first + size]) for first in range(0, len(tokens), size)]
    crossing = max(max(nodes) - mean * size, mean * size - min(nodes))
    num_nics = ceil(size / cluster.ranks_per_nic)
    seconds = cost.intra_node_s(float(most) * token_bytes(cost), 2)
    return seconds + (cost.inter_node_s(float(crossing) * token_bytes(cost), 2, num_nics) if crossing >= 1 else 0.0)


def token_bytes(cost: CostModel) -> float:
    """Bytes of a token that a remap moves in a layer: query, key, value; the output back."""
    return cost.kv_bytes(1) + 2 * cost.query_bytes(1)


# Channels, one SM each, of a transfer to another node: NCCL's default of
# NCCL_NCHANNELS_PER_NET_PEER (2.14, graph/paths.cc).
_NET_CHANNELS = 2

_LINK_CHANNELS = 2

# Channels of a transfer inside a node: two for each NVLink between the ranks, 32 at most (the same
# file; MAXCHANNELS).
_MAX_CHANNELS = 32

# What NCCL counts on of one NVLink in one direction, by generation of GPUs (June 2026, graph/topo.h,
# SM80, SM90 and SM100_NVLINK_BW).
NVLINK_BYTES_PER_S = {"Ampere": 20e9, "Hopper": 20.6e9, "Blackwell": 40.1e9}

# The same by A100's and H100's data sheets: 600 GB/s in 12 links, 900 GB/s in 18, both directions.
_SHEET_NVLINK_BYTES_PER_S = 25e9

# Parts of a processor that is not counted in SMs: the share that transfers take was measured.
PARTS = 1_000_000


@dataclass(frozen=True, slots=True)
class Contention:
    """SMs that transfers take of a rank's `num_sms` (0: none, as copy engines do not).

    A transfer is a kernel too: it holds some SMs while it runs, and before that it waits for them.
    Zeppelin (section 5.4.1) names this as the cause of the bubbles of its timeline. `waits`: until
    an attention kernel that fills the GPU lets go of some.
    """

    num_sms: int
    intra_sms: int
    inter_sms: int
    waits: bool = False

    @staticmethod
    def of_links(num_sms: int, intra_bytes_per_s: float, *, waits: bool = False) -> Contention:
        """SMs of NCCL's point-to-point kernels, by the rate of all NVLinks of a GPU."""
        if not num_sms:
            return Contention(0, 0, 0)
        # A cluster's rate is of whole links, by a data sheet or by NCCL.
        rates = (_SHEET_NVLINK_BYTES_PER_S, *NVLINK_BYTES_PER_S.values())
        links = min((intra_bytes_per_s / rate for rate in rates), key=lambda n: abs(n - round(n)))
        num_links = max(1, round(links))
        return Contention(num_sms, min(_MAX_CHANNELS, _LINK_CHANNELS * num_links), _NET_CHANNELS, waits)

    @staticmethod
    def of_slowdowns(intra: float, inter: float) -> Contention:
        """From measured slowdowns of kernels (from 1) beside transfers, in the node and between."""
        taken = [round(PARTS * (1 - 1 / max(1.0, factor))) for factor in (intra, inter)]
        return Contention(PARTS, taken[0], taken[1])

    def slowdown(self, *, intra: bool, inter: bool) -> float:
        """Factor on the time of a kernel that fills the GPU while such transfers run beside it."""
        taken = (self.intra_sms if intra else 0) + (self.inter_sms if inter else 0)
        return self.num_sms / (self.num_sms - taken) if taken else 1.0

    def block_s(self, kernel_s: float, num_blocks: float) -> float:
        """Seconds of one of `num_blocks` thread blocks on its SM; 0 where they leave SMs free."""
        return kernel_s * self.num_sms / num_blocks if num_blocks > self.num_sms else 0.0

    def wait_s(self, kernel_left_s: float, block_s: float, *, prioritised: bool) -> float:
        """Seconds until a communication kernel gets its SMs from one that fills the GPU.

        Thread blocks of a kernel are issued before those of a later one. With a stream of higher
        priority the transfer waits for a block to end, at most `block_s`; without, until the last
        blocks of the other kernel run, `block_s` before its end.
        """
        if not self.num_sms:
            return 0.0
        return min(block_s, kernel_left_s) if prioritised else max(0.0, kernel_left_s - block_s)
