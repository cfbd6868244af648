"""Protocols of cost models: the questions of a planner, and those of the simulator.

A planner asks for one layer's forward pass in round terms, or for kernel launches (`CostModel`).
The simulator also asks for each transfer and module, forward and backward (`MachineCost`).
`analytic.AnalyticCost` and `measured.MeasuredCost` implement both.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from megatron_balance.cost.contention import Contention

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

ADD = 1.5
"""Seconds of adding to what is held over those of packing: two values are read and one is written,
where packing reads one and writes one.
"""

LAUNCHES_OF_RUN = 2
"""An attention kernel, and what merges its outputs or adds up its gradients."""


@dataclass(frozen=True, slots=True)
class Link:
    """One direction of a rank's link in its node, or of one NIC: a message takes alpha and its
    bytes at the rate.
    """

    alpha_s: float
    bytes_per_s: float

    def time_s(self, num_bytes: float, num_messages: float = 1, share: float = 1.0) -> float:
        """Seconds for bytes in `num_messages` messages, one after another, at a `share` of the
        rate.
        """
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

    def attention_s(self, num_pairs: float, run_tokens: float = inf) -> float:
        """Seconds one rank takes for (query, key) pairs, all heads, when queries and keys come in
        runs of `run_tokens`.
        """
        ...

    def attend_s(self, pairs: Ints, launch: Ints, num_launches: int, *, backward: bool = False) -> Floats:
        """Seconds of each attention launch [num_launches], its fixed cost included; 0 for a launch
        without pairs.

        `pairs` [n, 9]: rows of `ir.program.Attend` (any order); `launch` [n]: the launch that each
        row belongs to.
        """
        ...

    def launch_s(self, num_launches: float) -> float:
        """Seconds of fixed cost of `num_launches` attention launches and their merges."""
        ...

    def linear_s(self, num_tokens: float) -> float:
        """Seconds one rank takes for tokens in the modules outside attention: projections, MLP,
        norms. Proportional.
        """
        ...

    def experts_s(self, num_tokens: float) -> float:
        """Seconds of a layer's exchange of tokens between experts in one direction, which `linear_s`
        has in it; 0: it has none. All ranks wait for the one with the most tokens.
        """
        ...

    def intra_node_s(self, num_bytes: float, num_messages: float = 1) -> float:
        """Seconds to receive bytes from a rank of the same node: alpha a message + bytes /
        bandwidth.
        """
        ...

    def inter_node_s(self, num_bytes: float, num_messages: float = 1, num_nics: float = 1) -> float:
        """Seconds to receive bytes from another node over `num_nics` NICs at once (a half: one NIC
        shared by two).
        """
        ...

    def routed_s(self, num_bytes: float, num_messages: float = 1, num_nics: float = 1) -> float:
        """Seconds to receive bytes from another node when each message is cut over `num_nics` NICs
        of both nodes (Zeppelin, Eq. 1).
        """
        ...

    def kv_bytes(self, num_tokens: float) -> float:
        """Bytes of the keys and values of tokens."""
        ...

    def query_bytes(self, num_tokens: float) -> float:
        """Bytes of the queries of tokens, or of their outputs, which are as many."""
        ...


class MachineCost(CostModel, Protocol):
    """Predicted seconds of everything a rank does in a step, one layer at a time."""

    def merge_s(self, num_tokens: float) -> float:
        """Seconds to merge the partial outputs of tokens, all heads, into those that are held."""
        ...

    def pack_s(self, num_bytes: float) -> float:
        """Seconds to gather bytes into a message, or to scatter them from one."""
        ...

    def layer_s(self, num_tokens: float, *, backward: bool = False) -> float:
        """Seconds of one layer's modules outside attention, tensor-parallel communication included."""
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
        """The host's prices; `simulator.machine.Machine.host` says whether they are simulated."""
        ...

    @property
    def contention(self) -> Contention:
        """The SMs that communication kernels take from the others."""
        ...


def routed_s(cost: CostModel, num_bytes: float, num_messages: float, num_nics: float) -> float:
    """Seconds to receive bytes from another node when each message is cut over `num_nics` NICs of
    both nodes.

    Zeppelin, Eq. 1: dispatch to the send proxies, transfer between the nodes, combine from the
    receive proxies, one after the other; source and target are a proxy each and keep their own
    piece.
    """
    passed_on = num_bytes * (num_nics - 1) / num_nics
    return 2 * cost.intra_node_s(passed_on, num_messages) + cost.inter_node_s(num_bytes, num_messages, num_nics)
