"""Time that knapformer takes to plan a batch with its topology given.

python -m tools.bench.knapformer_plans [--ranks 32 1024] [--repeats 7]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

from rich.console import Console
from rich.table import Table

from megatron_balance.config import load_cluster, load_model
from megatron_balance.cost.analytic import AnalyticCost
from megatron_balance.ir.batch import Batch
from megatron_balance.planners.knapformer import KnapFormerOptions, plan
from megatron_balance.workloads import datacodes

WORKLOADS = {
    "low resolution": datacodes.LOW_RESOLUTION,
    "mixed resolution": datacodes.MIXED_RESOLUTION,
    "images and videos": datacodes.IMAGES_AND_VIDEOS,
    "images and a long clip": datacodes.IMAGES_AND_A_LONG_CLIP,
}
TOPOLOGIES = ("g1n32", "g8n4", "g1n8+g2n4+g4n4")
UNIT = 32
"""Ranks of a workload; more ranks take several."""


def main() -> int:
    """Print a row for each batch and topology."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", nargs="+", type=int, default=[32, 1024])
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    model, table = load_model("flux-12b"), Table("ranks", "workload", "sequences", "topology", "ms, median", "least")
    for ranks in options.ranks:
        cluster = load_cluster("h100").build(num_ranks=ranks, ranks_per_node=8)
        cost = AnalyticCost(cluster, model)
        for name, codes in WORKLOADS.items():
            drawn = (datacodes.draw_by_gpu(codes, 1, seed)[0] for seed in range(ranks // UNIT))
            batch = Batch(tuple(length for by_gpu in drawn for samples in by_gpu for length in samples))
            for topology in TOPOLOGIES:
                took: list[float] = []
                for _ in range(options.repeats):
                    started = time.process_time()
                    plan(batch, cluster, model, cost, KnapFormerOptions(topology=topology))
                    took.append(1e3 * (time.process_time() - started))
                figures = f"{statistics.median(took):.2f}", f"{min(took):.2f}"
                table.add_row(str(ranks), name, str(len(batch.lengths)), topology, *figures)
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
