"""A pipeline stage without a microbatch of its own in a tick: it attends for the others.

DistCA, section 4.1. The stage makes the others' attention calls without rows of its own, segment
by segment in the order in which they make them (`compile.ping_pong`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_balance.compile.ping_pong import Segment
from megatron_balance.errors import InvalidProgramError
from megatron_balance.runtime.bind import Bound
from megatron_balance.runtime.executor import BackwardRun, ForwardRun
from megatron_balance.runtime.phase_run import PhaseRun, Received, wide_dtype


@dataclass(frozen=True, slots=True)
class Server:
    """A rank that attends for others. `dtype`, `device`: of their queries; `scale`: of scores."""

    dtype: torch.dtype
    device: torch.device
    scale: float

    def serve(self, bounds: Sequence[Bound], segments: Sequence[Segment], *, backward: bool) -> None:
        """Serve a pass through some layers: attend to what others send, and send it back.

        Args:
            bounds: by nano-batch.
            segments: of the pass, those of a backward as `compile.ping_pong.backward` names them.
            backward: the phase.

        Raises:
            InvalidProgramError: this rank owns rows of a plan.
        """
        for bound in bounds:
            if bound.num_tokens:
                raise InvalidProgramError(
                    f"rank {bound.rank} has {bound.num_tokens} rows of its own in a call that it only serves"
                )
        runs: dict[int, PhaseRun] = {}
        for nano_batch, _, part in segments:
            match part:
                case "linear":
                    pass
                case "start":
                    runs[nano_batch] = self._run(bounds[nano_batch], backward=backward)
                    runs[nano_batch].start()
                    bounds[nano_batch].groups.issues.flush()
                case "attend":
                    runs[nano_batch].attend()
                case "end":
                    runs.pop(nano_batch).end()

    def _run(self, bound: Bound, *, backward: bool) -> PhaseRun:
        shape = bound.shape
        q = torch.empty(0, shape.num_heads, shape.head_dim, dtype=self.dtype, device=self.device)
        kv = tuple(q.new_empty(0, shape.num_kv_heads, width) for width in shape.widths)
        if not backward:
            return ForwardRun(bound, q, kv, self.scale)
        lse = torch.empty(0, shape.num_heads, dtype=wide_dtype(self.dtype), device=self.device)
        out = q.new_empty(0, shape.num_heads, shape.value_width)
        return BackwardRun(bound, torch.empty_like(out), (q, *kv), (out, lse), Received(), self.scale)
