"""What a rank's attention calls really did, counted where it is done."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_balance.ir.program import Kind
from megatron_balance.runtime.lower.steps import Finish, GradLaunch, Launch, Start, Step, Work

_ZONES = ("inter_node", "intra_node", "local")
_TOKENS = {Kind.Q: "q_tokens_received", Kind.KV: "kv_tokens_received", Kind.OUT: "partial_tokens_received"}


@dataclass(slots=True)
class Counters:
    """Sums over the calls of one bound plan on this rank, forward and backward together unless said otherwise.

    `kernel_calls_*`: by zone name ("other": any other name); `exchanges_*`: by pattern; tokens received: forward only, and apart
    those that a remap remaps, whose query, key and value come and whose output goes back (`remap_tokens_received`);
    `bytes_received`: of all tensors that arrived for this rank. `routed_transfers`: peers to which an exchange went in pieces.
    `relayed_bytes`: passed on for others as a proxy; `inter_node_bytes`: between this rank and ranks of other nodes, what it compile on
    included. `idle_tasks`: tasks that a pipeline stage without a microbatch of its own attended to for others.
    """

    forward_calls: int = 0
    backward_calls: int = 0
    kernel_calls: int = 0
    kernel_calls_inter_node: int = 0
    kernel_calls_intra_node: int = 0
    kernel_calls_local: int = 0
    kernel_calls_other: int = 0
    exchanges_p2p: int = 0
    exchanges_all_to_all: int = 0
    exchanges_all_gather: int = 0
    exchanges_reduce_scatter: int = 0
    q_tokens_received: int = 0
    kv_tokens_received: int = 0
    partial_tokens_received: int = 0
    bytes_received_forward: int = 0
    bytes_received_backward: int = 0
    remap_tokens_received: int = 0
    routed_transfers: int = 0
    relayed_bytes_forward: int = 0
    relayed_bytes_backward: int = 0
    inter_node_bytes_sent_forward: int = 0
    inter_node_bytes_sent_backward: int = 0
    inter_node_bytes_received_forward: int = 0
    inter_node_bytes_received_backward: int = 0
    idle_tasks: int = 0

    def ran(self, work: Work) -> None:
        """Add one finished run of a phase."""
        for name, count in work.counts:
            setattr(self, name, getattr(self, name) + count)

    def carried(self, traffic: Traffic, *, forward: bool) -> None:
        """Add what one run of a phase moved."""
        phase = "forward" if forward else "backward"
        for name in ("bytes_received", "relayed_bytes", "inter_node_bytes_sent", "inter_node_bytes_received"):
            count = getattr(traffic, name)
            if count:
                setattr(self, f"{name}_{phase}", getattr(self, f"{name}_{phase}") + count)


@dataclass(slots=True)
class Traffic:
    """Bytes of one run of a phase, as in `Counters`."""

    bytes_received: int = 0
    relayed_bytes: int = 0
    inter_node_bytes_sent: int = 0
    inter_node_bytes_received: int = 0


def counts(steps: Sequence[Step], *, forward: bool, remap_out: int | None = None) -> tuple[tuple[str, int], ...]:
    """What one run of these steps adds to `Counters`, as (name, count). `remap_out`: the exchange that takes a remap's outputs back to the owner."""
    found: Counter[str] = Counter()
    found["forward_calls" if forward else "backward_calls"] = 1
    for step in steps:
        match step:
            case Launch() | GradLaunch():
                found["kernel_calls"] += step.calls
                found[f"kernel_calls_{step.zone if step.zone in _ZONES else 'other'}"] += step.calls
            case Start(exchange_step):
                found[f"exchanges_{exchange_step.collective}"] += bool(exchange_step.sends or exchange_step.receives or exchange_step.group)
                found["routed_transfers"] += len(exchange_step.routed_sends)
                if forward and exchange_step.id != remap_out:
                    for message in exchange_step.receives:
                        found[_TOKENS[message.kind]] += message.packed.num_rows
                elif forward:  # the outputs of all that was remapped to this rank, with query, key and value
                    remapped = sum(message.packed.num_rows for message in exchange_step.sends)
                    found["remap_tokens_received"] += remapped
                    found["q_tokens_received"] -= remapped
                    found["kv_tokens_received"] -= remapped
            case Finish():
                pass
    return tuple(found.items())
