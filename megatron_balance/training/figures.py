"""The figures of a training step: loads before and after planning, traffic, a predicted time."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeAlias

import numpy as np

from megatron_balance.analysis.statistics import plan_statistics
from megatron_balance.cost.analytic import AnalyticCost
from megatron_balance.cost.measured import MeasuredCost
from megatron_balance.ir.arrays import Floats
from megatron_balance.ir.forest import num_pairs
from megatron_balance.ir.model import Model
from megatron_balance.ir.plan import MicrobatchPlan
from megatron_balance.ir.step import TickPlan
from megatron_balance.ir.strategy import Strategy
from megatron_balance.simulator import pipeline
from megatron_balance.training.plans import PlannedStep
from megatron_balance.training.pool import Pool
from megatron_balance.training.tokens import PoolLengths

Cost: TypeAlias = AnalyticCost | MeasuredCost
Json: TypeAlias = dict[str, Any]
BACKWARD = 2  # a layer's backward pass takes twice its forward pass


@dataclass(frozen=True, slots=True)
class JobFacts:
    """Facts that figures need. `cost`: its cluster is the pool's; `num_chunks`: of each stage."""

    pool: Pool
    model: Model
    cost: Cost
    num_chunks: int = 1
    # Facts of each pipeline of a strategy; empty where they are the job's.
    of_strategy: "Callable[[Strategy | None], Sequence[JobFacts]]" = lambda _: ()
    stages: int | None = None  # pipeline stages; None: those of the pool
    tensor: int = 1  # GPUs of a rank, where pipelines differ in them

    @property
    def num_stages(self) -> int:
        return self.stages or self.pool.num_stages


def step_figures(planned: PlannedStep, shared: PoolLengths, job: JobFacts) -> Json:
    """The figures of a step's record: tokens, bytes and transfers of one layer's forward."""
    strategy = planned.step.strategy
    num_pipelines = len(planned.step.pipelines)
    jobs = tuple(job.of_strategy(strategy)) or (job,) * num_pipelines
    of_plan = [jobs[pipeline] for pipeline in planned.step.pipeline_of]
    each = [
        plan_statistics(plan, of.model, of.cost.cluster.ranks_per_nic)
        for plan, of in zip(planned.plans, of_plan, strict=True)
    ]
    # [R] each, by plan.
    tokens = [np.array(f["tokens_per_rank"], dtype=np.float64) for f in each]
    pairs = [np.array(f["attention_pairs_per_rank"], dtype=np.float64) for f in each]
    # A plan takes as long as its slowest rank.
    seconds = [
        max(of.cost.attention_s(p) + of.cost.linear_s(t) for p, t in zip(ps, ts, strict=True))
        for of, ps, ts in zip(of_plan, pairs, tokens, strict=True)
    ]
    pipelines = [list(chain.from_iterable(planned.own_plans_of(pipeline))) for pipeline in range(num_pipelines)]
    gpus = [of.tensor * of.num_stages for of in jobs]
    shared_ranks = sum(planned.plans[own[0]].num_ranks for own in pipelines)  # that all plans together are over
    # By pipeline: its share of the ranks that all plans together are over.
    share = [planned.plans[own[0]].num_ranks / shared_ranks for own in pipelines]
    of_pool = [share[pipeline] for pipeline in planned.step.pipeline_of]
    buffers = (job.pool.joint if job.pool.replica_groups is None else job.pool.attention).buffers
    record: Json = {
        "planner": planned.planner or planned.plans[0].planner,
        "strategy": None if strategy is None else str(strategy),
        # Of every nano-batch, where its planner says why the plan is what it is.
        "notes": [plan.note for plan in planned.plans if plan.note],
        "num_sequences": sum(f["num_sequences"] for f in each),
        "num_tokens": sum(f["num_tokens"] for f in each),
        "num_microbatches": len(planned.step.members),
        # Of the sequences that were drawn, by microbatch as dealt.
        "lengths": [list(map(int, each)) for each in shared.lengths],
        # Where some are trees, of how many segments each is.
        **({"segments": [list(map(len, each)) for each in shared.trees]} if shared.trees else {}),
        # By pipeline, where a step has several.
        "pipelines": list(planned.step.num_microbatches),
        **_account(planned, shared),
        "imbalance_before": imbalance_before(shared, job.pool),
        "imbalance_after": {
            name: imbalance_after(*(np.array([loads[at] for at in own]) for own in pipelines), gpus=gpus)
            for name, loads in (("tokens", tokens), ("attention", pairs))
        },
        **{
            name: sum(part * float(np.mean(f[f"{name}_per_rank"])) for part, f in zip(of_pool, each, strict=True))
            for name in ("kv_tokens_received", "kv_tokens_received_inter_node")
        },
        "zones": _zones(planned.plans),
        "remapped_tokens": sum(f["remap"]["tokens_moved"] for f in each),
        "remapped_tokens_inter_node": sum(f["remap"]["tokens_moved_inter_node"] for f in each),
        "routed_transfers": sum(f["routed_transfers"] for f in each),
        **{name: _by_nic(name, each, pipelines) for name in ("bytes_sent_per_nic", "bytes_received_per_nic")},
        # Memory that this rank's attention calls share: the most in use at once so far, and what is
        # set aside for it.
        "buffer_bytes": {"peak": buffers.peak_bytes, "held": buffers.held_bytes},
        # Compute only: neither transfers nor what surrounds the layers.
        "predicted_ms": 1e3
        * max(
            _through_stages([sum(seconds[i] for i in of) for of in planned.own_plans_of(pipeline)], jobs[pipeline])
            for pipeline in range(num_pipelines)
        ),
    }
    if planned.step.ticks:
        ticks = _tick_figures(planned.step.ticks, job.model, job.cost, job.num_chunks)
        record["imbalance_after"]["attention"] = imbalance_after(ticks.pop("attention"))
        record.update(ticks)
    return record


def _tick_figures(nano_batches: Sequence[Sequence[TickPlan]], model: Model, cost: Cost, num_chunks: int) -> Json:
    """The figures of ticks in which all pipeline stages attend together, by nano-batch;
    `num_chunks`: of each stage. Received tokens count, as for microbatches, one layer of every
    forward of a stage.
    """
    each: list[Json] = []
    for one in nano_batches:
        # Ticks of the same microbatches have one plan.
        plans = {planned.tick.microbatches: planned.plan for planned in one}
        known = {of: plan_statistics(plan, model, cost.cluster.ranks_per_nic) for of, plan in plans.items()}
        each += [known[planned.tick.microbatches] for planned in one]
    ticks = list(chain.from_iterable(nano_batches))
    forward = [of_tick for one, of_tick in zip(ticks, each, strict=True) if not one.tick.backward]
    pairs = np.array([f["attention_pairs_per_rank"] for f in each], dtype=np.float64)
    tokens = np.array([f["tokens_per_rank"] for f in each], dtype=np.float64)
    seconds = [
        # Attention and linear modules are two steps that all ranks of a tick wait for.
        max(map(cost.attention_s, ps)) + max(map(cost.linear_s, ts))
        for ps, ts in zip(pairs.tolist(), tokens.tolist(), strict=True)
    ]
    layers = model.num_layers / (len(ticks[0].tick.cells) * num_chunks)
    passes = [BACKWARD if one.tick.backward else 1 for one in ticks]
    return {
        "planner": ticks[0].plan.planner,
        "num_ticks": len(nano_batches[0]),
        **{
            name: sum(float(np.mean(f[f"{name}_per_rank"])) for f in forward) / num_chunks
            for name in ("kv_tokens_received", "kv_tokens_received_inter_node")
        },
        "routed_transfers": sum(f["routed_transfers"] for f in forward),
        **{
            name: (np.sum([f[name] for f in forward], axis=0) / num_chunks).tolist()
            for name in ("bytes_sent_per_nic", "bytes_received_per_nic")
        },
        # All ranks meet twice in every layer of a tick, before attention and behind it.
        "predicted_ms": 1e3 * layers * sum(n * s for n, s in zip(passes, seconds, strict=True)),
        "attention": pairs,
    }


def imbalance_before(shared: PoolLengths, pool: Pool) -> dict[str, float]:
    """Imbalance (largest over mean load) if every replica had kept its samples, cut zigzag."""
    # Replicas without a plan meet only when gradients are reduced, so a replica's load is its sum
    # over the step's microbatches.
    tokens, pairs = np.zeros(pool.size), np.zeros(pool.size)
    for m, (lengths, owners) in enumerate(zip(shared.lengths, shared.owners, strict=True)):
        sizes = np.array(lengths, dtype=np.float64)
        np.add.at(tokens, owners, sizes)
        # Pairs of a causal sequence, or of a tree.
        of = np.array([*map(num_pairs, shared.trees[m])]) if shared.trees else sizes * (sizes + 1) / 2
        np.add.at(pairs, owners, of)
    readers = list(pool.readers)
    return {"tokens": _max_over_mean(tokens[readers]), "attention": _max_over_mean(pairs[readers])}


def imbalance_after(*pipelines: Floats, gpus: Sequence[int] = ()) -> float:
    """Imbalance of loads [M, R] of ranks that exchange in every microbatch, by pipeline; `gpus`: by
    pipeline, those that share the load of each rank; empty: as many in each.
    """
    of = gpus or (1,) * len(pipelines)
    ranks = sum(loads.shape[1] * each for loads, each in zip(pipelines, of, strict=True))
    mean = sum(float(loads.sum()) for loads in pipelines) / ranks
    # The largest sum over a pipeline's microbatches of their largest loads: ranks exchange in every
    # one, and pipelines meet once a step.
    most = max(float(loads.max(axis=1).sum()) / each for loads, each in zip(pipelines, of, strict=True))
    return most / mean if mean else 1.0


def _by_nic(name: str, each: Sequence[Json], pipelines: Sequence[Sequence[int]]) -> list[list[float]]:
    """Bytes [nodes][NICs of a node] of a step, summed over its plans."""
    # A pipeline on several nodes has them to itself; those that share a node send nothing between
    # nodes.
    summed = [np.sum([each[at][name] for at in own], axis=0) for own in pipelines]
    return list(chain.from_iterable(each.tolist() for each in summed)) if len(summed[0]) > 1 else summed[0].tolist()


def _max_over_mean(loads: Floats) -> float:
    mean = loads.mean()
    return float(loads.max() / mean) if mean else 1.0


def _account(planned: PlannedStep, shared: PoolLengths) -> Json:
    ledger = planned.ledger
    return {
        "drawn_tokens": sum(map(sum, shared.lengths)),
        "trained_tokens": sum(plan.num_tokens for plan in planned.plans),
        "waiting_tokens": ledger.carry.waiting_tokens,
        "waiting_sequences": len(ledger.held),
        "run_tokens": {"drawn": ledger.drawn, "trained": ledger.trained},
    }


def _zones(plans: Sequence[MicrobatchPlan]) -> Json:
    names: Json = {}
    for plan in plans:
        for zone in plan.zones:
            names[zone.name] = names.get(zone.name, 0) + len(zone.seqs)
    return names


def _through_stages(seconds: Sequence[float], job: JobFacts) -> float:
    """Seconds until the last stage is done, in Megatron's order; `seconds`: of a layer of each."""
    stages, chunks = job.num_stages, job.num_chunks
    if len(seconds) % stages:
        chunks = 1  # groups of another size than Megatron's own: said as if not interleaved
    layers = job.model.num_layers / (stages * chunks)

    def run(_stage: int, step: pipeline.ChunkPass, begin: Floats) -> Floats:
        return begin + layers * seconds[step.microbatch] * (BACKWARD if step.backward else 1)

    return pipeline.run(stages, len(seconds), chunks, 1, run, lambda _: np.zeros(1)).total_s
