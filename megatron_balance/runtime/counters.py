"""What a rank's attention calls really did, counted where it is done."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from megatron_balance.core.program import Kind
from megatron_balance.runtime.lowered import Finish, GradLaunch, Launch, Start, Step, Work

_ZONES = ("inter_node", "intra_node", "local")
_TOKENS = {Kind.Q: "q_tokens_received", Kind.KV: "kv_tokens_received", Kind.OUT: "partial_tokens_received"}


@dataclass(slots=True)
class Counters:
    """Sums over the calls of one bound plan on this rank, forward and backward together unless said otherwise.

    `kernel_calls_*`: by zone name ("other": any other name); `exchanges_*`: by pattern; tokens received: forward only;
    `bytes_received`: of all tensors that arrived.
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
    q_tokens_received: int = 0
    kv_tokens_received: int = 0
    partial_tokens_received: int = 0
    bytes_received_forward: int = 0
    bytes_received_backward: int = 0

    def ran(self, work: Work) -> None:
        """Add one finished run of a phase."""
        for name, count in work.counts:
            setattr(self, name, getattr(self, name) + count)

    def arrived(self, tensors: list[Tensor], *, forward: bool) -> None:
        """Add the bytes of one received message."""
        num_bytes = sum(x.numel() * x.element_size() for x in tensors)
        if forward:
            self.bytes_received_forward += num_bytes
        else:
            self.bytes_received_backward += num_bytes


def counts(steps: Sequence[Step], *, forward: bool) -> tuple[tuple[str, int], ...]:
    """What one run of these steps adds to `Counters`, as (name, count)."""
    found: Counter[str] = Counter()
    found["forward_calls" if forward else "backward_calls"] = 1
    for step in steps:
        match step:
            case Launch() | GradLaunch():
                found["kernel_calls"] += step.calls
                found[f"kernel_calls_{step.zone if step.zone in _ZONES else 'other'}"] += step.calls
            case Start():
                found[f"exchanges_{step.swap.pattern}"] += 1
                for message in step.swap.receives:
                    if forward and message.kind in _TOKENS:
                        found[_TOKENS[message.kind]] += message.packed.num_rows
            case Finish():
                pass
    return tuple(found.items())
