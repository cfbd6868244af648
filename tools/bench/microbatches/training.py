"""In a rank: Megatron's `pretrain` in pipeline stages over the same documents dealt both ways, each
step timed from outside.

What is wrapped lives in this process only, which ends with its job, as in
`tools.bench.emulated.training`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any

import torch.distributed as dist
from megatron.training import training as megatron_training

from megatron_balance.megatron.stage_transfers import PlannedTransfers
from megatron_balance.training.plans import StepPlans
from tools.bench.emulated import device
from tools.bench.emulated.point import Point
from tools.bench.emulated.training import MeasuredStep, Meter, Run, differences, pretrain_steps
from tools.bench.microbatches.experiment import PLANNER, Microbatches, emulated, work_on
from tools.emulated_cluster import Controller


def train(rank: int, controller: Controller, run: Run, experiment: Microbatches, point: Point) -> None:
    """Train all steps of `run`; this is what the ranks of the cluster do."""
    _Meter(rank, controller, run).install()
    work = work_on(emulated(point, run.flags["pipeline-model-parallel-size"], run.layers))
    samples = [each for step in run.steps for each in experiment.dealt(step.lengths, step.variant, work)]
    pretrain_steps(rank, run, {"planner": {"name": PLANNER}}, samples)


@dataclass(slots=True)
class _Step(MeasuredStep):
    """`between_s`: in transfers between stages, waiting for the neighbour included."""

    between_s: float = 0.0


class _Meter(Meter):
    """Measures each step, and how long its ranks stand between stages."""

    step: _Step

    def __init__(self, rank: int, controller: Controller, run: Run) -> None:
        super().__init__(rank, controller, run)
        self._at = -1

    def install(self) -> None:
        """Wrap what is measured."""
        StepPlans.plan = self._begun(StepPlans.plan)
        PlannedTransfers._communicate = self._between(PlannedTransfers._communicate)
        megatron_training.train_step = self._measured(megatron_training.train_step)
        megatron_training.finalize_model_grads = self.reduced(megatron_training.finalize_model_grads)

    def _begun(self, plan: Callable[..., Any]) -> Callable[..., Any]:
        """The model begins when its microbatches are planned."""

        def begun(*args: Any) -> Any:
            planned = plan(*args)
            self.begin()
            return planned

        return begun

    def _between(self, communicate: Callable[..., Any]) -> Callable[..., Any]:
        def between(*args: Any, **kwargs: Any) -> Any:
            start = perf_counter()
            result = communicate(*args, **kwargs)
            self.step.between_s += perf_counter() - start
            return result

        return between

    def _measured(self, train_step: Callable[..., Any]) -> Callable[..., Any]:
        def measured(*args: Any, **kwargs: Any) -> Any:
            self._at += 1
            self.step = _Step()
            device.prefer_transfers()
            dist.barrier()
            start = perf_counter()
            result = train_step(*args, **kwargs)
            self.step.step_s = perf_counter() - start - self.step.own_s
            self._report(result[0].get("lm loss"), float(result[5]))
            return result

        return measured

    def _report(self, loss: Any, grad_norm: float) -> None:
        """Gather what the ranks measured, and record it on rank 0."""
        step = self.step
        mine = {
            "loss": None if loss is None else float(loss),
            "model_s": step.model_s,
            "between_s": step.between_s,
            "all_reduce_s": step.all_reduce_s,
            "step_s": step.step_s,
        }
        ranks: list[dict[str, Any]] = [mine] * dist.get_world_size()
        dist.all_gather_object(ranks, mine)
        if self.rank:
            return
        planned = self.run.steps[self._at]
        self.run.record(
            {
                "nics": self.run.topology.nics_per_node,
                **asdict(planned),
                "variant_id": planned.variant,
                "variant": self.run.variants[planned.variant].name,
                "stages": self.run.flags["pipeline-model-parallel-size"],
                "loss": ranks[-1]["loss"],  # the last stage knows it
                "grad_norm": grad_norm,
                "ranks": ranks,
                "nic_sent": differences(step.before, step.after, "sent"),
                "nic_received": differences(step.before, step.after, "received"),
            }
        )
