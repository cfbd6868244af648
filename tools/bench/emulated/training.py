"""In a rank: Megatron's `pretrain` over given batches, each step under the planner and layers of
its variant, timed from outside.

What is wrapped lives in this process only, which ends with its job: Megatron's `train_step` and its
reduction of gradients, the session's choice of a planner, planning and `bind`, attention, the two
nano-batches of the attention call, the ticks of joint pipelines, and transfers between stages.
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from time import perf_counter, thread_time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import yaml
from megatron.core.datasets.utils import Split
from megatron.training import training as megatron_training
from torch import Tensor
from torch.utils.data import Dataset

from megatron_balance.analysis.traffic import traffic
from megatron_balance.analysis.wire import Payload
from megatron_balance.compile import ping_pong as ping_pong_order
from megatron_balance.compile.pipeline import expand
from megatron_balance.ir.step import StepPlan
from megatron_balance.megatron import entry, ping_pong, session
from megatron_balance.megatron.data import PADDING
from megatron_balance.megatron.pipeline_ticks import TickRun
from megatron_balance.megatron.planning import step_plans
from megatron_balance.megatron.stage_transfers import PlannedTransfers
from megatron_balance.runtime import attention
from megatron_balance.runtime.bind import Bound, Prepared
from megatron_balance.runtime.trace import Trace, exchange_s, hidden_share
from megatron_balance.training.plans import StepPlans
from megatron_balance.workloads.lengths import Lengths
from tools.bench.emulated import device
from tools.bench.emulated.exchanges import exchanges_of
from tools.bench.emulated.experiments import Dealt, Experiment, Planned, Training, Variant, dealt
from tools.bench.emulated.point import TOKENS, Point, Shape
from tools.bench.emulated.report import Idle, warms_up
from tools.emulated_cluster import Controller, NicBytes
from tools.megatron_flags import GPT, LOOP, command_line

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
    """Megatron's flags of the model."""
    return {
        "hidden-size": shape.hidden_size,
        "kv-channels": shape.head_dim,
        "num-attention-heads": shape.heads,
        "ffn-hidden-size": shape.ffn_size,
    }


@dataclass(frozen=True, slots=True)
class Run:
    """One job of the benchmark."""

    experiment: Experiment
    training: Training
    point: Point
    record: Callable[[dict[str, Any]], None]
    """Called on rank 0 with what each step measured."""


def train(rank: int, controller: Controller, run: Run) -> None:
    """Train all steps of `run` by Megatron's `pretrain`; this is what the ranks of the cluster do."""
    Meter(rank, controller, run).install()
    experiment, training = run.experiment, run.training
    file = experiment.folder / f"balance-rank{rank}.yaml"
    cluster = run.point.cluster(training.nics)
    keys = {**experiment.config(), "cluster": cluster, "backward": experiment.backward, "plan_ahead": False}
    file.write_text(yaml.safe_dump(keys))
    flags = {
        **FLAGS,
        **model_flags(experiment.cluster_shape),
        "context-parallel-size": experiment.cluster_shape.num_ranks,
        **experiment.flags(training.stages),
        "num-layers": experiment.layers,
        "train-iters": len(training.steps),
        "balance-config": file,
    }
    sys.argv = ["bench", *command_line(flags)]
    samples = [sample for step in training.steps for sample in experiment.samples(step)]
    code = entry.run(lambda: _pretrain(Batches(samples, flags["seq-length"])))
    if code:
        sys.exit(code)


def _pretrain(batches: Batches) -> None:
    from megatron.core.enums import ModelType
    from megatron.training import pretrain
    from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
    from megatron.training.arguments import parse_and_validate_args

    from megatron_balance.megatron.flags import add_balance_arguments
    from megatron_balance.megatron.forward_step import forward_step

    def provider(*_: Any, **__: Any) -> tuple[Batches, None, None]:
        return batches, None, None

    provider.is_distributed = True  # pyright: ignore[reportFunctionMemberAccess]
    args = parse_and_validate_args(extra_args_provider=add_balance_arguments)
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    with entry.training(config):
        pretrain(config, provider, ModelType.encoder_or_decoder, forward_step)
    dist.barrier()
    dist.destroy_process_group()


class Batches(Dataset[dict[str, Tensor]]):
    """Each sample's documents, each filled with random tokens that depend on its length alone."""

    split = Split.train
    """Megatron's samplers read it."""

    def __init__(self, lengths: Sequence[Lengths], tokens: int = TOKENS) -> None:
        """`lengths`: of the documents of each sample, which has so many `tokens`."""
        self._lengths, self._tokens = lengths, tokens

    def __len__(self) -> int:
        return len(self._lengths)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Tokens, labels, loss_mask and position_ids of sample `index`, each [tokens]."""
        lengths = self._lengths[index]
        tokens = np.zeros(self._tokens + 1, dtype=np.int64)
        loss_mask = np.zeros(self._tokens, dtype=np.float32)
        position_ids = np.full(self._tokens, PADDING, dtype=np.int64)
        at = 0
        for length in lengths:
            loss_mask[at : at + length - 1] = 1  # a document's last token has no label
            position_ids[at : at + length] = np.arange(length)
            tokens[at : at + length] = np.random.default_rng(length).integers(0, VOCABULARY, size=length)
            at += length
        arrays = {"tokens": tokens[:-1], "labels": tokens[1:], "loss_mask": loss_mask, "position_ids": position_ids}
        return {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}


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
    between_s: float = 0.0
    """In transfers between stages, waiting for the neighbour included."""
    used: list[device.Used] = field(default_factory=list)
    """Before the model and behind it."""
    before: tuple[NicBytes, ...] = ()
    after: tuple[NicBytes, ...] = ()
    forward_calls: list[tuple[float, float]] = field(default_factory=list)
    backward_calls: list[tuple[float, float]] = field(default_factory=list)
    """When each attention call began and ended; all ranks have one clock."""
    bounds: list[Bound] = field(default_factory=list)
    dealt: Dealt = ()
    idle: list[Idle] = field(default_factory=list)
    """By tick in which its stage had no microbatch."""

    @property
    def traces(self) -> list[Trace]:
        """Of all that was bound."""
        return [bound.trace or [] for bound in self.bounds]

    def kernel_s(self) -> float:
        """Seconds of attention's kernels so far."""
        return sum(event.stop_s - event.start_s for trace in self.traces for event in trace if event.leg == "run")


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
        return self.run.experiment.variants[self._planned_step.variant]

    def install(self) -> None:
        """Wrap what is measured."""
        planner = self._planner
        session.Session.planner = lambda self, forward_only: planner(self)  # noqa: ARG005  evaluation is switched off
        StepPlans.plan = self._planned(StepPlans.plan)
        Prepared.ship = self._shipped(Prepared.ship)
        attention.run_forward = self._timed("forward_calls", attention.run_forward)
        attention.run_backward = self._timed("backward_calls", attention.run_backward)
        TickRun._serve = self._served(TickRun._serve)
        PlannedTransfers._communicate = self._between(PlannedTransfers._communicate)
        megatron_training.train_step = self._measured(megatron_training.train_step)
        megatron_training.finalize_model_grads = self._reduced(megatron_training.finalize_model_grads)

    def _planner(self, job: session.Session) -> StepPlans:
        """Of this step's variant, in `job`'s place."""
        at, variant = self._planned_step.variant, self._variant
        if at not in self._planners:
            job = copy.copy(job)
            job.config = job.config.model_copy(update={"planner": variant.choice()})
            job.ping_pong = variant.ping_pong
            self._planners[at] = step_plans(job, ahead=False, joint=variant.joint)
        return self._planners[at]

    def _begin(self) -> None:
        """The model begins."""
        self.step.before = self._counted()
        if self._share is not None:
            device.reserve(self._share)
        self._model_start_s, self._cpu_start_s = perf_counter(), thread_time()

    def _planned(self, plan: Callable[..., Any]) -> Callable[..., Any]:
        """In pipelines the model begins when its microbatches are planned; each is bound within."""

        def planned(*args: Any, **kwargs: Any) -> Any:
            found = plan(*args, **kwargs)
            self.step.dealt = dealt(found.step)
            if self.run.experiment.PIPELINED:
                self._begin()
            return found

        return planned

    def _shipped(self, ship: Callable[..., tuple[Bound, ...]]) -> Callable[..., tuple[Bound, ...]]:
        """Plans of the one microbatch, with which the model begins, or of one of several."""

        def shipped(prepared: Prepared) -> tuple[Bound, ...]:
            traces: list[Trace] = [[] for _ in prepared.bounds]
            bounds = tuple(replace(bound, trace=trace) for bound, trace in zip(ship(prepared), traces, strict=True))
            self.step.bounds += bounds
            if not self.run.experiment.PIPELINED:
                self._begin()
            return bounds

        return shipped

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            start = perf_counter()
            result = call(*args)
            getattr(self.step, name).append((start, perf_counter()))
            return result

        return timed

    def _served(self, serve: Callable[..., None]) -> Callable[..., None]:
        def served(run: TickRun, tick: Any, bounds: Any) -> None:
            kernels, tasks = self.step.kernel_s(), sum(bound.counters.idle_tasks for bound in bounds)
            serve(run, tick, bounds)
            tasks = sum(bound.counters.idle_tasks for bound in bounds) - tasks
            first = warms_up(run.ticks, run.ticks.index(tick), run.stage)
            self.step.idle.append(Idle(tick.backward, first, tasks, self.step.kernel_s() - kernels))

        return served

    def _between(self, communicate: Callable[..., Any]) -> Callable[..., Any]:
        def between(*args: Any, **kwargs: Any) -> Any:
            start = perf_counter()
            result = communicate(*args, **kwargs)
            self.step.between_s += perf_counter() - start
            return result

        return between

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
            order = ping_pong_order.forward if self._variant.interleaved else ping_pong_order.one_by_one
            ping_pong.interleaved = order
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
        waits = [exchange_s(trace) for trace in step.traces]
        under_way, waited = (sum(seconds) for seconds in zip(*waits, strict=True)) if waits else (0.0, 0.0)
        counted = [asdict(bound.counters) for bound in step.bounds]
        names = ("model_s", "all_reduce_s", "step_s", "cpu_s", "between_s", "forward_calls", "backward_calls", "idle")
        mine = {
            **{name: getattr(step, name) for name in names},
            "loss": None if loss is None else float(loss),
            "used": [step.used[0], step.used[-1]],
            "kernel_s": step.kernel_s(),
            "under_way_s": under_way,
            "waited_s": waited,
            "hidden_share": hidden_share(*step.traces),
            "tokens": sum(bound.num_tokens for bound in step.bounds),
            "counters": {name: sum(counters[name] for counters in counted) for name in counted[0]} if counted else {},
        }
        if not run.experiment.PIPELINED:
            bounds = enumerate(step.bounds)
            mine["exchanges"] = [each for nano_batch, bound in bounds for each in exchanges_of(bound, nano_batch)]
        ranks: list[dict[str, Any]] = [mine] * dist.get_world_size()
        dist.all_gather_object(ranks, mine)
        if self.rank:
            return
        run.record(
            {
                "nics": run.training.nics,
                "stages": run.training.stages,
                **asdict(self._planned_step),
                "variant_id": self._planned_step.variant,
                "variant": self._variant.name,
                "share": self._share,
                "cores": len(os.sched_getaffinity(0)),
                "dealt": step.dealt,
                "loss": ranks[-1]["loss"],  # the last stage knows it
                "grad_norm": grad_norm,
                "ranks": ranks,
                "nic_sent": _differences(step.before, step.after, "sent"),
                "nic_received": _differences(step.before, step.after, "received"),
                **({} if run.experiment.PIPELINED else _plan_figures(step.bounds, run)),
            }
        )


def _differences(before: Sequence[NicBytes], after: Sequence[NicBytes], side: str) -> list[int]:
    """Bytes that each NIC `sent` or `received` in between."""
    return [getattr(b, side) - getattr(a, side) for a, b in zip(before, after, strict=True)]


def _plan_figures(bounds: Sequence[Bound], run: Run) -> dict[str, Any]:
    """The plans of a microbatch, and the bytes that they put on each NIC, all layers, forward and
    backward.
    """
    plans, payload = [bound.plan for bound in bounds], Payload.of(session.current().model())
    topology, layers = run.point.topology(run.training.nics), run.experiment.layers
    moved = [
        traffic(
            expand(bound.plan, bound.policy),
            payload,
            ranks_per_node=topology.ranks_per_node,
            ranks_per_nic=topology.ranks_per_nic,
        )
        for bound in bounds
    ]
    zones: dict[str, int] = {}
    for zone in (zone for plan in plans for zone in plan.zones):
        zones[zone.name] = zones.get(zone.name, 0) + len(zone.seqs)
    sides = {"sent": [each.nic_sent for each in moved], "received": [each.nic_received for each in moved]}
    return {
        "fingerprint": StepPlan.whole(tuple(plans)).fingerprint() if len(plans) > 1 else plans[0].fingerprint(),
        "zones": zones,
        "picked": [plan.note.split(":")[0] or plan.planner for plan in plans],
        "moved_tokens": sum(row[2] for plan in plans for row in plan.moves),
        "routed_zones": [zone for plan in plans if plan.routing is not None for zone in plan.routing.zones],
        **{
            f"plan_nic_{side}": [layers * n for n in np.sum(of, axis=0).flatten().tolist()]
            for side, of in sides.items()
        },
    }
