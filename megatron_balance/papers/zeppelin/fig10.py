"""Figure 10 and section 5.2: cluster B beside cluster A. 3B as in the rest of the section; 32 GPUs
assumed, which is not printed.
"""

from __future__ import annotations

from megatron_balance.papers.base import Effort, Ours, table
from megatron_balance.papers.zeppelin.systems import DATASETS, DEFAULT, TE, ZEPPELIN, ZeppelinCase, tokens_per_s

CLUSTERS = {"A": "a800", "B": "h800"}


def ours(effort: Effort) -> Ours:
    """Speedups on both clusters, and what the text says of them."""
    cases = {name: ZeppelinCase("llama-3b", cluster, 32) for name, cluster in CLUSTERS.items()}
    for dataset, label in effort.progress(list(DATASETS.items()), "fig10"):
        rate: dict[tuple[str, str], float] = {}
        for name, case in cases.items():
            batches = case.batches(dataset, effort.batches)
            for system in (TE, ZEPPELIN, DEFAULT):
                rate[name, system.name] = tokens_per_s(system, case, batches)
        speedup = {name: rate[name, ZEPPELIN.name] / rate[name, TE.name] for name in CLUSTERS}
        for name in CLUSTERS:
            yield f"{label}: Zeppelin over TE CP on {name}", speedup[name]
        for name in CLUSTERS:
            yield f"{label}: zeppelin, default, over TE CP on {name}", rate[name, DEFAULT.name] / rate[name, TE.name]
        yield f"{label}: speedup on A over that on B", speedup["A"] / speedup["B"]
        yield f"{label}: throughput on B over that on A", rate["B", ZEPPELIN.name] / rate["A", ZEPPELIN.name]


TABLE = table("zeppelin", "fig10", ours)
