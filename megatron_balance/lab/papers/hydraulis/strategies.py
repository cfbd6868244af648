"""Gains of strategies, Figures 14 to 16 and 20.

Figure 14: seconds of propagation over GPUs, longest sequences and tokens a step, 7B. For 32B on 64
GPUs Figure 15: strategies chosen over 100 steps (a), and how even pipelines end (b); Figure 16:
throughput as parts of Hydraulis are added one by one; Figure 20: greedy dispatching (Alg. 1) over
ideal dispatching (Eq. 3).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from statistics import fmean

from megatron_balance.errors import InfeasibleError
from megatron_balance.lab.papers.base import Effort, Ours, table
from megatron_balance.lab.papers.hydraulis.cases import (
    B32,
    HETEROGENEOUS,
    HOMOGENEOUS,
    SOURCES,
    K,
    TrainedCase,
    candidates,
    chosen,
    costs,
    gap,
    megatron,
    packed_to_the_most,
    seconds,
)
from megatron_balance.planning.strategies import costs_of
from megatron_balance.solvers.dispatch import dispatch, exact, greedy, slowest_s

BASE = TrainedCase("7b", 16)
JOBS = {
    "16 GPUs, 32K, 200K tokens": BASE,
    "32 GPUs": replace(BASE, num_ranks=32),
    "64 GPUs": replace(BASE, num_ranks=64),
    "longest 64K": replace(BASE, longest=64 * K),
    "longest 128K": replace(BASE, longest=128 * K),
    "100K tokens": replace(BASE, tokens=100_000),
    "400K tokens": replace(BASE, tokens=400_000),
}
NODES = 20
"""Of a search for Eq. 3."""


def fig14(effort: Effort) -> Ours:
    """Hydraulis' seconds; jobs whose context length no scheme holds are left out."""
    for source in SOURCES:
        for name, job in effort.progress(list(JOBS.items()), f"fig14, {source}"):
            try:
                mean_s = fmean(chosen(source, job, batch)[1] for batch in job.batches(effort.batches))
            except InfeasibleError:
                continue
            yield f"{name}, {source}", mean_s


def choices(effort: Effort) -> Ours:
    """How often each strategy is chosen, and what that gains over <16,1,1> x 4 where it is chosen."""
    batches = B32.batches(effort.batches)
    for source in effort.progress(SOURCES, "fig15a"):
        taken = [chosen(source, B32, batch) for batch in batches]
        homo_s = [max(seconds(source, B32, HOMOGENEOUS, batch)) for batch in batches]
        for name, number in Counter(str(strategy) for strategy, _ in taken).most_common():
            yield f"{name}, {source}", number / len(batches)
        gains = sorted(slow / fast for slow, (_, fast) in zip(homo_s, taken, strict=True))
        yield f"chosen strategy over <16,1,1> x 4, median, {source}", gains[len(gains) // 2]


def balance(effort: Effort) -> Ours:
    """(slowest - fastest) / slowest over pipelines."""
    batches = B32.batches(effort.batches)
    for source in effort.progress(SOURCES, "fig15b"):
        own = [gap(seconds(source, B32, chosen(source, B32, batch)[0], batch)) for batch in batches]
        theirs = [gap(megatron(source, B32, HOMOGENEOUS, batch)) for batch in batches]
        for system, each in (("Megatron-LM", theirs), ("Hydraulis", own)):
            yield f"{system}, mean, at least, {source}", fmean(each)
            yield f"{system}, mean, at most, {source}", fmean(each)
            yield f"{system}, largest, {source}", max(each)


def fig16(effort: Effort) -> Ours:
    """Throughput over Megatron-LM's way; (c) is the candidate that holds the longest sequence."""
    batches = B32.batches(effort.batches)
    for source in effort.progress(SOURCES, "fig16"):
        widest = candidates(source, B32)[0]
        base_s = fmean(max(megatron(source, B32, HOMOGENEOUS, batch)) for batch in batches)
        steps = {
            "(a) dispatch": [max(packed_to_the_most(source, B32, HOMOGENEOUS, batch, dispatch)) for batch in batches],
            "(b) and packing": [max(seconds(source, B32, HOMOGENEOUS, batch)) for batch in batches],
            "(c) and a heterogeneous strategy": [max(seconds(source, B32, widest, batch)) for batch in batches],
            "(d) and one chosen every step": [chosen(source, B32, batch)[1] for batch in batches],
        }
        yield from ((f"{name}, {source}", base_s / fmean(each)) for name, each in steps.items())


def fig20(effort: Effort) -> Ours:
    """Least and most of Alg. 1's estimated seconds over the ideal ones; the mean of ours."""
    batches = B32.batches(effort.batches)
    for source in effort.progress(SOURCES, "fig20"):
        pipelines = costs_of(HETEROGENEOUS, costs(source, B32.size), B32.num_ranks)
        ideal = [slowest_s(batch, pipelines, exact(batch, pipelines, NODES)) for batch in batches]
        alg1, own = (
            [
                slowest_s(batch, pipelines, deal(batch, pipelines)) / best
                for batch, best in zip(batches, ideal, strict=True)
            ]
            for deal in (greedy, dispatch)
        )
        yield f"Alg. 1 over ideal, least, {source}", min(alg1)
        yield f"Alg. 1 over ideal, most, {source}", max(alg1)
        yield f"ours over ideal, mean, {source}", fmean(own)


FIG14, FIG16, FIG20 = (
    table("hydraulis", name, ours) for name, ours in {"fig14": fig14, "fig16": fig16, "fig20": fig20}.items()
)
CHOICES, BALANCE = table("hydraulis", "fig15a", choices), table("hydraulis", "fig15b", balance)
