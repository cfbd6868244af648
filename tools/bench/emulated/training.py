"""In a rank: Megatron's `pretrain` over given batches, each step under the planner and layers of
its variant, timed from outside.

What is wrapped lives in this process only, which ends with its job: Megatron's `train_step` and its
reduction of gradients, the session's choice of a planner, `bind`, and the two nano-batches of the
attention call.
"""

from __future__ import annotations

import copy
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
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
from megatron_balance.megatron.planning import step_plans
from megatron_balance.runtime import attention
from megatron_balance.runtime.bind import Bound, Prepared
from megatron_balance.runtime.trace import Trace, exchange_s, hidden_share
from megatron_balance.training.plans import StepPlans
from megatron_balance.workloads.lengths import Lengths
from tools.bench.emulated import device
from tools.bench.emulated.exchanges import exchanges_of
from tools.bench.emulated.point import SHAPE, TOKENS, Shape
from tools.bench.emulated.steps import Planned
from tools.bench.emulated.variants import VARIANTS, Variant
from tools.emulated_cluster import Controller, NicBytes, Topology
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

    topology: Topology
    cluster: dict[str, Any]
    """The `cluster` section of the configuration."""
    steps: tuple[Planned, ...]
    layers: int
    backward: str
    folder: Path
    share: float | None
    """Of a core, for each compute thread; None: ranks share the cores."""
    record: Callable[[dict[str, Any]], None]
    """Called on rank 0 with what each step measured."""
    variants: tuple[Variant, ...] = VARIANTS
    flags: Mapping[str, Any] = field(default_factory=dict)
    """Of Megatron, in place of `FLAGS`."""
    shape: Shape = SHAPE


def train(rank: int, controller: Controller, run: Run) -> None:
    """Train all steps of `run`; this is what the ranks of the cluster do."""
    _Meter(rank, controller, run).install()
    pretrain_steps(rank, run, {"planner": {"name": "te_ring"}}, [step.lengths for step in run.steps])


def pretrain_steps(rank: int, run: Run, config: Mapping[str, Any], samples: Sequence[Lengths]) -> None:
    """Megatron's `pretrain` over `samples`, the documents of each. `config`: keys of the
    configuration beside those that `run` sets.
    """
    file = run.folder / f"balance-rank{rank}.yaml"
    file.write_text(yaml.safe_dump({**config, "cluster": run.cluster, "backward": run.backward, "plan_ahead": False}))
    flags = {
        **FLAGS,
        **model_flags(run.shape),
        "context-parallel-size": run.topology.world_size,
        **run.flags,
        "num-layers": run.layers,
        "train-iters": len(run.steps),
        "balance-config": file,
    }
    sys.argv = ["bench", *command_line(flags)]
    code = entry.run(lambda: _pretrain(Batches(samples, flags["seq-length"])))
    if code:
        sys.exit(code)


def _pretrain(batches: Batches) -> None:
    from megatron.core.enums import ModelType
    from megatron.training import pretrain
    from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
    from megatron.training.arguments import parse_and_validate_args

    from megatron_balance.megatron.arguments import add_balance_arguments
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
    used: list[device.Used] = field(default_factory=list)
    """Before the model and behind it."""
    before: tuple[NicBytes, ...] = ()
    after: tuple[NicBytes, ...] = ()


class Meter:
    """Measures a step from where its model begins to where its gradients are reduced. `step`: what
    is measured now.
    """

    def __init__(self, rank: int, controller: Controller, run: Run) -> None:
        """Make a meter that wraps nothing yet."""
        self.rank, self.controller, self.run = rank, controller, run
        self.step = MeasuredStep()
        self._model_start_s = self._cpu_start_s = 0.0

    def begin(self) -> None:
        """The model begins."""
        self.step.before = self._counted()
        if self.run.share is not None:
            device.reserve(self.run.share)
        self._model_start_s, self._cpu_start_s = time.perf_counter(), time.thread_time()

    def reduced(self, reduce: Callable[..., Any]) -> Callable[..., Any]:
        """`reduce`, the reduction of gradients, with which the model ends."""

        def measured(*args: Any, **kwargs: Any) -> None:
            self.step.model_s = time.perf_counter() - self._model_start_s
            self.step.cpu_s = time.thread_time() - self._cpu_start_s
            if self.run.share is not None:
                device.release()
            # with it a barrier: else the first rank's reduction would be waiting for the last
            self.step.after = self._counted()
            start = time.perf_counter()
            reduce(*args, **kwargs)
            self.step.all_reduce_s += time.perf_counter() - start

        return measured

    def _counted(self) -> tuple[NicBytes, ...]:
        """The counters of all NICs at a moment when no rank sends anything; rank 0 has them."""
        dist.barrier()
        start = time.perf_counter()
        self.step.used.append(device.Used.now())
        found = self.controller.nic_bytes() if self.rank == 0 else ()
        dist.barrier()
        self.step.own_s += time.perf_counter() - start
        return found


@dataclass(slots=True)
class _Step(MeasuredStep):
    forward_calls: list[tuple[float, float]] = field(default_factory=list)
    backward_calls: list[tuple[float, float]] = field(default_factory=list)
    """When each attention call began and ended; all ranks have one clock."""
    bounds: list[Bound] = field(default_factory=list)


class _Meter(Meter):
    """Gives each step its planner, and measures it. Counters of the NICs are read where only
    attention's transfers lie between.
    """

    step: _Step

    def __init__(self, rank: int, controller: Controller, run: Run) -> None:
        super().__init__(rank, controller, run)
        self._planners: dict[int, StepPlans] = {}
        self._at = -1

    def install(self) -> None:
        """Wrap what is measured."""
        planner = self._planner
        session.Session.planner = lambda self, forward_only: planner(self)  # noqa: ARG005  evaluation is switched off
        Prepared.ship = self._shipped(Prepared.ship)
        attention.run_forward = self._timed("forward_calls", attention.run_forward)
        attention.run_backward = self._timed("backward_calls", attention.run_backward)
        megatron_training.train_step = self._measured(megatron_training.train_step)
        megatron_training.finalize_model_grads = self.reduced(megatron_training.finalize_model_grads)

    def _planner(self, job: session.Session) -> StepPlans:
        """Of this step's variant, in `job`'s place."""
        variant = self.run.steps[self._at].variant
        if variant not in self._planners:
            job = copy.copy(job)
            job.config = job.config.model_copy(update={"planner": self.run.variants[variant].choice()})
            job.ping_pong = self.run.variants[variant].ping_pong
            self._planners[variant] = step_plans(job, ahead=False)
        return self._planners[variant]

    def _shipped(self, ship: Callable[..., tuple[Bound, ...]]) -> Callable[..., tuple[Bound, ...]]:
        def shipped(prepared: Prepared) -> tuple[Bound, ...]:
            traces: list[Trace] = [[] for _ in prepared.bounds]
            bounds = tuple(replace(bound, trace=trace) for bound, trace in zip(ship(prepared), traces, strict=True))
            self.step.bounds += bounds
            self.begin()
            return bounds

        return shipped

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            start = time.perf_counter()
            result = call(*args)
            getattr(self.step, name).append((start, time.perf_counter()))
            return result

        return timed

    def _measured(self, train_step: Callable[..., Any]) -> Callable[..., Any]:
        def measured(*args: Any, **kwargs: Any) -> Any:
            self._at += 1
            self.step = _Step()
            variant = self.run.variants[self.run.steps[self._at].variant]
            ping_pong.interleaved = ping_pong_order.forward if variant.interleaved else ping_pong_order.one_by_one
            device.prefer_transfers()
            dist.barrier()
            start = time.perf_counter()
            result = train_step(*args, **kwargs)
            self.step.step_s = time.perf_counter() - start - self.step.own_s
            self._report(float(result[0]["lm loss"]), float(result[5]))
            return result

        return measured

    def _report(self, loss: float, grad_norm: float) -> None:
        """Gather what the ranks measured, and record it on rank 0."""
        step, bounds = self.step, self.step.bounds
        traces = [bound.trace or [] for bound in bounds]
        under_way, waited = (sum(seconds) for seconds in zip(*map(exchange_s, traces), strict=True))
        counted = [asdict(bound.counters) for bound in bounds]
        mine = {
            "forward_calls": step.forward_calls,
            "backward_calls": step.backward_calls,
            "model_s": step.model_s,
            "all_reduce_s": step.all_reduce_s,
            "step_s": step.step_s,
            "cpu_s": step.cpu_s,
            "used": [step.used[0], step.used[-1]],
            "kernel_s": sum(event.stop_s - event.start_s for trace in traces for event in trace if event.leg == "run"),
            "under_way_s": under_way,
            "waited_s": waited,
            "hidden_share": hidden_share(*traces),
            "tokens": sum(bound.num_tokens for bound in bounds),
            "counters": {name: sum(counters[name] for counters in counted) for name in counted[0]},
            "exchanges": [
                exchange for nano_batch, bound in enumerate(bounds) for exchange in exchanges_of(bound, nano_batch)
            ],
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
                "share": self.run.share,
                "cores": len(os.sched_getaffinity(0)),
                "loss": loss,
                "grad_norm": grad_norm,
                "ranks": ranks,
                "nic_sent": differences(step.before, step.after, "sent"),
                "nic_received": differences(step.before, step.after, "received"),
                **_plan_figures(bounds, self.run),
            }
        )


def differences(before: Sequence[NicBytes], after: Sequence[NicBytes], side: str) -> list[int]:
    """Bytes that each NIC `sent` or `received` in between."""
    return [getattr(b, side) - getattr(a, side) for a, b in zip(before, after, strict=True)]


def _plan_figures(bounds: Sequence[Bound], run: Run) -> dict[str, Any]:
    """The plans of a microbatch, and the bytes that they put on each NIC, all layers, forward and
    backward.
    """
    plans, payload = [bound.plan for bound in bounds], Payload.of(session.current().model())
    moved = [
        traffic(
            expand(bound.plan, bound.policy),
            payload,
            ranks_per_node=run.topology.ranks_per_node,
            ranks_per_nic=run.topology.ranks_per_nic,
        )
        for bound in bounds
    ]
    zones: dict[str, int] = {}
    for zone in (zone for plan in plans for zone in plan.zones):
        zones[zone.name] = zones.get(zone.name, 0) + len(zone.seqs)
    return {
        "fingerprint": StepPlan.whole(tuple(plans)).fingerprint() if len(plans) > 1 else plans[0].fingerprint(),
        "zones": zones,
        "picked": [plan.note.split(":")[0] or plan.planner for plan in plans],
        "moved_tokens": sum(row[2] for plan in plans for row in plan.moves),
        "routed_zones": [zone for plan in plans if plan.routing is not None for zone in plan.routing.zones],
        "plan_nic_sent": [run.layers * n for n in np.sum([each.nic_sent for each in moved], axis=0).flatten().tolist()],
        "plan_nic_received": [
            run.layers * n for n in np.sum([each.nic_received for each in moved], axis=0).flatten().tolist()
        ],
    }
