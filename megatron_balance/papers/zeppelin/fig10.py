"""Figure 10 and section 5.2: cluster B beside cluster A. 3B as in the rest of the section; 32 GPUs
assumed, which is not printed.
"""

from __future__ import annotations

from megatron_balance.papers.base import STATED, Effort, PaperTable, Row
from megatron_balance.papers.zeppelin.fig8 import DEFAULT_NOTE, DRAWN
from megatron_balance.papers.zeppelin.systems import DATASETS, DEFAULT, TE, ZEPPELIN, ZeppelinCase, tokens_per_s

CLUSTERS = {"A": "a800", "B": "h800"}
NIC_NOTE = "the paper prints no NIC rate for cluster B; 400 Gb/s a GPU is assumed (configs/cluster/h800.yaml)"


def rows(effort: Effort) -> list[Row]:
    """Speedups on both clusters, and what the text says of them."""
    cases = {name: ZeppelinCase("llama-3b", cluster, 32) for name, cluster in CLUSTERS.items()}
    table_rows: list[Row] = []
    for dataset, label in effort.progress(list(DATASETS.items()), "fig10"):
        rate: dict[tuple[str, str], float] = {}
        for name, case in cases.items():
            batches = case.batches(dataset, effort.batches)
            rate.update(
                {(name, system.name): tokens_per_s(system, case, batches) for system in (TE, ZEPPELIN, DEFAULT)}
            )
        speedup = {name: rate[name, ZEPPELIN.name] / rate[name, TE.name] for name in CLUSTERS}
        table_rows += [
            Row(f"{label}: Zeppelin over TE CP on {name}", None, each, "x", "simulated", note=DRAWN)
            for name, each in speedup.items()
        ]
        table_rows += [
            Row(
                f"{label}: zeppelin, default, over TE CP on {name}",
                None,
                rate[name, DEFAULT.name] / rate[name, TE.name],
                "x",
                "simulated",
                note=DEFAULT_NOTE,
            )
            for name in CLUSTERS
        ]
        table_rows += [
            Row(
                f"{label}: speedup on A over that on B",
                STATED,
                speedup["A"] / speedup["B"],
                "x",
                "simulated",
                ">=",
                NIC_NOTE,
            ),
            Row(
                f"{label}: throughput on B over that on A",
                STATED,
                rate["B", ZEPPELIN.name] / rate["A", ZEPPELIN.name],
                "x",
                "simulated",
                ">=",
            ),
        ]
    return table_rows


TABLE = PaperTable("clusters A and B; 3B, 32 GPUs", rows, batches=5)
