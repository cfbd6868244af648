"""How many layers of a training step keep what they received, decided alike on all ranks: by the plan,
and by facts that the ranks agreed on.
"""

import dataclasses
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_balance.analysis import backward
from megatron_balance.analysis.step_memory import StepMemory
from megatron_balance.ir.model import Model
from megatron_balance.ir.strategy import Strategy
from megatron_balance.runtime.groups import Groups
from megatron_balance.training.plans import PlannedStep

log = logging.getLogger(__name__)
FIRST_AGREEMENT = 3  # the step in which ranks first agree on what devices counted; then every `agreement_every`


@dataclass(frozen=True, slots=True)
class AgreedMemory:
    """The least memory of any rank, and the most state of any rank of each stage."""

    # Of a device, without what others take of it; None: not known (CPU).
    memory_bytes: float | None
    # Parameters, gradients and optimizer.
    state_bytes: tuple[float, ...]

    @classmethod
    def agreed(cls, stage: int, memory_bytes: float | None, state_bytes: float) -> "AgreedMemory":
        """The memory of all ranks of the job, of what this one reads. Collective over the world."""
        mine = (stage, memory_bytes, state_bytes)
        everyone = [mine] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        return cls.of(everyone)

    @classmethod
    def of(cls, ranks: Sequence[tuple[int, float | None, float]]) -> "AgreedMemory":
        known = [memory for _, memory, _ in ranks if memory is not None]
        stages = range(1 + max(stage for stage, _, _ in ranks))
        state = tuple(max((held for at, _, held in ranks if at == stage), default=0.0) for stage in stages)
        return cls(min(known) if known else None, state)


@dataclass(slots=True)
class Keeping:
    """Decides for every training step: `auto` asks the plan, `keep` and `replay` are what they say."""

    # Its state takes the place of the one predicted in `memory`.
    agreed: AgreedMemory
    memory: StepMemory
    # Of all ranks that plan together.
    groups: Groups
    # The most bytes that this rank's device held so far; None: none.
    counted: Callable[[], float | None]
    agreement_every: int
    # Memory of each of a strategy's pipelines, empty where it is the job's.
    of_strategy: Callable[[Strategy | None], Sequence[StepMemory]] = lambda _: ()
    _steps: int = 0
    _predicted: float = 0.0
    _excess: float = 0.0
    _told: str | None = None
    _last: tuple[str, Strategy | None, backward.Decision] | None = None

    def decide(self, planned: PlannedStep) -> backward.Decision:
        """Number of layers that keep. Collective now and then. InfeasibleError: none fits `auto`."""
        strategy = planned.step.strategy
        if self._last is not None:
            fingerprint, under, decision = self._last
            # The same plan again, or an answer that does not depend on the plan.
            if fingerprint == planned.fingerprint or (self.memory.asked != "auto" and under == strategy):
                return decision
        self._steps += 1
        if self.memory.asked == "auto" and (self._steps == FIRST_AGREEMENT or self._steps % self.agreement_every == 0):
            self._correct()
        pipelines = planned.step.pipelines
        own, state = self.of_strategy(strategy), self.agreed.state_bytes
        if own:  # a rank of any stage of a strategy may be one of any stage of the layout
            state = (max(state),) * max(len(memory.stages) for memory in own)
        # One decision for all pipelines: each stage of each of them runs its own microbatches alone.
        each = [
            self._pipeline(planned, numbers, memory, state)
            for numbers, memory in zip(pipelines, own or (self.memory,) * len(pipelines), strict=True)
        ]
        found = [
            backward.step_bytes(microbatches, model, stage) for microbatches, model, stages in each for stage in stages
        ]
        decision = backward.decide(found, self.memory.asked, self.agreed.memory_bytes)
        if decision.in_words != self._told:
            self._told = decision.in_words
            log.log(
                logging.INFO if decision.fits and not decision.tight else logging.WARNING, "%s", decision.sentence()
            )
        fullest = max(
            each, key=lambda one: max(float(backward.step_bytes(*one[:2], at).peak(0).max()) for at in one[2])
        )
        backward.check_fits(decision, *fullest)
        # Devices count the most bytes so far, so the excess holds for all steps before, too.
        self._predicted = max(self._predicted, decision.peak_bytes - self._excess)
        self._last = (planned.fingerprint, strategy, decision)
        return decision

    def _pipeline(
        self, planned: PlannedStep, numbers: range, memory: StepMemory, state: Sequence[float]
    ) -> tuple[list[backward.MicrobatchBytes], Model, list[backward.Stage]]:
        stages = [
            dataclasses.replace(stage, state_bytes=state[stage.sharding.stage] + self._excess)
            for stage in memory.stages
        ]
        plans_of = planned.step.plans_of[numbers.start : numbers.stop]
        microbatches = [backward.microbatch_bytes([planned.plans[at] for at in own], memory.model) for own in plans_of]
        return microbatches, memory.model, stages

    def _correct(self) -> None:
        """Agree on the most bytes by which a device's count passed the prediction."""
        counted = self.counted()
        excess = 0.0 if counted is None else counted - self._predicted
        if self.groups.pool is not None:
            nccl = dist.get_backend(self.groups.pool) == "nccl"
            device = torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")
            # MAX over the joint pool: every rank corrects by the same, and so decides the same.
            most = torch.tensor([excess], dtype=torch.float64, device=device)
            dist.all_reduce(most, dist.ReduceOp.MAX, group=self.groups.pool)
            excess = float(most)
        self._excess = max(0.0, excess)
