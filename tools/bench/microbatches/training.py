"""In a rank: Megatron's `pretrain` in pipeline stages over the same documents in all kinds of
microbatches, each step timed from outside.

What is wrapped lives in this process only, which ends with its job, as in
`tools.bench.emulated.training`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any

import torch.distributed as dist
from megatron.training import training as megatron_training

from megatron_balance.megatron import session
from megatron_balance.megatron.planning import step_plans
from megatron_balance.megatron.stage_transfers import PlannedTransfers
from megatron_balance.training.plans import StepPlans
from tools.bench.distca.pipeline.experiment import cut
from tools.bench.emulated import device
from tools.bench.emulated.training import MeasuredStep, Meter, Run, differences, pretrain_steps
from tools.bench.microbatches.experiment import CONTEXT, WITHIN, Dealt, Microbatches, dealt
from tools.emulated_cluster import Controller


def train(rank: int, controller: Controller, run: Run, experiment: Microbatches) -> None:
    """Train all steps of `run`; this is what the ranks of the cluster do."""
    _Meter(rank, controller, run, experiment).install()
    samples = [each for step in run.steps for each in cut(step.lengths, CONTEXT)]
    planner = experiment.ways[0] if experiment.replicas > 1 else WITHIN
    pretrain_steps(rank, run, {"planner": {"name": planner}}, samples)


@dataclass(slots=True)
class _Step(MeasuredStep):
    """`between_s`: in transfers between stages, waiting for the neighbour included. `dealt`: the
    microbatches.
    """

    between_s: float = 0.0
    dealt: Dealt = ()


class _Meter(Meter):
    """Measures each step, and how long its ranks stand between stages."""

    step: _Step

    def __init__(self, rank: int, controller: Controller, run: Run, experiment: Microbatches) -> None:
        super().__init__(rank, controller, run)
        self._experiment = experiment
        self._planners: dict[int, StepPlans] = {}
        self._at = -1

    def install(self) -> None:
        """Wrap what is measured."""
        planner = self._planner
        session.Session.planner = lambda self, forward_only: planner(self)  # noqa: ARG005  evaluation is switched off
        StepPlans.plan = self._begun(StepPlans.plan)
        PlannedTransfers._communicate = self._between(PlannedTransfers._communicate)
        megatron_training.train_step = self._measured(megatron_training.train_step)
        megatron_training.finalize_model_grads = self.reduced(megatron_training.finalize_model_grads)

    def _planner(self, job: session.Session) -> StepPlans:
        """Of this step's variant, in `job`'s place."""
        variant = self.run.steps[self._at].variant
        if variant not in self._planners:
            job = copy.copy(job)
            job.config = job.config.model_copy(update={"planner": self._experiment.choice(variant)})
            self._planners[variant] = step_plans(job, ahead=False)
        return self._planners[variant]

    def _begun(self, plan: Callable[..., Any]) -> Callable[..., Any]:
        """The model begins when its microbatches are planned."""

        def begun(*args: Any) -> Any:
            planned = plan(*args)
            self.step.dealt = dealt(planned.step)
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
                "variant": self._experiment.ways[planned.variant],
                "stages": self.run.flags["pipeline-model-parallel-size"],
                "dealt": step.dealt,
                "loss": ranks[-1]["loss"],  # the last stage knows it
                "grad_norm": grad_norm,
                "ranks": ranks,
                "nic_sent": differences(step.before, step.after, "sent"),
                "nic_received": differences(step.before, step.after, "received"),
            }
        )
