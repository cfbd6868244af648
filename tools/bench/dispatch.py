"""Sequences to pipelines: ours against the paper's Alg. 1, against all assignments where these are
few, and against a bound; and the CPU time, that of packing, of a choice among strategies and of their
proposal too (Hydraulis, arXiv 2412.07894, sections 6.1, 6.2 and 7, Table 2).

python -m tools.bench.dispatch [--cases 1000] [--small 60] [--batches 20]

Cases are drawn: 5 to 120 sequences on 2 to 12 pipelines, a third of them with pipeline parallelism
that differs. Times: lengths of `commoncrawl`, at most 32,768 tokens; pipelines priced by data sheets
(LLaMA 13B, A800s), 64 ranks with 200,000 tokens a step, 1,024 with 3.2 million. Published seconds
are of ten steps on ten processes.
"""

from __future__ import annotations

import argparse
import itertools
import random
import time
from collections.abc import Callable, Sequence
from statistics import mean, median
from typing import TypeAlias, TypeVar

import numpy as np

from megatron_balance.config import load_cluster, load_model
from megatron_balance.cost.analytic import AnalyticCost
from megatron_balance.cost.schemes import Scheme, fit_scheme
from megatron_balance.papers.hydraulis.cases import SAMPLE_SEED, SOURCES, costs
from megatron_balance.papers.hydraulis.table2 import JOBS
from megatron_balance.planners.pipelines import deal, fastest, packed
from megatron_balance.planning.strategies import propose
from megatron_balance.solvers import makespan
from megatron_balance.solvers.dispatch import (
    Assigned,
    PipelineCost,
    dispatch,
    greedy,
    lower_bound_s,
    problem_of,
)
from megatron_balance.solvers.microbatches import pack
from megatron_balance.workloads.lengths import draw

T = TypeVar("T")
Parts: TypeAlias = "tuple[tuple[Scheme, int, int], ...]"
"""Of a strategy: schemes, how many pipelines, and tokens of a microbatch."""
LONGEST = 32_768
FITTED = tuple(1 << power for power in range(8, 16))
STRATEGIES: dict[str, Parts] = {
    "2*tp8-pp1 + 8*tp4-pp1 + 8*tp2-pp1": ((Scheme(8), 2, 16_384), (Scheme(4), 8, 8_192), (Scheme(2), 8, 4_096)),
    "1*tp8-pp2 + 4*tp4-pp2 + 8*tp2-pp1": ((Scheme(8, 2), 1, 32_768), (Scheme(4, 2), 4, 16_384), (Scheme(2), 8, 4_096)),
    "4*tp8-pp2": ((Scheme(8, 2), 4, 32_768),),
}
"""Of 64 ranks: schemes, how many pipelines, and tokens of a microbatch (assumed)."""
MORE: tuple[Parts, ...] = (
    ((Scheme(8), 8, 16_384),),
    ((Scheme(8), 4, 16_384), (Scheme(4), 8, 8_192)),
    ((Scheme(8), 1, 16_384), (Scheme(4), 6, 8_192), (Scheme(2), 16, 4_096)),
    ((Scheme(8), 6, 16_384), (Scheme(2), 8, 4_096)),
    ((Scheme(8, 2), 1, 32_768), (Scheme(4), 12, 8_192)),
)
"""Others, for the choice."""
SAMPLE_TOKENS = 10_000_000
"""Of the sequences that a proposal sees."""
SIZES = ((1, 200_000), (16, 3_200_000))
"""Times 64 ranks, and tokens of a step."""


def drawn(rng: random.Random, mixed: bool) -> tuple[list[int], list[PipelineCost]]:
    """Sequences and pipelines. `mixed`: pipeline parallelism of 1, 2 and 4 side by side."""
    pipelines: list[PipelineCost] = []
    for _ in range(rng.choice([2, 3, 4, 8, 12])):
        ranks, stages = rng.choice([1, 2, 4, 8]), rng.choice([1, 2, 4]) if mixed else 1
        a, b, c = 1e-9 * rng.uniform(0.9, 1.1) / ranks, 1e-5 / ranks, 5e-3 * rng.uniform(0.5, 1.5)
        pipelines.append(PipelineCost(a, b, c, stages, 4096 * ranks))
    most = max(pipeline.max_tokens for pipeline in pipelines)
    count = rng.choice([5, 9, 20, 50, 120])
    return [min(most, max(1, int(rng.lognormvariate(6, 1.3)))) for _ in range(count)], pipelines


def seconds(lengths: Sequence[int], pipelines: Sequence[PipelineCost], assigned: Assigned) -> float:
    """Seconds of the slowest pipeline, c spread over full microbatches as both ways have it."""
    problem, of = problem_of(lengths, pipelines), np.zeros(len(lengths), dtype=np.int64)
    for at, seqs in enumerate(assigned):
        of[list(seqs)] = at
    return float(problem.seconds(of).max())


def least_of_all(lengths: Sequence[int], pipelines: Sequence[PipelineCost]) -> float:
    """Seconds of the best of all assignments."""
    problem = problem_of(lengths, pipelines)
    every = np.array(list(itertools.product(range(len(pipelines)), repeat=len(lengths))))
    work = problem.work[problem.kind]
    total, largest = np.zeros((2, len(every), len(pipelines)))
    for at in range(len(pipelines)):
        own = np.where(every == at, work[at], 0.0)
        total[:, at], largest[:, at] = own.sum(axis=1), own.max(axis=1)
    return float((total + problem.behind * largest + problem.start_s * (largest > 0)).max(axis=1).min())


def against_trials(cases: int) -> None:
    """Ours over Alg. 1 with 100 trials."""
    ratios: list[float] = []
    for number in range(cases):
        lengths, pipelines = drawn(random.Random(number), mixed=number % 3 == 0)
        ours = seconds(lengths, pipelines, dispatch(lengths, pipelines))
        ratios.append(ours / seconds(lengths, pipelines, greedy(lengths, pipelines, seed=number)))
    worse = [ratio for ratio in ratios if ratio > 1.001]
    print(
        f"{cases} cases, ours over Alg. 1: mean {mean(ratios):.4f}, median {median(ratios):.4f}, largest "
        f"{max(ratios):.4f}; {len(worse)} more than 0.1 % slower"
    )


def against_all(cases: int) -> None:
    """Ours over the best of all assignments of 9 sequences to 3 pipelines."""
    ratios: list[float] = []
    for number in range(cases):
        rng = random.Random(10_000 + number)
        lengths, pipelines = drawn(rng, mixed=number % 3 == 0)
        while len(lengths) < 9 or len(pipelines) < 3:
            lengths, pipelines = drawn(rng, mixed=number % 3 == 0)
        pipelines = sorted(pipelines, key=lambda each: -each.max_tokens)[:3]
        lengths = lengths[:9]
        ratios.append(seconds(lengths, pipelines, dispatch(lengths, pipelines)) / least_of_all(lengths, pipelines))
    equal = sum(ratio < 1 + 1e-9 for ratio in ratios)
    print(f"{cases} cases of 9 on 3, ours over the best of all: largest {max(ratios):.4f}, equal in {equal}")


def timed(run: Callable[..., T], *given: object) -> tuple[float, T]:
    """CPU milliseconds of a call, and what it returns."""
    begin = time.process_time()
    made = run(*given)
    return 1e3 * (time.process_time() - begin), made


def pipelines_of(parts: Parts, times: int) -> list[PipelineCost]:
    """The pipelines of a strategy of 64 ranks, `times` over."""
    model, cluster = load_model("llama-13b"), load_cluster("a800").build(num_ranks=64, ranks_per_node=8)
    pipelines: list[PipelineCost] = []
    for scheme, count, most in parts:
        fitted = fit_scheme(scheme, model, cluster, lambda wide, tensor: AnalyticCost(wide, model, tensor), FITTED)
        cost = PipelineCost(fitted.a, fitted.b, fitted.c, scheme.pipeline, most)
        pipelines += [cost] * (count * times)
    return pipelines


def choosing(batches: int) -> None:
    """CPU time of a choice among eight strategies, the three above and five that differ little."""
    for times, tokens in SIZES:
        known = [pipelines_of(parts, times) for parts in (*STRATEGIES.values(), *MORE)]
        longest = min(max(each.max_tokens for each in pipelines) for pipelines in known)
        took = [
            timed(fastest, [min(length, longest) for length in lengths], known)[0]
            for lengths in draw("commoncrawl", tokens, batches, 0)
        ]
        print(f"one of {len(known)} strategies, {64 * times} ranks: {median(took):.0f} ms", flush=True)


def proposing() -> None:
    """CPU time of a proposal for the 32B model, without sampled batches; costs known before."""
    for source in SOURCES:
        known = costs(source, "32b")
        for job in JOBS.values():
            sample = [length for batch in job.batches(1 + SAMPLE_TOKENS // job.tokens, SAMPLE_SEED) for length in batch]
            schemes = known.schemes(job.num_ranks)
            first = timed(
                lambda job=job, schemes=schemes, known=known: [known.pipeline(s, job.num_ranks) for s in schemes]
            )[0]
            took = [timed(propose, sample, job.tokens, known, job.num_ranks)[0] for _ in range(5)]
            what = f"proposal by {source}, {job.num_ranks} ranks, {len(schemes)} schemes"
            print(f"{what}: {median(took) / 1e3:.3f} s; their costs before: {first / 1e3:.3f} s", flush=True)


def at_scale(batches: int) -> None:
    """CPU time, and how far from the bound, on lengths of `commoncrawl`."""
    for name, parts in STRATEGIES.items():
        for times, tokens in SIZES:
            pipelines = pipelines_of(parts, times)
            longest = max(pipeline.max_tokens for pipeline in pipelines)
            dispatching, packing, over, counts, longer = [], [], [], [], []
            for lengths in draw("commoncrawl", tokens, batches, 0):
                cut = [min(length, LONGEST, longest) for length in lengths]
                ms, found = timed(dispatch, cut, pipelines)
                dispatching.append(ms)
                of = [[cut[seq] for seq in seqs] for seqs in found]
                packing.append(sum(timed(pack, own, each)[0] for own, each in zip(of, pipelines, strict=True)))
                over.append(seconds(cut, pipelines, found) / lower_bound_s(cut, pipelines))
                longer.append(max(packed(cut, pipelines, found)[1]) / max(deal(cut, pipelines)[1]))
                counts.append(len(cut))
            print(
                f"{name}, {64 * times} ranks, {median(counts):.0f} sequences: dispatch {median(dispatching):.1f} ms, "
                f"packing {median(packing):.1f} ms, over the bound {mean(over):.4f} (largest {max(over):.4f}); packed, "
                f"{mean(longer):.4f} times as long as plans, which count what packing makes",
                flush=True,
            )


def main(argv: Sequence[str] | None = None) -> int:
    """Print all comparisons."""
    parser = argparse.ArgumentParser(prog="tools.bench.dispatch", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--cases", type=int, default=1000, help="cases against Alg. 1")
    parser.add_argument("--small", type=int, default=60, help="cases against all assignments")
    parser.add_argument("--batches", type=int, default=20, help="batches at scale")
    options = parser.parse_args(argv)
    print(f"searches: {makespan.IMPROVED + 1} at most, {makespan.MOST_STEPS} steps each")
    if options.cases:
        against_trials(options.cases)
    if options.small:
        against_all(options.small)
    if options.batches:
        at_scale(options.batches)
        choosing(options.batches)
        proposing()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
