"""Table 2: seconds that solving takes, for ten steps."""

from __future__ import annotations

from time import perf_counter

from megatron_balance.papers.base import Effort, PaperTable, Row
from megatron_balance.papers.hydraulis.cases import AUTHORS, B32, SAMPLE_BATCHES, SAMPLE_SEED, Job, costs
from megatron_balance.planning.strategies import costs_of, propose
from megatron_balance.solvers.dispatch import dispatch
from megatron_balance.solvers.microbatches import pack

STEPS = 10
JOBS = {"64 GPUs, 200K tokens": B32, "1024 GPUs, 3.2M tokens": Job("32b", 1024, 3_200_000)}
PUBLISHED = {"64 GPUs, 200K tokens": (2.03, 5.46, 10.15), "1024 GPUs, 3.2M tokens": (107.21, 38.56, 13.46)}
"""Proposal, dispatching by greedy trials, packing."""
MACHINE = (
    "published: ten processes, but for the proposal; ours: one process of this machine; ten steps and one strategy"
)


def rows(effort: Effort) -> list[Row]:
    """Wall seconds on this machine."""
    del effort
    found: list[Row] = []
    known = costs(AUTHORS, "32b")
    for name, job in JOBS.items():
        sample = [
            length
            for batch in job.batches(SAMPLE_BATCHES * B32.tokens // job.tokens + 1, SAMPLE_SEED)
            for length in batch
        ]
        begin = perf_counter()
        proposed = propose(sample, job.tokens, known, job.num_ranks)
        proposal_s = perf_counter() - begin
        pipelines = costs_of(proposed[max(proposed)][0], known, job.num_ranks)
        batches = job.batches(STEPS)
        begin = perf_counter()
        dealt = [dispatch(batch, pipelines) for batch in batches]
        dispatch_s = perf_counter() - begin
        begin = perf_counter()
        for batch, parts in zip(batches, dealt, strict=True):
            for own, cost in zip(parts, pipelines, strict=True):
                pack([batch[seq] for seq in own], cost)
        pack_s = perf_counter() - begin
        ours = {"strategy proposal": proposal_s, "dispatching": dispatch_s, "packing": pack_s}
        found += [
            Row(f"{what}, {name}", published, took, "s", "measured", note=MACHINE)
            for (what, took), published in zip(ours.items(), PUBLISHED[name], strict=True)
        ]
    return found


TABLE = PaperTable("seconds of solving", rows)
