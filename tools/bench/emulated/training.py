"""In a rank: Megatron's `pretrain` over given batches, each step under the planner and layers of
its variant, timed from outside.

What is wrapped lives in this process only, which ends with its job: Megatron's `train_step` and its
reduction of gradients, the session's choice of a planner, `bind`, and attention.
"""

import copy
import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from time import perf_counter, thread_time
from typing import Any

import torch.distributed as dist
import yaml
from megatron.training import training as megatron_training

from megatron_balance.analysis.statistics import traffic
from megatron_balance.analysis.wire import Payload
from megatron_balance.compile.pipeline import expand
from megatron_balance.megatron import entry, session
from megatron_balance.megatron.planning import step_plans
from megatron_balance.runtime import attention
from megatron_balance.runtime.bind import Bound, Prepared
from megatron_balance.runtime.recorder import Trace
from megatron_balance.training.plans import StepPlans
from tools.bench.emulated import device
from tools.bench.emulated.ablation import ABLATION, BASELINE, Ablation, Planned, Training, Variant
from tools.bench.emulated.point import TOKENS, Point, Shape
from tools.bench.emulated.report import waited
from tools.emulated_cluster import Controller, NicBytes
from tools.megatron_flags import GPT, LOOP, command_line
from tools.megatron_pretrain import Documents, pretrain_balanced

VOCABULARY = 256

FLAGS: dict[str, Any] = {
    **GPT,
    **LOOP,
    "seq-length": TOKENS,
    "max-position-embeddings": TOKENS,
    "global-batch-size": 1,
    # the same weights in every step, so that a batch's loss must be the same under every variant
    "lr": 0,
    "min-lr": 0,
    "weight-decay": 0,
    "vocab-size": VOCABULARY,
    "seed": 1234,
    "balance-device": "cpu",
    "distributed-backend": "gloo",
    "mock-data": True,  # Megatron asks for data or for none; ours come from our own provider
}


def model_flags(shape: Shape) -> dict[str, Any]:
    return {
        "hidden-size": shape.hidden_size,
        "kv-channels": shape.head_dim,
        "num-attention-heads": shape.heads,
        "ffn-hidden-size": shape.ffn_size,
    }


@dataclass(frozen=True, slots=True)
class Run:
    ablation: Ablation
    training: Training
    point: Point
    record: Callable[[dict[str, Any]], None]
    """Called on rank 0 with what each step measured."""


def train(rank: int, controller: Controller, run: Run) -> None:
    """Train all steps of `run` by Megatron's `pretrain`; this is what the ranks of the cluster do."""
    Meter(rank, controller, run).install()
    ablation, training = run.ablation, run.training
    file = ablation.folder / f"balance-rank{rank}.yaml"
    keys = {
        "planner": {"name": BASELINE},
        "cluster": run.point.cluster(training.nics),
        "backward": ablation.backward,
        "plan_ahead": False,
    }
    file.write_text(yaml.safe_dump(keys))
    flags = {
        **FLAGS,
        **model_flags(ablation.cluster_shape),
        "context-parallel-size": ablation.cluster_shape.num_ranks,
        "num-layers": ablation.layers,
        "train-iters": len(training.steps),
        "balance-config": file,
    }
    sys.argv = ["bench", *command_line(flags)]
    documents = Documents([step.lengths for step in training.steps], VOCABULARY)
    code = entry.run(lambda: pretrain_balanced(documents))
    if code:
        sys.exit(code)


@dataclass(slots=True)
class MeasuredStep:
    """This rank's measurements of a step, in seconds."""

    model_s: float = 0.0
    """Forward and backward of the model, attention and all."""
    all_reduce_s: float = 0.0
    step_s: float = 0.0
    own_s: float = 0.0
    """Of the step, what the measuring itself took; not in `step_s`."""
    cpu_s: float = 0.0
    """Of the thread that computes, over `model_s`."""
    used: list[device.Used] = field(default_factory=list)
    """Before the model and behind it."""
    before: tuple[NicBytes, ...] = ()
    after: tuple[NicBytes, ...] = ()
    forward_calls: list[tuple[float, float]] = field(default_factory=list)
    backward_calls: list[tuple[float, float]] = field(default_factory=list)
    """When each attention call began and ended; all ranks have one clock."""
    bound: Bound = field(init=False)
    trace: Trace = field(default_factory=list)


class Meter:
    """Gives each step its planner, and measures it, from where its model begins to where its gradients
    are reduced. Counters of the NICs are read where only the model's transfers lie between.
    """

    def __init__(self, rank: int, controller: Controller, run: Run) -> None:
        """Make a meter that wraps nothing yet."""
        self.rank, self.controller, self.run = rank, controller, run
        self.step = MeasuredStep()
        self._share = run.point.kernels.share
        self._model_start_s = self._cpu_start_s = 0.0
        self._planners: dict[int, StepPlans] = {}
        self._at = -1

    @property
    def _planned_step(self) -> Planned:
        return self.run.training.steps[self._at]

    @property
    def _variant(self) -> Variant:
        return ABLATION[self._planned_step.variant]

    def install(self) -> None:
        """Wrap what is measured."""
        planner = self._planner
        session.Session.planner = lambda self, forward_only: planner(self)  # noqa: ARG005  evaluation is switched off
        Prepared.ship = self._shipped(Prepared.ship)
        attention.run_forward = self._timed("forward_calls", attention.run_forward)
        attention.run_backward = self._timed("backward_calls", attention.run_backward)
        megatron_training.train_step = self._measured(megatron_training.train_step)
        megatron_training.finalize_model_grads = self._reduced(megatron_training.finalize_model_grads)

    def _planner(self, job: session.Session) -> StepPlans:
        """Of this step's variant, in `job`'s place."""
        at, variant = self._planned_step.variant, self._variant
        if at not in self._planners:
            job = copy.copy(job)
            job.config = job.config.model_copy(update={"planner": variant.choice()})
            self._planners[at] = step_plans(job, ahead=False)
        return self._planners[at]

    def _shipped(self, ship: Callable[..., tuple[Bound, ...]]) -> Callable[..., tuple[Bound, ...]]:
        """The plan of the one microbatch, with which the model begins."""

        def shipped(prepared: Prepared) -> tuple[Bound, ...]:
            (bound,) = ship(prepared)
            self.step.bound = replace(bound, trace=self.step.trace)
            self.step.before = self._counted()
            if self._share is not None:
                device.reserve(self._share)
            self._model_start_s, self._cpu_start_s = perf_counter(), thread_time()
            return (self.step.bound,)

        return shipped

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            start = perf_counter()
            result = call(*args)
            getattr(self.step, name).append((start, perf_counter()))
            return result

        return timed

    def _reduced(self, reduce: Callable[..., Any]) -> Callable[..., Any]:
        """`reduce`, the reduction of gradients, with which the model ends."""

        def measured(*args: Any, **kwargs: Any) -> None:
            self.step.model_s = perf_counter() - self._model_start_s
            self.step.cpu_s = thread_time() - self._cpu_start_s
            if self._share is not None:
                device.release()
            # with it a barrier: else the first rank's reduction would be waiting for the last
            self.step.after = self._counted()
            start = perf_counter()
            reduce(*args, **kwargs)
            self.step.all_reduce_s += perf_counter() - start

        return measured

    def _counted(self) -> tuple[NicBytes, ...]:
        """The counters of all NICs at a moment when no rank sends anything; rank 0 has them."""
        dist.barrier()
        start = perf_counter()
        self.step.used.append(device.Used.now())
        found = self.controller.nic_bytes() if self.rank == 0 else ()
        dist.barrier()
        self.step.own_s += perf_counter() - start
        return found

    def _measured(self, train_step: Callable[..., Any]) -> Callable[..., Any]:
        def measured(*args: Any, **kwargs: Any) -> Any:
            self._at += 1
            self.step = MeasuredStep()
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
        step, run = self.step, self.run
        names = ("model_s", "all_reduce_s", "step_s", "cpu_s", "forward_calls", "backward_calls")
        waited_s, hidden_share = waited(step.trace)
        mine = {
            **{name: getattr(step, name) for name in names},
            "loss": None if loss is None else float(loss),
            "used": [step.used[0], step.used[-1]],
            "waited_s": waited_s,
            "hidden_share": hidden_share,
        }
        ranks: list[dict[str, Any]] = [mine] * dist.get_world_size()
        dist.all_gather_object(ranks, mine)
        if self.rank:
            return
        run.record(
            {
                "nics": run.training.nics,
                **asdict(self._planned_step),
                "variant_id": self._planned_step.variant,
                "variant": self._variant.name,
                "share": self._share,
                "cores": len(os.sched_getaffinity(0)),
                "loss": ranks[-1]["loss"],
                "grad_norm": grad_norm,
                "ranks": ranks,
                "nic_sent": _differences(step.before, step.after, "sent"),
                "nic_received": _differences(step.before, step.after, "received"),
                **_plan_figures(step.bound, run),
            }
        )


def _differences(before: Sequence[NicBytes], after: Sequence[NicBytes], side: str) -> list[int]:
    return [getattr(b, side) - getattr(a, side) for a, b in zip(before, after, strict=True)]


def _plan_figures(bound: Bound, run: Run) -> dict[str, Any]:
    """The plan, and the bytes that it puts on each NIC, all layers, forward and backward."""
    plan, topology = bound.plan, run.point.topology(run.training.nics)
    moved = traffic(
        expand(plan, bound.policy),
        Payload.of(session.current().model()),
        ranks_per_node=topology.ranks_per_node,
        ranks_per_nic=topology.ranks_per_nic,
    )
    zones = Counter[str]()
    for zone in plan.zones:
        zones[zone.name] += len(zone.seqs)
    sides = {"sent": moved.nic_sent, "received": moved.nic_received}
    return {
        "fingerprint": plan.fingerprint(),
        "zones": zones,
        "picked": plan.note.split(":")[0] or plan.planner,
        "moved_tokens": sum(row[2] for row in plan.moves),
        "routed_zones": [] if plan.routing is None else list(plan.routing.zones),
        **{f"plan_nic_{side}": (run.ablation.layers * of).flatten().tolist() for side, of in sides.items()},
    }
