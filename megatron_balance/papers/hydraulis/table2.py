"""Table 2: seconds that solving takes, for ten steps: the paper's greedy dispatching, and our own ways
of all three parts beside it.

Ideal dispatching (40.21 s) and packing by integer programs are not here: HiGHS takes minutes.
"""

from __future__ import annotations

from time import process_time

from megatron_balance.papers.base import Effort, PaperTable, Published, Row
from megatron_balance.papers.hydraulis.cases import (
    AUTHORS,
    B32,
    INPUTS,
    SAMPLE_BATCHES,
    SAMPLE_SEED,
    TrainedCase,
    costs,
)
from megatron_balance.planning.strategies import costs_of, propose
from megatron_balance.solvers.dispatch import dispatch, greedy
from megatron_balance.solvers.microbatches import pack

STEPS = 10
JOBS = {"64 GPUs, 200K tokens": B32, "1024 GPUs, 3.2M tokens": TrainedCase("32b", 1024, 3_200_000)}
GREEDY_S = {"64 GPUs, 200K tokens": Published(5.46), "1024 GPUs, 3.2M tokens": Published(38.56)}
MACHINE = "published: ten processes; ours: processor time of one process of this machine; ten steps and one strategy"
NOT_EQ4 = "not the paper's: Eq. 4's limit for small steps, in closed form; its dynamic program took 2.03 and 107.21 s"
NOT_ALG1 = "not the paper's: longest first with moves and swaps, which plans use (solvers/makespan.py)"
NOT_EQ1 = "not the paper's: longest first; its integer programs (Eq. 1) took 10.15 and 13.46 s on ten processes"


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
        begin = process_time()
        proposed = propose(sample, job.tokens, known, job.num_ranks)
        proposal_s = process_time() - begin
        pipelines = costs_of(proposed[max(proposed)][0], known, job.num_ranks)
        batches = job.batches(STEPS)
        begin = process_time()
        for batch in batches:
            greedy(batch, pipelines)
        greedy_s = process_time() - begin
        begin = process_time()
        dealt = [dispatch(batch, pipelines) for batch in batches]
        dispatch_s = process_time() - begin
        begin = process_time()
        for batch, parts in zip(batches, dealt, strict=True):
            for own, cost in zip(parts, pipelines, strict=True):
                pack([batch[seq] for seq in own], cost)
        pack_s = process_time() - begin
        found += [
            Row(f"{what}, {name}", printed, took, "s", "measured", note=note, inputs=INPUTS[AUTHORS])
            for what, printed, took, note in (
                ("greedy dispatching (Alg. 1, 100 trials)", GREEDY_S[name], greedy_s, MACHINE),
                ("our strategy proposal", None, proposal_s, NOT_EQ4),
                ("our dispatching", None, dispatch_s, NOT_ALG1),
                ("our packing", None, pack_s, NOT_EQ1),
            )
        ]
    return found


TABLE = PaperTable("seconds of solving", rows)
