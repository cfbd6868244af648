"""In a rank: Megatron's `pretrain` in pipeline stages, each step with stages that attend together or each for itself, timed from outside.

What is wrapped lives in this process only, which ends with its job, as in `tools.bench.emulated.training`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from itertools import chain
from time import perf_counter
from typing import Any

import torch.distributed as dist
from megatron.training import training as megatron_training

from megatron_balance.megatron import forward_backward, pipeline_ticks, session
from megatron_balance.megatron.pipeline_ticks import TickRun
from megatron_balance.megatron.planning import PlannedStep, StepPlanner
from megatron_balance.megatron.tick_planning import JointStepPlanner
from megatron_balance.runtime import bind as binding
from megatron_balance.runtime.bind import Bound
from megatron_balance.runtime.trace import Trace, exchange_s
from tools.bench.distca.pipeline.job import TOGETHER, cut
from tools.bench.distca.pipeline.report import Idle, warms_up
from tools.bench.emulated import device
from tools.bench.emulated.training import Run, differences, pretrain_steps
from tools.emulated_cluster import Controller, NicBytes


def train(rank: int, controller: Controller, run: Run) -> None:
    """Train all steps of `run`; this is what the ranks of the cluster do."""
    _Meter(rank, controller, run).install()
    samples = list(chain(*(cut(step.lengths, run.flags["seq-length"]) for step in run.steps)))
    pretrain_steps(rank, run, {"planner": {"name": "distca"}, "pipeline": "joint"}, samples)


@dataclass(slots=True)
class _Step:
    """What this rank measured of a step, in seconds. `idle`: by tick in which its stage had no microbatch."""

    model_s: float = 0.0
    all_reduce_s: float = 0.0
    step_s: float = 0.0
    own_s: float = 0.0
    idle: list[Idle] = field(default_factory=list)
    traces: list[Trace] = field(default_factory=list)
    before: tuple[NicBytes, ...] = ()
    after: tuple[NicBytes, ...] = ()


class _Planned:
    """A planner whose step begins when it has planned."""

    def __init__(self, planner: StepPlanner, begin: Callable[[], None]) -> None:
        self._planner, self._begin = planner, begin

    def plan(self, lengths: tuple[tuple[int, ...], ...]) -> PlannedStep:
        planned = self._planner.plan(lengths)
        self._begin()
        return planned

    def close(self) -> None:
        self._planner.close()


class _Meter:
    """Gives each step its planner, and measures it."""

    def __init__(self, rank: int, controller: Controller, run: Run) -> None:
        self._rank, self._controller, self._run = rank, controller, run
        self._planners: dict[int, _Planned] = {}
        self._at = -1
        self._step = _Step()
        self._start_s = 0.0

    def install(self) -> None:
        """Wrap what is measured."""
        planner = self._planner
        session.Session.planner = lambda self, forward_only: planner(self)  # noqa: ARG005  evaluation is switched off
        forward_backward.bind = pipeline_ticks.bind = self._bind
        TickRun._serve = self._served(TickRun._serve)
        megatron_training.train_step = self._measured(megatron_training.train_step)
        megatron_training.finalize_model_grads = self._reduced(megatron_training.finalize_model_grads)

    def _planner(self, job: session.Session) -> Any:
        """Of this step's variant."""
        variant = self._run.steps[self._at].variant
        if variant not in self._planners:
            made = JointStepPlanner(job, ahead=False, forward_only=False) if variant == TOGETHER else StepPlanner(job, ahead=False)
            self._planners[variant] = _Planned(made, self._begin)
        return self._planners[variant]

    def _begin(self) -> None:
        self._step.before = self._counted()
        if self._run.share is not None:
            device.reserve(self._run.share)
        self._start_s = perf_counter()

    def _bind(self, *args: Any, **kwargs: Any) -> Bound:
        trace: Trace = []
        self._step.traces.append(trace)
        return binding.bind(*args, trace=trace, **kwargs)

    def _counted(self) -> tuple[NicBytes, ...]:
        """The counters of all NICs at a moment when no rank sends anything; rank 0 has them."""
        dist.barrier()
        start = perf_counter()
        found = self._controller.nic_bytes() if self._rank == 0 else ()
        dist.barrier()
        self._step.own_s += perf_counter() - start
        return found

    def _served(self, serve: Callable[..., None]) -> Callable[..., None]:
        def served(run: TickRun, tick: Any, bounds: Any) -> None:
            kernels, tasks = self._kernel_s(), sum(bound.counters.idle_tasks for bound in bounds)
            serve(run, tick, bounds)
            tasks = sum(bound.counters.idle_tasks for bound in bounds) - tasks
            first = warms_up(run.ticks, run.ticks.index(tick), run.stage)
            self._step.idle.append(Idle(tick.backward, first, tasks, self._kernel_s() - kernels))

        return served

    def _kernel_s(self) -> float:
        """Seconds of attention so far."""
        return sum(event.stop_s - event.start_s for trace in self._step.traces for event in trace if event.leg == "run")

    def _reduced(self, reduce: Callable[..., Any]) -> Callable[..., Any]:
        def reduced(*args: Any, **kwargs: Any) -> None:
            self._step.model_s = perf_counter() - self._start_s
            if self._run.share is not None:
                device.release()
            self._step.after = self._counted()  # with it a barrier: else the first rank's reduction would be waiting for the last
            start = perf_counter()
            reduce(*args, **kwargs)
            self._step.all_reduce_s += perf_counter() - start

        return reduced

    def _measured(self, train_step: Callable[..., Any]) -> Callable[..., Any]:
        def measured(*args: Any, **kwargs: Any) -> Any:
            self._at += 1
            self._step = _Step()
            device.prefer_transfers()
            dist.barrier()
            start = perf_counter()
            result = train_step(*args, **kwargs)
            self._step.step_s = perf_counter() - start - self._step.own_s
            self._report(result[0].get("lm loss"), float(result[5]))
            return result

        return measured

    def _report(self, loss: Any, grad_norm: float) -> None:
        """Gather what the ranks measured, and record it on rank 0."""
        step = self._step
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
        if self._rank:
            return
        planned = self._run.steps[self._at]
        self._run.record(
            {
                "nics": self._run.topology.nics_per_node,
                **asdict(planned),
                "variant": self._run.variants[planned.variant].name,
                "loss": ranks[-1]["loss"],  # the last stage knows it
                "grad_norm": grad_norm,
                "ranks": ranks,
                "nic_sent": differences(step.before, step.after, "sent"),
                "nic_received": differences(step.before, step.after, "received"),
            }
        )
