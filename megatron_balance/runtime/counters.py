"""What a rank's attention calls really did, counted where it is done."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from megatron_balance.core.program import Kind
from megatron_balance.runtime.lowered import Work

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

    def ran(self, work: Work, *, forward: bool) -> None:
        """Add one finished run of a phase."""
        if forward:
            self.forward_calls += 1
            for kind, name in _TOKENS.items():
                setattr(self, name, getattr(self, name) + work.tokens_received.get(kind, 0))
        else:
            self.backward_calls += 1
        for zone, calls in work.kernel_calls.items():
            name = f"kernel_calls_{zone if zone in _ZONES else 'other'}"
            self.kernel_calls += calls
            setattr(self, name, getattr(self, name) + calls)
        for pattern, count in work.exchanges.items():
            name = f"exchanges_{pattern}"
            setattr(self, name, getattr(self, name) + count)

    def arrived(self, tensors: list[Tensor], *, forward: bool) -> None:
        """Add the bytes of one received message."""
        num_bytes = sum(x.numel() * x.element_size() for x in tensors)
        if forward:
            self.bytes_received_forward += num_bytes
        else:
            self.bytes_received_backward += num_bytes
