"""What a step did, once a step: one line in the log, one object in `steps.jsonl`, scalars in Megatron's TensorBoard and W&B."""

from __future__ import annotations

import argparse
import json
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.training import get_tensorboard_writer, get_wandb_writer

from megatron_balance.analysis.statistics import figures
from megatron_balance.config import RunConfig, to_yaml
from megatron_balance.cost.analytic import AnalyticCost
from megatron_balance.cost.measured import MeasuredCost
from megatron_balance.errors import ConfigError
from megatron_balance.ir.mask import CAUSAL
from megatron_balance.ir.model import Model
from megatron_balance.megatron.groups import Pool
from megatron_balance.megatron.tick_figures import BACKWARD, tick_figures
from megatron_balance.megatron.tokens import PoolLengths, job_device
from megatron_balance.runtime.bind import Counters
from megatron_balance.simulator import pipeline

if TYPE_CHECKING:
    from megatron_balance.megatron.planning import PlannedStep

log = logging.getLogger(__name__)

STEPS_FILE = "steps.jsonl"
CONFIG_FILE = "config.yaml"
Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Ran:
    """What is known of a step before its loss is."""

    planned: PlannedStep
    shared: PoolLengths
    counters: tuple[Counters, ...]
    """Of this rank, by plan."""


class StepLog:
    """Collects a step from the schedule's wrapper and writes it when Megatron has reduced its loss."""

    def __init__(self, args: argparse.Namespace, config: RunConfig) -> None:
        """Global rank 0 writes files; what it needs of other ranks is gathered over its joint pool."""
        self._args = args
        self._config = config
        self._file: IO[str] | None = None
        self._begun: float | None = None
        self._ran: Ran | None = None
        self._setup: tuple[Pool, Model, AnalyticCost | MeasuredCost] | None = None  # the cost model's cluster is the pool's
        self._writes = args.rank == 0
        if args.balance_log and self._writes:
            folder = Path(args.balance_log)
            try:
                folder.mkdir(parents=True, exist_ok=True)
                (folder / CONFIG_FILE).write_text(to_yaml(config), encoding="utf-8")
                self._file = (folder / STEPS_FILE).open("a", encoding="utf-8")
            except OSError as error:
                raise ConfigError(f"--balance-log {folder}: cannot be written ({error.strerror})") from None

    def describe(self, pool: Pool, model: Model, cost: AnalyticCost | MeasuredCost) -> None:
        """What every record needs and no step changes."""
        self._setup = (pool, model, cost)

    def begin(self, forward_only: bool) -> None:
        """A step begins; the first of several compile if Megatron runs it again."""
        if not forward_only and self._begun is None:
            self._begun = time.perf_counter()

    def ran(self, planned: PlannedStep, shared: PoolLengths, counters: Sequence[Counters]) -> None:
        """The schedule has run all microbatches."""
        self._ran = Ran(planned, shared, tuple(counters))

    def finish(self, step: int, loss_dict: dict[str, torch.Tensor], grad_norm: float | torch.Tensor | None) -> None:
        """The step is over: write it. Collective over the joint pool if there is a `--balance-log`."""
        ran, begun = self._ran, self._begun
        self._ran = self._begun = None
        if ran is None or begun is None or self._setup is None:
            return
        step_s = time.perf_counter() - begun
        loss = _number(loss_dict.get("lm loss"))
        counted = _table(ran.counters)[None]
        if self._args.balance_log:
            counted, loss = self._gather(ran.counters), self._from_last_stage(loss)
        writer, wandb = get_tensorboard_writer(), get_wandb_writer()
        if not (self._writes or writer or wandb):
            return
        record: Json = {
            "step": int(step),
            "loss": loss,
            "grad_norm": _number(grad_norm),
            **self._figures(ran),
            **_counted(counted),
            "plan_ms": 1e3 * ran.planned.plan_s,
            "plan_wait_ms": 1e3 * ran.planned.wait_s,
            "step_ms": 1e3 * step_s,
            "fingerprint": ran.planned.fingerprint,
        }
        if self._writes:
            _log_line(record)
            if self._file is not None:
                self._file.write(json.dumps(record) + "\n")
                self._file.flush()
        if step % self._args.tensorboard_log_interval == 0:
            for name, value in _scalars(record):
                if writer:
                    writer.add_scalar(name, value, step)
                if wandb:
                    wandb.log({name: value}, step)

    def close(self) -> None:
        """Nothing is written after this."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _figures(self, ran: Ran) -> Json:
        assert self._setup is not None
        pool, model, cost = self._setup
        each = [figures(plan, model, cost.cluster.ranks_per_nic) for plan in ran.planned.plans]
        tokens = np.array([f["tokens_per_rank"] for f in each], dtype=np.float64)
        pairs = np.array([f["attention_pairs_per_rank"] for f in each], dtype=np.float64)
        seconds = [
            max(cost.attention_s(p) + cost.linear_s(t) for p, t in zip(ps, ts, strict=True)) for ps, ts in zip(pairs, tokens, strict=True)
        ]
        record: Json = {
            "planner": ran.planned.plans[0].planner,
            "num_sequences": sum(f["num_sequences"] for f in each),
            "num_tokens": sum(f["num_tokens"] for f in each),
            "num_microbatches": len(ran.planned.parts),
            "imbalance_before": before(ran.shared, pool),
            "imbalance_after": {"tokens": together(tokens), "attention": together(pairs)},
            "kv_tokens_received": float(sum(np.mean(f["kv_tokens_received_per_rank"]) for f in each)),
            "kv_tokens_received_inter_node": float(sum(np.mean(f["kv_tokens_received_inter_node_per_rank"]) for f in each)),
            "zones": _zones(ran.planned),
            "remapped_tokens": sum(f["remap"]["tokens_moved"] for f in each),
            "remapped_tokens_inter_node": sum(f["remap"]["tokens_moved_inter_node"] for f in each),
            "routed_transfers": sum(f["routed_transfers"] for f in each),
            "bytes_sent_per_nic": np.sum([f["bytes_sent_per_nic"] for f in each], axis=0).tolist(),
            "bytes_received_per_nic": np.sum([f["bytes_received_per_nic"] for f in each], axis=0).tolist(),
            # Memory that this rank's attention calls share: the most in use at once so far, and what is set aside for it.
            "buffer_bytes": {"peak": pool.joint.buffers.peak_bytes, "held": pool.joint.buffers.held_bytes},
            # Compute only: neither transfers nor what surrounds the layers.
            "predicted_ms": 1e3 * self._through_stages([sum(seconds[i] for i in own) for own in ran.planned.plans_of]),
        }
        if ran.planned.ticks:
            ticks = tick_figures(ran.planned.ticks, model, cost, self._args.virtual_pipeline_model_parallel_size or 1)
            record["imbalance_after"]["attention"] = together(ticks.pop("attention"))
            record.update(ticks)
        return record

    def _through_stages(self, seconds: Sequence[float]) -> float:
        """When the last stage is done, of microbatches that take so long in each layer, in Megatron's order."""
        assert self._setup is not None
        pool, model, _ = self._setup
        stages, chunks = pool.num_stages, self._args.virtual_pipeline_model_parallel_size or 1
        if len(seconds) % stages:
            chunks = 1  # groups of another size than Megatron's own: said as if not interleaved
        layers = model.num_layers / (stages * chunks)

        def run(_stage: int, step: pipeline.Pass, begin: np.ndarray) -> np.ndarray:
            return begin + layers * seconds[step.microbatch] * (BACKWARD if step.backward else 1)

        return pipeline.total_s(pipeline.run(stages, len(seconds), chunks, 1, run, lambda _: np.zeros(1)))

    def _gather(self, counters: tuple[Counters, ...]) -> np.ndarray:
        """Counters of all ranks of the joint pool [R, M, counters]."""
        assert self._setup is not None
        joint = self._setup[0].joint
        if joint.size == 1:
            return _table(counters)[None]
        own = torch.from_numpy(_table(counters)).to(job_device())
        everyone = own.new_empty(joint.size, *own.shape)
        dist.all_gather(list(everyone.unbind()), own, group=joint.pool)
        return everyone.cpu().numpy()

    def _from_last_stage(self, loss: float | None) -> float | None:
        """The loss, which Megatron knows on the last pipeline stage only."""
        assert self._setup is not None
        pool = self._setup[0]
        if pool.num_stages == 1:
            return loss
        # Not a number where there is none: nothing was trained on, as Megatron has it.
        known = torch.tensor([math.nan if loss is None else loss], dtype=torch.float64, device=job_device())
        dist.broadcast(known, pool.joint.ranks[-1], group=pool.joint.pool)
        return float(known)


def before(shared: PoolLengths, pool: Pool) -> dict[str, float]:
    """Imbalance if every replica had kept its samples, each cut zigzag over its context-parallel ranks.

    Replicas without a plan meet only when gradients are reduced, so a replica's load is its sum over the step's microbatches.
    """
    tokens, pairs = np.zeros(pool.size), np.zeros(pool.size)
    for lengths, owners in zip(shared.lengths, shared.owners, strict=True):
        sizes = np.array(lengths, dtype=np.int64)
        np.add.at(tokens, owners, sizes)
        np.add.at(pairs, owners, CAUSAL.num_pairs(sizes))
    readers = list(pool.readers)
    return {"tokens": _ratio(tokens[readers]), "attention": _ratio(pairs[readers])}


def together(loads: np.ndarray) -> float:
    """Imbalance of loads [M, R] of ranks that exchange in every microbatch: the sum of the largest over the sum of the means."""
    mean = loads.mean(axis=1).sum()
    return float(loads.max(axis=1).sum() / mean) if mean else 1.0


def _ratio(loads: np.ndarray) -> float:
    mean = loads.mean()
    return float(loads.max() / mean) if mean else 1.0


def _zones(planned: PlannedStep) -> Json:
    """How many sequences each kind of zone holds."""
    names: Json = {}
    for plan in planned.plans:
        for zone in plan.zones:
            names[zone.name] = names.get(zone.name, 0) + len(zone.seqs)
    return names


_COUNTERS = tuple(field.name for field in fields(Counters))


def _table(counters: Sequence[Counters]) -> np.ndarray:
    """Counters of one rank [M, counters] int64."""
    return np.array([[getattr(c, name) for name in _COUNTERS] for c in counters], dtype=np.int64).reshape(-1, len(_COUNTERS))


def _counted(table: np.ndarray) -> Json:
    """What the ranks really did: means over ranks [R, M, counters] of the step's sums, and the per-rank sums themselves."""
    sums = table.sum(axis=1)
    kernel_calls = sums[:, _COUNTERS.index("kernel_calls")]
    return {"kernel_calls": float(kernel_calls.mean()), "counters": {name: sums[:, at].tolist() for at, name in enumerate(_COUNTERS)}}


def _number(value: float | torch.Tensor | None) -> float | None:
    return None if value is None else float(value)


def _scalars(record: Json) -> list[tuple[str, float]]:
    flat = [(f"{name}/{part}", value) for name in ("imbalance_before", "imbalance_after") for part, value in record[name].items()]
    names = (
        *("kv_tokens_received", "remapped_tokens", "routed_transfers", "kernel_calls", "num_sequences", "num_tokens"),
        *("plan_ms", "plan_wait_ms", "step_ms", "predicted_ms"),
    )
    return [(f"balance/{name}", float(value)) for name, value in [*flat, *((n, record[n]) for n in names)]]


def _log_line(record: Json) -> None:
    before_, after = record["imbalance_before"], record["imbalance_after"]
    log.info(
        "step %d: %s, %d sequences, %d tokens, imbalance tokens %.3f -> %.3f, attention %.3f -> %.3f, %d tokens remapped, "
        "%d transfers routed, plan %.1f ms (waited %.1f), step %.0f ms (predicted compute %.2f)",
        record["step"],
        record["planner"],
        record["num_sequences"],
        record["num_tokens"],
        before_["tokens"],
        after["tokens"],
        before_["attention"],
        after["attention"],
        record["remapped_tokens"],
        record["routed_transfers"],
        record["plan_ms"],
        record["plan_wait_ms"],
        record["step_ms"],
        record["predicted_ms"],
    )
