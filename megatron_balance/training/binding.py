"""Plans bound for this rank with what is the same for all of a job's plans."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from megatron_balance.compile.transpose import Policy
from megatron_balance.ir.model import GradientWire
from megatron_balance.ir.plan import MicrobatchPlan
from megatron_balance.ir.tick import TickPlan
from megatron_balance.runtime.bind import AttentionShape, Bound, Counters, bind
from megatron_balance.runtime.groups import Groups
from megatron_balance.runtime.lower.steps import BOTH_PHASES, PhaseName


@dataclass(frozen=True, slots=True)
class Binder:
    """Facts of a job that every bound plan needs. `groups`: of the ranks that attend together."""

    groups: Groups
    shape: AttentionShape
    dtype: torch.dtype
    device: torch.device
    kernel: str = "auto"
    gradient_wire: GradientWire = "fp32"

    def bind(
        self, plan: MicrobatchPlan, policy: Policy, nano_batch: int = 0, phases: Collection[PhaseName] = BOTH_PHASES
    ) -> Bound:
        """Bind `plan` for this rank. Arguments and errors as for `runtime.bind.bind`."""
        return bind(
            plan,
            self.groups.rank,
            self.shape,
            groups=self.groups,
            device=self.device,
            dtype=self.dtype,
            policy=policy,
            kernel=self.kernel,
            nano_batch=nano_batch,
            gradient_wire=self.gradient_wire,
            phases=phases,
        )


class BoundTicks:
    """The plans of a step's ticks, bound for this rank.

    Each is bound when first needed, for the phases of all ticks that run it, and let go after the
    last.
    """

    def __init__(
        self, binder: Binder, nano_batches: Sequence[Sequence[TickPlan]], phases_of: Mapping[bool, frozenset[PhaseName]]
    ) -> None:
        """Note the phases of each plan; `take` binds.

        Args:
            binder: over the joint pool.
            nano_batches: by nano-batch, the ticks of the step with their plans.
            phases_of: the phases that run in a backward tick (True), and in a forward tick.
        """
        self._binder = binder
        self._nano_batches = nano_batches
        self._last = {planned.tick.microbatches: number for number, planned in enumerate(nano_batches[0])}
        self._phases: dict[tuple[int | None, ...], frozenset[PhaseName]] = {}
        for tick in (planned.tick for planned in nano_batches[0]):
            self._phases[tick.microbatches] = (
                self._phases.get(tick.microbatches, frozenset()) | phases_of[tick.backward]
            )
        self._bound: dict[tuple[int | None, ...], tuple[Bound, ...]] = {}
        self.counters: list[Counters] = []
        """Of every plan bound so far."""

    def take(self, number: int) -> tuple[Bound, ...]:
        """The bound plans of tick `number`, by nano-batch; they are asked for in order."""
        key = self._nano_batches[0][number].tick.microbatches
        if key not in self._bound:
            self._bound[key] = tuple(
                self._bind(ticks[number], nano_batch) for nano_batch, ticks in enumerate(self._nano_batches)
            )
            self.counters += [bound.counters for bound in self._bound[key]]
        return self._bound.pop(key) if self._last[key] == number else self._bound[key]

    def _bind(self, planned: TickPlan, nano_batch: int) -> Bound:
        # A backward tick's plan is another than that of the forward: it replays what the rank owns.
        return self._binder.bind(planned.plan, "replay", nano_batch, self._phases[planned.tick.microbatches])
