"""Table 2: seconds that solving takes, for ten steps: the paper's greedy dispatching, and our own ways
of all three parts beside it.

Ideal dispatching (40.21 s) and packing by integer programs are not here: HiGHS takes minutes.
"""

from __future__ import annotations

from collections.abc import Callable
from time import process_time
from typing import TypeVar

from megatron_balance.lab.papers.base import Effort, Ours, table
from megatron_balance.lab.papers.hydraulis.cases import (
    AUTHORS,
    B32,
    SAMPLE_BATCHES,
    SAMPLE_SEED,
    TrainedCase,
    costs,
)
from megatron_balance.planning.strategies import costs_of, propose
from megatron_balance.solvers.dispatch import dispatch, greedy
from megatron_balance.solvers.microbatches import pack

T = TypeVar("T")
STEPS = 10
JOBS = {"64 GPUs, 200K tokens": B32, "1024 GPUs, 3.2M tokens": TrainedCase("32b", 1024, 3_200_000)}


def _timed_s(run: Callable[[], T]) -> tuple[T, float]:
    """Result of a call, and its processor time."""
    begin = process_time()
    made = run()
    return made, process_time() - begin


def ours(effort: Effort) -> Ours:
    """Wall seconds on this machine."""
    del effort
    known = costs(AUTHORS, "32b")
    for name, job in JOBS.items():
        drawn = job.batches(SAMPLE_BATCHES * B32.tokens // job.tokens + 1, SAMPLE_SEED)
        sample = [length for batch in drawn for length in batch]
        proposed, proposal_s = _timed_s(
            lambda job=job, sample=sample: propose(sample, job.tokens, known, job.num_ranks)
        )
        pipelines, batches = costs_of(proposed[max(proposed)][0], known, job.num_ranks), job.batches(STEPS)
        _, greedy_s = _timed_s(lambda own=pipelines, each=batches: [greedy(batch, own) for batch in each])
        dealt, dispatch_s = _timed_s(lambda own=pipelines, each=batches: [dispatch(batch, own) for batch in each])
        parts = [
            ([batch[seq] for seq in own], cost)
            for batch, of_batch in zip(batches, dealt, strict=True)
            for own, cost in zip(of_batch, pipelines, strict=True)
        ]
        _, pack_s = _timed_s(lambda parts=parts: [pack(own, cost) for own, cost in parts])
        yield f"greedy dispatching (Alg. 1, 100 trials), {name}", greedy_s
        yield f"our strategy proposal, {name}", proposal_s
        yield f"our dispatching, {name}", dispatch_s
        yield f"our packing, {name}", pack_s


TABLE = table("hydraulis", "table2", ours)
