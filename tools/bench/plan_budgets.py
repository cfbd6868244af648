"""Plan, project, bind, verify and remap against the budgets of the design (CPU time of one core;
targets, not tests).

python tools/bench/plan_budgets.py [--repeats 5] [--only TEXT] [--json]
"""

import argparse
import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import numpy as np

from megatron_balance import Cluster, MicrobatchPlan, Model, make_planner, rl, verify
from megatron_balance.analysis.statistics import plan_statistics
from megatron_balance.compile.pipeline import BOTH_PHASES, PhaseName, expand, project
from megatron_balance.compile.proof.meaning import verify as verify_program
from megatron_balance.config import load_cluster, load_model
from megatron_balance.ir import step as steps
from megatron_balance.ir.batch import Batch
from megatron_balance.ir.forest import num_tokens
from megatron_balance.ir.step import Solver
from megatron_balance.patterns import dispatch
from megatron_balance.planners.base import JointStages
from megatron_balance.planning.layers import Layers
from megatron_balance.planning.step_planner import PlanSpec, StepPlanner
from megatron_balance.runtime.bind import AttentionShape, bind
from megatron_balance.runtime.groups import Groups
from megatron_balance.runtime.lower import messages
from megatron_balance.solvers.milp import SOLVERS
from megatron_balance.solvers.remap import solve
from megatron_balance.workloads.distributions import IMAGES_AND_VIDEOS, MIXED_RESOLUTION, draw_by_gpu
from megatron_balance.workloads.trees import RolloutShape

MODEL = Model(num_heads=32, num_kv_heads=8, head_dim=128)
SHAPE = AttentionShape(MODEL.num_heads, MODEL.num_kv_heads, MODEL.head_dim)
MIDDLE = 5
"""The rank that is projected; any but the first will do."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """One thing to time: what it is, what it may take (None: no budget is set), and how to do it
    once.
    """

    what: str
    budget_ms: float | None
    run: Callable[[], object]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", default="", help="Rows whose name contains this.")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    rows = [
        _measure(measurement, options.repeats) for measurement in measurements() if options.only in measurement.what
    ]
    if options.json:
        print(json.dumps({"rows": rows}))
        return 0
    width = max(len(row["what"]) for row in rows) + 2
    print(f"{'':{width}}{'median ms':>10}{'min':>9}{'max':>9}{'budget':>8}{'ratio':>7}")
    for row in rows:
        allowed, times = row["budget_ms"], (row["median_ms"], row["min_ms"], row["max_ms"])
        budget = "" if allowed is None else f"{allowed:>8g}{row['median_ms'] / allowed:7.2f}"
        print(f"{row['what']:{width}}{times[0]:10.2f}{times[1]:9.2f}{times[2]:9.2f}{budget}")
    return 0


def measurements() -> Iterator[Measurement]:
    """Everything that is timed here. `bind` holds project and transpose, and looks up both phases;
    it needs torch, but no other rank.
    """
    for num_ranks, num_seqs, tokens_per_rank, budget_ms in (
        (64, 512, 8192, 5.0),
        (1024, 1024, 4096, 50.0),
        (1024, 4096, 4096, 50.0),
    ):
        cluster, lengths = Cluster(num_ranks, 8), long_tailed(num_seqs, num_ranks * tokens_per_rank)
        size = f"{num_ranks} ranks x {num_seqs} sequences, {sum(lengths) / 1e6:.1f}M tokens"
        for rule in ("waves", "groups", "paper"):
            for slack in (1.0, 1.25):
                make = make_planner("zeppelin", cluster, MODEL, tokens_per_rank=int(slack * tokens_per_rank), rule=rule)
                yield Measurement(
                    f"plan {size}: zeppelin {rule}, slack {slack:g}",
                    budget_ms,
                    lambda make=make, batch=lengths: make(batch),
                )
        ring = make_planner("te_ring", cluster, MODEL)
        yield Measurement(f"plan {size}: te_ring", budget_ms, lambda make=ring, batch=lengths: make(batch))
        yield from _projections(size, _plans(cluster, lengths, tokens_per_rank), 2.0 if num_ranks == 64 else 10.0)
    for num_ranks, budget_ms in ((64, 3.0), (512, 25.0)):
        cluster, lengths = Cluster(num_ranks, 8), long_tailed(4 * num_ranks, num_ranks * 4096)
        for tolerance in (0.02, 0.1):
            make = make_planner("distca", cluster, MODEL, tolerance=tolerance)
            size = f"{num_ranks} ranks x {len(lengths)} sequences, {sum(lengths) / 1e6:.1f}M tokens"
            yield Measurement(
                f"plan {size}: distca, tolerance {tolerance:g}", budget_ms, lambda make=make, batch=lengths: make(batch)
            )
    yield from _trees()
    yield from _topologies()
    yield from _rl_steps()
    yield from _pipeline_step(num_stages=4, stage=Cluster(16, 8), num_microbatches=8, tokens_per_rank=8192)
    cluster, lengths = Cluster(64, 8), [100 + seq for seq in range(64)]
    for name in ("te_ring", "llama_all_gather", "ulysses", "zeppelin", "distca"):
        made = make_planner(name, cluster, MODEL)(lengths)
        yield Measurement(
            f"expand and verify 64 ranks x 64 sequences, backward: {name}", 1000.0, lambda plan=made: verify(plan)
        )
    yield from _remaps()


def _trees() -> Iterator[Measurement]:
    """64 prompts of 64 responses each: planned, expanded, and the program proved."""
    cluster, generator = load_cluster("h100").build(num_ranks=64, ranks_per_node=8), np.random.default_rng(0)
    trees = tuple(RolloutShape(responses=64).draw(generator) for _ in range(64))
    batch = Batch(tuple(map(num_tokens, trees)), trees)
    size = f"64 ranks x {sum(map(len, trees))} segments of {len(trees)} trees, {batch.num_tokens / 1e6:.1f}M tokens"
    for name, budget_ms in (("distca", 50.0), ("zeppelin", None)):
        make = make_planner(name, cluster, MODEL)
        plan = make(batch)
        program = expand(plan, "keep")
        yield Measurement(f"plan {size}: {name}", budget_ms, partial(make, batch))
        yield Measurement(f"expand {size}: {name}", None, partial(expand, plan, "keep"))
        yield Measurement(f"prove {size}: {name}", None, partial(verify_program, program))


def _rl_steps() -> Iterator[Measurement]:
    """A step of reinforcement learning from its lengths on, with the size of its JSON."""
    cluster = load_cluster("h100").build(num_ranks=512, ranks_per_node=8)
    for tokens in (4, 8, 16):
        lengths = long_tailed(8192, tokens * 10**6)
        for name, given in (
            ("whole", {"planner": "whole"}),
            ("whole, context 8", {"context": 8, "attend": "context"}),
            ("zeppelin groups", {"planner": "zeppelin", "options": {"rule": "groups"}}),
            ("zeppelin", {"planner": "zeppelin"}),
            ("distca", {"planner": "distca"}),
        ):
            run = partial(rl.plan_step, lengths, None, cluster, MODEL, max_tokens=16384, **given)
            step = run()
            size = f"{len(step.members)} microbatches, JSON {len(steps.to_json(step)) / 1e3:.0f} kB"
            what = f"plan an RL step, 512 ranks x 8192 samples, {tokens}M tokens: {name} ({size})"
            yield Measurement(what, 200.0, run)


def _remaps() -> Iterator[Measurement]:
    """The remapping solver, and the general ones beside it, on another instance each time. A program
    of these has a variable for each pair of ranks, so they are timed up to 64 ranks.
    """
    rng = np.random.default_rng(20261203)

    def run(num_ranks: int, solver: Solver) -> None:
        held = (rng.lognormal(0.0, 1.3, num_ranks) * 4096).astype(np.int64)
        solve(held, node_size=8, intra_s=1.0, inter_s=8.0, solver=solver)

    for num_ranks, budget_ms in ((64, None), (256, None), (1024, 2.0)):
        yield Measurement(f"remap {num_ranks} ranks: exact", budget_ms, partial(run, num_ranks, "exact"))
    for solver in SOLVERS:
        yield Measurement(f"remap 64 ranks: {solver}", None, partial(run, 64, solver))


def _topologies() -> Iterator[Measurement]:
    """knapformer on KnapFormer's workloads, topology given."""
    model = load_model("flux-12b")
    for num_ranks, budget_ms in ((32, 1.0), (1024, 20.0)):
        cluster = load_cluster("h100").build(num_ranks=num_ranks, ranks_per_node=8)
        for name, codes in (("mixed resolution", MIXED_RESOLUTION), ("images and videos", IMAGES_AND_VIDEOS)):
            drawn = draw_by_gpu(codes, num_ranks // 32, 0)
            lengths = [length for batch in drawn for samples in batch for length in samples]
            for topology in ("g1n32", "g8n4", "g8n1+g4n2+g2n4+g1n8"):
                make = make_planner("knapformer", cluster, model, topology=topology)
                yield Measurement(
                    f"plan {num_ranks} ranks x {len(lengths)} sequences, {name}: knapformer {topology}",
                    budget_ms,
                    lambda make=make, batch=lengths: make(batch),
                )


def _plans(cluster: Cluster, lengths: list[int], tokens_per_rank: int) -> dict[str, MicrobatchPlan]:
    """Plans that are projected and bound: zeppelin alone, with routing where it pays and a remap,
    and with all of it routed.
    """
    zeppelin = partial(
        make_planner, "zeppelin", cluster, MODEL, tokens_per_rank=int(1.25 * tokens_per_rank), rule="groups"
    )
    return {
        "te_ring": make_planner("te_ring", cluster, MODEL)(lengths),
        "zeppelin": zeppelin(layers=Layers())(lengths),
        "zeppelin, both layers": zeppelin(layers=Layers(routing="pays", remap=True))(lengths),
        "zeppelin, all routed": zeppelin(layers=Layers(routing="always", remap=True))(lengths),
        "distca": make_planner("distca", cluster, MODEL, Layers())(lengths),
        "distca, routed": make_planner("distca", cluster, MODEL, Layers(routing="pays"))(lengths),
    }


def _pipeline_step(
    num_stages: int, stage: Cluster, num_microbatches: int, tokens_per_rank: int
) -> Iterator[Measurement]:
    """A training step in which all pipeline stages attend together and microbatches run as two
    nano-batches interleaved: planning all of it, and binding all of it on one rank. A tick is of
    one phase, and each plan is bound for the phases of its ticks.
    """
    joint = Cluster(num_stages * stage.num_ranks, stage.ranks_per_node)
    spec = PlanSpec(
        "distca",
        stage,
        MODEL,
        Layers(),
        {"tokens_per_rank": tokens_per_rank},
        None,
        JointStages(joint, num_chunks=1),
        ping_pong=True,
    )
    microbatches = [
        long_tailed(8 * stage.num_ranks, stage.num_ranks * tokens_per_rank, seed) for seed in range(num_microbatches)
    ]
    planner = StepPlanner(spec)
    ping_pong = planner.plan(microbatches)[0].ticks
    groups = Groups(MIDDLE, joint.num_ranks, tuple(range(joint.num_ranks)), None)

    def bind_all(of_phase: bool) -> None:
        for nano_batch, ticks in enumerate(ping_pong):
            names = {one.tick.microbatches: set[PhaseName]() for one in ticks}
            for one in ticks:
                names[one.tick.microbatches].add("backward" if one.tick.backward else "forward")
            for microbatches, planned in {one.tick.microbatches: one.plan for one in ticks}.items():
                phases = names[microbatches] if of_phase else BOTH_PHASES
                bind(planned, MIDDLE, SHAPE, groups=groups, policy="replay", nano_batch=nano_batch, phases=phases)

    size = (
        f"step of {len(ping_pong[0])} ticks, {num_stages} x {stage.num_ranks} ranks, {num_microbatches} "
        "microbatches in nano-batches"
    )
    yield Measurement(f"plan a {size}: distca", None, lambda: planner.plan(microbatches))
    yield Measurement(f"bind one's {size}: distca", None, partial(bind_all, of_phase=True))
    yield Measurement(f"bind one's {size}, both phases: distca", None, partial(bind_all, of_phase=False))


def _projections(size: str, plans: dict[str, MicrobatchPlan], budget_ms: float) -> Iterator[Measurement]:
    """The budget is for project and bind together."""
    for name, plan in plans.items():
        yield Measurement(f"project one of {size}: {name}", budget_ms, lambda plan=plan: project(plan, MIDDLE))
        groups = Groups(MIDDLE, plan.num_ranks, tuple(range(plan.num_ranks)), None)
        # te_ring over 1,024 ranks has a million rows a rank
        if name != "te_ring" or plan.num_ranks == 64:
            yield Measurement(
                f"bind one of {size}: {name}",
                budget_ms,
                lambda plan=plan, groups=groups: bind(plan, MIDDLE, SHAPE, groups=groups),
            )
        yield Measurement(f"figures of {size}: {name}", None, lambda plan=plan: plan_statistics(plan, MODEL))


def long_tailed(num_seqs: int, num_tokens: int, seed: int = 20261120) -> list[int]:
    """Log-normal lengths of exactly so many tokens in all, the same on every machine."""
    rng = random.Random(seed)
    weights = [rng.lognormvariate(0, 1.3) for _ in range(num_seqs)]
    lengths = [max(1, int(w * num_tokens / sum(weights))) for w in weights]
    lengths[0] += num_tokens - sum(lengths)
    return lengths


def _measure(measurement: Measurement, repeats: int) -> dict[str, Any]:
    times: list[float] = []
    for _ in range(repeats):
        # plans differ from microbatch to microbatch
        for cached in (dispatch.transfers, messages.routes_of):
            cached.cache_clear()
        start = time.process_time()
        measurement.run()
        times.append(1e3 * (time.process_time() - start))
    return {
        "what": measurement.what,
        "budget_ms": measurement.budget_ms,
        "median_ms": median(times),
        "min_ms": min(times),
        "max_ms": max(times),
    }


if __name__ == "__main__":
    raise SystemExit(main())
