"""Figure 20: greedy dispatching (Alg. 1) over ideal dispatching (Eq. 3), 32B on 64 GPUs."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean

from megatron_balance.papers.base import Effort, PaperTable, Row, published
from megatron_balance.papers.hydraulis.cases import B32, HETEROGENEOUS, SOURCES, costs, row
from megatron_balance.planning.strategies import costs_of
from megatron_balance.solvers.dispatch import dispatch, exact, greedy, slowest_s

LEAST, MOST = published(0.9, 1.1)
NODES = 20
WHAT = (
    "published: end-to-end seconds; ours: estimated ones; ideal: the better of ours and what HiGHS finds for Eq. 3 in "
    "20 nodes, <16,1,1> + <8,1,1> x 6"
)


def rows(effort: Effort) -> list[Row]:
    """Least and most of Alg. 1's estimated seconds over the ideal ones; the mean of ours."""
    batches, found = B32.batches(effort.batches), list[Row]()
    for source in effort.progress(SOURCES, "fig20"):
        pipelines = costs_of(HETEROGENEOUS, costs(source, B32.size), B32.num_ranks)
        ideal = [slowest_s(batch, pipelines, exact(batch, pipelines, NODES)) for batch in batches]
        over = {
            way: [
                slowest_s(batch, pipelines, deal(batch, pipelines)) / best
                for batch, best in zip(batches, ideal, strict=True)
            ]
            for way, deal in (("Alg. 1", greedy), ("ours", dispatch))
        }
        found += [
            replace(row(source, "Alg. 1 over ideal, least", LEAST, min(over["Alg. 1"]), "x", WHAT), sign=">="),
            replace(row(source, "Alg. 1 over ideal, most", MOST, max(over["Alg. 1"]), "x", WHAT), sign="<="),
            row(source, "ours over ideal, mean", None, fmean(over["ours"]), "x", WHAT),
        ]
    return found


TABLE = PaperTable("greedy beside ideal dispatching", rows, batches=4)
