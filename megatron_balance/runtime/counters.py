"""Counts of what a rank's attention calls really did, made where it is done."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_balance.runtime.lower.steps import Work


@dataclass(slots=True)
class Counters:
    """Sums over the calls of one bound plan on this rank, forward and backward together unless said
    otherwise.
    """

    forward_calls: int = 0
    backward_calls: int = 0
    kernel_calls: int = 0
    # By zone name; "other": any other name.
    kernel_calls_inter_node: int = 0
    kernel_calls_intra_node: int = 0
    kernel_calls_local: int = 0
    kernel_calls_other: int = 0
    # By collective.
    exchanges_p2p: int = 0
    exchanges_all_to_all: int = 0
    exchanges_all_gather: int = 0
    exchanges_reduce_scatter: int = 0
    # Of the forward only, without those of the remap, which are counted apart.
    q_tokens_received: int = 0
    kv_tokens_received: int = 0
    partial_tokens_received: int = 0
    # Of all tensors that arrived for this rank.
    bytes_received_forward: int = 0
    bytes_received_backward: int = 0
    # Tokens of the remap, whose query, key and value come and whose output goes back.
    remap_tokens_received: int = 0
    # Peers to which an exchange went in pieces.
    routed_transfers: int = 0
    # Passed on for others as a proxy.
    relayed_bytes_forward: int = 0
    relayed_bytes_backward: int = 0
    # Between this rank and ranks of other nodes, relayed bytes included.
    inter_node_bytes_sent_forward: int = 0
    inter_node_bytes_sent_backward: int = 0
    inter_node_bytes_received_forward: int = 0
    inter_node_bytes_received_backward: int = 0
    # Visible (query, key) pairs times query heads, of all that was attended.
    attended_pairs: int = 0
    # Tasks that a pipeline stage without a microbatch of its own attended to for others.
    idle_tasks: int = 0

    def ran(self, work: Work) -> None:
        """Add one finished run of a phase."""
        for name, count in work:
            setattr(self, name, getattr(self, name) + count)

    def carried(self, traffic: PhaseTraffic, *, forward: bool) -> None:
        """Add what one run of a phase moved."""
        phase = "forward" if forward else "backward"
        for name in ("bytes_received", "relayed_bytes", "inter_node_bytes_sent", "inter_node_bytes_received"):
            count = getattr(traffic, name)
            if count:
                setattr(self, f"{name}_{phase}", getattr(self, f"{name}_{phase}") + count)


@dataclass(slots=True)
class PhaseTraffic:
    """Bytes of one run of a phase, as in `Counters`."""

    bytes_received: int = 0
    relayed_bytes: int = 0
    inter_node_bytes_sent: int = 0
    inter_node_bytes_received: int = 0
