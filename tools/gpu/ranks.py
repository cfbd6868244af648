"""Several ranks on one device: the contract of all planners, forward and backward.

On CUDA streams, with gloo for NCCL's wire.
"""

from __future__ import annotations

import multiprocessing
import pickle
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from megatron_balance import reference
from megatron_balance.compile.pipeline import layout
from megatron_balance.cost.analytic import AnalyticCost
from megatron_balance.ir.batch import Batch
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.columns import Rows
from megatron_balance.ir.model import Model
from megatron_balance.ir.plan import REMAP, MicrobatchPlan, Routing
from megatron_balance.planners import PLANNERS
from tests.support import dense, jobs
from tools.gpu.rows import Context, Device, Figure, Row, Target

BUDGET_S = 40.0

PLACING = tuple(name for name in PLANNERS if PLANNERS[name].plan is not None)
"""Planners of one microbatch; those of whole steps ask one of them."""

NUM_RANKS, RANKS_PER_NODE = 4, 2
HEAD_DIM = 64
LENGTHS = (700, 300, 129, 64, 33, 1)
TOKENS_PER_RANK = 330
# bf16 keeps 8 bits: inputs, partials and results are each rounded to a 256th, relative to the
# largest value of each output.
FIGURES = tuple(
    Figure(
        f"{NUM_RANKS} ranks on one device, {name}: bf16 output and gradients against fp64",
        "of the largest",
        Target("at most", 0.02),
    )
    for name in PLACING
)
WAYS = ("keep", "replay")
PATIENCE_S = 60.0


def measure(context: Context) -> Iterator[Row]:
    plans = [_plan(name) for name in PLACING]
    with tempfile.TemporaryDirectory() as folder:
        seconds = min(PATIENCE_S, context.left_s())
        ranks, hung = run_ranks(_rank, NUM_RANKS, (plans, context.device), Path(folder), seconds)
    if hung:
        raise RuntimeError(f"{hung} of {NUM_RANKS} ranks did not end within {seconds:.0f} s")
    for figure, (at, plan) in zip(FIGURES, enumerate(plans), strict=True):
        errors = [worst(plan, [found[at][way] for found in ranks]) for way in range(len(WAYS))]
        counted = ranks[0][at][0].counters
        exchanges = sum(counted[f"exchanges_{kind}"] for kind in ("p2p", "all_to_all", "all_gather"))
        yield figure.measured(
            max(errors), f"{', '.join(WAYS)}; {exchanges} exchanges, {counted['kernel_calls']} kernel calls of rank 0"
        )


def planned(name: str, lengths: Sequence[int], cluster: Cluster, model: Model, tokens_per_rank: int) -> MicrobatchPlan:
    """A planner's plan of one microbatch."""
    place = PLANNERS[name].plan
    assert place is not None, "a planner of whole steps"
    options = PLANNERS[name].options(tokens_per_rank=tokens_per_rank)
    return place(Batch(tuple(lengths)), cluster, model, AnalyticCost(cluster, model), options)


def routed(plan: MicrobatchPlan) -> MicrobatchPlan:
    """The plan, routed wherever it can be."""
    return replace(plan, routing=Routing(1, (REMAP, *range(len(plan.zones)))))


def _plan(name: str) -> MicrobatchPlan:
    """A planner's plan of `LENGTHS` on two nodes of two; zeppelin's is remapped and routed, too."""
    model = Model(num_heads=8, num_kv_heads=4, head_dim=HEAD_DIM, hidden_size=512, ffn_size=1024)
    plan = planned(name, LENGTHS, Cluster(NUM_RANKS, RANKS_PER_NODE), model, TOKENS_PER_RANK)
    return routed(replace(plan, moves=Rows.of(3, [(0, 1, 5), (1, 2, 3)]))) if name == "zeppelin" else plan


def worst(plan: MicrobatchPlan, ranks: Sequence[jobs.Ran]) -> float:
    """The largest difference of output and gradients from dense attention in fp64.

    Each relative to its largest value.
    """
    truth = dense.attention(jobs.inputs(plan, HEAD_DIM))
    owned = [Rows.of(3, layout(plan, rank).tolist()) for rank in range(plan.num_ranks)]
    errors: list[float] = []
    for name in ("out", "q_grad", "k_grad", "v_grad"):
        values = getattr(truth, name)
        largest = max(float(abs(x).max()) for x in values)
        for rows, ran in zip(owned, ranks, strict=True):
            difference = abs(getattr(ran, name) - reference.owned_rows(rows, values))
            errors.append(float(difference.max()) / largest if difference.size else 0.0)
    return max(errors)


def run_ranks(
    target: Callable[..., None], num_ranks: int, given: tuple[Any, ...], folder: Path, seconds: float
) -> tuple[list[Any], int]:
    """By rank, what `target(rank, *given, folder)` pickled into its file; and how many did not end in
    `seconds`.

    Raises RuntimeError: a rank failed.
    """
    # Whose server imports torch once, and never touches the device.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["torch", "torch.distributed", "torch.fx.experimental.symbolic_shapes", target.__module__]
    )
    processes = [context.Process(target=target, args=(rank, *given, folder), daemon=True) for rank in range(num_ranks)]
    until = time.monotonic() + seconds
    for process in processes:
        process.start()
    for process in processes:
        process.join(max(0.0, until - time.monotonic()))
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    if any(codes):
        raise RuntimeError(f"ranks ended with {codes} (None: not within {seconds:.0f} s)")
    if None in codes:
        return [], codes.count(None)
    return [pickle.loads((folder / f"rank{rank}").read_bytes()) for rank in range(num_ranks)], 0


def _rank(rank: int, plans: Sequence[MicrobatchPlan], device: Device, folder: Path) -> None:
    import torch
    import torch.distributed as dist

    from megatron_balance.runtime.groups import make_groups
    from tests.support.pool import World
    from tools.gpu.staged import with_staged_streams

    torch.set_num_threads(1)
    if device == "cpu":
        from megatron_balance.megatron import cpu

        cpu.install()
    torch.cuda.set_device(0)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=NUM_RANKS,
        timeout=timedelta(seconds=PATIENCE_S),
    )
    groups = with_staged_streams(make_groups([range(NUM_RANKS)], RANKS_PER_NODE), RANKS_PER_NODE)
    world = World(rank, NUM_RANKS, groups)
    runs: list[Any] = [jobs.Run(policy, "bfloat16", calls=2, device=device) for policy in ("keep", "replay")]
    results = [jobs.attend(world, plan, HEAD_DIM, runs) for plan in plans]
    (folder / f"rank{rank}").write_bytes(pickle.dumps(results))
    dist.barrier()
    dist.destroy_process_group()
