"""CPU time and memory of a rank's link for a 32B model on 1,024 ranks, against its budget of 0.2 s
and 50 MB, once per strategy. The shards of the base layout (`owned`) are made once per run, and are
not in it.

    python -m tools.bench.link [--ranks 1024] [--json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import tracemalloc

import numpy as np

from megatron_balance.analysis.link import Base, Buffer, Parameter, Parameters, link, traffic
from megatron_balance.ir.strategy import Scheme, Strategy

LAYERS, HIDDEN, FFN, VOCABULARY = 60, 6656, 17920, 30592
BUCKET = 40_000_000
"""Elements after which Megatron closes a bucket."""
BUDGET_S, BUDGET_BYTES = 0.2, 50e6


def parameters() -> Parameters:
    """A 32B model: 60 layers of 6,656, gated fc1 of twice 17,920."""
    listed = [Parameter("embedding", VOCABULARY, HIDDEN, "first", 0)]
    for layer in range(LAYERS):
        listed += [
            Parameter(f"{layer}.norm_qkv", HIDDEN, 1, layer, parts=True),
            Parameter(f"{layer}.qkv", 3 * HIDDEN, HIDDEN, layer, 0),
            Parameter(f"{layer}.proj", HIDDEN, HIDDEN, layer, 1),
            Parameter(f"{layer}.norm_fc1", HIDDEN, 1, layer, parts=True),
            Parameter(f"{layer}.fc1", 2 * FFN, HIDDEN, layer, 0, blocks=2),
            Parameter(f"{layer}.fc2", HIDDEN, FFN, layer, 1),
        ]
    listed += [Parameter("norm", HIDDEN, 1, "last", parts=True), Parameter("output", VOCABULARY, HIDDEN, "last", 0)]
    return Parameters.of(listed, LAYERS)


def base(model: Parameters, scheme: Scheme, replicas: int) -> Base:
    """A base layout whose buffers are filled backwards in buckets, as Megatron fills them."""
    shards = scheme.context * replicas
    numbers, stages, _ = model.stages(np.arange(len(model)), scheme.pipeline)
    buffers: list[Buffer] = []
    for stage in range(scheme.pipeline):
        mine = numbers[stages == stage][::-1]
        starts: list[int] = []
        buckets, at = [0], 0
        for number in mine.tolist():
            at = -(-at // 64) * 64
            starts.append(at)
            at += int(model.shape[number].prod()) // (scheme.tensor if model.cut[number] >= 0 else 1)
            if at - buckets[-1] >= BUCKET or number == mine[-1]:
                at = -(-at // (128 * shards)) * 128 * shards
                buckets.append(at)
        buffers.append(Buffer(stage, mine, np.array(starts), np.array(buckets)))
    return Base(scheme, replicas, tuple(buffers))


def main() -> None:
    """Measure a few ranks of several strategies, and print the worst."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    ranks: int = args.ranks
    model = parameters()
    layout = base(model, Scheme(8, 2), ranks // 16)
    start = time.process_time()
    owned = layout.owned(model)
    once = {"owned_cpu_seconds": round(time.process_time() - start, 4), "owned_mb": round(owned.nbytes / 1e6, 1)}
    results: list[dict[str, object]] = []
    for strategy in (
        Strategy((Scheme(8, 2),) * (ranks // 16)),
        Strategy((Scheme(16),) * (ranks // 64) + (Scheme(8),) * (ranks // 32) + (Scheme(4, 2),) * (ranks // 16)),
        Strategy((Scheme(2, 2),) * (ranks // 4)),
    ):
        seconds: list[float] = []
        moved: list[int] = []
        peak = 0
        for rank in (0, ranks // 2 - 1, ranks - 1):
            for _ in range(3):
                start = time.process_time()
                mine = link(layout, owned, strategy, model, rank)
                seconds.append(time.process_time() - start)
            moved.append(2 * int(traffic(mine.pull, ranks)[rank, 1]) + 4 * int(traffic(mine.push, ranks)[rank, 0]))
            tracemalloc.start()
            link(layout, owned, strategy, model, rank)
            peak = max(peak, tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
        results.append(
            {
                "strategy": str(strategy),
                "ranks": ranks,
                "cpu_seconds_median": round(statistics.median(seconds), 4),
                "cpu_seconds_max": round(max(seconds), 4),
                "peak_mb": round(peak / 1e6, 1),
                "pulled_and_pushed_gb": round(max(moved) / 1e9, 2),
                **once,
                "within": max(seconds) <= BUDGET_S and peak <= BUDGET_BYTES,
            }
        )
    for result in results:
        print(json.dumps(result) if args.json else "  ".join(f"{key} {value}" for key, value in result.items()))


if __name__ == "__main__":
    main()
