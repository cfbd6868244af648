"""In a rank: Megatron's `pretrain` in pipeline stages, each step with stages that attend together
or each for itself, timed from outside.

What is wrapped lives in this process only, which ends with its job, as in
`tools.bench.emulated.training`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from time import perf_counter
from typing import Any

import torch.distributed as dist
from megatron.training import training as megatron_training

from megatron_balance.megatron import session
from megatron_balance.megatron.pipeline_ticks import TickRun
from megatron_balance.megatron.planning import step_plans
from megatron_balance.runtime.bind import Bound, Prepared
from megatron_balance.runtime.trace import Trace, exchange_s
from megatron_balance.training.plans import PlannedStep, StepPlans
from tools.bench.distca.pipeline.experiment import TOGETHER, cut
from tools.bench.distca.pipeline.report import Idle, warms_up
from tools.bench.emulated import device
from tools.bench.emulated.training import MeasuredStep, Meter, Run, differences, pretrain_steps
from tools.emulated_cluster import Controller


def train(rank: int, controller: Controller, run: Run) -> None:
    """Train all steps of `run`; this is what the ranks of the cluster do."""
    _Meter(rank, controller, run).install()
    samples = list(chain(*(cut(step.lengths, run.flags["seq-length"]) for step in run.steps)))
    pretrain_steps(rank, run, {"planner": {"name": "distca"}, "pipeline": "joint"}, samples)


@dataclass(slots=True)
class _Step(MeasuredStep):
    """`idle`: by tick in which its stage had no microbatch."""

    idle: list[Idle] = field(default_factory=list)
    traces: list[Trace] = field(default_factory=list)


class _Planned:
    """A planner whose step begins when it has planned."""

    def __init__(self, planner: StepPlans, begin: Callable[[], None]) -> None:
        self._planner, self._begin = planner, begin

    def plan(self, lengths: tuple[tuple[int, ...], ...]) -> PlannedStep:
        planned = self._planner.plan(lengths)
        self._begin()
        return planned

    def close(self) -> None:
        self._planner.close()


class _Meter(Meter):
    """Gives each step its planner, and measures it."""

    step: _Step

    def __init__(self, rank: int, controller: Controller, run: Run) -> None:
        super().__init__(rank, controller, run)
        self._planners: dict[int, _Planned] = {}
        self._at = -1

    def install(self) -> None:
        """Wrap what is measured."""
        planner = self._planner
        session.Session.planner = lambda self, forward_only: planner(self)  # noqa: ARG005  evaluation is switched off
        Prepared.ship = self._shipped(Prepared.ship)
        TickRun._serve = self._served(TickRun._serve)
        megatron_training.train_step = self._measured(megatron_training.train_step)
        megatron_training.finalize_model_grads = self.reduced(megatron_training.finalize_model_grads)

    def _planner(self, job: session.Session) -> Any:
        """Of this step's variant."""
        variant = self.run.steps[self._at].variant
        if variant not in self._planners:
            made = step_plans(job, ahead=False, joint=variant == TOGETHER)
            self._planners[variant] = _Planned(made, self.begin)
        return self._planners[variant]

    def _shipped(self, ship: Callable[..., tuple[Bound, ...]]) -> Callable[..., tuple[Bound, ...]]:
        def shipped(prepared: Prepared) -> tuple[Bound, ...]:
            traces: list[Trace] = [[] for _ in prepared.bounds]
            self.step.traces += traces
            return tuple(replace(bound, trace=trace) for bound, trace in zip(ship(prepared), traces, strict=True))

        return shipped

    def _served(self, serve: Callable[..., None]) -> Callable[..., None]:
        def served(run: TickRun, tick: Any, bounds: Any) -> None:
            kernels, tasks = self._kernel_s(), sum(bound.counters.idle_tasks for bound in bounds)
            serve(run, tick, bounds)
            tasks = sum(bound.counters.idle_tasks for bound in bounds) - tasks
            first = warms_up(run.ticks, run.ticks.index(tick), run.stage)
            self.step.idle.append(Idle(tick.backward, first, tasks, self._kernel_s() - kernels))

        return served

    def _kernel_s(self) -> float:
        """Seconds of attention so far."""
        return sum(event.stop_s - event.start_s for trace in self.step.traces for event in trace if event.leg == "run")

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
        under_way, waited = (sum(seconds) for seconds in zip(*map(exchange_s, step.traces), strict=True))
        mine = {
            "loss": None if loss is None else float(loss),
            "model_s": step.model_s,
            "all_reduce_s": step.all_reduce_s,
            "step_s": step.step_s,
            "kernel_s": self._kernel_s(),
            "under_way_s": under_way,
            "waited_s": waited,
            "idle": step.idle,
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
                "variant": self.run.variants[planned.variant].name,
                "loss": ranks[-1]["loss"],  # the last stage knows it
                "grad_norm": grad_norm,
                "ranks": ranks,
                "nic_sent": differences(step.before, step.after, "sent"),
                "nic_received": differences(step.before, step.after, "received"),
            }
        )
