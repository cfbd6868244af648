"""Counts of what a rank's attention calls really did, made where it is done."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_balance.ir.program import Kind
from megatron_balance.runtime.lower.steps import FinishStep, GradLaunch, IssueStep, Launch, Step, Work

_ZONES = ("inter_node", "intra_node", "local")
_TOKENS = {Kind.Q: "q_tokens_received", Kind.KV: "kv_tokens_received", Kind.OUT: "partial_tokens_received"}


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


def counts(steps: Sequence[Step], *, forward: bool, remap_out: int | None = None) -> tuple[tuple[str, int], ...]:
    """(name, count) pairs that one run of these steps adds to `Counters`.

    `remap_out`: the exchange that takes a remap's outputs back to their owners.
    """
    count: Counter[str] = Counter()
    count["forward_calls" if forward else "backward_calls"] = 1
    for step in steps:
        match step:
            case Launch() | GradLaunch():
                count["kernel_calls"] += step.calls
                count[f"kernel_calls_{step.zone if step.zone in _ZONES else 'other'}"] += step.calls
            case IssueStep(exchange):
                count[f"exchanges_{exchange.collective}"] += bool(exchange.sends or exchange.receives or exchange.group)
                count["routed_transfers"] += len(exchange.routed_sends)
                if forward and exchange.id != remap_out:
                    for message in exchange.receives:
                        count[_TOKENS[message.kind]] += message.packed.num_rows
                elif forward:  # one output for each token remapped to this rank
                    remapped = sum(message.packed.num_rows for message in exchange.sends)
                    count["remap_tokens_received"] += remapped
                    count["q_tokens_received"] -= remapped
                    count["kv_tokens_received"] -= remapped
            case FinishStep():
                pass
    return tuple(count.items())
